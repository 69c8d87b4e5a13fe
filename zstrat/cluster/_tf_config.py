"""The environment variable TF_CONFIG, with the rules of TensorFlow.

It is read and parsed at every query, so a program may set it late. Arguments of the
constructor and values of setters take precedence, and 0 is a value.
"""

from __future__ import annotations

import json
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final, final

from zstrat import config

from ._resolver import SourceResolver
from ._spec import TASK_TYPES, check_names, check_task_type, spec_from, task_index

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ._spec import ClusterSpec

VARIABLE: Final = "TF_CONFIG"
_SPARSE: Final = "sparseCluster"
_JOBS: Final = (*TASK_TYPES, "master")
"""The last is the chief of TensorFlow 1; code that does not support it refuses it."""


@final
class TFConfigClusterResolver(SourceResolver):
    """Reads TF_CONFIG: ``{"cluster": {job: [address, ...]}, "task": {"type":,
    "index":}}``. All parts are optional, as are "rpc_layer", "session_master" and
    "environment".

    A job may also be ``{"3": address}`` if a task need not know all others. Kubeflow
    writes "sparseCluster" instead of "cluster" for dynamic workers; for a ps it has
    only that ps, without its index. Jobs are chief, worker, ps and evaluator, and
    TensorFlow 1's master. All methods raise ValueError if TF_CONFIG is invalid; the
    error names the key, what was expected and what was found.
    """

    _empty_layer_counts = True

    def cluster_spec(self) -> ClusterSpec:
        config = _read()
        if self.is_sparse:
            spec = spec_from(self._sparse(config[_SPARSE]), VARIABLE)
        else:
            spec = spec_from(config.get("cluster", {}), VARIABLE)
        check_names(spec.jobs, _JOBS, f"{VARIABLE}: cluster", "job")
        return spec

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns the session master if one is set, "" if there is at most one task,
        else the address of the task, by default of this one.

        Raises:
            ValueError: The cluster has no such task.
        """
        master = _text("session_master")
        if master is not None:
            return master  # unchanged: TensorFlow adds no scheme to it
        spec = self.cluster_spec()
        if not spec or (len(spec.jobs) == 1 and spec.task_indices(*spec.jobs) == [0]):
            return ""
        job, index = self._asked(task_type, task_id)
        if job is None or index is None:
            missing = "task.type" if job is None else "task.index"
            raise ValueError(
                f"{VARIABLE}: {missing} is missing, expected the task of this process"
            )
        return self._with_layer(spec.task_address(job, index), rpc_layer)

    @property
    def is_sparse(self) -> bool:
        """Whether TF_CONFIG omits tasks that this one need not know."""
        config = _read()
        return "cluster" not in config and _SPARSE in config

    def _sparse(self, cluster: Any) -> Any:
        index = self.task_id
        match cluster:
            case {"ps": [address]} if self.task_type == "ps" and index:
                return {**cluster, "ps": {str(index): address}}
        return cluster

    def _found_task_type(self) -> str | None:
        task = _task()
        if "type" not in task:
            return None
        kind = str(task["type"])
        check_task_type(kind, _JOBS, VARIABLE)
        return kind

    def _found_task_id(self) -> int | None:
        task = _task()
        if "index" not in task:
            return None
        return task_index(task["index"], f"{VARIABLE}: task.index")

    def _found_rpc_layer(self) -> str | None:
        return _text("rpc_layer")

    def _found_environment(self) -> str | None:
        return _text("environment")


def _read() -> Mapping[str, Any]:
    text = config.environment().get(VARIABLE, "").strip()
    if not text:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        words = f"{VARIABLE}: expected JSON, got {text!r:.80}: {error}"
        raise ValueError(words) from None
    if not isinstance(value, dict):
        raise ValueError(
            f'{VARIABLE}: expected an object with "cluster" and "task", '
            f"got {text!r:.80}"
        )
    _check_keys(value, ("cluster", _SPARSE, "task"), VARIABLE)
    return value


def _check_keys(given: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """Refuses misspelled keys, with which a program would train alone. Other keys are
    allowed, as engines write some of their own."""
    for key in given:
        if key not in known:
            for closest in get_close_matches(key, known, n=1, cutoff=0.85):
                if closest not in given:
                    raise ValueError(
                        f"{where}: unknown key {key!r}; did you mean {closest!r}?"
                    )


def _task() -> Mapping[str, Any]:
    task = _read().get("task", {})
    if not isinstance(task, dict):
        raise ValueError(
            f'{VARIABLE}: task: expected an object with "type" and "index", '
            f"got {task!r:.80}"
        )
    _check_keys(task, ("type", "index"), f"{VARIABLE}: task")
    return task


def _text(key: str) -> str | None:
    value = _read().get(key)
    if value is None or isinstance(value, str):
        return value
    raise ValueError(f"{VARIABLE}: {key}: expected a string, got {value!r:.80}")

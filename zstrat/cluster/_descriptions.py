"""Resolvers of clusters that somebody described: TF_CONFIG, a TOML file, SageMaker.

The environment variable TF_CONFIG has the rules of TensorFlow. It is read and parsed at
every query, so a program may set it late. Arguments of the constructor and values of
setters take precedence, and 0 is a value.

A TOML file is for machines without a scheduler. Only zstrat reads it, so unknown keys
are errors: they are misspelled.

Amazon SageMaker names the hosts of a training job in variables of its containers.
"""

from __future__ import annotations

import json
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final, final

from zstrat import config

from ._resolver import SourceResolver
from ._roles import TASK_TYPES
from ._spec import (
    ClusterSpec,
    check_names,
    check_task_type,
    spec_from,
    task_index,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence


VARIABLE: Final = "TF_CONFIG"
_SPARSE: Final = "sparseCluster"
_JOBS: Final = (*TASK_TYPES, "master")
"""Names of jobs in TF_CONFIG. The last is the chief of TensorFlow 1; code that does not
support it refuses it."""


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
        # Unchanged: TensorFlow adds no scheme to it.
        if master is not None:
            return master
        spec = self.cluster_spec()
        # As in TensorFlow: a single task has nobody to connect to.
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
        """Whether TF_CONFIG omits tasks whose addresses this one does not need."""
        config = _read()
        return "cluster" not in config and _SPARSE in config

    def _sparse(self, cluster: Any) -> Any:
        index = self.task_id
        # The only ps is this one, whose index Kubeflow gives as that of the task; a
        # list would make it ps 0.
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
    # Not cached: a program may set the variable after it has made the resolver.
    text = config.environment().get(VARIABLE, "").strip()
    if not text:
        return {}
    try:
        value = json.loads(text)
    # The parser recurses, so a text of a thousand brackets is an error of its own.
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
    """Refuses misspelled keys, with which a program would train alone. Other unknown
    keys are allowed, as engines write some of their own."""
    for key in given:
        if key not in known:
            # Close matches only, as engines write keys of their own; and not if the key
            # itself is there as well.
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


_TABLES: Final = ("cluster", "task")


@final
class TomlClusterResolver(SourceResolver):
    """Reads a TOML file, again at each query of the cluster:

        [cluster]
        worker = ["10.0.0.1:2222", "10.0.0.2:2222"]
        ps = ["10.0.0.3:2222"]

        [task]            # optional, or passed to the constructor
        type = "worker"
        index = 0

    Args:
        task_type: Takes precedence over ``task.type`` of the file.
        task_id: Takes precedence over ``task.index`` of the file.

    Raises:
        ValueError: The file is invalid; names the file and the key.
    """

    _may_change = True
    _empty_layer_counts = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        self._path = str(path)
        # Read at once, so that a wrong file is an error here. The task of a process
        # does not change; the cluster is read again at each query.
        _, (kind, index) = _read_file(self._path)
        super().__init__(
            kind if task_type is None else task_type,
            index if task_id is None else task_id,
            rpc_layer,
        )

    def cluster_spec(self) -> ClusterSpec:
        """Reads the cluster from the file.

        Raises:
            ValueError: See the constructor.
        """
        return _read_file(self._path)[0]


def _read_file(path: str) -> tuple[ClusterSpec, tuple[str | None, int | None]]:
    """Reads the cluster, and the type and index of the task of this process."""
    tables = config.read_toml(path)
    check_names(tables, _TABLES, path, "table")
    if "cluster" not in tables:
        raise ValueError(f"{path}: the table [cluster] is missing")
    spec = spec_from(tables["cluster"], path)
    check_names(spec.jobs, TASK_TYPES, f"{path}: cluster", "job")
    return spec, _task_in_file(tables.get("task", {}), path)


def _task_in_file(task: Any, path: str) -> tuple[str | None, int | None]:
    if not isinstance(task, dict):
        raise ValueError(f"{path}: task: expected a table [task], got {task!r:.80}")
    check_names(task, ("type", "index"), f"{path}: task", "key")
    kind, index = task.get("type"), task.get("index")
    if kind is not None:
        check_task_type(kind, TASK_TYPES, path)
    # By type: in TOML true is not an integer, but in Python it is.
    if index is not None and (type(index) is not int or index < 0):
        raise ValueError(
            f"{path}: task.index: expected an integer of 0 or more, got {index!r:.80}"
        )
    return kind, index


_HOSTS: Final = "SM_HOSTS"
_THIS: Final = "SM_CURRENT_HOST"
_GPUS: Final = "SM_NUM_GPUS"


@final
class SageMakerClusterResolver(SourceResolver):
    """Reads ``SM_HOSTS`` and ``SM_CURRENT_HOST`` at each query.

    Every host is a worker, in the order of their names.

    Args:
        port: The port on all hosts.
        task_type, task_id, environment: Take precedence over the variables.

    All methods raise RuntimeError outside of a SageMaker job, and ValueError for an
    invalid variable; both name the variable.
    """

    _empty_layer_counts = True

    def __init__(
        self,
        port: int | str = 2223,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        super().__init__(task_type, task_id, rpc_layer, environment)
        self._port = port

    def cluster_spec(self) -> ClusterSpec:
        hosts = _hosts(config.environment())
        return ClusterSpec({"worker": [f"{host}:{self._port}" for host in hosts]})

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns the address of a task, by default of this process's; "" with one
        host.

        Raises:
            ValueError: The cluster has no such task.
        """
        # As in TensorFlow: there is no other host to connect to.
        if self.cluster_spec().num_tasks("worker") == 1:
            return ""
        return super().master(task_type, task_id, rpc_layer)

    def _found_task_type(self) -> str:
        return "worker"

    def _found_task_id(self) -> int:
        return _index(config.environment())

    def _accelerators(self) -> Mapping[str, int]:
        """Returns ``{"GPU": n}`` from ``SM_NUM_GPUS``, equal on all hosts; empty if it
        is 0 or unknown."""
        text = config.environment().get(_GPUS, "0")
        if not (text.isascii() and text.isdecimal() and len(text) < 10):
            raise ValueError(f"{_GPUS}: expected a number, got {text!r:.80}")
        return {"GPU": int(text)} if int(text) else {}


def _hosts(env: Mapping[str, str]) -> list[str]:
    text = _variable(env, _HOSTS)
    try:
        hosts = json.loads(text)
    except ValueError:
        hosts = None
    if not (
        isinstance(hosts, list) and hosts and all(isinstance(h, str) for h in hosts)
    ):
        raise ValueError(f"{_HOSTS}: expected a JSON list of names, got {text!r:.80}")
    # All hosts have to number each other alike.
    return sorted(hosts)


def _index(env: Mapping[str, str]) -> int:
    hosts, this = _hosts(env), _variable(env, _THIS)
    if this not in hosts:
        raise ValueError(f"{_THIS}: expected one of {_HOSTS}={hosts}, got {this!r:.80}")
    return hosts.index(this)


def _variable(env: Mapping[str, str], name: str) -> str:
    if name not in env:
        raise RuntimeError(
            f"Not a SageMaker environment: {name} is not set. The SageMaker training "
            "toolkit sets it in the containers of a training job"
        )
    return env[name]

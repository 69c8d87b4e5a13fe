"""The hosts of an Amazon SageMaker training job, which its containers are told."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final, final

from zstrat import config

from ._resolver import ClusterResolver, with_scheme
from ._spec import ClusterSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

_HOSTS: Final = "SM_HOSTS"
_THIS: Final = "SM_CURRENT_HOST"
_GPUS: Final = "SM_NUM_GPUS"


@final
class SageMakerClusterResolver(ClusterResolver):
    """Answers from ``SM_HOSTS`` and ``SM_CURRENT_HOST``, read at each question.

    Every host is a worker, in the order of their names.

    Args:
        port: The same on all hosts.
        task_type, task_id, environment: Go before what SageMaker says.

    Every answer raises RuntimeError where this is no SageMaker job, and ValueError if a
    variable cannot be read; both name the variable.
    """

    def __init__(
        self,
        port: int | str = 2223,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        self._port, self._environment = port, environment
        self._task_type, self._task_id, self._rpc_layer = task_type, task_id, rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        hosts = _hosts(config.environment())
        return ClusterSpec({"worker": [f"{host}:{self._port}" for host in hosts]})

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Address of the task, by default of this one; "" in a job with one host.

        Raises:
            ValueError: The cluster has no such task.
        """
        spec = self.cluster_spec()
        if spec.num_tasks("worker") == 1:
            return ""
        job = self.task_type if task_type is None else task_type
        index = self.task_id if task_id is None else task_id
        layer = self.rpc_layer if rpc_layer is None else rpc_layer
        return with_scheme(spec.task_address(job, index), layer)

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> dict[str, int]:
        """``{"GPU": n}`` by ``SM_NUM_GPUS``: hosts of one job are alike. Empty if n is
        0 or not known."""
        text = config.environment().get(_GPUS, "0")
        if not (text.isascii() and text.isdecimal() and len(text) < 10):
            raise ValueError(f"{_GPUS}: expected a number, got {text!r:.80}")
        return {"GPU": int(text)} if int(text) else {}

    @property
    def environment(self) -> str:
        return self._environment or ""

    @property
    def task_type(self) -> str:
        """The job that this process is a task of: "worker" unless it was set."""
        return "worker" if self._task_type is None else self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int:
        """The number of this host among the sorted ones, unless it was set.

        Raises:
            RuntimeError: This is no SageMaker environment.
            ValueError: Its variables do not fit together.
        """
        return _index(config.environment()) if self._task_id is None else self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id


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
    return sorted(hosts)


def _index(env: Mapping[str, str]) -> int:
    hosts, this = _hosts(env), _variable(env, _THIS)
    if this not in hosts:
        raise ValueError(f"{_THIS}: expected one of {_HOSTS}={hosts}, got {this!r:.80}")
    return hosts.index(this)


def _variable(env: Mapping[str, str], name: str) -> str:
    if name not in env:
        raise RuntimeError(
            f"Not a SageMaker environment: {name} is not set. It is in the container "
            "of a training job with the SageMaker training toolkit"
        )
    return env[name]

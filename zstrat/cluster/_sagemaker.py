"""The hosts of an Amazon SageMaker training job, from variables of its containers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final, final

from zstrat import config

from ._resolver import SourceResolver
from ._spec import ClusterSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

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
        """Returns the address of the task, by default this one; "" with one host.

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

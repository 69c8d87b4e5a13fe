"""A parameter-server strategy as a step sees it on a worker, and the face that it shows
there and on the coordinator."""

from __future__ import annotations

import functools
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, final

import jax

from zstrat.data import InputContext
from zstrat.program import input_pipeline, worker_context
from zstrat.strategy._devices import relative_name
from zstrat.strategy._extended import StrategyExtended
from zstrat.strategy._strategy import Strategy
from zstrat.variables import Variable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from zstrat.strategy.input._inputs import ProcessInputs
    from zstrat.variables import AbstractVariable, Creator

    from ._server_variables import ServerVariables

_log: Final = logging.getLogger(__name__)


@final
class ParameterServerExtended(StrategyExtended):
    """Devices and places of a parameter-server cluster."""

    def __init__(
        self,
        strategy: Strategy,
        platform: str,
        ps_count: int,
        variables: ServerVariables | None,
    ) -> None:
        replicas = range(strategy.num_replicas_in_sync)
        devices = [relative_name(platform, n) for n in replicas]
        servers = [f"/job:ps/task:{n}" for n in range(ps_count)]
        super().__init__(strategy, devices, servers, variables)
        self._variables = variables

    def value_container(self, value: Any) -> Any:
        """The sharded variable that ``value`` is a component of, or ``value``."""
        container = value.sharded_container if isinstance(value, Variable) else None
        return value if container is None else container

    def _colocated(self, variable: AbstractVariable) -> AbstractContextManager[None]:
        assert self._variables is not None  # it was created in this scope
        return self._variables.colocated(variable)


@final
class WorkerStrategy(Strategy):
    """A `ParameterServerStrategy` as a step sees it on a worker: its local devices are
    the replicas, and variables cannot be created.

    A worker with fewer devices than the coordinator planned for computes all replicas
    on one: slower, with the same results.
    """

    def __init__(self, ps_count: int, replicas: int) -> None:
        self._ps_count, self._replicas = ps_count, replicas

    # Looked for when a step asks, not before: the coordinator, which tries out what it
    # sends, needs no device for that, and takes no accelerator from a worker beside it.
    @functools.cached_property
    def _local(self) -> tuple[jax.Device, ...]:
        found = tuple(jax.local_devices()[: self._replicas])
        if len(found) < self._replicas:
            _log.warning(
                "this worker has %d devices, the coordinator planned %d replicas per "
                "worker: it computes all of them on one device",
                len(found),
                self._replicas,
            )
        return found

    @functools.cached_property
    def _extended(self) -> ParameterServerExtended:
        platform = self._local[0].platform
        return ParameterServerExtended(self, platform, self._ps_count, None)

    @property
    def num_replicas_in_sync(self) -> int:
        return self._replicas

    @property
    def extended(self) -> ParameterServerExtended:
        return self._extended

    def _function_inputs(self) -> ProcessInputs:
        worker = worker_context.get()
        if worker is None:
            return self._inputs()
        # TF says pipeline 0 of 1 on every worker, and their data are the same.
        share, shares = input_pipeline.get() or (
            worker.worker_index,
            worker.worker_count,
        )
        context = InputContext(shares, share, self._replicas)
        return replace(self._inputs(), context=context)

    def _creator(self) -> Creator | None:
        return None

    def _devices(self) -> Sequence[jax.Device]:
        return self._local

    def __reduce__(self) -> Any:
        return worker_strategy, (self._ps_count, self._replicas)

    def __repr__(self) -> str:
        return (
            f"<zstrat.ParameterServerStrategy on a worker: {self._replicas} replicas>"
        )


@functools.cache
def worker_strategy(ps_count: int, replicas: int) -> WorkerStrategy:
    """The stand-in of this process; one object, as scopes compare strategies by
    identity and a step function and its arguments are unpickled apart."""
    return WorkerStrategy(ps_count, replicas)

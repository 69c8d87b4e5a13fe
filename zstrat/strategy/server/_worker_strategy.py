"""`WorkerStrategy`: the form of a parameter-server strategy in steps on a worker."""

from __future__ import annotations

import functools
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, final

import jax

from zstrat.data import InputContext
from zstrat.program import input_pipeline, worker_context
from zstrat.strategy._devices import device_names, ps_names
from zstrat.strategy._extended import StrategyExtended
from zstrat.strategy._strategy import Strategy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zstrat.strategy.input._inputs import ProcessInputs
    from zstrat.variables import Creator

_log: Final = logging.getLogger(__name__)


@final
class WorkerStrategy(Strategy):
    """The form that a `ParameterServerStrategy` has in steps on a worker: the worker's
    devices are the replicas, and variables cannot be created.

    A worker with fewer devices than the coordinator planned for computes all replicas
    on one device: slower, with the same results.
    """

    def __init__(self, ps_count: int, replicas: int) -> None:
        self._ps_count, self._replicas = ps_count, replicas

    # Looked for when a step asks, not before: the coordinator, which tries out what it
    # sends, needs no device for that, and takes no accelerator from a worker beside it.
    @functools.cached_property
    def _local(self) -> tuple[jax.Device, ...]:
        devices = tuple(jax.local_devices()[: self._replicas])
        if len(devices) < self._replicas:
            _log.warning(
                "this worker has %d devices, the coordinator planned %d replicas per "
                "worker: it computes all of them on one device",
                len(devices),
                self._replicas,
            )
        return devices

    @functools.cached_property
    def _extended(self) -> StrategyExtended:
        devices = device_names(self._local[0].platform, self._replicas)
        return StrategyExtended(self, devices, ps_names(self._ps_count))

    @property
    def num_replicas_in_sync(self) -> int:
        return self._replicas

    @property
    def extended(self) -> StrategyExtended:
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


# One object: scopes compare strategies by identity, and a step function and its
# arguments are unpickled apart.
@functools.cache
def worker_strategy(ps_count: int, replicas: int) -> WorkerStrategy:
    """Returns the object that represents the strategy in this process."""
    return WorkerStrategy(ps_count, replicas)

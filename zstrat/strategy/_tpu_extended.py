"""The other face of a strategy whose replicas have several devices each."""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final, final

from ._devices import task_names
from ._extended import StrategyExtended

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zstrat.tpu.experimental import DeviceAssignment
    from zstrat.variables import AbstractVariable

    from ._logical_devices import LogicalDevices
    from ._strategy import Strategy
    from .mirrored._mirrored_store import MirroredVariables

_entered: Final[ContextVar[tuple[tuple[TPUExtended, int], ...]]] = ContextVar(
    "zstrat_logical_devices", default=()
)
"""Whose logical device is current, and which, the innermost one last. One stack for all
strategies: a context variable of each would outlive it. Law of the file: whoever sets
it resets it."""


@final
class TPUExtended(StrategyExtended):
    """Devices and hosts of a `TPUStrategy`.

    Args:
        devices: Those of each replica.
        assignment: What they were chosen by, None for all there are.
        variables: Who creates them.
        hosts: Of the whole system, with how many cores each.
    """

    experimental_require_static_shapes = True

    def __init__(
        self,
        strategy: Strategy,
        devices: LogicalDevices,
        assignment: DeviceAssignment | None,
        variables: MirroredVariables,
        hosts: tuple[int, int],
    ) -> None:
        super().__init__(strategy)
        self._devices = devices
        self._assignment = assignment
        self._variables = variables
        self._hosts, self._cores_per_host = hosts

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The current logical device of each replica, in replica order."""
        return task_names(self._devices.devices[:, self._current()].tolist())

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The same: each replica has a copy of every variable on all of its devices."""
        return self.worker_devices

    @property
    def num_hosts(self) -> int:
        """Hosts that replicas run on."""
        if self._assignment is None:
            return self._hosts
        numbers = range(self._assignment.num_replicas)
        return len({self._assignment.host_device(replica) for replica in numbers})

    @property
    def num_replicas_per_host(self) -> int:
        """As many as fit on one, or as there are."""
        if self._assignment is None:
            return self._cores_per_host
        room = self._cores_per_host // self._assignment.num_cores_per_replica
        return min(self._assignment.num_replicas, room)

    @contextlib.contextmanager
    def experimental_logical_device(self, logical_device_id: int) -> Iterator[None]:
        """Inside, this is the logical device that `worker_devices` of this strategy
        names.

        Variables that are created inside are on all logical devices, as all others.

        Raises:
            ValueError: There is no such logical device.
        """
        if not 0 <= logical_device_id < self._devices.count:
            raise ValueError(
                f"`logical_device_id` not in range (was {logical_device_id}, but there "
                f"are only {self._devices.count} logical devices per replica)."
            )
        before = _entered.set((*_entered.get(), (self, logical_device_id)))
        try:
            yield
        finally:
            _entered.reset(before)

    def variable_created_in_scope(self, v: AbstractVariable) -> bool:
        return all(self._variables.owns(part) for part in v.components)

    def _current(self) -> int:
        """The current logical device of this strategy."""
        own = [number for whose, number in _entered.get() if whose is self]
        return own[-1] if own else 0

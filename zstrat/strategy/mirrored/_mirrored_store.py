"""Variables of which each process has an equal copy.

All processes create the same variables; the initial values are those of rank 0. From
then on every process makes the same updates, with operands that are equal everywhere.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from zstrat.program.stages import CrossKind
from zstrat.strategy._devices import task_names
from zstrat.strategy.replica._collective import AXIS
from zstrat.variables import (
    DevicePool,
    DeviceStorage,
    LocalStorage,
    StrategyCreator,
    Variable,
    VariableAggregation,
    VariableSynchronization,
    initialize,
    next_id,
    owned,
)

from ._replicated_variable import MirroredVariable, SyncOnReadVariable
from ._takeover import taken_over

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from jax.sharding import Sharding

    from zstrat.program.stages import Channel
    from zstrat.strategy.replica._collective import Team
    from zstrat.variables import (
        AbstractVariable,
        OptimizerHandle,
        VariableHandle,
        VariableRequest,
    )


class MirroredVariables(StrategyCreator):
    """Creates variables on the devices of this process, and records which ones it
    created.

    A process that joins after the others have made steps creates variables without
    communication, and receives the others' values before it first uses a variable.

    Args:
        devices: The devices that keep values; each has the whole value.
        team: The replicas, of this process alone or of several.
        over: A mesh of the devices, if it has more axes than the one of the replicas.
        store: The device that keeps the values between steps; default: all of them.
        names: TF's names of the devices that keep a copy for each replica; default: the
            names in a program of one process.
        is_late: Whether the other processes have made steps already.
    """

    def __init__(
        self,
        devices: Sequence[jax.Device],
        team: Team,
        *,
        over: Mesh | None = None,
        store: jax.Device | None = None,
        names: Sequence[str] = (),
        is_late: bool = False,
    ) -> None:
        self._channel = team.channel
        self._team = team
        self._is_late = is_late
        self._created: list[weakref.ref[Variable]] = []
        self._optimizers: list[OptimizerHandle] = []
        channel = team.channel
        whole = None if channel is None else channel.mesh
        if whole is None and over is None and len(devices) > 1:
            over = Mesh(np.array(devices), (AXIS,))
        self.pool: DevicePool = _Devices(
            names or task_names(devices), devices[0], over, whole, channel, self._settle
        )
        # Central storage: steps run on other devices than the one that keeps the
        # values.
        if store is not None and [store] != list(devices):
            self.pool = _KeeperDevice(store, devices[0], self.pool)

    def take_over(self) -> None:
        """Gives all processes the values of the process that has made the most steps.
        All processes must call this, or use a variable for the first time.

        Raises:
            InvalidArgumentError: The processes have not created the same variables.
            PeerLostError, CollectiveTimeoutError: Another process did not take part.
        """
        if self._channel is None:
            return
        with self.pool.turn:
            # By number also where one was dropped here: other processes count it.
            created = {n: each() for n, each in enumerate(self._created)}
            self.pool.steps = taken_over(
                self._channel.collective,
                # Less than any number of steps: a late process is never the source.
                -1 if self._is_late else self.pool.steps,
                created,
                self._optimizers,
            )
            self._is_late = False

    def _settle(self) -> None:
        if self._is_late:
            with self.pool.turn:
                if self._is_late:  # no other thread was here first
                    self.take_over()

    def owns(self, variable: VariableHandle) -> bool:
        """Returns whether this object created the variable."""
        storage = variable.storage
        return isinstance(storage, DeviceStorage) and storage.pool is self.pool

    def create_variables(
        self, requests: Sequence[VariableRequest]
    ) -> list[AbstractVariable]:
        """Creates variables in all processes; one broadcast sends all initial values.

        Raises:
            ValueError: A request has no initial value, or a synchronization that
                mirrored variables do not have.
            PeerLostError, CollectiveTimeoutError: Another process did not take part.
        """
        for request in requests:
            if (
                request.synchronization is VariableSynchronization.NONE
                and not self.pool.travels
            ):
                raise ValueError(
                    f"variable {request.name!r}: `NONE` variable synchronization mode "
                    "is not supported with mirrored variables: leave it out (AUTO)"
                )
        values = [initialize(request) for request in requests]
        # A late process must not start a collective that the others do not: it takes
        # over their values before first use.
        if self._channel is not None and not self._is_late:
            values = self._channel.carry_out(CrossKind.FIRST, values)
        variables = [
            self._made(request, np.asarray(value))
            for request, value in zip(requests, values, strict=True)
        ]
        # In the order of creation, which is that of all processes; not held, so that a
        # variable that is dropped is freed.
        self._created += [weakref.ref(variable) for variable in variables]
        return list(variables)

    def register_optimizer(self, optimizer: OptimizerHandle) -> int:
        """Returns an id for an optimizer, which runs in the steps that use it."""
        self._optimizers.append(optimizer)
        return next_id()

    def forget_optimizer(self, optimizer: int) -> None:
        """Forgets the last optimizer: it will not run in any step."""
        del optimizer
        self._optimizers.pop()

    def _made(self, request: VariableRequest, value: np.ndarray) -> Variable:
        is_on_read = request.synchronization is VariableSynchronization.ON_READ
        storage = self._storage(value, request.aggregation if is_on_read else None)
        variable = owned(request, value, storage)
        if not is_on_read:
            return MirroredVariable.made(variable.spec, storage, self._team, self)
        if not isinstance(storage, DeviceStorage):
            raise NotImplementedError(
                f"variable {request.name!r}: synchronization=ON_READ with numbers of "
                "64 bits, which jax would cut to 32: create it with a narrower dtype, "
                "or switch on jax_enable_x64"
            )
        if self._team.local > 1 and self.pool.copies == 1:
            raise NotImplementedError(
                f"variable {request.name!r}: synchronization=ON_READ with several "
                "devices in one process and implementation=XLA: use "
                "get_replica_context().all_reduce and a variable that is assigned the "
                "result"
            )
        return SyncOnReadVariable.made(variable.spec, storage, self._team, self)

    def _storage(
        self, value: np.ndarray, on_read: VariableAggregation | None
    ) -> DeviceStorage | LocalStorage:
        seen: Any = jax.dtypes.canonicalize_dtype(value.dtype)
        if seen != value.dtype:
            # jax would cut it to 32 bits; steps refuse it, with an error that says so.
            return LocalStorage(value)
        return DeviceStorage(value, self.pool, on_read)


class _Devices(DevicePool):
    """A `DevicePool` that keeps values on the devices of this process, or of all
    processes."""

    def __init__(
        self,
        names: Sequence[str],
        device: jax.Device,
        over: Mesh | None,
        whole: Mesh | None,
        channel: Channel | None,
        settle: Callable[[], None],
    ) -> None:
        super().__init__(names, whole, 1 if over is None else over.shape[AXIS])
        self._channel = channel
        self._settle = settle
        self._where: Any = device
        self._apart: Any = None
        # In one job of XLA arrays are over the devices of all processes.
        mesh = whole or over
        if mesh is not None:
            made: Any = PartitionSpec  # untyped
            self._where = NamedSharding(mesh, made())
            self._apart = NamedSharding(mesh, made(AXIS))

    @property
    def sharding(self) -> Sharding | None:
        where: Sharding | None = None if self._apart is None else self._where
        return where

    @property
    def sharding_apart(self) -> Sharding | None:
        apart: Sharding | None = self._apart
        return apart

    def place(self, array: Any) -> jax.Array:
        return self._placed(array, self._where)

    def place_apart(self, copies: Any) -> jax.Array:
        return self._placed(copies, self._apart)

    def fingerprint(self) -> Hashable:
        return None if self._channel is None else self._channel.fingerprint

    def replicas(self) -> tuple[int, int]:
        if self._channel is None:
            return super().replicas()
        rank, size = self._channel.rank, self._channel.size
        return rank * self.copies, size * self.copies

    def settle(self) -> None:
        self._settle()

    def _placed(self, array: Any, where: Any) -> jax.Array:
        # A copy: jax may use the very memory of an array of numpy.
        value = np.array(array, order="C")
        if self.mesh is not None:
            # Each process gives its own devices a copy; nothing is compared.
            return jax.make_array_from_callback(value.shape, where, value.__getitem__)
        placed: jax.Array = jax.device_put(value, where)
        return placed


class _KeeperDevice(DevicePool):
    """A `DevicePool` that keeps values on one device, and copies them to other devices
    for each step: to ``first`` if there is one replica."""

    travels = True

    def __init__(
        self, device: jax.Device, first: jax.Device, steps: DevicePool
    ) -> None:
        super().__init__(task_names([device]), None, steps.copies)
        self._device = device
        self._sharding = steps.sharding or SingleDeviceSharding(first)
        self._steps = steps

    @property
    def sharding(self) -> Sharding:
        return self._sharding

    @property
    def sharding_apart(self) -> Sharding | None:
        return self._steps.sharding_apart

    def place(self, array: Any) -> jax.Array:
        # A copy: jax may use the very memory of an array of numpy.
        placed: jax.Array = jax.device_put(np.array(array, order="C"), self._device)
        return placed

    def place_apart(self, copies: Any) -> jax.Array:
        return self.place(copies)

    def fingerprint(self) -> Hashable:
        return None

    def settle(self) -> None:
        """Does nothing: no other process sends values."""

    def sent(self, trees: Any, shardings: Any) -> Any:
        # No copies where they are stored: a step does not overwrite arrays that travel.
        return jax.device_put(trees, shardings)

    def returned(self, trees: Any) -> Any:
        return jax.device_put(trees, self._device)

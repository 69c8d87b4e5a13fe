"""Strategies of one process: the default one, and those of several devices as a mesh.

Code that entered no strategy has the default one: one replica, whose variables are in
this process. The others run their replicas as one `LocalMesh`; their variables are on
one device (`OneDeviceStrategy`, `CentralStorageStrategy`) or have a copy on each
(`MirroredStrategy`).
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, cast, final

from zstrat.collectives import ReduceOp

from ._context import ReplicaContext
from ._devices import device_named, devices_named, local_devices, task_names
from ._extended import StrategyExtended
from ._frames import current, install
from ._strategy import Strategy
from .mirrored._mirrored_store import MirroredVariables
from .reduce._cross_device import CrossDeviceOps, NcclAllReduce, ReductionToOneDevice
from .replica._local_run import LocalMesh

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    import jax

    from zstrat.variables import AbstractVariable, Creator

    from .input._inputs import ProcessInputs
    from .replica._collective import Team


_DEVICE: Final = "/job:localhost/replica:0/task:0/device:CPU:0"


@final
class DefaultExtended(StrategyExtended):
    """``extended`` of the default strategy: everything is on one device."""

    def __init__(self, strategy: Strategy) -> None:
        super().__init__(
            strategy, (_DEVICE,), (_DEVICE,), lambda part: part.device == _DEVICE
        )

    def colocate_vars_with(
        self, colocate_with_variable: AbstractVariable
    ) -> AbstractContextManager[None]:
        """Changes nothing: there is only one place."""
        del colocate_with_variable
        return contextlib.nullcontext()


@final
class DefaultStrategy(Strategy):
    """The strategy that is current when no other is. This module makes the only one."""

    is_default = True

    def __init__(self) -> None:
        self._extended = DefaultExtended(self)
        self._context = ReplicaContext(self, 0)

    @property
    def num_replicas_in_sync(self) -> int:
        return 1

    @property
    def extended(self) -> DefaultExtended:
        """The other face of this strategy: one device, where everything is."""
        return self._extended

    @property
    def replica_context(self) -> ReplicaContext:
        """The context of code outside of every strategy."""
        return self._context

    @contextlib.contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Changes nothing.

        Raises (on entering):
            RuntimeError: Another strategy is current.
        """
        if has_strategy():
            raise RuntimeError(
                "Must not nest tf.distribute.Strategy scopes: that of the default "
                f"strategy in that of {get_strategy()!r}"
            )
        yield self

    def _creator(self) -> Creator | None:
        return None

    def _devices(self) -> Sequence[jax.Device]:
        return ()

    def __repr__(self) -> str:
        return "<zstrat default strategy>"

    def __reduce__(self) -> Any:
        return default_strategy, ()


_DEFAULT: Final = DefaultStrategy()


def default_strategy() -> Strategy:
    """Returns the one default strategy of this process."""
    return _DEFAULT


def get_strategy() -> Strategy:
    """Returns the current strategy: outside of every scope the default one."""
    frame = current()
    # No other class is an `AbstractStrategy`.
    return _DEFAULT if frame is None else cast("Strategy", frame.strategy)


def has_strategy() -> bool:
    """Returns whether a strategy other than the default one is current."""
    return not get_strategy().is_default


def in_cross_replica_context() -> bool:
    """Returns whether this code is in a scope and not in a replica function."""
    frame = current()
    return frame is not None and frame.replica is None


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Makes a strategy current without ``with strategy.scope()``, for all threads and
    tasks that enter no scope. None makes the default one current.

    Raises:
        RuntimeError: Called inside a scope or a replica function.
        TypeError: It is not a strategy.
    """
    if strategy is None or strategy is _DEFAULT:
        install(None, None)
    elif isinstance(strategy, Strategy):
        install(strategy, strategy._own_creator())
    else:
        raise TypeError(f"expected a strategy or None, got {type(strategy).__name__}")


def get_loss_reduction() -> ReduceOp:
    """Returns the reduction of a loss over the replicas: SUM. (In estimators of TF it
    is MEAN.)"""
    return ReduceOp.SUM


def get_update_replica_id() -> int | None:
    """Returns which component of a variable the function that ``extended.update``
    called is for, or None elsewhere."""
    frame = current()
    return None if frame is None else frame.update


def get_replica_context() -> ReplicaContext | None:
    """Returns the context of the replica function that runs, or None directly in a
    scope. Outside of every scope it is that of the default strategy."""
    frame = current()
    if frame is None:
        return _DEFAULT.replica_context
    return cast("ReplicaContext | None", frame.replica)  # the only class of contexts


def get_cross_replica_context() -> Strategy | None:
    """Returns the current strategy in its cross-replica context, or None."""
    return get_strategy() if in_cross_replica_context() else None


class LocalStrategy(Strategy):
    """Base of the strategies of one process. A subclass, which is final, sets the
    attributes that are declared here, and says where elements of datasets go."""

    _mesh: LocalMesh
    _variables: Creator
    _extended: StrategyExtended

    @property
    def num_replicas_in_sync(self) -> int:
        """Replicas of this process: one for each device, or for the several logical
        devices of a replica."""
        return self._mesh.replicas

    @property
    def extended(self) -> StrategyExtended:
        return self._extended

    def _creator(self) -> Creator:
        return self._variables

    def _devices(self) -> Sequence[jax.Device]:
        return self._mesh.devices

    def _team(self) -> Team:
        return self._mesh.team

    def _run_replicas(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        return self._mesh.run(fn, args, kwargs)


@final
class OneDeviceStrategy(LocalStrategy):
    """Variables and replica functions on one device.

    Args:
        device: TF's name of it, as ``"GPU:0"`` or ``"/cpu:0"``, or a device of jax.

    Raises:
        ValueError: There is no such device.
    """

    def __init__(self, device: str | jax.Device) -> None:
        devices = [device_named(device)]
        self._mesh = LocalMesh(self, devices)
        self._variables = variables = MirroredVariables(devices, self._mesh.team)
        names = task_names(devices)
        self._extended = StrategyExtended(self, names, names, variables.owns)

    def _inputs(self) -> ProcessInputs:
        return replace(super()._inputs(), place=self._mesh.layout.place_share)

    def __repr__(self) -> str:
        return f"<zstrat.OneDeviceStrategy: {self._extended.worker_devices[0]}>"


@final
class CentralStorageStrategy(LocalStrategy):
    """Synchronous training on several devices that share one copy of the variables.

    Variables are on the only device if there is one, and else on the CPU of the host. A
    step brings them to the replicas and their next values back.

    Args:
        compute_devices: Those of the replicas, by TF's names or as devices of jax. Left
            out: all accelerators of this process, or its CPU.
        parameter_device: That of the variables; given together with
            ``compute_devices``.

    Raises:
        ValueError: One of the two is given alone, a device is not there, or named
            twice.
    """

    def __init__(
        self,
        compute_devices: Sequence[str | jax.Device] | None = None,
        parameter_device: str | jax.Device | None = None,
    ) -> None:
        replicas = _computing(compute_devices)
        if parameter_device is not None:
            store = device_named(parameter_device)
        elif len(replicas) == 1:
            store = replicas[0]
        else:
            store = _host()
        self._mesh = LocalMesh(self, replicas)
        self._variables = variables = MirroredVariables(
            self._mesh.devices, self._mesh.team, store=store
        )
        self._extended = StrategyExtended(
            self, task_names(replicas), task_names([store]), variables.owns
        )

    def _inputs(self) -> ProcessInputs:
        return replace(super()._inputs(), place=self._mesh.layout.place_share)

    def __repr__(self) -> str:
        workers = ", ".join(self._extended.worker_devices)
        store = self._extended.parameter_devices[0]
        return f"<zstrat.CentralStorageStrategy: {workers}; variables on {store}>"


def _computing(devices: Sequence[str | jax.Device] | None) -> list[jax.Device]:
    if devices is None:
        there = local_devices()
        kind = there[0].platform
        return [x for x in there if x.platform == kind][: 1 if kind == "cpu" else None]
    return devices_named("compute_devices", devices)


def _host() -> jax.Device:
    """Returns the CPU of this process, or its first device where jax has no CPU."""
    there = local_devices()
    return next((x for x in there if x.platform == "cpu"), there[0])


@final
class MirroredStrategy(LocalStrategy):
    """Synchronous training on several devices of one process.

    Each device has a replica, and a copy of every variable; gradients are summed over
    the replicas, and each copy gets the same update.

    Args:
        devices: TF's names (``"GPU:0"``, ``"/device:CPU:1"``) or devices of jax. Left
            out: all of this process, accelerators if there are any.
        cross_device_ops: Reduces values outside of steps (``extended.reduce_to``); in
            steps XLA does. Left out: `NcclAllReduce`, or `ReductionToOneDevice` if
            there is a CPU among the devices.

    Raises:
        ValueError: There is no such device, one is named twice, or none at all.
        TypeError: ``cross_device_ops`` is not a `CrossDeviceOps`.
    """

    def __init__(
        self,
        devices: Sequence[str | jax.Device] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
    ) -> None:
        chosen = _chosen(devices)
        if not isinstance(cross_device_ops, CrossDeviceOps | None):
            raise TypeError(
                "cross_device_ops must be a zs.CrossDeviceOps, such as "
                f"zs.ReductionToOneDevice(), got {cross_device_ops!r:.80}"
            )
        self._mesh = LocalMesh(self, chosen)
        self._variables = variables = MirroredVariables(chosen, self._mesh.team)
        names, ops = task_names(chosen), cross_device_ops or _usual(chosen)
        self._extended = StrategyExtended(self, names, names, variables.owns, ops=ops)

    def _inputs(self) -> ProcessInputs:
        return replace(
            super()._inputs(), place=self._mesh.layout.place_share, per_replica=True
        )

    def __repr__(self) -> str:
        return f"<zstrat.MirroredStrategy: {', '.join(self._extended.worker_devices)}>"


def _chosen(devices: Sequence[str | jax.Device] | None) -> list[jax.Device]:
    if devices is None:
        there = local_devices()
        return [device for device in there if device.platform == there[0].platform]
    return devices_named("devices", devices)


def _usual(devices: Sequence[jax.Device]) -> CrossDeviceOps:
    """Chooses as TF does: one device if there is a CPU among them, else an all-reduce,
    which XLA carries out on any accelerators."""
    if any(device.platform == "cpu" for device in devices):
        return ReductionToOneDevice()
    return NcclAllReduce()

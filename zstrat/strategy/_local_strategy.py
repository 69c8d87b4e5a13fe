"""Strategies whose replicas run on devices of this process alone, as one `LocalMesh`.

Variables are on one device (`OneDeviceStrategy`, `CentralStorageStrategy`) or have a
copy on each (`MirroredStrategy`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, final

from ._devices import device_named, devices_named, local_devices, task_names
from ._extended import StrategyExtended
from ._strategy import Strategy
from .mirrored._mirrored_store import MirroredVariables
from .reduce._cross_device import CrossDeviceOps, NcclAllReduce, ReductionToOneDevice
from .replica._local_run import LocalMesh

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import jax

    from zstrat.variables import Creator

    from .input._inputs import ProcessInputs
    from .replica._collective import Team


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
        # On CPUs one replica, as in TF; several have to be named.
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

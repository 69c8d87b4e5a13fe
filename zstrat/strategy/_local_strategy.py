"""Strategies whose replicas run only on devices of this process, as one `LocalMesh`.

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
    """Base of the strategies of one process. Subclasses are final; they set the
    attributes that are declared here, and define where elements of datasets are
    placed."""

    _mesh: LocalMesh
    _variables: Creator
    _extended: StrategyExtended

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas of this process: one for each device, or for each group of
        logical devices."""
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
    """Runs replica functions on one device, which also stores the variables.

    Args:
        device: TF's name of the device, such as ``"GPU:0"`` or ``"/cpu:0"``, or a jax
            device.

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

    Variables are on the device if there is only one, otherwise on the CPU of the host.
    A step copies them to the replicas and copies their next values back.

    Args:
        compute_devices: The devices of the replicas, by TF's names or as jax devices.
            Default: all accelerators of this process, or its CPU.
        parameter_device: The device of the variables; must be given together with
            ``compute_devices``.

    Raises:
        ValueError: Only one of the arguments is given, a device does not exist, or is
            named twice.
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
    """Returns the CPU of this process, or its first device if jax has no CPU."""
    there = local_devices()
    return next((x for x in there if x.platform == "cpu"), there[0])


@final
class MirroredStrategy(LocalStrategy):
    """Synchronous training on several devices of one process.

    Each device has a replica, and a copy of every variable; gradients are summed over
    the replicas, and each copy gets the same update.

    Args:
        devices: TF's names (``"GPU:0"``, ``"/device:CPU:1"``) or jax devices. Default:
            all accelerators of this process, or its CPUs.
        cross_device_ops: Reduces values outside of steps (``extended.reduce_to``); in
            steps XLA reduces them. Default: `NcclAllReduce`, or `ReductionToOneDevice`
            if there is a CPU among the devices.

    Raises:
        ValueError: A device does not exist or is named twice, or the list is empty.
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
    """Returns TF's default reduction: on one device if there is a CPU among the
    devices, otherwise an all-reduce, which XLA executes on any accelerators."""
    if any(device.platform == "cpu" for device in devices):
        return ReductionToOneDevice()
    return NcclAllReduce()

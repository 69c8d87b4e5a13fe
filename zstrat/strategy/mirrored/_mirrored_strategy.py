"""Synchronous training on the devices of one process, each with a copy of all
variables."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, final

from zstrat.strategy._devices import devices_named, local_devices
from zstrat.strategy._local_extended import LocalExtended
from zstrat.strategy._local_strategy import LocalStrategy
from zstrat.strategy.reduce._cross_device import CrossDeviceOps
from zstrat.strategy.reduce._reductions import NcclAllReduce, ReductionToOneDevice
from zstrat.strategy.replica._local_run import LocalMesh

from ._mirrored_store import MirroredVariables

if TYPE_CHECKING:
    from collections.abc import Sequence

    import jax

    from zstrat.strategy.input._inputs import ProcessInputs


@final
class MirroredStrategy(LocalStrategy[LocalExtended]):
    """Synchronous training on several devices of one process.

    Each device has a replica, and a copy of every variable; gradients are summed over
    the replicas, and each copy gets the same update.

    Args:
        devices: TF's names (``"GPU:0"``, ``"/device:CPU:1"``) or devices of jax. Left
            out: all of this process, accelerators if there are any.
        cross_device_ops: What brings values together outside of steps
            (``extended.reduce_to``); in steps it is XLA. Left out: `NcclAllReduce`, or
            `ReductionToOneDevice` if there is a CPU among the devices.

    Raises:
        ValueError: There is no such device, one is named twice, or none at all.
        TypeError: ``cross_device_ops`` is none.
    """

    def __init__(
        self,
        devices: Sequence[str | jax.Device] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
    ) -> None:
        found = _chosen(devices)
        if not isinstance(cross_device_ops, CrossDeviceOps | None):
            raise TypeError(
                "cross_device_ops must be a zs.CrossDeviceOps, such as "
                f"zs.ReductionToOneDevice(), got {cross_device_ops!r:.80}"
            )
        self._mesh = LocalMesh(self, found)
        self._variables = MirroredVariables(found, self._mesh.team)
        ops = cross_device_ops or _usual(found)
        self._extended = LocalExtended(self, found, found, self._variables, ops)

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
    """What TF takes: one device if there is a CPU among them, else an all-reduce, which
    XLA carries out on whatever accelerators they are."""
    if any(device.platform == "cpu" for device in devices):
        return ReductionToOneDevice()
    return NcclAllReduce()

"""A strategy of one device: a program for several, tried on one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, final

from ._devices import device_named
from ._local_extended import LocalExtended
from ._local_strategy import LocalStrategy
from .mirrored._mirrored_store import MirroredVariables
from .replica._local_run import LocalMesh

if TYPE_CHECKING:
    import jax

    from .input._inputs import ProcessInputs


@final
class OneDeviceStrategy(LocalStrategy[LocalExtended]):
    """Variables and replica functions on one device.

    Args:
        device: TF's name of it, as ``"GPU:0"`` or ``"/cpu:0"``, or a device of jax.

    Raises:
        ValueError: There is no such device.
    """

    def __init__(self, device: str | jax.Device) -> None:
        found = [device_named(device)]
        self._mesh = LocalMesh(self, found)
        self._variables = MirroredVariables(found, self._mesh.team)
        self._extended = LocalExtended(self, found, found, self._variables)

    def _inputs(self) -> ProcessInputs:
        return replace(super()._inputs(), place=self._mesh.layout.place_share)

    def __repr__(self) -> str:
        return f"<zstrat.OneDeviceStrategy: {self._extended.worker_devices[0]}>"

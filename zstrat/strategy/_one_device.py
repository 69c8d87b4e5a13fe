"""A strategy of one device: a program for several, tried on one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, final

from ._devices import device_named
from ._local_extended import LocalExtended
from ._local_run import LocalMesh
from ._mirrored import MirroredVariables
from ._strategy import Strategy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import jax

    from zstrat.program._collective import Team
    from zstrat.variables import Creator

    from ._inputs import Inputs


@final
class OneDeviceStrategy(Strategy):
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

    @property
    def num_replicas_in_sync(self) -> int:
        return 1

    @property
    def extended(self) -> LocalExtended:
        return self._extended

    def _creator(self) -> Creator:
        return self._variables

    def _devices(self) -> Sequence[jax.Device]:
        return self._mesh.devices

    def _team(self) -> Team:
        return self._mesh.team

    def _inputs(self) -> Inputs:
        return replace(super()._inputs(), place=self._mesh.place_share)

    def _run_replicas(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        return self._mesh.run(fn, args, kwargs)

    def __repr__(self) -> str:
        return f"<zstrat.OneDeviceStrategy: {self._extended.worker_devices[0]}>"

"""Variables on one device of this process, replicas on several."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, final

from ._devices import device_named, devices_named, local_devices
from ._local_extended import LocalExtended
from ._local_strategy import LocalStrategy
from .mirrored._mirrored_store import MirroredVariables
from .replica._local_run import LocalMesh

if TYPE_CHECKING:
    from collections.abc import Sequence

    import jax

    from .input._inputs import ProcessInputs


@final
class CentralStorageStrategy(LocalStrategy[LocalExtended]):
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
        self._variables = MirroredVariables(
            self._mesh.devices, self._mesh.team, store=store
        )
        self._extended = LocalExtended(self, replicas, [store], self._variables)

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
    """The CPU of this process, or its first device where jax has none."""
    there = local_devices()
    return next((x for x in there if x.platform == "cpu"), there[0])

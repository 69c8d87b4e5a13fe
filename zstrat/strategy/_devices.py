"""Finds devices of this process by their TF names, and names devices as TF does.

A name may be short (``GPU:0``, ``/gpu:0``, ``/device:CPU:1``) or full
(``/job:localhost/replica:0/task:0/device:CPU:0``). Numbers count the devices of a kind
in this process. Only `local_devices` asks jax for devices.
"""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Final

import jax

if TYPE_CHECKING:
    from collections.abc import Sequence


_SHORT: Final = re.compile(
    r"(?:/job:(?P<job>\w+))?(?:/replica:(?P<replica>\d+))?(?:/task:(?P<task>\d+))?"
    r"/?(?:device:)?(?P<kind>[a-z_]+):(?P<number>\d+|\*)",
    re.IGNORECASE,
)
_LOCAL: Final = ("localhost", "worker", "chief")
"""Jobs whose task 0 this process may be."""


def device_named(name: str | jax.Device) -> jax.Device:
    """Returns the device of this process that has the given name.

    Args:
        name: TF's name of the device, or a jax device, which is returned unchanged.

    Raises:
        ValueError: ``name`` is not the name of a device, or there is no such device;
            the error lists the devices.
    """
    if isinstance(name, jax.Device):
        return name
    match = _SHORT.fullmatch(name) if isinstance(name, str) else None
    devices = local_devices()
    if match is None:
        raise ValueError(
            f"{name!r} is not the name of a device: expected one like 'GPU:0', "
            f"'/device:CPU:1' or {task_names(devices)[0]!r}, or a jax.Device"
        )
    if (match["job"] or "localhost").lower() not in _LOCAL or int(match["task"] or 0):
        raise ValueError(
            f"{name!r} is a device of another process; the devices of this one are "
            f"{', '.join(task_names(devices))}"
        )
    kind = match["kind"].lower()
    of_kind = [device for device in devices if _kind(device.platform) == kind]
    # Any of this kind: the first.
    number = 0 if match["number"] == "*" else int(match["number"])
    if number >= len(of_kind):
        raise ValueError(
            f"there is no device {name!r} in this process; there are "
            f"{', '.join(task_names(devices))}. Virtual devices of the CPU are made "
            "with JAX_NUM_CPU_DEVICES=8, before jax is used"
        )
    return of_kind[number]


def devices_named(argument: str, names: Sequence[str | jax.Device]) -> list[jax.Device]:
    """Returns the devices with the given names, one for each replica.

    Args:
        argument: The name of the argument ``names``, for errors.

    Raises:
        ValueError: ``names`` is not a list, or empty; a device does not exist, or is
            named twice.
    """
    if isinstance(names, str) or not names:
        raise ValueError(
            f"{argument} {names!r}: expected a list of one device or more, such as "
            "['GPU:0', 'GPU:1']; without it the strategy chooses the devices"
        )
    devices = [device_named(name) for name in names]
    if len(set(devices)) < len(devices):
        raise ValueError(
            f"duplicates in {argument} {names!r}: expected a different device for each "
            "replica"
        )
    return devices


def local_devices() -> list[jax.Device]:
    """Lists all devices of this process: those of jax's default platform, and the
    CPUs."""
    devices = list(jax.local_devices())
    if devices and devices[0].platform != "cpu":
        with contextlib.suppress(RuntimeError):  # jax is configured without the CPU
            devices += jax.local_devices(backend="cpu")
    return devices


def device_names(platform: str, count: int) -> list[str]:
    """Returns names of ``count`` devices without their task, such as ``/device:GPU:0``.
    ``platform`` is jax's name."""
    return [f"/device:{_kind(platform).upper()}:{n}" for n in range(count)]


def short_name(device: jax.Device) -> str:
    """Returns the short name of a device of this process, such as ``/device:GPU:0``;
    numbers count the devices of a kind."""
    kind = _kind(device.platform)
    same = [other for other in local_devices() if _kind(other.platform) == kind]
    number = same.index(device) if device in same else device.id
    return f"/device:{kind.upper()}:{number}"


def task_names(
    devices: Sequence[jax.Device], job: str = "localhost", task: int = 0
) -> tuple[str, ...]:
    """Returns the full names of devices of this process, which is task ``task`` of
    ``job``."""
    where = f"/job:{job}/replica:0/task:{task}"
    return tuple(f"{where}{short_name(device)}" for device in devices)


def ps_names(count: int) -> list[str]:
    """Returns TF's names of the devices of ``count`` parameter servers."""
    return [f"/job:ps/task:{n}" for n in range(count)]


def _kind(platform: str) -> str:
    # jax names the platforms of AMD's and Nvidia's devices after their makers.
    kind = platform.lower()
    return "gpu" if kind in ("cuda", "rocm") else kind

"""How many TPU devices a host has, as jax counts them.

A device is one core of a v2, v3 or 7x chip, and one chip of the other generations,
where both cores work as one.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

_BUS: Final = Path("/sys/bus/pci/devices")
_GOOGLE: Final = "0x1ae0"
_DEVICES_OF_A_CHIP: Final = {
    "0x0027": 2,  # v2, v3
    "0x005e": 1,  # v4
    "0x0062": 1,  # v5p
    "0x0063": 1,  # v5e
    "0x006f": 1,  # v6e
    "0x0076": 2,  # 7x
}
"""By PCI device id. Google has other devices on this bus, such as network cards."""

_DEVICES_OF_A_COUNT: Final = {
    "v2": 1.0,
    "v3": 1.0,
    "v4": 0.5,
    "v5p": 0.5,
    "v5litepod": 1.0,
    "v6e": 1.0,
}
"""By the word before the number in the name of an accelerator. The number counts cores
up to v5p, where two make a device since v4, and chips since v5e."""


def local_devices(bus: Path = _BUS) -> int:
    """Devices in this machine; 0 where there are none, or no such bus."""
    return sum(
        _DEVICES_OF_A_CHIP.get(_read(path / "device"), 0)
        for path in bus.glob("*")
        if _read(path / "vendor") == _GOOGLE
    )


def devices_per_host(accelerator: str, hosts: int) -> int | None:
    """Devices of each host of an accelerator such as "v4-32"; None for a name that is
    newer than this file.

    Raises:
        RuntimeError: They are not the same on all hosts.
    """
    match = re.fullmatch(r"([a-z0-9]+)-([0-9]{1,9})", accelerator)
    if match is None or match[1] not in _DEVICES_OF_A_COUNT:
        return None
    devices = int(int(match[2]) * _DEVICES_OF_A_COUNT[match[1]])
    if hosts == 0 or devices % hosts:
        raise RuntimeError(
            f"TPU cores on each device is not the same: {devices} of {accelerator} on "
            f"{hosts} hosts. Are all of its hosts listed?"
        )
    return devices // hosts


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""

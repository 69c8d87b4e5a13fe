"""Whether this machine has an accelerator: by its files and its environment, without
jax, which takes seconds to say so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_FILES: Final = ("nvidia[0-9]*", "dxg", "kfd", "accel[0-9]*", "vfio/[0-9]*")
"""Of Nvidia, of one under Windows, of AMD, of TPUs before and from v5e on."""

_VARIABLES: Final = ("TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES")


def signs(files: Path, environment: Mapping[str, str]) -> list[str]:
    """What speaks for an accelerator; jax may still not know what to do with it.

    Args:
        files: The folder of devices, ``/dev``.
    """
    found = [str(path) for each in _FILES for path in sorted(files.glob(each))]
    return found + [name for name in _VARIABLES if environment.get(name)]

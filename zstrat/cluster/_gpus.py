"""How many GPUs this node has for us, and which: what NVIDIA's tools say."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

VARIABLE: Final = "CUDA_VISIBLE_DEVICES"
_PATIENCE: Final = 60.0
"""Seconds for nvidia-smi, which loads the driver first if nothing keeps it loaded."""


def visible_gpus(env: Mapping[str, str]) -> list[str] | None:
    """What CUDA_VISIBLE_DEVICES lists, None where it is not set.

    CUDA stops reading at the first entry that names no device, as in "-1" or Slurm's
    "NoDevFiles".
    """
    text = env.get(VARIABLE)
    if text is None:
        return None
    shown: list[str] = []
    for entry in map(str.strip, text.split(",")):
        if not entry or not (entry.isdecimal() or entry.startswith(("GPU-", "MIG-"))):
            break
        shown.append(entry)
    return shown


def count_gpus(env: Mapping[str, str]) -> int:
    """GPUs that this process may use: by CUDA_VISIBLE_DEVICES, else by nvidia-smi; 0 on
    a machine without that program.

    Raises:
        RuntimeError: nvidia-smi is there and fails.
    """
    shown = visible_gpus(env)
    return _ask_driver() if shown is None else len(shown)


def _ask_driver() -> int:
    command = ["nvidia-smi", "--list-gpus"]
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=_PATIENCE, check=True
        )
    except FileNotFoundError:
        return 0
    except (OSError, subprocess.SubprocessError) as error:
        said = error.stdout if isinstance(error, subprocess.CalledProcessError) else ""
        raise RuntimeError(
            f"Could not get number of GPUs from nvidia-smi: {error}. {said or ''}"
            "Give gpus_per_node, 0 where none is to be used"
        ) from error
    return sum(line.startswith("GPU ") for line in ran.stdout.splitlines())

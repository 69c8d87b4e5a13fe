"""The GPUs of this node: how many there are for us, which, and a task's share of them.

NVIDIA's tools say what there is. Where several tasks share a node, each has a *share*:
a part of what CUDA_VISIBLE_DEVICES lists, which is put there in its place. Who reads
the variable again must not take the share for the whole, so this module knows what it
put there, and what was there before.

Law of the file: this alone changes CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

from zstrat import config

from ._hostlist import natural_order

if TYPE_CHECKING:
    from collections.abc import Mapping

GPUS_VARIABLE: Final = "CUDA_VISIBLE_DEVICES"
_TIMEOUT: Final = 60.0
"""Seconds for nvidia-smi, which loads the driver first if nothing keeps it loaded."""


def visible_gpus(env: Mapping[str, str]) -> list[str] | None:
    """What CUDA_VISIBLE_DEVICES lists, None where it is not set.

    CUDA stops reading at the first entry that names no device, as in "-1" or Slurm's
    "NoDevFiles".
    """
    text = env.get(GPUS_VARIABLE)
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
            command, capture_output=True, text=True, timeout=_TIMEOUT, check=True
        )
    except FileNotFoundError:
        return 0
    except (OSError, subprocess.SubprocessError) as error:
        said = error.stdout if isinstance(error, subprocess.CalledProcessError) else ""
        raise RuntimeError(
            f"Could not get number of GPUs from nvidia-smi: {error}. {said or ''}"
            "Set CUDA_VISIBLE_DEVICES, to '' where none is to be used, or give a "
            "SlurmClusterResolver gpus_per_node"
        ) from error
    return sum(line.startswith("GPU ") for line in ran.stdout.splitlines())


@final
@dataclass(frozen=True, slots=True)
class _Taken:
    """What the variable was, None if it was not set, and what it is now."""

    found: str | None
    share: str


@final
class _GpuEnvironment:
    """What this process has done to its own environment."""

    taken: _Taken | None = None


_memory = _GpuEnvironment()


def before_shares(env: Mapping[str, str]) -> Mapping[str, str]:
    """The environment as it was before this process took its share, if it did."""
    taken = _memory.taken
    if taken is None or env.get(GPUS_VARIABLE) != taken.share:
        return env  # or somebody else has set it since
    others = {name: value for name, value in env.items() if name != GPUS_VARIABLE}
    return others if taken.found is None else {**others, GPUS_VARIABLE: taken.found}


def share_of(
    env: Mapping[str, str], per_node: int, per_task: int, local: int
) -> list[str]:
    """The GPUs of a task, as CUDA_VISIBLE_DEVICES lists them; empty if that is to stay
    as it is: the task has none, or sees only some of the node's, which are its own.

    Args:
        env: As `before_shares` has it.
        local: Number of the task among those of its node.
    """
    shown = visible_gpus(env)
    if shown is None:
        shown = [str(number) for number in range(per_node)]
    if len(shown) < per_node:
        return []
    return shown[local * per_task : (local + 1) * per_task]


def parts_of(env: Mapping[str, str], tasks: int) -> list[list[str]]:
    """The GPUs of each of several tasks of a machine that all see the same ones:
    equally many, in the order of their numbers, whatever the order in which they are
    listed (Dask's workers on GPUs each have another one first). Of more tasks than
    GPUs, several have one together, in turn. Empty if it is to stay as it is: a task is
    alone, or jax is told to use other devices, or there are no GPUs.

    Args:
        env: As `before_shares` has it.

    Raises:
        RuntimeError: nvidia-smi is there and fails.
    """
    platforms = env.get("JAX_PLATFORMS", "")
    if tasks < 2 or (platforms and not {"cuda", "gpu"} & set(platforms.split(","))):
        return [[]] * tasks
    shown = visible_gpus(env)
    if shown is None:
        shown = [str(number) for number in range(_ask_driver())]
    if not shown:
        return [[]] * tasks
    shown.sort(key=natural_order)
    each = len(shown) // tasks
    if not each:
        return [[shown[place % len(shown)]] for place in range(tasks)]
    return [shown[place * each : (place + 1) * each] for place in range(tasks)]


def take_part(place: int, tasks: int) -> list[str]:
    """Makes its part (`parts_of`) all that this process sees, and returns it. Before
    jax looks for devices; a second call finds the same part."""
    env = before_shares(config.environment())
    part = parts_of(env, tasks)[place]
    if part:
        take_share(env, part)
    return part


def take_share(env: Mapping[str, str], share: list[str]) -> None:
    """Makes the share all that this process sees.

    Args:
        env: As `before_shares` has it.
    """
    _memory.taken = _Taken(env.get(GPUS_VARIABLE), ",".join(share))
    config.set_environment(GPUS_VARIABLE, _memory.taken.share)

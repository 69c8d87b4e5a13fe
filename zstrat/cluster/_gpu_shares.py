"""Divides the GPUs of a machine among the tasks on it.

If several tasks run on a machine, each gets a *share*, a part of the GPUs that
CUDA_VISIBLE_DEVICES lists; the variable is then set to the share. Code that reads the
variable again must not take the share for all GPUs, so `take_share` remembers the share
and the previous value.

Law: nothing else changes CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Final

from zstrat import config

if TYPE_CHECKING:
    from collections.abc import Mapping

GPUS_VARIABLE: Final = "CUDA_VISIBLE_DEVICES"
_TIMEOUT: Final = 60.0
"""Seconds for nvidia-smi, which loads the driver first if nothing keeps it loaded."""


def visible_gpus(env: Mapping[str, str]) -> list[str] | None:
    """Returns the GPUs in CUDA_VISIBLE_DEVICES, None if it is not set.

    CUDA stops reading at the first invalid entry, such as "-1" or Slurm's "NoDevFiles".
    """
    text = env.get(GPUS_VARIABLE)
    if text is None:
        return None
    shown: list[str] = []
    for entry in map(str.strip, text.split(",")):
        # A position of CUDA, or the name of a GPU or of a part of one.
        if not entry or not (entry.isdecimal() or entry.startswith(("GPU-", "MIG-"))):
            break
        shown.append(entry)
    return shown


def count_gpus(env: Mapping[str, str]) -> int:
    """Counts the GPUs for this process, by CUDA_VISIBLE_DEVICES or else by nvidia-smi;
    0 without that program.

    Raises:
        RuntimeError: nvidia-smi exists but fails.
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
        # nvidia-smi prints its errors to standard output.
        said = error.stdout if isinstance(error, subprocess.CalledProcessError) else ""
        raise RuntimeError(
            f"Could not get number of GPUs from nvidia-smi: {error}. {said or ''}"
            "Set CUDA_VISIBLE_DEVICES, to '' to use no GPU, or pass gpus_per_node to "
            "SlurmClusterResolver"
        ) from error
    # Parts of a GPU (MIG) are listed below it, and indented.
    return sum(line.startswith("GPU ") for line in ran.stdout.splitlines())


_taken: tuple[str | None, str] | None = None
"""The change that this process made to its CUDA_VISIBLE_DEVICES: the previous value
(None: the variable was not set), and the share. None before the first change."""


def before_shares(env: Mapping[str, str]) -> Mapping[str, str]:
    """Returns the environment from before this process took its share."""
    before, share = _taken or (None, None)
    # No share was taken, or the program has set the variable since: its choice counts.
    if share is None or env.get(GPUS_VARIABLE) != share:
        return env
    others = {name: value for name, value in env.items() if name != GPUS_VARIABLE}
    return others if before is None else {**others, GPUS_VARIABLE: before}


def share_of(
    env: Mapping[str, str], per_node: int, per_task: int, local: int
) -> list[str]:
    """Returns the share of a task for CUDA_VISIBLE_DEVICES; empty if the variable
    should not change: the task has no GPUs, or sees only its own GPUs already.

    Args:
        env: The result of `before_shares`.
        per_node, per_task: Numbers of GPUs.
        local: Number of the task on its node.
    """
    shown = visible_gpus(env)
    if shown is None:
        shown = [str(number) for number in range(per_node)]
    # Slurm has bound the GPUs to the task already (--gpus-per-task, cgroups).
    if len(shown) < per_node:
        return []
    return shown[local * per_task : (local + 1) * per_task]


def parts_of(env: Mapping[str, str], tasks: int) -> list[list[str]]:
    """Divides the GPUs of a machine equally among tasks that all see the same ones, in
    the order of their numbers (Dask lists them in another order for each worker). If
    there are more tasks than GPUs, tasks share GPUs round robin. Empty if nothing
    should change: there is one task, or jax uses other devices, or there are no GPUs.

    Args:
        env: The result of `before_shares`.

    Raises:
        RuntimeError: nvidia-smi exists but fails.
    """
    platforms = env.get("JAX_PLATFORMS", "")
    # The driver is not asked if nobody needs the answer, as that may take a minute.
    if tasks < 2 or (platforms and not {"cuda", "gpu"} & set(platforms.split(","))):
        return [[]] * tasks
    shown = visible_gpus(env)
    if shown is None:
        shown = [str(number) for number in range(_ask_driver())]
    if not shown:
        return [[]] * tasks
    # 2 before 10, as decimal numbers have no leading zeros here. The order of other
    # names has no meaning, but has to be the same in all tasks.
    shown.sort(key=lambda gpu: (len(gpu), gpu))
    # A remainder stays unused: all tasks get the same number.
    count = len(shown) // tasks
    if not count:
        return [[shown[index % len(shown)]] for index in range(tasks)]
    return [shown[index * count : (index + 1) * count] for index in range(tasks)]


def take_part(index: int, tasks: int) -> list[str]:
    """Makes only the part of task ``index`` (see `parts_of`) visible to this process,
    and returns it. Call this before jax initializes its devices; a second call returns
    the same part."""
    env = before_shares(config.environment())
    part = parts_of(env, tasks)[index]
    if part:
        take_share(env, part)
    return part


def take_share(env: Mapping[str, str], share: list[str]) -> None:
    """Makes only the share visible to this process.

    Args:
        env: The result of `before_shares`.
    """
    global _taken
    value = ",".join(share)
    _taken = env.get(GPUS_VARIABLE), value
    config.set_environment(GPUS_VARIABLE, value)

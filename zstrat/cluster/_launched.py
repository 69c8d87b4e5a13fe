"""Whether somebody started this process as one of several, without saying who they are.

Law of the file: what counts is how many processes were started together (the step),
never how many there could be (the allocation): one program that runs by itself in an
allocation of many tasks is alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_COUNTS: Final = {
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
}
"""By the variable of the number of processes, that of a process's own number: of Open
MPI, of MPICH and its kin, of Slurm's ``srun``. MPI first: its processes may have been
started by one task of Slurm on each node."""


def launched_together(env: Mapping[str, str]) -> tuple[str, int, str] | None:
    """The variable that says that several processes were started together, how many,
    and the variable with the number of this one; None: no variable says so."""
    for name, rank in _COUNTS.items():
        text = env.get(name, "")
        if text.isascii() and text.isdecimal() and len(text) < 10 and int(text) > 1:
            return name, int(text), rank
    return None

"""The cases of collectives: sums of float32 over ranks on this machine."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from functools import partial
from typing import Final

from benchmarks.case import Case, Reading

MiB = 2**20
GLOO: Final = "gloo (PyTorch), TCP"
MPI: Final = "Open MPI, shared memory"
FLOOR: Final = "numpy through shared memory, 1 MiB chunks, spinning"


def seconds(system: str, ranks: int, work: str, repeats: int, lane: str = "") -> float:
    """Median seconds of one call, over all but the first quarter of the repeats."""
    program = [sys.executable, "-m", "benchmarks.ranks", system, work, str(repeats)]
    if system == "mpi":
        options = ["--oversubscribe", "--allow-run-as-root", "-n", str(ranks)]
        return _last_number(["mpirun", *options, *program])
    if lane:
        program.append(lane)
    return _last_number(
        [sys.executable, "-m", "benchmarks.copies", str(ranks), *program]
    )


def _last_number(command: list[str]) -> float:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")
    return float(json.loads(done.stdout.splitlines()[-1]))


def peers(
    ranks: int, work: str, repeats: int, names: tuple[str, ...]
) -> dict[str, float]:
    """Seconds of those of the others that are installed."""
    found = {}
    if GLOO in names and importlib.util.find_spec("torch"):
        found[GLOO] = seconds("gloo", ranks, work, repeats)
    mpi = importlib.util.find_spec("mpi4py") and shutil.which("mpirun")
    if MPI in names and mpi:
        found[MPI] = seconds("mpi", ranks, work, repeats)
    return found


def one_size(
    ranks: int, nbytes: int, repeats: int, lane: str, names: tuple[str, ...]
) -> Reading:
    """In GB/s of the array's bytes; a small one in calls per second."""
    amount = nbytes / 1e9 if nbytes >= MiB else 1.0
    work = str(nbytes)
    ours = seconds("zstrat", ranks, work, repeats, lane)
    floor = seconds("floor", ranks, work, repeats)
    others = peers(ranks, work, repeats, names)
    rates = {name: amount / each for name, each in others.items()}
    return Reading(amount / ours, amount / floor, rates)


def packed(ranks: int) -> Reading:
    ours = seconds("zstrat", ranks, "packed", 12)
    floor = seconds("floor", ranks, "packed", 12)
    others = peers(ranks, "packed", 12, (GLOO,))
    return Reading(0.1 / ours, 0.1 / floor, {n: 0.1 / s for n, s in others.items()})


def _case(
    ranks: int,
    nbytes: int,
    repeats: int,
    lane: str,
    of_floor: float,
    others: dict[str, float],
) -> Case:
    where = "TCP lane" if lane == "tcp" else "one host"
    size = f"{nbytes // MiB} MB" if nbytes >= MiB else f"{nbytes // 1024} KB"
    return Case(
        f"all-reduce of {size}, {ranks} ranks, {where}",
        "GB/s" if nbytes >= MiB else "/s",
        of_floor,
        FLOOR,
        partial(one_size, ranks, nbytes, repeats, lane, tuple(others)),
        of_limit=True,
        others=others,
    )


CASES = [
    *[
        case
        for ranks in (2, 4)
        for case in (
            _case(ranks, 256 * MiB, 6, "auto", 0.5, {GLOO: 3, MPI: 1.5}),
            _case(ranks, 64 * MiB, 16, "auto", 0.5, {GLOO: 3, MPI: 1.5}),
            _case(ranks, MiB, 200, "auto", 0.3, {GLOO: 2}),
            _case(ranks, 4096, 1000, "auto", 0, {GLOO: 2}),
            _case(ranks, 64 * MiB, 16, "tcp", 0, {GLOO: 1.4}),
            _case(ranks, MiB, 200, "tcp", 0, {GLOO: 1.2}),
            Case(
                f"all-reduce of 200 arrays, 100 MB, {ranks} ranks, one host",
                "GB/s",
                0,
                FLOOR,
                partial(packed, ranks),
                others={"gloo (PyTorch), TCP": 2},
            ),
        )
    ],
]

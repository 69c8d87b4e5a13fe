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
RING: Final = "a ring over bare TCP sockets, numpy"
ZMQ_RING: Final = "a ring over bare DEALER and ROUTER sockets, numpy"


def seconds(
    system: str, ranks: int, work: str, repeats: int, transport: str = ""
) -> float:
    """Median seconds of one call, over all but the first quarter of the repeats."""
    program = [sys.executable, "-m", "benchmarks.ranks", system, work, str(repeats)]
    if system == "mpi":
        options = ["--oversubscribe", "--allow-run-as-root", "-n", str(ranks)]
        return _last_number(["mpirun", *options, *program])
    if transport:
        program.append(transport)
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
    if ZMQ_RING in names:
        found[ZMQ_RING] = seconds("zmq_ring", ranks, work, repeats)
    return found


def one_size(
    ranks: int, nbytes: int, repeats: int, transport: str, names: tuple[str, ...]
) -> Reading:
    """In GB/s of the array's bytes; a small one in calls per second."""
    amount = nbytes / 1e9 if nbytes >= MiB else 1.0
    work = str(nbytes)
    ours = seconds("zstrat", ranks, work, repeats, transport)
    least = seconds("ring" if transport == "tcp" else "floor", ranks, work, repeats)
    others = peers(ranks, work, repeats, names)
    rates = {name: amount / each for name, each in others.items()}
    return Reading(amount / ours, amount / least, rates)


def packed(ranks: int) -> Reading:
    ours = seconds("zstrat", ranks, "packed", 12)
    floor = seconds("floor", ranks, "packed", 12)
    others = peers(ranks, "packed", 12, (GLOO,))
    return Reading(0.1 / ours, 0.1 / floor, {n: 0.1 / s for n, s in others.items()})


def simulated() -> Reading:
    """The dearest of all algorithms, sizes and numbers of ranks, over what the textbook
    says of it."""
    from benchmarks.cost_curve import LINE, RANKS, SIZES, TEXTBOOK
    from benchmarks.line_cost import cost

    ratios = [
        cost("all_reduce", algorithm, ranks, nbytes, LINE) / formula(ranks, nbytes)
        for algorithm, formula in TEXTBOOK.items()
        for nbytes in SIZES.values()
        for ranks in RANKS
    ]
    return Reading(max(ratios), 1.0)


def _one_host(
    ranks: int, mib: int, repeats: int, of_floor: float, others: dict[str, float]
) -> Case:
    return Case(
        f"all-reduce of {mib} MB, {ranks} ranks, one host",
        "GB/s",
        of_floor,
        FLOOR,
        partial(one_size, ranks, mib * MiB, repeats, "auto", tuple(others)),
        of_limit=True,
        others=others,
    )


def _over_tcp(ranks: int) -> Case:
    return Case(
        f"all-reduce of 64 MB, {ranks} ranks, TCP transport",
        "GB/s",
        # Where the ring takes 23 ms with two ranks, 1.4 times gloo's speed is 28 ms.
        0.8,
        RING,
        partial(one_size, ranks, 64 * MiB, 16, "tcp", (GLOO, ZMQ_RING)),
        of_limit=True,
        others={GLOO: 1.4, ZMQ_RING: 0.95},
    )


def _little_over_tcp(ranks: int, most: float) -> Case:
    """``most``: seconds that one call may take: five sixths of what gloo took where the
    targets were set, call after call."""
    return Case(
        f"all-reduce of 1 MB, {ranks} ranks, TCP transport",
        "GB/s",
        round(MiB / 1e9 / most, 2),
        RING,
        partial(one_size, ranks, MiB, 200, "tcp", (GLOO, ZMQ_RING)),
        others={GLOO: 1.2, ZMQ_RING: 0.95},
    )


def _small(ranks: int, most: float) -> Case:
    """``most``: seconds that one call may take."""
    return Case(
        f"all-reduce of 4 KB, {ranks} ranks, one host",
        "/s",
        round(1 / most),
        FLOOR,
        partial(one_size, ranks, 4096, 1000, "auto", (GLOO,)),
        others={GLOO: 2},
    )


def _packed(ranks: int, most: float) -> Case:
    """``most``: seconds that one call may take: half of what gloo took where the
    targets were set, its tensors flattened by hand."""
    return Case(
        f"all-reduce of 200 arrays, 100 MB, {ranks} ranks, one host",
        "GB/s",
        round(0.1 / most, 2),
        FLOOR,
        partial(packed, ranks),
        others={GLOO: 2},
    )


_SIMULATED = Case(
    "all-reduce of 2 to 1,024 ranks, simulated",
    "x",
    1.05,
    "the textbook's formulas, 25 Gb/s, 50 us, 4 KB to 64 MB",
    simulated,
    lower=True,
)

CASES = [
    *[
        case
        for ranks, small, little, many in (
            (2, 0.15e-3, 1.25e-3, 37.5e-3),
            (4, 1e-3, 4.6e-3, 88e-3),
        )
        for case in (
            _one_host(ranks, 256, 6, 0.5, {GLOO: 3, MPI: 1.5}),
            _one_host(ranks, 64, 16, 0.5, {GLOO: 3, MPI: 1.5}),
            _one_host(ranks, 1, 200, 0.3, {GLOO: 2}),
            _small(ranks, small),
            _over_tcp(ranks),
            _little_over_tcp(ranks, little),
            _packed(ranks, many),
        )
    ],
    _SIMULATED,
]

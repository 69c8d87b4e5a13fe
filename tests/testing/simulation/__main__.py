"""Runs many seeds on all cores, and says which ones did not keep the contract.

PYTHONPATH=tests/testing python -m simulation 0-2000
python -m simulation 1234 --tell
python -m simulation 0-200 --mutation "the ledger forgets"
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import time
from functools import partial
from typing import TYPE_CHECKING, Final

from ._mutations import MUTATIONS, run_mutated

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ._run import SeedVerdict

AT_ONCE: Final = 10
"""Seeds that a process is given at a time."""


def seeds_in(text: str) -> range:
    """``"7"``, or ``"0-2000"`` without its end.

    Raises:
        argparse.ArgumentTypeError: It is neither, or has no seeds.
    """
    first, dash, end = text.partition("-")
    with contextlib.suppress(ValueError):
        seeds = range(int(first), int(end) if dash else int(first) + 1)
        if seeds:  # no seeds would keep any contract
            return seeds
    raise argparse.ArgumentTypeError(
        f"expected 7, or 0-2000 without its end, got {text!r}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 if all seeds kept the contract."""
    parser = argparse.ArgumentParser(
        prog="python -m simulation", description=__doc__.split("\n")[0]
    )
    parser.add_argument("seeds", type=seeds_in, help="7, or 0-2000 (without its end)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--mutation", choices=MUTATIONS, help="break zstrat like that")
    parser.add_argument("--tell", action="store_true", help="print each message")
    given = parser.parse_args(arguments)
    if given.tell:
        work = partial(run_mutated, given.mutation, told=print)
        return _report(map(work, given.seeds), given.mutation)
    spawning = multiprocessing.get_context("spawn")
    with spawning.Pool(given.processes) as pool:
        quietly = partial(run_mutated, given.mutation)
        return _report(pool.imap(quietly, given.seeds, AT_ONCE), given.mutation)


def _report(verdicts: Iterator[SeedVerdict], mutation: str | None) -> int:
    began, count, steps, failed = time.monotonic(), 0, 0, []
    for verdict in verdicts:
        count, steps = count + 1, steps + verdict.steps
        if verdict.failure is not None:
            failed.append(verdict.seed)
            print(f"seed {verdict.seed}: {verdict.failure}", flush=True)
    took = time.monotonic() - began
    print(
        f"{count} seeds, {steps} steps ran, {len(failed)} seeds failed, {took:.0f} s "
        f"({count / max(took, 1e-9):.1f} seeds/s)"
    )
    if failed:
        more = "" if mutation is None else f' --mutation "{mutation}"'
        again = f"python -m simulation {failed[0]} --tell{more}"
        print(f"see what happens: {again}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())

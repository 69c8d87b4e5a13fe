"""``python -m benchmarks [--runs N] [--only WORD] [--json FILE]``: the table.

Each run of a case is a process of its own. The JSON is written after every case, so
that a run which is cut short leaves what it has measured.

``--check`` compares the ratios to the limits, which machines have in common, with those
of ``reached.json`` beside this file, and ends with 1 where one is worse: its median by
more than `WORSE`, and outside of what the runs were that were kept. ``--keep`` writes
the rows that were measured into it.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.cases import CASES

if TYPE_CHECKING:
    from benchmarks.case import Case

LONGEST = 300.0
"""Seconds that one run of a case may take."""
WORSE = 0.1
"""What part of a ratio may be lost."""
REACHED = Path(__file__).with_name("reached.json")
"""What ratio each case has reached: the median of its runs, and the worst of them. Some
differ by a third from process to process, others by a hundredth."""


def main() -> int:
    arguments = _arguments()
    if arguments.one is not None:
        reading = CASES[arguments.one].measure()
        print(json.dumps(asdict(reading)))
        return 0
    rows: list[dict[str, Any]] = []
    failed = False
    _print_row("", "case", "median [min-max]", "reach", "limit", "of the limit")
    for number, case in enumerate(CASES):
        if arguments.only not in case.name:
            continue
        readings = [_run(number) for _ in range(arguments.runs)]
        whole = [reading for reading in readings if reading is not None]
        failed |= len(whole) < len(readings)
        if whole:
            rows.append(_row(case, whole))
            _print(case, rows[-1])
        _write(arguments.json, rows)
    print("\nLimits, measured in the same runs:")
    for row in rows:
        print(f"  {row['name']}: {row['limit_is']}")
        for name, values in row["others"].items():
            times = statistics.median(row["values"]) / statistics.median(values)
            print(f"    {name}: {_spread(values)} {row['unit']}, {times:.2f} times it")
    if arguments.keep:
        _keep(rows)
    worse = worse_than(_reached(), rows) if arguments.check else []
    for words in worse:
        print(words)
    return int(failed or bool(worse))


Reached = dict[str, list[float]]
"""Of each case by name the median ratio, and the worst."""


def worse_than(reached: Reached, rows: list[dict[str, Any]]) -> list[str]:
    """In words, which rows are worse than what was reached, by more than `WORSE` and
    than the worst run that was kept."""
    words = []
    for row in rows:
        name, now = row["name"], statistics.median(row["ratios"])
        if name not in reached:
            words.append(f"{name}: nobody kept what it reaches: --keep")
            continue
        before, worst = reached[name]
        lost = now / before - 1 if row["lower"] else 1 - now / before
        is_outside = now > worst if row["lower"] else now < worst
        if lost > WORSE and is_outside:
            was = f"{before:g} ({worst:g} at worst)"
            words.append(f"{name}: {now:.3g} of the limit, it was {was}")
    return words


def _reached() -> Reached:
    found: Reached = json.loads(REACHED.read_text() if REACHED.exists() else "{}")
    return found


def _keep(rows: list[dict[str, Any]]) -> None:
    reached = _reached()
    for row in rows:
        worst = max if row["lower"] else min
        kept = statistics.median(row["ratios"]), worst(row["ratios"])
        reached[row["name"]] = [float(f"{ratio:.3g}") for ratio in kept]
    known = {case.name: reached[case.name] for case in CASES if case.name in reached}
    REACHED.write_text(json.dumps(known, indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("--runs", type=int, default=5, help="processes per case")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--json", type=Path, default=Path("out/bench.json"))
    parser.add_argument("--check", action="store_true", help="fail where one is worse")
    parser.add_argument("--keep", action="store_true", help="keep what is reached")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def _run(number: int) -> dict[str, Any] | None:
    command = [sys.executable, "-m", "benchmarks", "--one", str(number)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LONGEST, check=True
        )
    except subprocess.CalledProcessError as error:
        print(f"{CASES[number].name} failed:\n{error.stderr}", file=sys.stderr)
        return None
    except subprocess.TimeoutExpired:
        print(f"{CASES[number].name}: not done in {LONGEST:g} s", file=sys.stderr)
        return None
    reading: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return reading


def _row(case: Case, readings: list[dict[str, Any]]) -> dict[str, Any]:
    values = [reading["value"] for reading in readings]
    limits = [reading["limit"] for reading in readings]
    ratios = [value / limit for value, limit in zip(values, limits, strict=True)]
    others = {
        name: [reading["others"][name] for reading in readings]
        for name in readings[0]["others"]
    }
    reached = case.is_reached(
        statistics.median(values),
        statistics.median(ratios),
        {name: statistics.median(found) for name, found in others.items()},
    )
    return {
        "name": case.name,
        "unit": case.unit,
        "reach": case.target,
        "lower": case.lower,
        "is_reached": reached,
        "limit_is": case.limit,
        "values": values,
        "limits": limits,
        "others": others,
        "ratios": ratios,
    }


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    machine = {"machine": platform.platform(), "python": platform.python_version()}
    path.write_text(json.dumps({**machine, "rows": rows}, indent=1))


def _print(case: Case, row: dict[str, Any]) -> None:
    _print_row(
        "ok" if row["is_reached"] else "--",
        case.name,
        f"{_spread(row['values'])} {case.unit}",
        case.target,
        f"{_spread(row['limits'])} {case.unit}",
        _spread(row["ratios"]),
    )


def _spread(values: list[float]) -> str:
    median, low, high = statistics.median(values), min(values), max(values)
    return f"{_short(median)} [{_short(low)}-{_short(high)}]"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def _print_row(*cells: str) -> None:
    widths = (4, 52, 34, 20, 34, 18)
    print("".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)), flush=True)


if __name__ == "__main__":
    sys.exit(main())

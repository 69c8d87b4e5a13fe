"""``python -m benchmarks [--runs N] [--only WORD] [--json FILE]``: the table."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.cases import CASES, Case


def main() -> None:
    arguments = _arguments()
    if arguments.one is not None:
        reading = CASES[arguments.one].measure()
        print(json.dumps({"value": reading.value, "limit": reading.limit}))
        return
    rows = []
    _print_row("case", "median [min-max]", "reach", "limit", "ratio")
    for number, case in enumerate(CASES):
        if arguments.only in case.name:
            row = _summary(case, [_run(number) for _ in range(arguments.runs)])
            rows.append(row)
            _print_row(case.name, row["text"], case.target, row["beside"], row["ratio"])
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        machine = {"machine": platform.platform(), "python": platform.python_version()}
        arguments.json.write_text(json.dumps({**machine, "rows": rows}, indent=1))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("--runs", type=int, default=5, help="processes per case")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--json", type=Path, default=Path("out/bench.json"))
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def _run(number: int) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--one", str(number)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{CASES[number].name}:\n{done.stdout}{done.stderr}")
    reading: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return reading


def _summary(case: Case, readings: list[dict[str, float]]) -> dict[str, Any]:
    values = [reading["value"] for reading in readings]
    limits = [reading["limit"] for reading in readings]
    ratios = [value / limit for value, limit in zip(values, limits, strict=True)]
    return {
        "name": case.name,
        "unit": case.unit,
        "reach": case.target,
        "limit_is": case.limit,
        "values": values,
        "limits": limits,
        "text": f"{_spread(values)} {case.unit}",
        "beside": _spread(limits),
        "ratio": _spread(ratios),
    }


def _spread(values: list[float]) -> str:
    median, low, high = statistics.median(values), min(values), max(values)
    return f"{_short(median)} [{_short(low)}-{_short(high)}]"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def _print_row(*cells: str) -> None:
    widths = (52, 34, 22, 28, 20)
    print("".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)), flush=True)


if __name__ == "__main__":
    main()

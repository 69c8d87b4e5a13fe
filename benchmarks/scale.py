"""``make scale``: how far zstrat scales, on paper: docs/scale.md with its pictures.

Measures what things cost on this machine (`scale_costs`), puts that into formulae
(`scale_model`), and runs the largest simulated cluster.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from . import scale_model as model
from .scale_costs import LINKS, measured, simulated
from .scale_model import Exchange, Link
from .scale_plot import Curve, drawn
from .slow_links import checked_points

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from .scale_model import Costs
    from .slow_links import Checked

PAGE: Final = "scale.md"
COMPUTES: Final = (1e-5, 1e-4, 1e-3, 1e-2, 5e-2)
"""Seconds that the function of a step computes."""
WORKERS: Final = (10, 30, 100, 300, 1000, 3000, 10_000)
SERVERS: Final = (1, 10, 100, 1000)
SIZES: Final = (4096, 2**20, 16 * 2**20)
"""Bytes that a step reads and pushes."""
MODEL_BYTES: Final = 4e8
MODEL_STEP: Final = 1.0
ROUND_TRIP: Final = 0.05
"""Seconds of a step of the model on slow links, and of its links."""
MEGABITS: Final = (10, 100, 1000, 10_000)
EXCHANGES: Final = (
    Exchange(),
    Exchange(10),
    Exchange(50),
    Exchange(500),
    Exchange(50, 4, 10),
    Exchange(500, 4, 100),
)
TEMPLATE: Final = Path(__file__).with_name("scale_page.md")


class Largest(NamedTuple):
    """The cluster that was simulated."""

    workers: int
    steps: int
    seconds: float
    """Of one core, in all."""
    program: float
    """Of them on the program's loop."""


def page(
    costs: Costs, largest: Largest, machine: str, checked: Sequence[Checked]
) -> dict[str, str]:
    """The files of the page, by name."""
    words = {
        "machine": machine,
        "links": str(LINKS),
        "costs": "\n".join(_costs(costs)),
        "program": "\n".join(_program(costs)),
        "turns": "\n".join(_turns(costs)),
        "servers": "\n".join(_servers(costs)),
        "beats": "\n".join(_beats(costs)),
        "connections": "\n".join(_connections(costs)),
        "ledger": _ledger(costs),
        "links_used": "\n".join(_links_used(costs)),
        "checked": "\n".join(_checked(costs, checked)),
        "workers": f"{largest.workers:,}",
        "steps": f"{largest.steps:,}",
        "seconds": f"{largest.seconds:.0f}",
        "per_step": f"{largest.program / largest.steps * 1e6:,.0f}",
    }
    text = TEMPLATE.read_text("utf-8")
    for name, value in words.items():
        text = text.replace(f"@{name}@", value)
    return {PAGE: text, **_pictures(costs)}


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _costs(costs: Costs) -> Iterator[str]:
    rows = [
        ("`step`", "program's loop: a step, in messages of its own", costs.step),
        ("`packed`", "the same, where messages carry many steps", costs.packed),
        ("`scan`", "program's loop: per worker with room, in each turn", costs.scan),
        ("`submit`", "program's own thread: `schedule`", costs.submit),
        ("`beat`", "one connection, per beat sent and received", costs.beat),
        ("`exchange`", "a server: requests of a step, without bytes", costs.exchange),
        ("`byte`", "a server: 1 MiB that is read and pushed", costs.byte * 2**20),
        ("`own`", "a worker: a step that computes nothing", costs.own),
        ("`call`", "a worker: each server more in a step", costs.call),
        ("`entry`", "a server: a push in its ledger", costs.entry),
    ]
    yield from _table(
        ("cost", "of", "of one core"),
        [(name, what, _time(seconds)) for name, what, seconds in rows],
    )


def _program(costs: Costs) -> Iterator[str]:
    head = ("a step computes", "messages of its own", "packed", "with 10 servers")
    packed = replace(costs, step=costs.packed)
    rows = [
        (
            _time(t),
            _count(model.program_workers(costs, t, 1)),
            _count(model.program_workers(packed, t, 1)),
            _count(model.program_workers(costs, t, 10)),
        )
        for t in COMPUTES
    ]
    yield from _table(head, rows)


def _turns(costs: Costs) -> Iterator[str]:
    head = ("workers", "idle", "half full", "nine tenths full")
    rows = []
    for workers in WORKERS:
        turns = []
        for share in (0.0, 0.5, 0.9):
            # What the beats leave of that is for steps.
            beats = model.program_share(costs, 0.0, workers, 1)
            rate = max(0.0, share - beats) / costs.step
            turns.append(_time(model.turn_seconds(costs, rate, workers, 1)))
        rows.append((f"{workers:,}", *turns))
    yield from _table(head, rows)


def _servers(costs: Costs) -> Iterator[str]:
    head = ("a step reads and pushes", *[f"{n:,} servers" for n in SERVERS])
    rows = [
        (
            _bytes(size),
            *[_count(model.server_rate(costs, 100, n, size)) for n in SERVERS],
        )
        for size in SIZES
    ]
    yield from _table(head, rows)


def _beats(costs: Costs) -> Iterator[str]:
    head = ("workers", "program", "each server")
    rows = [
        (
            f"{n:,}",
            f"{model.program_share(costs, 0.0, n, 10):.1%}",
            f"{model.server_share(costs, 0.0, n, 10, 0):.1%}",
        )
        for n in WORKERS
    ]
    yield from _table(head, rows)


def _connections(costs: Costs) -> Iterator[str]:
    head = ("workers", "servers", "of the program", "of a server", "in all")
    head += ("memory of the program", "its descriptors")
    rows = []
    for workers, servers in (
        (10, 1),
        (100, 10),
        (1000, 10),
        (1000, 100),
        (10_000, 100),
    ):
        count = model.connections(workers, servers)
        memory = count["program"] * costs.connection_bytes
        files = count["program"] * costs.connection_files
        numbers = [count[name] for name in ("program", "server", "all")]
        said = [f"{number:,}" for number in (workers, servers, *numbers)]
        rows.append((*said, _bytes(memory), f"{files:,.0f}"))
    yield from _table(head, rows)


def _ledger(costs: Costs) -> str:
    held = 2**20 * costs.entry_bytes
    return (
        f"{_time(costs.entry)} per push, {costs.entry_bytes:.0f} bytes while its step "
        f"is above the mark:\n{_bytes(held)} for the 1,048,576 steps that a server "
        "remembers at most"
    )


def _used(costs: Costs, megabits: float, how: Exchange) -> float:
    link = Link(1e6 * megabits, ROUND_TRIP)
    return model.utilization(costs, link, MODEL_STEP, MODEL_BYTES, how)


def _links_used(costs: Costs) -> Iterator[str]:
    head = ("`every`, `fragments`, `overlap`", *[f"{n:,} Mbit/s" for n in MEGABITS])
    rows = [
        (_how(how), *[f"{_used(costs, n, how):.1%}" for n in MEGABITS])
        for how in EXCHANGES
    ]
    yield from _table(head, rows)


def _checked(costs: Costs, checked: Sequence[Checked]) -> Iterator[str]:
    head = ("link", "`every`, `fragments`, `overlap`", "computed", "measured")
    rows = []
    for case in checked:
        link = Link(1e6 * case.megabits, case.round_trip)
        used = model.utilization(costs, link, case.compute, case.nbytes, case.how)
        words = f"{case.megabits:g} Mbit/s, {_time(case.round_trip)}"
        rows.append((words, _how(case.how), f"{used:.2f}", f"{case.measured:.2f}"))
    yield from _table(head, rows)


def _how(how: Exchange) -> str:
    return f"{how.every}, {how.fragments}, {how.overlap}"


def _pictures(costs: Costs) -> dict[str, str]:
    many = [float(round(10 ** (1 + power / 10))) for power in range(31)]
    steps = [
        Curve(
            f"{_time(t)} a step",
            [
                (n, min(model.offered_rate(costs, t, int(n), 1), _limit(n)))
                for n in many
            ],
        )
        for t in COMPUTES
        for _limit in [_program_limit(costs)]
    ]
    packed = _program_limit(replace(costs, step=costs.packed))
    steps.append(Curve("limit, packed", [(n, packed(n)) for n in many], True))
    servers = [float(round(10 ** (power / 10))) for power in range(31)]
    rates = [
        Curve(
            _bytes(size),
            [(n, model.server_rate(costs, 100, int(n), size)) for n in servers],
        )
        for size in SIZES
    ]
    beats = [
        Curve(
            f"T = {period:g} s",
            [(n, model.program_share(costs, 0.0, n, 10, period)) for n in many],
        )
        for period in (0.1, 0.5, 2.0)
    ]
    connected = [
        Curve(
            f"{count:,} servers",
            [(n, model.connections(int(n), count)["all"]) for n in many],
        )
        for count in SERVERS
    ]
    speeds = [10 ** (1 + power / 20) for power in range(61)]
    used = [
        Curve(_how(how), [(n, _used(costs, n, how)) for n in speeds], how.overlap > 0)
        for how in EXCHANGES
    ]
    across = ("workers", 10.0, 1e4)
    return {
        "scale_program.svg": drawn(
            "one server: the program's loop", across, ("steps/s", 1e2, 1e6), steps
        ),
        "scale_servers.svg": drawn(
            "100 workers: servers", ("servers", 1.0, 1e3), ("steps/s", 1e1, 1e5), rates
        ),
        "scale_beats.svg": drawn(
            "beats on the program's loop", across, ("of a core", 1e-4, 1e1), beats
        ),
        "scale_links.svg": drawn(
            "100 million parameters, 1 s a step, 50 ms",
            ("Mbit/s", 10.0, 1e4),
            ("of the time", 1e-3, 1.0),
            used,
        ),
        "scale_connections.svg": drawn(
            "connections", across, ("in all", 1e1, 1e8), connected
        ),
    }


def _program_limit(costs: Costs) -> Callable[[float], float]:
    return lambda workers: max(1.0, model.program_rate(costs, int(workers), 1))


def _time(seconds: float) -> str:
    if seconds == float("inf"):
        return "full"
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e9:.3g} ns"


def _bytes(count: float) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:.0f} bytes"


def _count(value: float) -> str:
    """Two digits: more would be said than is known."""
    digits = 1 - len(str(int(value))) + 1
    return f"{round(value, min(0, digits)):,.0f}"


def _machine() -> str:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return (
        f"{os.cpu_count()} cores ({platform.machine()}), {memory:.0f} GiB, "
        f"Python {platform.python_version()}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale")
    parser.add_argument("folder", type=Path, help="of the page: docs")
    parser.add_argument("--workers", type=int, default=1000, help="to simulate")
    given = parser.parse_args()
    costs = measured()
    began, steps = time.process_time(), 3 * given.workers
    program = simulated(given.workers, steps)
    spent = time.process_time() - began
    largest = Largest(given.workers, steps, spent, program)
    checked = checked_points()
    for name, text in page(costs, largest, _machine(), checked).items():
        (given.folder / name).write_text(text, "utf-8")
        print(given.folder / name)


if __name__ == "__main__":
    main()

"""Combines the reports of the tasks of a run into its metrics.

Law of the file: plain data in, plain data out. Missing or malformed values of a task
become absent or zero in the result, and never raise an error: observing a run must not
stop it.

`over` combines several samples of a task, each of the seconds before it, because a
minute shows more than ten seconds, such as a dataset that stalls now and then. It adds
histograms, averages rates and shares, and takes the last value of gauges such as
memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from ._histogram import HistogramTable, Unit
from ._limits import slowest
from ._metrics import task_numbers
from ._throughput import PS_PHASES, WORKER_PHASES, Phase

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ._histogram import Plain


WORKER: Final = "worker"
PS: Final = "ps"

Window = tuple[str, str]
"""Key of a histogram: a task and one of its phases, or a task and a store to which it
pushes."""


@dataclass(frozen=True, slots=True)
class TaskReport:
    """The last report that the program or an observer has received from a task.

    ``values`` has the parts of `METRICS`, and ``phases``, ``staleness``, ``time``,
    ``stalls``, ``now``, ``transports``, ``program`` and ``log``. It is empty before the
    first report, and has only ``log`` for a lost task.
    """

    state: str
    address: str
    last_error: str = ""
    values: Mapping[str, Plain] = field(default_factory=dict)


def report(tasks: Mapping[str, TaskReport]) -> dict[str, Plain]:
    """Computes ``steps_per_s``, ``examples_per_s``, ``phases``, ``staleness``,
    ``tasks``, ``rounds``, ``largest_lead``, ``leases`` and ``slowest`` of
    `ClusterCoordinator.metrics`; the numbers of rounds and leases may be a second old.

    Args:
        tasks: The reports by task name, such as "worker:0".
    """
    # All tasks together: numpy takes a thousand histograms in the time of a few.
    phases = HistogramTable(_windows(tasks, "phases"))
    stale = HistogramTable(_windows(tasks, "staleness"), Unit.COUNTS)
    entries = {name: _task(name, task, phases, stale) for name, task in tasks.items()}
    workers = [name for name in tasks if _job(name) == WORKER]
    ages = stale.merged(
        (name, store)
        for name in workers
        for store in _part(tasks[name].values, "staleness")
    )
    programs = [_part(tasks[name].values, "program") for name in workers]
    program = _last_program(programs)
    metrics: dict[str, Plain] = {
        "steps_per_s": sum(entries[name]["steps_per_s"] for name in workers),
        # None rather than 0: steps that draw from no dataset have no examples.
        "examples_per_s": sum(entries[name]["examples_per_s"] or 0 for name in workers)
        or None,
        "queued_closures": _count(program.get("waiting")),
        "queue_full": bool(program.get("full")),
        "phases": {
            str(phase): phases.merged((name, phase) for name in workers).summary()
            for phase in WORKER_PHASES
        },
        "staleness": {**ages.summary(), "buckets": ages.buckets()},
        "tasks": entries,
        **_of_program(programs),
    }
    metrics["slowest"] = slowest(metrics)  # it looks at all that is above
    return metrics


def _task(
    name: str,
    task: TaskReport,
    phases: HistogramTable[Window],
    stale: HistogramTable[Window],
) -> dict[str, Plain]:
    values, job = task.values, _job(name)
    entry: dict[str, Plain] = {
        "state": task.state,
        "address": task.address,
        "last_error": task.last_error,
        "transports": _part(values, "transports"),
        "log": str(values.get("log") or ""),
        **task_numbers(job, values),
    }
    if job == WORKER:
        entry["examples_per_s"] = entry["examples_per_s"] or None
        entry |= {
            "phases": _summaries(name, WORKER_PHASES, phases),
            "time": _shaped(values.get("time"), _SHARES),
            "now": _shaped(now, _NOW) if (now := _part(values, "now")) else None,
            "staleness": {
                store: stale.summary((name, store))
                for store in _part(values, "staleness")
            },
            "slow_pulls": _shaped(values.get("stalls"), _SHARES),
        }
    if job == PS:
        busy = _number(_part(values, "time").get(Phase.APPLY))
        entry |= {**_summaries(name, PS_PHASES, phases), "busy": busy}
    return entry


def _last_program(programs: Iterable[dict[str, Plain]]) -> dict[str, Plain]:
    """Returns the newest information about the program: that in the report of the
    worker to which the program dispatched closures last."""
    known = [program for program in programs if program]
    return min(known, key=lambda program: _number(program.get("seconds")), default={})


def _of_program(programs: Iterable[Mapping[str, Plain]]) -> dict[str, Plain]:
    """Returns ``rounds``, ``largest_lead`` and ``leases``, from the newest metrics that
    the program has sent to a worker."""
    # Each worker has what the program sent to it last: only one of them is the newest.
    sent = [_part(program, "metrics") for program in programs]
    newest = max(sent, key=lambda metrics: _number(metrics.get("at")), default={})
    return {
        "rounds": _shaped(newest.get("rounds"), _ROUNDS),
        "largest_lead": _known_count(newest.get("largest_lead")),
        "leases": _shaped(newest.get("leases"), _LEASES),
    }


def _job(name: str) -> str:
    return name.partition(":")[0]


def _part(values: Mapping[str, Plain], name: str) -> dict[str, Plain]:
    # A task of another version may report something else there.
    part = values.get(name)
    return part if isinstance(part, dict) else {}


def _number(value: Plain) -> float:
    # NaN and infinity, too: the page is JSON, which has neither.
    is_finite = isinstance(value, int | float) and math.isfinite(value)
    return float(value) if is_finite else 0.0


def _count(value: Plain) -> int:
    return int(_number(value))


def _known_count(value: Plain) -> int | None:
    return None if value is None else _count(value)


_EACH: Final = ""
"""The key of a shape that has no names of its own: it is for each name in a report."""
_SHARES: Final = {_EACH: _number}
_NOW: Final = {"phase": str, "step": _count, "seconds": _number}
_WAITS: Final = {_EACH: {"rounds": _count, "seconds": _number}}
_ROUNDS: Final = {
    _EACH: {
        **dict.fromkeys(("workers", "backup", "waiting", "closed"), _count),
        "per_s": _number,
        "late": {_EACH: _count},
        "dropped": {_EACH: _count},
        "waited_for": _WAITS,
        "recent": {"rounds": _count, "seconds": _number, "waited_for": _WAITS},
    }
}
_LEASES: Final = {
    _EACH: dict.fromkeys(
        ("epoch", "epochs", "examples", "total", "open", "done", "skipped"),
        _known_count,
    )
}


def _shaped(value: Plain, shape: Any) -> Plain:
    """Converts a part of a report to a shape: a function, or shapes by name. What is
    missing or has another form is what the functions make of None."""
    if callable(shape):
        return shape(value)
    known = value if isinstance(value, dict) else {}
    if _EACH in shape:
        return {name: _shaped(each, shape[_EACH]) for name, each in known.items()}
    return {name: _shaped(known.get(name), inner) for name, inner in shape.items()}


def _windows(tasks: Mapping[str, TaskReport], part: str) -> dict[Window, Plain]:
    """Returns the histograms of recent values in a part of all reports, by task and
    phase or store."""
    return {
        (name, key): windowed["recent"]
        for name, task in tasks.items()
        for key, windowed in _part(task.values, part).items()
        if isinstance(windowed, dict) and "recent" in windowed
    }


def _summaries(
    name: str, phases: Iterable[Phase], windows: HistogramTable[Window]
) -> dict[str, dict[str, Plain]]:
    return {str(phase): windows.summary((name, phase)) for phase in phases}


_WINDOWED = {"phases": Unit.SECONDS, "staleness": Unit.COUNTS}
_AVERAGED = ("rates", "time", "stalls")


def over(samples: Sequence[TaskReport]) -> TaskReport:
    """Combines the samples of one task; its state is that of the last sample.

    Raises:
        ValueError: There is no sample.
    """
    if not samples:
        raise ValueError("samples=[]: expected one report or more")
    # The index stands for a task's name, by which `_windows` finds histograms.
    known = {str(n): sample for n, sample in enumerate(samples) if sample.values}
    last = samples[-1]
    if not known:
        return last
    reported = [sample.values for sample in known.values()]
    # The last sample, with all parts replaced that say more of several.
    combined: dict[str, Plain] = dict(reported[-1])
    for part, unit in _WINDOWED.items():
        table = HistogramTable(_windows(known, part), unit)
        combined[part] = {
            name: {"recent": table.merged((n, name) for n in known).plain()}
            for name in _names(reported, part)
        }
    for part in _AVERAGED:
        combined[part] = {
            name: sum(_number(_part(values, part).get(name)) for values in reported)
            / len(reported)
            for name in _names(reported, part)
        }
    return replace(last, values=combined)


def _names(reported: Iterable[Mapping[str, Plain]], part: str) -> list[str]:
    names = (name for values in reported for name in _part(values, part))
    return list(dict.fromkeys(names))

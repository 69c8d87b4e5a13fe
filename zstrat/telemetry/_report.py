"""What the tasks of a run tell of themselves, put together for whoever looks at it.

Law of the file: plain data in, plain data out. What a task has not told, or has told in
a form that nobody knows, is absent or zero, and never an error: who looks at a run must
not stop it.

Several looks, each of the seconds before it, become one (`over`): a minute tells more
than ten seconds do, of a dataset that stalls now and then, or a server that is slow
while another job runs. Histograms add up, rates and shares have a mean, and of what
there is a number for now, such as memory, the last one counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from ._histogram import HistogramTable, Unit
from ._limits import slowest
from ._metrics import task_numbers
from ._phases import PS_PHASES, WORKER_PHASES, Phase

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ._histogram import Plain


WORKER: Final = "worker"
PS: Final = "ps"

Window = tuple[str, str]
"""A task, and one of its phases, or a store that it pushes to."""


@dataclass(frozen=True, slots=True)
class TaskReport:
    """One task as the program, or an observer, knows it.

    ``values`` is what it reported last: the parts of `METRICS`, and ``phases``,
    ``staleness``, ``time``, ``stalls``, ``now``, ``transports``, ``program`` and
    ``log``; empty if nothing, and of a task that is lost its ``log`` alone.
    """

    state: str
    address: str
    last_error: str = ""
    values: Mapping[str, Plain] = field(default_factory=dict)


def report(tasks: Mapping[str, TaskReport]) -> dict[str, Plain]:
    """``steps_per_s``, ``examples_per_s``, ``phases``, ``staleness``, ``tasks`` and
    ``slowest``, as `ClusterCoordinator.metrics` has them.

    Args:
        tasks: By name: "worker:0", "ps:1".
    """
    phases = HistogramTable(_windows(tasks, "phases"))
    stale = HistogramTable(_windows(tasks, "staleness"), Unit.COUNTS)
    entries = {name: _task(name, task, phases, stale) for name, task in tasks.items()}
    workers = [name for name in tasks if _job(name) == WORKER]
    ages = stale.merged(
        (name, store)
        for name in workers
        for store in _part(tasks[name].values, "staleness")
    )
    program = _last_program(tasks[name].values for name in workers)
    made: dict[str, Plain] = {
        "steps_per_s": sum(entries[name]["steps_per_s"] for name in workers),
        "examples_per_s": sum(entries[name]["examples_per_s"] or 0 for name in workers)
        or None,
        "queued_closures": int(_number(program.get("waiting"))),
        "queue_full": bool(program.get("full")),
        "phases": {
            str(phase): phases.merged((name, phase) for name in workers).summary()
            for phase in WORKER_PHASES
        },
        "staleness": {**ages.summary(), "buckets": ages.buckets()},
        "tasks": entries,
    }
    made["slowest"] = slowest(made)
    return made


def _task(
    name: str,
    task: TaskReport,
    phases: HistogramTable[Window],
    stale: HistogramTable[Window],
) -> dict[str, Plain]:
    values, job = task.values, _job(name)
    made: dict[str, Plain] = {
        "state": task.state,
        "address": task.address,
        "last_error": task.last_error,
        "transports": _part(values, "transports"),
        "log": str(values.get("log") or ""),
        **task_numbers(job, values),
    }
    if job == WORKER:
        made["examples_per_s"] = made["examples_per_s"] or None
        made |= {
            "phases": _summaries(name, WORKER_PHASES, phases),
            "time": _shares(values, "time"),
            "now": _now(_part(values, "now")),
            "staleness": {
                store: stale.summary((name, store))
                for store in _part(values, "staleness")
            },
            "slow_pulls": _shares(values, "stalls"),
        }
    if job == PS:
        busy = _number(_part(values, "time").get(Phase.APPLY))
        made |= {**_summaries(name, PS_PHASES, phases), "busy": busy}
    return made


def _last_program(workers: Iterable[Mapping[str, Plain]]) -> dict[str, Plain]:
    """What the worker knows of the program that was handed closures last: what the
    others know is older."""
    known = [part for each in workers if (part := _part(each, "program"))]
    return min(known, key=lambda part: _number(part.get("seconds")), default={})


def _now(told: Mapping[str, Plain]) -> dict[str, Plain] | None:
    if not told:
        return None
    return {
        "phase": str(told.get("phase")),
        "step": int(_number(told.get("step"))),
        "seconds": _number(told.get("seconds")),
    }


def _job(name: str) -> str:
    return name.partition(":")[0]


def _part(told: Mapping[str, Plain], name: str) -> dict[str, Plain]:
    part = told.get(name)
    return part if isinstance(part, dict) else {}


def _number(value: Plain) -> float:
    known = isinstance(value, int | float) and math.isfinite(value)
    return float(value) if known else 0.0


def _shares(told: Mapping[str, Plain], name: str) -> dict[str, float]:
    return {what: _number(share) for what, share in _part(told, name).items()}


def _windows(tasks: Mapping[str, TaskReport], part: str) -> dict[Window, Plain]:
    """The windows of each `Windowed.plain` in that part of what the tasks told."""
    return {
        (name, key): windowed["recent"]
        for name, each in tasks.items()
        for key, windowed in _part(each.values, part).items()
        if isinstance(windowed, dict) and "recent" in windowed
    }


def _summaries(
    name: str, phases: Iterable[Phase], windows: HistogramTable[Window]
) -> dict[str, dict[str, Plain]]:
    return {str(phase): windows.summary((name, phase)) for phase in phases}


_WINDOWED = {"phases": Unit.SECONDS, "staleness": Unit.COUNTS}
_AVERAGED = ("rates", "time", "stalls")


def over(looks: Sequence[TaskReport]) -> TaskReport:
    """One task as all looks together have seen it; at the last one it is as it is.

    Raises:
        ValueError: There was no look.
    """
    if not looks:
        raise ValueError("no look at the task")
    known = {str(n): look for n, look in enumerate(looks) if look.values}
    last = looks[-1]
    if not known:
        return last
    told = [look.values for look in known.values()]
    made: dict[str, Plain] = dict(told[-1])
    for part, unit in _WINDOWED.items():
        table = HistogramTable(_windows(known, part), unit)
        made[part] = {
            name: {"recent": table.merged((n, name) for n in known).plain()}
            for name in _names(told, part)
        }
    for part in _AVERAGED:
        made[part] = {
            name: sum(_number(_part(each, part).get(name)) for each in told) / len(told)
            for name in _names(told, part)
        }
    return replace(last, values=made)


def _names(told: Iterable[Mapping[str, Plain]], part: str) -> list[str]:
    return list(dict.fromkeys(name for each in told for name in _part(each, part)))

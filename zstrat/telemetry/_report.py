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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from ._histogram import Histogram, HistogramTable, Unit, merged
from ._limits import slowest
from ._phases import PS_PHASES, WORKER_PHASES, Phase

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ._histogram import Plain


WORKER: Final = "worker"
PS: Final = "ps"

Window = tuple[str, str]
"""A task, and one of its phases, or a store that it pushes to."""


@dataclass(frozen=True, slots=True)
class TaskTold:
    """One task as the program, or an observer, knows it.

    ``told`` is what it has last said of itself: ``phases``, ``staleness``, ``rates``,
    ``time``, ``now``, ``lanes``, ``gauges`` and ``log``; empty if nothing, and of a
    task that is lost its ``log`` alone.
    """

    state: str
    address: str
    last_error: str = ""
    told: Mapping[str, Plain] = field(default_factory=dict)


def report(tasks: Mapping[str, TaskTold]) -> dict[str, Plain]:
    """``steps_per_s``, ``examples_per_s``, ``phases``, ``staleness``, ``tasks`` and
    ``slowest``, as `ClusterCoordinator.metrics` has them.

    Args:
        tasks: By name: "worker:0", "ps:1".
    """
    phases = HistogramTable(_windows(tasks, "phases"))
    stale = HistogramTable(_windows(tasks, "staleness"), Unit.COUNTS)
    workers = {n: each.told for n, each in tasks.items() if _job(n) == WORKER}
    ages = stale.merged(
        (name, store) for name in workers for store in _part(workers[name], "staleness")
    )
    examples = sum(_rate(told, "examples") for told in workers.values())
    program = _heard_last(workers.values())
    made: dict[str, Plain] = {
        "steps_per_s": sum(_rate(told, "steps") for told in workers.values()),
        "examples_per_s": examples or None,
        "queued_closures": int(_number(program.get("program_waiting"))),
        "queue_full": bool(program.get("program_full")),
        "phases": {
            str(phase): phases.merged((name, phase) for name in workers).summary()
            for phase in WORKER_PHASES
        },
        "staleness": {**ages.summary(), "buckets": ages.buckets()},
        "tasks": {n: _task(n, each, phases, stale) for n, each in tasks.items()},
    }
    made["slowest"] = slowest(made)
    return made


def _task(
    name: str,
    task: TaskTold,
    phases: HistogramTable[Window],
    stale: HistogramTable[Window],
) -> dict[str, Plain]:
    told, job = task.told, _job(name)
    gauges = _part(told, "gauges")
    made: dict[str, Plain] = {
        "state": task.state,
        "address": task.address,
        "last_error": task.last_error,
        "bytes_in_per_s": _rate(told, "bytes_in"),
        "bytes_out_per_s": _rate(told, "bytes_out"),
        "lanes": _part(told, "lanes"),
        "log": str(told.get("log") or ""),
        "memory": int(_number(gauges.get("memory"))),
        "cpu_seconds": _number(gauges.get("cpu_seconds")),
        "cores": _rate(told, "cpu"),
        "waiting": int(_number(gauges.get("waiting"))),
    }
    if job == WORKER:
        examples = _rate(told, "examples")
        made |= {
            "steps_per_s": _rate(told, "steps"),
            "examples_per_s": examples or None,
            "pulls_per_s": _rate(told, "pulls"),
            "pushes_per_s": _rate(told, "pushes"),
            "phases": _summaries(name, WORKER_PHASES, phases),
            "time": _shares(told, "time"),
            "now": _now(_part(told, "now")),
            "staleness": {
                store: stale.summary((name, store))
                for store in _part(told, "staleness")
            },
            "slow_pulls": _shares(told, "stalls"),
            "compilations": int(_number(gauges.get("compilations"))),
            "cached_programs": int(_number(gauges.get("cached_programs"))),
            "retries": int(_number(gauges.get("retries"))),
        }
    if job == PS:
        made |= {
            **_summaries(name, PS_PHASES, phases),
            "busy": _number(_part(told, "time").get("apply")),
            "pulls_per_s": _rate(told, "pulls"),
            "pushes_per_s": _rate(told, "pushes"),
        }
    return made


def _heard_last(workers: Iterable[Mapping[str, Plain]]) -> dict[str, Plain]:
    """The gauges of the worker that was handed closures last, of those that tell: what
    the others know of the program is older."""
    told = [_part(each, "gauges") for each in workers]
    known = [gauges for gauges in told if "program_heard" in gauges]
    return min(known, key=lambda each: _number(each["program_heard"]), default={})


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


def _rate(told: Mapping[str, Plain], name: str) -> float:
    return _number(_part(told, "rates").get(name))


def _windows(tasks: Mapping[str, TaskTold], part: str) -> dict[Window, Plain]:
    """The windows of each `Windowed.plain` in that part of what the tasks told."""
    return {
        (name, key): windowed["recent"]
        for name, each in tasks.items()
        for key, windowed in _part(each.told, part).items()
        if isinstance(windowed, dict) and "recent" in windowed
    }


def _summaries(
    name: str, phases: Iterable[Phase], windows: HistogramTable[Window]
) -> dict[str, dict[str, Plain]]:
    return {str(phase): windows.summary((name, phase)) for phase in phases}


_WINDOWED = {"phases": Unit.SECONDS, "staleness": Unit.COUNTS}
_AVERAGED = ("rates", "time", "stalls")


def over(looks: Sequence[TaskTold]) -> TaskTold:
    """One task as all looks together have seen it; at the last one it is as it is.

    Raises:
        ValueError: There was no look.
    """
    if not looks:
        raise ValueError("no look at the task")
    told = [look.told for look in looks if look.told]
    last = looks[-1]
    if not told:
        return last
    made: dict[str, Plain] = dict(told[-1])
    for part, unit in _WINDOWED.items():
        made[part] = {
            name: {"recent": merged(_recent(told, part, name, unit), unit).plain()}
            for name in _names(told, part)
        }
    for part in _AVERAGED:
        made[part] = {
            name: sum(_number(_part(each, part).get(name)) for each in told) / len(told)
            for name in _names(told, part)
        }
    return TaskTold(last.state, last.address, last.last_error, made)


def _names(told: Iterable[Mapping[str, Plain]], part: str) -> list[str]:
    return list(dict.fromkeys(name for each in told for name in _part(each, part)))


def _recent(
    told: Iterable[Mapping[str, Plain]], part: str, name: str, unit: Unit
) -> Iterable[Histogram]:
    for each in told:
        try:
            histogram = Histogram.from_plain(_part(each, part)[name]["recent"])
        except (KeyError, TypeError, ValueError):  # of another version, or none
            continue
        if histogram.unit is unit:
            yield histogram

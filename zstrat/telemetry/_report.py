"""What the tasks of a run tell of themselves, put together for whoever looks at it.

Law of the file: plain data in, plain data out. What a task has not told, or has told in
a form that nobody knows, is absent or zero, and never an error: who looks at a run must
not stop it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from ._histogram import Histogram, Unit, merged
from ._limits import slowest
from ._phases import PS_PHASES, WORKER_PHASES, Phase

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ._histogram import Plain

WORKER: Final = "worker"
PS: Final = "ps"


@dataclass(frozen=True, slots=True)
class TaskTold:
    """One task as the program, or an observer, knows it.

    ``told`` is what it has last said of itself: ``phases``, ``staleness``, ``rates``,
    ``time``, ``lanes`` and ``gauges``; empty if nothing, or nothing of late.
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
    workers = [each.told for name, each in tasks.items() if _job(name) == WORKER]
    stale = merged((each for told in workers for each in _staleness(told)), Unit.COUNTS)
    examples = sum(_rate(told, "examples") for told in workers)
    made: dict[str, Plain] = {
        "steps_per_s": sum(_rate(told, "steps") for told in workers),
        "examples_per_s": examples or None,
        "phases": {
            str(phase): merged(_of_phase(workers, phase)).summary()
            for phase in WORKER_PHASES
        },
        "staleness": {**stale.summary(), "buckets": stale.buckets()},
        "tasks": {name: _task(_job(name), each) for name, each in tasks.items()},
    }
    made["slowest"] = slowest(made)
    return made


def _task(job: str, task: TaskTold) -> dict[str, Plain]:
    told = task.told
    made: dict[str, Plain] = {
        "state": task.state,
        "address": task.address,
        "last_error": task.last_error,
        "bytes_in_per_s": _rate(told, "bytes_in"),
        "bytes_out_per_s": _rate(told, "bytes_out"),
        "lanes": _part(told, "lanes"),
        "memory": int(_number(_part(told, "gauges").get("memory"))),
        "waiting": int(_number(_part(told, "gauges").get("waiting"))),
    }
    if job == WORKER:
        gauges = _part(told, "gauges")
        examples = _rate(told, "examples")
        made |= {
            "steps_per_s": _rate(told, "steps"),
            "examples_per_s": examples or None,
            "pulls_per_s": _rate(told, "pulls"),
            "pushes_per_s": _rate(told, "pushes"),
            "phases": _summaries(told, WORKER_PHASES),
            "time": {
                name: _number(share) for name, share in _part(told, "time").items()
            },
            "staleness": {
                store: _recent(each, Unit.COUNTS).summary()
                for store, each in _part(told, "staleness").items()
            },
            "slow_pulls": {
                name: _number(share) for name, share in _part(told, "stalls").items()
            },
            "compilations": int(_number(gauges.get("compilations"))),
            "cached_programs": int(_number(gauges.get("cached_programs"))),
            "retries": int(_number(gauges.get("retries"))),
        }
    if job == PS:
        made |= {
            **_summaries(told, PS_PHASES),
            "busy": _number(_part(told, "time").get("apply")),
            "pulls_per_s": _rate(told, "pulls"),
            "pushes_per_s": _rate(told, "pushes"),
        }
    return made


def _job(name: str) -> str:
    return name.partition(":")[0]


def _part(told: Mapping[str, Plain], name: str) -> dict[str, Plain]:
    part = told.get(name)
    return part if isinstance(part, dict) else {}


def _number(value: Plain) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _rate(told: Mapping[str, Plain], name: str) -> float:
    return _number(_part(told, "rates").get(name))


def _recent(plain: Plain, unit: Unit) -> Histogram:
    """The window of a `Windowed.plain`; an empty one if it is none."""
    try:
        found = Histogram.from_plain(plain["recent"])
    except (KeyError, TypeError, ValueError):  # a task of another version, or nothing
        return Histogram(unit)
    return found if found.unit is unit else Histogram(unit)


def _staleness(told: Mapping[str, Plain]) -> Iterable[Histogram]:
    return [_recent(each, Unit.COUNTS) for each in _part(told, "staleness").values()]


def _of_phase(
    tasks: Iterable[Mapping[str, Plain]], phase: Phase
) -> Iterable[Histogram]:
    return [_recent(_part(told, "phases").get(phase), Unit.SECONDS) for told in tasks]


def _summaries(
    told: Mapping[str, Plain], phases: Iterable[Phase]
) -> dict[str, dict[str, Plain]]:
    return {
        str(phase): _recent(_part(told, "phases").get(phase), Unit.SECONDS).summary()
        for phase in phases
    }

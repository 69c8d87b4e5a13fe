"""Several looks at a run, each of the seconds before it, as one look at all of them.

A minute tells more than ten seconds do: a dataset that stalls now and then, a server
that is slow while another job runs. Histograms add up, rates and shares have a mean,
and of what there is a number for now, such as memory, the last one counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._histogram import Histogram, Unit, merged
from ._report import TaskTold

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ._histogram import Plain

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
            name: sum(_numbers(told, part, name)) / len(told)
            for name in _names(told, part)
        }
    return TaskTold(last.state, last.address, last.last_error, made)


def _names(told: Iterable[Mapping[str, Plain]], part: str) -> list[str]:
    return list(dict.fromkeys(name for each in told for name in _of(each, part)))


def _of(told: Mapping[str, Plain], part: str) -> Mapping[str, Plain]:
    found = told.get(part)
    return found if isinstance(found, dict) else {}


def _recent(
    told: Iterable[Mapping[str, Plain]], part: str, name: str, unit: Unit
) -> Iterable[Histogram]:
    for each in told:
        try:
            histogram = Histogram.from_plain(_of(each, part)[name]["recent"])
        except (KeyError, TypeError, ValueError):  # of another version, or none
            continue
        if histogram.unit is unit:
            yield histogram


def _numbers(
    told: Iterable[Mapping[str, Plain]], part: str, name: str
) -> Iterable[float]:
    for each in told:
        value = _of(each, part).get(name)
        yield float(value) if isinstance(value, int | float) else 0.0

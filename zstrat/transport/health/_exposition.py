"""The counts of a process as Prometheus reads them.

Law of the file: what is here is counts and sizes under the name of a task; names,
addresses and versions are in one metric, ``zstrat_task_info``, and what a program calls
its numbers in ``zstrat_scalar``; both are left out where other machines can ask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ._metrics import HISTOGRAMS, METRICS, WORKER_METRICS, Metric

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from zstrat.wire import PlainTree

EXTRA: Final = (
    "metrics are made by prometheus_client, which is not installed here: "
    "pip install 'zstrat[prometheus]'"
)

Told = tuple[str, "Mapping[str, PlainTree]"]
"""The name of a task, and its statistics."""


def number_at(values: Mapping[str, PlainTree], path: Sequence[str]) -> float | None:
    """The number at ``path``; None if there is none."""
    value: PlainTree = dict(values)
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return float(value) if isinstance(value, int | float) else None


def exposition(told: Iterable[Told], accept: str, *, names: bool) -> tuple[str, str]:
    """The text for Prometheus, and its content type.

    Args:
        accept: What the scraper says that it reads.
        names: Whether addresses and versions of tasks are told, too.

    Raises:
        ImportError: prometheus_client is not installed.
    """
    try:
        import prometheus_client as client
        from prometheus_client import exposition as formats
    except ImportError as error:
        raise ImportError(EXTRA) from error
    registry = client.CollectorRegistry()
    client.ProcessCollector(registry=registry)
    client.GCCollector(registry=registry)
    registry.register(_Collector(list(told), names))
    encode, kind = formats.choose_encoder(accept)
    return encode(registry).decode(), kind


class _Collector:
    """What prometheus_client asks for the metrics of one scrape."""

    def __init__(self, told: list[Told], names: bool) -> None:
        self._told, self._names = told, names

    def collect(self) -> Iterator[Any]:
        from prometheus_client import core

        families: dict[str, Any] = {}

        def add(metric: Metric, value: float | None, **labels: str) -> None:
            if value is None:
                return
            if metric.name not in families:
                made = (
                    core.CounterMetricFamily
                    if metric.is_counter
                    else core.GaugeMetricFamily
                )
                families[metric.name] = made(
                    metric.name, metric.words, labels=list(labels)
                )
            families[metric.name].add_metric(list(labels.values()), value)

        yield from self._histograms()
        yield self._lanes()
        for task, values in self._told:
            for metric in METRICS.get(task.partition(":")[0], ()):
                add(metric, number_at(values, metric.path), task=task)
            for worker, seen in _members(values):
                for metric in WORKER_METRICS:
                    add(metric, number_at(seen, metric.path), task=task, worker=worker)
        yield from families.values()
        if self._names:
            yield self._scalars()
            yield self._info()

    def _histograms(self) -> Iterator[Any]:
        from prometheus_client import core

        for metric in HISTOGRAMS:
            family = core.HistogramMetricFamily(
                metric.name, metric.words, labels=["task", metric.label]
            )
            for task, values in self._told:
                for name, windowed in _dict(values, metric.key).items():
                    whole = windowed.get("total") if isinstance(windowed, dict) else 0
                    if (found := metric.below(whole)) is not None:
                        family.add_metric([task, name], *found)
            if family.samples:
                yield family

    def _lanes(self) -> Any:
        from prometheus_client import core

        family = core.CounterMetricFamily(
            "zstrat_lane_bytes",
            "Of messages, by the way they take.",
            labels=["task", "lane", "direction"],
        )
        for task, values in self._told:
            for lane in (lanes := _dict(values, "lanes")):
                for direction, amount in _dict(lanes, lane).items():
                    if isinstance(amount, int | float):
                        family.add_metric([task, lane, direction], float(amount))
        return family

    def _scalars(self) -> Any:
        """The last points of what `log_scalar` was given."""
        from prometheus_client import core

        family = core.GaugeMetricFamily(
            "zstrat_scalar", "As zs.log_scalar was told last.", labels=["task", "name"]
        )
        for task, values in self._told:
            scalars = _dict(_dict(values, "coordinator"), "scalars")
            for name, points in scalars.items():
                last = points[-1] if isinstance(points, list) and points else None
                value = last[2] if isinstance(last, list) else None
                if isinstance(value, int | float):
                    family.add_metric([task, name], float(value))
        return family

    def _info(self) -> Any:
        from prometheus_client import core

        keys = ("address", "host", "incarnation", "pid")
        family = core.InfoMetricFamily(
            "zstrat_task", "Where a task is, and what it runs.", labels=["task"]
        )
        for task, values in self._told:
            about = values.get("task")
            if isinstance(about, dict):
                told = {key: str(about[key]) for key in keys if key in about}
                versions = about.get("versions")
                if isinstance(versions, dict):
                    told |= {name: str(each) for name, each in versions.items()}
                family.add_metric([task], told)
        return family


def _dict(values: Mapping[str, PlainTree], key: str) -> Mapping[str, PlainTree]:
    found = values.get(key)
    return found if isinstance(found, dict) else {}


def _members(
    values: Mapping[str, PlainTree],
) -> Iterator[tuple[str, dict[str, PlainTree]]]:
    """The workers of a program, "worker:0" and what it knows of it."""
    for name, seen in _dict(_dict(values, "coordinator"), "workers").items():
        if isinstance(seen, dict):
            index = name.rpartition(":")[2]
            yield f"worker:{index}", seen

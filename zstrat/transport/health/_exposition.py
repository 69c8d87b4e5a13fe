"""The numbers of a process as Prometheus reads them.

Law of the file: what is here is counts and sizes under the name of a task; names,
addresses and versions are in one metric, ``zstrat_task_info``, and what a program calls
its numbers in ``zstrat_scalar``; both are left out where other machines can ask, and an
optimizer is a number there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from zstrat.telemetry import EDGES, Histogram, Kind, Metric, Unit, metrics_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from zstrat.wire import PlainTree

EXTRA: Final = (
    "metrics are made by prometheus_client, which is not installed here: "
    "pip install 'zstrat[prometheus]'"
)

TaskStatistics = tuple[str, "Mapping[str, PlainTree]"]
"""The name of a task, and its statistics."""

_LABELS: Final = {"phases": "phase", "staleness": "store"}
"""The label by which the histograms of a metric differ."""
_EDGES: Final = {Unit.SECONDS: range(-17, 7), Unit.COUNTS: range(15)}
"""The ends of their buckets, as powers of two. Ours are four times as fine; each bucket
is a separate series there, and there is none for what hardly any step takes."""


def exposition(
    tasks: Iterable[TaskStatistics], accept: str, *, names: bool
) -> tuple[str, str]:
    """Returns the text for Prometheus, and its content type.

    Args:
        accept: What the scraper says that it reads.
        names: Whether to include addresses and versions of tasks.

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
    registry.register(_Collector(list(tasks), names))
    encode, kind = formats.choose_encoder(accept)
    return encode(registry).decode(), kind


class Sample(NamedTuple):
    """One value of a family: what ``add_metric`` of prometheus_client takes after the
    labels. ``kind`` None is an info. Its task is one more label, the first."""

    kind: Kind | None
    name: str
    words: str
    value: tuple[Any, ...]
    labels: Mapping[str, str]


class _Collector:
    """The collector that prometheus_client asks for the metrics of one scrape."""

    def __init__(self, tasks: list[TaskStatistics], names: bool) -> None:
        self._statistics, self._names = tasks, names

    def collect(self) -> Iterable[Any]:
        from prometheus_client import core

        made_by = {
            Kind.COUNTER: core.CounterMetricFamily,
            Kind.GAUGE: core.GaugeMetricFamily,
            Kind.HISTOGRAM: core.HistogramMetricFamily,
            None: core.InfoMetricFamily,
        }
        families: dict[str, Any] = {}
        for task, values in self._statistics:
            samples = [*_numbers(task, values, self._names), *_transports(values)]
            samples += [*_scalars(values), *_about(values)] if self._names else []
            for kind, name, words, value, labels in samples:
                if name not in families:
                    make, names = made_by[kind], ["task", *labels]
                    families[name] = make(name, words, labels=names)
                families[name].add_metric([task, *labels.values()], *value)
        return families.values()


def _numbers(
    task: str, values: Mapping[str, PlainTree], names: bool
) -> Iterator[Sample]:
    for metric in metrics_of(task.partition(":")[0]):
        if metric.kind is Kind.HISTOGRAM:
            yield from _histograms(metric, values)
        else:
            yield from _number(metric, values, {})
    for name, seen in _dict(_dict(values, "coordinator"), "workers").items():
        if isinstance(seen, dict):
            worker = {"worker": f"worker:{name.rpartition(':')[2]}"}
            for metric in metrics_of("member"):
                yield from _number(metric, seen, worker)
    yield from _rounds(_dict(_dict(values, "coordinator"), "rounds"), names)
    yield from _leases(_dict(_dict(values, "coordinator"), "leases"), names)


def _leases(datasets: dict[str, PlainTree], names: bool) -> Iterator[Sample]:
    for index, name in enumerate(datasets):
        leases = _dict(datasets, name)
        labels = {"dataset": name if names else str(index)}
        for metric in metrics_of("leases"):
            yield from _number(metric, leases, labels)
        for worker, held in _dict(leases, "workers").items():
            for metric in metrics_of("holder"):
                yield from _number(metric, {"held": held}, {**labels, "worker": worker})


def _rounds(optimizers: dict[str, PlainTree], names: bool) -> Iterator[Sample]:
    for index, name in enumerate(optimizers):
        rounds = _dict(optimizers, name)
        optimizer = {"optimizer": name if names else str(index)}
        for metric in metrics_of("rounds"):
            yield from _number(metric, rounds, optimizer)
        late, dropped = _dict(rounds, "late"), _dict(rounds, "dropped")
        waits = _dict(rounds, "waited_for")
        for worker in sorted({*late, *waits}):
            seen: dict[str, PlainTree] = {
                "late": late.get(worker, 0),
                "dropped": dropped.get(worker, 0),
                "rounds": 0,
                "seconds": 0.0,
                **_dict(waits, worker),
            }
            labels = {**optimizer, "worker": worker}
            for metric in metrics_of("contributor"):
                yield from _number(metric, seen, labels)


def _number(
    metric: Metric, values: Mapping[str, PlainTree], labels: Mapping[str, str]
) -> Iterator[Sample]:
    found = metric.find(values)
    if found is not None and metric.prometheus:
        yield Sample(metric.kind, metric.prometheus, metric.help, (found,), labels)


def _histograms(metric: Metric, values: Mapping[str, PlainTree]) -> Iterator[Sample]:
    """Yields for each histogram how many values are not above each edge, and their
    sum."""
    ends, whole = EDGES[metric.unit], 0 if metric.unit is Unit.SECONDS else 1
    for name, windowed in _dict(values, metric.name).items():
        try:
            found = Histogram.from_plain(windowed["total"])  # type: ignore[arg-type,call-overload,index]
        except (LookupError, TypeError, ValueError):  # of a task of another version
            continue
        if found.unit is not metric.unit:
            continue
        sums = found.counts.cumsum()
        # Counts are whole: not above 7 is what is below 8.
        below = [
            (str(2.0**power - whole), float(sums[ends.index(2.0**power)]))
            for power in _EDGES[metric.unit]
        ]
        value = [*below, ("+Inf", float(found.count))], found.total
        labels = {_LABELS[metric.name]: name}
        yield Sample(metric.kind, metric.prometheus, metric.help, value, labels)


def _transports(values: Mapping[str, PlainTree]) -> Iterator[Sample]:
    for transport in (transports := _dict(values, "transports")):
        for direction, amount in _dict(transports, transport).items():
            if isinstance(amount, int | float):
                labels = {"transport": transport, "direction": direction}
                words = "Of messages, by the way they take."
                value = (float(amount),)
                yield Sample(
                    Kind.COUNTER, "zstrat_transport_bytes", words, value, labels
                )


def _scalars(values: Mapping[str, PlainTree]) -> Iterator[Sample]:
    """Yields the last points of what `log_scalar` was given."""
    for name, points in _dict(_dict(values, "coordinator"), "scalars").items():
        last = points[-1] if isinstance(points, list) and points else None
        value = last[2] if isinstance(last, list) else None
        if isinstance(value, int | float):
            words, labels = "Last value of zs.log_scalar.", {"name": name}
            yield Sample(Kind.GAUGE, "zstrat_scalar", words, (float(value),), labels)


def _about(values: Mapping[str, PlainTree]) -> Iterator[Sample]:
    if task := _dict(values, "task"):
        keys = ("address", "host", "incarnation", "pid")
        labels = {key: task[key] for key in keys if key in task}
        labels |= _dict(task, "versions")
        value = ({name: str(each) for name, each in labels.items()},)
        words = "Where a task is, and what it runs."
        yield Sample(None, "zstrat_task", words, value, {})


def _dict(values: Mapping[str, PlainTree], key: str) -> dict[str, PlainTree]:
    found = values.get(key)
    return found if isinstance(found, dict) else {}

"""The counts of a process as Prometheus reads them.

Law of the file: what is here is counts and sizes under the name of a task; names,
addresses and versions are in one metric, ``zstrat_task_info``, and what a program calls
its numbers in ``zstrat_scalar``; both are left out where other machines can ask. The
names of `METRICS` and `HISTOGRAMS` are public: dashboards rely on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from zstrat.telemetry import EDGES, Histogram, Unit

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from zstrat.wire import PlainTree

EXTRA: Final = (
    "metrics are made by prometheus_client, which is not installed here: "
    "pip install 'zstrat[prometheus]'"
)

Told = tuple[str, "Mapping[str, PlainTree]"]
"""The name of a task, and its statistics."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One number of the statistics: where it is, and what Prometheus calls it.

    Counters only grow while the task lives; the word total ends their names.
    """

    path: tuple[str, ...]
    name: str
    words: str
    is_counter: bool = False


def _gauge(path: str, name: str, words: str) -> Metric:
    return Metric(tuple(path.split(".")), f"zstrat_{name}", words)


def _counter(path: str, name: str, words: str) -> Metric:
    return Metric(tuple(path.split(".")), f"zstrat_{name}", words, is_counter=True)


_OF_ALL: Final = (
    _gauge("task.uptime", "uptime_seconds", "Since the task began."),
    _gauge("task.memory_bytes", "memory_bytes", "Of its process, in RAM."),
    _counter("task.cpu_seconds", "cpu_seconds", "Of its process, all threads."),
    _gauge("endpoint.handlers", "requests_open", "Being answered."),
    _counter("endpoint.counts.greetings", "greetings", "Connections let in."),
    _counter("endpoint.counts.messages", "messages", "That came."),
    _counter("endpoint.counts.refused", "refused", "Connections refused."),
    _counter("endpoint.counts.impostors", "impostors", "Claimed to be a task."),
    _counter("endpoint.counts.newcomers", "newcomers", "Too many at a time."),
    _counter("endpoint.counts.probes", "probes", "Connected, and said nothing."),
    _gauge("endpoint.pool.leases", "pool_leases", "Arrays in pooled memory."),
    _gauge("endpoint.pool.idle_bytes", "pool_idle_bytes", "Pooled memory, unused."),
    _gauge("groups.generations", "collective_groups", "Groups it is a member of."),
)

_OF_A_PS: Final = (
    _gauge("service.owner_alive", "ps_owned", "1 while a program holds it."),
    _gauge("service.variables", "ps_variables", "Variables, or parts, it holds."),
    _gauge("service.bytes", "ps_value_bytes", "Their values."),
    _gauge("service.held_bytes", "ps_held_bytes", "With old versions still read."),
    _gauge("service.slot_bytes", "ps_slot_bytes", "What optimizers keep of them."),
    _gauge("service.optimizers", "ps_optimizers", "Optimizers."),
    _gauge("service.programs", "ps_programs", "Compiled updates."),
    _gauge("service.waiting", "ps_waiting", "Requests that wait for a variable."),
    _gauge("service.remembered_steps", "ps_remembered_steps", "To know duplicates."),
    _gauge("service.snapshots", "ps_snapshots", "Checkpoints being read."),
    _gauge("service.undo_bytes", "ps_undo_bytes", "Old rows kept for these."),
    _gauge("service.replication.view", "ps_view", "Grows as its copies change."),
    _gauge("service.replication.behind", "ps_backup_behind", "Changes it lacks."),
    _gauge("service.replication.log_bytes", "ps_log_bytes", "Of these changes."),
    _gauge("service.replication.unacknowledged", "ps_unacknowledged", "Updates."),
    _counter("service.pulls", "ps_pulls", "Requests for values."),
    _counter("service.reads", "ps_reads", "Values read."),
    _counter("service.unchanged", "ps_unchanged", "Of these, not sent again."),
    _counter("service.rows", "ps_rows", "Rows of tables read."),
    _counter("service.pushes", "ps_pushes", "Requests that update."),
    _counter("service.updates", "ps_updates", "Updates applied."),
    _counter("service.duplicates", "ps_duplicates", "Not applied a second time."),
    _counter("service.failed", "ps_failed", "Requests that failed."),
)

_OF_A_WORKER: Final = (
    _gauge("service.draining", "worker_draining", "1 while it ends."),
    _gauge("service.queued", "worker_queued", "Closures that wait."),
    _gauge("service.kept_results", "worker_kept_results", "Not fetched yet."),
    _gauge("service.kept_bytes", "worker_kept_bytes", "Of these results."),
    _gauge("service.devices", "worker_devices", "It computes on."),
    _gauge("service.functions", "worker_functions", "It was sent."),
    _gauge("service.layouts", "worker_layouts", "Arrangements of arguments."),
    _gauge("service.programs", "worker_programs", "Compiled steps."),
    _counter("service.done", "worker_done", "Closures done."),
    _counter("service.failed", "worker_failed", "Closures that raised."),
    _counter("service.cancelled", "worker_cancelled", "Closures cancelled."),
    _counter("service.duplicates", "worker_duplicates", "Not run a second time."),
    _counter("service.pushes", "worker_pushes", "Requests that update, to ps."),
    _counter("service.pulls", "worker_pulls", "Requests for values, to ps."),
    _counter("service.traces", "worker_traces", "Of step functions."),
    _counter("service.compilations", "worker_compilations", "By XLA."),
    _counter("service.compile_seconds", "worker_compile_seconds", "In XLA."),
)

_OF_A_PROGRAM: Final = (
    _gauge("coordinator.queued_closures", "queued_closures", "Not given out yet."),
    _gauge("coordinator.queue_full", "queue_full", "1: schedule() has to wait."),
    _gauge("coordinator.inflight_closures", "inflight_closures", "At workers."),
    _counter("coordinator.scheduled_closures", "scheduled_closures", "So far."),
    _gauge("coordinator.steps_per_s", "steps_per_second", "Of the last seconds."),
    _gauge("coordinator.examples_per_s", "examples_per_second", "Drawn, likewise."),
    _gauge("coordinator.seconds", "session_seconds", "Since the session began."),
    _counter("coordinator.fetches", "fetches", "Results brought."),
    _counter("coordinator.traces", "traces", "Of step functions."),
    _counter("coordinator.dispatches", "dispatches", "Messages to workers."),
    _counter("coordinator.turns", "dispatch_turns", "Turns of the loop."),
    _counter("coordinator.stale_completions", "stale_completions", "Came late."),
    _counter("coordinator.ps_restores", "ps_restores", "Servers filled again."),
    _counter("coordinator.steps_lost", "steps_lost", "With lost servers."),
    _counter("coordinator.failovers", "failovers", "Backups that took over."),
    _gauge("coordinator.stores_without_backup", "stores_without_backup", "Of ps."),
    _counter("coordinator.stores_moved", "stores_moved", "To other processes."),
    _counter("coordinator.workers_added", "workers_added", "Came while it ran."),
    _counter("coordinator.workers_moved", "workers_moved", "To other addresses."),
    _counter("coordinator.workers_removed", "workers_removed", "Went."),
    _counter("coordinator.resolver_questions", "resolver_questions", "Who is there."),
    _counter("coordinator.resolver_errors", "resolver_errors", "No answer to that."),
    _counter("coordinator.recoverable_worker_failures", "worker_losses", "Survived."),
)


@dataclass(frozen=True, slots=True)
class HistogramMetric:
    """Histograms of the statistics by what they are of: ``label`` is what Prometheus
    calls that, and ``edges`` are where its buckets end.

    Ours are four times as fine. Each bucket is a series of its own there, so these are
    a power of two wide, and none for what hardly any step takes.
    """

    key: str
    name: str
    words: str
    label: str
    edges: tuple[float, ...]
    unit: Unit

    def below(self, plain: PlainTree) -> tuple[list[tuple[str, float]], float] | None:
        """Pairs of an edge and how many values are not above it, and the sum of all;
        None if this is no histogram of the unit."""
        try:
            found = Histogram.from_plain(plain)  # type: ignore[arg-type]
        except ValueError:  # of a task of another version, or nothing
            return None
        if found.unit is not self.unit:
            return None
        sums, ends = found.counts.cumsum(), EDGES[self.unit]
        # Counts are whole: not above 7 is what is below 8.
        whole = 0 if self.unit is Unit.SECONDS else 1
        pairs = [
            (str(float(edge - whole)), float(sums[ends.index(edge)]))
            for edge in self.edges
        ]
        return [*pairs, ("+Inf", float(found.count))], found.total


HISTOGRAMS: Final = (
    HistogramMetric(
        "phases",
        "zstrat_phase_seconds",
        "Of steps on a worker, and of what a parameter server does with them.",
        "phase",
        tuple(2.0**power for power in range(-17, 7)),
        Unit.SECONDS,
    ),
    HistogramMetric(
        "staleness",
        "zstrat_staleness_versions",
        "Versions between the pull of a value and the push made with it.",
        "store",
        tuple(2.0**power for power in range(15)),
        Unit.COUNTS,
    ),
)
"""Histograms of workers and parameter servers, since their session began."""

METRICS: Final[Mapping[str, Sequence[Metric]]] = {
    "ps": (*_OF_ALL, *_OF_A_PS),
    "worker": (*_OF_ALL, *_OF_A_WORKER),
    "chief": _OF_A_PROGRAM,
    "program": _OF_A_PROGRAM,
}
"""The metrics of a task by its job. A program that shares the parameter servers of a
chief has none of the cluster's jobs, and is called "program"."""

_MEMBERS: Final = (
    _gauge("in_flight", "coordinator_worker_in_flight", "Closures there."),
    _counter("completed", "coordinator_worker_completed", "Closures it did."),
    _counter("losses", "coordinator_worker_losses", "How often it was lost."),
)
"""Metrics of one worker, as the program sees it."""


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
                for metric in _MEMBERS:
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

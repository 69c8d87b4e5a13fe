"""Which counts of a process Prometheus is shown, and what it calls them.

Law of the file: each text is read alone, as Prometheus shows it, and says of what it
is. The names of `METRICS` and `HISTOGRAMS` are public: dashboards rely on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from zstrat.telemetry import EDGES, Histogram, Unit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zstrat.wire import PlainTree


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
    _gauge("task.uptime", "uptime_seconds", "Seconds since the task began."),
    _gauge("task.memory_bytes", "memory_bytes", "Bytes of its process in RAM."),
    _counter(
        "task.cpu_seconds",
        "cpu_seconds",
        "Seconds that all threads of its process have run.",
    ),
    _gauge("endpoint.handlers", "requests_open", "Requests that are being answered."),
    _counter("endpoint.counts.greetings", "greetings", "Connections that were let in."),
    _counter("endpoint.counts.messages", "messages", "Messages that came."),
    _counter("endpoint.counts.refused", "refused", "Connections that were refused."),
    _counter(
        "endpoint.counts.impostors",
        "impostors",
        "Connections refused as they claimed to be another task.",
    ),
    _counter(
        "endpoint.counts.newcomers",
        "newcomers",
        "Connections refused as too many came at a time.",
    ),
    _counter("endpoint.counts.probes", "probes", "Connections that said nothing."),
    _gauge("endpoint.pool.leases", "pool_leases", "Arrays that lie in pooled memory."),
    _gauge(
        "endpoint.pool.idle_bytes",
        "pool_idle_bytes",
        "Bytes of pooled memory that nothing uses.",
    ),
    _gauge(
        "groups.generations",
        "collective_groups",
        "Groups that the task is a member of.",
    ),
)

_OF_A_PS: Final = (
    _gauge("service.owner_alive", "ps_owned", "1 while a program holds the server."),
    _gauge(
        "service.variables",
        "ps_variables",
        "Variables, and parts of variables, that it holds.",
    ),
    _gauge("service.bytes", "ps_value_bytes", "Bytes of the values of variables."),
    _gauge(
        "service.held_bytes",
        "ps_held_bytes",
        "Bytes of values, and of old versions still read.",
    ),
    _gauge(
        "service.slot_bytes",
        "ps_slot_bytes",
        "Bytes that optimizers keep beside the values.",
    ),
    _gauge("service.optimizers", "ps_optimizers", "Optimizers that move variables."),
    _gauge("service.programs", "ps_programs", "Compiled programs of updates."),
    _gauge("service.waiting", "ps_waiting", "Requests that wait for a variable."),
    _gauge(
        "service.remembered_steps",
        "ps_remembered_steps",
        "Steps remembered to know a push that comes twice.",
    ),
    _gauge(
        "service.snapshots",
        "ps_snapshots",
        "Snapshots that are being read for checkpoints.",
    ),
    _gauge(
        "service.undo_bytes", "ps_undo_bytes", "Bytes of old rows kept for snapshots."
    ),
    _gauge(
        "service.replication.view",
        "ps_view",
        "Number of the view, which grows as copies change.",
    ),
    _gauge(
        "service.replication.behind",
        "ps_backup_behind",
        "Changes that the backup has not got yet.",
    ),
    _gauge(
        "service.replication.log_bytes",
        "ps_log_bytes",
        "Bytes of changes that the backup has not got yet.",
    ),
    _gauge(
        "service.replication.unacknowledged",
        "ps_unacknowledged",
        "Updates that the backup has not acknowledged.",
    ),
    _counter("service.pulls", "ps_pulls", "Requests for values."),
    _counter("service.reads", "ps_reads", "Values that were read."),
    _counter(
        "service.unchanged", "ps_unchanged", "Values that the reader had already."
    ),
    _counter("service.rows", "ps_rows", "Rows of tables that were read."),
    _counter("service.pushes", "ps_pushes", "Requests that update."),
    _counter("service.updates", "ps_updates", "Updates that were applied."),
    _counter(
        "service.duplicates",
        "ps_duplicates",
        "Pushes that came twice, and were applied once.",
    ),
    _counter("service.failed", "ps_failed", "Requests that failed."),
)

_OF_A_WORKER: Final = (
    _gauge("service.draining", "worker_draining", "1 while the worker ends."),
    _gauge("service.queued", "worker_queued", "Closures that wait to run."),
    _gauge(
        "service.kept_results",
        "worker_kept_results",
        "Results that nobody has fetched.",
    ),
    _gauge(
        "service.kept_bytes",
        "worker_kept_bytes",
        "Bytes of results that nobody has fetched.",
    ),
    _gauge("service.devices", "worker_devices", "Devices that it computes on."),
    _gauge("service.functions", "worker_functions", "Functions that it was sent."),
    _gauge(
        "service.layouts", "worker_layouts", "Arrangements of arguments that it knows."
    ),
    _gauge("service.programs", "worker_programs", "Compiled programs of steps."),
    _counter("service.done", "worker_done", "Closures that ended well."),
    _counter("service.failed", "worker_failed", "Closures that raised."),
    _counter("service.cancelled", "worker_cancelled", "Closures that were cancelled."),
    _counter(
        "service.duplicates",
        "worker_duplicates",
        "Closures that came twice, and ran once.",
    ),
    _counter(
        "service.pushes", "worker_pushes", "Requests to parameter servers that update."
    ),
    _counter(
        "service.pulls", "worker_pulls", "Requests to parameter servers for values."
    ),
    _counter("service.traces", "worker_traces", "Traces of step functions."),
    _counter("service.compilations", "worker_compilations", "Compilations by XLA."),
    _counter(
        "service.compile_seconds",
        "worker_compile_seconds",
        "Seconds of compilations by XLA.",
    ),
)

_OF_A_PROGRAM: Final = (
    _gauge(
        "coordinator.queued_closures",
        "queued_closures",
        "Closures that no worker has been given.",
    ),
    _gauge("coordinator.queue_full", "queue_full", "1 while schedule() has to wait."),
    _gauge(
        "coordinator.inflight_closures",
        "inflight_closures",
        "Closures that workers have.",
    ),
    _counter(
        "coordinator.scheduled_closures",
        "scheduled_closures",
        "Closures scheduled so far.",
    ),
    _gauge(
        "coordinator.steps_per_s",
        "steps_per_second",
        "Steps a second, of the last seconds.",
    ),
    _gauge(
        "coordinator.examples_per_s",
        "examples_per_second",
        "Examples drawn a second, of the last seconds.",
    ),
    _gauge(
        "coordinator.seconds", "session_seconds", "Seconds since the session began."
    ),
    _counter("coordinator.fetches", "fetches", "Results that were brought."),
    _counter("coordinator.traces", "traces", "Traces of step functions."),
    _counter("coordinator.dispatches", "dispatches", "Messages to workers."),
    _counter(
        "coordinator.turns", "dispatch_turns", "Turns of the loop that dispatches."
    ),
    _counter(
        "coordinator.stale_completions",
        "stale_completions",
        "Completions of closures that were given up before.",
    ),
    _counter(
        "coordinator.ps_restores",
        "ps_restores",
        "Parameter servers filled again from a checkpoint.",
    ),
    _counter(
        "coordinator.steps_lost",
        "steps_lost",
        "Steps whose updates were lost with their server.",
    ),
    _counter(
        "coordinator.failovers",
        "failovers",
        "Backups that took the place of a primary.",
    ),
    _gauge(
        "coordinator.stores_without_backup",
        "stores_without_backup",
        "Stores of parameter servers that have no backup.",
    ),
    _counter(
        "coordinator.stores_moved",
        "stores_moved",
        "Stores that were moved to another process.",
    ),
    _counter(
        "coordinator.workers_added",
        "workers_added",
        "Workers that came while the program ran.",
    ),
    _counter(
        "coordinator.workers_moved",
        "workers_moved",
        "Workers that came back at another address.",
    ),
    _counter(
        "coordinator.workers_removed", "workers_removed", "Workers that were removed."
    ),
    _counter(
        "coordinator.resolver_questions",
        "resolver_questions",
        "How often the resolver was asked who is there.",
    ),
    _counter(
        "coordinator.resolver_errors",
        "resolver_errors",
        "How often the resolver had no answer.",
    ),
    _counter(
        "coordinator.recoverable_worker_failures",
        "worker_losses",
        "Losses of workers that the program survived.",
    ),
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
        "Seconds of the phases of a step on a worker, or of a request on a server.",
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

WORKER_METRICS: Final = (
    _gauge("in_flight", "coordinator_worker_in_flight", "Closures a worker has."),
    _counter("completed", "coordinator_worker_completed", "Closures a worker did."),
    _counter("losses", "coordinator_worker_losses", "How often a worker was lost."),
)
"""Metrics of one worker, as the program sees it."""

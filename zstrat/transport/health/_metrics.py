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
    is_counter: bool


def _metrics(where: str, table: str) -> tuple[Metric, ...]:
    """Metrics of one part of the statistics.

    Args:
        where: The path to that part.
        table: A line for each: where the number is in that part, what Prometheus calls
            it behind ``zstrat_``, and the words. A counter has a + before it.
    """
    found = []
    for line in table.strip().splitlines():
        place, name, words = line.split(maxsplit=2)
        path = f"{where}.{place.lstrip('+')}".strip(".").split(".")
        found.append(Metric(tuple(path), f"zstrat_{name}", words, place[0] == "+"))
    return tuple(found)


_OF_ALL: Final = _metrics(
    "",
    """
    task.uptime uptime_seconds Seconds since the task began.
    task.memory_bytes memory_bytes Bytes of its process in RAM.
    +task.cpu_seconds cpu_seconds Seconds that all threads of its process have run.
    endpoint.handlers requests_open Requests that are being answered.
    +endpoint.counts.greetings greetings Connections that were let in.
    +endpoint.counts.messages messages Messages that came.
    +endpoint.counts.refused refused Connections that were refused.
    +endpoint.counts.impostors impostors \
        Connections refused as they claimed to be another task.
    +endpoint.counts.newcomers newcomers Connections refused as too many came at a time.
    +endpoint.counts.probes probes Connections that said nothing.
    endpoint.pool.leases pool_leases Arrays that lie in pooled memory.
    endpoint.pool.idle_bytes pool_idle_bytes Bytes of pooled memory that nothing uses.
    groups.generations collective_groups Groups that the task is a member of.
    """,
)

_OF_A_PS: Final = _metrics(
    "service",
    """
    owner_alive ps_owned 1 while a program holds the server.
    variables ps_variables Variables, and parts of variables, that it holds.
    bytes ps_value_bytes Bytes of the values of variables.
    held_bytes ps_held_bytes Bytes of values, and of old versions still read.
    slot_bytes ps_slot_bytes Bytes that optimizers keep beside the values.
    optimizers ps_optimizers Optimizers that move variables.
    programs ps_programs Compiled programs of updates.
    waiting ps_waiting Requests that wait for a variable.
    remembered_steps ps_remembered_steps \
        Steps remembered to know a push that comes twice.
    snapshots ps_snapshots Snapshots that are being read for checkpoints.
    undo_bytes ps_undo_bytes Bytes of old rows kept for snapshots.
    replication.view ps_view Number of the view, which grows as copies change.
    replication.behind ps_backup_behind Changes that the backup has not got yet.
    replication.log_bytes ps_log_bytes Bytes of changes that the backup has not got yet.
    replication.unacknowledged ps_unacknowledged \
        Updates that the backup has not acknowledged.
    +pulls ps_pulls Requests for values.
    +reads ps_reads Values that were read.
    +unchanged ps_unchanged Values that the reader had already.
    +rows ps_rows Rows of tables that were read.
    +pushes ps_pushes Requests that update.
    +updates ps_updates Updates that were applied.
    +duplicates ps_duplicates Pushes that came twice, and were applied once.
    +failed ps_failed Requests that failed.
    """,
)

_OF_A_WORKER: Final = _metrics(
    "service",
    """
    draining worker_draining 1 while the worker ends.
    queued worker_queued Closures that wait to run.
    kept_results worker_kept_results Results that nobody has fetched.
    kept_bytes worker_kept_bytes Bytes of results that nobody has fetched.
    devices worker_devices Devices that it computes on.
    functions worker_functions Functions that it was sent.
    layouts worker_layouts Arrangements of arguments that it knows.
    programs worker_programs Compiled programs of steps.
    +done worker_done Closures that ended well.
    +failed worker_failed Closures that raised.
    +cancelled worker_cancelled Closures that were cancelled.
    +duplicates worker_duplicates Closures that came twice, and ran once.
    +pushes worker_pushes Requests to parameter servers that update.
    +pulls worker_pulls Requests to parameter servers for values.
    +traces worker_traces Traces of step functions.
    +compilations worker_compilations Compilations by XLA.
    +compile_seconds worker_compile_seconds Seconds of compilations by XLA.
    """,
)

_OF_A_PROGRAM: Final = _metrics(
    "coordinator",
    """
    queued_closures queued_closures Closures that no worker has been given.
    queue_full queue_full 1 while schedule() has to wait.
    inflight_closures inflight_closures Closures that workers have.
    +scheduled_closures scheduled_closures Closures scheduled so far.
    steps_per_s steps_per_second Steps a second, of the last seconds.
    examples_per_s examples_per_second Examples drawn a second, of the last seconds.
    seconds session_seconds Seconds since the session began.
    +fetches fetches Results that were brought.
    +traces traces Traces of step functions.
    +dispatches dispatches Messages to workers.
    +turns dispatch_turns Turns of the loop that dispatches.
    +stale_completions stale_completions \
        Completions of closures that were given up before.
    +ps_restores ps_restores Parameter servers filled again from a checkpoint.
    +steps_lost steps_lost Steps whose updates were lost with their server.
    +failovers failovers Backups that took the place of a primary.
    stores_without_backup stores_without_backup \
        Stores of parameter servers that are not known to have a backup now.
    +stores_moved stores_moved Stores that were moved to another process.
    +workers_added workers_added Workers that came while the program ran.
    +workers_moved workers_moved Workers that came back at another address.
    +workers_removed workers_removed Workers that were removed.
    +resolver_questions resolver_questions \
        How often the resolver was asked who is there.
    +resolver_errors resolver_errors How often the resolver had no answer.
    +recoverable_worker_failures worker_losses \
        Losses of workers that the program survived.
    """,
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

WORKER_METRICS: Final = _metrics(
    "",
    """
    in_flight coordinator_worker_in_flight Closures a worker has.
    +completed coordinator_worker_completed Closures a worker did.
    +losses coordinator_worker_losses How often a worker was lost.
    """,
)
"""Metrics of one worker, as the program sees it."""

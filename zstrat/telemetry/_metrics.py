"""The table of all metrics that a process reports: name, unit, kind and meaning.

A task reports each metric once, in one of the parts ``service``, ``process``,
``rates``, ``task``, ``endpoint`` and ``groups``; a program has ``coordinator``.
`METRICS` has the location of each metric and its Prometheus name. The metrics of
`COLUMNS` are also in ``tasks`` of `ClusterCoordinator.metrics`, under the same name;
those with a heading are columns of the page and of ``zstrat top``.

To add a metric, report it in a part, and add a line here. Everything that shows metrics
is made from these two tables; ``make metrics`` writes that of docs/observing.md.

Law of the file: a help text must be clear without its context, as in Prometheus. Names
are public: dashboards rely on them.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final

from ._histogram import Plain, Unit

if TYPE_CHECKING:
    from collections.abc import Mapping


class Kind(enum.Enum):
    """The kind of a metric."""

    GAUGE = enum.auto()
    COUNTER = enum.auto()
    """A number that only grows while the task runs. Its name in Prometheus ends in
    "total"."""
    HISTOGRAM = enum.auto()
    """Several `Windowed`, by phase or store."""
    RATE = enum.auto()
    """Recent growth per second (`zstrat.telemetry.Rate`)."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of a process.

    Args:
        name: Its key in `ClusterCoordinator.metrics`.
        unit: Its unit; of a rate, the unit per second.
        help: Its meaning.
        of: The jobs that report it. Other things that report have names like jobs:
            "program" is a program that shares the parameter servers of a chief,
            "member" a worker in the view of its program, "rounds" the rounds of an
            optimizer, "contributor" a worker that contributes to them, "leases" a
            leased dataset, "holder" a worker that has leased ranges of it.
        path: The keys that lead to the number in a report.
        prometheus: Its name in Prometheus; "" if it is not exported.
    """

    name: str
    unit: Unit
    kind: Kind
    help: str
    of: tuple[str, ...]
    path: tuple[str, ...]
    prometheus: str

    def find(self, values: Mapping[str, Plain]) -> float | None:
        """Finds the number of the metric in the report of a process; None if it is
        missing or not finite."""
        value: Plain = values
        for key in self.path:
            value = value.get(key) if isinstance(value, dict) else None
        # Observers take reports of any version: what is not a number is missing.
        known = isinstance(value, int | float) and math.isfinite(value)
        return value if known else None


def _read(table: str) -> tuple[Metric, ...]:
    """Parses a table of metrics that is written as text.

    Args:
        table: A line "[jobs] part" begins the metrics in one part of the report of
            these jobs. Each metric is a line of three columns. First its keys in the
            part, with + before them for a counter, * for histograms, and the unit after
            a colon unless it is counts. Then its Prometheus name without ``zstrat_``,
            or -. Then the help text.
    """
    found, jobs, part = [], "", ""
    for line in table.strip().splitlines():
        if line.startswith("["):
            jobs, _, part = line[1:].partition("]")
            continue
        # A table of text rather than 120 calls: a reader compares its columns.
        place, prometheus, words = line.split(maxsplit=2)
        kind = {"+": Kind.COUNTER, "*": Kind.HISTOGRAM}.get(place[0], Kind.GAUGE)
        place, _, unit = place.lstrip("+*").partition(":")
        path = *part.split(), *place.split(".")
        found.append(
            Metric(
                path[-1],
                Unit(unit or Unit.COUNTS),
                Kind.RATE if path[0] == "rates" else kind,
                words,
                tuple(jobs.split()),
                path,
                "" if prometheus == "-" else f"zstrat_{prometheus}",
            )
        )
    return tuple(found)


METRICS: Final = _read("""
[worker] rates
steps_per_s - Steps that ended per second.
examples_per_s - Elements that steps drew from datasets per second, or None.
[ps worker] rates
pulls_per_s - Requests for values per second.
pushes_per_s - Requests that update per second.
bytes_in_per_s:bytes - Bytes that its process received per second.
bytes_out_per_s:bytes - Bytes that its process sent per second.
cores:seconds - Seconds that its process ran per second: 1.5 is one core and a half.
[ps worker] process
memory:bytes memory_bytes Bytes of its process in RAM.
+cpu_seconds:seconds cpu_seconds Seconds that all threads of its process have run.
[ps worker]
*phases:seconds phase_seconds \
    Seconds of the phases of a step on a worker, or of a request on a server.
*staleness staleness_versions \
    Versions between the pull of a value and the push made with it.
task.uptime:seconds uptime_seconds Seconds since the task began.
endpoint.handlers requests_open Requests that are being answered.
+endpoint.counts.greetings greetings Connections that were let in.
+endpoint.counts.messages messages Messages that came.
+endpoint.counts.refused refused Connections that were refused.
+endpoint.counts.impostors impostors \
    Connections refused as they claimed to be another task.
+endpoint.counts.newcomers newcomers Connections refused as too many came at a time.
+endpoint.counts.probes probes Connections that said nothing.
endpoint.pool.leases pool_leases Arrays that are in pooled memory.
endpoint.pool.idle_bytes:bytes pool_idle_bytes Bytes of pooled memory that nothing uses.
groups.generations collective_groups Groups that the task is a member of.
[ps] service
owner_alive ps_owned 1 while a program holds the server.
variables ps_variables Variables, and parts of variables, that it holds.
bytes:bytes ps_value_bytes Bytes of the values of variables.
held_bytes:bytes ps_held_bytes Bytes of values, and of old versions still read.
slot_bytes:bytes ps_slot_bytes Bytes that optimizers keep beside the values.
optimizers ps_optimizers Optimizers that move variables.
programs ps_programs Compiled programs of updates.
waiting ps_waiting Requests that wait for a variable.
remembered_steps ps_remembered_steps Steps remembered to know a push that comes twice.
snapshots ps_snapshots Snapshots that are being read for checkpoints.
table_rows ps_table_rows Rows of tables of any id.
table_id_bytes:bytes ps_table_id_bytes Bytes of ids and indices of these tables.
table_waiting ps_table_waiting Ids that wait for admission to these tables.
undo_bytes:bytes ps_undo_bytes Bytes of old rows kept for snapshots.
contributions ps_contributions Contributions of steps that wait for their round.
contribution_bytes:bytes ps_contribution_bytes Bytes of these contributions.
replication.view ps_view Number of the view, which grows as copies change.
replication.behind ps_backup_behind Changes that the backup has not got yet.
replication.log_bytes:bytes ps_log_bytes \
    Bytes of changes that the backup has not got yet.
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
+table_births ps_table_births Rows of tables of any id that were created.
+table_removed ps_table_removed Rows of these tables that were removed or evicted.
+table_refused ps_table_refused Gradients dropped as their ids were not admitted.
[worker] service
draining worker_draining 1 while the worker ends.
waiting worker_queued Closures that wait to run.
kept_results worker_kept_results Results that nobody has fetched.
kept_bytes:bytes worker_kept_bytes Bytes of results that nobody has fetched.
devices worker_devices Devices that it computes on.
functions worker_functions Functions that it was sent.
layouts worker_layouts Arrangements of arguments that it knows.
cached_programs worker_programs Compiled programs of steps.
+done worker_done Closures that ended well.
+failed worker_failed Closures that raised.
+cancelled worker_cancelled Closures that were cancelled.
+duplicates worker_duplicates Closures that came twice, and ran once.
+pushes worker_pushes Requests to parameter servers that update.
+pulls worker_pulls Requests to parameter servers for values.
+traces worker_traces Traces of step functions.
+compilations worker_compilations Compilations by XLA.
+compile_seconds:seconds worker_compile_seconds Seconds of compilations by XLA.
+encoded_from:bytes worker_encoded_from_bytes Bytes of arrays that wire= encoded.
+encoded_to:bytes worker_encoded_to_bytes Bytes that were sent for these arrays.
residual_bytes:bytes worker_residual_bytes Bytes that error feedback has not sent.
+retries worker_retries Requests to parameter servers that were sent again.
[chief program] coordinator
queued_closures queued_closures Closures that no worker has been given.
queue_full queue_full 1 while schedule() has to wait.
inflight_closures inflight_closures Closures that workers have.
+scheduled_closures scheduled_closures Closures scheduled so far.
steps_per_s steps_per_second Steps a second, of the last seconds.
examples_per_s examples_per_second Examples drawn a second, of the last seconds.
seconds:seconds session_seconds Seconds since the session began.
+fetches fetches Results that were brought.
+traces traces Traces of step functions.
+dispatches dispatches Messages to workers.
+turns dispatch_turns Turns of the loop that dispatches.
+stale_completions stale_completions Completions of closures that were given up before.
+ps_restores ps_restores Parameter servers filled again from a checkpoint.
+steps_lost steps_lost Steps whose updates were lost with their server.
+failovers failovers Backups that took the place of a primary.
stores_without_backup stores_without_backup \
    Stores of parameter servers that are not known to have a backup now.
+stores_moved stores_moved Stores that were moved to another process.
+workers_added workers_added Workers that came while the program ran.
+workers_moved workers_moved Workers that came back at another address.
+workers_removed workers_removed Workers that were removed.
+resolver_questions resolver_questions How often the resolver was asked who is there.
+resolver_errors resolver_errors How often the resolver had no answer.
+recoverable_worker_failures worker_losses Losses of workers that the program survived.
largest_lead largest_lead \
    Largest lead of a worker over the slowest one in closures, with staleness=.
[rounds]
workers round_size Contributions that a round waits for.
backup round_backup Contributions that a round can do without.
waiting round_contributions_waiting Contributions that wait for the round to close.
per_s rounds_per_second Rounds closed a second, of the last seconds.
+closed rounds_closed Rounds closed so far.
[contributor]
+late round_contributions_late Contributions of a worker to rounds closed before.
+dropped round_contributions_dropped Those of them without effect.
+rounds round_waits Rounds that a worker was the last to contribute to.
+seconds:seconds round_waited_seconds Seconds that rounds waited for a worker alone.
[leases]
epoch lease_epoch The first epoch of a leased dataset that is not over.
total lease_examples Examples of a leased dataset in all its epochs.
done lease_examples_done Those of them that are applied.
skipped lease_examples_skipped Those of them that failed and are left out.
open leases_open Leases that steps have.
to_lease_again leases_returned Leases that came back, to be handed out again.
[holder]
held leases_held Leases that the steps of a worker have.
[member]
in_flight coordinator_worker_in_flight Closures a worker has.
+completed coordinator_worker_completed Closures a worker did.
+losses coordinator_worker_losses How often a worker was lost.
""")
"""All metrics of all jobs."""

COLUMNS: Final = {
    "steps_per_s": "Steps/s",
    "examples_per_s": "",
    "waiting": "Waiting",
    "pulls_per_s": "Pulls/s",
    "pushes_per_s": "Pushes/s",
    "bytes_in_per_s": "In",
    "bytes_out_per_s": "Out",
    "memory": "Memory",
    "cpu_seconds": "",
    "cores": "Processor",
    "compilations": "Compiled",
    "cached_programs": "",
    "encoded_from": "",
    "encoded_to": "",
    "retries": "",
}
"""For each metric of a task in `ClusterCoordinator.metrics` the heading of its column
on the web page; "": it has no column."""


# The tables never change, and these are asked for each task at each look.
@cache
def metrics_of(job: str) -> tuple[Metric, ...]:
    """Returns the metrics that a process of this job reports."""
    return tuple(metric for metric in METRICS if job in metric.of)


@cache
def task_metrics(job: str) -> tuple[Metric, ...]:
    """Returns the metrics of `COLUMNS` that a task of this job reports, in order."""
    known = {metric.name: metric for metric in metrics_of(job)}
    return tuple(known[name] for name in COLUMNS if name in known)


def task_numbers(job: str, values: Mapping[str, Plain]) -> dict[str, float]:
    """Returns the numbers of one task for `ClusterCoordinator.metrics` by name; 0 for
    missing ones."""
    return {metric.name: metric.find(values) or 0 for metric in task_metrics(job)}

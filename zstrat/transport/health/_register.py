"""Registers the owners of statistics in this process, collects their numbers, and
formats the numbers for Prometheus.

Tasks, sessions and programs that report statistics register here. Each owner runs on
the loop of its own thread. The HTTP server asks for the numbers from another thread, so
it can report a loop that is frozen. A loop is asked by a callback; at most one callback
per question is scheduled at a time, however many requests ask. Slow statistics are
computed on the asking thread if their owner allows that.

`TelemetryNotices` sends a task's statistics to its coordinator without being asked.

Law of the metrics for Prometheus: they are counts and sizes, labelled with the name of
a task. Names, addresses and versions are in one metric, ``zstrat_task_info``, and the
user's names of scalars in ``zstrat_scalar``. Where other machines can ask, both metrics
are left out, and an optimizer is a number.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from concurrent.futures import Future
from contextlib import suppress
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Generic,
    NamedTuple,
    Protocol,
    TypeVar,
    final,
)

from zstrat.errors import BusyError, PeerLostError
from zstrat.telemetry import (
    EDGES,
    RECENT,
    Histogram,
    Kind,
    Metric,
    Unit,
    log_file,
    metrics_of,
    resident_bytes,
)
from zstrat.transport._pump import moved_bytes, transports
from zstrat.wire import Telemetry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from zstrat.wire import Message, PlainTree


T = TypeVar("T")


class Reporting(Protocol):
    """An owner of statistics, to be registered. Its methods are called on its own loop,
    unless it was registered with ``anywhere``."""

    def readiness(self) -> str:
        """Returns why the owner is not ready; "" if it is ready."""
        ...

    def statistics(self) -> dict[str, PlainTree]:
        """Returns the statistics that `zstrat status --json` shows of the owner."""
        ...


class SharedAnswer(Generic[T]):
    """The answer of a loop to one question, shared by all callers that ask at the same
    time."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, answer: Callable[[], T]
    ) -> None:
        self._loop, self._answer = loop, answer
        self._coming: Future[T] | None = None

    async def ask(self, timeout: float) -> T:
        """Runs the question on the loop by a callback, and returns its answer.
        Concurrent callers share one callback.

        Raises:
            TimeoutError: The loop did not run the callback within ``timeout`` seconds.
            RuntimeError: The loop is closed.

        Cancellation: other callers still get their answer.
        """
        # One callback at a time: a frozen loop would collect one per scrape, and run
        # them all when it thaws.
        if self._coming is None or self._coming.done():
            coming: Future[T] = Future()
            self._loop.call_soon_threadsafe(self._fill, coming)
            self._coming = coming
        wait = asyncio.wrap_future(self._coming)
        async with asyncio.timeout(timeout):
            # Shielded: other callers wait for the same future.
            return await asyncio.shield(wait)

    def _fill(self, coming: Future[T]) -> None:
        try:
            coming.set_result(self._answer())
        except Exception as error:  # to the callers of `ask`
            coming.set_exception(error)


class RegisterEntry:
    """A registered owner of statistics, and how to ask it. Does not keep the owner
    alive."""

    def __init__(
        self,
        owner: Reporting,
        name: str,
        loop: asyncio.AbstractEventLoop,
        anywhere: bool,
    ) -> None:
        self.name, self.loop = name, loop
        # Weak: an owner that its user drops without closing has to be collected.
        self._owner = weakref.ref(owner)
        self._anywhere = anywhere
        self.readiness = SharedAnswer(loop, self._readiness)
        self._on_loop = SharedAnswer(loop, self._statistics)

    @property
    def is_over(self) -> bool:
        return self.loop.is_closed() or self._owner() is None

    def is_of(self, owner: Reporting) -> bool:
        return self._owner() is owner

    async def statistics(self, timeout: float) -> dict[str, PlainTree]:
        """Returns the statistics of the owner, whose loop must run.

        Raises:
            TimeoutError, RuntimeError: As `SharedAnswer.ask`.
        """
        if not self._anywhere:
            return await self._on_loop.ask(timeout)
        # Statistics that any thread computes say nothing about the loop: this asks
        # whether it runs.
        await self.readiness.ask(timeout)
        return self._statistics()

    def _readiness(self) -> str:
        owner = self._owner()
        return "it has ended" if owner is None else owner.readiness()

    def _statistics(self) -> dict[str, PlainTree]:
        owner = self._owner()
        return {} if owner is None else owner.statistics()


class Register:
    """All registered owners of statistics in this process. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: list[RegisterEntry] = []

    def add(
        self,
        owner: Reporting,
        name: str,
        loop: asyncio.AbstractEventLoop,
        *,
        anywhere: bool = False,
    ) -> None:
        """Registers an owner of statistics, which runs on ``loop``, under ``name``,
        such as "ps:0".

        Args:
            anywhere: Call the owner's ``statistics`` on the asking thread, after a
                callback on its loop has run: for slow statistics that any thread may
                compute.
        """
        entry = RegisterEntry(owner, name, loop, anywhere)
        # Ended owners are removed here, too, as each keeps its loop: in most processes
        # nobody ever asks, and each cell of a notebook may create a session.
        with self._lock:
            self._all = [each for each in self._all if not each.is_over]
            self._all.append(entry)

    def remove(self, owner: Reporting) -> None:
        """Unregisters an owner that has ended. Owners that are garbage-collected, or
        whose loop is closed, are removed automatically."""
        with self._lock:
            self._all = [each for each in self._all if not each.is_of(owner)]

    def present(self) -> list[RegisterEntry]:
        """Returns the entries of owners that still exist and whose loop is open."""
        with self._lock:
            self._all = [each for each in self._all if not each.is_over]
            return list(self._all)

    def forget(self) -> None:
        """Forgets all owners after a fork: their loops run in the parent."""
        self._lock, self._all = threading.Lock(), []


REGISTER: Final = Register()
os.register_at_fork(after_in_child=REGISTER.forget)


register = REGISTER.add
unregister = REGISTER.remove

EVERY: Final = 1.0


@final
class TelemetryNotices:
    """Sends telemetry (current numbers) of a task to one peer, about once a second
    while the numbers change. Belongs to one session, and runs on its loop.

    Pauses when nothing has happened for the seconds that rates are averaged over, so
    that all rates are zero, and no step runs. A peer that does not read misses notices.

    Args:
        values: Returns the present telemetry.
        notify: Sends a notice, or raises as `Link.notify` does.
    """

    def __init__(
        self,
        values: Callable[[], Mapping[str, PlainTree]],
        notify: Callable[[Message], None],
    ) -> None:
        self._values, self._notify = values, notify
        self._loop: Final = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._left = 0
        """Number of notices to send before the pause, if nothing happens."""
        self._is_closed = False

    def touch(self) -> None:
        """Notes that something has happened, which ends a pause."""
        # Rates are of the last `RECENT` seconds: after one notice more they are all
        # zero.
        self._left = RECENT + 1
        if self._timer is None and not self._is_closed:
            self._timer = self._loop.call_later(EVERY, self._send)

    def close(self) -> None:
        """Stops sending telemetry."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _send(self) -> None:
        self._timer = None
        values = dict(self._values())
        with suppress(BusyError, PeerLostError):  # the next notice replaces it
            self._notify(Telemetry(values))
        self._left = max(0, self._left - 1)
        if (self._left or _has_steps(values)) and not self._is_closed:
            self._timer = self._loop.call_later(EVERY, self._send)


def _has_steps(values: Mapping[str, PlainTree]) -> bool:
    """Returns whether the telemetry shows that steps run. Rates of bytes do not count,
    as notices send some bytes themselves."""
    rates = values.get("rates")
    counted = ("steps_per_s", "pulls_per_s", "pushes_per_s")
    has_steps = isinstance(rates, dict) and any(map(rates.get, counted))
    return has_steps or bool(values.get("now"))


def process_report() -> dict[str, PlainTree]:
    """Returns the report on this process: ``process``, ``transports`` and ``log``."""
    memory, seconds = resident_bytes(), time.process_time()
    return {
        "process": {"memory": memory, "cpu_seconds": seconds},
        "transports": {
            name: dict(transport) for name, transport in transports().items()
        },
        "log": log_file(),
    }


def process_totals() -> dict[str, float]:
    """Returns totals of this process, by the name of the rate that a task reports from
    each."""
    got, sent = moved_bytes()
    cores = time.process_time()
    return {"bytes_in_per_s": got, "bytes_out_per_s": sent, "cores": cores}


EXTRA: Final = (
    "metrics are made by prometheus_client, which is not installed here: "
    "pip install 'zstrat[prometheus]'"
)

TaskStatistics = tuple[str, "Mapping[str, PlainTree]"]
"""The name of a task, and the task's statistics."""

_LABELS: Final = {"phases": "phase", "staleness": "store"}
"""For each metric that has several histograms, the label by which they differ."""
_EDGES: Final = {Unit.SECONDS: range(-17, 7), Unit.COUNTS: range(15)}
"""For each unit, the upper ends of the buckets that Prometheus gets, as powers of two.
Our own buckets are four times as fine; each bucket is a separate series in Prometheus,
and there are no buckets for values that hardly any step has."""


def exposition(
    tasks: Iterable[TaskStatistics], accept: str, *, names: bool
) -> tuple[str, str]:
    """Returns the metrics of the tasks as text for Prometheus, and its content type.

    Args:
        accept: The ``Accept`` header of the scraper.
        names: Whether to include addresses and versions of tasks.

    Raises:
        ImportError: prometheus_client is not installed.
    """
    try:
        # Here: it is optional, and no process needs it before the first scrape.
        import prometheus_client as client
        from prometheus_client import exposition as formats
    except ImportError as error:
        raise ImportError(EXTRA) from error
    # Not the global one, which may have metrics of the user's program.
    registry = client.CollectorRegistry()
    client.ProcessCollector(registry=registry)
    client.GCCollector(registry=registry)
    registry.register(_Collector(list(tasks), names))
    encode, kind = formats.choose_encoder(accept)
    return encode(registry).decode(), kind


class Sample(NamedTuple):
    """One value of a metric family for Prometheus, with what ``add_metric`` of
    prometheus_client takes after the labels. ``kind`` None is an info metric. The
    task's name is one more label, the first."""

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
                    # prometheus_client wants all samples of a metric in one family,
                    # whatever task they are of.
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
        # By number where other machines may ask: names are the user's words.
        optimizer = {"optimizer": name if names else str(index)}
        for metric in metrics_of("rounds"):
            yield from _number(metric, rounds, optimizer)
        late, dropped = _dict(rounds, "late"), _dict(rounds, "dropped")
        waits = _dict(rounds, "waited_for")
        # A worker may have only waited-for rounds, or only late ones: each of its
        # samples is there all the same.
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
    value = metric.find(values)
    if value is not None and metric.prometheus:
        yield Sample(metric.kind, metric.prometheus, metric.help, (value,), labels)


def _histograms(metric: Metric, values: Mapping[str, PlainTree]) -> Iterator[Sample]:
    """Yields, for each histogram of a metric, the number of values up to each edge, and
    the sum of all values."""
    ends, whole = EDGES[metric.unit], 0 if metric.unit is Unit.SECONDS else 1
    for name, windowed in _dict(values, metric.name).items():
        try:
            histogram = Histogram.from_plain(windowed["total"])  # type: ignore[arg-type,call-overload,index]
        except (LookupError, TypeError, ValueError):  # of a task of another version
            continue
        if histogram.unit is not metric.unit:
            continue
        sums = histogram.counts.cumsum()
        # Counts are whole: not above 7 is what is below 8.
        below = [
            (str(2.0**power - whole), float(sums[ends.index(2.0**power)]))
            for power in _EDGES[metric.unit]
        ]
        buckets = [*below, ("+Inf", float(histogram.count))], histogram.total
        labels = {_LABELS[metric.name]: name}
        yield Sample(metric.kind, metric.prometheus, metric.help, buckets, labels)


def _transports(values: Mapping[str, PlainTree]) -> Iterator[Sample]:
    for transport in (transports := _dict(values, "transports")):
        for direction, amount in _dict(transports, transport).items():
            if isinstance(amount, int | float):
                labels = {"transport": transport, "direction": direction}
                words = "Bytes of messages, by transport and direction."
                value = (float(amount),)
                yield Sample(
                    Kind.COUNTER, "zstrat_transport_bytes", words, value, labels
                )


def _scalars(values: Mapping[str, PlainTree]) -> Iterator[Sample]:
    """Yields the last value of each name that `log_scalar` was given."""
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
    value = values.get(key)
    return value if isinstance(value, dict) else {}

"""Combines the records of all tasks of a run into a time line, and writes its file.

Times are converted to the clock of the program. For each step, arrows lead from the
call that scheduled it to its run, from the run to its push, and from the push to the
updates on each parameter server. A step that ran twice has two such chains.

A *row* belongs to a task and has consecutive spans; overlapping spans are divided among
several rows (`without_overlaps`). An arrow leads from one span to another. A curve is a
number that changes over time. All times of a `Timeline` are in seconds of one clock.

The file is JSON in the format of Chrome's traces, which Perfetto opens. The path is
checked before the measurement. The file is written under a temporary name and renamed
when it is complete, so that a full disk keeps the previous file.

The JSON is an array of events. A task is a process (``pid``), a row one of its threads
(``tid``); a span is an event ``X``, a curve is events ``C``, and an arrow is a pair of
``s`` and ``f``, each at the begin of its span and after it in the file. Times are in
microseconds since the earliest one, with a precision of a nanosecond.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import io
import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, TextIO, cast

from zstrat.paths import explained
from zstrat.telemetry._throughput import Phase

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from zstrat.telemetry._throughput import PhaseSpan, TrafficPoint

    from ._notes import ClockLine, JaxEvent, ProgramNotes, TaskNotes

    Event = dict[str, Any]


PictureValue = str | int | float


# Compared by identity: arrows refer to one span, and others may have the same times.
@dataclass(frozen=True, slots=True, eq=False)
class TimelineSpan:
    """A named interval. Viewers show ``details`` when the span is selected."""

    name: str
    began: float
    ended: float
    details: Mapping[str, PictureValue] = field(default_factory=dict)


@dataclass(slots=True)
class TimelineRow:
    """Spans of a task that do not overlap, in their order."""

    name: str
    spans: list[TimelineSpan] = field(default_factory=list)


@dataclass(slots=True)
class TimelineCurve:
    """Values of a number and the times from which they hold. ``unit``: "bytes" or
    "count"."""

    name: str
    unit: str
    points: list[tuple[float, float]] = field(default_factory=list)


@dataclass(slots=True)
class TimelineTask:
    """The spans and curves of one process. ``label``: remarks, such as the error of its
    clock."""

    name: str
    label: str = ""
    rows: list[TimelineRow] = field(default_factory=list)
    curves: list[TimelineCurve] = field(default_factory=list)


@dataclass(slots=True)
class Timeline:
    """A whole time line. ``about``: information about the file and missing records."""

    tasks: list[TimelineTask] = field(default_factory=list)
    arrows: list[tuple[TimelineSpan, TimelineSpan]] = field(default_factory=list)
    about: dict[str, PictureValue] = field(default_factory=dict)


def earliest(timeline: Timeline) -> float:
    """Returns the earliest time of a time line, which is time 0 of the file; 0 if it is
    empty."""
    begins = [
        span.began for task in timeline.tasks for row in task.rows for span in row.spans
    ]
    points = [
        at for task in timeline.tasks for curve in task.curves for at, _ in curve.points
    ]
    return min((*begins, *points), default=0.0)


def placed(row: TimelineRow, start: float) -> Iterator[tuple[TimelineSpan, int, int]]:
    """Yields the spans of a row with begin and end in nanoseconds since ``start``.
    Adjusts these so that no span is empty, as arrows need a span, and no span overlaps
    the previous one."""
    end = 0
    for span in row.spans:
        begin = max(round((span.began - start) * 1e9), end)
        end = max(round((span.ended - start) * 1e9), begin + 1)
        yield span, begin, end


ROWS: Final = 8
"""Most rows of one kind and task. Eight of a thousand waiting closures of a worker are
enough to see, and a curve shows their number."""


def without_overlaps(
    name: str, spans: Iterable[TimelineSpan], limit: int = ROWS
) -> tuple[list[TimelineRow], list[TimelineSpan]]:
    """Divides the spans among as few rows as possible, filling the first rows first.

    Viewers draw the spans of one row as a stack of calls: a span that begins within
    another one and ends after it would be drawn wrongly, or not at all.

    Returns:
        The rows, and the spans that did not fit into ``limit`` rows.
    """
    rows: list[TimelineRow] = []
    left: list[TimelineSpan] = []
    for span in sorted(spans, key=lambda span: (span.began, span.ended)):
        # The first row with room: spans are sorted by their begin, so rows are few.
        row = next((row for row in rows if row.spans[-1].ended <= span.began), None)
        if row is None and len(rows) < limit:
            row = TimelineRow(f"{name} {len(rows) + 1}" if rows else name)
            rows.append(row)
        if row is None:
            left.append(span)
        else:
            row.spans.append(span)
    return rows, left


_SCHEDULE: Final = "schedule"
_BEFORE: Final[Mapping[str, str]] = {
    Phase.COMPUTE: _SCHEDULE,
    Phase.PUSH: Phase.COMPUTE,
    Phase.APPLY: Phase.PUSH,
}
"""For each kind of span the kind from which an arrow leads to it."""


def assemble(
    notes: ProgramNotes,
    tasks: Iterable[TaskNotes],
    ended: float,
    about: Mapping[str, PictureValue],
) -> Timeline:
    """Creates the time line from the begin of the ``notes`` until ``ended``. Drops
    spans that are outside by more than the error of their clock; keeps spans that
    overlap an end as a whole.

    Args:
        about: Information for the file, in addition to clocks and missing records.
    """
    assembly = _Assembly(notes.began, ended, dict(about))
    shown = [assembly.program(notes), *[assembly.task(task) for task in tasks]]
    return Timeline(shown, list(assembly.arrows()), assembly.about)


@dataclass(slots=True)
class _Assembly:
    began: float
    ended: float
    about: dict[str, PictureValue]
    drawn: dict[tuple[str, int], list[TimelineSpan]] = field(default_factory=dict)
    """The spans by kind and step number."""

    def arrows(self) -> Iterable[tuple[TimelineSpan, TimelineSpan]]:
        for (kind, step), heads in self.drawn.items():
            for tail in self.drawn.get((_BEFORE.get(kind, ""), step), ()):
                yield from ((tail, head) for head in heads)

    def program(self, notes: ProgramNotes) -> TimelineTask:
        task = TimelineTask("program", "", curves=_queue(notes))
        self._draw(
            task,
            {
                _SCHEDULE: [
                    TimelineSpan(_SCHEDULE, began, ended, {"step": step})
                    for step, began, ended in notes.scheduled
                ],
                "dispatch": [
                    TimelineSpan(f"to {worker}", began, ended, {"closures": closures})
                    for worker, closures, began, ended in notes.dispatched
                ],
                "fetch": [TimelineSpan("fetch", *times) for times in notes.fetched],
            },
        )
        if notes.is_full:
            self.about["program: cut"] = "there was no room to note all that it did"
        return task

    def task(self, notes: TaskNotes) -> TimelineTask:
        clock = "" if notes.clock is None else _clock_words(notes.clock)
        cut = "it has noted more: its last spans are here" if notes.is_cut else ""
        for what, words in (
            ("clock", clock),
            ("missing", notes.problem),
            ("cut", cut),
            ("jax profile", notes.profile),
            ("jax events", "" if notes.jax is None else notes.jax.words),
        ):
            if words:
                self.about[f"{notes.name}: {what}"] = words
        task = TimelineTask(notes.name, f"clock {clock}" if clock else "")
        if notes.clock is not None:
            self._draw(task, self._placed(notes.spans, notes.clock))
            if notes.jax is not None:
                self._draw(task, self._computed(notes.jax.events, notes.clock))
            task.curves = self._traffic(notes.traffic, notes.clock)
        return task

    def _placed(
        self, spans: Iterable[PhaseSpan], clock: ClockLine
    ) -> dict[str, list[TimelineSpan]]:
        """Converts the spans within the time line, by phase, in the order of phases."""
        kinds: dict[str, list[TimelineSpan]] = {phase: [] for phase in Phase}
        for step, phase, start, end in spans:
            began, ended = clock.ours(start), clock.ours(end)
            if self._may_meet(began, ended, clock):
                details: dict[str, PictureValue] = {"step": step} if step >= 0 else {}
                kinds[phase].append(TimelineSpan(phase, began, ended, details))
        return kinds

    def _computed(
        self, events: Iterable[JaxEvent], clock: ClockLine
    ) -> dict[str, list[TimelineSpan]]:
        """Converts the events that jax recorded to spans, by thread or device. Nested
        events are in separate rows."""
        kinds: dict[str, list[TimelineSpan]] = {}
        for row, name, start, end in events:
            began, ended = clock.ours(start), clock.ours(end)
            if self._may_meet(began, ended, clock):
                span = TimelineSpan(name, began, ended)
                kinds.setdefault(f"jax {row}", []).append(span)
        return kinds

    def _may_meet(self, began: float, ended: float, clock: ClockLine) -> bool:
        """Returns whether an interval may overlap the time line, given the error of its
        clock."""
        return ended >= self.began - clock.error and began <= self.ended + clock.error

    def _traffic(
        self, points: Sequence[TrafficPoint], clock: ClockLine
    ) -> list[TimelineCurve]:
        """Makes the curves of received and sent bytes of all connections."""
        got = TimelineCurve("received", "bytes")
        sent = TimelineCurve("sent", "bytes")
        for at, total_got, total_sent in sorted(points):
            moment = clock.ours(at)
            if self.began <= moment <= self.ended:
                # From the begin on: what came before the time line would hide it.
                got.points.append((moment, total_got - points[0].got))
                sent.points.append((moment, total_sent - points[0].sent))
        return [got, sent]

    def _draw(
        self, task: TimelineTask, kinds: Mapping[str, Iterable[TimelineSpan]]
    ) -> None:
        for kind, spans in kinds.items():
            rows, left = without_overlaps(kind, spans)
            task.rows += rows
            # Dropped with a word in the file: a viewer with a thousand rows shows less.
            if left:
                words = f"{len(left)} of {kind}, as they overlap {ROWS} others"
                self.about[f"{task.name}: {kind} not drawn"] = words
            for row in rows:
                for span in row.spans:
                    key = kind, int(span.details.get("step", -1))
                    if key[1] >= 0:
                        self.drawn.setdefault(key, []).append(span)


def _queue(notes: ProgramNotes) -> list[TimelineCurve]:
    """Makes two curves: the numbers of closures queued in the program, and at
    workers."""
    # The program notes events, not numbers: a queue's length is the sum of its changes.
    changes = [(ended, 1, 0) for _, _, ended in notes.scheduled]
    changes += [(at, -count, count) for _, count, _, at in notes.dispatched]
    changes += [(at, 0, -count) for count, at in notes.ended]
    waits = TimelineCurve("closures that wait", "count", [(notes.began, notes.waiting)])
    runs = TimelineCurve("closures at workers", "count", [(notes.began, notes.running)])
    for at, waiting, running in sorted(changes):
        for curve, change in ((waits, waiting), (runs, running)):
            if change:
                # Dispatched closures may return to the queue or be cancelled.
                curve.points.append((at, max(0.0, curve.points[-1][1] + change)))
    return [waits, runs]


def _clock_words(clock: ClockLine) -> str:
    return (
        f"offset {clock.first.offset * 1e3:+.3f} ms to the program's, "
        f"error at most {clock.error * 1e3:.3f} ms"
    )


SUFFIXES: Final = (".json", ".json.gz")


def check_place(path: str | os.PathLike[str]) -> Path:
    """Checks that a time line can be written to ``path``, and creates its folder if
    necessary. Returns the absolute path.

    Raises:
        ValueError: The name has an unsupported suffix.
        OSError: The file cannot be created.
    """
    full = Path(path).absolute()
    if not full.name.endswith(SUFFIXES):
        raise ValueError(
            f"file of the time line: expected a name *{' or *'.join(SUFFIXES)}, got "
            f"{os.fspath(path)!r}"
        )
    with explained("the time line", full):
        if full.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        full.parent.mkdir(parents=True, exist_ok=True)
        # Tried, not asked: rights, quotas and read-only mounts say no in many ways.
        with tempfile.TemporaryFile(dir=full.parent):
            pass
    return full


def write_timeline(timeline: Timeline, path: Path) -> int:
    """Writes the file, compressed if its name ends in .gz; returns its size in bytes.

    Raises:
        OSError: The file cannot be written; a previous file is kept.
    """
    # In the same folder: a rename to another file system would be a copy.
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            _write(timeline, file, packs=path.name.endswith(".gz"))
        os.replace(part, path)
    except BaseException:  # to the caller
        part.unlink(missing_ok=True)
        raise
    return path.stat().st_size


def _write(timeline: Timeline, file: BinaryIO, *, packs: bool) -> None:
    packed = gzip.GzipFile(fileobj=file, mode="wb") if packs else None
    with packed or contextlib.nullcontext(file) as raw:
        text = io.TextIOWrapper(cast("BinaryIO", raw), "utf-8", write_through=True)
        _write_json(timeline, text)
        # Else its end would close the file before the end of the compressed data.
        text.detach()


CATEGORY: Final = "zstrat"


def _write_json(timeline: Timeline, file: TextIO) -> None:
    about = json.dumps(timeline.about)
    file.write(f'{{"displayTimeUnit": "ms", "otherData": {about}, "traceEvents": [')
    between = "\n"
    # Event by event: a long run has millions, and one text of all would double them.
    for event in _events(timeline):
        file.write(between + json.dumps(event))
        between = ",\n"
    file.write("\n]}\n")


def _events(timeline: Timeline) -> Iterator[Event]:
    start = earliest(timeline)
    arrows = _tips_of_arrows(timeline)
    yield {
        "ph": "i",
        "s": "g",
        "pid": 1,
        "tid": 0,
        "ts": 0,
        "name": "about this file",
        "cat": CATEGORY,
        "args": timeline.about,
    }
    for pid, task in enumerate(timeline.tasks, 1):
        yield from _of_task(pid, task, start, arrows)


def _of_task(
    pid: int, task: TimelineTask, start: float, arrows: dict[int, list[Event]]
) -> Iterator[Event]:
    yield _meta(pid, 0, "process_name", {"name": task.name})
    yield _meta(pid, 0, "process_labels", {"labels": task.label})
    yield _meta(pid, 0, "process_sort_index", {"sort_index": pid})
    for tid, row in enumerate(task.rows, 1):
        yield _meta(pid, tid, "thread_name", {"name": row.name})
        yield _meta(pid, tid, "thread_sort_index", {"sort_index": tid})
        for span, begin, end in placed(row, start):
            place = {"pid": pid, "tid": tid, "ts": begin / 1e3}
            took = {"dur": (end - begin) / 1e3, "args": dict(span.details)}
            yield {"ph": "X", "name": span.name, "cat": CATEGORY, **took, **place}
            # After their span in the file, at its time: a viewer binds them to it so.
            for tip in arrows.get(id(span), ()):
                yield {**tip, **place}
    for curve in task.curves:
        yield from _counts(pid, curve, start)


def _counts(pid: int, curve: TimelineCurve, start: float) -> Iterator[Event]:
    for at, value in curve.points:
        yield {
            "ph": "C",
            "pid": pid,
            "tid": 0,
            "ts": round((at - start) * 1e9) / 1e3,
            "name": curve.name,
            "args": {curve.unit: value},
        }


def _meta(pid: int, tid: int, name: str, args: dict[str, Any]) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "name": name, "args": args}


def _tips_of_arrows(timeline: Timeline) -> dict[int, list[Event]]:
    """Returns the arrow events that follow each span, by the identity of the span."""
    tips: dict[int, list[Event]] = {}

    def add(span: TimelineSpan, event: Event) -> None:
        common = {"name": "step", "cat": CATEGORY}
        tips.setdefault(id(span), []).append({**event, **common})

    for number, (tail, head) in enumerate(timeline.arrows, 1):
        add(tail, {"ph": "s", "id": number})
        add(head, {"ph": "f", "bp": "e", "id": number})
    return tips

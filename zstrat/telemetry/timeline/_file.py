"""Writes a time line as JSON in the format of Chrome's traces, which Perfetto opens.

The path is checked before the measurement. The file is written under a temporary name
and renamed when it is complete, so that a full disk keeps the previous file.

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
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, TextIO, cast

from zstrat.paths import explained

from ._assembly import earliest, placed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ._assembly import Timeline, TimelineCurve, TimelineSpan, TimelineTask

    Event = dict[str, Any]


SUFFIXES: Final = (".json", ".json.gz")


def check_place(path: str | os.PathLike[str]) -> Path:
    """Returns the absolute path of the file, and creates its folder if necessary.

    Raises:
        ValueError: The name has another suffix.
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
        with tempfile.TemporaryFile(dir=full.parent):
            pass
    return full


def write_timeline(timeline: Timeline, path: Path) -> int:
    """Writes the file, compressed if its name ends in .gz; returns its size in bytes.

    Raises:
        OSError: The file cannot be written; a previous file is kept.
    """
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
        text.detach()


CATEGORY: Final = "zstrat"


def _write_json(timeline: Timeline, file: TextIO) -> None:
    about = json.dumps(timeline.about)
    file.write(f'{{"displayTimeUnit": "ms", "otherData": {about}, "traceEvents": [')
    between = "\n"
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

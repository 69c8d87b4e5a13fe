"""A time line in Perfetto's own format: a `Trace` of `TracePacket`, as protobuf.

Only the few fields that are needed are written, by hand: a field is its number and
type, and the value behind it; a message within a message is its length and its bytes.
The numbers are those of Perfetto's `perfetto_trace.proto`; they never change there.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, BinaryIO, Final

from ._picture import earliest, placed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ._picture import (
        PictureValue,
        Timeline,
        TimelineCurve,
        TimelineRow,
        TimelineTask,
    )

# Trace
_PACKET: Final = 1
# TracePacket
_TIMESTAMP, _SEQUENCE, _TRACK_EVENT, _TRACK_DESCRIPTOR = 8, 10, 11, 60
# TrackDescriptor
_UUID, _NAME, _PROCESS, _PARENT, _COUNTER, _ORDERING, _RANK = 1, 2, 3, 5, 8, 11, 12
_EXPLICIT: Final = 3
"""Rows stand in the order of their ranks."""
# ProcessDescriptor
_PID, _PROCESS_NAME, _PROCESS_LABELS = 1, 6, 8
# CounterDescriptor
_UNIT: Final = 3
_UNITS: Final = {"count": 2, "bytes": 3}
# TrackEvent
_ANNOTATION, _TYPE, _TRACK, _CATEGORY, _EVENT_NAME, _NUMBER = 4, 9, 11, 22, 23, 44
_TAILS, _HEADS = 47, 48
_BEGIN, _END, _INSTANT, _COUNT = 1, 2, 3, 4
# DebugAnnotation
_KEY, _INTEGER, _DOUBLE, _TEXT = 10, 4, 5, 6

_ONE_WRITER: Final = 1
"""All packets are of one sequence, in the order of which events of one time come."""


def write_protobuf(timeline: Timeline, file: BinaryIO) -> None:
    """Writes it packet by packet.

    Raises:
        OSError: The file cannot be written.
    """
    writer = _Writer(file, timeline)
    for rank, task in enumerate(timeline.tasks, 1):
        process = writer.task(rank, task)
        if rank == 1:
            writer.tell(process, timeline.about)
        for place, row in enumerate(task.rows):
            writer.row(process, place, row)
        for place, curve in enumerate(task.curves, len(task.rows)):
            writer.curve(process, place, curve)


class _Writer:
    """Numbers the tracks of one file."""

    def __init__(self, file: BinaryIO, timeline: Timeline) -> None:
        self._file, self._start = file, earliest(timeline)
        self._tracks = 0
        self._flows: dict[int, bytes] = {}
        """What belongs to a span of which arrows begin or end, by its identity."""
        for number, ends in enumerate(timeline.arrows, 1):
            for field, span in zip((_TAILS, _HEADS), ends, strict=True):
                before = self._flows.get(id(span), b"")
                self._flows[id(span)] = before + _fixed(field, number)

    def task(self, rank: int, task: TimelineTask) -> int:
        """Returns its track, beneath which are those of its rows and curves."""
        process = _number(_PID, rank) + _text(_PROCESS_NAME, task.name)
        if task.label:
            process += _text(_PROCESS_LABELS, task.label)
        ordered = _number(_ORDERING, _EXPLICIT) + _number(_RANK, rank)
        return self._track(_message(_PROCESS, process) + ordered)

    def tell(self, track: int, about: Mapping[str, PictureValue]) -> None:
        event = _event(_INSTANT, track) + _text(_EVENT_NAME, "about this file")
        self._at(0, event + _annotations(about))

    def row(self, process: int, place: int, row: TimelineRow) -> None:
        track = self._track(_named(row.name, process, place))
        for span, begin, end in placed(row, self._start):
            event = _event(_BEGIN, track) + _text(_EVENT_NAME, span.name)
            flows = self._flows.get(id(span), b"")
            self._at(begin, event + flows + _annotations(span.details))
            self._at(end, _event(_END, track))

    def curve(self, process: int, place: int, curve: TimelineCurve) -> None:
        unit = _message(_COUNTER, _number(_UNIT, _UNITS[curve.unit]))
        track = self._track(_named(curve.name, process, place) + unit)
        for at, value in curve.points:
            moment = round((at - self._start) * 1e9)
            self._at(moment, _event(_COUNT, track) + _double(_NUMBER, value))

    def _track(self, described: bytes) -> int:
        self._tracks += 1
        described = _number(_UUID, self._tracks) + described
        self._packet(_message(_TRACK_DESCRIPTOR, described))
        return self._tracks

    def _at(self, nanoseconds: int, event: bytes) -> None:
        self._packet(_number(_TIMESTAMP, nanoseconds) + _message(_TRACK_EVENT, event))

    def _packet(self, content: bytes) -> None:
        self._file.write(_message(_PACKET, content + _number(_SEQUENCE, _ONE_WRITER)))


def _named(name: str, parent: int, rank: int) -> bytes:
    return _text(_NAME, name) + _number(_PARENT, parent) + _number(_RANK, rank)


def _event(kind: int, track: int) -> bytes:
    category = _text(_CATEGORY, "zstrat") if kind == _BEGIN else b""
    return _number(_TYPE, kind) + _number(_TRACK, track) + category


def _annotations(details: Mapping[str, PictureValue]) -> bytes:
    return b"".join(
        _message(_ANNOTATION, _text(_KEY, key) + _annotated(value))
        for key, value in details.items()
    )


def _annotated(value: PictureValue) -> bytes:
    if isinstance(value, str):
        return _text(_TEXT, value)
    if isinstance(value, int):
        return _number(_INTEGER, value)
    return _double(_DOUBLE, value)


def _number(field: int, value: int) -> bytes:
    """Negative ones as two's complement of 64 bits, as int64 wants it."""
    return _varint(field << 3) + _varint(value & 0xFFFF_FFFF_FFFF_FFFF)


def _fixed(field: int, value: int) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<Q", value)


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


def _message(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _text(field: int, text: str) -> bytes:
    # Halves of surrogate pairs are no UTF-8, and readers refuse the whole file.
    return _message(field, text.encode("utf-8", "backslashreplace"))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)

"""A topology as bytes: TensorFlow's ``TopologyProto``; either reads the other's.

Fields: 1 mesh_shape (int32, repeated), 2 num_tasks (int32), 3 num_tpu_devices_per_task
(int32), 4 device_coordinates (int32, repeated); the encoding is that of protocol
buffers, version 3. Fields that are not known here are skipped.

Law of the file: what a message means is checked by who asked for it; here only that it
is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MESH, _TASKS, _DEVICES, _COORDINATES = 1, 2, 3, 4

_MAX_VARINT: Final = 10
"""Bytes of the longest one: of 64 bits, 7 in each byte."""


@dataclass(frozen=True, slots=True)
class TopologyMessage:
    """The fields, as they were sent."""

    mesh_shape: tuple[int, ...]
    num_tasks: int
    num_tpu_devices_per_task: int
    device_coordinates: tuple[int, ...]


def encode(message: TopologyMessage) -> bytes:
    """The message as bytes; its numbers are not negative."""
    return b"".join(
        (
            _packed(_MESH, message.mesh_shape),
            _number(_TASKS, message.num_tasks),
            _number(_DEVICES, message.num_tpu_devices_per_task),
            _packed(_COORDINATES, message.device_coordinates),
        )
    )


def decode(data: bytes) -> TopologyMessage:
    """Inverse of `encode`.

    Raises:
        ValueError: These bytes are no such message; says at which byte.
    """
    found: dict[int, list[int]] = {}
    for field, kind, value in _fields(data):
        if field > _COORDINATES or kind in (_FIXED64, _FIXED32):
            continue
        if isinstance(value, int):
            found.setdefault(field, []).append(value)
        elif field in (_MESH, _COORDINATES):
            found.setdefault(field, []).extend(_numbers(value))
    return TopologyMessage(
        tuple(found.get(_MESH, ())),
        found.get(_TASKS, [0])[-1],
        found.get(_DEVICES, [0])[-1],
        tuple(found.get(_COORDINATES, ())),
    )


def _packed(field: int, values: Iterable[int]) -> bytes:
    body = b"".join(_varint(value) for value in values)
    return _varint(field << 3 | _BYTES) + _varint(len(body)) + body if body else b""


def _number(field: int, value: int) -> bytes:
    # A zero is what is not there.
    return _varint(field << 3 | _VARINT) + _varint(value) if value else b""


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def _fields(data: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    at = 0
    while at < len(data):
        tag, at = _read(data, at)
        field, kind = tag >> 3, tag & 7
        value: int | bytes
        if kind == _VARINT:
            value, at = _read(data, at)
        else:
            size = {_FIXED64: 8, _FIXED32: 4}.get(kind)
            if kind == _BYTES:
                size, at = _read(data, at)
            if size is None or not field or size > len(data) - at:
                raise _no_topology(data, at)
            value, at = data[at : at + size], at + size
        yield field, kind, value


def _numbers(data: bytes) -> Iterator[int]:
    at = 0
    while at < len(data):
        value, at = _read(data, at)
        yield value


def _read(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for n, byte in enumerate(data[at : at + _MAX_VARINT]):
        value |= (byte & 0x7F) << 7 * n
        if byte < 0x80:
            # Negative numbers are sent as 64 bits of two's complement.
            return value - (1 << 64) if value >> 63 else value, at + n + 1
    raise _no_topology(data, at)


def _no_topology(data: bytes, at: int) -> ValueError:
    return ValueError(
        f"serialized topology: {len(data)} bytes that are no TopologyProto (at byte "
        f"{at}); give what Topology.serialized() returned"
    )

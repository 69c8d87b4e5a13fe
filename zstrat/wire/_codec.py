"""Encodes messages as frames, and decodes them.

A message is one header frame and any number of raw frames. The header is a msgpack
array ``[kind, request, field, ...]``, fields in the order of the dataclass. A field
``arrays`` is ``[[dtype, dims], ...]`` in the header, and each array is a raw frame. A
``bytes`` field above `INLINE` is only a length in the header and travels as one more
raw frame after the arrays, so that a header stays small whatever is sent.

Everything that arrives is hostile until it is checked: `decode_header` raises
`ProtocolError` and nothing else, and the memory that it allocates is bounded by the
size of the header, never by a number in the header.
"""

from __future__ import annotations

import threading
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, get_type_hints

import msgpack
import numpy as np

from zstrat.config import Limits
from zstrat.errors import ProtocolError

from ._arrays import DTYPES, ArraySpec, Buffer, announce, array_from, check_specs, raw
from ._messages import MESSAGES, Message
from ._schema import (
    FEW,
    Arrays,
    Check,
    Mismatch,
    Row,
    check_for,
    describe,
    most_records,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

INLINE: Final = 16 * 1024
"""Most bytes of a ``bytes`` field in the header; a longer one travels as a frame. Two
such fields still fit into a header beside all other fields, and for shorter ones a
frame costs more than the copy."""


class _Packer(threading.local):
    """The msgpack packer of the present thread: a packer is not safe in two threads,
    and to make one for each header would cost more than the packing."""

    def __init__(self) -> None:
        self.pack: Callable[[Any], bytes] = msgpack.Packer().pack


_packer: Final = _Packer()
_SMALL_HEADER: Final = 2048
MAX_LIST_ITEMS: Final = 2**15
"""Most items of one list in a header: unpacking as many small lists takes four
milliseconds."""
MAX_MAP_ITEMS: Final = 2**13
_unpackb: Final = partial(
    msgpack.unpackb,
    raw=False,
    strict_map_key=True,
    max_array_len=MAX_LIST_ITEMS,
    max_map_len=MAX_MAP_ITEMS,
)
_BYTE: Final = DTYPES["uint8"]


class Announced(NamedTuple):
    """A message whose header was checked, and whose raw frames are still to come.

    ``message_kind`` is the class of the message, ``specs`` announce all raw frames,
    ``outside`` has the indices of the ``fields`` of bytes that follow in frames, after
    the arrays.
    """

    request: int
    message_kind: type[Message]
    specs: Sequence[ArraySpec]
    form: _Form
    fields: list[Any]
    outside: Sequence[int]

    def build(self, arrays: Arrays) -> Message:
        """Returns the message, made with one array for each spec, in order."""
        form, fields, outside = self.form, self.fields, self.outside
        if outside:
            blobs, arrays = arrays[-len(outside) :], arrays[: -len(outside)]
            for at, blob in zip(outside, blobs, strict=True):
                # A copy: code and pickles are kept, and must not keep a frame of the
                # socket.
                fields[at] = blob.tobytes()
        if form.arrays is not None:
            fields[form.arrays] = arrays
        return form.cls(*fields)


class _Form:
    """How messages of one class are encoded and checked."""

    __slots__ = ("arrays", "blobs", "cls", "fields", "kind", "names", "plain", "row")

    def __init__(self, cls: type[Message]) -> None:
        hints = {n: h for n, h in get_type_hints(cls).items() if n != "kind"}
        self.cls, self.kind, self.names = cls, cls.kind, tuple(hints)
        self.arrays = self.names.index("arrays") if "arrays" in hints else None
        self.blobs = [at for at, hint in enumerate(hints.values()) if hint is bytes]
        checks = [_check_for(name, hint) for name, hint in hints.items()]
        self.row = Row(list(hints.values()), checks)
        self.plain = self.arrays is None and not self.blobs
        self.fields = _getter(self.names)


def encode(
    message: Message, request: int = 0, limit: int = Limits().header
) -> tuple[bytes, tuple[np.ndarray, ...]]:
    """Encodes a message. Returns the header frame and the raw frames (uint8 [nbytes],
    views where possible).

    Args:
        limit: Most bytes of a header that the other side accepts.

    Raises:
        TypeError: ``message`` is not a message, or a field cannot travel; the error
            names the field.
        ValueError: A number needs more than 64 bits, or the header is longer than
            ``limit``.
    """
    form = _BY_CLASS[type(message)]
    fields: Sequence[Any] = form.fields(message)
    frames: tuple[np.ndarray, ...] = ()
    if not form.plain:
        fields, frames = _extract(form, list(fields))
    values = (form.kind, request, *fields)
    try:
        header = _packer.pack(values)
    # The whole header first: which field is at fault is only asked if there is one.
    except (TypeError, ValueError, OverflowError) as error:
        header = _pack_odd(form, values, error)
    if len(header) > limit:
        raise ValueError(
            f"{form.cls.__name__}: the header is {len(header)} bytes, "
            f"at most {limit} may be sent: it has too many parts, or too long texts"
        )
    if len(header) > FEW:  # each item takes a byte at least
        _check_lengths(form, fields)
    return header, frames


def decode_header(header: Buffer, limits: Limits) -> Announced:
    """Decodes a header and checks every field. Returns the message that the header
    announces.

    Raises:
        ProtocolError: The header is invalid; the error names the message, the field,
            the expected and the actual value.
    """
    values = _unpack(header, limits)
    if type(values) is not list or len(values) < 2:
        raise ProtocolError(
            f"header: expected [kind, request, ...], got {describe(values)}"
        )
    kind, request, *fields = values
    if type(kind) is not int:  # not isinstance: True would pass for the kind 1
        raise _no_kind(kind)
    form = _BY_KIND[kind]
    if type(request) is not int or request < 0:
        raise _wrong(form, Mismatch("an int of 0 or more", request), ".request")
    if len(fields) != len(form.names):
        expected = f"{len(form.names)} fields ({', '.join(form.names)})"
        raise _wrong(form, Mismatch(expected, fields))
    at = 0
    try:
        for at, check in form.row.checks_of(fields):
            fields[at] = check(fields[at])
    except Mismatch as wrong:
        raise _wrong(form, wrong, f".{form.names[at]}") from None
    if form.plain:
        return _make_announced((request, form.cls, (), form, fields, ()))
    specs, outside = _announced(form, fields, limits)
    return _make_announced((request, form.cls, specs, form, fields, outside))


def decode(
    header: Buffer, buffers: Sequence[Buffer], limits: Limits
) -> tuple[int, Message]:
    """Decodes a message of which all frames are there. Returns its request number and
    the message, whose arrays are views of the buffers.

    Raises:
        ProtocolError: The frames are not exactly what the header announces.
    """
    announced = decode_header(header, limits)
    specs, cls = announced.specs, announced.message_kind
    # All frames have to be there; a connection takes bodies in chunks, too.
    if len(buffers) != len(specs):
        raise ProtocolError(
            f"{cls.__name__}: expected {len(specs)} frames, got {len(buffers)}"
        )
    return announced.request, announced.build(tuple(map(array_from, specs, buffers)))


def _getter(names: tuple[str, ...]) -> Callable[[Message], tuple[Any, ...]]:
    if not names:
        return lambda message: ()
    get = attrgetter(*names)
    return get if len(names) > 1 else lambda message: (get(message),)


def _check_for(name: str, hint: Any) -> Check:
    if name == "arrays":
        return check_specs
    return _check_blob if hint is bytes else check_for(hint)


def _extract(
    form: _Form, fields: list[Any]
) -> tuple[list[Any], tuple[np.ndarray, ...]]:
    """Moves arrays and long bytes from the fields of a message to raw frames. Returns
    the fields for the header, and the frames."""
    frames: list[np.ndarray] = []
    if form.arrays is not None:
        arrays = fields[form.arrays]
        try:
            fields[form.arrays] = list(map(announce, arrays))
        except TypeError as error:
            raise TypeError(f"{form.cls.__name__}.arrays: {error}") from None
        frames.extend(map(raw, arrays))
    for at in form.blobs:
        blob = fields[at]
        if not isinstance(blob, bytes):
            place = f"{form.cls.__name__}.{form.names[at]}"
            raise TypeError(f"{place}: expected bytes, got {type(blob).__name__}")
        # The header keeps the length, so that the receiver knows of the frame.
        if len(blob) > INLINE:
            fields[at] = len(blob)
            frames.append(np.frombuffer(blob, np.uint8))
    return fields, tuple(frames)


def _check_lengths(form: _Form, fields: Sequence[Any]) -> None:
    for name, value in zip(form.names, fields, strict=True):
        if not isinstance(value, list | dict) or len(value) <= FEW:
            continue
        first = next(iter(value))
        most = MAX_LIST_ITEMS if isinstance(value, list) else MAX_MAP_ITEMS
        if isinstance(first, tuple):
            most = most_records(type(first))
        if len(value) > most:
            raise ValueError(
                f"{form.cls.__name__}.{name} has {len(value)} items, at most {most} "
                "may be sent: use fewer and larger arrays, or more parameter servers"
            )


def _pack_odd(form: _Form, values: tuple[Any, ...], error: Exception) -> bytes:
    """Packs a header that the packer refused with ``error``. Replaces text that cannot
    be encoded by escapes; raises an error that names the field in all other cases."""
    if not isinstance(error, UnicodeEncodeError):
        raise _culprit(form, values, error) from error
    try:
        # Half a surrogate pair, say from a file name in an error: readable beats exact.
        packed: bytes = msgpack.packb(values, unicode_errors="backslashreplace")
    except (TypeError, ValueError, OverflowError) as other:
        raise _culprit(form, values, other) from other
    return packed


def _culprit(form: _Form, values: tuple[Any, ...], error: Exception) -> Exception:
    cls = TypeError if isinstance(error, TypeError) else ValueError
    for name, value in zip(("kind", "request", *form.names), values, strict=True):
        try:
            msgpack.packb(value)
        except (TypeError, ValueError, OverflowError) as wrong:
            return cls(f"{form.cls.__name__}.{name} cannot be sent: {wrong}")
    return cls(f"{form.cls.__name__} cannot be sent: {error}")


def _unpack(header: Buffer, limits: Limits) -> Any:
    size = len(header)
    if size > limits.header:
        raise ProtocolError(
            f"header: expected at most {limits.header} bytes, got {size}"
        )
    try:
        if size > _SMALL_HEADER:
            # msgpack allocates a list as long as claimed before its items are there, a
            # thousand deep: a first pass that builds nothing proves that they are. In a
            # small header no claim can exceed its size, which keeps that below 11 MiB.
            probe = msgpack.Unpacker(max_buffer_size=size)
            probe.feed(header)
            probe.skip()
        return _unpackb(header)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        words = str(error) or type(error).__name__
        raise ProtocolError(
            f"header: {size} bytes that are not msgpack: {words:.200}"
        ) from None


def _announced(
    form: _Form, fields: list[Any], limits: Limits
) -> tuple[tuple[ArraySpec, ...], list[int]]:
    """Returns the specs of all raw frames of a message, and the indices of the bytes
    fields that travel as frames."""
    specs: list[ArraySpec] = [] if form.arrays is None else fields[form.arrays]
    outside: list[int] = []
    for at in form.blobs:
        if type(fields[at]) is int:
            outside.append(at)
            specs = [*specs, ArraySpec(_BYTE, (fields[at],))]
    if specs:
        total = sum([spec.nbytes for spec in specs])
        # Before anything is allocated: the specs are only what a peer claims.
        if total > limits.body:
            raise _wrong(form, Mismatch(f"at most {limits.body} bytes of body", total))
    return tuple(specs), outside


def _check_blob(value: Any) -> bytes | int:
    """Checks a field of bytes: the bytes, or the number of bytes that follow in a
    frame."""
    # Shorter ones have no frame, so a length is of a long one.
    if type(value) is bytes or (type(value) is int and value > INLINE):
        return value
    raise Mismatch("bytes", value)


def _wrong(form: _Form, wrong: Mismatch, field: str = "") -> ProtocolError:
    place = f"{form.cls.__name__}{field}{wrong.where}"
    return ProtocolError(f"{place}: expected {wrong.expected}, got {wrong.got}")


def _no_kind(kind: Any) -> ProtocolError:
    return ProtocolError(f"header: no message has the kind {describe(kind)}")


class _FormsByClass(dict[type, _Form]):
    """The form of each class of messages, created when it is first used: a process uses
    only some classes, and to create all forms would take a quarter of the import time
    of this package."""

    def __missing__(self, cls: type) -> _Form:
        if not issubclass(cls, Message):
            raise TypeError(f"{cls.__name__} is not a message")
        form = self[cls] = _Form(cls)
        return form


class _FormsByKind(dict[int, _Form]):
    """The forms of `_FormsByClass`, by the number of the kind with which a header
    begins."""

    def __missing__(self, kind: int) -> _Form:
        if kind not in MESSAGES:
            raise _no_kind(kind)
        form = self[kind] = _BY_CLASS[MESSAGES[kind]]
        return form


_make_announced: Final = partial(tuple.__new__, Announced)
_BY_CLASS: Final = _FormsByClass()
_BY_KIND: Final = _FormsByKind()

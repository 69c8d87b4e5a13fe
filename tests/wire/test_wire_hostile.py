"""Whatever arrives is a message or a `ProtocolError`: no crash, no unbounded memory."""

from __future__ import annotations

import struct
import tracemalloc
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from zstrat.config import Limits
from zstrat.errors import ProtocolError, to_wire
from zstrat.wire import (
    MESSAGES,
    Batch,
    Beat,
    CloseRound,
    Completion,
    Completions,
    Dispatch,
    Failure,
    Fetched,
    Hello,
    LayoutMessage,
    Message,
    Pull,
    Pulled,
    PullRound,
    Push,
    Read,
    ResourceBuilt,
    RoundMember,
    RoundNumber,
    RoundOrder,
    Statistics,
    Update,
    decode,
    decode_header,
    encode,
)

LIMITS = Limits()
MIB = 2**20
KINDS = [*MESSAGES]
LAYOUT = LayoutMessage(3, ["float32", "int64"], [[2, 3], []], {"loss": 0, "n": [1]})
ORDER = RoundOrder(1, 2, 0, [RoundMember(5, 1, 1.0)])
SAMPLES: list[Message] = [
    Hello(1, "worker", 2, 2**63 + 5, "host", 77, {"python": "3.11", "jax": "0.10"}),
    Beat(True),
    Failure(to_wire(ValueError("no"))),
    Statistics({"bytes": 7, "variables": [{"name": "w", "rate": 0.5}], "none": None}),
    Pull(9, [Read(1, -1), Read(2, 40)]),
    Pulled([1, 2], (np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(()))),
    Push(9, 5, 0, 4, [Update(1, 10, 1, 1)], (np.ones(3, np.float16),)),
    Dispatch(9, 4, [Batch(b"digest", 0, 1, [5, 6, 7], 2)], b"123456", ()),
    Completions(9, [Completion(5, 0, 3, 4, None)] * 3, [LAYOUT], b"\0" * 12),
    CloseRound(9, ORDER, [6], 4, (np.ones(1, "f4"),)),
    PullRound(9, [RoundNumber(1, 2)], [Read(1, -1)], [2], (np.arange(2),)),
    ResourceBuilt(LAYOUT),
]
FRAMES = [encode(sample, 12) for sample in SAMPLES]


def survives(header: bytes, frames: list[bytes]) -> Message | None:
    """The message, proved sound by a second round, or None: it was refused."""
    try:
        request, message = decode(header, frames, LIMITS)
    except ProtocolError as error:
        words = str(error)
    else:
        again = encode(message, request)
        assert decode_header(again[0], LIMITS).message_kind is type(message)
        return message
    assert 0 < len(words) < 1000
    return None


def raws(index: int) -> list[bytes]:
    return [bytes(frame) for frame in FRAMES[index][1]]


@examples(250)
@given(st.binary(max_size=300), st.lists(st.binary(max_size=20), max_size=3))
def test_garbage(header: bytes, frames: list[bytes]) -> None:
    survives(header, frames)


@pytest.mark.parametrize("index", range(len(SAMPLES)))
def test_truncated_and_extended(index: int) -> None:
    header = FRAMES[index][0]
    for length in range(len(header)):
        assert survives(header[:length], raws(index)) is None
    assert survives(header + b"\0", raws(index)) is None
    assert survives(header, [*raws(index), b""]) is None
    if raws(index):
        assert survives(header, raws(index)[1:]) is None
        assert survives(header, [raws(index)[0] + b"\0", *raws(index)[1:]]) is None
        assert survives(header, [raws(index)[0][1:], *raws(index)[1:]]) is None


@pytest.mark.parametrize("index", range(len(SAMPLES)))
def test_every_flipped_bit(index: int) -> None:
    header = FRAMES[index][0]
    for place in range(len(header)):
        for bit in range(8):
            flipped = bytearray(header)
            flipped[place] ^= 1 << bit
            survives(bytes(flipped), raws(index))


MSGPACK = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**64 - 1),
        st.floats(),
        st.text(max_size=6),
        st.binary(max_size=6),
        st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=9)),
        st.sampled_from(["float32", "bfloat16", "object", "<V2"]),
    ),
    lambda inner: (
        st.lists(inner, max_size=6)
        | st.dictionaries(
            st.text(max_size=3) | st.binary(max_size=3) | st.integers(0, 9),
            inner,
            max_size=3,
        )
    ),
    max_leaves=20,
)


@examples(250)
@given(st.sampled_from(KINDS), MSGPACK, st.lists(MSGPACK, max_size=8), st.data())
def test_fields_of_any_type(
    kind: int, request: Any, fields: list[Any], data: st.DataObject
) -> None:
    survives(msgpack.packb([kind, request, *fields]), [])
    survives(msgpack.packb([kind, 3, *fields]), [])
    values = msgpack.unpackb(data.draw(st.sampled_from(FRAMES))[0])
    values[data.draw(st.integers(0, len(values) - 1))] = request
    survives(msgpack.packb(values), [])


@examples(200)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["float32", "bool", "float8_e5m2", "object", ""]),
            st.lists(
                st.integers(-5, 5) | st.integers(-(2**63), 2**64 - 1), max_size=40
            ),
        ),
        max_size=3,
    ),
    st.lists(st.binary(max_size=64), max_size=3),
)
def test_hostile_specs(specs: list[Any], frames: list[bytes]) -> None:
    header = msgpack.packb([Fetched.kind, 0, specs])
    message = survives(header, frames)
    if message is not None:
        assert isinstance(message, Fetched)
        assert [list(array.shape) for array in message.arrays] == [s[1] for s in specs]


def nested(depth: int, opening: bytes) -> bytes:
    return opening * depth


BOMBS = {
    "deep fixarrays": nested(200_000, b"\x91"),
    "deep fixmaps": nested(100_000, b"\x81\xa1k"),
    "nested array32 claims": nested(50_000, b"\xdd\x00\x03\xff\xff"),
    "nested array16 claims": nested(80_000, b"\xdc\xff\xff"),
    "small nested array16 claims": nested(680, b"\xdc" + struct.pack(">H", 2040)),
    "nested map32 claims": nested(50_000, b"\xdf\x00\x03\xff\xff"),
    "array32 of everything": b"\xdd\xff\xff\xff\xff",
    "map32 of everything": b"\xdf\xff\xff\xff\xff",
    "str32 of everything": b"\xdb\xff\xff\xff\xff",
    "bin32 of everything": b"\xc6\xff\xff\xff\xff",
    "ext32 of everything": b"\xc9\xff\xff\xff\xff\x05",
    "timestamp out of range": b"\x93\x01\x00\xc7\x0c\xff" + b"\xff" * 12,
    "empty maps": b"\xdd" + struct.pack(">I", 250_000) + b"\x80" * 250_000,
    "a list as a key": b"\x93\x09\x00\x81\x91\x01\x01",
    "an int as a key": b"\x93\x09\x00\x81\x01\x01",
    "bad utf-8": b"\x93\x05\x00\xa2\xff\xfe",
    "reserved byte": b"\xc1",
    "nothing": b"",
    "no array": b"\x05",
    "no kind": b"\x90",
    "too large": bytes(LIMITS.header + 1),
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS.keys())
def test_bombs_are_refused_in_bounded_memory(bomb: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            decode(bomb, [], LIMITS)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 32 * MIB


def test_a_large_header_of_small_things_is_bounded_too() -> None:
    most = 2**15
    filler: list[Any] = 7 * [most * [1]]
    header = msgpack.packb([Failure.kind, 0, filler])
    tracemalloc.start()
    try:
        decode(header, [], LIMITS)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 32 * MIB
    for longer in ([1] * (most + 1), dict.fromkeys(range(most // 4 + 1), 1)):
        header = msgpack.packb([Failure.kind, 0, longer])
        with pytest.raises(ProtocolError):
            decode(header, [], LIMITS)


def test_a_loop_is_not_held_up_by_what_is_made_of_one_header() -> None:
    reads = [[1, 1, 0]] * 2**13
    assert len(decode(pack(Pull, 1, reads), [], LIMITS)[1].reads) == 2**13
    with pytest.raises(ProtocolError, match=r"Pull\.reads.*\b8192\b"):
        decode(pack(Pull, 1, [*reads, [1, 1, 0]]), [], LIMITS)
    with pytest.raises(ValueError, match=r"Pull\.reads.*\b8193\b.*\b8192\b"):
        encode(Pull(1, [Read(1, 1)] * (2**13 + 1)))
    with pytest.raises(ProtocolError, match=r"Dispatch\.batches.*\b2048\b"):
        decode(
            pack(Dispatch, 1, 0, 2049 * [[1, 1, 1, [1]]], b"", [], 0, False, None),
            [],
            LIMITS,
        )
    for branch in ([], {}):
        header = pack(Failure, 8 * [520 * [branch]])
        with pytest.raises(ProtocolError, match=r"\b4096\b"):
            decode(header, [], LIMITS)


def pack(cls: Any, *fields: Any, request: Any = 0) -> bytes:
    packed: bytes = msgpack.packb([cls.kind, request, *fields])
    return packed


def deep(depth: int) -> list[Any]:
    tree: list[Any] = []
    for _ in range(depth):
        tree = [tree]
    return tree


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (msgpack.packb([999, 0]), r"\b999\b"),
        (msgpack.packb([True, 0]), r"no message has the kind True"),
        (msgpack.packb({"kind": 1}), r"expected \[kind, request, \.\.\.\], got a dict"),
        (
            pack(Beat, True, request=-1),
            r"Beat\.request.*\b0\b",
        ),
        (pack(Beat), r"\b1\b.*\b0\b"),
        (pack(Beat, 1), r"Beat\.wanted.*\b1\b"),
        (pack(Pull, True, []), r"Pull\.session"),
        (
            pack(Pull, 1, [[1, 2, 0], [1, "x", 0]]),
            r"Pull\.reads.*\[1\]",
        ),
        (
            pack(Pull, 1, [[1, 2, 0], [1]]),
            r"Pull\.reads.*\[1\].*\b1\b",
        ),
        (pack(Pull, 1, [[1, 2, 0], "ab"]), r"Pull\.reads.*\[1\]"),
        (pack(Pull, 1, {"a": 1}), r"Pull\.reads.*\b1\b"),
        (pack(Pull, 1.0, []), r"Pull\.session.*\b1\.0\b"),
        (
            pack(Dispatch, 1, 2, [[b"d", 0, 1, [5, None], 0, 0]], b"", [], 0, False, 1),
            r"Dispatch\.batches.*\[0\].*\[1\]",
        ),
        (
            pack(ResourceBuilt, [1, ["f4"], [[1], ["x"]], None], 0),
            r"ResourceBuilt\.layout\.shapes.*\[1\].*\[0\]",
        ),
        (
            pack(Failure, deep(65)),
            r"Failure\.error",
        ),
        (
            pack(Failure, msgpack.ExtType(4, b"")),
            r"Failure\.error",
        ),
        (pack(Failure, [{b"k": 1}]), r"Failure\.error"),
        (pack(Statistics, [1]), r"Statistics\.values.*\b1\b"),
        (
            pack(Hello, 1, "ps", 0, 1, "h", 1, {"jax": 3}, 0),
            r"Hello\.versions.*\['jax'\].*\b3\b",
        ),
        (pack(Fetched, 3), r"Fetched\.arrays.*\b3\b"),
        (pack(Fetched, [[]]), r"Fetched\.arrays.*\[0\]"),
        (
            pack(Fetched, [["object", [1]]]),
            r"\[0\].*'object'",
        ),
        (pack(Fetched, [["int8", [-1]]]), r"\b0\b.*\b1\b"),
        (pack(Fetched, [["int8", [1.0]]]), r"expected a list of ints as dims"),
        (pack(Fetched, [["int8", [float("nan")]]]), r"expected a list of ints as dims"),
        (pack(Fetched, [["int8", [1] * 33]]), r"\b32\b.*\b33\b"),
        (pack(Fetched, [["int8", [2**32, 2**32]]]), r"fits into memory"),
        (pack(Fetched, [["int8", [0, 2**63]]]), r"fits into memory"),
        (
            pack(Fetched, [["int8", [2**40]]]),
            r"Fetched: expected at most \d+ bytes of body",
        ),
        (
            pack(Fetched, [["int8", []]] * 4097),
            r"\b4097\b.*\b0\b",
        ),
        (pack(Fetched, [["int8", [3]]]), r"\b1\b.*\b0\b"),
        (
            pack(Completions, 1, [], [], 2**62, []),
            r"Completions: expected at most \d+ bytes of body",
        ),
        (
            pack(Completions, 1, [], [], 12, []),
            r"Completions\.results.*\b12\b",
        ),
        (pack(Completions, 1, [], [], "x", []), r"Completions\.results"),
    ],
)
def test_errors_say_which_field_and_what_was_expected(
    header: bytes, words: str
) -> None:
    with pytest.raises(ProtocolError, match=words):
        decode(header, [], LIMITS)


def test_a_frame_of_another_size_is_refused_with_both_sizes() -> None:
    header, _ = encode(Fetched((np.zeros((2, 3), np.float32),)))
    words = r"\[2, 3\].*\b24\b.*\b25\b"
    with pytest.raises(ProtocolError, match=words):
        decode(header, [bytes(25)], LIMITS)

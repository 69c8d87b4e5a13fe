"""Whatever may be sent arrives as it was: every message, dtype, shape and layout."""

from __future__ import annotations

import gc
import subprocess
import sys
import types
import weakref
from dataclasses import fields
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

import zstrat.wire
from zstrat.config import Limits
from zstrat.errors import ProtocolError
from zstrat.wire import (
    DTYPES,
    MESSAGES,
    ArraySpec,
    Completions,
    Failure,
    Fetched,
    Message,
    Pull,
    PutCode,
    Read,
    array_from,
    decode,
    decode_header,
    dtype_named,
    encode,
    raw,
)

LIMITS = Limits()
INT64 = st.integers(-(2**63), 2**64 - 1)
SCALARS = {
    int: INT64,
    str: st.text(max_size=20),
    bytes: st.binary(max_size=40) | st.sampled_from([b"x" * 16384, b"y" * 16385]),
    bool: st.booleans(),
    float: st.floats(allow_nan=False),
}
TREES = st.recursive(
    st.one_of(st.none(), *(SCALARS[each] for each in (bool, int, float, str))),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    """Any array that may travel, in any memory layout."""
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    doubled = [dim * 2 for dim in shape]
    size = int(np.prod(doubled)) * dtype.itemsize
    content = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8)
    if dtype == np.bool_:
        content = content & 1
    array = content.view(dtype).reshape(doubled)
    array = array[tuple(draw(st.sampled_from(WALKS))(dim) for dim in shape)]
    if draw(st.booleans()):
        array = np.asfortranarray(array) if array.ndim else array
    if draw(st.booleans()):
        array = array.transpose()
    if draw(st.booleans()) and dtype.kind in "iufc" and dtype.name in np.sctypeDict:
        array = array.astype(array.dtype.newbyteorder(">"))
    return array


WALKS = (
    lambda dim: slice(0, dim),
    lambda dim: slice(None, None, 2),
    lambda dim: slice(None, None, -2),
)


def values(hint: Any) -> st.SearchStrategy[Any]:
    """What a field annotated ``hint`` may hold, told from the annotation alone."""
    if hint in SCALARS:
        return SCALARS[hint]
    if isinstance(hint, types.UnionType):
        return TREES
    origin, args = get_origin(hint), get_args(hint)
    if origin is list:
        return st.lists(values(args[0]), max_size=5)
    if origin is dict:
        return st.dictionaries(st.text(max_size=9), values(args[1]), max_size=4)
    if origin is tuple:
        return st.lists(arrays(), max_size=3).map(tuple)
    return st.tuples(*map(values, get_type_hints(hint).values())).map(hint._make)


def messages() -> st.SearchStrategy[Message]:
    return st.one_of([messages_of(cls) for cls in MESSAGES.values()])


def messages_of(cls: type) -> st.SearchStrategy[Any]:
    hints = get_type_hints(cls)
    return st.builds(
        cls, **{each.name: values(hints[each.name]) for each in fields(cls)}
    )


def same(one: Any, other: Any) -> bool:
    """Whether two messages are equal, arrays by their bytes."""
    return type(one) is type(other) and all(
        all(map(same_array, getattr(one, each.name), getattr(other, each.name)))
        and len(one.arrays) == len(other.arrays)
        if each.name == "arrays"
        else getattr(one, each.name) == getattr(other, each.name)
        for each in fields(one)
    )


def same_array(one: np.ndarray, other: np.ndarray) -> bool:
    """Bit for bit, whatever the byte order and the memory layout."""
    little = one.dtype.newbyteorder("<")
    return (
        other.dtype == little
        and one.shape == other.shape
        and one.astype(little).tobytes() == other.tobytes()
    )


@pytest.mark.parametrize("cls", MESSAGES.values(), ids=lambda cls: cls.__name__)
def test_every_message_arrives_as_it_was(cls: type) -> None:
    @examples(25)
    @given(messages_of(cls), st.integers(0, 2**64 - 1))
    def there_and_back(message: Message, request: int) -> None:
        header, frames = encode(message, request)
        arrived_request, arrived = decode(header, [bytes(f) for f in frames], LIMITS)
        assert arrived_request == request
        assert same(message, arrived)

    there_and_back()


@examples(300)
@given(arrays())
def test_every_array_arrives_bit_for_bit(array: np.ndarray) -> None:
    header, frames = encode(Fetched((array,)))
    (frame,) = frames
    assert frame.dtype == np.uint8
    assert frame.shape == (array.nbytes,)
    _, message = decode(header, [memoryview(frame)], LIMITS)
    assert isinstance(message, Fetched)
    assert same_array(array, message.arrays[0])
    assert not message.arrays[0].flags.writeable


@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)], ids=str)
def test_every_dtype_and_shape(name: str, shape: tuple[int, ...]) -> None:
    size = int(np.prod(shape)) * DTYPES[name].itemsize
    content = np.arange(size, dtype=np.uint8) & (1 if name == "bool" else 255)
    array = content.view(DTYPES[name]).reshape(shape)
    header, frames = encode(Fetched((array,)))
    _, message = decode(header, frames, LIMITS)
    assert isinstance(message, Fetched)
    assert same_array(array, message.arrays[0])


def test_all_eight_bit_floats_travel() -> None:
    import ml_dtypes

    eight_bit = [name for name in dir(ml_dtypes) if name.startswith("float8_")]
    assert len(eight_bit) == 8
    for name in ["bfloat16", *eight_bit]:
        assert dtype_named(name) == np.dtype(getattr(ml_dtypes, name))


def test_numpy_scalars_travel_as_0d_arrays() -> None:
    header, frames = encode(Fetched((np.float32(1.5),)))  # type: ignore[arg-type]
    _, message = decode(header, frames, LIMITS)
    assert message.arrays[0].shape == ()
    assert message.arrays[0] == np.float32(1.5)


@pytest.mark.parametrize(
    "array",
    [
        np.array([object()]),
        np.array(["text"]),
        np.array([b"text"]),
        np.array(["2020-01-01"], "datetime64[s]"),
        np.array([1], "timedelta64[s]"),
        np.zeros(2, [("a", "f4")]),
        np.zeros(1, np.longdouble),
        np.ma.masked_array([1.0], [True]),
        [1.0, 2.0],
        3.0,
    ],
    ids=lambda array: str(getattr(array, "dtype", type(array).__name__)),
)
def test_what_cannot_travel_is_refused_with_words(array: Any) -> None:
    with pytest.raises(TypeError, match=r"Fetched\.arrays"):
        encode(Fetched((array,)))


def test_a_dtype_that_does_not_travel_names_those_that_do() -> None:
    with pytest.raises(ProtocolError, match="'int4'"):
        dtype_named("int4")


def test_elements_in_place_are_not_copied() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert np.shares_memory(raw(array), array)
    view = array_from(ArraySpec(array.dtype, array.shape), raw(array))
    assert np.shares_memory(view, array)
    assert not view.flags.writeable
    assert array.flags.writeable


def test_the_frame_keeps_the_very_array_that_was_given_alive() -> None:
    store = np.arange(1000, dtype=np.float32)
    lent = store[:]  # numpy would make `store` the base of every view of this
    watch = weakref.ref(lent)
    _, frames = encode(Fetched((lent,)))
    piece = memoryview(frames[0][:100])
    del lent, frames
    gc.collect()
    assert watch() is not None
    del piece
    gc.collect()
    assert watch() is None


def test_long_bytes_leave_the_header() -> None:
    shipped = PutCode(1, b"digest", bytes(10_000_000))
    header, frames = encode(shipped, 5)
    assert len(header) < 100
    assert [frame.nbytes for frame in frames] == [10_000_000]
    assert decode(header, frames, LIMITS) == (5, shipped)
    results = Completions(1, [], [], bytes(2_000_000))
    header, frames = encode(results)
    assert decode(header, frames, LIMITS) == (0, results)


def test_header_says_what_is_to_come_before_it_is_there() -> None:
    header, frames = encode(Fetched((np.zeros((2, 3), np.float16), np.ones(()))), 9)
    announced = decode_header(header, LIMITS)
    assert announced.request == 9
    assert announced.message_kind is Fetched
    assert announced.specs == (
        ArraySpec(np.dtype("float16"), (2, 3)),
        ArraySpec(np.dtype("float64"), ()),
    )
    assert [spec.nbytes for spec in announced.specs] == [12, 8]
    built = announced.build(tuple(map(array_from, announced.specs, frames)))
    assert same(built, Fetched((np.zeros((2, 3), np.float16), np.ones(()))))


def test_header_may_be_a_memoryview() -> None:
    message = Pull(1, [Read(2, 3)])
    assert decode(memoryview(encode(message)[0]), [], LIMITS) == (0, message)


@pytest.mark.parametrize(
    ("message", "error", "words"),
    [
        (Pull(2**64, []), ValueError, "Pull.session cannot be sent"),
        (Pull(1, [Read(1, -(2**63) - 1)]), ValueError, "Pull.reads cannot be sent"),
        (Pull(np.int64(1), []), TypeError, "Pull.session cannot be sent.*int64"),
        (Failure(object()), TypeError, "Failure.error cannot be sent"),  # type: ignore[arg-type]
        (PutCode(1, b"", "text"), TypeError, "PutCode"),  # type: ignore[arg-type]
        (Failure(["x" * 300_000]), ValueError, "Failure: the header is .* at most"),
        ("text", TypeError, "str is not a message"),
    ],
    ids=lambda given: type(given).__name__,
)
def test_sender_is_told_what_it_cannot_send(
    message: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        encode(message)


def test_half_a_surrogate_pair_in_an_error_still_arrives() -> None:
    header, _ = encode(Failure(["no file \udc80"]))
    assert decode(header, [], LIMITS) == (0, Failure(["no file \\udc80"]))


def test_every_message_is_exported() -> None:
    unknown = {cls.__name__ for cls in MESSAGES.values()} - set(vars(zstrat.wire))
    assert not unknown, "add the message to zstrat/wire/__init__.py"


def test_import_needs_neither_jax_nor_zmq() -> None:
    program = (
        "import sys, zstrat.wire; "
        "print([name for name in ('jax', 'zmq', 'optax') if name in sys.modules])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "[]"

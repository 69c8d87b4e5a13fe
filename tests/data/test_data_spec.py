"""What elements look like, before there are any; and generators that promise it."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from zstrat.data import Dataset, TensorSpec
from zstrat.errors import OutOfRangeError

LONG = TensorSpec((), np.int64)
NAMED = {"a": np.zeros((3, 2), np.float32), "b": (["x", "y", "z"],)}


def never():
    raise AssertionError("somebody looks at an element")
    yield


UNDRAWN = Dataset.from_generator(never, output_signature=LONG)


@pytest.mark.shows("tf.data.Dataset.element_spec", "tf.TensorSpec")
@pytest.mark.parametrize(
    ("dataset", "spec"),
    [
        (Dataset.range(3), LONG),
        (UNDRAWN, LONG),
        (UNDRAWN.shuffle(9).repeat().take(3).prefetch(2).cache(), LONG),
        (UNDRAWN.filter(never).shard(2, 1), LONG),
        (UNDRAWN.batch(2), TensorSpec((None,), np.int64)),
        (UNDRAWN.batch(2, drop_remainder=True), TensorSpec((2,), np.int64)),
        (UNDRAWN.batch(2).enumerate(), (LONG, TensorSpec((None,), np.int64))),
        (UNDRAWN.batch(2).unbatch(), LONG),
        (UNDRAWN.batch(4).rebatch(3), TensorSpec((None,), np.int64)),
        (UNDRAWN.batch(4).rebatch(3, True), TensorSpec((3,), np.int64)),
        (UNDRAWN.batch(4).rebatch([2, 3], True), TensorSpec((None,), np.int64)),
        (Dataset.zip({"a": UNDRAWN}), {"a": LONG}),
        (
            Dataset.from_tensor_slices(NAMED),
            {
                "a": TensorSpec((2,), np.float32),
                "b": (TensorSpec((), str),),
            },
        ),
        (
            UNDRAWN.batch(2, True).padded_batch(3, [None]),
            TensorSpec((None, None), np.int64),
        ),
        (
            UNDRAWN.batch(2).concatenate(Dataset.range(4).batch(2, True)),
            TensorSpec((None,), np.int64),
        ),
        (Dataset.from_text_lines("missing"), TensorSpec((), bytes)),
    ],
)
def test_what_is_known_without_an_element(dataset, spec):
    assert dataset.element_spec == spec


def test_what_is_not_known_is_looked_at():
    halves = Dataset.range(5).map(lambda x: x / 2)
    assert halves.element_spec == TensorSpec((), np.float64)
    assert halves.batch(2).element_spec == TensorSpec((None,), np.float64)
    rows = Dataset.from_generator(lambda: [[1], [1, 2]])
    assert rows.padded_batch(2).element_spec == TensorSpec((None, None), np.int64)
    with pytest.raises(OutOfRangeError):
        Dataset.from_generator(list).element_spec  # noqa: B018


def test_looking_changes_no_order_and_fills_no_buffer():
    drawn = []

    def count(x):
        drawn.append(x)
        return x

    shuffled = Dataset.range(50).map(count).shuffle(50, seed=3)
    again = Dataset.range(50).map(count).shuffle(50, seed=3)
    assert shuffled.element_spec == LONG
    assert len(drawn) == 1
    assert list(shuffled) == list(again)


# signatures


@pytest.mark.shows("tf.data.Dataset.from_generator(output_signature=)")
@pytest.mark.parametrize(
    ("given", "signature", "kept"),
    [
        (1, TensorSpec((), np.float32), np.float32(1)),
        (300, TensorSpec((), np.int16), np.int16(300)),
        (np.float64(0.1), TensorSpec((), np.float32), np.float32(0.1)),
        (
            [-(2**63), 2**62],
            TensorSpec((2,), np.float32),
            np.float32([-(2**63), 2**62]),
        ),
        ([np.inf, np.nan], TensorSpec((2,), np.float16), np.float16([np.inf, np.nan])),
        (np.inf, TensorSpec((), np.float32), np.float32(np.inf)),
        ([1, 2], TensorSpec((None,), np.int32), np.array([1, 2], np.int32)),
        (255, TensorSpec((), np.uint8), np.uint8(255)),
        ([0, 1], TensorSpec((2,), bool), np.array([False, True])),
        # Rounded, as numpy and TensorFlow round: 2**24 + 1 has no place in float32.
        (2**24 + 1, TensorSpec((), np.float32), np.float32(2**24)),
        (2**63 - 1, TensorSpec((), np.float64), np.float64(2**63)),
        (-(2**53) - 1, TensorSpec((), np.complex128), np.complex128(-(2**53))),
        ("ä", TensorSpec((), bytes), "ä".encode()),
        (b"a", TensorSpec((), bytes), b"a"),
        (["a", "bc"], TensorSpec((2,), bytes), np.array([b"a", b"bc"], object)),
    ],
)
def test_elements_come_as_they_were_promised(given, signature, kept):
    (element,) = Dataset.from_generator(lambda: [given], output_signature=signature)
    np.testing.assert_array_equal(element, kept)
    assert getattr(element, "dtype", bytes) == getattr(kept, "dtype", bytes)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_narrow_floats_of_jax_are_rounded_as_by_jax(dtype):
    rows = [np.float32([1.1, -0.3, np.nan]), np.float64([1.1, 3, 0]), [7, -3, 12]]
    narrow = TensorSpec((3,), dtype)
    made = Dataset.from_generator(lambda: rows, output_signature=narrow)
    for row, given in zip(made, rows, strict=True):
        assert row.dtype == dtype
        reference = np.asarray(jnp.asarray(given, dtype))
        np.testing.assert_array_equal(row.astype("f4"), reference.astype("f4"))
    wide = TensorSpec((3,), np.float32)
    (back,) = Dataset.from_generator(lambda: [row], output_signature=wide)
    assert back.dtype == np.float32
    assert back.tolist() == [7, -3, 12]
    for wrong, words in ((1e39, "`generator`"), (1j, "`generator`")):
        bad = Dataset.from_generator(
            lambda wrong=wrong: [wrong], output_signature=TensorSpec((), dtype)
        )
        with pytest.raises(TypeError, match=words):
            list(bad)


PAIR = (TensorSpec((), np.int32), TensorSpec((), np.int32))


@pytest.mark.parametrize(
    ("given", "signature", "words"),
    [
        (1.5, TensorSpec((), np.int32), "of dtype float64 where int32 was expected"),
        (3000, TensorSpec((), np.int8), "of dtype int64 where int8 was expected"),
        (True, TensorSpec((), str), "of dtype bool where str was expected"),
        (
            -1,
            TensorSpec((), np.uint64),
            "int64 where uint64 was expected, which cannot",
        ),
        (256, TensorSpec((), np.uint8), "int64 where uint8 was expected, which cannot"),
        (2, TensorSpec((), bool), "of dtype int64 where bool was expected, which"),
        (np.uint64(2**63), TensorSpec((), np.int64), "which cannot hold its values"),
        (7e4, TensorSpec((), np.float16), "some of its values would be infinite"),
        (70000, TensorSpec((), np.float16), "some of its values would be infinite"),
        ([1e39, 1], TensorSpec((2,), np.float32), "some of its values would be inf"),
        (1e39j, TensorSpec((), np.complex64), "some of its values would be infinite"),
        (1j, TensorSpec((), np.float64), "complex128 where float64 .*, which cannot"),
        ([1, 2, 3], TensorSpec((2,), int), r"of shape \(3,\) .* \(2,\) was expected"),
        (1, PAIR, "did not match the expected structure"),
        ([1, 2], PAIR, "A list is one array"),
        ({"b": 1}, {"a": LONG}, r"expected structure was \{'a'.*was \{'b'"),
        ({"a": 1, "b": 1}, {"a": LONG}, "did not match the expected structure"),
    ],
)
def test_what_comes_is_checked(given, signature, words):
    good = Dataset.from_generator(lambda: [given], output_signature=signature)
    with pytest.raises(TypeError, match=rf"\(number 0.*{words}"):
        list(good)


def test_the_element_and_the_component_are_named():
    dataset = Dataset.from_generator(
        lambda: [{"x": 1}, {"x": 1.5}], output_signature={"x": LONG}
    )
    with pytest.raises(TypeError, match=r"\b1\b.*\['x'\]"):
        list(dataset)
    with pytest.raises(TypeError, match="'float'"):
        TensorSpec((2.5,))
    with pytest.raises(TypeError, match="TensorSpec"):
        Dataset.from_generator(never, output_signature={"x": "int32"})

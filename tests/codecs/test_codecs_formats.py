"""Formats of gradients: bounds, bytes, and what a hostile sender may try."""

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from zstrat.codecs import (
    GRADIENT_BLOCK,
    ROW_BLOCK,
    Wire,
    decode_gradient,
    encode_gradient,
    wire_format,
)
from zstrat.errors import InvalidArgumentError
from zstrat.wire import Codec

CODECS = [codec for codec in Codec if codec is not Codec.NONE]
SCALED = (Codec.INT8, Codec.INT4, Codec.E3M0)
SIZES = (1, 257, 9001)


def random_array(size, seed=0):
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


def sent(codec, array, seed=None, block=GRADIENT_BLOCK, density=0.1):
    arrays = encode_gradient(codec, array, block=block, seed=seed, density=density)
    return decode_gradient(codec, array.shape, arrays, block)


def scales_of(array, block=GRADIENT_BLOCK):
    padded = np.pad(np.abs(array), (0, -array.size % block)).reshape(-1, block)
    return np.repeat(padded.max(1), block)[: array.size]


@pytest.mark.parametrize("codec", SCALED)
@pytest.mark.parametrize("seed", [None, 7])
def test_errors_are_bounded_in_each_block(codec, seed):
    for size in SIZES:
        array = random_array(size)
        error = np.abs(sent(codec, array, seed) - array)
        if codec is Codec.E3M0:
            # Neighbours are 2**(e - 7) and 2**(e - 6) of the scale, or 0 and 2**-6.
            step = np.maximum(np.abs(array), scales_of(array) * 2**-6)
        else:
            step = scales_of(array) / (127 if codec is Codec.INT8 else 7)
        assert (error <= step * (0.501 if seed is None else 1.001)).all()


@pytest.mark.parametrize("codec", SCALED)
def test_random_rounding_is_right_in_the_mean(codec):
    array = random_array(512)
    count = 400
    found = [sent(codec, array, seed) for seed in range(count)]
    error = np.abs(np.mean(found, axis=0) - array)
    spread = np.std(found, axis=0).max() / count**0.5
    assert error.max() < 5 * spread


@pytest.mark.parametrize("codec", SCALED)
def test_the_same_seed_sends_the_same_bytes(codec):
    array = random_array(1000)
    first, again, other = (
        [
            x.tobytes()
            for x in encode_gradient(codec, array, block=GRADIENT_BLOCK, seed=seed)
        ]
        for seed in (2**40 + 3, 2**40 + 3, 2**40 + 4)
    )
    assert first == again != other


@pytest.mark.parametrize("codec", SCALED)
@pytest.mark.parametrize("size", [2e-38, 3.4e38])
def test_the_smallest_and_largest_scales(codec, size):
    array = np.full(300, size, np.float32)
    np.testing.assert_allclose(sent(codec, array), array, rtol=1e-6)


def test_rows_of_any_number_have_few_programs():
    compiled = []

    def note(event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        for rows in range(130, 260, 2):
            sent(Codec.INT8, random_array((rows, 100)), 7, ROW_BLOCK)
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert len(compiled) <= 18


def test_bfloat16_is_the_nearest():
    array = random_array((7, 5))
    found = sent(Codec.BFLOAT16, array)
    assert np.array_equal(found, array.astype(ml_dtypes.bfloat16).astype(np.float32))


@pytest.mark.parametrize("size", SIZES)
def test_top_k_sends_the_largest_of_each_chunk(size):
    array = random_array(size)
    found = sent(Codec.TOP_K, array, density=0.1)
    for start in range(0, size, 4096):
        part, got = array[start : start + 4096], found[start : start + 4096]
        kept = got != 0
        assert np.array_equal(got[kept], part[kept])
        # round(0.1 * 4096) of a whole chunk, the same share of a part, rounded up
        assert kept.sum() == -(-part.size * 410 // 4096)
        if not kept.all():
            assert np.abs(part[kept]).min() >= np.abs(part[~kept]).max()


@given(
    hnp.arrays(
        np.float32, st.sampled_from([0, 1, 300, 512]), elements=st.floats(width=32)
    ),
    st.sampled_from(CODECS),
    st.sampled_from([None, 1]),
)
def test_what_is_not_finite_stays_so(array, codec, seed):
    found = sent(codec, array, seed, density=1.0)
    assert found.shape == array.shape
    bad = ~np.isfinite(array)
    assert not np.isfinite(found[bad]).any()
    for start in range(0, array.size, GRADIENT_BLOCK):
        part = slice(start, start + GRADIENT_BLOCK)
        if not bad[part].any():
            # The largest float32 is infinite in bfloat16.
            assert np.isfinite(found[part]).all() or codec is Codec.BFLOAT16


@pytest.mark.parametrize(
    ("codec", "most"),
    [
        (Codec.BFLOAT16, 0.5),
        (Codec.INT8, 0.27),
        (Codec.INT4, 0.14),
        (Codec.E3M0, 0.14),
        (Codec.TOP_K, 0.016),
    ],
)
@pytest.mark.parametrize("block", [128, 256])
def test_bytes(codec, most, block):
    array = random_array(100_000)
    arrays = encode_gradient(codec, array, block=block, seed=0, density=0.01)
    assert sum(x.nbytes for x in arrays) <= most * array.nbytes + 8


@pytest.mark.parametrize("codec", CODECS)
def test_arrays_that_do_not_fit_are_refused(codec):
    array = random_array(5000)
    good = encode_gradient(codec, array, block=GRADIENT_BLOCK, seed=0, density=0.01)
    wrong = [
        [x[:-1] for x in good],
        [np.concatenate([x, x]) for x in good],
        [x.astype(np.float64) for x in good],
        [x.view(np.int8) for x in good[:1]] + list(good[1:]) * 2,
    ]
    for arrays in wrong:
        with pytest.raises(InvalidArgumentError):
            decode_gradient(codec, (5000,), arrays, GRADIENT_BLOCK)


def test_places_outside_of_a_chunk_are_refused():
    places, numbers = encode_gradient(
        Codec.TOP_K, random_array(5000), block=GRADIENT_BLOCK, seed=0, density=0.01
    )
    for at, place in ((0, 4096), (len(places) - 1, 904)):
        wrong = places.copy()
        wrong[at] = place
        with pytest.raises(InvalidArgumentError):
            decode_gradient(Codec.TOP_K, (5000,), [wrong, numbers], GRADIENT_BLOCK)


@pytest.mark.parametrize(
    "wrong",
    [
        {"push": "int3"},
        {"push": ["int8"]},
        {"push": "int8", "density": 0.5},
        {"push": "topk"},
        {"push": "topk", "density": 2.0},
        {"push": "topk", "density": 0.1, "error_feedback": False},
        {"push": "bfloat16", "error_feedback": True},
        {"push": "int8", "error_feedback": 1.5},
        {},
        {"pull": "int8"},
        {"pull": "bfloat16", "error_feedback": True},
        {"pull": "bfloat16", "density": 0.5},
    ],
)
def test_formats_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match="expected"):
        Wire(**wrong)


def test_a_name_stands_for_a_format():
    assert wire_format("topk") == Wire(push="topk", density=0.01)
    assert wire_format("topk").has_feedback
    assert not wire_format("int8").has_feedback
    assert wire_format(None) is None
    with pytest.raises(TypeError, match=r"zs\.Wire"):
        wire_format(8)

"""Compression: what a hop loses is bounded, and over many calls nothing is lost."""

from __future__ import annotations

import numpy as np
import pytest
from collectives_hops import all_reduce_calls, deliver, made_by
from hypothesis import given
from hypothesis import strategies as st
from tiers import combined

from zstrat.collectives import (
    Compression,
    Compressor,
    reduction_of,
)
from zstrat.errors import ProtocolError
from zstrat.wire import DTYPES

KINDS = ["bf16", "f16", "int8", "topk:0.1"]


def codec_of(kind: str, dtype: str = "float32", op: str = "SUM"):
    compressor = Compressor(Compression.of(kind))
    return compressor.codec("x", reduction_of(op, DTYPES[dtype], 2))


RING = made_by("all_reduce", "ring")


def all_reduce(compressors, values, op="MEAN", schedule=RING):
    """One call of all ranks; results ``[ranks, n]``, and the bytes that travelled."""
    reduction = reduction_of(op, values.dtype, len(values))
    results = np.zeros_like(values)
    codecs = [each.codec("x", reduction) for each in compressors]
    calls = all_reduce_calls(schedule, values, results, op, codecs, chunk_bytes=256)
    deliver(calls)
    return results


@given(st.lists(st.floats(-1e4, 1e4, width=32), max_size=80))
def test_each_kind_is_as_exact_as_it_says(values) -> None:
    exact = np.array(values, np.float32)
    largest = np.abs(exact).max(initial=0)
    for kind, bound in {
        "bf16": np.abs(exact) * 2**-8 + 1e-38,
        "f16": np.abs(exact) * 2**-10 + 2**-24,
        "int8": largest / 127 * 0.51 + 1e-37,
    }.items():
        codec = codec_of(kind)
        back = codec.decode(codec.encode(0, exact), len(exact))
        assert back.dtype == np.float32
        assert (np.abs(back - exact) <= bound).all(), kind


def test_bytes_on_the_wire() -> None:
    values = np.ones(1000, np.float32)
    lengths = [codec_of(kind).encode(0, values).nbytes for kind in KINDS]
    assert lengths == [2000, 2000, 1004, 800]


def test_top_k_keeps_the_largest_where_they_are() -> None:
    values = np.arange(20, dtype=np.float32) * np.where(np.arange(20) % 2, 1, -1)
    codec = codec_of("topk:0.15")
    expected = np.where(np.abs(values) >= 17, values, 0)
    np.testing.assert_array_equal(codec.decode(codec.encode(0, values), 20), expected)


@pytest.mark.parametrize("kind", ["int8", "topk:0.1"])
def test_what_was_left_out_comes_later(kind) -> None:
    """All that was decoded so far differs from all that was given by what is kept."""
    codec = codec_of(kind)
    draw = np.random.default_rng(1)
    given = np.zeros(100)
    came = np.zeros(100)
    for _ in range(200):
        values = draw.standard_normal(100).astype(np.float32)
        given += values
        came += codec.decode(codec.encode(7, values), 100)
    # With top-k a value waits until what has gathered is among the largest ten.
    bound = {"int8": 0.05, "topk:0.1": 30.0}[kind]
    assert np.abs(given - came).max() < bound
    steady = np.linspace(0.1, 1, 100).astype(np.float32)
    mean = np.zeros(100)
    for _ in range(500):
        mean += codec.decode(codec.encode(7, steady), 100) / 500
    np.testing.assert_allclose(mean, steady, atol=bound / 200)


@pytest.mark.parametrize(
    ("kind", "schedule", "dtype"),
    combined(
        [*KINDS],
        [
            RING,
            made_by("all_reduce", "halving_doubling"),
            made_by("all_reduce", "double_tree"),
        ],
        ["float32", "float64", "bfloat16"],
        step=3,
    ),
)
def test_all_ranks_have_the_same_bits(kind, schedule, dtype) -> None:
    draw = np.random.default_rng(2)
    size = 5
    compressors = [Compressor(Compression.of(kind)) for _ in range(size)]
    for _ in range(3):
        values = draw.standard_normal((size, 333)).astype(DTYPES[dtype])
        results = all_reduce(compressors, values, schedule=schedule)
        assert len({result.tobytes() for result in results}) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_mean_of_many_calls_is_right(kind) -> None:
    """Steady values: what the calls give, on average, is the mean of all ranks."""
    size, calls = 4, 300
    values = np.random.default_rng(3).standard_normal((size, 200)).astype(np.float32)
    compressors = [Compressor(Compression.of(kind)) for _ in range(size)]
    total = sum(all_reduce(compressors, values)[0].astype(float) for _ in range(calls))
    atol = {"bf16": 0.02, "f16": 0.002, "int8": 0.001, "topk:0.1": 0.15}[kind]
    np.testing.assert_allclose(total / calls, values.mean(0), atol=atol)


def test_a_model_trained_on_compressed_gradients_learns() -> None:
    """Least squares by gradient descent on 4 ranks; the solution is numpy's."""
    draw = np.random.default_rng(4)
    inputs = draw.standard_normal((4, 50, 20))
    truth = draw.standard_normal(20)
    outputs = inputs @ truth + 0.1 * draw.standard_normal((4, 50))
    best = np.linalg.lstsq(inputs.reshape(200, 20), outputs.reshape(200), rcond=None)[0]
    for kind, atol in {"bf16": 0.01, "int8": 0.01, "topk:0.1": 0.05}.items():
        compressors = [Compressor(Compression.of(kind)) for _ in range(4)]
        weights = np.zeros(20)
        for step in range(300):
            errors = inputs @ weights - outputs
            gradients = np.einsum("rn,rnd->rd", errors, inputs) / 50
            mean = all_reduce(compressors, gradients.astype(np.float32))[0]
            weights -= 0.1 / (1 + step / 50) * mean
        np.testing.assert_allclose(weights, best, atol=atol)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [0, 1])
def test_few_values(kind, count) -> None:
    values = np.full(count, 2.0, np.float32)
    codec = codec_of(kind)
    np.testing.assert_allclose(codec.decode(codec.encode(0, values), count), values)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_no_number_is_seen_and_then_forgotten(kind, bad) -> None:
    values = np.ones(50, np.float32)
    values[7] = bad
    codec = codec_of(kind)
    assert not np.isfinite(codec.decode(codec.encode(0, values), 50)[7])
    good = codec.decode(codec.encode(0, np.ones(50, np.float32)), 50)
    assert np.isfinite(good).all()


def test_zeros_stay_zeros() -> None:
    codec = codec_of("int8")
    assert not codec.decode(codec.encode(0, np.zeros(9, np.float32)), 9).any()
    tiny = np.full(9, 1e-45, np.float32)
    back = codec.decode(codec.encode(0, tiny), 9)
    assert np.isfinite(back).all()


def test_calls_of_another_size_start_anew() -> None:
    compressor = Compressor(Compression.of("int8"))
    reduction = reduction_of("SUM", np.float32, 2)
    compressor.codec("x", reduction).encode(0, np.full(10, 0.3, np.float32))
    other = compressor.codec("x", reduction)
    assert other.encode(0, np.ones(5, np.float32)).nbytes == 9


@pytest.mark.parametrize("name", ["zip", "topk:0", "topk:2", "topk:x", "bf16:1", ""])
def test_an_unknown_compression(name) -> None:
    with pytest.raises(ValueError, match=r"'bf16'.*'f16'.*'int8'"):
        Compression.of(name)


@pytest.mark.parametrize(
    ("op", "dtype"), [("SUM", "int32"), ("MAX", "float32"), ("SUM", "complex64")]
)
def test_only_sums_of_floats_lose_bits(op, dtype) -> None:
    with pytest.raises(TypeError, match="SUM"):
        codec_of("bf16", dtype, op)


def test_hostile_bytes_are_refused() -> None:
    for kind in KINDS:
        with pytest.raises(ProtocolError):
            codec_of(kind).decode(np.zeros(3, np.uint8), 100)
    with pytest.raises(ProtocolError, match=r"\b4294967295\b.*\b10\b"):
        codec_of("topk:0.1").decode(np.full(8, 255, np.uint8), 10)

"""The arithmetic of reductions: numpy and ml_dtypes say what is right."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zstrat.collectives import ReduceOp, narrow, reduction_of
from zstrat.wire import DTYPES

BF16 = DTYPES["bfloat16"]


def total(op: str, values: np.ndarray) -> np.ndarray:
    """All rows of ``[ranks, n]`` one after the other, as a rank does."""
    reduction = reduction_of(op, values.dtype, len(values))
    have = values[0]
    for row in values[1:]:
        out = np.empty(values.shape[1], reduction.accumulator)
        reduction.reduce(have, row, out)
        have = out
    result = np.empty(values.shape[1], values.dtype)
    reduction.finish(have, result)
    return result


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_small_numbers_are_rounded_once(name, op) -> None:
    """A sum that loses every small term if it is rounded in between."""
    dtype = DTYPES[name]
    values = np.full((256, 3), 1, dtype)
    values[0] = [64, 32, 0]
    exact = values.astype(np.float64).sum(0) / (256 if op == "MEAN" else 1)
    wanted = exact.astype(np.float32).astype(dtype)
    assert total(op, values).tobytes() == wanted.tobytes()


@pytest.mark.parametrize("name", ["int8", "uint16", "int64", "float16", "bfloat16"])
@pytest.mark.parametrize(("op", "ufunc"), [("MIN", np.minimum), ("MAX", np.maximum)])
def test_extremes_are_in_the_dtype_itself(name, op, ufunc) -> None:
    values = np.arange(30).reshape(3, 10).astype(DTYPES[name])
    values[1] = values[1][::-1]
    reduction = reduction_of(op, values.dtype, 3)
    assert not reduction.rounds
    wanted = ufunc.reduce(values.astype(np.float64)).astype(values.dtype)
    assert total(op, values).tobytes() == wanted.tobytes()


def test_bool_has_extremes_only() -> None:
    values = np.array([[True, False, False], [True, True, False]])
    np.testing.assert_array_equal(total("MAX", values), [True, True, False])
    np.testing.assert_array_equal(total("MIN", values), [True, False, False])
    with pytest.raises(TypeError, match="SUM"):
        reduction_of("sum", np.bool_, 2)


def test_integers_have_no_mean() -> None:
    with pytest.raises(TypeError, match="MEAN"):
        reduction_of(ReduceOp.MEAN, np.int32, 2)


@pytest.mark.parametrize("dtype", ["U3", "O", "M8[s]", "V7"])
def test_what_is_no_number_is_refused(dtype) -> None:
    with pytest.raises(TypeError, match="SUM"):
        reduction_of("SUM", np.dtype(dtype), 2)


def test_complex_numbers_have_no_order() -> None:
    assert reduction_of("MEAN", np.complex64, 2).accumulator == np.complex64
    with pytest.raises(TypeError, match="MAX"):
        reduction_of("MAX", np.complex64, 2)


def test_not_a_number_stays_one() -> None:
    values = np.array([[np.nan, 1, -np.inf], [1, np.nan, np.inf]], np.float32)
    for op in ("SUM", "MEAN", "MIN", "MAX"):
        assert np.isnan(total(op, values)[:2]).all()


def test_a_mean_is_a_division() -> None:
    """Not a product with 1/3, which is another number."""
    values = np.full((3, 1), 5, np.float64)
    values[0] = 0
    assert total("MEAN", values)[0] == 10 / 3


def test_all_bit_patterns_of_bf16_are_widened_exactly() -> None:
    every = np.arange(2**16, dtype=np.uint16).view(BF16)
    wide = reduction_of("SUM", BF16, 2).widened(every)
    assert wide.dtype == np.float32
    same = wide.tobytes() == every.astype(np.float32).tobytes()
    assert same or np.array_equal(wide, every.astype(np.float32), equal_nan=True)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_rounding_to_bf16(bits) -> None:
    """All bit patterns of f32, as ml_dtypes rounds them; NaN stays NaN."""
    values = np.array(bits, np.uint32).view(np.float32)
    found = np.empty(len(values), BF16)
    narrow(values, found)
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = values.astype(BF16)
    number = ~np.isnan(values)
    assert found[number].tobytes() == wanted[number].tobytes()
    assert np.isnan(found[~number].astype(np.float32)).all()


def test_the_edges_of_bf16() -> None:
    bits = [0x7F7FFFFF, 0x7F800000, 0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF, 0x00008000]
    values = np.array([*bits, 0x00018000, 0x80000001], np.uint32).view(np.float32)
    found = np.empty(len(values), BF16)
    narrow(values, found)
    expected = [np.inf, np.inf, np.nan, np.nan, np.nan, 0]
    np.testing.assert_array_equal(found[:6].astype(np.float32), expected)
    assert found[6:].view(np.uint16).tolist() == [2, 0x8000]  # a tie, and -0


def test_too_large_becomes_inf() -> None:
    values = np.full((2, 1), 60000, np.float16)
    assert np.isinf(total("SUM", values)[0])
    assert total("MEAN", values)[0] == 60000


def test_an_unknown_operation() -> None:
    with pytest.raises(ValueError, match="'PRODUCT'"):
        reduction_of("PRODUCT", np.float32, 2)

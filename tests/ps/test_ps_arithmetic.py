"""Plain updates against the plainest possible Python: one element after the other."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tiers import examples

from zstrat.errors import InvalidArgumentError
from zstrat.ps.engine import SCATTERS, check, compute
from zstrat.rows import runs
from zstrat.wire import UpdateOp

BF16 = np.dtype(ml_dtypes.bfloat16)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
DTYPES = [
    np.dtype(d) for d in ("f8", "f4", "f2", "i8", "i4", "i1", "u1", "u4", "c8")
] + [BF16]


def truncated(a, b):
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def expected(op: UpdateOp, value: np.ndarray, indices, rows) -> np.ndarray:
    """Row after row, in order, in float64 (Python ints for integers)."""
    exact = object if value.dtype.kind in "iu" else np.complex128
    out, rows = value.astype(exact), rows.astype(exact)
    for index, row in zip(indices, rows, strict=True):
        match op:
            case UpdateOp.SCATTER_ADD:
                out[index] = out[index] + row
            case UpdateOp.SCATTER_SUB:
                out[index] = out[index] - row
            case UpdateOp.SCATTER_MUL:
                out[index] = out[index] * row
            case UpdateOp.SCATTER_DIV if exact is object:
                out[index] = np.frompyfunc(truncated, 2, 1)(out[index], row)
            case UpdateOp.SCATTER_DIV:
                out[index] = out[index] / row
            case UpdateOp.SCATTER_MIN:
                out[index] = np.minimum(out[index].real, row.real)
            case UpdateOp.SCATTER_MAX:
                out[index] = np.maximum(out[index].real, row.real)
            case UpdateOp.SCATTER_UPDATE:
                out[index] = row
    return out


@st.composite
def scatters(draw):
    op = draw(st.sampled_from(sorted(SCATTERS)))
    dtype = draw(st.sampled_from(DTYPES))
    rows, width = draw(st.integers(1, 6)), draw(st.integers(0, 5))
    shape = (rows, width) if draw(st.booleans()) else (rows,)
    count = draw(st.integers(0, 60))
    indices = draw(
        hnp.arrays(
            draw(st.sampled_from(["i4", "i8", "u8", "u1"])),
            count,
            elements=st.integers(0, rows - 1),
        )
    )
    # Small whole numbers: exact in every dtype, whatever the order of additions.
    small = st.integers(
        1, 2 if op in (UpdateOp.SCATTER_MUL, UpdateOp.SCATTER_DIV) else 3
    )
    if op in (UpdateOp.SCATTER_MUL, UpdateOp.SCATTER_DIV):
        count = min(count, 5)  # powers of two, within the range of float16
        indices = indices[:count]
    values = draw(hnp.arrays("i8", (count, *shape[1:]), elements=small))
    value = draw(hnp.arrays("i8", shape, elements=st.integers(0, 16)))
    return op, value.astype(dtype), indices, values.astype(dtype)


@given(scatters(), st.booleans())
@examples(300)
def test_scatters_do_what_one_row_after_the_other_does(case, in_place):
    op, value, indices, rows = case
    if op in (UpdateOp.SCATTER_MIN, UpdateOp.SCATTER_MAX) and value.dtype.kind == "c":
        with pytest.raises(InvalidArgumentError):
            check(op, (indices, rows), value.shape, value.dtype, "v")
        return
    check(op, (indices, rows), value.shape, value.dtype, "v")
    want, before = expected(op, value, indices, rows), value.copy()
    out = value if in_place else np.empty_like(value)
    compute(op, value, (indices, rows), out)
    if not in_place:
        np.testing.assert_array_equal(value, before)
    if value.dtype.kind in "iu":
        wrapped = want.astype(np.int64).astype(value.dtype)
        np.testing.assert_array_equal(out, wrapped)
    else:
        np.testing.assert_array_equal(out.astype(np.complex128), want)


@pytest.mark.parametrize("op", [UpdateOp.SCATTER_ADD, UpdateOp.SCATTER_SUB])
@pytest.mark.parametrize("dtype", ["f4", "f2", BF16, "i4"])
def test_many_duplicates_of_a_few_hot_rows_all_count(op, dtype):
    rng = np.random.default_rng(1)
    indices = rng.zipf(1.3, 5000).clip(max=50) - 1
    value = np.zeros((50, 4), dtype)
    compute(op, value, (indices, np.ones((5000, 4), dtype)), value)
    counts = np.bincount(indices, minlength=50)[:, None].repeat(4, 1)
    sign = 1 if op is UpdateOp.SCATTER_ADD else -1
    np.testing.assert_array_equal(value, (sign * counts).astype(dtype))


def test_sixteen_bit_duplicates_add_in_float32():
    value = np.zeros(1, BF16)
    compute(
        UpdateOp.SCATTER_ADD, value, (np.zeros(1000, int), np.ones(1000, BF16)), value
    )
    assert value[0] == 1000  # adding one by one in bfloat16 would stop at 256


def test_of_duplicate_indices_the_last_update_wins():
    value = np.zeros(3, np.float32)
    rows = np.arange(1, 7, dtype=np.float32)
    compute(UpdateOp.SCATTER_UPDATE, value, (np.array([0, 1, 0, 2, 1, 0]), rows), value)
    assert value.tolist() == [6, 5, 4]


def test_indices_too_large_for_the_fast_sort_are_sorted_too():
    indices = np.array([2**62 - 1, 5, 2**62 - 1, 7])
    found = runs(indices)
    assert found.unique.tolist() == [5, 7, 2**62 - 1]
    assert found.counts.tolist() == [1, 1, 2]
    assert found.order.tolist() == [1, 3, 0, 2]


@pytest.mark.parametrize("dtype", [*DTYPES, FP8, np.dtype(bool)])
@pytest.mark.parametrize("op", [UpdateOp.ASSIGN, UpdateOp.ADD, UpdateOp.SUB])
def test_dense_updates_of_every_dtype(op, dtype):
    value, delta = np.array([1, 3, 0]).astype(dtype), np.array([1, 1, 0]).astype(dtype)
    if dtype.kind == "b" and op is UpdateOp.SUB:
        with pytest.raises(InvalidArgumentError, match="SUB"):
            check(op, (delta,), value.shape, dtype, "v")
        return
    check(op, (delta,), value.shape, dtype, "v")
    want = {UpdateOp.ASSIGN: delta, UpdateOp.ADD: value + delta}
    if dtype.kind != "b":
        want[UpdateOp.SUB] = value - delta
    compute(op, value, (delta,), value)
    np.testing.assert_array_equal(value, want[op])


def test_floating_point_exceptions_are_values():
    value = np.array([1.0, 0.0, np.finfo("f4").max], "f4")
    compute(UpdateOp.SCATTER_DIV, value, (np.array([0, 1]), np.zeros(2, "f4")), value)
    compute(UpdateOp.ADD, value, (np.full(3, np.finfo("f4").max),), value)
    assert np.isposinf(value[0])
    assert np.isnan(value[1])
    assert np.isposinf(value[2])


MATRIX = ((4, 2), np.dtype("f4"))
ROWS = np.zeros((3, 2), "f4")


@pytest.mark.parametrize(
    ("op", "operands", "words"),
    [
        (
            UpdateOp.ADD,
            (np.zeros((4, 3), "f4"),),
            r"ADD expects shape \(4, 2\), got \(4, 3\)",
        ),
        (UpdateOp.ADD, (np.zeros((4, 2), "f8"),), "expects float32, got float64"),
        (UpdateOp.ADD, (), "expects 1 arrays, got 0"),
        (UpdateOp.SCATTER_ADD, (ROWS,), "expects 2 arrays, got 1"),
        (
            UpdateOp.SCATTER_ADD,
            (np.array([0, 1, 4]), ROWS),
            r"indices in \[0, 4\), got 4",
        ),
        (
            UpdateOp.SCATTER_ADD,
            (np.array([0, -1, 1]), ROWS),
            r"indices in \[0, 4\), got -1",
        ),
        (UpdateOp.SCATTER_ADD, (np.array([0, 1]), ROWS), r"rows of shape \(2, 2\)"),
        (UpdateOp.SCATTER_ADD, (np.zeros(3), ROWS), r"integer indices.*got float64"),
        (
            UpdateOp.SCATTER_ADD,
            (np.zeros((3, 1), int), ROWS),
            r"integer indices of shape",
        ),
        (UpdateOp.SCATTER_ADD, (np.zeros(3, int), ROWS.astype("f2")), "got float16"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_name_and_both_sides(op, operands, words):
    with pytest.raises(InvalidArgumentError, match=f"variable 'kernel': .*{words}"):
        check(op, operands, *MATRIX, "kernel")


class Scarce(np.ndarray):
    """Rows that can be taken once; then there is no memory."""

    def __getitem__(self, at):
        if self.taken:
            raise MemoryError
        self.taken = True
        return np.asarray(self)[at]


def test_a_division_that_runs_out_of_memory_has_changed_nothing():
    value = np.array([100, 7, 100])
    rows = np.array([2, 5, 5]).view(Scarce)
    rows.taken = False
    with pytest.raises(MemoryError):
        compute(UpdateOp.SCATTER_DIV, value, (np.array([0, 0, 2]), rows), value)
    assert value.tolist() == [100, 7, 100]


def test_scalars_have_no_rows_and_integers_no_zero_divisor():
    with pytest.raises(InvalidArgumentError, match="SCATTER_ADD"):
        check(
            UpdateOp.SCATTER_ADD,
            (np.zeros(1, int), np.zeros(1)),
            (),
            np.dtype("f8"),
            "v",
        )
    with pytest.raises(InvalidArgumentError):
        check(
            UpdateOp.SCATTER_DIV,
            (np.zeros(1, int), np.zeros(1, int)),
            (2,),
            np.dtype(int),
            "v",
        )

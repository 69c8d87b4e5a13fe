"""The compiled loops for rows: as numpy and as XLA compute, and what they refuse."""

import subprocess
import sys

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zstrat.native import (
    IS_BUILT,
    MOST_REGISTERS,
    MOST_TABLES,
    LoopProgram,
    RowOperation,
    put_rows,
    take_rows,
)
from zstrat.ps.engine import as_rows

needs_loops = pytest.mark.skipif(not IS_BUILT, reason="the extension is not built")

NUMPY = {
    RowOperation.NEG: lambda a: -a,
    RowOperation.ABS: np.abs,
    RowOperation.SIGN: lambda a: np.where(a > 0, 1, np.where(a < 0, -1, a)),
    RowOperation.SQRT: np.sqrt,
    RowOperation.RSQRT: lambda a: np.float32(1) / np.sqrt(a),
    RowOperation.ADD: np.add,
    RowOperation.SUB: np.subtract,
    RowOperation.MUL: np.multiply,
    RowOperation.DIV: np.divide,
    RowOperation.MAX: lambda a, b: np.where((a > b) | np.isnan(a), a, b),
    RowOperation.MIN: lambda a, b: np.where((a < b) | np.isnan(a), a, b),
    RowOperation.EQ: np.equal,
    RowOperation.NE: np.not_equal,
    RowOperation.LT: np.less,
    RowOperation.LE: np.less_equal,
    RowOperation.GT: np.greater,
    RowOperation.GE: np.greater_equal,
    RowOperation.AND: np.logical_and,
    RowOperation.OR: np.logical_or,
    RowOperation.NOT: np.logical_not,
    RowOperation.SELECT: lambda a, b, c: np.where(a != 0, c, b),
}
OF_TRUTH = {RowOperation.AND, RowOperation.OR, RowOperation.NOT}
COMPARES = [
    operation for operation in RowOperation if 11 <= operation <= 16
]  # what gives truth

numbers = st.sampled_from(
    [0.0, -0.0, 1.0, -2.5, 0.1, 3e38, 1e-38, float("inf"), float("-inf"), float("nan")]
)


def flushed(array):
    """The array with zeros in place of denormal numbers."""
    is_denormal = np.abs(array) < np.finfo(np.float32).tiny
    return np.where(is_denormal, np.copysign(np.float32(0), array), array)


def computed(code, results, constants, tables, indices, gradients):
    """The new rows of each table, by numpy: operation by operation, on whole arrays."""
    registers = [table[indices] for table in tables]
    registers += [gradients, *(np.full_like(gradients, c) for c in constants)]
    with np.errstate(all="ignore"):
        for operation, _, *operands in code.tolist():
            function = NUMPY[RowOperation(operation)]
            count = function.nin if isinstance(function, np.ufunc) else None
            count = count or function.__code__.co_argcount
            some = [flushed(registers[number]) for number in operands[:count]]
            registers.append(function(*some).astype(np.float32))
    return [flushed(registers[number]) for number in results]


@st.composite
def programs(draw):
    """Code of operations at random, where truth is made by comparisons alone."""
    tables, constants = draw(st.integers(1, 3)), draw(st.lists(numbers, max_size=3))
    known = tables + 1 + len(constants)
    truths: list[int] = []
    code = []
    for place in range(known, known + draw(st.integers(0, 8))):
        operations = [x for x in RowOperation if truths or x not in OF_TRUTH]
        operation = draw(st.sampled_from(operations))
        pool = truths if operation in OF_TRUTH else list(range(place))
        operands = [draw(st.sampled_from(pool)) for _ in range(3)]
        if operation in OF_TRUTH or operation in COMPARES:
            truths.append(place)
        code.append([operation, place, *operands])
    results = draw(
        st.lists(
            st.integers(0, known + len(code) - 1), min_size=tables, max_size=tables
        )
    )
    return (
        np.array(code, np.int32).reshape(-1, 5),
        np.array(results, np.int32),
        np.array(constants, np.float32),
    )


@needs_loops
@given(programs(), st.sampled_from([1, 3, 16, 64, 511, 512, 700]), st.data())
def test_programs_compute_what_numpy_computes(program, length, data):
    code, results, constants = program
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    rows, count = 40, data.draw(st.integers(0, 40))
    some = data.draw(st.lists(numbers, min_size=1, max_size=10))
    tables = [
        np.where(
            rng.random((rows, length)) < 0.3,
            rng.choice(np.array(some, np.float32), (rows, length)),
            rng.standard_normal((rows, length), np.float32),
        ).astype(np.float32)
        for _ in results
    ]
    indices = rng.permutation(rows)[:count]
    gradients = rng.standard_normal((count, length), np.float32)
    want = [table.copy() for table in tables]
    new = computed(code, results, constants, tables, indices, gradients)
    for table, fresh in zip(want, new, strict=True):
        table[indices] = fresh
    LoopProgram(code, results).update(constants, tables, indices, gradients)
    for got, wanted in zip(tables, want, strict=True):
        # Copied and not computed, a denormal number stays.
        np.testing.assert_array_equal(flushed(got), flushed(wanted))


@needs_loops
def test_denormal_numbers_are_zero_as_in_xla():
    table = np.full((1, 4), 1e-30, np.float32)
    code = np.array([[RowOperation.MUL, 2, 0, 1, 0]], np.int32)
    gradient = np.full((1, 4), 1e-9, np.float32)
    want = np.asarray(jax.jit(lambda a, b: a * b)(table, gradient))
    program = LoopProgram(code, np.array([2], np.int32))
    program.update(np.zeros(0, np.float32), [table], np.zeros(1, np.intp), gradient)
    np.testing.assert_array_equal(table, want)
    assert np.float32(1e-30) * np.float32(1e-9) != 0, "only while the loop runs"


@pytest.mark.parametrize("width", [1, 2, 4, 8, 12, 16, 32, 64, 100, 128, 256, 5000])
def test_rows_are_copied_from_and_to_any_place(width):
    rng = np.random.default_rng(width)
    table = rng.integers(0, 256, (50, width)).astype(np.uint8)
    indices = rng.permutation(50)[:33]
    odd = np.zeros(33 * 8 + 1, np.uint8)[1:].view(np.int64)  # as within a message
    odd[:] = indices
    out = np.zeros((33, width), np.uint8)
    take_rows(as_rows(table), odd, as_rows(out))
    np.testing.assert_array_equal(out, table[indices])
    new = rng.integers(0, 256, (33, width)).astype(np.uint8)
    want = table.copy()
    want[indices] = new
    put_rows(as_rows(table), odd, as_rows(new))
    np.testing.assert_array_equal(table, want)


def one_step(tables=1, constants=0, operation=RowOperation.ADD, **fields):
    known = tables + 1 + constants
    code = np.array([[operation, known, 0, 1, 0]], np.int32)
    for place, number in fields.get("code", {}).items():
        code[0, place] = number
    results = np.array([fields.get("result", known)] * tables, np.int32)
    return LoopProgram(code, results)


@needs_loops
@pytest.mark.parametrize("index", [-1, 5, 2**40])
def test_an_index_outside_changes_nothing(index):
    table = np.arange(20, dtype=np.float32).reshape(5, 4)
    before, gradient = table.copy(), np.ones((3, 4), np.float32)
    indices = np.array([0, index, 2])
    none = np.zeros(0, np.float32)
    with pytest.raises(IndexError, match=r"\b5 rows"):
        one_step().update(none, [table], indices, gradient)
    with pytest.raises(IndexError, match=r"\b5 rows"):
        put_rows(as_rows(table), indices, as_rows(gradient))
    with pytest.raises(IndexError, match=r"\b5 rows"):
        take_rows(as_rows(table), indices, as_rows(gradient))
    np.testing.assert_array_equal(table, before)


@needs_loops
@pytest.mark.parametrize(
    "program",
    [
        one_step(code={0: 21}),
        one_step(code={0: -1}),
        one_step(code={1: 3}),  # its result is not the next register
        one_step(code={2: 2}),  # made of itself
        one_step(code={4: -1}),
        one_step(result=3),
        one_step(result=-1),
        LoopProgram(np.zeros((MOST_REGISTERS, 5), np.int32), np.zeros(1, np.int32)),
    ],
)
def test_programs_that_would_leave_their_registers_are_refused(program):
    table, gradient = np.zeros((5, 4), np.float32), np.ones((1, 4), np.float32)
    with pytest.raises(ValueError, match="fit"):
        program.update(np.zeros(0, np.float32), [table], np.zeros(1, np.intp), gradient)
    np.testing.assert_array_equal(table, 0)


@needs_loops
def test_arrays_that_do_not_fit_are_refused():
    none, at = np.zeros(0, np.float32), np.zeros(2, np.intp)
    table, gradient = np.zeros((5, 4), np.float32), np.ones((2, 4), np.float32)
    for wrong in (np.zeros((5, 3), np.float32), np.zeros(21, np.float32)):
        with pytest.raises(ValueError, match="fit"):
            one_step().update(none, [wrong], at, gradient)
    with pytest.raises(ValueError, match="fit"):
        one_step(2).update(none, [table], at, gradient)
    with pytest.raises(ValueError, match="tables"):
        one_step().update(none, [table] * (MOST_TABLES + 1), at, gradient)
    with pytest.raises(ValueError, match="fit"):
        take_rows(as_rows(table), at, as_rows(gradient)[:1])
    table.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        one_step().update(none, [table], at, gradient)


WITHOUT = """
import sys
sys.modules["zstrat.native._loops"] = None
import numpy as np
from zstrat.native import IS_BUILT, put_rows, take_rows
assert not IS_BUILT
table, out = np.arange(9, dtype="i8"), np.zeros(2, "i8")
take_rows(table, np.array([4, 2]), out)
put_rows(table, np.array([0, 8]), out)
print(out.tolist(), table.tolist())
"""


def test_without_the_extension_numpy_copies():
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT], check=True, capture_output=True, text=True
    )
    assert run.stdout.split("\n")[0] == "[4, 2] [4, 1, 2, 3, 4, 5, 6, 7, 2]"

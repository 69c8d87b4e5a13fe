"""Division of rows truncates integers towards zero; updates of rows of other dtypes."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import combined

import zstrat as zs

DIVIDED = [("int8", -128, 127), ("int32", -(2**31), 2**31 - 1), ("uint16", 0, 65535)]


def slices(indices, rows, like):
    return zs.IndexedSlices(np.asarray(rows, like.dtype), indices, like.shape)


def cut_off(dividend, divisor):
    """Of Python's integers, which are exact."""
    quotient = abs(int(dividend)) // abs(int(divisor))
    return -quotient if (dividend < 0) != (divisor < 0) else quotient


def divided(before, indices, rows):
    after = before.copy()
    for index, row in zip(indices, rows, strict=True):
        for column, divisor in enumerate(row):
            after[index, column] = cut_off(after[index, column], divisor)
    return after


def one_device():
    return zs.OneDeviceStrategy("CPU:0")


@pytest.mark.parametrize(("dtype", "low", "high"), DIVIDED)
def test_a_step_divides_as_integers_do(dtype, low, high):
    rng = np.random.default_rng(0)
    before = rng.integers(low, high, (5, 4), dtype=dtype, endpoint=True)
    before[0, :2] = low, high
    indices = [3, 0, 3, 1, 3, 0]
    rows = rng.integers(-5 if low else 1, 5, (6, 4), dtype=dtype, endpoint=True)
    rows[rows == 0] = 3
    rows[rows == np.array(-1).astype(dtype)] = 2  # the least integer has no negative
    with one_device().scope():
        v = zs.Variable(before)

    @zs.function
    def step():
        v.scatter_div(slices(indices, rows, v))
        return v.value()

    seen = step()
    expected = divided(before, indices, rows)
    assert (seen.dtype, v.numpy().dtype) == (dtype, dtype)
    np.testing.assert_array_equal(seen, expected)
    np.testing.assert_array_equal(v.numpy(), expected)


def test_divisors_of_one_row_whose_product_does_not_fit():
    with one_device().scope():
        v = zs.Variable(np.array([[9], [2**31 - 1]], np.int32))

    @zs.function
    def step():
        v.scatter_div(slices([0, 0, 1, 1], [[65536]] * 4, v))

    step()
    np.testing.assert_array_equal(v.numpy(), [[0], [0]])


def test_no_rows():
    with one_device().scope():
        v = zs.Variable(np.array([[9], [7]], np.int32))
    zs.function(lambda: v.scatter_div(slices(np.zeros(0, int), np.zeros((0, 1)), v)))()
    np.testing.assert_array_equal(v.numpy(), [[9], [7]])


def test_a_row_that_is_not_there_is_left_out():
    with one_device().scope():
        v = zs.Variable(np.array([[9], [7]], np.int32))

    @zs.function
    def step(index):
        v.scatter_div(zs.IndexedSlices(jnp.full((2, 1), 2, jnp.int32), index, v.shape))

    step(jnp.array([-1, 2]))
    np.testing.assert_array_equal(v.numpy(), [[9], [7]])


def test_a_read_after_it_in_the_same_jit():
    with one_device().scope():
        v = zs.Variable(np.array([[9], [-9]], np.int32))

    @zs.function
    def step():
        v.scatter_div(slices([0, 1], [[2], [2]], v))
        return jax.jit(lambda: v.value() * 2)()

    np.testing.assert_array_equal(step(), [[8], [-8]])


NARROW = ["int8", "uint8", "int32", "float16", "bfloat16"]
OPS = ["add", "sub", "mul", "div", "min", "max", "update"]


@pytest.mark.parametrize(("op", "dtype"), combined(OPS, NARROW))
def test_scatter_keeps_the_dtype(op, dtype):
    with one_device().scope():
        v = zs.Variable(jnp.full((3, 1), 6, dtype))
    six, two = 6, 2
    expected = {
        "add": six + two + two,
        "sub": six - two - two,
        "mul": six * two * two,
        "div": 1 if dtype[0] in "iu" else 1.5,
        "min": two,
        "max": six,
        "update": two,
    }[op]

    @zs.function
    def step():
        rows = jnp.full((2, 1), two, dtype)
        getattr(v, f"scatter_{op}")(zs.IndexedSlices(rows, np.array([1, 1]), v.shape))
        return v.value()

    seen = step()
    assert (seen.dtype, v.numpy().dtype) == (jnp.dtype(dtype), jnp.dtype(dtype))
    np.testing.assert_array_equal(np.asarray(seen, float), [[6], [expected], [6]])


@pytest.mark.parametrize(
    ("op", "dtype"), combined(["assign", "assign_add", "assign_sub"], NARROW)
)
def test_dense_updates_keep_the_dtype(op, dtype):
    with one_device().scope():
        v = zs.Variable(jnp.full((2,), 6, dtype))

    @zs.function
    def step():
        getattr(v, op)(jnp.full((2,), 2, dtype))
        return v.value()

    seen = step()
    assert (seen.dtype, v.numpy().dtype) == (jnp.dtype(dtype), jnp.dtype(dtype))
    expected = {"assign": 2, "assign_add": 8, "assign_sub": 4}[op]
    np.testing.assert_array_equal(np.asarray(seen, float), [expected] * 2)


@pytest.mark.parametrize("op", ["assign", "assign_add", "assign_sub"])
def test_floats_for_integers_are_refused_in_a_step_as_outside(op):
    with one_device().scope():
        v = zs.Variable(np.array([6, 6], np.int32))
    with pytest.raises(ValueError, match="'Variable'"):
        getattr(v, op)(np.float32([1.5, 1.5]))
    with pytest.raises(ValueError, match="'Variable'"):
        zs.function(lambda: getattr(v, op)(jnp.float32([1.5, 1.5])))()
    assert v.numpy().dtype == np.int32


def test_large_integers_outside_of_a_step_lose_no_digit():
    big = 2**62 + 1
    for scope in (contextlib.nullcontext(), one_device().scope()):
        with scope:
            v = zs.Variable(np.array([[big], [-big], [9]]), dtype="int64")
        v.scatter_div(slices([0, 1, 1], [[1], [3], [-1]], v))
        expected = divided(np.array([[big], [-big]]), [0, 1, 1], [[1], [3], [-1]])
        np.testing.assert_array_equal(v.numpy()[:2], expected)


def test_zero_divides_no_integer():
    v = zs.Variable(np.array([[9]], np.int32), name="v")
    with one_device().scope():
        w = zs.Variable(np.array([[9]], np.int32), name="w")
    divide = zs.function(lambda: v.scatter_div(slices([0], [[0]], v)))
    for division in (divide, lambda: w.scatter_div(slices([0], [[0]], w))):
        with pytest.raises(zs.InvalidArgumentError):
            division()
    assert v.numpy() == w.numpy() == 9


@pytest.mark.parametrize(
    ("dtype", "value", "divisors"),
    [("float16", 60000, [300, 300]), ("float32", 1e38, [1e30, 1e30])],
)
def test_floats_are_divided_one_after_the_other(dtype, value, divisors):
    with one_device().scope():
        v = zs.Variable(np.array([[value], [1]], dtype))

    @zs.function
    def step(rows):
        v.scatter_div(zs.IndexedSlices(rows, [0, 0]))

    step(np.array(divisors, dtype).reshape(2, 1))
    first, second = np.array(divisors, dtype)
    # The product of the divisors is infinite in the dtype.
    assert v.numpy()[0, 0] == np.array(value, dtype) / first / second != 0


def test_a_step_that_would_divide_by_zero_has_no_effect():
    v, w = zs.Variable(1.0), zs.Variable(1.0)
    divided = zs.Variable([[4], [5]], dtype="int32")

    @zs.function
    def step(rows):
        v.assign_add(1.0)
        divided.scatter_div(zs.IndexedSlices(rows, np.array([0])))
        w.assign_add(1.0)

    with pytest.raises(zs.InvalidArgumentError):
        step(np.array([[0]], np.int32))
    assert (v.numpy(), w.numpy()) == (1, 1)
    step(np.array([[2]], np.int32))
    assert (v.numpy(), w.numpy()) == (2, 2)
    assert divided.numpy().tolist() == [[2], [5]]


def test_many_rows_of_one_index():
    indices = jnp.array([1] * 100 + [0, 1, 7])  # 7 is not there
    rows = np.full((103, 1), 1.5, np.float32)
    with one_device().scope():
        v = zs.Variable(np.full((2, 1), 1e9, np.float32))
    zs.function(lambda at: v.scatter_div(zs.IndexedSlices(rows, at)))(indices)
    expected = [[1e9 / 1.5], [1e9 / 1.5**101]]
    np.testing.assert_allclose(v.numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize("where", ["here", "on a device"])
@pytest.mark.parametrize("when", ["outside", "in a step"])
@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("bool", "scatter_div"),
        ("bool", "scatter_sub"),
        ("complex64", "scatter_min"),
        ("complex64", "scatter_max"),
    ],
)
def test_operations_that_a_dtype_lacks_are_refused(where, when, dtype, name):
    with one_device().scope() if where == "on a device" else contextlib.nullcontext():
        v = zs.Variable(np.ones((2, 1), dtype), name="v")

    def update():
        getattr(v, name)(slices([0], [[1]], v))

    with pytest.raises(zs.InvalidArgumentError, match=rf"'v'.*not defined.*{dtype}"):
        (update if when == "outside" else zs.function(update))()
    np.testing.assert_array_equal(v.numpy(), np.ones((2, 1), dtype))


def test_booleans_are_added_and_multiplied_as_numpy_does():
    before, rows = np.array([[False], [True]]), np.array([[True], [False]])
    for name, expected in (
        ("scatter_add", before | rows),
        ("scatter_mul", before & rows),
    ):
        with one_device().scope():
            v = zs.Variable(before)
        update = getattr(v, name)
        zs.function(lambda update=update: update(zs.IndexedSlices(rows, [0, 1])))()
        np.testing.assert_array_equal(v.numpy(), expected)

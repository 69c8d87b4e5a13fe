"""Reading and updating a variable that is stored in this process."""

import asyncio
import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zstrat.variables as zv
from zstrat import initializers
from zstrat.wire import DTYPES, UpdateOp


@pytest.mark.shows("tf.Variable(initial_value=)")
def test_python_values_get_tf_dtypes_and_arrays_keep_theirs():
    dtypes = {
        zv.Variable(v).dtype.name for v in (1.0, [1.0, 2.0], np.float32(1), jnp.ones(2))
    }
    assert dtypes == {"float32"}
    assert zv.Variable(3).dtype == zv.Variable([1, 2]).dtype == np.int32
    assert zv.Variable(True).dtype == np.bool_
    with pytest.warns(zv.DowncastWarning):
        wide = [zv.Variable(np.zeros(2, order)).dtype for order in ("<f8", ">f8")]
    assert wide == [np.float64, np.dtype("<f8")]
    assert zv.Variable(jnp.ones(2, jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", ["float16", np.float16, jnp.float16, np.dtype("f2")])
def test_dtype_may_be_a_name_a_numpy_or_a_jax_type(dtype):
    variable = zv.Variable([1.0, 2.0], dtype=dtype)
    assert variable.spec.dtype == "float16"
    assert variable.numpy().dtype == np.float16


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_that_travels_can_be_a_variable(name):
    variable = zv.Variable(np.ones((2, 2)), dtype=name)
    variable.assign(np.ones((2, 2), DTYPES[name]))
    assert variable.numpy().dtype == DTYPES[name]


@pytest.mark.parametrize("value", ["text", object(), np.array("2020", "M8[Y]")])
def test_values_that_are_not_arrays_of_numbers_are_refused(value):
    with pytest.raises(TypeError, match="w"):
        zv.Variable(value, name="w")


def test_a_dtype_that_does_not_travel_is_named():
    with pytest.raises(TypeError, match="'Variable'"):
        zv.Variable(1, dtype="int4")


def test_a_random_key_is_kept_as_its_data():
    with pytest.raises(TypeError, match=r"'w'.*key_data"):
        zv.Variable(jax.random.key(0), name="w")


def test_an_initial_value_is_needed():
    with pytest.raises(ValueError, match=r"'w'.*initial_value"):
        zv.Variable(name="w", shape=(2,), dtype="float32")


@pytest.mark.parametrize("name", [3, b"w", ("w",)])
def test_a_name_is_text(name):
    with pytest.raises(TypeError, match="name="):
        zv.Variable(1.0, name=name)


def test_a_given_shape_must_be_the_values():
    assert zv.Variable(np.float32([[0, 0, 0]]), shape=(1, 3)).shape == (1, 3)
    for shape in (2, np.int64(2), np.array([2])):
        assert zv.Variable([0.0, 1.0], shape=shape).shape == (2,)
    with pytest.raises(ValueError, match=r"\(2,\).*\(3,\)"):
        zv.Variable([0.0, 1.0], shape=3)


@pytest.mark.parametrize("shape", [(-1, 4), ("a", 4), (2.5,), "34"])
def test_a_shape_that_is_none_names_the_variable(shape):
    with pytest.raises(ValueError, match=r"'w'.*shape="):
        zv.Variable(np.zeros, name="w", shape=shape, dtype="float32")


def test_a_misspelt_dtype_names_the_variable():
    with pytest.raises(TypeError, match=r"'w'.*flaot32.*float32"):
        zv.Variable(1.0, name="w", dtype="flaot32")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "numbers, got NoneType None"),
        ("hello", "numbers, got str 'hello'"),
        (object(), "numbers, got object"),
        ([[1, 2], [3]], "inhomogeneous"),
    ],
)
def test_what_is_no_array_names_the_variable_and_what_was_given(value, words):
    with pytest.raises(ValueError, match=f"'w'.*{words}"):
        zv.Variable([1.0, 2.0], name="w").assign(value)


def test_enums_are_checked():
    with pytest.raises(ValueError, match="VariableAggregation"):
        zv.Variable(1.0, aggregation="sum")
    with pytest.raises(ValueError, match="VariableSynchronization"):
        zv.Variable(1.0, synchronization=zv.VariableAggregation.SUM)


def test_callables_get_the_arguments_that_they_take():
    assert zv.Variable(lambda: 2.0).numpy() == 2.0
    assert zv.Variable(lambda: [2.0], shape=(1,)).shape == (1,)
    seen = []

    def initializer(shape, dtype):
        seen.append((shape, dtype))
        return np.ones(shape, dtype)

    assert zv.Variable(initializer, shape=(2, 3)).dtype == np.float32
    assert zv.Variable(initializer, shape=(2,), dtype="float16").dtype == np.float16
    assert seen == [((2, 3), np.float32), ((2,), np.float16)]
    with pytest.raises(TypeError):
        zv.Variable(initializer)


def test_the_error_of_an_initializer_with_a_key_says_how_to_bind_it():
    with pytest.raises(ValueError, match=r"functools\.partial"):
        zv.Variable(jax.nn.initializers.ones, shape=(2,))


def test_a_value_that_was_read_never_changes():
    variable = zv.Variable([1.0, 2.0])
    before = variable.numpy()
    variable.assign_add([1.0, 1.0])
    variable.scatter_add(zv.IndexedSlices(np.ones(1, np.float32), [0]))
    np.testing.assert_array_equal(before, [1.0, 2.0])
    with pytest.raises(ValueError, match="read-only"):
        before[0] = 5.0
    np.testing.assert_array_equal(variable.numpy(), [3.0, 3.0])


def test_the_initial_array_is_copied():
    array = np.zeros(2, np.float32)
    variable = zv.Variable(array)
    array[0] = 7.0
    np.testing.assert_array_equal(variable.numpy(), [0.0, 0.0])


@pytest.mark.shows("tf.Variable")
def test_updates_return_the_variable():
    variable = zv.Variable([1.0, 2.0])
    assert variable.assign([3.0, 4.0], read_value=False) is variable
    assert variable.assign_add([1.0, 1.0]).assign_sub([2.0, 0.0]) is variable
    np.testing.assert_array_equal(variable, [2.0, 5.0])


@pytest.mark.parametrize("method", ["assign", "assign_add", "assign_sub"])
def test_shapes_must_be_equal_without_broadcasting(method):
    variable = zv.Variable(np.zeros((2, 3), np.float32), name="w")
    for value in (1.0, np.zeros(3), np.zeros((2, 3, 1))):
        with pytest.raises(ValueError, match=r"'w'.*\(2, 3\)"):
            getattr(variable, method)(value)


def test_dtypes_of_the_same_kind_are_converted_unless_they_are_jax_arrays():
    variable = zv.Variable([0.0, 0.0], name="w")
    variable.assign(np.ones(2))
    variable.assign([1, 2])
    variable.assign(jnp.ones(2) * 2)
    half = zv.Variable(np.zeros(2, np.float16))
    with pytest.raises(ValueError, match="'Variable'"):
        half.assign(jnp.ones(2, jnp.float32))
    whole = zv.Variable([0, 0])
    with pytest.raises(ValueError, match="'Variable'"):
        whole.assign([0.5, 0.5])
    with pytest.raises(ValueError, match="dtype mismatch"):
        variable.assign(np.ones(2, np.complex64))


_BEYOND = [
    ("int32", 2**40 + 7),
    ("int32", np.int64(-(2**31)) - 1),
    ("uint8", 300),
    ("uint8", [0, -1]),
    ("uint8", np.array([0, 256])),
    ("uint8", jnp.array(-1, jnp.int32)),
    ("uint64", np.int64(-1)),
    ("int64", np.uint64(2**63)),
]


@pytest.mark.parametrize(("dtype", "value"), _BEYOND)
def test_integers_that_do_not_fit_are_refused(dtype, value):
    with pytest.raises(ValueError, match=f"initial value of variable 'n'.*{dtype}"):
        zv.Variable(value, name="n", dtype=dtype)
    variable = zv.Variable(np.zeros(np.shape(value)), name="n", dtype=dtype)
    for update in (variable.assign, variable.assign_add):
        with pytest.raises(ValueError, match=r"'n'.*(fit|mismatch)"):
            update(value)
    assert not np.any(variable.numpy())


@pytest.mark.parametrize(
    "use",
    [
        zv.Variable,
        lambda x: zv.Variable(np.zeros(2, "float32")).assign(x),
        lambda x: zv.Variable(np.zeros(2, "float32")).scatter_add(
            zv.IndexedSlices(x, np.arange(2))
        ),
    ],
)
def test_a_masked_array_does_not_lose_its_mask(use):
    """jax takes none, either."""
    missing = np.ma.array([1, 2], mask=[False, True], dtype="float32")
    with pytest.raises(ValueError, match=r"filled\(0\)"):
        use(missing)
    use(missing.filled(0))


def test_integers_that_fit_are_converted_and_python_ones_are_int32():
    with pytest.raises(ValueError, match=r"\b3000000000\b"):
        zv.Variable([1, 3_000_000_000])
    assert zv.Variable(3_000_000_000, dtype="int64").numpy() == 3_000_000_000
    variable = zv.Variable(np.array([0, 0], np.uint8))
    variable.assign(np.array([0, 255], np.int64))
    assert variable.numpy().tolist() == [0, 255]
    rows = zv.IndexedSlices(np.array([-1]), [0])
    with pytest.raises(ValueError, match=r"contains -1.*uint8"):
        variable.scatter_add(rows)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (1.5, "int32"),
        (np.array([0.0, np.nan], np.float32), "int32"),
        (np.array([2.0**40]), "int32"),
        (2.5, "bool"),
        (3 + 2j, "float32"),
        ([1, 2.5], "int64"),
        ([0, 2], "bool"),
    ],
)
def test_a_first_value_that_its_dtype_does_not_have_is_refused(value, dtype):
    with pytest.raises(ValueError, match=rf"'v'.*which dtype {dtype} does not have"):
        zv.Variable(value, dtype=dtype, name="v")
    assert zv.Variable(np.array([2.0, -3.0]), dtype=np.int8).numpy().tolist() == [2, -3]


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        ([2**63 + 1, 1], "uint64"),
        ([2**64 - 1, 1], "uint64"),
        ([np.uint64(2**63 + 1), 1], "uint64"),
        ([2**53 + 1, 1.0], "int64"),
        (-(2**63), "int64"),
    ],
)
def test_integers_beyond_the_digits_of_floats_stay_exact(value, dtype):
    assert zv.Variable(value, dtype=dtype).numpy().tolist() == value
    made = initializers.constant(value)(np.shape(value), dtype)
    assert made.tolist() == value


_SCATTERS = {
    "scatter_add": np.add,
    "scatter_sub": np.subtract,
    "scatter_mul": np.multiply,
    "scatter_div": np.divide,
    "scatter_min": np.minimum,
    "scatter_max": np.maximum,
    "scatter_update": lambda old, new: new,
}


@pytest.mark.parametrize("name", sorted(_SCATTERS))
@given(data=st.data())
def test_scatters_are_row_by_row(name, data):
    rows = data.draw(st.integers(0, 6))
    index = data.draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows))
    rng = np.random.default_rng(rows)
    start = rng.uniform(1, 2, (4, 2)).astype(np.float32)
    given_rows = rng.uniform(1, 2, (rows, 2)).astype(np.float32)
    expected = start.copy()
    for at, row in zip(index, given_rows, strict=True):
        expected[at] = _SCATTERS[name](expected[at], row)
    variable = zv.Variable(start)
    slices = zv.IndexedSlices(given_rows, np.array(index, np.int32))
    assert getattr(variable, name)(slices) is variable
    np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("slices", "error", "words"),
    [
        (
            zv.IndexedSlices(np.ones((1, 2)), [4]),
            IndexError,
            r"\b4\b",
        ),
        (zv.IndexedSlices(np.ones((1, 2)), [-1]), IndexError, r"\b1\b"),
        (zv.IndexedSlices(np.ones((1, 2)), [0.5]), ValueError, "scatter_add"),
        (zv.IndexedSlices(np.ones((1, 2)), [[0]]), ValueError, "scatter_add"),
        (zv.IndexedSlices(np.ones((2, 2)), [0]), ValueError, "shape mismatch"),
        (zv.IndexedSlices(np.ones((1, 3)), [0]), ValueError, "shape mismatch"),
    ],
)
def test_bad_rows_are_refused_with_words(slices, error, words):
    variable = zv.Variable(np.zeros((4, 2), np.float32), name="table")
    with pytest.raises(error, match=words):
        variable.scatter_add(slices)
    np.testing.assert_array_equal(variable.numpy(), 0)


def test_scatter_into_a_scalar_is_refused():
    with pytest.raises(ValueError, match=r"scatter_add.*'Variable'"):
        zv.Variable(1.0).scatter_add(zv.IndexedSlices(np.ones(1), [0]))


def test_sparse_read_keeps_the_order_of_the_indices():
    variable = zv.Variable(np.arange(6.0).reshape(3, 2), dtype="float32")
    rows = variable.sparse_read([[2, 0], [2, 1]])
    assert rows.shape == (2, 2, 2)
    np.testing.assert_array_equal(rows[0], [[4.0, 5.0], [0.0, 1.0]])
    with pytest.raises(IndexError, match="no row 3"):
        variable.sparse_read([3])
    with pytest.raises(ValueError, match="'Variable'"):
        variable.sparse_read([0.5])
    with pytest.raises(ValueError, match="'Variable'"):
        zv.Variable(1.0).sparse_read([0])


async def test_every_wait_has_an_awaitable_twin():
    variable = zv.Variable(np.zeros((2, 2), np.float32))
    one = np.ones((2, 2))
    assert await variable.assign_async(one) is variable
    await variable.assign_add_async(one)
    await variable.assign_sub_async(one * 0.5)
    row = zv.IndexedSlices(np.ones((1, 2)), [1])
    await variable.scatter_async(UpdateOp.SCATTER_MUL, row)
    np.testing.assert_array_equal(await variable.read_value_async(), one * 1.5)
    np.testing.assert_array_equal(await variable.value_async(), one * 1.5)
    np.testing.assert_array_equal(await variable.sparse_read_async([1]), [[1.5, 1.5]])
    with pytest.raises(ValueError, match="'Variable'"):
        await variable.assign_async(1.0)


@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        ("float32", UpdateOp.ASSIGN),
        ("float32", UpdateOp.OPTIMIZE_ROWS),
        ("bool", UpdateOp.SCATTER_DIV),
        ("complex64", UpdateOp.SCATTER_MIN),
    ],
)
async def test_scatter_async_takes_the_operations_that_blocking_methods_have(dtype, op):
    variable = zv.Variable(np.ones(3), dtype=dtype)
    rows = zv.IndexedSlices(np.zeros(1, dtype), [0])
    with pytest.raises(ValueError, match=op.name):
        await variable.scatter_async(op, rows)
    np.testing.assert_array_equal(variable.numpy(), np.ones(3, dtype))


async def test_blocking_methods_work_under_a_running_loop():
    variable = zv.Variable(1.0)
    variable.assign_add(1.0)
    assert variable.numpy() == 2.0
    assert asyncio.get_running_loop().is_running()


@pytest.mark.shows("Variable.name")
def test_names_devices_and_flags():
    variable = zv.Variable([1.0, 2.0], name="w", trainable=False)
    assert (variable.name, variable.shape, variable.ndim, variable.size) == (
        "w",
        (2,),
        1,
        2,
    )
    assert variable.device == "/job:localhost/replica:0/task:0/device:CPU:0"
    assert not variable.trainable
    assert variable.spec.nbytes == 8
    assert zv.Variable(1.0).name == "Variable"
    assert "'w'" in repr(variable)
    spec = zv.VariableSpec(3, "w", (2,), "float32", ps=2)
    assert spec.device == "/job:ps/replica:0/task:2/device:CPU:0"


def test_a_pickled_handle_is_unbound():
    variable = zv.Variable([1.0, 2.0], name="w")
    handle = pickle.loads(pickle.dumps(variable))
    assert handle.spec == variable.spec
    for use in (handle.numpy, handle.value, lambda: handle.assign([0.0, 0.0])):
        with pytest.raises(RuntimeError, match="'w'"):
            use()
    with pytest.raises(RuntimeError, match="CPU"):
        asyncio.run(handle.read_value_async())
    with pytest.raises(RuntimeError, match="CPU"):
        asyncio.run(handle.assign_async([0.0, 0.0]))


def test_a_deep_copy_has_a_value_of_its_own():
    variable = zv.Variable([1.0, 2.0], name="w", trainable=False)
    twin = copy.deepcopy({"w": variable})["w"]
    twin.assign([5.0, 5.0])
    np.testing.assert_array_equal(variable.numpy(), [1.0, 2.0])
    assert twin.name == "w"
    assert not twin.trainable
    assert twin.spec.key != variable.spec.key


def test_the_value_may_come_from_another_variable():
    first = zv.Variable([1.0, 2.0])
    second = zv.Variable(first)
    second.assign_add(first)
    np.testing.assert_array_equal(second.numpy(), [2.0, 4.0])
    assert second.dtype == np.float32

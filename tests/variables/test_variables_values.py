"""Reading and updating a variable that is stored in this process."""

import asyncio
import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
    assert zv.Variable([1j]).dtype == np.complex64
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


def created(value=None, **how):
    return lambda: zv.Variable(value, **{"name": "w", **how})


@pytest.mark.parametrize(
    ("create", "error", "words"),
    [
        *[(created(x), TypeError, "'w'") for x in ("text", np.array("2020", "M8[Y]"))],
        (created(object()), TypeError, "'w'"),
        (created(1, dtype="int4"), TypeError, "'w'"),
        (created(1.0, dtype="flaot32"), TypeError, r"'w'.*flaot32.*float32"),
        (created(jax.random.key(0)), TypeError, r"'w'.*key_data"),
        (created(shape=(2,), dtype="float32"), ValueError, r"'w'.*initial_value"),
        *[(created(1.0, name=x), TypeError, "name=") for x in (3, b"w", ("w",))],
        *[
            (created(np.zeros, shape=x, dtype="float32"), ValueError, r"'w'.*shape=")
            for x in ((-1, 4), ("a", 4), (2.5,), "34")
        ],
        (created(1.0, aggregation="sum"), ValueError, "VariableAggregation"),
        (
            created(1.0, synchronization=zv.VariableAggregation.SUM),
            ValueError,
            "VariableSynchronization",
        ),
        (
            created(jax.nn.initializers.ones, shape=(2,)),
            ValueError,
            r"functools\.partial",
        ),
    ],
)
def test_variables_that_cannot_be_created_are_refused(create, error, words):
    with pytest.raises(error, match=words):
        create()


def test_a_given_shape_must_be_the_values():
    assert zv.Variable(np.float32([[0, 0, 0]]), shape=(1, 3)).shape == (1, 3)
    for shape in (2, np.int64(2), np.array([2])):
        assert zv.Variable([0.0, 1.0], shape=shape).shape == (2,)
    with pytest.raises(ValueError, match=r"\(2,\).*\(3,\)"):
        zv.Variable([0.0, 1.0], shape=3)


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

"""reduce, gather and local results, against numpy on all the values together."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import zstrat.variables as zv
from zstrat.collectives import ReduceOp
from zstrat.strategy import PerReplica, ValueContext, get_strategy

ARRAYS = hnp.arrays(
    np.float64,
    hnp.array_shapes(min_dims=1, max_dims=3, max_side=4),
    elements=st.integers(-100, 100),
)


@pytest.fixture
def three(make_cluster):
    return make_cluster(devices=3).strategy


@pytest.fixture
def one(make_cluster):
    return make_cluster(devices=1).strategy


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_reduce_and_gather_are_numpys_on_all_the_rows(three, data):
    first = data.draw(ARRAYS)
    axis = data.draw(st.integers(-first.ndim, first.ndim - 1))
    shape, parts = list(first.shape), [first]
    for _ in range(2):
        shape[axis] = data.draw(st.integers(1, 4))
        parts.append(np.full(shape, data.draw(st.integers(-9, 9)), np.float64))
    whole = np.concatenate(parts, axis)
    value = PerReplica(tuple(parts))
    np.testing.assert_array_equal(three.gather(value, axis), whole)
    total = three.reduce("sum", value, axis=axis)
    np.testing.assert_allclose(total, whole.sum(axis), rtol=1e-12)
    mean = three.reduce(ReduceOp.MEAN, value, axis=axis)
    np.testing.assert_allclose(mean, whole.mean(axis), rtol=1e-12)


@pytest.mark.shows("tf.distribute.ReduceOp.SUM")
@pytest.mark.shows("tf.distribute.ReduceOp.MEAN")
@pytest.mark.shows("reduce(reduce_op=)", "ReduceOp")
@pytest.mark.parametrize("op", ["sum", "Sum", "SUM", ReduceOp.SUM])
def test_the_operation_is_an_enum_or_a_name_in_any_case(three, op):
    value = PerReplica((1.0, 2.0, 6.0))
    assert three.reduce(op, value, axis=None) == 9.0
    assert three.reduce(ReduceOp.MEAN, value, axis=None) == 3.0


@pytest.mark.shows("ParameterServerStrategy.reduce", "reduce(axis=)")
def test_tensorflows_example_of_axis(make_cluster):
    two = make_cluster(devices=2).strategy
    value = PerReplica((np.arange(4), np.arange(4, 8)))
    np.testing.assert_array_equal(two.reduce("sum", value, None), [4, 6, 8, 10])
    assert two.reduce("sum", value, axis=0) == 28
    uneven = PerReplica((np.arange(4.0), np.array([4.0, 5.0])))
    assert two.reduce("mean", uneven, axis=0) == 2.5
    with pytest.raises(ValueError, match="give an axis"):
        two.reduce("sum", uneven, axis=None)


def test_several_axes_and_trees(three):
    parts = [np.full((2, 3), float(i)) for i in range(3)]
    value = {"a": PerReplica(tuple(parts)), "b": [PerReplica((1, 2, 3))]}
    np.testing.assert_allclose(three.reduce("mean", value["a"], (0, 1)), 1.0)
    np.testing.assert_allclose(three.reduce("mean", value["a"], [0, -1]), 1.0)
    reduced = three.reduce("mean", value, axis=None)
    np.testing.assert_array_equal(reduced["a"], np.ones((2, 3)))
    assert reduced["b"] == [2.0]
    nested = PerReplica(tuple({"x": i} for i in range(3)))
    assert three.reduce("sum", nested, None) == {"x": 3}


def test_integers_keep_their_dtype_in_a_sum_and_become_floats_in_a_mean(three):
    value = PerReplica(tuple(np.int64([i, 2**40]) for i in range(3)))
    total = three.reduce("sum", value, None)
    assert total.dtype == np.int64
    np.testing.assert_array_equal(total, [3, 3 * 2**40])
    assert three.reduce("mean", value, None)[0] == 1.0


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("text", ["a", b"a", np.array(["a", "b"]), np.array([], "U1")])
def test_text_is_not_added_up(three, op, text):
    with pytest.raises(
        TypeError, match=r"numbers are added up, got (b?'a'|\[\]|\['a')"
    ):
        three.reduce(op, PerReplica((text, text, text)), axis=None)


@pytest.mark.parametrize("axis", [1.0, "0", [0, "1"], {0}, True])
def test_an_axis_is_an_integer(three, axis):
    with pytest.raises(TypeError, match="axis must be"):
        three.reduce("mean", PerReplica((np.ones(2),) * 3), axis)


@pytest.mark.parametrize("axis", [1, -2, (0, 5)])
def test_an_axis_is_inside_the_rank(three, axis):
    for op in ("mean", "sum"):
        with pytest.raises(ValueError, match="out of bounds"):
            three.reduce(op, PerReplica((np.ones(2),) * 3), axis)
    with pytest.raises(ValueError, match="axis="):
        three.reduce("mean", PerReplica((1.0, 2.0, 3.0)), 0)


def test_values_that_are_the_same_everywhere(three, one):
    assert three.reduce("mean", 3.0, None) == 3.0
    assert three.reduce("sum", 0, None) == 0
    np.testing.assert_array_equal(three.reduce("sum", np.zeros(2), None), [0, 0])
    for value in (1.0, np.ones(2), jnp.zeros(2)):
        with pytest.raises(ValueError, match="DistributedValues"):
            three.reduce("sum", value, None)
    assert one.reduce("sum", 3.0, None) == 3.0
    assert one.reduce("sum", jnp.ones(4), 0) == 4.0
    variable = zv.Variable([1.0, 2.0])
    assert one.reduce("mean", variable, 0) == 1.5


def test_slices_are_joined(three):
    parts = tuple(
        zv.IndexedSlices(np.full((1, 2), float(i)), np.array([i % 2]), (2, 2))
        for i in range(3)
    )
    joined = three.reduce("sum", PerReplica(parts), None)
    np.testing.assert_array_equal(joined.to_dense(), [[2, 2], [1, 1]])
    averaged = three.reduce("mean", PerReplica(parts), None)
    np.testing.assert_allclose(averaged.values[2], [2 / 3, 2 / 3])
    with pytest.raises(ValueError, match="axis=None"):
        three.reduce("sum", PerReplica(parts), 0)
    with pytest.raises(NotImplementedError, match="IndexedSlices"):
        three.gather(PerReplica(parts), 0)
    with pytest.raises(NotImplementedError, match="IndexedSlices"):
        three.gather(parts[0], 0)


@pytest.mark.shows("ParameterServerStrategy.gather")
def test_tensorflows_examples_of_gather(make_cluster):
    four = make_cluster(devices=4).strategy
    single = np.arange(6).reshape(1, 2, 3)
    value = PerReplica((single,) * 4)
    for axis in range(3):
        gathered = four.gather(value, axis)
        np.testing.assert_array_equal(gathered, np.concatenate([single] * 4, axis))


@pytest.mark.shows("gather(axis=)")
def test_gather_refuses_what_does_not_fit(three, one):
    with pytest.raises(ValueError, match="rank of at least 1"):
        three.gather(PerReplica((1, 2, 3)), 0)
    uneven = PerReplica(tuple(np.ones((1, n)) for n in (2, 3, 3)))
    assert three.gather(uneven, 1).shape == (1, 8)
    with pytest.raises(ValueError, match="every other dimension"):
        three.gather(uneven, 0)
    with pytest.raises(ValueError, match="out of bounds"):
        three.gather(uneven, 2)
    with pytest.raises(ValueError, match="not distributed"):
        three.gather(np.ones(3), 0)
    np.testing.assert_array_equal(one.gather(np.arange(3), 0), np.arange(3))
    np.testing.assert_array_equal(get_strategy().gather(np.ones((2, 1)), 0), [[1], [1]])


@pytest.mark.shows("ParameterServerStrategy.experimental_local_results")
def test_local_results(three):
    value = PerReplica((1, 2, 3))
    assert three.experimental_local_results(value) == (1, 2, 3)
    assert three.experimental_local_results(5) == (5,)
    assert three.experimental_local_results([value, 7]) == ([1, 7], [2, 7], [3, 7])
    assert three.experimental_local_results({"a": 1}) == ({"a": 1},)


@pytest.mark.shows("tf.distribute.ValueContext")
@pytest.mark.shows("ValueContext.num_replicas_in_sync")
@pytest.mark.shows("ValueContext.replica_id_in_sync_group")
@pytest.mark.shows(
    "ParameterServerStrategy.experimental_distribute_values_from_function"
)
def test_values_from_a_function_are_always_wrapped(three, one):
    array = np.array([3.0, 2.0, 1.0])
    value = three.experimental_distribute_values_from_function(
        lambda context: array[context.replica_id_in_sync_group]
    )
    assert three.experimental_local_results(value) == (3.0, 2.0, 1.0)
    same = three.experimental_distribute_values_from_function(
        lambda context: context.num_replicas_in_sync
    )
    assert three.experimental_local_results(same) == (3, 3, 3)
    kinds = three.experimental_distribute_values_from_function(type)
    assert kinds.values == (ValueContext,) * 3
    single = one.experimental_distribute_values_from_function(lambda context: 1)
    assert isinstance(single, PerReplica)


def test_per_replica_is_a_pytree_node_that_shows_its_values():
    value = PerReplica((jnp.ones(2), {"x": 2}))
    assert len(jax.tree.leaves(value)) == 2
    doubled = jax.tree.map(lambda x: x * 2, value)
    assert isinstance(doubled, PerReplica)
    assert doubled.values[1] == {"x": 4}
    assert repr(PerReplica((1, 2))) == "PerReplica:{\n  0: 1,\n  1: 2\n}"


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_random_keys_are_not_added_up(three, op):
    keys = PerReplica([jax.random.key(n) for n in range(3)])
    with pytest.raises(TypeError, match="key_data"):
        three.reduce(op, keys, None)

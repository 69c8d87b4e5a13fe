"""ShardedVariable: one array to its user, whatever its parts."""

import copy
import gc
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

import zstrat.variables as zv

VALUE = np.arange(20, dtype=np.float32).reshape(10, 2)


def sharded(value=VALUE, cuts=(4, 7), name="w"):
    """Not in TF's layout on purpose: any neighbouring rows make a part. A variable that
    is not sharded if ``cuts`` is None."""
    if cuts is None:
        return zv.Variable(value, name=name)
    parts = [
        zv.Variable(rows, name=f"part {n}")
        for n, rows in enumerate(np.split(value, cuts))
    ]
    return zv.ShardedVariable(parts, name)


def test_it_is_an_array_over_its_components():
    parts = [zv.Variable(VALUE[:4]), zv.Variable(VALUE[4:])]
    w = zv.ShardedVariable(parts)
    assert w.name == "ShardedVariable"
    assert (w.shape, w.ndim, w.size, w.dtype) == ((10, 2), 2, 20, np.float32)
    assert w.variables == parts or all(
        a is b for a, b in zip(w.variables, parts, strict=True)
    )
    assert [part is own for part, own in zip(w, parts, strict=True)] == [True, True]
    assert len(w) == 2
    np.testing.assert_array_equal(w.numpy(), VALUE)
    np.testing.assert_array_equal(np.asarray(w), VALUE)
    np.testing.assert_array_equal(jnp.asarray(w), VALUE)
    assert np.asarray(w, np.float64).dtype == np.float64
    assert not w.numpy().flags.writeable
    assert repr(w) == (
        "<zstrat.ShardedVariable 'ShardedVariable' shape=(10, 2) dtype=float32 parts=2>"
    )


def test_a_component_knows_its_rows_and_its_container():
    w = sharded()
    assert [part.spec.part for part in w] == [
        zv.ComponentRows("w", 0, 3, 0, 10),
        zv.ComponentRows("w", 1, 3, 4, 10),
        zv.ComponentRows("w", 2, 3, 7, 10),
    ]
    first = w.variables[0]
    assert first.sharded_container is w
    del w
    gc.collect()
    assert first.sharded_container is None, "it does not hold the container"
    assert zv.Variable(1.0).sharded_container is None


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (list, TypeError, r"zs\.Variable"),
        (lambda: zv.Variable([1.0]), TypeError, r"zs\.Variable"),
        (lambda: [np.zeros(3)], TypeError, r"zs\.Variable"),
        (
            lambda: [zv.Variable([1.0]), zv.Variable([1])],
            ValueError,
            "ShardedVariable",
        ),
        (
            lambda: [zv.Variable([[0.0, 0.0]]), zv.Variable([[0.0]])],
            ValueError,
            "ShardedVariable",
        ),
        (lambda: [zv.Variable(1.0)], ValueError, "ShardedVariable"),
        (lambda: [sharded().variables[1]], ValueError, r"\b1\b.*'w'"),
    ],
)
def test_variables_that_cannot_be_joined_are_refused(make, error, words):
    with pytest.raises(error, match=words):
        zv.ShardedVariable(make())


def test_a_variable_is_not_joined_with_itself():
    x = zv.Variable([1.0])
    with pytest.raises(ValueError, match=r"ShardedVariable.*'Variable'"):
        zv.ShardedVariable([x, x])


def test_operators_act_on_the_whole():
    w, v = sharded(), VALUE
    for ours, theirs in [
        (w + 1, v + 1),
        (1 - w, 1 - v),
        (w * v, v * v),
        (v / (w + 1), v / (v + 1)),
        (w @ np.ones((2, 3)), v @ np.ones((2, 3))),
        (-w, -v),
        (abs(w), abs(v)),
        (w**2, v**2),
        (w // 3, v // 3),
        (w % 3, v % 3),
        (w == v, v == v),
        (w > 3, v > 3),
        (w + w, v + v),
        (np.exp(w), np.exp(v)),
    ]:
        np.testing.assert_array_equal(ours, theirs)
    with pytest.raises(TypeError, match="assign_add"):
        w += 1


def test_it_is_a_leaf_and_a_key():
    w = sharded()
    assert jax.tree.leaves({"a": [w]}) == [w] or jax.tree.leaves({"a": [w]})[0] is w
    assert {w: 1}[w] == 1
    np.testing.assert_array_equal(zv.values({"w": w})["w"], VALUE)


def test_a_module_collects_the_components():
    class Model(zv.Module):
        def __init__(self):
            super().__init__()
            self.table = sharded(name="table")
            self.bias = zv.Variable(0.0, name="bias", trainable=False)

    model = Model()
    assert [v.name for v in model.variables] == ["bias", "part 0", "part 1", "part 2"]
    assert len(model.trainable_variables) == 3


def test_pickled_it_is_a_handle_of_its_components():
    w = sharded()
    far = pickle.loads(pickle.dumps(w))
    assert (far.name, far.shape, far.table) == (w.name, w.shape, w.table)
    assert hash(far.table) == hash(w.table)
    assert far.variables[0].sharded_container is far
    with pytest.raises(RuntimeError, match=r"'part 0'.*came from another task"):
        far.value()
    with pytest.raises(RuntimeError, match="CPU"):
        far.sparse_read([1])
    with pytest.raises(RuntimeError, match="scatter_add"):
        far.scatter_add(zv.IndexedSlices(np.zeros((2, 2)), [0, 9]))


def test_a_copy_is_another_variable():
    w = sharded()
    twin = copy.deepcopy({"w": w})["w"]
    twin.assign_add(np.ones((10, 2)))
    np.testing.assert_array_equal(w.numpy(), VALUE)
    np.testing.assert_array_equal(twin.numpy(), VALUE + 1)
    assert [part.name for part in twin] == [part.name for part in w]
    assert (twin.name, len(twin)) == ("w", 3)


@pytest.mark.shows("tf.Variable")
@pytest.mark.parametrize("cuts", [None, (4, 7)])
def test_dense_updates_return_the_variable(cuts):
    w = sharded(cuts=cuts)
    assert w.assign(VALUE * 2, read_value=False) is w
    assert w.assign_add(VALUE).assign_sub(np.ones((10, 2))) is w
    np.testing.assert_array_equal(w.numpy(), VALUE * 3 - 1)
    with pytest.raises(ValueError, match="'w'"):
        w.assign(VALUE[:9])
    np.testing.assert_array_equal(w.numpy(), VALUE * 3 - 1)


SCATTERS = {
    "scatter_add": np.add.at,
    "scatter_sub": np.subtract.at,
    "scatter_mul": np.multiply.at,
    "scatter_div": np.divide.at,
    "scatter_min": np.minimum.at,
    "scatter_max": np.maximum.at,
    "scatter_update": lambda a, i, v: a.__setitem__(i, v),
    "batch_scatter_update": lambda a, i, v: a.__setitem__(i, v),
}


@pytest.mark.parametrize("name", SCATTERS)
@given(
    indices=st.lists(st.integers(0, 9), max_size=12),
    cuts=st.none() | st.lists(st.integers(0, 10), max_size=3).map(sorted),
    seed=st.integers(0, 99),
)
@examples(25)
def test_scattering_is_that_of_numpy(name, indices, cuts, seed):
    # Powers of two: no operation rounds, so the order of sums is not seen; the order of
    # duplicates in an update is.
    rng = np.random.default_rng(seed)
    rows = 2.0 ** rng.integers(-2, 3, (len(indices), 2)).astype(np.float32)
    name = "scatter_update" if cuts is None and name.startswith("batch") else name
    w, expected = sharded(VALUE, cuts), VALUE.copy()
    index = np.array(indices, np.int64)
    assert getattr(w, name)(zv.IndexedSlices(rows, index)) is w
    SCATTERS[name](expected, index, rows)
    np.testing.assert_array_equal(w.numpy(), expected)


@pytest.mark.parametrize("cuts", [None, (4, 7)])
@pytest.mark.parametrize("bad", [-1, 10])
def test_rows_that_are_not_there(bad, cuts):
    w = sharded(cuts=cuts)
    slices = zv.IndexedSlices(np.ones((2, 2)), [0, bad])
    with pytest.raises(
        IndexError, match=f"scatter_add to .*'w'.*index {bad} is out of"
    ):
        w.scatter_add(slices)
    with pytest.raises(IndexError, match=f"'w'.*has no row {bad}"):
        w.sparse_read([0, bad])
    with pytest.raises(IndexError, match=f"index {bad} is out of bounds"):
        zv.Optimizer(optax.sgd(1.0)).apply_gradients(slices, w)
    np.testing.assert_array_equal(w.numpy(), VALUE)


@pytest.mark.parametrize("cuts", [None, (4, 7)])
@pytest.mark.parametrize(
    ("slices", "words"),
    [
        (zv.IndexedSlices(np.ones((2, 3)), [0, 1]), "shape mismatch"),
        (zv.IndexedSlices(np.ones((3, 2)), [0, 1]), "shape mismatch"),
        (zv.IndexedSlices(np.ones((2, 2)), [0.0, 1.0]), "indices"),
        (zv.IndexedSlices(np.ones((1, 1, 2)), [[0]]), "indices"),
        (zv.IndexedSlices(jnp.ones((1, 2), jnp.int32), [0]), "dtype mismatch"),
    ],
)
def test_rows_that_do_not_fit(slices, words, cuts):
    w = sharded(cuts=cuts)
    with pytest.raises(ValueError, match=f"scatter_add.*'w'.*{words}"):
        w.scatter_add(slices)
    np.testing.assert_array_equal(w.numpy(), VALUE)


@pytest.mark.parametrize("ids", [[9, 0, 9, 4], [], np.array([3], np.uint8), (6, 5)])
def test_rows_are_read_in_the_order_of_the_ids(ids):
    read = sharded().sparse_read(ids)
    np.testing.assert_array_equal(read, VALUE[np.asarray(ids, int)])
    assert not read.flags.writeable


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (3, r"rank 1.*rank 0"),
        ([[1, 2]], r"rank 1.*rank 2"),
        ([1.0], "must be integers, got float64"),
        ([True], "must be integers, got bool"),
    ],
)
async def test_ids_are_a_vector_of_integers(ids, words):
    with pytest.raises(ValueError, match=words):
        sharded().sparse_read(ids)
    with pytest.raises(ValueError, match=words):
        await sharded().sparse_read_async(ids)


def test_staged_by_jax_it_is_refused():
    w = sharded()
    for use in (w.value, w.numpy, lambda: w[0], lambda: w.sparse_read([1])):
        with pytest.raises(RuntimeError, match="'w'"):
            jax.jit(use)()
    with pytest.raises(RuntimeError, match=r"scatter_add.*'w'"):
        jax.jit(
            lambda: w.scatter_add(zv.IndexedSlices(np.ones((1, 2)), [1])) and None
        )()


def test_a_dense_gradient_moves_each_part():
    w, optimizer = sharded(), zv.Optimizer(optax.adam(0.1))
    transformation, value = optax.adam(0.1), jnp.asarray(VALUE)
    state = transformation.init(value)
    for turn in range(3):
        gradient = np.sin(VALUE + turn)
        optimizer.apply_gradients(gradient, w)
        delta, state = transformation.update(gradient, state, value)
        value = optax.apply_updates(value, delta)
    np.testing.assert_allclose(w.numpy(), value, rtol=1e-5)


async def test_gradient_rows_move_only_their_rows():
    w, optimizer = sharded(), zv.Optimizer(optax.sgd(1.0))
    rows = zv.IndexedSlices(np.ones((4, 2)), [9, 0, 9, 5])
    optimizer.apply_gradients({"w": rows}, {"w": w})
    await optimizer.apply_gradients_async([(rows, w)])
    expected = VALUE.copy()
    expected[[0, 5]] -= 2
    expected[9] -= 4
    np.testing.assert_array_equal(w.numpy(), expected)


def test_a_part_and_its_whole_are_moved_once():
    w, optimizer = sharded(), zv.Optimizer(optax.sgd(1.0))
    gradients = [(VALUE, w), (VALUE[:4], w.variables[0])]
    with pytest.raises(ValueError, match=r"\b0\b.*apply_gradients"):
        optimizer.apply_gradients(gradients)
    np.testing.assert_array_equal(w.numpy(), VALUE)


def test_nothing_is_moved_if_something_does_not_fit():
    w, b = sharded(), zv.Variable([1.0, 2.0])
    optimizer = zv.Optimizer(optax.sgd(1.0))
    with pytest.raises(ValueError, match="'Variable'"):
        optimizer.apply_gradients([(np.ones((10, 2)), w), (np.ones(3), b)])
    np.testing.assert_array_equal(w.numpy(), VALUE)

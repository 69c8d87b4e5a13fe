"""Pytrees of variables, modules, slices and initial values."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zstrat.variables as zv
from zstrat import initializers


def test_a_tree_of_arrays_becomes_a_tree_of_named_variables():
    tree = {"dense": {"kernel": np.ones((2, 3), np.float32), "bias": jnp.zeros(3)}}
    made = zv.create_variables([tree, 1.0], name="model")
    names = [v.name for v in jax.tree.leaves(made)]
    assert names == ["model/0/dense/bias", "model/0/dense/kernel", "model/1"]
    assert jax.tree.structure(made) == jax.tree.structure([tree, 1.0])
    np.testing.assert_array_equal(made[0]["dense"]["kernel"], np.ones((2, 3)))


def test_options_of_a_tree_are_those_of_its_variables():
    made = zv.create_variables([np.zeros(2)], dtype="float32", trainable=False)
    assert made[0].dtype == np.float32
    assert not made[0].trainable
    assert zv.create_variables(1.0).name == "Variable"


def test_variables_are_leaves():
    x = zv.Variable([1.0, 2.0])
    (leaf,) = jax.tree.leaves({"a": x})
    assert leaf is x


class Dense(zv.Module):
    def __init__(self, name=None):
        super().__init__(name=name)
        self.w = zv.Variable(np.ones((2, 2), np.float32), name="w")
        self.b = zv.Variable([0.0, 0.0], name="b")
        self.frozen = zv.Variable(1.0, name="frozen", trainable=False)


class Model(zv.Module):
    def __init__(self):
        super().__init__()
        self.layers = [Dense("one"), Dense("two")]
        self.heads = {"out": Dense("three"), "same": self.layers[0]}
        self.size = 3


@pytest.mark.shows("Model.trainable_variables")
def test_a_module_collects_the_variables_of_its_attributes():
    dense, model = Dense(), Model()
    assert [v.name for v in dense.variables] == ["b", "frozen", "w"]
    assert [v.name for v in dense.trainable_variables] == ["b", "w"]
    assert len(model.variables) == 9
    assert {m.name for m in model.submodules} == {"one", "two", "three"}
    assert (dense.name, model.name) == ("dense", "model")


@pytest.mark.shows("tf.IndexedSlices")
def test_slices_are_pytree_nodes_that_add_up():
    slices = zv.IndexedSlices(jnp.ones((3, 2)), jnp.array([0, 2, 0]), (3, 2))
    assert len(jax.tree.leaves(slices)) == 2
    dense = jax.jit(lambda s: s.to_dense())(slices)
    np.testing.assert_array_equal(dense, [[2, 2], [0, 0], [1, 1]])
    assert slices.shape == (3, 2)
    assert slices.dtype == jnp.float32
    with pytest.raises(ValueError, match="dense_shape"):
        zv.IndexedSlices(jnp.ones(1), jnp.zeros(1, int)).to_dense()


@pytest.mark.parametrize("made", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("rows", [3, 200])
def test_slices_of_no_row_count_nowhere_in_the_dense_array(made, rows):
    indices = made(np.array([-1, 2, -128, 2], np.int8))
    slices = zv.IndexedSlices(jnp.arange(1.0, 5.0), indices, (rows,))
    expected = np.zeros(rows, np.float32)
    expected[2] = 2 + 4
    np.testing.assert_array_equal(slices.to_dense(), expected)
    np.testing.assert_array_equal(jax.jit(lambda s: s.to_dense())(slices), expected)


@pytest.mark.parametrize("indices", [[2**32 + 1, 1], [-(2**32), 1]])
def test_slices_of_rows_that_jax_would_take_for_others(indices):
    slices = zv.IndexedSlices(jnp.ones(2), np.array(indices, np.int64), (3,))
    np.testing.assert_array_equal(slices.to_dense(), [0, 1, 0])


@pytest.mark.parametrize(("values", "lost"), [([2**40, 1], "becomes 0"), ([3, 1], "")])
def test_a_dense_array_warns_which_digits_it_lost(values, lost):
    slices = zv.IndexedSlices(np.array(values, np.int64), np.array([0, 1]), (2,))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        slices.to_dense()
    assert [lost in str(each.message) for each in told] == [True] * bool(lost)
    assert all(each.filename == __file__ for each in told)


DRAWN = [
    lambda seed: initializers.normal(0.1, seed),
    lambda seed: initializers.uniform(-1, 1, seed),
    lambda seed: initializers.glorot_uniform(seed),
    lambda seed: initializers.he_normal(seed),
]


@pytest.mark.parametrize("make", DRAWN)
def test_a_seed_fixes_what_is_drawn(make):
    shape, dtype = (4, 5), np.dtype("float32")
    first = make(1)(shape, dtype)
    assert first.dtype == dtype
    np.testing.assert_array_equal(first, make(1)(shape, dtype))
    assert not np.array_equal(first, make(2)(shape, dtype))
    assert not np.array_equal(make(None)(shape, dtype), make(None)(shape, dtype))


def test_fixed_values():
    assert zv.Variable(initializers.zeros, shape=(2,)).numpy().tolist() == [0, 0]
    assert zv.Variable(initializers.ones, shape=(2,)).numpy().tolist() == [1, 1]
    seven = zv.Variable(initializers.constant(7), shape=(2,), dtype="int32")
    assert seven.numpy().tolist() == [7, 7]
    spread = initializers.constant([1, 2])((3, 2), "float32")
    assert spread.tolist() == [[1, 2]] * 3


def test_the_spread_is_what_the_names_promise():
    shape = (200, 300)
    normal = initializers.normal(0.5, 0, mean=2.0)(shape, "float32")
    assert abs(normal.std() - 0.5) < 0.01
    assert abs(normal.mean() - 2.0) < 0.01
    uniform = initializers.uniform(-2, 3, 0)(shape, "float32")
    assert -2 <= uniform.min() < -1.99
    assert 2.99 < uniform.max() < 3
    bound = np.sqrt(6 / 500)
    glorot = initializers.glorot_uniform(0)(shape, "float32")
    assert 0.99 * bound < np.abs(glorot).max() <= bound
    he = initializers.he_normal(0)(shape, "float32")
    assert abs(he.std() - np.sqrt(2 / 200)) < 0.005
    conv = initializers.he_normal(0)((3, 3, 64, 32), "float32")
    assert abs(conv.std() - np.sqrt(2 / (9 * 64))) < 0.002
    assert initializers.glorot_uniform(0)((), "float32").shape == ()
    assert initializers.he_normal(0)((5,), "float32").shape == (5,)

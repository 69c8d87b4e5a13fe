"""Gradients of rows for variables of this process change only these rows and slots."""

import jax
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zstrat.variables as zv

VALUE = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)


def momentum(gradient, trace, count):
    trace = gradient + 0.9 * trace
    return -0.1 * trace, trace


def adagrad(gradient, total, count):
    total = total + gradient**2
    return -0.1 * gradient / np.sqrt(total + 1e-7), total


def adam(gradient, moments, count):
    first = 0.9 * moments[..., 0] + 0.1 * gradient
    second = 0.999 * moments[..., 1] + 0.001 * gradient**2
    mean, square = first / (1 - 0.9**count), second / (1 - 0.999**count)
    return -0.1 * mean / (np.sqrt(square) + 1e-8), np.stack([first, second], -1)


def scheduled(gradient, nothing, count):
    return -(0.5**count) * gradient, nothing


ROW_BY_ROW = {
    "momentum": (optax.sgd(0.1, momentum=0.9), momentum, np.zeros((8, 3))),
    "adagrad": (optax.adagrad(0.1), adagrad, np.full((8, 3), 0.1)),
    "adam": (optax.adam(0.1), adam, np.zeros((8, 3, 2))),
    "scheduled": (
        optax.sgd(optax.exponential_decay(0.5, 1, 0.5)),
        scheduled,
        np.zeros((8, 3)),
    ),
}


@pytest.mark.parametrize("name", ROW_BY_ROW)
def test_rows_and_their_slots_move_and_counts_are_shared(name):
    transformation, step, slots = ROW_BY_ROW[name]
    x, optimizer = zv.Variable(VALUE), zv.Optimizer(transformation)
    value, slots = VALUE.astype(np.float64), slots.copy()
    rng = np.random.default_rng(1)
    for turn, indices in enumerate(([1, 5, 1], [5], [0, 1, 2, 3], [7, 7, 7])):
        index = np.array(indices)
        rows = rng.normal(size=(len(indices), 3)).astype(np.float32)
        optimizer.apply_gradients(zv.IndexedSlices(rows, index), x)
        for row in set(indices):
            gradient = rows[index == row].sum(0, dtype=np.float64)
            move, slots[row] = step(gradient, slots[row], turn + 1)
            value[row] += move
    np.testing.assert_allclose(x.numpy(), value, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(x.numpy()[6], VALUE[6])


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint16", "uint32", "uint64"])
def test_rows_are_moved_by_indices_of_any_dtype(dtype):
    """Three, so that one that is no row is added; some dtypes have no -1."""
    x, optimizer = zv.Variable(VALUE), zv.Optimizer(optax.sgd(1.0))
    index = np.array([7, 1, 1]).astype(dtype)
    optimizer.apply_gradients(zv.IndexedSlices(np.ones((3, 3), "float32"), index), x)
    expected = VALUE.copy()
    np.subtract.at(expected, [7, 1, 1], 1)
    np.testing.assert_allclose(x.numpy(), expected, rtol=1e-6)


MOMENTUM = zv.Optimizer(optax.sgd(0.5, momentum=0.5))  # it rounds little


# Of few lengths: for each of them a program is compiled.
ids = st.sampled_from([0, 1, 4, 9]).flatmap(
    lambda count: st.lists(st.integers(0, 7), min_size=count, max_size=count)
)


@given(st.lists(ids, min_size=1, max_size=4))
@settings(max_examples=10, deadline=None)
def test_dense_and_sparse_steps_share_their_slots(batches):
    x, optimizer = zv.Variable(np.zeros((8, 1), np.float32)), MOMENTUM
    value, trace = np.zeros((8, 1), np.float32), np.zeros((8, 1), np.float32)
    for indices in batches:
        rows = np.ones((len(indices), 1), np.float32)
        optimizer.apply_gradients(zv.IndexedSlices(rows, np.array(indices, int)), x)
        for i in set(indices):
            trace[i] = indices.count(i) + 0.5 * trace[i]
            value[i] -= 0.5 * trace[i]
        optimizer.apply_gradients(np.ones((8, 1), np.float32), x)
        trace = 1 + 0.5 * trace
        value = value - 0.5 * trace
    np.testing.assert_allclose(x.numpy(), value, rtol=1e-6)


def test_updates_do_not_change_values_that_were_read():
    x, optimizer = zv.Variable(VALUE), zv.Optimizer(optax.adam(0.1))
    before = x.numpy()
    optimizer.apply_gradients(zv.IndexedSlices(np.ones((1, 3)), [2]), x)
    np.testing.assert_array_equal(before, VALUE)


OF_SEVERAL = {
    "norm of values": lambda: optax.lars(0.1),
    "factored": lambda: optax.adafactor(0.1),
    "MultiSteps": lambda: optax.MultiSteps(optax.sgd(1.0), 2),
    "around adam": lambda: optax.MultiSteps(optax.adam(0.1), 2),
    "there and back": lambda: optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.5)),
    "within a chain": lambda: optax.chain(
        optax.clip(1.0), optax.apply_every(2), optax.sgd(1.0)
    ),
}


@pytest.mark.parametrize("name", OF_SEVERAL)
def test_rows_are_not_moved_by_what_looks_at_several_rows_or_updates(name):
    """A row that the last update does not name would lose what it was given before, or
    keep what was to be taken back."""
    transformation = OF_SEVERAL[name]()
    x, optimizer = zv.Variable(VALUE), zv.Optimizer(transformation, name="mixing")
    rows = zv.IndexedSlices(np.ones((1, 3)), [2], (8, 3))
    with pytest.raises(ValueError, match=r"'mixing'.*to_dense"):
        optimizer.apply_gradients(rows, x)
    np.testing.assert_array_equal(x.numpy(), VALUE)
    want, state = VALUE, transformation.init(VALUE)
    for _ in range(2):
        optimizer.apply_gradients(rows.to_dense(), x)
        updates, state = transformation.update(rows.to_dense(), state, want)
        want = optax.apply_updates(want, updates)
    np.testing.assert_allclose(x.numpy(), want, rtol=1e-6)


def test_rows_of_a_table_beside_variables_whose_gradients_are_added_up():
    table, bias = zv.Variable(VALUE), zv.Variable(np.zeros(3, np.float32))
    params = {"bias": bias, "table": table}
    transformation = optax.multi_transform(
        {"now": optax.sgd(1.0), "every two": optax.MultiSteps(optax.sgd(1.0), 2)},
        {"bias": "every two", "table": "now"},
    )
    optimizer = zv.Optimizer(transformation, params=params)
    rows = zv.IndexedSlices(np.ones((1, 3)), [2], (8, 3))
    want = VALUE.copy()
    for applied in (0, 1):
        optimizer.apply_gradients({"bias": np.ones(3), "table": rows}, params)
        want[2] -= 1
        np.testing.assert_allclose(table.numpy(), want, rtol=1e-6)
        np.testing.assert_allclose(bias.numpy(), np.full(3, -1.0 * applied))


def test_the_norm_of_gradients_is_that_of_summed_rows():
    x = zv.Variable(VALUE)
    clip = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(1.0))
    rows = np.array([[1, 0, 0], [0, 3, 0], [2, 0, 4]], np.float32)
    zv.Optimizer(clip).apply_gradients(zv.IndexedSlices(rows, [2, 5, 2]), x)
    summed = np.zeros_like(VALUE)
    summed[2], summed[5] = [3, 0, 4], [0, 3, 0]
    expected = VALUE - summed * 0.5 / np.sqrt(34)
    np.testing.assert_allclose(x.numpy(), expected, rtol=1e-5)


def test_a_call_that_is_refused_leaves_no_tree_behind():
    x, y = zv.Variable(VALUE), zv.Variable(VALUE)
    optimizer = zv.Optimizer(optax.lars(0.1, momentum=0.9))
    with pytest.raises(ValueError, match=r"'Optimizer'.*IndexedSlices.*'Variable'"):
        optimizer.apply_gradients([(zv.IndexedSlices(np.ones((1, 3)), [2]), x)])
    optimizer.apply_gradients({"y": VALUE}, {"y": y})
    (momentum,) = [x for x in jax.tree.leaves(optimizer.state) if np.ndim(x) == 2]
    assert momentum.shape == VALUE.shape


def test_a_state_that_is_looked_at_first_changes_nothing():
    plain, seen = zv.Variable(VALUE), zv.Variable(VALUE)
    clip = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1))
    rows = zv.IndexedSlices(np.ones((2, 3), np.float32), [2, 5])
    for variable in (plain, seen):
        optimizer = zv.Optimizer(clip, params=variable)
        if variable is seen:
            assert optimizer.state is not None
        optimizer.apply_gradients(rows, variable)
    np.testing.assert_array_equal(plain.numpy(), seen.numpy())
    assert not np.array_equal(plain.numpy(), VALUE)


def test_steps_are_compiled_for_powers_of_two():
    traced = []

    def update(gradient, state, value=None):
        traced.append(gradient.shape)
        return -gradient, state

    counting = optax.GradientTransformation(lambda value: (), update)
    x = zv.Variable(np.zeros((100, 2), np.float32))
    optimizer = zv.Optimizer(counting)
    for count in range(1, 34):
        rows = zv.IndexedSlices(np.ones((count, 2)), np.arange(count))
        optimizer.apply_gradients(rows, x)
    sizes = {rows for rows, width in traced if width == 2}
    assert sizes - {100} <= {1, 2, 4, 8, 16, 17, 32, 64}  # 17: how rows are compared
    assert len(traced) <= 9
    np.testing.assert_array_equal(x.numpy()[:33, 0], -np.arange(33, 0, -1))

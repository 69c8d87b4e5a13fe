"""Eager steps have the effects of captured steps, at once."""

from __future__ import annotations

from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zstrat.program as zs

Pair = namedtuple("Pair", "first second")


def test_eager_and_captured_steps_agree(storage):
    printed = []

    def body(v, it):
        x = next(it)
        printed.append(v.value())
        grads = zs.grad(lambda p: jnp.sum((p - x) ** 2))(v)
        v.assign_sub(0.5 * grads)
        return {"after": v.value()}

    results = []
    for eager in (False, True):
        v = storage.variable(np.array([1.0, 2.0], np.float32))
        function = zs.function(body, eager=eager)
        it = zs.StepIterator(iter(np.full((2, 2), 5, np.float32)))
        results.append([function(v, it), function(v, it), storage.values[v.spec.key]])
    jax.tree.map(np.testing.assert_allclose, results[0], results[1])
    np.testing.assert_array_equal(printed[-2], [1.0, 2.0])


def test_eager_steps_see_current_values_under_transformations(storage):
    v = storage.variable(np.float32(1))

    @jax.jit
    def scaled(x):
        return x * v.value()

    def body(carry, _):
        return carry + v.value(), None

    @zs.function(eager=True)
    def step(x):
        first = scaled(x)
        v.assign_add(1.0)
        total, _ = jax.lax.scan(body, x, None, length=3)
        return first, scaled(x), total, jax.grad(lambda y: y * v.value())(x)

    for start in (1.0, 2.0):
        got = [float(x) for x in step(np.float32(10))]
        assert got == [10 * start, 10 * start + 10, 13 + 3 * start, start + 1]


def test_numpy_in_eager_steps_is_the_value_and_is_refused_where_there_is_none(storage):
    v = storage.variable(np.array([1.0, 2.0], np.float32))

    @zs.function(eager=True)
    def step():
        before = v.numpy()
        v.assign_add(before * 2)
        return before, v.numpy()

    before, after = step()
    assert (before.tolist(), after.tolist()) == ([1, 2], [3, 6])
    outer_step = zs.function(lambda: v.numpy())
    jitted = zs.function(lambda: jax.jit(lambda: v.numpy())(), eager=True)
    for refused in (outer_step, jitted):
        with pytest.raises(RuntimeError, match=r"numpy\(\)"):
            refused()


def test_eager_steps_draw_and_update_at_their_top_level_alone(storage):
    v = storage.variable(np.float32(1))
    it = zs.StepIterator(iter(np.arange(3, dtype=np.float32)))

    @zs.function(eager=True)
    def draws(it):
        drawing = jax.jit(lambda: next(it))
        return drawing() + drawing()

    @zs.function(eager=True)
    def updates():
        jax.jit(lambda: v.assign(np.float32(2)).value())()

    with pytest.raises(RuntimeError, match=r"next\(iterator\)"):
        draws(it)
    with pytest.raises(RuntimeError, match="ASSIGN"):
        updates()
    assert next(it) == 0.0
    assert storage.values[v.spec.key] == 1.0


def test_run_eager_goes_through_the_given_storage(storage):
    v = storage.variable(np.float32(1))
    shipped = zs.load(zs.dump_code(zs.function(lambda: v.assign_add(2.0), eager=True)))
    result = zs.run_eager(shipped, (), {}, storage)
    assert result.leaves[0] == 3.0
    assert result.updates == []
    assert storage.values[v.spec.key] == 3.0


def test_eager_and_captured_steps_get_equal_arguments():
    def body(tree, n, flag, word, *, key):
        assert (flag, word, list(tree)) == (True, "w", ["x"])
        tree["own"] = 1  # nobody else sees it
        return tree["x"].at[0].set(n), key

    tree = {"x": np.arange(2, dtype=np.float64)}
    args, kwargs = (tree, 1, True, "w"), {"key": np.int16(2)}
    captured = zs.function(body)(*args, **kwargs)
    step = zs.function(body, eager=True)
    for _ in range(2):  # a worker calls with the same arguments again and again
        leaves = zs.run_eager(step, args, kwargs).leaves
        for x, y, z in zip(captured, leaves, step(*args, **kwargs), strict=True):
            assert x.dtype == y.dtype == z.dtype
            assert x.tolist() == y.tolist() == z.tolist()


def test_an_eager_result_of_classes_is_rebuilt_without_a_trace(storage):
    v = storage.variable(np.float32(1))
    step = zs.function(lambda: {"pair": Pair(v.value(), 2)}, eager=True)
    result = zs.run_eager(step, (), {}, storage)
    assert zs.rebuild(result.layout.structure, result.leaves) == {"pair": Pair(1, 2)}


def test_an_eager_result_that_nobody_could_rebuild(storage):
    partial = jax.tree_util.Partial(lambda x: x, 1.0)  # keeps the function beside it
    step = zs.function(lambda: {"pair": partial}, eager=True)
    assert step()["pair"]() == 1  # here it need not cross a wire
    with pytest.raises(TypeError, match="PyTreeDef"):
        zs.run_eager(step, (), {}, storage)

"""What a step does: expected values come from numpy and from plain jax."""

from __future__ import annotations

from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zstrat.program as zs
from zstrat.variables import IndexedSlices, Variable, apply
from zstrat.wire import UpdateOp

Pair = namedtuple("Pair", "first second")


def worker_run(function, *args, **kwargs):
    """What a worker does: prepare, pull, run. Returns the result and the updates."""
    prepared = zs.prepare(function, args, kwargs)
    values = [v.storage.read(v) for v in prepared.plan.variables]
    result = prepared.run(values)
    treedef = prepared.plan.out_structure.treedef
    return zs.rebuild(result.layout.structure, result.leaves, treedef), result.updates


@pytest.mark.shows("tf.function")
def test_each_variable_is_one_read_and_updates_keep_their_order(storage):
    v, w = storage.variable([1.0, 2.0], "v"), storage.variable([5.0, 6.0], "w")

    @zs.function
    def step(x):
        total = v.value() + w.value() + v.read_value()
        w.assign_sub(x)
        v.assign(total)
        return total

    x = np.array([1.0, 1.0])
    with jax.enable_x64(True):
        plan = step.plan((x,))
        assert [spec.name for spec in plan.reads] == ["v", "w"]
        assert [(u.spec.name, u.op) for u in plan.updates] == [
            ("w", UpdateOp.SUB),
            ("v", UpdateOp.ASSIGN),
        ]
        total, updates = worker_run(step, x)
    np.testing.assert_array_equal(total, [7.0, 10.0])
    np.testing.assert_array_equal(updates[0].arrays[0], x)
    np.testing.assert_array_equal(updates[1].arrays[0], [7.0, 10.0])


def test_a_weakly_typed_element_is_drawn_as_an_array_of_its_dtype():
    step = zs.function(lambda iterator: next(iterator))
    elements = [jnp.asarray(1.0), np.float32(2), jnp.asarray(3.0), jnp.float32(4)]
    assert elements[0].weak_type
    iterator = zs.StepIterator(iter(elements), np.float32(0))
    drawn = [step(iterator) for _ in elements]
    assert [float(x) for x in drawn] == [1, 2, 3, 4]
    assert not any(jnp.asarray(x).weak_type for x in drawn)
    assert step.trace_count == 1


def test_an_update_alone_reads_nothing(storage):
    v = storage.variable(np.float32(1))

    @zs.function
    def step():
        v.assign_add(1.0)

    plan = step.plan()
    assert plan.reads == ()
    assert not plan.read_only
    result, updates = worker_run(step)
    assert result is None
    assert updates[0].arrays[0] == 1.0


WRITES = [
    (UpdateOp.ASSIGN, ([3.0, -4.0, 5.0],)),
    (UpdateOp.ADD, ([3.0, -4.0, 5.0],)),
    (UpdateOp.SUB, ([3.0, -4.0, 5.0],)),
    (UpdateOp.SCATTER_ADD, ([2, 0, 2], [3.0, -4.0, 5.0])),
    (UpdateOp.SCATTER_SUB, ([2, 0, 2], [3.0, -4.0, 5.0])),
    (UpdateOp.SCATTER_MUL, ([2, 0, 2], [3.0, -4.0, 5.0])),
    (UpdateOp.SCATTER_DIV, ([2, 0, 2], [2.0, -4.0, 8.0])),
    (UpdateOp.SCATTER_MIN, ([2, 0, 2], [3.0, -4.0, 5.0])),
    (UpdateOp.SCATTER_MAX, ([2, 0, 2], [3.0, -4.0, 5.0])),
    (UpdateOp.SCATTER_UPDATE, ([2, 0, 2], [3.0, -4.0, 5.0])),
]


def _write(variable: Variable, op: UpdateOp, operands) -> None:
    match op:
        case UpdateOp.ASSIGN:
            variable.assign(operands[0])
        case UpdateOp.ADD:
            variable.assign_add(operands[0])
        case UpdateOp.SUB:
            variable.assign_sub(operands[0])
        case _:
            slices = IndexedSlices(operands[1], operands[0])
            variable._sparse(op, slices)


@pytest.mark.parametrize(
    ("op", "operands"), WRITES, ids=lambda p: getattr(p, "name", "")
)
def test_a_read_after_a_write_sees_what_was_written(storage, op, operands):
    start = np.array([1.0, 2.0, 3.0], np.float32)
    v = storage.variable(start)
    kinds = [np.int32, np.float32] if len(operands) == 2 else [np.float32]
    arrays = tuple(np.array(o, k) for o, k in zip(operands, kinds, strict=True))

    @zs.function
    def step(operands):
        before = v.value()
        _write(v, op, operands)
        middle = v.value()
        v.assign_add(middle)
        return before, middle, v.value()

    before, middle, after = step(arrays)
    expected = apply(op, start, arrays)
    np.testing.assert_array_equal(before, start)
    np.testing.assert_allclose(middle, expected, rtol=1e-6)
    np.testing.assert_allclose(after, 2 * expected, rtol=1e-6)
    np.testing.assert_allclose(storage.values[v.spec.key], 2 * expected, rtol=1e-6)


def test_a_read_after_an_assignment_needs_no_pull(storage):
    v = storage.variable(np.float32(7))

    @zs.function
    def step(x):
        v.assign(x)
        return v.assign_add(x)

    assert step.plan((np.float32(2),)).reads == ()
    assert step(np.float32(2)) == 4.0


def test_an_assignment_after_an_optimizer_can_be_read(storage):
    v = storage.variable(np.float32(1))
    opt = storage.optimizer(optax.sgd(1.0))

    @zs.function
    def step():
        opt.apply_gradients([(jnp.float32(1), v)])
        v.assign(5.0)
        return v.value()

    assert step() == 5.0
    assert storage.values[v.spec.key] == 5.0


def test_inner_jit_and_scan_see_the_current_value_and_no_stale_trace(storage):
    """jax remembers traces of inner functions by identity and types of arguments."""
    v = storage.variable(np.float32(1))

    @jax.jit
    def scaled(x):
        return x * v.value()

    def body(carry, _):
        return carry + v.value(), None

    @zs.function
    def step(x):
        first = scaled(x)
        v.assign_add(1.0)
        second = scaled(x)
        third, _ = jax.lax.scan(body, x, None, length=3)
        return first, second, third

    for start in (1.0, 2.0, 3.0):
        got = [float(x) for x in step(np.float32(10))]
        assert got == [10 * start, 10 * (start + 1), 10 + 3 * (start + 1)]


def test_reads_are_allowed_under_transformations(storage):
    v = storage.variable(np.array([1.0, 2.0], np.float32))

    @zs.function
    def step(x):
        grad = jax.grad(lambda y: jnp.sum(v.value() * y * y))(x)
        mapped = jax.vmap(lambda y: y * jnp.sum(v.value()))(x)
        chosen = jax.lax.cond(x[0] > 0, lambda: v.value(), lambda: -v.value())
        return grad, mapped, chosen

    x = np.array([3.0, 4.0], np.float32)
    grad, mapped, chosen = step(x)
    np.testing.assert_allclose(grad, [6.0, 16.0])
    np.testing.assert_allclose(mapped, [9.0, 12.0])
    np.testing.assert_allclose(chosen, [1.0, 2.0])


def test_nested_functions_are_inlined(storage):
    v = storage.variable(np.float32(1))

    @zs.function
    def inner(x):
        v.assign_add(x)
        return v.value()

    @zs.function
    def outer(x):
        return inner(x) + inner(x)

    assert outer(np.float32(1)) == 5.0
    assert storage.values[v.spec.key] == 3.0
    assert (outer.trace_count, inner.trace_count) == (1, 0)


def test_results_keep_their_structure_and_plain_python_values(storage):
    v = storage.variable(np.float32(3))

    @zs.function
    def step(x, flag):
        return {
            "b": [x, None, (x + 1,), 7, 2.5, True, "text", b"raw"],
            "a": {1: v, 2: flag},
            "pair": Pair(x, "second"),
            "numpy": np.arange(3),
            "empty": (),
        }

    expected = {
        "b": [np.float32(1), None, (np.float32(2),), 7, 2.5, True, "text", b"raw"],
        "a": {1: np.float32(3), 2: False},
        "pair": Pair(np.float32(1), "second"),
        "numpy": np.arange(3),
        "empty": (),
    }
    x = np.float32(1)
    for result in (step(x, False), worker_run(step, x, False)[0]):
        assert jax.tree.structure(result) == jax.tree.structure(expected)
        jax.tree.map(np.testing.assert_array_equal, result, expected)
        assert type(result["b"][3]) is int
        assert type(result["a"][2]) is bool


def test_results_of_the_worker_are_complete_numpy_arrays_of_their_own(storage):
    big = np.arange(1 << 16, dtype=np.float32)
    aligned = np.empty(big.nbytes + 64, np.uint8)
    offset = -aligned.ctypes.data % 64
    value = aligned[offset : offset + big.nbytes].view(np.float32)
    value[:] = big
    v = storage.variable(value)
    storage.values[v.spec.key] = value

    @zs.function
    def step(x, it):
        v.assign_add(x)
        element = next(it)
        return x, element, v.value(), jnp.reshape(x, (-1, 1))

    it = zs.StepIterator(iter([value]))
    prepared = zs.prepare(step, (value, it), {})
    result = prepared.run([value])
    for array in (*result.leaves, *result.updates[0].arrays):
        assert type(array) is np.ndarray
        assert not array.flags.writeable
        assert not np.shares_memory(array, value)


def test_a_constant_function_is_computed_once():
    runs = []

    @zs.function
    def step():
        return jnp.ones(3), "text"

    @zs.function
    def printing():
        jax.debug.callback(lambda: runs.append(1))
        return jnp.ones(3)

    first, second = (zs.prepare(step, (), {}).run([]) for _ in range(2))
    assert first is second
    for _ in range(2):
        zs.prepare(printing, (), {}).run([])
    jax.effects_barrier()
    assert runs == [1, 1]


def test_context_is_known_in_a_step_and_a_second_attempt_is_seen(storage):
    v = storage.variable(np.float32(0))

    @zs.function
    def step():
        context = zs.get_worker_context()
        return context.worker_index, context.attempt, v.value()

    assert step.plan().out_structure.unflatten([0])[:2] == (0, 1)
    for attempt in (1, 2, 2):
        token = zs.worker_context.set(zs.WorkerContext(3, 4, attempt))
        try:
            prepared = zs.prepare(step, (), {})
        finally:
            zs.worker_context.reset(token)
        result = prepared.run([np.float32(5)])
        rebuilt = zs.rebuild(result.layout.structure, result.leaves)
        assert rebuilt == (3, attempt, 5.0)
    assert step.trace_count == 3


def test_bfloat16_and_integers_and_booleans(storage):
    v = storage.variable(np.array([1, 2], jnp.bfloat16))
    n, flag = storage.variable(np.int32(3)), storage.variable(np.array(True))

    @zs.function
    def step():
        v.assign(v.value() * jnp.bfloat16(2))
        n.assign_add(1)
        flag.assign(~flag.value())
        return v.value(), n.value(), flag.value()

    (a, b, c), updates = worker_run(step)
    assert (a.dtype, b.dtype, c.dtype) == (jnp.bfloat16, np.int32, np.bool_)
    assert (a.tolist(), b, c) == ([2.0, 4.0], 4, False)
    assert updates[0].arrays[0].dtype == jnp.bfloat16


def test_a_plan_that_updates_local_variables_is_not_shared(storage):
    local = Variable(1.0, name="mine")
    zs.function(lambda: local.value()).plan().require_shared()
    step = zs.function(lambda: local.assign_add(local.value()))
    with pytest.raises(ValueError, match=r"'mine'.*strategy\.scope"):
        step.plan().require_shared()
    remote = storage.variable(np.float32(1))
    zs.function(lambda: remote.value()).plan().require_shared()


def test_a_body_runs_once_where_it_is_called(storage):
    """Also one that looks rows up, of which two programs are made."""
    v, table = (
        storage.variable(np.float32(2)),
        storage.variable(np.eye(3, dtype=np.float32)),
    )
    ran = []

    @zs.function
    def step(x):
        ran.append("step")
        v.assign_add(x)
        return v.value() * jax.grad(lambda y: y * v.value())(x)

    @zs.function
    def rows(ids):
        ran.append("rows")
        first = zs.embedding_lookup(table, ids)
        return first, zs.embedding_lookup(table, first[0].astype(jnp.int32)) * v.value()

    assert [float(step(1.0)), float(step(2.0))] == [9, 25]
    for _ in range(2):
        first, second = rows(np.array([0, 2]))
        np.testing.assert_array_equal(first, np.eye(3)[[0, 2]])
        np.testing.assert_array_equal(second, 5 * np.eye(3)[[1, 0, 0]])
    assert ran == ["step", "rows"]
    assert (step.trace_count, rows.trace_count) == (1, 1)


def test_python_values_are_those_of_the_trace(storage):
    """As of ``tf.function``: a number of numpy's is the same in all steps."""
    v, captured = storage.variable(np.float32(0)), {"count": 0}

    @zs.function
    def step():
        captured["count"] += 1
        v.assign_add(captured["count"])
        return captured["count"], np.random.rand()

    assert step() == step()
    assert step()[0] == 1
    assert v.numpy() == 3

"""What a step does: expected values come from numpy and from plain jax."""

from __future__ import annotations

import copy
from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zstrat.program as zs
from zstrat.errors import OutOfRangeError
from zstrat.variables import IndexedSlices, Variable, apply
from zstrat.wire._messages import UpdateOp

Pair = namedtuple("Pair", "first second")


def worker_run(function, *args, **kwargs):
    """What a worker does: prepare, pull, run. Returns the result and the updates."""
    prepared = zs.prepare(function, args, kwargs)
    values = [v.home.read(v) for v in prepared.plan.variables]
    result = prepared.run(values)
    treedef = prepared.plan.out_structure.treedef
    return zs.rebuild(result.layout.structure, result.leaves, treedef), result.updates


def test_each_variable_is_one_read_and_updates_keep_their_order(home):
    v, w = home.variable([1.0, 2.0], "v"), home.variable([5.0, 6.0], "w")

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


def test_an_update_alone_reads_nothing(home):
    v = home.variable(np.float32(1))

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
def test_a_read_after_a_write_sees_what_was_written(home, op, operands):
    start = np.array([1.0, 2.0, 3.0], np.float32)
    v = home.variable(start)
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
    np.testing.assert_allclose(home.values[v.spec.key], 2 * expected, rtol=1e-6)


def test_what_is_assigned_and_then_read_is_not_pulled(home):
    v = home.variable(np.float32(7))

    @zs.function
    def step(x):
        v.assign(x)
        return v.assign_add(x)

    assert step.plan((np.float32(2),)).reads == ()
    assert step(np.float32(2)) == 4.0


def test_an_assignment_after_an_optimizer_can_be_read(home):
    v = home.variable(np.float32(1))
    opt = home.optimizer(optax.sgd(1.0))

    @zs.function
    def step():
        opt.apply_gradients([(jnp.float32(1), v)])
        v.assign(5.0)
        return v.value()

    assert step() == 5.0
    assert home.values[v.spec.key] == 5.0


def test_inner_jit_and_scan_see_the_current_value_and_no_stale_trace(home):
    """jax remembers traces of inner functions by identity and types of arguments."""
    v = home.variable(np.float32(1))

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


def test_reads_are_allowed_under_transformations(home):
    v = home.variable(np.array([1.0, 2.0], np.float32))

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


def test_nested_functions_are_inlined(home):
    v = home.variable(np.float32(1))

    @zs.function
    def inner(x):
        v.assign_add(x)
        return v.value()

    @zs.function
    def outer(x):
        return inner(x) + inner(x)

    assert outer(np.float32(1)) == 5.0
    assert home.values[v.spec.key] == 3.0
    assert (outer.trace_count, inner.trace_count) == (1, 0)


def test_results_keep_their_structure_and_plain_python_values(home):
    v = home.variable(np.float32(3))

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


def test_results_of_the_worker_are_complete_numpy_arrays_of_their_own(home):
    big = np.arange(1 << 16, dtype=np.float32)
    aligned = np.empty(big.nbytes + 64, np.uint8)
    offset = -aligned.ctypes.data % 64
    value = aligned[offset : offset + big.nbytes].view(np.float32)
    value[:] = big
    v = home.variable(value)
    home.values[v.spec.key] = value

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


def test_draws(home):
    v = home.variable(np.float32(0))

    @zs.function
    def step(it, other):
        a, b, c = next(it), next(other), next(it)
        v.assign_add(a["x"] + b + c["x"])
        return a["x"], b, c["x"]

    it = zs.StepIterator({"x": np.float32(n)} for n in range(5))
    other = zs.StepIterator(iter(range(100, 105)))
    with jax.numpy_dtype_promotion("standard"):
        assert [float(x) for x in step(it, other)] == [0, 100, 1]
        plan = step.plan((it, other))
        assert plan.draws == (0, 1, 0)
        assert plan.draws_per_step == {0: 2, 1: 1}
        assert [float(x) for x in step(it, other)] == [2, 101, 3]
        for _ in range(2):
            # The second draw fails: the first element and the other's go back.
            with pytest.raises(OutOfRangeError, match="End of sequence"):
                step(it, other)
    assert next(it)["x"] == 4
    assert next(other) == 102


def test_the_same_iterator_twice_is_one_iterator():
    @zs.function
    def step(a, b):
        return next(a), next(b)

    def numbers():
        return zs.StepIterator(iter(np.arange(10, dtype=np.float32)))

    it = numbers()
    assert [float(x) for x in step(it, it)] == [0, 1]
    assert [float(x) for x in step(it, numbers())] == [2, 0]
    assert step.trace_count == 2


def test_elements_of_another_shape_are_planned_anew_and_lose_nothing():
    @zs.function
    def step(it):
        return jnp.sum(next(it))

    batches = [np.ones(4, np.float32), np.ones(4, np.float32), np.ones(3, np.float32)]
    it = zs.StepIterator(iter(batches))
    assert [float(step(it)) for _ in batches] == [4, 4, 3]
    assert step.trace_count == 2


def test_prepared_steps_give_their_elements_back_in_order():
    @zs.function
    def step(it):
        return next(it)

    it = zs.StepIterator(iter(np.arange(5, dtype=np.float32)))
    first, second, third = (zs.prepare(step, (it,), {}) for _ in range(3))
    assert first.run([]).leaves[0] == 0
    third.unread()
    second.unread()
    assert [float(step(it)) for _ in range(4)] == [1, 2, 3, 4]


@pytest.mark.parametrize("foreign", [False, True])
def test_a_source_that_fills_one_buffer(foreign):
    class Foreign:
        """An array of another library, over the same memory."""

        def __init__(self, array):
            self.array = array

        def __array__(self, dtype=None, copy=None):
            return self.array

    @zs.function
    def step(it):
        return next(it)["x"], next(it)["x"]

    def source():
        buffer = np.zeros(2, np.float32)
        for n in range(6):
            buffer[:] = n
            yield {"x": Foreign(buffer) if foreign else buffer}

    it = zs.StepIterator(source())
    first, second = (zs.prepare(step, (it,), {}) for _ in range(2))
    second.unread()
    drawn = [*first.run([]).leaves, *step(it), next(it)["x"], next(it)["x"]]
    assert [x.tolist() for x in drawn] == [[n, n] for n in range(6)]


def test_planning_draws_nothing_for_good():
    seen = []

    def source():
        for n in range(3):
            seen.append(n)
            yield np.float32(n)

    @zs.function
    def step(it):
        return next(it), next(it)

    it = zs.StepIterator(source())
    step.plan((it,))
    assert [float(x) for x in step(it)] == [0, 1]


def test_an_abstract_iterator_plans_without_elements():
    spec = {"x": jax.ShapeDtypeStruct((4, 2), np.float32)}

    @zs.function
    def step(it):
        return jnp.sum(next(it)["x"], axis=0)

    plan = step.plan((zs.StepIterator(None, spec),))
    assert plan.out_specs[0].shape == (2,)
    assert plan.layout.structure == 0
    step.plan((zs.StepIterator(None, spec),))
    assert step.trace_count == 1


def test_context_is_known_in_a_step_and_a_second_attempt_is_seen(home):
    v = home.variable(np.float32(0))

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


def test_methods_are_step_functions_of_their_instance(home):
    class Model:
        def __init__(self, scale):
            self.scale = scale
            self.v = home.variable(np.float32(scale))

        @zs.function
        def step(self, x):
            return self.v.value() * x

    two, three = Model(2), Model(3)
    assert (float(two.step(np.float32(5))), float(three.step(np.float32(5)))) == (
        10,
        15,
    )
    assert two.step is two.step
    assert two.step.trace_count == 1


def test_eager_and_captured_steps_agree(home):
    printed = []

    def body(v, it):
        x = next(it)
        printed.append(v.value())
        grads = zs.grad(lambda p: jnp.sum((p - x) ** 2))(v)
        v.assign_sub(0.5 * grads)
        return {"after": v.value()}

    results = []
    for eager in (False, True):
        v = home.variable(np.array([1.0, 2.0], np.float32))
        function = zs.function(body, eager=eager)
        it = zs.StepIterator(iter(np.full((2, 2), 5, np.float32)))
        results.append([function(v, it), function(v, it), home.values[v.spec.key]])
    jax.tree.map(np.testing.assert_allclose, results[0], results[1])
    np.testing.assert_array_equal(printed[-2], [1.0, 2.0])


def test_eager_steps_see_current_values_under_transformations(home):
    v = home.variable(np.float32(1))

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


def test_eager_steps_draw_and_update_at_their_top_level_alone(home):
    v = home.variable(np.float32(1))
    it = zs.StepIterator(iter(np.arange(3, dtype=np.float32)))

    @zs.function(eager=True)
    def draws(it):
        drawing = jax.jit(lambda: next(it))
        return drawing() + drawing()

    @zs.function(eager=True)
    def updates():
        jax.jit(lambda: v.assign(np.float32(2)).value())()

    with pytest.raises(
        RuntimeError, match=r"next\(iterator\) inside a function that ja"
    ):
        draws(it)
    with pytest.raises(RuntimeError, match=r"ASSIGN of .* inside a function that jax"):
        updates()
    assert next(it) == 0.0
    assert home.values[v.spec.key] == 1.0


def test_no_element_is_lost_when_another_one_is_refused():
    good = zs.StepIterator(iter([np.float32(1), np.float32(2)]))
    mixed = zs.StepIterator(iter([np.float32(5), "a text", np.float32(7)]))
    step = zs.function(lambda a, b: next(a) + next(b))
    assert step(good, mixed) == 6.0
    for _ in range(2):  # of a known program, then of one that is traced
        with pytest.raises(TypeError, match="contains str"):
            step(good, mixed)
        step = zs.function(lambda a, b: next(a) + next(b))
    assert next(mixed) == "a text"
    assert step(good, mixed) == 9.0


def test_run_eager_goes_through_the_given_home(home):
    v = home.variable(np.float32(1))
    shipped = zs.load(zs.dump_code(zs.function(lambda: v.assign_add(2.0), eager=True)))
    result = zs.run_eager(shipped, (), {}, home)
    assert result.leaves[0] == 3.0
    assert result.updates == []
    assert home.values[v.spec.key] == 3.0


def test_an_eager_step_is_given_what_a_captured_one_is():
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


def test_an_eager_result_that_nobody_could_rebuild(home):
    v = home.variable(np.float32(1))
    step = zs.function(lambda: {"pair": Pair(v.value(), 2)}, eager=True)
    assert step()["pair"] == Pair(1, 2)  # here it need not cross a wire
    with pytest.raises(TypeError, match=r"'.*' returns PyTreeDef.*Pair.*plain tuples"):
        zs.run_eager(step, (), {}, home)


def test_bfloat16_and_integers_and_booleans(home):
    v = home.variable(np.array([1, 2], jnp.bfloat16))
    n, flag = home.variable(np.int32(3)), home.variable(np.array(True))

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


def test_a_plan_of_local_variables_is_not_shared(home):
    local = Variable(1.0, name="mine")
    step = zs.function(lambda: local.value())
    with pytest.raises(ValueError, match=r"'mine'.*strategy\.scope"):
        step.plan().require_shared()
    remote = home.variable(np.float32(1))
    zs.function(lambda: remote.value()).plan().require_shared()


def test_a_method_under_another_name_is_still_one_function(home):
    def body(self, x):
        return x + self.offset

    class Model:
        offset = 1
        renamed = zs.function(body)

    model = Model()
    assert model.renamed(np.float32(1)) == 2.0
    assert model.renamed is model.renamed


def test_a_subclass_calls_the_step_of_its_parent():
    class Parent:
        @zs.function
        def step(self):
            return self.offset

    class Child(Parent):
        offset = 3

        @zs.function
        def step(self):
            return 10 + super().step()

    child = Child()
    assert [child.step() for _ in range(3)] == [13, 13, 13]
    assert child.step.trace_count == 1
    assert super(Child, child).step is super(Child, child).step


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda m: zs.load(*zs.dump(m))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_a_copy_of_an_object_runs_its_own_steps(copied):
    class Model:
        def __init__(self, k):
            self.k = k

        @zs.function
        def step(self):
            return self.k

    first = Model(1)
    assert first.step() == 1
    second = copied(first)
    second.k = 2
    for _ in range(2):
        assert (second.step(), first.step()) == (2, 1)
    assert (second.step.trace_count, first.step.trace_count) == (1, 1)


def test_two_names_of_a_method_are_one_function():
    class Model:
        @zs.function
        def step(self):
            return 1

        other = step

    model = Model()
    assert model.other is model.step is model.other
    model.other()
    model.other()
    assert model.step.trace_count == 1


def test_an_object_may_have_a_step_of_its_own():
    class Model:
        @zs.function
        def step(self):
            return 1

    model = Model()
    model.step()
    model.step = zs.function(lambda: 2)
    assert model.step() == 2


def test_methods_that_have_no_place_are_refused():
    class Slotted:
        __slots__ = ("k",)

        @zs.function
        def step(self):
            return self.k

    class Model:
        step = zs.function(lambda cls: 1)

    with pytest.raises(TypeError, match=r"'.*step'.*Slotted.*__slots__.*'__dict__'"):
        Slotted().step  # noqa: B018
    # What @classmethod above @zs.function does in Python 3.11.
    with pytest.raises(TypeError, match=r"is a class method.*@staticmethod"):
        vars(Model)["step"].__get__(Model)


def test_attributes_of_a_callable_object_stay_its_own():
    class Doubled:
        def __init__(self):
            self.name, self.eager, self.body = None, True, lambda x: -x

        def __call__(self, x):
            return 2 * x

    step = zs.function(Doubled())
    assert (step(np.float32(3)), step.eager) == (6.0, False)
    assert step.name.endswith("Doubled")

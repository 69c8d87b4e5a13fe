"""Variables as arguments: one trace for all calls that are alike."""

import functools
import types
import warnings
from collections import deque

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zstrat as zs


@pytest.fixture(params=["ps", "mirrored", "here"])
def make(request, storage):
    """Makes a variable that lives where most variables do."""
    one = zs.MirroredStrategy(["CPU:0"])

    def mirrored(value, name):
        with one.scope():
            return zs.Variable(value, name=name)

    ways = {
        "ps": storage.variable,
        "mirrored": mirrored,
        "here": lambda value, name: zs.Variable(value, name=name),
    }
    numbers = iter(range(100))
    return lambda value: ways[request.param](
        np.asarray(value, np.float32), f"v{next(numbers)}"
    )


class Counted:
    """A step function and how often its body ran: twice for each trace that was also
    run, once to plan and once to compile."""

    def __init__(self, body):
        self.runs = 0

        def counted(*args, **kwargs):
            self.runs += 1
            return body(*args, **kwargs)

        self.step = zs.function(counted)

    def __call__(self, *args, **kwargs):
        return self.step(*args, **kwargs)


def moved(v, w, x):
    v.assign_add(x * jnp.ones(2))
    w.assign(v * 2)
    return v.value(), w.value()


def test_other_variables_are_no_other_trace(make):
    a, b, c = (make([n, n]) for n in (0, 1, 2))
    step = Counted(moved)
    assert [y.tolist() for y in step(a, b, 1.0)] == [[1, 1], [2, 2]]
    assert step.runs == 1
    assert [y.tolist() for y in step(b, c, 2.0)] == [[4, 4], [8, 8]]
    assert [y.tolist() for y in step(c, a, 1.0)] == [[9, 9], [18, 18]]
    assert step.runs == 1
    assert step.step.trace_count == 1
    assert [v.numpy()[0] for v in (a, b, c)] == [18, 4, 9]
    assert [y.tolist() for y in step(a, b, 1.0)] == [[19, 19], [38, 38]]


def test_the_same_variable_twice_is_another_pattern(make):
    a, b = make([1, 1]), make([2, 2])
    step = Counted(moved)
    step(a, b, 1.0)
    assert [y.tolist() for y in step(a, a, 1.0)] == [[6, 6], [6, 6]]
    assert step.step.trace_count == 2
    assert [y.tolist() for y in step(b, b, 1.0)] == [[10, 10], [10, 10]]
    assert step.step.trace_count == 2


def test_variables_in_containers(make):
    first, second = ([make([n, n]), make([n + 1, n])] for n in (0, 5))
    step = Counted(lambda tree, *, by: (tree["w"][0] + tree["w"][1]) * by)
    assert step({"w": first}, by=2.0).tolist() == [2, 0]
    assert step({"w": second}, by=2.0).tolist() == [22, 20]
    assert step({"w": first[::-1]}, by=1.0).tolist() == [1, 0]
    assert step.runs == 1
    step({"w": [first[0]] * 2}, by=1.0)
    assert step.step.trace_count == 2


def test_other_shapes_and_dtypes_are_other_traces(storage):
    step = Counted(lambda v: v * 2)
    for value in (np.zeros(2, "f"), np.zeros(3, "f"), np.zeros(2, np.int32)):
        step(storage.variable(value))
    step(storage.on_devices(np.zeros(2, "f")))
    assert step.step.trace_count == 4


def test_variables_in_parts(storage):
    values = np.arange(8, dtype=np.float32), np.ones(8, np.float32)
    tables = [storage.sharded(value) for value in values]
    step = Counted(lambda t: t.assign_add(jnp.ones(8)).value())
    for table, value in zip(tables, values, strict=True):
        np.testing.assert_array_equal(step(table), value + 1)
        np.testing.assert_array_equal(table.numpy(), value + 1)
    assert step.runs == 1
    step(storage.sharded(values[0], parts=4))
    assert step.step.trace_count == 2


def test_rows_are_updated_where_they_are_meant(storage):
    tables = [storage.sharded(np.zeros(8, np.float32)) for _ in range(3)]
    step = Counted(lambda t, ids: t.scatter_add(zs.IndexedSlices(jnp.ones(2), ids)))
    for n, table in enumerate(tables):
        step(table, np.array([n, 7 - n]))
    assert step.step.trace_count == 1
    assert [np.flatnonzero(t.numpy()).tolist() for t in tables] == [
        [0, 7],
        [1, 6],
        [2, 5],
    ]


def test_a_body_that_has_the_variable_itself(make):
    """It may be asked which one it was given."""
    a, b, c = (make([n]) for n in (1, 2, 3))
    step = Counted(lambda v: (v + a, v is a))
    assert step(a) == (2, True)
    assert step(b) == (3, False)
    assert step(c) == (4, False)
    assert step(a) == (2, True)
    assert step.step.trace_count == 2
    holder = zs.Module()
    holder.mine = [a]
    held = Counted(lambda v: v is holder.mine[0])
    assert [bool(held(v)) for v in (b, a, c)] == [False, True, False]
    kept = {a: 10.0}
    known = Counted(lambda v, kept=kept: v * kept.get(v, 1.0))
    assert [float(known(v)[0]) for v in (b, a, c)] == [2, 10, 3]
    bound = Counted(functools.partial(lambda mine, v: mine + v * 2, a))
    assert [float(bound(v)[0]) for v in (a, b, a, c)] == [3, 5, 3, 7]


def test_a_body_that_reaches_the_variable_by_a_way_that_nobody_sees(make):
    """The first call has it as an argument and as an attribute of a module."""
    a, b, c = (make([n]) for n in (1, 2, 3))
    module = types.ModuleType("beside")
    module.mine = a

    def body(v):
        v.assign_add(jnp.ones(1))
        return v * 10 + module.mine

    step = Counted(body)
    assert step(a).tolist() == [22]
    assert step(b).tolist() == [32]
    assert step(c).tolist() == [42]
    assert step(a).tolist() == [33]
    assert step.step.trace_count == 2
    later = Counted(body)
    assert later(b).tolist() == [43]
    assert later(a).tolist() == [44]  # not what it did with b
    assert later.step.trace_count == 2


class Held:
    """Holds a variable in a slot."""

    __slots__ = ("mine",)


def asked_module(beside):
    return lambda v: v is beside.mine


def asked_class(beside):
    kind = type("Settings", (), {"mine": beside.mine})
    return lambda v: v is kind.mine


def asked_slot(beside):
    held = Held()
    held.mine = beside.mine
    return lambda v: v is held.mine


def asked_function_of_a_module(beside):
    code = "def asks(v):\n    return v is mine"
    exec(code, vars(beside))
    return lambda v: beside.asks(v)


def asked_method(beside):
    class Model:
        mine = beside.mine

        def asks(self, v):
            return v is self.mine

        def step(self, v):
            return self.asks(v)

    return Model().step


def asked_deque(beside):
    kept = deque([beside.mine])
    return lambda v: any(v is each for each in kept)


def asked_number(beside):
    numbers = {id(beside.mine)}
    return lambda v: id(v) in numbers


def asked_function_of_c(beside):
    is_mine = {id(beside.mine)}.__contains__
    return lambda v: is_mine(id(v))


def asked_partial_of_jax(beside):
    return jax.tree_util.Partial(lambda mine, v: v is mine, beside.mine)


def asked_tuple_of_optax(beside):
    mine = beside.mine
    kept = optax.GradientTransformation(None, lambda v: v is mine)
    return lambda v: kept.update(v)


@pytest.mark.parametrize(
    "asked",
    [
        asked_module,
        asked_class,
        asked_slot,
        asked_function_of_a_module,
        asked_method,
        asked_deque,
        asked_number,
        asked_function_of_c,
        asked_partial_of_jax,
        asked_tuple_of_optax,
    ],
)
def test_a_body_that_compares_captured_variables_is_not_shared(storage, asked):
    a, b = (storage.variable(np.float32(n)) for n in (1, 2))
    beside = types.ModuleType("beside")
    beside.mine = b
    asks = asked(beside)
    step = Counted(lambda v: v * (10 if asks(v) else 1))
    assert [float(step(v)) for v in (b, a, b)] == [20, 1, 20]
    step = Counted(lambda v: v * (10 if asks(v) else 1))
    assert [float(step(v)) for v in (a, b, a)] == [1, 20, 1]


def test_an_argument_that_holds_the_variable(storage):
    a, b = (storage.variable(np.float32(n)) for n in (1, 2))
    held = Held()
    held.mine = b
    step = Counted(lambda v, held: v * (10 if v is held.mine else 1))
    assert [float(step(v, held)) for v in (b, a, b)] == [20, 1, 20]


def test_a_variable_that_is_looked_for_in_a_dict_that_nobody_sees(storage):
    a, b = (storage.variable(np.float32(n)) for n in (1, 2))
    look = {b: 10.0}.get  # a function of C
    step = Counted(lambda v: v * look(v, 1.0))
    assert [float(step(v)) for v in (b, a, b)] == [20, 1, 20]
    drawn = zs.StepIterator(iter([np.float32(n) for n in range(4)]))
    drawing = Counted(lambda v, it: next(it) + v * look(v, 1.0) + next(it))
    assert [float(drawing(v, drawn)) for v in (b, a)] == [21, 6]


def test_a_body_that_asks_for_the_name(make):
    a, b = make([1]), make([2])
    step = Counted(lambda v: v * (10 if v.name == a.name else 1))
    assert [float(step(v)[0]) for v in (b, a, b)] == [2, 10, 2]
    assert step.step.trace_count == 2
    where = Counted(lambda v: v * len(v.device))
    assert where(a) == len(a.device)
    assert where(b) == 2 * len(b.device)


def test_an_optimizer_moves_each_variable_by_itself(storage):
    a, b = (storage.variable(np.full(1, n, np.float32)) for n in (1, 2))
    optimizer = storage.optimizer(optax.sgd(0.5))
    step = Counted(lambda v: optimizer.apply_gradients([(jnp.ones(1), v)]))
    step(a)
    step(b)
    assert [a.numpy()[0], b.numpy()[0]] == [0.5, 1.5]
    assert step.step.trace_count == 2


def test_rows_that_are_looked_up(storage):
    a, b = storage.sharded(np.arange(4.0, dtype="f")), storage.sharded(np.ones(4, "f"))
    step = Counted(lambda t, ids: t.sparse_read(ids))
    assert step(a, np.array([3, 0])).tolist() == [3, 0]
    assert step(b, np.array([3, 0])).tolist() == [1, 1]


def test_no_warning_for_other_variables_and_one_for_other_shapes(make):
    step = Counted(lambda v: v.value())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in range(12):
            step(make([n]))
        for n in range(2, 5):
            step(make([0.0] * n))
    with pytest.warns(zs.RetraceWarning, match=r"\[0\].*\[4\].*\[5\]"):
        step(make([0.0] * 5))


def test_many_variables_are_one_program(storage):
    """More than are kept: the shared one stays."""
    step = Counted(lambda v: v * 2)
    variables = [storage.variable(np.float32(n)) for n in range(300)]
    assert [float(step(v)) for v in variables] == [2.0 * n for n in range(300)]
    assert step.runs == 1


def test_a_step_that_draws(make):
    step = Counted(lambda v, it: v + next(it))
    iterator = zs.StepIterator(iter([np.float32(n) for n in range(4)]))
    a, b = make([10]), make([20])
    assert [float(step(v, iterator)[0]) for v in (a, b, a)] == [10, 21, 12]
    assert step.runs == 1

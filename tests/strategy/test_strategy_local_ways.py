"""Replica functions made at random, as one program and in turns, in a step and outside,
of one process and of two, on floats and integers: all of them do what a few lines of
numpy do with the replicas in lockstep."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lockstep import KINDS, A, Copies, S
from ranks import ranks
from tiers import examples

import zstrat as zs

VARIABLES = KINDS[:-1]  # the last kind has no value outside
START = np.array([4, 2, 8])
WEIGHTS = np.arange(1, 4)
ROWS = np.array([2, 0, 2])

INDEX = st.integers(0, len(VARIABLES) - 1)
STEPS = st.one_of(
    st.tuples(st.just("add"), st.sampled_from([-2, 1, 3])),
    st.tuples(st.just("number"), st.just(0)),
    st.tuples(st.just("all_reduce"), st.sampled_from(["sum", "mean"])),
    st.tuples(st.just("all_gather"), st.sampled_from([0, -1])),
    st.tuples(st.just("reduce rows"), st.just("sum")),
    st.tuples(st.just("gradient"), st.sampled_from(["sum", "mean", "gather"])),
    st.tuples(st.sampled_from(["read", "read rows"]), INDEX),
    st.tuples(st.sampled_from(["assign", "assign_add", "assign_sub"]), INDEX),
    st.tuples(st.sampled_from(["scatter_add", "scatter_sub"]), st.integers(0, 3)),
)
"""Operations and what they are made with: indices of variables, the first four of
which have updates of rows."""
# One strategy is given functions that are made anew for each test.
pytestmark = pytest.mark.filterwarnings("ignore::zstrat.program.RetraceWarning")


def number():
    return jnp.asarray(zs.get_replica_context().replica_id_in_sync_group)


def body(steps, variables, x):
    context, dtype = zs.get_replica_context(), x.dtype
    replicas = context.num_replicas_in_sync
    for what, how in steps:
        match what:
            case "add":
                x = x + how  # as Python's numbers, which have no dtype
            case "number":
                x = x + number().astype(dtype)
            case "all_reduce":
                x = context.all_reduce(how, {"x": x})["x"].astype(dtype)
            case "all_gather":
                x = context.all_gather(x[None] if how == 0 else x, how)
                x = x.reshape(replicas, 3).sum(0, dtype=dtype)
            case "reduce rows":
                rows = zs.IndexedSlices(x[:1], number()[None], (replicas,))
                x = x + context.all_reduce(how, rows).to_dense().sum(dtype=dtype)
            case "gradient":
                x = gradient(how, x)
            case "read":
                x = x + variables[how].value()
            case "read rows":
                x = x + variables[how].sparse_read(ROWS)
            case "scatter_add" | "scatter_sub":
                rows = zs.IndexedSlices(x[:2], jnp.asarray([2, 0]))
                getattr(variables[how], what)(rows)
            case _:
                getattr(variables[how], what)(x)
    return x


def gradient(how, x):
    """Of a loss to which every replica contributes by its number."""

    context = zs.get_replica_context()

    def loss(x):
        if how == "gather":
            both = context.all_gather(x * WEIGHTS, 0)
        else:
            both = context.all_reduce(how, x * WEIGHTS)
        return jnp.sum(both * (number() + 1))

    return jax.grad(loss)(x)


class Lockstep:
    """The same in numpy: a row for each replica."""

    def __init__(self, kinds, dtype, replicas):
        self.copies = [Copies(kind, START.astype(dtype), replicas) for kind in kinds]
        self.numbers = np.arange(replicas)[:, None]

    def run(self, steps, x):
        dtype, replicas = x.dtype, len(x)
        for what, how in steps:
            match what:
                case "add":
                    x = x + dtype.type(how)
                case "number":
                    x = x + self.numbers.astype(dtype)
                case "all_reduce":
                    whole = x.sum(0, dtype=dtype) if how == "sum" else x.mean(0)
                    x = np.stack([whole.astype(dtype)] * replicas)
                case "all_gather":
                    x = np.stack([x.sum(0, dtype=dtype)] * replicas)
                case "reduce rows":
                    x = x + x[:, 0].sum(dtype=dtype)
                case "gradient":
                    scale = (self.numbers + 1).sum() / (
                        replicas if how == "mean" else 1
                    )
                    x = np.stack([(WEIGHTS * scale).astype(dtype)] * replicas)
                case "read":
                    x = x + self.copies[how].values
                case "read rows":
                    x = x + self.copies[how].values[:, ROWS]
                case "scatter_add" | "scatter_sub":
                    ids = np.array([[2, 0]] * replicas)
                    self.copies[how].write_rows(what, ids, x[:, :2])
                case _:
                    self.copies[how].write(what, x)
        return x


def kinds_of(strategy):
    """Where all replicas share one device for variables, an update has to say how."""
    is_central = isinstance(strategy, zs.CentralStorageStrategy)
    return [
        (A.MEAN, S.ON_WRITE) if is_central and kind == (A.NONE, S.ON_WRITE) else kind
        for kind in VARIABLES
    ]


def check(steps, strategy, dtype, in_step, in_turns):
    """Runs the function twice; of this process are the replicas from ``first`` on."""
    kinds, replicas = kinds_of(strategy), strategy.num_replicas_in_sync
    with strategy.scope():
        variables = [
            zs.Variable(START.astype(dtype), aggregation=how, synchronization=when)
            for how, when in kinds
        ]
    expected = Lockstep(kinds, dtype, replicas)
    ids = []

    def fn(x):
        if in_turns:
            int(zs.get_replica_context().replica_id_in_sync_group)
        return body(steps, variables, x)

    x = (np.arange(3 * replicas) % 7).astype(dtype).reshape(replicas, 3)

    def own(context):
        ids.append(context.replica_id_in_sync_group)
        return x[context.replica_id_in_sync_group]

    values = strategy.experimental_distribute_values_from_function(own)

    def step(x):
        return strategy.run(fn, (x,))

    do = zs.function(step) if in_step else step
    same = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    for _ in range(2):
        found = np.stack(strategy.experimental_local_results(do(values)))
        assert found.dtype == dtype
        same(found, expected.run(steps, x)[ids])
        for variable, copies in zip(variables, expected.copies, strict=True):
            seen = copies.seen_from(ids[0])
            same(variable.numpy(), seen)


def usable(steps, dtype, in_turns):
    """Gradients are of floats, and under a transformation replicas in turns cannot
    wait: that is refused."""
    has_gradients = dtype == "float32" and not in_turns
    return [step for step in steps if has_gradients or step[0] != "gradient"]


STRATEGIES = {
    "three": zs.MirroredStrategy,
    "central": zs.CentralStorageStrategy,
}


@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize("in_turns", [False, True])
@pytest.mark.parametrize(
    ("name", "dtype"), [("three", "float32"), ("three", "int32"), ("central", "int32")]
)
@settings(max_examples=4)
@given(steps=st.lists(STEPS, min_size=1, max_size=6))
def test_any_function(name, dtype, in_step, in_turns, steps):
    strategy = STRATEGIES[name]([f"CPU:{n}" for n in range(3)])
    check(usable(steps, dtype, in_turns), strategy, dtype, in_step, in_turns)


@pytest.mark.parametrize("in_turns", [False, True])
@pytest.mark.parametrize(
    ("dtype", "local", "in_step"), [("float32", 2, False), ("int32", 1, True)]
)
@settings(max_examples=3)
@given(steps=st.lists(STEPS, min_size=1, max_size=6))
def test_any_function_of_two_processes(dtype, local, in_step, in_turns, steps):
    steps = usable(steps, dtype, in_turns)

    def program(strategy, rank):
        check(steps, strategy, dtype, in_step, in_turns)

    ranks(2, program, local)


@pytest.mark.thorough
@examples(40)
@given(
    steps=st.lists(STEPS, min_size=1, max_size=8),
    name=st.sampled_from(sorted(STRATEGIES)),
    dtype=st.sampled_from(["float32", "int32"]),
    in_step=st.booleans(),
    in_turns=st.booleans(),
)
def test_many_functions(steps, name, dtype, in_step, in_turns):
    strategy = STRATEGIES[name]([f"CPU:{n}" for n in range(3)])
    check(usable(steps, dtype, in_turns), strategy, dtype, in_step, in_turns)

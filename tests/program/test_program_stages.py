"""Programs cut at their collectives: the stage of each equation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

import zstrat.program as zs
from zstrat.program.stages import Channel, gather_from, stages, sum_over

FACTOR = 3


class Factor:
    """All ranks give what this one gives."""

    rank, size, generation = 1, FACTOR, 0

    def all_reduce(self, tree, op="sum"):
        assert op == "sum"
        return [x * FACTOR for x in tree]

    def all_gather(self, tree, axis=0):
        return [np.concatenate([x] * FACTOR, axis) for x in tree]

    def broadcast(self, tree, root=0):
        return tree


CHANNEL = Channel(Factor())


def crossed(x):
    return sum_over(CHANNEL, [x])[0]


def run(closed, *args):
    """The outputs of a program that is run stage by stage."""
    cut, constants = stages(closed)
    store = dict(enumerate(args)) | constants
    for stage in cut:
        made = stage.run(*[store[n] for n in stage.takes])
        if stage is cut[-1]:
            return made, cut
        store.update(zip(stage.gives, made, strict=True))
        for each in stage.crossings:
            reduced = each.channel.carry_out(
                each.kind, [store[n] for n in each.operands]
            )
            store.update(zip(each.results, reduced, strict=True))
    raise AssertionError


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "mul", "sin", "cross", "jit", "where"]),
        st.integers(0, 30),
        st.integers(0, 30),
    ),
    min_size=1,
    max_size=25,
)


def program(steps, reduce):
    """A function of two arrays that does these steps."""

    def fn(x, y):
        values = [x, y]
        for what, i, j in steps:
            a, b = values[i % len(values)], values[j % len(values)]
            match what:
                case "add":
                    made = a + b * 0.5
                case "mul":
                    made = jnp.tanh(a) * b
                case "sin":
                    made = jnp.sin(a)
                case "cross":
                    made = reduce(jnp.cos(a))
                case "jit":
                    made = jax.jit(lambda a, b: reduce(jnp.sin(a - b)) + a)(a, b)
                case "where":
                    made = jnp.where(a > b, a, b)
            values.append(made)
        return values[-3:]

    return fn


@examples(60)
@given(STEPS)
def test_a_cut_program_computes_what_the_whole_one_does(steps):
    args = jnp.linspace(-1, 1, 4), jnp.linspace(0.5, 2, 4)
    closed = jax.make_jaxpr(program(steps, crossed))(*args)
    made, _ = run(closed, *args)
    expected = program(steps, lambda x: x * FACTOR)(*args)
    for one, other in zip(made, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@examples(60)
@given(STEPS)
def test_nothing_is_computed_twice(steps):
    args = jnp.linspace(-1, 1, 4), jnp.linspace(0.5, 2, 4)
    closed = jax.make_jaxpr(program(steps, crossed))(*args)
    cut, _ = stages(closed)
    made = [n for stage in cut[:-1] for n in stage.gives]
    assert len(made) == len(set(made))
    # Whatever a stage takes was made before, or is an input.
    known = {0, 1}
    for stage in cut:
        assert set(stage.takes) <= known
        known |= set(stage.gives) if stage is not cut[-1] else set()
        for each in stage.crossings:
            known |= set(each.results)


def layers(w, x):
    for each in w:
        x = jnp.tanh(x @ each)
    return jnp.mean(x**2)


def test_a_gradient_is_handed_over_and_nothing_else():
    weights = [jnp.ones((4, 4)) * 0.1 for _ in range(3)]
    moments = [jnp.zeros((4, 4)) for _ in range(3)]

    def step(weights, moments, x):
        loss, grads = jax.value_and_grad(layers)(weights, x)
        grads = sum_over(CHANNEL, grads)
        moments = [0.9 * m + g for m, g in zip(moments, grads, strict=True)]
        weights = [w - 0.1 * m for w, m in zip(weights, moments, strict=True)]
        return loss, weights, moments

    closed = jax.make_jaxpr(step)(weights, moments, jnp.ones((8, 4)))
    cut, _ = stages(closed)
    first, last = cut
    # Three gradients and the loss; the decay of the moments is computed where it is
    # used, of inputs that are there anyway.
    assert len(first.gives) == 4
    inputs = range(7)
    assert set(first.takes) == {0, 1, 2, 6}
    assert set(last.takes) & set(inputs) == {0, 1, 2, 3, 4, 5}
    assert [len(x.operands) for x in first.crossings] == [3]


def test_independent_collectives_go_out_together():
    def step(x, y):
        a, b = crossed(jnp.sin(x)), crossed(jnp.cos(y))
        return a + b, crossed(a * 2)

    cut, _ = stages(jax.make_jaxpr(step)(jnp.ones(3), jnp.ones(3)))
    assert [len(stage.crossings) for stage in cut] == [2, 1, 0]


def test_gradients_of_a_sum_are_summed():
    def loss(x):
        return jnp.sum(crossed(x * 2) ** 2)

    x = jnp.arange(3.0)
    closed = jax.make_jaxpr(jax.grad(loss))(x)
    (found,), _ = run(closed, x)
    # d/dx sum((3 * 2x)^2), and the incoming gradient summed over 3 ranks.
    np.testing.assert_allclose(found, 2 * (6 * x) * 2 * FACTOR)


def test_gradients_of_a_gather_are_those_of_the_own_part():
    weight = jnp.arange(6.0)

    def loss(x):
        return jnp.sum(gather_from(CHANNEL, [x])[0] * weight)

    x = jnp.ones(2)
    (found,), _ = run(jax.make_jaxpr(jax.grad(loss))(x), x)
    np.testing.assert_allclose(found, FACTOR * weight[2:4])


def test_constants_are_reduced_too():
    constant = np.arange(3.0, dtype=np.float32)

    def step(x):
        return x + crossed(jnp.asarray(constant)) + crossed(jnp.float32(1))

    (found,), _ = run(jax.make_jaxpr(step)(jnp.zeros(3)), jnp.zeros(3))
    np.testing.assert_allclose(found, 3 * constant + 3)


def test_a_collective_that_nobody_waits_for_happens():
    def step(x):
        crossed(x * 2)
        return x + 1

    cut, _ = stages(jax.make_jaxpr(step)(jnp.zeros(3)))
    assert [len(stage.crossings) for stage in cut] == [1, 0]


@pytest.mark.parametrize("kind", ["scan", "cond", "while"])
def test_collectives_in_loops_and_branches_are_refused(kind):
    def step(x):
        match kind:
            case "scan":
                return jax.lax.scan(lambda c, _: (crossed(c), None), x, length=3)[0]
            case "cond":
                return jax.lax.cond(x[0] > 0, crossed, lambda x: x, x)
            case "while":
                return jax.lax.while_loop(lambda x: x[0] < 9, crossed, x)

    closed = jax.make_jaxpr(step)(jnp.ones(3))
    with pytest.raises(RuntimeError, match="while_loop"):
        stages(closed)


def test_a_step_that_cannot_be_cut_gives_back_what_it_drew():
    iterator = zs.StepIterator([np.ones(3, np.float32), np.zeros(3, np.float32)])

    @zs.function
    def step(iterator):
        first = next(iterator)
        return jax.lax.scan(lambda c, _: (crossed(c), None), first, length=3)[0]

    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"jax\.lax\.scan"):
            step(iterator)
    np.testing.assert_array_equal(iterator.draw(), np.ones(3))


def test_checkpointed_functions_may_have_collectives():
    def loss(x):
        return jnp.sum(jax.checkpoint(lambda x: jnp.sin(crossed(x)))(x))

    x = jnp.arange(3.0)
    (found,), _ = run(jax.make_jaxpr(jax.grad(loss))(x), x)
    np.testing.assert_allclose(found, FACTOR * np.cos(3 * np.arange(3)), rtol=1e-5)

"""Errors of what a step cannot do: each names the user's line."""

from __future__ import annotations

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zstrat.program as zs
from zstrat.variables import Variable

X = np.array([1.0, 2.0], np.float32)


def line_of(function, text: str) -> str:
    """A pattern for ``file:line`` of the line of ``function`` that contains text."""
    lines, start = inspect.getsourcelines(function)
    number = next(n for n, line in enumerate(lines, start) if text in line)
    return re.escape(f"{__file__}:{number} ")


def refused(body, *args, error, match, at):
    """Asserts that planning the body is refused with these words, at that line."""
    with pytest.raises(error, match=match) as caught:
        zs.function(body).plan(args)
    assert re.search(line_of(body, at), str(caught.value)), str(caught.value)
    return caught.value


class Endless:
    """Not a builtin iterator: of those jax itself warns."""

    def __iter__(self):
        return self

    def __next__(self):
        return X


UNDER = {
    "grad": lambda f: jax.grad(lambda x: (f(jnp.sum(x)), jnp.sum(x))[1])(X),
    "vmap": lambda f: jax.vmap(lambda x: (f(x), x)[1])(X),
    "jit": lambda f: jax.jit(lambda x: (f(jnp.sum(x)), x)[1])(X),
    "cond": lambda f: jax.lax.cond(
        jnp.asarray(True), lambda: (f(jnp.float32(1)), 1)[1], lambda: 0
    ),
    "scan": lambda f: jax.lax.scan(lambda c, x: ((f(x), c)[1], None), X[0], X),
    "checkpoint": lambda f: jax.checkpoint(lambda x: (f(jnp.sum(x)), x)[1])(X),
    "value_and_grad": lambda f: zs.value_and_grad(
        lambda x: (f(jnp.sum(x)), jnp.sum(x))[1]
    )(X),
}


@pytest.mark.parametrize("under", UNDER.values(), ids=UNDER)
def test_an_update_and_a_draw_under_a_transformation(storage, under):
    v, it = storage.variable(np.float32(1), "weights"), zs.StepIterator(iter([X]))

    def updates():
        under(lambda x: v.assign_add(x))  # here

    def draws(it):
        under(lambda x: next(it))  # here

    match = r"ADD.*'weights'.*jax\.grad"
    refused(updates, error=RuntimeError, match=match, at="# here")
    match = r"next\(iterator\)"
    refused(draws, it, error=RuntimeError, match=match, at="# here")
    np.testing.assert_array_equal(next(it), X)


def test_an_optimizer_under_grad(storage):
    v, opt = storage.variable(np.float32(1), "w"), storage.optimizer(optax.sgd(0.1))

    def body(x):
        def loss(x):
            opt.apply_gradients([(jnp.float32(1), v)])  # here
            return x

        return jax.grad(loss)(x)

    match = "'w'"
    refused(body, X[0], error=RuntimeError, match=match, at="# here")


def test_an_update_under_value_and_grad_of_a_variable_outside_of_steps(storage):
    v = storage.variable(np.float32(1))

    def loss():
        return v.assign_add(v.value()).value()

    with pytest.raises(RuntimeError, match="ADD"):
        zs.value_and_grad(loss, variables=v)()


LEAKED = {
    "grad": lambda keep: jax.grad(lambda x: (keep(x * 2), jnp.sum(x))[1])(X),
    "jit": lambda keep: jax.jit(lambda x: (keep(x * 2), x)[1])(X),
    "vmap": lambda keep: jax.vmap(lambda x: (keep(x * 2), x)[1])(X),
    "cond": lambda keep: jax.lax.cond(
        jnp.asarray(True), lambda: (keep(jnp.asarray(X) * 2), 1)[1], lambda: 0
    ),
}


@pytest.mark.parametrize("leak", LEAKED.values(), ids=LEAKED)
@pytest.mark.parametrize("shape", ["direct", "computed"])
def test_a_leaked_value_in_an_update(storage, leak, shape):
    v = storage.variable(X, "w")

    def body():
        kept = []
        leak(kept.append)
        wide = jnp.broadcast_to(kept[0], (2,)) if kept[0].shape == () else kept[0]
        v.assign(kept[0] if shape == "direct" and kept[0].shape else wide + 1.0)  # here

    with pytest.raises(RuntimeError, match="belongs to another function that jax") as e:
        zs.function(body).plan()
    if shape == "direct" and leak in (LEAKED["grad"], LEAKED["jit"]):
        assert re.search(rf"{line_of(body, '# here')}.*'w'", str(e.value))


def _branch(x):
    if x[0] > 0:  # here
        return x
    return -x


def _integer(x):
    return [1, 2, 3][x[0].astype(int)]  # here


def _float(x):
    return float(x[0])  # here


def _numpy(x):
    return np.sin(x)  # here


def _mask(x):
    return x[x > 0]  # here


TRACED = {
    "branch": (_branch, jax.errors.TracerBoolConversionError, r"jnp\.where"),
    "index": (_integer, jax.errors.TracerIntegerConversionError, r"zs\.function"),
    "float": (_float, jax.errors.ConcretizationTypeError, r"zs\.function"),
    "numpy": (_numpy, jax.errors.TracerArrayConversionError, r"jax\.numpy"),
    "mask": (_mask, jax.errors.NonConcreteBooleanIndexError, r"jnp\.where"),
}


@pytest.mark.parametrize(("body", "cause", "match"), TRACED.values(), ids=TRACED)
def test_python_wants_a_value(body, cause, match):
    error = refused(body, X, error=TypeError, match=match, at="# here")
    assert isinstance(error.__cause__, cause)
    assert "eager=True" in str(error)


def test_python_wants_the_value_of_a_variable_or_a_result(storage):
    v, opt = storage.variable(np.float32(1), "w"), storage.optimizer(optax.sgd(0.1))

    def branches():
        return 1 if v.value() > 0 else 2  # here

    def reads_after():
        opt.apply_gradients([(jnp.float32(1), v)])
        return v.value()  # here

    refused(branches, error=TypeError, match="while_loop", at="# here")
    refused(reads_after, error=RuntimeError, match="'w'", at="# here")


def test_values_and_variables_that_a_step_has_not(storage):
    v = storage.variable(np.float32(1))
    with pytest.raises(RuntimeError, match=r"numpy\(\)"):
        zs.function(lambda: v.numpy()).plan()
    with pytest.raises(ValueError, match="'new'"):
        zs.function(lambda: Variable(1.0, name="new").value()).plan()
    with pytest.raises(RuntimeError, match=r"get_worker_context\(\)"):
        zs.get_worker_context()


def test_draws_without_an_end_and_of_a_captured_iterator():
    captured = zs.StepIterator(iter([X]))
    it = zs.StepIterator(None, jax.ShapeDtypeStruct((), np.float32))

    def endless(it):
        total = jnp.float32(0)
        while True:
            total = total + next(it)  # here

    def captures():
        return next(captured)  # here

    refused(endless, it, error=RuntimeError, match=r"\b1024\b", at="# here")
    refused(captures, error=RuntimeError, match=r"zs\.function", at="# here")


def summed(it):
    return sum(x for x in it)


def summed_while_there_are(it):
    total = 0
    while (optional := it.get_next_as_optional()).has_value():
        total += optional.get_value()
    return total


@pytest.mark.parametrize("body", [summed, summed_while_there_are])
def test_where_the_data_end_is_not_traced(body):
    abstract = zs.StepIterator(None, jax.ShapeDtypeStruct((), np.float32))
    words = rf"{__file__}.*where the dataset ends.*in range\(n\): x = next\(iterator\)"
    with pytest.raises(RuntimeError, match=words):
        zs.function(body).plan((abstract,))
    assert zs.function(body, eager=True)(zs.StepIterator([1.0, 2.0])) == 3
    with pytest.warns(UserWarning, match=r"zs\.function"):
        assert zs.function(body)(zs.StepIterator([1.0, 2.0])) == 3


@pytest.mark.parametrize(
    ("argument", "match"),
    [
        ((Endless(),), r"\[0\].*zs\.StepIterator"),
        (({"x": np.array(["a", "b"])},), r"\[0\].*\['x'\]"),
        ((np.ones(2, [("a", "i4")]),), r"\[0\].*'a'"),
        ((np.longdouble(1),), r"\[0\]"),
        ((np.ones(2, ">f4"),), r"\[0\].*'float32'"),
        (([X, {1, 2}],), r"\[0\].*\[1\]"),
    ],
)
def test_arguments_that_no_step_can_take(argument, match):
    with pytest.raises(TypeError, match=match):
        zs.function(lambda x: 1).plan(argument)


def test_a_dataset_of_strings():
    it = zs.StepIterator(iter([{"name": "text", "x": X}]))
    with pytest.raises(TypeError, match="'text'"):
        zs.function(lambda it: next(it)).plan((it,))


@pytest.mark.parametrize(
    ("result", "match"),
    [
        ({"a": object()}, r"\['a'\]"),
        ([1 << 70], r"\[0\].*\b64\b"),
        (jax.random.key(0), "key_data"),
    ],
    ids=["object", "integer", "key"],
)
def test_results_that_no_step_can_give(result, match):
    with pytest.raises(TypeError, match=match):
        zs.function(lambda: result).plan()


def read_in_a_loop(variable):
    """Inside of what jax traces by itself, so that the body is traced again."""
    return jax.lax.fori_loop(0, 2, lambda _, x: x + variable.value(), jnp.float32(0))


def test_a_body_that_changes_its_mind(storage):
    v, w = storage.variable(np.float32(1), "v"), storage.variable(np.float32(1), "w")
    traces, y = [], storage.variable(np.float32(1), "y")

    def reads_another():
        traces.append(1)
        return read_in_a_loop(v if len(traces) % 2 else w)

    def updates_another():
        traces.append(1)
        (v if len(traces) % 2 else w).assign(0.0)
        return read_in_a_loop(y)

    for body in (reads_another, updates_another):
        traces.clear()
        with pytest.raises(RuntimeError, match="did something else when it was traced"):
            zs.function(body)()


def test_a_step_inside_jit(storage):
    """Refused as well if its program is there already, or it takes no argument."""
    v = storage.variable(np.float32(1))
    step = zs.function(lambda x: v.value() * x)
    bare = zs.function(lambda: v.value() * 2)
    for _ in range(2):
        with pytest.raises(TypeError, match="__wrapped"):
            jax.jit(lambda x: step(x))(X[0])
        with pytest.raises(TypeError, match="__wrapped"):
            jax.jit(lambda x: x + bare())(X[0])
        assert (step(X[0]), bare()) == (X[0], 2.0)


def test_a_known_step_takes_no_traced_argument(storage):
    v = storage.variable(np.float32(3))
    step = zs.function(lambda x: v.value() * x)
    for x in (jnp.float32(2), 2.0):
        step(x)
        with pytest.raises(TypeError, match=r"\[0\].*jax\.gr"):
            jax.grad(step)(x)
    with pytest.raises(TypeError, match=r"\[0\].*\['x'\]"):
        jax.vmap(lambda x: zs.prepare(step, ({"x": x},), {}))(jnp.ones(2))


def test_objects_that_are_not_step_functions_are_refused():
    async def waits():
        """Cannot be traced."""

    with pytest.raises(TypeError, match="takes a Python function, got 3"):
        zs.function(3)
    with pytest.raises(TypeError, match=r"zs\.function"):
        zs.function(waits)
    with pytest.raises(ValueError, match="has no plan"):
        zs.function(lambda: 1, eager=True).plan()


def test_errors_of_the_body_pass_unchanged(storage):
    v = storage.variable(np.float32(1))

    def body():
        v.assign_add(1.0)
        raise KeyError("mine")

    step = zs.function(body)
    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            step()
    assert storage.values[v.spec.key] == 1.0
    assert step.trace_count == 0


GIVEN = {
    "exp": lambda v: jnp.exp(v),
    "matmul": lambda v: jnp.matmul(X, v),
    "relu": lambda v: jax.nn.relu(v),
    "sum": lambda v: jnp.sum(v),
    "jit": lambda v: jax.jit(lambda x: x + 1)(v),
    "grad": lambda v: jax.grad(jnp.sum)(v),
    "primitive": lambda v: jax.lax.add(v, v),
}


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
@pytest.mark.parametrize("run", ["plan", "here", "eager"])
def test_a_variable_where_jax_takes_arrays(storage, given, run):
    v = storage.variable(X)

    def body():
        return given(v)  # here

    step = zs.function(body, eager=run == "eager")
    with pytest.raises(TypeError, match=r"v\.value.*zs\.values") as caught:
        step.plan() if run == "plan" else step()
    words = str(caught.value)
    assert re.search(re.escape(__file__) + r":\d+ ", words), words
    assert isinstance(caught.value.__cause__, ValueError)


def test_other_errors_of_an_eager_step_are_unchanged():
    @zs.function(eager=True)
    def step():
        raise ValueError("mine")

    with pytest.raises(ValueError, match=r"^mine\n") as caught:
        step()
    assert str(caught.value) == "mine"


def test_a_python_value_that_changes_from_trace_to_trace(storage):
    """The two values come, their place in the result, and what to do."""
    captured, grown = {"count": 0}, []
    v = storage.variable(np.float32(1))

    def counts():
        captured["count"] += 1
        return {"x": [read_in_a_loop(v), captured["count"]]}

    def grows():
        grown.append(read_in_a_loop(v))
        return grown

    words = r"\['x'\]\[1\].*\b1\b.*\b2\b"
    for fn, match in ((counts, words), (grows, r"\[\*\].*\[\*, \*\]")):
        with pytest.raises(RuntimeError, match=match):
            zs.function(fn)()

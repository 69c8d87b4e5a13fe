"""Keys of programs: which calls share a trace, and warnings of retraces."""

from __future__ import annotations

import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zstrat.program as zs


@pytest.mark.filterwarnings("ignore::zstrat.program.RetraceWarning")
def test_values_do_not_name_a_program_but_types_do():
    @zs.function
    def step(x, **kwargs):
        return kwargs.get("scale", 1) * x

    f32 = np.ones(3, np.float32)
    for value in (f32, 2 * f32, jnp.ones(3), np.ones(3, np.float32)):
        step(value)
    assert step.trace_count == 2  # a jax array can be weakly typed, numpy's cannot
    step(f32, scale=2)
    step(f32, scale=3)
    assert float(step(f32, scale=4)[0]) == 4.0
    assert step.trace_count == 3
    step(np.ones(4, np.float32))
    step(np.ones(3, np.int32))
    step([f32][0], scale=2.5)
    assert step.trace_count == 6


def test_python_numbers_are_weakly_typed():
    @zs.function
    def step(x, n):
        return x * n

    x = np.ones(2, jnp.bfloat16)
    assert step(x, 3).dtype == jnp.bfloat16
    assert step(x, 0.5).dtype == jnp.bfloat16


def test_static_values_name_a_program_and_may_be_branched_on():
    @zs.function
    def step(x, mode, double=False):
        x = x if mode == "plain" else -x
        return 2 * x if double else x

    x = np.float32(3)
    calls = [("plain", False), ("other", False), ("plain", True), ("plain", False)]
    assert [float(step(x, m, double=d)) for m, d in calls] == [3, -3, 6, 3]
    assert step.trace_count == 3


def test_variables_are_named_by_what_they_are(storage):
    a, b = storage.variable(np.float32(1)), storage.variable(np.float32(2))

    @zs.function
    def step(x, y):
        return x.value() - 10 * y.value()

    assert [float(step(*pair)) for pair in ((a, b), (b, a), (a, b))] == [-19, -8, -19]
    assert step.trace_count == 1
    assert len(step.plan((a, a)).reads) == 1
    assert step.trace_count == 2


def test_repeated_traces_are_warned_about_with_words():
    @zs.function
    def step(batch):
        return jnp.sum(batch["x"])

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in range(1, 5):
            step({"x": np.ones(n, np.float32)})
    words = r"\b5\b.*\[0\].*\['x'\]"
    with pytest.warns(zs.RetraceWarning, match=words):
        step({"x": np.ones(5, np.float32)})


def test_changing_elements_are_named_too():
    step = zs.function(lambda it: jnp.sum(next(it)))
    it = zs.StepIterator(np.ones(n, np.float32) for n in range(1, 6))
    words = r"\b0\b.*\[4\].*\[5\]"
    for _ in range(4):
        step(it)
    with pytest.warns(zs.RetraceWarning, match=words):
        step(it)


def test_a_trace_for_other_processes_is_not_an_argument_of_the_user(storage):
    variable = storage.on_devices(np.float32(1))
    step = zs.function(lambda x: variable.assign_add(x))

    def formed_anew(times):
        for _ in range(times):
            variable.storage.pool.formation += 1
            step(1.0)

    formed_anew(4)
    with pytest.warns(zs.RetraceWarning, match="processes of its strategy") as told:
        formed_anew(1)
    assert "argument compares" not in str(told[0].message)
    assert step.trace_count == 5
    assert variable.numpy() == 6


@pytest.mark.filterwarnings("ignore::zstrat.program.RetraceWarning")
def test_programs_are_bounded():
    step = zs.function(lambda mode: mode)
    for n in range(140):
        step.plan((str(n),))
    assert step.trace_count == 140
    for n in range(12, 140):  # the last 128
        step.plan((str(n),))
    assert step.trace_count == 140
    step.plan(("11",))
    assert step.trace_count == 141


def test_a_program_does_not_keep_arguments_alive():
    import gc
    import weakref

    step = zs.function(lambda x, it: (jnp.sum(x), next(it)))
    array = np.ones(10, np.float32)
    it = zs.StepIterator(iter([array, array]))
    step(array, it)
    refs = [weakref.ref(array), weakref.ref(it)]
    del array, it
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


def test_a_step_is_compiled_once_per_signature():
    traces = []

    @zs.function
    def step(x):
        traces.append(1)
        return x + 1

    for _ in range(5):
        step(np.ones(3, np.float32))
    assert len(traces) == 1


def test_the_64_bit_flag_names_a_program():
    step = zs.function(lambda x: x * 2)
    bare = zs.function(lambda: jnp.arange(2))
    x = np.ones(2, np.float64)

    def dtypes():
        return [
            zs.prepare(function, args, {}).run([]).layout.dtypes[0]
            for function, args in ((step, (x,)), (bare, ()))
        ]

    for _ in range(2):
        with jax.enable_x64(True):
            assert dtypes() == ["float64", "int64"]
        assert dtypes() == ["float32", "int32"]
    assert step.trace_count == bare.trace_count == 2


def test_threads_that_call_first_trace_once():
    """The second comes while the first one traces, and waits for its program."""
    entered, looked_up = threading.Event(), threading.Event()

    class Key:
        """A static argument that tells when the second call was looked up."""

        hashed = 0

        def __hash__(self):
            self.hashed += 1
            # First when the arguments are cut, then when their program is looked for.
            if entered.is_set() and self.hashed == 2:
                looked_up.set()
            return 1

        def __eq__(self, other):
            return isinstance(other, Key)

    bodies = []

    def body(x, key):
        if not bodies:
            entered.set()
            second.start()
            assert looked_up.wait(60)
        bodies.append(1)
        return x + 1

    step = zs.function(body)
    results = []
    second = threading.Thread(target=lambda: results.append(step(1.0, Key())))
    assert step(1.0, Key()) == 2.0
    second.join(60)
    assert results == [2.0]
    assert step.trace_count == 1


@pytest.mark.parametrize("args", [(), (np.float32(2),)])
def test_each_kind_of_random_numbers_is_a_program(args):
    def drawn(scale=1.0):
        return jax.random.normal(jax.random.PRNGKey(3), (4,)) * scale

    step = zs.function(drawn)
    for _ in range(2):
        for kind in ("threefry2x32", "rbg"):
            with jax.default_prng_impl(kind):
                np.testing.assert_allclose(step(*args), drawn(*args), rtol=1e-6)
    assert step.trace_count == 2


@pytest.mark.filterwarnings("error")
def test_another_kind_of_random_numbers_is_named_in_the_warning():
    step = zs.function(lambda x: x)
    for n in range(1, 5):
        step(np.ones(n, np.float32))
    words = "jax_default_prng_impl"
    with (
        jax.default_prng_impl("rbg"),
        pytest.warns(zs.RetraceWarning, match=words) as told,
    ):
        step(np.ones(4, np.float32))
    assert "enable_x64" not in str(told[0].message)


class Tagged(np.ndarray):
    """An array of somebody's own class."""


@pytest.mark.parametrize("eager", [False, True])
def test_subclasses_of_arrays_are_arrays_as_to_jax(eager, tmp_path):
    plain = np.float32([[1, 2], [3, 4]])
    mapped = np.memmap(tmp_path / "rows", np.float32, "w+", shape=(2, 2))
    mapped[:] = plain

    def squared(x):
        return x["a"] * x["a"]  # element by element, also of a matrix

    step = zs.function(squared, eager=eager)
    for array in (plain.view(np.matrix), mapped, plain.view(Tagged)):
        reference = jax.jit(squared)({"a": array})
        np.testing.assert_array_equal(step({"a": array}), reference)
    assert eager or step.trace_count == 1  # they are one signature


@pytest.mark.parametrize("eager", [False, True])
def test_masked_arrays_are_refused_as_by_jax(eager):
    masked = np.ma.masked_array(np.ones(2, np.float32), [False, True])
    step = zs.function(lambda x: x["a"] * 2, eager=eager)
    with pytest.raises(ValueError, match=r"argument|args\[0\]\['a'\].*fill it"):
        step({"a": masked})
    returns = zs.function(lambda: {"a": masked}, eager=eager)
    with pytest.raises(ValueError, match=r"\['a'\]"):
        returns()

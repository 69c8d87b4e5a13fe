"""The copies of a variable are the same variables whenever somebody asks for them, and
nothing keeps them when nobody has the variable any more."""

import gc
import warnings
import weakref

import jax.numpy as jnp
import numpy as np

import zstrat as zs


def variable(strategy):
    with strategy.scope():
        return zs.Variable(np.zeros(2, np.float32), name="own")


def number():
    return zs.get_replica_context().replica_id_in_sync_group


def test_a_step_is_traced_once_for_each_copy(two):
    v = variable(two)
    two.run(lambda: v.assign(jnp.full(2, number() + 1.0)))

    @zs.function
    def step(copy):
        return copy.value() + 1

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            seen = [step(c) for c in two.experimental_local_results(v)]
            np.testing.assert_array_equal(seen, [[2, 2], [3, 3]])
    assert step.trace_count == 2


def test_copies_of_two_variables_are_different_ones(two):
    v, w = variable(two), variable(two)
    copies = [*two.experimental_local_results(v), *two.experimental_local_results(w)]
    keys = {x.spec.key for x in [v, w, *copies]}
    assert len(keys) == 6


def test_a_step_of_an_older_handle_finds_what_a_newer_one_wrote(two):
    v = variable(two)
    step = zs.function(lambda copy: copy.value())
    step(two.experimental_local_results(v)[1])
    two.experimental_local_results(v)[1].assign([7, 7])
    np.testing.assert_array_equal(step(two.experimental_local_results(v)[1]), [7, 7])


def test_the_variable_goes_with_its_last_handle(two):
    v = variable(two)
    storage = weakref.ref(v.storage)
    gc.disable()
    try:
        two.experimental_local_results(v)
        del v
        assert storage() is None
    finally:
        gc.enable()

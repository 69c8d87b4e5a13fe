"""Replicas in turns have what they have in one program: their share of what was drawn,
and their own copies and numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zstrat as zs

BATCH = np.arange(4, dtype=np.float32)


def meet():
    zs.get_replica_context().merge_call(lambda strategy: None)


def drawing(elements):
    return zs.StepIterator(iter(elements))


def values(result):
    return [np.asarray(value).tolist() for value in result.values]


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("in_turns", [False, True])
def test_each_has_its_rows_of_what_was_drawn(two, eager, in_turns):
    def replica(x, shared):
        if in_turns:
            meet()
        return {"rows": x["a"] * 1, "of both": x["a"].sum() + shared.sum()}

    @zs.function(eager=eager)
    def step(iterator):
        return two.run(replica, args=(next(iterator), jnp.ones(2)))

    found = step(drawing([{"a": BATCH}]))
    assert values(found["rows"]) == [[0, 1], [2, 3]]
    assert values(found["of both"]) == [3, 7]


@pytest.mark.parametrize("eager", [False, True])
def test_rows_are_counted_once(two, eager):
    @zs.function(eager=eager)
    def step(iterator):
        def replica(x):
            meet()
            return x.sum()

        return two.reduce("sum", two.run(replica, args=(next(iterator),)), axis=None)

    iterator = drawing([BATCH, BATCH + 1])
    assert [float(step(iterator)), float(step(iterator))] == [6, 10]


@pytest.mark.parametrize("eager", [False, True])
def test_rows_that_do_not_split_are_refused(two, eager):
    @zs.function(eager=eager)
    def step(iterator):
        def replica(x):
            meet()
            return x.sum()

        return two.run(replica, args=(next(iterator),))

    with pytest.raises(ValueError, match="a batch of 5 elements does not split evenly"):
        step(drawing([np.arange(5, dtype=np.float32)]))


def test_what_was_not_drawn_is_whole(two):
    @zs.function(eager=True)
    def step(iterator):
        (first, scalar) = next(iterator)
        return two.run(lambda x, y: (x.sum(), y * 1), args=(first + 0, scalar))

    whole, scalar = step(drawing([(BATCH, np.float32(7))]))
    assert values(whole) == [6, 6]
    assert values(scalar) == [7, 7]


def test_rows_lie_where_their_replica_runs(two):
    @zs.function(eager=True)
    def step(iterator):
        return two.run(lambda x: x * 2, args=(next(iterator),))

    found = step(drawing([BATCH]))
    assert [value.devices() for value in found.values] == [
        {device} for device in jax.devices()[:2]
    ]

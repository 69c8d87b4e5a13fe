"""Integers of 64 bits that replicas are given: none names another row.

jax computes with 32 bits, and would take the lower half of them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zstrat as zs
from zstrat.strategy import PerReplica

TABLE = np.arange(10, dtype=np.float32).reshape(5, 2)
WRONG = 2**32 + 2
WIDE = np.array([1, WRONG, 3, 4])


@pytest.fixture(params=[1, 2])
def strategy(request):
    if request.param == 1:
        return zs.OneDeviceStrategy("CPU:0")
    return zs.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.fixture
def look_up(strategy):
    with strategy.scope():
        table = zs.Variable(TABLE, name="table")

    def look_up(ids):
        return zs.embedding_lookup(table, ids)

    return look_up


def parts(ids, count):
    return PerReplica(np.split(ids, count))


def from_function(strategy, ids):
    rows = np.split(ids, strategy.num_replicas_in_sync)
    return strategy.experimental_distribute_values_from_function(
        lambda context: rows[context.replica_id_in_sync_group]
    )


def from_numbers(strategy, ids):
    return strategy.experimental_distribute_values_from_function(
        lambda context: ids[context.replica_id_in_sync_group + 1]
    )


def from_dataset(strategy, ids):
    dataset = zs.data.Dataset.from_tensor_slices(ids).batch(4)
    return next(iter(strategy.experimental_distribute_dataset(dataset)))


@pytest.mark.parametrize("made", [from_function, from_numbers, from_dataset])
@pytest.mark.parametrize("in_step", [False, True])
def test_ids_that_replicas_are_given_have_to_fit(strategy, look_up, made, in_step):
    def run(ids):
        return strategy.run(look_up, args=(ids,))

    run = zs.function(run) if in_step else run
    with pytest.raises(ValueError, match=f"contains {WRONG}"):
        run(made(strategy, WIDE))
    fitting = np.array([1, 2, 3, 4])
    found = strategy.experimental_local_results(run(made(strategy, fitting)))
    if made is not from_numbers:
        found = np.concatenate(found)
    ids = fitting[1 : 1 + len(found)] if made is from_numbers else fitting
    np.testing.assert_array_equal(found, TABLE[ids])


def test_ids_that_are_drawn_in_a_step_have_to_fit(strategy, look_up):
    dataset = zs.data.Dataset.from_tensor_slices(WIDE).batch(4)
    drawn = iter(strategy.experimental_distribute_dataset(dataset))
    step = zs.function(lambda it: strategy.run(look_up, args=(next(it),)))
    with pytest.raises(ValueError, match=f"element 0.*contains {WRONG}"):
        step(drawn)


@pytest.mark.parametrize("made", [from_function, from_dataset])
def test_what_no_row_is_found_by_may_be_cut(strategy, made):
    expected = WIDE.astype(np.int32) % 7
    with pytest.warns(zs.DowncastWarning, match=rf"args\[0\].*{WRONG} becomes 2"):
        found = strategy.run(lambda x: x % 7, args=(made(strategy, WIDE),))
    found = strategy.experimental_local_results(found)
    np.testing.assert_array_equal(np.concatenate(found), expected)


@pytest.mark.parametrize("given", ["whole", "parts", "numbers"])
@pytest.mark.parametrize("traced_by", [zs.function, jax.jit])
def test_what_is_known_while_a_step_is_traced_has_to_fit(given, traced_by):
    strategy = zs.MirroredStrategy(["CPU:0", "CPU:1"])
    ids = {
        "whole": WIDE,
        "parts": parts(WIDE, 2),
        "numbers": PerReplica([WIDE[0], WIDE[1]]),
    }[given]

    @traced_by
    def step():
        return jax.tree.leaves(strategy.run(lambda x: x + 1, args=(ids,)))

    with pytest.raises(ValueError, match=f"strategy.run contains {WRONG}"):
        step()


def test_wide_parts_reach_python_whole():
    """Replicas in turns compute with what they are given."""
    strategy = zs.MirroredStrategy(["CPU:0", "CPU:1"])
    found = strategy.run(
        lambda x: int(np.max(x)), args=(from_function(strategy, WIDE),)
    )
    assert strategy.experimental_local_results(found) == (WRONG, 4)


def test_with_64_bits_nothing_is_cut():
    with jax.enable_x64(True):
        strategy = zs.MirroredStrategy(["CPU:0", "CPU:1"])
        ids = from_function(strategy, WIDE)
        found = strategy.run(lambda x: jnp.max(x), args=(ids,))
        assert [int(x) for x in found.values] == [WRONG, 4]


@pytest.mark.parametrize("made_wide", [True, False])
def test_results_of_64_bits_are_what_jax_makes_of_them_there(made_wide):
    """Inside the scope of 64 bits and outside, whichever is asked first."""
    strategy = zs.MirroredStrategy(["CPU:0", "CPU:1"])

    def number():
        return jnp.float64(0.1) + zs.get_replica_context().replica_id_in_sync_group

    with jax.enable_x64(True):
        values = [strategy.run(number) for _ in range(2)]
        wide = [np.float64(0.1), np.float64(0.1) + 1]
    for value, inside in zip(values, (made_wide, not made_wide), strict=True):
        with jax.enable_x64(inside):
            found = strategy.experimental_local_results(value)
            expected = [jnp.asarray(x) for x in wide]
            assert [x.dtype for x in found] == [x.dtype for x in expected]
            np.testing.assert_array_equal(found, expected)


def test_a_weak_result_has_its_dtype_wherever_it_is_looked_at():
    strategy = zs.MirroredStrategy(["CPU:0", "CPU:1"])
    step = zs.function(lambda: strategy.run(lambda: 2.5 * jnp.sin(jnp.asarray(1.0))))
    first, second = step(), step()
    with jax.enable_x64(True):
        inside = strategy.experimental_local_results(first)
        assert [x.dtype for x in inside] == [jnp.float32] * 2
    outside = strategy.experimental_local_results(second)
    assert [x.dtype for x in outside] == [jnp.float32] * 2
    assert [x.weak_type for x in (*inside, *outside)] == [True] * 4

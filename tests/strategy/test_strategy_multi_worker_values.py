"""Values of several processes, here threads, that are reduced and gathered."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ranks import ranks

import zstrat as zs


@pytest.mark.parametrize("compiled", [True, False])
def test_what_is_not_distributed_is_the_process_s_own_value(compiled):
    def program(strategy, rank):
        def all_of(x):
            rows = strategy.gather(jnp.full((2, 2), x), axis=0)
            return (
                strategy.reduce("sum", x, None),
                strategy.reduce("mean", {"a": x, "b": x * 2}, None),
                strategy.reduce("mean", jnp.arange(4.0) + x, 0),
                rows,
            )

        fn = zs.function(all_of) if compiled else all_of
        x = np.float32(rank + 1)
        return jax.tree.map(np.asarray, fn(x if compiled else jnp.asarray(x)))

    for total, mean, over_axis, rows in ranks(2, program):
        assert total == 3.0
        assert mean == {"a": 1.5, "b": 3.0}
        assert over_axis == 3.0
        np.testing.assert_array_equal(rows[:, 0], [1, 1, 2, 2])


def test_uneven_means_weigh_correctly():
    def program(strategy, rank):
        values = np.arange(1.0 + 3 * rank)  # one element, then four
        return float(strategy.reduce("mean", values, axis=0))

    expected = (0 + (0 + 1 + 2 + 3)) / 5
    assert ranks(2, program) == pytest.approx([expected] * 2)


def test_uneven_values_are_gathered_outside_of_steps():
    def program(strategy, rank):
        mine = np.full((1, rank + 1), rank, np.int64)
        return strategy.gather(mine, axis=1).tolist()

    assert ranks(2, program) == [[[0, 1, 1]]] * 2


@pytest.mark.parametrize("compiled", [True, False])
def test_sums_of_what_is_narrow_count_and_means_do_not_wrap(compiled):
    flags = [[True, True, False], [True, False, False]]
    narrow = [[200, 100, 3], [100, 100, 4]]

    def program(strategy, rank):
        def all_of(flag, x):
            return (
                strategy.reduce("sum", flag, None),
                strategy.reduce("mean", flag, None),
                strategy.reduce("mean", x, None),
                strategy.reduce("sum", x, None),
            )

        fn = zs.function(all_of) if compiled else all_of
        found = fn(np.array(flags[rank]), np.array(narrow[rank], np.uint8))
        return [np.asarray(x) for x in found]

    for count, share, mean, total in ranks(2, program):
        assert count.dtype.kind == "i"
        assert count.tolist() == [2, 1, 0]
        assert share.tolist() == [1.0, 0.5, 0.0]
        assert mean.tolist() == [150.0, 100.0, 3.5]
        assert total.dtype == np.uint8
        assert total.tolist() == [300 - 256, 200, 7]


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("aggregation", ["SUM", "MEAN", "ONLY_FIRST_REPLICA"])
def test_a_variable_with_a_value_in_each_process_is_reduced_once(compiled, aggregation):
    def program(strategy, rank):
        with strategy.scope():
            v = zs.Variable(
                np.float32([0]),
                aggregation=zs.VariableAggregation[aggregation],
                synchronization=zs.VariableSynchronization.ON_READ,
            )
        strategy.run(lambda: v.assign_add(jnp.float32([rank + 1])))
        (mine,) = strategy.experimental_local_results(v)

        def together():
            return (
                mine.value(),
                strategy.reduce("sum", v),
                strategy.reduce("mean", v),
                strategy.gather(v, 0),
            )

        found = (zs.function(together) if compiled else together)()
        mine.assign_add([5.0])
        again = strategy.gather(v, 0)
        return [np.asarray(each).tolist() for each in (*found, mine.value(), again)]

    assert ranks(2, program) == [
        [[n], [3.0], [1.5], [1.0, 2.0], [n + 5], [6.0, 7.0]] for n in (1.0, 2.0)
    ]

"""IndexedSlices of several processes, here threads: their rows one after the other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ranks import ranks

import zstrat as zs


def slices(rank, rows=2):
    """Rank 0 has rows 0 and 1, of the value 1; rank 1 rows 1 and 2, of the value 2."""
    indices = jnp.arange(rows) + rank
    return zs.IndexedSlices(jnp.full((rows, 3), rank + 1.0), indices, (5, 3))


DENSE = np.zeros((5, 3))
DENSE[0], DENSE[1], DENSE[2] = 1, 3, 2


def flat(found):
    return np.asarray(found.values)[:, 0].tolist(), np.asarray(found.indices).tolist()


@pytest.mark.parametrize("compiled", [True, False])
def test_rows_of_all_in_the_order_of_ranks(compiled):
    def program(strategy, rank):
        def reduced(mine, dense):
            tree = {"rows": mine, "dense": dense}
            return [strategy.reduce(op, tree, None) for op in ("sum", "mean")]

        fn = zs.function(reduced) if compiled else reduced
        return fn(slices(rank), jnp.float32(rank + 1))

    for total, mean in ranks(2, program):
        assert flat(total["rows"]) == ([1, 1, 2, 2], [0, 1, 1, 2])
        assert flat(mean["rows"]) == ([0.5, 0.5, 1, 1], [0, 1, 1, 2])
        assert total["rows"].dense_shape == mean["rows"].dense_shape == (5, 3)
        np.testing.assert_array_equal(total["rows"].to_dense(), DENSE)
        assert (float(total["dense"]), float(mean["dense"])) == (3, 1.5)


def test_their_numbers_may_differ_outside_of_steps():
    def program(strategy, rank):
        mine = slices(rank, rows=2 * rank)
        return strategy.extended.reduce_to("mean", mine, "CPU:0")

    for found in ranks(2, program):
        assert flat(found) == ([1, 1], [1, 2])


def test_a_step_is_compiled_for_as_many_of_each():
    def program(strategy, rank):
        @zs.function
        def step(mine):
            return strategy.reduce("sum", mine, None)

        return step(slices(rank, rows=rank + 1))

    with pytest.raises(ValueError, match=r"zs\.RaggedIds"):
        ranks(2, program)


def test_replicas_of_a_process_come_together():
    """Also in containers, and rows of 64 bits as they are."""

    def program(strategy, rank):
        each = [
            {"x": zs.IndexedSlices(np.ones((1, 2), np.float32), np.array([2**33 + n]))}
            for n in (2 * rank, 2 * rank + 1)
        ]
        found = strategy.reduce("mean", zs.PerReplica(each), None)["x"]
        return found.values.tolist(), found.indices.tolist()

    rows = [2**33 + n for n in range(4)]
    assert ranks(2, program) == [([[0.25, 0.25]] * 4, rows)] * 2


def test_one_collective_for_all_slices():
    def program(strategy, rank):
        strategy.reduce("sum", [slices(rank), slices(rank)], None)
        return list(strategy._team().channel.collective.board.calls)

    (calls, _) = ranks(2, program)
    assert [kind for kind, _ in calls[-1:]] == ["gather"]
    assert len(calls[-1][1]) == 4


def test_mirrored_values_are_those_of_all_replicas():
    def program(strategy, rank):
        copies = zs.Mirrored((jnp.float32(3), jnp.float32(3)))
        total = strategy.reduce("sum", copies, None)
        return float(total), float(strategy.reduce("mean", copies, None))

    assert ranks(2, program) == [(12.0, 3.0)] * 2


def test_what_cannot_be_done_with_them_is_refused():
    def program(strategy, rank):
        mine = slices(rank)
        with pytest.raises(ValueError, match="axis=None"):
            strategy.reduce("sum", mine, 0)
        mixed = zs.PerReplica((mine, jnp.ones((5, 3))))
        with pytest.raises(ValueError, match="IndexedSlices"):
            strategy.reduce("sum", mixed, None)
        for value in (mine, zs.PerReplica((mine, mine)), {"a": mine}):
            with pytest.raises(NotImplementedError, match="IndexedSlices"):
                strategy.gather(value, 0)

    ranks(2, program)


def test_gradients_of_replicas():
    """As a replica function returns them, in a step and at once."""
    table = np.arange(8.0, dtype=np.float32).reshape(4, 2)

    def program(strategy, rank):
        def rows(ids):
            def mine(ids):
                return zs.IndexedSlices(2 * jnp.asarray(table)[ids], ids, (4, 2))

            return strategy.reduce("sum", strategy.run(mine, (ids,)), None).to_dense()

        ids = jnp.array([rank, 3])
        return jax.tree.map(np.asarray, [rows(ids), zs.function(rows)(ids)])

    expected = 2 * table * np.array([[1], [1], [0], [2]])
    for found in ranks(2, program):
        for each in found:
            np.testing.assert_array_equal(each, expected)

"""The mean of integers that each replica of several processes has for itself is exact,
and cut off once: by numpy's and Python's arithmetic."""

import jax.numpy as jnp
import numpy as np
import pytest
from ranks import ranks
from tiers import combined

import zstrat as zs

A, S = zs.VariableAggregation, zs.VariableSynchronization

HIGH, LOW = 2**31 - 1, -(2**31)
# What four replicas have, one row each.
ROWS = {
    "int8": [
        [100, -128, 1, -1],
        [100, -128, 2, -2],
        [100, -127, 2, -2],
        [100, 0, 3, 1],
    ],
    "int32": [
        [HIGH, LOW, 1, 7],
        [HIGH, LOW, 2, -8],
        [HIGH, LOW, 2, 7],
        [HIGH, 0, 3, 1],
    ],
    "uint32": [[2**32 - 1, 1], [2**32 - 1, 2], [2**32 - 1, 2], [2**32 - 1, 5]],
}


def cases(first):
    """Each dtype once, in turns with an axis and with none; ``first``: 0 or 1."""
    for number, (dtype, rows) in enumerate(ROWS.items(), start=first):
        values = np.array(rows, dtype)
        yield values[:, 1] if number % 2 else values


def exact(values):
    """The mean, cut off towards zero."""
    count = len(values)
    numbers = [
        abs(total) // count * (1 if total >= 0 else -1)
        for total in values.astype(object).sum(0, keepdims=True).reshape(-1)
    ]
    return np.array(numbers, values.dtype).reshape(values.shape[1:])


def check(strategy, folder, first):
    for number, values in enumerate(cases(first)):
        values = values[: strategy.num_replicas_in_sync]
        with strategy.scope():
            v = zs.Variable(
                np.zeros_like(values[0]), aggregation=A.MEAN, synchronization=S.ON_READ
            )

        def replica(v=v, values=values):
            context = zs.get_replica_context()
            v.assign(jnp.asarray(values)[context.replica_id_in_sync_group])

        # In a step: outside of one, each operation is compiled by itself.
        zs.function(lambda replica=replica: strategy.run(replica))()
        wanted = exact(values)
        np.testing.assert_array_equal(v.numpy(), wanted)
        assert v.numpy().dtype == values.dtype
        in_a_step = zs.function(lambda v=v: v.value())()
        assert in_a_step.dtype == values.dtype
        np.testing.assert_array_equal(in_a_step, wanted)
        saved = zs.Checkpoint(v=v).save(f"{folder}/{number}")
        plain = zs.Variable(np.zeros_like(values[0]))
        zs.Checkpoint(v=plain).restore(saved)
        np.testing.assert_array_equal(plain.numpy(), wanted)


@pytest.mark.parametrize("size", combined([2, 3], step=2))
def test_of_processes_with_one_device_each(tmp_path, size):
    ranks(size, lambda strategy, rank: check(strategy, tmp_path / str(rank), size % 2))

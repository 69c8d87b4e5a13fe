"""The axis of what several processes, here threads, gather and reduce."""

import jax.numpy as jnp
import numpy as np
import pytest
from ranks import ranks

import zstrat as zs


@pytest.mark.parametrize("kind", [int, np.array, jnp.int32])
def test_an_axis_of_any_kind_between_processes(kind):
    def program(strategy, rank):
        mine = np.full((1, 2), rank + 1.0, np.float32)
        rows = strategy.gather(mine, axis=kind(1))
        total = strategy.reduce("sum", mine, axis=kind(1))
        everybody = strategy.run(
            lambda: zs.get_replica_context().all_gather(jnp.asarray(mine), kind(1))
        )
        return rows.tolist(), np.asarray(total).tolist(), everybody.tolist()

    row = [[1, 1, 2, 2]]
    assert ranks(2, program) == [(row, [6], row)] * 2


def test_no_process_waits_for_one_whose_axis_is_no_integer():
    def program(strategy, rank):
        with pytest.raises(TypeError, match="axis must be an integer"):
            strategy.gather(np.ones(2), axis=0.5)

    ranks(2, program)

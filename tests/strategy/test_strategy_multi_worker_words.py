"""Errors of a process of a cluster that cannot be part of the job of a strategy."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from ranks import Board, Threads, ranks

import zstrat as zs
from zstrat.cluster import ClusterSpec, SimpleClusterResolver

SPEC = ClusterSpec({"worker": ["127.0.0.1:9000", "127.0.0.1:9001"]})


def alone(*_):
    return Threads(Board(1), 0)


@pytest.mark.parametrize("task", [(None, None), ("worker", None), (None, 0)])
def test_a_process_knows_which_task_it_is(task):
    job, index = task
    resolver = SimpleClusterResolver(SPEC, task_type=job, task_id=index)
    words = (
        "When `cluster_spec` is not empty, both `task_type` and `task_id` must be "
        "specified."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        zs.MultiWorkerMirroredStrategy(resolver, group=alone)


def gathered(strategy, rank, axis):
    """Rank n has n + 1 rows, or columns, of its number."""
    mine = jnp.full((rank + 1, 2) if axis == 0 else (2, rank + 1), rank)
    return strategy.run(lambda: zs.get_replica_context().all_gather(mine, axis))


@pytest.mark.parametrize(
    ("axis", "expected"), [(0, [[0, 0], [1, 1], [1, 1]]), (1, [[0, 1, 1]] * 2)]
)
def test_replicas_of_processes_give_different_lengths_outside_of_steps(axis, expected):
    for found in ranks(2, lambda *my: gathered(*my, axis)):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_step_has_one_length_for_all_processes(axis):
    def program(strategy, rank):
        return zs.function(lambda: gathered(strategy, rank, axis))()

    words = r"zs\.RaggedIds"
    with pytest.raises(ValueError, match=words):
        ranks(2, program)

"""The tests of replicas once more, where each replica has a device of its own."""

import jax
from replicated_steps import R
from test_strategy_replica_updates import *  # noqa: F403
from test_strategy_replicas import *  # noqa: F403


def test_each_replica_has_a_device():
    assert jax.local_device_count() >= R

"""The first version's ParameterServerStrategy, where there is a cluster."""

from __future__ import annotations

import numpy as np
import pytest

import zstrat as zs

pytestmark = pytest.mark.processes


@pytest.mark.shows("experimental.ParameterServerStrategy")
def test_a_worker_has_its_variables_on_the_ps(daemons):
    make = zs.compat.v1.distribute.experimental.ParameterServerStrategy
    spec = {"ps": daemons.spec.job_tasks("ps")[:1], "worker": ["localhost:1"]}
    resolver = zs.cluster_resolver.SimpleClusterResolver(
        zs.ClusterSpec(spec), task_type="worker", task_id=0
    )
    with make(resolver) as strategy:
        assert strategy.cluster_resolver is resolver
        assert strategy.extended.experimental_between_graph
        with strategy.scope():
            v = zs.Variable(np.zeros(2, np.float32))
        assert v.device == "/job:ps/replica:0/task:0/device:CPU:0"
        strategy.run(lambda: v.assign_add(np.ones(2, np.float32)))
        assert v.numpy().tolist() == [1.0, 1.0]

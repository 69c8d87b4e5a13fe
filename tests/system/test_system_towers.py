"""TF 1.12's strategy over real parameter servers: two programs of two towers each."""

import json
import os
import subprocess

import numpy as np
import pytest
from programs import Program

import zstrat as zs
from zstrat.contrib import distribute
from zstrat.testing import ThreadCluster

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("programs")]

PROGRAM = """
import json, sys
import numpy as np
import zstrat as zs
from zstrat.contrib import distribute

SUM, MEAN = zs.VariableAggregation.SUM, zs.VariableAggregation.MEAN
spec, index = json.loads(sys.argv[1]), int(sys.argv[2])
distribution = distribute.ParameterServerStrategy(num_gpus_per_worker=2)
distribution.configure(cluster_spec=spec, task_type="worker", task_id=index)
assert distribution.num_towers == 2
with distribution.scope():
    v = zs.Variable(np.float32(0), aggregation=SUM)
    w = zs.Variable(np.float32(0))
    ended = zs.Variable(np.float32(0), aggregation=SUM)

    def merge(merging, x):
        total = merging.reduce(MEAN, x, w)
        merging.update(w, lambda var, delta: var.assign_add(delta), total)
        return total

    def fn(x):
        v.assign_add(x)
        tower = zs.get_tower_context()
        return tower.merge_call(merge, x + tower.tower_id)

    for _ in range(10):
        found = distribution.call_for_each_tower(fn, np.float32(1))
        # The same object in both towers: merged into one.
        assert [float(x) for x in distribution.unwrap(found)] == [1.5]
    distribution.update(ended, lambda var: var.assign_add(np.float32(1)))
print("ended", flush=True)
sys.stdin.readline()
print(float(v.numpy()), float(w.numpy()), float(ended.numpy()), flush=True)
distribution.close()
"""


@pytest.fixture(scope="module")
def local():
    with ThreadCluster(num_ps=2, num_workers=0) as cluster:
        yield cluster


@pytest.fixture
def spec(local):
    """The ps of the cluster, and workers that listen nowhere."""
    ps = local.spec.job_tasks("ps")
    return {"ps": ps, "worker": ["localhost:1", "localhost:2"]}


@pytest.mark.shows("tf.contrib.distribute.ParameterServerStrategy")
def test_programs_of_several_towers_train_the_same_variables(spec):
    programs = [
        Program(
            ["-c", PROGRAM, json.dumps(spec), str(index)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "JAX_NUM_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu"},
            text=True,
        )
        for index in (1, 0)
    ]
    try:
        for each in programs:
            assert each.stdout.readline() == "ended\n"
        for each in programs:
            out, _ = each.communicate("go\n", timeout=60)
            assert out == "40.0 30.0 2.0\n"
            assert each.returncode == 0
    finally:
        for each in programs:
            each.kill()
            each.communicate()


@pytest.mark.shows("configure", "configure(session_config=)")
def test_a_strategy_joins_a_cluster_once(spec):
    distribution = distribute.ParameterServerStrategy()
    config = distribute.SessionConfig(["/job:other"])
    options = {"cluster_spec": spec, "task_type": "worker", "task_id": 0}
    distribution.configure(config, **options)
    try:
        engine = distribution.engine
        distribution.configure(**options)
        assert distribution.engine is engine
        assert config.device_filters == ["/job:worker/task:0", "/job:ps"]
        assert not config.isolate_session_state
        assert distribution.between_graph
        assert distribution.should_init
        assert distribution.should_checkpoint
        assert distribution.should_save_summary
        assert distribution.worker_devices == [
            "/job:worker/replica:0/task:0/device:CPU:0"
        ]
        assert distribution.parameter_devices == ["/job:ps/task:0", "/job:ps/task:1"]
        with distribution.scope():
            assert distribute.get_distribution_strategy() is distribution
            v, w = zs.Variable(1.0), zs.Variable(np.zeros(2, np.float32))
            with distribution.colocate_vars_with(w):
                beside = zs.Variable(1.0)
            assert [x.spec.ps for x in (v, w, beside)] == [0, 1, 1]
            words = "'/job:worker/task:1'"
            for elsewhere in ("/job:worker/task:1", ["/job:worker/task:1"]):
                with pytest.raises(ValueError, match=words):
                    distribution.reduce(zs.VariableAggregation.SUM, v, elsewhere)
            here = distribution.reduce(
                zs.VariableAggregation.SUM, 2.0, "/job:worker/task:0"
            )
            assert here == 2.0
            distribution.update(w, lambda var, x: var.assign(x), np.ones(2, np.float32))
            assert w.numpy().tolist() == [1.0, 1.0]
    finally:
        distribution.close()

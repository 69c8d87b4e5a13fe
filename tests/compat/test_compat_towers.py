"""One tower, and what there is outside of every strategy. More than one tower are in
`test_strategy_local_two_towers`."""

import os

import numpy as np
import programs
import pytest

import zstrat as zs
from zstrat.contrib import distribute
from zstrat.contrib.distribute._strategy import _faces, face_of

pytestmark = pytest.mark.usefixtures("programs")

CPU = "/job:localhost/replica:0/task:0/device:CPU:0"


@pytest.fixture
def distribution():
    return distribute.ParameterServerStrategy()


@pytest.mark.shows("group", "scope")
def test_one_tower(distribution):
    assert distribution.num_towers == 1
    assert distribution.is_single_tower
    assert distribution.worker_device_index == 0
    assert distribution.worker_devices == distribution.parameter_devices == [CPU]

    def merge_fn(merging, x):
        assert merging is distribution
        return merging.unwrap(x)

    def fn(x, *, scale):
        tower = zs.get_tower_context()
        assert tower.tower_id == 0
        assert tower.is_single_tower
        assert tower.device == CPU
        return tower.merge_call(merge_fn, x * scale)

    with distribution.scope() as entered:
        assert entered is distribution
        assert distribution.call_for_each_tower(fn, 3, scale=2) == [6]
        v = zs.Variable(1.0)
        assert distribution.engine.extended.variable_created_in_scope(v)
        assert distribution.reduce(zs.VariableAggregation.SUM, 3.0, v) == 3.0
        assert distribution.broadcast(np.float32(2)) == 2.0
        assert distribution.group(v.value()) is None
    dataset = distribution.distribute_dataset(lambda: [1, 2])
    assert list(dataset._elements()) == [1, 2]


@pytest.mark.shows("tf.contrib.distribute.DistributionStrategy")
def test_outside_of_every_strategy():
    tower = distribute.get_tower_context()
    assert tower.tower_id == 0
    assert tower.num_towers == 1
    default = distribute.get_distribution_strategy()
    assert not distribute.has_distribution_strategy()
    assert tower.merge_call(lambda d, x: (type(d), x), 2) == (type(default), 2)
    assert default.num_towers == 1
    assert default.configure(cluster_spec={"ps": ["a:1"]}) is None
    assert zs.get_tower_context is distribute.get_tower_context


@pytest.mark.shows("configure(cluster_spec=, task_type=, task_id=)")
@pytest.mark.parametrize("task", [("worker", None), (None, 0), (None, None)])
def test_a_cluster_needs_a_task(distribution, task):
    with pytest.raises(ValueError, match=r"`task_type`.*`task_id`"):
        distribution.configure(
            cluster_spec={"ps": ["localhost:1"], "worker": ["localhost:2"]},
            task_type=task[0],
            task_id=task[1],
        )


def test_a_cluster_needs_a_ps(distribution):
    with pytest.raises(ValueError, match="`ps`"):
        distribution.configure(
            cluster_spec={"worker": ["localhost:2"]}, task_type="worker", task_id=0
        )
    assert distribution.worker_devices == [CPU]


def test_without_a_cluster_a_session_is_isolated(distribution):
    config = distribute.SessionConfig(["/job:other"], False)
    distribution.configure(session_config=config)
    assert config == distribute.SessionConfig(["/job:other"], True)


SCRIPT = """
import numpy as np
import zstrat as zs
from zstrat.contrib import distribute

rows = zs.data.Dataset.from_tensor_slices(np.arange(6.0, dtype=np.float32)).batch(2)
distribution = distribute.ParameterServerStrategy()
iterator = iter(distribution.distribute_dataset(lambda: rows))
print(next(iterator).tolist())
"""


def test_a_script_that_ends_in_the_middle_of_a_pass_says_nothing():
    done = programs.run(
        ["-c", SCRIPT],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0.0, 1.0]\n", "")


def test_the_face_of_an_engine_that_is_gone_is_not_that_of_the_next_one():
    face = distribute.DistributionStrategy(zs.OneDeviceStrategy("CPU:0"))
    engine = zs.OneDeviceStrategy("CPU:0")
    assert face_of(face.engine) is face
    # `configure` has given the face another engine, and this one the id of the old one.
    _faces[id(engine)] = face
    assert face_of(engine) is not face
    assert face_of(engine).engine is engine

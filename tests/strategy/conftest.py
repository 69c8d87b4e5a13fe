"""Strategies over a cluster without processes, and over the devices of this process."""

import pytest
from fake_cluster import FakeCluster

import zstrat as zs
from zstrat.cluster import TPUClusterResolver


@pytest.fixture
def make_cluster():
    return FakeCluster


@pytest.fixture
def cluster():
    return FakeCluster()


@pytest.fixture
def four(make_cluster):
    """A cluster whose workers have four replicas, as `replicated_steps` has them."""
    return make_cluster(devices=4)


@pytest.fixture
def tpu_resolver():
    return TPUClusterResolver("local")


@pytest.fixture
def make_tpu(tpu_resolver):
    """Makes a TPUStrategy by the first lines of TensorFlow's examples."""

    def make(
        computation_shape=None, num_replicas=1, mesh_shape=(1, 2, 2, 2), **options
    ):
        zs.experimental_connect_to_cluster(tpu_resolver)
        topology = zs.tpu.experimental.initialize_tpu_system(
            tpu_resolver, mesh_shape=mesh_shape
        )
        assignment = zs.tpu.experimental.DeviceAssignment.build(
            topology, computation_shape=computation_shape, num_replicas=num_replicas
        )
        return zs.TPUStrategy(
            tpu_resolver, experimental_device_assignment=assignment, **options
        )

    return make


@pytest.fixture
def two():
    """For files of tests that run with eight devices."""
    return zs.MirroredStrategy(["CPU:0", "CPU:1"])

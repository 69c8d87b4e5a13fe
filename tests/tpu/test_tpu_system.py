"""The topology of jax's devices, here CPUs and stand-ins for TPUs."""

import types

import jax
import pytest

import zstrat as zs
from zstrat.cluster import ClusterSpec, SimpleClusterResolver

RESOLVER = SimpleClusterResolver(ClusterSpec({}))


def stand_in(number, task=0, platform="tpu", coords=None, core=0):
    return types.SimpleNamespace(
        id=number,
        process_index=task,
        platform=platform,
        coords=coords,
        core_on_chip=core,
    )


@pytest.fixture
def of(monkeypatch):
    """The system of these devices."""

    def of(devices, **options):
        monkeypatch.setattr(jax, "devices", lambda: devices)
        tasks = len({device.process_index for device in devices})
        monkeypatch.setattr(jax, "process_count", lambda: tasks)
        return zs.tpu.experimental.initialize_tpu_system(RESOLVER, **options)

    return of


def test_the_devices_of_this_process():
    topology = zs.tpu.experimental.initialize_tpu_system()
    count = jax.device_count()
    assert isinstance(topology, zs.tpu.experimental.Topology)
    assert topology.mesh_shape.tolist() == [1, 1, 1, count]
    assert topology.device_coordinates[0, :, 3].tolist() == list(range(count))


@pytest.mark.shows("tf.tpu.experimental.initialize_tpu_system")
def test_cpus_are_laid_into_a_mesh_of_any_shape(of):
    cpus = [stand_in(n, platform="cpu") for n in range(8)]
    assert of(cpus).mesh_shape.tolist() == [1, 1, 1, 8]
    topology = of(cpus, mesh_shape=[2, 2, 1, 2])
    assert topology.num_tasks == 1
    assert topology.device_coordinates[0].tolist() == [
        [0, 0, 0, 0],
        [0, 0, 0, 1],
        [1, 0, 0, 0],
        [1, 0, 0, 1],
        [0, 1, 0, 0],
        [0, 1, 0, 1],
        [1, 1, 0, 0],
        [1, 1, 0, 1],
    ]


@pytest.mark.parametrize("mesh", [[1, 1, 1, 4], [1, 2, 2, 3], [2, 4], [-2, -4, 1, 1]])
def test_a_mesh_has_as_many_places_as_there_are_devices(of, mesh):
    words = r"expected a product of 8|must be a sequence of 4 positive"
    with pytest.raises(ValueError, match=words):
        of([stand_in(n, platform="cpu") for n in range(8)], mesh_shape=mesh)


def test_tpus_tell_where_they_are(of):
    """Two hosts of a slice that begins at x = 2, whose devices are not in order."""
    tpus = [
        stand_in(3, task=1, coords=(3, 0, 0), core=1),
        stand_in(2, task=1, coords=(3, 0, 0), core=0),
        stand_in(0, task=0, coords=(2, 0, 0), core=0),
        stand_in(1, task=0, coords=(2, 0, 0), core=1),
    ]
    topology = of(tpus)
    assert topology.mesh_shape.tolist() == [2, 1, 1, 2]
    assert topology.device_coordinates.tolist() == [
        [[0, 0, 0, 0], [0, 0, 0, 1]],
        [[1, 0, 0, 0], [1, 0, 0, 1]],
    ]
    assert of(tpus, mesh_shape=[2, 1, 1, 2]).num_tasks == 2
    with pytest.raises(ValueError, match=r"TPUs.*\[2, 1, 1, 2\]"):
        of(tpus, mesh_shape=[1, 1, 1, 4])


def test_every_process_has_as_many_devices(of):
    cpus = [stand_in(n, task=n // 2, platform="cpu") for n in range(3)]
    with pytest.raises(ValueError, match=r"\[2, 1\]"):
        of(cpus)


def test_it_takes_a_resolver_or_none():
    with pytest.raises(TypeError, match="ClusterResolver"):
        zs.tpu.experimental.initialize_tpu_system("tpu")


def test_connecting_to_this_host():
    assert zs.experimental_connect_to_cluster(RESOLVER) is None
    assert zs.experimental_connect_to_cluster(ClusterSpec({"worker": ["a:1"]})) is None


@pytest.mark.shows("tf.config.experimental_connect_to_cluster")
def test_connecting_to_several_hosts_is_up_to_jax():
    spec = ClusterSpec({"worker": ["a:1", "b:1"]})
    words = r"\b2\b.*\b1\b.*num_processes=2"
    with pytest.raises(RuntimeError, match=words):
        zs.experimental_connect_to_cluster(SimpleClusterResolver(spec))


def test_connecting_to_something_else():
    words = r"`ClusterSpec`.*`ClusterResolver`"
    with pytest.raises(ValueError, match=words):
        zs.experimental_connect_to_cluster({"worker": ["a:1"]})

"""A topology: what it refuses, what it answers, and its bytes."""

import pickle
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zstrat.tpu.experimental import Topology

# Two hosts of two chips with two cores each, in a row along y.
COORDINATES = [
    [[0, 0, 0, 0], [0, 0, 0, 1], [1, 0, 0, 0], [1, 0, 0, 1]],
    [[0, 1, 0, 0], [0, 1, 0, 1], [1, 1, 0, 0], [1, 1, 0, 1]],
]

MESH = [2, 2, 1, 2]

# The message of protocol buffers, written down by its specification: a tag is
# (field << 3 | kind), kind 2 is bytes with their length, 0 a number.
BYTES = bytes(
    [
        *(1 << 3 | 2, 4, 2, 2, 1, 2),
        *(2 << 3 | 0, 2),
        *(3 << 3 | 0, 4),
        *(4 << 3 | 2, 32),
        *np.ravel(COORDINATES).tolist(),
    ]
)


@pytest.fixture
def topology():
    return Topology(mesh_shape=MESH, device_coordinates=COORDINATES)


def test_what_it_says(topology):
    assert topology.mesh_shape.tolist() == MESH
    assert topology.mesh_rank == 4
    assert (topology.num_tasks, topology.num_tpus_per_task) == (2, 4)
    np.testing.assert_array_equal(topology.device_coordinates, COORDINATES)
    assert topology.device_coordinates.dtype == topology.mesh_shape.dtype == np.int32
    assert topology.missing_devices.shape == (0, 4)


@pytest.mark.shows("the topology that it returns")
def test_what_is_where(topology):
    for task, row in enumerate(COORDINATES):
        for device, place in enumerate(row):
            assert topology.task_ordinal_at_coordinates(place) == task
            assert topology.tpu_device_ordinal_at_coordinates(place) == device
    place = np.array([1, 1, 0, 0])
    assert topology.cpu_device_name_at_coordinates(place) == "/task:1/device:CPU:0"
    assert (
        topology.cpu_device_name_at_coordinates(place, job="worker")
        == "/job:worker/task:1/device:CPU:0"
    )
    assert topology.tpu_device_name_at_coordinates(place) == "/task:1/device:TPU:2"
    assert (
        topology.tpu_device_name_at_coordinates(place, job="tpu")
        == "/job:tpu/task:1/device:TPU:2"
    )


def test_holes():
    topology = Topology(mesh_shape=MESH, device_coordinates=COORDINATES[1:])
    assert topology.missing_devices.tolist() == [
        [0, 0, 0, 0],
        [0, 0, 0, 1],
        [1, 0, 0, 0],
        [1, 0, 0, 1],
    ]
    with pytest.raises(ValueError, match=r"\(1, 0, 0, 1\).*\b4\b"):
        topology.task_ordinal_at_coordinates((1, 0, 0, 1))
    with pytest.raises(ValueError, match=r"\(5, 0, 0, 0\)"):
        topology.tpu_device_name_at_coordinates((5, 0, 0, 0))


def test_nobody_writes_to_it(topology):
    with pytest.raises(ValueError, match="read-only"):
        topology.mesh_shape[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        topology.device_coordinates[0] = 1


@pytest.mark.parametrize(
    "mesh",
    [None, [], [2, 2, 2], [2, 2, 1, 0], [2, 2, -1, 2], [[2, 2, 1, 2]], [2.5] * 4],
)
def test_a_mesh_is_four_positive_integers(mesh):
    with pytest.raises(ValueError, match=r"`mesh_shape`.*\b4\b"):
        Topology(mesh_shape=mesh, device_coordinates=COORDINATES)


@pytest.mark.parametrize(
    "coordinates",
    [
        None,
        COORDINATES[0],
        [[[0, 0, 0]]],
        [[[0.5, 0, 0, 0]]],
        np.zeros((1, 1, 1, 4), int),
    ],
)
def test_coordinates_have_three_axes(coordinates):
    words = "`device_coordinates`"
    with pytest.raises(ValueError, match=words):
        Topology(mesh_shape=MESH, device_coordinates=coordinates)


@pytest.mark.parametrize("place", [[0, 0, 0, -1], [2, 0, 0, 0], [0, 0, 0, 2]])
def test_coordinates_are_in_the_mesh(place):
    words = re.escape(f"device 1 of task 0 is at {place}")
    with pytest.raises(ValueError, match=f"must be >= 0 and within the mesh.*{words}"):
        Topology(mesh_shape=MESH, device_coordinates=[[[0, 0, 0, 0], place]])


def test_a_place_is_that_of_one_device():
    with pytest.raises(ValueError, match=r"\[1, 0, 0, 1\]"):
        Topology(
            mesh_shape=MESH,
            device_coordinates=[[[0, 0, 0, 0], [1, 0, 0, 1], [1, 0, 0, 1]]],
        )


def same(one, other):
    return (
        one.mesh_shape.tolist() == other.mesh_shape.tolist()
        and one.device_coordinates.tolist() == other.device_coordinates.tolist()
    )


def test_its_bytes_are_those_of_tensorflow(topology):
    assert topology.serialized() == BYTES
    found = Topology(serialized=BYTES)
    assert same(found, topology)
    assert found.serialized() == BYTES
    assert same(pickle.loads(pickle.dumps(topology)), topology)


def test_serialized_goes_before_the_other_arguments():
    assert Topology(BYTES, mesh_shape=[9], device_coordinates="no").num_tasks == 2


def test_numbers_that_are_not_packed_and_fields_that_are_not_known():
    unpacked = b"".join(bytes([1 << 3, n]) for n in MESH)
    unpacked += bytes([2 << 3, 1, 3 << 3, 1])
    unpacked += b"".join(bytes([4 << 3, n]) for n in (1, 1, 0, 1))
    unknown = bytes([5 << 3 | 2, 2, 8, 1, 9 << 3 | 5, 1, 2, 3, 4, 9 << 3 | 1, *[7] * 8])
    found = Topology(unknown[:4] + unpacked + unknown[4:])
    assert found.device_coordinates.tolist() == [[[1, 1, 0, 1]]]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x08", "TopologyProto"),
        (b"\x0a\x7f", "TopologyProto"),
        (b"\xff" * 12, "TopologyProto"),
        (b"\x0b", "TopologyProto"),
        (b"\x00\x01", "malformed at byte|mesh_shape"),
        (BYTES[6:], "`mesh_shape`"),
        (BYTES[:6] + b"\x10\x03" + BYTES[8:], r"num_tasks.*\(3\).*\b32\b"),
        (
            BYTES[:6] + b"\x10" + b"\xff" * 9 + b"\x01" + BYTES[8:],
            "`num_tasks`",
        ),
    ],
)
def test_bytes_that_are_no_topology(data, words):
    with pytest.raises(ValueError, match=words):
        Topology(serialized=data)


@given(st.binary(min_size=1, max_size=40))
def test_any_bytes_are_read_or_refused(data):
    try:
        found = Topology(serialized=data)
    except ValueError:
        return
    assert same(Topology(serialized=found.serialized()), found)


@given(st.data())
def test_round_trip(data):
    mesh = data.draw(st.tuples(*[st.integers(1, 300)] * 2, st.just(1), st.just(2)))
    places = data.draw(
        st.lists(
            st.tuples(*[st.integers(0, size - 1) for size in mesh]),
            unique=True,
            min_size=2,
            max_size=8,
        )
    )
    places = places[: len(places) // 2 * 2]
    topology = Topology(
        mesh_shape=mesh, device_coordinates=np.reshape(places, (2, -1, 4))
    )
    assert same(Topology(serialized=topology.serialized()), topology)

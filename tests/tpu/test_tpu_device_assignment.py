"""Device assignments: TensorFlow's rules, and that cores are distributed once."""

import itertools
import pickle

import numpy as np
import pytest

from zstrat.tpu.experimental import DeviceAssignment, DeviceOrderMode, Topology


def whole(mesh, tasks=1):
    """A system without holes: places row by row, in as many tasks."""
    places = list(itertools.product(*map(range, mesh)))
    return Topology(
        mesh_shape=mesh, device_coordinates=np.reshape(places, (tasks, -1, 4))
    )


def cores(assignment):
    return [
        "".join(map(str, place)) for place in assignment.core_assignment.reshape(-1, 4)
    ]


@pytest.fixture
def assignment():
    """Two replicas of two cores, on two tasks of two chips."""
    topology = whole([2, 2, 1, 1], tasks=2)
    return DeviceAssignment(
        topology, [[[0, 0, 0, 0], [1, 0, 0, 0]], [[0, 1, 0, 0], [1, 1, 0, 0]]]
    )


@pytest.mark.shows("tf.tpu.experimental.DeviceAssignment")
def test_what_it_says(assignment):
    assert (assignment.num_replicas, assignment.num_cores_per_replica) == (2, 2)
    assert assignment.core_assignment.shape == (2, 2, 4)
    assert assignment.core_assignment.dtype == np.int32
    assert assignment.coordinates(1, 0) == (0, 1, 0, 0)
    assert assignment.topology.num_tasks == 2


def test_names_and_numbers(assignment):
    assert assignment.tpu_ordinal() == 0
    assert assignment.tpu_ordinal(replica=1, logical_core=1) == 1
    assert assignment.host_device() == "/task:0/device:CPU:0"
    assert (
        assignment.host_device(replica=0, logical_core=1, job="worker")
        == "/job:worker/task:1/device:CPU:0"
    )
    assert assignment.tpu_device(1, 0) == "/task:0/device:TPU:1"
    assert assignment.tpu_device(1, 1, job="j") == "/job:j/task:1/device:TPU:1"


def test_lookup_replicas(assignment):
    assert assignment.lookup_replicas(0, 0) == [0, 1]
    assert assignment.lookup_replicas(1, 1) == [0, 1]
    for task, core in ((0, 1), (7, 0), (0, 2)):
        words = (
            f"Can not find any replica in task: {task} contains logical_core: {core}"
        )
        with pytest.raises(ValueError, match=words):
            assignment.lookup_replicas(task, core)


def test_it_is_pickled(assignment):
    found = pickle.loads(pickle.dumps(assignment))
    np.testing.assert_array_equal(found.core_assignment, assignment.core_assignment)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([[0, 0, 0, 0]], "rank 3"),
        ([[[0, 0, 0]]], r"\(4\)"),
        ([[[0.5, 0, 0, 0]]], "core_assignment"),
        (np.zeros((0, 1, 4), int), "core_assignment"),
        ([[[9, 0, 0, 0]]], r"\(9, 0, 0, 0\)"),
        ([[[0, 0, 0, 0]], [[0, 0, 0, 0]]], r"\(0, 0\).*\(1, 0\)"),
    ],
)
def test_what_it_refuses(given, words):
    with pytest.raises(ValueError, match=words):
        DeviceAssignment(whole([2, 1, 1, 1]), given)


def test_it_is_of_a_topology():
    for make in (DeviceAssignment, DeviceAssignment.build):
        with pytest.raises(ValueError, match="initialize_tpu_system"):
            make("a topology", [[[0, 0, 0, 0]]])


@pytest.mark.parametrize("name", ["computation_shape", "computation_stride"])
@pytest.mark.parametrize(
    ("extents", "words"),
    [
        ([1, 1, 1], r"must have shape \[4\]"),
        (2, r"must have shape \[4\]"),
        ([1, 1, 1, 1.5], r"must have shape \[4\]"),
        ([1, 0, 1, 1], "must be positive"),
        ([1, 1, -1, 1], "must be positive"),
    ],
)
def test_extents_are_four_positive_integers(name, extents, words):
    with pytest.raises(ValueError, match=f"{name} {words}"):
        DeviceAssignment.build(whole([2, 2, 1, 2]), **{name: extents})


def test_a_footprint_that_does_not_fit():
    """TensorFlow's example of eight logical devices does not fit a 2x2x1x2 mesh, and
    does fit one of 1x2x2x2."""
    words = r"\[1, 2, 2, 2\].*TPU"
    with pytest.raises(ValueError, match=words):
        DeviceAssignment.build(whole([2, 2, 1, 2]), [1, 2, 2, 2])
    assert DeviceAssignment.build(whole([1, 2, 2, 2]), [1, 2, 2, 2]).num_replicas == 1
    words = r"\[4, 1, 1, 1\]"
    with pytest.raises(ValueError, match=words):
        DeviceAssignment.build(whole([2, 2, 1, 2]), [2, 1, 1, 1], [2, 1, 1, 1])


def test_more_replicas_than_fit():
    words = r"\b5\b.*\b4\b.*\[1, 1, 1, 2\]"
    with pytest.raises(ValueError, match=words):
        DeviceAssignment.build(whole([2, 2, 1, 2]), [1, 1, 1, 2], num_replicas=5)
    with pytest.raises(ValueError, match=r"num_replicas.*\b0\b"):
        DeviceAssignment.build(whole([2, 2, 1, 2]), num_replicas=0)


MESH = DeviceOrderMode.MESH

BUILDS = {
    "one core": (whole([2, 2, 1, 2]), {}, "0000"),
    # Four replicas of one core: two chips along x, and not four.
    "both cores of a chip go before another chip": (
        whole([2, 2, 1, 2]),
        {"num_replicas": 4},
        "0000 0001 1000 1001",
    ),
    "replicas go by core, then x, then y": (
        whole([2, 2, 1, 2]),
        {"num_replicas": 8},
        "0000 0001 1000 1001 0100 0101 1100 1101",
    ),
    "replicas near a square": (
        whole([4, 4, 1, 1]),
        {"num_replicas": 4},
        "0000 1000 0100 1100",
    ),
    "replicas that fill no grid": (
        whole([2, 2, 1, 1]),
        {"num_replicas": 3},
        "0000 1000 0100",
    ),
    "cores of a replica row by row": (
        whole([2, 2, 1, 2]),
        {
            "computation_shape": [2, 2, 1, 1],
            "num_replicas": 2,
            "device_order_mode": MESH,
        },
        "0000 0100 1000 1100 0001 0101 1001 1101",
    ),
    "strided replicas interlock": (
        whole([4, 1, 1, 1]),
        {
            "computation_shape": [2, 1, 1, 1],
            "computation_stride": [2, 1, 1, 1],
            "num_replicas": 2,
        },
        "0000 2000 1000 3000",
    ),
    # Whole chips, all of them: chips of a replica in a ring with their cores together,
    # replicas in a ring of blocks.
    "rings through chips": (
        whole([2, 4, 1, 2]),
        {"computation_shape": [2, 2, 1, 2], "num_replicas": 2},
        "0000 0001 1000 1001 1100 1101 0100 0101 "
        "0200 0201 1200 1201 1300 1301 0300 0301",
    ),
    "rings through replicas": (
        whole([2, 2, 1, 2]),
        {"computation_shape": [1, 1, 1, 2], "num_replicas": 4},
        "0000 0001 1000 1001 1100 1101 0100 0101",
    ),
    "rows where a ring is possible": (
        whole([2, 2, 1, 2]),
        {
            "computation_shape": [1, 1, 1, 2],
            "num_replicas": 4,
            "device_order_mode": MESH,
        },
        "0000 0001 1000 1001 0100 0101 1100 1101",
    ),
}


@pytest.mark.shows("tf.tpu.experimental.DeviceAssignment.build")
@pytest.mark.shows("DeviceAssignment.build(computation_shape=, num_replicas=)")
@pytest.mark.parametrize("case", BUILDS)
def test_which_cores_replicas_have(case):
    """TensorFlow's examples; any other build is in `test_tpu_brute_force`."""
    topology, options, expected = BUILDS[case]
    for given in (topology, topology.serialized()):
        assert cores(DeviceAssignment.build(given, **options)) == expected.split()


@pytest.mark.parametrize(
    ("shape", "stride", "replicas"),
    [
        ([2, 2, 1, 1], None, 2),  # half of each chip
        ([1, 1, 1, 2], None, 3),  # one chip is left over
        ([1, 1, 1, 2], [2, 1, 1, 1], 4),  # not side by side
    ],
)
def test_a_ring_that_is_not_possible(shape, stride, replicas):
    args = (whole([2, 2, 1, 2]), shape, stride, replicas)
    with pytest.raises(ValueError, match=r"DeviceOrderMode.*RING"):
        DeviceAssignment.build(*args, device_order_mode=DeviceOrderMode.RING)
    auto = DeviceAssignment.build(*args)
    mesh = DeviceAssignment.build(*args, device_order_mode=DeviceOrderMode.MESH)
    assert cores(auto) == cores(mesh)


HOLED = Topology(
    mesh_shape=[2, 2, 1, 2],
    device_coordinates=[
        [[1, 1, 0, 0], [1, 1, 0, 1], [0, 0, 0, 1]],
        [[0, 1, 0, 0], [0, 1, 0, 1], [0, 0, 0, 0]],
    ],
)


def test_cores_of_a_holed_mesh_are_dealt_out_task_by_task():
    found = DeviceAssignment.build(HOLED, [1, 1, 1, 2], num_replicas=3)
    assert cores(found) == ["1100", "1101", "0001", "0100", "0101", "0000"]


def test_a_holed_mesh_has_no_strides_and_may_have_too_few():
    with pytest.raises(ValueError, match=r"needs a whole mesh, and 2 devices"):
        DeviceAssignment.build(HOLED, computation_stride=[2, 1, 1, 1])
    with pytest.raises(ValueError, match=r"requested 4 replicas of 2 cores.* has 6"):
        DeviceAssignment.build(HOLED, [1, 1, 1, 2], num_replicas=4)

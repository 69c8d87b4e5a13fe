"""`DeviceAssignment.build` against a second one, written from TensorFlow's rules."""

import itertools
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zstrat.tpu.experimental import DeviceAssignment, DeviceOrderMode, Topology

CORE, X, Y, Z = 3, 0, 1, 2
REFUSED = "refused"


@st.composite
def systems(draw):
    mesh = draw(st.tuples(*[st.integers(1, 4)] * 3, st.integers(1, 3)))
    places = draw(st.permutations(list(itertools.product(*map(range, mesh)))))
    holes = draw(st.sampled_from([0, 0, 0, 1, 2]))
    tasks = draw(st.integers(1, 3))
    kept = max(1, (len(places) - holes) // tasks) * tasks
    if kept > len(places):
        tasks, kept = 1, len(places)
    given_places = np.reshape(places[:kept], (tasks, -1, 4))
    return Topology(mesh_shape=mesh, device_coordinates=given_places)


@st.composite
def builds(draw):
    topology = draw(systems())
    mesh = topology.mesh_shape.tolist()
    shape = [draw(st.integers(1, m)) for m in mesh]
    if draw(st.booleans()):
        shape[CORE] = mesh[CORE]
    strides = st.lists(st.integers(1, 3), min_size=4, max_size=4)
    stride = draw(st.one_of(st.just([1] * 4), strides))
    room = math.prod(
        m // (n * s) * s for m, n, s in zip(mesh, shape, stride, strict=True)
    )
    some = st.integers(1, max(1, room) + 1)
    replicas = draw(st.one_of(st.just(max(1, room)), some))
    return topology, shape, stride, replicas, draw(st.sampled_from(DeviceOrderMode))


def by_the_text(topology, shape, stride, replicas, order):
    mesh = topology.mesh_shape.tolist()
    footprint = [n * s for n, s in zip(shape, stride, strict=True)]
    if any(f > m for f, m in zip(footprint, mesh, strict=True)):
        return REFUSED
    blocks = [m // f for m, f in zip(mesh, footprint, strict=True)]
    counts = [b * s for b, s in zip(blocks, stride, strict=True)]
    if math.prod(counts) < replicas:
        return REFUSED
    if topology.num_tasks * topology.num_tpus_per_task < math.prod(mesh):
        cores = [core for task in topology.device_coordinates.tolist() for core in task]
        each = math.prod(shape)
        if math.prod(stride) != 1 or len(cores) < replicas * each:
            return REFUSED
        return [cores[r * each : (r + 1) * each] for r in range(replicas)]
    grid = grid_of(counts, replicas)
    can_ring = (
        shape[CORE] == mesh[CORE]
        and stride == [1, 1, 1, 1]
        and replicas == math.prod(counts)
    )
    if order == DeviceOrderMode.RING and not can_ring:
        return REFUSED
    if can_ring and order != DeviceOrderMode.MESH:
        return [
            [
                [bx * shape[X] + x, by * shape[Y] + y, bz * shape[Z] + z, core]
                for x, y, z in ring(*shape[:3])
                for core in range(mesh[CORE])
            ]
            for bx, by, bz in ring(*grid[:3])
        ]
    return [block(number, grid, shape, stride) for number in range(replicas)]


def grid_of(counts, replicas):
    grid = [0] * 4
    order = sorted((CORE, X, Y, Z), key=lambda axis: counts[axis])  # sorting is stable
    remaining = replicas
    for visited, axis in enumerate(order):
        target = math.ceil(round(remaining ** (1 / (4 - visited)), 9))
        grid[axis] = min(counts[axis], target)
        remaining = math.ceil(remaining / grid[axis])
    assert remaining == 1
    return grid


def block(number, grid, shape, stride):
    start = [0] * 4
    for axis in (CORE, X, Y, Z):
        number, digit = divmod(number, grid[axis])
        outer, inner = divmod(digit, stride[axis])
        start[axis] = outer * shape[axis] * stride[axis] + inner
    found = []
    for a in range(shape[X]):
        for b in range(shape[Y]):
            for c in range(shape[Z]):
                for d in range(shape[CORE]):
                    steps = zip((a, b, c, d), stride, start, strict=True)
                    found.append([at + n * s for n, s, at in steps])
    return found


def ring(xs, ys, zs):
    """By turns: along the row, and back along column 0 at the end."""
    long = [n for n in (xs, ys, zs) if n > 1]
    if len(long) < 2 or any(n % 2 for n in long):
        return [(x, y, z) for z in range(zs) for y in range(ys) for x in range(xs)]
    if zs == 1:
        return [(0, 0, 0), *((x, y, 0) for x, y in snake(xs, ys))]
    if ys == 1:
        return [(0, 0, 0), *((x, 0, z) for x, z in snake(xs, zs))]
    if xs == 1:
        return [(0, 0, 0), *((0, y, z) for y, z in snake(ys, zs))]
    found = [(0, 0, 0)]
    for z in range(zs):
        plane = [(x, y, z) for x, y in snake(xs, ys)]
        found.extend(plane if z % 2 == 0 else plane[::-1])
    found.extend((0, 0, z) for z in range(zs - 1, 0, -1))
    return found


def snake(columns, rows):
    found = []
    for row in range(0, rows, 2):
        found.extend((column, row) for column in range(1, columns))
        found.extend((column, row + 1) for column in range(columns - 1, 0, -1))
    found.extend((0, row) for row in range(rows - 1, 0, -1))
    return found


@given(builds())
def test_every_assignment_is_the_one_of_the_text(build):
    topology, shape, stride, replicas, order = build
    expected = by_the_text(topology, shape, stride, replicas, order)
    try:
        found = DeviceAssignment.build(topology, shape, stride, replicas, order)
    except ValueError:
        assert expected == REFUSED
        return
    assert found.core_assignment.tolist() == expected
    for (r, c), place in zip(
        np.ndindex(replicas, math.prod(shape)),
        itertools.chain.from_iterable(expected),
        strict=True,
    ):
        task, device = np.argwhere((topology.device_coordinates == place).all(2))[0]
        assert found.tpu_ordinal(r, c) == device
        assert found.host_device(r, c, job="w") == f"/job:w/task:{task}/device:CPU:0"
        assert r in found.lookup_replicas(task, c)

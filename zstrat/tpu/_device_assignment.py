"""Assigns the cores of a TPU system to the logical cores of replicas.

`Packing` places blocks of cores in the mesh of cores, in an order. The computation of a
replica uses a block of ``shape`` cores, ``stride`` apart in each dimension; its
*footprint* is the product of shape and stride in each dimension. Strided blocks
interlock: in each dimension, as many replicas as the stride share one footprint.

The order of the chips in a block makes each chip adjacent to the previous one. For a
block with even sides the order is a ring: the last chip is adjacent to the first one as
well. Then collectives between neighbours never share a link.

Law of `Packing`: plain integers, and arrays of them with four entries, x, y, z and
core; no devices.
"""

from __future__ import annotations

import enum
import itertools
import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from ._topology import RANK, Topology

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class DeviceOrderMode(enum.IntEnum):
    """The order in which `DeviceAssignment.build` numbers cores."""

    AUTO = 0
    """RING if it is possible, else MESH."""
    RING = 1
    """Cores that are neighbours in the numbering are neighbours in the mesh."""
    MESH = 2
    """Cores are numbered row by row of the mesh."""


@final
class DeviceAssignment:
    """The cores that each replica uses. `build` creates an assignment from the shape of
    a replica.

    Args:
        topology: The topology of the TPU system.
        core_assignment: Coordinates ``[replicas, cores per replica, 4]``.

    Raises:
        ValueError: ``topology`` is not a topology; ``core_assignment`` has another
            shape or dtype, duplicates, or coordinates without a device.
    """

    def __init__(self, topology: Topology, core_assignment: Any) -> None:
        _require_topology(topology)
        self._topology = topology
        self._cores = _checked(np.asarray(core_assignment))
        self._replicas: dict[tuple[int, int], list[int]] = {}
        owners: dict[tuple[int, ...], tuple[int, int]] = {}
        for replica, core in np.ndindex(self._cores.shape[:2]):
            place = self.coordinates(replica, core)
            # A core computes one logical core: jax could not place two on it.
            if place in owners:
                raise ValueError(
                    f"core_assignment assigns the core at {place} to both (replica, "
                    f"logical core) {owners[place]} and {replica, core}"
                )
            owners[place] = replica, core
            task = topology.task_ordinal_at_coordinates(place)
            self._replicas.setdefault((task, core), []).append(replica)

    @staticmethod
    def build(
        topology: Topology | bytes,
        computation_shape: Sequence[int] | None = None,
        computation_stride: Sequence[int] | None = None,
        num_replicas: int = 1,
        device_order_mode: DeviceOrderMode = DeviceOrderMode.AUTO,
    ) -> DeviceAssignment:
        """Assigns equal blocks of cores to replicas, and arranges the blocks as near to
        a cube as fits.

        In a system with missing devices, the existing ones are assigned in the order of
        tasks, and the order mode is ignored.

        Args:
            topology: The topology of the TPU system, or its serialized form.
            computation_shape: Cores ``[4]`` of one replica in x, y, z and in each chip;
                default: one core.
            computation_stride: Distances ``[4]`` between the cores of one replica;
                default: they are adjacent.
            num_replicas: Number of replicas.
            device_order_mode: The order of replicas and cores; a ring needs whole
                chips, no stride, and as many replicas as fit.

        Raises:
            ValueError: The replicas do not fit; a shape is not four positive integers;
                a ring is not possible; or devices are missing, and there is a stride or
                too few devices.
        """
        if isinstance(topology, bytes):
            topology = Topology(serialized=topology)
        _require_topology(topology)
        shape = _extents("computation_shape", computation_shape)
        stride = _extents("computation_stride", computation_stride)
        if num_replicas < 1:
            raise ValueError(f"num_replicas must be positive; got {num_replicas}")
        mesh = topology.mesh_shape.tolist()
        packed = packing(mesh, shape, stride, num_replicas)
        # Blocks would reach over holes, and the replicas have to be equal.
        if len(topology.missing_devices):
            return DeviceAssignment(topology, _task_order_cores(topology, packed))
        in_rings = packed.can_ring and device_order_mode is not DeviceOrderMode.MESH
        if device_order_mode is DeviceOrderMode.RING and not in_rings:
            raise ValueError(
                "device_order_mode=DeviceOrderMode.RING is not possible with "
                f"{num_replicas} replicas of shape {shape}, {stride} apart, in a mesh "
                f"{mesh}: it needs all cores of a chip in one replica, no stride, and "
                "as many replicas as fit; try DeviceOrderMode.AUTO"
            )
        cores = packed.in_rings() if in_rings else packed.in_rows()
        return DeviceAssignment(topology, cores)

    @property
    def topology(self) -> Topology:
        """The topology of the cores."""
        return self._topology

    @property
    def core_assignment(self) -> np.ndarray:
        """Coordinates of the cores, int32 ``[replicas, cores per replica, 4]``: x, y,
        z, core."""
        return self._cores

    @property
    def num_replicas(self) -> int:
        """The number of copies of the computation."""
        return int(self._cores.shape[0])

    @property
    def num_cores_per_replica(self) -> int:
        """The number of logical devices, or cores, of each replica."""
        return int(self._cores.shape[1])

    def coordinates(self, replica: int, logical_core: int) -> tuple[int, ...]:
        """Returns the coordinates of a logical core: x, y, z, core."""
        return tuple(self._cores[replica, logical_core].tolist())

    def lookup_replicas(self, task_id: int, logical_core: int) -> list[int]:
        """Returns the replicas whose logical core ``logical_core`` is on task
        ``task_id``, in order.

        Raises:
            ValueError: No replica has its core there.
        """
        found = self._replicas.get((task_id, logical_core))
        if found is None:
            raise ValueError(
                f"Can not find any replica in task: {task_id} contains logical_core: "
                f"{logical_core}"
            )
        return list(found)

    def tpu_ordinal(self, replica: int = 0, logical_core: int = 0) -> int:
        """Returns the index of a logical core's device among the devices of its
        task."""
        place = self.coordinates(replica, logical_core)
        return self._topology.tpu_device_ordinal_at_coordinates(place)

    def host_device(
        self, replica: int = 0, logical_core: int = 0, job: str | None = None
    ) -> str:
        """Returns TensorFlow's name of the host (CPU device) of a logical core."""
        place = self.coordinates(replica, logical_core)
        return self._topology.cpu_device_name_at_coordinates(place, job=job)

    def tpu_device(
        self, replica: int = 0, logical_core: int = 0, job: str | None = None
    ) -> str:
        """Returns TensorFlow's name of a logical core's device."""
        place = self.coordinates(replica, logical_core)
        return self._topology.tpu_device_name_at_coordinates(place, job=job)

    def __reduce__(self) -> Any:
        return DeviceAssignment, (self._topology, self._cores)

    def __repr__(self) -> str:
        return (
            f"<zstrat.tpu DeviceAssignment: {self.num_replicas} replicas of "
            f"{self.num_cores_per_replica} cores>"
        )


def _require_topology(topology: object) -> None:
    if not isinstance(topology, Topology):
        raise ValueError(
            f"topology must be a Topology object, got {type(topology).__name__}: give "
            "what initialize_tpu_system returned"
        )


def _task_order_cores(topology: Topology, packed: Packing) -> np.ndarray:
    """Returns the cores that exist, in the order of tasks, divided among replicas."""
    if math.prod(packed.stride) != 1:
        raise ValueError(
            f"computation_stride {list(packed.stride)} needs a whole mesh, and "
            f"{len(topology.missing_devices)} devices of this TPU system are missing"
        )
    cores = topology.device_coordinates.reshape(-1, RANK)
    each = math.prod(packed.shape)
    if packed.replicas * each > len(cores):
        raise ValueError(
            f"requested {packed.replicas} replicas of {each} cores, and the TPU system "
            f"has {len(cores)}: {len(topology.missing_devices)} devices are missing"
        )
    return cores[: packed.replicas * each].reshape(packed.replicas, each, RANK)


def _checked(cores: np.ndarray) -> np.ndarray:
    if cores.ndim != 3:
        raise ValueError(
            "core_assignment must be a rank 3 numpy array [replicas, cores per "
            f"replica, {RANK}], got shape {list(cores.shape)}"
        )
    if cores.shape[2] != RANK:
        raise ValueError(
            "minor dimension of core_assignment must have size equal to topology rank "
            f"({RANK}), got shape {list(cores.shape)}"
        )
    if cores.dtype.kind not in "iu" or not cores.size:
        raise ValueError(
            "core_assignment must be integers for at least one core, got "
            f"{cores.dtype} {list(cores.shape)}"
        )
    made = cores.astype(np.int32)
    made.setflags(write=False)
    return made


def _extents(name: str, given: Sequence[int] | None) -> list[int]:
    if given is None:
        return [1] * RANK
    found = np.asarray(given)
    if found.shape != (RANK,) or found.dtype.kind not in "iu":
        raise ValueError(
            f"{name} must have shape [{RANK}] (x, y, z, cores of a chip); got {given!r}"
        )
    if (found < 1).any():
        raise ValueError(f"{name} must be positive; got {name}={found.tolist()}")
    numbers: list[int] = found.tolist()
    return numbers


_log: Final = logging.getLogger(__name__)

Chip = tuple[int, int, int]
"""The position of a chip: ``(x, y, z)``."""


def ring(extents: Sequence[int]) -> list[Chip]:
    """Orders all chips of a block of these three extents, beginning at (0, 0, 0).

    With one extent greater than 1 the order is a line, with two a ring in one plane,
    with three the rings of all planes, opened at their corners and joined along z. A
    ring needs even extents (those greater than 1); if one of several is odd, the order
    is row by row, x fastest, and a warning is logged.
    """
    # An axis of extent 1 has no neighbours to go to.
    long = [axis for axis in range(3) if extents[axis] > 1]
    if len(long) > 1 and any(extents[axis] % 2 for axis in long):
        _log.warning(
            "chips of a block of %s are numbered row by row: a ring through them "
            "needs even sides",
            tuple(extents),
        )
        return _rows(extents)
    match long:
        case [columns, rows]:
            plane = [(0, 0), *_opened(extents[columns], extents[rows])]
            return [_at({columns: i, rows: j}) for i, j in plane]
        case [_, _, _]:
            return _strung(extents)
        case _:
            return _rows(extents)


def _rows(extents: Sequence[int]) -> list[Chip]:
    width, height, depth = (range(extent) for extent in extents)
    return [(x, y, z) for z, y, x in itertools.product(depth, height, width)]


def _at(places: dict[int, int]) -> Chip:
    return places.get(0, 0), places.get(1, 0), places.get(2, 0)


def _opened(columns: int, rows: int) -> list[tuple[int, int]]:
    """Returns the ring of a plane without the corner (0, 0): from one neighbour of the
    corner to the other.

    The path goes back and forth through the rows, and returns along column 0.
    """
    found: list[tuple[int, int]] = []
    for row in range(rows):
        there = [(column, row) for column in range(1, columns)]
        found += there[::-1] if row % 2 else there
    return found + [(0, row) for row in range(rows - 1, 0, -1)]


def _strung(extents: Sequence[int]) -> list[Chip]:
    columns, rows, planes = extents
    found: list[Chip] = [(0, 0, 0)]
    for z in range(planes):
        # Every other plane backwards: it begins where the one below it ended.
        plane = _opened(columns, rows)
        found += [(x, y, z) for x, y in (plane[::-1] if z % 2 else plane)]
    # The corners were left out of the planes: they are the way back.
    return found + [(0, 0, z) for z in range(planes - 1, 0, -1)]


Cores = tuple[int, int, int, int]
"""A position, or extents, in the mesh: x, y, z, core."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Places blocks of cores in a mesh. Created by `packing`, which checks that they
    fit."""

    mesh: Cores
    shape: Cores
    stride: Cores
    replicas: int

    @property
    def footprint(self) -> Cores:
        """Extents of the part of the mesh that one block covers, with the cores between
        its own."""
        return _each(a * b for a, b in zip(self.shape, self.stride, strict=True))

    @property
    def counts(self) -> Cores:
        """The number of blocks (replicas) that fit in each dimension."""
        blocks = [m // f for m, f in zip(self.mesh, self.footprint, strict=True)]
        return _each(b * s for b, s in zip(blocks, self.stride, strict=True))

    @property
    def can_ring(self) -> bool:
        """Whether a ring leads through the chips of each block, and one through all
        blocks: the blocks must be of whole chips without strides, and use all chips of
        the mesh."""
        return (
            self.shape[3] == self.mesh[3]
            and math.prod(self.stride) == 1
            and self.replicas == math.prod(self.counts)
        )

    def in_rings(self) -> np.ndarray:
        """Cores ``[replicas, cores, 4]``: the blocks of the replicas follow each other
        in a ring, the chips of each block in a ring, and the cores of a chip one after
        the other."""
        # Whole chips, so that all cores of one follow each other in the numbering.
        chips = np.array(ring(self.shape[:3]), np.int32)
        blocks = np.array(ring(self.grid()[:3]), np.int32) * self.shape[:3]
        found = np.empty((len(blocks), len(chips), self.mesh[3], 4), np.int32)
        found[..., :3] = (blocks[:, None] + chips)[:, :, None]
        found[..., 3] = np.arange(self.mesh[3])
        return found.reshape(len(blocks), -1, 4)

    def in_rows(self) -> np.ndarray:
        """Cores ``[replicas, cores, 4]``: the cores of a replica row by row, the core
        of a chip fastest and x slowest; replicas one after the other by core, x, y,
        z."""
        spans = zip(self.footprint, self.stride, strict=True)
        offsets = list(itertools.product(*(range(0, f, s) for f, s in spans)))
        x, y, z, core = (range(extent) for extent in self.grid())
        # The last dimension of a product runs fastest.
        places = itertools.islice(itertools.product(z, y, x, core), self.replicas)
        starts = [self._start((a, b, c, d)) for c, b, a, d in places]
        return np.array(starts, np.int32)[:, None] + np.array(offsets, np.int32)

    def _start(self, place: Cores) -> Cores:
        """Returns the first core of the replica at position ``place`` of the grid."""
        spans = zip(place, self.footprint, self.stride, strict=True)
        # Replicas interlock: ``s`` of them share a footprint, each one core further.
        return _each(p // s * f + p % s for p, f, s in spans)

    def grid(self) -> Cores:
        """Returns the number of adjacent replicas in each dimension, near a cube.

        The dimension with the least room is filled first, so that no choice leaves too
        little room in the others. Of dimensions with equal room the first is that of
        the cores of a chip, then x, y, z.
        """
        counts, left = self.counts, self.replicas
        # (axis + 1) % 4 makes the cores of a chip the first among equals.
        found = [1] * 4
        tightest = sorted(range(4), key=lambda axis: (counts[axis], (axis + 1) % 4))
        for n, axis in enumerate(tightest):
            # The side of the cube that the rest would fill, if there is room for it.
            found[axis] = min(counts[axis], _root(left, 4 - n))
            left = -(-left // found[axis])
        return _each(found)


def packing(
    mesh: Sequence[int], shape: Sequence[int], stride: Sequence[int], replicas: int
) -> Packing:
    """Returns the packing of ``replicas`` blocks of ``shape`` cores, ``stride`` apart,
    in a mesh.

    Raises:
        ValueError: A block does not fit into the mesh, or ``replicas`` blocks do not.
    """
    found = Packing(_each(mesh), _each(shape), _each(stride), replicas)
    if any(f > m for f, m in zip(found.footprint, found.mesh, strict=True)):
        raise ValueError(
            f"computation footprint {list(found.footprint)} does not fit in TPU "
            f"topology shape {list(found.mesh)}"
        )
    # After the footprint: of a block that does not fit the count would be 0.
    room = math.prod(found.counts)
    if replicas > room:
        raise ValueError(
            f"requested {replicas} replicas but only {room} replicas with shape "
            f"{list(found.shape)} and computation_stride {list(found.stride)} fit in a "
            f"TPU mesh of shape {list(found.mesh)}"
        )
    return found


def _each(values: Iterable[int]) -> Cores:
    x, y, z, core = (int(value) for value in values)
    return x, y, z, core


def _root(number: int, degree: int) -> int:
    """Returns the least integer whose power ``degree`` is at least ``number``."""
    return next(n for n in itertools.count(1) if n**degree >= number)

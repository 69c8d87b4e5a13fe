"""Which core of a TPU system is which logical core of which replica."""

from __future__ import annotations

import enum
import math
from typing import TYPE_CHECKING, Any, final

import numpy as np

from ._packing import packing
from ._topology import RANK, Topology

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ._packing import Packing


class DeviceOrderMode(enum.IntEnum):
    """In which order `DeviceAssignment.build` numbers cores."""

    AUTO = 0
    """RING where it is possible, else MESH."""
    RING = 1
    """Neighbours in the numbering are neighbours in the mesh."""
    MESH = 2
    """Row by row."""


@final
class DeviceAssignment:
    """The cores of each replica. `build` makes one from the shape of a replica.

    Args:
        topology: The system.
        core_assignment: Coordinates ``[replicas, cores per replica, 4]``.

    Raises:
        ValueError: ``topology`` is none; ``core_assignment`` has another shape or
            dtype, names a place without a device, or one twice.
    """

    def __init__(self, topology: Topology, core_assignment: Any) -> None:
        _require_topology(topology)
        self._topology = topology
        self._cores = _checked(np.asarray(core_assignment))
        self._replicas: dict[tuple[int, int], list[int]] = {}
        owners: dict[tuple[int, ...], tuple[int, int]] = {}
        for replica, core in np.ndindex(self._cores.shape[:2]):
            place = self.coordinates(replica, core)
            if place in owners:
                raise ValueError(
                    f"core_assignment gives the core at {place} both to (replica, "
                    f"logical core) {owners[place]} and to {replica, core}"
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
        """Replicas of equal blocks of cores, as near to a cube as there is room for.

        Of a system with missing devices, those that there are are dealt out in the
        order of tasks; the order mode is not looked at.

        Args:
            topology: The system, or its serialized form.
            computation_shape: Cores ``[4]`` of one replica in x, y, z and in each chip;
                default one core.
            computation_stride: How far they are apart ``[4]``; default side by side.
            num_replicas: How many.
            device_order_mode: The numbering of replicas and cores; a ring needs whole
                chips, no stride, and as many replicas as fit.

        Raises:
            ValueError: A replica or all of them do not fit; a shape is not four
                positive integers; a ring is not possible; or devices are missing and
                there is a stride or there are too few.
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
        if len(topology.missing_devices):
            return DeviceAssignment(topology, _dealt(topology, packed))
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
        """The mesh that the cores of the replicas are in."""
        return self._topology

    @property
    def core_assignment(self) -> np.ndarray:
        """int32 ``[replicas, cores per replica, 4]``."""
        return self._cores

    @property
    def num_replicas(self) -> int:
        """How many copies of the computation run."""
        return int(self._cores.shape[0])

    @property
    def num_cores_per_replica(self) -> int:
        """How many logical devices each replica has, a core each."""
        return int(self._cores.shape[1])

    def coordinates(self, replica: int, logical_core: int) -> tuple[int, ...]:
        """Where a logical core is: x, y, z, core."""
        return tuple(self._cores[replica, logical_core].tolist())

    def lookup_replicas(self, task_id: int, logical_core: int) -> list[int]:
        """The replicas that have that logical core on that task, in order.

        Raises:
            ValueError: None has.
        """
        found = self._replicas.get((task_id, logical_core))
        if found is None:
            raise ValueError(
                f"Can not find any replica in task: {task_id} contains logical_core: "
                f"{logical_core}"
            )
        return list(found)

    def tpu_ordinal(self, replica: int = 0, logical_core: int = 0) -> int:
        """The number of a logical core's device among those of its task."""
        place = self.coordinates(replica, logical_core)
        return self._topology.tpu_device_ordinal_at_coordinates(place)

    def host_device(
        self, replica: int = 0, logical_core: int = 0, job: str | None = None
    ) -> str:
        """TF's name of the host of a logical core."""
        place = self.coordinates(replica, logical_core)
        return self._topology.cpu_device_name_at_coordinates(place, job=job)

    def tpu_device(
        self, replica: int = 0, logical_core: int = 0, job: str | None = None
    ) -> str:
        """TF's name of a logical core's device."""
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


def _dealt(topology: Topology, packed: Packing) -> np.ndarray:
    """The cores that there are, in the order of tasks, cut into replicas."""
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

"""The topology of a TPU system: its mesh of cores, and which device of which task each
core is.

A core has four coordinates: three of its chip, and its own index on the chip. The mesh
may have holes, where a chip is broken or belongs to another job.

Serialized, a topology is TensorFlow's ``TopologyProto``; each library reads what the
other writes. Fields: 1 mesh_shape (int32, repeated), 2 num_tasks (int32), 3
num_tpu_devices_per_task (int32), 4 device_coordinates (int32, repeated); the encoding
is that of protocol buffers, version
3. Fields that are not known here are skipped.

Law of `Topology`: it is immutable, and everything is checked when it is created, also
if it comes from arbitrary bytes.

The TPU system of this process has the devices of jax. A TPU device has coordinates.
Other devices are placed in a mesh whose shape the caller chooses, so that a program for
many cores can run and be tested on virtual CPU devices. TensorFlow requires a call that
connects a resolver to its TPU system; it exists here for compatibility, and jax needs
no call.

Law: functions import jax when they are called, so that an import initializes no
devices.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from zstrat.cluster import ClusterResolver, ClusterSpec, TPUClusterResolver

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import jax


RANK: Final = 4
"""Number of coordinates of a core: x, y, z of its chip, and its index on the chip."""


@final
class Topology:
    """The coordinates of the devices of all tasks in the mesh of a TPU system.

    Args:
        serialized: The result of `serialized` or of TensorFlow's method; then the other
            arguments are ignored.
        mesh_shape: Extents ``[4]`` of the mesh: x, y, z, and cores per chip.
        device_coordinates: Coordinates of device ``d`` of task ``t``, ``[tasks, devices
            per task, 4]``.

    Raises:
        ValueError: ``mesh_shape`` is not four positive integers;
            ``device_coordinates`` has another shape or dtype, is outside of the mesh,
            or has duplicates; or ``serialized`` is not a topology.
    """

    def __init__(
        self,
        serialized: bytes | None = None,
        mesh_shape: Sequence[int] | None = None,
        device_coordinates: Any = None,
    ) -> None:
        if serialized:
            mesh_shape, device_coordinates = _parsed(serialized)
        self._mesh_shape = _mesh(mesh_shape)
        self._coordinates = _coordinates(device_coordinates, self._mesh_shape)
        # Coordinates to device: two devices at one place make fewer entries.
        self._places = {
            (*map(int, self._coordinates[task, device]),): (task, device)
            for task, device in np.ndindex(self._coordinates.shape[:2])
        }
        _require_apart(self._coordinates, len(self._places))
        # As it came: TensorFlow's bytes may have fields that are not known here.
        self._serialized = serialized or None

    @property
    def mesh_shape(self) -> np.ndarray:
        """Extents of the mesh, int32 ``[4]``: x, y, z, cores per chip."""
        return self._mesh_shape

    @property
    def mesh_rank(self) -> int:
        """The number of coordinates of a core, 4."""
        return RANK

    @property
    def device_coordinates(self) -> np.ndarray:
        """Coordinates of the devices, int32 ``[tasks, devices per task, 4]``."""
        return self._coordinates

    @property
    def num_tasks(self) -> int:
        """The number of tasks (hosts) with devices in the mesh."""
        return int(self._coordinates.shape[0])

    @property
    def num_tpus_per_task(self) -> int:
        """The number of cores of each task, equal for all."""
        return int(self._coordinates.shape[1])

    @property
    def missing_devices(self) -> np.ndarray:
        """Coordinates ``[n, 4]`` in the mesh where there is no device, row-major."""
        holes = np.ones(self._mesh_shape, bool)
        holes[tuple(self._coordinates.reshape(-1, RANK).T)] = False
        return np.argwhere(holes)

    def task_ordinal_at_coordinates(self, device_coordinates: Sequence[int]) -> int:
        """Returns the task of the device at these coordinates.

        Raises:
            ValueError: There is no device. The other methods with coordinates raise
                this, too.
        """
        return self._at(device_coordinates)[0]

    def tpu_device_ordinal_at_coordinates(
        self, device_coordinates: Sequence[int]
    ) -> int:
        """Returns the index of the device at these coordinates among the devices of its
        task."""
        return self._at(device_coordinates)[1]

    def cpu_device_name_at_coordinates(
        self, device_coordinates: Sequence[int], job: str | None = None
    ) -> str:
        """Returns TensorFlow's name of the host of the device at these coordinates:
        "/job:J/task:T/device:CPU:0", without "/job:J" if ``job`` is None."""
        return f"{_task(job, self._at(device_coordinates)[0])}/device:CPU:0"

    def tpu_device_name_at_coordinates(
        self, device_coordinates: Sequence[int], job: str | None = None
    ) -> str:
        """Returns TensorFlow's name of the device at these coordinates:
        "/job:J/task:T/device:TPU:N", without "/job:J" if ``job`` is None."""
        task, device = self._at(device_coordinates)
        return f"{_task(job, task)}/device:TPU:{device}"

    def serialized(self) -> bytes:
        """Returns the topology as bytes, a ``TopologyProto`` of TensorFlow."""
        if self._serialized is None:
            self._serialized = _encode(
                self._mesh_shape.tolist(),
                self.num_tasks,
                self.num_tpus_per_task,
                self._coordinates.ravel().tolist(),
            )
        return self._serialized

    def _at(self, coordinates: Sequence[int]) -> tuple[int, int]:
        place = tuple(int(n) for n in coordinates)
        try:
            return self._places[place]
        except KeyError:
            raise ValueError(
                f"there is no device at {place} in this TPU system, whose mesh is "
                f"{self._mesh_shape.tolist()} with "
                f"{len(self.missing_devices)} missing devices"
            ) from None

    def __reduce__(self) -> Any:
        return Topology, (self.serialized(),)

    def __repr__(self) -> str:
        return (
            f"<zstrat.tpu Topology: mesh {self._mesh_shape.tolist()}, {self.num_tasks} "
            f"tasks of {self.num_tpus_per_task} devices>"
        )


def _mesh(mesh_shape: Any) -> np.ndarray:
    found = np.asarray(() if mesh_shape is None else mesh_shape)
    if found.shape != (RANK,) or found.dtype.kind not in "iu" or (found < 1).any():
        raise ValueError(
            f"`mesh_shape` must be a sequence of {RANK} positive integers (x, y, z, "
            f"cores per chip); got {mesh_shape!r}"
        )
    return _frozen(found)


def _coordinates(given: Any, mesh: np.ndarray) -> np.ndarray:
    found = np.asarray(() if given is None else given)
    if found.ndim != 3 or found.shape[2] != RANK or found.dtype.kind not in "iu":
        raise ValueError(
            "`device_coordinates` must be an array of integers of shape [tasks, "
            f"devices per task, {RANK}], its minor dimension the rank of the mesh; got "
            f"{found.dtype} {list(found.shape)}"
        )
    # The first one that is outside, if any.
    for task, device in np.argwhere(((found < 0) | (found >= mesh)).any(axis=2)):
        raise ValueError(
            f"`device_coordinates` must be >= 0 and within the mesh {mesh.tolist()}: "
            f"device {device} of task {task} is at {found[task, device].tolist()}"
        )
    return _frozen(found)


def _require_apart(coordinates: np.ndarray, places: int) -> None:
    rows = coordinates.reshape(-1, RANK)
    if places == len(rows):
        return
    places_of, counts = np.unique(rows, axis=0, return_counts=True)
    twice = places_of[counts > 1][0].tolist()
    raise ValueError(
        f"`device_coordinates` names {twice} more than once: give each device other "
        "coordinates"
    )


def _parsed(serialized: bytes) -> tuple[tuple[int, ...], np.ndarray]:
    # Other programs made these bytes, so sizes are compared before arrays are made.
    extents, *sizes, coordinates = _decode(serialized)
    mesh = tuple(_mesh(np.asarray(extents, np.int64)).tolist())
    for name, size in zip(
        ("num_tasks", "num_tpu_devices_per_task"), sizes, strict=True
    ):
        if size < 0:
            raise ValueError(f"`{name}` must be >= 0; got {size}")
    if len(coordinates) != sizes[0] * sizes[1] * RANK:
        raise ValueError(
            f"`device_coordinates` must have shape num_tasks ({sizes[0]}) * "
            f"num_tpu_devices_per_task ({sizes[1]}) * len(mesh_shape) ({RANK}); got "
            f"{len(coordinates)} numbers"
        )
    return mesh, np.asarray(coordinates, np.int64).reshape(*sizes, RANK)


def _frozen(array: np.ndarray) -> np.ndarray:
    # `astype` copies: the caller may still write to its array.
    made = array.astype(np.int32)
    made.setflags(write=False)
    return made


def _task(job: str | None, task: int) -> str:
    return f"/task:{task}" if job is None else f"/job:{job}/task:{task}"


_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MESH, _TASKS, _DEVICES, _COORDINATES = 1, 2, 3, 4

_MAX_VARINT: Final = 10
"""Bytes of the longest varint, which has 64 bits, 7 in each byte."""


def _encode(mesh: list[int], tasks: int, devices: int, coordinates: list[int]) -> bytes:
    """Encodes the fields of a ``TopologyProto``, which are not negative."""
    return b"".join(
        (
            _packed(_MESH, mesh),
            _number(_TASKS, tasks),
            _number(_DEVICES, devices),
            _packed(_COORDINATES, coordinates),
        )
    )


def _decode(data: bytes) -> tuple[list[int], int, int, list[int]]:
    """Decodes the fields of a ``TopologyProto``; the inverse of `_encode`.

    Raises:
        ValueError: The bytes are not such a message; the error names the position of
            the first wrong byte.
    """
    found: dict[int, list[int]] = {}
    for field, kind, value in _fields(data):
        if field > _COORDINATES or kind in (_FIXED64, _FIXED32):
            continue
        if isinstance(value, int):
            found.setdefault(field, []).append(value)
        elif field in (_MESH, _COORDINATES):
            found.setdefault(field, []).extend(_numbers(value))
    # Of a number that comes twice protocol buffers take the last one, and they leave
    # out a zero; repeated fields are joined.
    return (
        found.get(_MESH, []),
        found.get(_TASKS, [0])[-1],
        found.get(_DEVICES, [0])[-1],
        found.get(_COORDINATES, []),
    )


def _packed(field: int, values: Iterable[int]) -> bytes:
    body = b"".join(_varint(value) for value in values)
    return _varint(field << 3 | _BYTES) + _varint(len(body)) + body if body else b""


def _number(field: int, value: int) -> bytes:
    # A zero is what is not there.
    return _varint(field << 3 | _VARINT) + _varint(value) if value else b""


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def _fields(data: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    at = 0
    while at < len(data):
        tag, at = _read(data, at)
        field, kind = tag >> 3, tag & 7
        value: int | bytes
        if kind == _VARINT:
            value, at = _read(data, at)
        else:
            # Unknown fields are skipped by their length, whatever they hold. Groups (3
            # and 4) have none; version 3 does not write them.
            size = {_FIXED64: 8, _FIXED32: 4}.get(kind)
            if kind == _BYTES:
                size, at = _read(data, at)
            if size is None or not field or size > len(data) - at:
                raise _no_topology(data, at)
            value, at = data[at : at + size], at + size
        yield field, kind, value


def _numbers(data: bytes) -> Iterator[int]:
    at = 0
    while at < len(data):
        value, at = _read(data, at)
        yield value


def _read(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for n, byte in enumerate(data[at : at + _MAX_VARINT]):
        value |= (byte & 0x7F) << 7 * n
        if byte < 0x80:
            # Negative numbers are sent as 64 bits of two's complement.
            return value - (1 << 64) if value >> 63 else value, at + n + 1
    raise _no_topology(data, at)


def _no_topology(data: bytes, at: int) -> ValueError:
    return ValueError(
        f"serialized topology: expected the result of Topology.serialized(), got "
        f"{len(data)} bytes that are malformed at byte {at}"
    )


_FASTEST_FIRST: Final = (3, 0, 1, 2)
"""The order in which coordinates change: the cores of a chip first, then x, y, z."""


def initialize_tpu_system(
    cluster_resolver: ClusterResolver | None = None,
    *,
    mesh_shape: Sequence[int] | None = None,
) -> Topology:
    """Returns the topology of the cores of all processes of this jax job.

    The call initializes jax if it is not initialized yet, and nothing else. Task ``t``
    is process ``t`` of jax; its devices are numbered by their ids.

    Args:
        cluster_resolver: The resolver of the system. It is not queried, as jax finds
            the devices. A `TPUClusterResolver` gets the topology.
        mesh_shape: Extents ``[4]`` (x, y, z, cores per chip) of the mesh for devices
            without coordinates, such as CPUs; their product is the number of devices,
            which are placed core by core, then along x, y and z. Default: ``[1, 1, 1,
            n]``, one chip with all devices.

    Raises:
        TypeError: ``cluster_resolver`` is not a resolver.
        ValueError: ``mesh_shape`` does not fit the number of devices, or the devices
            are TPUs with another mesh; or the processes have different numbers of
            devices.
    """
    if cluster_resolver is not None and not isinstance(
        cluster_resolver, ClusterResolver
    ):
        raise TypeError(
            "cluster_resolver must be a ClusterResolver or None, got "
            f"{type(cluster_resolver).__name__}"
        )
    topology = _of_devices(devices_by_task(), mesh_shape)
    if isinstance(cluster_resolver, TPUClusterResolver):
        cluster_resolver.set_tpu_topology(topology.serialized())
    return topology


def _of_devices(
    tasks: Sequence[Sequence[Any]], mesh_shape: Sequence[int] | None
) -> Topology:
    counts = [len(devices) for devices in tasks]
    if len(set(counts)) > 1:
        raise ValueError(
            f"the processes of this job have {counts} devices: expected the same "
            "number in each"
        )
    # Only if all have coordinates; a mesh of some would have holes that are cores.
    places = [[_place(device) for device in devices] for devices in tasks]
    found = np.array([[p for p in row if p is not None] for row in places], np.int64)
    if found.shape == (len(tasks), counts[0], RANK):
        return _of_places(found, mesh_shape)
    return _laid_out(len(tasks), counts[0], mesh_shape)


def devices_by_task() -> list[list[jax.Device]]:
    """Returns the devices of each process: ``[task][ordinal]``."""
    import jax

    rows: list[list[jax.Device]] = [[] for _ in range(jax.process_count())]
    for device in sorted(jax.devices(), key=lambda device: device.id):
        rows[device.process_index].append(device)
    return rows


def _place(device: Any) -> tuple[int, ...] | None:
    """Returns the coordinates of a device, None if it has no coordinates."""
    if device.platform != "tpu":
        return None
    return (*device.coords, device.core_on_chip)


def _of_places(places: np.ndarray, asked: Sequence[int] | None) -> Topology:
    # A slice of a system may begin at any coordinates.
    places = places - places.min(axis=(0, 1))
    mesh = (places.max(axis=(0, 1)) + 1).tolist()
    if asked is not None and list(asked) != mesh:
        raise ValueError(
            f"mesh_shape={list(asked)}: the mesh of these TPUs is {mesh}; omit the "
            "argument"
        )
    return Topology(mesh_shape=mesh, device_coordinates=places)


def _laid_out(tasks: int, devices: int, asked: Sequence[int] | None) -> Topology:
    count = tasks * devices
    mesh = [1, 1, 1, count] if asked is None else [int(extent) for extent in asked]
    if len(mesh) == RANK and math.prod(mesh) != count:
        raise ValueError(
            f"mesh_shape={mesh}: expected a product of {count}, the number of devices, "
            f"got {math.prod(mesh)} "
            "(XLA_FLAGS=--xla_force_host_platform_device_count=N makes N virtual CPU "
            "devices)"
        )
    places = np.zeros((count, RANK), np.int64)
    if len(mesh) == RANK:
        left = np.arange(count)
        for axis in _FASTEST_FIRST:
            # An extent below 1 is refused by `Topology`, in better words.
            left, places[:, axis] = np.divmod(left, max(1, mesh[axis]))
    return Topology(
        mesh_shape=mesh, device_coordinates=places.reshape(tasks, devices, RANK)
    )


def experimental_connect_to_cluster(
    cluster_spec_or_resolver: ClusterSpec | ClusterResolver,
) -> None:
    """Checks that this process can use the devices of the cluster.

    A process can always use the devices of its own host. In TensorFlow one client can
    use the devices of other hosts; in jax each host runs the program, and
    `jax.distributed.initialize` connects the processes before their first use of a
    device. The additional coordinator of a `TPUClusterResolver` has no devices.

    Raises:
        ValueError: The argument is neither a spec nor a resolver.
        RuntimeError: The cluster has several tasks, but this jax job has another number
            of processes.
    """
    if isinstance(cluster_spec_or_resolver, ClusterSpec):
        spec = cluster_spec_or_resolver
    elif isinstance(cluster_spec_or_resolver, ClusterResolver):
        spec = cluster_spec_or_resolver.cluster_spec()
    else:
        raise ValueError(
            "`cluster_spec_or_resolver` must be a `ClusterSpec` or a `ClusterResolver`,"
            f" got {type(cluster_spec_or_resolver).__name__}"
        )
    # Only the job of the hosts with devices: a coordinator beside it joins no jax job.
    jobs = spec.jobs
    if isinstance(cluster_spec_or_resolver, TPUClusterResolver):
        jobs = [job for job in jobs if job == cluster_spec_or_resolver.get_job_name()]
    tasks = sum(spec.num_tasks(job) for job in jobs)
    if tasks <= 1:
        return
    import jax

    # Asked of jax.distributed first: `process_count` alone would initialize devices,
    # after which the processes could not be connected any longer.
    joined = jax.process_count() if jax.distributed.is_initialized() else 1
    if joined != tasks:
        raise RuntimeError(
            f"the cluster has {tasks} tasks, but this jax job has {joined} "
            "process(es): call jax.distributed.initialize(coordinator_address, "
            f"num_processes={tasks}, process_id) in each task before using jax"
        )

"""The TPU system of this process: the topology of the devices of jax.

A TPU device has coordinates. Other devices are placed in a mesh whose shape the caller
chooses, so that a program for many cores can run and be tested on virtual CPU devices.
TensorFlow requires a call that connects a resolver to its TPU system; it exists here
for compatibility, and jax needs no call.

Law of the file: functions import jax when they are called, so that importing this
module initializes no devices.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from zstrat.cluster import ClusterResolver, ClusterSpec, TPUClusterResolver

from ._topology import RANK, Topology

if TYPE_CHECKING:
    from collections.abc import Sequence

    import jax

_FASTEST_FIRST: Final = (3, 0, 1, 2)
"""The order of coordinates: the cores of a chip first, then x, y, z."""


def initialize_tpu_system(
    cluster_resolver: ClusterResolver | None = None,
    *,
    mesh_shape: Sequence[int] | None = None,
) -> Topology:
    """Returns the topology of the cores of all processes of this jax job.

    Only jax is initialized, if it is not yet. Task ``t`` is process ``t`` of jax; its
    devices are numbered by their ids.

    Args:
        cluster_resolver: The resolver of the system. It is not queried, as jax finds
            the devices; the topology is set on a `TPUClusterResolver`.
        mesh_shape: Extents ``[4]`` (x, y, z, cores per chip) of the mesh for devices
            without coordinates, such as CPUs; their product is the number of devices,
            which are placed core by core, then along x, y and z. Default:
            ``[1, 1, 1, n]``, one chip with all devices.

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
    jobs = spec.jobs
    if isinstance(cluster_spec_or_resolver, TPUClusterResolver):
        jobs = [job for job in jobs if job == cluster_spec_or_resolver.get_job_name()]
    tasks = sum(spec.num_tasks(job) for job in jobs)
    if tasks <= 1:
        return
    import jax

    joined = jax.process_count() if jax.distributed.is_initialized() else 1
    if joined != tasks:
        raise RuntimeError(
            f"the cluster has {tasks} tasks, but this jax job has {joined} "
            "process(es): call jax.distributed.initialize(coordinator_address, "
            f"num_processes={tasks}, process_id) in each task before using jax"
        )

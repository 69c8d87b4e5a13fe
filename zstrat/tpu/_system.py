"""The TPU system of this process: the topology of the devices that jax has.

A TPU tells where it is. Other devices do not, and have no place: they are laid into a
mesh of a shape that the caller chooses, so that a program for many cores runs, and is
tested, on the virtual devices of one processor. TF has a call between a resolver and
its TPU system; it is here, and jax has nothing to do in it.

Law of the file: jax is imported when a function is called, so that importing this
chooses no devices.
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
"""In which order places are distributed: the cores of a chip, then along x, y, z."""


def initialize_tpu_system(
    cluster_resolver: ClusterResolver | None = None,
    *,
    mesh_shape: Sequence[int] | None = None,
) -> Topology:
    """The cores that there are, of all processes of this job of jax.

    Nothing is initialized: jax has done that, or does it now. Task ``t`` is process
    ``t`` of jax; its devices are numbered by their ids.

    Args:
        cluster_resolver: Of the system. jax finds it by itself, so nothing is asked of
            it; a `TPUClusterResolver` is told the topology.
        mesh_shape: Extents ``[4]`` (x, y, z, cores per chip) of the mesh for devices
            that have no places, such as CPUs; as many places as there are devices. They
            are laid into it core by core, then along x, y and z. Left out:
            ``[1, 1, 1, n]``, one chip with all.

    Raises:
        TypeError: ``cluster_resolver`` is no resolver.
        ValueError: ``mesh_shape`` does not fit the number of devices, or the devices
            are TPUs and their mesh is another one; or the processes have different
            numbers of devices.
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
            f"the processes of this job have {counts} devices: a topology needs as "
            "many in each"
        )
    places = [[_place(device) for device in devices] for devices in tasks]
    found = np.array([[p for p in row if p is not None] for row in places], np.int64)
    if found.shape == (len(tasks), counts[0], RANK):
        return _of_places(found, mesh_shape)
    return _laid_out(len(tasks), counts[0], mesh_shape)


def devices_by_task() -> list[list[jax.Device]]:
    """The devices of each process, by number: ``[task][ordinal]``."""
    import jax

    rows: list[list[jax.Device]] = [[] for _ in range(jax.process_count())]
    for device in sorted(jax.devices(), key=lambda device: device.id):
        rows[device.process_index].append(device)
    return rows


def _place(device: Any) -> tuple[int, ...] | None:
    """Where a device is, None for one that has no place."""
    if device.platform != "tpu":
        return None
    return (*device.coords, device.core_on_chip)


def _of_places(places: np.ndarray, asked: Sequence[int] | None) -> Topology:
    # A slice of a system may begin anywhere in it.
    places = places - places.min(axis=(0, 1))
    mesh = (places.max(axis=(0, 1)) + 1).tolist()
    if asked is not None and list(asked) != mesh:
        raise ValueError(
            f"mesh_shape={list(asked)}: the mesh of these TPUs is {mesh}; leave it out"
        )
    return Topology(mesh_shape=mesh, device_coordinates=places)


def _laid_out(tasks: int, devices: int, asked: Sequence[int] | None) -> Topology:
    count = tasks * devices
    mesh = [1, 1, 1, count] if asked is None else [int(extent) for extent in asked]
    if len(mesh) == RANK and math.prod(mesh) != count:
        raise ValueError(
            f"mesh_shape={mesh} has {math.prod(mesh)} places for {count} devices: give "
            "as many (XLA_FLAGS=--xla_force_host_platform_device_count=N makes N "
            "virtual devices of a CPU)"
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
    """Makes sure that this process reaches the devices of the cluster.

    Those of its own host it has, as soon as it uses jax; nothing is connected then.
    TensorFlow lets one client use the devices of other hosts. In jax each host runs the
    program: `jax.distributed.initialize` brings the processes together, before their
    first use of a device. Of a TPU these are its own hosts; the coordinator that a
    `TPUClusterResolver` may name beside them has no device.

    Raises:
        ValueError: The argument is neither a spec nor a resolver.
        RuntimeError: The cluster has several tasks, and the processes of this job of
            jax are not as many.
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
            f"the cluster has {tasks} tasks, and {joined} process(es) of jax are "
            "together: call jax.distributed.initialize(coordinator_address, "
            f"num_processes={tasks}, process_id) in each of them before jax is used"
        )

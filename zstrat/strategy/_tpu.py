"""Synchronous training on TPU cores, of which each replica may have several.

Replicas and logical devices are axes of one mesh, and the replicas are one program over
the mesh, compiled by XLA. The same code runs on other devices, including the virtual
devices of a CPU.
"""

from __future__ import annotations

import contextlib
import functools
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, final

import jax
import numpy as np

from zstrat.cluster import ClusterResolver, TPUClusterResolver
from zstrat.program import Function, in_python_step
from zstrat.tpu import devices_by_task
from zstrat.tpu.experimental import DeviceAssignment
from zstrat.variables import AbstractVariable, IndexedSlices, is_staging, recorder

from ._devices import task_names
from ._extended import StrategyExtended
from ._local_strategy import LocalStrategy
from ._logical_devices import LogicalDevices, logical_axes
from .mirrored._mirrored_store import MirroredVariables
from .replica._local_run import LocalMesh
from .replica._per_replica import is_distributed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ._strategy import Strategy
    from .input._inputs import ProcessInputs


_entered: Final[ContextVar[tuple[tuple[TPUExtended, int], ...]]] = ContextVar(
    "zstrat_logical_devices", default=()
)
"""Strategies and their current logical devices, the innermost one last. One stack
serves all strategies, as a separate context variable would outlive its strategy. Law of
the file: code that sets this variable resets it."""


@final
class TPUExtended(StrategyExtended):
    """``extended`` of a `TPUStrategy`: its devices and hosts.

    Args:
        devices: The devices of each replica.
        assignment: The assignment by which they were chosen; None: all devices are
            used.
        variables: The creator of variables.
        hosts: The hosts of the whole system, with their numbers of cores.
    """

    experimental_require_static_shapes = True

    def __init__(
        self,
        strategy: Strategy,
        devices: LogicalDevices,
        assignment: DeviceAssignment | None,
        variables: MirroredVariables,
        hosts: tuple[int, int],
    ) -> None:
        super().__init__(strategy, (), (), variables.owns)
        self._devices = devices
        self._assignment = assignment
        self._hosts, self._cores_per_host = hosts

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The current logical device of each replica, in replica order."""
        return task_names(self._devices.devices[:, self._current()].tolist())

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The `worker_devices`: each replica has a copy of every variable on all its
        devices."""
        return self.worker_devices

    @property
    def num_hosts(self) -> int:
        """Number of hosts on which replicas run."""
        if self._assignment is None:
            return self._hosts
        numbers = range(self._assignment.num_replicas)
        return len({self._assignment.host_device(replica) for replica in numbers})

    @property
    def num_replicas_per_host(self) -> int:
        """Number of replicas that fit on a host, at most the number of all replicas."""
        if self._assignment is None:
            return self._cores_per_host
        room = self._cores_per_host // self._assignment.num_cores_per_replica
        return min(self._assignment.num_replicas, room)

    @contextlib.contextmanager
    def experimental_logical_device(self, logical_device_id: int) -> Iterator[None]:
        """Makes a logical device current in the context: `worker_devices` names this
        one.

        Variables that are created inside are on all logical devices, like all others.

        Raises:
            ValueError: There is no such logical device.
        """
        if not 0 <= logical_device_id < self._devices.count:
            raise ValueError(
                f"`logical_device_id` not in range (was {logical_device_id}, but there "
                f"are only {self._devices.count} logical devices per replica)."
            )
        before = _entered.set((*_entered.get(), (self, logical_device_id)))
        try:
            yield
        finally:
            _entered.reset(before)

    def _current(self) -> int:
        """Returns the current logical device of this strategy."""
        own = [number for whose, number in _entered.get() if whose is self]
        return own[-1] if own else 0


_TENSORS = (
    jax.Array,
    np.ndarray,
    np.generic,
    int,
    float,
    complex,
    AbstractVariable,
    IndexedSlices,
)


@final
class TPUStrategy(LocalStrategy):
    """Synchronous training on TPUs.

    Each replica has a copy of every variable, and gradients are summed over the
    replicas. With a device assignment a replica has several *logical devices*, over
    which its values may be split.

    TensorFlow can put one operation on one logical device. XLA distributes a program
    over all devices of a mesh, so here every logical device computes all values that
    are not split, and an annotation says how a value is split, not which device
    computes it. The resulting values are the same.

    Args:
        tpu_cluster_resolver: The resolver of the TPU. Default: the TPU of this machine.
        experimental_device_assignment: The cores of each replica. Default: each core is
            a replica.
        experimental_spmd_xla_partitioning: Whether assigning a value to one logical
            device is an error. It has no other effect, as programs are always SPMD
            here.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The assignment was made for a system with other devices.
        NotImplementedError: Some replicas are on devices of other processes.
    """

    def __init__(
        self,
        tpu_cluster_resolver: ClusterResolver | None = None,
        experimental_device_assignment: DeviceAssignment | None = None,
        experimental_spmd_xla_partitioning: bool = False,
    ) -> None:
        resolver, assignment = tpu_cluster_resolver, experimental_device_assignment
        if resolver is not None and not isinstance(resolver, ClusterResolver):
            raise TypeError(
                "tpu_cluster_resolver must be a ClusterResolver or None, got "
                f"{type(resolver).__name__}"
            )
        if assignment is not None and not isinstance(assignment, DeviceAssignment):
            raise TypeError(
                "experimental_device_assignment must be a DeviceAssignment or None, "
                f"got {type(assignment).__name__}: use DeviceAssignment.build"
            )
        tasks = devices_by_task()
        devices = _assigned(tasks, assignment)
        _require_own(devices)
        self._resolver = resolver or TPUClusterResolver("local")
        self._logical = LogicalDevices(
            devices, is_spmd=bool(experimental_spmd_xla_partitioning)
        )
        axes = logical_axes(self._logical.count)
        # TF compiles whatever runs on a TPU, so a function that cannot be traced is
        # refused.
        self._mesh = LocalMesh(self, self._logical.grid, axes, is_compiled=True)
        self._variables = MirroredVariables(
            devices.ravel().tolist(),
            self._mesh.team,
            over=self._mesh.mesh,
            names=task_names(self._mesh.devices),
        )
        hosts = len(tasks), len(tasks[0])
        self._extended: TPUExtended = TPUExtended(
            self, self._logical, assignment, self._variables, hosts
        )

    @property
    def extended(self) -> TPUExtended:
        return self._extended

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The resolver that was given, otherwise one of the TPU of this machine."""
        return self._resolver

    def experimental_assign_to_logical_device(
        self, tensor: Any, logical_device_id: int
    ) -> Any:
        """Assigns a tensor to a logical device.

        jax has no public way to place a value on only one device of a mesh. So the
        whole value is placed on *all* logical devices of the replica, including this
        one, and the number is recorded as a name in the compiled program.

        Args:
            tensor: An array.
            logical_device_id: In ``[0, number of logical devices)``.

        Raises:
            ValueError: The strategy was made with
                ``experimental_spmd_xla_partitioning=True``, or there is no such logical
                device.
        """
        return self._logical.assigned(tensor, logical_device_id)

    def experimental_split_to_logical_devices(
        self, tensor: Any, partition_dimensions: Sequence[int]
    ) -> Any:
        """Splits the tensor into tiles, one on each logical device, row by row.

        The gradient of the result is split in the same way. If the number of devices
        has several prime factors, one order of the devices does not fit all splits (of
        6: ``[2, 3]`` and ``[3, 2]``); for some splits the tiles are on the devices in
        another order.

        Args:
            tensor: An array.
            partition_dimensions: The number of parts into which each dimension is
                split.

        Raises:
            ValueError: ``partition_dimensions`` does not have one entry for each
                dimension, an entry does not divide its dimension, or their product is
                not the number of logical devices.
        """
        return self._logical.split(tensor, partition_dimensions)

    def experimental_replicate_to_logical_devices(self, tensor: Any) -> Any:
        """Places the whole tensor on every logical device."""
        return self._logical.replicated(tensor)

    def _inputs(self) -> ProcessInputs:
        return replace(
            super()._inputs(), place=self._mesh.layout.place_share, static_shapes=True
        )

    def _run_replicas(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        result = super()._run_replicas(_traced(fn), args, kwargs)
        for leaf in jax.tree.leaves(result, is_leaf=is_distributed):
            if not isinstance(leaf, _TENSORS) and not is_distributed(leaf):
                raise TypeError(
                    "a function that TPUStrategy runs must return a nest of tensors; "
                    f"{leaf!r:.80} ({type(leaf).__name__}) is not a tensor: return "
                    "arrays, numbers or None"
                )
        return result

    def __repr__(self) -> str:
        return (
            f"<zstrat.TPUStrategy: {self._logical.replicas} replicas of "
            f"{self._logical.count} logical devices>"
        )


def _assigned(
    tasks: Sequence[Sequence[jax.Device]], assignment: DeviceAssignment | None
) -> np.ndarray:
    """Returns the devices of the replicas, ``[replicas, logical devices]``."""
    if assignment is None:
        # TF's rule: without an assignment each core is a replica by itself.
        every = [device for devices in tasks for device in devices]
        return np.array(every, object)[:, None]
    topology = assignment.topology
    there = [len(devices) for devices in tasks]
    # An assignment that was built elsewhere would name devices by numbers of another
    # system.
    if there != [topology.num_tpus_per_task] * topology.num_tasks:
        raise ValueError(
            "experimental_device_assignment is of a system with "
            f"{topology.num_tasks} tasks of {topology.num_tpus_per_task} devices, and "
            f"the processes of this job have {there}: build it from what "
            "initialize_tpu_system returns here"
        )
    shape = assignment.num_replicas, assignment.num_cores_per_replica
    chosen = np.empty(shape, object)
    for replica, core in np.ndindex(shape):
        place = assignment.coordinates(replica, core)
        task = topology.task_ordinal_at_coordinates(place)
        chosen[replica, core] = tasks[task][assignment.tpu_ordinal(replica, core)]
    return chosen


def _require_own(devices: np.ndarray) -> None:
    others = sorted({d.process_index for d in devices.flat} - {jax.process_index()})
    if others:
        raise NotImplementedError(
            f"TPUStrategy runs on the devices of one process; this is process "
            f"{jax.process_index()} of jax, and replicas have devices of {others}: "
            "assign devices of this process alone, or use "
            "MultiWorkerMirroredStrategy with implementation=XLA over all processes"
        )


def _traced(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function; in a step that runs in Python because of its loops, returns
    a step function that traces it.

    Raises:
        NotImplementedError: The function would not be traced.
    """
    recording = recorder.get()
    if is_staging() or (recording is not None and not recording.live):
        return fn
    plain = fn
    # A partial of a step function is traced as the function is.
    while isinstance(plain, functools.partial):
        plain = plain.func
    if isinstance(plain, Function) and not plain.eager and recording is None:
        return fn
    if in_python_step.get() and recording is None and not isinstance(plain, Function):
        return Function(fn)
    raise NotImplementedError(
        "TPUStrategy.run(fn, ...) does not support pure eager execution. please make "
        "sure the function passed into `strategy.run` is a `zs.function` or "
        "`strategy.run` is called inside a `zs.function`, which is not eager itself"
    )

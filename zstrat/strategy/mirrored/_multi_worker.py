"""Synchronous training of several processes, with or without one job of XLA.

Every process has a copy of all variables, and runs the same program on its own data. A
step is compiled around its collectives: a program that ends in gradients, their sum
over all replicas, a program that applies it (`zstrat.program.stages._stages`).

In one job of XLA, rank 0 is the coordinator of `jax.distributed`: it takes a free port
of its address in the cluster and announces it through the group. That port does not
authenticate anyone, so the address must not be reachable from the internet.

Where the program has initialized jax.distributed itself, the processes learn of each
other through jax, and need no other cluster.

Law: jax.distributed is initialized once in a process, before its first use of any
device; the job cannot be formed again while the process lives.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, final

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from zstrat.cluster import (
    Launch,
    TFConfigClusterResolver,
    detect,
    free_ports,
    host_and_port,
    id_in_cluster,
    launched_together,
    query_cluster_spec,
    resolver_of,
    validate_cluster_spec,
    worker_count,
)
from zstrat.collectives import Group
from zstrat.config import environment
from zstrat.program import hide_frames
from zstrat.program.stages import PROCESS, Channel
from zstrat.strategy._devices import task_names
from zstrat.strategy._extended import StrategyExtended
from zstrat.strategy._options import ChosenGroup, CommunicationOptions
from zstrat.strategy._strategy import Closing, Strategy
from zstrat.strategy.replica._collective import AXIS, Team
from zstrat.strategy.replica._local_run import MeshLayout
from zstrat.strategy.replica._mapped import mesh_over

from ._mirrored_store import MirroredVariables

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zstrat.cluster import ClusterResolver, ClusterSpec
    from zstrat.program.stages import Collective
    from zstrat.strategy.input._inputs import ProcessInputs
    from zstrat.variables import Creator


_MAX_ANNOUNCED_BYTES: Final = 1024
"""Bytes of an announcement: more than an address, or an error, has."""
_NOWHERE: Final = (
    (socket.AF_INET, "192.0.2.1"),
    (socket.AF_INET6, "2001:db8::1"),
)
"""Reserved addresses (RFC 5737, RFC 3849): the route there starts as the route to the
others does."""
_REFUSAL: Final = "!"
"""The prefix of an error, which no address begins with."""


def is_in_job() -> bool:
    """Returns whether jax has connected this process with others."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def resolver_of_jax() -> ClusterResolver:
    """Returns the cluster of the processes that jax has connected: all are workers, in
    the order of jax. Each takes a free port and announces it; all have to call this."""
    host = _own_address()
    (port,) = free_ports(1, "::" if ":" in host else "0.0.0.0")
    gathered = multihost_utils.process_allgather(
        _sent(f"{socket.gethostname()} {host} {port}")
    )
    announced = [_received(row).split() for row in np.asarray(gathered)]
    # All on one host: its loopback suffices, which is not reachable from outside.
    if len({(name, host) for name, host, _ in announced}) == 1:
        announced = [[name, "127.0.0.1", port] for name, _, port in announced]
    addresses = tuple(host_and_port(host, port) for _, host, port in announced)
    count, index = jax.process_count(), jax.process_index()
    return resolver_of(Launch("jax.process_count()", "", count, index, addresses))


def _own_address() -> str:
    """Returns the address of this host that it sends from, where others reach it. Sends
    nothing."""
    for family, nowhere in _NOWHERE:
        # No route by IPv4, or no IPv6 at all: try the other family, or use the
        # loopback.
        with (
            contextlib.suppress(OSError),
            socket.socket(family, socket.SOCK_DGRAM) as probe,
        ):
            # Connecting a socket of datagrams sends nothing: it only chooses the route.
            # Port 9 is that of `discard`.
            probe.connect((nowhere, 9))
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def _sent(text: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    sent = np.zeros(_MAX_ANNOUNCED_BYTES, np.uint8)
    raw = text.encode()[:_MAX_ANNOUNCED_BYTES]
    sent[: len(raw)] = np.frombuffer(raw, np.uint8)
    return sent


def _received(row: np.ndarray[Any, np.dtype[np.uint8]]) -> str:
    return row.tobytes().rstrip(b"\0").decode(errors="replace")


def join_job(collective: Collective, host: str, timeout: float) -> Mesh:
    """Forms the job, or takes the existing one; returns the devices of all processes,
    one row for each rank.

    Args:
        host: Where rank 0 listens.
        timeout: Seconds to wait for the other processes.

    Raises:
        ValueError: The address is not a loopback or private one. Raised in every
            process.
        OSError: Rank 0 cannot listen there. Raised in rank 0.
        RuntimeError: jax was used before, or another job has been formed, or the
            processes have different numbers of devices.
    """
    # The program may have formed it, or a strategy before this one.
    if not jax.distributed.is_initialized():
        address = _broadcast_address(collective, host)
        jax.distributed.initialize(
            address,
            collective.size,
            collective.rank,
            # jax would listen on every interface, and it authenticates nobody.
            coordinator_bind_address=address if collective.rank == 0 else None,
            initialization_timeout=max(1, int(timeout)),
        )
    return _mesh(collective)


def require_private(host: str) -> None:
    """Refuses an address that is reachable from the public internet.

    Raises:
        ValueError: It is public, or cannot be resolved.
    """
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError as error:
        raise ValueError(
            f"implementation=XLA: the address {host!r} of the first task cannot be "
            f"resolved here ({error}): give it as a number in the cluster"
        ) from error
    public = [x for x in found if not ipaddress.ip_address(x).is_private]
    if public:
        raise ValueError(
            f"implementation=XLA: the first task has the public address {public[0]}, "
            "and jax.distributed does not authenticate those who connect: give the "
            "address of a private network in the cluster, or use implementation=RING"
        )


def _broadcast_address(collective: Collective, host: str) -> str:
    """Sends the address of the coordinator from rank 0, or why there is no address:
    no process should wait for one that has given up."""
    refused: Exception | None = None
    text = ""
    if collective.rank == 0:
        try:
            text = _address(host)
        except (ValueError, OSError) as error:
            refused, text = error, f"{_REFUSAL}{error}"
    received = np.asarray(collective.broadcast([_sent(text)], 0)[0])
    if refused is not None:
        raise refused
    result = _received(received)
    if result.startswith(_REFUSAL):
        raise ValueError(f"rank 0 formed no job of XLA: {result[len(_REFUSAL) :]}")
    return result


def _address(host: str) -> str:
    require_private(host)
    (port,) = free_ports(1, host)
    return host_and_port(host, port)


def _mesh(collective: Collective) -> Mesh:
    if (jax.process_index(), jax.process_count()) != (collective.rank, collective.size):
        raise RuntimeError(
            f"this process is {jax.process_index()} of {jax.process_count()} of a job "
            f"of jax.distributed, and rank {collective.rank} of {collective.size} of "
            "the strategy: leave jax.distributed.initialize to the strategy"
        )
    rows: list[list[Any]] = [[] for _ in range(collective.size)]
    # By id, so that all processes make the same mesh.
    for device in sorted(jax.devices(), key=lambda device: device.id):
        rows[device.process_index].append(device)
    counts = [len(row) for row in rows]
    if len(set(counts)) > 1:
        raise RuntimeError(
            f"the processes have {counts} devices: implementation=XLA needs as many in "
            "each"
        )
    return Mesh(np.array(rows), (PROCESS, AXIS))


_NAME: Final = "MultiWorkerMirroredStrategy"
"""Name of the group: processes that make one find each other by it."""

_START_TIMEOUT: Final = 300.0
"""Seconds for all processes to start; the default of jax."""


def _group(resolver: ClusterResolver, options: CommunicationOptions) -> Collective:
    try:
        group = Group(
            resolver,
            name=_NAME,
            timeout=options.timeout_seconds,
            bytes_per_pack=options.bytes_per_pack,
        )
    except Exception as error:  # to the caller
        hide_frames(error)
        raise
    return ChosenGroup(group, options)


@final
class MultiWorkerMirroredStrategy(Strategy, Closing):
    """Synchronous training over the processes of a cluster.

    Blocks until all of them are there. Variables created in `scope` are copies of those
    of the first process; `run` runs on this process's devices, and gradients are summed
    over all replicas of all processes.

    Args:
        cluster_resolver: Knows the tasks of the cluster and which one this is. Left
            out: TF_CONFIG does; else jax, if `jax.distributed.initialize` was called;
            else the launcher of the processes (`zs.cluster_resolver.detect`). An empty
            cluster is this process alone.
        communication_options: How the processes exchange what they reduce.
        group: Connects the processes; another function in tests.

    Raises:
        ValueError: The cluster does not know this task, or the task does not train; or
            this process is one of several that were started together, and the addresses
            of the others are unknown.
        CollectiveTimeoutError: A process does not come; names it.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        group: Callable[[ClusterResolver, CommunicationOptions], Collective] = _group,
    ) -> None:
        resolver = cluster_resolver or _found()
        options = communication_options or CommunicationOptions()
        spec = query_cluster_spec(resolver)
        if not spec and isinstance(resolver, TFConfigClusterResolver):
            _require_alone(environment())
        _require_all(resolver)
        task, saves = _task(resolver)
        self._resolver = resolver
        self._options = options
        self._channel: Channel | None = None
        if spec and worker_count(spec, task[0]) > 1:
            collective = group(resolver, options)
            mesh = None
            if options.is_xla:
                host = _host(spec.task_address(*_first(spec)))
                mesh = join_job(
                    collective, host, options.timeout_seconds or _START_TIMEOUT
                )
            self._channel = Channel(collective, mesh)
        # After the job was formed, because asking jax for devices starts its backends.
        self._local = tuple(jax.local_devices())
        # A later generation: the others have made steps, and this process joins them.
        late = self._channel is not None and self._channel.collective.generation > 0
        names = task_names(self._local, *task)
        self._variables = MirroredVariables(
            self._local, self._team(), names=names, is_late=late
        )
        self._extended = StrategyExtended(
            self, names, names, self._variables.owns, between_graph=True, saves=saves
        )

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The one that was given, else one of TF_CONFIG."""
        return self._resolver

    @property
    def communication_options(self) -> CommunicationOptions:
        """The options of collectives between the processes."""
        return self._options

    @property
    def num_replicas_in_sync(self) -> int:
        """Devices of all processes."""
        return self._team().size

    @property
    def extended(self) -> StrategyExtended:
        """Devices of this process, whether it saves, and values reduced over all
        processes."""
        return self._extended

    def reform(self, *, timeout: float | None = None) -> None:
        """Connects the processes again after one was lost, restarted or cut off; blocks
        until all of them are there.

        Processes that were not lost call it when a step has raised `PeerLostError`,
        `CollectiveTimeoutError` or `UnavailableError`; such a step has changed nothing.
        A restarted process makes its strategy and its variables as before. All then
        have the values, and the state of optimizers, of the process that had made the
        most steps; the restarted one has them before it first uses a variable. All
        processes, also those that were not lost, begin fresh passes of their datasets
        (``iter()``) after it: an older iterator waits for answers that the restarted
        process does not give. Where they shard a dataset that is shuffled again in each
        pass, they make it again from its ``shuffle`` on and distribute it again: the
        restarted process begins with its first order, and a pass in different orders is
        refused.

        Args:
            timeout: Seconds to wait for all processes.

        Raises:
            RuntimeError: With implementation=XLA: a job of jax cannot be formed again.
            CollectiveTimeoutError: Not all processes came in time; names the missing
                ones. It may be called again.
        """
        if self._channel is None:
            return
        if self._channel.mesh is not None:
            raise RuntimeError(
                "a strategy with implementation=XLA cannot be formed again, because "
                "jax cannot: start all processes again, and restore a checkpoint"
            )
        # First the connection, on which the values then travel.
        self._channel.collective.reform(timeout=timeout)
        self._variables.take_over()

    def close(self) -> None:
        """Leaves the other processes, whose next collective fails. Closing twice is
        fine; ``with`` closes at its end."""
        if self._channel is not None:
            self._channel.collective.close()

    def _creator(self) -> Creator | None:
        return self._variables

    def _devices(self) -> Sequence[jax.Device]:
        return self._local

    def _team(self) -> Team:
        return Team(len(self._local), self._channel)

    def _inputs(self) -> ProcessInputs:
        inputs, channel = super()._inputs(), self._channel
        if channel is not None:
            inputs = replace(inputs, all_max=partial(_all_max, channel))
        if len(self._local) == 1 or (channel is not None and channel.mesh is not None):
            return inputs  # a program of all processes takes the rows of each
        layout = MeshLayout(mesh_over(self._local))
        return replace(inputs, place=layout.place_share)

    def __repr__(self) -> str:
        team = self._team()
        return (
            f"<zstrat.MultiWorkerMirroredStrategy: rank {team.first // team.local} of "
            f"{team.size // team.local}, {team.local} devices>"
        )


def _all_max(channel: Channel, numbers: Sequence[int]) -> list[int]:
    """Reduces numbers with the collective that the processes reduce values with."""
    given = [np.array(numbers, np.int64)]
    (largest,) = channel.collective.all_reduce(given, "max")
    return [int(number) for number in largest]


def _first(spec: ClusterSpec) -> tuple[str, int]:
    """Returns the task of rank 0."""
    job = "chief" if "chief" in spec.jobs else "worker"
    return job, spec.task_indices(job)[0]


# Without the scheme, the port, and the brackets of IPv6.
def _host(address: str) -> str:
    host = address.rpartition("://")[2].rpartition(":")[0]
    return host.removeprefix("[").removesuffix("]")


def _found() -> ClusterResolver:
    """Returns the resolver of a program that gives none."""
    if is_in_job() and not environment().get("TF_CONFIG", "").strip():
        return resolver_of_jax()
    return detect()


def _require_alone(env: Mapping[str, str]) -> None:
    """Refuses to train alone without TF_CONFIG where several processes would.

    Raises:
        ValueError: Names the evidence of several processes, and the remedy.
    """
    if env.get("TF_CONFIG", "").strip():
        return  # it defines an empty cluster
    variable = launched_together(env)
    if variable is not None:
        seen = f"{variable[0]}={variable[1]}"
    elif is_in_job():
        count = jax.process_count()
        seen = f"jax.distributed.initialize has connected {count} processes"
    else:
        return
    raise ValueError(
        "the TFConfigClusterResolver finds no TF_CONFIG, so this process would train "
        f"alone, and it was started as one of several: {seen}. Give no resolver, then "
        "zs.cluster_resolver.detect() finds the others; or set TF_CONFIG in each "
        "process. If each is to train alone, set TF_CONFIG='{}'"
    )


def _require_all(resolver: ClusterResolver) -> None:
    """Refuses a TF_CONFIG that does not name all processes.

    Raises:
        ValueError: The source leaves out processes that would train with this one.
    """
    if isinstance(resolver, TFConfigClusterResolver) and resolver.is_sparse:
        raise ValueError(
            "TF_CONFIG has a sparseCluster, which names no other worker, so this "
            "process would train alone: take enableDynamicWorker out of the TFJob, or "
            "train with a ParameterServerStrategy"
        )


def _task(resolver: ClusterResolver) -> tuple[tuple[str, int], bool]:
    """Returns the task that this process is, and whether it saves."""
    spec = query_cluster_spec(resolver)
    job, index = resolver.task_type, resolver.task_id
    if not spec:
        return ("localhost", 0), True
    if job is None or index is None:
        raise ValueError(
            "When `cluster_spec` is not empty, both `task_type` and `task_id` must be "
            "specified."
        )
    validate_cluster_spec(spec, job, index)
    id_in_cluster(spec, job, index)  # refuses a ps
    # Not the chief as such: in a sparse cluster worker 0 may be missing.
    return (job, index), job == "evaluator" or (job, index) == _first(spec)

"""Synchronous training of several processes, with or without one job of XLA.

Every process has a copy of all variables, and runs the same program on its own data. A
step is compiled in parts between its collectives: a program that computes gradients,
their sum over all replicas, a program that applies the sum
(`zstrat.program.stages._stages`). In one job of XLA (`_xla_job`) a step is one program
over the devices of all processes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, final

import jax
import numpy as np

from zstrat.cluster import (
    TFConfigClusterResolver,
    detect,
    id_in_cluster,
    launched_together,
    query_cluster_spec,
    validate_cluster_spec,
    worker_count,
)
from zstrat.collectives import Group
from zstrat.config import environment
from zstrat.program import hide_frames
from zstrat.program.stages import Channel
from zstrat.strategy._devices import task_names
from zstrat.strategy._extended import StrategyExtended
from zstrat.strategy._options import ChosenGroup, CommunicationOptions
from zstrat.strategy._strategy import Closing, Strategy
from zstrat.strategy.replica._collective import Team
from zstrat.strategy.replica._local_run import MeshLayout
from zstrat.strategy.replica._mapped import mesh_over

from ._mirrored_store import MirroredVariables
from ._xla_job import is_in_job, join_job, resolver_of_jax

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zstrat.cluster import ClusterResolver, ClusterSpec
    from zstrat.program.stages import Collective
    from zstrat.strategy.input._inputs import ProcessInputs
    from zstrat.variables import Creator


_NAME: Final = "MultiWorkerMirroredStrategy"
"""Name of the group: processes that make one with this name find each other."""

_START_TIMEOUT: Final = 300.0
"""Seconds for all processes to start; jax has the same default."""


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

    The constructor blocks until all processes have made the strategy. Variables created
    in `scope` start with the values of the first process; `run` runs on this process's
    devices, and gradients are summed over all replicas of all processes.

    Args:
        cluster_resolver: Knows the tasks of the cluster, and which task this process
            is. Default: one that reads TF_CONFIG; otherwise jax's processes, if
            `jax.distributed.initialize` was called; otherwise those of the launcher
            (`zs.cluster_resolver.detect`). In an empty cluster this process trains
            alone.
        communication_options: Options of the collectives between processes.
        group: Function that connects the processes; tests replace it.

    Raises:
        ValueError: The cluster does not know this task, or the task does not train; or
            this process is one of several that were started together, and the addresses
            of the others are unknown.
        CollectiveTimeoutError: A process does not start in time; the error names it.
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
        """The resolver that was given, or the one that was found."""
        return self._resolver

    @property
    def communication_options(self) -> CommunicationOptions:
        """The options of collectives between the processes."""
        return self._options

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of devices of all processes."""
        return self._team().size

    @property
    def extended(self) -> StrategyExtended:
        """Devices of this process, whether it saves checkpoints, and reductions over
        all processes."""
        return self._extended

    def reform(self, *, timeout: float | None = None) -> None:
        """Connects the processes again after one was lost, restarted or cut off; blocks
        until all processes have called this or made the strategy.

        Processes that were not lost call it when a step has raised `PeerLostError`,
        `CollectiveTimeoutError` or `UnavailableError`; such a step has changed nothing.
        A restarted process makes its strategy and its variables as before. All
        processes then have the values, and the state of optimizers, of the process that
        had made the most steps; the restarted one has them before it first uses a
        variable. Afterwards all processes, including those that were not lost, must
        begin new passes of their datasets (``iter()``): an older iterator would wait
        for the restarted process forever. If a dataset is sharded and shuffled
        differently in each pass, all processes must create it again from its
        ``shuffle`` on and distribute it again: the restarted process begins with the
        first order, and a pass with different orders raises an error.

        Args:
            timeout: Seconds to wait for all processes.

        Raises:
            RuntimeError: The strategy has implementation=XLA: a job of jax cannot be
                formed again.
            CollectiveTimeoutError: Not all processes connected in time; the error names
                the missing ones. This may be called again.
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
        """Disconnects from the other processes, whose next collective fails. Closing
        twice is allowed; ``with`` closes at its end."""
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
    """Returns, for each number, the largest value among all processes, by the
    collective that reduces values."""
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
    """Returns the resolver for a program that gives none."""
    if is_in_job() and not environment().get("TF_CONFIG", "").strip():
        return resolver_of_jax()
    return detect()


def _require_alone(env: Mapping[str, str]) -> None:
    """Refuses to train without TF_CONFIG if several processes were started together,
    each of which would train alone.

    Raises:
        ValueError: There are several processes; the error names the evidence and the
            remedy.
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
        ValueError: TF_CONFIG leaves out processes that were started with this one.
    """
    if isinstance(resolver, TFConfigClusterResolver) and resolver.is_sparse:
        raise ValueError(
            "TF_CONFIG has a sparseCluster, which names no other worker, so this "
            "process would train alone: take enableDynamicWorker out of the TFJob, or "
            "train with a ParameterServerStrategy"
        )


def _task(resolver: ClusterResolver) -> tuple[tuple[str, int], bool]:
    """Returns which task this process is, and whether it saves checkpoints."""
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

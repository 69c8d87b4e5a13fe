"""Towers (replicas) of TF 1.12: their context, and the strategy with variables on
servers.

The names here are those of TF 1.12 for `zstrat.ReplicaContext`, for functions that
return the current context or strategy, and for the strategy.

The parameter-server strategy runs the towers in one program, and stores variables on
the parameter servers (ps) of a cluster, or on this machine without a cluster.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, cast, final

import jax

from zstrat.cluster import ClusterSpec, SimpleClusterResolver, normalize_cluster_spec
from zstrat.strategy import (
    BetweenGraphStrategy,
    CentralStorageStrategy,
    Mirrored,
    get_cross_replica_context,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from zstrat.strategy.reduce import is_whole

from ._strategy import DistributionStrategy, face_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from zstrat.strategy import ReplicaContext, Strategy


@final
class TowerContext:
    """The context of the tower in which a function runs. Get it from
    `get_tower_context`."""

    __slots__ = ("_replica",)

    def __init__(self, replica: ReplicaContext) -> None:
        self._replica = replica

    @property
    def distribution_strategy(self) -> DistributionStrategy:
        """The strategy that runs the tower."""
        return face_of(cast("Strategy", self._replica.strategy))

    @property
    def tower_id(self) -> int | jax.Array:
        """The number of the tower, from 0 to ``num_towers - 1``; traced if all towers
        are one program."""
        return self._replica.replica_id_in_sync_group

    @property
    def num_towers(self) -> int:
        return self._replica.num_replicas_in_sync

    @property
    def is_single_tower(self) -> bool:
        """Whether this is the only tower."""
        return self.num_towers == 1

    @property
    def device(self) -> str:
        """TF's name of the device on which the tower runs. A function that reads this
        runs sequentially, tower by tower."""
        (device,) = self._replica.devices
        return device

    def merge_call(
        self, merge_fn: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Calls ``merge_fn(distribution, *args, **kwargs)`` once, in the cross-tower
        context, when all towers have made this call; each tower gets its part of the
        result.

        Args:
            args, kwargs: Arguments for ``merge_fn``, which gets each with the values of
                all towers.

        Raises:
            RuntimeError: Another tower makes fewer of these calls, or this tower is not
                the one that runs.
        """
        # The engine passes itself; TF 1.12 passes the object that the program has made.
        distribution = self.distribution_strategy

        def merge(_: object, *merged: Any, **named: Any) -> Any:
            return merge_fn(distribution, *merged, **named)

        return self._replica.merge_call(merge, args, kwargs)


def get_tower_context() -> TowerContext | None:
    """Returns the context of the tower that this code runs in; None in the cross-tower
    context. Outside of all scopes it is that of the default strategy's only tower."""
    replica = get_replica_context()
    return None if replica is None else TowerContext(replica)


def get_cross_tower_context() -> DistributionStrategy | None:
    """Returns the strategy whose cross-tower context this code is in, or None."""
    strategy = get_cross_replica_context()
    return None if strategy is None else face_of(strategy)


def in_cross_tower_context() -> bool:
    """Returns whether this code is in a scope, and not in a tower."""
    return in_cross_replica_context()


def get_distribution_strategy() -> DistributionStrategy:
    """Returns the current strategy; outside of all scopes the default one."""
    return face_of(get_strategy())


def has_distribution_strategy() -> bool:
    """Returns whether a strategy other than the default one is current."""
    return has_strategy()


def require_tower_context(tower_ctx: TowerContext) -> None:
    """Refuses code that does not run in the tower of this context.

    Raises:
        RuntimeError: The code runs elsewhere.
    """
    found = get_replica_context()
    if found is None:
        raise RuntimeError("Need to be inside `call_for_each_tower()`")
    if found is not tower_ctx._replica:
        raise RuntimeError("Mismatching TowerContext: this code runs in another tower")


_TASK: Final = re.compile(r"/job:(?P<job>\w+)(/replica:\d+)?(/task:(?P<task>\d+))?")


@dataclass(slots=True)
class SessionConfig:
    """The two fields of TF's ``ConfigProto`` that a strategy sets. zstrat has no
    sessions: a program that passes this object to ``configure`` may read the fields
    afterwards."""

    device_filters: list[str] = field(default_factory=list)
    isolate_session_state: bool = True


@final
class ParameterServerStrategy(DistributionStrategy):
    """Towers in sync on the devices of this worker, asynchronous between workers.

    Without a cluster the variables are on the only device of the towers, or on the CPU.
    With a cluster, which is passed to `configure`, variables are distributed over its
    parameter servers in turn, and every worker runs the whole program: the chief, or
    worker 0, creates the variables.

    Args:
        num_gpus_per_worker: Number of local devices that have a tower each, the first
            ones in jax's order; 0: one tower on the CPU.

    Raises:
        ValueError: There are fewer devices.
    """

    def __init__(self, num_gpus_per_worker: int = 0) -> None:
        self._towers = _devices(num_gpus_per_worker)
        self._task: tuple[str, int] | None = None
        super().__init__(CentralStorageStrategy(self._towers))

    @property
    def between_graph(self) -> bool:
        return True

    def configure(
        self,
        session_config: Any = None,
        cluster_spec: Any = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        """Sets the cluster; from then on variables are created on its ps. Only the
        first call sets it.

        Blocks until all ps answer, and, in a worker that is not the chief, until the
        chief has connected.

        Args:
            session_config: A `SessionConfig`, whose device filters are set; other
                objects are not changed.
            cluster_spec: A dictionary or a `zstrat.ClusterSpec`.

        Raises:
            ValueError: ``task_type`` or ``task_id`` is missing, or there is no ps.
            DeadlineExceededError: A ps does not answer in time, or the chief does not
                connect.
        """
        if self._task is None and cluster_spec:
            if task_type is None or task_id is None:
                raise ValueError(
                    "When `cluster_spec` is given, must also specify `task_type` and "
                    "`task_id`."
                )
            self._join(normalize_cluster_spec(cluster_spec), task_type, task_id)
        if isinstance(session_config, SessionConfig):
            session_config.isolate_session_state = self._task is None
            if self._task is not None:
                job, task = self._task
                filters = [f"/job:{job}/task:{task}", "/job:ps"]
                session_config.device_filters[:] = filters

    def close(self) -> None:
        """Disconnects from the parameter servers, which keep the variables for other
        workers."""
        if isinstance(self.engine, BetweenGraphStrategy):
            self.engine.close()

    def _join(self, spec: ClusterSpec, job: str, task: int) -> None:
        resolver = SimpleClusterResolver(spec, task_type=job, task_id=task)
        # Replaces the engine without a cluster, under the same face. It blocks, and may
        # fail; `_task` is set after it, so that `configure` may be called again.
        engine = BetweenGraphStrategy(resolver, devices=self._towers)
        super().__init__(engine)
        self._task = job, task

    def _require_operands(self, arguments: Any) -> None:
        """Refuses, in addition, a mirrored value on several devices as an argument:
        TF's rule for this strategy, whose variables have one copy."""
        super()._require_operands(arguments)
        for leaf in jax.tree.leaves(arguments, is_leaf=is_whole):
            if isinstance(leaf, Mirrored) and leaf.replicas > 1:
                raise ValueError(
                    "You cannot update variable with a Mirrored object with multiple "
                    f"components {leaf!r}: specify a single value or a Mirrored with a "
                    "single value"
                )

    def _require_here(self, destinations: Any) -> None:
        several = isinstance(destinations, list | tuple)
        for each in destinations if several else [destinations]:
            # A destination without a task, such as "/gpu:0", is on this worker.
            found = _TASK.match(each) if isinstance(each, str) else None
            if self._task is None or found is None or found["task"] is None:
                continue
            job, task = self._task
            if found["job"] == job and int(found["task"]) != task:
                raise ValueError(
                    f"Cannot reduce to another worker: {each!r}, current worker is "
                    f"'/job:{job}/task:{task}'"
                )


def _devices(count: int) -> tuple[jax.Device, ...]:
    if count < 0:
        raise ValueError(f"num_gpus_per_worker={count}: expected 0 or more")
    if count == 0:
        return (jax.local_devices(backend="cpu")[0],)
    found = jax.local_devices()
    if len(found) < count:
        raise ValueError(
            f"num_gpus_per_worker={count}, but jax has the local devices {found}: give "
            "at most as many, or make virtual ones of the CPU "
            f"(jax.config.update('jax_num_cpu_devices', {count}))"
        )
    return tuple(found[:count])

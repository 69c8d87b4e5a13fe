"""A fleet on Ray: parameter servers in one placement group, each worker in its own.

A placement group reserves the resources of a task, so that a restarted task comes back
to its machine and its port. The fleet restarts tasks, as on every engine, and not Ray
(``max_restarts``), which would restart an actor without notifying the program.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import TYPE_CHECKING, Any, Final, final

from zstrat.cluster import GPUS_VARIABLE
from zstrat.errors import UnavailableError
from zstrat.launch._started_tasks import share

from ._fleet import Fleet
from ._piped import TaskHost
from .state import FleetTask, TaskEnd

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from concurrent.futures import Future

    from zstrat.config import Settings

    from .state import RunningTask, TaskEvents, TaskLaunch

log = logging.getLogger("zstrat.launch")

SETTLING: Final = 2.0
"""Seconds to wait for the resources of each worker above the minimum; Ray assigns the
resources that it has within a fraction of that."""

Resources = dict[str, float]
"""Resources of Ray: "CPU", "GPU", "memory" in bytes, and custom names."""


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ImportError("Ray is not installed: pip install 'zstrat[ray]'") from error
    return ray


class RayHost(TaskHost):
    """A `TaskHost` in a Ray actor, which finds its own address and GPUs."""

    def __init__(self, launch: TaskLaunch) -> None:
        # Only here, in the actor, is it known where Ray has put it.
        context = _ray().get_runtime_context()
        super().__init__(
            _with_gpus(launch, context.get_accelerator_ids()["GPU"]),
            _addresses(_ray())[context.get_node_id()],
        )


def _with_gpus(launch: TaskLaunch, gpus: Sequence[str]) -> TaskLaunch:
    """Adds the GPUs that Ray assigned to the actor to the variables of the launch, and
    the actor's share of the cores, which Ray does not divide."""
    env = {GPUS_VARIABLE: ",".join(gpus), "NPROC": str(share(launch.on_host))}
    # One task on its host as far as the daemon is concerned: it must not divide the
    # GPUs of its actor once more.
    return dataclasses.replace(launch, env={**env, **launch.env}, on_host=1, rank=0)


def _addresses(ray: Any) -> dict[str, str]:
    """Returns the addresses of the machines by their Ray node ids."""
    return {node["NodeID"]: str(node["NodeManagerAddress"]) for node in ray.nodes()}


@final
class _RayTask:
    """The actor of a task, until the task has ended."""

    def __init__(self, ray: Any, actor: Any, events: TaskEvents) -> None:
        self._ray, self._events = ray, events
        self._actor: Any = actor
        """The actor; None once the task has ended: Ray ends an actor without
        references, which frees its resources. (A callback, which runs on a thread of
        Ray, must not kill the actor.)"""
        # Both are asked at once and answered when it is so far; they run side by side,
        # as the methods of the actor are coroutines.
        actor.address.remote().future().add_done_callback(self._bound)
        actor.over.remote().future().add_done_callback(self._ended)

    def drain(self) -> None:
        if (actor := self._actor) is not None:
            actor.drain.remote()

    def kill(self) -> None:
        # The kernel kills the daemon when the process of the actor ends.
        if (actor := self._actor) is not None:
            self._ray.kill(actor)

    def _bound(self, answer: Future[str]) -> None:
        if answer.exception() is None and answer.result():
            self._events.bound(answer.result())

    def _ended(self, answer: Future[TaskEnd]) -> None:
        # First: the next attempt needs the resources of this one.
        self._actor = None
        lost = answer.exception()
        if lost is None:
            self._events.ended(answer.result())
        else:
            words = " ".join(str(lost).split())
            self._events.ended(TaskEnd("was lost with its actor", why=words))


@final
class RayEngine:
    """Starts each task by an actor on its reserved resources."""

    name = "Ray"

    def __init__(
        self, ray: Any, bundles: Mapping[str, Sequence[Any]], reserved: _PlacementGroups
    ) -> None:
        self._ray, self._bundles, self._reserved = ray, bundles, reserved

    def start(self, launch: TaskLaunch, events: TaskEvents) -> RunningTask:
        group, bundle = self._bundles[launch.task.name]
        strategies = self._ray.util.scheduling_strategies
        strategy = strategies.PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=bundle
        )
        wanted = dict(group.bundle_specs[bundle])
        # A restart whose machine is lost: Ray schedules the group again, by itself.
        if launch.bind and not group.wait(0):
            words = "Ray has no free resources for %s (%s): waiting until it has some"
            log.warning(words, launch.task.name, wanted)
        host = self._ray.remote(RayHost).options(
            scheduling_strategy=strategy,
            # 0, as Ray's default of 1 would not fit into a bundle without CPUs.
            num_cpus=wanted.pop("CPU", 0),
            num_gpus=wanted.pop("GPU", 0),
            memory=wanted.pop("memory", None),
            resources=wanted,
        )
        return _RayTask(self._ray, host.remote(launch), events)

    def close(self) -> None:
        """Releases the reserved resources."""
        self._reserved.release()


def ray(
    num_ps: int = 1,
    num_workers: int | tuple[int, int] = 1,
    *,
    ps_resources: Mapping[str, float] | None = None,
    worker_resources: Mapping[str, float] | None = None,
    wait: float = 10.0,
    restarts: int = 5,
    window: float = 600.0,
    env: Mapping[str, str] | None = None,
    settings: Settings | None = None,
) -> Fleet:
    """Starts parameter servers and workers on a Ray cluster.

        with zs.launch.ray(num_ps=2, num_workers=(2, 16)) as cluster:
            strategy = zs.ParameterServerStrategy(cluster)

    Initializes Ray if necessary. Each run has its own keys. The logs of the tasks are
    those of their actors, which Ray also shows in the program.

    Args:
        num_ps: Number of parameter servers.
        num_workers: Number of workers; or (least, most): as many as Ray has free
            resources for now.
        ps_resources, worker_resources: Ray resources of each task; default: {"CPU": 1}.
        wait: Seconds to wait for the resources. Use more if machines are started on
            demand.
        restarts, window: A task that fails is restarted at its address, at most
            ``restarts`` times within ``window`` seconds. If its machine is lost, it
            moves to another one, and ``cluster.resolver`` returns its new address.
        env: Variables for the tasks.
        settings: Timeouts; default: from ``ZSTRAT_*``.

    Raises:
        ImportError: Ray is not installed.
        ValueError: A number is invalid.
        UnavailableError: Ray has not enough room; says what there is and what it lacks.
            Or a task ended before it was ready.
        DeadlineExceededError: A task was not ready in ``timeouts.connect``.
    """
    least, most = _span(num_workers)
    if not isinstance(num_ps, int) or num_ps < 1:
        raise ValueError(f"num_ps={num_ps!r}: expected 1 or more")
    engine = _ray()
    if not engine.is_initialized():
        engine.init()
    reserved = _PlacementGroups(engine, time.monotonic() + wait)
    try:
        # All ps in one group, as training needs all of them; a group for each worker,
        # as any number will do.
        ps = reserved.group([dict(ps_resources or {"CPU": 1})] * num_ps)
        workers = [
            reserved.group([dict(worker_resources or {"CPU": 1})]) for _ in range(most)
        ]
        ready = reserved.wait_ready(ps, workers, least)
        places = [("ps", n, ps, n) for n in range(num_ps)]
        places += [("worker", n, group, 0) for n, group in enumerate(ready)]
        tasks = [
            FleetTask(job, n, reserved.host(group, bundle))
            for job, n, group, bundle in places
        ]
        bundles = {f"{job}:{n}": bundle for job, n, *bundle in places}
        return Fleet(
            RayEngine(engine, bundles, reserved),
            tasks,
            restarts=restarts,
            window=window,
            env=env,
            logs="terminal",
            settings=settings,
        )
    except BaseException:  # to the caller, who has no fleet that would release them
        reserved.release()
        raise


class _PlacementGroups:
    """Placement groups of Ray, all requested at once."""

    def __init__(self, ray: Any, deadline: float) -> None:
        self._ray, self._deadline = ray, deadline
        self.groups: list[Any] = []

    def group(self, bundles: list[Resources]) -> Any:
        """Requests a group; returns before it is ready."""
        group = self._ray.util.placement_group(bundles, strategy="SPREAD")
        self.groups.append(group)
        return group

    def wait_ready(self, ps: Any, workers: list[Any], least: int) -> list[Any]:
        """Waits for the group of ``ps`` and ``least`` groups of workers; returns the
        ready groups of workers and releases the others.

        Raises:
            UnavailableError: Too few groups were ready in time.
        """
        if not ps.wait(self._left()):
            raise self._too_small("the parameter servers", ps.bundle_specs)
        ready = [group for group in workers[:least] if group.wait(self._left())]
        for group in workers[least:]:
            if not group.wait(min(self._left(), SETTLING)):
                break  # the groups are equal: the next one would not be ready either
            ready.append(group)
        if len(ready) < least:
            what = f"{least} workers, only for {len(ready)},"
            raise self._too_small(what, workers[0].bundle_specs)
        # Otherwise Ray would give them the next free resources.
        for group in [group for group in workers if group not in ready]:
            self._ray.util.remove_placement_group(group)
            self.groups.remove(group)
        if len(ready) < len(workers):
            words = "Ray has free resources for %d of %d workers"
            log.info(words, len(ready), len(workers))
        return ready

    def host(self, group: Any, bundle: int) -> str:
        """Returns the address of the machine of a bundle."""
        table = self._ray.util.placement_group_table(group)
        node = table["bundles_to_node_id"][bundle]
        return _addresses(self._ray).get(node, "a lost machine")

    def release(self) -> None:
        """Removes all groups. Idempotent."""
        # One by one, so that a call after Ctrl-C continues.
        while self.groups:
            self._ray.util.remove_placement_group(self.groups.pop())

    def _left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _too_small(self, what: str, bundles: list[Resources]) -> UnavailableError:
        free = {
            name: amount
            for name, amount in self._ray.available_resources().items()
            # Without what Ray adds for its own use: a name of each node, and bundles.
            if not name.startswith(("node:", "object_store")) and "_group_" not in name
        }
        return UnavailableError(
            f"Ray has too few free resources for {what} with {bundles[0]} each; free: "
            f"{free}. Add machines, request less (ps_resources=, worker_resources=), "
            "or set a longer wait= if machines are started on demand"
        )


def _span(workers: int | tuple[int, int]) -> tuple[int, int]:
    match (workers, workers) if isinstance(workers, int) else workers:
        case int(least), int(most) if 1 <= least <= most:
            return least, most
    raise ValueError(
        f"num_workers={workers!r}: expected a number, 1 or more, or (least, most)"
    )

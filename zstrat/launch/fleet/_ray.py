"""A fleet on Ray: parameter servers in one placement group, each worker in its own.

A placement group keeps the machine of a task: a task that is started again comes back
there, to its port. What starts again is the fleet, as on every engine, and not Ray
(``max_restarts``), which would bring an actor back without a word to the program.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import TYPE_CHECKING, Any, Final, final

from zstrat.cluster import GPUS_VARIABLE
from zstrat.errors import UnavailableError
from zstrat.launch._runtime_dir import share

from ._engine import End, FleetTask
from ._fleet import Fleet
from ._piped import TaskHost

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from concurrent.futures import Future

    from zstrat.config import Settings

    from ._engine import RunningTask, TaskEvents, TaskLaunch

log = logging.getLogger("zstrat.launch")

SETTLING: Final = 2.0
"""Seconds for each worker beyond those that are needed to find a place, too: Ray gives
out what it has within a fraction of that."""

Resources = dict[str, float]
"""As Ray has them: "CPU", "GPU", "memory" in bytes, and names of one's own."""


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ImportError(
            "Ray is not installed here: pip install 'zstrat[ray]'"
        ) from error
    return ray


class RayHost(TaskHost):
    """On the machine where Ray has put this actor, by the address that Ray knows."""

    def __init__(self, launch: TaskLaunch) -> None:
        context = _ray().get_runtime_context()
        super().__init__(
            _with_gpus(launch, context.get_accelerator_ids()["GPU"]),
            _addresses(_ray())[context.get_node_id()],
        )


def _with_gpus(launch: TaskLaunch, gpus: Sequence[str]) -> TaskLaunch:
    """With the GPUs that Ray gave to its actor, none if it gave none: they are divided
    already, and only the cores are not."""
    env = {GPUS_VARIABLE: ",".join(gpus), "NPROC": str(share(launch.beside))}
    return dataclasses.replace(launch, env={**env, **launch.env}, beside=1, place=0)


def _addresses(ray: Any) -> dict[str, str]:
    """The addresses of the machines, by their names in Ray."""
    return {each["NodeID"]: str(each["NodeManagerAddress"]) for each in ray.nodes()}


@final
class _RayTask:
    """One actor, until its task has ended."""

    def __init__(self, ray: Any, actor: Any, hear: TaskEvents) -> None:
        self._ray, self._hear = ray, hear
        self._actor: Any = actor
        """None once the task has ended: Ray ends an actor that nobody knows any more,
        and its place is free. (It may not be killed by a callback, which is Ray's own
        thread.)"""
        actor.address.remote().future().add_done_callback(self._bound)
        actor.over.remote().future().add_done_callback(self._ended)

    def drain(self) -> None:
        if (actor := self._actor) is not None:
            actor.drain.remote()

    def kill(self) -> None:
        # The daemon ends with the process of the actor, by the kernel's hand.
        if (actor := self._actor) is not None:
            self._ray.kill(actor)

    def _bound(self, answer: Future[str]) -> None:
        if answer.exception() is None and answer.result():
            self._hear.bound(answer.result())

    def _ended(self, answer: Future[End]) -> None:
        self._actor = None
        lost = answer.exception()
        if lost is None:
            self._hear.ended(answer.result())
        else:
            words = " ".join(str(lost).split())
            self._hear.ended(End("was lost with its actor", why=words))


@final
class RayEngine:
    """Starts each task in an actor, in the place that was reserved for it."""

    name = "Ray"

    def __init__(
        self, ray: Any, places: Mapping[str, tuple[Any, int]], groups: list[Any]
    ) -> None:
        self._ray, self._places, self._groups = ray, places, groups

    def start(self, launch: TaskLaunch, hear: TaskEvents) -> RunningTask:
        group, bundle = self._places[launch.task.name]
        strategies = self._ray.util.scheduling_strategies
        strategy = strategies.PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=bundle
        )
        wanted = dict(group.bundle_specs[bundle])
        if launch.bind and not group.wait(0):  # its machine is gone, and no other found
            words = "Ray has no room for %s with %s now: it waits until there is some"
            log.warning(words, launch.task.name, wanted)
        host = self._ray.remote(RayHost).options(
            scheduling_strategy=strategy,
            num_cpus=wanted.pop("CPU", 0),
            num_gpus=wanted.pop("GPU", 0),
            memory=wanted.pop("memory", None),
            resources=wanted,
        )
        return _RayTask(self._ray, host.remote(launch), hear)

    def close(self) -> None:
        """Gives the places back."""
        while self._groups:
            self._ray.util.remove_placement_group(self._groups.pop())


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
    """Parameter servers and workers on a cluster of Ray, for this program.

        with zs.launch.ray(num_ps=2, num_workers=(2, 16)) as cluster:
            strategy = zs.ParameterServerStrategy(cluster)

    Ray is initialized if it is not. Each run has keys of its own. What the tasks log is
    in Ray's logs of their actors, which Ray shows in the program, too.

    Args:
        num_ps: How many.
        num_workers: How many; or (least, most): as many as there is room for now.
        ps_resources, worker_resources: Of each, as Ray has them; default: {"CPU": 1}.
        wait: Seconds that Ray has to find room. Give it more where machines are started
            on demand.
        restarts, window: A task that ends by itself is started again on its machine, at
            its address, so often at most within so many seconds. On another machine, if
            that one is gone: then ``cluster.resolver`` tells its new address.
        env: Variables for the tasks.
        settings: Timeouts; default: from ``ZSTRAT_*``.

    Raises:
        ImportError: Ray is not installed.
        ValueError: A number cannot be.
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
        ps = reserved.group([dict(ps_resources or {"CPU": 1})] * num_ps)
        workers = [
            reserved.group([dict(worker_resources or {"CPU": 1})]) for _ in range(most)
        ]
        there = reserved.found(ps, workers, least)
        places = {f"ps:{n}": (ps, n) for n in range(num_ps)}
        places |= {f"worker:{n}": (group, 0) for n, group in enumerate(there)}
        tasks = [
            FleetTask(*_named(name), reserved.host(*place))
            for name, place in places.items()
        ]
        return Fleet(
            RayEngine(engine, places, reserved.groups),
            tasks,
            restarts=restarts,
            window=window,
            env=env,
            logs="terminal",
            settings=settings,
        )
    except BaseException:  # to the caller, who has no fleet that would give them back
        reserved.give_back()
        raise


class _PlacementGroups:
    """Placement groups: asked for all at once, then waited for."""

    def __init__(self, ray: Any, deadline: float) -> None:
        self._ray, self._deadline = ray, deadline
        self.groups: list[Any] = []

    def group(self, bundles: list[Resources]) -> Any:
        """Asks for a group, which is there later."""
        made = self._ray.util.placement_group(bundles, strategy="SPREAD")
        self.groups.append(made)
        return made

    def found(self, ps: Any, workers: list[Any], least: int) -> list[Any]:
        """The groups of workers that are there, once that of ``ps`` and ``least`` of
        them are; the others are given back.

        Raises:
            UnavailableError: There are not so many in time.
        """
        if not ps.wait(self._left()):
            raise self._too_small("the parameter servers", ps.bundle_specs)
        there = [group for group in workers[:least] if group.wait(self._left())]
        for group in workers[least:]:
            if not group.wait(min(self._left(), SETTLING)):
                break  # they are alike: if this one has no place, the next has none
            there.append(group)
        if len(there) < least:
            what = f"{least} workers, only for {len(there)},"
            raise self._too_small(what, workers[0].bundle_specs)
        for group in [each for each in workers if each not in there]:
            self._ray.util.remove_placement_group(group)
            self.groups.remove(group)
        if len(there) < len(workers):
            log.info("Ray has room for %d of %d workers", len(there), len(workers))
        return there

    def host(self, group: Any, bundle: int) -> str:
        """The address of the machine of a bundle."""
        table = self._ray.util.placement_group_table(group)
        node = table["bundles_to_node_id"][bundle]
        return _addresses(self._ray).get(node, "a machine that is gone")

    def give_back(self) -> None:
        """Idempotent."""
        while self.groups:
            self._ray.util.remove_placement_group(self.groups.pop())

    def _left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _too_small(self, what: str, each: list[Resources]) -> UnavailableError:
        free = {
            name: amount
            for name, amount in self._ray.available_resources().items()
            if not name.startswith(("node:", "object_store")) and "_group_" not in name
        }
        return UnavailableError(
            f"Ray has no room for {what} with {each[0]} each; free are {free}: add "
            "machines, ask for fewer or less (ps_resources=, worker_resources=), or "
            "wait= longer where machines are started on demand"
        )


def _span(workers: int | tuple[int, int]) -> tuple[int, int]:
    match (workers, workers) if isinstance(workers, int) else workers:
        case int(least), int(most) if 1 <= least <= most:
            return least, most
    raise ValueError(
        f"num_workers={workers!r}: expected a number from 1 on, or (least, most)"
    )


def _named(name: str) -> tuple[str, int]:
    job, _, index = name.partition(":")
    return job, int(index)

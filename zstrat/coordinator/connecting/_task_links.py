"""Where the tasks of a cluster are, and links to them; how far ahead of their steps
workers fetch, and whether servers can keep copies for each other.

A program may know only some of the workers, but all parameter servers: a variable names
its server by its place among them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

from zstrat.transport import Link, Security, hello, key_names
from zstrat.wire import Job

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping

    from zstrat.cluster import ClusterSpec
    from zstrat.config import Settings
    from zstrat.errors import PeerLostError
    from zstrat.wire import Hello, Message


def addresses_of_ps(spec: ClusterSpec) -> list[str]:
    """Their addresses: a variable names its server by its place here."""
    numbers = spec.task_indices("ps")
    if numbers != list(range(len(numbers))):
        raise ValueError(
            f"the cluster has the parameter servers {numbers}: number ps from 0 "
            "without gaps, all programs of a cluster must know all of them; only "
            "workers may be left out"
        )
    return [spec.task_address("ps", number) for number in numbers]


def addresses_of_workers(spec: ClusterSpec) -> dict[int, str]:
    """By task number."""
    return {
        number: spec.task_address("worker", number)
        for number in spec.task_indices("worker")
    }


def prefetch_of(settings: Settings, workers: Mapping[int, str]) -> int:
    """Optimizer steps."""
    # The steps of several workers interleave, so reading a value before one's own last
    # push is nothing new; with one worker it would be the only staleness there is.
    if settings.prefetch is not None:
        return settings.prefetch
    return 1 if len(workers) > 1 else 0


def check_replicas(
    replicas: int, ps: int, settings: Settings, stores_per_ps: int = 1
) -> None:
    """
    Args:
        ps: How many parameter servers there are.
        stores_per_ps: Logical servers of each of them.

    Raises:
        ValueError: There cannot be so many copies, or stores; says why.
    """
    if not replicas and stores_per_ps == 1:
        return
    if ps <= replicas:
        raise ValueError(
            f"replicas={replicas}: what one parameter server holds is kept by another "
            f"one, too, and the cluster has {ps}: give it {replicas + 1} ps at least"
        )
    keys = settings.keys
    if keys is not None and any(name.startswith("ps-") for name in key_names(keys)):
        raise ValueError(
            f"replicas={replicas}, stores_per_ps={stores_per_ps}: what one parameter "
            f"server hosts has the key of another one, and {keys} has a key for each: "
            "make keys for the roles, `zstrat keygen` without --per-task"
        )


def links_of(
    job: Job, index: int, incarnation: int, settings: Settings, *, looks: bool = False
) -> MakeTaskLink:
    """Links over ZeroMQ, with the key of the job if there are keys.

    Args:
        looks: They say that they are those of an observer.
    """
    keys = None if settings.keys is None else Security.load(settings.keys, job, index)
    me = hello(Job.OBSERVER if looks else job, index, incarnation)
    return partial(Link, me=me, settings=settings, security=keys)


class TaskLink(Protocol):
    """What a task session needs of `zstrat.transport.Link`."""

    @property
    def is_open(self) -> bool: ...

    @property
    def is_refused(self) -> bool: ...

    @property
    def trouble(self) -> str: ...

    @property
    def peer(self) -> Hello | None: ...

    def start(self) -> None: ...

    async def wait_open(self, deadline: float) -> Hello: ...

    def submit(
        self, message: Message, *, deadline: float | None = None
    ) -> asyncio.Future[Message]: ...

    def notify(self, message: Message) -> None: ...

    async def close(self) -> None: ...


class MakeTaskLink(Protocol):
    """Makes the link to one task; it is not started yet."""

    def __call__(
        self,
        address: str,
        *,
        name: str,
        expect: tuple[str, int],
        on_notice: Callable[[Message], None],
        on_open: Callable[[Hello], None],
        on_lost: Callable[[PeerLostError], None],
    ) -> TaskLink: ...

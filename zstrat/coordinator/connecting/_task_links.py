"""Addresses of the tasks of a cluster, and links to them, which may move to other
addresses. Also checks whether the servers can keep copies for each other.

A program may know only some of the workers, but all parameter servers: a variable names
its server by the index among them.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, TypeVar, final

from zstrat.errors import ClosedError, DeadlineExceededError
from zstrat.transport import Link, Security, hello, key_names
from zstrat.wire import Job

if TYPE_CHECKING:
    from collections.abc import Callable

    from zstrat.cluster import ClusterSpec
    from zstrat.config import Settings
    from zstrat.errors import PeerLostError
    from zstrat.transport import MakeTaskLink, TaskLink
    from zstrat.wire import Hello, Message


def addresses_of_ps(spec: ClusterSpec) -> list[str]:
    """Returns the addresses of all parameter servers, by index."""
    numbers = spec.task_indices("ps")
    if numbers != list(range(len(numbers))):
        raise ValueError(
            f"the cluster has ps with the indices {numbers}, expected all from 0 on "
            "without gaps: each program has to know all ps; only workers may be left "
            "out"
        )
    return [spec.task_address("ps", number) for number in numbers]


def addresses_of_workers(spec: ClusterSpec) -> dict[int, str]:
    """Returns the addresses of the known workers, by task number."""
    return {
        number: spec.task_address("worker", number)
        for number in spec.task_indices("worker")
    }


def check_replicas(
    replicas: int, ps: int, settings: Settings, stores_per_ps: int = 1
) -> None:
    """Checks that the cluster can have this number of replicas and of stores per ps.

    Args:
        ps: Number of parameter servers.
        stores_per_ps: Stores of each of them.

    Raises:
        ValueError: The cluster cannot have them; says why.
    """
    if not replicas and stores_per_ps == 1:
        return
    if ps <= replicas:
        raise ValueError(
            f"replicas={replicas} needs at least {replicas + 1} ps, as another one "
            f"keeps the copy, and the cluster has {ps}: add one, or leave out replicas="
        )
    keys = settings.keys
    if keys is not None and any(name.startswith("ps-") for name in key_names(keys)):
        raise ValueError(
            f"replicas={replicas} and stores_per_ps={stores_per_ps} need keys per "
            f"role, as a ps hosts stores of others, and {keys} has a key for each "
            "task: make keys with `zstrat keygen`, without --per-task"
        )


def links_of(
    job: Job, index: int, incarnation: int, settings: Settings, *, looks: bool = False
) -> MakeTaskLink:
    """Returns what makes links over ZeroMQ, with the key of the job if there are keys.

    Args:
        looks: The links are those of an observer.
    """
    keys = None if settings.keys is None else Security.load(settings.keys, job, index)
    me = hello(Job.OBSERVER if looks else job, index, incarnation)
    return partial(Link, me=me, settings=settings, security=keys)


T = TypeVar("T")


@final
class MovableLink:
    """The link to one task, which may move to another address. On the loop.

    A `Link` has one address for life, so each move makes another one. The earlier link
    is closed first: requests that end with it, and are sent again, come first at the
    new address. The law of this class: only the current link calls its owner.

    Args:
        name: The name of the task: "/job:ps/task:0".
        expect: The job and the task number that have to answer there.
        on_notice, on_open, on_lost: Called by the current link.
    """

    def __init__(
        self,
        make_link: MakeTaskLink,
        address: str,
        *,
        name: str,
        expect: tuple[str, int],
        on_notice: Callable[[Message], None],
        on_open: Callable[[Hello], None],
        on_lost: Callable[[PeerLostError], None],
    ) -> None:
        self._make_link, self._name, self._expect = make_link, name, expect
        self._on_notice, self._on_open, self._on_lost = on_notice, on_open, on_lost
        self._moves = 0
        self._is_closed = False
        self._moving: asyncio.Task[None] | None = None
        """Closes the earlier link, and starts the current one."""
        self._started: TaskLink | None = None
        """The link that was started last."""
        self._has_address = asyncio.Event()
        self._has_address.set()
        self.now: TaskLink = self._new_link(address)
        """The current link."""

    @property
    def is_parked(self) -> bool:
        """Whether the address is unknown, up to the next `move`."""
        return not self._has_address.is_set()

    def start(self) -> None:
        """Starts to connect to the first address; does nothing if it has moved."""
        if not self._moves:
            self._start(self.now)

    def move(self, address: str) -> None:
        """Moves to another address."""
        self._has_address.set()
        self._moves += 1
        before, self.now = self.now, self._new_link(address)
        going = self._replace(before, self._moving)
        loop = asyncio.get_running_loop()
        self._moving = loop.create_task(going, name=f"{self._name} moves")  # see close

    def park(self) -> None:
        """Starts no link up to the next `move`, as the address is unknown."""
        self._has_address.clear()

    async def wait_open(self, deadline: float) -> None:
        """Waits until the current link is open; raises as `TaskLink.wait_open`.

        Cancellation: nothing is lost.
        """
        while True:
            await self._wait_address(deadline)
            if self._moving is not None:
                await asyncio.wait([self._moving])
            if self.is_parked:
                continue
            link = self.now
            try:
                await link.wait_open(deadline)
            except ClosedError:
                if link is self.now:
                    raise
            else:
                return

    def stop(self) -> None:
        """Starts no further link. `close` has to follow."""
        self._is_closed = True

    async def close(self) -> None:
        """Closes the link."""
        self.stop()
        if self._moving is not None:
            await self._moving
        await self.now.close()

    def _new_link(self, address: str) -> TaskLink:
        return self._make_link(
            address,
            name=self._name,
            expect=self._expect,
            on_notice=partial(self._call, self._moves, self._on_notice),
            on_open=partial(self._call, self._moves, self._on_open),
            on_lost=partial(self._call, self._moves, self._on_lost),
        )

    def _call(self, moves: int, callback: Callable[[T], None], event: T) -> None:
        """Calls the owner, unless the event is of an earlier link."""
        if moves == self._moves:
            callback(event)

    async def _replace(
        self, before: TaskLink, moving: asyncio.Task[None] | None
    ) -> None:
        link = self.now  # a later move has another one
        if moving is not None:
            await moving
        await before.close()
        # After the requests that end with it are sent again: they come first.
        asyncio.get_running_loop().call_soon(self._start, link)

    def _start(self, link: TaskLink) -> None:
        if link is self._started or self._is_closed or self.is_parked:
            return
        if link is self.now:
            self._started = link
            link.start()

    async def _wait_address(self, deadline: float) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                await self._has_address.wait()
        except TimeoutError:
            raise DeadlineExceededError(
                f"{self._name}: no other process took its place in time"
            ) from None

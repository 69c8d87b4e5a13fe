"""Links to the tasks of a cluster: where these are, how a link to one is made, and one
that may go on at another address. Also what a program decides with a look at all of
them: how far ahead of their steps workers fetch, and whether servers can keep copies
for each other.

A program may know only some of the workers, but all parameter servers: a variable names
its server by its place among them.
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


T = TypeVar("T")


@final
class MovableLink:
    """The links to one task, which may go on at another address, one after the other.
    On the loop.

    A link has one address for its whole life, so each move makes another link. The link
    before is closed first: what the end of its requests sets going comes first at the
    new address. Law of the class: only the link of now tells anything to its owner.

    Args:
        name: What the task is called: "/job:ps/task:0".
        expect: The job and the task number that have to answer there.
        on_notice, on_open, on_lost: What the link of now has to tell.
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
        """Closes the link before, and starts the next one."""
        self._started: TaskLink | None = None
        """The link that was started last."""
        self._has_address = asyncio.Event()
        self._has_address.set()
        self.now: TaskLink = self._new_link(address)
        """The link to the present address."""

    @property
    def is_parked(self) -> bool:
        """Whether nobody knows the address, up to the next `move`."""
        return not self._has_address.is_set()

    def start(self) -> None:
        """Begins to connect to the first address; a link that was moved starts by
        itself."""
        if not self._moves:
            self._start(self.now)

    def move(self, address: str) -> None:
        """Goes on at another address."""
        self._has_address.set()
        self._moves += 1
        before, self.now = self.now, self._new_link(address)
        going = self._replace(before, self._moving)
        loop = asyncio.get_running_loop()
        self._moving = loop.create_task(going, name=f"{self._name} moves")  # see close

    def park(self) -> None:
        """Starts no link up to the next `move`, as nobody knows the address."""
        self._has_address.clear()

    async def wait_open(self, deadline: float) -> None:
        """Waits until the link of that moment is open; raises as `TaskLink.wait_open`.

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
        """Starts no link any more. `close` has to follow."""
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
            on_notice=partial(self._tell, self._moves, self._on_notice),
            on_open=partial(self._tell, self._moves, self._on_open),
            on_lost=partial(self._tell, self._moves, self._on_lost),
        )

    def _tell(self, moves: int, callback: Callable[[T], None], what: T) -> None:
        """Drops what a link to an earlier address has to say."""
        if moves == self._moves:
            callback(what)

    async def _replace(
        self, before: TaskLink, moving: asyncio.Task[None] | None
    ) -> None:
        link = self.now  # a later move has another one
        if moving is not None:
            await moving
        await before.close()
        # Behind what the end of its requests sets going: they come first at the next.
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
            words = f"{self._name}: no process has taken its place in time"
            raise DeadlineExceededError(words) from None

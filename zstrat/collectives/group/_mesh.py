"""The ways from one rank to all others, for one generation, and how it leaves them.

Every rank opens a link to every other; what it sends goes over its own links, what it
receives comes through its endpoint. A connection that breaks and comes back may have
lost what was on it, so for a generation it is as good as a loss.

A rank does not leave before the others have what it sent to them. A socket that is
closed gives its last messages little time, and says nothing of them. So each of the
others is asked something; it answers when it has come to that, and so has taken all
that was sent before. Then it is told at once that this rank leaves, though others
answer later.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from zstrat.errors import (
    BusyError,
    ClosedError,
    CollectiveTimeoutError,
    DeadlineExceededError,
    PeerLostError,
    ZstratError,
)

from ._rendezvous import listed, rank_at, seat_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from zstrat.transport import Link
    from zstrat.wire import Hello, MemberEntry, Message

    from ._rendezvous import GroupSeat

    MakeLink = Callable[..., Link]
    """A `Link` of this process that lacks but the task, and who is told of it."""


def link_to(seat: GroupSeat, make: MakeLink, **events: Any) -> Link:
    """The link to the task of a seat, which is told ``events``; it is not started."""
    return make(seat.address, name=seat.task, expect=(seat.job, seat.number), **events)


class Mesh:
    """Links by rank. Belongs to the thread of its loop.

    Args:
        on_lost: Rank, why it can be reached no more, and whether it said goodbye; may
            be called more than once.
        on_flushed: What waited for a rank has left, or some of it.
    """

    def __init__(
        self,
        group: str,
        rank: int,
        members: Sequence[MemberEntry],
        make_link: MakeLink,
        *,
        on_lost: Callable[[int, str, bool], None],
        on_flushed: Callable[[], None],
    ) -> None:
        self._group, self._rank, self._members = group, rank, members
        self._on_lost = on_lost
        self._opened: set[int] = set()
        self.links: dict[int, Link] = {
            other: link_to(
                seat_of(member),
                make_link,
                on_open=partial(self._open_again, other),
                on_lost=partial(self._lost, other),
                on_flushed=on_flushed,
            )
            for other, member in enumerate(members)
            if other != rank
        }

    async def open(self, deadline: float) -> None:
        """Connects to all, at the same time.

        Raises:
            CollectiveTimeoutError: Some do not answer; names them.
            PeerLostError: One was started anew since the generation was formed.

        Cancellation: the links stay; `close` ends them.
        """
        for link in self.links.values():
            link.start()
        found = await asyncio.gather(
            *(link.wait_open(deadline) for link in self.links.values()),
            return_exceptions=True,
        )
        silent = []
        for rank, hello in zip(self.links, found, strict=True):
            if isinstance(hello, DeadlineExceededError):
                silent.append(self.name(rank))
            elif isinstance(hello, BaseException):
                raise hello
            elif hello.incarnation != self._members[rank].incarnation:
                raise PeerLostError(self.name(rank), "it was started anew meanwhile")
        if silent:
            raise CollectiveTimeoutError(
                f"group {self._group!r}: {listed(silent)} cannot be reached from "
                f"{self.name(self._rank)}, though rank 0 was: check the addresses of "
                "the cluster and the firewalls between its machines"
            )
        self._opened.update(self.links)

    def send(self, rank: int, message: Message) -> None:
        """Sends a notice. To a rank that is not connected nothing is sent: it will be
        said to be lost.

        Raises:
            BusyError: It does not read, and too many wait for it.
        """
        with suppress(PeerLostError, ClosedError):
            self.links[rank].notify(message)

    def ask(
        self, rank: int, message: Message, deadline: float
    ) -> asyncio.Future[Message]:
        """Sends a request; see `Link.submit`."""
        return self.links[rank].submit(message, deadline=deadline)

    def tell_all(self, message: Message, besides: Sequence[int] = ()) -> None:
        """To every other rank; one whose line is full hears of it later, from its own
        deadline or from the end of the link."""
        for rank in range(len(self._members)):
            if rank != self._rank and rank not in besides:
                with suppress(BusyError):
                    self.send(rank, message)

    def backlog(self, rank: int) -> int:
        """Messages that wait to leave for a rank."""
        return self.links[rank].backlog

    def name(self, rank: int) -> str:
        """What messages call a rank."""
        return rank_at(rank, seat_of(self._members[rank]))

    async def close(self, reason: str) -> None:
        """Says goodbye to all. Cancellation: the links are closed all the same."""
        self._opened.clear()
        await asyncio.gather(*(link.close(reason) for link in self.links.values()))

    def _open_again(self, rank: int, hello: Hello) -> None:
        if rank in self._opened:
            reason = "its connection broke, and came back without what was on it"
            self._on_lost(rank, reason, False)

    def _lost(self, rank: int, error: PeerLostError) -> None:
        self._on_lost(rank, error.reason, error.left)


async def wait_heard(
    mesh: Mesh,
    ranks: Iterable[int],
    question: Message,
    deadline: float,
    heard: asyncio.Future[None],
    has_heard: Callable[[int], None],
) -> None:
    """Returns when each of these ranks has what was sent to it, is gone, or it is too
    late; or as soon as somebody settles ``heard``. ``has_heard`` is called with each
    rank that has it.

    Cancellation: no answer is waited for any more.
    """
    asked: set[asyncio.Future[Message]] = set()

    def over(rank: int, answer: asyncio.Future[Message]) -> None:
        if not answer.cancelled() and answer.exception() is None:  # whatever it says
            has_heard(rank)
        asked.discard(answer)
        if not asked and not heard.done():
            heard.set_result(None)

    for rank in ranks:
        with suppress(ZstratError):  # its link is closed, or full of questions
            answer = mesh.ask(rank, question, deadline)
            asked.add(answer)
            answer.add_done_callback(partial(over, rank))
    try:
        if asked:
            await heard
    finally:
        for answer in list(asked):
            answer.cancel()

"""Links to the other ranks of a generation.

Every rank opens a link to every other rank: it sends over its own links, and receives
through its endpoint. A connection that breaks and reconnects may have lost messages, so
a generation treats a broken connection as the loss of the rank.

A rank leaves only after the others have received its messages. Closing a socket gives
the last messages little time, and does not report lost ones. So the rank sends each
other rank a request; the answer shows that all earlier messages were received. Each
rank that has answered is notified at once that this rank leaves.
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
    """Creates a `Link` of this process, given the address and the task that it connects
    to, and callbacks."""


def link_to(seat: GroupSeat, make: MakeLink, **events: Any) -> Link:
    """Creates the link to the task of a seat, with ``events`` as callbacks. The link is
    not started."""
    return make(seat.address, name=seat.task, expect=(seat.job, seat.number), **events)


class Mesh:
    """Links to all other ranks. Used on the loop's thread.

    Args:
        on_lost: Called with a lost rank, the reason, and whether the rank said goodbye;
            maybe more than once.
        on_flushed: Called when messages to some rank have left.
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
        """Opens the links to all other ranks at the same time.

        Raises:
            CollectiveTimeoutError: Some ranks do not answer; the error names them.
            PeerLostError: A rank was restarted since the generation was formed.

        Cancellation: the links stay open until `close`.
        """
        for link in self.links.values():
            link.start()
        # All of them, even if one fails: the error names every silent rank.
        answers = await asyncio.gather(
            *(link.wait_open(deadline) for link in self.links.values()),
            return_exceptions=True,
        )
        silent = []
        for rank, hello in zip(self.links, answers, strict=True):
            if isinstance(hello, DeadlineExceededError):
                silent.append(self.name(rank))
            elif isinstance(hello, BaseException):
                raise hello
            # Another process has its address by now, and knows nothing of this
            # generation.
            elif hello.incarnation != self._members[rank].incarnation:
                raise PeerLostError(self.name(rank), "it was restarted meanwhile")
        if silent:
            raise CollectiveTimeoutError(
                f"group {self._group!r}: {self.name(self._rank)} cannot reach "
                f"{listed(silent)}, but has reached rank 0: check the addresses of the "
                "cluster and the firewalls between its machines"
            )
        self._opened.update(self.links)

    def send(self, rank: int, message: Message) -> None:
        """Sends a notice to a rank. Sends nothing to a rank that is not connected, as
        `on_lost` will be called for it.

        Raises:
            BusyError: The rank does not read, and too many messages wait for it.
        """
        with suppress(PeerLostError, ClosedError):
            self.links[rank].notify(message)

    def ask(
        self, rank: int, message: Message, deadline: float
    ) -> asyncio.Future[Message]:
        """Sends a request to a rank, and returns the future of its answer; see
        `Link.submit`."""
        return self.links[rank].submit(message, deadline=deadline)

    def notify_all(self, message: Message, besides: Sequence[int] = ()) -> None:
        """Sends a notice to every other rank but ``besides``. A rank whose link is full
        does not get the notice: it notices the end by its own deadline, or by the end
        of the link."""
        for rank in range(len(self._members)):
            if rank != self._rank and rank not in besides:
                with suppress(BusyError):
                    self.send(rank, message)

    def backlog(self, rank: int) -> int:
        """Returns the number of messages to a rank that wait to be sent."""
        return self.links[rank].backlog

    def name(self, rank: int) -> str:
        """Returns the name of a rank, for texts of errors."""
        return rank_at(rank, seat_of(self._members[rank]))

    async def close(self, reason: str) -> None:
        """Says goodbye on all links and closes them, even if cancelled."""
        # A connection that comes back from here on is not a loss.
        self._opened.clear()
        await asyncio.gather(*(link.close(reason) for link in self.links.values()))

    def _open_again(self, rank: int, hello: Hello) -> None:
        if rank in self._opened:
            reason = "its connection broke, and messages on it may be lost"
            self._on_lost(rank, reason, False)

    def _lost(self, rank: int, error: PeerLostError) -> None:
        self._on_lost(rank, error.reason, error.left)


async def wait_received(
    mesh: Mesh,
    ranks: Iterable[int],
    question: Message,
    deadline: float,
    all_received: asyncio.Future[None],
    on_received: Callable[[int], None],
) -> None:
    """Waits until each of ``ranks`` has received all messages sent to it or is lost,
    until the deadline, or until ``all_received`` is done. Asks each rank the
    ``question`` to find out, and calls ``on_received`` with each rank that has received
    all."""
    asked: set[asyncio.Future[Message]] = set()

    def over(rank: int, answer: asyncio.Future[Message]) -> None:
        if not answer.cancelled() and answer.exception() is None:  # whatever it says
            on_received(rank)
        asked.discard(answer)
        if not asked and not all_received.done():
            all_received.set_result(None)

    for rank in ranks:
        with suppress(ZstratError):  # its link is closed, or full of questions
            answer = mesh.ask(rank, question, deadline)
            asked.add(answer)
            answer.add_done_callback(partial(over, rank))
    try:
        if asked:
            await all_received
    finally:
        # A copy: `over` is called for each one that is cancelled.
        for answer in list(asked):
            answer.cancel()

"""Where groups are formed of which this task is rank 0: the shell of `_membership`.

Whoever asks gets a future, and hears through it once all have come or time is up. All
of it belongs to the thread of the loop.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Final

from zstrat.errors import BusyError, ProtocolError

from ._membership import Formed, Refused, Rendezvous

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from zstrat.transport import Remote
    from zstrat.wire import JoinGroup, Message

    from ._choice import Choices
    from ._membership import GroupSeat

GROUPS: Final = 1024
"""Names of groups for which somebody may wait at rank 0."""


class Desk:
    """Rendezvous by name of group, and one timer for all of them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._rendezvous: dict[str, Rendezvous[asyncio.Future[Message]]] = {}
        self._asked: dict[asyncio.Future[Message], Remote] = {}
        self._timer: asyncio.TimerHandle | None = None

    def asks(self, remote: Remote, request: JoinGroup) -> asyncio.Future[Message]:
        """A task wants to be a member of a group whose rank 0 is here.

        Raises:
            ProtocolError: It does not say who it is.
            BusyError: Too many groups wait to be formed.
        """
        if request.member.incarnation != remote.hello.incarnation:
            raise ProtocolError(f"{remote.name} wants to join as somebody else")
        future: asyncio.Future[Message] = self._loop.create_future()
        self._asked[future] = remote
        self._ask(request, future)
        return future

    def open(
        self, request: JoinGroup, seats: Sequence[GroupSeat], choices: Choices
    ) -> asyncio.Future[Message]:
        """This task is rank 0 of a group, and knows who is to come; its answer."""
        rendezvous = self._rendezvous_of(request.group)
        self._obey(rendezvous.open(seats, choices.to_plain()))
        future: asyncio.Future[Message] = self._loop.create_future()
        self._ask(request, future)
        return future

    def lost(self, remote: Remote) -> None:
        """Who is gone waits no more."""
        for future in [f for f, who in self._asked.items() if who is remote]:
            future.cancel()

    def close(self) -> None:
        """Nobody is told that time is up any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _ask(self, request: JoinGroup, future: asyncio.Future[Message]) -> None:
        rendezvous = self._rendezvous_of(request.group)
        future.add_done_callback(lambda done: self._answered(request.group, done))
        self._obey(rendezvous.ask(request, future, self._loop.time()))
        self._arm()

    def _rendezvous_of(self, group: str) -> Rendezvous[asyncio.Future[Message]]:
        found = self._rendezvous.get(group)
        if found is None:
            if len(self._rendezvous) >= GROUPS:
                raise BusyError(f"{GROUPS} groups wait to be formed at this task")
            found = Rendezvous(group, new_ticket)
            self._rendezvous[group] = found
        return found

    def _answered(self, group: str, future: asyncio.Future[Message]) -> None:
        self._asked.pop(future, None)
        rendezvous = self._rendezvous.get(group)
        if rendezvous is not None:
            rendezvous.leave(future)
            if rendezvous.is_idle:
                del self._rendezvous[group]

    def _obey(
        self,
        orders: Sequence[
            Formed[asyncio.Future[Message]] | Refused[asyncio.Future[Message]]
        ],
    ) -> None:
        for order in orders:
            if isinstance(order, Formed):
                for future in order.to:
                    if not future.done():
                        future.set_result(order.answer)
            elif not order.token.done():
                order.token.set_exception(order.error)

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = min((each.due for each in self._rendezvous.values()), default=None)
        if due is not None and due != float("inf"):
            self._timer = self._loop.call_at(due, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now = self._loop.time()
        for rendezvous in list(self._rendezvous.values()):
            self._obey(rendezvous.tick(now))
        self._arm()


def new_ticket() -> int:
    """What no other generation of any group has: 63 random bits."""
    return secrets.randbits(63)

"""What a program before has left on all processes, and how this one goes on with it.

Each process says which copies it has; what follows of each store is decided in
`successors`, and ordered as any other change of where stores are. The law of this file:
what a process has said is so of the life that it had then. Who is lost later has said
what it had, and who comes back has nothing.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, NamedTuple, final

from zstrat.errors import DeadlineExceededError, PeerLostError, PSUnavailableError
from zstrat.transport import reached_as
from zstrat.wire import AskCopies, CloseSession, CopiesReport

from ._orders import CopyPhase
from ._successors import session_lost, successors

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence

    from zstrat.config import Timeouts
    from zstrat.wire import OrphanedCopy

    from ._store_orders import StoreOrders
    from ._successors import Successor

_ASKED_AGAIN: Final = 0.1
"""Seconds until all are asked once more what they have, as long as one may hear yet
that another is lost: nobody tells that to a program that has not taken them over."""


class _ProcessReport(NamedTuple):
    """What a process has said in one of its lives."""

    life: int
    copies: list[OrphanedCopy]


@final
class OrphanedStores:
    """The stores that a program of the same name has left. On the loop.

    Args:
        take_over_stores: Orders what becomes of these copies, when processes had these
            lives.
    """

    def __init__(
        self,
        orders: StoreOrders,
        name: str,
        timeouts: Timeouts,
        take_over_stores: Callable[[Mapping[int, Successor], Sequence[int]], None],
    ) -> None:
        self._orders, self._known = orders, orders.known
        self._name, self._timeouts = name, timeouts
        self._take_over_stores = take_over_stores
        self._told: dict[int, _ProcessReport] = {}
        """By process."""
        self.origin = 0
        """What keys are counted from."""

    async def find(self, deadline: float) -> Mapping[int, Successor]:
        """What is left of each store, as all processes tell; nothing if nothing is.
        Who was lost behind its answer has said what it had; the others are asked again
        then, as they may know by now that they have all.

        Raises:
            PSUnavailableError: Of a store no copy is left that has all.
            InvalidArgumentError: There are more stores than this program would have.
            DeadlineExceededError: A process does not answer.

        Cancellation: nothing has changed.
        """
        told, loop = self._told, asyncio.get_running_loop()
        session = self._orders.session
        noticed_within = self._timeouts.liveness + self._timeouts.reconnect
        until: float | None = None
        while True:
            lives = list(self._known.lives)
            asked = [
                n for n, at in enumerate(lives) if n not in told or told[n].life == at
            ]
            said = await asyncio.gather(*(self._copies_of(n, deadline) for n in asked))
            told.update(zip(asked, said, strict=True))
            # One was lost while they were asked: what the others know of it may change
            # yet.
            if lives != self._known.lives:
                until = loop.time() + noticed_within
                continue
            copies = {number: each.copies for number, each in told.items()}
            try:
                stores = len(self._orders.servers)
                return successors(self._name, session, copies, stores)
            except PSUnavailableError:
                if until is None:  # who lost the other one silently notices it by then
                    until = loop.time() + noticed_within
                if loop.time() >= until:
                    raise
            await asyncio.sleep(_ASKED_AGAIN)  # who has lost the other one hears it yet

    async def go_on(self, left: Mapping[int, Successor], deadline: float) -> None:
        """Has the copies serve that are to, and waits until they do.

        Raises:
            PSUnavailableError: Nothing is left of one of them any more.
            DeadlineExceededError: One does not answer.
        """
        self.origin = left[0].chosen.copy.origin
        await self.keep_origin(self.origin, deadline)
        processes = self._known.sessions
        self._take_over_stores(
            left, [self._told[each.place].life for each in processes]
        )
        await self._wait_served(deadline)

    async def keep_origin(self, origin: int, deadline: float) -> None:
        """All processes count keys from there, also those that have begun empty; or,
        if none has anything, from the number of this session.

        Raises:
            DeadlineExceededError: One does not answer.
        """
        for process in self._known.sessions:
            process.keep_origin(origin)
            if process.opened is not None and process.opened.origin != origin:
                # It has begun with another origin, with nothing: it enters once more.
                session = self._orders.session
                process.renew(session, [CloseSession(session, False)])
        for process in self._known.sessions:
            await process.wait_ready(deadline)

    async def unless_lost(self, work: Coroutine[None, None, None]) -> None:
        """Does what waits for stores that another program has left, until nothing is
        left of one of them.

        Raises:
            PSUnavailableError: That is so; says which one, and what to do.

        Cancellation: that of the work.
        """
        loop = asyncio.get_running_loop()
        waits = self._orders.wait_until(self._is_any_lost)
        doing = loop.create_task(work, name="going on with what was left")
        looking = loop.create_task(waits, name="looking for what is lost")
        both = doing, looking
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            self._require_left()
            await doing
        finally:
            for each in both:
                each.cancel()
            await asyncio.gather(*both, return_exceptions=True)

    async def _copies_of(self, number: int, deadline: float) -> _ProcessReport:
        """What it says that it has; it is asked again if it was lost before it said
        so."""
        process, known = self._known.sessions[number], self._known.addresses[number]
        ask = AskCopies(self._orders.session)
        while True:
            await process.wait_ready(deadline)
            life = self._known.lives[number]
            try:
                answer = await process.link.submit(ask, deadline=deadline)
            except PeerLostError:
                continue  # `wait_ready` waits until the link is open again
            assert isinstance(answer, CopiesReport), answer
            copies = [
                copy._replace(address=reached_as(copy.address or known, known))
                for copy in answer.copies
            ]
            return _ProcessReport(life, copies)

    async def _wait_served(self, deadline: float) -> None:
        stores, status = self._orders.placement.stores, self._orders.status
        waiting = (CopyPhase.DETACHING, CopyPhase.PROMOTING)
        try:
            async with asyncio.timeout_at(deadline):
                await self.unless_lost(
                    self._orders.wait_until(
                        lambda: all(s.phase not in waiting for s in stores)
                    )
                )
        except TimeoutError:
            raise DeadlineExceededError(
                f"resume={self._name!r}: what is left of it is not served in time: "
                f"{status.words()}; look at the logs of the parameter servers"
            ) from None

    def _is_any_lost(self) -> bool:
        return any(s.phase is CopyPhase.EMPTY for s in self._orders.placement.stores)

    def _require_left(self) -> None:
        for store in self._orders.placement.stores:
            if store.phase is CopyPhase.EMPTY:
                why = f"nothing is left of it: {store.reason}"
                raise session_lost(self._name, store.number, why)

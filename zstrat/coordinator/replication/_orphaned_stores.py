"""Finds the copies of stores that an earlier program has left on all processes, and
serves them.

Each process reports its copies; `successors` decides which copies continue, and orders
are sent for that as for any other change. The law of this file: a report is about the
life that the process has then (until it loses its memory). A process that is lost later
has reported the copies that it had, and is empty when it comes back.
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

    from ._orders import Successor
    from ._store_orders import StoreOrders

_ASKED_AGAIN: Final = 0.1
"""Seconds until all processes are asked again, while one of them may still notice that
another is lost: processes do not notify a program of that before it has taken them
over."""


class _ProcessReport(NamedTuple):
    """The copies that a process has reported in one of its lives."""

    life: int
    copies: list[OrphanedCopy]


@final
class OrphanedStores:
    """The stores that an earlier program of the same name has left. On the loop.

    Args:
        take_over_stores: Serves copies, given by store, that processes reported when
            they had the ``lives`` given.
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
        self._reports: dict[int, _ProcessReport] = {}
        """The report of each process, by index."""
        self.origin = 0
        """The number from which keys of the session are counted; 0 before `serve`."""

    async def find(self, deadline: float) -> Mapping[int, Successor]:
        """Asks all processes for their copies, and returns the copies with which each
        store continues; empty if nothing is left. A process that is lost after its
        report is not asked again. The other processes are asked again: they may have
        noticed by then that their copies are complete.

        Raises:
            PSUnavailableError: A store has no complete copy.
            InvalidArgumentError: There are more stores than this program would have.
            DeadlineExceededError: A process does not answer.

        Cancellation: nothing has changed.
        """
        reports, loop = self._reports, asyncio.get_running_loop()
        session = self._orders.session
        noticed_within = self._timeouts.liveness + self._timeouts.reconnect
        until: float | None = None
        while True:
            lives = list(self._known.lives)
            asked = [
                process
                for process, life in enumerate(lives)
                if process not in reports or reports[process].life == life
            ]
            # All are asked at once, and again in each turn: an earlier answer may be
            # from before its process noticed that the other copy was lost.
            answers = await asyncio.gather(
                *(self._copies_of(n, deadline) for n in asked)
            )
            reports.update(zip(asked, answers, strict=True))
            # One was lost while they were asked: the others may not have noticed yet.
            if lives != self._known.lives:
                until = loop.time() + noticed_within
                continue
            copies = {process: report.copies for process, report in reports.items()}
            try:
                stores = len(self._orders.servers)
                return successors(self._name, session, copies, stores)
            except PSUnavailableError:
                if until is None:  # a silent loss of the other copy is noticed by then
                    until = loop.time() + noticed_within
                if loop.time() >= until:
                    raise
            await asyncio.sleep(_ASKED_AGAIN)  # until the other copy's loss is noticed

    async def serve(self, orphans: Mapping[int, Successor], deadline: float) -> None:
        """Promotes the chosen copies, and waits until they serve.

        Raises:
            PSUnavailableError: Nothing is left of a store.
            DeadlineExceededError: A copy does not answer.
        """
        # Any store's will do: `successors` has checked that all have the same.
        self.origin = orphans[0].chosen.copy.origin
        await self.keep_origin(self.origin, deadline)
        processes = self._known.sessions
        self._take_over_stores(
            orphans, [self._reports[process.place].life for process in processes]
        )
        await self._wait_served(deadline)

    async def keep_origin(self, origin: int, deadline: float) -> None:
        """Sets the number from which all processes count keys, and waits for those that
        have begun with another number.

        Raises:
            DeadlineExceededError: A process does not answer.
        """
        for process in self._known.sessions:
            process.keep_origin(origin)
            if process.opened is not None and process.opened.origin != origin:
                # It began empty, with another origin: it enters once more.
                session = self._orders.session
                process.renew(session, [CloseSession(session, False)])
        for process in self._known.sessions:
            await process.wait_ready(deadline)

    async def unless_lost(self, work: Coroutine[None, None, None]) -> None:
        """Carries out work that needs all orphaned stores, and gives up when one of
        these is lost.

        Raises:
            PSUnavailableError: Nothing is left of a store; names the store, and what to
                do.

        Cancellation: that of the work.
        """
        loop = asyncio.get_running_loop()
        stores = self._orders.placement.stores
        # A store that is lost meanwhile never answers: `work` alone would wait for its
        # whole deadline.
        waits = self._orders.wait_until(
            lambda: any(store.phase is CopyPhase.EMPTY for store in stores)
        )
        doing = loop.create_task(work, name="serving orphaned stores")
        looking = loop.create_task(waits, name="watching orphaned stores")
        both = doing, looking
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            for store in stores:
                if store.phase is CopyPhase.EMPTY:
                    why = f"nothing is left of it: {store.reason}"
                    raise session_lost(self._name, store.number, why)
            await doing
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)

    async def _copies_of(self, number: int, deadline: float) -> _ProcessReport:
        """Asks a process for its copies; asks again if the process is lost before it
        answers."""
        process = self._known.sessions[number]
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
                copy._replace(
                    # A process names its copies by the address that it listens on,
                    # which may be 0.0.0.0; "" is its own.
                    address=reached_as(copy.address or process.address, process.address)
                )
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
                f"resume={self._name!r}: its stores are not served in time: "
                f"{status.words()}; look at the logs of the parameter servers"
            ) from None

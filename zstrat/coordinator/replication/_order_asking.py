"""Asks processes and copies for what was decided, one order for a store at a time, and
has `StorePlacement` hear what becomes of it.

The next order for a store takes the place of the one before, whose answer nobody awaits
then: it may be carried out all the same. On the loop thread.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Final, final

from zstrat.coordinator.connecting import ProbedTask
from zstrat.errors import (
    ClosedError,
    DeadlineExceededError,
    InvalidArgumentError,
    PeerLostError,
)
from zstrat.transport import reached_as
from zstrat.wire import (
    AttachBackup,
    DetachBackup,
    HostStore,
    Message,
    PromoteBackup,
    StoreHosted,
)

from ._orders import Attach, Detach, Establish, Host, Promote, Swap

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zstrat.config import Timeouts
    from zstrat.transport import MakeTaskLink

    from ._orders import Asked, PlacementOrder
    from ._store_processes import SessionStores

log = logging.getLogger("zstrat.coordinator")

ATTACH_SECONDS: Final = 86400.0
"""Seconds that a primary has to fill a backup: it is lost before, or the backup is."""


@final
class OrderAsking:
    """The orders of one session. ``session`` changes when stores begin anew.

    Args:
        carry_out: Does what follows.
    """

    def __init__(
        self,
        stores: SessionStores,
        session: int,
        timeouts: Timeouts,
        make_link: MakeTaskLink,
        carry_out: Callable[[Sequence[PlacementOrder]], None],
    ) -> None:
        self.session = session
        self._stores, self._carry_out = stores, carry_out
        self._timeouts, self._make_link = timeouts, make_link
        self._asking: dict[int, asyncio.Task[None]] = {}
        self._ended: list[asyncio.Task[None]] = []

    def ask(self, order: Asked) -> None:
        """Carries the order out; its owner is told."""
        earlier = self._asking.pop(order.store, None)
        if earlier is not None:
            earlier.cancel()
            self._ended = [task for task in self._ended if not task.done()] + [earlier]
        self._asking[order.store] = asyncio.get_running_loop().create_task(
            self._asked(order), name=f"{type(order).__name__} of store {order.store}"
        )

    def stop(self) -> None:
        """What was asked may be carried out; nobody waits for it."""
        for asking in self._asking.values():
            asking.cancel()
        self._ended += self._asking.values()
        self._asking.clear()

    async def wait_ended(self) -> None:
        """Waits until nothing is under way behind `stop`.

        Cancellation: as without.
        """
        await asyncio.gather(*self._ended, return_exceptions=True)

    async def _asked(self, order: Asked) -> None:
        placement = self._stores.placement
        hear: Callable[..., Sequence[PlacementOrder]] = placement.unanswered
        told = ""
        try:
            answer = await self._answer(order)
        except (PeerLostError, DeadlineExceededError, ClosedError) as error:
            told = str(error)
        except Exception as error:  # to the log, and to whoever decides: also OSError
            log.warning("%s: %s: %s", self._what(order), type(error).__name__, error)
            third = isinstance(error, InvalidArgumentError)
            hear = partial(placement.refused, never_counted=third)
            told = str(error)
        else:
            del self._asking[order.store]
            self._carry_out(self._done(order, answer))
            return
        del self._asking[order.store]
        self._carry_out(hear(order, told))

    async def _answer(self, order: Asked) -> Message:
        loop, session, view = asyncio.get_running_loop(), self.session, order.view
        deadline = loop.time() + ATTACH_SECONDS
        match order:
            case Host(store, _, number, beside):
                primary = self._stores.servers[store]
                process = self._stores.processes[number]
                await primary.wait_ready(deadline)
                await process.wait_ready(deadline)
                deadline = loop.time() + self._timeouts.request
                assert primary.hello is not None, "it has entered the session"
                named = primary.hello.incarnation
                host = HostStore(session, store, view, primary=named, beside=beside)
                return await process.link.submit(host, deadline=deadline)
            case Establish(store, _, number):
                process = self._stores.processes[number]
                await process.wait_ready(deadline)
                deadline = loop.time() + self._timeouts.request
                host = HostStore(session, store, view, True)
                return await process.link.submit(host, deadline=deadline)
            case Swap(store, _, number, backup):
                process = self._stores.processes[number]
                await process.wait_ready(deadline)
                named = backup.incarnation
                host = HostStore(session, store, view, primary=named, swaps=True)
                return await process.link.submit(host, deadline=deadline)
            case Attach(store, _, backup, beside):
                primary = self._stores.servers[store]
                await primary.wait_ready(deadline)
                at, number = backup.address, backup.incarnation
                attach = AttachBackup(session, view, at, number, beside)
                return await primary.link.submit(attach, deadline=deadline)
            case Detach(store):
                primary = self._stores.servers[store]
                await primary.wait_ready(deadline)
                detach = DetachBackup(session, view)
                return await primary.link.submit(detach, deadline=deadline)
            case Promote():
                return await self._promote(order)

    async def _promote(self, order: Promote) -> Message:
        """Over a link of its own: the program's line goes there when it is done."""
        deadline = asyncio.get_running_loop().time() + 2 * self._timeouts.liveness
        name, copy = self._stores.servers[order.store].name, order.backup
        backup = ProbedTask(
            "ps", order.store, copy.address, self._make_link, name, copy.incarnation
        )
        backup.start()
        try:
            await backup.wait_ready(deadline)
            promote = PromoteBackup(self.session, order.view)
            if (partner := order.partner) is not None:
                at, number = partner.address, partner.incarnation
                promote = PromoteBackup(self.session, order.view, at, number)
            return await backup.link.submit(promote, deadline=deadline)
        finally:
            await backup.link.close()

    def _done(self, order: Asked, answer: Message) -> Sequence[PlacementOrder]:
        placement = self._stores.placement
        match order:
            case Host():
                assert isinstance(answer, StoreHosted), answer
                return self._hosted(order, answer)
            case Establish():
                assert isinstance(answer, StoreHosted), answer
                address = self._reached(order, answer)
                return placement.created(order, address, answer.incarnation)
            case Swap():
                assert isinstance(answer, StoreHosted), answer
                address = self._reached(order, answer)
                return placement.swapped(order, address, answer.incarnation)
            case Attach():
                return placement.attached(order)
            case Detach():
                return placement.detached(order)
            case Promote():
                if placement.stores[order.store].target == order.backup.process:
                    return self._moved(order)
                self._log_failover(order)
                return placement.promoted(order)

    def _log_failover(self, order: Promote) -> None:
        """Names the process that is lost, and the store, which goes on elsewhere."""
        store = self._stores.placement.stores[order.store]
        name = self._stores.servers[order.store].name
        here = self._stores.processes[order.backup.process].name
        if not store.is_primary_known:
            words = "the store of %s goes on with the copy in the process of %s (%s)"
            log.warning(words, name, here, store.reason)
            return
        log.warning(
            "the process of %s is lost (%s): the store of %s, which it served, goes on "
            "in the process of %s with all that was acknowledged",
            self._stores.processes[store.primary.process].name,
            store.reason,
            name,
            here,
        )

    def _hosted(self, order: Host, answer: StoreHosted) -> Sequence[PlacementOrder]:
        address = self._reached(order, answer)
        orders = self._stores.placement.hosted(order, address, answer.incarnation)
        if self._stores.placement.stores[order.store].target == order.process:
            log.info(
                "the store of %s is copied to the process of %s, where it moves",
                self._stores.servers[order.store].name,
                self._stores.processes[order.process].name,
            )
        return orders

    def _reached(self, order: Host | Establish | Swap, answer: StoreHosted) -> str:
        return reached_as(answer.address, self._stores.addresses[order.process])

    def _moved(self, order: Promote) -> Sequence[PlacementOrder]:
        log.info(
            "the store of %s is in the process of %s now",
            self._stores.servers[order.store].name,
            self._stores.processes[order.backup.process].name,
        )
        return self._stores.placement.promoted(order)

    def _what(self, order: Asked) -> str:
        name = f"the store of {self._stores.servers[order.store].name}"
        processes = self._stores.processes
        match order:
            case Host(_, _, number):
                return f"{processes[number].name} keeps no backup of {name}"
            case Swap(_, _, number):
                return f"{processes[number].name} does not hand over {name}"
            case Establish(_, _, number):
                return f"{processes[number].name} does not host {name}"
            case Attach():
                return f"{name}: its server does not fill its backup"
            case Detach():
                return f"{name}: its server does not go on without its backup"
            case Promote():
                return f"{name}: its backup does not take its server's place"

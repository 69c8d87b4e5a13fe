"""One process of a parameter server: its own store, the backup copies of other
processes' stores that it hosts, and the state that it hands to its successor.

A hosted copy is a whole second parameter server in the process, with its own store,
compute thread, endpoint and incarnation. So each address belongs to one store, and no
request names a store. A copy lives until it is dropped, or its session is over.

If there is a state folder, a process begins with the state that the process before it
has left. The owner of its endpoint calls `inherit` before the endpoint is bound,
`take_over` directly after that, and `leave` when all accepted requests have been
answered. Lives on the event loop.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, final

from zstrat.errors import PermissionDeniedError, StaleSessionError, UnavailableError
from zstrat.transport import ZEROMQ, Endpoint, Link, new_incarnation
from zstrat.wire import (
    AskCopies,
    CopiesReport,
    Done,
    DropStore,
    HostStore,
    Message,
    OrphanedCopy,
    PromoteBackup,
    StoreHosted,
)

from ._roles import check_role
from ._service import PsService
from ._thread import ComputeThread
from .handover._handover import Handover, Inherited, StoreRole

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterator

    from zstrat.config import Settings
    from zstrat.transport import Handler, Remote, Security, Sockets
    from zstrat.wire import Hello, Owner, PlainTree

    from ._thread import MakeThread
    from .handover._handover import HandedOverStore
    from .replication._log_link import Connect

_LOG: Final = logging.getLogger("zstrat.ps")

RESTART: Final = "its next process takes over all it holds"
"""The reason that peers are given for the end of a process that hands its state to the
next one."""

_SHUT_DOWN: Final = "its process was shut down"

HostingRequest = AskCopies | HostStore | DropStore
_HOSTING: Final = AskCopies, HostStore, DropStore


@dataclass(frozen=True, slots=True)
class _HostedCopy:
    """A copy of another process's store that this process hosts. ``view`` is that of
    the order to host it; ``origin`` is the view of its session, which stays when the
    next program takes the session over."""

    session: int
    origin: int
    view: int
    hosted: StoreHosted
    service: PsService
    endpoint: Endpoint

    async def close(self, reason: str) -> None:
        """Finishes accepted requests and closes the copy. Cancellation: the address of
        the copy is free all the same."""
        try:
            await self.service.drain()
        finally:
            await self.endpoint.close(reason)

    def left(self, store: int) -> HandedOverStore:
        """Returns the state of the copy of ``store`` for the next process, when the
        copy is drained and closed."""
        state, hosted = self.service.role.state_for_successor(store), self.hosted
        return replace(state, address=hosted.address, incarnation=hosted.incarnation)


@final
class PsProcess:
    """All stores that one process of a parameter server holds.

    Args:
        me: The HELLO of the process.
        bind: The address to bind; copies get others of the same interface.
        settings: If they name a state folder, the next process takes over all stores of
            this one.
        on_exit: As in `PsService`.
        make_service: Makes the service of a store.
        make_thread: Makes the threads that read and write a state.
        draw: Draws an incarnation.
        sockets: Makes the sockets of the copies.
    """

    def __init__(
        self,
        me: Hello,
        bind: str,
        *,
        load_code: Callable[[bytes], object],
        settings: Settings,
        security: Security | None = None,
        on_exit: Callable[[], None] | None = None,
        make_service: Callable[..., PsService] = PsService,
        make_thread: MakeThread = ComputeThread,
        draw: Callable[[], int] = new_incarnation,
        sockets: Sockets = ZEROMQ,
    ) -> None:
        self._task, self._bind = f"/job:ps/task:{me.index}", bind
        self._load_code, self._make_service = load_code, make_service
        self._settings, self._security, self._on_exit = settings, security, on_exit
        self._draw, self._sockets = draw, sockets
        # One change of the copies at a time: each awaits sockets or a drain in between.
        self._changing = asyncio.Lock()
        # Strong references: the loop itself keeps weak ones only.
        self._ending: set[asyncio.Task[object]] = set()
        self._is_over = False
        self._is_taken_over = asyncio.Event()
        self._handover: Handover | None = None
        self._inherited: Inherited | None = None
        if settings.state is not None:
            self._handover = Handover(
                settings.state, me.index, self._task, make_thread, settings.spill
            )
            # On the loop: no request can be held up yet.
            largest = settings.limits.body
            self._inherited = self._handover.take(load_code, largest=largest)
        if (left := self._inherited) is None:
            self._begin(me, None)
        else:
            self._begin(replace(me, incarnation=left.incarnation), left.own)

    def _begin(self, me: Hello, left: HandedOverStore | None) -> None:
        self.me = me
        """The HELLO of the process; if the process takes over a state, with the
        incarnation of the process before."""
        self._copies: dict[int, _HostedCopy] = {}
        self.service = self._service(
            me,
            None,
            left,
            on_exit=self._on_exit,
            on_new_owner=self._follow_new_owner,
        )
        """The service of the process's own store."""

    def handle(
        self, remote: Remote, message: Message
    ) -> Message | Awaitable[Message] | None:
        """Answers requests about hosted copies, and passes all others to
        `PsService.handle`."""
        if isinstance(message, _HOSTING):
            return self._handle_hosting(remote, message)
        # Its own store may be with another process, and it still hosts copies.
        return self.service.handle(remote, message)

    async def inherit(self) -> bool:
        """Hosts the copies that the process before has hosted, each at its address;
        their requests wait until `take_over`. If an address is in use, ignores the
        whole state that was left: peers that know the incarnation would expect all of
        it.

        Returns:
            False if an address is in use: the process then begins empty, with another
            incarnation.

        Cancellation: some copies may be hosted already; `leave` ends them.
        """
        left = self._inherited
        if left is None or self._handover is None:
            return True
        try:
            for copy_left in left.copies:
                await self._inherit(left.owner, copy_left)
        except OSError as error:
            for copy in self._copies.values():
                await copy.endpoint.close()
            _LOG.error(
                "what the process before has left is not used, and this one begins "
                "empty: the address of a copy that it kept is taken: %s",
                error,
            )
            self._handover.took()
            # Another incarnation: what peers knew under the old one does not exist.
            self._inherited = None
            self._begin(replace(self.me, incarnation=self._draw()), None)
            return False
        return True

    def take_over(self) -> None:
        """Starts to answer requests for the inherited stores, including hosted copies.
        Called when the address is bound, and before the first request."""
        if self._inherited is not None and self._handover is not None:
            # Durably, before the first answer: no state may be used twice.
            self._handover.took()
            self.service.take_over(self._inherited.owner)
            self._is_taken_over.set()

    async def leave(self, endpoint: Endpoint, *, drained: bool) -> float:
        """Stops hosting copies, and hands all stores to the next process if there is a
        state folder; else drops all copies.

        Args:
            endpoint: The endpoint of the process. It is closed before the state is
                written if there are backups, so that peers need not wait for the
                writing.
            drained: Whether all requests that the process's own store has accepted are
                done.

        Returns:
            Seconds within which the next process takes over; 0 if no process will.

        Cancellation: stores that are not closed yet are closed with the process.
        """
        # Before anything is closed: `_host` refuses from now on.
        self._is_over = True
        owner, seconds = self.service.owner, self._settings.timeouts.handover
        if self._handover is None or owner is None:
            async with self._changing:
                for store in list(self._copies):
                    await self._drop(store, _SHUT_DOWN)
            return 0.0
        async with self._changing:
            # First: `_end_stale_copies` must not drop what the next process takes over.
            copies, self._copies = self._copies, {}
            # All or nothing: peers that know the incarnation expect all that it had.
            is_whole = False
            try:
                ends = [await copy.service.drain() for copy in copies.values()]
                is_whole = drained and all(ends)
            finally:
                # Peers wait for a next process only if that can have what is here.
                why, returns = (RESTART, seconds) if is_whole else (_SHUT_DOWN, 0.0)
                for copy in copies.values():
                    await copy.endpoint.close(why, returns)
        if not is_whole:
            _LOG.error(
                "what this process holds is lost with it: something that it had "
                "accepted did not end within ZSTRAT_DRAIN"
            )
            return 0.0
        role, left = self.service.role, [c.left(n) for n, c in copies.items()]
        own = role.state_for_successor(self.me.index)
        # The backups of what it serves may be promoted while it writes.
        if role.is_replicated:
            await endpoint.close(RESTART, seconds)
        whole = Inherited(self.me.incarnation, owner, own, left)
        return seconds if await self._handover.leave(whole, seconds) else 0.0

    def validate(self) -> None:
        """Checks the invariants of all stores of the process that hold between two
        events.

        Raises:
            AssertionError: An invariant is violated.
        """
        for service in (self.service, *[c.service for c in self._copies.values()]):
            service.role.validate()

    def statistics_of_copies(self) -> list[PlainTree]:
        """Returns the statistics of each hosted copy, with its store and address."""
        return [
            {
                "store": store,
                "address": copy.hosted.address,
                **copy.service.statistics(),
            }
            for store, copy in sorted(self._copies.items())
        ]

    async def _handle_hosting(self, remote: Remote, message: HostingRequest) -> Message:
        """Hosts or drops a copy by order of a coordinator, or lists the hosted copies.

        Raises:
            PermissionDeniedError: The caller is not a coordinator, or the process has a
                key that no other server has.
            StaleSessionError: The session is not the open one, or there is a newer
                view.
            OSError, ZstratError: No address can be bound.

        Cancellation: no copy is left incomplete.
        """
        check_role(self._task, remote, message)
        async with self._changing:
            if isinstance(message, AskCopies):
                # Not `_require`: what is asked changes nothing, and is answered to any
                # view.
                self._require_session(message.session)
                return CopiesReport(list(self._left()))
            self._require(message)
            if isinstance(message, HostStore):
                return await self._host(remote, message)
            # Its own store, which another process serves by now: this process may have
            # returned with the state that it had left.
            if message.store == self.me.index:
                self.service.give_up(message.view)
            await self._drop(message.store, "its coordinator does not need it")
            return Done()

    def _follow_new_owner(self, owner: Owner) -> None:
        """Moves the copies that this process hosts to the session of the program that
        takes over."""
        for store, copy in self._copies.items():
            # The same copy in another session: its contents and address stay.
            self._copies[store] = replace(copy, session=owner.session)
            copy.service.role.follow_new_owner(owner, self.service.coordinator_lost_at)

    def _left(self) -> Iterator[OrphanedCopy]:
        lost_at, number = self.service.coordinator_lost_at, self.me.index
        if (own := self.service.role.copy_of_lost_program(number, lost_at)) is not None:
            yield own
        for store, copy in self._copies.items():
            left = copy.service.role.copy_of_lost_program(store, lost_at)
            if left is not None:
                yield left._replace(address=copy.hosted.address)

    def _end_stale_copies(self) -> None:
        """Drops the copies of sessions that are over. Called when the session of the
        process, or of a copy, has changed. A copy that serves its store is dropped only
        when its own session is closed."""
        session = self.service.session
        for store, copy in self._copies.items():
            at = copy.service.session
            over = at is None if session is None else copy.session != session
            if over or (at is None and not copy.service.role.is_backup):
                # In a task: it is called from the end of a session, which cannot wait
                # for a drain.
                self._end_soon(self._end(store, copy), store)

    def _end_soon(self, ending: Coroutine[Any, Any, object], store: int) -> None:
        loop = asyncio.get_running_loop()
        task = loop.create_task(ending, name=f"dropping store {store}")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def _require(self, message: HostStore | DropStore) -> None:
        if self._is_over:
            raise UnavailableError(f"{self._task} is shutting down")
        if isinstance(message, HostStore):
            self._require_role_key()
        self._require_session(message.session)
        session, copy = self.service.session, self._copies.get(message.store)
        # Of the copy or of its role, which has been promoted in newer views since.
        newest = -1 if copy is None else max(copy.view, copy.service.role.view)
        if message.view < newest and copy is not None and copy.session == session:
            raise StaleSessionError(
                f"{self._task} keeps store {message.store} in view {newest}: view "
                f"{message.view} is over"
            )

    def _require_session(self, session: int) -> None:
        if (present := self.service.session) != session:
            raise StaleSessionError(
                f"{self._task} serves session {present or 0:#x}, and keeps no copies "
                f"for {session:#x}"
            )

    def _require_role_key(self) -> None:
        """Refuses to host a copy if the key of this process is for its own task alone:
        peers that connect to the copy expect the key of the task that the store belongs
        to."""
        if self._security is not None and self._security.index is not None:
            raise PermissionDeniedError(
                f"{self._task} has a key of its own, and so cannot serve the store of "
                "another task: replicas=1, stores_per_ps= and stores that move need "
                "one key per role, which `zstrat keygen` makes without --per-task"
            )

    async def _host(self, remote: Remote, message: HostStore) -> StoreHosted:
        store, copy = message.store, self._copies.get(message.store)
        owner = self.service.owner
        assert owner is not None, "it has the session of the message"
        asked = message.session, owner.origin, message.view
        if copy is not None:
            if (copy.session, copy.origin, copy.view) == asked:
                return copy.hosted  # asked again, as the answer was lost
            # A copy that swaps is still needed until its successor has everything.
            if not message.swaps:
                await self._drop(store, "an empty one takes its place")
        # Another incarnation: no peer may take the empty copy for an earlier one.
        me = replace(self.me, index=store, incarnation=self._draw())
        source = self.service if copy is None else copy.service
        # A copy that swaps has the content of the view before, not of a newer one.
        view = source.role.view if message.swaps else message.view
        service = self._service(me, (owner, view, message.primary), None)
        where = _beside(self._bind, store, me.incarnation)
        hosted = await self._serve(me, service, where, owner, message.view)
        # Empty and serving: a store of `stores_per_ps`, or one that starts over
        # elsewhere.
        if message.serves:
            promote = PromoteBackup(message.session, message.view)
            service.role.promoted(remote, promote)
        elif message.swaps:
            await self._swap(store, source, copy)
        elif message.beside:
            service.role.be_third()
        _LOG.info(
            "%s keeps a copy of store %d at %s", self._task, store, hosted.address
        )
        return hosted

    async def _swap(
        self, store: int, source: PsService, before: _HostedCopy | None
    ) -> None:
        """Swaps the roles of ``source``, which serves a store, and its backup in
        another process: the backup becomes the primary, and the content of ``source``
        moves to the newest hosted copy, which becomes the backup.

        Args:
            before: The copy that is replaced, if ``source`` is the service of a hosted
                copy.

        Raises:
            UnavailableError: The swap failed; ``source`` serves as before.

        Cancellation: ``source`` serves as before.
        """
        copy = self._copies[store]
        try:
            # Without a copy only its own store is served by this process.
            if before is None and store != self.me.index:
                raise UnavailableError(f"{self._task} does not serve store {store}")
            await source.hand_to(copy.service)
        except BaseException:  # to the coordinator
            del self._copies[store]
            # The new copy had taken its place.
            if before is not None:
                self._copies[store] = before
            await copy.close("the store stays where it was")
            raise
        if before is not None:
            # Not awaited: its drain would hold up the answer, and nobody needs it now.
            self._end_soon(before.close("another process serves its store"), store)

    async def _inherit(self, owner: Owner, left: HandedOverStore) -> None:
        number, where = left.number, left.address
        me = replace(self.me, index=number, incarnation=left.incarnation)
        # What served before is not asked again until an order says so in a newer view.
        is_backup = left.role in (StoreRole.BACKUP, StoreRole.NOTHING)
        service = self._service(me, (owner, left.view, 0) if is_backup else None, left)
        later = partial(self._later, service)
        await self._serve(me, service, where, owner, left.view, later)
        if not is_backup:
            service.take_over(owner)
        _LOG.info("%s keeps its copy of store %d at %s", self._task, number, where)

    def _service(
        self,
        me: Hello,
        backup_of: tuple[Owner, int, int] | None,
        left: HandedOverStore | None,
        **of_own: Any,
    ) -> PsService:
        return self._make_service(
            load_code=self._load_code,
            settings=self._settings,
            task=f"/job:ps/task:{me.index}",
            incarnation=me.incarnation,
            connect=_backup_links(me, self._settings, self._security, self._sockets),
            backup_of=backup_of,
            on_cleared=self._end_stale_copies,
            keeps_state=self._settings.state is not None,
            inherited=left,
            **of_own,
        )

    async def _later(
        self, service: PsService, remote: Remote, message: Message
    ) -> Message:
        # Another address may be taken, and then nothing of what was left is used.
        await self._is_taken_over.wait()
        answer = service.handle(remote, message)
        if inspect.isawaitable(answer):
            answer = await answer
        return Done() if answer is None else answer

    async def _serve(
        self,
        me: Hello,
        service: PsService,
        where: str,
        owner: Owner,
        view: int,
        handler: Handler | None = None,
    ) -> StoreHosted:
        endpoint = Endpoint(
            me,
            handler or service.handle,
            settings=self._settings,
            absorb=service.absorb,
            on_lost=service.lost,
            security=self._security,
            sockets=self._sockets,
        )
        # Bound before it is listed: an address that is taken leaves no copy.
        hosted = StoreHosted(await endpoint.bind(where), me.incarnation)
        copy = _HostedCopy(owner.session, owner.origin, view, hosted, service, endpoint)
        self._copies[me.index] = copy
        return hosted

    async def _drop(self, store: int, why: str) -> None:
        # Taken out first: while it drains, nobody may find it.
        copy = self._copies.pop(store, None)
        if copy is not None:
            await copy.close(why)
            _LOG.info("%s keeps no copy of store %d: %s", self._task, store, why)

    async def _end(self, store: int, copy: _HostedCopy) -> None:
        async with self._changing:
            # Another copy of the store may have taken its place while the lock was
            # waited for.
            if self._copies.get(store) is copy:
                await self._drop(store, "its session is over")


def _backup_links(
    me: Hello,
    settings: Settings,
    security: Security | None,
    sockets: Sockets,
) -> Connect:
    """Returns the function that makes links from the task ``me`` to a backup of its
    store."""
    return partial(
        Link,
        me=me,
        name=f"the backup of /job:{me.job}/task:{me.index}",
        settings=settings,
        security=security,
        sockets=sockets,
        expect=(me.job, me.index),
    )


def _beside(bind: str, store: int, incarnation: int) -> str:
    """Returns an unused address on the network interface of ``bind``, for a copy of
    ``store``."""
    # A socket file that is left over must not be taken for this one's.
    if bind.startswith("ipc:"):
        return f"{bind}.{store}-{incarnation:x}"
    return f"{bind.rpartition(':')[0]}:0"

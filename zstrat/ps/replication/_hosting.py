"""Second copies that one process keeps for others, each at an address of its own.

A copy is a whole parameter server beside the one of its process: store, compute thread,
endpoint and incarnation. So an address is a store, and no request says which one it
means. A copy lives until it is dropped, or its session is over.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final, final

from zstrat.errors import PermissionDeniedError, StaleSessionError, UnavailableError
from zstrat.ps._service import PsService
from zstrat.ps.handover._handover import StoreRole
from zstrat.transport import ZEROMQ, Endpoint, Link, new_incarnation
from zstrat.wire import (
    AskCopies,
    CopiesTold,
    Done,
    DropStore,
    HostStore,
    Job,
    LeftCopy,
    Message,
    StoreHosted,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from zstrat.config import Settings
    from zstrat.ps.handover import LeftStore
    from zstrat.transport import Handler, Remote, Security, Sockets
    from zstrat.wire import Hello, Owner, PlainTree

    from ._forwarding import Connect

_LOG: Final = logging.getLogger("zstrat.ps")

HostingRequest = AskCopies | HostStore | DropStore


@dataclass(frozen=True, slots=True)
class _HostedCopy:
    """``view`` is that in which it was asked for; ``origin`` that of its session, which
    a program that goes on with it keeps, and one that begins anew does not."""

    session: int
    origin: int
    view: int
    hosted: StoreHosted
    service: PsService
    endpoint: Endpoint

    async def close(self, reason: str, returns: float = 0.0) -> bool:
        """Whether all that was accepted was done in time. Cancellation: its address is
        free all the same."""
        try:
            return await self.service.drain()
        finally:
            await self.endpoint.close(reason, returns)

    def left(self, store: int) -> LeftStore:
        """What is there of it, behind `close`."""
        found, hosted = self.service.role.state_for_successor(store), self.hosted
        return replace(found, address=hosted.address, incarnation=hosted.incarnation)


@final
class HostedStores:
    """The copies that the process of a parameter server keeps for others.

    Args:
        own: The service of the process itself, and the HELLO of that.
        bind: The address of the process; copies get others of the same interface.
        make_service: Makes the service of a copy.
        draw: Draws an incarnation.
        sockets: Where those of the copies come from.
        keeps_state: They are left for another process, when this one ends.
    """

    def __init__(
        self,
        own: PsService,
        me: Hello,
        bind: str,
        *,
        load_code: Callable[[bytes], object],
        settings: Settings,
        security: Security | None,
        make_service: Callable[..., PsService] = PsService,
        draw: Callable[[], int] = new_incarnation,
        sockets: Sockets = ZEROMQ,
        keeps_state: bool = False,
    ) -> None:
        self._own, self._me, self._bind = own, me, bind
        self._task = f"/job:ps/task:{me.index}"
        self._load_code, self._make_service = load_code, make_service
        self._settings, self._security = settings, security
        self._draw, self._sockets, self._keeps_state = draw, sockets, keeps_state
        self._copies: dict[int, _HostedCopy] = {}
        self._changing = asyncio.Lock()
        self._ending: set[asyncio.Task[None]] = set()
        self._is_over = False
        self._is_taken_over = asyncio.Event()

    def statistics(self) -> list[PlainTree]:
        """The statistics of each copy, with its store and address."""
        return [
            {
                "store": store,
                "address": copy.hosted.address,
                **copy.service.statistics(),
            }
            for store, copy in sorted(self._copies.items())
        ]

    async def handle(self, remote: Remote, message: HostingRequest) -> Message:
        """Hosts or drops a copy for a coordinator, or tells it which are here.

        Raises:
            PermissionDeniedError: Somebody else asks, or the process has a key that no
                other server has.
            StaleSessionError: The session is not the open one, or the view is over.
            OSError, ZstratError: No address can be bound.

        Cancellation: nothing is left half made.
        """
        if remote.role is not Job.CHIEF:
            raise PermissionDeniedError(
                f"{self._task} takes {type(message).__name__} from a coordinator, and "
                f"{remote.name} is {remote.role}"
            )
        async with self._changing:
            if isinstance(message, AskCopies):
                self._require_session(message.session)
                return CopiesTold(list(self._left()))
            self._require(message)
            if isinstance(message, HostStore):
                return await self._host(remote, message)
            if message.store == self._me.index:  # another process serves it by now
                self._own.give_up(message.view)
            await self._drop(message.store, "its coordinator does not need it")
            return Done()

    def follow_new_owner(self, owner: Owner) -> None:
        """Another program goes on with what the process has."""
        for store, copy in self._copies.items():
            self._copies[store] = replace(copy, session=owner.session)
            copy.service.role.follow_new_owner(owner, self._own.coordinator_lost_at)

    def _left(self) -> Iterator[LeftCopy]:
        lost_at = self._own.coordinator_lost_at
        if (own := self._own.copy_of_lost_program(self._me.index, lost_at)) is not None:
            yield own
        for store, copy in self._copies.items():
            if (left := copy.service.copy_of_lost_program(store, lost_at)) is not None:
                yield left._replace(address=copy.hosted.address)

    def look(self) -> None:
        """Drops the copies of sessions that are over. To be called when the session of
        the process, or of a copy, has changed. A copy that serves goes only when its
        own session is closed."""
        mine = self._own.session
        for store, copy in self._copies.items():
            at = copy.service.session
            over = at is None if mine is None else copy.session != mine
            if over or (at is None and not copy.service.role.is_backup):
                task = asyncio.get_running_loop().create_task(
                    self._end(store, copy), name=f"dropping store {store}"
                )
                self._ending.add(task)
                task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Drops all copies, and takes no more.

        Cancellation: what is left is closed with the process.
        """
        self._is_over = True
        async with self._changing:
            for store in list(self._copies):
                await self._drop(store, "its process was shut down")

    async def leave(self, reason: str, returns: float) -> list[LeftStore] | None:
        """Closes all copies, and tells their peers to come back within ``returns``
        seconds.

        Returns:
            What is left of each; None if one did not finish in time what it had
            accepted.

        Cancellation: as `close`.
        """
        self._is_over = True
        async with self._changing:
            # Taken out first: `look` must not drop what the next process is to have.
            copies, self._copies = self._copies, {}
            ends = [await each.close(reason, returns) for each in copies.values()]
            if not all(ends):
                return None
            return [copy.left(store) for store, copy in copies.items()]

    async def inherit(self, owner: Owner, copies: Sequence[LeftStore]) -> None:
        """Hosts the copies that the process before has kept, each at its address.
        Requests wait until `take_over`.

        Raises:
            OSError: The address of one is taken; none is kept.

        Cancellation: some may be hosted already; `close` ends them.
        """
        self._is_taken_over.clear()
        try:
            for left in copies:
                await self._inherit(owner, left)
        except OSError:
            for copy in self._copies.values():
                await copy.endpoint.close()
            self._copies.clear()
            raise

    def take_over(self) -> None:
        """Lets the inherited copies answer, for the coordinator that they belong to."""
        self._is_taken_over.set()

    def _require(self, message: HostStore | DropStore) -> None:
        if self._is_over:
            raise UnavailableError(f"{self._task} is shutting down")
        if isinstance(message, HostStore):
            self._require_role_key()
        self._require_session(message.session)
        mine, copy = self._own.session, self._copies.get(message.store)
        newest = -1 if copy is None else max(copy.view, copy.service.role.view)
        if message.view < newest and copy is not None and copy.session == mine:
            raise StaleSessionError(
                f"{self._task} keeps store {message.store} in view {newest}, and view "
                f"{message.view} is over"
            )

    def _require_session(self, session: int) -> None:
        if (mine := self._own.session) != session:
            raise StaleSessionError(
                f"{self._task} serves session {mine or 0:#x}, and keeps no copies for "
                f"{session:#x}"
            )

    def _require_role_key(self) -> None:
        """Refuses to host where this process has a key of its own: whoever connects to
        a copy expects the key of the task whose store it is."""
        if self._security is not None and self._security.index is not None:
            raise PermissionDeniedError(
                f"{self._task} has a key of its own, and so cannot serve the store of "
                "another task: replicas=1, stores_per_ps= and stores that move need "
                "keys of roles, as `zstrat keygen` "
                "makes them without --per-task"
            )

    async def _host(self, remote: Remote, message: HostStore) -> StoreHosted:
        store, copy = message.store, self._copies.get(message.store)
        owner = self._own.owner
        assert owner is not None, "it has the session of the message"
        asked = message.session, owner.origin, message.view
        if copy is not None:
            if (copy.session, copy.origin, copy.view) == asked:
                return copy.hosted  # asked again, as the answer was lost
            await self._drop(store, "an empty one takes its place")
        # Another incarnation: nobody may take the empty copy for one that was here.
        me = replace(self._me, index=store, incarnation=self._draw())
        service = self._service(me, (owner, message.view, message.primary), None)
        where = _beside(self._bind, store, me.incarnation)
        hosted = await self._serve(me, service, where, owner, message.view)
        if message.serves:
            service.role.promoted(remote, message.view)
        _LOG.info(
            "%s keeps a copy of store %d at %s", self._task, store, hosted.address
        )
        return hosted

    async def _inherit(self, owner: Owner, left: LeftStore) -> None:
        number, where = left.number, left.address
        me = replace(self._me, index=number, incarnation=left.incarnation)
        is_backup = left.role in (StoreRole.BACKUP, StoreRole.NOTHING)
        service = self._service(me, (owner, left.view, 0) if is_backup else None, left)
        later = partial(self._later, service)
        await self._serve(me, service, where, owner, left.view, later)
        if not is_backup:
            service.take_over(owner)
        _LOG.info(
            "%s goes on with its copy of store %d at %s", self._task, number, where
        )

    def _service(
        self,
        me: Hello,
        backup_of: tuple[Owner, int, int] | None,
        left: LeftStore | None,
    ) -> PsService:
        return self._make_service(
            load_code=self._load_code,
            settings=self._settings,
            task=f"/job:ps/task:{me.index}",
            incarnation=me.incarnation,
            connect=backup_links(me, self._settings, self._security, self._sockets),
            backup_of=backup_of,
            on_cleared=self.look,
            keeps_state=self._keeps_state,
            inherited=left,
        )

    async def _later(
        self, service: PsService, remote: Remote, message: Message
    ) -> Message:
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
        hosted = StoreHosted(await endpoint.bind(where), me.incarnation)
        copy = _HostedCopy(owner.session, owner.origin, view, hosted, service, endpoint)
        self._copies[me.index] = copy
        return hosted

    async def _drop(self, store: int, why: str) -> None:
        copy = self._copies.pop(store, None)
        if copy is not None:
            await copy.close(why)
            _LOG.info("%s keeps no copy of store %d: %s", self._task, store, why)

    async def _end(self, store: int, copy: _HostedCopy) -> None:
        async with self._changing:
            if self._copies.get(store) is copy:
                await self._drop(store, "its session is over")


def backup_links(
    me: Hello,
    settings: Settings,
    security: Security | None,
    sockets: Sockets = ZEROMQ,
) -> Connect:
    """How the task ``me`` reaches a backup of its store, which has the same name."""
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
    """An address of the same interface that nothing is bound to."""
    if bind.startswith("ipc:"):
        return f"{bind}.{store}-{incarnation:x}"
    return f"{bind.rpartition(':')[0]}:0"

"""A backup: takes the changes of its primary in their order, and waits to be it.

Changes are made one after the other, what takes long on the compute thread. One counts
as taken when it is in memory here and not too much waits before it; so the primary does
not wait for the arithmetic, and cannot fill this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final, final

from zstrat.errors import (
    InvalidArgumentError,
    NotPrimaryError,
    PeerLostError,
    PermissionDeniedError,
    StaleSessionError,
    UnavailableError,
)
from zstrat.ps._requests import advance
from zstrat.wire import (
    BackupLost,
    ChangeProgram,
    CopyWhole,
    Done,
    Job,
    LogMade,
    LogTaken,
    Message,
    OpenLog,
    PromoteBackup,
)

from ._log import WINDOW, nbytes_of
from ._replay import CHANGES, replay

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from zstrat.ps._requests import PendingRequest
    from zstrat.ps._roles import Caller
    from zstrat.ps._thread import JobThread
    from zstrat.ps.store._store import Store

JUMP: Final = 2**40
"""By how much versions grow when a backup becomes the primary: an old one that nobody
can reach would need weeks to give out so many, and a field holds eight million jumps.
"""

_AT_ONCE: Final = 4 * 2**20
"""Bytes of changes that are made in one turn of the loop."""

_LOG: Final = logging.getLogger("zstrat.ps")


@final
class Backup:
    """The backup of one store of ``session``, named ``task`` in errors.

    Args:
        named: The incarnation of its primary, as the coordinator has said.
        on_promoted: Called once, when all is done that the old primary told, with who
            asked for it.
        on_made: Called with each change, and when it was begun to be made.
    """

    def __init__(
        self,
        task: str,
        store: Store,
        thread: JobThread,
        session: int,
        view: int,
        named: int,
        on_promoted: Callable[[Caller, PromoteBackup], None],
        clock: Callable[[], float],
        on_made: Callable[[Message, float], None],
    ) -> None:
        self.session, self.view, self._named = session, view, named
        self.is_whole = False
        """All is here, or waits here, that the primary has acknowledged."""
        self.failure = ""
        """How it differs from its primary."""
        self.is_beside = False
        """It is a third copy, of which its primary has not said yet that it counts."""
        self._task, self._store, self._thread = task, store, thread
        self._on_promoted = on_promoted
        self._clock, self._on_made = clock, on_made
        self._since = 0.0
        """When the change that is made was begun."""
        self._primary: Caller | None = None
        self._promotion: asyncio.Future[None] | None = None
        self._queue: deque[Message] = deque()
        self._nbytes = 0
        self._received = self._told = 0
        self._whole_at: int | None = None
        """The number of the change behind which nothing of the copy is missing."""
        self._is_busy = self._speaks_soon = self._goes_on_soon = False
        self._is_inherited = False
        self._begun = session
        """Whose steps are known here, when all is made that was taken."""
        self._earlier: set[int] = set()
        """Sessions of programs that are lost."""
        self._made_all = asyncio.Event()
        """Set when nothing waits here."""
        self._made_all.set()

    def statistics(self) -> dict[str, str | int | bool]:
        """How far the copy is: ``changes`` were received, ``behind`` of them wait."""
        return {
            "whole": self.is_whole,
            "primary": "" if self._primary is None else self._primary.name,
            "changes": self._received,
            "behind": len(self._queue),
            "error": self.failure,
        }

    def handle(
        self, remote: Caller, message: Message
    ) -> Message | Awaitable[Message] | None:
        """What its primary and the coordinator say.

        Raises:
            NotPrimaryError: It serves nobody yet.
            PermissionDeniedError: Somebody else says that it is the primary.
            StaleSessionError: The view, or the session, is over.
            UnavailableError: It cannot follow, or take its primary's place.
        """
        if type(message) in CHANGES and remote is self._primary:
            if self._promotion is None:
                self._take(message)
            return None
        if remote.role is Job.PS and isinstance(message, OpenLog):
            return self._open(remote, message)
        if remote.role is Job.CHIEF and isinstance(message, PromoteBackup):
            self.require(message.session, message.view)
            return self._promote(remote, message)
        raise NotPrimaryError(
            f"{self._task}: this process has the second copy of its variables, and "
            "does not serve it"
        )

    def require(self, session: int, view: int) -> None:
        """Refuses what is said of an older view, or of another session.

        Raises:
            StaleSessionError: The view, or the session, is over.
        """
        if session != self.session or view < self.view:
            raise StaleSessionError(
                f"{self._task}: this copy belongs to session {self.session:#x} and "
                f"view {self.view}, not to {session:#x} and {view}"
            )

    def _open(self, remote: Caller, opening: OpenLog) -> LogTaken | Awaitable[Message]:
        known = opening.session in self._earlier
        self.require(self.session if known else opening.session, opening.view)
        if remote.hello.incarnation != self._named:
            raise PermissionDeniedError(
                f"{self._task}: this copy takes changes from incarnation "
                f"{self._named:x} of it, as its coordinator has said, and "
                f"{remote.name} is {remote.hello.incarnation:x}: two processes serve "
                "one store, or a key is where it should not be"
            )
        if self._promotion is not None:
            return self._succeeded(self._promotion)
        if self._is_inherited:
            raise UnavailableError(
                f"{self._task}: this copy is of a process before, and takes no changes"
            )
        self.is_beside &= opening.view == self.view
        self._primary, self.view = remote, opening.view
        self._told = self._received
        self._tell(LogMade(self._made_count))  # it may not have heard it
        return LogTaken(self._received)

    async def _succeeded(self, promotion: asyncio.Future[None]) -> Message:
        """Answers a primary that asks while this copy takes its place, when it is known
        whether it does. Always raises."""
        await asyncio.shield(promotion)
        if self.failure:
            raise UnavailableError(f"{self._task}: {self.failure}")
        raise StaleSessionError(f"{self._task} has another primary by now")

    def _take(self, change: Message) -> None:
        self._received += 1
        if self.failure:
            return
        if isinstance(change, CopyWhole):
            self.is_whole, self._whole_at = True, self._received
        elif isinstance(change, ChangeProgram):
            self._begun = change.session
        self._queue.append(change)
        self._made_all.clear()
        self._nbytes += nbytes_of(change)
        self._speak()
        if not self._is_busy:
            self._go_on_soon()

    def _speak(self) -> None:
        """Once for all that a turn of the loop brings."""
        if self._nbytes <= WINDOW and not self._speaks_soon:
            self._speaks_soon = True
            asyncio.get_running_loop().call_soon(self._speak_now)

    def _speak_now(self) -> None:
        self._speaks_soon = False
        if self._primary is not None and self._told < self._received:
            self._told = self._received
            self._tell(LogTaken(self._received))

    def _tell(self, message: Message) -> None:
        if self._primary is None:
            return
        with contextlib.suppress(PeerLostError):  # it asks when it is back
            self._primary.notify(message)

    def _go_on_soon(self) -> None:
        if not self._goes_on_soon:
            self._goes_on_soon = True
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        """Makes changes until one has to be computed, or others have their turn."""
        self._goes_on_soon = False
        left = _AT_ONCE
        while self._queue and left > 0 and not self._is_busy:
            change = self._queue[0]
            left -= nbytes_of(change)
            self._since = self._clock()
            try:
                pending = advance(replay(self._store, change))
                if pending is None:
                    self._made()
                else:
                    self._compute(pending)
            except Exception as error:  # to the log and to the primary
                self._differ(change, error)
        if self._queue and not self._is_busy:
            self._go_on_soon()

    def _compute(self, pending: PendingRequest[None]) -> None:
        done = self._thread.submit(pending.plan.compute)
        self._is_busy = True
        done.add_done_callback(partial(self._computed, pending))

    def _computed(
        self, pending: PendingRequest[None], done: asyncio.Future[None]
    ) -> None:
        self._is_busy = False
        if not self._queue:  # it was closed meanwhile
            return
        try:
            advance(pending.running, done.exception())
        except BaseException as error:  # to the log and to the primary
            self._differ(self._queue[0], error)
        else:
            self._made()
            self._go_on()

    def _made(self) -> None:
        change = self._queue.popleft()
        self._nbytes -= nbytes_of(change)
        self._on_made(change, self._since)
        made, whole_at = self._made_count, self._whole_at
        if made == whole_at or (whole_at is None and not self._queue):
            self._tell(LogMade(made))
        if self._told < self._received:
            self._speak()
        if not self._queue:
            self._made_all.set()
            self._look_at_promotion()

    def _differ(self, change: Message, error: BaseException) -> None:
        """Notes that a change cannot be made here: the copy differs from the primary's
        store from here on, and is worth nothing."""
        what = f"{type(change).__name__} failed here: {type(error).__name__}: {error}"
        self.failure, self.is_whole = what, False
        _LOG.error("%s: the copy differs from its primary: %s", self._task, what)
        self._stop()
        self._tell(BackupLost(self.session, self.view, what))

    def inherit(self, *, is_whole: bool) -> None:
        """A process before has had this copy: it may take its primary's place, if it
        has all, and cannot follow it any further."""
        self._is_inherited, self.is_whole = True, is_whole

    def be_whole(self) -> None:
        """The store was given all that the primary has, whose versions have jumped."""
        self.is_whole = True
        self._store.variables.jump(JUMP)

    @property
    def partner(self) -> int:
        """The incarnation of the primary that it follows; 0 if it follows none."""
        follows = self.is_whole and not self._is_inherited and self._promotion is None
        return self._named if follows else 0

    def is_primary(self, remote: object) -> bool:
        """Whether the changes come from there."""
        return remote is self._primary

    def follow_new_owner(self, session: int) -> None:
        """Another program goes on, in this session. Steps begin anew when the primary
        says so, or when it has this copy take the primary's place before."""
        self._earlier.add(self.session)
        self.session = session

    async def finish(self, deadline: float) -> None:
        """Waits until all changes are made that were taken. Nothing more may come. If
        that is not so at the deadline (loop time), the copy is given up.

        Cancellation: they are made all the same.
        """
        try:
            async with asyncio.timeout_at(deadline):
                await self._made_all.wait()
        except TimeoutError:
            self.close()

    def close(self) -> None:
        """Makes nothing more here, as the copy was dropped."""
        self.failure, self.is_whole = self.failure or "it was dropped", False
        self._primary = None
        self._stop()

    def _stop(self) -> None:
        self._queue.clear()
        self._made_all.set()
        self._nbytes = 0
        self._look_at_promotion()

    async def _promote(self, remote: Caller, message: PromoteBackup) -> Message:
        """Nothing more is taken from now on. The primary is told when all is made that
        was: that it is replaced, or that this copy is of no use."""
        if self.is_beside:
            raise InvalidArgumentError(
                f"{self._task} cannot become the primary: this is a third copy, and "
                "its primary has not said that it counts"
            )
        if not self.is_whole:
            why = self.failure or "it has not everything yet"
            raise UnavailableError(f"{self._task} cannot become the primary: {why}")
        self.view = message.view
        if self._promotion is None:
            self._promotion = asyncio.get_running_loop().create_future()
            if not self._queue:
                self._look_at_promotion()
        # Who asks may go, and ask again by a new line: it goes on meanwhile.
        await asyncio.shield(self._promotion)
        if self.failure:
            raise UnavailableError(
                f"{self._task} cannot become the primary: {self.failure}"
            )
        self._on_promoted(remote, message)
        return Done()

    @property
    def _made_count(self) -> int:
        return self._received - len(self._queue)

    def _look_at_promotion(self) -> None:
        promotion = self._promotion
        if promotion is None or promotion.done():
            return
        if not self.failure:
            self._store.variables.jump(JUMP)
            # The old primary was to tell of that, and did not any more.
            if self._begun != self.session:
                self._store.change_program()
            self._tell(PromoteBackup(self.session, self.view))
            self._primary = None
        promotion.set_result(None)

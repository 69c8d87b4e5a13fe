"""A backup: replays the changes of its primary in their order, until it is promoted.

Changes are made one after the other, long ones on the compute thread. The backup
reports a change as taken when the change is in its memory, and the changes that wait
before it are not too many bytes. So the primary does not wait for the arithmetic, and
cannot fill the memory of this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
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

from ._log_link import WINDOW, nbytes_of
from ._replay import CHANGES, replay

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from zstrat.ps._requests import PendingRequest
    from zstrat.ps._roles import Caller
    from zstrat.ps._thread import JobThread
    from zstrat.ps.store._store import Store

JUMP: Final = 2**40
"""The number by which all versions grow when a backup becomes the primary, so that no
version is used twice. An old primary that is cut off would need weeks to give out so
many, and the field of a version has room for eight million jumps, or eight thousand of
a set, whose version is a sum of up to a thousand."""

_AT_ONCE: Final = 4 * 2**20
"""Bytes of changes that are made in one turn of the event loop."""

_LOG: Final = logging.getLogger("zstrat.ps")


class BackupState(enum.Enum):
    """The states of a backup, which decide whether it takes changes, and may be
    promoted.

    FILLING ──`CopyWhole`, or it is given a whole store──▶ WHOLE
    FILLING ──a process before left all of it──▶ INHERITED
    WHOLE, INHERITED ──a coordinator promotes it──▶ PROMOTING
    PROMOTING ──all changes are made──▶ PROMOTED
    any ──a change cannot be made, or it is dropped──▶ FAILED
    """

    FILLING = "filling"
    """The backup lacks a part of what its primary has acknowledged."""
    WHOLE = "whole"
    """The backup has all that its primary has acknowledged, made or waiting in its
    queue."""
    INHERITED = "inherited"
    """The backup is whole, but was handed over by a process before: it takes no further
    changes."""
    PROMOTING = "promoting"
    """The backup takes no further changes, and makes those that wait."""
    PROMOTED = "promoted"
    FAILED = "failed"
    """The backup differs from its primary, or was dropped."""


_WHOLE: Final = frozenset(BackupState) - {BackupState.FILLING, BackupState.FAILED}


@final
class Backup:
    """The backup of one store of ``session``, named ``task`` in errors.

    Args:
        named: The incarnation of the primary, according to the coordinator.
        on_promoted: Called with the coordinator and its order, when all changes from
            the old primary are made.
        on_made: Called with each change that was made, and the time at which it was
            begun.
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
        self.failure = ""
        """Why the backup is FAILED; "" in all other states."""
        self.is_beside = False
        """Whether this is a third copy, and its primary has not said yet that it counts
        as the backup."""
        self._state = BackupState.FILLING
        self._task, self._store, self._thread = task, store, thread
        self._on_promoted = on_promoted
        self._clock, self._on_made = clock, on_made
        self._began = 0.0
        """When the change that is being made now was begun."""
        self._primary: Caller | None = None
        self._promotion: asyncio.Future[None] | None = None
        """Done when it is known whether this copy becomes the primary; None before it
        is promoted."""
        self._queue: deque[Message] = deque()
        """Changes that were received, and not made yet."""
        self._nbytes = 0
        self._received = self._reported = 0
        """The number of changes received, and of those that were reported to the
        primary as taken."""
        self._whole_at: int | None = None
        """The number of the change `CopyWhole`, with which the copy is complete; None
        before it is received."""
        self._is_computing = False
        # Callbacks that the loop runs next, once for all changes of a turn:
        self._reports_soon = self._makes_soon = False
        self._steps_of = session
        """The session whose steps the store remembers, when all changes are made."""
        self._earlier: set[int] = set()
        """Sessions of earlier programs, which are lost."""
        self._made_all = asyncio.Event()
        """Set when no change waits."""
        self._made_all.set()

    @property
    def is_whole(self) -> bool:
        """Whether the backup has all that the primary has acknowledged, made or waiting
        in its queue."""
        return self._state in _WHOLE

    @property
    def partner(self) -> int:
        """The incarnation of the primary that sends changes to this backup; 0 if none
        does."""
        return self._named if self._state is BackupState.WHOLE else 0

    def statistics(self) -> dict[str, str | int | bool]:
        """Returns the progress of the backup: ``changes`` were received, ``behind`` of
        them wait to be made."""
        return {
            "whole": self.is_whole,
            "primary": "" if self._primary is None else self._primary.name,
            "changes": self._received,
            "behind": len(self._queue),
            "error": self.failure,
        }

    def validate(self) -> None:
        """Checks the invariants that hold between two events.

        Raises:
            AssertionError: An invariant is violated.
        """
        state = self._state
        assert (state is BackupState.FAILED) == bool(self.failure), state
        assert bool(self._queue) == bool(self._nbytes), "bytes of no change wait"
        assert bool(self._queue) != self._made_all.is_set()
        if self._queue:
            assert self._is_computing or self._makes_soon, "changes wait for nobody"
        if state in (BackupState.PROMOTING, BackupState.PROMOTED):
            assert self._promotion is not None, state
            assert self._promotion.done() == (state is BackupState.PROMOTED)
        if state is BackupState.PROMOTED:
            assert not self._queue, "it was promoted without some changes"
        assert self._reported <= self._received, "it reports what it has not received"

    def handle(
        self, remote: Caller, message: Message
    ) -> Message | Awaitable[Message] | None:
        """Handles changes and logs from the primary, and orders of the coordinator.

        Raises:
            NotPrimaryError: For any other request: a backup serves no variables.
            PermissionDeniedError: The sender is not the primary of this copy.
            StaleSessionError: There is a newer view or session.
            UnavailableError: The backup cannot take changes, or be promoted.
        """
        if type(message) in CHANGES and remote is self._primary:
            # Dropped and not refused: the promotion notifies the old primary.
            if self._promotion is None:
                self._take_change(message)
            return None
        if remote.role is Job.PS and isinstance(message, OpenLog):
            return self._open_log(remote, message)
        if remote.role is Job.CHIEF and isinstance(message, PromoteBackup):
            self.require(message.session, message.view)
            return self._promote(remote, message)
        raise NotPrimaryError(
            f"{self._task}: this process has a backup of its variables, and "
            "serves no requests for them"
        )

    def require(self, session: int, view: int) -> None:
        """Refuses an order for an older view, or for another session.

        Raises:
            StaleSessionError: There is a newer view or session.
        """
        if session != self.session or view < self.view:
            raise StaleSessionError(
                f"{self._task}: this copy belongs to session {self.session:#x} and "
                f"view {self.view}, not to {session:#x} and {view}"
            )

    def _open_log(
        self, remote: Caller, opening: OpenLog
    ) -> LogTaken | Awaitable[Message]:
        # The primary may still be of the program before, which has not said yet that it
        # changes.
        known = opening.session in self._earlier
        self.require(self.session if known else opening.session, opening.view)
        # A key proves which task it is, and the coordinator names the process.
        if remote.hello.incarnation != self._named:
            raise PermissionDeniedError(
                f"{self._task}: this copy takes changes from incarnation "
                f"{self._named:x} of it, according to its coordinator, and "
                f"{remote.name} is {remote.hello.incarnation:x}: two processes serve "
                "one store, or a key is on the wrong host"
            )
        # Its primary may have missed the notice of that, and must not count on it.
        if self._state is BackupState.FAILED:
            raise UnavailableError(f"{self._task}: {self.failure}")
        if self._promotion is not None:
            return self._succeeded(self._promotion)
        if self._state is BackupState.INHERITED:
            raise UnavailableError(
                f"{self._task}: this copy is of a process before, and takes no changes"
            )
        # A primary that names it in a newer view counts it among the two.
        self.is_beside &= opening.view == self.view
        self._primary, self.view = remote, opening.view
        # The answer says what was received, so no notice has to.
        self._reported = self._received
        self._notify(LogMade(self._made_count))  # the last one may not have arrived
        return LogTaken(self._received)

    async def _succeeded(self, promotion: asyncio.Future[None]) -> Message:
        """Answers a primary that opens its log while this copy is promoted: waits for
        the promotion, and always raises."""
        # Shielded, as the coordinator waits for the same promotion.
        await asyncio.shield(promotion)
        if self.failure:
            raise UnavailableError(f"{self._task}: {self.failure}")
        raise StaleSessionError(f"{self._task} has another primary")

    def _take_change(self, change: Message) -> None:
        # Numbers are those of the primary's log, whether or not a change can be made.
        self._received += 1
        if self.failure:
            return
        if isinstance(change, CopyWhole):
            # All that it lacked has been received, if not made.
            self._state, self._whole_at = BackupState.WHOLE, self._received
        elif isinstance(change, ChangeProgram):
            self._steps_of = change.session
        self._queue.append(change)
        self._made_all.clear()
        self._nbytes += nbytes_of(change)
        self._report()
        if not self._is_computing:
            self._make_soon()

    def _report(self) -> None:
        """Reports to the primary which changes were taken, once for all changes of a
        turn of the loop."""
        # Above the window nothing is reported, so that the primary stops sending.
        if self._nbytes <= WINDOW and not self._reports_soon:
            self._reports_soon = True
            asyncio.get_running_loop().call_soon(self._report_now)

    def _report_now(self) -> None:
        self._reports_soon = False
        if self._primary is not None and self._reported < self._received:
            self._reported = self._received
            self._notify(LogTaken(self._received))

    def _notify(self, message: Message) -> None:
        if self._primary is None:
            return
        with contextlib.suppress(PeerLostError):  # it asks when its link is back
            self._primary.notify(message)

    def _make_soon(self) -> None:
        if not self._makes_soon:
            self._makes_soon = True
            asyncio.get_running_loop().call_soon(self._make_changes)

    def _make_changes(self) -> None:
        """Makes waiting changes until one has to be computed on the thread, or
        `_AT_ONCE` bytes are made."""
        self._makes_soon = False
        left = _AT_ONCE
        while self._queue and left > 0 and not self._is_computing:
            # It stays in the queue until it is made, so that `_made_count` is right at
            # any time.
            change = self._queue[0]
            left -= nbytes_of(change)
            self._began = self._clock()
            try:
                self._continue(advance(replay(self._store, change)))
            except Exception as error:  # to the log and to the primary
                self._fail_change(change, error)
        if self._queue and not self._is_computing:
            self._make_soon()

    def _continue(self, pending: PendingRequest[None] | None) -> None:
        """Has the thread do the next job of the change that is being made now; None:
        the change is made."""
        if pending is None:
            self._change_made()
            return
        done = self._thread.submit(pending.job)
        self._is_computing = True
        done.add_done_callback(partial(self._computed, pending))

    def _computed(
        self, pending: PendingRequest[None], done: asyncio.Future[None]
    ) -> None:
        self._is_computing = False
        if not self._queue:  # it was dropped meanwhile
            return
        change = self._queue[0]
        try:
            self._continue(advance(pending.running, done.exception()))
        except BaseException as error:  # to the log and to the primary
            self._fail_change(change, error)
        else:
            self._make_changes()

    def _change_made(self) -> None:
        change = self._queue.popleft()
        self._nbytes -= nbytes_of(change)
        self._on_made(change, self._began)
        made, whole_at = self._made_count, self._whole_at
        # `LogShipping` waits for these while it fills the backup; afterwards nobody
        # does.
        if made == whole_at or (whole_at is None and not self._queue):
            self._notify(LogMade(made))
        # Reports had stopped at the window, and there is room again.
        if self._reported < self._received:
            self._report()
        if not self._queue:
            self._made_all.set()
            self._settle_promotion()

    def _fail_change(self, change: Message, error: BaseException) -> None:
        """Notes that a change cannot be made here: from now on this copy differs from
        the primary's store, and is of no use."""
        what = f"{type(change).__name__} failed here: {type(error).__name__}: {error}"
        self._fail(what)
        _LOG.error("%s: the copy differs from its primary: %s", self._task, what)
        self._stop()
        self._notify(BackupLost(self.session, self.view, what))

    def inherit(self, *, is_whole: bool) -> None:
        """Notes that the copy was handed over by a process before. If ``is_whole``, it
        may be promoted, but it can take no further changes."""
        if is_whole:
            self._state = BackupState.INHERITED
        else:
            self._fail("a process before has left only a part of this copy")

    def be_whole(self) -> None:
        """Counts the copy as whole, because its store was given all that the primary
        has. Versions jump."""
        self._state = BackupState.WHOLE
        # As those of the new primary when it was promoted: copies have equal versions.
        self._store.variables.jump(JUMP)

    def is_primary(self, remote: object) -> bool:
        """Returns whether a peer is the primary that sends changes to this backup."""
        return remote is self._primary

    def follow_new_owner(self, session: int) -> None:
        """Notes that another program takes over, in this session. Steps of its session
        are counted from the start when the primary sends `ChangeProgram`, or at a
        promotion before that."""
        self._earlier.add(self.session)
        self.session = session

    async def finish(self, deadline: float) -> None:
        """Waits until all received changes are made, while no more arrive. At the
        deadline (loop time) drops the copy.

        Cancellation: the changes are made all the same.
        """
        try:
            async with asyncio.timeout_at(deadline):
                await self._made_all.wait()
        except TimeoutError:
            self.close()

    def close(self) -> None:
        """Drops the copy: the backup makes no further changes."""
        self._fail(self.failure or "it was dropped")
        self._primary = None
        self._stop()

    def _fail(self, failure: str) -> None:
        self._state, self.failure = BackupState.FAILED, failure

    def _stop(self) -> None:
        self._queue.clear()
        self._made_all.set()
        self._nbytes = 0
        # A promotion that waits for the changes ends, and finds that it failed.
        self._settle_promotion()

    async def _promote(self, remote: Caller, message: PromoteBackup) -> Message:
        """Takes no changes from now on. When all received changes are made, notifies
        the primary: that it is replaced, or that this copy is of no use."""
        if self.is_beside:
            raise InvalidArgumentError(
                f"{self._task} cannot become the primary: this is a third copy, and "
                "its primary has not said that it counts"
            )
        self._require_whole()
        self.view = message.view
        if self._promotion is None:
            self._state = BackupState.PROMOTING
            self._promotion = asyncio.get_running_loop().create_future()
            if not self._queue:
                self._settle_promotion()
        # The coordinator may leave, and ask again over a new connection meanwhile.
        await asyncio.shield(self._promotion)
        # A change may have failed meanwhile.
        self._require_whole()
        self._on_promoted(remote, message)
        return Done()

    def _require_whole(self) -> None:
        if not self.is_whole:
            why = self.failure or "it does not have everything yet"
            raise UnavailableError(f"{self._task} cannot become the primary: {why}")

    @property
    def _made_count(self) -> int:
        return self._received - len(self._queue)

    def _settle_promotion(self) -> None:
        promotion = self._promotion
        if promotion is None or promotion.done():
            return
        if self._state is BackupState.PROMOTING:
            self._state = BackupState.PROMOTED
            self._store.variables.jump(JUMP)
            # The old primary was to say that, and could not.
            if self._steps_of != self.session:
                self._store.change_program()
            self._notify(PromoteBackup(self.session, self.view))
            self._primary = None
        promotion.set_result(None)

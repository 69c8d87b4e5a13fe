"""The way from a primary to its backup: a copy first, then every change as it comes.

Law of the file: from the moment at which the backup is told that nothing is missing
(`CopyWhole`), no answer leaves that the backup has not everything for which it stands.
Only a coordinator may end that, because only it knows that nobody makes the backup the
primary meanwhile.

While the copy is under way changes wait here, and nobody waits for them, unless they
are too many bytes. What the backup has to compile for them it compiles before it is
said to have all: so nobody waits for that either, then or when it takes the place. The
link may break and come back: the backup then says what it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple, final

import numpy as np

from zstrat.errors import (
    ClosedError,
    PeerLostError,
    StaleSessionError,
    UnavailableError,
    ZstratError,
)
from zstrat.ps.snapshots._snapshot import cut
from zstrat.ps.store._changes import with_log, without_log
from zstrat.wire import (
    BackupLost,
    CopiedPart,
    CopyParts,
    CopyWhole,
    Hello,
    LogMade,
    LogTaken,
    Message,
    OpenLog,
    PromoteBackup,
    Push,
)

from ._copying import StoreCopy, optimizer_code
from ._log import WINDOW, ReplicationLog, nbytes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence
    from contextlib import AbstractAsyncContextManager

    from zstrat.ps.snapshots._snapshot import TensorPart
    from zstrat.ps.store._store import Store
    from zstrat.transport import TaskLink
    from zstrat.wire import AttachBackup

    AreFree = Callable[[Iterable[Hashable]], bool]
    Turn = Callable[[Sequence[Hashable]], AbstractAsyncContextManager[AreFree]]
    Connect = Callable[..., TaskLink]
    """Makes a link to the backup at an address, which is told ``on_notice``,
    ``on_open`` and ``on_lost``."""
    """Names that the body has for itself; and whether others are free now."""

HELD: Final = 256 * 2**20
"""Bytes of changes that wait for the end of a copy, before those wait who make more."""

REHEARSAL: Final = 1.0
"""Seconds in which a push is to come, so that the backup compiles for it what it has to
before anybody waits for it. A store that nobody pushes to has nobody who waits."""

ROUNDS: Final = 16
"""So often a backup that is slower than its primary may catch up: behind that those who
push wait for it."""

_LOG: Final = logging.getLogger("zstrat.ps")


class _Answer(NamedTuple):
    """Leaves when the backup has the change ``number``."""

    number: int
    future: asyncio.Future[Message]
    message: Message


@final
class LogShipping:
    """To one backup of one store, which is empty at first.

    Args:
        turn: Holds off others from names.
        on_lost: Told why, each time that the backup cannot be reached any more.
        on_replaced: Told that the backup is the primary by now.
        is_whole: The backup has all that is here, and gets each change from now on.
    """

    def __init__(
        self,
        store: Store,
        turn: Turn,
        attached: AttachBackup,
        connect: Connect,
        *,
        on_lost: Callable[[str], None],
        on_replaced: Callable[[], None],
        is_whole: bool = False,
    ) -> None:
        self.attached = attached
        """What it was asked for by."""
        self.failure = ""
        """Why the backup cannot be reached; "" if it can."""
        self.is_strict = False
        """The backup has all that answers stand for, and only a coordinator may say
        that it need not."""
        self._store, self._turn = store, turn
        self._on_lost, self._on_replaced = on_lost, on_replaced
        self._log = ReplicationLog()
        self._held: list[Message] = []
        self._held_bytes = 0
        self._answers: deque[_Answer] = deque()
        self._slowed: list[tuple[asyncio.Future[Message], Message]] = []
        self._news = asyncio.Event()
        self._flows = self._is_over = self._is_diverged = False
        self._opening: asyncio.Future[Message] | None = None
        """Asks the backup what it has: the answer to an earlier one says nothing."""
        self._made = 0
        """The backup has made so many changes, as far as it has said."""
        self._has_pushes = False
        """One came since the moment that is copied."""
        self.ending: asyncio.Task[None] | None = None
        """Closes the link, after `release`, `refuse` or `abandon`. Whoever calls these
        keeps it."""
        self._link = connect(
            attached.address,
            on_notice=self._noticed,
            on_open=self._opened,
            on_lost=lambda error: self._lost(error.reason),
        )
        if is_whole:
            self.is_strict = True
            store.log = with_log(store.log, self)

    def statistics(self) -> dict[str, str | int]:
        """How the backup stands: ``behind`` changes that it does not have, in
        ``log_bytes`` of memory, and ``unacknowledged`` answers that wait for it."""
        state = "copying" if not self.is_strict else "attached"
        if self.failure:
            state = "lost"
        elif not self._link.is_heard:  # it may be back in time, or be gone
            state = "unknown"
        return {
            "backup": self.attached.address,
            "backup_state": state,
            "backup_error": self.failure,
            "behind": self._log.head - self._log.taken + len(self._held),
            "log_bytes": self._log.nbytes + self._held_bytes,
            "unacknowledged": len(self._answers) + len(self._slowed),
        }

    def append(self, change: Message) -> None:
        """See `ChangeLog`."""
        if not self.is_strict:
            self._held.append(change)
            self._held_bytes += nbytes_of(change)
            if isinstance(change, Push) and not self._has_pushes:
                self._has_pushes = True
                self._news.set()
            return
        self._log.append(change)
        self._send()

    def mark_diverged(self, why: str) -> None:
        """See `ChangeLog`."""
        self._is_diverged = True
        self._lost(f"it cannot follow any more: {why}")

    def hold(self, message: Message) -> Message | asyncio.Future[Message]:
        """See `ChangeLog`."""
        if self._may_leave:
            return message
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._wait(future, message)
        return future

    def answer(self, future: asyncio.Future[Message], message: Message) -> None:
        """See `ChangeLog`."""
        if self._may_leave:
            future.set_result(message)
        else:
            self._wait(future, message)

    @property
    def _may_leave(self) -> bool:
        if self._is_over:
            return True
        if not self.is_strict:
            return self._held_bytes + self._log.nbytes < HELD
        return self._log.is_taken

    def _wait(self, future: asyncio.Future[Message], message: Message) -> None:
        if self.is_strict:
            self._answers.append(_Answer(self._log.head, future, message))
        else:
            self._slowed.append((future, message))

    async def settled(self) -> None:
        """Waits until no answer waits for the backup any more, or none can leave by
        itself, as the backup is lost.

        Cancellation: loses nothing.
        """
        with contextlib.suppress(UnavailableError):
            await self._until(lambda: not self._answers and not self._slowed)

    def release(self) -> None:
        """Ends the log shipping, as the primary goes on alone: what waits may leave."""
        self._end()
        for future, message in self._take_answers():
            if not future.done():
                future.set_result(message)

    def abandon(self) -> None:
        """Ends the log shipping without a word: callers of answers that wait learn from
        their connections that these end."""
        self._end()
        self._take_answers()

    def refuse(self, error: ZstratError) -> None:
        """Ends the log shipping, and fails the answers that wait with the error."""
        self._end()
        for future, _ in self._take_answers():
            if not future.done():
                future.set_exception(error)

    def _end(self) -> None:
        if self._is_over:
            return
        self._is_over, self._flows = True, False
        self._store.log = without_log(self._store.log, self)
        self._held.clear()
        self._news.set()
        self.ending = asyncio.get_running_loop().create_task(
            self._link.close("it has no backup any more"), name="closing a backup"
        )

    def _take_answers(self) -> list[tuple[asyncio.Future[Message], Message]]:
        waiting = [(each.future, each.message) for each in self._answers]
        waiting += self._slowed
        self._answers.clear()
        self._slowed = []
        return waiting

    def _opened(self, hello: Hello) -> None:
        self._flows = False
        if self._is_diverged:
            return
        if hello.incarnation != self.attached.incarnation:
            self._is_diverged = True
            self._lost("its process has lost it: it was started anew")
            return
        self._open_log()

    def _open_log(self) -> None:
        self._flows = False
        opening = OpenLog(self.attached.session, self.attached.view)
        self._opening = self._link.submit(opening)
        self._opening.add_done_callback(self._resumed)

    def _resumed(self, opened: asyncio.Future[Message]) -> None:
        if opened.cancelled() or self._is_over or opened is not self._opening:
            return
        error = opened.exception()
        if error is None:
            taken = opened.result()
            assert isinstance(taken, LogTaken)
            if self._acknowledged(taken.number, resumed=True):
                self._flows, self.failure = True, ""
                self._send()
        elif isinstance(error, StaleSessionError):
            self._replaced()
        elif not isinstance(error, PeerLostError | ClosedError):
            self._lost(f"it refuses the log: {error}")

    def _noticed(self, message: Message) -> None:
        if self._is_over:
            return
        match message:
            case LogTaken(number=number):
                if self._flows:
                    self._acknowledged(number)
                    self._send()
            case LogMade(number=number):
                self._made = max(self._made, number)
                self._news.set()
            case BackupLost(reason=reason):
                self.mark_diverged(reason)
            case PromoteBackup():
                self._replaced()

    def _acknowledged(self, number: int, *, resumed: bool = False) -> bool:
        log = self._log
        try:
            if resumed:
                log.resume(number)
            else:
                log.acknowledge(number)
        except ZstratError as error:  # to the coordinator, as the loss of the backup
            self.mark_diverged(str(error))
            return False
        answers = self._answers
        while answers and answers[0].number <= log.taken:
            _, future, message = answers.popleft()
            if not future.done():
                future.set_result(message)
        self._news.set()
        return True

    def _replaced(self) -> None:
        if not self._is_over:
            self._on_replaced()

    def _lost(self, why: str) -> None:
        self._flows = False
        if self._is_over or self.failure:
            return
        self.failure = why
        _LOG.warning("the backup at %s is lost: %s", self.attached.address, why)
        self._news.set()
        self._on_lost(why)

    def _send(self) -> None:
        while self._flows and (change := self._log.take()) is not None:
            try:
                self._link.notify(change)
            except (PeerLostError, ClosedError):  # sent again when the link is back
                self._flows = False
            except (TypeError, ValueError) as error:
                self.mark_diverged(str(error))

    async def keep(self, attached: AttachBackup) -> None:
        """Tells the backup that it stays the backup, in a newer view, for another
        program.

        Raises:
            UnavailableError: It is lost, or is no longer wanted.

        Cancellation: as if it was told.
        """
        # What is under way in pieces may come in behind the question what is there.
        await self._until(lambda: self._flows and self._log.is_taken)
        if self.attached != attached:
            self.attached = attached
            self._open_log()
        await self._until(lambda: self._flows)

    async def copy(self, deadline: float) -> None:
        """Makes the backup whole, and waits until it has made what it was told.

        Args:
            deadline: Loop time until which the backup has to be there.

        Raises:
            UnavailableError: It is lost, or is no longer wanted.
            ZstratError: As of `Link.wait_open`.

        Cancellation: it is not whole; `release` ends it.
        """
        self._link.start()
        await self._link.wait_open(deadline)
        await self._until(lambda: self._flows)
        # Loading jax takes seconds, which nothing has to wait for yet. One that is
        # withdrawn before the cut would be found to differ, and the backup refused.
        for message in optimizer_code(self._store):
            await self._pass_on(message)
        await self._all_made()
        copy = await self._cut()
        try:
            for message in copy.messages:
                await self._pass_on(message)
            for parts in cut(copy.tensors):
                await self._pass_on(await self._read(parts))
                for part in parts:
                    part.tensor.pin.forget(part.stop)
        finally:
            copy.release()
        await self._rehearse()
        self._become_strict()
        await self._all_made()

    async def follow(self, deadline: float) -> None:
        """Connects to a backup that has all.

        Args:
            deadline: Loop time until which the backup has to be there; else it is lost.

        Cancellation: `release` ends it.
        """
        self._link.start()
        try:
            await self._link.wait_open(deadline)
        except ZstratError as error:  # to the coordinator
            self._lost(str(error))

    async def give_way(self, stand_aside: Callable[[], None]) -> None:
        """Waits until the backup has all that there is, while nothing more comes and
        nothing is computed; then the log shipping is over.

        Args:
            stand_aside: Refuses whatever comes from then on.

        Raises:
            UnavailableError: The backup is lost, or is no longer wanted.

        Cancellation: as an error.
        """
        names = self._names()
        async with self._turn(names):
            self._require_wanted()
            stand_aside()
            await self._until(lambda: self._flows and self._log.is_taken)
            self.release()

    async def _rehearse(self) -> None:
        """Has the backup make all that came during the copy; where pushes are computed,
        waits for one, so that the backup has compiled for it before anybody waits."""
        if self._store.engine.programs:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REHEARSAL):
                    await self._until(lambda: self._has_pushes)
        for _ in range(ROUNDS):
            self._pass_held()
            await self._all_made()
            if self._held_bytes < WINDOW // 2:
                return

    async def _all_made(self) -> None:
        head = self._log.head
        await self._until(lambda: self._made >= head)

    def _pass_held(self) -> None:
        self._require_wanted()
        for change in self._held:
            self._log.append(change)
        self._held, self._held_bytes = [], 0
        self._send()

    def _become_strict(self) -> None:
        self._pass_held()
        self._log.append(CopyWhole())
        self.is_strict = True
        slowed, self._slowed = self._slowed, []
        for future, message in slowed:
            self._wait(future, message)
        self._send()

    async def _cut(self) -> StoreCopy:
        """The store at one moment between two changes. From then on changes are kept
        for the backup."""
        while True:
            names = self._names()
            async with self._turn(names) as are_free:
                self._require_wanted()
                # Most that came while it waited have been at rest since: who creates
                # without end does not put it off.
                if are_free(set(self._names()).difference(names)):
                    copy = StoreCopy(self._store)
                    self._store.log = with_log(self._store.log, self)
                    return copy

    def _names(self) -> list[Hashable]:
        optimizers = (("optimizer", known.optimizer) for known in self._store.engine)
        return [*self._store.variables, *optimizers]

    async def _pass_on(self, message: Message) -> None:
        self._require_wanted()
        self._log.append(message)
        self._send()
        await asyncio.sleep(0)  # requests come between two pieces
        await self._until(lambda: self._log.nbytes < WINDOW)

    async def _read(self, parts: list[TensorPart]) -> CopyParts:
        places, arrays = [], []
        for tensor, start, stop in parts:
            data = tensor.pin.view(start, stop)
            if data is None:
                data = np.empty(stop - start, np.uint8)
                async with self._turn([tensor.entry.key]):
                    tensor.pin.copy(start, data)
            arrays.append(data)
            entry = tensor.entry
            places.append(CopiedPart(entry.key, entry.optimizer, entry.leaf, start))
        return CopyParts(places, tuple(arrays))

    async def _until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self._require_wanted()
            self._news.clear()
            await self._news.wait()

    def _require_wanted(self) -> None:
        if self._is_over:
            raise UnavailableError("the backup is not wanted any more")
        if self.failure:
            raise UnavailableError(
                f"the backup at {self.attached.address} is lost: {self.failure}"
            )

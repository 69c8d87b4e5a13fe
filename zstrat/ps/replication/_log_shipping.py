"""Ships the changes of a primary to one backup: first a copy of the store, then each
change.

Law of the file: from the moment at which the backup receives `CopyWhole`, the primary
sends no answer unless the backup has every change that the answer acknowledges. Only a
coordinator may end that, because only a coordinator knows that nobody promotes the
backup meanwhile.

While the backup is filled, changes are held here, and answers do not wait for them
unless they are too many bytes. The backup compiles the programs that the changes need
before it counts as whole, so no answer waits for compiling, then or after a promotion.
The link may break and reconnect: the backup then reports which changes it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple, final

import numpy as np

from zstrat.errors import (
    UnavailableError,
    ZstratError,
)
from zstrat.ps.snapshots._snapshot import cut
from zstrat.ps.store._changes import with_log, without_log
from zstrat.wire import (
    CopiedPart,
    CopyParts,
    CopyWhole,
    Message,
    Push,
)

from ._log_link import WINDOW, LogLink, nbytes_of
from ._replay import StoreCopy, optimizer_code

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Hashable, Iterable, Sequence
    from contextlib import AbstractAsyncContextManager

    from zstrat.ps.snapshots._snapshot import TensorPart
    from zstrat.ps.store._store import Store
    from zstrat.wire import AttachBackup

    from ._log_link import Connect

    AreFree = Callable[[Iterable[Hashable]], bool]
    Turn = Callable[[Sequence[Hashable]], AbstractAsyncContextManager[AreFree]]
    """Holds names, so that no other request uses them, while its body runs; yields a
    function that returns whether names are free."""

HELD: Final = 256 * 2**20
"""Bytes of changes that are held while a backup is filled; above that, answers to
further changes wait."""

REHEARSAL: Final = 1.0
"""Seconds to wait for a push, for which the backup then compiles before any answer
waits for the backup. If no push comes, no answer waits."""

ROUNDS: Final = 16
"""The most rounds in which a backup that is slower than its primary may catch up. After
them, pushes wait for the backup."""


class _Answer(NamedTuple):
    """An answer that is sent when the backup has the change ``number``."""

    number: int
    future: asyncio.Future[Message]
    message: Message


class ShippingStage(enum.Enum):
    """The stages of a backup, by how much of the store it has.

    FILLING ──`CopyWhole` is in the log──▶ WHOLE
       └───── release, refuse, abandon ──────┴─▶ OVER
    """

    FILLING = "copying"
    WHOLE = "attached"
    """The backup has every change that an answer acknowledged; only a coordinator may
    end that."""
    OVER = "over"


@final
class LogShipping:
    """Ships the changes of one store to one backup, which is empty at first.

    Args:
        turn: Holds names, so that no other request uses them, while its body runs.
        on_lost: Receives the reason, each time that the backup becomes unreachable.
        on_replaced: Called when the backup has become the primary.
        is_whole: Whether the backup has everything already, and gets each change from
            now on.
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
        self.work: asyncio.Task[None] | None = None
        """The task that fills the backup, or connects to one that is whole. See
        `work_on`."""
        self.ending: asyncio.Task[None] | None = None
        """The task that closes the link after `release`, `refuse` or `abandon`, whose
        callers keep a reference to it."""
        self._store, self._turn = store, turn
        self._stage = ShippingStage.FILLING
        self._held: list[Message] = []
        """Changes made since the store was copied, while the backup is filled."""
        self._held_bytes = 0
        self._answers: deque[_Answer] = deque()
        """Answers that wait until the backup has a change."""
        self._slowed: list[tuple[asyncio.Future[Message], Message]] = []
        """Answers that wait because more than `HELD` bytes of changes are held."""
        self._progress = asyncio.Event()
        """Set when a condition that `_until` waits for may have become true."""
        self._has_pushes = False
        """Whether a push was applied since the store was copied."""
        self._link = LogLink(
            attached,
            connect,
            on_progress=self._progressed,
            on_lost=on_lost,
            on_replaced=on_replaced,
        )
        if is_whole:
            self._stage = ShippingStage.WHOLE
            store.log = with_log(store.log, self)

    @property
    def is_whole(self) -> bool:
        """Whether the backup has every change that an answer acknowledged."""
        return self._stage is ShippingStage.WHOLE

    @property
    def is_over(self) -> bool:
        return self._stage is ShippingStage.OVER

    @property
    def attached(self) -> AttachBackup:
        """The order that asked for the backup."""
        return self._link.attached

    @property
    def failure(self) -> str:
        """Why the backup is lost; "" if it is not lost."""
        return self._link.failure

    def statistics(self) -> dict[str, str | int]:
        """Returns the state of the backup: how many changes it lacks (``behind``),
        their memory (``log_bytes``), and how many answers wait for it
        (``unacknowledged``)."""
        state = self._stage.value
        if self.failure:
            state = "lost"
        elif not self._link.is_heard:  # it may be back in time, or be gone
            state = "unknown"
        return {
            "backup": self.attached.address,
            "backup_state": state,
            "backup_error": self.failure,
            "behind": self._link.log.head - self._link.log.taken + len(self._held),
            "log_bytes": self._link.log.nbytes + self._held_bytes,
            "unacknowledged": len(self._answers) + len(self._slowed),
        }

    def validate(self) -> None:
        """Checks the invariants that hold between two events.

        Raises:
            AssertionError: An invariant is violated.
        """
        self._link.validate()
        if self._stage is not ShippingStage.FILLING:
            assert not self._held, "changes are held, and the backup is not filled"
            assert not self._slowed, "answers are slowed, and the backup is not filled"
        if self._stage is not ShippingStage.WHOLE:
            assert not self._answers, "answers wait for a backup that is not whole"
        elif self._answers:
            assert self._answers[0].number > self._link.log.taken, "it may leave"

    def work_on(self, work: Coroutine[None, None, None], name: str) -> None:
        """Runs the coroutine `fill` or `follow` in a task, which is cancelled when the
        log shipping ends."""
        self.work = asyncio.get_running_loop().create_task(work, name=name)

    def append(self, change: Message) -> None:
        """Ships a change to the backup, or holds it while the backup is filled. See
        `ChangeLog`."""
        match self._stage:
            case ShippingStage.WHOLE:
                self._link.append(change)
            case ShippingStage.FILLING:
                self._held.append(change)
                self._held_bytes += nbytes_of(change)
                if isinstance(change, Push) and not self._has_pushes:
                    self._has_pushes = True
                    self._progress.set()

    def mark_diverged(self, why: str) -> None:
        """Gives up the backup, because no message describes a change of the store. See
        `ChangeLog`."""
        self._link.mark_diverged(why)

    def hold(self, message: Message) -> Message | asyncio.Future[Message]:
        """Returns the answer to a change, or a future of it that waits for the backup.
        See `ChangeLog`."""
        if self._may_leave:
            return message
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._wait(future, message)
        return future

    def answer(self, future: asyncio.Future[Message], message: Message) -> None:
        """Sets the future to the answer when the backup has the change. See
        `ChangeLog`."""
        if self._may_leave:
            future.set_result(message)
        else:
            self._wait(future, message)

    @property
    def _may_leave(self) -> bool:
        match self._stage:
            case ShippingStage.WHOLE:
                return self._link.log.is_taken
            case ShippingStage.FILLING:
                return self._held_bytes + self._link.log.nbytes < HELD
            case ShippingStage.OVER:
                return True

    def _wait(self, future: asyncio.Future[Message], message: Message) -> None:
        if self.is_whole:
            # The last change is in the log already, so the answer stands for all up to
            # it.
            self._answers.append(_Answer(self._link.log.head, future, message))
        else:
            self._slowed.append((future, message))

    async def settled(self) -> None:
        """Waits until no answer waits for the backup, or the backup is lost.

        Cancellation: loses nothing.
        """
        # A lost backup ends the wait: only the coordinator can say what becomes of the
        # answers.
        with contextlib.suppress(UnavailableError):
            await self._until(lambda: not self._answers and not self._slowed)

    def release(self) -> None:
        """Ends the log shipping and releases the answers that wait for the backup,
        because the primary continues alone."""
        for future, message in self._end():
            if not future.done():
                future.set_result(message)

    def abandon(self) -> None:
        """Ends the log shipping without answering: callers whose answers wait see their
        connections end."""
        self._end()

    def refuse(self, error: ZstratError) -> None:
        """Ends the log shipping, and fails the answers that wait with the error."""
        for future, _ in self._end():
            if not future.done():
                future.set_exception(error)

    def _end(self) -> list[tuple[asyncio.Future[Message], Message]]:
        """Ends the log shipping; returns the answers that wait."""
        if self.is_over:
            return []
        waiting = [(each.future, each.message) for each in self._answers]
        waiting += self._slowed
        self._stage = ShippingStage.OVER
        self._answers.clear()
        self._slowed, self._held, self._held_bytes = [], [], 0
        self._store.log = without_log(self._store.log, self)
        self._progress.set()
        if self.work is not None:
            self.work.cancel()
        self.ending = self._link.close()
        return waiting

    def _progressed(self) -> None:
        """Sends the answers whose changes the backup now has."""
        answers, taken = self._answers, self._link.log.taken
        while answers and answers[0].number <= taken:
            _, future, message = answers.popleft()
            if not future.done():
                future.set_result(message)
        self._progress.set()

    async def keep(self, attached: AttachBackup) -> None:
        """Keeps the backup for another program, in the newer view of the order
        ``attached``.

        Raises:
            UnavailableError: The backup is lost, or is no longer wanted.

        Cancellation: the backup may know of the newer view already.
        """
        # What is under way in pieces may arrive after the question which changes
        # the backup has.
        await self._until(lambda: self._link.has_taken_all)
        if self.attached != attached:
            self._link.open_log(attached)
        await self._until(lambda: self._link.is_flowing)

    async def fill(self, deadline: float) -> None:
        """Copies the store to the backup, and waits until the backup is whole and has
        made all changes.

        Args:
            deadline: Loop time by which the backup has to be connected.

        Raises:
            UnavailableError: The backup is lost, or is no longer wanted.
            ZstratError: As in `Link.wait_open`.

        Cancellation: the backup is not whole; `release` ends it.
        """
        await self._link.open(deadline)
        await self._until(lambda: self._link.is_flowing)
        # Loading jax takes the backup seconds, for which nobody has to wait yet. An
        # optimizer that is withdrawn before the cut would count as a difference, and
        # the backup would be refused.
        for message in optimizer_code(self._store):
            await self._ship(message)
        await self._all_made()
        copy = await self._cut()
        try:
            for message in copy.messages:
                await self._ship(message)
            for parts in cut(copy.tensors):
                # Read and shipped one after the other: only a few pieces are in memory
                # at a time.
                await self._ship(await self._read(parts))
                for part in parts:
                    # Rows that are written from now on need not be saved for what was
                    # sent.
                    part.tensor.pin.forget(part.stop)
        finally:
            copy.release()
        await self._rehearse()
        self._become_whole()
        await self._all_made()

    async def follow(self, deadline: float) -> None:
        """Connects to a backup that has everything.

        Args:
            deadline: Loop time by which the backup has to be connected; else it counts
                as lost.

        Cancellation: the link stays; `release` ends it.
        """
        try:
            await self._link.open(deadline)
        except ZstratError as error:  # to the coordinator
            self._link.lose(str(error))

    async def hand_over(self, stand_aside: Callable[[], None]) -> None:
        """Waits, while no request is computed, until the backup has everything; then
        ends the log shipping.

        Args:
            stand_aside: Called first; makes the store refuse all further requests.

        Raises:
            UnavailableError: The backup is lost, or is no longer wanted.

        Cancellation: the log shipping continues.
        """
        names = self._names()
        # All names: nothing is computed, and nothing that was accepted is left out.
        async with self._turn(names):
            self._require_wanted()
            stand_aside()
            await self._until(lambda: self._link.has_taken_all)
            self.release()

    async def _rehearse(self) -> None:
        """Sends the changes that were held, in rounds, and waits until the backup has
        made them. If pushes to this store run compiled programs, waits for a push
        first, so that the backup compiles its programs before any answer waits for the
        backup."""
        if self._store.engine.programs:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REHEARSAL):
                    await self._until(lambda: self._has_pushes)
        for _ in range(ROUNDS):
            # A round is shorter than the one before as long as the backup is the faster
            # one.
            self._pass_held()
            await self._all_made()
            if self._held_bytes < WINDOW // 2:
                return

    async def _all_made(self) -> None:
        head = self._link.log.head
        await self._until(lambda: self._link.made >= head)

    def _pass_held(self) -> None:
        self._require_wanted()
        for change in self._held:
            self._link.append(change)
        self._held, self._held_bytes = [], 0

    def _become_whole(self) -> None:
        # Nothing is awaited before the new stage: a change that came between would be
        # lost.
        self._pass_held()
        self._require_wanted()  # a held change that cannot be sent has ended it
        self._stage = ShippingStage.WHOLE
        self._link.append(CopyWhole())
        # After `CopyWhole`: without it the backup cannot be promoted.
        slowed, self._slowed = self._slowed, []
        for future, message in slowed:
            self._wait(future, message)

    async def _cut(self) -> StoreCopy:
        """Copies the store at a moment between two changes. Changes after that are held
        for the backup."""
        while True:
            names = self._names()
            async with self._turn(names) as are_free:
                self._require_wanted()
                # Names that came while it waited are mostly at rest: a program that
                # never stops creating variables does not delay the copy.
                if are_free(set(self._names()).difference(names)):
                    copy = StoreCopy(self._store)
                    self._store.log = with_log(self._store.log, self)
                    return copy

    def _names(self) -> list[Hashable]:
        optimizers = (("optimizer", known.optimizer) for known in self._store.engine)
        return [*self._store.variables, *optimizers]

    async def _ship(self, message: Message) -> None:
        self._require_wanted()
        self._link.append(message)
        await asyncio.sleep(0)  # requests come between two pieces
        await self._until(lambda: self._link.log.nbytes < WINDOW)

    async def _read(self, parts: list[TensorPart]) -> CopyParts:
        places, arrays = [], []
        for tensor, start, stop in parts:
            data = tensor.pin.view(start, stop)
            # A value that may change still is copied in a turn, between two updates.
            if data is None:
                data = np.empty(stop - start, np.uint8)
                async with self._turn([tensor.entry.key]):
                    tensor.pin.copy(start, data)
            arrays.append(data)
            entry = tensor.entry
            places.append(CopiedPart(entry.key, entry.optimizer, entry.leaf, start))
        return CopyParts(places, tuple(arrays))

    async def _until(self, is_true: Callable[[], bool]) -> None:
        while not is_true():
            self._require_wanted()
            self._progress.clear()
            await self._progress.wait()

    def _require_wanted(self) -> None:
        if self.is_over:
            raise UnavailableError("the backup is no longer wanted")
        if self.failure:
            raise UnavailableError(
                f"the backup at {self.attached.address} is lost: {self.failure}"
            )

"""The log of the changes of a store, and the link that sends the log to one backup.

The link may break and reconnect: the backup then reports which changes it has, and the
rest is sent again. A copy that differs from the store is of no use, however well its
link works: `LogLinkState.DIVERGED` is final.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple, final

from zstrat.errors import (
    ClosedError,
    PeerLostError,
    ProtocolError,
    StaleSessionError,
    ZstratError,
)
from zstrat.wire import (
    BackupLost,
    Hello,
    LogMade,
    LogTaken,
    Message,
    OpenLog,
    PromoteBackup,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zstrat.transport import TaskLink
    from zstrat.wire import AttachBackup

    Connect = Callable[..., TaskLink]
    """Makes a link to the backup at an address; takes ``on_notice``, ``on_open`` and
    ``on_lost``."""

WINDOW: Final = 32 * 2**20
"""The most bytes of changes that may be sent and not acknowledged: several hundred
usual pushes, more than 100 Gb/s carry in a millisecond, and little compared with a
store."""

MAX_CHANGES_UNDER_WAY: Final = 8192
"""The most changes that may be sent and not acknowledged: an eighth of the messages
that a connection takes."""

_LOG: Final = logging.getLogger("zstrat.ps")

_OBJECT: Final = 512
"""Approximate bytes of memory that a change takes besides its arrays."""


class _Change(NamedTuple):
    """A change that the backup may lack, and the bytes of memory that it takes."""

    message: Message
    nbytes: int


@final
class ReplicationLog:
    """The changes of a store that its backup does not have yet. Decides without I/O.

    Changes are numbered from 1 on in the order in which they were made. They are sent
    in that order, and kept until the backup has them. The bytes sent and not
    acknowledged are bounded; the bytes that wait to be sent are bounded by the number
    of requests that wait (`_log_shipping`).
    """

    def __init__(self) -> None:
        self._kept: deque[_Change] = deque()
        self.head = 0
        """The number of the last change that was made."""
        self.taken = 0
        """The number of the last change that the backup has."""
        self._sent = 0
        self.nbytes = 0
        """Bytes of all changes in the log."""
        self._under_way = 0

    @property
    def is_taken(self) -> bool:
        """Whether the backup has every change."""
        return self.taken == self.head

    def append(self, message: Message) -> int:
        """Adds a change; returns its number."""
        nbytes = nbytes_of(message)
        self._kept.append(_Change(message, nbytes))
        self.nbytes += nbytes
        self.head += 1
        return self.head

    def next_change(self) -> Message | None:
        """Returns the next change to send; None if there is none, or too many bytes or
        changes are not acknowledged."""
        # `_kept` begins with the first change that the backup lacks.
        place = self._sent - self.taken
        if place == len(self._kept) or place >= MAX_CHANGES_UNDER_WAY:
            return None
        # Not together with the next change: one that is larger than the window must go,
        # too.
        if self._under_way >= WINDOW:
            return None
        change = self._kept[place]
        self._sent += 1
        self._under_way += change.nbytes
        return change.message

    def acknowledge(self, number: int) -> None:
        """Drops all changes up to this one, as the backup has them. Ignores late
        numbers.

        Raises:
            ProtocolError: The change was not sent.
        """
        if number > self._sent:
            raise ProtocolError(
                f"the backup has change {number} of {self._sent} that were sent"
            )
        while self.taken < number:
            change = self._kept.popleft()
            self.taken += 1
            self.nbytes -= change.nbytes
            self._under_way -= change.nbytes

    def resume(self, number: int) -> None:
        """Restarts sending after change ``number``, the last one that the backup has;
        later changes are sent again.

        Raises:
            ProtocolError: The change was not sent, or is older than the last
                acknowledged one.
        """
        if number < self.taken:
            raise ProtocolError(
                f"the backup has {number} changes, and said that it has {self.taken}"
            )
        self.acknowledge(number)
        self._sent, self._under_way = self.taken, 0


def nbytes_of(message: Message) -> int:
    """Returns the approximate bytes of memory that a message takes."""
    arrays: Sequence[object] = getattr(message, "arrays", ())
    code: bytes = getattr(message, "code", b"")
    return _OBJECT + len(code) + sum([array.nbytes for array in arrays])  # type: ignore[attr-defined]


class LogLinkState(enum.Enum):
    """Whether changes reach the backup.

    OPENING ──the backup reports the changes it has──▶ FLOWING
    FLOWING ──the log is opened again, or a message cannot be sent──▶ OPENING
    OPENING, FLOWING ──the link is lost, or the backup refuses the log──▶ LOST
    LOST ──the backup reports the changes it has──▶ FLOWING
    OPENING, FLOWING, LOST ──the copy differs, or its process has lost it──▶ DIVERGED
    any ──`close`──▶ CLOSED
    """

    OPENING = "opening"
    FLOWING = "flowing"
    LOST = "lost"
    DIVERGED = "diverged"
    CLOSED = "closed"


_FINAL: Final = (LogLinkState.DIVERGED, LogLinkState.CLOSED)


@final
class LogLink:
    """Sends numbered changes to one backup, and tracks which of them the backup has.

    Args:
        attached: The order that asked for the backup.
        on_progress: Called when the backup has received or made more changes, or is
            lost.
        on_lost: Receives the reason, each time that the backup becomes unreachable.
        on_replaced: Called when the backup has become the primary.
    """

    def __init__(
        self,
        attached: AttachBackup,
        connect: Connect,
        *,
        on_progress: Callable[[], None],
        on_lost: Callable[[str], None],
        on_replaced: Callable[[], None],
    ) -> None:
        self.attached = attached
        self.state = LogLinkState.OPENING
        self.failure = ""
        """Why the state is LOST or DIVERGED, or was when the link was closed; else
        ""."""
        self.log = ReplicationLog()
        self.made = 0
        """The number of the last change that the backup is known to have made."""
        self._on_progress = on_progress
        self._on_lost, self._on_replaced = on_lost, on_replaced
        self._opening: asyncio.Future[Message] | None = None
        """The answer to the newest `OpenLog`; answers to older ones are ignored."""
        self._link = connect(
            attached.address,
            on_notice=self._noticed,
            on_open=self._opened,
            on_lost=lambda error: self._fail(LogLinkState.LOST, error.reason),
        )

    @property
    def is_flowing(self) -> bool:
        return self.state is LogLinkState.FLOWING

    @property
    def has_taken_all(self) -> bool:
        """Whether the backup is known to have every change."""
        return self.is_flowing and self.log.is_taken

    @property
    def is_heard(self) -> bool:
        """Whether the backup has sent a message recently."""
        return self._link.is_heard

    def validate(self) -> None:
        """Checks the invariants that hold between two events.

        Raises:
            AssertionError: An invariant is violated.
        """
        if self.state is not LogLinkState.CLOSED:
            failed = self.state in (LogLinkState.LOST, LogLinkState.DIVERGED)
            assert failed == bool(self.failure), (self.state, self.failure)
        assert self.log.taken <= self.log.head, "it has changes that nobody has made"

    async def open(self, deadline: float) -> None:
        """Connects to the backup.

        Args:
            deadline: Loop time by which the backup has to be connected.

        Raises:
            ZstratError: As in `Link.wait_open`.

        Cancellation: the link still connects.
        """
        self._link.start()
        await self._link.wait_open(deadline)

    def open_log(self, attached: AttachBackup) -> None:
        """Asks the backup, in the view of the order ``attached``, which changes it
        has."""
        self.attached = attached
        # Until the answer is here it is not known what the backup has, so nothing is
        # sent.
        self._interrupt()
        self._opening = self._link.submit(OpenLog(attached.session, attached.view))
        self._opening.add_done_callback(self._resumed)

    def append(self, change: Message) -> None:
        """Numbers a change, and sends it when it is next."""
        self.log.append(change)
        self._send()

    def lose(self, why: str) -> None:
        """Marks the backup as lost until its link opens again."""
        self._fail(LogLinkState.LOST, why)

    def mark_diverged(self, why: str) -> None:
        """Marks the backup as lost for good, because its copy differs from the
        store."""
        self._fail(LogLinkState.DIVERGED, f"it can no longer follow: {why}")

    def close(self) -> asyncio.Task[None]:
        """Closes the link; returns the task that does so, to which the caller keeps a
        reference."""
        # First: from now on nothing that the link reports has an effect.
        self.state = LogLinkState.CLOSED
        return asyncio.get_running_loop().create_task(
            self._link.close("the store has no backup"), name="closing a backup"
        )

    def _opened(self, hello: Hello) -> None:
        if self.state in _FINAL:
            return
        # Another process at the address would apply the rest of the log to an empty
        # store.
        if hello.incarnation != self.attached.incarnation:
            why = "its process was restarted, and has lost the copy"
            self._fail(LogLinkState.DIVERGED, why)
            return
        self.open_log(self.attached)

    def _resumed(self, opened: asyncio.Future[Message]) -> None:
        # The link was lost meanwhile, or opened once more.
        if opened.cancelled() or opened is not self._opening:
            return
        error = opened.exception()
        if self.state in _FINAL:  # since the question was sent
            return
        if error is None:
            taken = opened.result()
            assert isinstance(taken, LogTaken)
            if self._acknowledged(taken.number, resumed=True):
                self.state, self.failure = LogLinkState.FLOWING, ""
                self._send()
        elif isinstance(error, StaleSessionError):
            self._on_replaced()
        elif not isinstance(error, PeerLostError | ClosedError):
            # The end of the link itself is reported by `on_lost`, or wanted.
            self.lose(f"it refuses the log: {error}")

    def _noticed(self, message: Message) -> None:
        if self.state is LogLinkState.CLOSED:
            return
        match message:
            case LogTaken(number=number):
                if self.is_flowing:
                    self._acknowledged(number)
                    self._send()
            case LogMade(number=number):
                self.made = max(self.made, number)
                self._on_progress()
            case BackupLost(reason=reason):
                self.mark_diverged(reason)
            case PromoteBackup():
                self._on_replaced()

    def _acknowledged(self, number: int, *, resumed: bool = False) -> bool:
        """Handles the backup's report that it has the changes up to ``number``. Returns
        False if the report is impossible."""
        try:
            if resumed:
                self.log.resume(number)
            else:
                self.log.acknowledge(number)
        except ZstratError as error:  # to the coordinator, as the loss of the backup
            self.mark_diverged(str(error))
            return False
        self._on_progress()
        return True

    def _interrupt(self) -> None:
        """Stops sending, until the log is opened again."""
        if self.is_flowing:
            self.state = LogLinkState.OPENING

    def _fail(self, state: LogLinkState, why: str) -> None:
        if self.state in _FINAL:
            return
        was_lost = self.state is LogLinkState.LOST
        self.state = state
        if was_lost:
            return  # the coordinator has been notified
        self.failure = why
        _LOG.warning("the backup at %s is lost: %s", self.attached.address, why)
        self._on_progress()
        self._on_lost(why)

    def _send(self) -> None:
        while self.is_flowing and (change := self.log.next_change()) is not None:
            try:
                self._link.notify(change)
            except (PeerLostError, ClosedError):  # sent again when the link is back
                self._interrupt()
            except (TypeError, ValueError) as error:
                # It cannot be encoded, so the backup would lack it for good.
                self.mark_diverged(str(error))

"""Carries out the calls of a generation by messages, and assigns their keys.

A *hop* is a message with data of a call. Hops are matched with calls by key. Keys are
equal on all ranks without communication. A user calls an *operation*, which may take
several calls (for buckets, or for lengths before the data). Untagged operations are
numbered in the order of the program, and operations with a tag are numbered per tag. A
hop that comes before this rank makes the call is kept. Errors are reported to the
generation, which ends.

Law of the file: every call that was started ends exactly once, and all code runs on the
loop's thread.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import OrderedDict, deque
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, Protocol

from zstrat.collectives._compression import Compression, Compressor
from zstrat.collectives.schedules._choice import Choices, choices_from
from zstrat.collectives.schedules._plans import progress_of
from zstrat.config import MiB
from zstrat.errors import BusyError, ProtocolError, ZstratError
from zstrat.wire import CallState, Hop

from ._inquiry import FORGOTTEN

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterator, Sequence

    from zstrat.collectives._engine import CollectiveCall
    from zstrat.collectives.schedules._progress import ScheduleProgress, Send
    from zstrat.wire import GroupFormed

    from ._mesh import Mesh

PARTS: Final = 2**20
"""Most calls of one operation, that is, arrays of one pytree."""

FORMING: Final = 0
"""Key of the call in which a new generation agrees on its transport; numbers of
operations begin at 1."""

_NAMED: Final = 1 << 62
"""The bit that is set in keys that are digests, and only in these."""


def key_of(tag: str | None, number: int, part: int) -> int:
    """Returns the key of one call, from its operation (1, 2, ...) and its part.

    Keys of tagged operations are digests of 62 bits: few are under way at a time, so
    that a collision is practically impossible.
    """
    if tag is None:
        return number * PARTS + part
    return _digest(f"{tag}\0{number}\0{part}")


def key_between(key: int, part: int) -> int:
    """Returns the key of part ``part`` of a call, which only some of the ranks take
    part in."""
    return _digest(f"{key}/{part}")


def number_of(key: int) -> int | None:
    """Returns the number of the operation that a call belongs to, or None if the key is
    a digest."""
    return None if key & _NAMED else key // PARTS


def about(words: str, part: int = 0) -> int:
    """Returns a digest (32 bits) of an operation's description and the part."""
    return zlib.crc32(f"{words}{part}".encode())


def _digest(text: str) -> int:
    digest = blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % _NAMED | _NAMED


EARLY: Final = 1024 * MiB
"""Most bytes of hops kept for calls that this rank has not made yet. Senders do not ask
first. In most algorithms a rank waits for other ranks and so is never far ahead, but
the root of a broadcast sends everything. Beyond this bound the generation ends, with a
remedy in the error."""

BACKLOG: Final = 32
"""Number of hops that may wait for one rank before no more are created: enough to keep
the link busy, few enough that private copies of chunks cost little memory."""

_REMEMBERED: Final = 4096
"""Number of ended calls that are remembered, for ranks that ask about them."""


class Running:
    """A call under way by messages."""

    __slots__ = ("call", "draws", "ended", "moved", "progress", "ranks", "timer")

    def __init__(
        self,
        call: CollectiveCall,
        progress: ScheduleProgress,
        ranks: Sequence[int],
        ended: Callable[[Exception | None], None],
        now: float,
    ) -> None:
        self.moved = now
        """Loop time when the call started, or when its last hop came."""
        self.call, self.progress, self.ranks, self.ended = call, progress, ranks, ended
        self.draws: Iterator[Send] | None = progress.start()
        self.timer: asyncio.TimerHandle | None = None

    @property
    def waits(self) -> list[int]:
        return sorted(self.ranks[rank] for rank in self.progress.waits)


class TrafficOwner(Protocol):
    """The part of a `Generation` that its traffic uses."""

    rank: int
    size: int
    hosts: int
    broken: ZstratError | None
    leavers: dict[int, int]

    @property
    def title(self) -> str: ...

    def name(self, rank: int) -> str: ...

    def said(self, call: CollectiveCall) -> str: ...

    def is_over(self, number: int) -> bool: ...

    def refusal(self) -> ZstratError: ...

    def check_left(self, running: Running) -> None: ...

    def inquire(self, call: CollectiveCall, ranks: Sequence[int]) -> None: ...

    def check_same(self, sender: int, hop: Hop) -> None: ...

    def abort(self, error: ZstratError, key: int) -> None: ...


class Traffic:
    """Carries out the calls of one generation, the ``owner``, by messages.

    Args:
        formed: The answer of rank 0 with the members and the table of algorithms.
        counts: Counters of the node, which count refused hops by reason.
    """

    def __init__(
        self,
        owner: TrafficOwner,
        mesh: Mesh,
        formed: GroupFormed,
        counts: Counter[str],
    ) -> None:
        self.running: dict[int, Running] = {}
        """Calls under way, by key."""
        self.waited = [0.0] * owner.size
        """Seconds waited so far, by the rank whose hop ended the wait. A call waits
        from its start, or from its last hop, until the next hop."""
        self._owner, self._mesh, self._ticket = owner, mesh, formed.ticket
        self.choices = _choices_of(formed)
        self._counts = counts
        self._loop = asyncio.get_running_loop()
        self._drawing: deque[Running] = deque()
        self._is_drawing = False
        self._early: dict[int, list[tuple[int, Hop]]] = {}
        self._early_bytes = 0
        self._over: OrderedDict[int, str] = OrderedDict()
        self._compressors: dict[str, Compressor] = {}

    def start(
        self,
        call: CollectiveCall,
        ended: Callable[[Exception | None], None],
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Starts a call. Calls ``ended`` once with the error of the call or None, maybe
        before `start` returns.

        Args:
            ranks: Ranks that take part, ascending; None: all.
        """
        owner = self._owner
        if owner.broken is not None:
            ended(owner.refusal())
            return
        who = range(owner.size) if ranks is None else ranks
        try:
            progress = progress_of(
                call,
                who.index(owner.rank),
                len(who),
                one_host=owner.hosts == 1,
                compressor=self._compressor_of(call),
                choices=self.choices,
            )
        except (TypeError, ValueError) as error:  # to the caller
            ended(error)
            return
        running = Running(call, progress, who, ended, self._loop.time())
        self.running[call.key] = running
        running.timer = self._loop.call_at(call.deadline, self._overdue, call.key)
        self._drawing.append(running)
        self.draw()
        for sender, hop in self._early.pop(call.key, ()):
            self._early_bytes -= _nbytes(hop)
            self._deliver(running, sender, hop)
        # After all early hops: a rank that has left may have sent them.
        if self._owner.leavers and call.key in self.running:
            self._owner.check_left(running)

    def hop(self, sender: int, hop: Hop) -> None:
        """Passes a hop to its call, or keeps the hop until this rank makes the call."""
        running = self.running.get(hop.call)
        if running is not None:
            self._take(running, sender, hop)
        elif self._owner.broken is None and not self._is_over(hop.call):
            self._keep(sender, hop)
            # An engine may run this number here: then the sender makes another call.
            self._owner.check_same(sender, hop)
        else:
            self._counts["late hops"] += 1

    def draw(self) -> None:
        """Sends the first hops of started calls, which wait for no other rank, oldest
        call first, as far as the links have room."""
        if self._is_drawing or not self._drawing:
            return
        self._is_drawing = True  # sending calls `on_flushed`, which calls this again
        try:
            while self._drawing:
                running = self._drawing[0]
                # A link is full: `on_flushed` calls this again.
                if not self._draw_from(running):
                    return
                # Sending may have ended the generation, which clears the queue.
                if self._drawing and self._drawing[0] is running:
                    self._drawing.popleft()
                running.draws = None
                if running.progress.is_done and self._owner.broken is None:
                    self._end(running, None)
        finally:
            self._is_drawing = False

    @property
    def has_early(self) -> bool:
        """Whether hops are kept for calls that this rank has not made. From any
        thread."""
        return bool(self._early)

    def early_of(self, number: int) -> list[tuple[int, Hop]]:
        """Returns the senders and the kept hops of untagged operation ``number``."""
        of_it = [key for key in self._early if number_of(key) == number]
        return [each for key in of_it for each in self._early[key]]

    def state(self, key: int) -> CallState | None:
        """Returns the progress of a call; None if this rank has not made the call."""
        running = self.running.get(key)
        if running is not None:
            return CallState(running.call.words, running.waits, False, False)
        if self._is_over(key):
            is_broken = self._owner.broken is not None
            return CallState(self._over.get(key, FORGOTTEN), [], True, is_broken)
        return None

    def fail(self, error: Callable[[], Exception]) -> None:
        """Fails all calls under way, each with its own copy of the error."""
        self._early.clear()
        self._drawing.clear()
        for running in list(self.running.values()):
            self._end(running, error())

    def _keep(self, sender: int, hop: Hop) -> None:
        self._early.setdefault(hop.call, []).append((sender, hop))
        self._early_bytes += _nbytes(hop)
        # The generation ends, as the hops cannot be refused: the sender does not send
        # twice.
        if self._early_bytes > EARLY:
            owner = self._owner
            error = BusyError(
                f"{owner.title}: {self._early_bytes >> 20} MiB arrived, the last from "
                f"{owner.name(sender)}, for calls that {owner.name(owner.rank)} has "
                f"not made yet; the limit is {EARLY >> 20} MiB. If it is only late, "
                "call barrier() on all ranks before calls that send so much (such as a "
                "broadcast after loading); else make the same calls on all ranks"
            )
            owner.abort(error, hop.call)

    def _take(self, running: Running, sender: int, hop: Hop) -> None:
        now = self._loop.time()
        # Hops that came early were not waited for; they go straight to `_deliver`.
        self.waited[sender] += now - running.moved
        running.moved = now
        self._deliver(running, sender, hop)
        if self._owner.leavers and running.call.key in self.running:
            self._owner.check_left(running)

    def _deliver(self, running: Running, sender: int, hop: Hop) -> None:
        if running.call.key not in self.running:
            return  # an earlier hop has ended the call
        if hop.about != running.call.about:
            self._owner.inquire(running.call, (sender,))
            return
        try:
            sends = running.progress.arrived(hop.place, hop.arrays[0])
        except ProtocolError as error:
            owner = self._owner
            why = f"{owner.said(running.call)}: {owner.name(sender)}: {error}"
            owner.abort(ProtocolError(why), hop.call)
            return
        if sends:
            self._send(running, sends)
        # All hops may have come while this rank still has first hops to send.
        if running.draws is None and running.progress.is_done:
            self._end(running, None)

    def _send(self, running: Running, sends: Sequence[Send]) -> None:
        call, ranks = running.call, running.ranks
        for peer, place, data in sends:
            hop = Hop(self._ticket, call.key, place, call.about, (data,))
            try:
                self._mesh.send(ranks[peer], hop)
            except BusyError as error:
                self._owner.abort(error, call.key)
                return

    def _draw_from(self, running: Running) -> bool:
        """Sends first hops of a call as far as the links have room; returns whether all
        were sent."""
        assert running.draws is not None
        for send in running.draws:
            self._send(running, (send,))
            if self._mesh.backlog(running.ranks[send.peer]) >= BACKLOG:
                return False
        return True

    def _end(self, running: Running, error: Exception | None) -> None:
        key = running.call.key
        # It has ended already: an error and its last hop may meet.
        if self.running.pop(key, None) is None:
            return
        if running.timer is not None:
            running.timer.cancel()
        # Ranks may ask about it later, if they wait for a third rank.
        self._over[key] = running.call.words
        if len(self._over) > _REMEMBERED:
            self._over.popitem(last=False)
        running.ended(error)

    def _is_over(self, key: int) -> bool:
        number = number_of(key)
        if key in self._over:
            return True
        if not number:  # the forming call, or one with a tag
            return False
        return self._owner.is_over(number)

    def _overdue(self, key: int) -> None:
        running = self.running.get(key)
        if running is not None:
            self._owner.inquire(running.call, running.waits)

    def _compressor_of(self, call: CollectiveCall) -> Compressor | None:
        name = call.compression
        if name is None:
            return None
        # One for the generation, as it keeps what each call has left out.
        if name not in self._compressors:
            self._compressors[name] = Compressor(Compression.of(name))
        return self._compressors[name]


def _choices_of(formed: GroupFormed) -> Choices:
    try:
        return choices_from(formed.choices)
    except ValueError as error:
        raise ProtocolError(f"rank 0's table of algorithms: {error}") from error


def _nbytes(hop: Hop) -> int:
    return sum([array.nbytes for array in hop.arrays])

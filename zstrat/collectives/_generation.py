"""One generation of a group on the loop: its calls under way, and how it ends.

Hops are matched with calls by key. A hop may come before this rank makes the call; it
is kept then. Deadlines, losses and disagreement end the generation for all ranks: the
one who notices tells the others, everything under way fails, and every later call says
why at once.

The law of this file: it runs on the loop's thread alone, but for what says otherwise,
and every call that was started ends exactly once.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict, deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, cast

from zstrat.config import MiB
from zstrat.errors import (
    BusyError,
    CancelledError,
    ClosedError,
    PeerLostError,
    ProtocolError,
    UnavailableError,
    ZstratError,
    from_wire,
    to_wire,
)
from zstrat.wire import AbortCall, AskCall, CallState, Hop, LeaveGroup

from ._asking import inquire
from ._blame import Inquiry, verdict
from ._choice import Choices, choices_from
from ._compression import Compression, Compressor
from ._engine import margin_of
from ._keys import FORMING, number_of
from ._mesh import Mesh
from ._plans import progress_of

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterator, Sequence

    from zstrat.wire import GroupFormed, Hello, PlainTree

    from ._engine import Call
    from ._mesh import MakeLink
    from ._progress import Progress, Send

EARLY: Final = 1024 * MiB
"""Bytes of hops of calls that this rank has not made yet. What others can send ahead is
bounded by what they have under way; more than this is a rank that never calls."""

BACKLOG: Final = 32
"""Hops that may wait for one rank before no more are made: enough to keep its line
busy, few enough that private copies of chunks cost little memory."""

_LAST_WORDS: Final = 1.0
"""Seconds in which what a rank sent before its goodbye can still be taken."""

_REMEMBERED: Final = 4096
"""Ended calls that are known as such, for ranks that ask."""


class _Running:
    """A call under way."""

    __slots__ = ("call", "draws", "ended", "progress", "ranks", "timer")

    def __init__(
        self,
        call: Call,
        progress: Progress,
        ranks: Sequence[int],
        ended: Callable[[Exception | None], None],
    ) -> None:
        self.call, self.progress, self.ranks, self.ended = call, progress, ranks, ended
        self.draws: Iterator[Send] | None = progress.start()
        self.timer: asyncio.TimerHandle | None = None

    @property
    def waits(self) -> list[int]:
        return sorted(self.ranks[rank] for rank in self.progress.waits)


class Generation:
    """The members that a group has until one of them is lost, leaves, or is replaced.

    Args:
        rank: This one.
        counts: Of the node: hops that were refused, and why.
    """

    def __init__(
        self,
        group: str,
        rank: int,
        formed: GroupFormed,
        make_link: MakeLink,
        counts: Counter[str],
    ) -> None:
        self.group, self.number, self.rank = group, formed.generation, rank
        self.ticket, self.members = formed.ticket, tuple(formed.members)
        self.size = len(self.members)
        self.broken: ZstratError | None = None
        """Why it came to an end; set once. May be read from any thread."""
        self.begun: dict[int, str] = {}
        """Operations under way that have no tag, by number: what they are, in words.
        The group writes it, from any thread."""
        self.calls = 0
        """Operations without a tag that have begun here; the group counts."""
        self.lost: set[int] = set()
        """Ranks that are known to be gone."""
        self.on_broken: Callable[[ZstratError], None] = lambda error: None
        self.engine_waits: Callable[[], Sequence[int]] = tuple
        """Ranks that the engine waits for just now."""
        self._counts = counts
        self._choices = _choices_of(formed)
        self._one_host = len({member.host for member in self.members}) == 1
        self._ranks = {each.incarnation: at for at, each in enumerate(self.members)}
        self._loop = asyncio.get_running_loop()
        self._mesh = Mesh(
            group,
            rank,
            self.members,
            make_link,
            on_lost=self.gone,
            on_flushed=self._draw,
        )
        self._running: dict[int, _Running] = {}
        self._drawing: deque[_Running] = deque()
        self._is_drawing = False
        self._early: dict[int, list[tuple[int, Hop]]] = {}
        self._early_bytes = 0
        self._over: OrderedDict[int, str] = OrderedDict()
        self._left: dict[int, int] = {}
        self._compressors: dict[str, Compressor] = {}
        self._is_known = False
        """A call here has ended with the error."""
        self._broken_flag = threading.Event()
        self._inquest: asyncio.Task[None] | None = None
        self._drained: asyncio.Future[None] | None = None

    async def open(self, deadline: float) -> None:
        """Connects to all members; see `Mesh.open`."""
        await self._mesh.open(deadline)

    def name(self, rank: int) -> str:
        """What messages call a rank."""
        return self._mesh.name(rank)

    def rank_of(self, hello: Hello) -> int | None:
        """The rank of a task, None if it is no member."""
        return self._ranks.get(hello.incarnation)

    # ---- calls ---------------------------------------------------------------------

    def start(
        self,
        call: Call,
        ended: Callable[[Exception | None], None],
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Begins a call; ``ended`` hears once how it went, maybe before this returns.

        Args:
            ranks: Those that take part, ascending; all if None.
        """
        if self.broken is not None:
            ended(self.refusal())
            return
        who = range(self.size) if ranks is None else ranks
        try:
            progress = progress_of(
                call,
                who.index(self.rank),
                len(who),
                one_host=self._one_host,
                compressor=self._compressor_of(call),
                choices=self._choices,
            )
        except (TypeError, ValueError) as error:  # to the caller
            ended(error)
            return
        running = _Running(call, progress, who, ended)
        self._running[call.key] = running
        running.timer = self._loop.call_at(
            call.deadline, self._overdue, call.key, call.words
        )
        self._drawing.append(running)
        self._draw()
        for sender, hop in self._early.pop(call.key, ()):
            self._early_bytes -= _nbytes(hop)
            self._take(running, sender, hop)
        if self._left:
            self._check_left(running)

    def _compressor_of(self, call: Call) -> Compressor | None:
        name = call.compression
        if name is None:
            return None
        if name not in self._compressors:
            self._compressors[name] = Compressor(Compression.of(name))
        return self._compressors[name]

    def hop(self, incarnation: int, hop: Hop) -> None:
        """Part of a call arrived."""
        sender = self._ranks.get(incarnation)
        if sender is None or len(hop.arrays) != 1:
            self._counts["hops of strangers"] += 1
            return
        running = self._running.get(hop.call)
        if running is not None:
            self._take(running, sender, hop)
        elif self.broken is None and not self._is_over(hop.call):
            self._keep(sender, hop)
        else:
            self._counts["late hops"] += 1

    def _keep(self, sender: int, hop: Hop) -> None:
        self._early.setdefault(hop.call, []).append((sender, hop))
        self._early_bytes += _nbytes(hop)
        if self._early_bytes > EARLY:
            error = BusyError(
                f"{self.title}: {self._early_bytes >> 20} MiB arrived for calls that "
                f"{self.name(self.rank)} has not made: the ranks do not make the same "
                "calls, or one is far behind: call barrier() now and then"
            )
            self.abort(error, hop.call)

    def _take(self, running: _Running, sender: int, hop: Hop) -> None:
        if running.call.key not in self._running:
            return  # an earlier hop has ended it
        if hop.about != running.call.about:
            self.differs(running.call, sender)
            return
        try:
            sends = running.progress.arrived(hop.place, hop.arrays[0])
        except ProtocolError as error:
            why = f"{self._said(running.call)}: {self.name(sender)}: {error}"
            self.abort(ProtocolError(why), hop.call)
            return
        if sends:
            self._send(running, sends)
        if running.draws is None:
            if running.progress.is_done:
                self._end(running, None)
            elif self._left:
                self._check_left(running)

    def _send(self, running: _Running, sends: Sequence[Send]) -> None:
        call, ranks = running.call, running.ranks
        for peer, place, data in sends:
            hop = Hop(self.ticket, call.key, place, call.about, (data,))
            try:
                self._mesh.send(ranks[peer], hop)
            except BusyError as error:
                self.abort(error, call.key)
                return

    def _draw(self) -> None:
        """Makes first hops, as fast as the lines take them, oldest call first."""
        if self._drained is not None and self._mesh.is_drained:
            self._drained.set_result(None)
            self._drained = None
        if self._is_drawing or not self._drawing:
            return
        self._is_drawing = True  # sending flushes, and what is flushed draws
        try:
            while self._drawing:
                running = self._drawing[0]
                if not self._draw_from(running):
                    return
                if self._drawing and self._drawing[0] is running:
                    self._drawing.popleft()
                running.draws = None
                if running.progress.is_done and self.broken is None:
                    self._end(running, None)
        finally:
            self._is_drawing = False

    def _draw_from(self, running: _Running) -> bool:
        """Whether the call has no more first hops."""
        assert running.draws is not None
        for send in running.draws:
            self._send(running, (send,))
            if self._mesh.backlog(running.ranks[send.peer]) >= BACKLOG:
                return False
        return True

    def _end(self, running: _Running, error: Exception | None) -> None:
        key = running.call.key
        if self._running.pop(key, None) is None:
            return
        if running.timer is not None:
            running.timer.cancel()
        self._over[key] = running.call.words
        if len(self._over) > _REMEMBERED:
            self._over.popitem(last=False)
        running.ended(error)

    # ---- how far is everybody --------------------------------------------------------

    def state(self, ask: AskCall) -> CallState:
        """The answer to a rank that waits."""
        running = self._running.get(ask.call)
        if running is not None:
            return CallState(running.call.words, running.waits, False)
        if self._is_over(ask.call):
            return CallState(self._over.get(ask.call, "?"), [], True)
        number = number_of(ask.call)
        words = self.begun.get(number, "") if number is not None else ""
        return CallState(words, list(self.engine_waits()) if words else [], False)

    def _is_over(self, key: int) -> bool:
        number = number_of(key)
        if key in self._over:
            return True
        if not number:  # the forming call, or one with a tag
            return False
        return number <= self.calls and number not in self.begun

    def _overdue(self, key: int, words: str) -> None:
        running = self._running.get(key)
        if running is not None:
            self.overdue(running.call, running.waits)

    def overdue(self, call: Call, waits: Sequence[int]) -> None:
        """A call's deadline has come: finds out why, and ends the generation."""
        self._inquire(call, waits)

    def differs(self, call: Call, sender: int) -> None:
        """A rank calls something else: asks what, and ends the generation."""
        self._inquire(call, (sender,))

    def _inquire(self, call: Call, ranks: Sequence[int]) -> None:
        if self._inquest is None and self.broken is None:
            self._inquest = self._loop.create_task(
                self._find_out(call, ranks), name=f"inquest about {call.words}"
            )

    async def _find_out(self, call: Call, ranks: Sequence[int]) -> None:
        inquiry = Inquiry(self.rank, call.words)
        question = AskCall(self.ticket, call.key)
        # Loop time and the monotonic clock are the same clock.
        deadline = max(call.deadline, self._loop.time()) + margin_of(call.timeout)
        await inquire(
            inquiry, ranks, partial(self._mesh.ask, message=question), deadline
        )
        self.abort(
            verdict(inquiry, self._said(call), self.name, call.timeout), call.key
        )

    def _said(self, call: Call) -> str:
        number = number_of(call.key)
        which = f"call {number}" if call.tag is None else f"call with tag {call.tag!r}"
        return f"{call.words}, {which} of {self.title}"

    @property
    def title(self) -> str:
        """What messages call it."""
        return f"group {self.group!r} (generation {self.number})"

    # ---- the end ---------------------------------------------------------------------

    def abort(
        self,
        error: ZstratError,
        key: int = FORMING,
        lost: Sequence[int] = (),
        *,
        tell: bool = True,
    ) -> None:
        """Ends the generation: all that is under way fails with this error.

        Args:
            lost: Ranks that are gone.
            tell: Whether the others have to hear of it.
        """
        if self.broken is not None:
            return
        self.broken = error
        self._broken_flag.set()
        self.lost.update(lost)
        if tell:
            message = AbortCall(self.ticket, key, _plain(error), list(lost))
            for rank in range(self.size):
                if rank != self.rank and rank not in lost:
                    with suppress(BusyError):  # it hears of it from its own deadline
                        self._mesh.send(rank, message)
        self._early.clear()
        self._drawing.clear()
        for running in list(self._running.values()):
            self._is_known = True
            self._end(running, again(error))
        self.on_broken(error)

    def abort_by(self, error: Exception) -> None:
        """Something here went wrong that the other ranks cannot know: tells them."""
        if not isinstance(error, ZstratError):
            error = ProtocolError(f"{type(error).__name__}: {error}")
        why = f"{self.name(self.rank)} gave up in {self.title}: {error}"
        self.abort(CancelledError(why))

    def wait_broken(self, timeout: float) -> ZstratError:
        """Blocks until the generation has ended; why it did. From any thread but the
        loop's."""
        self._broken_flag.wait(timeout)
        self._is_known = True
        return again(self.broken) if self.broken is not None else self.refusal()

    def aborted(self, sender: int, message: AbortCall) -> None:
        """Another rank has ended the generation."""
        error = from_wire(message.error)
        if not isinstance(error, ZstratError):
            error = ProtocolError(f"{self.name(sender)} gave up: {error}")
        lost = [rank for rank in message.lost if 0 <= rank < self.size]
        self.abort(error, message.call, lost, tell=False)

    def gone(self, rank: int, reason: str, left: bool = False) -> None:
        """A member cannot be reached any more. One that said goodbye has sent what
        others need of it, and `LeaveGroup` last: on another connection, and later."""
        if left:
            self._loop.call_later(_LAST_WORDS, self.gone, rank, reason)
            return
        if rank in self._left:
            return
        why = f"{reason}; {self.title} has ended: call reform() to go on without it"
        self.abort(PeerLostError(self.name(rank), why), lost=(rank,))

    def left(self, sender: int, message: LeaveGroup) -> None:
        """A member leaves on purpose: what it has called is complete on its side."""
        self._left[sender] = message.calls
        self.lost.add(sender)
        self._reason_left = message.reason
        for running in list(self._running.values()):
            self._check_left(running)
        if any(number > message.calls for number in list(self.begun)):
            self._abort_left(sender)

    def _check_left(self, running: _Running) -> None:
        for rank in self._left:
            if rank in running.waits:
                self._abort_left(rank)
                return

    def _abort_left(self, rank: int) -> None:
        why = f"it left {self.title}; call reform() to go on without it"
        self.abort(PeerLostError(self.name(rank), why, True), lost=(rank,))

    def refusal(self) -> ZstratError:
        """What a call gets after the end; from any thread. The first one on this rank
        that hears of it gets the error itself."""
        if self.broken is not None and not self._is_known:
            self._is_known = True
            return again(self.broken)
        return UnavailableError(
            f"{self.title} has ended: {self.broken}; call reform() on all ranks that "
            "go on, for a new generation"
        )

    async def close(self, reason: str, deadline: float) -> None:
        """Leaves: what was sent arrives, what is under way fails with `ClosedError`.

        Cancellation: the links are closed all the same.
        """
        if self.broken is None:
            if not self._mesh.is_drained:
                self._drained = self._loop.create_future()
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(deadline):
                        await self._drained
            farewell = LeaveGroup(self.ticket, self.calls, reason)
            for rank in range(self.size):
                if rank != self.rank:
                    with suppress(BusyError):
                        self._mesh.send(rank, farewell)
            self.abort(ClosedError(f"{self.title} was closed"), tell=False)
        if self._inquest is not None:
            self._inquest.cancel()
        await self._mesh.close(reason)


def again(error: ZstratError) -> ZstratError:
    """Another one like it: an exception that is raised twice collects tracebacks."""
    return type(error)(*error.args)


def _choices_of(formed: GroupFormed) -> Choices:
    try:
        return choices_from(formed.choices)
    except ValueError as error:
        raise ProtocolError(f"rank 0's table of algorithms: {error}") from error


def _plain(error: ZstratError) -> PlainTree:
    return cast("PlainTree", to_wire(error))


def _nbytes(hop: Hop) -> int:
    return sum([array.nbytes for array in hop.arrays])

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
from collections import OrderedDict, deque
from functools import partial
from typing import TYPE_CHECKING, Final

from zstrat.config import MiB
from zstrat.errors import (
    BusyError,
    ClosedError,
    CollectiveTimeoutError,
    InvalidArgumentError,
    PeerLostError,
    ProtocolError,
    UnavailableError,
    ZstratError,
    from_wire,
    to_wire,
)
from zstrat.wire import AbortCall, AskCall, CallState, Hop, LeaveGroup

from ._blame import Inquiry
from ._engine import Differs, Overdue
from ._keys import number_of
from ._membership import listed
from ._mesh import Mesh
from ._plans import progress_of

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterator, Sequence

    from zstrat.wire import GroupFormed

    from ._engine import Call
    from ._mesh import MakeLink
    from ._progress import Progress, Send

EARLY: Final = 1024 * MiB
"""Bytes of hops of calls that this rank has not made yet. What others can send ahead is
bounded by what they have under way; more than this is a rank that never calls."""

BACKLOG: Final = 16
"""Hops that may wait for one rank before no more are made: enough to keep its line
busy, few enough that private copies of chunks cost little memory."""

_REMEMBERED: Final = 4096
"""Ended calls that are known as such, for ranks that ask."""

Ended = "Callable[[Exception | None], None]"


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
        self.lost_ranks: set[int] = set()
        self.on_broken: Callable[[ZstratError], None] = _ignore
        self.engine_waits: Callable[[], Sequence[int]] = tuple
        """Ranks that the engine waits for just now."""
        self._counts = counts
        self._ranks = {each.incarnation: at for at, each in enumerate(self.members)}
        self._loop = asyncio.get_running_loop()
        self._mesh = Mesh(
            group,
            rank,
            self.members,
            make_link,
            on_lost=self.lost,
            on_flushed=self._draw,
        )
        self._running: dict[int, _Running] = {}
        self._drawing: deque[_Running] = deque()
        self._is_drawing = False
        self._early: dict[int, list[tuple[int, Hop]]] = {}
        self._early_bytes = 0
        self._over: OrderedDict[int, str] = OrderedDict()
        self._left: dict[int, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._drained: asyncio.Future[None] | None = None

    async def open(self, deadline: float) -> None:
        """Connects to all members; see `Mesh.open`."""
        await self._mesh.open(deadline)

    def name(self, rank: int) -> str:
        """What messages call a rank."""
        return self._mesh.name(rank)

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
            progress = progress_of(call, who.index(self.rank), len(who))
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
                f"{self._title}: {self._early_bytes >> 20} MiB arrived for calls that "
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
        return number is not None and number <= self.calls and number not in self.begun

    def _overdue(self, key: int, words: str) -> None:
        running = self._running.get(key)
        if running is not None:
            self.overdue(running.call, running.waits)

    def overdue(self, call: Call, waits: Sequence[int]) -> None:
        """A call's deadline has come: finds out why, and ends the generation."""
        self._begin(self._inquire(call, waits), f"who keeps {call.words} waiting")

    def differs(self, call: Call, sender: int) -> None:
        """A rank calls something else: asks what, and ends the generation."""
        self._begin(self._inquire(call, (sender,)), f"what rank {sender} calls")

    def _begin(self, work: Coroutine[None, None, None], name: str) -> None:
        if self._tasks or self.broken is not None:
            work.close()  # one inquiry ends the generation; a second has nothing to do
            return
        task = self._loop.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _inquire(self, call: Call, waits: Sequence[int]) -> None:
        inquiry = Inquiry(self.rank, call.words)
        deadline = call.deadline + margin_of(call.timeout)
        asking: dict[asyncio.Future[Message], int] = {}

        def ask(ranks: list[int]) -> None:
            for rank in ranks:
                question = AskCall(self.ticket, call.key)
                asking[self._mesh.ask(rank, question, deadline)] = rank

        ask(inquiry.ask(waits))
        while asking:
            done, _ = await asyncio.wait(
                asking, return_when=asyncio.FIRST_COMPLETED
            )
            for future in done:
                rank = asking.pop(future)
                ask(_heard(inquiry, rank, future))
        self._judge(call, inquiry)

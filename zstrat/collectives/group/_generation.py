"""One generation of a group: its members, and how it ends.

`_traffic` carries its calls. A missed deadline, a lost rank or different calls end the
generation for all ranks: the rank that notices it notifies the others, all calls under
way fail, and every later call raises the reason at once.

Law of the file: a generation ends once, and every method runs on the loop's thread
unless its docstring says otherwise.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, cast

import numpy as np

from zstrat.collectives._engine import CallKind, CollectiveCall, margin_of
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
from zstrat.threads import Latch
from zstrat.transport import copied_error
from zstrat.wire import AbortCall, AskCall, CallState, Hop, LeaveGroup

from ._inquiry import FORGOTTEN, FailureInquiry, inquire, verdict
from ._mesh import Mesh, wait_received
from ._traffic import FORMING, PARTS, Traffic, about, number_of

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Mapping, Sequence

    from zstrat.wire import GroupFormed, Hello, PlainTree

    from ._mesh import MakeLink
    from ._traffic import Running

_GOODBYE_SECONDS: Final = 5.0
"""Seconds in which messages that a rank sent before its goodbye may still arrive: 32
hops of 1 MiB on a slow network, to a busy machine."""


_ASKING: Final = 4.0
"""Timeout in seconds of the pseudo-call that is inquired about when an unexpected hop
comes: a quarter of the timeout is for asking the sender what it calls instead
(`margin_of`)."""

_REMEMBERED: Final = 64
"""Number of ended operations whose descriptions are kept: a rank that waits may ask
what this rank called and has given up meanwhile."""


class Generation:
    """The members of a group until one of them is lost, leaves, or is replaced.

    Args:
        rank: The rank of this process.
        counts: Counters of the node, which count refused hops by reason.
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
        self.hosts = len({member.host for member in self.members})
        """Number of machines of the members: by host names at first, and by shared
        memory once all ranks have reported which memory they can map."""
        self.broken: ZstratError | None = None
        """Why the generation ended; set once. May be read from any thread."""
        self.begun: dict[int, str] = {}
        """Descriptions of untagged operations under way, by number. The group writes
        it, from any thread."""
        self._ended: deque[tuple[int, str]] = deque(maxlen=_REMEMBERED)
        self.calls = 0
        """Number of untagged operations that this rank has begun; the group sets it."""
        self.lost: set[int] = set()
        """Ranks that are known to be lost."""
        self.on_broken: Callable[[ZstratError], None] = lambda error: None
        self.engine_waits: Callable[[], Sequence[int]] = tuple
        """Returns the ranks that the engine waits for now. The engine's executor sets
        it."""
        self.engine_waited: Callable[[], Mapping[int, float]] = dict
        """Returns the seconds that the engine has waited so far, by rank. The engine's
        executor sets it."""
        self._counts = counts
        self._ranks = {each.incarnation: at for at, each in enumerate(self.members)}
        self._loop = asyncio.get_running_loop()
        self.mesh: Final = Mesh(
            group,
            rank,
            self.members,
            make_link,
            on_lost=self.gone,
            on_flushed=lambda: self.traffic.draw(),  # created after the mesh
        )
        self.traffic: Final = Traffic(self, self.mesh, formed, counts)
        self.leavers: dict[int, int] = {}
        """Ranks that left on purpose, with the number of untagged operations that each
        has begun. May be read from any thread."""
        self._is_known = False
        """Whether a call of this rank has raised the error that ended the
        generation."""
        self._broken_flag = Latch()
        self._inquiry: asyncio.Task[None] | None = None
        self._notice_came: asyncio.Future[None] | None = None
        """Done when the notice with the reason comes from a rank that has ended the
        generation already. The inquiry waits for it."""
        self._all_received: asyncio.Future[None] | None = None
        """Done when the other ranks have received everything that was sent to them.
        `close` waits for it."""

    @property
    def waited(self) -> dict[str, float]:
        """Seconds that calls of this rank have waited, by the name of the task waited
        for. From any thread."""
        in_memory = self.engine_waited()
        return {
            self.members[rank].task: seconds + in_memory.get(rank, 0.0)
            for rank, seconds in enumerate(self.traffic.waited)
            if seconds or in_memory.get(rank)
        }

    def name(self, rank: int) -> str:
        """Returns the name of a rank, for texts of errors."""
        return self.mesh.name(rank)

    def rank_of(self, hello: Hello) -> int | None:
        """Returns the rank of a task, or None if it is not a member."""
        return self._ranks.get(hello.incarnation)

    def hop(self, incarnation: int, hop: Hop) -> None:
        """Passes a hop (data of a call) that has arrived to its call."""
        # By incarnation: a rank that was restarted has another one, and is not a
        # member.
        sender = self._ranks.get(incarnation)
        if sender is None or len(hop.arrays) != 1:
            self._counts["hops of strangers"] += 1
            return
        self.traffic.hop(sender, hop)

    def end(self, number: int) -> None:
        """Notes the end of an untagged operation. From any thread."""
        # First: a rank that asks in between must not get FORGOTTEN.
        if (words := self.begun.get(number)) is not None:
            self._ended.append((number, words))
            del self.begun[number]

    def state(self, ask: AskCall) -> CallState:
        """Answers a rank that asks for the progress of this one with a call."""
        progress = self.traffic.state(ask.call)
        number = number_of(ask.call)
        if progress is not None:
            if progress.about == FORGOTTEN:
                # The traffic does not know the calls of the engine.
                words = dict(self._ended).get(number or 0, FORGOTTEN)
                return replace(progress, about=words)
            return progress
        words = self.begun.get(number, "") if number is not None else ""
        waits = list(self.engine_waits()) if words else []
        return CallState(words, waits, False, self.broken is not None)

    def is_over(self, number: int) -> bool:
        """Returns whether an untagged operation has begun and ended on this rank."""
        return number <= self.calls and number not in self.begun

    def check_same(self, sender: int, hop: Hop) -> None:
        """Ends the generation if a hop belongs to another operation than this rank has
        begun under the same number. The traffic cannot notice it if an engine, which
        receives no hops, runs that operation."""
        number = number_of(hop.call)
        words = self.begun.get(number) if number is not None else None
        if words is None or about(words, hop.call % PARTS) == hop.about:
            return
        now = self._loop.time()
        # A call that stands for the engine's in the inquiry, which needs no arrays.
        nothing = np.empty(0, np.uint8)
        call = CollectiveCall(
            *(hop.call, CallKind.BARRIER, nothing, nothing, 0, words, now, _ASKING)
        )
        self.inquire(call, (sender,))

    def check_early(self, number: int) -> None:
        """Calls `check_same` with each hop that came before operation ``number``
        began."""
        for sender, hop in self.traffic.early_of(number):
            self.check_same(sender, hop)

    def inquire(self, call: CollectiveCall, ranks: Sequence[int]) -> None:
        """Asks ``ranks`` why ``call`` does not end, then ends the generation. Called
        when the deadline of the call has come, or a rank makes a different call."""
        if self._inquiry is None and self.broken is None:
            self._inquiry = self._loop.create_task(
                self._find_out(call, ranks), name=f"inquiry about {call.words}"
            )

    async def _find_out(self, call: CollectiveCall, ranks: Sequence[int]) -> None:
        inquiry = FailureInquiry(self.rank, call.words)
        key = call.key if call.whole is None else call.whole
        question = AskCall(self.ticket, key)
        # Loop time and the monotonic clock are the same clock.
        deadline = max(call.deadline, self._loop.time()) + margin_of(call.timeout)
        ask = partial(self.mesh.ask, message=question, deadline=deadline)
        await inquire(inquiry, ranks, ask)
        # The notice has a better reason than silence, and may come a little later, as
        # notices and answers travel on different connections.
        if inquiry.has_ended_elsewhere and self.broken is None:
            self._notice_came = self._loop.create_future()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await self._notice_came
        self.abort(verdict(inquiry, self.said(call), self.name, call.timeout), key)

    def said(self, call: CollectiveCall) -> str:
        """Returns the name of a call, for texts of errors."""
        number = number_of(call.key if call.whole is None else call.whole)
        which = f"call {number}" if call.tag is None else f"call with tag {call.tag!r}"
        return f"{call.words}, {which} of {self.title}"

    @property
    def title(self) -> str:
        """Name of the generation, for texts of errors."""
        return f"group {self.group!r} (generation {self.number})"

    def abort(
        self,
        error: ZstratError,
        key: int = FORMING,
        lost: Sequence[int] = (),
        *,
        notify: bool = True,
    ) -> None:
        """Ends the generation: all calls under way fail with ``error``.

        Args:
            lost: Ranks that are lost.
            notify: Whether to notify the other ranks.
        """
        if self.broken is not None:
            return
        # First: what fails below may make the next call, which has to be refused.
        self.broken = error
        self._broken_flag.open()
        for waiting in (self._all_received, self._notice_came):
            if waiting is not None and not waiting.done():
                waiting.set_result(None)
        self.lost.update(lost)
        if notify:
            plain = cast("PlainTree", to_wire(error))
            self.mesh.notify_all(AbortCall(self.ticket, key, plain, list(lost)), lost)
        # These calls raise the error; if there are none, the next call raises it.
        if self.traffic.running:
            self._is_known = True
        self.traffic.fail(partial(copied_error, error))
        self.on_broken(error)

    def abort_by(self, error: Exception) -> None:
        """Ends the generation after an error of this rank, and notifies the other
        ranks."""
        if not isinstance(error, ZstratError):
            error = ProtocolError(f"{type(error).__name__}: {error}")
        why = f"{self.name(self.rank)} gave up in {self.title}: {error}"
        self.abort(CancelledError(why))

    def wait_broken(self, timeout: float) -> ZstratError:
        """Blocks until the generation has ended, and returns the reason. From any
        thread except the loop's."""
        self._broken_flag.wait(timeout)
        self._is_known = True
        return copied_error(self.broken) if self.broken is not None else self.refusal()

    def aborted(self, sender: int, message: AbortCall) -> None:
        """Ends the generation because rank ``sender`` has ended it, with the reason in
        its message."""
        error = from_wire(message.error)
        if not isinstance(error, ZstratError):
            error = ProtocolError(f"{self.name(sender)} gave up: {error}")
        lost = [rank for rank in message.lost if 0 <= rank < self.size]
        self.abort(error, message.call, lost, notify=False)

    def gone(self, rank: int, reason: str, left: bool = False) -> None:
        """Ends the generation because a member cannot be reached. If the member said
        goodbye (``left``), waits first: its last messages and its `LeaveGroup` come on
        another connection and may be late."""
        if left:
            # The goodbye of a link says nothing of calls: `LeaveGroup` does, if it left
            # on purpose.
            self._loop.call_later(_GOODBYE_SECONDS, self.gone, rank, reason)
            return
        if rank in self.leavers:
            return
        why = f"{reason}; {self.title} has ended: call reform() to continue without it"
        self.abort(PeerLostError(self.name(rank), why), lost=(rank,))

    def cut_off(self, rank: int) -> None:
        """Ends the generation because the data connection of a member has ended
        although its link is open."""
        why = f"its data connection ended; {self.title} has ended: call reform()"
        # That member is notified, too, as it may live.
        self.abort(PeerLostError(self.name(rank), why))

    def left(self, sender: int, message: LeaveGroup) -> None:
        """Notes that a member leaves on purpose, after it completed its calls. Ends the
        generation if a call of this rank needs the member."""
        self.leavers[sender] = message.calls
        self.lost.add(sender)
        for running in list(self.traffic.running.values()):
            self.check_left(running)
        # A copy: other threads begin and end operations.
        self.check_begun(max(list(self.begun), default=0))

    def check_begun(self, number: int) -> None:
        """Ends the generation if a rank has left before operation ``number``."""
        for rank, calls in self.leavers.items():
            if number > calls:
                self._abort_left(rank)
                return

    def check_left(self, running: Running) -> None:
        """Ends the generation if a running call waits for a rank that has left."""
        for rank in self.leavers:
            if rank in running.waits:
                self._abort_left(rank)
                return

    def _abort_left(self, rank: int) -> None:
        why = f"it left {self.title}; call reform() to continue without it"
        self.abort(PeerLostError(self.name(rank), why, True), lost=(rank,))

    def refusal(self) -> ZstratError:
        """Returns the error of a call that is made after the end of the generation: the
        reason itself for the first such call of this rank, then `UnavailableError`.
        From any thread."""
        if self.broken is not None and not self._is_known:
            self._is_known = True
            return copied_error(self.broken)
        return UnavailableError(
            f"{self.title} has ended: {self.broken}; call reform() on all ranks that "
            "continue, for a new generation"
        )

    async def close(self, reason: str, deadline: float) -> None:
        """Leaves the generation. Sent messages arrive if the other ranks read them
        before the deadline; calls under way fail with `ClosedError`.

        Cancellation: the links are closed all the same.
        """
        informed: set[int] = set()
        try:
            if self.broken is None:
                await self._part(reason, informed, deadline)
        finally:
            await self._leave(reason, informed)

    async def _part(self, reason: str, informed: set[int], deadline: float) -> None:
        """Waits until each other rank has received all messages, and then notifies it
        that this rank leaves."""
        others = set(range(self.size)) - {self.rank} - self.lost
        self._all_received = self._loop.create_future()

        def inform(rank: int) -> None:
            if self.broken is None:
                informed.add(rank)
                with suppress(BusyError):  # it will notice the end of the link
                    self.mesh.send(rank, LeaveGroup(self.ticket, self.calls, reason))

        question = AskCall(self.ticket, FORMING)
        await wait_received(
            self.mesh, others, question, deadline, self._all_received, inform
        )

    async def _leave(self, reason: str, informed: set[int]) -> None:
        if self.broken is None:
            self.mesh.notify_all(
                LeaveGroup(self.ticket, self.calls, reason), [*informed]
            )
            self.abort(ClosedError(f"{self.title} was closed"), notify=False)
        if self._inquiry is not None:
            self._inquiry.cancel()
        # Last: the notices above go by these links.
        await self.mesh.close(reason)

"""What one task is asked for a time line: its clock, before and after, and its spans.

All of it goes over the link that the program has to the task anyway, as requests of
their own at the begin and at the end; nothing is asked in between.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, Protocol, final

from zstrat.coordinator._seen import short
from zstrat.errors import ZstratError
from zstrat.telemetry.timeline import (
    ClockLine,
    ClockReading,
    RoundTrip,
    TaskNotes,
    from_columns,
    from_jax_columns,
    read_clock,
)
from zstrat.wire import AskClock, Captured, ClockTold, EndCapture

if TYPE_CHECKING:
    from zstrat.coordinator.connecting import TaskLink
    from zstrat.wire import BeginCapture, Hello

TRIPS: Final = 8
"""Round trips of which the shortest counts: on a network that is busy most of them wait
somewhere, and one that did not says all there is to know."""


class AskedTask(Protocol):
    """A task of the session (`TaskSession`), or a second copy (`BackupTask`)."""

    @property
    def name(self) -> str: ...

    @property
    def hello(self) -> Hello | None: ...

    @property
    def link(self) -> TaskLink: ...

    @property
    def is_ready(self) -> bool: ...

    @property
    def state(self) -> str: ...

    async def wait_ready(self, deadline: float) -> object: ...


@final
class CapturedTask:
    """One task of the session, on the loop.

    Args:
        session: The number that the task knows its session by.
    """

    def __init__(self, task: AskedTask, session: int) -> None:
        self.task: Final = task
        self.name: Final = short(task.name)
        self.session: Final = session
        self._incarnation: int | None = None
        self._first: ClockReading | None = None
        self._problem = ""

    async def begin(self, order: BeginCapture, deadline: float) -> None:
        """Reads its clock, and has it keep its spans. That it does not answer until
        ``deadline`` (loop time) is told by `end`.

        Cancellation: it may keep spans, for as long as it was told to.
        """
        try:
            await self.task.wait_ready(deadline)
            hello = self.task.hello
            self._incarnation = None if hello is None else hello.incarnation
            self._first = await self._clock(deadline)
            await self.task.link.submit(order, deadline=deadline)
        except ZstratError as error:
            self._problem = f"it did not begin: {error}"

    async def end(self, deadline: float) -> TaskNotes:
        """What it has noted; or what is known if it does not answer."""
        notes = TaskNotes(self.name, problem=self._problem or self._loss())
        if self._first is None or notes.problem:
            return notes
        notes.clock = ClockLine(self._first)
        try:
            end = EndCapture(self.session)
            told = await self.task.link.submit(end, deadline=deadline)
            assert isinstance(told, Captured), told
            own, of_jax = told.arrays[:4], told.arrays[4:]
            notes.spans, notes.traffic = from_columns(told.phases, own)
            notes.is_cut = told.is_cut
            notes.profile, notes.problem = told.profile, told.problem
            notes.jax = from_jax_columns(of_jax) if of_jax else None
            notes.clock = ClockLine(self._first, await self._clock(deadline))
        except (ZstratError, ValueError) as error:
            notes.problem = f"it did not tell all of it: {error}"
        return notes

    def _loss(self) -> str:
        """Why there is nobody who knows what it has noted."""
        hello = self.task.hello
        if not self.task.is_ready:
            return f"it was lost meanwhile: {self.task.state}"
        if hello is not None and hello.incarnation != self._incarnation:
            return "it was started again meanwhile, and has forgotten what it had noted"
        return ""

    async def _clock(self, deadline: float) -> ClockReading:
        return read_clock([await self._trip(deadline) for _ in range(TRIPS)])

    async def _trip(self, deadline: float) -> RoundTrip:
        asked = time.monotonic()
        answer = await self.task.link.submit(AskClock(self.session), deadline=deadline)
        heard = time.monotonic()
        assert isinstance(answer, ClockTold), answer
        return RoundTrip(asked, answer.now, heard)

"""What a worker keeps of its steps while a time line is taken, and jax's own profile.

Spans are kept by the session's recorder, on the loop. jax is told to profile on the
executor thread, between two steps: it may take a second.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, final

from zstrat.telemetry import SpanCapture
from zstrat.telemetry.timeline import columns_of, jax_columns
from zstrat.transport import moved_bytes
from zstrat.wire import AskClock, BeginCapture, Captured, ClockTold, Done, EndCapture

from ._jax_profile import JaxProfile

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from zstrat.telemetry import Recorder
    from zstrat.wire import Message

    from ._executor import WorkerThread

ANSWERED: Final = 120.0
"""Seconds in which the program may begin, and end, jax's profile of all workers. Behind
these nobody ends it any more, and it would fill the memory."""

Capturing = AskClock | BeginCapture | EndCapture


@final
class SessionCapture:
    """Of one session. Only the loop touches it.

    Args:
        executor: Whose thread tells jax.
        clock: What the spans are told by.
    """

    def __init__(
        self, recorder: Recorder, executor: WorkerThread, clock: Callable[[], float]
    ) -> None:
        self._recorder, self._executor, self._clock = recorder, executor, clock
        self._profile = JaxProfile(clock, 0)
        self._limit: asyncio.TimerHandle | None = None
        """Of jax's profile, while there is one."""

    def serve(self, message: Capturing) -> Message | Awaitable[Message]:
        """Answers at once, or when jax has done what it was told."""
        match message:
            case AskClock():
                return ClockTold(self._clock())
            case BeginCapture(spans=spans, seconds=seconds):
                now = self._clock()
                capture = SpanCapture(spans, now + seconds, moved_bytes)
                self._recorder.begin_capture(capture, now)
                self.close()
                self._profile = JaxProfile(self._clock, spans)
                return self._begin_profile(seconds) if message.profile else Done()
            case EndCapture():
                if self._limit is None:
                    return self._captured()
                return self._end_profile()

    def close(self) -> None:
        """The session is over, or who has begun a profile is gone: it ends."""
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None
            self._executor.tell(self._profile.stop)

    async def _begin_profile(self, seconds: float) -> Message:
        loop = asyncio.get_running_loop()
        self._limit = loop.call_later(seconds + ANSWERED, self.close)
        await self._executor.submit(self._profile.start)
        return Done()

    async def _end_profile(self) -> Message:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None
        await self._executor.submit(self._profile.stop)
        return self._captured()

    def _captured(self) -> Captured:
        capture, profile = self._recorder.end_capture(self._clock()), self._profile
        phases, columns = columns_of(capture)
        folder, problem = profile.folder, profile.problem
        if profile.events is not None:
            columns += jax_columns(profile.events)
        return Captured(phases, capture.is_cut, folder, problem, tuple(columns))

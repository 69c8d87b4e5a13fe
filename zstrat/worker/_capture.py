"""Captures the spans of a worker's steps for a time line, and jax's own profile.

The recorder of the session keeps the spans; it runs on the event loop. jax's profiler
is started on the executor thread, between two steps, because starting takes up to a
second. The profile has its own clock. Annotations that are written at known times,
right after the start, relate that clock to the worker's clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

import jax

from zstrat.telemetry import SpanCapture
from zstrat.telemetry.timeline import (
    JaxEvent,
    JaxEvents,
    RoundTrip,
    columns_of,
    jax_columns,
    read_clock,
)
from zstrat.transport import moved_bytes
from zstrat.wire import AskClock, BeginCapture, Captured, ClockTime, Done, EndCapture

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from zstrat.telemetry import Recorder
    from zstrat.telemetry.timeline import ClockReading
    from zstrat.wire import Message

    from ._executor import WorkerThread


ANSWERED: Final = 120.0
"""Seconds that the program has to start and stop jax's profile on all workers. After
that time the program is assumed lost, and the profile is stopped before it fills the
memory."""

Capturing = AskClock | BeginCapture | EndCapture


@final
class SessionCapture:
    """Answers the messages of one session that start and stop captures. Only the loop
    uses this object.

    Args:
        executor: Its thread starts and stops jax's profiler.
        clock: The clock of the spans.
    """

    def __init__(
        self, recorder: Recorder, executor: WorkerThread, clock: Callable[[], float]
    ) -> None:
        self._recorder, self._executor, self._clock = recorder, executor, clock
        self._profile = JaxProfile(clock, 0)
        self._limit: asyncio.TimerHandle | None = None
        """Timer that stops jax's profile if no message does; None: no profile runs, or
        its time is up."""
        self._is_reported = True
        """Whether the program has received the path of the profile's folder, or no
        profile ran."""

    def serve(self, message: Capturing) -> Message | Awaitable[Message]:
        """Answers a message about a capture; at once, or, where jax's profiler has to
        start or stop, when that is done."""
        match message:
            case AskClock():
                return ClockTime(self._clock())
            case BeginCapture(spans=spans, seconds=seconds):
                now = self._clock()
                capture = SpanCapture(spans, now + seconds, moved_bytes)
                self._recorder.begin_capture(capture, now)
                # A profile of a program that was lost has to end first: jax has one at
                # a time.
                self.close()
                self._profile = JaxProfile(self._clock, spans)
                return self._begin_profile(seconds) if message.profile else Done()
            case EndCapture():
                # Also a profile whose time is up: the thread may have yet to stop it.
                return self._captured() if self._is_reported else self._end_profile()

    def close(self) -> None:
        """Stops jax's profile and removes its folder, unless the program has received
        the path of the folder."""
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None
        if not self._is_reported:
            self._is_reported = True
            self._executor.tell(self._profile.discard)

    def _stop_late(self) -> None:
        # Not discarded yet: a program that was only frozen may still ask for it.
        self._limit = None
        self._executor.tell(self._profile.stop)

    async def _begin_profile(self, seconds: float) -> Message:
        loop = asyncio.get_running_loop()
        self._is_reported = False
        self._limit = loop.call_later(seconds + ANSWERED, self._stop_late)
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
        self._is_reported = True
        if profile.events is not None:
            columns += jax_columns(profile.events)
        return Captured(phases, capture.is_cut, folder, problem, tuple(columns))


_MARK: Final = "zstrat clock"
_MARKS: Final = 8
"""Number of annotations that relate the clocks. The shortest of them is used: the first
takes thirty times as long."""
_MAX_NAME_CHARACTERS: Final = 200
"""Limit of the length of an event's name: names of fused operations may have thousands
of characters."""


@final
class JaxProfile:
    """One profile of jax's profiler. Its methods are called on the executor thread. jax
    supports one profile at a time in a process.

    Args:
        clock: The clock of the worker's spans.
        limit: Most events to keep; of more events the last ones are kept.
    """

    def __init__(self, clock: Callable[[], float], limit: int) -> None:
        self._clock, self._limit = clock, limit
        self._marks: list[tuple[float, float]] = []
        self.folder = ""
        """Path of the profile's folder, once the profile was started."""
        self.problem = ""
        """Why there is no profile; "" if there is one."""
        self.events: JaxEvents | None = None
        """Events of the profile, once it was stopped."""
        self._is_running = False

    def start(self) -> None:
        """Starts the profile, in a new temporary folder."""
        folder = ""
        try:
            folder = tempfile.mkdtemp(prefix="zstrat-jax-profile-")
            options = jax.profiler.ProfileOptions()
            # Tracing Python makes each call several times as slow, on the loop, too.
            options.python_tracer_level = 0
            jax.profiler.start_trace(folder, profiler_options=options)
        except Exception as error:  # reported with the capture
            self.problem = (
                f"jax's profiler did not start: {error} (a process has one profile "
                "at a time: stop the other one first)"
            )
            _remove(folder)
            return
        self.folder, self._is_running = folder, True
        for _ in range(_MARKS):
            began = self._clock()
            with jax.profiler.TraceAnnotation(_MARK):
                pass
            self._marks.append((began, self._clock()))

    def stop(self) -> None:
        """Stops the profile, writes it, and reads its events."""
        # The time of a profile may be up while an order to end it is on its way.
        if not self._is_running:
            return
        self._is_running = False
        try:
            jax.profiler.stop_trace()  # type: ignore[no-untyped-call]
        except Exception as error:  # reported with the capture
            self.problem = f"jax's profile is lost: {error}"
            self.discard()
            return
        try:
            self.events = self._read()
        except Exception as error:  # reported in the file: another jax, a full disk
            words = f"the events cannot be read: {type(error).__name__}: {error}"
            self.events = JaxEvents([], words)

    def discard(self) -> None:
        """Stops the profile if it runs, and removes its folder."""
        if self._is_running:
            self._is_running = False
            # Nobody is left to whom an error could be reported.
            with contextlib.suppress(Exception):
                jax.profiler.stop_trace()  # type: ignore[no-untyped-call]
        _remove(self.folder)
        self.folder = ""

    def _read(self) -> JaxEvents:
        found = list(_events(Path(self.folder)))
        marks = sorted(each.began for each in found if each.name == _MARK)
        clock = self._clock_of(marks)
        shown = [each for each in found if each.name != _MARK]
        kept = deque(sorted(shown, key=lambda each: each.ended), self._limit)
        words = f"{len(kept)} of {len(shown)} that took any time, wrong by "
        return JaxEvents(
            [
                each._replace(
                    began=each.began - clock.offset, ended=each.ended - clock.offset
                )
                for each in kept
            ],
            f"{words}{clock.error * 1e3:.3f} ms at most against its clock",
        )

    def _clock_of(self, marks: list[float]) -> ClockReading:
        """Returns how far the clock of the profile is ahead of the worker's clock.

        Raises:
            ValueError: The annotations with known times are missing in the profile.
        """
        trips = zip(self._marks, marks, strict=True)
        return read_clock([RoundTrip(began, at, ended) for (began, ended), at in trips])


def _remove(folder: str) -> None:
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def _events(folder: Path) -> Iterator[JaxEvent]:
    """Yields the events of the profile that have a duration, with times of the
    profile's clock.

    Raises:
        ValueError: There is no profile in the folder.
    """
    (file,) = folder.rglob("*.xplane.pb")
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        where = plane.name.removeprefix("/device:")
        for line in plane.lines:
            # The number after the name of a thread has no meaning.
            thread = line.name.partition("/")[0]
            row = thread if plane.name.startswith("/host:") else f"{where} {thread}"
            for event in line.events:
                if event.duration_ns > 0:
                    began = event.start_ns * 1e-9
                    ended = began + event.duration_ns * 1e-9
                    yield JaxEvent(row, event.name[:_MAX_NAME_CHARACTERS], began, ended)

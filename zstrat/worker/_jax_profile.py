"""jax's own profile of this process, and what of it a time line shows.

It has a clock of its own, which begins with it. Marks that are made at its begin, at
known moments, say what that clock is in ours.
"""

from __future__ import annotations

import tempfile
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

import jax

from zstrat.telemetry.timeline import JaxEvent, JaxEvents, RoundTrip, read_clock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zstrat.telemetry.timeline import ClockReading

_MARK: Final = "zstrat clock"
_MARKS: Final = 8
"""Of which the shortest counts: the first one takes thirty times as long as others."""
_MAX_NAME_CHARACTERS: Final = 200
"""Characters of a name: those of fusions may have thousands."""


@final
class JaxProfile:
    """One profile. Its methods are called on the executor thread; jax can take one at a
    time in a process.

    Args:
        clock: That of the worker's spans.
        limit: Events that are kept, the last ones.
    """

    def __init__(self, clock: Callable[[], float], limit: int) -> None:
        self._clock, self._limit = clock, limit
        self._marks: list[tuple[float, float]] = []
        self.folder = ""
        """Where it is, once it has begun."""
        self.problem = ""
        """Why there is none."""
        self.events: JaxEvents | None = None
        """What it has, once it has ended."""

    def start(self) -> None:
        """Begins it, in a folder of its own for temporary files."""
        try:
            folder = tempfile.mkdtemp(prefix="zstrat-jax-profile-")
            options = jax.profiler.ProfileOptions()
            # Each call of Python would take several times as long, the loop's too.
            options.python_tracer_level = 0
            jax.profiler.start_trace(folder, profiler_options=options)
        except Exception as error:  # told with what was captured
            self.problem = (
                f"jax does not profile it: {error} (it takes one profile at a time in "
                "a process: end the other one first)"
            )
            return
        self.folder = folder
        for _ in range(_MARKS):
            began = self._clock()
            with jax.profiler.TraceAnnotation(_MARK):
                pass
            self._marks.append((began, self._clock()))

    def stop(self) -> None:
        """Ends it, writes it, and reads what it has."""
        if not self.folder or self.problem:
            return
        try:
            jax.profiler.stop_trace()  # type: ignore[no-untyped-call]
        except Exception as error:  # told with what was captured
            self.folder, self.problem = "", f"jax's profile is lost: {error}"
            return
        try:
            self.events = self._read()
        except Exception as error:  # told in the file: a jax of another kind, a disk
            words = f"none could be read: {type(error).__name__}: {error}"
            self.events = JaxEvents([], words)

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
        """What the clock of the profile is ahead of ours.

        Raises:
            ValueError: The marks are not all there.
        """
        trips = zip(self._marks, marks, strict=True)
        return read_clock([RoundTrip(began, at, ended) for (began, ended), at in trips])


def _events(folder: Path) -> Iterator[JaxEvent]:
    """All that took any time, by the clock of the profile.

    Raises:
        ValueError: There is none.
    """
    (file,) = folder.rglob("*.xplane.pb")
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        where = plane.name.removeprefix("/device:")
        for line in plane.lines:
            # Behind the name of a thread stands its number, which says nothing.
            thread = line.name.partition("/")[0]
            row = thread if plane.name.startswith("/host:") else f"{where} {thread}"
            for event in line.events:
                if event.duration_ns > 0:
                    began = event.start_ns * 1e-9
                    ended = began + event.duration_ns * 1e-9
                    yield JaxEvent(row, event.name[:_MAX_NAME_CHARACTERS], began, ended)

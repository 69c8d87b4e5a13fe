"""`zs.profile`: records a time line of all tasks, in a file that Perfetto opens.

The law of this file: entering the block raises errors; after that, problems with the
time line never reach the program. They are logged, and `Profile.problem` has their
text.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import math
import operator
import os
import time
from functools import partial
from typing import TYPE_CHECKING, Final, Self, SupportsIndex, final

from zstrat.coordinator._placeholders import in_step
from zstrat.coordinator.connecting._session_opening import open_sessions
from zstrat.errors import ClosedError, UnavailableError
from zstrat.program import worker_context
from zstrat.telemetry.timeline import assemble, check_place, write_timeline
from zstrat.transport import on_own_thread, to_its_end
from zstrat.variables import recorder

from ._timeline_run import PROFILE_SECONDS, TimelineBounds, TimelineRun

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from zstrat.coordinator._core import CoordinatorCore
    from zstrat.coordinator._session import ClusterSession
    from zstrat.telemetry.timeline import PictureValue, Timeline

    from ._timeline_run import CollectedRun

log = logging.getLogger("zstrat.coordinator")

SECONDS: Final = 60.0
MAX_BYTES: Final = 64 * 2**20
WAITING: Final = PROFILE_SECONDS + 10.0
"""Seconds for the loop to ask all tasks, which have shorter deadlines of their own."""


@final
class Profile:
    """Records a time line while its block runs: ``with``, or ``async with`` on any
    event loop.

    Entering waits until all tasks record, for ten seconds at most; leaving collects
    their spans, and writes the file. Nothing waits in between, and once the block runs
    problems with the time line raise no errors.

    Raises, when the block is entered:
        OSError: The file cannot be created.
        RuntimeError: Another time line of this session is being recorded; this is a
            step function; or the program has no coordinator, or several.
        ClosedError: The strategy is closed.
    """

    def __init__(
        self,
        find: Callable[[], CoordinatorCore],
        path: str | os.PathLike[str],
        steps: SupportsIndex | None,
        seconds: float,
        max_bytes: SupportsIndex,
        jax_profile: bool,
    ) -> None:
        self._find, self._path = find, path
        self._bounds: Final = _bounds(steps, seconds, max_bytes, jax_profile)
        self._place: Path | None = None
        self._run: TimelineRun | None = None
        self._session: ClusterSession
        self.problem = ""
        """Why no file was written, after the block; "" if one was."""
        self.about: dict[str, PictureValue] = {}
        """The summary in the file: the error of each task's clock, what was cut off,
        and which tasks are missing."""

    @property
    def path(self) -> Path | None:
        """The path of the file; None before the block is entered."""
        return self._place

    def __repr__(self) -> str:
        return f"<zstrat.Profile: {os.fspath(self._path)}>"

    def __enter__(self) -> Self:
        core = self._prepare()
        try:
            core.session.run(self._begin(core), "starting a time line", WAITING)
        except BaseException as error:  # to the caller
            self._interrupted(error, core.session)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            run, session = self._current()
            with self._logging_errors(), contextlib.suppress(ClosedError):
                # A session that closes ends the time line itself, with what it has
                # (`Cluster.close`).
                session.run(run.end(), "ending a time line", WAITING)
            self._write(run)
        except BaseException as error:  # to the caller, such as Ctrl-C
            self._interrupted(error, self._session)
            raise

    async def __aenter__(self) -> Self:
        core = await asyncio.to_thread(self._prepare)
        try:
            await core.session.run_async(self._begin(core), "starting a time line")
        except BaseException as error:  # to the caller
            self._interrupted(error, core.session)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        run, session = self._current()
        try:
            with self._logging_errors(), contextlib.suppress(ClosedError):
                await session.run_async(run.end(), "ending a time line")
        except BaseException as error:  # to the caller, such as a cancellation
            self._interrupted(error, session)
            raise
        # On another thread, and to its end: the loop runs meanwhile, and a cancellation
        # leaves no half of a file.
        await to_its_end(on_own_thread(partial(self._write, run)))

    def _prepare(self) -> CoordinatorCore:
        if worker_context.get() is not None or recorder.get() is not None:
            raise RuntimeError(in_step("zs.profile"))
        if self._run is not None:
            raise RuntimeError(
                "this zs.profile has already recorded a block; call zs.profile() again"
            )
        core = self._find()
        # Now, as an error after the block would come when the run is over.
        self._place = check_place(self._path)
        return core

    def _interrupted(self, error: BaseException, session: ClusterSession) -> None:
        """Ends the time line after its start or end was interrupted."""
        self.problem = self.problem or f"it was interrupted by {type(error).__name__}"
        # On the loop, after what was interrupted, which may have started all the same.
        session.portal.call_soon(self._give_up)

    def _give_up(self) -> None:
        if self._run is not None:
            self._run.give_up()

    async def _begin(self, core: CoordinatorCore) -> None:
        run = TimelineRun(core.session.cluster, core.engine, self._bounds)
        await run.begin()
        # On the loop, and only once it has begun: `_give_up` runs there, too.
        self._run, self._session = run, core.session

    def _current(self) -> tuple[TimelineRun, ClusterSession]:
        assert self._run is not None, "the block was not entered"
        return self._run, self._session

    def _write(self, run: TimelineRun) -> None:
        """Writes the file. Called on a thread of the user, as writing may take long."""
        collected, place = run.collected, self._place
        assert place is not None
        with self._logging_errors():
            if collected is None:
                raise UnavailableError("the session was closed before it had ended")
            timeline = timeline_of(collected)
            self.about = timeline.about
            nbytes = write_timeline(timeline, place)
            log.info(
                "%s: %.1f MB, open it at ui.perfetto.dev: %s",
                place,
                nbytes / 1e6,
                "; ".join(f"{name}: {value}" for name, value in self.about.items()),
            )
            for name, value in self.about.items():
                if name.endswith((": missing", ": cut", " not drawn")):
                    log.warning("%s: %s: %s", place, name, value)

    @contextlib.contextmanager
    def _logging_errors(self) -> Iterator[None]:
        """Logs errors instead of raising them: they must not end the training."""
        try:
            yield
        except Exception as error:  # to the log, and to `problem`
            self.problem = self.problem or f"{type(error).__name__}: {error}"
            log.error("the time line %s was not written: %s", self._path, self.problem)


def timeline_of(collected: CollectedRun) -> Timeline:
    """Returns the spans of all tasks, with times of the program's clock."""
    notes = collected.notes
    # All spans are on the monotonic clock; only this line has the time of day.
    began = datetime.datetime.now(datetime.UTC) - datetime.timedelta(
        seconds=time.monotonic() - notes.began
    )
    about: dict[str, PictureValue] = {
        "began": began.isoformat(timespec="milliseconds"),
        "seconds": round(collected.ended - notes.began, 6),
        "steps that ended": notes.steps,
        "ended by": collected.reason,
    }
    return assemble(notes, collected.tasks, collected.ended, about)


def _bounds(
    steps: SupportsIndex | None, seconds: float, max_bytes: SupportsIndex, profile: bool
) -> TimelineBounds:
    """Returns the bounds of a time line, checked.

    Raises:
        ValueError: A bound is not above zero.
    """
    count = None if steps is None else operator.index(steps)
    nbytes = operator.index(max_bytes)
    require_above_0("zs.profile", steps=count, seconds=seconds, max_bytes=nbytes)
    return TimelineBounds(count, float(seconds), nbytes, bool(profile))


def require_above_0(who: str, **numbers: float | None) -> None:
    """Checks arguments of ``who``: each has to be None, or a number above 0."""
    for name, number in numbers.items():
        if number is not None and not 0 < number < math.inf:
            raise ValueError(f"{who}: {name}={number!r}: expected a number above 0")


def profile(
    path: str | os.PathLike[str],
    *,
    steps: SupportsIndex | None = None,
    seconds: float = SECONDS,
    max_bytes: SupportsIndex = MAX_BYTES,
    jax_profile: bool = False,
) -> Profile:
    """Records a time line of all tasks of this program while a block runs::

        with zs.profile("out/trace.json", steps=20):
            for _ in range(20):
                coordinator.schedule(train_step, args=(iterator,))
            coordinator.join()

    The file shows the steps of the program, each worker and each parameter server on
    one clock. Arrows lead from the call that scheduled a step to its run, its push, and
    the update. Open it in the browser at ui.perfetto.dev. Recording ends after
    ``steps`` or ``seconds``, while the block continues.

    Args:
        path: ``*.json`` (Chrome's trace events), or ``*.json.gz``, compressed. Its
            folder is created if needed.
        steps: Record until this number of closures has ended.
        seconds: Record for at most this long.
        max_bytes: The approximate size of the file, before compression. A task with
            more keeps its last spans, and the file says so.
        jax_profile: Also profile each worker's process with jax, into a folder on the
            worker; the file says which.

    Returns:
        A context manager; see `Profile` for the errors of entering it.

    Raises:
        ValueError: A bound is not above zero.
    """
    return Profile(_only_core, path, steps, seconds, max_bytes, jax_profile)


def _only_core() -> CoordinatorCore:
    """Returns the core of this program's only coordinator.

    Raises:
        RuntimeError: There is no coordinator, or there are several.
    """
    sessions = open_sessions.present()
    cores = [session.core for session in sessions]
    present: list[CoordinatorCore] = [core for core in cores if core is not None]
    if len(present) == 1:
        return present[0]
    if present:
        raise RuntimeError(
            f"zs.profile: this program has {len(present)} coordinators; use "
            "coordinator.profile(...) of one of them"
        )
    raise RuntimeError(
        "zs.profile: this program has no coordinator; make "
        "zs.ClusterCoordinator(strategy) first. The steps of a strategy without one "
        "run in this process, and jax.profiler.trace(folder) records them"
    )

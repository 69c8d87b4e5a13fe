"""`zs.profile`: the time line of all tasks of a run, in a file that Perfetto opens.

Law of the file: what can be wrong is said when the block is entered. From then on
nothing that goes wrong with the picture reaches the program: it is logged, and told by
`Profile.problem`.
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

from zstrat.coordinator._on_worker import in_step
from zstrat.coordinator.connecting._open_sessions import open_sessions
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
"""Seconds for the loop to ask all tasks, which have a deadline of their own there."""


@final
class Profile:
    """The time line of a run while a block runs, as a context manager: ``with``, or
    ``async with`` on any event loop.

    Entering waits until all tasks keep what they do, for ten seconds at most; leaving
    waits until they have told it, and writes the file. In between nothing is waited
    for. Nothing that goes wrong with the time line raises once the block runs.

    Raises, when it is entered:
        OSError: The file cannot be made there.
        RuntimeError: Another one is taken in this session just now; it is used in a
            step function; or there is no coordinator, or are several.
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
        """Why there is no file, once the block has ended; "" if there is."""
        self.about: dict[str, PictureValue] = {}
        """What the file says of itself: how far each task's clock may be wrong, what
        was cut off, and who is missing."""

    @property
    def path(self) -> Path | None:
        """The file in full; None before the block is entered."""
        return self._place

    def __repr__(self) -> str:
        return f"<zstrat.Profile: {os.fspath(self._path)}>"

    def __enter__(self) -> Self:
        core = self._prepare()
        try:
            core.session.run(self._begin(core), "beginning a time line", WAITING)
        except BaseException as error:  # to whoever enters the block
            self._cut_off(error, core.session)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            run, session = self._current()
            with self._noting(), contextlib.suppress(ClosedError):
                session.run(run.end(), "ending a time line", WAITING)
            self._write(run)
        except BaseException as error:  # to whoever leaves the block: of Ctrl-C
            self._cut_off(error, self._session)
            raise

    async def __aenter__(self) -> Self:
        core = await asyncio.to_thread(self._prepare)
        try:
            await core.session.run_async(self._begin(core), "beginning a time line")
        except BaseException as error:  # to whoever enters the block
            self._cut_off(error, core.session)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        run, session = self._current()
        try:
            with self._noting(), contextlib.suppress(ClosedError):
                await session.run_async(run.end(), "ending a time line")
        except BaseException as error:  # of cancellation
            self._cut_off(error, session)
            raise
        await to_its_end(on_own_thread(partial(self._write, run)))

    def _prepare(self) -> CoordinatorCore:
        if worker_context.get() is not None or recorder.get() is not None:
            raise RuntimeError(in_step("zs.profile"))
        if self._run is not None:
            raise RuntimeError(
                "this zs.profile has recorded a block already: call zs.profile() again"
            )
        core = self._find()
        self._place = check_place(self._path)
        return core

    def _cut_off(self, error: BaseException, session: ClusterSession) -> None:
        """If the begin was the block is not entered, and nobody will end it; if the end
        was, it may not have been asked for yet."""
        self.problem = self.problem or f"it was cut off by {type(error).__name__}"
        # Behind what was cut off, which may have begun all the same.
        session.portal.call_soon(self._give_up)

    def _give_up(self) -> None:
        if self._run is not None:
            self._run.give_up()

    async def _begin(self, core: CoordinatorCore) -> None:
        run = TimelineRun(core.session.cluster, core.engine, self._bounds)
        await run.begin()
        self._run, self._session = run, core.session

    def _current(self) -> tuple[TimelineRun, ClusterSession]:
        assert self._run is not None, "the block was not entered"
        return self._run, self._session

    def _write(self, run: TimelineRun) -> None:
        """In a thread of the user: it may take as long as the disk does."""
        collected, place = run.collected, self._place
        assert place is not None
        with self._noting():
            if collected is None:
                raise UnavailableError("the session was closed before it had ended")
            timeline = timeline_of(collected)
            self.about = timeline.about
            nbytes = write_timeline(timeline, place)
            log.info(
                "%s: %.1f MB, open it at ui.perfetto.dev: %s",
                place,
                nbytes / 1e6,
                "; ".join(f"{what}: {said}" for what, said in self.about.items()),
            )
            for what, said in self.about.items():
                if what.endswith((": missing", ": cut", " not drawn")):
                    log.warning("%s: %s: %s", place, what, said)

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        """What goes wrong is not raised: the block, which trains, has nothing to do
        with it."""
        try:
            yield
        except Exception as error:  # goes to the log, and to `problem`
            self.problem = self.problem or f"{type(error).__name__}: {error}"
            log.error("the time line %s was not written: %s", self._path, self.problem)


def timeline_of(collected: CollectedRun) -> Timeline:
    """What was collected, on the clock of the program."""
    notes = collected.notes
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
    """
    Raises:
        ValueError: One of them is not above zero.
    """
    count = None if steps is None else operator.index(steps)
    nbytes = operator.index(max_bytes)
    for name, number in (("steps", count), ("seconds", seconds), ("max_bytes", nbytes)):
        if number is not None and not 0 < number < math.inf:
            raise ValueError(f"zs.profile: {name}={number!r}: expected more than 0")
    return TimelineBounds(count, float(seconds), nbytes, bool(profile))


def profile(
    path: str | os.PathLike[str],
    *,
    steps: SupportsIndex | None = None,
    seconds: float = SECONDS,
    max_bytes: SupportsIndex = MAX_BYTES,
    jax_profile: bool = False,
) -> Profile:
    """The time line of all tasks of this program's run, while a block runs::

        with zs.profile("out/trace.json", steps=20):
            for _ in range(20):
                coordinator.schedule(train_step, args=(iterator,))
            coordinator.join()

    The file shows what the program, each worker and each parameter server was at, step
    by step, on one clock; arrows lead from the call that scheduled a step to its run,
    its push, and what was applied. Open it at ui.perfetto.dev, which reads it in the
    browser. It ends by itself after ``steps`` or ``seconds``; training goes on.

    Args:
        path: ``*.json`` (Chrome's trace events), or ``*.json.gz``, the same compressed.
            Its folder is made if it is not there.
        steps: It ends when so many closures have ended.
        seconds: It ends after so long in any case.
        max_bytes: About how large the file may become, before it is compressed; of a
            task that has noted more the last is kept, and the file says so.
        jax_profile: Each worker has jax profile its process, too, into a folder there;
            the file says which.

    Returns:
        A context manager; entering it raises as `Profile` says.

    Raises:
        ValueError: A bound is not above zero.
    """
    return Profile(_only_core, path, steps, seconds, max_bytes, jax_profile)


def _only_core() -> CoordinatorCore:
    """The coordinator of this program.

    Raises:
        RuntimeError: There is none, or there are several.
    """
    sessions = open_sessions.present()
    cores = [session.coordinators.get("core") for session in sessions]
    found: list[CoordinatorCore] = [core for core in cores if core is not None]
    if len(found) == 1:
        return found[0]
    if found:
        raise RuntimeError(
            f"zs.profile: this program has {len(found)} coordinators: use "
            "coordinator.profile(...) of the one that is meant"
        )
    raise RuntimeError(
        "zs.profile: this program has no coordinator whose steps could be shown: make "
        "zs.ClusterCoordinator(strategy) first; the steps of a strategy without one "
        "run in this process: jax.profiler.trace(folder) shows them"
    )

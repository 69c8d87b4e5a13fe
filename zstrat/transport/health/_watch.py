"""Looks at the newest run of this process, and gives pages what it saw.

Law of the file: whoever looks at a page costs the run nothing. The run is asked at
most once a second, however many pages are open: its loop says that it turns, and what
is told is put together, and becomes JSON, on the thread of the HTTP port, once for all,
and less often if that takes long. A page that reads slowly leaves frames out; one that
does not read is dropped.

It is looked from the first page on, and then until the port is closed, so that who
opens another one sees what was before.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from typing import TYPE_CHECKING, Final

from zstrat.telemetry import TaskReport, report

from ._picture import RunLook, RunPicture
from ._register import REGISTER

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from zstrat.wire import PlainTree

    from ._picture import Metrics
    from ._register import RegisterEntry

VIEWERS: Final = 16
"""Pages that are open at a time. Each keeps one of the 64 connections, of which the
others are for probes."""
EVERY: Final = 1.0
"""Seconds between two looks."""
_SHARE: Final = 50
"""For each second of a core that looks and pages took, so many pass to the next."""
_SLOWEST: Final = 30.0
_PARTING: Final = 2.0
"""Seconds for the pages to take the word that this process ends."""

PROGRAMS: Final = ("chief:", "program:", "observer:")
"""Who sees a whole run. A task sees itself."""

log = logging.getLogger("zstrat.transport.health")


class RunWatch:
    """The looks of one process, and the pages that are open. Lives on one loop.

    Args:
        timeout: Seconds after which a loop that does not turn hangs.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._picture = RunPicture(secrets.token_hex(8))
        self._frames: dict[bool, bytes] = {}
        """Those of the picture's number: the change to it, and the whole."""
        self._looking: asyncio.Task[None] | None = None
        self._seen: asyncio.Future[None] | None = None
        """Done with the next look."""
        self._shown: RegisterEntry | None = None
        self._run = 0
        self._is_over = False
        self._viewers = 0
        self._deserted: asyncio.Future[None] | None = None
        """Done when the last page has heard that this process ends."""

    @property
    def is_full(self) -> bool:
        return self._viewers >= VIEWERS

    def begin(self) -> None:
        """Looks from now on. Idempotent; on the loop."""
        if self._looking is None:
            loop = asyncio.get_running_loop()
            self._seen = loop.create_future()
            self._looking = loop.create_task(self._look_on(), name="look at the run")

    async def end(self) -> None:
        """Tells all pages that this process ends; waits a moment for them to hear."""
        self._is_over = True
        if self._looking is not None:
            self._looking.cancel()
        if self._seen is not None and not self._seen.done():
            self._seen.set_result(None)
        if self._viewers:
            self._deserted = asyncio.get_running_loop().create_future()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PARTING):
                    await self._deserted

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events: a whole frame, and then what changes, each as soon as
        the one before was taken; at the end of this process the event "end".

        Cancellation, and closing the generator: the page is no viewer any more.
        """
        self.begin()
        self._viewers += 1
        try:
            # So soon a browser tries again when the connection breaks.
            yield b"retry: 2000\n\n"
            last = 0
            while not self._is_over:
                if self._picture.number == last and self._seen is not None:
                    await asyncio.shield(self._seen)
                if self._picture.number != last:
                    event = self._event(last)
                    last = self._picture.number
                    yield event
            yield b"event: end\ndata: {}\n\n"
        finally:
            self._viewers -= 1
            if self._deserted is not None and not self._viewers:
                self._deserted.set_result(None)

    def _event(self, after: int) -> bytes:
        is_next = 0 < after == self._picture.number - 1
        if is_next not in self._frames:
            frame = self._picture.frame(after if is_next else 0)
            self._frames[is_next] = f"data: {frame}\n\n".encode("ascii")
        return self._frames[is_next]

    async def _look_on(self) -> None:
        loop = asyncio.get_running_loop()
        used = time.thread_time()
        while True:
            began = loop.time()
            self._picture.see(await self._look(), began)
            self._frames = {}
            seen, self._seen = self._seen, loop.create_future()
            if seen is not None and not seen.done():
                seen.set_result(None)
            spent, used = time.thread_time() - used, time.thread_time()
            every = min(max(EVERY, _SHARE * spent), _SLOWEST)
            await asyncio.sleep(began + every - loop.time())

    async def _look(self) -> RunLook:
        present = REGISTER.present()
        if not present:
            return RunLook()
        programs = [each for each in present if each.name.startswith(PROGRAMS)]
        was_program = self._shown is not None and self._shown.name.startswith(PROGRAMS)
        if was_program and not programs:
            return RunLook()  # it has ended, although tasks of it may be here yet
        shown = (programs or present)[-1]
        if shown is not self._shown:
            self._shown, self._run = shown, self._run + 1
        return await self._asked(shown, self._run)

    async def _asked(self, entry: RegisterEntry, run: int) -> RunLook:
        try:
            return self._seen_in(entry, run, await entry.statistics(self._timeout))
        except TimeoutError:
            words = f"its event loop has not turned for {self._timeout:g} s"
            return RunLook(run, entry.name, state="hangs", words=words)
        except Exception:  # a defect of ours: to the log, and the page says that
            if entry.is_over:  # its loop was closed meanwhile
                return RunLook()
            log.exception("asking %s for its numbers", entry.name)
            words = "an error that the log of this process has"
            return RunLook(run, entry.name, state="hangs", words=words)

    def _seen_in(
        self, entry: RegisterEntry, run: int, told: Mapping[str, PlainTree]
    ) -> RunLook:
        metrics = told.get("coordinator")
        if isinstance(metrics, dict):
            return RunLook(run, entry.name, metrics)
        if not entry.name.startswith(PROGRAMS):
            return RunLook(run, entry.name, _of_task(entry.name, told))
        words = "it has no ClusterCoordinator yet, so there are no steps to show"
        return RunLook(run, entry.name, state="waits", words=words)


def _of_task(name: str, told: Mapping[str, PlainTree]) -> Metrics:
    """A run of which this process sees one task only: itself."""
    about = told.get("task")
    known = about if isinstance(about, dict) else {}
    task = TaskReport("open", str(known.get("address", "")), "", told)
    uptime = known.get("uptime")
    return {"seconds": uptime, **report({name: task})}

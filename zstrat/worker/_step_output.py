"""Sends what steps and dataset functions print to their program.

Any thread may print; the loop sends. The law of this file: a thread that prints never
waits for the network or for the program. Lines beyond `LINES` a second, or beyond
`PENDING` unsent bytes, are dropped and counted.

Order. The executor thread asks the loop to send before it asks it to report a closure,
and the loop does both in that order, on one link. So the program receives the output of
a step before the end of the step.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import groupby
from typing import TYPE_CHECKING, Final, final

from zstrat.errors import BusyError, PeerLostError
from zstrat.program import tracing_again
from zstrat.wire import Printed, PrintedText

if TYPE_CHECKING:
    from zstrat.transport import Remote

LINES: Final = 1000
"""Most lines of one task in a `WINDOW`: more than a person reads, and little to
send."""
WINDOW: Final = 1.0
PENDING: Final = 64 * 1024
"""Most bytes that wait for the loop: a quarter of the largest header."""
MAX_LINE_CHARACTERS: Final = 8 * 1024
"""Most characters of a line; a longer one is cut into several."""
BEGUN: Final = 64
"""Most threads with an unfinished line; beyond that all unfinished lines are ended."""

Hear = Callable[[int, str], None]
"""Receives text written to a stream (1 or 2). Called from any thread; never raises."""
Listen = Callable[[Hear | None], None]
"""Redirects the output of the process, except that of older threads; None: ends it."""

_RETURNS: Final = re.compile(r"(^|\n)\r+")


def unheard(hear: Hear | None) -> None:
    """A `Listen` that does not redirect the output."""


def unbegun() -> None:
    """Does nothing, as there is no output to send."""


@final
class StepOutput:
    """Collects the output of one session and sends it to the coordinator.

    Created, sent and closed on the loop; `hear` and `end_lines` are called on any
    thread. An empty text with a count only reports dropped lines.
    """

    def __init__(
        self,
        session: int,
        remote: Remote,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._session, self._remote, self._clock = session, remote, clock
        self._loop: Final = asyncio.get_running_loop()
        # Re-entrant: a finalizer that prints may run at any allocation.
        self._lock: Final = threading.RLock()
        self._begun: dict[tuple[int, int], str] = {}
        """Unfinished lines, by thread and stream."""
        self._lines: list[PrintedText] = []
        self._nbytes = 0
        self._window_began, self._in_window = clock(), 0
        self._dropped = 0
        """Dropped lines that were not reported yet,"""
        self._dropped_from = 1
        """and the stream of the last one."""
        self._is_reported = False
        """Dropped lines were reported in this window."""
        self._is_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    # Threads that print

    def hear(self, stream: int, text: str) -> None:
        """Receives text written to a stream; finished lines are sent soon."""
        if self._closed or tracing_again.get():
            return
        with self._lock:
            place = threading.get_ident(), stream
            text = self._begun.pop(place, "") + text
            if (
                "\n" not in text
                and "\r" not in text
                and len(text) <= MAX_LINE_CHARACTERS
            ):
                self._begun[place] = text  # `print` writes word by word
                return
            if "\r" in text:  # a progress bar
                text = _RETURNS.sub(r"\1", text.replace("\r\n", "\n"))
                text = text.replace("\r", "\n")
            *lines, rest = text.split("\n")
            if len(rest) > MAX_LINE_CHARACTERS:  # the last piece waits for its end
                begun = (len(rest) - 1) // MAX_LINE_CHARACTERS * MAX_LINE_CHARACTERS
                lines.append(rest[:begun])
                rest = rest[begun:]
            if rest:
                self._begun[place] = rest
                self._bound()
            for line in lines:
                for at in range(0, len(line) or 1, MAX_LINE_CHARACTERS):
                    self._add(stream, line[at : at + MAX_LINE_CHARACTERS])

    def end_lines(self) -> None:
        """Ends the unfinished lines of the calling thread, and reports dropped lines if
        that was not done in this window."""
        if not self._begun and not self._dropped:
            return
        with self._lock:
            for stream in (1, 2):
                line = self._begun.pop((threading.get_ident(), stream), "")
                if line:
                    self._add(stream, line)
            if not self._is_reported:
                self._report_dropped()

    # The loop

    def close(self) -> None:
        """Stops sending."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _send(self) -> None:
        with self._lock:
            lines, self._lines, self._nbytes = self._lines, [], 0
            self._is_due = False
        if self._closed or not lines:
            return
        try:
            self._remote.notify(Printed(self._session, _joined(lines)))
        except BusyError:  # the coordinator does not read: it gets the count later
            with self._lock:
                for line in lines:
                    self._drop(line.stream, line.dropped + (line.text != ""))
        except PeerLostError:  # the session is notified separately, and ends
            pass

    def _report_later(self) -> None:
        if self._timer is None and not self._closed:
            self._timer = self._loop.call_later(WINDOW, self._report)

    def _report(self) -> None:
        self._timer = None
        with self._lock:
            if self._clock() - self._window_began < WINDOW:
                self._report_later()  # further output reports it in the next window
            else:
                self._report_dropped()

    # With the lock

    def _add(self, stream: int, line: str) -> None:
        now = self._clock()
        if now - self._window_began >= WINDOW:
            self._window_began, self._in_window, self._is_reported = now, 0, False
        if self._in_window >= LINES or self._nbytes >= PENDING:
            self._drop(stream, 1)
            return
        self._in_window += 1
        dropped, self._dropped = self._dropped, 0
        self._put(stream, line + "\n", dropped)

    def _put(self, stream: int, text: str, dropped: int) -> None:
        # Halves of surrogate pairs cannot be sent.
        if not text.isascii():
            text = text.encode("utf-8", "backslashreplace").decode()
            self._nbytes += 3 * len(text)
        self._nbytes += len(text)
        self._lines.append(PrintedText(stream, text, dropped))
        if not self._is_due:
            self._is_due = True
            self._soon(self._send)

    def _drop(self, stream: int, count: int) -> None:
        if not self._dropped:
            self._soon(self._report_later)
        self._dropped += count
        self._dropped_from = stream

    def _report_dropped(self) -> None:
        if self._dropped:
            self._is_reported = True
            dropped, self._dropped = self._dropped, 0
            self._put(self._dropped_from, "", dropped)

    def _bound(self) -> None:
        if len(self._begun) > BEGUN:
            begun, self._begun = self._begun, {}
            for (_, stream), line in begun.items():
                self._add(stream, line)

    def _soon(self, function: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed: the process ends
            self._loop.call_soon_threadsafe(function)


def _joined(lines: list[PrintedText]) -> list[PrintedText]:
    """Joins neighbouring lines of one stream; a count of dropped lines starts a new
    text."""
    texts: list[PrintedText] = []
    number = 0

    def run_of(line: PrintedText) -> tuple[int, int]:
        nonlocal number
        number += line.dropped > 0
        return number, line.stream

    for (_, stream), run in groupby(lines, run_of):
        members = list(run)
        text = "".join([line.text for line in members])
        texts.append(PrintedText(stream, text, members[0].dropped))
    return texts

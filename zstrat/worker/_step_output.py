"""What steps and dataset functions print, on its way to their program.

Any thread may print; the loop sends. The law of this file: nobody who prints waits for
the network or for the program. What is more than `LINES` a second, or than `PENDING`
bytes that were not sent yet, is dropped and counted.

Order. The executor thread asks the loop to send before it asks it to report a closure,
and the loop does both in that order, on one link. So the program hears what a step has
printed before it hears that the step is over.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import groupby
from typing import TYPE_CHECKING, Final, NamedTuple, final

from zstrat.errors import BusyError, PeerLostError
from zstrat.program import tracing_again
from zstrat.wire import Printed, PrintedText

if TYPE_CHECKING:
    from zstrat.transport import Remote

LINES: Final = 1000
"""Lines of one task in a `WINDOW`: more than anybody reads, and little to send."""
WINDOW: Final = 1.0
PENDING: Final = 64 * 1024
"""Bytes that wait for the loop: a quarter of what a header may have."""
MAX_LINE_CHARACTERS: Final = 8 * 1024
"""Characters of a line; a longer one is cut in several."""
BEGUN: Final = 64
"""Threads that may have begun a line; with more of them, all these lines end."""

Hear = Callable[[int, str], None]
"""Takes what was written to a stream (1 or 2). From any thread; never raises."""
Listen = Callable[[Hear | None], None]
"""From now on this hears what the process writes, but for threads of before."""

_RETURNS: Final = re.compile(r"(^|\n)\r+")


def unheard(hear: Hear | None) -> None:
    """A `Listen` that leaves what is printed to the process."""


def unbegun() -> None:
    """No line was begun that somebody hears."""


class _Line(NamedTuple):
    stream: int
    text: str
    """With its end; empty: only tells of what was dropped."""
    dropped: int


@final
class StepOutput:
    """What is printed in one session. Made, sent and closed on the loop.

    Args:
        remote: The coordinator, which hears it.
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
        # Re-entrant: a finalizer that prints may run wherever memory is asked for.
        self._lock: Final = threading.RLock()
        self._begun: dict[tuple[int, int], str] = {}
        """Lines that have no end yet, by thread and stream."""
        self._lines: list[_Line] = []
        self._nbytes = 0
        self._window_began, self._in_window = clock(), 0
        self._dropped = 0
        """Lines of which the program was not told,"""
        self._dropped_from = 1
        """and the stream of the last one."""
        self._told = False
        """In this window it was."""
        self._is_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    # Whoever prints

    def hear(self, stream: int, text: str) -> None:
        """Takes what was written to a stream; what ends a line is sent soon."""
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
                self._begun[place] = text  # as of print, which writes by the word
                return
            if "\r" in text:  # a bar that is drawn over and over
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
        """The calling thread is done with something: a line that it has begun ends, and
        what was dropped is told, once in a window."""
        if not self._begun and not self._dropped:
            return
        with self._lock:
            for stream in (1, 2):
                line = self._begun.pop((threading.get_ident(), stream), "")
                if line:
                    self._add(stream, line)
            if not self._told:
                self._tell_dropped()

    # The loop

    def close(self) -> None:
        """Nothing is sent any more."""
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
        except BusyError:  # it does not read: it is told how much that was, later
            with self._lock:
                for line in lines:
                    self._drop(line.stream, line.dropped + (line.text != ""))
        except PeerLostError:  # told to the session for itself; it ends
            pass

    def _tell_later(self) -> None:
        if self._timer is None and not self._closed:
            self._timer = self._loop.call_later(WINDOW, self._tell)

    def _tell(self) -> None:
        self._timer = None
        with self._lock:
            if self._clock() - self._window_began < WINDOW:
                self._tell_later()  # who prints on tells it with the next window
            else:
                self._tell_dropped()

    # With the lock

    def _add(self, stream: int, line: str) -> None:
        now = self._clock()
        if now - self._window_began >= WINDOW:
            self._window_began, self._in_window, self._told = now, 0, False
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
        self._lines.append(_Line(stream, text, dropped))
        if not self._is_due:
            self._is_due = True
            self._soon(self._send)

    def _drop(self, stream: int, count: int) -> None:
        if not self._dropped:
            self._soon(self._tell_later)
        self._dropped += count
        self._dropped_from = stream

    def _tell_dropped(self) -> None:
        if self._dropped:
            self._told = True
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


def _joined(lines: list[_Line]) -> list[PrintedText]:
    """Neighbours of one stream as one text; what was dropped begins another."""
    texts: list[PrintedText] = []
    number = 0

    def run_of(line: _Line) -> tuple[int, int]:
        nonlocal number
        number += line.dropped > 0
        return number, line.stream

    for (_, stream), run in groupby(lines, run_of):
        members = list(run)
        text = "".join([line.text for line in members])
        texts.append(PrintedText(stream, text, members[0].dropped))
    return texts

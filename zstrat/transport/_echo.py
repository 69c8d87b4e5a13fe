"""What other tasks print, shown by this program.

Law of the file: the loop puts text in and never waits for a stream, which may be a pipe
that nobody reads. Text is written by a thread that lives while there is some, or by a
thread of the user that has waited for what the text belongs to: so it is there when
that wait ends, and lands where the user's own would.

The thread is no daemon: one that holds the lock of ``sys.stdout`` when the interpreter
ends would abort it. It ends by itself, at the latest when the main thread does.
"""

from __future__ import annotations

import re
import sys
import threading
from collections import deque
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Final, final

from zstrat.threads import ThreadBell

if TYPE_CHECKING:
    import contextvars

MAX_PENDING_CHARACTERS: Final = 2**20
"""Characters that wait for a stream; what comes then is dropped, and counted."""
LINGER: Final = 0.2
"""Seconds that the thread waits for more: starting one takes the loop 50 µs."""
OUT: Final = 1

_COLOURS: Final = re.compile("(\x1b\\[[0-9;]*m)")


@final
class Echo:
    """Text on its way to ``sys.stdout`` and ``sys.stderr`` as they are when it gets
    there."""

    def __init__(self) -> None:
        self.place: contextvars.Context | None = None
        """Of a caller that waits now: in a notebook it says which cell that is."""
        self.waiting: deque[tuple[int, str]] = deque()
        self.is_behind = False
        """Something is not written yet, or is being written: it is to be waited for, by
        `show`."""
        self._size = 0
        self._dropped = 0
        # Both re-entrant: a finalizer may close this, a stream may be an object that
        # prints.
        self._lock, self._writing = threading.RLock(), threading.RLock()
        self._bell: ThreadBell | None = None
        """Of the thread that shows, while it waits for more."""
        self._thread: threading.Thread | None = None
        self._closed = False

    def put(self, task: str, stream: int, text: str, dropped: int = 0) -> None:
        """Has lines of a task shown. On the loop.

        Args:
            text: Lines, each with its end.
            dropped: Lines before them that are not there.
        """
        lines = []
        with self._lock:
            if self._closed:
                return
            if self._size > MAX_PENDING_CHARACTERS:
                self._dropped += dropped + text.count("\n")
                return
            dropped, self._dropped = dropped + self._dropped, 0
            if dropped:
                lines.append(
                    f"{task}| ({dropped:,} lines are not shown here: there are too "
                    "many at once. The log of the task has them.)\n"
                )
            lines += [f"{task}| {_quiet(line)}\n" for line in text.split("\n")[:-1]]
            text = "".join(lines)
            self.waiting.append((stream, text))
            self._size += len(text)
            self.is_behind = True
            if self._thread is None:
                self._start()
            self._wake()

    def show(self) -> None:
        """Writes all that waits; blocks as ``print`` does."""
        with self._writing:
            while True:
                with self._lock:
                    shown = list(self.waiting)
                    self.waiting.clear()
                    self._size = 0
                    if not shown:
                        self.is_behind = False
                        return
                for stream, run in groupby(shown, itemgetter(0)):
                    _write(stream, "".join([text for _, text in run]))

    def close(self) -> None:
        """No more text comes; what waits is written. From any thread."""
        with self._lock:
            self._closed = True
            self._wake()

    def _wake(self) -> None:
        if self._bell is not None:
            self._bell.ring()

    def _start(self) -> None:
        if not threading.main_thread().is_alive():
            return  # the interpreter ends
        self._thread = threading.Thread(target=self._live, name="zstrat echo")
        try:
            self._thread.start()
        except RuntimeError:  # the interpreter ends, and text with it
            self._thread = None

    def _live(self) -> None:
        main = threading.main_thread()
        while True:
            place = self.place
            if place is None:
                self.show()
            else:
                place.copy().run(self.show)
            with self._lock:
                if main.is_alive() and not (self._closed or self.waiting):
                    self._bell = ThreadBell()
            if self._bell is not None:
                self._bell.wait(LINGER)
            with self._lock:
                self._bell = None
                if not (self.waiting and main.is_alive()):
                    self._thread = None
                    return


def _write(stream: int, text: str) -> None:
    out = sys.stdout if stream == OUT else sys.stderr
    if out is None:  # a program without streams
        return
    try:
        try:
            out.write(text)
        except UnicodeEncodeError as error:  # it takes less than the worker's stream
            known = error.encoding
            out.write(text.encode(known, "backslashreplace").decode(known))
        out.flush()
    except (OSError, ValueError):  # nobody reads it, or it is closed: as nobody would
        return


def _quiet(line: str) -> str:
    """The line without what moves the cursor of a terminal; colours stay."""
    if line.isprintable():
        return line
    pieces = _COLOURS.split(line)
    return "".join(
        piece if at % 2 else "".join([_escaped(c) for c in piece])
        for at, piece in enumerate(pieces)
    )


def _escaped(character: str) -> str:
    plain = character.isprintable() or character == "\t"
    return character if plain else f"\\x{ord(character):02x}"

"""Shows the output of other tasks in this program.

Law of the file: the loop queues text and never waits for a stream, which may be a pipe
that nobody reads. Text is written by a thread that exists while some text waits, or by
a user's thread that has waited for the step that printed it, so that the text appears
when the wait ends, in order with the thread's own output.

The thread is not a daemon: a daemon that holds the lock of ``sys.stdout`` at the end of
the interpreter would abort it. The thread ends by itself, at the latest with the main
thread.
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
"""Most characters that wait to be written; further text is dropped, and its lines are
counted."""
LINGER: Final = 0.2
"""Seconds that the writing thread waits for more text before it ends: to start a thread
takes the loop 50 µs."""
OUT: Final = 1

_COLOURS: Final = re.compile("(\x1b\\[[0-9;]*m)")


@final
class Echo:
    """Queues text for ``sys.stdout`` and ``sys.stderr``, and writes it to the streams
    that these names have at the time of writing."""

    def __init__(self) -> None:
        self.place: contextvars.Context | None = None
        """Context variables of a caller that waits now; in a notebook they say which
        cell gets the text."""
        self.waiting: deque[tuple[int, str]] = deque()
        self.is_behind = False
        """Whether some text is not written yet; `show` waits until all text is."""
        self._size = 0
        self._dropped = 0
        # Both re-entrant: a finalizer may call `close`, and a stream may be an object
        # that prints.
        self._lock, self._writing = threading.RLock(), threading.RLock()
        self._bell: ThreadBell | None = None
        """Wakes the writing thread while it waits for more text."""
        self._thread: threading.Thread | None = None
        self._closed = False

    def put(self, task: str, stream: int, text: str, dropped: int = 0) -> None:
        """Queues lines that a task printed. Call it on the loop.

        Args:
            text: Lines, each with its newline.
            dropped: Number of dropped lines before them.
        """
        lines = []
        with self._lock:
            if self._closed:
                return
            # Dropped lines are reported before the next text that fits.
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
        """Writes all queued text; blocks as ``print`` does."""
        with self._writing:
            while True:
                with self._lock:
                    # Not held while writing: the loop queues text meanwhile, whatever
                    # the stream does.
                    shown = list(self.waiting)
                    self.waiting.clear()
                    self._size = 0
                    if not shown:
                        self.is_behind = False
                        return
                for stream, run in groupby(shown, itemgetter(0)):
                    _write(stream, "".join([text for _, text in run]))

    def close(self) -> None:
        """Accepts no more text, and lets the thread write the queued text. From any
        thread."""
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
                # Under the lock: text that comes after this look finds a bell to ring.
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
        except UnicodeEncodeError as error:  # its encoding lacks a character
            known = error.encoding
            out.write(text.encode(known, "backslashreplace").decode(known))
        out.flush()
    except (OSError, ValueError):  # nobody reads it, or it is closed
        return


def _quiet(line: str) -> str:
    """Escapes characters that control a terminal, except colours."""
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

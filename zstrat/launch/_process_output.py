"""What a process prints, heard by one listener besides.

The streams ``sys.stdout`` and ``sys.stderr`` of the process are replaced by others that
write to the same place, line by line, and tell. So the log keeps everything, in time,
also what was printed before a crash. What native code writes to the descriptors, and
what child processes write, is in the log alone: to hear it the descriptors would have
to be pipes, and the last lines of a process that aborts would be lost in them.

Records of logging are heard as the program of a session would show them, and warnings,
which `logging.captureWarnings` makes records; those of zstrat itself are not.

The law of this file: a listener hears no thread that began before it listened, but for
its own. So what an earlier session has left running does not speak in the next one. Nor
does it hear a process that was forked, where locks of it may be held for ever.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING, BinaryIO, Final, final

if TYPE_CHECKING:
    from collections.abc import Callable

    from zstrat.worker import Hear

_OURS: Final = "zstrat"
_WARNINGS: Final = "py.warnings"


@final
class ProcessOutput:
    """The streams of this process, and who hears them."""

    def __init__(self) -> None:
        self._hear: Hear | None = None
        self._mine = self._process = 0
        self._older: weakref.WeakSet[threading.Thread] = weakref.WeakSet()

    def install(self) -> None:
        """Takes the streams of the process, and a place beside its log, for good."""
        for number, stream in ((1, sys.stdout), (2, sys.stderr)):
            stream.flush()
            # Of the descriptor, which nobody closes: the log has a stream of its own.
            out = open(number, "wb", closefd=False)  # noqa: SIM115
            heard = self.stream(number, out, stream.encoding, stream.errors)
            if number == 1:
                sys.stdout = heard
            else:
                sys.stderr = heard
        logging.getLogger().addHandler(self.records())

    def stream(
        self, number: int, out: BinaryIO, encoding: str, errors: str | None
    ) -> HeardStream:
        """What stands for standard output (1) or standard error (2)."""
        return HeardStream(out, encoding, errors, partial(self._heard, number))

    def records(self) -> logging.Handler:
        """What takes records of logging, as standard error does."""
        return HeardRecords(partial(self._heard, 2))

    def listen(self, hear: Hear | None) -> None:
        """From now on ``hear`` hears what is printed; None: nobody does. Called on the
        thread that runs what is to be heard."""
        mine = threading.current_thread()
        # Native threads, which have none of these objects until they call Python, do
        # what that thread asks them to.
        self._older = weakref.WeakSet(
            thread
            for thread in threading.enumerate()
            if thread is not mine and not _is_native(thread)
        )
        self._process = os.getpid()
        self._mine, self._hear = threading.get_ident(), hear

    def _heard(self, stream: int, text: str) -> None:
        hear = self._hear
        if hear is None or os.getpid() != self._process:
            return
        if threading.get_ident() == self._mine or (
            threading.current_thread() not in self._older
        ):
            hear(stream, text)


class HeardStream(io.TextIOWrapper):
    """A text stream that tells what is written to it."""

    def __init__(
        self,
        out: BinaryIO,
        encoding: str,
        errors: str | None,
        tell: Callable[[str], None],
    ) -> None:
        super().__init__(out, encoding, errors, line_buffering=True)
        self._tell = tell

    def write(self, text: str, /) -> int:
        count = super().write(text)
        self._tell(text)
        return count


class HeardRecords(logging.Handler):
    """Tells of records that are not zstrat's own, as a plain program shows them."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()
        self._tell = tell
        self._plain = logging.Formatter("%(message)s")
        self._usual = logging.Formatter(logging.BASIC_FORMAT)

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.partition(".")[0] == _OURS or _is_written(record):
            return
        shown = self._plain if record.name == _WARNINGS else self._usual
        try:
            self._tell(shown.format(record).rstrip("\n") + "\n")
        except Exception:  # goes to the log, as of every handler: a record's own fault
            self.handleError(record)


def _is_written(record: logging.LogRecord) -> bool:
    """Whether a handler of the user has written it to a stream that is heard."""
    logger = logging.getLogger(record.name)
    while logger.parent is not None:
        for handler in logger.handlers:
            is_heard = isinstance(getattr(handler, "stream", None), HeardStream)
            if is_heard and record.levelno >= handler.level:
                return True
        logger = logger.parent
    return False


def _is_native(thread: threading.Thread) -> bool:
    return isinstance(thread, threading._DummyThread)

"""Prepares the process of a daemon: imports jax without garbage collections, chooses
devices, and forwards what the process prints to one listener, in addition to its log.

``sys.stdout`` and ``sys.stderr`` are replaced by streams that write to the same file,
line by line, and call the listener. So the log still has everything, in order,
including what was printed before a crash. Output of native code and of child processes
is in the log only: to forward it the descriptors would have to be pipes, and the last
output of a process that aborts would be lost in them.

Records of logging and warnings are forwarded as a plain program would print them,
except the records of zstrat itself.

Law: a listener receives no output of a thread that started before it began to listen,
except its own thread, so that the remains of an earlier session do not print into the
next one. It receives no output of forked processes, where its locks may never be freed.
"""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import os
import sys
import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING, BinaryIO, Final, final

from zstrat.config import set_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from zstrat.worker import Hear


_OURS: Final = "zstrat"
_WARNINGS: Final = "py.warnings"


@final
class ProcessOutput:
    """The output streams of this process, and the listener to which their output is
    forwarded."""

    def __init__(self) -> None:
        self._listener: Hear | None = None
        self._thread = self._process = 0
        self._older: weakref.WeakSet[threading.Thread] = weakref.WeakSet()

    def install(self) -> None:
        """Replaces the streams of the process and adds a logging handler, for good."""
        for number, stream in ((1, sys.stdout), (2, sys.stderr)):
            # What the old stream still buffers would come after newer output.
            stream.flush()
            # The descriptor stays open: the logging handler writes to it as well.
            out = open(number, "wb", closefd=False)  # noqa: SIM115
            forwarding = self.stream(number, out, stream.encoding, stream.errors)
            if number == 1:
                sys.stdout = forwarding
            else:
                sys.stderr = forwarding
        logging.getLogger().addHandler(self.records())

    def stream(
        self, number: int, out: BinaryIO, encoding: str, errors: str | None
    ) -> ForwardingStream:
        """Makes the replacement of standard output (1) or standard error (2)."""
        return ForwardingStream(out, encoding, errors, partial(self._forward, number))

    def records(self) -> logging.Handler:
        """Makes the handler that forwards logging records as output to standard
        error."""
        return ForwardingHandler(partial(self._forward, 2))

    def listen(self, listener: Hear | None) -> None:
        """Sets the listener, None for none. Call this on the thread whose output is
        forwarded."""
        current = threading.current_thread()
        # A weak set: a thread that ends must not be kept, nor its number, which the
        # system gives to a new thread.
        # Native threads are "dummy" threads to Python; they work for the current one.
        self._older = weakref.WeakSet(
            thread
            for thread in threading.enumerate()
            if thread is not current and not isinstance(thread, threading._DummyThread)
        )
        self._process = os.getpid()
        # The listener last: `_forward`, on other threads, reads it first and without a
        # lock, and must then find the rest of its session.
        self._thread, self._listener = threading.get_ident(), listener

    def _forward(self, stream: int, text: str) -> None:
        listener = self._listener
        if listener is None or os.getpid() != self._process:
            return
        # By number first, which is cheap: `current_thread` looks up an object, and in a
        # native thread makes one.
        if threading.get_ident() == self._thread or (
            threading.current_thread() not in self._older
        ):
            listener(stream, text)


class ForwardingStream(io.TextIOWrapper):
    """A text stream that passes each written text to a callback as well."""

    def __init__(
        self,
        out: BinaryIO,
        encoding: str,
        errors: str | None,
        forward: Callable[[str], None],
    ) -> None:
        super().__init__(out, encoding, errors, line_buffering=True)
        self._forward = forward

    def write(self, text: str, /) -> int:
        # The file first: the log has the text even if the listener fails.
        count = super().write(text)
        self._forward(text)
        return count


class ForwardingHandler(logging.Handler):
    """A logging handler that formats records of users' code as a plain program prints
    them, and ignores the records of zstrat."""

    def __init__(self, forward: Callable[[str], None]) -> None:
        super().__init__()
        self._forward = forward
        self._plain = logging.Formatter("%(message)s")
        self._usual = logging.Formatter(logging.BASIC_FORMAT)

    def emit(self, record: logging.LogRecord) -> None:
        # Records of zstrat are about the daemon, not about the user's program, and
        # a record that a handler of the user prints would come twice.
        if record.name.partition(".")[0] == _OURS or _is_written(record):
            return
        shown = self._plain if record.name == _WARNINGS else self._usual
        try:
            self._forward(shown.format(record).rstrip("\n") + "\n")
        except Exception:  # goes to the log: the record has wrong arguments
            self.handleError(record)


def _is_written(record: logging.LogRecord) -> bool:
    """Returns whether a handler of the user writes the record to a forwarding
    stream."""
    logger = logging.getLogger(record.name)
    # Up to the root, but without it: its handlers are the daemon's.
    while logger.parent is not None:
        for handler in logger.handlers:
            stream = getattr(handler, "stream", None)
            is_forwarded = isinstance(stream, ForwardingStream)
            if is_forwarded and record.levelno >= handler.level:
                return True
        logger = logger.parent
    return False


@contextlib.contextmanager
def kept_for_good() -> Iterator[None]:
    """Runs the block without garbage collections, and excludes all objects that exist
    at its end from later collections.

    With jax loaded, one collection takes 0.2 s, which blocks the event loop; there are
    a dozen while jax is imported, and one at exit. Garbage of the block is never freed
    (for imports less than 1 MiB). Only for processes of our own, such as daemons,
    because this affects all objects of the process.
    """
    gc.disable()
    try:
        yield
    finally:
        # Before `enable`: the next allocation might start a full collection.
        gc.freeze()
        gc.enable()


def choose_devices(variables: Mapping[str, str]) -> None:
    """Sets environment variables that select the devices of jax.

    If jax is imported already, as in a forked daemon, the configuration of jax is
    updated as well; jax must not have initialized its devices yet.
    """
    for name, value in variables.items():
        set_environment(name, value)
    if (jax := sys.modules.get("jax")) is not None:
        for name, value in variables.items():
            # jax has read its own variables when it was imported. Those of CUDA and
            # ROCm are read by their libraries, when a backend starts.
            if name.startswith("JAX_"):
                word = int(value) if value.isdecimal() else value
                jax.config.update(name.lower(), word)

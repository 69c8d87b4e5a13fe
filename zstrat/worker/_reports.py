"""Reports the ends of steps, their results, and what they print.

Large results are kept until fetched. Law: a closure is *open* from its dispatch until
its ending is in a message. An open closure is not accepted again, and a closure that is
not open is not reported.

What steps and dataset functions print is sent to their program. Any thread may print;
the loop sends. Law: a thread that prints never waits for the network or for the
program. Lines beyond `LINES` a second, or beyond `PENDING` unsent bytes, are dropped
and counted.

Order: the executor thread asks the loop to send printed text before it asks the loop to
report the closure, and the loop does both in that order, on one link. So the program
receives the output of a step before the end of the step.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from itertools import groupby
from typing import TYPE_CHECKING, Final, final

from zstrat.errors import BusyError, NotFoundError, PeerLostError
from zstrat.program import tracing_again
from zstrat.wire import Completions, Outcome, Printed, PrintedText

from . import _closure

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterable, Sequence

    import numpy as np

    from zstrat.transport import Remote
    from zstrat.wire import Batch, LayoutMessage

    from ._closure import Ending


BATCH: Final = 1024
"""Most endings in one message: each takes about 20 bytes of its header, which is
bounded."""
AGAIN: Final = 0.02
"""Seconds until completions are sent again to a coordinator that does not read."""

_NAMES: Final = {
    int(Outcome.OK): "done",
    int(Outcome.FAILED): "failed",
    int(Outcome.CANCELLED): "cancelled",
    int(Outcome.DOUBTFUL): "failed",
}


@final
class Reports:
    """The open closures of one session, and the endings to report. Only the loop uses
    this object.

    Args:
        results: Keeps results that are too large for a completion.
        counts: Counters of outcomes and duplicates.
    """

    __slots__ = (
        "_closed", "_counts", "_ended", "_flushing", "_idle", "_known_layouts",
        "_loop", "_open", "_remote", "_results", "_session",
    )  # fmt: skip

    def __init__(
        self, session: int, remote: Remote, results: Results, counts: Counter[str]
    ) -> None:
        self._session, self._remote = session, remote
        self._results, self._counts = results, counts
        self._loop: Final = asyncio.get_running_loop()
        self._open: set[int] = set()
        self._ended: list[Ending] = []
        self._known_layouts: set[int] = set()
        self._flushing: asyncio.Handle | None = None
        self._idle: asyncio.Event = asyncio.Event()
        self._idle.set()
        self._closed = False

    def __len__(self) -> int:
        """Returns the number of open closures."""
        return len(self._open)

    def opened(self, batch: Batch) -> Batch:
        """Marks the closures of a batch as open. Returns the batch without those that
        are open already."""
        before, taken = len(self._open), batch
        if not self._open.isdisjoint(batch.steps):
            new = [step for step in batch.steps if step not in self._open]
            taken = batch._replace(steps=new)
        self._open.update(taken.steps)
        opened = len(self._open) - before
        if opened < len(taken.steps):  # a closure twice in one batch
            taken = taken._replace(steps=list(dict.fromkeys(taken.steps)))
        self._counts["duplicates"] += len(batch.steps) - opened
        if self._open:
            self._idle.clear()
        return taken

    def later(self, ending: Ending) -> None:
        """Queues an ending, to be sent with the next report."""
        self._ended.append(ending)

    def soon(self, ending: Ending) -> None:
        """Queues an ending, to be sent together with those of the same turn of the
        loop."""
        self._ended.append(ending)
        if self._flushing is None:
            self._flushing = self._loop.call_soon(self._flush)

    def now(self, endings: Sequence[Ending]) -> None:
        """Sends these endings, and all queued ones, now."""
        self._ended += endings
        if self._ended:
            self._flush()

    async def wait_idle(self) -> None:
        """Waits until no closure is open, or the session has ended."""
        await self._idle.wait()

    def close(self) -> None:
        """Drops all open closures and queued endings, and stops reporting."""
        # A flush that is due would count closures that are no longer open.
        self._closed = True
        if self._flushing is not None:
            self._flushing.cancel()
        self._open.clear()
        self._idle.set()

    def _flush(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        # Taken off the list in `_report` only after they were sent, so nothing is lost
        # if sending fails.
        while self._ended and not self._closed:
            batch = self._ended[:BATCH]
            try:
                self._report(batch)
            except BusyError:  # the coordinator does not read: try again later
                self._flushing = self._loop.call_later(AGAIN, self._flush)
                return
            except PeerLostError:  # the session is notified separately, and ends
                return

    def _report(self, batch: list[Ending]) -> None:
        """Sends the endings of ``batch``, the first ones of ``_ended``; in halves if
        they do not fit one message."""
        message = self._completions(batch)
        try:
            self._remote.notify(message)
        except (TypeError, ValueError) as error:  # it does not fit into a message
            if len(batch) > 1:
                # Halves find the one that does not fit; the others are reported as they
                # are.
                self._report(batch[: len(batch) // 2])
                return
            step = batch[0].completion.step
            # Its updates are applied by now, so the outcome is in doubt: it must not
            # run again by itself.
            broken = _closure.failed(step, error, pushed=True)
            self._remote.notify(self._completions([broken]))
            batch = [broken]
        else:
            # Only now: a description that was not sent has to go with the next message.
            self._known_layouts.update([layout.layout for layout in message.layouts])
        del self._ended[: len(batch)]
        for ending in batch:
            self._count(ending)
        if not self._open:
            self._idle.set()

    def _completions(self, endings: list[Ending]) -> Completions:
        layouts: dict[int, LayoutMessage] = {}
        for ending in endings:
            layout = ending.layout
            if layout is not None and layout.layout not in self._known_layouts:
                layouts[layout.layout] = layout
        return Completions(
            self._session,
            [ending.completion for ending in endings],
            list(layouts.values()),
            b"".join([ending.data for ending in endings]),
            [each for ending in endings for each in ending.contributions],
        )

    def _count(self, ending: Ending) -> None:
        completion = ending.completion
        self._open.remove(completion.step)
        self._counts[_NAMES[completion.outcome]] += 1
        if ending.kept is not None:
            self._results.keep(completion.step, ending.kept)


KEPT_BYTES: Final = 2 * 2**30
"""Most bytes of large results to keep. A program that never fetches its large results
must not fill the machine's memory; one that fetches them within a few steps never comes
near this limit."""


@final
class Results:
    """The large results of closures, by step. Beyond ``limit`` bytes in total the
    oldest are dropped."""

    def __init__(self, limit: int = KEPT_BYTES) -> None:
        self.nbytes = 0
        self._limit: Final = limit
        self._kept: OrderedDict[int, Sequence[np.ndarray]] = OrderedDict()
        self._forgotten = 0
        """Latest step whose result was dropped because of the limit."""

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, step: int, arrays: Sequence[np.ndarray]) -> None:
        """Keeps the arrays of a result. The newest result is kept whatever its size."""
        self.drop([step])
        self._kept[step] = arrays
        self.nbytes += sum(array.nbytes for array in arrays)
        while self.nbytes > self._limit and len(self._kept) > 1:
            oldest = next(iter(self._kept))
            self._forgotten = max(self._forgotten, oldest)
            self.drop([oldest])

    def of(self, step: int) -> Sequence[np.ndarray]:
        """Returns the arrays of a result, and continues to keep them.

        Raises:
            NotFoundError: The result is not kept; says why.
        """
        arrays = self._kept.get(step)
        if arrays is not None:
            return arrays
        why = "it was dropped, or the closure left no large result"
        if step <= self._forgotten:
            why = (
                f"this worker keeps {self._limit >> 20} MiB of large results, and has "
                "dropped the oldest: fetch them sooner, or return less from the step"
            )
        raise NotFoundError(f"the result of closure {step} is not here: {why}")

    def drop(self, steps: Iterable[int]) -> None:
        """Drops the results of these steps; ignores unknown ones."""
        for step in steps:
            arrays = self._kept.pop(step, None)
            if arrays is not None:
                self.nbytes -= sum(array.nbytes for array in arrays)


LINES: Final = 1000
"""Most lines that one task sends in a second: more than a person reads, and little to
send."""
WINDOW: Final = 1.0
PENDING: Final = 64 * 1024
"""Most bytes of printed text that wait for the loop: a quarter of the largest
header."""
MAX_LINE_CHARACTERS: Final = 8 * 1024
"""Most characters of a line; a longer line is split into several."""
BEGUN: Final = 64
"""Most threads with an unfinished line; with more threads all unfinished lines are
ended."""

Hear = Callable[[int, str], None]
"""A function that receives text written to a stream (1: standard output, 2: standard
error). Called from any thread; never raises."""
Listen = Callable[[Hear | None], None]
"""A function that redirects the output of the process to a `Hear`, except that of older
threads; None ends the redirection."""

_RETURNS: Final = re.compile(r"(^|\n)\r+")


def unheard(hear: Hear | None) -> None:
    """A `Listen` function that does not redirect the output."""


def unbegun() -> None:
    """Does nothing, as there is no output to send."""


@final
class StepOutput:
    """Collects the printed output of one session and sends it to the coordinator.

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
        """Number of dropped lines that were not reported yet."""
        self._dropped_from = 1
        """The stream of the last dropped line."""
        self._is_reported = False
        """Whether dropped lines were reported in the present second."""
        self._is_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    # Threads that print

    def hear(self, stream: int, text: str) -> None:
        """Collects text written to a stream, and has its finished lines sent soon."""
        # A body that jax traces again for the same program has printed already.
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
        """Ends the unfinished lines of the calling thread, and reports dropped lines
        unless that was done in the present second."""
        # Without the lock: this is called before each post, and a step that prints
        # nothing must not wait.
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
        """Stops sending printed output."""
        # Threads of the session may still print; `hear` looks at this first.
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _send(self) -> None:
        with self._lock:
            lines, self._lines, self._nbytes = self._lines, [], 0
            self._is_due = False
        # Outside of the lock: threads that print must not wait for the link.
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
            # Up to four bytes a character in UTF-8; the exact number would cost an
            # encoding more.
            text = text.encode("utf-8", "backslashreplace").decode()
            self._nbytes += 3 * len(text)
        self._nbytes += len(text)
        self._lines.append(PrintedText(stream, text, dropped))
        # One call of the loop for all lines until it comes.
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
        # Threads that ended in the middle of a line would be kept forever.
        if len(self._begun) > BEGUN:
            begun, self._begun = self._begun, {}
            for (_, stream), line in begun.items():
                self._add(stream, line)

    def _soon(self, function: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed: the process ends
            self._loop.call_soon_threadsafe(function)


def _joined(lines: list[PrintedText]) -> list[PrintedText]:
    """Joins neighbouring lines of one stream into one text; a count of dropped lines
    starts a new text."""
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

"""Reports ended closures to the coordinator, and keeps large results until fetched.

The law: a closure is *open* from its dispatch until its ending is in a message. An open
closure is not accepted again, and a closure that is not open is not reported.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, final

from zstrat.errors import BusyError, NotFoundError, PeerLostError
from zstrat.wire import Completions, Outcome

from . import _closure

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterable, Sequence

    import numpy as np

    from zstrat.transport import Remote
    from zstrat.wire import Batch, LayoutMessage

    from ._closure import Ending

BATCH: Final = 1024
"""Most endings of one message: about 20 bytes each in its header, which is bounded."""
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
    """The open closures of one session, and endings to report. Only the loop uses it.

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
        """Opens the closures of a batch. Returns the batch without those already
        open."""
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
        """Reports it with whatever is reported next."""
        self._ended.append(ending)

    def soon(self, ending: Ending) -> None:
        """Reports it with those that end in the same turn of the loop."""
        self._ended.append(ending)
        if self._flushing is None:
            self._flushing = self._loop.call_soon(self._flush)

    def now(self, endings: Sequence[Ending]) -> None:
        """Reports them, and all that waits."""
        self._ended += endings
        if self._ended:
            self._flush()

    async def wait_idle(self) -> None:
        """Waits until nothing is open, or for the end."""
        await self._idle.wait()

    def close(self) -> None:
        """Drops everything, and stops reporting."""
        self._closed = True
        if self._flushing is not None:
            self._flushing.cancel()
        self._open.clear()
        self._idle.set()

    def _flush(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
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
        """Sends endings, the first ones of ``_ended``; in halves if too large."""
        message = self._completions(batch)
        try:
            self._remote.notify(message)
        except (TypeError, ValueError) as error:  # it does not fit into a message
            if len(batch) > 1:
                self._report(batch[: len(batch) // 2])
                return
            step = batch[0].completion.step
            broken = _closure.failed(step, error, pushed=True)
            self._remote.notify(self._completions([broken]))
            batch = [broken]
        else:
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
"""A program that never fetches its large results must not fill the machine's memory;
one that fetches them within a few steps never comes near this."""


@final
class Results:
    """Large results by step. Beyond ``limit`` bytes in total the oldest are dropped."""

    def __init__(self, limit: int = KEPT_BYTES) -> None:
        self.nbytes = 0
        self._limit: Final = limit
        self._kept: OrderedDict[int, Sequence[np.ndarray]] = OrderedDict()
        self._forgotten = 0
        """Latest step whose result was dropped because of the limit."""

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, step: int, arrays: Sequence[np.ndarray]) -> None:
        """Keeps a result. The newest one is kept whatever its size."""
        self.drop([step])
        self._kept[step] = arrays
        self.nbytes += sum(array.nbytes for array in arrays)
        while self.nbytes > self._limit and len(self._kept) > 1:
            oldest = next(iter(self._kept))
            self._forgotten = max(self._forgotten, oldest)
            self.drop([oldest])

    def of(self, step: int) -> Sequence[np.ndarray]:
        """Returns the arrays of a result, which is still kept.

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
        """Drops results; ignores unknown ones."""
        for step in steps:
            arrays = self._kept.pop(step, None)
            if arrays is not None:
                self.nbytes -= sum(array.nbytes for array in arrays)

"""How a coordinator hears of its closures: endings, and large results when it asks.

The law: a closure is *open* from its dispatch until its ending was put into a message;
one that is open is not taken again, and one that is not open is not reported.

Large results stay on the worker until the coordinator asks for them.
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
"""Endings of one message: about 20 bytes each in its header, which is bounded."""
AGAIN: Final = 0.02
"""Seconds until completions are offered again to a coordinator that does not read."""

_NAMES: Final = {
    int(Outcome.OK): "done",
    int(Outcome.FAILED): "failed",
    int(Outcome.CANCELLED): "cancelled",
}


@final
class Reports:
    """The closures of one session that are open, and what has ended of them. Only the
    loop touches it.

    Args:
        results: Keeps those that are too large to travel with their completion.
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
        """Closures that have not ended."""
        return len(self._open)

    def opened(self, batch: Batch) -> Batch:
        """Opens the closures of a batch; the batch without those that were open."""
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
        """Forgets everything; nothing is reported any more."""
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
            except BusyError:  # it does not read: offer them again, and it slows down
                self._flushing = self._loop.call_later(AGAIN, self._flush)
                return
            except PeerLostError:  # told to us for itself; it ends the session
                return

    def _report(self, batch: list[Ending]) -> None:
        """Sends endings, the first of ``_ended``; in halves if they are too large."""
        message = self._completions(batch)
        try:
            self._remote.notify(message)
        except (TypeError, ValueError) as error:  # it does not fit into a message
            if len(batch) > 1:
                self._report(batch[: len(batch) // 2])
                return
            broken = _closure.failed(batch[0].completion.step, error)
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
    """Results by step; the oldest of more than ``limit`` bytes in all are forgotten."""

    def __init__(self, limit: int = KEPT_BYTES) -> None:
        self.nbytes = 0
        self._limit: Final = limit
        self._kept: OrderedDict[int, Sequence[np.ndarray]] = OrderedDict()
        self._forgotten = 0
        """Every result that was forgotten is of a step up to this one."""

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, step: int, arrays: Sequence[np.ndarray]) -> None:
        """The newest one is kept whatever its size."""
        self.drop([step])
        self._kept[step] = arrays
        self.nbytes += sum(array.nbytes for array in arrays)
        while self.nbytes > self._limit and len(self._kept) > 1:
            oldest = next(iter(self._kept))
            self._forgotten = max(self._forgotten, oldest)
            self.drop([oldest])

    def of(self, step: int) -> Sequence[np.ndarray]:
        """The arrays of a result; it stays.

        Raises:
            NotFoundError: It is not here; says whether it had to be forgotten.
        """
        arrays = self._kept.get(step)
        if arrays is not None:
            return arrays
        why = "it was dropped, or the closure left no large result"
        if step <= self._forgotten:
            why = (
                f"this worker keeps {self._limit >> 20} MiB of large results and had "
                "to forget the oldest: fetch them sooner, or return less from the step"
            )
        raise NotFoundError(f"the result of closure {step} is not here: {why}")

    def drop(self, steps: Iterable[int]) -> None:
        """Forgets results; unknown ones are no error."""
        for step in steps:
            arrays = self._kept.pop(step, None)
            if arrays is not None:
                self.nbytes -= sum(array.nbytes for array in arrays)

"""Leased datasets: each example is applied once in each epoch.

One dataset serves all workers. The coordinator leases ranges of its examples to steps
as it hands the steps out, and a worker reads the examples of its leases; a `LeaseBook`
records which ranges are leased and which are done. A step that runs again, on any
worker, reads the same examples, and parameter servers apply each step once.
"""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn, final, get_args

import jax
import numpy as np

from zstrat.data import Dataset, IndexedPass, LeasedSource
from zstrat.errors import InvalidArgumentError, OutOfRangeError

from ._calls import Code
from ._datasets import PerWorkerIterator, wait_known
from ._values import DatasetHandle, RemoteValue
from .leases import LeaseBook, OnError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from rich.console import Console, RenderableType
    from rich.progress import Progress

    from ._calls import ScheduledCall
    from ._core import CoordinatorCore
    from ._resources import Record

_KEY: Final = "leases"
"""The key of the leases in the state of an iterator in a checkpoint."""


@final
class LeasedDataset(DatasetHandle):
    """A dataset that all workers share; ``iter()`` starts a pass through its epochs.

    Args:
        maker: The pickled `LeasedSource`.
        book: Makes the `LeaseBook` of a pass.
        kind: See `PerWorkerDataset`.
    """

    def __init__(
        self,
        core: CoordinatorCore,
        maker: Code,
        book: Callable[[], LeaseBook],
        kind: type[RemoteValue],
    ) -> None:
        self._core, self._maker, self._name = core, maker, book().name
        self._book, self._kind = book, kind

    def __iter__(self) -> LeasedIterator:
        """Starts a pass, or continues that of the program whose session this one
        resumes. Returns before the workers have opened the source."""
        return self.begin()

    def begin(self, *, from_start: bool = False) -> LeasedIterator:
        """Starts a pass like ``iter()``; with ``from_start`` never continues that of an
        earlier program."""
        book = self._book()
        record = self._core.create_resource(
            "iterator",
            self._name,
            self._maker,
            kind=self._kind,
            book=book,
            from_start=from_start,
        )
        return LeasedIterator(self, self._core, record, book)

    @property
    def epochs(self) -> LeasedEpochs:
        """The epochs of a new pass, to iterate over."""
        return iter(self).epochs

    def refuse(self) -> NoReturn:
        raise TypeError(f"{self._name} cannot be an argument; pass iter(dataset)")


@final
class LeasedIterator(PerWorkerIterator):
    """One pass through a leased dataset, for ``next()`` in scheduled functions. A
    checkpoint of the iterator has the ranges that are not done."""

    is_leased = True

    def __init__(
        self,
        dataset: LeasedDataset,
        core: CoordinatorCore,
        record: Record,
        book: LeaseBook,
    ) -> None:
        super().__init__(dataset, core, record)
        self._book = book

    @property
    def epochs(self) -> LeasedEpochs:
        """The epochs of this pass that are not over, to iterate over."""
        return LeasedEpochs(self)

    def progress(self) -> AbstractContextManager[object]:
        """Shows a progress bar in the terminal, in ``with iterator.progress():``, with
        the number of examples done in all epochs, and the time that is left."""
        return _progress_bar(self._read)

    def _read(self, look: Callable[[LeaseBook], object]) -> None:
        with self._core.engine.lock:
            look(self._book)

    async def get_state_async(self) -> dict[str, Any]:
        """Returns the ranges of examples that are not done, as JSON types for
        `set_state_async`. Waits until the running steps have ended."""
        async with self.session.at_rest():
            return await self.position_async()

    async def position_async(self) -> dict[str, Any]:
        async def state() -> dict[str, Any]:
            return {_KEY: self._state()}

        return await self.session.run_async(state(), f"reading the leases of {self}")

    async def start_at_async(self, state: Mapping[str, Any]) -> None:
        """Does nothing: a worker that returns has no position to return to."""

    async def set_state_async(self, state: Mapping[str, Any]) -> None:
        """Continues the pass from a state of `get_state_async`, which may be of another
        number of workers.

        Raises:
            InvalidArgumentError: The state is of other data, of another
                ``shuffle_seed``, or of an epoch that this pass does not have.

        Cancellation: the pass may continue from the state all the same.
        """
        await self.require_fit_async(state)
        engine = self._core.engine

        async def restore() -> None:
            with engine.lock:
                # In this order: a pass moves only while no step has a lease, and
                # closures that wait look at the new position.
                engine.queue.give_leases_back(self.resource)
                self._book.restore(state[_KEY])
                engine.queue.leases_changed(self.resource)
            self._core.dispatcher.turn_soon()
            # Servers have noted the leases of the earlier position, for a program that
            # resumes.
            await self.session.cluster.renewal.note_leases({})

        async with self.session.at_rest():
            await self.session.run_async(restore(), f"restoring the leases of {self}")

    async def require_fit_async(self, state: Mapping[str, Any]) -> None:
        if why := self.misfit(state):
            raise InvalidArgumentError(f"{self} cannot continue at the state: {why}")

    @staticmethod
    def states_of(state: Mapping[str, Any]) -> list[str]:
        return [json.dumps(state[_KEY])]

    def misfit(self, state: Mapping[str, Any]) -> str:
        if _KEY not in state:
            return "it was saved of an iterator that is not of a leased dataset"
        return self._book.misfit(state[_KEY])

    def _state(self) -> dict[str, Any]:
        """Returns the state of the pass. Call it on the loop, where every step that has
        ended has also contributed to its round."""
        engine = self._core.engine
        with engine.lock:
            waiting = engine.queue.leases.waiting_for_rounds(self._book)
            return self._book.state(waiting)

    def _next_epoch(self) -> LeasedEpoch | None:
        if not wait_known(self._core, self._record):
            assert self._record.failure is not None
            raise self._record.failure.with_traceback(None)
        # Only when all steps have ended it is known which leases come back.
        self._core.engine.join(None)
        with self._core.engine.lock:
            if self._book.is_over:
                return None
            return LeasedEpoch(self, self._core, self._book, self._book.epoch)


@final
class LeasedEpochs:
    """The epochs of a pass, from the first one that is not over, in ``for`` and ``async
    for``. Before each epoch waits for all closures, so that the epoch is complete, and
    raises what `join` raises.

    Raises (while iterating):
        RuntimeError: The body of the loop has scheduled no step of an epoch.
    """

    def __init__(self, iterator: LeasedIterator) -> None:
        self._iterator: Final = iterator
        self._leased = -1

    def __iter__(self) -> Iterator[LeasedEpoch]:
        while (epoch := self._next()) is not None:
            yield epoch

    async def __aiter__(self) -> AsyncIterator[LeasedEpoch]:
        # On a thread, as it joins.
        while (epoch := await asyncio.to_thread(self._next)) is not None:
            yield epoch

    def _next(self) -> LeasedEpoch | None:
        if (epoch := self._iterator._next_epoch()) is not None:
            self._leased = epoch.require_leased(self._leased)
        return epoch


@final
class LeasedEpoch:
    """One epoch of a pass. ``for _ in epoch`` yields once for each step that the body
    of the loop has to schedule, if a step draws one batch, and ends when the epoch is
    over.

    Yields again for a step that failed or was lost. ``async for`` awaits instead of
    blocking.

    Raises (while iterating):
        RuntimeError: The body of the loop has scheduled no step that draws.
    """

    def __init__(
        self,
        iterator: LeasedIterator,
        core: CoordinatorCore,
        book: LeaseBook,
        number: int,
    ) -> None:
        self.iterator: Final = iterator
        """The iterator of the pass, which is an argument of the epoch's steps."""
        self.number: Final = number
        """The number of the epoch, from 0."""
        self._core, self._book = core, book

    @property
    def steps(self) -> int:
        """The number of batches that no step has leased yet."""
        with self._core.engine.lock:
            return self._book.left_of(self.number)

    @property
    def examples(self) -> int:
        """The number of examples of the epoch, including those of a last batch that is
        left out."""
        with self._core.engine.lock:
            return self._book.size

    def require_leased(self, before: int) -> int:
        """Returns how many leases the pass has given so far. A loop over epochs passes
        the number from ``before`` its body ran: without more leases the loop would have
        no end.

        Raises:
            RuntimeError: There are no more leases than ``before``.
        """
        if (leased := self._book.leased) == before:
            raise RuntimeError(
                f"no step of epoch {self.number} was scheduled: schedule its steps in "
                "the loop, with coordinator.schedule_epoch(step, iterator), or a "
                "coordinator.schedule in `for _ in epoch`"
            )
        return leased

    def steps_of(self, call: ScheduledCall) -> int:
        """Returns how many closures of a call draw all batches that no step has leased
        yet.

        Raises:
            ValueError: The step does not draw from the iterator, or draws a number of
                batches that does not divide those left.
        """
        draws = {draw.resource: draw.batches for draw in call.draws}
        count = draws.get(self.iterator.resource, 0)
        if not count:
            raise ValueError(
                f"{call.result.name} does not draw from {self.iterator}: call next() "
                "of it in the step"
            )
        steps, rest = divmod(self.steps, count)
        if rest:
            raise ValueError(
                f"epoch {self.number} has {self.steps} batches left, and a step of "
                f"{call.result.name} draws {count}: {rest} would remain. Choose batch= "
                "so that the number of batches is a multiple, or drop_remainder=True"
            )
        return steps

    def __iter__(self) -> Iterator[int]:
        number, leased = 0, -1
        self._core.engine.join(None)
        while steps := self.steps:
            leased = self.require_leased(leased)
            # As many as there are batches without a step, in one go: `steps` takes the
            # lock.
            yield from range(number, number := number + steps)
            self._core.engine.join(None)

    async def __aiter__(self) -> AsyncIterator[int]:
        number, leased = 0, -1
        await self._core.engine.join_async()
        while steps := self.steps:
            leased = self.require_leased(leased)
            for each in range(number, number := number + steps):
                yield each
            await self._core.engine.join_async()

    def __repr__(self) -> str:
        return f"<epoch {self.number} of {self.iterator}>"


def _progress_bar(
    read: Callable[[Callable[[LeaseBook], object]], None],
    console: Console | None = None,
) -> Progress:
    """Returns a progress bar, for ``with``: how many examples of the pass are done or
    skipped, and when the pass will be over. In a file or a pipe only its last state is
    printed.

    Args:
        read: Calls a function with the `LeaseBook` of the pass, which does not change
            meanwhile.
        console: Where the bar is shown; None: on standard output.
    """
    # Here, as most programs show none, and importing rich takes 65 ms.
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    class LeaseProgress(Progress):
        def get_renderables(self) -> Iterable[RenderableType]:
            """Reads the state of the pass each time that the bar is drawn."""
            # It may be drawn before its task is added.
            if self.tasks:
                read(self.look)
            return super().get_renderables()

        def look(self, book: LeaseBook) -> None:
            # No worker has built the dataset, so nothing is known yet.
            if not book.size:
                return
            last = "" if book.epochs is None else f"/{book.epochs}"
            epoch = book.epoch if book.is_over else book.epoch + 1
            self.update(
                self.tasks[0].id,
                completed=book.done + book.skipped,
                total=book.total,
                description=f"epoch {epoch}{last}",
            )

    progress = LeaseProgress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
    )
    progress.add_task("waiting for a worker", total=None)
    return progress


def current_epoch(iterator: Any) -> LeasedEpoch:
    """Returns the first epoch of a pass that is not over. Waits until all closures have
    ended.

    Raises:
        TypeError: ``iterator`` is not the iterator of a leased dataset.
        OutOfRangeError: All epochs are over.
        Exception: See `ClusterCoordinator.join`.
    """
    if not isinstance(iterator, LeasedIterator):
        raise TypeError(
            f"a {type(iterator).__name__} has no epochs: give the iterator of a leased "
            "dataset, iter(coordinator.create_leased_dataset(...)), and the dataset "
            "itself to evaluate()"
        )
    if (epoch := iterator._next_epoch()) is None:
        raise OutOfRangeError(f"End of sequence: {iterator._book.name} is exhausted")
    return epoch


def begin_evaluation(data: Any) -> LeasedIterator:
    """Starts a pass through all examples of a leased dataset.

    Raises:
        TypeError: ``data`` is not a leased dataset.
    """
    if not isinstance(data, LeasedDataset):
        raise TypeError(
            f"evaluate() got a {type(data).__name__}: give it the leased dataset, "
            "coordinator.create_leased_dataset(...), without iter()"
        )
    return data.begin(from_start=True)


def make_leased_dataset(
    core: CoordinatorCore,
    source: Any,
    batch: int | None,
    on_error: OnError,
    kind: type[RemoteValue] = RemoteValue,
    **options: Any,
) -> LeasedDataset:
    """Creates one dataset for all workers; see
    `ClusterCoordinator.create_leased_dataset`. ``options`` are those of
    `Dataset.from_indexed`.

    Raises:
        TypeError, ValueError: The source has no examples that can be read by number, or
            an argument is wrong.
        Exception: The source cannot be pickled.
    """
    if on_error not in get_args(OnError):
        raise ValueError(f"on_error must be 'raise' or 'skip', got {on_error!r}")
    # `from_indexed` has them already, and the values given here would have no effect.
    if batch is None and options != {
        "shuffle_seed": None,
        "epochs": 1,
        "drop_remainder": False,
    }:
        raise TypeError(
            "shuffle_seed=, epochs= and drop_remainder= need batch=; of a "
            "Dataset.from_indexed they are arguments of from_indexed"
        )
    if batch is not None:
        source = Dataset.from_indexed(source, batch, **options)
    recipe = source.recipe if isinstance(source, Dataset) else None
    if not isinstance(recipe, IndexedPass) or not isinstance(
        recipe.source, LeasedSource
    ):
        raise TypeError(
            f"create_leased_dataset of {type(source).__name__} needs batch=, the "
            "number of examples of a batch; Dataset.from_indexed alone has its own"
        )
    leased = recipe.source
    of = getattr(leased.source, "__name__", type(leased.source).__name__)
    book = partial(
        LeaseBook,
        f"the leased dataset of {of}",
        leased.batch,
        leased.seed,
        leased.epochs,
        drop_remainder=leased.drop_remainder,
        on_error=on_error,
    )
    # The source is pickled once, here: it is as it was at this call, for all workers.
    return LeasedDataset(core, Code.of(leased), book, kind)


def summed(results: Iterable[Any]) -> Any:
    """Returns the sum of pytrees of numbers: floats in float64, integers in int64."""
    total: Any = None
    for result in results:
        wide = jax.tree.map(_wide, result)
        total = wide if total is None else jax.tree.map(np.add, total, wide)
    return total


def _wide(leaf: Any) -> Any:
    array = np.asarray(leaf)
    if array.dtype.kind in "biu":
        return array.astype(np.int64)[()]
    if array.dtype.kind in "OSU":
        raise TypeError(
            "evaluate() sums what its step returns, and this one returns "
            f"{leaf!r:.80}: return numbers and arrays alone"
        )
    wide = np.complex128 if array.dtype.kind == "c" else np.float64
    return array.astype(wide)[()]

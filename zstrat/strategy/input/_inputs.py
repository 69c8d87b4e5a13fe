"""The input side of a strategy: datasets shared out among workers and replicas.

One `ProcessInputs` says who draws here and where elements go; it makes the distributed
datasets of every strategy. What each replica gets was decided by numbers
(`zstrat.data`); this file lines the pieces up: source, cut, place, prefetch, pace.

Law of the file: it reads nothing itself; whoever iterates begins a pass (`_feed`).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, final

import jax

from zstrat.data import (
    AutoShardPolicy,
    InputContext,
    ShapePromise,
    Worker,
    allotted,
    as_dataset,
    dense,
    ending,
)
from zstrat.program import StepDataset, building, kept
from zstrat.variables import user_line

from ._distributed_dataset import DistributedDataset
from ._epoch_sync import PassLength
from ._feed import BegunPass, DatasetFeed, FeedSources
from ._input_options import InputOptions
from ._replica_batches import (
    per_replica,
    shares_of_batches,
    shares_of_elements,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from zstrat.data import Allotment, Dataset, Recipe

    from ._epoch_sync import WorkerAgreement
    from ._feed import FeedPosition, Place
    from ._replica_batches import Share

_DATASET: Final = "a distributed dataset"
_FUNCTION: Final = "a dataset of distribute_datasets_from_function"
_CUT: Final = (
    "its values are not the rows of a batch, which are cut for the replicas. Make it "
    "dense, or give each replica its own by distribute_datasets_from_function"
)
_FETCHED: Final = (
    "it has another size in every element, and cannot be put on the devices of "
    "TPUStrategy in advance. Make it dense, or set "
    "zs.InputOptions(experimental_fetch_to_device=False)"
)


@final
@dataclass(frozen=True, slots=True)
class ProcessInputs:
    """Who draws in this process, and where elements go.

    Args:
        context: This input pipeline among all, and the replicas of all.
        local: Replicas of this process.
        place: Makes of a `Share` what a step draws: on the prefetch thread, so it may
            put rows on devices.
        accord: Brings the pipelines together; None where there is one alone, or where
            nobody waits for the others.
        static_shapes: A step in which a replica has no rows ends the data, instead of
            giving it an element of no rows; and a batch size that is known has to
            split evenly. Rows are not counted otherwise: a last batch may be shorter,
            if it has some for every replica, as in TF.
        per_replica: One input function for each replica may be asked for.
    """

    context: InputContext
    local: int = 1
    place: Place = per_replica
    accord: WorkerAgreement | None = None
    static_shapes: bool = False
    per_replica: bool = False

    def of_dataset(
        self, dataset: Iterable[Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """See `Strategy.experimental_distribute_dataset`."""
        chosen = input_options(options)
        if chosen.is_per_replica:
            raise not_per_replica()
        refuse_distributed(dataset)
        allotment = allotted(dataset, self._worker())
        alone = self.context.num_replicas_in_sync == 1
        is_fresh = allotment.is_fresh
        is_partial = not self.static_shapes
        if not is_partial:
            self._require_even(allotment.batch_size)

        def shares(place: FeedPosition | None) -> BegunPass:
            (begun,), steps = _begun((allotment,), place)
            whole, behind = (steps, 0) if alone else allotment.before(steps)
            batches = self._read(begun, allotment, chosen, whole)
            if alone:
                found = shares_of_elements(
                    [batches], lambda: ShapePromise.NONE, is_fresh=is_fresh
                )
            else:
                batches = dense(batches, _CUT)
                cutter = allotment.cutter()
                found = shares_of_batches(
                    batches, cutter, is_partial=is_partial, is_fresh=is_fresh
                )
                found = itertools.islice(found, behind, None)
            rest = _ending_with(batches, found)
            return BegunPass(rest, (begun,), allotment.order(begun))

        length = PassLength(
            is_infinite=allotment.is_infinite,
            is_common=allotment.ends_with_others and is_partial,
        )
        by_worker = allotment.policy in (AutoShardPolicy.FILE, AutoShardPolicy.HINT)
        split = (self.context.num_input_pipelines,) if by_worker else ()
        sources = FeedSources(shares, (allotment,), split, are_alike=True)
        return self._fed(_DATASET, sources, chosen, self.accord, length)

    def of_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> DistributedDataset:
        """See `Strategy.distribute_datasets_from_function`."""
        chosen = input_options(options)
        require_function(dataset_fn)
        if chosen.is_per_replica:
            return self._of_functions(dataset_fn, chosen)
        made = allotted(_made(dataset_fn, self.context), Worker())
        promise = partial(self._promise, [made])

        def shares(place: FeedPosition | None) -> BegunPass:
            (begun,), steps = _begun((made,), place)
            elements = self._read(begun, made, chosen, steps * self.local)
            found = shares_of_elements(
                [elements] * self.local,
                promise,
                is_fresh=made.is_fresh,
                before=lambda: _first(begun, steps * self.local),
            )
            return BegunPass(_ending_with(elements, found), (begun,))

        size = made.recipe.size()
        steps = None
        if size >= 0:  # others ask for it, which give or leave out such a step as here
            is_kept = promise() is not ShapePromise.SAME
            steps = math.ceil(size / self.local) if is_kept else size // self.local
        length = PassLength(steps, is_infinite=made.is_infinite)
        split = (self.context.num_input_pipelines, self.local)
        sources = FeedSources(shares, (made,), split)
        return self._fed(_FUNCTION, sources, chosen, self.accord, length)

    def _promise(self, made: Sequence[Allotment]) -> ShapePromise:
        """What decides of a last step of a dataset function that lacks elements. Where
        other processes are waited for it is always one, as in TF."""
        if self.static_shapes:
            return ShapePromise.SAME
        if self.accord is not None or self.local == 1:
            return ShapePromise.NONE
        return max(each.shapes.promise for each in made)

    def _of_functions(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions
    ) -> DistributedDataset:
        """One input pipeline for each replica."""
        if not self.per_replica:
            raise not_per_replica()
        # To each function it looks like a worker of its own, as in TF.
        contexts = [InputContext(self.local, i, self.local) for i in range(self.local)]
        made = tuple(allotted(_made(dataset_fn, each), Worker()) for each in contexts)
        promise = partial(self._promise, made)

        def shares(place: FeedPosition | None) -> BegunPass:
            begun, steps = _begun(made, place)
            pipelines = [
                self._read(one, each, options, steps)
                for one, each in zip(begun, made, strict=True)
            ]

            def before() -> Iterator[Any]:
                for one in begun:
                    yield from _first(one, steps)

            found = shares_of_elements(pipelines, promise, before=before)
            return BegunPass(found, begun)

        sources = FeedSources(shares, made, (1, self.local))
        return self._fed(_FUNCTION, sources, options, None, PassLength())

    def _fed(
        self,
        name: str,
        sources: FeedSources,
        options: InputOptions,
        accord: WorkerAgreement | None,
        length: PassLength,
    ) -> DistributedDataset:
        place = self.place if options.fetches else per_replica
        is_partial = not self.static_shapes
        # Now, where the user distributes the dataset: a warning of a pass is said at
        # this line.
        where = user_line()
        feed = DatasetFeed(where, sources, place, options, accord, is_partial, length)
        return DistributedDataset(feed, name)

    def _read(
        self, begun: Recipe, allotment: Allotment, options: InputOptions, start: int
    ) -> Iterator[Any]:
        """The elements of a pass from a number on. Nobody writes to them while they
        wait, and none is sparse where all shapes have to be the same on devices."""
        elements = begun.without_first(start).elements()
        # The prefetch thread is ahead of the step, and a source that fills one buffer
        # again would overwrite what waits.
        steady = elements if allotment.is_steady else _copied(elements)
        is_fetched = self.static_shapes and options.fetches
        return dense(steady, _FETCHED) if is_fetched else steady

    def _worker(self) -> Worker:
        context = self.context
        if context.num_replicas_in_sync % context.num_input_pipelines:
            raise ValueError(
                f"num_replicas_in_sync {context.num_replicas_in_sync} must be a "
                f"multiple of the {context.num_input_pipelines} workers (input "
                "pipelines): every worker has as many replicas"
            )
        return Worker(
            context.num_input_pipelines, context.input_pipeline_id, self.local
        )

    def _require_even(self, batch_size: int | None) -> None:
        """Refuses batches that cannot give all replicas the same shape."""
        count = self.context.num_replicas_in_sync
        if batch_size is not None and batch_size % count:
            raise ValueError(
                f"a global batch of {batch_size} does not split evenly over {count} "
                "replicas, which need the same shapes here: choose a multiple of "
                f"{count}"
            )


def not_per_replica() -> NotImplementedError:
    """The error of an option that only one method has."""
    return NotImplementedError(
        "InputReplicationMode.PER_REPLICA is only supported in "
        "`distribute_datasets_from_function` of MirroredStrategy: leave it out, and "
        "the elements of one input function go to the replicas in turn"
    )


def _begun(
    made: Sequence[Allotment], place: FeedPosition | None
) -> tuple[tuple[Recipe, ...], int]:
    """The passes, begun, and how many steps of them are left out."""
    if place is None:
        return tuple(each.begin() for each in made), 0
    pairs = zip(made, place.passes, strict=True)
    return tuple(each.begin(one) for each, one in pairs), place.steps


def _first(begun: Recipe, count: int) -> Iterator[Any]:
    """So many elements of a pass."""
    with ending(begun.elements()) as elements:
        yield from itertools.islice(elements, count)


def _copied(elements: Iterator[Any]) -> Iterator[Any]:
    with ending(elements) as source:
        for element in source:
            yield jax.tree.map(kept, element)


def _ending_with(source: Iterator[Any], shares: Iterator[Share]) -> Iterator[Share]:
    """The shares, at whose end their source is closed."""
    with ending(source):
        yield from shares


def input_options(options: InputOptions | None) -> InputOptions:
    """The options; those of the class where there are none.

    Raises:
        TypeError: It is something else.
    """
    if options is None:
        return InputOptions()
    if not isinstance(options, InputOptions):
        raise TypeError(f"`options` must be a zs.InputOptions, got {options!r:.100}")
    return options


def _made(dataset_fn: Callable[[InputContext], Any], context: InputContext) -> Dataset:
    before = building.set(True)  # it may be a step function, which is its body then
    try:
        made = dataset_fn(context)
    finally:
        building.reset(before)
    refuse_distributed(made)
    try:
        return as_dataset(made)
    except TypeError as error:
        raise TypeError(f"the dataset function {dataset_fn!r}: {error}") from error


def require_function(dataset_fn: object) -> None:
    """Refuses what cannot be called with an `InputContext`.

    Raises:
        TypeError: Says what takes a dataset itself.
    """
    if not callable(dataset_fn):
        raise TypeError(
            "distribute_datasets_from_function takes a function of one "
            f"InputContext, got {type(dataset_fn).__name__}; a dataset itself is "
            "what experimental_distribute_dataset takes"
        )


def refuse_distributed(dataset: object) -> None:
    """Refuses what a strategy has made.

    Raises:
        TypeError: Says what to distribute.
    """
    if isinstance(dataset, StepDataset):
        raise distributed_already()


def distributed_already() -> TypeError:
    """The error of a dataset that a strategy has made."""
    return TypeError(
        "the dataset is distributed already: distribute the dataset that it was made of"
    )

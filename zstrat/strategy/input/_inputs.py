"""The input side of a strategy: distributes datasets over workers and replicas.

One `ProcessInputs` describes the replicas of this process and where their elements are
put; it makes the distributed datasets of every strategy. Numbers alone (`zstrat.data`)
decide the share of each replica; this file connects the stages: read, divide among
replicas, put on devices, prefetch, synchronize. On the coordinator of parameter servers
an `UnbuiltDataset` represents a dataset that each worker builds.

Law of the file: it reads no data itself; an iterator begins a pass (`_feed`).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn, final

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
from zstrat.strategy._options import InputOptions
from zstrat.variables import user_line

from ._distributed_dataset import DistributedDataset, refuse_attribute
from ._feed import BegunPass, DatasetFeed, FeedSources
from ._replica_batches import per_replica, shares_of_batches, shares_of_elements
from ._synchronized_pass import PassLength

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from zstrat.data import Allotment, Dataset, Recipe
    from zstrat.strategy._frames import AbstractStrategy

    from ._feed import FeedPosition, Place
    from ._replica_batches import Share
    from ._synchronized_pass import AllMax

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
    """Describes the replicas of this process, which draw elements, and where elements
    are put.

    Args:
        context: The index of this input pipeline among all, and the number of all
            replicas.
        local: Number of replicas of this process.
        place: Function that converts a `Share` to the element of a step and may put
            rows on devices. It is called on the prefetch thread.
        all_max: Function that returns the largest numbers of all pipelines; None if
            there is only one, or if pipelines do not wait for each other.
        static_shapes: Whether a step in which a replica has no rows ends the data
            (otherwise that replica gets an element without rows), and a known batch
            size must split evenly. As in TF, a last batch may be shorter if it has rows
            for every replica.
        per_replica: Whether there may be one input function for each replica.
    """

    context: InputContext
    local: int = 1
    place: Place = per_replica
    all_max: AllMax | None = None
    static_shapes: bool = False
    per_replica: bool = False

    def of_dataset(
        self, dataset: Iterable[Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Distributes a dataset; see `Strategy.experimental_distribute_dataset`."""
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

        def shares(position: FeedPosition | None) -> BegunPass:
            (begun,), steps = _begun((allotment,), position)
            # Batches before the position are skipped and never cut; of the batch that
            # it is in, the first steps are.
            whole, behind = (steps, 0) if alone else allotment.before(steps)
            batches = self._read(begun, allotment, chosen, whole)
            if alone:
                cut = shares_of_elements(
                    [batches], lambda: ShapePromise.NONE, is_fresh=is_fresh
                )
            else:
                batches = dense(batches, _CUT)
                cutter = allotment.cutter()
                cut = shares_of_batches(
                    batches, cutter, is_partial=is_partial, is_fresh=is_fresh
                )
                cut = itertools.islice(cut, behind, None)
            rest = _ending_with(batches, cut)
            return BegunPass(rest, (begun,), allotment.order(begun))

        length = PassLength(
            is_infinite=allotment.is_infinite,
            is_common=allotment.ends_with_others and is_partial,
        )
        # Each worker has its own files or its own part, so their number decides what a
        # step is.
        by_worker = allotment.policy in (AutoShardPolicy.FILE, AutoShardPolicy.HINT)
        split = (self.context.num_input_pipelines,) if by_worker else ()
        sources = FeedSources(shares, (allotment,), split, are_alike=True)
        return self._fed(_DATASET, sources, chosen, self.all_max, length)

    def of_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> DistributedDataset:
        """Distributes the dataset that a function makes; see
        `Strategy.distribute_datasets_from_function`."""
        chosen = input_options(options)
        require_function(dataset_fn)
        if chosen.is_per_replica:
            return self._of_functions(dataset_fn, chosen)
        # The function has sharded it, if at all.
        allotment = allotted(_made(dataset_fn, self.context), Worker())
        promise = partial(self._promise, [allotment])

        def shares(position: FeedPosition | None) -> BegunPass:
            (begun,), steps = _begun((allotment,), position)
            elements = self._read(begun, allotment, chosen, steps * self.local)
            cut = shares_of_elements(
                [elements] * self.local,
                promise,
                is_fresh=allotment.is_fresh,
                before=lambda: _first(begun, steps * self.local),
            )
            return BegunPass(_ending_with(elements, cut), (begun,))

        size = allotment.recipe.size()
        steps = None
        if size >= 0:  # the other workers keep or drop such a step as this one does
            is_kept = promise() is not ShapePromise.SAME
            steps = math.ceil(size / self.local) if is_kept else size // self.local
        length = PassLength(steps, is_infinite=allotment.is_infinite)
        split = (self.context.num_input_pipelines, self.local)
        sources = FeedSources(shares, (allotment,), split)
        return self._fed(_FUNCTION, sources, chosen, self.all_max, length)

    def _promise(self, made: Sequence[Allotment]) -> ShapePromise:
        """Returns under which condition a last step with too few elements still counts
        as a step, for datasets of functions. If other processes are waited for, it
        always counts, as in TF."""
        if self.static_shapes:
            return ShapePromise.SAME
        if self.all_max is not None or self.local == 1:
            return ShapePromise.NONE
        return max(each.shapes.promise for each in made)

    def _of_functions(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions
    ) -> DistributedDataset:
        """Makes one input pipeline for each replica, by calling the function once for
        each."""
        if not self.per_replica:
            raise not_per_replica()
        # Each function sees a separate worker, as in TF.
        contexts = [InputContext(self.local, i, self.local) for i in range(self.local)]
        allotments = tuple(
            allotted(_made(dataset_fn, each), Worker()) for each in contexts
        )
        promise = partial(self._promise, allotments)

        def shares(position: FeedPosition | None) -> BegunPass:
            begun, steps = _begun(allotments, position)
            pipelines = [
                self._read(one, each, options, steps)
                for one, each in zip(begun, allotments, strict=True)
            ]

            def before() -> Iterator[Any]:
                for one in begun:
                    yield from _first(one, steps)

            cut = shares_of_elements(pipelines, promise, before=before)
            return BegunPass(cut, begun)

        sources = FeedSources(shares, allotments, (1, self.local))
        # Only strategies of one process have these, so nobody is waited for.
        return self._fed(_FUNCTION, sources, options, None, PassLength())

    def _fed(
        self,
        name: str,
        sources: FeedSources,
        options: InputOptions,
        all_max: AllMax | None,
        length: PassLength,
    ) -> DistributedDataset:
        place = self.place if options.fetches else per_replica
        is_partial = not self.static_shapes
        # Recorded now, where the user distributes the dataset: a warning of a pass
        # names this line.
        where = user_line()
        feed = DatasetFeed(where, sources, place, options, all_max, is_partial, length)
        return DistributedDataset(feed, name)

    def _read(
        self, begun: Recipe, allotment: Allotment, options: InputOptions, start: int
    ) -> Iterator[Any]:
        """Yields the elements of a pass, beginning with element ``start``. The elements
        are copied if the source reuses its buffers, and made dense if all replicas need
        the same shapes on devices."""
        elements = begun.without_first(start).elements()
        # The prefetch thread is ahead of the step, and a source that reuses one buffer
        # would overwrite elements that wait.
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
        """Refuses a batch size with which the replicas cannot all have the same shape.

        Raises:
            ValueError: The number of replicas does not divide the batch size.
        """
        count = self.context.num_replicas_in_sync
        if batch_size is not None and batch_size % count:
            raise ValueError(
                f"a global batch of {batch_size} does not split evenly over {count} "
                "replicas, which need the same shapes here: choose a multiple of "
                f"{count}"
            )


def not_per_replica() -> NotImplementedError:
    """Makes the error for PER_REPLICA, an option that only one method accepts."""
    return NotImplementedError(
        "InputReplicationMode.PER_REPLICA is only supported in "
        "`distribute_datasets_from_function` of MirroredStrategy: leave it out, and "
        "the elements of one input function go to the replicas in turn"
    )


def _begun(
    allotments: Sequence[Allotment], position: FeedPosition | None
) -> tuple[tuple[Recipe, ...], int]:
    """Begins passes over the sources, at a position if one is given. Returns them, and
    the number of their first steps to skip."""
    if position is None:
        return tuple(allotment.begin() for allotment in allotments), 0
    pairs = zip(allotments, position.passes, strict=True)
    return tuple(allotment.begin(one) for allotment, one in pairs), position.steps


def _first(begun: Recipe, count: int) -> Iterator[Any]:
    """Yields the first ``count`` elements of a pass."""
    with ending(begun.elements()) as elements:
        yield from itertools.islice(elements, count)


def _copied(elements: Iterator[Any]) -> Iterator[Any]:
    with ending(elements) as source:
        for element in source:
            yield jax.tree.map(kept, element)


def _ending_with(source: Iterator[Any], shares: Iterator[Share]) -> Iterator[Share]:
    """Yields the shares, and closes the source that they are made from at the end."""
    with ending(source):
        yield from shares


def input_options(options: InputOptions | None) -> InputOptions:
    """Returns the options, or the defaults for None.

    Raises:
        TypeError: ``options`` is not an `InputOptions`.
    """
    if options is None:
        return InputOptions()
    if not isinstance(options, InputOptions):
        raise TypeError(f"`options` must be a zs.InputOptions, got {options!r:.100}")
    return options


def _made(dataset_fn: Callable[[InputContext], Any], context: InputContext) -> Dataset:
    before = building.set(True)  # of a step function the body runs then
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
    """Refuses an argument that cannot be called with an `InputContext`.

    Raises:
        TypeError: ``dataset_fn`` is not callable; the error names the method that takes
            a dataset.
    """
    if not callable(dataset_fn):
        raise TypeError(
            "distribute_datasets_from_function takes a function of one "
            f"InputContext, got {type(dataset_fn).__name__}; a dataset itself is "
            "what experimental_distribute_dataset takes"
        )


def refuse_distributed(dataset: object) -> None:
    """Refuses a dataset that a strategy has distributed already.

    Raises:
        TypeError: The dataset is distributed already.
    """
    if isinstance(dataset, StepDataset):
        raise distributed_already()


def distributed_already() -> TypeError:
    """Makes the error for a dataset that a strategy has distributed already."""
    return TypeError(
        "the dataset is distributed already: distribute the dataset that it was made of"
    )


@final
class UnbuiltDataset:
    """Describes a distributed dataset that workers will build.

    ``coordinator.create_per_worker_dataset`` takes this object, or a function that
    returns one.

    Raises:
        NotImplementedError: ``options`` asks for PER_REPLICA.
        TypeError: ``options`` is not an `InputOptions`; the source is not a dataset, or
            not a function.
        ValueError: The source consists of arrays whose first axes differ.
    """

    def __init__(
        self,
        strategy: AbstractStrategy,
        source: Any,
        options: InputOptions | None,
        *,
        is_function: bool,
    ) -> None:
        # Here, where the user called: workers would refuse it later.
        if input_options(options).is_per_replica:
            raise not_per_replica()
        if is_function:
            require_function(source)
        else:
            _require_dataset(source)
        self._strategy: Final = strategy
        self._source: Final = source
        self._options: Final = options
        self._is_function: Final = is_function

    def __iter__(self) -> Iterator[Any]:
        """Raises an error: the coordinator has no elements.

        Raises:
            ValueError: Always; the error names the remedy.
        """
        raise _unbuilt("iter() of")

    @property
    def element_spec(self) -> Any:
        """Raises an error, as `__iter__`."""
        raise _unbuilt("the element_spec of")

    def __reduce__(self) -> Any:
        how = self._strategy, self._source, self._options, self._is_function
        return _built, how

    def __getattr__(self, name: str) -> NoReturn:
        refuse_attribute("distributed dataset", name)

    def __repr__(self) -> str:
        return "<zstrat distributed dataset, to be built by workers>"


def _require_dataset(source: object) -> None:
    """Checks, before a source is sent to workers, that it is a dataset that they
    accept."""
    if isinstance(source, UnbuiltDataset):
        raise distributed_already()
    refuse_distributed(source)
    as_dataset(source)


def _built(
    strategy: AbstractStrategy,
    source: Any,
    options: InputOptions | None,
    is_function: bool,
) -> Any:
    if is_function:
        return strategy.distribute_datasets_from_function(source, options)
    return strategy.experimental_distribute_dataset(source, options)


def _unbuilt(what: str) -> ValueError:
    return ValueError(
        f"{what} a dataset of ParameterServerStrategy on the coordinator: its elements "
        "are made by the workers. Distribute it in a dataset function, hand that to "
        "`coordinator.create_per_worker_dataset(dataset_fn)`, and pass the iterator of "
        "what it returns to scheduled functions"
    )

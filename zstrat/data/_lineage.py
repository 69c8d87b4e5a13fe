"""Finds and rewrites the operations of a recipe, from the last operation to the source.

A dataset is shared out among workers by rewriting its recipe: with a source of fewer
files, or with a shard where the user left a hint. What is known without a pass (the
batch size, the ranks of the leaves, the options) is found in the same way.

Law of the file: nothing here iterates over a dataset.
"""

from __future__ import annotations

import enum
import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

import numpy as np

from ._batches import IndexedPass, PaddedBatches, Rebatched, Unbatched
from ._cached import Cached
from ._foreign import Foreign
from ._passes import (
    INFINITE,
    Batched,
    Batching,
    Derived,
    Enumerated,
    Filtered,
    MappedPass,
    PassThrough,
    Prefetched,
    Recipe,
    Reordered,
    Repeated,
    Rows,
)
from ._replica_rows import AutoShardPolicy, Options
from ._several import Concatenated, Interleaved, Several
from ._shuffled import Shuffled
from ._spec import common_first_axis, first_axis, unknown
from ._tree import leaves
from .files import Files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


@final
@dataclass(frozen=True, slots=True)
class Hinted(Reordered):
    """Marks the operation at which the user wants the dataset sharded when it is
    distributed."""

    source: Recipe

    def items(self) -> Iterator[Any]:
        raise RuntimeError(
            "`Dataset.shard(SHARD_HINT, ...)` can only be used in "
            "`experimental_distribute_dataset()` of a strategy, with "
            "`AutoShardPolicy.HINT`: set "
            "options.experimental_distribute.auto_shard_policy and call "
            "dataset.with_options(options)"
        )


@final
@dataclass(frozen=True, slots=True)
class Opted(Reordered):
    """Sets options, which apply to all operations before and after this one."""

    source: Recipe
    policy: AutoShardPolicy | None

    def items(self) -> Iterator[Any]:
        return self.source.items()

    def elements(self) -> Iterator[Any]:
        return self.source.elements()

    def without_first(self, count: int) -> Recipe:
        return self.with_source(self.source.without_first(count))


def options_of(recipe: Recipe) -> Options:
    """Returns the options of the recipe; options that were set later override earlier
    ones."""
    found = Options()
    for each in walk(recipe):
        if isinstance(each, Opted | Foreign):
            # The walk begins with the last operation, whose options count.
            found = Options(each.policy).merge(found)
    return found


class ShapePromise(enum.IntEnum):
    """How much is known, before a pass, about whether all elements have the same
    shapes.

    TF traces the functions of a dataset, and so knows the shapes that they return; here
    only the elements that a function made show them. An element that is made of several
    others has the greatest of their promises.
    """

    SAME = 0
    """All elements have the same shapes."""
    AS_MADE = 1
    """A function makes the elements: if those seen have the same shapes, all are
    assumed to."""
    ROWS = 2
    """Batches may differ in their number of rows; all else has one shape."""
    NONE = 3


@final
@dataclass(frozen=True, slots=True)
class KnownShapes:
    """The shapes of the elements of a recipe, as far as the recipe shows them without a
    pass. The shapes of datasets that a function makes are known when a pass has made an
    element.

    Args:
        batch_size: The rows of a whole batch, None if unknown.
        is_even: All batches except the last have ``batch_size`` rows.
        is_whole: The last batch has ``batch_size`` rows, too.
        promised_rows: The number of rows that all batches are assumed to have; a
            function of ``map`` is assumed not to change it.
        promise: Whether all elements have the same shapes.
        ranks: The ranks of the leaves of an element, None if unknown.
    """

    batch_size: int | None = None
    is_even: bool = False
    is_whole: bool = False
    promised_rows: int | None = None
    promise: ShapePromise = ShapePromise.NONE
    ranks: tuple[int, ...] | None = None


def shapes_of(recipe: Recipe) -> KnownShapes:
    """Returns the shapes that are known of a recipe's elements; where the recipe has
    its own spec, they are taken from the spec."""
    match recipe:
        case Foreign():
            return KnownShapes(recipe.batch_size, ranks=recipe.ranks)
        case Several():
            found = _shapes_of_several(
                recipe, [shapes_of(each) for each in recipe.sources]
            )
        case Derived():
            found = _shapes_of_one(recipe, shapes_of(recipe.source))
        case IndexedPass():
            source = recipe.source
            found = KnownShapes(source.batch, True, source.drop_remainder)
        case Rows():
            rows = [np.shape(leaf)[1:] for _, leaf in leaves(recipe.arrays)]
            found = KnownShapes(common_first_axis(rows), True, True)
        case _:
            found = KnownShapes()
    # A spec is never a guess, so it wins over what the operations say of shapes.
    spec = recipe.spec(unknown)
    if spec is None:
        return found
    known = [leaf.shape for _, leaf in leaves(spec)]
    is_static = all(None not in shape for shape in known)
    return replace(
        found,
        promised_rows=common_first_axis(known),
        promise=ShapePromise.SAME if is_static else ShapePromise.ROWS,
        ranks=tuple(map(len, known)),
    )


def _shapes_of_several(recipe: Several, sources: Sequence[KnownShapes]) -> KnownShapes:
    sizes = {each.batch_size for each in sources}
    are_whole = all(each.is_whole for each in sources)
    return KnownShapes(
        sizes.pop() if len(sizes) == 1 else None,
        are_whole,
        are_whole,
        promise=max(each.promise for each in sources),
        ranks=sources[0].ranks if isinstance(recipe, Concatenated) else None,
    )


def _shapes_of_one(recipe: Derived, source: KnownShapes) -> KnownShapes:
    by_function = max(ShapePromise.AS_MADE, source.promise)
    match recipe:
        case Repeated() | Shuffled():
            # A short last batch comes again in the middle, or anywhere.
            return replace(source, is_even=source.is_whole)
        case PassThrough():
            return source
        case Enumerated():
            ranks = None if source.ranks is None else (0, *source.ranks)
            return KnownShapes(promise=source.promise, ranks=ranks)
        case MappedPass():
            rows = source.promised_rows
            return KnownShapes(promised_rows=rows, promise=by_function)
        case Unbatched():
            return KnownShapes(promise=ShapePromise.AS_MADE)
        case Interleaved():
            # Known once a pass has called the function; until then it may be anything.
            made = recipe.made.last
            found = ShapePromise.ROWS if made is None else shapes_of(made).promise
            return KnownShapes(promise=max(ShapePromise.AS_MADE, found))
        case Batching():
            # Unknown sizes are negative, too, and promise no whole last batch.
            size = recipe.source.size()
            divides = size == INFINITE or (size >= 0 and not size % recipe.batch_size)
            ranks = source.ranks
            return KnownShapes(
                recipe.batch_size,
                True,
                recipe.drop_remainder or divides,
                recipe.rows,
                _promise_of_batches(recipe, recipe.rows),
                None if ranks is None else tuple(rank + 1 for rank in ranks),
            )
        case Rebatched():
            # As TF counts them: unless it is promised, not even of whole batches.
            rows = recipe.rows if recipe.drop_remainder else None
            counted = rows or first_axis(recipe.spec(unknown))
            promise = _promise_of_batches(recipe, rows)
            return KnownShapes(counted, True, True, rows, promise, source.ranks)
    return KnownShapes()


def _promise_of_batches(recipe: Recipe, rows: int | None) -> ShapePromise:
    if isinstance(recipe, PaddedBatches):
        is_static = rows is not None and recipe.pads_to_one_shape
        return ShapePromise.SAME if is_static else ShapePromise.ROWS
    return ShapePromise.ROWS if rows is None else ShapePromise.AS_MADE


def is_steady(recipe: Recipe) -> bool:
    """Returns whether an element of the recipe is never written to after it was
    yielded."""
    match recipe:
        case Foreign():
            return recipe.is_steady
        case Reordered() | Prefetched() | Enumerated():
            return is_steady(recipe.source)
        # They yield views of the elements of their source.
        case Unbatched() | Rebatched():
            return is_steady(recipe.source)
        case Several():
            return all(map(is_steady, recipe.sources))
        case _:
            return True


def is_fresh(recipe: Recipe) -> bool:
    """Returns whether only the reader of an element holds references to the element's
    memory."""
    match recipe:
        case Batched():
            return True
        case Filtered():  # the predicate has seen it, and may have kept it
            return False
        case Reordered() | Prefetched():
            return is_fresh(recipe.source)
        case _:
            return False


def file_count(recipe: Recipe) -> int | None:
    """Returns how many files (or parts of files) the recipe is read from; None if it is
    read from something else, or not from files alone. Zipped datasets count as
    something else, because it is unknown which of their files belong together."""
    source = _source(recipe)
    if isinstance(source, Files):
        return len(source.paths)
    if isinstance(source, Concatenated):
        counts = [file_count(each) for each in source.sources]
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else None
    return None


def for_files(recipe: Recipe, workers: int, worker: int) -> Recipe:
    """Returns the recipe restricted to the files ``worker``, ``worker + workers``,
    …."""

    def fewer(source: Recipe) -> Recipe:
        if isinstance(source, Files):
            return source.every(workers, worker)
        assert isinstance(source, Concatenated)
        shards: list[Recipe] = []
        # File i of all goes to worker ``i % workers``: each source begins where the
        # count of the files before it has come to.
        before = 0
        for each in source.sources:
            shards.append(for_files(each, workers, (worker - before) % workers))
            before += file_count(each) or 0
        return replace(source, sources=tuple(shards))

    place = workers, worker
    return _rewritten(
        recipe, lambda x: isinstance(x, Files | Concatenated), fewer, place
    )


def for_hint(recipe: Recipe, workers: int, worker: int) -> Recipe:
    """Returns the recipe with the shard of the worker in place of the user's hint.

    Raises:
        ValueError: There is no hint, and there are several workers.
    """
    if workers == 1:
        return _unhinted(recipe)
    if not any(isinstance(each, Hinted) for each in _chain(recipe)):
        raise ValueError(
            "AutoShardPolicy.HINT: the dataset does not say where to shard it: call "
            "dataset.shard(zs.data.SHARD_HINT, zs.data.SHARD_HINT) at that place "
            "(behind `zip` and `concatenate`), or set another auto_shard_policy"
        )

    def sharded(hint: Recipe) -> Recipe:
        assert isinstance(hint, Hinted)
        return hint.source.shard(workers, worker)

    place = workers, worker
    return _rewritten(recipe, lambda each: isinstance(each, Hinted), sharded, place)


def sharded_operation(recipe: Recipe, policy: AutoShardPolicy) -> int | None:
    """Returns the index, counted from the last operation, of the operation whose
    elements are sharded by number; None if elements are not sharded by number. All
    workers have to see these elements in one order."""
    if policy is AutoShardPolicy.HINT:
        hints = (n for n, each in enumerate(_chain(recipe)) if isinstance(each, Hinted))
        return next(hints, None)
    # DATA shards the elements that come out; files are sharded as a whole, in no order.
    return 0 if policy is AutoShardPolicy.DATA else None


def order_differs(recipe: Recipe, sharded_at: int) -> bool:
    """Returns whether workers shuffle the elements that are sharded by number
    differently, so that some elements are read twice, and others never."""
    return any(
        not each.is_the_same_everywhere for each in _shuffled(recipe, sharded_at)
    )


def has_no_order(recipe: Recipe, sharded_at: int) -> bool:
    """Returns whether the elements that are sharded by number are made in no fixed
    order."""
    return any(
        isinstance(each, MappedPass) and each.threads > 0 and not each.in_order
        for each in itertools.islice(walk(recipe), sharded_at, None)
    )


def order_of(begun: Recipe, sharded_at: int) -> str:
    """Returns the pass numbers that determine the order in which a begun recipe is
    sharded; "" if all its passes have the same order, or if the order differs between
    processes anyway."""
    return ", ".join(
        ".".join(map(str, each.order))
        for each in _shuffled(begun, sharded_at)
        if each.reshuffle and each.is_the_same_everywhere
    )


def _shuffled(recipe: Recipe, sharded_at: int) -> Iterator[Shuffled]:
    for each in itertools.islice(walk(recipe), sharded_at, None):
        if isinstance(each, Shuffled):
            yield each


def walk(recipe: Recipe) -> Iterator[Recipe]:
    """Yields the recipe and, recursively, all recipes that it is made of."""
    yield recipe
    if isinstance(recipe, Derived):
        yield from walk(recipe.source)
    elif isinstance(recipe, Several):
        for source in recipe.sources:
            yield from walk(source)


def _chain(recipe: Recipe) -> Iterator[Recipe]:
    """Yields the recipe, the recipe that it is made of, and so on, up to the first one
    that is made of several recipes or of none."""
    yield recipe
    while isinstance(recipe, Derived):
        recipe = recipe.source
        yield recipe


def _source(recipe: Recipe) -> Recipe:
    *_, source = _chain(recipe)
    return source


def _rewritten(
    recipe: Recipe,
    is_wanted: Callable[[Recipe], bool],
    change: Callable[[Recipe], Recipe],
    place: tuple[int, int],
) -> Recipe:
    """Returns the recipe with the last operation changed for which ``is_wanted`` is
    true; caches after it are separated for this worker. ``place``: number of workers,
    and index of this one."""
    if is_wanted(recipe):
        return change(recipe)
    assert isinstance(recipe, Derived), "what is to be changed is not in it"
    changed = recipe.with_source(_rewritten(recipe.source, is_wanted, change, place))
    # Workers have different data there: no cache may serve two of them.
    return changed.shared(*place) if isinstance(changed, Cached) else changed


def _unhinted(recipe: Recipe) -> Recipe:
    if isinstance(recipe, Hinted):
        return _unhinted(recipe.source)
    return recipe.map_sources(_unhinted)

"""What a recipe is made of: found by walking from the last operation to the source.

Sharing a dataset out among workers rewrites its recipe: another source with fewer
files, or a shard where the user left a hint. What is known without a pass (the batch
size, the ranks of the leaves, the options) is found on the same walk.

Law of the file: nothing here passes over a dataset.
"""

from __future__ import annotations

import enum
import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn, final

import numpy as np

from ._batches import PaddedBatches, Rebatched, Unbatched
from ._cached import Cached
from ._foreign import Foreign
from ._options import AutoShardPolicy, Options
from ._passes import (
    INFINITE,
    Batched,
    Batching,
    Derived,
    Enumerated,
    Filtered,
    MappedPass,
    Prefetched,
    Recipe,
    Reordered,
    Repeated,
    Rows,
)
from ._several import Concatenated, Interleaved, Several
from ._shuffle import Shuffled
from ._spec import common_first_axis, first_axis, unknown
from ._tree import leaves
from .files import Files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@final
@dataclass(frozen=True, slots=True)
class Hinted(Reordered):
    """Where the user wants the dataset sharded, by whoever distributes it."""

    source: Recipe

    def items(self) -> Iterator[Any]:
        _refuse_hint()


@final
@dataclass(frozen=True, slots=True)
class Opted(Reordered):
    """Options for everything before it and after it."""

    source: Recipe
    policy: AutoShardPolicy | None

    def items(self) -> Iterator[Any]:
        return self.source.items()

    def elements(self) -> Iterator[Any]:
        return self.source.elements()

    def without_first(self, count: int) -> Recipe:
        return self.of(self.source.without_first(count))


def options_of(recipe: Recipe) -> Options:
    """The options of the recipe; of several, the last ones count."""
    found = Options()
    for each in walk(recipe):
        if isinstance(each, Opted | Foreign):
            # The walk begins with the last operation, whose options count.
            found = Options(each.policy).merge(found)
    return found


def batch_size_of(recipe: Recipe) -> int | None:
    """The rows of a whole batch, None if that is not known without a pass."""
    match recipe:
        case Batching():
            return recipe.batch_size
        case Rebatched():
            # As TF counts them: unless it is promised, not even of whole batches.
            promised = first_axis(recipe.spec(unknown))
            return recipe.rows if recipe.drop_remainder else promised
        case Several():
            found = {batch_size_of(source) for source in recipe.sources}
            return found.pop() if len(found) == 1 else None
        case Rows():
            return common_first_axis(
                np.shape(leaf)[1:] for _, leaf in leaves(recipe.arrays)
            )
        case Foreign():
            return recipe.batch_size
        case Reordered() | Prefetched() | Cached():
            return batch_size_of(recipe.source)
        case _:
            return None


def is_even(recipe: Recipe, *, to_the_end: bool = False) -> bool:
    """Whether it is known that all batches have the rows that `batch_size_of` says.

    Args:
        to_the_end: The last one, too.
    """
    match recipe:
        case Batching():
            rows = recipe.source.size()
            whole = rows == INFINITE or (rows >= 0 and not rows % recipe.batch_size)
            return not to_the_end or recipe.drop_remainder or whole
        case Repeated() | Shuffled():
            return is_even(recipe.source, to_the_end=True)
        case Several():
            return all(is_even(each, to_the_end=True) for each in recipe.sources)
        case Reordered() | Prefetched() | Cached():
            return is_even(recipe.source, to_the_end=to_the_end)
        case Rebatched() | Rows():
            return True
        case _:
            return False


def promised_rows(recipe: Recipe) -> int | None:
    """The rows that all batches are promised to have; a function of ``map`` is taken to
    keep them."""
    spec = recipe.spec(unknown)
    if spec is not None:
        return first_axis(spec)
    match recipe:
        case Batching() | Rebatched():
            return recipe.rows if recipe.drop_remainder else None
        case Reordered() | Prefetched() | Cached() | MappedPass():
            return promised_rows(recipe.source)
        case _:
            return None


def ranks_of(recipe: Recipe) -> tuple[int, ...] | None:
    """The ranks of the leaves of an element, None if not known without a pass."""
    match recipe:
        case Foreign():
            return recipe.ranks
        case Batching():
            ranks = ranks_of(recipe.source)
            return None if ranks is None else tuple(rank + 1 for rank in ranks)
        case Enumerated():
            ranks = ranks_of(recipe.source)
            return None if ranks is None else (0, *ranks)
        case Concatenated():
            return ranks_of(recipe.sources[0])
        case Reordered() | Prefetched() | Cached() | Rebatched():
            return ranks_of(recipe.source)
        case _:
            spec = recipe.spec(unknown)
            return None if spec is None else tuple(x.ndim for _, x in leaves(spec))


class ShapePromise(enum.IntEnum):
    """What is known of the shapes of all elements before a pass.

    TF traces the functions of a dataset, and so knows what they promise; here only what
    they made shows it. The greater one is that of elements made of several.
    """

    SAME = 0
    """All elements have the same shapes."""
    AS_MADE = 1
    """A function decides: those of the same shapes are taken to keep a promise."""
    ROWS = 2
    """Batches may differ in their rows; numbers still have one shape."""
    NONE = 3


def promise_of(recipe: Recipe) -> ShapePromise:
    """What the recipe promises of the shapes of its elements. What functions make of
    which datasets is known when a pass has made an element."""
    spec = recipe.spec(unknown)
    if spec is not None:
        is_static = all(None not in leaf.shape for _, leaf in leaves(spec))
        return ShapePromise.SAME if is_static else ShapePromise.ROWS
    match recipe:
        case Interleaved():
            made = recipe.made.last  # by a function, so of any number of rows
            found = ShapePromise.ROWS if made is None else promise_of(made)
            return max(ShapePromise.AS_MADE, found)
        case PaddedBatches():
            is_static = recipe.drop_remainder and recipe.pads_to_one_shape
            return ShapePromise.SAME if is_static else ShapePromise.ROWS
        case Batching() | Rebatched():
            is_even = recipe.rows is not None and recipe.drop_remainder
            return ShapePromise.AS_MADE if is_even else ShapePromise.ROWS
        case Unbatched():
            return ShapePromise.AS_MADE
        case Several():
            return max(map(promise_of, recipe.sources))
        case Reordered() | Prefetched() | Cached() | Enumerated():
            return promise_of(recipe.source)
        case MappedPass():
            return max(ShapePromise.AS_MADE, promise_of(recipe.source))
        case _:
            return ShapePromise.NONE


def is_steady(recipe: Recipe) -> bool:
    """Whether nobody writes to an element that was yielded."""
    match recipe:
        case Foreign():
            return recipe.is_steady
        case Reordered() | Prefetched() | Enumerated():
            return is_steady(recipe.source)
        case Unbatched() | Rebatched():  # views of them
            return is_steady(recipe.source)
        case Several():
            return all(map(is_steady, recipe.sources))
        case _:
            return True


def is_fresh(recipe: Recipe) -> bool:
    """Whether nobody but who draws it has the memory of an element."""
    match recipe:
        case Batched():
            return True
        case Filtered():  # a function of the user has seen it
            return False
        case Reordered() | Prefetched():
            return is_fresh(recipe.source)
        case _:
            return False


def file_count(recipe: Recipe) -> int | None:
    """How many files (or parts of files) it is read from, None if it is not, or not
    from them alone. Nobody knows which files of zipped datasets belong together."""
    source = _source(recipe)
    if isinstance(source, Files):
        return len(source.paths)
    if isinstance(source, Concatenated):
        counts = [file_count(each) for each in source.sources]
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else None
    return None


def for_files(recipe: Recipe, workers: int, worker: int) -> Recipe:
    """The recipe over the files ``worker``, ``worker + workers``, … alone."""

    def fewer(source: Recipe) -> Recipe:
        if isinstance(source, Files):
            return source.every(workers, worker)
        assert isinstance(source, Concatenated)
        dealt: list[Recipe] = []
        before = 0
        for each in source.sources:  # the files of all are counted through
            dealt.append(for_files(each, workers, (worker - before) % workers))
            before += file_count(each) or 0
        return replace(source, sources=tuple(dealt))

    place = workers, worker
    return _rewritten(
        recipe, lambda x: isinstance(x, Files | Concatenated), fewer, place
    )


def for_hint(recipe: Recipe, workers: int, worker: int) -> Recipe:
    """The recipe with the shard of the worker where the hint is.

    Raises:
        ValueError: There is no hint, and several workers.
    """
    if not any(isinstance(each, Hinted) for each in _line(recipe)):
        if workers == 1:
            return recipe
        raise ValueError(
            "AutoShardPolicy.HINT: the dataset does not say where to shard it: call "
            "dataset.shard(zs.data.SHARD_HINT, zs.data.SHARD_HINT) at that place "
            "(behind `zip` and `concatenate`), or set another auto_shard_policy"
        )

    def sharded(hint: Recipe) -> Recipe:
        assert isinstance(hint, Hinted)
        return hint.source.part(workers, worker)

    place = workers, worker
    return _rewritten(recipe, lambda each: isinstance(each, Hinted), sharded, place)


def dealt_before(recipe: Recipe, policy: AutoShardPolicy) -> int | None:
    """How many operations, counted from the last, come after the one whose elements
    workers deal out by number, so that they have to see them in one order; None: they
    deal out none."""
    if policy is AutoShardPolicy.HINT:
        hints = (n for n, each in enumerate(_line(recipe)) if isinstance(each, Hinted))
        return next(hints, None)
    return 0 if policy is AutoShardPolicy.DATA else None


def order_differs(recipe: Recipe, dealt: int) -> bool:
    """Whether each worker sees in another order what several deal out by number, so
    that some elements are read twice, and others by nobody."""
    return any(not each.is_the_same_everywhere for each in _shuffled(recipe, dealt))


def has_no_order(recipe: Recipe, dealt: int) -> bool:
    """Whether what workers deal out by number comes as it is made, in any order."""
    return any(
        isinstance(each, MappedPass) and each.threads > 0 and not each.in_order
        for each in itertools.islice(walk(recipe), dealt, None)
    )


def order_of(begun: Recipe, dealt: int) -> str:
    """The numbers of a pass that make the order in which it is dealt out; "" if it has
    the same order as all others, or another one in every process anyway."""
    return ", ".join(
        ".".join(map(str, each.order))
        for each in _shuffled(begun, dealt)
        if each.reshuffle and each.is_the_same_everywhere
    )


def _shuffled(recipe: Recipe, dealt: int) -> Iterator[Shuffled]:
    for each in itertools.islice(walk(recipe), dealt, None):
        if isinstance(each, Shuffled):
            yield each


def walk(recipe: Recipe) -> Iterator[Recipe]:
    """Yields the recipe and all that it is made of."""
    yield recipe
    if isinstance(recipe, Derived):
        yield from walk(recipe.source)
    elif isinstance(recipe, Several):
        for source in recipe.sources:
            yield from walk(source)


def _line(recipe: Recipe) -> Iterator[Recipe]:
    """Yields the recipe and what it is made of, up to where that is several."""
    yield recipe
    while isinstance(recipe, Derived):
        recipe = recipe.source
        yield recipe


def _source(recipe: Recipe) -> Recipe:
    *_, source = _line(recipe)
    return source


def _rewritten(
    recipe: Recipe,
    is_wanted: Callable[[Recipe], bool],
    change: Callable[[Recipe], Recipe],
    place: tuple[int, int],
) -> Recipe:
    """The recipe with the last wanted operation changed, for one worker of several."""
    if is_wanted(recipe):
        return change(recipe)
    assert isinstance(recipe, Derived), "what is to be changed is not in it"
    changed = recipe.of(_rewritten(recipe.source, is_wanted, change, place))
    # Workers have different data there: no cache may serve two of them.
    return changed.shared(*place) if isinstance(changed, Cached) else changed


def _refuse_hint() -> NoReturn:
    raise RuntimeError(
        "`Dataset.shard(SHARD_HINT, ...)` can only be used in "
        "`experimental_distribute_dataset()` of a strategy, with "
        "`AutoShardPolicy.HINT`: set options.experimental_distribute.auto_shard_policy "
        "and call dataset.with_options(options)"
    )

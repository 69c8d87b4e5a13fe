"""What a recipe is made of: found by walking from the last operation to the source.

Sharing a dataset out among workers rewrites its recipe: another source with fewer
files, or a shard where the user left a hint. What is known without a pass (the batch
size, the ranks of the leaves, the options) is found on the same walk.

Law of the file: nothing here passes over a dataset.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, final

import numpy as np

from ._files import Files
from ._foreign import Foreign
from ._options import AutoShardPolicy, Options
from ._passes import (
    Batched,
    Counted,
    Derived,
    Enumerated,
    Prefetched,
    Recipe,
    Reordered,
    Rows,
    SlicedPass,
)
from ._shuffle import Shuffled
from ._tree import leaves

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


def options_of(recipe: Recipe) -> Options:
    """The options of the recipe; of several, the last ones count."""
    found = Options()
    for each in _walk(recipe):
        if isinstance(each, Opted | Foreign):
            found = Options(each.policy).merge(found)
    return found


def batch_size_of(recipe: Recipe) -> int | None:
    """The rows of a whole batch, None if that is not known without a pass."""
    match recipe:
        case Batched():
            return recipe.batch_size
        case Rows():
            sizes = {np.shape(leaf)[1:2] for _, leaf in leaves(recipe.arrays)}
            return _only(sizes)
        case Foreign():
            return recipe.batch_size
        case Reordered() | Prefetched():
            return batch_size_of(recipe.source)
        case _:
            return None


def ranks_of(recipe: Recipe) -> tuple[int, ...] | None:
    """The ranks of the leaves of an element, None if not known without a pass."""
    match recipe:
        case Rows():
            return tuple(np.ndim(leaf) - 1 for _, leaf in leaves(recipe.arrays))
        case Counted():
            return (0,)
        case Foreign():
            return recipe.ranks
        case Batched():
            ranks = ranks_of(recipe.source)
            return None if ranks is None else tuple(rank + 1 for rank in ranks)
        case Enumerated():
            ranks = ranks_of(recipe.source)
            return None if ranks is None else (0, *ranks)
        case Reordered() | Prefetched():
            return ranks_of(recipe.source)
        case _:
            return None


def is_steady(recipe: Recipe) -> bool:
    """Whether nobody writes to an element that was yielded."""
    match recipe:
        case Foreign():
            return recipe.is_steady
        case Reordered() | Prefetched() | Enumerated():
            return is_steady(recipe.source)
        case _:
            return True


def file_count(recipe: Recipe) -> int | None:
    """How many files it is read from, None if it is not."""
    source = _source(recipe)
    return len(source.paths) if isinstance(source, Files) else None


def for_files(recipe: Recipe, workers: int, worker: int) -> Recipe:
    """The same of files ``worker``, ``worker + workers``, … alone."""

    def fewer(source: Recipe) -> Recipe:
        assert isinstance(source, Files)
        return source.every(workers, worker)

    return _rewritten(recipe, lambda each: isinstance(each, Files), fewer)


def for_hint(recipe: Recipe, workers: int, worker: int) -> Recipe:
    """The same with the shard of the worker where the hint is.

    Raises:
        ValueError: There is no hint, and several workers.
    """
    if not any(isinstance(each, Hinted) for each in _walk(recipe)):
        if workers == 1:
            return recipe
        raise ValueError(
            "AutoShardPolicy.HINT: the dataset does not say where to shard it: call "
            "dataset.shard(zs.data.SHARD_HINT, zs.data.SHARD_HINT) at that place, or "
            "set another auto_shard_policy"
        )

    def sharded(hint: Recipe) -> Recipe:
        assert isinstance(hint, Hinted)
        return SlicedPass(hint.source, start=worker, step=workers)

    return _rewritten(recipe, lambda each: isinstance(each, Hinted), sharded)


def dealt_before(recipe: Recipe, policy: AutoShardPolicy) -> int | None:
    """How many operations, counted from the last, come after the one whose elements
    workers deal out by number, so that they have to see them in one order; None: they
    deal out none."""
    if policy is AutoShardPolicy.HINT:
        hints = (n for n, each in enumerate(_walk(recipe)) if isinstance(each, Hinted))
        return next(hints, None)
    return 0 if policy is AutoShardPolicy.DATA else None


def order_differs(recipe: Recipe, dealt: int) -> bool:
    """Whether each worker sees in another order what several deal out by number, so
    that some elements are read twice, and others by nobody."""
    return any(not each.is_the_same_everywhere for each in _shuffled(recipe, dealt))


def order_of(begun: Recipe, dealt: int) -> str:
    """The numbers of a pass that make the order in which it is dealt out; "" if it has
    the same order as all others, or another one in every process anyway."""
    return ", ".join(
        ".".join(map(str, each.order))
        for each in _shuffled(begun, dealt)
        if each.reshuffle and each.is_the_same_everywhere
    )


def _shuffled(recipe: Recipe, dealt: int) -> Iterator[Shuffled]:
    for each in itertools.islice(_walk(recipe), dealt, None):
        if isinstance(each, Shuffled):
            yield each


def _walk(recipe: Recipe) -> Iterator[Recipe]:
    yield recipe
    while isinstance(recipe, Derived):
        recipe = recipe.source
        yield recipe


def _source(recipe: Recipe) -> Recipe:
    *_, source = _walk(recipe)
    return source


def _rewritten(
    recipe: Recipe,
    is_wanted: Callable[[Recipe], bool],
    change: Callable[[Recipe], Recipe],
) -> Recipe:
    """The recipe with the last wanted operation changed."""
    if is_wanted(recipe):
        return change(recipe)
    assert isinstance(recipe, Derived), "what is to be changed is not in it"
    return recipe.of(_rewritten(recipe.source, is_wanted, change))


def _only(sizes: set[tuple[int, ...]]) -> int | None:
    """The one first axis of all leaves, if they agree and have one."""
    if len(sizes) != 1:
        return None
    (size,) = sizes
    return size[0] if size else None


def _refuse_hint() -> NoReturn:
    raise RuntimeError(
        "`Dataset.shard(SHARD_HINT, ...)` can only be used in "
        "`experimental_distribute_dataset()` of a strategy, with "
        "`AutoShardPolicy.HINT`: set options.experimental_distribute.auto_shard_policy "
        "and call dataset.with_options(options)"
    )

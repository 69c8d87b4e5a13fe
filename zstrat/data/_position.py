"""The position of a pass, from which another pass, in any process, can continue.

A position is the number of elements that were drawn, and what determines the order of
the pass: the pass numbers of its shuffles, and the seeds that were drawn for shuffles
without one. Elements are not stored. To continue, the pass is begun again and the drawn
elements are skipped; over arrays in memory no element is made for that.

Law of the file: a position is saved only if the pass would have the same order again,
as far as the recipe shows, and is restored only in a recipe with the same operations.
Functions and sources have to return the same values each time.
"""

from __future__ import annotations

import abc
import itertools
import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final, final

from zstrat.errors import ClosedError, InvalidArgumentError

from ._batches import IndexedPass, Rebatched, Unbatched
from ._cached import Cached
from ._elements import Elements
from ._lineage import walk
from ._passes import Batching, Filtered
from ._several import Interleaved
from ._shuffled import Shuffled

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from _typeshed import DataclassInstance

    from ._leaves import Element
    from ._passes import Recipe


MOST_DRAWN: Final = 2**53
"""Limit of elements, or steps, before a position: no program draws more, and multiplied
by the number of replicas it still fits a C integer."""


class CheckpointableIterator(abc.ABC):
    """An iterator whose position in its data can be saved and restored.

    A `zs.Checkpoint` that holds the iterator does both. The dataset has to be made in
    the same way, and the dataset's functions and sources must return the same values
    each time.
    """

    @abc.abstractmethod
    def get_state(self) -> dict[str, Any]:
        """Returns the position, made of numbers, text and lists that JSON can hold.

        Raises:
            InvalidArgumentError: Another pass would have another order; says what to
                change.
        """

    @abc.abstractmethod
    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues at a position that `get_state` returned, of this iterator or of
        another one of the same dataset, whatever this iterator has drawn.

        Raises:
            InvalidArgumentError: The position is of another dataset; nothing changed.
            ClosedError: The iterator was closed.
        """

    @abc.abstractmethod
    def misfit(self, state: Mapping[str, Any]) -> str:
        """Returns why the iterator cannot continue at a position; "" if it can."""


@final
@dataclass(frozen=True, slots=True)
class Position:
    """A position in the passes of a recipe.

    Args:
        drawn: How many elements come before the position.
        orders: For each shuffle its seed, if that was drawn, and the number of the
            pass.
        sizes: How many elements there are after each operation that changes the number,
            from the end of the recipe to its sources; used to check that the dataset is
            the same. Empty: not compared.
        operations: The operations that decide which elements come when, as text; used
            for the same check. None: not compared.
    """

    drawn: int
    orders: tuple[tuple[int | None, tuple[int, ...]], ...]
    sizes: tuple[int, ...]
    operations: tuple[str, ...] | None

    @classmethod
    def of(cls, begun: Recipe, drawn: int) -> Position:
        """Returns the position after ``drawn`` elements of a pass.

        Raises:
            InvalidArgumentError: Another pass may have another order.
        """
        if why := begun.why_order_varies():
            raise _unsaved(why)
        orders = tuple(
            (each.seed if each.is_drawn else None, each.order)
            for each in shuffles(begun)
        )
        return cls(drawn, orders, _sizes(begun), _operations(begun))

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Position:
        """Returns the position whose `plain` form this is.

        Raises:
            InvalidArgumentError: The argument is not the plain form of a position.
        """
        match plain:
            case {
                "drawn": int(drawn),
                "orders": [*orders],
                "sizes": [*sizes],
                "operations": [*_] | None as operations,
            } if 0 <= drawn <= MOST_DRAWN and all(map(_is_order, orders)):
                listed = tuple((seed, tuple(order)) for seed, order in orders)
                made_by = None if operations is None else tuple(operations)
                return cls(drawn, listed, tuple(sizes), made_by)
        raise InvalidArgumentError(
            f"expected the saved place of an iterator, got {plain!r:.200}"
        )

    def of_all(self, *, are_alike: bool) -> Position:
        """Returns the position for all processes, each of which reads a part of the
        dataset.

        Args:
            are_alike: All processes have the same operations.

        Raises:
            InvalidArgumentError: The processes do not have one common order.
        """
        # A seed is in a place only if it was drawn, and each process has drawn its own.
        if any(seed is not None for seed, _ in self.orders):
            raise _unsaved(
                "each process shuffles in its own order. Give shuffle the same "
                "seed in all of them: shuffle(buffer_size, seed=...)"
            )
        operations = self.operations if are_alike else None
        return replace(self, sizes=(), operations=operations)

    @property
    def plain(self) -> dict[str, Any]:
        return plain_place(self)

    def misfit(self, recipe: Recipe) -> str:
        """Returns why this is not a position in the passes of the recipe; "" if it
        is."""
        # From the plainest difference to the subtlest: the first one is named.
        sizes = _sizes(recipe)
        if self.sizes and sizes != self.sizes:
            return (
                f"it was saved of a dataset with {_listed(self.sizes)} elements, and "
                f"this one has {_listed(sizes)} (of each transformation, the last one "
                "first; -1: without end, -2: not known)"
            )
        if 0 <= recipe.size() < self.drawn:
            return f"{self.drawn} elements come before it, of {recipe.size()}"
        operations = _operations(recipe)
        if self.operations is not None and operations != self.operations:
            return (
                f"it was saved of a dataset made by {_listed(self.operations)}, and "
                f"this one is made by {_listed(operations)} (the last one first)"
            )
        count = sum(1 for _ in shuffles(recipe))
        if count != len(self.orders):
            return (
                f"it was saved of a dataset with {len(self.orders)} shuffles, and this "
                f"one has {count}"
            )
        return ""

    def resumed_pass(self, recipe: Recipe) -> Recipe:
        """Returns the pass of ``recipe`` that this position is in, from its first
        element. Later passes of the recipe get later numbers."""
        orders = iter(self.orders)

        def ordered(each: Recipe, is_counted: bool = True) -> Recipe:
            if isinstance(each, Shuffled):
                seed, order = next(orders)
                if is_counted:  # so that the next pass here gets another order
                    each.passes.note(order)
                each = each.with_order(seed, order)
            elif isinstance(each, Cached):
                is_counted = False  # what is before it is passed over as if first
            return each.map_sources(lambda source: ordered(source, is_counted))

        # Begun as the first pass, then numbered as in the position: `begin_pass` would
        # take the next number, and count a pass that nobody reads.
        return ordered(recipe.first_pass())


@final
class DatasetIterator(Elements["Element"], CheckpointableIterator):
    """A pass over a `Dataset`. May be an attribute of a `zs.Checkpoint`, which then
    saves and restores its position.

    Args:
        recipe: The operations, not begun.
        name: Name of the data in errors.
    """

    def __init__(self, recipe: Recipe, name: str = "the dataset") -> None:
        self._recipe: Final = recipe
        # Begun here, in the thread of the caller: it takes the number of the pass now,
        # however late its elements are drawn.
        self._begun = recipe.begin_pass()
        self._drawn = 0
        super().__init__(self._begun.elements(), name)

    def __next__(self) -> Element:
        element = super().__next__()
        self._drawn += 1
        return element

    def unread(self, element: Element) -> None:
        super().unread(element)
        self._drawn -= 1  # a saved place has it before it again

    def get_state(self) -> dict[str, Any]:
        return Position.of(self._begun, self._drawn).plain

    def set_state(self, state: Mapping[str, Any]) -> None:
        if self.is_closed:
            raise ClosedError(f"{self.name} is closed: build its iterator again")
        require_fit(self, state)
        position = Position.from_plain(state)
        self._begun = position.resumed_pass(self._recipe)
        self._drawn = position.drawn
        self.replace(self._begun.without_first(position.drawn).elements())

    def misfit(self, state: Mapping[str, Any]) -> str:
        if self.is_closed:
            return "it was closed"
        return Position.from_plain(state).misfit(self._recipe)


def _unsaved(why: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        "the place of this iterator cannot be saved, because another pass may give "
        f"other elements: {why}"
    )


def plain_place(place: DataclassInstance) -> dict[str, Any]:
    """Returns a position in JSON form, by the names of its fields."""
    # Through JSON: tuples become lists, as they are after a checkpoint was read.
    found: dict[str, Any] = json.loads(json.dumps(asdict(place)))
    return found


def require_fit(iterator: CheckpointableIterator, state: Mapping[str, Any]) -> None:
    """Checks that a position is of the iterator's dataset.

    Raises:
        InvalidArgumentError: The position is of another dataset.
    """
    if why := iterator.misfit(state):
        raise InvalidArgumentError(
            f"this iterator cannot go on where it was saved: {why}. Make the dataset "
            "as it was, or leave the iterator out and begin a new pass"
        )


def shuffles(recipe: Recipe) -> Iterator[Shuffled]:
    """Yields the shuffles of a recipe, the last operation first."""
    return (each for each in walk(recipe) if isinstance(each, Shuffled))


def _sizes(recipe: Recipe) -> tuple[int, ...]:
    found = (each.size() for each in walk(recipe))
    # Runs of one size count once: a `map` or `prefetch` more keeps old places valid.
    return tuple(size for size, _ in itertools.groupby(found))


def _operations(recipe: Recipe) -> tuple[str, ...]:
    return tuple(filter(None, map(_operation, walk(recipe))))


def _operation(recipe: Recipe) -> str:
    match recipe:
        case Shuffled():
            kept = None if recipe.is_drawn else recipe.seed
            again = "" if recipe.reshuffle else ", reshuffle_each_iteration=False"
            return f"shuffle({recipe.buffer_size}, seed={kept}{again})"
        case Batching():
            dropping = ", drop_remainder=True" if recipe.drop_remainder else ""
            return f"batch({recipe.batch_size}{dropping})"
        case Rebatched():
            return f"rebatch({list(recipe.sizes)})"
        case IndexedPass():
            seed = recipe.source.seed
            return f"from_indexed(batch={recipe.source.batch}, shuffle_seed={seed})"
        case Interleaved():
            lengths = f"{recipe.cycle_length}, {recipe.block_length}"
            return f"interleave(…, {lengths})"
        case Unbatched():
            return "unbatch()"
        case Filtered():
            return "filter(…)"
    return ""


def _listed(parts: tuple[Any, ...]) -> str:
    return ", ".join(map(str, parts)) or "no operation that counts"


def _is_order(plain: Any) -> bool:
    match plain:
        case [None | int(), [*numbers]] if numbers:
            return all(isinstance(number, int) for number in numbers)
    return False

"""Where a pass is, so that another one, also of another process, can go on from there.

A position is the number of elements that were drawn, and what makes the order of the
pass: the numbers of its shuffles, and the seeds that were drawn for those without one.
No element is kept: the pass is begun anew and what was drawn is left out, which over
arrays in memory costs no element.

Law of the file: a position is written down only of a pass that comes again in the same
order, as far as the recipe can tell; functions and sources have to give the same each
time.
"""

from __future__ import annotations

import abc
import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, final

from zstrat.errors import InvalidArgumentError

from ._elements import Elements
from ._lineage import Opted, walk
from ._passes import Batching, MappedPass, Prefetched, SlicedPass
from ._several import Zipped
from ._shuffle import Shuffled

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ._leaves import Element
    from ._passes import Recipe


class CheckpointableIterator(abc.ABC):
    """An iterator whose place in its data can be saved and found again.

    A `zs.Checkpoint` that holds one does both. The dataset has to be made in the same
    way, and whatever functions and sources it has must give the same each time.
    """

    @abc.abstractmethod
    def get_state(self) -> dict[str, Any]:
        """The place, of numbers, texts and lists that JSON has.

        Raises:
            InvalidArgumentError: Another pass would have another order; says what to
                change.
        """

    @abc.abstractmethod
    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes to a place that `get_state` gave, of this iterator or of another one of
        the same dataset; what this one has drawn does not count.

        Raises:
            InvalidArgumentError: It is the place of another dataset; nothing changed.
            ClosedError: The iterator was closed.
        """

    @abc.abstractmethod
    def misfit(self, state: Mapping[str, Any]) -> str:
        """Why the iterator cannot go to that place; "" if it can."""


@final
@dataclass(frozen=True, slots=True)
class Position:
    """A place in the passes of a recipe.

    Args:
        drawn: How many elements come before it.
        orders: Of each shuffle its seed, if that was drawn, and the number of the pass.
        sizes: How many elements there are, wherever that changes between the end of the
            recipe and its sources: they tell that it is the same dataset. Empty: not
            to be compared.
    """

    drawn: int
    orders: tuple[tuple[int | None, tuple[int, ...]], ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, begun: Recipe, drawn: int) -> Position:
        """The place behind so many elements of a pass.

        Raises:
            InvalidArgumentError: Another pass may have another order.
        """
        if why := begun.chance():
            raise _unsaved(why)
        orders = tuple(
            (each.seed if each.is_drawn else None, each.order)
            for each in shuffles(begun)
        )
        return cls(drawn, orders, _sizes(begun))

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Position:
        """The inverse of `plain`.

        Raises:
            InvalidArgumentError: It is something else.
        """
        match plain:
            case {
                "drawn": int(drawn),
                "orders": [*orders],
                "sizes": [*sizes],
            } if drawn >= 0 and all(map(_is_order, orders)):
                listed = tuple((seed, tuple(order)) for seed, order in orders)
                return cls(drawn, listed, tuple(sizes))
        raise InvalidArgumentError(f"this is no place of an iterator: {plain!r:.200}")

    def of_all(self) -> Position:
        """The place for all processes, each of which reads a part.

        Raises:
            InvalidArgumentError: They have not one order.
        """
        if any(seed is not None for seed, _ in self.orders):
            raise _unsaved(
                "each process shuffles in an order of its own. Give shuffle the same "
                "seed in all of them: shuffle(buffer_size, seed=...)"
            )
        return replace(self, sizes=())

    @property
    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        orders = [[seed, list(order)] for seed, order in self.orders]
        return {"drawn": self.drawn, "orders": orders, "sizes": list(self.sizes)}

    def misfit(self, recipe: Recipe) -> str:
        """Why it is no place in the passes of the recipe; "" if it is one."""
        sizes = _sizes(recipe)
        if self.sizes and sizes != self.sizes:
            return (
                f"it was saved where the dataset has {_listed(self.sizes)} elements, "
                f"from its end to its source, and this one has {_listed(sizes)} (-1: "
                "without end, -2: not known)"
            )
        count = sum(1 for _ in shuffles(recipe))
        if count != len(self.orders):
            return (
                f"it was saved of a dataset with {len(self.orders)} shuffles, and this "
                f"one has {count}"
            )
        return ""

    def passed(self, recipe: Recipe) -> Recipe:
        """The whole pass, begun, in which this place is. Passes that are begun later
        have later numbers."""
        orders = iter(self.orders)

        def ordered(each: Recipe) -> Recipe:
            if isinstance(each, Shuffled):
                each = each.ordered(*next(orders))
            return each.of_each(ordered)

        # As if it were the first pass: to begin another would count it.
        return ordered(recipe.first())


def without_first(recipe: Recipe, count: int) -> Recipe:
    """The recipe without its first elements, of which as few as may be are made."""
    if not count:
        return recipe
    match recipe:
        case MappedPass():
            fewer = without_first(recipe.source, count)
            return replace(recipe, source=fewer, start=recipe.start + count)
        case Prefetched() | Opted():
            return recipe.of(without_first(recipe.source, count))
        case Batching():
            rows = count * recipe.batch_size
            return recipe.of(without_first(recipe.source, rows))
        case Zipped():
            return recipe.of_each(lambda source: without_first(source, count))
        case _:
            return SlicedPass(recipe, start=count)


@final
class DatasetIterator(Elements["Element"], CheckpointableIterator):
    """A pass over a `Dataset`, which may be an attribute of a `zs.Checkpoint`.

    Args:
        recipe: Not begun.
        name: Stands in errors.
    """

    def __init__(self, recipe: Recipe, name: str = "the dataset") -> None:
        self._recipe: Final = recipe
        self._begun = recipe.begun()
        self._drawn = 0
        super().__init__(self._begun.elements(), name)

    def __next__(self) -> Element:
        element = super().__next__()
        self._drawn += 1
        return element

    def unread(self, element: Element) -> None:
        super().unread(element)
        self._drawn -= 1

    def get_state(self) -> dict[str, Any]:
        return Position.of(self._begun, self._drawn).plain

    def set_state(self, state: Mapping[str, Any]) -> None:
        require_fit(self, state)
        position = Position.from_plain(state)
        self._begun = position.passed(self._recipe)
        self._drawn = position.drawn
        self.replace(without_first(self._begun, position.drawn).elements())

    def misfit(self, state: Mapping[str, Any]) -> str:
        return Position.from_plain(state).misfit(self._recipe)


def _unsaved(why: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        "the place of this iterator cannot be saved, as nobody could find it again in "
        f"another pass: {why}"
    )


def require_fit(iterator: CheckpointableIterator, state: Mapping[str, Any]) -> None:
    """Refuses the place of another dataset.

    Raises:
        InvalidArgumentError: It is one.
    """
    if why := iterator.misfit(state):
        raise InvalidArgumentError(
            f"this iterator cannot go to that place: {why}. Make the dataset as it "
            "was, or leave the iterator out and begin a new pass"
        )


def shuffles(recipe: Recipe) -> Iterator[Shuffled]:
    """All that shuffles in it, the last first."""
    return (each for each in walk(recipe) if isinstance(each, Shuffled))


def _sizes(recipe: Recipe) -> tuple[int, ...]:
    found = (each.size() for each in walk(recipe))
    return tuple(size for size, _ in itertools.groupby(found))


def _listed(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes))


def _is_order(plain: Any) -> bool:
    match plain:
        case [None | int(), [*numbers]]:
            return all(isinstance(number, int) for number in numbers)
    return False

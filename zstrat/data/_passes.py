"""The operations of a dataset, each as a value that can be passed over again and again.

A `Recipe` yields *items*; ``one`` makes the element of an item and ``many`` the batch
of several. Over arrays in memory an item is only a row number, so that shuffling,
repeating and sharding move integers, and a batch is one gather per array instead of
hundreds of slices and a stack. Whatever looks at elements (`MappedPass`, `Batched`)
makes them first; from there on an item is its own element.

The law: a pass is begun once, by `Recipe.begun`, in the thread that asks for it; it
shares nothing with other passes but the count that gave it its number, and is the same
whenever, and in whatever thread, its items are made. Nobody writes to an element that
it has yielded.
"""

from __future__ import annotations

import abc
import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Self, final

import numpy as np

from ._elements import ending
from ._prefetch import Prefetcher
from ._tree import mapped, owned, stacked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ._leaves import Element

INFINITE: Final = -1
UNKNOWN: Final = -2


class Recipe(abc.ABC):
    """How to pass over a dataset. Subclasses are final."""

    __slots__ = ()

    @abc.abstractmethod
    def items(self) -> Iterator[Any]:
        """The items of the pass that was begun, from the first."""

    @abc.abstractmethod
    def size(self) -> int:
        """Number of items of a pass, `INFINITE` or `UNKNOWN`."""

    def apart(self) -> Recipe:
        """Itself with a count of passes of its own, however often others pass over it:
        for those who have to agree about the numbers of their passes."""
        return self

    def begun(self) -> Recipe:
        """Itself as a pass that begins now: it has its number among the passes."""
        return self

    def again(self, number: int) -> Recipe:
        """Itself, begun, as the repeat of this number within its pass."""
        del number
        return self

    def one(self, item: Any) -> Element:
        return item

    def many(self, items: list[Any]) -> Element:
        return stacked(items)

    def elements(self) -> Iterator[Element]:
        """The elements of the pass that was begun, from the first."""
        with ending(self.items()) as items:
            for item in items:
                yield self.one(item)


class Derived(Recipe):
    """Made of one other recipe; has as many items, unless the subclass says another
    number."""

    __slots__ = ()

    source: Recipe

    def size(self) -> int:
        return self.source.size()

    def of(self, source: Recipe) -> Self:
        """The same of another recipe."""
        if source is self.source:
            return self
        changed: Self = replace(self, source=source)  # type: ignore[type-var]
        return changed

    def apart(self) -> Recipe:
        return self.of(self.source.apart())

    def begun(self) -> Recipe:
        return self.of(self.source.begun())

    def again(self, number: int) -> Recipe:
        return self.of(self.source.again(number))


class Reordered(Derived):
    """Chooses among the items of its source and leaves their meaning to it."""

    __slots__ = ()

    def one(self, item: Any) -> Element:
        return self.source.one(item)

    def many(self, items: list[Any]) -> Element:
        return self.source.many(items)


@final
@dataclass(frozen=True, slots=True)
class Rows(Recipe):
    """The rows of arrays in memory; an item is a row number."""

    arrays: Element
    rows: int

    def items(self) -> Iterator[int]:
        return iter(range(self.rows))

    def size(self) -> int:
        return self.rows

    def one(self, item: int) -> Element:
        return mapped(lambda array: array[item], self.arrays)

    def many(self, items: list[int]) -> Element:
        rows = np.array(items)
        return mapped(lambda array: array[rows], self.arrays)


@final
@dataclass(frozen=True, slots=True)
class Counted(Recipe):
    """Whole numbers; an item is a Python int, an element an int64."""

    numbers: range

    def items(self) -> Iterator[int]:
        return iter(self.numbers)

    def size(self) -> int:
        return len(self.numbers)

    def one(self, item: int) -> Element:
        return np.int64(item)

    def many(self, items: list[int]) -> Element:
        return np.array(items, np.int64)


@final
@dataclass(frozen=True, slots=True)
class Generated(Recipe):
    """What a callable's iterable yields; it is called anew for each pass."""

    generator: Callable[..., Any]
    args: tuple[Any, ...]

    def items(self) -> Iterator[Element]:
        with ending(iter(self.generator(*self.args))) as source:
            for element in source:
                yield owned(element)

    def size(self) -> int:
        return UNKNOWN


@final
@dataclass(frozen=True, slots=True)
class MappedPass(Derived):
    source: Recipe
    function: Callable[..., Any]

    def items(self) -> Iterator[Element]:
        with ending(self.source.elements()) as elements:
            for element in elements:
                # As in TF the components of a plain tuple are the arguments.
                args = element if type(element) is tuple else (element,)
                yield owned(self.function(*args))


@final
@dataclass(frozen=True, slots=True)
class Enumerated(Derived):
    source: Recipe
    start: int

    def items(self) -> Iterator[Element]:
        with ending(self.source.elements()) as elements:
            for number, element in enumerate(elements, self.start):
                yield np.int64(number), element


@final
@dataclass(frozen=True, slots=True)
class Batched(Derived):
    source: Recipe
    batch_size: int
    drop_remainder: bool

    def items(self) -> Iterator[Element]:
        with ending(self.source.items()) as items:
            while chunk := list(itertools.islice(items, self.batch_size)):
                if len(chunk) < self.batch_size and self.drop_remainder:
                    return
                yield self.source.many(chunk)

    def size(self) -> int:
        size = self.source.size()
        if size < 0:
            return size
        whole, rest = divmod(size, self.batch_size)
        return whole + (rest > 0 and not self.drop_remainder)


@final
@dataclass(frozen=True, slots=True)
class Repeated(Reordered):
    source: Recipe
    times: int | None

    def items(self) -> Iterator[Any]:
        passes = itertools.count() if self.times is None else range(self.times)
        for number in passes:
            empty = True
            with ending(self.source.again(number).items()) as items:
                for item in items:
                    empty = False
                    yield item
            if empty:
                return  # for ever nothing is nothing, not a hang

    def size(self) -> int:
        size = self.source.size()
        if size == 0 or self.times == 0:
            return 0
        if self.times is None or size == INFINITE:
            return INFINITE
        return size if size < 0 else size * self.times


@final
@dataclass(frozen=True, slots=True)
class SlicedPass(Reordered):
    """Items ``start``, ``start + step``, … before ``stop``: take, skip and shard."""

    source: Recipe
    start: int = 0
    stop: int | None = None
    step: int = 1

    def items(self) -> Iterator[Any]:
        with ending(self.source.items()) as items:
            yield from itertools.islice(items, self.start, self.stop, self.step)

    def size(self) -> int:
        size = self.source.size()
        if size == INFINITE and self.stop is not None:
            size = self.stop
        if size < 0:
            return size
        return len(range(size)[self.start : self.stop : self.step])


@final
@dataclass(frozen=True, slots=True)
class Prefetched(Derived):
    """Makes elements (not items) ahead: making them is the work to be hidden."""

    source: Recipe
    buffer_size: int

    def items(self) -> Iterator[Element]:
        return Prefetcher(self.source.elements(), self.buffer_size)

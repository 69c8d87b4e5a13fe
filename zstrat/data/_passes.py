"""The operations of a dataset, each as an immutable value that can be iterated many
times.

A `Recipe` yields *items*; `Recipe.element_of` makes the element of an item, and
`Recipe.batch_of` the batch of several items. For arrays in memory an item is only a row
number, so that shuffling, repeating and sharding move integers, and a batch is one
gather per array instead of hundreds of slices and a stack. Operations that need the
elements (`MappedPass`, `Batched`) make them first; after these operations an item is
the element itself.

The law: a *pass* (one iteration over a dataset) is begun once, by `Recipe.begin_pass`,
in the thread that asks for it. It shares nothing with other passes except the counter
from which it got its number, and it yields the same elements whenever, and in whatever
thread, they are made. An element that a pass has yielded is never written to.
"""

from __future__ import annotations

import abc
import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Self, final

import numpy as np

from ._elements import ending
from ._parallel import Prefetcher, in_order, numbered
from ._spec import TensorSpec, cast_to_signature, leaf_spec, row_spec, stacked_spec
from ._tree import gathered, mapped, owned, stacked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ._leaves import Element
    from ._spec import Look, Spec

# The numbers that `tf.data` has for the same.
INFINITE: Final = -1
UNKNOWN: Final = -2


class Recipe(abc.ABC):
    """The operations by which a dataset makes its elements. Subclasses are final."""

    __slots__ = ()

    @abc.abstractmethod
    def items(self) -> Iterator[Any]:
        """Yields the items of a begun pass, from the first one."""

    @abc.abstractmethod
    def size(self) -> int:
        """Returns the number of items of a pass, `INFINITE` or `UNKNOWN`."""

    def spec(self, look: Look) -> Spec:
        """Describes an element without a pass; a recipe that does not know its spec
        calls ``look``, which may draw an element."""
        return look(self)

    def shard(self, parts: int, index: int) -> Recipe:
        """Returns shard ``index`` of ``parts``: every ``parts``-th item, unless the
        source is better divided in another way, as a file into row groups."""
        return SlicedPass(self, start=index, step=parts)

    def map_sources(self, change: Callable[[Recipe], Recipe]) -> Recipe:
        """Returns the recipe with each of its sources replaced by ``change(source)``; a
        recipe without sources returns itself."""
        del change
        return self

    def with_own_count(self) -> Recipe:
        """Returns the recipe with a separate counter of passes, which other readers of
        the dataset do not advance: processes that share a dataset out have to agree
        about the numbers of their passes."""
        return self.map_sources(lambda source: source.with_own_count())

    def first_pass(self) -> Recipe:
        """Returns the recipe as a begun pass, as if it had never been iterated
        before."""
        return self.map_sources(lambda source: source.first_pass())

    def begin_pass(self) -> Recipe:
        """Returns the recipe as a pass that begins now, with the next pass number."""
        return self.map_sources(lambda source: source.begin_pass())

    def as_repeat(self, number: int) -> Recipe:
        """Returns the begun recipe as its repeat ``number`` within a pass, for the
        operation repeat."""
        return self.map_sources(lambda source: source.as_repeat(number))

    def without_first(self, count: int) -> Recipe:
        """Returns the begun recipe without its first ``count`` elements, and makes as
        few of these elements as possible. The result cannot be begun or repeated again.
        """
        return SlicedPass(self, start=count) if count else self

    def why_order_varies(self) -> str:
        """Returns why two passes with the same numbers may have different orders, as
        text for the user; "" if the recipe shows no reason."""
        return ""

    def element_of(self, item: Any) -> Element:
        """Makes the element of an item; for most recipes the item is the element."""
        return item

    def batch_of(self, items: list[Any]) -> Element:
        """Makes one batch from several items: makes their elements, and stacks them."""
        return stacked(items)

    def elements(self) -> Iterator[Element]:
        """Yields the elements of a begun pass, from the first one."""
        with ending(self.items()) as items:
            for item in items:
                yield self.element_of(item)


class Derived(Recipe):
    """A recipe made of one other recipe. It has as many items as that one, unless the
    subclass says otherwise."""

    __slots__ = ()

    source: Recipe

    def size(self) -> int:
        return self.source.size()

    def why_order_varies(self) -> str:
        return self.source.why_order_varies()

    def with_source(self, source: Recipe) -> Self:
        """Returns this operation with another source."""
        # Itself where nothing changed: a `Cached` of it keeps its elements by that.
        if source is self.source:
            return self
        changed: Self = replace(self, source=source)  # type: ignore[type-var]
        return changed

    def map_sources(self, change: Callable[[Recipe], Recipe]) -> Self:
        return self.with_source(change(self.source))


class PassThrough(Derived):
    """A recipe whose elements are those of its source, unchanged."""

    __slots__ = ()

    def spec(self, look: Look) -> Spec:
        return self.source.spec(look)


class Reordered(PassThrough):
    """A recipe that yields some of its source's items; the source makes their
    elements."""

    __slots__ = ()

    def element_of(self, item: Any) -> Element:
        return self.source.element_of(item)

    def batch_of(self, items: list[Any]) -> Element:
        return self.source.batch_of(items)


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

    def spec(self, look: Look) -> Spec:
        del look
        return row_spec(mapped(leaf_spec, self.arrays))

    def element_of(self, item: int) -> Element:
        return mapped(lambda array: array[item], self.arrays)

    def batch_of(self, items: list[int]) -> Element:
        return gathered(self.arrays, np.array(items))


@final
@dataclass(frozen=True, slots=True)
class Single(Recipe):
    """One element, given in advance."""

    element: Element

    def items(self) -> Iterator[Element]:
        yield self.element

    def size(self) -> int:
        return 1

    def spec(self, look: Look) -> Spec:
        del look
        return mapped(leaf_spec, self.element)


@final
@dataclass(frozen=True, slots=True)
class Counted(Recipe):
    """The numbers of a range; an item is a Python int, an element an int64."""

    numbers: range

    def items(self) -> Iterator[int]:
        return iter(self.numbers)

    def size(self) -> int:
        return len(self.numbers)

    def spec(self, look: Look) -> Spec:
        del look
        return TensorSpec((), np.int64)

    def element_of(self, item: int) -> Element:
        return np.int64(item)

    def batch_of(self, items: list[int]) -> Element:
        return np.array(items, np.int64)


@final
@dataclass(frozen=True, slots=True)
class Generated(Recipe):
    """A recipe whose elements come from an iterable that a callable returns; each pass
    calls it again."""

    generator: Callable[..., Any]
    args: tuple[Any, ...]
    signature: Spec = None

    def items(self) -> Iterator[Element]:
        with ending(iter(self.generator(*self.args))) as source:
            for number, element in enumerate(source):
                # Before it is fitted: a generator may fill one buffer again and again.
                fresh = owned(element)
                if self.signature is not None:
                    fresh = cast_to_signature(fresh, self.signature, number)
                yield fresh

    def size(self) -> int:
        return UNKNOWN

    def spec(self, look: Look) -> Spec:
        return look(self) if self.signature is None else self.signature


@final
@dataclass(frozen=True, slots=True)
class MappedPass(Derived):
    """Applies a function to each element.

    Args:
        threads: How many elements are made at a time; 0: the reader makes them, one by
            one.
        in_order: The results are yielded in the order of the elements, not as they are
            made.
        start: The number of the first element, for messages.
    """

    source: Recipe
    function: Callable[..., Any]
    threads: int = 0
    in_order: bool = True
    start: int = 0

    def why_order_varies(self) -> str:
        if self.threads and not self.in_order:
            return (
                "map(deterministic=False) gives elements as they are made. Leave "
                "`deterministic` out"
            )
        return self.source.why_order_varies()

    def without_first(self, count: int) -> Recipe:
        fewer = self.source.without_first(count)
        return replace(self, source=fewer, start=self.start + count)

    def items(self) -> Iterator[Element]:
        made = numbered(self._made, "map", self.function)
        elements = self.source.elements()
        if self.threads:
            return in_order(elements, made, self.threads, self.in_order, self.start)
        return self._each(elements, made)

    def _each(
        self, source: Iterator[Element], made: Callable[[int, Element], Element]
    ) -> Iterator[Element]:
        with ending(source) as elements:
            for number, element in enumerate(elements, self.start):
                yield made(number, element)

    def _made(self, element: Element) -> Element:
        made = self.function(*arguments(element))
        # As in TensorFlow: several values that are returned, not one to be stacked.
        return owned(tuple(made) if type(made) is list else made)


@final
@dataclass(frozen=True, slots=True)
class Filtered(Reordered):
    """The items of the source for whose elements a function returns True."""

    source: Recipe
    predicate: Callable[..., Any]

    def items(self) -> Iterator[Any]:
        judged = numbered(self._judged, "filter", self.predicate)
        # Items, not elements, go on: a batch of what was kept is still one gather.
        with ending(self.source.items()) as items:
            for number, item in enumerate(items):
                if judged(number, self.source.element_of(item)):
                    yield item

    def size(self) -> int:
        return UNKNOWN

    def _judged(self, element: Element) -> bool:
        answer = self.predicate(*arguments(element))
        # Nothing else, though Python has a truth of it: an array of several, or a None
        # of a function without `return`, is a mistake that would drop elements.
        is_bool = isinstance(answer, bool | np.bool_)
        if not is_bool:
            array = np.asarray(answer)
            is_bool = array.dtype == np.bool_ and array.ndim == 0
        if not is_bool:
            raise TypeError(
                "Invalid `predicate`. `predicate` must return one bool, but it "
                f"returned {answer!r:.100}"
            )
        return bool(answer)


@final
@dataclass(frozen=True, slots=True)
class Enumerated(Derived):
    source: Recipe
    start: int

    def without_first(self, count: int) -> Recipe:
        fewer = self.source.without_first(count)
        return replace(self, source=fewer, start=self.start + count)

    def items(self) -> Iterator[Element]:
        with ending(self.source.elements()) as elements:
            for number, element in enumerate(elements, self.start):
                yield np.int64(number), element

    def spec(self, look: Look) -> Spec:
        source = self.source.spec(look)
        return None if source is None else (TensorSpec((), np.int64), source)


class Batching(Derived):
    """Groups a fixed number of items into a batch. Subclasses are final, and say how a
    batch is made."""

    __slots__ = ()

    batch_size: int
    drop_remainder: bool

    def items(self) -> Iterator[Element]:
        with ending(self.source.items()) as items:
            while chunk := list(itertools.islice(items, self.batch_size)):
                # Only the last chunk is short; the source is closed by `ending`.
                if len(chunk) < self.batch_size and self.drop_remainder:
                    return
                yield self.join_batch(chunk)

    def without_first(self, count: int) -> Recipe:
        return self.with_source(self.source.without_first(count * self.batch_size))

    @abc.abstractmethod
    def join_batch(self, chunk: list[Any]) -> Element:
        """Makes a batch of these items of the source."""

    @property
    def rows(self) -> int | None:
        """The number of rows of every batch, as far as it is promised; None:
        unknown."""
        return self.batch_size if self.drop_remainder else None

    def size(self) -> int:
        size = self.source.size()
        if size < 0:  # infinite or unknown, as its source
            return size
        whole, rest = divmod(size, self.batch_size)
        return whole + (rest > 0 and not self.drop_remainder)


@final
@dataclass(frozen=True, slots=True)
class Batched(Batching):
    """Stacks elements that all have the same shapes."""

    source: Recipe
    batch_size: int
    drop_remainder: bool

    def join_batch(self, chunk: list[Any]) -> Element:
        return self.source.batch_of(chunk)

    def spec(self, look: Look) -> Spec:
        return stacked_spec(self.source.spec(look), self.rows)


@final
@dataclass(frozen=True, slots=True)
class Repeated(Reordered):
    """Repeats its source.

    Args:
        start: The number of the first repeat.
        missing: How many items of the first repeat are left out.
    """

    source: Recipe
    times: int | None
    start: int = 0
    missing: int = 0

    def items(self) -> Iterator[Any]:
        missing = self.missing
        for number in itertools.count(self.start):
            if self.times is not None and number >= self.times:
                return
            empty = True
            source = self.source.as_repeat(number)
            if missing:  # of the first repeat here alone, which was partly read
                source, missing = source.without_first(missing), 0
            with ending(source.items()) as items:
                for item in items:
                    empty = False
                    yield item
            if empty:
                return  # an empty dataset without end is empty, and does not hang

    def without_first(self, count: int) -> Recipe:
        size = self.source.size()
        # Whole repeats are skipped by their number, if it is known how long one is.
        if size <= 0:
            return Reordered.without_first(self, count)
        start, missing = divmod(count, size)
        return replace(self, start=start, missing=missing)

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
    """The items ``start``, ``start + step``, … before ``stop``, for the operations
    take, skip and shard."""

    source: Recipe
    start: int = 0
    stop: int | None = None
    step: int = 1

    def items(self) -> Iterator[Any]:
        with ending(self.source.items()) as items:
            yield from itertools.islice(items, self.start, self.stop, self.step)

    def without_first(self, count: int) -> Recipe:
        # Items are skipped at the source, where that may cost nothing.
        missing = self.start + count * self.step
        stop = None if self.stop is None else max(0, self.stop - missing)
        return SlicedPass(self.source.without_first(missing), 0, stop, self.step)

    def size(self) -> int:
        size = self.source.size()
        if size == INFINITE and self.stop is not None:
            size = self.stop  # an endless source has as many as are taken
        if size < 0:
            return size
        return len(range(size)[self.start : self.stop : self.step])


@final
@dataclass(frozen=True, slots=True)
class Prefetched(PassThrough):
    """Makes elements (not items) in advance, because making them is the work to be
    hidden."""

    source: Recipe
    buffer_size: int

    def items(self) -> Iterator[Element]:
        return Prefetcher(self.source.elements(), self.buffer_size)

    # Before the thread, not after it: what is skipped is not to be made first.
    def without_first(self, count: int) -> Recipe:
        return self.with_source(self.source.without_first(count))


def arguments(element: Element) -> tuple[Any, ...]:
    """Returns the arguments for a mapped function: the components of a plain tuple, as
    in TF, or the element."""
    # A named tuple is one argument: the function reads its fields by their names.
    return element if type(element) is tuple else (element,)

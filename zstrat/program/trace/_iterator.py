"""What ``next(iterator)`` meets in a step function.

While a step is traced, a draw is recorded and its element is abstract; in an eager step
and outside of steps it is the element itself. Elements are pytrees of numpy arrays.

Law of the file: elements that were drawn and given back come again first, in the order
of the first drawing, and nobody has written to them meanwhile. One thread uses a
`StepIterator` at a time.
"""

from __future__ import annotations

import abc
from collections import deque
from dataclasses import dataclass, field
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Generic,
    Self,
    TypeVar,
    final,
)

import jax
import numpy as np

from zstrat.data import ClosingIterator, Elements, is_steady, kind_of, native, own
from zstrat.errors import OutOfRangeError
from zstrat.variables import is_weak, recorder

from . import joined

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

    from .joined import TreeDef


class Draws:
    """Real or abstract elements for one call: drawn, used, given back."""

    def __init__(self, iterators: Sequence[StepIterator]) -> None:
        self.iterators = iterators
        """Those among the arguments, then those that the body captured."""
        self._drawn: list[tuple[int, Any, Element]] = []
        self._used = 0
        self.is_spent = False
        """Whether what was made of them is kept: then nothing is given back."""

    @property
    def elements(self) -> list[Element]:
        """What was drawn, in order."""
        return [element for _, _, element in self._drawn]

    def draw(self, ordinal: int) -> Element:
        """One more element of the ``ordinal``-th iterator.

        Raises:
            OutOfRangeError: There is none; then all others were given back.
            TypeError: It is no pytree of arrays; then all were given back.
        """
        iterator = self.iterators[ordinal]
        if iterator.is_abstract:
            raw: Any = iterator.element_spec
        else:
            try:
                raw = iterator.draw()
            except BaseException:  # to the caller; the others are drawn again
                self.unread()
                raise
        try:
            element = Element(raw)
        except BaseException:  # to the caller; the next call draws the same
            if not iterator.is_abstract:
                iterator.unread(raw)
            self.unread()
            raise
        self._drawn.append((ordinal, raw, element))
        return element

    def require_real(self) -> None:
        """Refuses elements that are only described.

        Raises:
            RuntimeError: They are on a worker.
        """
        for iterator in self.iterators:
            if iterator._source is None:
                iterator.draw()

    def match(self, ordinals: Sequence[int]) -> list[Element]:
        """Draws exactly these, keeping what was drawn so already. Raises as `draw`."""
        if not ordinals and not self._drawn:
            return []  # as most steps, whose batch is an argument
        kept = 0
        for (drawn, _, _), wanted in zip(self._drawn, ordinals, strict=False):
            if drawn != wanted:
                break
            kept += 1
        self._give_back(kept)
        for ordinal in ordinals[kept:]:
            self.draw(ordinal)
        return self.elements

    def supply(self, ordinal: int, iterator: StepIterator) -> Element:
        """Gives a trace the elements that were drawn already, then new ones."""
        if ordinal == len(self.iterators):  # the body captured it
            self.iterators = [*self.iterators, iterator]
        if self._used < len(self._drawn):
            known, _, element = self._drawn[self._used]
            if known == ordinal:
                self._used += 1
                return element
            # The body draws in another order for these shapes: begin anew.
            self._give_back(self._used)
        self._used += 1
        return self.draw(ordinal)

    def begin_again(self) -> None:
        """The body is traced once more: it is given the same elements."""
        self._used = 0

    def keep_used(self) -> None:
        """Gives back what the trace did not use."""
        self._give_back(self._used)

    def unread(self) -> None:
        """Gives everything back that is not spent."""
        if not self.is_spent:
            self._give_back(0)

    def _give_back(self, start: int) -> None:
        while len(self._drawn) > start:
            ordinal, raw, _ = self._drawn.pop()
            if not self.iterators[ordinal].is_abstract:
                self.iterators[ordinal].unread(raw)


T = TypeVar("T")

_FIXED: Final = (jax.Array, np.generic, int, float, complex, str, bytes)
"""Leaves that cannot be written to."""


@final
@dataclass(frozen=True, slots=True)
class Optional(Generic[T]):
    """An element, or none where the data have ended."""

    elements: tuple[T, ...]
    require_known: Callable[[], None] | None = field(
        default=None, repr=False, compare=False
    )
    """Called before it is told whether there was an element."""

    def has_value(self) -> bool:
        """Whether there was an element. A branch on it goes by the data, which a trace
        cannot: a step that is called here then runs in Python; see `zs.function`.

        Raises:
            LoopsOverData: In a step that is traced on a worker.
        """
        if self.require_known is not None:
            self.require_known()
        return bool(self.elements)

    def get_value(self) -> T:
        """The element.

        Raises:
            ValueError: There was none; ask `has_value` first.
        """
        if not self.elements:
            raise ValueError(
                "Optional has no value: the data have ended; ask has_value() first"
            )
        return self.elements[0]


class StepIterator:
    """The iterator of a dataset, as a step function takes it.

    Args:
        source: The elements; None while a step is traced for its shapes alone.
        element_spec: Pytree of ``jax.ShapeDtypeStruct`` (or of arrays) that describes
            an element; needed if there is no source.
        name: Stands in the errors.
        steady: The source never writes to an element that it gave, so none need be
            copied; see `zstrat.data.is_steady`, which is asked where it is not said.
    """

    is_resource: bool = False
    """Whether it was built on a worker under a number, or stands for one: then it is
    the same object as long as the step is, which may capture it."""

    def __init__(
        self,
        source: Iterable[Any] | None,
        element_spec: Any = None,
        *,
        name: str = "the dataset",
        steady: bool = False,
    ) -> None:
        self._steady = steady or is_steady(source)
        self._ends_loops = False
        """Whether in a step, too, ``next()`` ends with StopIteration: of an iterator
        that was made there."""
        self._source = None if source is None else iter(source)
        self._element_spec: Final = element_spec
        self.name: Final = name
        self._ready: Final[deque[Any]] = deque()
        self._drawn = 0
        """Elements that were drawn and not given back."""

    @property
    def element_spec(self) -> Any:
        """The description of an element that was given, None if none was."""
        return self._element_spec

    @property
    def is_abstract(self) -> bool:
        """Whether there are no elements behind it, only their description."""
        return self._source is None

    def __iter__(self) -> Iterator[Any]:
        """What a ``for`` loop takes elements from: the iterator itself, or in a step
        another one, whose end is that of a loop."""
        return self if recorder.get() is None else ElementLoop(self)

    def __next__(self) -> Any:
        """The next element.

        Raises:
            StopIteration: There are no more. In a step: OutOfRangeError, as `get_next`
                raises it everywhere.
            RuntimeError: In a step, inside a function that jax transforms.
        """
        try:
            return self.get_next()
        except OutOfRangeError:
            if self._ends_loops or recorder.get() is None:
                raise StopIteration from None
            raise

    def get_next(self) -> Any:
        """The next element, as ``next()``."""
        current = recorder.get()
        return self.draw() if current is None else current.draw(self)

    def get_next_as_optional(self) -> Optional[Any]:
        """The next element, or that there is none.

        In a step that is traced, `Optional.has_value` cannot tell; see there.
        """
        try:
            return Optional((self.get_next(),), self._require_known_end)
        except OutOfRangeError:
            self._require_known_end()
            return Optional(())

    def draw(self) -> Any:
        """The next real element, whatever is being traced.

        Raises:
            OutOfRangeError: There are no more.
        """
        if self._ready:
            self._drawn += 1
            return self._ready.popleft()
        if self._source is None:
            raise RuntimeError(
                f"the iterator of {self.name} has elements only on a worker: pass it "
                "as an argument to a scheduled zs.function"
            )
        try:
            element = next(self._source)
        except StopIteration:
            raise OutOfRangeError(
                f"End of sequence: {self.name} is exhausted"
            ) from None
        self._drawn += 1
        return element if self._steady else joined.mapped(kept, element)

    def unread(self, element: Any) -> None:
        """Gives back what was drawn last; of several, the last one first."""
        self._drawn -= 1
        if isinstance(self._source, Elements):  # its place may be saved
            self._source.unread(element)
        else:
            self._ready.appendleft(element)

    def go_on(self, source: Iterator[Any], drawn: int) -> None:
        """Goes on with another source, before which so many elements were drawn."""
        self._source, self._drawn = source, drawn
        self._ready.clear()

    def close(self) -> None:
        """Ends the pass and closes its source, if it can be closed."""
        if isinstance(self._source, ClosingIterator):
            self._source.close()

    def _require_known_end(self) -> None:
        require_untraced(self.name)


def require_untraced(name: str) -> None:
    """Called before Python goes by whether the data of this name have ended.

    Raises:
        LoopsOverData: A step is being traced, which cannot tell.
    """
    current = recorder.get()
    if current is not None:
        current.require_known_end(name)


@final
class ElementLoop:
    """The elements of an iterator, as a ``for`` loop in a step takes them.

    Raises (while iterating):
        LoopsOverData: The step is being traced: its end is not known then.
    """

    def __init__(self, iterator: StepIterator) -> None:
        self._iterator = iterator

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        self._iterator._require_known_end()
        try:
            return self._iterator.get_next()
        except OutOfRangeError:
            raise StopIteration from None


def drawn(iterator: Iterator[Any]) -> Any:
    """The next element for code that takes one, not for a loop that ends with them.

    Raises:
        OutOfRangeError: A `StepIterator`, also one that ends loops, has no more.
        StopIteration: Another iterator has no more.
    """
    if isinstance(iterator, StepIterator):
        return iterator.get_next()
    return next(iterator)


class StepDataset(abc.ABC):
    """A dataset whose iterators are step iterators already."""

    @abc.abstractmethod
    def __iter__(self) -> StepIterator: ...


class Element:
    """One element, cut: ``leaves`` are arrays, ``key`` names structure and types."""

    __slots__ = ("key", "leaves", "treedef")

    def __init__(self, element: Any) -> None:
        leaves: list[Any]
        leaves, treedef = joined.flatten(element)
        for number, leaf in enumerate(leaves):
            if type(leaf) is np.ndarray:
                leaves[number] = native(leaf)
            elif not _is_strong(leaf):
                leaves[number] = _array(leaf)
        self.leaves = leaves
        self.treedef: TreeDef = treedef
        self.key: Hashable = (
            treedef,
            tuple([(leaf.shape, leaf.dtype) for leaf in leaves]),
        )


def _is_strong(leaf: Any) -> bool:
    """Whether it is a jax array, and of its dtype in any arithmetic: ``key`` does not
    tell a weak one."""
    return isinstance(leaf, jax.Array) and not is_weak(leaf)


def kept(leaf: Any) -> Any:
    """The leaf as it is now: its source may fill the same buffer again."""
    if isinstance(leaf, _FIXED):
        return leaf
    array = np.asarray(leaf)  # of another library's array it may be the very memory
    # Of text, objects and dates only numpy's own: others are no arrays to a step.
    return own(leaf if array.dtype.kind in "OSUmM" else array)


def _array(leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    array = np.asarray(leaf)
    if array.dtype.kind in "OSUmM":
        raise TypeError(
            f"an element of the dataset contains {kind_of(array)} ({leaf!r:.80}), and "
            "a step draws arrays of numbers or booleans: map the dataset first, text "
            "to the indices of its words, say, or leave the component out"
        )
    return native(array)

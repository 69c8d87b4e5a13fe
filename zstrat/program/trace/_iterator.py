"""`StepIterator`: iterators of datasets as arguments of step functions.

While a step is traced, a draw is recorded and its element is abstract; in eager steps
and outside of steps it is the real element. Elements are pytrees of numpy arrays.

Law of the file: elements that were drawn and given back are drawn again first, in their
order, and were not written to meanwhile. One thread uses a `StepIterator` at a time.
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
    """The elements, real or abstract, that one call draws, uses and may give back to
    their iterators."""

    def __init__(self, iterators: Sequence[StepIterator]) -> None:
        self.iterators = iterators
        """The iterators among the arguments, followed by captured ones."""
        self._drawn: list[tuple[int, Any, Element]] = []
        self._used = 0
        self.is_spent = False
        """Whether the results that were computed from the elements are stored, so that
        no element is given back."""

    @property
    def elements(self) -> list[Element]:
        """The drawn elements, in order."""
        return [element for _, _, element in self._drawn]

    def draw(self, ordinal: int) -> Element:
        """Draws from iterator number ``ordinal``.

        Raises:
            OutOfRangeError: The iterator has no more elements; all other elements were
                given back.
            TypeError: The element is not a pytree of arrays; all elements were given
                back.
        """
        iterator = self.iterators[ordinal]
        # A coordinator knows only what elements look like; nothing is drawn there.
        if iterator.is_abstract:
            raw: Any = iterator.element_spec
        else:
            try:
                raw = iterator.draw()
            except BaseException:  # to the caller; the next call draws the others
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
        """Refuses iterators that have only a description of their elements.

        Raises:
            RuntimeError: The elements are on a worker.
        """
        for iterator in self.iterators:
            # `draw` then raises the error that says where the elements are.
            if iterator._source is None:
                iterator.draw()

    def match(self, ordinals: Sequence[int]) -> list[Element]:
        """Draws from exactly these iterators, in order; keeps elements that were drawn
        already from the same iterators.

        Raises as `draw`.
        """
        if not ordinals and not self._drawn:
            return []  # as in most steps, whose batch is an argument
        kept = 0
        for (drawn, _, _), wanted in zip(self._drawn, ordinals, strict=False):
            if drawn != wanted:
                break
            kept += 1
        # What was drawn in vain goes back before more is drawn, so the order stays.
        self._give_back(kept)
        for ordinal in ordinals[kept:]:
            self.draw(ordinal)
        return self.elements

    def supply(self, ordinal: int, iterator: StepIterator) -> Element:
        """Returns the next element for a trace: first those that were drawn already,
        then new ones."""
        if ordinal == len(self.iterators):  # the body captured it
            self.iterators = [*self.iterators, iterator]
        if self._used < len(self._drawn):
            known, _, element = self._drawn[self._used]
            if known == ordinal:
                self._used += 1
                return element
            # The body draws in another order for these shapes.
            self._give_back(self._used)
        self._used += 1
        return self.draw(ordinal)

    def begin_again(self) -> None:
        """Starts again with the first drawn element, for another trace of the body."""
        self._used = 0

    def keep_used(self) -> None:
        """Gives back the elements that were drawn before and that the trace has not
        used."""
        self._give_back(self._used)

    def unread(self) -> None:
        """Gives all elements back, unless their results are stored."""
        if not self.is_spent:
            self._give_back(0)

    def _give_back(self, start: int) -> None:
        while len(self._drawn) > start:
            # The last one first, as each is put in front of what is left.
            ordinal, raw, _ = self._drawn.pop()
            if not self.iterators[ordinal].is_abstract:
                self.iterators[ordinal].unread(raw)


T = TypeVar("T")

_FIXED: Final = (jax.Array, np.generic, int, float, complex, str, bytes)
"""Types of leaves that cannot be written to."""


@final
@dataclass(frozen=True, slots=True)
class Optional(Generic[T]):
    """An element, or nothing at the end of the data."""

    elements: tuple[T, ...]
    require_known: Callable[[], None] | None = field(
        default=None, repr=False, compare=False
    )
    """A function that is called before `has_value` answers, and may refuse; None:
    none."""

    def has_value(self) -> bool:
        """Returns whether there was an element.

        A trace cannot branch on the answer: a step that is called in this process then
        runs in Python; see `zs.function`.

        Raises:
            LoopsOverData: In a step that is traced on a worker.
        """
        if self.require_known is not None:
            self.require_known()
        return bool(self.elements)

    def get_value(self) -> T:
        """Returns the element.

        Raises:
            ValueError: There was no element; check `has_value` first.
        """
        if not self.elements:
            raise ValueError(
                "this Optional has no value, because the data have ended: ask "
                "has_value() first"
            )
        return self.elements[0]


class StepIterator:
    """The iterator of a dataset, as an argument of a step function.

    Args:
        source: The elements; None while a step is traced only for its shapes.
        element_spec: Pytree of ``jax.ShapeDtypeStruct`` (or of arrays) that describes
            an element; needed if there is no source.
        name: Name of the dataset in errors.
        steady: The source never writes to an element after it has returned the element,
            so that elements need not be copied. Default: `zstrat.data.is_steady`
            decides.
    """

    is_resource: bool = False
    """Whether a worker has built the iterator under a number, or this object represents
    such an iterator: then it is always the same object, and a step may capture it."""

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
        """Whether ``next()`` raises StopIteration in steps, too, because the iterator
        was made in the step."""
        self._source = None if source is None else iter(source)
        self._element_spec: Final = element_spec
        self.name: Final = name
        self._ready: Final[deque[Any]] = deque()
        self._drawn = 0
        """Number of elements that were drawn and not given back."""

    @property
    def element_spec(self) -> Any:
        """The description of an element, as given to the constructor."""
        return self._element_spec

    @property
    def is_abstract(self) -> bool:
        """Whether the iterator has no elements, only their description."""
        return self._source is None

    def __iter__(self) -> Iterator[Any]:
        """Returns an iterator for a ``for`` loop: outside of steps this object, in a
        step an `ElementLoop`."""
        return self if recorder.get() is None else ElementLoop(self)

    def __next__(self) -> Any:
        """Draws the next element.

        Raises:
            StopIteration: There are no more elements, outside of steps.
            OutOfRangeError: There are no more elements, in a step.
            RuntimeError: In a step, inside a function that jax transforms.
        """
        try:
            return self.get_next()
        except OutOfRangeError:
            if self._ends_loops or recorder.get() is None:
                raise StopIteration from None
            raise

    def get_next(self) -> Any:
        """Draws the next element; raises OutOfRangeError at the end of the data."""
        current = recorder.get()
        # In a step the recorder decides: an abstract element in a trace, a real one in
        # eager steps.
        return self.draw() if current is None else current.draw(self)

    def get_next_as_optional(self) -> Optional[Any]:
        """Draws the next element, if there is one; see `Optional.has_value`."""
        try:
            return Optional((self.get_next(),), self._require_known_end)
        except OutOfRangeError:
            self._require_known_end()
            return Optional(())

    def draw(self) -> Any:
        """Draws the next real element, also while a step is traced.

        Raises:
            OutOfRangeError: There are no more elements.
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
        """Gives back the element that was drawn last. Of several elements, give back
        the last one first."""
        self._drawn -= 1
        if isinstance(self._source, Elements):  # checkpoints may save its position
            self._source.unread(element)
        else:
            self._ready.appendleft(element)

    def go_on(self, source: Iterator[Any], drawn: int) -> None:
        """Continues with another source, at the position after ``drawn`` elements."""
        self._source, self._drawn = source, drawn
        self._ready.clear()

    def close(self) -> None:
        """Ends the pass; closes the source if it can be closed."""
        if isinstance(self._source, ClosingIterator):
            self._source.close()

    def _require_known_end(self) -> None:
        require_untraced(self.name)


def require_untraced(name: str) -> None:
    """Refuses to branch on the end of the data called ``name``, if a step is being
    traced.

    Raises:
        LoopsOverData: A step is being traced; the end of the data is then unknown.
    """
    current = recorder.get()
    if current is not None:
        current.require_known_end(name)


@final
class ElementLoop:
    """The iterator of a ``for`` loop in a step.

    Raises (while iterating):
        LoopsOverData: The step is being traced; the end of the data is then unknown.
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
    """Draws one element, for code that is not a loop.

    Raises:
        OutOfRangeError: A `StepIterator` has no more elements, also one that ends
            loops.
        StopIteration: Another iterator has no more elements.
    """
    if isinstance(iterator, StepIterator):
        return iterator.get_next()
    return next(iterator)


class StepDataset(abc.ABC):
    """A dataset whose iterators are step iterators."""

    @abc.abstractmethod
    def __iter__(self) -> StepIterator: ...


class Element:
    """One drawn element: ``leaves`` are arrays, ``key`` identifies structure and
    types."""

    __slots__ = ("key", "leaves", "treedef")

    def __init__(self, element: Any) -> None:
        leaves: list[Any]
        # A value per replica counts as one array, as in the program.
        leaves, treedef = joined.flatten(element)
        for number, leaf in enumerate(leaves):
            if type(leaf) is np.ndarray:
                leaves[number] = native(leaf)
            elif not isinstance(leaf, jax.Array) or is_weak(leaf):
                # ``key`` does not show a weak type.
                leaves[number] = _array(leaf)
        self.leaves = leaves
        self.treedef: TreeDef = treedef
        self.key: Hashable = (
            treedef,
            tuple([(leaf.shape, leaf.dtype) for leaf in leaves]),
        )


def kept(leaf: Any) -> Any:
    """Returns the leaf, or a copy if its source may write to the same buffer again."""
    if isinstance(leaf, _FIXED):
        return leaf
    array = np.asarray(leaf)  # may share the memory of another library's array
    # Text, objects and dates only if they are arrays of numpy.
    return own(leaf if array.dtype.kind in "OSUmM" else array)


def _array(leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    array = np.asarray(leaf)
    if array.dtype.kind in "OSUmM":
        raise TypeError(
            f"an element of the dataset contains {kind_of(array)} ({leaf!r:.80}), but "
            "a step draws arrays of numbers or booleans: map the dataset first (text "
            "to indices of words, say), or remove the component"
        )
    return native(array)

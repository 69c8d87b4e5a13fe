"""The datasets that a function makes of each element, read in turn.

The order is TF's. There are ``cycle_length`` places; the next place gives up to
``block_length`` elements, and then the one after it is next. A place whose dataset has
ended is passed over, and filled when its turn comes again, while there is input.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, final, runtime_checkable

from ._elements import ending
from ._parallel import numbered
from ._passes import UNKNOWN, Derived, Recipe, arguments
from ._prefetch import Prefetcher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ._leaves import Element


@runtime_checkable
class Made(Protocol):
    """A dataset."""

    @property
    def recipe(self) -> Recipe: ...


@final
@dataclass(frozen=True, slots=True)
class Interleaved(Derived):
    """Elements of the datasets that a function makes.

    Args:
        threads: So many places read their datasets ahead, a block each; the order
            stays the same.
    """

    source: Recipe
    function: Callable[..., Any]
    cycle_length: int
    block_length: int
    threads: int = 0

    def items(self) -> Iterator[Element]:
        opened = numbered(self._opened, "interleave", self.function)
        with contextlib.ExitStack() as stack, ending(self.source.elements()) as inputs:
            places = [contextlib.ExitStack() for _ in range(self.cycle_length)]
            for place in places:
                stack.enter_context(place)
            reading: list[Iterator[Element] | None] = [None] * self.cycle_length
            numbered_inputs = enumerate(inputs)
            for at in itertools.cycle(range(self.cycle_length)):
                current = reading[at]
                if current is None:
                    number, element = next(numbered_inputs, (None, None))
                    if number is None:
                        if all(each is None for each in reading):
                            return
                        continue
                    # Its number tells the orders of shuffles apart: a count that this
                    # advanced would make them depend on how far other passes are.
                    inner = opened(number, element).again(number)
                    current = self._ahead(inner.elements(), at)
                    reading[at] = current
                    places[at].enter_context(ending(current))
                given = 0
                for element in itertools.islice(current, self.block_length):
                    given += 1
                    yield element
                if given < self.block_length:
                    reading[at] = None
                    places[at].close()

    def size(self) -> int:
        return UNKNOWN

    def _ahead(self, elements: Iterator[Element], place: int) -> Iterator[Element]:
        if place >= self.threads:
            return elements
        return Prefetcher(elements, self.block_length)

    def _opened(self, element: Element) -> Recipe:
        made = self.function(*arguments(element))
        if not isinstance(made, Made):
            raise TypeError(
                "`map_func` must return a zs.data.Dataset; it returned a "
                f"{type(made).__name__}"
            )
        return made.recipe.first()

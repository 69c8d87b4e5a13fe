"""Random orders: passes in which elements come shuffled.

Law of shuffles: the order of a repeat is computed from the seed, the number of its pass
and the number of the repeat alone. Workers that share one dataset out among themselves
rely on that: they prefetch at different speeds, and still have to see the same rows at
the same positions.
"""

from __future__ import annotations

import itertools
import random
import secrets
import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, final

from zstrat.errors import OutOfRangeError

from ._elements import ending
from ._passes import Derived, Recipe, Reordered
from ._spec import spec_of
from ._tree import as_element

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ._spec import Spec


@final
class PassCounter:
    """Numbers the passes over one `Shuffled`, so that each pass has a different order.

    A pickled copy begins at the first pass again: what a dataset yields where it was
    shipped to does not depend on earlier reads here.

    Args:
        first: Prefix of the numbers of all passes that are counted here.
    """

    __slots__ = ("_branches", "_counting", "_first", "_last")

    def __init__(self, first: tuple[int, ...] = ()) -> None:
        self._first: Final = first
        self._last = 0
        self._counting: Final = threading.Lock()
        self._branches: Final = itertools.count(1)

    def next_number(self) -> tuple[int, ...]:
        # Passes of one dataset may be begun in several threads.
        with self._counting:
            self._last += 1
            return (*self._first, self._last)

    def first_number(self) -> tuple[int, ...]:
        """Returns the number of the first pass, whether that pass was begun or not."""
        return (*self._first, 1)

    def note(self, order: tuple[int, ...]) -> None:
        """Records that a pass with this number (from `next_number`) was begun in
        another process."""
        with self._counting:
            # A restored position may be older than passes that were begun here since.
            self._last = max(self._last, order[-1])

    def branch(self) -> PassCounter:
        """Returns a separate counter: passes that it numbers are not counted here."""
        return PassCounter((*self._first, next(self._branches)))

    def __reduce__(self) -> tuple[type[PassCounter], tuple[tuple[int, ...]]]:
        return PassCounter, (self._first,)


@final
@dataclass(frozen=True, slots=True)
class Shuffled(Reordered):
    """Draws items at random from a buffer of the next ``buffer_size`` items. Each pass
    has another order unless ``reshuffle`` is false, which needs a seed.

    Args:
        order: The number of the pass, then those of the repeats within it, the
            outermost first. These numbers and the seed determine the order; a shared
            counter that repeats advance would make the order depend on the progress of
            other passes.
        is_drawn: The seed was drawn at random in this process: other processes have
            another one.
    """

    source: Recipe
    buffer_size: int
    seed: int | None
    reshuffle: bool
    passes: PassCounter = field(default_factory=PassCounter)
    order: tuple[int, ...] = ()
    is_drawn: bool = False

    @property
    def is_the_same_everywhere(self) -> bool:
        """Whether every process that makes this dataset sees the same order."""
        return self.seed is not None and not self.is_drawn

    def begin_pass(self) -> Recipe:
        fresh = replace(
            self.with_source(self.source.begin_pass()), order=self.passes.next_number()
        )
        if fresh.seed is not None:
            return fresh
        # Drawn for this pass alone, and kept in it: its elements may be made twice, as
        # by a restored position.
        return replace(fresh, seed=secrets.randbits(63), is_drawn=True)

    def with_order(self, seed: int | None, order: tuple[int, ...]) -> Shuffled:
        """Returns the pass with this number. ``seed`` is the seed that was drawn for
        the pass, None if none was drawn."""
        if order == self.order and seed in (None, self.seed):
            return self  # a cache after it stays the one of this recipe
        if seed is None:
            return replace(self, order=order)
        return replace(self, order=order, seed=seed, is_drawn=True)

    def why_order_varies(self) -> str:
        if self.seed is None:
            return (
                "a shuffle before `cache`, or in the function of `interleave`, has no "
                "seed. Give it one: shuffle(buffer_size, seed=...)"
            )
        return self.source.why_order_varies()

    def with_own_count(self) -> Recipe:
        fresh = self.with_source(self.source.with_own_count())
        return replace(fresh, passes=self.passes.branch())

    def first_pass(self) -> Recipe:
        fresh = self.with_source(self.source.first_pass())
        return replace(fresh, order=self.passes.first_number())

    def as_repeat(self, number: int) -> Recipe:
        fresh = self.with_source(self.source.as_repeat(number))
        return replace(fresh, order=(*self.order, number))

    def items(self) -> Iterator[Any]:
        order = self.order if self.reshuffle else ()
        # A text seeds the same way in every process; None: from the operating system.
        text = " ".join(map(str, (self.seed, *order)))
        draws = random.Random(None if self.seed is None else text)
        with ending(self.source.items()) as items:
            buffer = list(itertools.islice(items, self.buffer_size))
            for item in items:
                # Not `randrange`, which takes twice as long; the bias is below 2**-40.
                place = int(draws.random() * len(buffer))
                yield buffer[place]
                buffer[place] = item
        draws.shuffle(buffer)
        yield from buffer


def first_element_spec(recipe: Recipe) -> Spec:
    """Returns the spec of the dataset's first element, drawn from a separate pass that
    does not change the order of later passes.

    Raises:
        OutOfRangeError: The dataset has no element.
    """
    # Apart: a look must not change the order of the passes that follow.
    with ending(
        _unshuffled(recipe.with_own_count()).begin_pass().elements()
    ) as elements:
        for element in elements:
            return spec_of(as_element(element))
    raise OutOfRangeError(
        "End of sequence: the dataset has no element whose spec could be looked at"
    )


def _unshuffled(recipe: Recipe) -> Recipe:
    """Returns the recipe without its shuffles, which would fill their buffers to yield
    one element."""
    while isinstance(recipe, Shuffled):
        recipe = recipe.source
    # No further than recipes of one source; others keep the shuffles of theirs.
    if isinstance(recipe, Derived):
        return recipe.with_source(_unshuffled(recipe.source))
    return recipe

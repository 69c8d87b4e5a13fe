"""Datasets made of several others: zipped, concatenated, and interleaved.

The order of `Interleaved` is TF's. There are ``cycle_length`` slots for open datasets.
A slot yields up to ``block_length`` elements, then the next slot does. A slot whose
dataset has ended is skipped; when its turn comes again it gets the next dataset, while
there is input.

Law of the others: the sources are iterated together. They are begun at one moment, in
the order in which they were given, and all are closed whichever of them ends first.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self, final

from ._elements import ending
from ._parallel import Prefetcher, numbered
from ._passes import INFINITE, UNKNOWN, Derived, Recipe, arguments
from ._spec import common_spec
from ._tree import mapped, stacked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ._leaves import Element
    from ._spec import Look, Spec


class Several(Recipe):
    """A recipe that is made of several others. Subclasses are final."""

    __slots__ = ()

    sources: tuple[Recipe, ...]

    @abc.abstractmethod
    def size(self) -> int: ...

    def why_order_varies(self) -> str:
        return next(
            filter(None, (source.why_order_varies() for source in self.sources)), ""
        )

    def map_sources(self, change: Callable[[Recipe], Recipe]) -> Self:
        fresh = tuple(map(change, self.sources))
        # Itself where nothing changed, as `Derived.with_source`.
        if all(new is old for new, old in zip(fresh, self.sources, strict=True)):
            return self
        changed: Self = replace(self, sources=fresh)  # type: ignore[type-var]
        return changed


@final
@dataclass(frozen=True, slots=True)
class Zipped(Several):
    """Combines one element of each source to an element; ends with the source that ends
    first.

    An item consists of an item of each source, so that batches are gathered source by
    source.

    Args:
        structure: The structure of an element; its leaves are indices of sources.
    """

    sources: tuple[Recipe, ...]
    structure: Element

    def items(self) -> Iterator[tuple[Any, ...]]:
        with contextlib.ExitStack() as stack:
            # All are closed, whichever ends first; `zip` would leave that to the
            # garbage collector.
            passes = [stack.enter_context(ending(s.items())) for s in self.sources]
            yield from zip(*passes, strict=False)

    def without_first(self, count: int) -> Recipe:
        return self.map_sources(lambda source: source.without_first(count))

    def size(self) -> int:
        # The shortest counts, and one of unknown size may be that.
        sizes = {source.size() for source in self.sources}
        if UNKNOWN in sizes:
            return UNKNOWN
        return min(sizes - {INFINITE}, default=INFINITE)

    def spec(self, look: Look) -> Spec:
        found = [source.spec(look) for source in self.sources]
        if any(spec is None for spec in found):
            return None
        return mapped(lambda number: found[number], self.structure)

    def element_of(self, item: tuple[Any, ...]) -> Element:
        return mapped(lambda n: self.sources[n].element_of(item[n]), self.structure)

    def batch_of(self, items: list[tuple[Any, ...]]) -> Element:
        columns = list(zip(*items, strict=True))
        return mapped(
            lambda n: self.sources[n].batch_of(list(columns[n])), self.structure
        )


@final
@dataclass(frozen=True, slots=True)
class Concatenated(Several):
    """Yields the elements of each source, one source after the other; an item says
    which source it is from."""

    sources: tuple[Recipe, ...]

    def items(self) -> Iterator[tuple[int, Any]]:
        for number, source in enumerate(self.sources):
            with ending(source.items()) as items:
                for item in items:
                    yield number, item

    def without_first(self, count: int) -> Recipe:
        fewer: list[Recipe] = []
        for source in self.sources:
            size = source.size()
            if size < 0:  # a dataset without end may have no element, too
                break
            missing = min(count, size)
            fewer.append(source.without_first(missing))
            count -= missing
        # As many as before: items have their numbers.
        rest = replace(self, sources=(*fewer, *self.sources[len(fewer) :]))
        return Several.without_first(rest, count)

    def size(self) -> int:
        sizes = [source.size() for source in self.sources]
        if INFINITE in sizes:
            return INFINITE
        return UNKNOWN if UNKNOWN in sizes else sum(sizes)

    def spec(self, look: Look) -> Spec:
        first, *others = [source.spec(look) for source in self.sources]
        for other in others:
            if first is None or other is None:
                return None
            first = common_spec(first, other)
        return first

    def element_of(self, item: tuple[int, Any]) -> Element:
        number, inner = item
        return self.sources[number].element_of(inner)

    def batch_of(self, items: list[tuple[int, Any]]) -> Element:
        # A batch within one source is gathered at once; only one across the end of a
        # source is made of single elements.
        numbers = {number for number, _ in items}
        if len(numbers) > 1:
            return stacked([self.element_of(item) for item in items])
        (number,) = numbers
        return self.sources[number].batch_of([inner for _, inner in items])


def zipped(datasets: Any, recipe_of: Callable[[Any], Recipe]) -> Zipped:
    """Returns a structure of datasets as a recipe.

    Args:
        recipe_of: Returns the recipe of a leaf; raises if the leaf is not a dataset.
    """
    sources: list[Recipe] = []

    # `mapped` goes through the leaves in order, so each index is that of its source.
    def number(leaf: Any) -> int:
        sources.append(recipe_of(leaf))
        return len(sources) - 1

    structure = mapped(number, datasets)
    if not sources:
        raise TypeError("Must pass at least one dataset to `zip`.")
    return Zipped(tuple(sources), structure)


@final
class MadeRecipes:
    """Records which datasets a function has made. A pickled copy has no records."""

    __slots__ = ("_found", "last")

    def __init__(self) -> None:
        self._found = ""
        self.last: Recipe | None = None
        """The dataset that the function made last. In TF, which traces the function,
        all datasets of a function have the same spec as this one."""

    def note(self, recipe: Recipe) -> None:
        """Records that the function has made the dataset."""
        # What it has made in its turn is known when all has been drawn from it.
        self._found, self.last = self.why_order_varies(), recipe

    def why_order_varies(self) -> str:
        """Returns `Recipe.why_order_varies` of the first of the recorded datasets for
        which there is a reason."""
        return self._found or (
            "" if self.last is None else self.last.why_order_varies()
        )

    def __reduce__(self) -> tuple[type[MadeRecipes], tuple[()]]:
        return MadeRecipes, ()


@final
@dataclass(frozen=True, slots=True)
class Interleaved(Derived):
    """Interleaves the elements of the datasets that a function makes.

    Args:
        threads: Number of slots that read their datasets ahead, a block each; the order
            stays the same.
        made: Records of the datasets that the function has made, in all passes.
    """

    source: Recipe
    function: Callable[..., Any]
    cycle_length: int
    block_length: int
    threads: int = 0
    made: MadeRecipes = field(default_factory=MadeRecipes, compare=False)

    def why_order_varies(self) -> str:
        return self.source.why_order_varies() or self.made.why_order_varies()

    def items(self) -> Iterator[Element]:
        opened = numbered(self._opened, "interleave", self.function)
        with contextlib.ExitStack() as stack, ending(self.source.elements()) as inputs:
            # One stack a place: its dataset is closed when it ends, or with the pass.
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
                        continue  # no input is left, and other places still read
                    # Shuffles get different orders by its number: a count that this
                    # advanced would make them depend on how far other passes are.
                    current = opened(number, element).as_repeat(number).elements()
                    if at < self.threads:
                        current = Prefetcher(current, self.block_length)
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

    def _opened(self, element: Element) -> Recipe:
        made = self.function(*arguments(element))
        # By attribute: `Dataset` is made of this module, and cannot be imported here.
        recipe = getattr(made, "recipe", None)
        if not isinstance(recipe, Recipe):
            raise TypeError(
                "`map_func` must return a zs.data.Dataset; it returned a "
                f"{type(made).__name__}"
            )
        recipe = recipe.first_pass()
        self.made.note(recipe)
        return recipe

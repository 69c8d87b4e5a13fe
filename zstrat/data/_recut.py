"""Batches taken apart: into their rows, or into batches of other sizes.

Rows stay in their order, and are views of the batches where they do not reach over the
end of one.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import numpy as np

from ._elements import ending
from ._passes import INFINITE, UNKNOWN, Derived, Recipe
from ._spec import first_axis, row_spec, stacked_spec, unknown
from ._tree import leaves, mapped

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ._leaves import Element
    from ._spec import Look, Spec


@final
@dataclass(frozen=True, slots=True)
class Unbatched(Derived):
    """The rows of each element."""

    source: Recipe

    def items(self) -> Iterator[Element]:
        with ending(self.source.elements()) as elements:
            for element in elements:
                for row in range(rows_of(element, "unbatch")):
                    yield _row(element, row)

    def size(self) -> int:
        size = self.source.size()
        if size < 0:
            return size
        rows = first_axis(self.source.spec(unknown))
        return UNKNOWN if rows is None else size * rows

    def spec(self, look: Look) -> Spec:
        return row_spec(self.source.spec(look))


@final
@dataclass(frozen=True, slots=True)
class Rebatched(Derived):
    """The rows of all elements, in batches of these sizes, again and again."""

    source: Recipe
    sizes: tuple[int, ...]
    drop_remainder: bool

    def items(self) -> Iterator[Element]:
        waiting: deque[Element] = deque()
        """Rows that are in no batch yet; of nothing there is none."""
        count = 0
        sizes = itertools.cycle(self.sizes)
        wanted = next(sizes)
        with ending(self.source.elements()) as elements:
            for element in elements:
                rows = rows_of(element, "rebatch")
                if rows:
                    waiting.append(element)
                count += rows
                while count >= wanted:
                    yield _taken(waiting, wanted)
                    count -= wanted
                    wanted = next(sizes)
        if count and not self.drop_remainder:
            yield _taken(waiting, count)

    def size(self) -> int:
        return INFINITE if self.source.size() == INFINITE else UNKNOWN

    @property
    def rows(self) -> int | None:
        """Of every whole batch, if all have the same."""
        return self.sizes[0] if len(set(self.sizes)) == 1 else None

    def spec(self, look: Look) -> Spec:
        rows = self.rows if self.drop_remainder else None
        return stacked_spec(row_spec(self.source.spec(look)), rows)


def rows_of(element: Element, what: str) -> int:
    """The one first axis of the arrays of a batch.

    Raises:
        ValueError: One has none, or they differ; in TF's words.
    """
    found = [(path, np.shape(leaf)) for path, leaf in leaves(element)]
    for path, shape in found:
        if not shape:
            raise ValueError(
                f"Cannot unbatch an input with scalar components: `{what}` takes "
                f"batches, and component {path or 0} is a scalar"
            )
    sizes = sorted({shape[0] for _, shape in found})
    if len(sizes) != 1:
        raise ValueError(
            f"`{what}()` is only supported for datasets of elements whose components "
            f"have a matching leading dimension. Encountered "
            f"{' and '.join(map(str, sizes)) or 'no component'}."
        )
    return int(sizes[0])


def _row(element: Element, row: int) -> Element:
    return mapped(lambda leaf: leaf[row], element)


def _taken(waiting: deque[Element], rows: int) -> Element:
    """The next rows, of which there are enough."""
    parts: list[Element] = []
    while rows:
        element = waiting.popleft()
        length = rows_of(element, "rebatch")
        if length > rows:
            waiting.appendleft(_cut(element, slice(rows, None)))
            element, length = _cut(element, slice(rows)), rows
        parts.append(element)
        rows -= length
    return parts[0] if len(parts) == 1 else appended(parts)


def _cut(element: Element, rows: slice) -> Element:
    return mapped(lambda leaf: leaf[rows], element)


def appended(parts: Sequence[Element]) -> Element:
    """One batch of all rows, in order.

    Raises:
        ValueError: The parts differ in structure, or in the shape of a row.
    """
    by_path = [dict(leaves(part)) for part in parts]
    if any(found.keys() != by_path[0].keys() for found in by_path):
        raise ValueError(
            "Cannot bring batches of different structure together: give all elements "
            "the same components"
        )
    merged = iter(
        [_concatenated([found[path] for found in by_path], path) for path in by_path[0]]
    )
    return mapped(lambda _: next(merged), parts[0])


def _concatenated(column: list[Any], path: str) -> np.ndarray:
    if len({np.shape(leaf)[1:] for leaf in column}) > 1:
        shapes = " and ".join(str(list(np.shape(leaf))) for leaf in column[:2])
        raise ValueError(
            f"Cannot bring batches together: component {path or 0} has rows of "
            f"different shapes: {shapes}"
        )
    return np.concatenate(column)

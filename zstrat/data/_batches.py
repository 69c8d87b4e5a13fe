"""Batches taken apart into rows, regrouped into other sizes, or padded.

Rows that were in a batch stay in their order. They are views of the batch, except where
a new batch joins rows of several old ones. Elements of different shapes are stacked
when each array is padded to a common shape.

`IndexedPass` makes a dataset from examples that are read by number. The coordinator
leases the ranges of such a dataset to steps; `IndexedPass` yields the same batches in
the order of their positions, one epoch after the other.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, replace
from operator import index
from typing import TYPE_CHECKING, Any, Protocol, final

import numpy as np

from ._elements import ending
from ._leaves import node_of
from ._passes import INFINITE, UNKNOWN, Batching, Derived, Recipe
from ._spec import (
    TensorSpec,
    first_axis,
    lossless_cast,
    row_spec,
    stacked_spec,
    unknown,
)
from ._tree import is_record, leaves, mapped, require_joint, stacked, with_leaves

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ._leaves import Element
    from ._spec import Look, Spec


@final
@dataclass(frozen=True, slots=True)
class Unbatched(Derived):
    """The rows of each element of the source, as single elements."""

    source: Recipe

    def items(self) -> Iterator[Element]:
        with ending(self.source.elements()) as elements:
            for element in elements:
                for row in range(rows_of(element, "unbatch")):
                    yield _cut(element, row)

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
    """The rows of all elements of the source, regrouped into batches of ``sizes``,
    which repeat."""

    source: Recipe
    sizes: tuple[int, ...]
    drop_remainder: bool

    def items(self) -> Iterator[Element]:
        waiting: deque[Element] = deque()
        """Rows that were read and are not yet in a batch."""
        count = 0
        sizes = itertools.cycle(self.sizes)
        wanted = next(sizes)
        with ending(self.source.elements()) as elements:
            for element in elements:
                rows = rows_of(element, "rebatch")
                if rows:  # `_taken` could not end at one without rows
                    waiting.append(element)
                count += rows
                while count >= wanted:  # a large batch may have rows for several
                    yield _taken(waiting, wanted)
                    count -= wanted
                    wanted = next(sizes)
        if count and not self.drop_remainder:
            yield _taken(waiting, count)

    def size(self) -> int:
        return INFINITE if self.source.size() == INFINITE else UNKNOWN

    @property
    def rows(self) -> int | None:
        """Number of rows of every whole batch, if all have the same number; None
        otherwise."""
        return self.sizes[0] if len(set(self.sizes)) == 1 else None

    def spec(self, look: Look) -> Spec:
        source, rows = self.source.spec(look), self.rows
        if rows is not None and not self.drop_remainder:
            # As in TF: batches of a promised size that are cut leave no rest.
            before = first_axis(source)
            rows = rows if before is not None and before % rows == 0 else None
        return stacked_spec(row_spec(source), rows)


def rows_of(element: Element, what: str) -> int:
    """Returns the number of rows of a batch: the length of the first axis, which all
    its arrays share.

    Raises:
        ValueError: An array has no axis, or the first axes differ; in TF's words.
    """
    found = [(path, np.shape(leaf)) for path, leaf in leaves(element)]
    for path, shape in found:
        if not shape:
            raise ValueError(
                f"Cannot unbatch an input with scalar components: `{what}` takes "
                f"batches, and component {path or 0} is a scalar"
            )
    # A structure without leaves has no rows either: then there is no size at all.
    sizes = sorted({shape[0] for _, shape in found})
    if len(sizes) != 1:
        raise ValueError(
            f"`{what}()` is only supported for datasets of elements whose components "
            f"have a matching leading dimension. Encountered "
            f"{' and '.join(map(str, sizes)) or 'no component'}."
        )
    return int(sizes[0])


def _taken(waiting: deque[Element], rows: int) -> Element:
    """Removes the next ``rows`` rows, which must be there, and returns them as one
    batch."""
    parts: list[Element] = []
    while rows:
        element = waiting.popleft()
        length = rows_of(element, "rebatch")
        if length > rows:
            # What is left goes back to the front, so that rows stay in their order.
            waiting.appendleft(_cut(element, slice(rows, None)))
            element, length = _cut(element, slice(rows)), rows
        parts.append(element)
        rows -= length
    return parts[0] if len(parts) == 1 else appended(parts)


def _cut(element: Element, rows: int | slice) -> Element:
    """Returns one row of a batch, or some rows as a smaller batch; both are views."""
    return mapped(lambda leaf: leaf[rows], element)


def appended(parts: Sequence[Element]) -> Element:
    """Joins batches to one batch of all their rows, in order.

    Raises:
        ValueError: The parts differ in structure, or in the shape of a row.
    """
    # Leaf by leaf: structures of parts need not be the same object, only alike.
    by_path = [dict(leaves(part)) for part in parts]
    if any(found.keys() != by_path[0].keys() for found in by_path):
        raise ValueError(
            "Cannot bring batches of different structure together: give all elements "
            "the same components"
        )
    merged = [
        _concatenated([found[path] for found in by_path], path) for path in by_path[0]
    ]
    return with_leaves(parts[0], merged)


def _concatenated(column: list[Any], path: str) -> np.ndarray:
    if len({np.shape(leaf)[1:] for leaf in column}) > 1:
        shapes = " and ".join(str(list(np.shape(leaf))) for leaf in column[:2])
        raise ValueError(
            f"Cannot bring batches together: component {path or 0} has rows of "
            f"different shapes: {shapes}"
        )
    try:
        found = np.concatenate(column)
    except TypeError:
        # numpy's words do not say which component; where kinds differ ours do.
        require_joint(column, np.dtype(object), path)
        raise
    require_joint(column, found.dtype, path)
    return found


@final
@dataclass(frozen=True, slots=True)
class PaddedBatches(Batching):
    """Stacks elements whose arrays are padded at their ends to a common shape.

    Args:
        shapes: The structure of an element, with a shape at each leaf. None and -1 in a
            shape mean the longest length in the batch; None in place of all shapes
            means that for all axes.
        values: The same structure with a padding value at each leaf, or one value for
            all leaves; None: zero, False, or empty text.
    """

    source: Recipe
    batch_size: int
    drop_remainder: bool
    shapes: Any = None
    values: Any = None

    @property
    def pads_to_one_shape(self) -> bool:
        """Whether all lengths are fixed, so that every element is padded to the same
        shape."""
        return self.shapes is not None and None not in _lengths(self.shapes)

    def join_batch(self, chunk: list[Any]) -> Element:
        elements = [self.source.element_of(item) for item in chunk]
        # Refuses elements of different kinds or structures. Their lengths may differ,
        # so leaves are compared as scalars of their dtypes.
        stacked([mapped(_no_shape, element) for element in elements])
        found = [dict(leaves(element)) for element in elements]
        shapes = self._per_leaf(elements[0], self.shapes, "padded_shapes")
        values = self._per_leaf(elements[0], self.values, "padding_values")
        padded = [
            _padded([each[path] for each in found], path or "0", shape, value)
            for path, shape, value in zip(found[0], shapes, values, strict=True)
        ]
        return with_leaves(elements[0], padded)

    def spec(self, look: Look) -> Spec:
        source = self.source.spec(look)
        if source is None:
            return None
        shapes = iter(self._per_leaf(source, self.shapes, "padded_shapes"))
        # A look at one element says nothing of the lengths of others.
        is_known = self.source.spec(unknown) is not None

        def padded(leaf: TensorSpec) -> TensorSpec:
            shape = next(shapes)
            own = leaf.shape if is_known else (None,) * leaf.ndim
            known = own if shape is None else _sizes(shape)
            return TensorSpec((self.rows, *known), leaf.dtype)

        return mapped(padded, source)

    @staticmethod
    def _per_leaf(element: Element, given: Any, name: str) -> list[Any]:
        """Returns the value of the argument ``name`` for each leaf of an element, in
        order."""
        found: list[Any] = []
        _flatten(element, given, name, "", found)
        return found


def _flatten(
    element: Element, given: Any, name: str, path: str, out: list[Any]
) -> None:
    # One value or shape for all leaves is handed down to each.
    is_whole = given is None or _is_scalar(given)
    if isinstance(element, dict):
        alike = isinstance(given, dict) and given.keys() == element.keys()
        if not (is_whole or alike):
            raise _unlike(name, path, f"a dict with the keys {list(element)}", given)
        for key, item in element.items():
            inner = given if is_whole else given[key]
            _flatten(item, inner, name, f"{path}[{key!r}]", out)
    elif isinstance(element, tuple):
        alike = isinstance(given, tuple) and len(given) == len(element)
        if not (is_whole or alike):
            raise _unlike(name, path, f"a tuple of {len(element)}", given)
        for at, item in enumerate(element):
            inner = given if is_whole else given[at]
            _flatten(item, inner, name, f"{path}[{at}]", out)
    elif (node := node_of(element)) is not None:
        other = None if is_whole else node_of(given)
        if not is_whole and (other is None or other.paths != node.paths):
            raise _unlike(name, path, f"a {type(element).__name__}", given)
        inners = (given,) * len(node.paths) if other is None else other.children
        for below, item, each in zip(node.paths, node.children, inners, strict=True):
            _flatten(item, each, name, path + below, out)
    elif element is not None:
        out.append(given)


def _unlike(name: str, path: str, wanted: str, given: Any) -> TypeError:
    return TypeError(
        f"`{name}` must have the structure of an element: at {path or 'the top'} that "
        f"is {wanted}; got {given!r:.100}"
    )


def _is_scalar(given: Any) -> bool:
    is_tree = isinstance(given, dict | tuple | list) or node_of(given) is not None
    return not is_tree and np.ndim(given) == 0


def _no_shape(leaf: Any) -> Any:
    """Replaces a leaf by a value that shows only its kind, so that structures can be
    compared without lengths."""
    return leaf if isinstance(leaf, bytes) else np.zeros((), np.asarray(leaf).dtype)


def _lengths(shapes: Any) -> list[int | None]:
    """Returns the lengths of a shape, or of all shapes in a structure; a tuple may be
    either."""
    if isinstance(shapes, dict | tuple):
        inner = shapes.values() if isinstance(shapes, dict) else shapes
        return [length for shape in inner for length in _lengths(shape)]
    if (node := node_of(shapes)) is not None:
        return [length for shape in node.children for length in _lengths(shape)]
    return [None] if shapes is None else [*_sizes(shapes)]


def _sizes(shape: Any) -> tuple[int | None, ...]:
    given = [shape] if isinstance(shape, int | np.integer) else list(shape)
    return tuple(None if size in (None, -1) else index(size) for size in given)


def _padded(column: Sequence[Any], path: str, shape: Any, value: Any) -> np.ndarray:
    """Stacks one component of several elements, padded to one shape."""
    arrays = [_as_array(leaf) for leaf in column]
    found = {array.ndim for array in arrays}
    if len(found) > 1:
        raise ValueError(
            f"Cannot pad component {path}: the elements of a batch have ranks "
            f"{sorted(found)}; padding makes axes longer, and no new ones"
        )
    longest = [max(sizes) for sizes in zip(*[a.shape for a in arrays], strict=True)]
    target = longest if shape is None else _target(shape, longest, path)
    dtype = np.result_type(*[array.dtype for array in arrays])
    require_joint(arrays, dtype, path)
    filler = _filler(value, dtype, path)
    if dtype.kind == "U":  # as long as the text that fills it up, if that is longer
        dtype = np.result_type(dtype, np.asarray(filler).dtype)
    # Filled as a whole, then overwritten: one call, whatever the number of gaps.
    batch = np.full((len(arrays), *target), filler, dtype)
    for number, array in enumerate(arrays):
        filled: tuple[Any, ...] = (number, *map(slice, array.shape))
        # A scalar as such: in an array of objects an array of no axes stays an array.
        batch[filled] = array if array.ndim else array[()]
    return batch


def _as_array(leaf: Any) -> np.ndarray:
    if is_record(leaf):  # as an object: numpy's "S" drops zeros at the end
        leaf = np.array(leaf, object)
    return np.asarray(leaf)


def _target(shape: Any, longest: list[int], path: str) -> list[int]:
    sizes = _sizes(shape)
    if len(sizes) != len(longest):
        raise ValueError(
            f"The padded shape {sizes} is not compatible with the {len(longest)} axes "
            f"of component {path}"
        )
    target = [
        known if size is None else size
        for size, known in zip(sizes, longest, strict=True)
    ]
    if any(size < known for size, known in zip(target, longest, strict=True)):
        raise ValueError(
            f"Attempted to pad to a smaller size than the input element: component "
            f"{path} has {longest}, and the padded shape is {sizes}"
        )
    return target


def _filler(value: Any, dtype: np.dtype[Any], path: str) -> Any:
    if value is None:
        if dtype.kind == "O":
            return b""
        return np.zeros((), dtype)[()]
    array = np.asarray(value, object if dtype.kind == "O" else None)
    if dtype.kind == "O" or (array.dtype.kind == dtype.kind == "U"):
        return value
    is_date = array.dtype.kind == dtype.kind and dtype.kind in "mM"
    # NaT is unequal to itself: `lossless_cast` would take it for a changed value.
    cast = (
        array.astype(dtype)
        if is_date and np.isnat(array)
        else lossless_cast(array, dtype)
    )
    if array.dtype.kind == "c" and dtype.kind != "c":
        cast = None  # also without an imaginary part, as in TF
    if cast is None:
        raise TypeError(
            f"Invalid `padding_values`. {value!r} does not match type {dtype} of "
            f"component {path}"
        )
    return cast[()]


class IndexedBatches(Protocol):
    """What this file uses of a `LeasedSource`."""

    @property
    def batch(self) -> int: ...

    @property
    def seed(self) -> int | None: ...

    @property
    def drop_remainder(self) -> bool: ...

    def batches(self, start: int) -> Iterator[Element]:
        """Yields the batches of all epochs, without the first ``start`` batches."""
        ...

    def steps(self) -> int:
        """Returns the number of batches, or `INFINITE`, or `UNKNOWN`."""
        ...


@final
@dataclass(frozen=True, slots=True)
class IndexedPass(Recipe):
    """The batches of all epochs of a leased source, without the first ``start``
    batches."""

    source: IndexedBatches
    start: int = 0

    def items(self) -> Iterator[Element]:
        return self.source.batches(self.start)

    def size(self) -> int:
        steps = self.source.steps()
        return steps if steps < 0 else max(0, steps - self.start)

    def without_first(self, count: int) -> Recipe:
        return replace(self, start=self.start + count)

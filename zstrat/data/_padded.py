"""Batches of elements of different shapes: each array is filled up to a common one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import numpy as np

from ._passes import Batching, Recipe
from ._spec import TensorSpec, unknown
from ._tree import leaves, mapped, stacked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ._leaves import Element
    from ._spec import Look, Spec


@final
@dataclass(frozen=True, slots=True)
class PaddedBatches(Batching):
    """Stacks elements whose arrays were filled up at their ends.

    Args:
        shapes: The structure of an element with a shape at each leaf, whose None and -1
            mean the longest of the batch; None: that in all axes.
        values: The same with a value at each leaf, or one for all; None: zero, False,
            or empty text.
    """

    source: Recipe
    batch_size: int
    drop_remainder: bool
    shapes: Any = None
    values: Any = None

    def joined(self, chunk: list[Any]) -> Element:
        elements = [self.source.one(item) for item in chunk]
        stacked([mapped(_no_shape, element) for element in elements])  # alike?
        found = [dict(leaves(element)) for element in elements]
        shapes = self._per_leaf(elements[0], self.shapes, "padded_shapes")
        values = self._per_leaf(elements[0], self.values, "padding_values")
        padded = [
            _padded([each[path] for each in found], path or "0", shape, value)
            for path, shape, value in zip(found[0], shapes, values, strict=True)
        ]
        merged = iter(padded)
        return mapped(lambda _: next(merged), elements[0])

    def spec(self, look: Look) -> Spec:
        source = self.source.spec(look)
        if source is None:
            return None
        shapes = iter(self._per_leaf(source, self.shapes, "padded_shapes"))
        is_known = self.source.spec(unknown) is not None  # not of one element alone

        def padded(leaf: TensorSpec) -> TensorSpec:
            shape = next(shapes)
            own = leaf.shape if is_known else (None,) * leaf.ndim
            known = own if shape is None else _sizes(shape)
            return TensorSpec((self.rows, *known), leaf.dtype)

        return mapped(padded, source)

    @staticmethod
    def _per_leaf(element: Element, given: Any, name: str) -> list[Any]:
        """What was given for each leaf, in order."""
        found: list[Any] = []
        _flatten(element, given, name, "", found)
        return found


def _flatten(
    element: Element, given: Any, name: str, path: str, out: list[Any]
) -> None:
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
    elif element is not None:
        out.append(given)


def _unlike(name: str, path: str, wanted: str, given: Any) -> TypeError:
    return TypeError(
        f"`{name}` must have the structure of an element: at {path or 'the top'} that "
        f"is {wanted}; got {given!r:.100}"
    )


def _is_scalar(given: Any) -> bool:
    return not isinstance(given, dict | tuple | list) and np.ndim(given) == 0


def _no_shape(leaf: Any) -> Any:
    """What tells kinds and structures apart, and no lengths."""
    return leaf if isinstance(leaf, bytes) else np.zeros((), np.asarray(leaf).dtype)


def _sizes(shape: Any) -> tuple[int | None, ...]:
    given = [shape] if isinstance(shape, int | np.integer) else list(shape)
    return tuple(None if size in (None, -1) else int(size) for size in given)


def _padded(column: Sequence[Any], path: str, shape: Any, value: Any) -> np.ndarray:
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
    batch = np.full((len(arrays), *target), _filler(value, dtype, path), dtype)
    for number, array in enumerate(arrays):
        filled: tuple[Any, ...] = (number, *map(slice, array.shape))
        batch[filled] = array if array.ndim else array[()]
    return batch


def _as_array(leaf: Any) -> np.ndarray:
    if isinstance(leaf, bytes) and not isinstance(leaf, np.generic):
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
    with np.errstate(over="ignore", invalid="ignore"):
        cast = array.astype(dtype)
    same = np.array_equal(cast, array, equal_nan=dtype.kind in "fc")
    if array.dtype.kind == "f" and dtype.kind == "f":
        same = True  # 0.1 in fewer bits is 0.1 still
    if not same:
        raise TypeError(
            f"Invalid `padding_values`. {value!r} does not match type {dtype} of "
            f"component {path}"
        )
    return cast[()]

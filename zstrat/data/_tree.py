"""Structures of arrays, as TensorFlow's datasets understand them.

Dicts, tuples (named ones, too) and objects of other classes that jax knows as pytrees
are structure. Everything else, a list included, is a leaf and becomes a numpy array.
This module works without jax, because a dataset may be made in a process without it.

A single record (`bytes`) stays `bytes`, and several become an array of objects, as
TensorFlow's strings do: numpy's own strings drop the zeros at their ends.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from zstrat.memory import aligned

from ._leaves import Element, node_of, require_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ._leaves import Node


def as_element(value: object, path: str = "") -> Element:
    """Converts every leaf to a numpy array; single records stay `bytes`.

    Raises:
        ValueError: A leaf cannot be an array (a ragged list, say), or is a masked
            array, which would lose its mask. Names the path of the leaf.
        TypeError: A leaf is, or contains, an object that is neither a number nor text;
            names its path, its type and what to give.
    """
    # Records first: numpy makes text of fixed size of them, and cuts zeros at the end.
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, np.ndarray | np.generic):
        if _is_masked(value):
            raise ValueError(
                f"component {path or 'of the dataset'} is a masked array, and would "
                "lose its mask: fill it, .filled(0) say"
            )
        if value.dtype.hasobject:
            require_text(value, path, value)
        return value
    if isinstance(value, dict):
        return dict_like(
            value,
            {key: as_element(item, f"{path}[{key!r}]") for key, item in value.items()},
        )
    if isinstance(value, tuple):
        return rebuilt(
            value, [as_element(v, f"{path}[{i}]") for i, v in enumerate(value)]
        )
    if (node := node_of(value)) is not None:
        pairs = zip(node.children, node.paths, strict=True)
        return node.rebuilt([as_element(v, path + below) for v, below in pairs])
    array = _converted(value, path)
    if array.dtype.hasobject:
        require_text(array, path, value)
    return array


def _is_masked(value: object) -> bool:
    """Returns whether the value is an array with a mask, which numpy drops when it
    copies."""
    # Plain ones first: numpy imports its masked arrays when they are asked for.
    is_plain = type(value) is np.ndarray or not isinstance(value, np.ndarray)
    return not is_plain and isinstance(value, np.ma.MaskedArray)


def _converted(value: object, path: str) -> np.ndarray:
    where = f"component {path or 'of the dataset'} cannot be converted to an array"
    try:
        array = np.asarray(value)
        # A list of `bytes` again, as objects: "S" has lost the zeros at their ends.
        has_records = array.dtype.kind == "S" and isinstance(value, list)
        return np.asarray(value, object) if has_records else array
    except ValueError as error:
        raise ValueError(
            f"{where}: {error}. A list is one array; for several components use a tuple"
        ) from error
    except TypeError as error:  # keys of jax, for one; it says what else to do
        raise TypeError(f"{where}: {error}") from error


def owned(value: object) -> Element:
    """Converts leaves as `as_element` does, and copies arrays that may still be written
    to.

    A generator or a mapped function may fill one buffer again and again, while the
    elements wait in a shuffle's buffer, a batch, or a step that has not run.
    """
    return mapped(own, as_element(value))


def own(leaf: Any) -> Any:
    """Returns the leaf, or a copy if its memory may still be written to."""
    if not isinstance(leaf, np.ndarray):
        return leaf
    memory: object = leaf
    while isinstance(memory, np.ndarray):  # a read-only view may be of such a buffer
        if memory.flags.writeable:
            return np.array(leaf)
        memory = memory.base
    # Memory that no array of numpy owns (a mapped file, a frame) counts as read-only.
    return leaf


def native(array: np.ndarray) -> np.ndarray:
    """Returns the array in this machine's byte order, which is the only one that jax
    accepts; files written on other machines may have the other order."""
    dtype = array.dtype
    return array if dtype.isnative else array.astype(dtype.newbyteorder("="))


def gathered(arrays: Element, rows: np.ndarray) -> Element:
    """Returns these rows of every array, as copies that jax can use without copying
    again. All row numbers have to be valid."""
    return mapped(lambda array: _gathered(array, rows), arrays)


def _gathered(array: Any, rows: np.ndarray) -> Any:
    is_plain = isinstance(array, np.ndarray) and not array.dtype.hasobject
    if not (is_plain and array.nbytes and array.flags.c_contiguous):
        return array[rows]
    # jax takes host memory without a copy only if it is aligned to 64 bytes.
    found = aligned((len(rows), *array.shape[1:]), array.dtype)
    # Clipped: if a number could be wrong, numpy would write to a copy first.
    return np.take(array, rows, 0, found, "clip")


def rebuilt(like: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    """Returns the items as a tuple of the class of ``like``, which may be a named
    tuple."""
    return tuple(items) if type(like) is tuple else type(like)(*items)


def dict_like(like: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """Returns the items as a dict of the class of ``like``, if jax knows that class."""
    if type(like) is OrderedDict:
        return OrderedDict(items)
    if type(like) is defaultdict:
        return defaultdict(like.default_factory, items)
    return items


def mapped(leaf: Callable[[Any], Any], tree: Element) -> Element:
    """Applies ``leaf`` to each leaf of a tree; returns a tree of the same structure."""
    if isinstance(tree, dict):
        return dict_like(tree, {key: mapped(leaf, x) for key, x in tree.items()})
    if isinstance(tree, tuple):
        return rebuilt(tree, [mapped(leaf, item) for item in tree])
    if (node := node_of(tree)) is not None:
        return node.rebuilt([mapped(leaf, item) for item in node.children])
    return None if tree is None else leaf(tree)


def with_leaves(tree: Element, new: Iterable[Any]) -> Element:
    """Returns a tree of the same structure as ``tree`` with the leaves ``new``, in
    order."""
    values = iter(new)
    return mapped(lambda _: next(values), tree)


def leaves(tree: Element, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every leaf with a description of its path, in order."""
    if isinstance(tree, dict):
        for key, item in tree.items():
            yield from leaves(item, f"{path}[{key!r}]")
    elif isinstance(tree, tuple):
        for number, item in enumerate(tree):
            yield from leaves(item, f"{path}[{number}]")
    elif (node := node_of(tree)) is not None:
        for below, item in zip(node.paths, node.children, strict=True):
            yield from leaves(item, path + below)
    elif tree is not None:
        yield path, tree


def stacked(elements: Sequence[Element], path: str = "") -> Element:
    """Stacks elements, in order, along a new first axis of each leaf.

    Raises:
        ValueError: The elements differ in structure, in the shape of a leaf, or in the
            kind of its values: numbers, text, bytes, dates.
    """
    first = elements[0]
    if isinstance(first, dict):
        _same(
            elements, lambda e: isinstance(e, dict) and e.keys() == first.keys(), path
        )
        return dict_like(
            first,
            {
                key: stacked([element[key] for element in elements], f"{path}[{key!r}]")
                for key in first
            },
        )
    if isinstance(first, tuple):
        size = len(first)
        _same(elements, lambda e: isinstance(e, tuple) and len(e) == size, path)
        columns = zip(*elements, strict=True)
        items = [stacked(column, f"{path}[{i}]") for i, column in enumerate(columns)]
        return rebuilt(first, items)
    if first is None:
        _same(elements, lambda e: e is None, path)
        return None
    if (node := node_of(first)) is not None:
        return _stacked_nodes(node, elements, path)
    return _stacked_leaf(elements, path)


def _stacked_nodes(first: Node, elements: Sequence[Element], path: str) -> Element:
    nodes = [node_of(element) for element in elements]
    # Equal only if jax would map them together: with the same static parts, too.
    _same(elements, lambda e: node_treedef(e) == first.treedef, path)
    columns = zip(*[node.children for node in nodes if node is not None], strict=True)
    # Joined in the first one's class: with equal treedefs any would do.
    pairs = zip(columns, first.paths, strict=True)
    return first.rebuilt([stacked(column, path + below) for column, below in pairs])


def node_treedef(value: Any) -> Any:
    """Returns the treedef of a pytree node of a class that jax knows; None for any
    other value."""
    node = node_of(value)
    return None if node is None else node.treedef


def _stacked_leaf(arrays: Sequence[Any], path: str) -> np.ndarray:
    if is_record(arrays[0]):
        _same(arrays, is_record, path)
        # Made empty and filled: np.array(list of bytes) would choose a dtype itself.
        column = np.empty(len(arrays), object)
        column[:] = arrays
        return column
    try:
        found = np.stack(arrays)
    # Compared only now: looking at each array first would cost as much as the batch.
    except (TypeError, ValueError):
        _same_kind(arrays, path)
        _same_shape(arrays, path)
        raise
    require_joint(arrays, found.dtype, path)
    return found


def require_joint(arrays: Sequence[Any], dtype: np.dtype[Any], path: str) -> None:
    """Refuses arrays whose values would change in the dtype to which numpy joins them:
    numbers beside text become text, and integers of 64 bits beside floats, or int64
    beside uint64, lose their last digits.

    Raises:
        ValueError: Names the path and the values.
    """
    if dtype.kind in _KINDS:  # what is beside such becomes one
        are_arrays = all(isinstance(each, np.ndarray | np.generic) for each in arrays)
        is_one = are_arrays and {each.dtype.kind for each in arrays} == {dtype.kind}
        if dtype.kind == "O" or not is_one:
            _same_kind(arrays, path)
        return
    # Values are looked at only where a dtype of several became float64, which is rare.
    is_wide = dtype.kind in "fc" and dtype.itemsize >= _FLOAT64
    if is_wide and any(each.dtype is not dtype for each in arrays):
        for number, array in enumerate(arrays):
            _require_digits(array, dtype, number, path)


def _require_digits(array: Any, dtype: np.dtype[Any], number: int, path: str) -> None:
    if array.dtype.kind not in "iu" or array.dtype.itemsize < 8 or not array.size:
        return
    # Python's integers: -int64.min and uint64.max do not fit numpy's own.
    if max(int(array.max()), -int(array.min())) > _WHOLE:
        raise ValueError(
            f"Cannot batch elements of different dtypes in component {path or 0}: "
            f"together they are {dtype}, and element {number} is {array.dtype} with "
            f"integers beyond 2**53, which would lose digits. Give all elements one "
            "dtype"
        )


_WHOLE: Final = 2**53
"""Up to this number float64, which numpy uses for joined integers, has all integers."""
_FLOAT64: Final = 8
"""Bytes of a float64: it holds all integers of the narrower dtypes that numpy joins in
it."""


def _same_shape(arrays: Sequence[Any], path: str) -> None:
    first = np.shape(arrays[0])
    for number, array in enumerate(arrays):
        if np.shape(array) != first:
            raise ValueError(
                "Cannot batch tensors with different shapes in component "
                f"{path or 0}. First element had shape {list(first)} and element "
                f"{number} had shape {list(np.shape(array))}."
            ) from None


def is_record(leaf: object) -> bool:
    """Returns whether a leaf is plain `bytes`. numpy's byte strings (`np.bytes_`) count
    as arrays."""
    return isinstance(leaf, bytes) and not isinstance(leaf, np.generic)


_KINDS: Final = {
    "U": "text",
    "S": "text of bytes",
    "M": "dates",
    "m": "spans of time",
    "O": "objects",
}
"""Names of values that are not numbers, by the letter of their dtype's kind."""

_MISSING: Final = "text that is missing"

_OBJECTS: Final[dict[frozenset[object], str]] = {
    frozenset([str]): _KINDS["U"],
    frozenset([bytes]): _KINDS["S"],
    frozenset(): _MISSING,
}
"""Names of the values of an array of objects, by the set of the objects' types."""


def kind_of(leaf: object) -> str:
    """Returns a name of the kind of values of an array; values of two kinds cannot be
    in one batch."""
    array = np.asarray(leaf)
    if array.dtype.kind == "O":  # of text, of which some may be missing
        # By the types of the objects: one `str` among `bytes` makes another kind.
        found: set[object] = set(map(type, array.ravel().tolist()))
        return _OBJECTS.get(frozenset(found - {type(None)}), _KINDS["O"])
    return _KINDS.get(array.dtype.kind, "an array")


def _same_kind(arrays: Sequence[Any], path: str) -> None:
    kinds = [_kind(array) for array in arrays]
    kind = next((each for each in kinds if each != _MISSING), _MISSING)
    alike = {kind, _MISSING} if kind in _OBJECTS.values() else {kind}
    if not alike.issuperset(kinds):
        _same(arrays, lambda each: _kind(each) in alike, path)


def _same(
    elements: Sequence[Element], fits: Callable[[Element], bool], path: str
) -> None:
    for number, element in enumerate(elements):
        if not fits(element):
            raise ValueError(
                f"Cannot batch elements of different structure at {path or 'the top'}: "
                f"the first is {_kind(elements[0])}, element {number} is "
                f"{_kind(element)}"
            )


def _kind(element: Element) -> str:
    if isinstance(element, dict):
        return f"a dict with the keys {sorted(map(str, element))}"
    if isinstance(element, tuple):
        return f"a tuple of {len(element)}"
    if (node := node_of(element)) is not None:
        return f"a {type(element).__name__} ({node.treedef})"
    if is_record(element):
        return "a record of bytes"
    if element is None:
        return "None"
    return kind_of(element)

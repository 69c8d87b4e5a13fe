"""The leaves of an element: numbers, booleans, text, records (`bytes`), and arrays of
them.

numpy wraps any other value that a source yields into an array of one object, and a step
would treat that array as a constant. So such a value is refused as soon as a dataset
receives it; the error names its path, its type and what to give instead.

Objects of classes that jax knows as pytrees are structure. jax is consulted only if the
program has imported it; otherwise no class can be registered with it.

Law of leaves: nothing is converted or copied, and arrays of other libraries are not
read, because they may be on a device.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, runtime_checkable

import numpy as np

from ._elements import ending

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Element = Any
"""Nested dicts, tuples and other classes that jax knows as pytrees, with numpy arrays,
numpy scalars or `bytes` as leaves."""

SCALARS: Final = bool | int | float | complex | str | bytes
_PLAIN: Final = SCALARS | np.generic
"""Types of leaves that are data whatever their value is."""
_NO_NODES: Final = _PLAIN | np.ndarray | list | None
"""Types that are known not to be pytree nodes, so that jax need not be consulted; a
list is one array here, not structure."""
_TEXT: Final = str | bytes | None
"""Types of objects that an array may hold: text and records, and None where one is
missing."""
_DATA: Final = (
    "no data: elements are numbers, booleans, text, bytes and arrays of these, in "
    "dicts, tuples and classes that jax knows as pytrees"
)


# These are known by their attributes: no library is imported to ask what something is.
@runtime_checkable
class Array(Protocol):
    """An array, numpy's or of another library."""

    def __array__(self) -> Any: ...


@runtime_checkable
class Assignable(Protocol):
    """A variable, of zstrat or of another library."""

    def assign(self, value: Any) -> Any: ...


@runtime_checkable
class Specified(Protocol):
    """An array, or a description of one: a `TensorSpec`, a ``jax.ShapeDtypeStruct``,
    …"""

    @property
    def shape(self) -> Any: ...

    @property
    def dtype(self) -> Any: ...


@runtime_checkable
class RowSlices(Protocol):
    """Rows of a larger array, or single values of one, with their indices."""

    @property
    def values(self) -> Any: ...

    @property
    def indices(self) -> Any: ...

    @property
    def dense_shape(self) -> Any: ...


@runtime_checkable
class Ragged(Protocol):
    """Rows of different lengths in one array of values, as in TensorFlow's
    RaggedTensor."""

    @property
    def values(self) -> Any: ...

    @property
    def row_splits(self) -> Any: ...


@runtime_checkable
class Densable(Protocol):
    """A sparse array of scipy or jax."""

    def todense(self) -> Any: ...


class Node(NamedTuple):
    """An object of a class that jax knows as a pytree, flattened by one level."""

    paths: tuple[str, ...]
    children: tuple[Any, ...]
    treedef: Any
    """Equal for objects of the same class with the same static part."""

    def rebuilt(self, children: Iterable[Any]) -> Any:
        """Returns an object of the same class with other children."""
        return self.treedef.unflatten(children)


def node_of(value: Any) -> Node | None:
    """Returns an object flattened by one level, if jax knows its class as a pytree.
    Returns None for all other objects, for lists, which are one array, and for sparse
    or ragged arrays. Do not call this for dicts and tuples."""
    # The plain ones first: this is asked of each leaf of each element.
    if isinstance(value, _NO_NODES) or _is_of_jax(value):
        return None
    jax: Any = sys.modules.get("jax")
    if jax is None or isinstance(value, Iterator) or _is_sparse(value):
        return None
    flatten = jax.tree_util.tree_flatten_with_path
    # One level: whatever is below the object itself counts as a leaf.
    found, treedef = flatten(value, lambda node: node is not value)
    # jax gives back itself what it has no pytree class for.
    if len(found) == 1 and found[0][1] is value:
        return None
    paths = tuple([jax.tree_util.keystr(path) for path, _ in found])
    return Node(paths, tuple([child for _, child in found]), treedef)


def require_text(array: Any, path: str, given: object) -> None:
    """Checks that an array of objects holds only text, records or None.

    Args:
        given: The value from which numpy made the array, for the error message.

    Raises:
        TypeError: Names the path, the value, and what to give instead.
    """
    if not _is_text(array):
        raise _no_data(given, path)


def require_data(element: Element) -> None:
    """Checks that all leaves of an element from another library's dataset are data.

    Raises:
        TypeError: As `require_text`.
    """
    for path, node in _unjudged(element, ""):
        # jax warns of an iterator that it is to open: it is a leaf, and refused.
        for place, leaf in _opened(node, path, lambda x: isinstance(x, Iterator)):
            if not _is_data(leaf):
                raise _no_data(leaf, place)


def dense(elements: Iterator[Element], why: str) -> Iterator[Element]:
    """Yields the elements unchanged, and raises if one of them contains a sparse or
    ragged array.

    Args:
        why: A sentence that says what would go wrong, and what else to do.

    Raises (while iterating):
        ValueError: A component is sparse or ragged; with its path and ``why``.
    """
    with ending(elements) as source:
        for element in source:
            _require_dense(element, why)
            yield element
            del element  # the reader may be its only owner while the next is made


def _require_dense(element: Element, why: str) -> None:
    for path, node in _unjudged(element, ""):
        for place, leaf in _opened(node, path, _is_sparse):
            if _is_sparse(leaf):
                raise ValueError(
                    f"component {place or 'of the dataset'} is sparse or ragged (a "
                    f"{type(leaf).__name__}): {why}"
                )


def _no_data(leaf: object, path: str) -> TypeError:
    return TypeError(
        f"component {path or 'of the dataset'} is {_worded(leaf)}, and {_DATA}. "
        f"{_advice(leaf)}"
    )


def _worded(leaf: object) -> str:
    if isinstance(leaf, int):
        return "an int of more than 64 bits"
    if not isinstance(leaf, np.ndarray | list):
        return f"of type {type(leaf).__name__}"
    items = leaf.flat if isinstance(leaf, np.ndarray) else leaf
    names = sorted({type(x).__name__ for x in items if not isinstance(x, str)})
    kind = "an array" if isinstance(leaf, np.ndarray) else "a list"
    return f"{kind} of objects ({', '.join(names[:5])})"


def _advice(leaf: object) -> str:
    if _is_sparse(leaf):
        return (
            "Make it dense (`to_dense()` of zs.IndexedSlices), or give its fields as "
            "arrays, each a separate component: {'values': x.values, 'indices': "
            "x.indices}"
        )
    if isinstance(leaf, np.ndarray | list):
        return (
            "Give one array of numbers (pad rows of different lengths), or several "
            "components as a dict or a tuple; a list is one array"
        )
    return (
        "Give its fields as arrays, in a dict or a tuple, or make an array or text of "
        "it where it is read"
    )


def _unjudged(element: Element, path: str) -> Iterator[tuple[str, Any]]:
    """Yields the values of an element that are neither plain structure nor certainly
    data, each with its path."""
    # By exact type: a subclass of dict or tuple may be a pytree class of its own.
    kind = type(element)
    if kind is dict:
        for key, item in element.items():
            yield from _unjudged(item, f"{path}[{key!r}]")
    elif kind is tuple or kind is list:
        for number, item in enumerate(element):
            yield from _unjudged(item, f"{path}[{number}]")
    elif kind is np.ndarray:
        if element.dtype.hasobject:
            yield path, element
    elif not (element is None or isinstance(element, _PLAIN) or _is_of_jax(element)):
        yield path, element


def _is_of_jax(leaf: object) -> bool:
    """Returns whether a leaf is an array of jax. This check comes first because the
    others take longer."""
    jax: Any = sys.modules.get("jax")
    return jax is not None and isinstance(leaf, jax.Array)


def _opened(
    node: Any, path: str, is_leaf: Callable[[Any], bool]
) -> Iterator[tuple[str, Any]]:
    """Yields the leaves of a jax pytree, and the nodes for which ``is_leaf`` is true,
    each with its path; yields any other value itself."""
    jax: Any = sys.modules.get("jax")
    if jax is not None:
        found, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf)
        for place, leaf in found:
            yield path + jax.tree_util.keystr(place), leaf
    elif isinstance(node, tuple) and not is_leaf(node):
        for place, leaf in _unjudged(tuple(node), path):  # a named one
            yield from _opened(leaf, place, is_leaf)
    else:
        yield path, node


def _is_data(leaf: Any) -> bool:
    if isinstance(leaf, _PLAIN):
        return True
    if isinstance(leaf, np.ndarray):
        return not leaf.dtype.hasobject or _is_text(leaf)
    if isinstance(leaf, Array):
        # By its dtype alone: to convert an array of a device would copy it.
        return not (isinstance(leaf, Specified) and leaf.dtype == object)
    try:  # the rest is what numpy reads without copying: bytearrays, mapped files
        memoryview(leaf)
    except TypeError:
        return False
    return True


def _is_text(array: Any) -> bool:
    is_plain = array.dtype.kind == "O"  # else a record of several fields
    return is_plain and all(isinstance(x, _TEXT) for x in array.flat)


_TUPLES: Final = ("SparseTensorValue", "RaggedTensorValue")
"""TensorFlow's classes of tuples."""


def _is_sparse(node: object) -> bool:
    if isinstance(node, tuple) and type(node).__name__ not in _TUPLES:
        return False  # a user's own structure, whatever its fields are called
    return isinstance(node, RowSlices | Ragged | Densable)

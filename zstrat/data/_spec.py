"""The spec of an element: the shape and dtype of each leaf.

A spec has the structure of an element, with a `TensorSpec` at each leaf. Recipes return
the part that they know without a pass; to know more, draw one element (`Look`).

Law of the file: a spec is never a guess. What no recipe knows is None, until a caller
draws an element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from ._leaves import Specified, node_of
from ._tree import dict_like, is_record, leaves, mapped, rebuilt, with_leaves

if TYPE_CHECKING:
    from ._leaves import Element

Spec = Any
"""The structure of an element with a `TensorSpec` at each leaf; None: unknown."""
Look = Callable[[Any], Spec]
"""A function that finds the spec of a recipe that does not know it, for example by
drawing an element."""

TEXT: Final = np.dtype(object)
"""The dtype of a batch of `bytes`: an array of objects."""

_NUMBERS: Final = "biufc"
"""Letters of numpy for the kinds of numbers; in `_WHOLE` for booleans and integers."""
_WHOLE: Final = "biu"
_ORDER: Final = {"b": 0, "i": 0, "u": 0, "f": 1, "c": 2}
_FLOAT32: Final = 4
"""Bytes of a float32."""


@final
@dataclass(frozen=True, init=False)
class TensorSpec:
    """The shape and dtype of one component of an element.

    Args:
        shape: Lengths of the axes; None for a length that is not the same in all
            elements.
        dtype: `bytes` for records, and for text as TensorFlow has it (an array of
            several is of dtype object); `str` for text of any length.

    Raises:
        TypeError: numpy does not know the dtype, or a length is not an integer.
    """

    shape: tuple[int | None, ...]
    dtype: np.dtype[Any]
    name: str | None = None

    def __init__(
        self,
        shape: Iterable[int | None] = (),
        dtype: Any = np.float32,
        name: str | None = None,
    ) -> None:
        # Normalized, past the frozen class: equal specs compare equal however given.
        sizes = tuple(None if size is None else index(size) for size in shape)
        object.__setattr__(self, "shape", sizes)
        object.__setattr__(self, "dtype", _dtype(dtype))
        object.__setattr__(self, "name", name)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __repr__(self) -> str:
        return f"TensorSpec(shape={self.shape}, dtype={self.dtype.name})"


def unknown(recipe: object) -> Spec:
    """A `Look` that returns an unknown spec, without drawing an element."""
    del recipe


def spec_of(element: Element) -> Spec:
    """Returns the spec of an existing element, of which all lengths are known."""
    return mapped(leaf_spec, element)


def leaf_spec(leaf: Any) -> TensorSpec:
    if is_record(leaf):
        return TensorSpec((), TEXT)
    # Arrays of jax, too: np.asarray would wait for a device, and copy from it.
    if isinstance(leaf, Specified):
        return TensorSpec(leaf.shape, leaf.dtype)
    array = np.asarray(leaf)
    return TensorSpec(array.shape, array.dtype)


def stacked_spec(spec: Spec, rows: int | None) -> Spec:
    """Returns the spec of a batch of elements with the given spec. ``rows`` None:
    batches of different lengths."""

    def stacked(leaf: TensorSpec) -> TensorSpec:
        return TensorSpec((rows, *leaf.shape), leaf.dtype)

    return mapped(stacked, spec)


def row_spec(spec: Spec) -> Spec:
    """Returns the spec of one row of a batch with the given spec."""
    return mapped(lambda leaf: TensorSpec(leaf.shape[1:], leaf.dtype), spec)


def first_axis(spec: Spec) -> int | None:
    """Returns the length of the first axis of all leaves; None if unknown or not the
    same."""
    return common_first_axis(leaf.shape for _, leaf in leaves(spec))


def common_first_axis(shapes: Iterable[tuple[int | None, ...] | None]) -> int | None:
    """Returns the length of the first axis that all shapes share. None if the lengths
    differ, a shape has no axis or is unknown (None), or there are no shapes."""
    # Slices, as the shape of a scalar has no first entry.
    sizes = {None if shape is None else shape[:1] for shape in shapes}
    if len(sizes) != 1:
        return None
    (size,) = sizes
    return size[0] if size else None


def common_spec(first: Spec, second: Spec) -> Spec:
    """Returns the spec that fits elements of both specs; lengths that differ become
    unknown.

    Raises:
        TypeError: The specs differ in structure, in the rank of a leaf, or in a dtype.
    """
    # By path: dicts of the same keys may have another order.
    theirs = dict(leaves(second))
    merged: list[TensorSpec] = []
    for path, ours in leaves(first):
        other = theirs.pop(path, None)
        if other is None or (ours.dtype, ours.ndim) != (other.dtype, other.ndim):
            raise _incompatible(first, second)
        both = zip(ours.shape, other.shape, strict=True)
        merged.append(TensorSpec([x if x == y else None for x, y in both], ours.dtype))
    if theirs:
        raise _incompatible(first, second)
    return with_leaves(first, merged)


def _incompatible(first: Spec, second: Spec) -> TypeError:
    return TypeError(f"Incompatible dataset elements: {first!r} and {second!r}")


def signature_of(given: Any) -> Spec:
    """Converts a user's signature to a spec, with a `TensorSpec` at each leaf.

    Raises:
        TypeError: A leaf has no shape and dtype.
    """
    for path, leaf in leaves(given):
        if not isinstance(leaf, Specified):
            raise TypeError(
                "`output_signature` must be a zs.data.TensorSpec(shape, dtype), or "
                "dicts, tuples and pytree classes of them; at "
                f"{path or 'the top'} it is {leaf!r:.100}"
            )
    return mapped(lambda leaf: TensorSpec(leaf.shape, leaf.dtype), given)


def cast_to_signature(element: Element, signature: Spec, number: int) -> Element:
    """Returns the element converted to the dtypes of its signature.

    Raises:
        TypeError: The element does not fit: in structure, in a shape, or because a
            value would change in that dtype. Says which element, where, what was
            expected and got.
    """
    if dict(leaves(signature)).keys() != dict(leaves(element)).keys():
        raise TypeError(
            f"`generator` yielded an element (number {number}) that did not match the "
            f"expected structure. The expected structure was {signature!r}, but the "
            f"yielded element was {spec_of(element)!r}. A list is one array; for "
            "several components yield a tuple or a dict"
        )
    return _fitted(element, signature, number, "")


def _fitted(element: Element, signature: Spec, number: int, path: str) -> Element:
    if isinstance(signature, dict):
        items_by_key = {
            key: _fitted(element[key], item, number, f"{path}[{key!r}]")
            for key, item in signature.items()
        }
        return dict_like(signature, items_by_key)
    if isinstance(signature, tuple):
        pairs = zip(element, signature, strict=True)
        items = [
            _fitted(e, s, number, f"{path}[{i}]") for i, (e, s) in enumerate(pairs)
        ]
        return rebuilt(signature, items)
    if (wanted := node_of(signature)) is not None and (node := node_of(element)):
        triples = zip(node.children, wanted.children, wanted.paths, strict=True)
        fitting = [_fitted(e, s, number, path + below) for e, s, below in triples]
        return node.rebuilt(fitting)
    return None if signature is None else _leaf(element, signature, number, path)


def _leaf(leaf: Any, spec: TensorSpec, number: int, path: str) -> Any:
    where = f"`generator` yielded an element (number {number}"
    where += f", component {path})" if path else ")"
    found = leaf_spec(leaf)
    if not _fits(found.shape, spec.shape):
        raise TypeError(
            f"{where} of shape {found.shape} where an element of shape {spec.shape} "
            "was expected"
        )
    if found.dtype == spec.dtype:
        return leaf
    cast = _cast(np.asarray(leaf), spec.dtype)
    if cast is None:
        raise TypeError(
            f"{where} of dtype {found.dtype.name} where {spec.dtype.name} was "
            f"expected, {cast_refusal(found.dtype, spec.dtype)}: yield that dtype, or "
            "change the signature"
        )
    return cast


def _cast(array: np.ndarray, dtype: np.dtype[Any]) -> Any:
    """Converts an array to another dtype; returns None if values would change."""
    if dtype == TEXT:
        if array.dtype.kind == "S":
            return array.astype(object)  # each as `bytes`
        if array.dtype.kind != "U":
            return None
        encoded = np.vectorize(str.encode, otypes=[object])(array)
        return encoded if array.ndim else bytes(encoded[()])
    given, wanted = _kind(array.dtype), _kind(dtype)
    if given != wanted and not _is_wider(given, wanted):
        return None
    cast = lossless_cast(array, dtype)
    return cast if cast is None or cast.ndim else cast[()]


def lossless_cast(array: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray | None:
    """Casts numbers to another dtype, rounding to floats as numpy and TensorFlow do.

    Returns None if a value would change otherwise: an integer that is out of the
    dtype's range, a number that would become infinite, a complex number cast to a real
    one.
    """
    given, wanted = _kind(array.dtype), _kind(dtype)
    # First by the dtypes alone; most casts need no look at their values.
    if (array.dtype.kind, dtype.kind) != (given, wanted):
        has_all = False  # nothing is known of the ranges of narrow floats
    elif given == wanted:
        has_all = given in _NUMBERS and dtype.itemsize >= array.dtype.itemsize
    else:  # float32 and wider round all integers to finite numbers
        has_all = given in _WHOLE and wanted in "fc" and dtype.itemsize >= _FLOAT32
    if has_all:
        return array.astype(dtype)
    if given == "c" and wanted != "c":
        if array.imag.any():
            return None
        array = array.real
    # Overflow is what is looked for below, and numpy's warning would come first.
    with np.errstate(over="ignore", invalid="ignore"):
        cast = array.astype(dtype)
    if wanted not in "fc" or given not in _NUMBERS:
        return cast if np.array_equal(cast, array) else None
    finite = np.isfinite(cast)
    if not array.ndim:  # by itself, as `all` takes longer than all the rest
        return cast if finite or not np.isfinite(array) else None
    return cast if finite.all() or (finite | ~np.isfinite(array)).all() else None


def _kind(dtype: np.dtype[Any]) -> str:
    """Returns numpy's letter for the kind of a dtype; "f" also for jax's narrow floats,
    which numpy calls void."""
    # By name: ml_dtypes, which has them, need not be imported for numpy's own.
    is_narrow = dtype.name == "bfloat16" or dtype.name.startswith("float8")
    return "f" if is_narrow else dtype.kind


def _is_wider(given: str, wanted: str) -> bool:
    """Returns whether numbers of the kind ``given`` may be converted to the kind
    ``wanted``."""
    is_known = given in _ORDER and wanted in _ORDER
    return is_known and _ORDER[given] <= _ORDER[wanted]


def cast_refusal(found: np.dtype[Any], wanted: np.dtype[Any]) -> str:
    """Returns the reason why `lossless_cast` refuses numbers, as text."""
    given, kind = _kind(found), _kind(wanted)
    if kind in "fc" and (given == kind or _is_wider(given, kind)):
        return "in which some of its values would be infinite"
    return "which cannot hold its values"


def _fits(shape: Any, wanted: tuple[int | None, ...]) -> bool:
    return len(shape) == len(wanted) and all(
        size is None or size == found for found, size in zip(shape, wanted, strict=True)
    )


def _dtype(given: Any) -> np.dtype[Any]:
    if given is bytes or given == "string":
        return TEXT
    dtype = np.dtype(given)
    # numpy's dtypes of text have a length in them, which differs from batch to batch.
    return np.dtype(str) if dtype.kind == "U" else dtype


def state_dtypes(first: Element) -> dict[str, np.dtype[Any]]:
    """Returns the dtypes that every state of a reduction must have, by path: those of
    the first state."""
    return {path: _state_dtype(leaf) for path, leaf in leaves(first)}


def cast_state(
    state: Element, first: Element, dtypes: dict[str, np.dtype[Any]], number: int
) -> Element:
    """Returns the state after element ``number``, converted to the dtypes of the first
    state.

    Raises:
        TypeError: The state has another structure, or values that the dtypes cannot
            hold.
    """
    found = dict(leaves(state))
    if found.keys() != dtypes.keys():
        raise TypeError(
            f"`reduce_func` returned another structure than `initial_state` has, at "
            f"element {number}: {spec_of(state)!r}, after {spec_of(first)!r}"
        )
    cast = {p: _cast_leaf(leaf, dtypes[p], p, number) for p, leaf in found.items()}
    # Mostly nothing was cast, and rebuilding a tree costs more than comparing leaves.
    if all(cast[path] is leaf for path, leaf in found.items()):
        return state
    return with_leaves(state, cast.values())


def _cast_leaf(leaf: Any, dtype: np.dtype[Any], path: str, number: int) -> Any:
    found = _state_dtype(leaf)
    if found == dtype:
        return leaf
    cast = None
    if found.kind == dtype.kind or np.can_cast(found, dtype, "same_kind"):
        cast = lossless_cast(np.asarray(leaf), dtype)
    if cast is None:
        raise TypeError(
            f"`reduce_func` returned {found} at element {number}, where "
            f"`initial_state` has {dtype}"
            f"{f' (component {path})' if path else ''}, "
            f"{cast_refusal(found, dtype)}: begin with a value of {found}, or convert "
            "the result"
        )
    return cast[()]


def _state_dtype(leaf: Any) -> np.dtype[Any]:
    dtype = np.asarray(leaf).dtype
    # Text may grow from state to state: numpy's dtype of it has the length in it.
    return np.dtype(dtype.kind) if dtype.kind in "US" else dtype

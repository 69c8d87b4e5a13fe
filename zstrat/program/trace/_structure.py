"""The structure of a step's result, and its plain form, which can be sent.

A result is any pytree. Its arrays are *leaves*, numbered in jax's order; Python
numbers, strings, bytes and booleans are *static*: part of the structure. The plain form
is nested lists that msgpack can carry:

    n                    leaf number n
    None                 None
    ["=", value]         a static value
    ["[", x, ...]        a list;    ["(", x, ...]  a tuple
    ["{", [k, x], ...]   a dict
    ["@", name, x, ...]  a node that both sides know by name (`name_node`)
    ["*", node, slot, ...]
                         a pytree with nodes of other classes, flat: a slot is a leaf
                         number or a static value, for a receiver that has traced the
                         function and knows its treedef; ``node`` is for others, in the
                         forms above and this one, or None if a node has no plain form
    ["#", class, aux, x, ...]
                         inside of such a node: a node of another class that jax knows
                         (`ship._classes.class_reference`); aux is its auxiliary data,
                         in these forms

Law of the file: what `encode` writes, `rebuild` reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import jax
import numpy as np
from jax.tree_util import PyTreeDef, default_registry, keystr

from zstrat.program.ship._classes import class_reference, referenced_class
from zstrat.variables import AbstractVariable, Variable, require_unmasked
from zstrat.wire import DTYPES, name_of

from . import joined

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from zstrat.wire import PlainTree

    from .joined import TreeDef

_KEYS: Final = (str, int, bool, float, bytes)
_STATIC: Final = (bool, int, float, str, bytes)
_LEAF: Final[Any] = jax.tree.structure(0)

_named: Final[dict[type, str]] = {}
_makers: Final[dict[str, Callable[[tuple[Any, ...]], Any]]] = {}


def name_node(kind: type, name: str, make: Callable[[tuple[Any, ...]], Any]) -> None:
    """Registers a plain form for a class of pytree nodes that consist only of their
    children.

    ``make(children)`` rebuilds a node. Called where the class is defined.
    """
    _named[kind] = name
    _makers[name] = make


@dataclass(frozen=True, slots=True)
class Static:
    """A leaf of a result that is a plain Python value, not an array."""

    value: bool | int | float | str | bytes


@dataclass(frozen=True, slots=True)
class ResultLayout:
    """Describes how a result is rebuilt from its arrays: dtype name and shape of each
    leaf, and the plain form of the structure.

    There is one object per compiled program: compare it by identity.
    """

    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    structure: PlainTree


@dataclass(frozen=True, slots=True)
class Structure:
    """A result without its arrays: its treedef, and for each leaf the number of an
    array or a static value."""

    treedef: TreeDef
    slots: tuple[int | Static, ...]

    @property
    def plain(self) -> PlainTree:
        """The structure in the form that can be sent; see the module's docstring."""
        return encode(self.treedef, self.slots)

    def difference(self, other: Structure) -> tuple[str, str, str]:
        """Finds the first difference to another structure: its path, the value in this
        one, the value in the other one."""
        if self.treedef == other.treedef:
            numbered = self.treedef.unflatten(range(len(self.slots)))
            paths = jax.tree_util.tree_flatten_with_path(numbered)[0]
            slots = zip(paths, self.slots, other.slots, strict=True)
            for (path, _), slot, other_slot in slots:
                if slot != other_slot:
                    return _place(path), _slot_words(slot), _slot_words(other_slot)
        return "result", f"{self.treedef!s:.300}", f"{other.treedef!s:.300}"

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """Rebuilds the result from the structure and these arrays."""
        return self.treedef.unflatten(
            [s.value if isinstance(s, Static) else leaves[s] for s in self.slots]
        )


def split(
    result: object, read: Callable[[Variable], Any]
) -> tuple[Structure, list[Any]]:
    """Splits a result into structure and arrays. Variables in the result are replaced
    by their values, which ``read`` returns.

    Raises:
        TypeError: A leaf is neither an array nor a plain Python value; names its path.
        ValueError: The result is nested too deeply, or contains itself; or an array has
            a mask, which it would lose.
    """
    paths, treedef = _flat(result)
    slots: list[int | Static] = []
    arrays: list[Any] = []
    for path, leaf in paths:
        # A variable in a result means its value.
        if isinstance(leaf, Variable):
            leaf = read(leaf)
        elif isinstance(leaf, AbstractVariable):
            leaf = leaf.value()
        if isinstance(leaf, _STATIC) and not isinstance(leaf, np.generic):
            slots.append(Static(_static(leaf, path)))
            continue
        _require_array(leaf, path)
        slots.append(len(arrays))
        arrays.append(leaf)
    return Structure(treedef, tuple(slots)), arrays


def _flat(result: object) -> tuple[list[tuple[Any, Any]], TreeDef]:
    try:
        return joined.flatten_with_path(result)
    except (RecursionError, SystemError) as error:
        # jax raises either for a tree that is too deep.
        raise ValueError(
            f"the step returns a {type(result).__name__} that contains itself, or is "
            "nested too deeply: return arrays in a pytree of a few levels"
        ) from error


def encode(treedef: TreeDef, slots: Sequence[int | Static]) -> PlainTree:
    """Encodes a structure to its plain form.

    Raises:
        ValueError: The structure is nested too deeply.
    """
    try:
        plain = _encode(treedef, iter(slots))
    except RecursionError as error:  # with Python 3.13 jax goes deeper than this
        raise ValueError(
            "the step returns a pytree that is nested too deeply: return arrays in a "
            "pytree of a few levels"
        ) from error
    if isinstance(plain, _Foreign):
        return ["*", plain.node, *map(_slot, slots)]
    return plain


def is_described(structure: PlainTree) -> bool:
    """Returns whether a process that has not traced the function can `rebuild` it."""
    return not (isinstance(structure, list) and structure[:2] == ["*", None])


def rebuild(
    structure: PlainTree, leaves: Sequence[Any], treedef: TreeDef | None = None
) -> Any:
    """Rebuilds a result from its plain form and its arrays.

    Args:
        treedef: The treedef of the function's own trace; needed only for results with
            nodes that have no plain form.

    Raises:
        ValueError: The plain form is malformed, or needs a ``treedef`` that is missing
            or does not fit.
        TypeError: The result has a node of a class that this process does not have.
    """
    match structure:
        case None:
            return None
        # To Python a bool is an int, but it is no number of a leaf.
        case bool():
            pass
        case int(number) if 0 <= number < len(leaves):
            return leaves[number]
        case ["=", value]:
            return value
        case ["[", *items]:
            return [rebuild(item, leaves, treedef) for item in items]
        case ["(", *items]:
            return tuple(rebuild(item, leaves, treedef) for item in items)
        case ["{", *pairs]:
            return {k: rebuild(item, leaves, treedef) for k, item in _pairs(pairs)}
        case ["@", str(name), *items] if name in _makers:
            return _makers[name](tuple(rebuild(x, leaves, treedef) for x in items))
        case ["*", node, *slots]:
            # A receiver that has not traced the function builds the nodes itself.
            if treedef is None and node is not None:
                return rebuild(node, leaves)
            if treedef is None or treedef.num_leaves != len(slots):
                raise ValueError(
                    f"a result of {len(slots)} leaves arrived in a pytree without a "
                    f"plain form, but the function was traced here as {treedef}"
                )
            return treedef.unflatten([rebuild(s, leaves) for s in slots])
        case ["#", [*reference], aux, *items]:
            children = [rebuild(item, leaves) for item in items]
            data = referenced_class(reference), _rebuild_aux(aux)
            return _node_of(data, len(children)).unflatten(children)
    raise ValueError(f"malformed structure of a result: {structure!r:.200}")


@dataclass(frozen=True, slots=True)
class _Foreign:
    """A structure has a node of a class without a plain form. ``node`` is its form for
    processes that have not traced the function, None if it has none."""

    node: PlainTree


def _encode(node: TreeDef, slots: Iterator[int | Static]) -> PlainTree | _Foreign:
    data = node.node_data()
    if data is None:
        # Only the number of leaves distinguishes a bare leaf from None.
        return _slot(next(slots)) if node.num_leaves else None
    kind, keys = data
    if kind is type(None):
        return None
    # In jax's order, by which slots are numbered.
    parts: list[Any] = [_encode(child, slots) for child in node.children()]
    foreign = any(isinstance(part, _Foreign) for part in parts)
    if foreign:
        # One node without a plain form leaves the whole tree without one.
        if None in (part.node for part in parts if isinstance(part, _Foreign)):
            return _Foreign(None)
        parts = [part.node if isinstance(part, _Foreign) else part for part in parts]
    plain: PlainTree
    if kind is list:
        plain = ["[", *parts]
    elif kind is tuple:
        plain = ["(", *parts]
    elif kind in _named and keys is None:
        plain = ["@", _named[kind], *parts]
    elif kind is dict and all(isinstance(key, _KEYS) for key in keys):
        plain = ["{", *([k, part] for k, part in zip(keys, parts, strict=True))]
    else:
        try:
            aux = _encode_aux(keys)
        except _NoPlainForm:
            return _Foreign(None)
        return _Foreign(["#", class_reference(kind), aux, *parts])
    return _Foreign(plain) if foreign else plain


class _NoPlainForm(Exception):
    """A node has no plain form, because its auxiliary data are not plain values."""


def _encode_aux(aux: Any) -> PlainTree:
    kind = type(aux)
    if aux is None:
        return None
    # What msgpack carries: integers of 64 bits at most.
    if kind in _STATIC and (kind is not int or -(2**63) <= aux < 2**64):
        return ["=", aux]
    if kind is tuple or kind is list:
        return ["(" if kind is tuple else "[", *map(_encode_aux, aux)]
    if kind is dict and all(type(key) in _KEYS for key in aux):
        return ["{", *([key, _encode_aux(value)] for key, value in aux.items())]
    if isinstance(aux, type):  # the factory of a defaultdict
        return ["#", class_reference(aux)]
    raise _NoPlainForm


def _rebuild_aux(aux: PlainTree) -> Any:
    match aux:
        case ["#", [*reference]]:
            return referenced_class(reference)
        case ["(" | "[" as kind, *items]:
            parts = [_rebuild_aux(item) for item in items]
            return tuple(parts) if kind == "(" else parts
        case ["{", *pairs]:
            return {key: _rebuild_aux(item) for key, item in _pairs(pairs)}
    return rebuild(aux, ())


def _node_of(data: tuple[type, Any], children: int) -> TreeDef:
    """Makes the treedef of a node of a class, with ``children`` leaves as children."""
    make: Any = PyTreeDef.from_node_data_and_children
    try:
        return make(default_registry, data, [_LEAF] * children)
    except (ValueError, RuntimeError) as error:
        raise TypeError(
            f"an element or result contains a {data[0].__qualname__}, which is not "
            f"registered as a pytree in this program: {error}. Register the class "
            "where it is defined, at the top of a module"
        ) from error


def _slot_words(slot: int | Static) -> str:
    return repr(slot.value) if isinstance(slot, Static) else "an array"


def _slot(slot: int | Static) -> PlainTree:
    return ["=", slot.value] if isinstance(slot, Static) else slot


def _pairs(pairs: list[PlainTree]) -> Iterator[tuple[Any, PlainTree]]:
    for pair in pairs:
        match pair:
            case [bool() | int() | float() | str() | bytes() as key, item]:
                yield key, item
            case _:
                raise ValueError(f"malformed item of a dict: {pair!r:.200}")


def _static(leaf: Any, path: Any) -> bool | int | float | str | bytes:
    if not isinstance(leaf, bool):
        # A subclass (a StrEnum, say) loses its class, which cannot be sent.
        leaf = next(kind for kind in _STATIC if isinstance(leaf, kind))(leaf)
    if isinstance(leaf, int) and not -(2**63) <= leaf < 2**64:
        raise TypeError(
            f"the step returns {leaf} at {_place(path)}: integers must fit 64 bits"
        )
    plain: bool | int | float | str | bytes = leaf
    return plain


def _require_array(leaf: Any, path: Any) -> None:
    if isinstance(leaf, jax.Array) and jax.numpy.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    ):
        raise TypeError(
            f"the step returns a random key at {_place(path)}: return "
            "jax.random.key_data(key), and wrap it again with jax.random.wrap_key_data"
        )
    # Of Python; it becomes an array, as msgpack has no complex numbers.
    if isinstance(leaf, complex):
        return
    if not isinstance(leaf, np.ndarray | np.generic | jax.Array):
        raise TypeError(
            f"the step returns {type(leaf).__name__} at {_place(path)}: return arrays, "
            "numbers, strings, None, and pytrees of them"
        )
    require_unmasked(leaf, f"what the step returns at {_place(path)}")
    if name_of(leaf.dtype) is None:
        raise TypeError(
            f"the step returns an array of dtype {leaf.dtype} at {_place(path)}: "
            f"return one of {', '.join(DTYPES)}"
        )


def _place(path: Any) -> str:
    return f"result{keystr(path)}"

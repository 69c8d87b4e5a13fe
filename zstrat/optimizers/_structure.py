"""The structure of the tree that an optimizer updates, and its encoding as plain data.

Paths, labels and masks depend on where a leaf is in the tree, so a parameter server
traces an optimizer on a tree of the same structure. Only a coordinator may send code; a
worker sends the structure as plain data: dicts, lists and tuples as they are, any other
container as a `Mirror` with the same keys.

The leaves of a list of ``(gradient, variable)`` pairs have no paths. An optimizer that
reads their keys gets an error that says so.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NoReturn, final

import jax
from jax.tree_util import (
    DictKey,
    FlattenedIndexKey,
    GetAttrKey,
    SequenceKey,
    register_pytree_with_keys,
    tree_flatten_with_path,
)

from zstrat.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from zstrat.wire import PlainTree

Path = tuple[Any, ...]
"""The path of a leaf: keys of jax (``DictKey``, ``SequenceKey``, ...), from the root to
the leaf."""


@final
class TreeStructure:
    """The structure of a pytree, and the path of each of its leaves."""

    def __init__(self, treedef: Any) -> None:
        self.treedef = treedef
        numbered = treedef.unflatten(list(range(treedef.num_leaves)))
        self.paths: list[Path] = [p for p, _ in tree_flatten_with_path(numbered)[0]]

    def __len__(self) -> int:
        return len(self.paths)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TreeStructure) and self.treedef == other.treedef

    def __hash__(self) -> int:
        return hash(self.treedef)

    def __repr__(self) -> str:
        return f"TreeStructure({self.treedef})"

    @staticmethod
    def of(tree: Any) -> TreeStructure:
        """Returns the structure of a pytree. Leaves are what jax takes for leaves."""
        return TreeStructure(jax.tree.structure(tree))

    @staticmethod
    def of_pairs(names: Sequence[str]) -> TreeStructure:
        """Returns the structure of a list whose elements have no paths; ``names`` are
        those of the elements in errors."""
        return TreeStructure(jax.tree.structure(Pairs(range(len(names)), names)))

    def words(self, leaf: int) -> str:
        """Returns the name of a leaf for messages: its path, or "" if it has none."""
        path = self.paths[leaf]
        if any(isinstance(key, Unnamed) for key in path):
            return ""
        return jax.tree_util.keystr(path)

    def plain(self) -> PlainTree:
        """Returns the structure as data for the wire; inverse of `from_plain`."""
        numbered = self.treedef.unflatten(list(range(len(self))))
        return _plain(numbered)

    @staticmethod
    def from_plain(plain: PlainTree) -> TreeStructure:
        """Rebuilds a structure from the data of `plain`.

        Raises:
            InvalidArgumentError: The data does not describe a structure.
        """
        return TreeStructure(jax.tree.structure(_built(plain, depth=0)))

    @property
    def is_plain(self) -> bool:
        """Whether `from_plain` rebuilds exactly this structure, without a `Mirror` in
        place of a container of another class."""
        return TreeStructure.from_plain(self.plain()) == self


@final
class Unnamed:
    """The key of an element of a list whose elements have no paths. Reading an
    attribute, the text or equality of the key raises an error that says what to do."""

    __slots__ = ("_number", "_who")

    def __init__(self, number: int, who: str) -> None:
        self._number, self._who = number, who

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            # Python and `copy` ask for such names to find out whether they exist.
            raise AttributeError(name)
        raise self._refusal()

    def __str__(self) -> str:
        # jax writes paths down to name the arguments of what it traces.
        if _asks_jax_itself():
            return f"<{self._number}>"
        raise self._refusal()

    def __eq__(self, other: object) -> bool:
        # A comparison with a key is a search for a path.
        if not isinstance(other, Unnamed):
            raise self._refusal()
        return (self._number, self._who) == (other._number, other._who)

    def __hash__(self) -> int:
        return hash((self._number, self._who))

    def __repr__(self) -> str:
        return f"<no path: {self._who}>"

    def _refusal(self) -> ValueError:
        return ValueError(
            f"the optimizer asks for the path of variable {self._who!r}, and "
            "apply_gradients was given pairs, which have none: name the tree, as "
            "zs.Optimizer(transformation, params=params), or give "
            "apply_gradients(grads, params) two pytrees"
        )


def _asks_jax_itself() -> bool:
    """Returns whether jax itself reads the text of a key; False if an optimizer does,
    through jax's functions of trees (``keystr``)."""
    # Frame 0 is this function, 1 is `__str__`.
    frame = sys._getframe(2)
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        # An optimizer may call these functions of jax, too: what counts is who called
        # them.
        if not name.endswith("tree_util"):
            return name.startswith("jax.")
        frame = frame.f_back  # type: ignore[assignment]
    return False


@final
class Pairs:
    """A list whose elements have no paths: (gradient, variable) pairs."""

    def __init__(self, values: Iterable[Any], names: Sequence[str]) -> None:
        self.values, self.names = tuple(values), tuple(names)

    @staticmethod
    def as_lists(tree: Any) -> Any:
        """Replaces each `Pairs` in a pytree by a list."""

        def found(node: Any) -> bool:
            return isinstance(node, Pairs)

        return jax.tree.map(
            lambda node: [*node.values] if found(node) else node, tree, is_leaf=found
        )


register_pytree_with_keys(
    Pairs,
    lambda pairs: (
        [
            (Unnamed(n, name), value)
            for n, (name, value) in enumerate(
                zip(pairs.names, pairs.values, strict=True)
            )
        ],
        pairs.names,
    ),
    lambda names, values: Pairs(values, names),
    lambda pairs: (pairs.values, pairs.names),
)


@final
class Mirror:
    """A container with the keys of one whose class only another process knows."""

    def __init__(self, keys: Sequence[Any], values: Iterable[Any]) -> None:
        self.keys, self.values = tuple(keys), tuple(values)


register_pytree_with_keys(
    Mirror,
    lambda node: (list(zip(node.keys, node.values, strict=True)), node.keys),
    lambda keys, values: Mirror(keys, values),
    lambda node: (node.values, node.keys),
)

_DEPTH = 256
"""The most levels of a structure that is decoded, more than any tree of parameters has:
received data is not trusted."""


def _plain(node: Any) -> PlainTree:
    match node:
        case int():
            return node
        case None:
            return ["n"]
        case Pairs():
            return ["p", list(node.names), [_plain(x) for x in node.values]]
        case Mirror():
            keys, children = [_plain_key(key) for key in node.keys], node.values
            return ["m", keys, [_plain(x) for x in children]]
    if type(node) is dict and all(type(key) is str for key in node):
        return ["d", list(node), [_plain(x) for x in node.values()]]
    if type(node) is list or type(node) is tuple:
        return [type(node).__name__[0], [_plain(x) for x in node]]
    # A class that is registered with jax: its keys, without the class.
    pairs = tree_flatten_with_path(node, is_leaf=lambda other: other is not node)[0]
    return ["m", [_plain_key(p[0]) for p, _ in pairs], [_plain(x) for _, x in pairs]]


def _plain_key(key: Any) -> PlainTree:
    match key:
        case DictKey(key=str() | int() as name):
            return ["d", name]
        case SequenceKey(idx=number):
            return ["s", number]
        case GetAttrKey(name=name):
            return ["a", name]
        case FlattenedIndexKey(key=int() as number):
            return ["f", number]
    return ["a", str(key)]


def _built(plain: PlainTree, depth: int) -> Any:
    # What comes from another task may be nested deeper than Python lets calls be.
    if depth > _DEPTH:
        raise InvalidArgumentError(f"a tree of variables is over {_DEPTH} deep")
    match plain:
        case int():
            return plain
        case ["n"]:
            return None
        case ["l", [*children]]:
            return [_built(x, depth + 1) for x in children]
        case ["t", [*children]]:
            return tuple([_built(x, depth + 1) for x in children])
        case ["d", [*keys], [*children]] if len(keys) == len(children):
            built = [_built(x, depth + 1) for x in children]
            return dict(zip(map(str, keys), built, strict=True))
        case ["p", [*names], [*children]] if len(names) == len(children):
            return Pairs([_built(x, depth + 1) for x in children], [*map(str, names)])
        case ["m", [*keys], [*children]] if len(keys) == len(children):
            built = [_built(x, depth + 1) for x in children]
            return Mirror([_built_key(key) for key in keys], built)
    raise InvalidArgumentError(f"not the structure of a tree: {plain!r:.80}")


def _built_key(plain: PlainTree) -> Any:
    match plain:
        case ["d", str() | int() as name]:
            return DictKey(name)
        case ["s", int() as number]:
            return SequenceKey(number)
        case ["a", str() as name]:
            return GetAttrKey(name)
        case ["f", int() as number]:
            return FlattenedIndexKey(number)
    raise InvalidArgumentError(f"not the key of a tree: {plain!r:.80}")

"""The objects of a program as a graph: which object holds which others, under which
names.

A checkpoint stores this graph beside its tensors, and a restore walks the stored graph
and the program's graph together from the root. So a variable is found by the path on
which the program reaches it, whatever the variable is called, and one that is reached
on two paths is stored once.
"""

from __future__ import annotations

import abc
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import jax
import numpy as np
from jax.tree_util import (
    DictKey,
    FlattenedIndexKey,
    GetAttrKey,
    SequenceKey,
    tree_flatten_with_path,
)

from zstrat.coordinator import PerWorkerIterator
from zstrat.data import CheckpointableIterator
from zstrat.program import LocalOptimizer
from zstrat.variables import AbstractVariable, Module, Optimizer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

SAVE_COUNTER: Final = "save_counter"

SavedIterator = CheckpointableIterator | PerWorkerIterator
"""An iterator whose position a checkpoint saves."""


class Tracked(abc.ABC):
    """An object that says which of its attributes a checkpoint of it includes."""

    @property
    @abc.abstractmethod
    def tracked(self) -> dict[str, Any]:
        """Returns the objects that a checkpoint of this object includes, by name."""


@dataclass(slots=True)
class ObjectNode:
    """One object of the graph: its ``path`` from the root (the shortest), and the
    objects that it holds, by name."""

    value: Any
    path: str
    children: dict[str, ObjectNode] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        match self.value:
            case AbstractVariable():
                return "variable"
            case Optimizer():
                return "optimizer"
            case CheckpointableIterator() | PerWorkerIterator():
                return "iterator"
        return "group"


@dataclass(frozen=True, slots=True)
class Graph:
    """All objects that are reachable from ``nodes[0]``, the nearest first."""

    nodes: tuple[ObjectNode, ...]

    @property
    def variables(self) -> list[ObjectNode]:
        return [node for node in self.nodes if node.kind == "variable"]

    @property
    def optimizers(self) -> list[ObjectNode]:
        return [node for node in self.nodes if node.kind == "optimizer"]

    @property
    def local_optimizers(self) -> list[ObjectNode]:
        return [node for node in self.nodes if isinstance(node.value, LocalOptimizer)]

    @property
    def iterators(self) -> list[ObjectNode]:
        return [node for node in self.nodes if node.kind == "iterator"]


def graph_of(root: Any, name: str = "", *, skip: frozenset[str] = frozenset()) -> Graph:
    """Returns the graph of the objects below ``root``.

    Args:
        name: Path of the root.
        skip: Names of children of the root that are left out.

    Raises:
        TypeError: A container that was given to be saved contains something that cannot
            be saved: an array or a number, which no restore could replace in place; or
            two keys with the same text.
    """
    first = ObjectNode(root, name)
    nodes, known = [first], {id(root): first}
    # The nodes keep what they are about alive, so that no id is used twice.
    todo = deque([(first, True)])
    # Breadth first: the path of an object is the shortest one that leads to it.
    while todo:
        node, is_strict = todo.popleft()
        # A module holds whatever its class needs; a container was given to be saved.
        strict_below = is_strict and not isinstance(node.value, Module)
        children = held(node.value)
        if strict_below and isinstance(node.value, dict):
            _require_all(node.value, children)
        for key, value in children.items():
            if node is first and key in skip:
                continue
            path = f"{node.path}/{escaped(key)}".removeprefix("/")
            if not is_trackable(value, strict=strict_below, named=strict_below):
                if strict_below and value is not None:
                    raise TypeError(_refusal(path, value))
                continue
            child = known.get(id(value))
            if child is None:  # else it is reached in two ways, and stored once
                child = known[id(value)] = ObjectNode(value, path)
                nodes.append(child)
                todo.append((child, strict_below))
            node.children[key] = child
    return Graph(tuple(nodes))


def held(value: Any) -> dict[str, Any]:
    """Returns the objects that an object holds, by name; {} if it is a leaf."""
    # Leaves first: a list may hold a million numbers, and jax is slow to ask.
    match value:
        case AbstractVariable() | str() | bytes() | int() | float() | np.ndarray():
            return {}
        case CheckpointableIterator() | PerWorkerIterator():
            return {}
        case Optimizer():
            return {} if value.iterations is None else {"iterations": value.iterations}
        case LocalOptimizer():
            pace = {} if value.pace is None else {"pace": value.pace}
            return {"outer": value.outer, **pace}
        case Tracked():
            return value.tracked
        case Module():
            # Sorted: nodes do not depend on the order of assignments.
            return dict(sorted(vars(value).items()))
        case dict():
            return _by_text((str(key), each) for key, each in value.items())
    # Named tuples are pytrees of jax, with names.
    if isinstance(value, list) or type(value) is tuple:
        return {str(index): each for index, each in enumerate(value)}
    return _tree_level(value)


def is_trackable(value: Any, *, strict: bool = False, named: bool = True) -> bool:
    """Returns whether an object is, or contains, something that a checkpoint saves.

    Args:
        strict: Return True for a container even if it contains nothing that can be
            saved, so that its contents are checked.
        named: The object is not below a module. The position of an iterator is saved
            only if the user includes the iterator by name, not if a module happens to
            hold it.
    """
    if isinstance(
        value, AbstractVariable | Optimizer | LocalOptimizer | Tracked | Module
    ):
        return True
    if isinstance(value, SavedIterator):
        return named
    below = held(value)
    if strict and (below or isinstance(value, dict | list | tuple)):
        return True
    return any(is_trackable(each, named=named) for each in below.values())


def escaped(name: str) -> str:
    """Returns the name in a form that can be a part of a path: different names have
    different forms, and none begins with one dot followed by a small letter (as
    ``.slots`` does)."""
    # Dots first: those of ".S" must stay single.
    return name.replace(".", "..").replace("/", ".S")


def _tree_level(value: Any) -> dict[str, Any]:
    """Returns the children of a pytree node of jax, one level below it."""
    if value is None or jax.tree_util.all_leaves([value]):
        return {}
    paths, _ = tree_flatten_with_path(value, is_leaf=lambda node: node is not value)
    return _by_text(_keyed(paths))


def _by_text(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Returns children by their keys as text, in which form a checkpoint stores keys.

    If two keys have the same text, the child that can be saved is kept.

    Raises:
        TypeError: Two different children that can be saved have the same text as key.
    """
    found: dict[str, Any] = {}
    for key, each in pairs:
        other = found.get(key)
        if other is not None and is_trackable(other):
            if each is other or not is_trackable(each):
                continue
            raise _written_alike(key)
        found[key] = each
    return found


def _require_all(given: dict[Any, Any], children: dict[str, Any]) -> None:
    """Refuses a container, given to be saved, if one of its values is not among its
    children: a plain value whose key has the same text as the key of a variable.

    Raises:
        TypeError: The container has such a value; names its key.
    """
    for key, each in given.items():
        if each is not None and children[str(key)] is not each:
            raise _written_alike(str(key))


def _written_alike(key: str) -> TypeError:
    return TypeError(
        f"two keys of a container are written {key!r} (such as 1 and '1'), and a "
        "checkpoint would hold one of the two values: give them keys whose texts differ"
    )


def _keyed(paths: Any) -> Iterator[tuple[str, Any]]:
    for (key, *_), child in paths:
        match key:
            case GetAttrKey(name=name):
                yield name, child
            case DictKey(key=name) | FlattenedIndexKey(key=name):
                yield str(name), child
            case SequenceKey(idx=index):
                yield str(index), child
            case _:  # a class of the user's own for keys: how it prints must do
                yield str(key), child


def _refusal(path: str, value: Any) -> str:
    return (
        f"{path} is {type(value).__name__} ({value!r:.40}), and a checkpoint holds "
        "zs.Variable, zs.Optimizer, zs.Module, iterators of datasets and containers "
        "of them: a restore could not replace it in place. Make it a "
        "zs.Variable, or leave it out"
    )

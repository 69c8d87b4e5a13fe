"""Finds the variables of an object among its attributes, as ``tf.Module`` does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._sharded import ShardedVariable
from ._variable import Variable

if TYPE_CHECKING:
    from collections.abc import Iterator


class Module:
    """Base of models that keep variables in attributes.

    Variables in lists, tuples, dicts and other modules count too, each once, in the
    order of the attributes' names. Of a sharded variable the components count.
    """

    def __init__(self, name: str | None = None) -> None:
        self._name = type(self).__name__.lower() if name is None else name

    @property
    def name(self) -> str:
        return self._name

    @property
    def variables(self) -> tuple[Variable, ...]:
        return tuple(leaf for leaf in _walk(self, set()) if isinstance(leaf, Variable))

    @property
    def trainable_variables(self) -> tuple[Variable, ...]:
        return tuple(v for v in self.variables if v.trainable)

    @property
    def submodules(self) -> tuple[Module, ...]:
        """All modules below this one."""
        found = (leaf for leaf in _walk(self, set()) if isinstance(leaf, Module))
        return tuple(module for module in found if module is not self)


def _walk(node: Any, seen: set[int]) -> Iterator[Variable | Module]:
    if id(node) in seen:
        return
    if isinstance(node, Variable):
        seen.add(id(node))
        yield node
        return
    children: list[Any] = []
    match node:
        case ShardedVariable():
            children = node.variables
        case Module():
            yield node
            children = [value for _, value in sorted(vars(node).items())]
        case dict():
            children = list(node.values())
        case list() | tuple():
            children = list(node)
    seen.add(id(node))
    for child in children:
        yield from _walk(child, seen)

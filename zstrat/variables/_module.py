"""Finds the variables of an object among its attributes, as ``tf.Module`` does."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final

from ._sharded import ShardedVariable
from ._variable import Variable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    OnAttribute = Callable[["Module", str, Any], None]

_watchers: Final[dict[int, list[OnAttribute]]] = {}
"""By ``id`` of a living module; a user's class may compare or hash as it likes."""


class Module:
    """Base of models that keep variables in attributes.

    Variables in lists, tuples, dicts and other modules count too, each once, in the
    order of the attributes' names. Of a sharded variable the components count.
    """

    def __init__(self, name: str | None = None) -> None:
        self._name = type(self).__name__.lower() if name is None else name

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        for told in tuple(_watchers.get(id(self), ())):
            told(self, name, value)

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


def watch(module: Module, told: OnAttribute) -> None:
    """Has ``told(module, name, value)`` called after each attribute that is set."""
    if id(module) not in _watchers:
        _watchers[id(module)] = []
        weakref.finalize(module, _watchers.pop, id(module), None).atexit = False
    _watchers[id(module)].append(told)


def unwatch(module: Module, told: OnAttribute) -> None:
    """Inverse of `watch`."""
    if told in (listed := _watchers.get(id(module), [])):
        listed.remove(told)


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

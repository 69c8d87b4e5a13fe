"""Variables in pytrees, and among the attributes of a `Module`.

`create_variables` converts a pytree of arrays to a pytree of variables, `values`
converts it back. A `Module` finds variables among its attributes, as ``tf.Module``
does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import jax
from jax.tree_util import keystr

from ._abstract import AbstractVariable
from ._creator import VariableRequest, is_trainable
from ._hash_table import HashTable
from ._sharded import ShardedVariable
from ._storage import VariableAggregation, VariableSynchronization
from ._variable import Variable, create

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    OnAttribute = Callable[["Module", str, Any], None]


def create_variables(
    tree: Any,
    *,
    name: str = "",
    dtype: Any = None,
    trainable: bool | None = None,
    aggregation: VariableAggregation = VariableAggregation.NONE,
    synchronization: VariableSynchronization = VariableSynchronization.AUTO,
) -> Any:
    """Replaces each array of a pytree by a new `Variable`, named by the path of the
    array.

    ``{"dense": {"kernel": k}}`` gives a variable ``"dense/kernel"``, or
    ``"name/dense/kernel"`` with a ``name``. Creates all of them in one round trip.

    Args:
        dtype: The dtype of all variables; default: that of each array.
        trainable: Whether all variables are trainable; default: True, unless their
            synchronization is ON_READ.

    Raises:
        ValueError, TypeError: As `Variable`; the error names the leaf.
    """
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    names = [
        "/".join(filter(None, (name, keystr(path, simple=True, separator="/"))))
        for path, _ in paths
    ]
    requests = [
        VariableRequest(
            leaf,
            None,
            dtype,
            # An array that is the whole tree has no path.
            leaf_name or "Variable",
            is_trainable(trainable, synchronization, leaf_name),
            aggregation,
            synchronization,
        )
        for leaf_name, (_, leaf) in zip(names, paths, strict=True)
    ]
    return jax.tree.unflatten(treedef, create(requests))


def values(tree: Any) -> Any:
    """Replaces every variable of a pytree by its value; other leaves stay.

    Inside a step the values are traced arrays, elsewhere read-only numpy arrays.
    """
    return jax.tree.map(
        lambda leaf: leaf.value() if isinstance(leaf, AbstractVariable) else leaf,
        tree,
    )


_LISTENERS: Final = "_zstrat_listeners"


class _Listeners(list["OnAttribute"]):
    """The callbacks of `watch` for one module. The module itself keeps this object, as
    module and callbacks may refer to each other. A copy of the module, here or on
    another task, has no callbacks."""

    def __reduce__(self) -> Any:
        return _Listeners, ()


class Module:
    """Base of models that keep variables in attributes.

    Variables in lists, tuples, dicts and other modules are found too, each once, in the
    order of the attributes' names. A sharded variable is listed as its components, a
    `HashTable` as one variable.
    """

    def __init__(self, name: str | None = None) -> None:
        self._name = type(self).__name__.lower() if name is None else name

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        # Over a copy, because a callback may end its own watch.
        for callback in tuple(vars(self).get(_LISTENERS, ())):
            callback(self, name, value)

    @property
    def name(self) -> str:
        """The name that the module was given, or that of its class."""
        return self._name

    @property
    def variables(self) -> tuple[Variable | HashTable, ...]:
        """All variables of this module and of its submodules."""
        kinds = (Variable, HashTable)
        return tuple(leaf for leaf in _walk(self, set()) if isinstance(leaf, kinds))

    @property
    def trainable_variables(self) -> tuple[Variable | HashTable, ...]:
        """The variables of this module and its submodules that are trainable."""
        return tuple(v for v in self.variables if v.trainable)

    @property
    def submodules(self) -> tuple[Module, ...]:
        """All modules among the attributes of this module, directly or nested."""
        modules = (leaf for leaf in _walk(self, set()) if isinstance(leaf, Module))
        return tuple(module for module in modules if module is not self)


def watch(module: Module, callback: OnAttribute) -> None:
    """Makes a module call ``callback(module, name, value)`` after each attribute that
    is set."""
    vars(module).setdefault(_LISTENERS, _Listeners()).append(callback)


def unwatch(module: Module, callback: OnAttribute) -> None:
    """Removes a callback that `watch` added."""
    listeners = vars(module).get(_LISTENERS, [])
    if callback in listeners:
        listeners.remove(callback)


def _walk(node: Any, seen: set[int]) -> Iterator[Variable | HashTable | Module]:
    # Modules may refer to each other, and a variable counts once wherever it occurs.
    if id(node) in seen:
        return
    if isinstance(node, Variable | HashTable):
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

"""Pytrees of variables, from pytrees of arrays and back."""

from __future__ import annotations

from typing import Any

import jax
from jax.tree_util import keystr

from ._abstract import AbstractVariable
from ._creator import VariableRequest, is_trainable
from ._spec import VariableAggregation, VariableSynchronization
from ._variable import create


def create_variables(
    tree: Any,
    *,
    name: str = "",
    dtype: Any = None,
    trainable: bool | None = None,
    aggregation: VariableAggregation = VariableAggregation.NONE,
    synchronization: VariableSynchronization = VariableSynchronization.AUTO,
) -> Any:
    """The same pytree with a new `Variable` for each array, named by its path.

    ``{"dense": {"kernel": k}}`` gives a variable ``"dense/kernel"``, with ``name`` and
    a slash before it if there is one. All of them are created in one round trip.

    Args:
        dtype: Of all the variables; left out: each array's own.
        trainable: Of all the variables; left out: they are, unless their
            synchronization is ON_READ.

    Raises:
        ValueError, TypeError: As `Variable`; names the leaf.
    """
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    names = ["/".join(filter(None, (name, _words(path)))) for path, _ in paths]
    requests = [
        VariableRequest(
            leaf,
            None,
            dtype,
            each or "Variable",
            is_trainable(trainable, synchronization, each),
            aggregation,
            synchronization,
        )
        for each, (_, leaf) in zip(names, paths, strict=True)
    ]
    return jax.tree.unflatten(treedef, create(requests))


def values(tree: Any) -> Any:
    """The pytree with every variable replaced by its value; other leaves stay.

    Inside a step the values are traced arrays, elsewhere read-only numpy arrays.
    """
    return jax.tree.map(
        lambda leaf: leaf.value() if isinstance(leaf, AbstractVariable) else leaf,
        tree,
    )


def _words(path: tuple[Any, ...]) -> str:
    return keystr(path, simple=True, separator="/")

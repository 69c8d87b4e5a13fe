"""Pytrees of variables, made from pytrees of arrays."""

from __future__ import annotations

from typing import Any

import jax
from jax.tree_util import keystr

from ._creator import Request
from ._spec import VariableAggregation, VariableSynchronization
from ._variable import create


def create_variables(
    tree: Any,
    *,
    name: str = "",
    dtype: Any = None,
    trainable: bool = True,
    aggregation: VariableAggregation = VariableAggregation.NONE,
    synchronization: VariableSynchronization = VariableSynchronization.AUTO,
) -> Any:
    """The same pytree with a new `Variable` for each array, named by its path.

    ``{"dense": {"kernel": k}}`` gives a variable ``"dense/kernel"``, with ``name`` and
    a slash before it if there is one. All of them are created in one round trip.

    Args:
        dtype: Of all the variables; left out: each array's own.

    Raises:
        ValueError, TypeError: As `Variable`; names the leaf.
    """
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    requests = [
        Request(
            leaf,
            None,
            dtype,
            "/".join(filter(None, (name, _words(path)))) or "Variable",
            trainable,
            aggregation,
            synchronization,
        )
        for path, leaf in paths
    ]
    return jax.tree.unflatten(treedef, create(requests))


def _words(path: tuple[Any, ...]) -> str:
    return keystr(path, simple=True, separator="/")

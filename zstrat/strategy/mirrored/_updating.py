"""The update context: a function that changes a variable, called for its components.

A variable that all replicas share is one array, so what is done to each of its copies
is done once, with operands that are the same for all of them. Where each replica has a
copy of its own, the function is called for each copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from zstrat.program.trace import is_apart
from zstrat.strategy._frames import Frame, entered
from zstrat.strategy.replica._per_replica import (
    DistributedValues,
    PerReplica,
    is_distributed,
)
from zstrat.strategy.replica._regroup import regroup
from zstrat.variables import Variable

from ._copies import copies_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zstrat.strategy._abstract import AbstractStrategy
    from zstrat.variables import AbstractVariable


def components_of(variable: AbstractVariable) -> tuple[AbstractVariable, ...]:
    """The copies of a variable of which each replica has its own, or the variable."""
    if isinstance(variable, Variable) and is_apart(variable):
        return copies_of(variable)
    return (variable,)


def updated(
    strategy: AbstractStrategy,
    fns: Sequence[Callable[..., Any]],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    group: bool,
) -> Any:
    """What ``fns`` return, one for each component in its update context.

    Raises:
        ValueError: There is a value per replica among the arguments, or a mirrored one
            of more values than one that are not as many as the components.
    """
    given = jax.tree.leaves((args, kwargs), is_leaf=is_distributed)
    if any(isinstance(leaf, PerReplica) for leaf in given):
        raise ValueError(
            "update: a value per replica among the arguments; they may contain "
            "mirrored values alone: bring it together with reduce_to first"
        )
    for leaf in given:
        if isinstance(leaf, DistributedValues):
            _require_enough(leaf, len(fns))
    results = []
    for number, fn in enumerate(fns):
        own_args, own_kwargs = _own(number, (tuple(args), dict(kwargs)))
        with entered(Frame(strategy, update=number)):
            results.append(fn(*own_args, **own_kwargs))
    if not group:
        return _listed(results)
    return results[0] if len(results) == 1 else regroup(results)


def agreed(tree: Any) -> Any:
    """What all replicas have brought, as one value. In a trace it is that of the first
    one: whether they are equal is not known there.

    Raises:
        ValueError: They have brought different values.
    """
    return jax.tree.map(_agreed_leaf, tree, is_leaf=is_distributed)


def _agreed_leaf(leaf: Any) -> Any:
    if not isinstance(leaf, PerReplica):
        return leaf
    first, *others = leaf.values
    traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(leaf.values))
    if not traced and not all(_are_equal(first, other) for other in others):
        raise ValueError(
            f"update: replicas give different values, {leaf!r:.200}: bring them "
            "together first (get_replica_context().all_reduce)"
        )
    return first


def _are_equal(one: Any, other: Any) -> bool:
    # As bytes of numbers: nan is as good as another nan.
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


def _require_enough(mirrored: DistributedValues, components: int) -> None:
    """Refuses a mirrored value that some component has no part of.

    Raises:
        ValueError: It has other devices than the components.
    """
    count = mirrored.replicas
    # One value is for all of them, and one component may have any of several.
    if count == 1 or count == components or (count and components == 1):
        return
    raise ValueError(
        f"update: a mirrored value of {count} values among the arguments, where copies "
        f"to update: {components}; expected as many values, or one for all: reduce_to "
        "with the variable as its destination makes such a value"
    )


def _own(component: int, tree: Any) -> Any:
    """The pytree as that component sees it."""

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, DistributedValues):
            return leaf
        return leaf.values[component if leaf.replicas > 1 else 0]

    return jax.tree.map(own, tree, is_leaf=is_distributed)


def _listed(results: Sequence[Any]) -> Any:
    """One tree of the results, in which each leaf is the list of the results'
    leaves."""
    return jax.tree.map(
        lambda *leaves: list(leaves), *results, is_leaf=lambda x: x is None
    )

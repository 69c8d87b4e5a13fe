"""The arguments of the replicas of one program: a part for each, or the same for all.

Of the arguments of ``run`` a value per replica is split, and so are the rows of arrays
that were drawn from an iterator in this step; other arrays are shared. A value that is
not an array is not an input of a program: it stays the Python value that it is.

Law of the file: it computes nothing, and only concatenates parts that are separate
arrays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zstrat.program.trace import Plain, joined, uncut
from zstrat.variables import recorder

from ._mapped import Spread
from ._per_replica import DistributedValues, Mirrored, PerReplica, is_distributed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zstrat.strategy._abstract import AbstractStrategy

    from ._collective import Team

NUMBERS: Final = (int, float, complex)
"""The numbers of Python; booleans are integers."""


class UnevenParts(ValueError):
    """The replicas' parts of an argument cannot be one array on devices."""


def unwrapped(tree: Any) -> Any:
    """Returns the pytree with Python numbers in place of `Plain` ones."""
    return joined.mapped(_value, tree)


def require_one_each(node: Any, replicas: int) -> None:
    """Refuses a value per replica for another number of replicas.

    Raises:
        ValueError: It has another number of values.
    """
    if isinstance(node, DistributedValues) and node.replicas != replicas:
        raise ValueError(
            f"a PerReplica argument of strategy.run has {node.replicas} values; "
            f"expected one for each of the {replicas} replicas"
        )


def require_all_one_each(tree: Any, replicas: int) -> None:
    """Refuses values per replica in a pytree as `require_one_each` does."""
    for node in jax.tree.leaves(tree, is_leaf=is_distributed):
        require_one_each(node, replicas)


def is_known(array: Any) -> bool:
    """Returns whether devices know the dtype of an array; random keys have a dtype of
    jax."""
    return isinstance(array, jax.Array) or np.asarray(array).dtype.kind not in "OSUmM"


def require_known(tree: Any) -> None:
    """Refuses arrays of text, dates and objects, which devices do not know: a function
    may draw and pass them on without a step that refuses them.

    Raises:
        UnevenParts: There is such an array.
    """
    for leaf in joined.leaves(tree):
        if isinstance(leaf, np.ndarray | np.generic) and not is_known(leaf):
            raise UnevenParts(f"arrays of dtype {leaf.dtype} cannot be on devices")


def distribute_rows(tree: Any, replicas: int) -> Any:
    """Replaces each drawn array of a pytree by a value per replica: its rows in order.

    Raises:
        ValueError: The rows do not split evenly.
    """
    return jax.tree.map(
        lambda leaf: (
            PerReplica.of_whole(_rows(leaf, replicas).array, replicas)
            if _is_batch(leaf)
            else leaf
        ),
        tree,
        is_leaf=is_distributed,
    )


class ReplicaCall(NamedTuple):
    """One call of ``run``: the function that each replica calls, and the arguments, of
    which each replica gets its part."""

    strategy: AbstractStrategy
    team: Team
    fn: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    @property
    def tree(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and named arguments as one pytree."""
        return tuple(self.args), dict(self.kwargs)

    def given(self, tree: Any) -> ReplicaCall:
        """Returns this call with other arguments: a pytree as `tree` is."""
        return self._replace(args=tree[0], kwargs=tree[1])


class RunArguments:
    """The arguments of ``run``, sorted into arrays that are split, arrays that are
    shared, and other values.

    Raises:
        UnevenParts: Parts of one argument differ in shape, dtype or structure.
        ValueError: The number of parts is not that of the replicas, or drawn rows do
            not split evenly, or integers do not fit 32 bits.
    """

    def __init__(self, tree: Any, replicas: int) -> None:
        self.shared: list[Any] = []
        self.split: list[Spread] = []
        self._plan: list[tuple[str, Any]] = []
        self._replicas = replicas
        # Flattened twice: a value per replica may contain pytrees, whose leaves are
        # sorted one by one.
        tree = jax.tree.map(self._expand, tree, is_leaf=is_distributed)
        leaves, self._treedef = jax.tree.flatten(tree)
        for leaf in leaves:
            self._sort(leaf)

    def of_replica(self, shared: Sequence[Any], own: Sequence[Any]) -> Any:
        """Returns the arguments of one replica, made of its arrays."""
        sources = {"shared": iter(shared), "split": iter(own)}
        leaves = [
            leaf if kind == "whole" else next(sources[kind])
            for kind, leaf in self._plan
        ]
        return jax.tree.unflatten(self._treedef, leaves)

    def _expand(self, node: Any) -> Any:
        """Turns a value per replica into a pytree of parts."""
        if not isinstance(node, DistributedValues):
            return node
        require_one_each(node, self._replicas)
        if node.whole is not None:
            return Spread(node.whole, node.is_stacked)
        first, *others = node.values
        # One object for all replicas is shared, not stacked: it stays the same object,
        # a variable for example.
        if isinstance(node, Mirrored) and all(other is first for other in others):
            return first
        structures = {jax.tree.structure(value) for value in node.values}
        if len(structures) > 1:
            raise UnevenParts(
                "the parts of a PerReplica argument of strategy.run must have one "
                f"structure, because all replicas run one program; got {structures}"
            )
        return jax.tree.map(lambda *parts: _as_one(parts), *node.values)

    def _sort(self, leaf: Any) -> None:
        if isinstance(leaf, Spread):
            self._plan.append(("split", None))
            self.split.append(leaf)
        elif _is_batch(leaf):
            self._plan.append(("split", None))
            self.split.append(_rows(leaf, self._replicas))
        elif isinstance(leaf, jax.Array | np.ndarray):
            self._plan.append(("shared", None))
            self.shared.append(leaf)
        else:
            self._plan.append(("whole", _value(leaf)))


def _value(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, Plain) else leaf


def _as_one(parts: Sequence[Any]) -> Any:
    """Makes one array of those of the replicas, or returns the value that is the same
    for all of them."""
    first, *others = values = [_value(part) for part in parts]
    if not isinstance(first, jax.Array | np.ndarray | np.generic) and all(
        other is first or _are_same(other, first) for other in others
    ):
        return first
    if not all(isinstance(x, jax.Array | np.ndarray | np.generic) for x in values):
        numbers = all(isinstance(value, NUMBERS) for value in values)
        if not numbers:
            raise UnevenParts(
                "the parts of a PerReplica argument of strategy.run are neither arrays "
                f"nor equal: {values!r:.200}"
            )
    arrays = [uncut(value) for value in values]
    kinds = {(array.shape, array.dtype.name) for array in arrays}
    if len(kinds) > 1:
        raise UnevenParts(
            "the parts of a PerReplica argument of strategy.run must have one shape "
            f"and dtype, because all replicas run one program; got {sorted(kinds)}"
        )
    # Scalars have no rows to be laid out over devices, so they are given an axis of
    # replicas.
    if arrays[0].ndim == 0:
        return Spread(jnp.stack(arrays), stacked=True)
    return Spread(jnp.concatenate(arrays))


def _are_same(one: Any, other: Any) -> bool:
    """Returns whether a program may use one of them for both; 0.0 and -0.0 are equal,
    but differ."""
    if type(one) is not type(other):
        return False
    if isinstance(one, NUMBERS):
        return Plain(one) == Plain(other)
    return bool(one == other)


def _is_batch(leaf: Any) -> bool:
    """Returns whether the array was drawn from an iterator, so that its rows are
    split."""
    if not isinstance(leaf, jax.Array) or leaf.ndim == 0:
        return False
    recording = recorder.get()
    return recording is not None and recording.drew(leaf)


def _rows(array: Any, replicas: int) -> Spread:
    rows = array.shape[0]
    if rows % replicas:
        raise ValueError(
            f"a batch of {rows} elements does not split evenly over the {replicas} "
            f"replicas of a worker: use a batch size that {replicas} divides, and "
            "batch(..., drop_remainder=True) so that the last one does too"
        )
    return Spread(array)

"""What the replicas of one program are given: each its part, or all the same.

Of the arguments of ``run`` a value per replica is split, and so are the rows of what
was drawn from an iterator in this step; other arrays are shared. What is no array is no
input of a program: it stays the Python value that it is.

Law of the file: nothing is computed here but the joining of parts that are in arrays of
their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zstrat.program.trace import Plain, joined, uncut
from zstrat.variables import recorder

from ._per_replica import DistributedValues, Mirrored, PerReplica, is_distributed
from ._spread import Spread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zstrat.strategy._abstract import AbstractStrategy

    from ._collective import Team

NUMBERS: Final = (int, float, complex)
"""Python's; booleans are integers."""


class UnevenParts(ValueError):
    """The replicas' parts of an argument cannot be one array on devices."""


def unwrapped(tree: Any) -> Any:
    """The pytree with the numbers themselves."""
    return joined.mapped(_value, tree)


def require_one_each(node: Any, replicas: int) -> None:
    """Refuses a value per replica of another number of replicas.

    Raises:
        ValueError: It is one.
    """
    if isinstance(node, DistributedValues) and node.replicas != replicas:
        raise ValueError(
            f"a PerReplica argument of strategy.run has {node.replicas} values; "
            f"expected one for each of the {replicas} replicas"
        )


def require_all_one_each(tree: Any, replicas: int) -> None:
    """Refuses as `require_one_each` does, all values per replica in a pytree."""
    for node in jax.tree.leaves(tree, is_leaf=is_distributed):
        require_one_each(node, replicas)


def is_known(array: Any) -> bool:
    """Whether devices know its dtype; keys of jax have none of numpy's."""
    return isinstance(array, jax.Array) or np.asarray(array).dtype.kind not in "OSUmM"


def require_known(tree: Any) -> None:
    """Finds arrays of text, dates and objects. Whoever draws them and passes them on
    has written no step that could refuse them.

    Raises:
        UnevenParts: There is one.
    """
    for leaf in joined.leaves(tree):
        if isinstance(leaf, np.ndarray | np.generic) and not is_known(leaf):
            raise UnevenParts(f"devices know no arrays of dtype {leaf.dtype}")


def distribute_rows(tree: Any, replicas: int) -> Any:
    """The pytree with what was drawn as a value per replica: its rows in order.

    Raises:
        ValueError: They do not split evenly.
    """
    return jax.tree.map(
        lambda leaf: _rows_of_each(leaf, replicas) if _is_batch(leaf) else leaf,
        tree,
        is_leaf=is_distributed,
    )


class ReplicaCall(NamedTuple):
    """One call of ``run``: the function that each replica calls, and what with. Of
    ``args`` and ``kwargs`` each replica gets its own part."""

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
        """This call with other arguments: a pytree as `tree` is."""
        return self._replace(args=tree[0], kwargs=tree[1])


class RunArguments:
    """Arguments of ``run``, sorted into what is split, shared and not an array.

    Raises:
        UnevenParts: Parts of one argument differ in shape, dtype or structure.
        ValueError: There is not one part for each replica, or drawn rows do not split
            evenly, or integers do not fit 32 bits.
    """

    def __init__(self, tree: Any, replicas: int) -> None:
        self.shared: list[Any] = []
        self.split: list[Spread] = []
        self._plan: list[tuple[str, Any]] = []
        self._replicas = replicas
        # Twice flattened: a value per replica may hold pytrees, whose leaves are sorted
        # one by one.
        tree = jax.tree.map(self._expand, tree, is_leaf=is_distributed)
        leaves, self._treedef = jax.tree.flatten(tree)
        for leaf in leaves:
            self._sort(leaf)

    def of_replica(self, shared: Sequence[Any], own: Sequence[Any]) -> Any:
        """The arguments, made of one replica's arrays."""
        sources = {"shared": iter(shared), "split": iter(own)}
        leaves = [
            leaf if kind == "whole" else next(sources[kind])
            for kind, leaf in self._plan
        ]
        return jax.tree.unflatten(self._treedef, leaves)

    def _expand(self, node: Any) -> Any:
        """A value per replica as a pytree of parts."""
        if not isinstance(node, DistributedValues):
            return node
        require_one_each(node, self._replicas)
        if node.whole is not None:
            return Spread(node.whole, node.is_stacked)
        first, *others = node.values
        # One object for all replicas is shared, not stacked: it stays what it is, a
        # variable say.
        if isinstance(node, Mirrored) and all(other is first for other in others):
            return first
        structures = {jax.tree.structure(value) for value in node.values}
        if len(structures) > 1:
            raise UnevenParts(
                "the parts of a PerReplica argument of strategy.run must have one "
                f"structure, because all replicas run one program; got {structures}"
            )
        return jax.tree.map(lambda *parts: _Parts(parts), *node.values)

    def _sort(self, leaf: Any) -> None:
        if isinstance(leaf, _Parts):
            leaf = _as_one(leaf.parts)
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


class _Parts:
    """One leaf per replica; opaque to pytrees."""

    def __init__(self, parts: tuple[Any, ...]) -> None:
        self.parts = parts


def _value(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, Plain) else leaf


def _as_one(parts: Sequence[Any]) -> Any:
    """One array of those of the replicas, or what is the same for all of them."""
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
    """Whether a program may have one of them for both: 0.0 and -0.0 are equal."""
    if type(one) is not type(other):
        return False
    if isinstance(one, NUMBERS):
        return Plain(one) == Plain(other)
    return bool(one == other)


def _is_batch(leaf: Any) -> bool:
    """Whether the array was drawn from an iterator, so that its rows are split."""
    if not isinstance(leaf, jax.Array) or leaf.ndim == 0:
        return False
    recording = recorder.get()
    return recording is not None and recording.drew(leaf)


def _rows_of_each(array: Any, replicas: int) -> PerReplica:
    whole = _rows(array, replicas).array
    return PerReplica.of_whole(whole, replicas)


def _rows(array: Any, replicas: int) -> Spread:
    rows = array.shape[0]
    if rows % replicas:
        raise ValueError(
            f"a batch of {rows} elements does not split evenly over the {replicas} "
            f"replicas of a worker: use a batch size that {replicas} divides, and "
            "batch(..., drop_remainder=True) so that the last one does too"
        )
    return Spread(array)

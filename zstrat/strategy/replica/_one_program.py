"""Runs a call of ``run`` as one program: converts its arguments and its result.

Values per replica among the arguments of ``run`` are split over the replicas, and so
are the rows of arrays that were drawn from an iterator in this step; other arrays are
shared by all replicas. A value that is not an array is not an input of the program, but
a Python constant. Parts that are separate arrays are concatenated; nothing else is
computed here.

Law of the file: tracing decides whether the replicas are one program (`_regions`); a
function that cannot be one program raises `NeedsSequential` before anything is
computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zstrat.program.trace import LOOKS, Plain, is_of_shapes, joined, uncut
from zstrat.strategy._context import ReplicaContext
from zstrat.variables import CreatedInStep, ValueWanted, recorder

from ._columns import is_slices
from ._fibers import NeedsSequential
from ._mapped import Spread
from ._per_replica import DistributedValues, Mirrored, PerReplica, is_distributed
from ._regions import discovered, replicate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from jax.sharding import Mesh

    from zstrat.strategy._frames import AbstractStrategy

    from ._collective import Team

NUMBERS: Final = (int, float, complex)
"""The types of Python numbers; booleans are integers."""


class UnevenParts(ValueError):
    """Raised if the replicas' parts of an argument cannot be one array on devices."""


def unwrapped(tree: Any) -> Any:
    """Replaces `Plain` numbers in a pytree by the Python numbers that they wrap."""
    return joined.mapped(_value, tree)


def require_one_each(node: Any, replicas: int) -> None:
    """Refuses a value per replica that does not have one value for each replica.

    Raises:
        ValueError: It has another number of values.
    """
    if isinstance(node, DistributedValues) and node.replicas != replicas:
        raise ValueError(
            f"a PerReplica argument of strategy.run has {node.replicas} values; "
            f"expected one for each of the {replicas} replicas"
        )


def require_all_one_each(tree: Any, replicas: int) -> None:
    """Refuses values per replica in a pytree like `require_one_each`."""
    for node in jax.tree.leaves(tree, is_leaf=is_distributed):
        require_one_each(node, replicas)


def is_known(array: Any) -> bool:
    """Returns whether devices support the dtype of an array; random keys have a dtype
    of jax."""
    # The kinds of numpy: objects, bytes, text, timedelta and datetime.
    return isinstance(array, jax.Array) or np.asarray(array).dtype.kind not in "OSUmM"


def require_known(tree: Any) -> None:
    """Refuses arrays of text, dates and objects, whose dtypes devices do not support,
    if there is no step that would refuse them.

    Raises:
        UnevenParts: There is such an array.
    """
    for leaf in joined.leaves(tree):
        if isinstance(leaf, np.ndarray | np.generic) and not is_known(leaf):
            raise UnevenParts(f"arrays of dtype {leaf.dtype} cannot be on devices")


def distribute_rows(tree: Any, replicas: int) -> Any:
    """Replaces each drawn array of a pytree by a value per replica: its rows are
    distributed in order.

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
        """Returns this call with other arguments, given as a pytree like `tree`."""
        return self._replace(args=tree[0], kwargs=tree[1])


class RunArguments:
    """The arguments of ``run``, sorted into arrays that are split, arrays that are
    shared, and other values.

    Raises:
        UnevenParts: The replicas' parts of one argument differ in shape, dtype or
            structure.
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
        """Returns the arguments of one replica, made from the shared arrays and its own
        parts."""
        sources = {"shared": iter(shared), "split": iter(own)}
        leaves = [
            leaf if kind == "whole" else next(sources[kind])
            for kind, leaf in self._plan
        ]
        return jax.tree.unflatten(self._treedef, leaves)

    def _expand(self, node: Any) -> Any:
        """Converts a value per replica to a pytree of `Spread` arrays and shared
        values; returns anything else unchanged."""
        if not isinstance(node, DistributedValues):
            return node
        require_one_each(node, self._replicas)
        # Before `values`, which would cut the array into views.
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
    """Makes one array from the parts of all replicas, or returns the Python value that
    is the same for all."""
    first, *others = values = [_value(part) for part in parts]
    # Python values are constants of the program, so one must serve all replicas.
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
    """Returns whether a program may use one of the two values for both: 0.0 and -0.0
    compare as equal, but differ."""
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


_LOOKS: Final[tuple[type[Exception], ...]] = (*LOOKS, ValueWanted, CreatedInStep)


def as_one_program(call: ReplicaCall, mesh: Mesh | None) -> Any:
    """Runs the replicas as one program. Returns the result with each array as a
    `PerReplica`; other objects are unchanged.

    Args:
        mesh: The replicas' devices; None: one device computes all replicas.

    Raises:
        NeedsSequential: Python looks at a value in the function, or the function
            creates variables or calls ``merge_call``.
        UnevenParts: Replicas are given arrays of different shapes.
        Exception: Whatever the function raises while it is traced.
    """
    count = call.team.local
    arguments = RunArguments(call.tree, count)
    result = replicate(
        _replica(call, arguments),
        arguments.shared,
        arguments.split,
        team=call.team,
        mesh=mesh,
    )
    return jax.tree.map(lambda x: _per_replica(x, count), result, is_leaf=is_slices)


def needs_sequential(call: ReplicaCall) -> bool:
    """Returns whether the replicas cannot be one program even if all have arguments
    like those of the first replica. This only tries: a step that is being traced
    records nothing of it.

    Raises:
        Exception: Whatever the function raises while it is traced.
    """
    count = call.team.local

    def first(node: Any) -> Any:
        if not isinstance(node, DistributedValues):
            return node
        return PerReplica((node.values[0],) * count)

    # Parts of other shapes cannot be one program by themselves; whether the function
    # looks at values does not depend on their shapes.
    tree = jax.tree.map(first, call.tree, is_leaf=is_distributed)
    arguments = RunArguments(tree, count)
    split = [Spread(uncut(x.array), x.stacked) for x in arguments.split]
    shared = [uncut(x) for x in arguments.shared]
    try:
        discovered(_replica(call, arguments), shared, split, call.team)
    except NeedsSequential:
        return True
    return False


def _replica(
    call: ReplicaCall, arguments: RunArguments
) -> Callable[[Sequence[Any], Sequence[Any]], Any]:
    def replica(shared: Sequence[Any], own: Sequence[Any]) -> Any:
        own_args, own_kwargs = arguments.of_replica(shared, own)
        with ReplicaContext(call.strategy, call.team.replica_id()):
            return _call_traced(call.fn, own_args, own_kwargs)

    return replica


def alone(call: ReplicaCall) -> Any:
    """Runs the only replica of the process as a part of a step.

    Raises:
        NeedsSequential: As `as_one_program`.
    """
    with ReplicaContext(call.strategy, 0):
        return _call_traced(call.fn, call.args, call.kwargs)


def _call_traced(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    try:
        return fn(*args, **kwargs)
    # Errors of jax that say: this value is traced, and Python looked at it.
    except _LOOKS as error:
        raise _needs_sequential(error) from error
    # jax has no own class for a shape or slice that depends on a value.
    except (TypeError, IndexError) as error:
        if not is_of_shapes(error):
            raise
        raise _needs_sequential(error) from error


def _needs_sequential(error: Exception) -> NeedsSequential:
    first = str(error).partition("\n")[0]
    return NeedsSequential(f"{type(error).__name__}: {first}")


def _per_replica(node: Any, count: int) -> Any:
    """Converts an array or an IndexedSlices to a value per replica; returns anything
    else unchanged."""
    if isinstance(node, Spread):
        return PerReplica.of_whole(node.array, count, stacked=node.stacked)
    if not any(isinstance(leaf, Spread) for leaf in jax.tree.leaves(node)):
        return node
    return PerReplica([_of_replica(i, node, count) for i in range(count)])


def _of_replica(replica: int, node: Any, count: int) -> Any:
    return jax.tree.map(
        lambda leaf: (
            _per_replica(leaf, count).values[replica]
            if isinstance(leaf, Spread)
            else leaf
        ),
        node,
    )

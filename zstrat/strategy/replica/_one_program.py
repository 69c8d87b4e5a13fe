"""A replica function as one program for all replicas of this process.

It is traced once, with a traced number of the replica, and mapped over the devices
(`_replicas`). What a replica makes stays on its device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import jax

from zstrat.program.trace import LOOKS, is_of_shapes, uncut
from zstrat.strategy._context import ReplicaContext
from zstrat.variables import CreatedInStep, ValueWanted

from . import _replicas, _spread
from ._arguments import RunArguments
from ._columns import is_slices
from ._per_replica import DistributedValues, PerReplica, is_distributed
from ._turns import NeedsTurns

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from jax.sharding import Mesh

    from ._arguments import ReplicaCall


_LOOKS: Final[tuple[type[Exception], ...]] = (*LOOKS, ValueWanted, CreatedInStep)


def as_one_program(call: ReplicaCall, mesh: Mesh | None) -> Any:
    """What the replicas return: each array as a `PerReplica`, all else as it is.

    Args:
        mesh: The replicas' devices; None: one device computes all of them.

    Raises:
        NeedsTurns: Python looks at a value in the function, or it creates variables, or
            calls ``merge_call``.
        UnevenParts: Replicas are given arrays of different shapes.
        Exception: Whatever the function raises while it is traced.
    """
    count = call.team.local
    sorted_out = RunArguments(call.tree, count)
    result = _replicas.replicate(
        _replica(call, sorted_out),
        sorted_out.shared,
        sorted_out.split,
        team=call.team,
        mesh=mesh,
    )
    return jax.tree.map(lambda x: _per_replica(x, count), result, is_leaf=is_slices)


def needs_turns(call: ReplicaCall) -> bool:
    """Whether replicas that are given what the first one is given are no one program.
    The step, if there is one, hears nothing of it.

    Raises:
        Exception: Whatever the function raises while it is traced.
    """
    count = call.team.local

    def first(node: Any) -> Any:
        if not isinstance(node, DistributedValues):
            return node
        return PerReplica((node.values[0],) * count)

    tree = jax.tree.map(first, call.tree, is_leaf=is_distributed)
    sorted_out = RunArguments(tree, count)
    split = [_spread.Spread(uncut(x.array), x.stacked) for x in sorted_out.split]
    shared = [uncut(x) for x in sorted_out.shared]
    try:
        _replicas.discovered(_replica(call, sorted_out), shared, split, call.team)
    except NeedsTurns:
        return True
    return False


def _replica(
    call: ReplicaCall, sorted_out: RunArguments
) -> Callable[[Sequence[Any], Sequence[Any]], Any]:
    def replica(shared: Sequence[Any], own: Sequence[Any]) -> Any:
        own_args, own_kwargs = sorted_out.of_replica(shared, own)
        with ReplicaContext(call.strategy, call.team.replica_id()):
            return _looked_out(call.fn, own_args, own_kwargs)

    return replica


def alone(call: ReplicaCall) -> Any:
    """What the only replica returns, in a step.

    Raises:
        NeedsTurns: As `as_one_program`.
    """
    with ReplicaContext(call.strategy, 0):
        return _looked_out(call.fn, call.args, call.kwargs)


def _looked_out(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    try:
        return fn(*args, **kwargs)
    except _LOOKS as error:
        raise _needs_turns(error) from error
    except (TypeError, IndexError) as error:
        if not is_of_shapes(error):
            raise
        raise _needs_turns(error) from error


def _needs_turns(error: Exception) -> NeedsTurns:
    first = str(error).partition("\n")[0]
    return NeedsTurns(f"{type(error).__name__}: {first}")


def _per_replica(node: Any, count: int) -> Any:
    """An array or an IndexedSlices as one value per replica, all else as it is."""
    if isinstance(node, _spread.Spread):
        return PerReplica.of_whole(node.array, count, stacked=node.stacked)
    if not any(isinstance(leaf, _spread.Spread) for leaf in jax.tree.leaves(node)):
        return node
    return PerReplica([_of_replica(i, node, count) for i in range(count)])


def _of_replica(replica: int, node: Any, count: int) -> Any:
    return jax.tree.map(
        lambda leaf: (
            _per_replica(leaf, count).values[replica]
            if isinstance(leaf, _spread.Spread)
            else leaf
        ),
        node,
    )

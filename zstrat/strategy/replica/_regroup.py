"""What the replicas returned, as one value: TF's rules.

Lists, tuples, mappings and pytrees of other classes are merged member by member. What
is the same object on all replicas is that object, and the copies of a variable, each
from its replica, are the variable; everything else becomes a value per replica.
`zstrat.strategy.replica._per_replica.select_replica` is the inverse.

Law of the file: nothing is copied. Arrays of equal shapes, each on the device of its
replica, become one array over the devices.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax

from zstrat.strategy.mirrored._copies import copied
from zstrat.variables import IndexedSlices

from ._per_replica import DistributedValues, PerReplica

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Wrap = Callable[[Sequence[Any]], DistributedValues]


def regroup(
    values: Sequence[Any], wrap: Wrap = PerReplica, *, always_wrap: bool = False
) -> Any:
    """One value of those of all replicas, in replica order.

    Args:
        wrap: Makes the value per replica.
        always_wrap: Also of what is the same object everywhere, and of copies.

    Raises:
        ValueError: The replicas' values have different structures.
    """
    first = values[0]
    members = _members(first)
    if members is not None:
        columns = zip(*[_members_like(first, value) for value in values], strict=True)
        merged = [regroup(column, wrap, always_wrap=always_wrap) for column in columns]
        return _rebuilt(first, merged)
    if not always_wrap and all(value is first for value in values[1:]):
        return first
    container = None if always_wrap else copied(values)
    return wrap(values) if container is None else container


def _members(value: Any) -> list[Any] | None:
    """The members of a container, None for what is none."""
    match value:
        case IndexedSlices() | DistributedValues() | None:
            return None
        case list() | tuple():
            return list(value)
        case Mapping():
            return list(value.values())
    return _flat(value)[0] if _is_node(value) else None


def _members_like(first: Any, value: Any) -> list[Any]:
    """The members, in the order of those of another replica's container."""
    members = _members(value) if type(value) is type(first) else None
    if members is not None and _keys(value) == _keys(first):
        if isinstance(first, Mapping):
            return [value[key] for key in first]
        return members
    raise ValueError(
        f"the replicas returned values of different structures: replica 0 "
        f"{_described(first)}, and another one {_described(value)}: return one "
        "structure, the same on all of them"
    )


def _keys(value: Any) -> Any:
    """What must be equal for two containers to be merged."""
    match value:
        case Mapping():
            return set(value)
        case list() | tuple():
            return len(value)
    return _flat(value)[1] if _is_node(value) else None


def _rebuilt(like: Any, members: list[Any]) -> Any:
    match like:
        case list():
            return members
        case tuple():
            is_named = isinstance(getattr(like, "_fields", None), tuple)
            return type(like)(*members) if is_named else tuple(members)
        case dict():
            # Of a class of its own (with a default, say) the same with other members.
            named = copy.copy(like)
            for key, member in zip(like, members, strict=True):
                named[key] = member
            return named
        case Mapping():
            made: Any = type(like)
            return made(zip(like, members, strict=True))
    return _flat(like)[1].unflatten(members)


def _is_node(value: Any) -> bool:
    """Whether jax knows it as a container."""
    return not jax.tree_util.all_leaves([value])


def _flat(node: Any) -> tuple[list[Any], Any]:
    """The members of one that jax knows, and what else there is to it."""
    found: tuple[list[Any], Any]
    found = jax.tree.flatten(node, is_leaf=lambda x: x is not node)
    return found


def _described(value: Any) -> str:
    keys = _keys(value) if _members(value) is not None else ""
    return f"{type(value).__name__} {keys}".strip()

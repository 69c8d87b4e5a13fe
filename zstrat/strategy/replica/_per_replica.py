"""`DistributedValues`: one value for each local replica, stored as a tuple of values or
as one array over all devices.

An array over the devices is sharded so that each device has exactly the part of its
replica: programs take and return it without a copy. The values of the replicas are then
views of it, made when they are first needed.

`regroup` merges the results of the replicas to one value, by TF's rules. Lists, tuples,
mappings and pytrees of other classes are merged member by member. An object that is the
same on all replicas stays that object, and the copies of a variable, each from its
replica, become the variable; everything else becomes a value per replica.
`select_replica` is the inverse.

Law of the file: ``values`` do not depend on how they are stored, and to jax they are
always the leaves of a pytree. Only zstrat's own flattening has the one array as a leaf
(`zstrat.program.trace.joined`). `regroup` copies nothing.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Self, TypeGuard, final

import jax
import jax.numpy as jnp
import numpy as np

from zstrat.program import name_node
from zstrat.program.trace import joined
from zstrat.variables import (
    CopyStorage,
    DeviceStorage,
    IndexedSlices,
    Variable,
    is_weak,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zstrat.variables import VariableHandle

    Wrap = Callable[[Sequence[Any]], "DistributedValues"]


class DistributedValues:
    """One value (an array or a pytree) per local replica, in replica order.

    Base of `PerReplica` and `Mirrored`. A step may take and return such a value. To jax
    it is a pytree of the values: `jax.tree.map` calls its function once for each
    replica. To compute with all of them in one operation use `whole`.
    """

    __slots__ = ("_count", "_stacked", "_values", "_whole")
    _values: tuple[Any, ...] | None

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = tuple(values)
        self._count = len(self._values)
        self._whole: Any = None
        self._stacked = False

    @classmethod
    def of_whole(cls, whole: Any, replicas: int, *, stacked: bool = False) -> Self:
        """Makes an object whose values are parts of one array.

        Args:
            whole: ``[replicas * n, ...]``, of which replica i has n rows from ``i * n``
                on.
            stacked: Whether ``whole`` is ``[replicas, ...]`` instead, and replica i's
                value is ``whole[i]``; used for scalars.
        """
        values = object.__new__(cls)
        values._values, values._count = None, replicas
        values._whole, values._stacked = whole, stacked
        return values

    @property
    def values(self) -> tuple[Any, ...]:
        """One value per replica; if they are stored as one array over the devices, each
        is a view of a device's part."""
        if self._values is not None:
            return self._values
        result = _views(self._whole, self._count, self._stacked)
        # Kept: the next reading gets the same objects.
        if not any(isinstance(value, jax.core.Tracer) for value in result):
            # Traced views belong to the trace that reads them.
            self._values = result
        return result

    @property
    def whole(self) -> Any:
        """The one array in which all values are stored, or None.

        Its rows are the replicas' rows, those of replica 0 first, so functions that
        treat each row separately (``x * 2``) may take it in place of the values, and
        are then one operation for all devices. Functions that compute along the first
        axis (softmax, cumsum, ``x[::-1]``) would mix the replicas. Under plain
        `jax.jit` on accelerators, pass this array: jax refuses arguments on different
        devices.
        """
        return self._whole

    @property
    def is_stacked(self) -> bool:
        """Whether replica i's value is ``whole[i]``, instead of some rows of
        ``whole``."""
        return self._stacked

    @property
    def replicas(self) -> int:
        """Number of values."""
        return self._count

    def __reduce__(self) -> Any:
        return type(self), (self.values,)

    def __repr__(self) -> str:
        lines = (f"  {i}: {value!r}" for i, value in enumerate(self.values))
        return f"{type(self).__name__}:{{\n" + ",\n".join(lines) + "\n}"


@final
class PerReplica(DistributedValues):
    """Values that differ from replica to replica."""

    __slots__ = ()


@final
class Mirrored(DistributedValues):
    """Values that are known to be equal on all replicas, so any of them may be used for
    all."""

    __slots__ = ()


_Layout = tuple[int, bool] | None
"""How values are stored. For one array: the number of replicas, and whether it is
stacked. None for separate values."""


def _children(node: DistributedValues) -> tuple[tuple[Any, ...], _Layout]:
    whole = node._whole
    if whole is not None and joined.asked.is_joined:
        return (whole,), (node._count, node._stacked)
    return node.values, None


def _of_children(
    kind: type[DistributedValues], layout: _Layout, children: Any
) -> DistributedValues:
    if layout is None:
        return kind(children)
    return kind.of_whole(children[0], layout[0], stacked=layout[1])


for _kind in (PerReplica, Mirrored):
    jax.tree_util.register_pytree_node(
        _kind, _children, functools.partial(_of_children, _kind)
    )
name_node(PerReplica, "per replica", PerReplica)


def is_distributed(node: object) -> bool:
    """Returns whether this is a value per replica."""
    return isinstance(node, DistributedValues)


def select_replica(replica: int, tree: Any) -> Any:
    """Returns a pytree in which each value per replica is replaced by that of one
    replica."""
    return jax.tree.map(
        lambda node: (
            node.values[replica] if isinstance(node, DistributedValues) else node
        ),
        tree,
        is_leaf=is_distributed,
    )


def local_results(value: Any) -> tuple[Any, ...]:
    """Returns one entry per replica; ``(value,)`` if the pytree has no value per
    replica."""
    if isinstance(value, DistributedValues):
        return value.values
    # As values per replica inside of a container.
    for node in jax.tree.leaves(value, is_leaf=is_distributed):
        if isinstance(node, DistributedValues):
            return tuple(select_replica(i, value) for i in range(node.replicas))
    return (value,)


def _views(whole: Any, count: int, stacked: bool) -> tuple[Any, ...]:
    at = _shards(whole.sharding, whole.shape, count) if is_concrete(whole) else None
    if at is not None:
        shards = {device: whole.addressable_data(i) for device, i in at.items()}
        return tuple(_loose(shards, stacked, is_weak(whole)))
    if stacked:
        return tuple(whole[i] for i in range(count))
    rows = whole.shape[0] // count
    return tuple(whole[i * rows : (i + 1) * rows] for i in range(count))


@functools.lru_cache(256)
def _shards(
    sharding: jax.sharding.Sharding, shape: tuple[int, ...], count: int
) -> dict[jax.Device, int] | None:
    """Returns the first device of each replica, with the number of its addressable part
    of the array; None unless each device has exactly the part of its replica."""
    rows = shape[0] // count
    indices = sharding.addressable_devices_indices_map(shape)
    devices, places = list(indices), list(indices.values())
    # With one replica the array is its value. `None`: an index that this process does
    # not know.
    if count == 1 or len(places) % count or None in places:
        return None
    if sharding.shard_shape(shape) != (rows, *shape[1:]):
        return None
    # Backwards: the first one of each replica stays. They come in the mesh's order.
    found = {
        (index[0].start or 0): at
        for at, index in reversed(list(enumerate(places)))
        if index is not None
    }
    if sorted(found) != [rows * i for i in range(count)]:
        return None
    return {devices[at]: at for _, at in sorted(found.items())}


def is_concrete(value: object) -> TypeGuard[jax.Array]:
    """Returns whether this is a jax array with actual values, not one of a trace."""
    return isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)


def loose(
    shard: jax.Array, stacked: bool = False, *, weak: bool | None = None
) -> jax.Array:
    """Returns a shard as an array that is bound to no device, so that it can be
    combined with shards of other devices, which jax otherwise refuses. Only scalars are
    copied. On accelerators, where jax would need a copy, returns the shard itself.

    ``weak``: whether the array is weakly typed, which a shard does not know; None: as
    the shard says.
    """
    (device,) = shard.devices()
    wanted = is_weak(shard) if weak is None else weak
    (result,) = _loose({device: shard}, stacked, wanted)
    return result


def _loose(
    shards: dict[jax.Device, jax.Array], stacked: bool, weak: bool
) -> list[jax.Array]:
    """Does the same as `loose` for several shards of the same kind, each on its
    device."""
    first, device = next(iter(shards.values())), next(iter(shards))
    # Random keys do not have a dtype of numpy.
    if device.platform != "cpu" or not isinstance(first.dtype, np.dtype):
        if not stacked and (is_weak(first) or not weak):
            return list(shards.values())
        return [_part(shard, stacked, weak) for shard in shards.values()]
    # All of them first: they are made by threads that share the cores, and what is
    # begun for one replica while others still compute takes three times as long.
    for shard in shards.values():
        shard.block_until_ready()
    if stacked or weak:
        return _parts(shards, stacked, weak)
    # The guard is for arrays of the host; this one comes from a shard.
    with jax.transfer_guard_host_to_device("allow"):
        return [_view_on(device, np.asarray(shard)) for device, shard in shards.items()]


def _view_on(device: jax.Device, view: np.ndarray) -> Any:
    with jax.default_device(device):
        return jax.device_put(view)


def _parts(shards: dict[jax.Device, jax.Array], stacked: bool, weak: bool) -> list[Any]:
    """Does the same as `_part` for several shards; the results are bound to no
    device."""
    first = next(iter(shards.values()))
    # As jax takes it now: in the scope of `jax.enable_x64` otherwise than outside.
    taken = jax.dtypes.canonicalize_dtype(first.dtype)
    programs = _part_programs(tuple(shards), first.shape, taken, stacked, weak)
    if taken == first.dtype:
        pairs = zip(programs, shards.values(), strict=True)
        result = [program(shard) for program, shard in pairs]
        # They are compiled for what is bound to no device, and so is what they make. A
        # jax that went by what they are given gets it from the host.
        if not result[0].committed:
            return result
    with jax.transfer_guard_host_to_device("allow"):
        pairs = zip(programs, shards.values(), strict=True)
        return [program(np.asarray(shard)) for program, shard in pairs]


@functools.lru_cache(256)
def _part_programs(
    devices: tuple[jax.Device, ...],
    shape: tuple[int, ...],
    dtype: Any,
    stacked: bool,
    weak: bool,
) -> list[Any]:
    """Compiles `_part` for each of the devices, for shards of the given shape and
    dtype."""
    # To call one takes a fifth of the time of the jitted function with that device as
    # the default one.
    return [_part_program(x, shape, dtype, stacked, weak) for x in devices]


@functools.lru_cache(1024)
def _part_program(
    device: jax.Device, shape: tuple[int, ...], dtype: Any, stacked: bool, weak: bool
) -> jax.stages.Compiled:
    kind: Any = jax.ShapeDtypeStruct  # untyped
    with jax.default_device(device):
        return _part.lower(kind(shape, dtype), stacked, weak).compile()


@functools.partial(jax.jit, static_argnums=(1, 2))
def _part(array: Any, stacked: bool, weak: bool) -> Any:
    """Returns the array, or its first row if ``stacked``; weakly typed if ``weak``. No
    function of jax makes an array weakly typed."""
    part = array[0] if stacked else array
    if not weak or is_weak(part):
        return part
    # Or a number of Python would have 64 bits where they are switched on.
    with jax.enable_x64(part.dtype in _WIDE):
        return jnp.full(part.shape, part.dtype.type(0).item()).at[...].set(part)


_WIDE: Final = tuple(map(np.dtype, ("int64", "uint64", "float64", "complex128")))


def on_one_device(arrays: Sequence[Any]) -> list[Any]:
    """Returns the arrays so that one operation can use all of them: those that are
    bound to another device than the first one are moved to its device."""
    bound = [x for x in arrays if is_concrete(x) and x.committed]
    # Nothing is moved where all are together: moving also binds what was bound to no
    # device.
    if len({frozenset(x.devices()) for x in bound}) < 2:
        return list(arrays)
    where = bound[0].sharding
    # By identity: arrays have no hash.
    moved = {id(x) for x in bound if x.devices() != bound[0].devices()}
    return [jax.device_put(x, where) if id(x) in moved else x for x in arrays]


def regroup(
    values: Sequence[Any], wrap: Wrap = PerReplica, *, always_wrap: bool = False
) -> Any:
    """Merges the values of all replicas into one, in replica order.

    Args:
        wrap: Function that makes a value per replica from the values.
        always_wrap: Whether to call ``wrap`` even if all values are the same object, or
            are the copies of a variable.

    Raises:
        ValueError: The replicas' values have different structures.
    """
    first = values[0]
    members = _members(first)
    # Members first: a container that is the same object everywhere is still rebuilt, so
    # that results never share a list with an argument.
    if members is not None:
        columns = zip(*[_members_like(first, value) for value in values], strict=True)
        merged = [regroup(column, wrap, always_wrap=always_wrap) for column in columns]
        return _rebuilt(first, merged)
    if not always_wrap and all(value is first for value in values[1:]):
        return first
    container = None if always_wrap else _variable_of_copies(values)
    return wrap(values) if container is None else container


def _members(value: Any) -> list[Any] | None:
    """Returns the members of a container, or None if it is not a container."""
    match value:
        case IndexedSlices() | DistributedValues() | None:
            return None
        case list() | tuple():
            return list(value)
        case Mapping():
            return list(value.values())
    return _flat(value)[0] if _is_node(value) else None


def _members_like(first: Any, value: Any) -> list[Any]:
    """Returns the members of a replica's container, in the order of the first replica's
    container.

    Raises:
        ValueError: The containers have different structures.
    """
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
    """Returns what must be equal for two containers to be merged: keys, length or
    structure."""
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
            # Of a subclass (with a default, for example) the same with other members.
            named = copy.copy(like)
            for key, member in zip(like, members, strict=True):
                named[key] = member
            return named
        case Mapping():
            made: Any = type(like)
            return made(zip(like, members, strict=True))
    return _flat(like)[1].unflatten(members)


def _is_node(value: Any) -> bool:
    """Returns whether jax treats the value as a container (an inner node of
    pytrees)."""
    return not jax.tree_util.all_leaves([value])


def _flat(node: Any) -> tuple[list[Any], Any]:
    """Returns the members of a container that jax knows, and its structure: one level
    only."""
    result: tuple[list[Any], Any]
    # One level: the flattening stops at all nodes but the first.
    result = jax.tree.flatten(node, is_leaf=lambda x: x is not node)
    return result


def _described(value: Any) -> str:
    keys = _keys(value) if _members(value) is not None else ""
    return f"{type(value).__name__} {keys}".strip()


def _variable_of_copies(values: Sequence[Any]) -> VariableHandle | None:
    """Returns the variable whose copies the values are, if they are all its copies in
    replica order; otherwise None."""
    storages = [value.storage for value in values if isinstance(value, Variable)]
    copies = [storage for storage in storages if isinstance(storage, CopyStorage)]
    if not copies or len(copies) < len(values):
        return None
    whole = copies[0].container
    numbers = [storage.number for storage in copies if storage.container is whole]
    storage = whole.storage
    is_all = isinstance(storage, DeviceStorage) and len(numbers) == storage.pool.copies
    return whole if is_all and numbers == list(range(len(values))) else None

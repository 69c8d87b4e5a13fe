"""What a method of a group asks for: checked, in words, and as steps.

A request has no number yet, and nothing is sent: no other rank ever hears of what is
refused here. The words are what ranks compare, so they hold all that has to be alike.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from zstrat.collectives._compression import Compression, Compressor
from zstrat.collectives._engine import CallKind
from zstrat.collectives._leaves import described, flatten, is_slices, leaf_of
from zstrat.collectives._reduction import reduction_of
from zstrat.collectives._terms import ReduceOp
from zstrat.collectives.schedules._algorithms import algorithm_named
from zstrat.rows import runs, sums

from . import _operations as operations
from ._operations import CallOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from zstrat.collectives._leaves import ArrayLeaf, SlicesLike

    from ._operations import CallFactory, Steps


class OperationRequest(NamedTuple):
    """An operation in words, what makes its steps, and how it is to be carried out."""

    words: str
    make: Callable[[CallFactory], Steps]
    options: CallOptions


def all_reduce(
    size: int,
    tree: Any,
    op: ReduceOp | str,
    in_place: bool,
    densify: bool,
    options: CallOptions,
) -> OperationRequest:
    """See `GroupCalls.all_reduce`."""
    op = ReduceOp.of(op)
    if type(tree) is np.ndarray and tree.dtype.isnative and tree.flags.c_contiguous:
        return _all_reduce_array(size, tree, op, in_place, options)
    _check_algorithm(CallKind.ALL_REDUCE, options)
    found, rebuild, where = flatten(tree)
    if densify:
        found = [_dense(x) if is_slices(x) else x for x in found]
    sparse = {at: x for at, x in enumerate(found) if is_slices(x)}
    leaves = [leaf_of(x) for at, x in enumerate(found) if at not in sparse]
    _check_reducible(size, op, leaves, options.compression)
    if in_place:
        _check_writable(leaves, sparse)
    rows = [leaf_of(part) for x in sparse.values() for part in (x.values, x.indices)]
    _check_reducible(size, op, rows[::2])
    _check_sparse(op, rows)
    more = (op.value, _packs(leaves, options), where)
    words = _named("all_reduce", [*leaves, *rows], options, *more, free=rows)

    def make(factory: CallFactory) -> Steps:
        steps = operations.all_reduce(factory, leaves, op, in_place)
        if not rows:
            return operations.rebuilt(steps, rebuild)
        gathers = operations.all_gather(factory, rows, [0] * len(rows))
        return operations.rebuilt(operations.together(steps, gathers), finish)

    def finish(parts: list[list[Any]]) -> Any:
        reduced, gathered = map(iter, parts)
        divisor = size if op is ReduceOp.MEAN else None
        return rebuild(
            [
                _gathered(sparse[at], divisor, next(gathered), next(gathered))
                if at in sparse
                else next(reduced)
                for at in range(len(found))
            ]
        )

    return OperationRequest(words, make, options)


def _all_reduce_array(
    size: int,
    array: np.ndarray,
    op: ReduceOp,
    in_place: bool,
    options: CallOptions,
) -> OperationRequest:
    """`all_reduce` of one array whose elements are sent as they lie."""
    # Text, as it is a key: what is none is refused with words that name it.
    compression = None if options.compression is None else str(options.compression)
    algorithm = None if options.algorithm is None else str(options.algorithm)
    words = _array_words(size, array.dtype, array.shape, op, compression, algorithm)
    if in_place and not array.flags.writeable:
        raise _read_only()
    return OperationRequest(
        words,
        lambda factory: operations.all_reduce_array(factory, array, op, in_place),
        options,
    )


@lru_cache(maxsize=1024)
def _array_words(
    size: int,
    dtype: np.dtype,
    shape: tuple[int, ...],
    op: ReduceOp,
    compression: str | None,
    algorithm: str | None,
) -> str:
    """The operation on such an array, in words. A program reduces the same arrays at
    each step: what its calls have in common is checked and written once.

    Raises: as `all_reduce`.
    """
    options = CallOptions(1.0, None, compression, algorithm)
    _check_algorithm(CallKind.ALL_REDUCE, options)
    leaf = dataclasses.replace(leaf_of(np.empty(0, dtype)), shape=shape)
    _check_reducible(size, op, [leaf], compression)
    return _named("all_reduce", [leaf], options, op.value)


def all_gather(tree: Any, axis: int, options: CallOptions) -> OperationRequest:
    """See `GroupCalls.all_gather`."""
    _check_algorithm(CallKind.ALL_GATHER, options)
    found, rebuild, where = flatten(tree)
    leaves, axes = [], []
    for each in map(leaf_of, found):
        ndim = len(each.shape)
        if not -ndim <= axis < ndim:
            raise ValueError(
                f"all_gather along axis {axis}: an array of shape {each.shape} has "
                "no such axis"
            )
        axes.append(axis % ndim)
        leaves.append(each if not axis % ndim else each.moved(axis))
    words = _named("all_gather", leaves, options, f"axis={axis}", where, free=leaves)

    def make(factory: CallFactory) -> Steps:
        steps = operations.all_gather(factory, leaves, axes)
        return operations.rebuilt(steps, rebuild)

    return OperationRequest(words, make, options)


def reduce_scatter(
    size: int, tree: Any, op: ReduceOp | str, options: CallOptions
) -> OperationRequest:
    """See `GroupCalls.reduce_scatter`."""
    _check_algorithm(CallKind.REDUCE_SCATTER, options)
    op = ReduceOp.of(op)
    found, rebuild, where = flatten(tree)
    leaves = [leaf_of(each) for each in found]
    _check_reducible(size, op, leaves)
    _check_axis("reduce_scatter", leaves)
    words = _named("reduce_scatter", leaves, options, op.value, where)

    def make(factory: CallFactory) -> Steps:
        steps = operations.reduce_scatter(factory, leaves, op)
        return operations.rebuilt(steps, rebuild)

    return OperationRequest(words, make, options)


def broadcast(
    size: int, tree: Any, root: int, in_place: bool, options: CallOptions
) -> OperationRequest:
    """See `GroupCalls.broadcast`."""
    _check_algorithm(CallKind.BROADCAST, options)
    if not 0 <= root < size:
        raise ValueError(f"root={root}: expected a rank below {size}")
    found, rebuild, where = flatten(tree)
    leaves = [leaf_of(each) for each in found]
    if in_place:
        _check_writable(leaves, ())
    more = (f"root={root}", _packs(leaves, options), where)
    words = _named("broadcast", leaves, options, *more)

    def make(factory: CallFactory) -> Steps:
        steps = operations.broadcast(factory, leaves, root, in_place)
        return operations.rebuilt(steps, rebuild)

    return OperationRequest(words, make, options)


def all_to_all(
    size: int, array: Any, splits: Sequence[int] | None, options: CallOptions
) -> OperationRequest:
    """See `GroupCalls.all_to_all`."""
    leaf = leaf_of(array)
    _check_axis("all_to_all", [leaf])
    rows = leaf.shape[0]
    if splits is None and rows % size:
        raise ValueError(
            f"all_to_all of {rows} rows among {size} ranks: they do not divide; "
            "say with splits= how many each rank gets"
        )
    if splits is not None and (
        len(splits) != size or sum(splits) != rows or min(splits) < 0
    ):
        raise ValueError(
            f"splits={list(splits)}: expected {size} counts that add up to {rows}"
        )
    free = [] if splits is None else [leaf]
    words = _named("all_to_all", [leaf], options, free=free)
    return OperationRequest(
        words, lambda factory: operations.all_to_all(factory, leaf, splits), options
    )


def barrier(options: CallOptions) -> OperationRequest:
    """See `GroupCalls.barrier`."""
    return OperationRequest("barrier()", operations.barrier, options)


def _gathered(slices: Any, divisor: int | None, values: Any, indices: Any) -> Any:
    """The slices of all ranks. Whoever adds them up later has the mean if each of them
    is divided by the number of ranks now."""
    if divisor is not None:
        values = values / divisor
    return dataclasses.replace(slices, values=values, indices=indices)


def _dense(slices: SlicesLike) -> Any:
    """The whole array: of numpy if the slices are, as jax would cut 64 bits."""
    values, indices, shape = slices.values, slices.indices, slices.dense_shape
    are_numpy = isinstance(values, np.ndarray) and isinstance(indices, np.ndarray)
    if shape is None or not are_numpy:
        return slices.to_dense()
    inside = (indices >= 0) & (indices < shape[0])
    found = runs(indices[inside])
    whole = np.zeros(shape, values.dtype)
    whole[found.unique] = sums(found, values[inside])
    return whole


def _check_algorithm(kind: CallKind, options: CallOptions) -> None:
    """Raises: ValueError: There is no such algorithm for the call, or none for what
    is compressed; says which."""
    if options.algorithm not in (None, "auto"):
        found = algorithm_named(kind.value, options.algorithm)
        if options.compression is not None and not found.is_compressible:
            raise ValueError(
                f"algorithm {options.algorithm!r} with "
                f"compression={options.compression!r}: every rank finishes by itself, "
                "so nothing may be rounded on the way: name another one"
            )


def _check_reducible(
    size: int, op: ReduceOp, leaves: Iterable[ArrayLeaf], compression: str | None = None
) -> None:
    for dtype in {leaf.flat.dtype for leaf in leaves}:
        reduction = reduction_of(op, dtype, size)
        if compression is not None:
            Compressor(Compression.of(compression)).codec("", reduction)


def _packs(leaves: Sequence[ArrayLeaf], options: CallOptions) -> str:
    """How small arrays share calls, where that is not as for everybody."""
    packs = options.bytes_per_pack
    return f"bytes_per_pack={packs}" if packs and len(leaves) > 1 else ""


def _named(
    name: str,
    leaves: Sequence[ArrayLeaf],
    options: CallOptions,
    *more: str,
    free: Sequence[ArrayLeaf] = (),
) -> str:
    """An operation in words; ``free`` are leaves whose first axis may differ."""
    words = [described(leaves, free), *filter(None, more)]
    if options.compression is not None:
        words.append(f"compression={options.compression!r}")
    if options.algorithm is not None:
        words.append(f"algorithm={options.algorithm!r}")
    return f"{name}({', '.join(words)})"


def _check_axis(name: str, leaves: Sequence[ArrayLeaf]) -> None:
    for leaf in leaves:
        if not leaf.shape:
            raise ValueError(f"{name}: expected arrays with an axis, got a number")


def _check_writable(leaves: Sequence[ArrayLeaf], sparse: object) -> None:
    if sparse:
        raise TypeError("in_place: IndexedSlices change their length")
    for leaf in leaves:
        if leaf.is_jax or not isinstance(leaf.origin, np.ndarray):
            raise TypeError(
                f"in_place: {type(leaf.origin).__name__} cannot be written to: give "
                "numpy arrays, or take what is returned"
            )
        if not leaf.origin.flags.writeable:
            raise _read_only()
    if len(leaves) > 1:
        _check_apart(leaves)


def _read_only() -> ValueError:
    return ValueError(
        "in_place: an array is read-only: give a copy that may be written to, or leave "
        "in_place out and take what is returned"
    )


def _check_apart(leaves: Sequence[ArrayLeaf]) -> None:
    """Memory that stands in a tree twice would be written to twice."""
    spans = sorted(
        (start, start + leaf.flat.nbytes)
        for leaf in leaves
        for start in [leaf.flat.ctypes.data]
        if leaf.flat.size
    )
    if any(end > start for (_, end), (start, _) in pairwise(spans)):
        raise ValueError(
            "in_place: the same memory stands at two places of the tree: give each "
            "array once"
        )


def _check_sparse(op: ReduceOp, rows: Sequence[ArrayLeaf]) -> None:
    if rows and op not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise TypeError(
            f"{op.value} of IndexedSlices: expected SUM or MEAN; use densify=True"
        )

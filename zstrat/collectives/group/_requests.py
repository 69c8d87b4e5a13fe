"""What a method of a group asks for: checked, in words, and as steps.

Nothing has a number yet, and nothing is sent: what is refused here, no other rank ever
hears of. The words are what ranks compare, so they hold all that has to be alike.
"""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import numpy as np

from zstrat.collectives._compression import Compression, Compressor
from zstrat.collectives._engine import CallKind
from zstrat.collectives._leaves import described, flatten, is_slices, leaf_of
from zstrat.collectives._reduction import reduction_of
from zstrat.collectives._terms import ReduceOp
from zstrat.collectives.schedules._plans import checked_algorithm

from . import _operations as operations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from zstrat.collectives._leaves import ArrayLeaf

    from ._operations import CallFactory, Steps
    from ._work import CallOptions


class OperationRequest(NamedTuple):
    """An operation in words, and what makes its steps."""

    words: str
    make: Callable[[CallFactory], Steps]


BARRIER: Final = OperationRequest("barrier()", operations.barrier)


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
    checked_algorithm(CallKind.ALL_REDUCE, options.algorithm)
    found, rebuild, where = flatten(tree)
    if densify:
        found = [x.to_dense() if is_slices(x) else x for x in found]
    dense = {at: leaf_of(x) for at, x in enumerate(found) if not is_slices(x)}
    sparse = {at: x for at, x in enumerate(found) if is_slices(x)}
    leaves = list(dense.values())
    _check_reducible(size, op, leaves, options.compression)
    if in_place:
        _check_writable(leaves, sparse)
    rows = [leaf_of(part) for x in sparse.values() for part in (x.values, x.indices)]
    _check_reducible(size, op, rows[::2])
    _check_sparse(op, rows)
    packs = _packs(leaves, options)
    words = _named("all_reduce", [*leaves, *rows], op.value, packs, where, free=rows)

    def make(draft: CallFactory) -> Steps:
        many = [operations.all_reduce(draft, leaves, op, in_place)]
        if rows:
            many.append(operations.all_gather(draft, rows, [0] * len(rows)))
        return operations.together(many, finish)

    def finish(parts: list[list[Any]]) -> Any:
        out = dict(zip(dense, parts[0], strict=True))
        gathered = iter(parts[1] if rows else ())
        for at, slices in sparse.items():
            values, indices = next(gathered), next(gathered)
            if op is ReduceOp.MEAN:
                values = values / size
            # mypy cannot see that what is an `IndexedSlices` is a dataclass.
            out[at] = dataclasses.replace(
                cast("Any", slices), values=values, indices=indices
            )
        return rebuild([out[at] for at in range(len(found))])

    return OperationRequest(words, make)


def all_gather(tree: Any, axis: int, options: CallOptions) -> OperationRequest:
    """See `GroupCalls.all_gather`."""
    checked_algorithm(CallKind.ALL_GATHER, options.algorithm)
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
    words = _named("all_gather", leaves, f"axis={axis}", where, free=leaves)
    steps = operations.all_gather
    return OperationRequest(
        words, lambda draft: operations.rebuilt(steps(draft, leaves, axes), rebuild)
    )


def reduce_scatter(
    size: int, tree: Any, op: ReduceOp | str, options: CallOptions
) -> OperationRequest:
    """See `GroupCalls.reduce_scatter`."""
    checked_algorithm(CallKind.REDUCE_SCATTER, options.algorithm)
    op = ReduceOp.of(op)
    found, rebuild, where = flatten(tree)
    leaves = [leaf_of(each) for each in found]
    _check_reducible(size, op, leaves)
    _check_axis("reduce_scatter", leaves)
    words = _named("reduce_scatter", leaves, op.value, where)
    return OperationRequest(
        words,
        lambda draft: operations.rebuilt(
            operations.reduce_scatter(draft, leaves, op), rebuild
        ),
    )


def broadcast(
    size: int, tree: Any, root: int, in_place: bool, options: CallOptions
) -> OperationRequest:
    """See `GroupCalls.broadcast`."""
    checked_algorithm(CallKind.BROADCAST, options.algorithm)
    if not 0 <= root < size:
        raise ValueError(f"root={root}: expected a rank below {size}")
    found, rebuild, where = flatten(tree)
    leaves = [leaf_of(each) for each in found]
    if in_place:
        _check_writable(leaves, ())
    words = _named("broadcast", leaves, f"root={root}", _packs(leaves, options), where)
    return OperationRequest(
        words,
        lambda draft: operations.rebuilt(
            operations.broadcast(draft, leaves, root, in_place), rebuild
        ),
    )


def all_to_all(size: int, array: Any, splits: Sequence[int] | None) -> OperationRequest:
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
    words = _named("all_to_all", [leaf], free=free)
    return OperationRequest(
        words,
        lambda draft: operations.rebuilt(
            operations.all_to_all(draft, leaf, splits), lambda leaves: leaves[0]
        ),
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
    name: str, leaves: Sequence[ArrayLeaf], *more: str, free: Sequence[ArrayLeaf] = ()
) -> str:
    """An operation in words; ``free`` are leaves whose first axis may differ."""
    words = ", ".join([described(leaves, free), *filter(None, more)])
    return f"{name}({words})"


def described_with(words: str, options: CallOptions) -> str:
    """The words of an operation with what its caller wants of the way it goes."""
    extra = [
        f"{name}={value!r}"
        for name, value in (
            ("compression", options.compression),
            ("algorithm", options.algorithm),
        )
        if value is not None
    ]
    return ", ".join([words[:-1], *extra]) + ")" if extra else words


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
            raise ValueError("in_place: an array is read-only")
    if len(leaves) > 1:
        _check_apart(leaves)


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

"""The operations of a group: each function here checks the arguments of an operation,
describes it as text, and returns the steps that carry it out.

An `OperationRequest` has no number yet, and nothing was sent: no other rank receives an
operation that is refused here. Ranks compare the descriptions, so these contain
everything that must be equal on all ranks.

The steps are an iterator. A step is a list of calls that start together; the next step
begins when all of them have ended. The iterator returns a function that makes the
user's result, which runs in the thread that asks for the result. Steps send nothing
themselves, so the same steps serve blocking and asynchronous callers and any transport.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from zstrat.collectives._engine import CallKind, CollectiveCall
from zstrat.collectives._leaves import (
    buckets,
    dense,
    flatten,
    is_slices,
    leaf_of,
    with_rows,
)
from zstrat.collectives._reduction import ReduceOp
from zstrat.collectives.schedules._algorithms import ALGORITHMS
from zstrat.config import MiB
from zstrat.transport import POOL

from ._arguments import (
    CallOptions,
    check_axis,
    check_reducible,
    check_sparse,
    check_splits,
    check_writable,
    packs,
    read_only,
    words_of,
)
from ._traffic import about, key_of

if TYPE_CHECKING:
    from zstrat.collectives._leaves import ArrayLeaf

Finish = Callable[[], Any]
Steps = Generator[list[CollectiveCall], None, Finish]

ALONE: Final = 128 * 1024
"""Bytes of an array from which it is not packed with others: to copy it twice costs
more than a call of its own."""

PACK: Final = 4 * MiB
"""Default of the bytes per pack: so large that the cost of the call does not matter,
and small enough that a result which the user keeps holds no more memory of other
results than this."""

_LENGTHS: Final = np.dtype(np.int64)


@dataclass(slots=True)
class CallFactory:
    """Creates the calls of one operation of one rank. ``number`` counts the operations
    with its tag."""

    rank: int
    size: int
    number: int
    words: str
    deadline: float
    options: CallOptions
    parts: int = 0
    """Number of calls created so far."""
    meanwhile: Callable[[], None] | None = None
    """Work for the caller's thread while the first calls are under way, if the thread
    does not wait for them."""

    def call(
        self,
        kind: CallKind,
        source: np.ndarray,
        target: np.ndarray,
        *,
        op: ReduceOp = ReduceOp.SUM,
        root: int = 0,
        sizes: Sequence[int] = (),
        is_frozen: bool = False,
    ) -> CollectiveCall:
        """Creates the next call of the operation."""
        part, self.parts = self.parts, self.parts + 1
        options, tag, algorithm = self.options, self.options.tag, self.options.algorithm
        # An operation may take calls of other kinds, whose algorithms are others.
        if algorithm != "auto" and algorithm not in ALGORITHMS[kind.value]:
            algorithm = None
        return CollectiveCall(
            key_of(tag, self.number, part),
            kind,
            source,
            target,
            about(self.words, part),
            self.words,
            self.deadline,
            options.timeout,
            op,
            root,
            tuple(sizes),
            tag,
            options.compression,
            # What a compression leaves out belongs to the next call of this name.
            f"{tag}/{self.words}/{part}",
            algorithm,
            is_frozen,
        )


class OperationRequest(NamedTuple):
    """A checked operation without a number: its description, the function that makes
    its steps, and its options."""

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
    """Returns the request to reduce every array over all ranks, and to gather
    IndexedSlices."""
    op = ReduceOp.of(op)
    # The usual call of a training step: no tree, so most of what follows is saved.
    if type(tree) is np.ndarray and tree.dtype.isnative and tree.flags.c_contiguous:
        return _all_reduce_array(size, tree, op, in_place, options)
    nodes, rebuild, paths = flatten(tree)
    if densify:
        nodes = [dense(x) if is_slices(x) else x for x in nodes]
    sparse = {at: x for at, x in enumerate(nodes) if is_slices(x)}
    leaves = [leaf_of(x) for at, x in enumerate(nodes) if at not in sparse]
    check_reducible(size, op, leaves, options.compression)
    if in_place:
        check_writable(leaves, sparse)
    rows = [leaf_of(part) for x in sparse.values() for part in (x.values, x.indices)]
    # The values alone: indices are gathered, not reduced.
    check_reducible(size, op, rows[::2])
    check_sparse(op, rows)
    kind, more = CallKind.ALL_REDUCE, (op.value, packs(leaves, options), paths)
    words = words_of(kind, [*leaves, *rows], options, *more, free=rows)

    def steps(factory: CallFactory) -> Steps:
        calls, results = _packed(factory, kind, leaves, in_place, op=op)
        if not rows:
            yield calls
            return lambda: rebuild(_delivered(leaves, results, in_place))
        gathering = _gathered(factory, rows, [0] * len(rows))
        yield calls + next(gathering)  # the lengths travel with what is reduced
        gathered = yield from gathering

        def finish() -> Any:
            arrays = iter(_delivered(leaves, results, in_place))
            slices = iter(gathered())
            divisor = size if op is ReduceOp.MEAN else None
            return rebuild(
                [
                    with_rows(sparse[at], divisor, next(slices), next(slices))
                    if at in sparse
                    else next(arrays)
                    for at in range(len(nodes))
                ]
            )

        return finish

    return OperationRequest(words, steps, options)


def _all_reduce_array(
    size: int,
    array: np.ndarray,
    op: ReduceOp,
    in_place: bool,
    options: CallOptions,
) -> OperationRequest:
    """Returns the request of `all_reduce` for one array in C order, which needs no
    packing."""
    # Text, as it is a key; an unknown name is refused by an error that has it.
    compression = None if options.compression is None else str(options.compression)
    algorithm = None if options.algorithm is None else str(options.algorithm)
    words = _array_words(size, array.dtype, array.shape, op, compression, algorithm)
    if in_place and not array.flags.writeable:
        raise read_only()

    def steps(factory: CallFactory) -> Steps:
        source = array.reshape(-1)
        target = source if in_place else POOL.empty(source.size, source.dtype)
        yield [factory.call(CallKind.ALL_REDUCE, source, target, op=op)]
        return lambda: array if in_place else target.reshape(array.shape)

    return OperationRequest(words, steps, options)


@lru_cache(maxsize=1024)
def _array_words(
    size: int,
    dtype: np.dtype,
    shape: tuple[int, ...],
    op: ReduceOp,
    compression: str | None,
    algorithm: str | None,
) -> str:
    """Describes an all-reduce of an array of this dtype and shape. The description is
    cached, because a program reduces the same arrays at each step.

    Raises: as `all_reduce`.
    """
    leaf = dataclasses.replace(leaf_of(np.empty(0, dtype)), shape=shape)
    check_reducible(size, op, [leaf], compression)
    options = CallOptions(1.0, None, compression, algorithm)
    return words_of(CallKind.ALL_REDUCE, [leaf], options, op.value)


def broadcast(
    size: int, tree: Any, root: int, in_place: bool, options: CallOptions
) -> OperationRequest:
    """Returns the request to send the arrays of the root to all ranks."""
    if not 0 <= root < size:
        raise ValueError(f"root={root}: expected a rank below {size}")
    nodes, rebuild, paths = flatten(tree)
    leaves = [leaf_of(each) for each in nodes]
    if in_place:
        check_writable(leaves, ())
    kind, more = CallKind.BROADCAST, (f"root={root}", packs(leaves, options), paths)
    words = words_of(kind, leaves, options, *more)

    def steps(factory: CallFactory) -> Steps:
        calls, results = _packed(factory, kind, leaves, in_place, root=root)
        is_root = factory.rank == root
        copies = _copies(leaves, results) if is_root and not in_place else {}

        def keep() -> None:
            """Copies the root's arrays for its result. The root may change its arrays
            after this, or after the calls have ended."""
            while copies:
                at, copy = copies.popitem()
                np.copyto(copy, results[at])
                results[at] = copy

        factory.meanwhile = keep
        yield calls

        def finish() -> Any:
            keep()
            if not is_root:
                return rebuild(_delivered(leaves, results, in_place))
            return rebuild(
                [
                    x.origin if in_place or x.is_jax else results[at].reshape(x.shape)
                    for at, x in enumerate(leaves)
                ]
            )

        return finish

    return OperationRequest(words, steps, options)


def all_gather(tree: Any, axis: int, options: CallOptions) -> OperationRequest:
    """Returns the request to concatenate the arrays of all ranks, in the order of
    ranks."""
    nodes, rebuild, paths = flatten(tree)
    leaves, axes = [], []
    for each in map(leaf_of, nodes):
        ndim = len(each.shape)
        if not -ndim <= axis < ndim:
            raise ValueError(
                f"all_gather along axis {axis}: an array of shape {each.shape} has "
                "no such axis"
            )
        axes.append(axis % ndim)
        leaves.append(each if not axis % ndim else each.moved(axis))
    more = (f"axis={axis}", paths)
    words = words_of(CallKind.ALL_GATHER, leaves, options, *more, free=leaves)

    def steps(factory: CallFactory) -> Steps:
        finish = yield from _gathered(factory, leaves, axes)
        return lambda: rebuild(finish())

    return OperationRequest(words, steps, options)


def reduce_scatter(
    size: int, tree: Any, op: ReduceOp | str, options: CallOptions
) -> OperationRequest:
    """Returns the request to reduce every array over all ranks, of which rank r keeps
    the r-th part of the first axis. The first ``n mod size`` ranks have one row
    more."""
    op = ReduceOp.of(op)
    nodes, rebuild, paths = flatten(tree)
    leaves = [leaf_of(each) for each in nodes]
    check_reducible(size, op, leaves)
    kind = CallKind.REDUCE_SCATTER
    check_axis(kind, leaves)
    words = words_of(kind, leaves, options, op.value, paths)

    def steps(factory: CallFactory) -> Steps:
        calls, results = [], []
        for leaf in leaves:
            short, more = divmod(leaf.shape[0], size)
            rows = [short + (rank < more) for rank in range(size)]
            sizes = [each * leaf.row for each in rows]
            target = POOL.empty(sizes[factory.rank], leaf.flat.dtype)
            calls.append(
                factory.call(
                    kind, leaf.flat, target, op=op, sizes=sizes, is_frozen=leaf.is_jax
                )
            )
            results.append(target.reshape(rows[factory.rank], *leaf.shape[1:]))
        yield calls
        return lambda: rebuild(
            [leaf.back(result) for leaf, result in zip(leaves, results, strict=True)]
        )

    return OperationRequest(words, steps, options)


def all_to_all(
    size: int, array: Any, splits: Sequence[int] | None, options: CallOptions
) -> OperationRequest:
    """Returns the request to send part j of the first axis to rank j; the result has
    the received parts in the order of ranks. ``splits``: rows for each rank; None:
    equal numbers."""
    leaf, kind = leaf_of(array), CallKind.ALL_TO_ALL
    check_axis(kind, [leaf])
    check_splits(size, leaf.shape[0], splits)
    words = words_of(kind, [leaf], options, free=[] if splits is None else [leaf])

    def steps(factory: CallFactory) -> Steps:
        if splits is None:
            rows = np.full(size * size, leaf.shape[0] // size, _LENGTHS)
        else:
            rows = np.empty(size * size, _LENGTHS)
            counts, sizes = np.array(splits, _LENGTHS), [size] * size
            # A rank knows what it sends, but not how much it gets.
            yield [factory.call(CallKind.ALL_GATHER, counts, rows, sizes=sizes)]
        incoming = int(rows[factory.rank :: size].sum())
        target = POOL.empty(incoming * leaf.row, leaf.flat.dtype)
        sizes = [int(each) * leaf.row for each in rows]
        yield [
            factory.call(kind, leaf.flat, target, sizes=sizes, is_frozen=leaf.is_jax)
        ]
        return lambda: leaf.back(target.reshape(incoming, *leaf.shape[1:]))

    return OperationRequest(words, steps, options)


def barrier(options: CallOptions) -> OperationRequest:
    """Returns the request to wait until all ranks have made the call."""

    def steps(factory: CallFactory) -> Steps:
        nothing = np.empty(0, np.uint8)
        yield [factory.call(CallKind.BARRIER, nothing, nothing)]
        return lambda: None

    return OperationRequest("barrier()", steps, options)


def _packed(
    factory: CallFactory,
    kind: CallKind,
    leaves: Sequence[ArrayLeaf],
    in_place: bool,
    *,
    op: ReduceOp = ReduceOp.SUM,
    root: int = 0,
) -> tuple[list[CollectiveCall], dict[int, np.ndarray]]:
    """Creates the calls of an operation, in which small leaves are packed, the last
    leaves first. Returns the calls, and the array with the result of each leaf by its
    index."""
    flats = [leaf.flat for leaf in leaves]
    sizes = [(flat.dtype, flat.size) for flat in flats]
    is_broadcast = kind is CallKind.BROADCAST
    calls: list[CollectiveCall] = []
    results: dict[int, np.ndarray] = {}
    for bucket in buckets(sizes, factory.options.bytes_per_pack or PACK, ALONE):
        first = leaves[bucket.members[0]]
        # The result is made where the user wants it.
        is_own = in_place and not bucket.is_packed and first.is_view
        # Its values are not read here, so they are not copied together either.
        if is_broadcast and factory.rank != root and not is_own:
            source = POOL.empty(sum(bucket.counts), bucket.dtype)
        else:
            source = bucket.flat(flats, POOL.empty)
        # A broadcast, an array of the user and a pack take the result in place.
        target = source
        if not (is_broadcast or is_own or bucket.is_packed):
            target = POOL.empty(source.size, source.dtype)
        # jax arrays never change, so their memory may be sent without a copy; that of a
        # pack is used again.
        frozen = first.is_jax and not bucket.is_packed
        calls.append(
            factory.call(kind, source, target, op=op, root=root, is_frozen=frozen)
        )
        results.update(zip(bucket.members, bucket.split(target), strict=True))
    return calls, results


def _gathered(
    factory: CallFactory, leaves: Sequence[ArrayLeaf], axes: Sequence[int]
) -> Steps:
    """Yields the steps of a gather, which concatenates the leaves of all ranks along
    their first axis. ``axes`` has for each leaf the position of that axis in the
    result."""
    kind = CallKind.ALL_GATHER
    lengths = np.array([leaf.shape[0] for leaf in leaves], _LENGTHS)
    table = np.empty(factory.size * len(leaves), _LENGTHS)
    sizes = [len(leaves)] * factory.size
    # First axes may differ, so lengths go first, of all leaves in one call.
    yield [factory.call(kind, lengths, table, sizes=sizes)]
    calls, results = [], []
    for at, leaf in enumerate(leaves):
        rows = [int(each) for each in table[at :: len(leaves)]]
        sizes = [each * leaf.row for each in rows]
        target = POOL.empty(sum(sizes), leaf.flat.dtype)
        calls.append(
            factory.call(kind, leaf.flat, target, sizes=sizes, is_frozen=leaf.is_jax)
        )
        results.append(target.reshape(sum(rows), *leaf.shape[1:]))
    yield calls
    return lambda: [
        leaf.back(np.moveaxis(result, 0, axis))
        for leaf, result, axis in zip(leaves, results, axes, strict=True)
    ]


def _copies(
    leaves: Sequence[ArrayLeaf], results: dict[int, np.ndarray]
) -> dict[int, np.ndarray]:
    """Allocates memory for the results of the root of a broadcast, which must not be
    the input arrays unless these are immutable. Returns it by index of the leaf."""
    return {
        at: POOL.empty(leaf.flat.size, leaf.flat.dtype)
        for at, leaf in enumerate(leaves)
        if not leaf.is_jax and results[at].ctypes.data == leaf.flat.ctypes.data
    }


def _delivered(
    leaves: Sequence[ArrayLeaf], results: dict[int, np.ndarray], in_place: bool
) -> list[Any]:
    """Returns the results in the form that users get: in new arrays, or written into
    their arrays if ``in_place``."""
    if not in_place:
        return [x.back(results[at].reshape(x.shape)) for at, x in enumerate(leaves)]
    # Through `origin`, where `flat` was a copy: of another byte order, or with gaps.
    for at, leaf in enumerate(leaves):
        result = results[at]
        if not leaf.is_view or result.ctypes.data != leaf.flat.ctypes.data:
            leaf.origin[...] = result.reshape(leaf.shape)
    return [leaf.origin for leaf in leaves]

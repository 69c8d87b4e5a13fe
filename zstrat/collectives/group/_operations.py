"""What the methods of a group do, as steps: calls, then more calls, then a result.

A step is a list of calls that go out together; the next step begins when all of them
are over. The last thing is a function that makes the user's result; it runs in the
thread that asks for it. Nothing here sends anything, so that the same steps serve
blocking and asynchronous callers and any lane.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from zstrat.collectives._buckets import Bucket, buckets
from zstrat.collectives._engine import CallKind, CollectiveCall
from zstrat.collectives._terms import ReduceOp
from zstrat.collectives.schedules._algorithms import ALGORITHMS
from zstrat.config import MiB
from zstrat.transport import POOL

from ._keys import about, key_of

if TYPE_CHECKING:
    from zstrat.collectives._leaves import ArrayLeaf

Finish = Callable[[], Any]
Steps = Generator[list[CollectiveCall], None, Finish]

ALONE: Final = 128 * 1024
"""Arrays of so many bytes travel by themselves: to copy them twice costs more than a
call."""

PACK: Final = 4 * MiB
"""Bytes per pack where nobody says: a call costs nothing beside so many, and what is
left of a result keeps no more than this of others in memory."""

_LENGTHS: Final = np.dtype(np.int64)


@dataclass(frozen=True, slots=True)
class CallOptions:
    """What a caller says about any operation. ``timeout`` in seconds."""

    timeout: float
    tag: str | None = None
    compression: str | None = None
    algorithm: str | None = None
    bytes_per_pack: int = 0


@dataclass(slots=True)
class CallFactory:
    """Makes the calls of one operation, the ``number``-th of its tag, of one rank."""

    rank: int
    size: int
    number: int
    words: str
    deadline: float
    options: CallOptions
    parts: int = 0
    """Calls that it has made."""
    meanwhile: Callable[[], None] | None = None
    """For the caller's thread to do while the first calls are on their way, if it does
    not wait for them."""

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
        """The next call of the operation."""
        part, self.parts = self.parts, self.parts + 1
        options, tag = self.options, self.options.tag
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
            f"{tag}/{self.words}/{part}",
            options.algorithm if _knows(kind, options.algorithm) else None,
            is_frozen,
        )


def _knows(kind: CallKind, algorithm: str | None) -> bool:
    """An operation may take calls of other kinds, whose algorithms are others."""
    return algorithm in ALGORITHMS[kind.value] or algorithm == "auto"


def all_reduce(
    factory: CallFactory, leaves: Sequence[ArrayLeaf], op: ReduceOp, in_place: bool
) -> Steps:
    """Every leaf reduced over all ranks; small ones share calls, the last go first."""
    flats = [leaf.flat for leaf in leaves]
    sizes = [(flat.dtype, flat.size) for flat in flats]
    results: dict[int, np.ndarray] = {}
    calls = []
    for bucket in buckets(sizes, factory.options.bytes_per_pack or PACK, ALONE):
        source = bucket.flat(flats, POOL.empty)
        target = _target(leaves, bucket, source, in_place)
        frozen = not bucket.is_packed and leaves[bucket.members[0]].is_jax
        calls.append(
            factory.call(CallKind.ALL_REDUCE, source, target, op=op, is_frozen=frozen)
        )
        results.update(zip(bucket.members, bucket.split(target), strict=True))
    yield calls

    return lambda: _all_delivered(leaves, results, in_place)


def all_reduce_array(
    factory: CallFactory, array: np.ndarray, op: ReduceOp, in_place: bool
) -> Steps:
    """`all_reduce` of one array in C order, where there is nothing to pack."""
    source = array.reshape(-1)
    target = source if in_place else POOL.empty(source.size, source.dtype)
    yield [factory.call(CallKind.ALL_REDUCE, source, target, op=op)]
    return lambda: array if in_place else target.reshape(array.shape)


def broadcast(
    factory: CallFactory, leaves: Sequence[ArrayLeaf], root: int, in_place: bool = False
) -> Steps:
    """The root's leaves on all ranks; small ones share calls, the last go first."""
    flats = [leaf.flat for leaf in leaves]
    sizes = [(flat.dtype, flat.size) for flat in flats]
    is_root = factory.rank == root
    results: dict[int, np.ndarray] = {}
    calls = []
    for bucket in buckets(sizes, factory.options.bytes_per_pack or PACK, ALONE):
        if is_root or _is_own(leaves, bucket, in_place):
            target = bucket.flat(flats, POOL.empty)
        else:
            target = POOL.empty(sum(bucket.counts), bucket.dtype)
        frozen = not bucket.is_packed and leaves[bucket.members[0]].is_jax
        calls.append(
            factory.call(
                CallKind.BROADCAST, target, target, root=root, is_frozen=frozen
            )
        )
        results.update(zip(bucket.members, bucket.split(target), strict=True))
    copies = _copies(leaves, results) if is_root and not in_place else {}

    def keep() -> None:
        """The root may change its arrays when this is over, or the calls."""
        while copies:
            at, copy = copies.popitem()
            np.copyto(copy, results[at])
            results[at] = copy

    factory.meanwhile = keep
    yield calls

    def finish() -> list[Any]:
        keep()
        if not is_root:
            return _all_delivered(leaves, results, in_place)
        if in_place:
            return [leaf.origin for leaf in leaves]
        return [_kept(leaf, results[at]) for at, leaf in enumerate(leaves)]

    return finish


def all_gather(
    factory: CallFactory, leaves: Sequence[ArrayLeaf], axes: Sequence[int]
) -> Steps:
    """Leaves of all ranks, one behind the other along their first axis, which is put
    where ``axes`` says in the results."""
    lengths = np.array([leaf.shape[0] for leaf in leaves], _LENGTHS)
    table = np.empty(factory.size * len(leaves), _LENGTHS)
    sizes = [len(leaves)] * factory.size
    yield [factory.call(CallKind.ALL_GATHER, lengths, table, sizes=sizes)]
    calls, results = [], []
    for at, leaf in enumerate(leaves):
        rows = [int(each) for each in table[at :: len(leaves)]]
        sizes = [each * leaf.row for each in rows]
        target = POOL.empty(sum(sizes), leaf.flat.dtype)
        calls.append(
            factory.call(
                CallKind.ALL_GATHER,
                leaf.flat,
                target,
                sizes=sizes,
                is_frozen=leaf.is_jax,
            )
        )
        results.append(target.reshape(sum(rows), *leaf.shape[1:]))
    yield calls

    def finish() -> list[Any]:
        return [
            leaf.back(np.moveaxis(result, 0, axis))
            for leaf, result, axis in zip(leaves, results, axes, strict=True)
        ]

    return finish


def reduce_scatter(
    factory: CallFactory, leaves: Sequence[ArrayLeaf], op: ReduceOp
) -> Steps:
    """Every leaf reduced over all ranks, and cut along its first axis: rank r keeps the
    r-th part. The first ``n mod size`` ranks have one row more."""
    calls, results = [], []
    for leaf in leaves:
        row = leaf.row
        short, more = divmod(leaf.shape[0], factory.size)
        rows = [short + (rank < more) for rank in range(factory.size)]
        target = POOL.empty(rows[factory.rank] * row, leaf.flat.dtype)
        sizes = [each * row for each in rows]
        calls.append(
            factory.call(
                CallKind.REDUCE_SCATTER,
                leaf.flat,
                target,
                op=op,
                sizes=sizes,
                is_frozen=leaf.is_jax,
            )
        )
        results.append(target.reshape(rows[factory.rank], *leaf.shape[1:]))
    yield calls
    return lambda: [
        leaf.back(result) for leaf, result in zip(leaves, results, strict=True)
    ]


def all_to_all(
    factory: CallFactory, leaf: ArrayLeaf, splits: Sequence[int] | None
) -> Steps:
    """Part j of the first axis goes to rank j; the result is what came, in the order of
    ranks. ``splits``: rows for each rank; None: as many for each."""
    size, row = factory.size, leaf.row
    if splits is None:
        rows = np.full(size * size, leaf.shape[0] // size, _LENGTHS)
    else:
        rows = np.empty(size * size, _LENGTHS)
        mine = np.array(splits, _LENGTHS)
        yield [factory.call(CallKind.ALL_GATHER, mine, rows, sizes=[size] * size)]
    incoming = int(rows[factory.rank :: size].sum())
    target = POOL.empty(incoming * row, leaf.flat.dtype)
    yield [
        factory.call(
            CallKind.ALL_TO_ALL,
            leaf.flat,
            target,
            sizes=[int(each) * row for each in rows],
            is_frozen=leaf.is_jax,
        )
    ]
    return lambda: leaf.back(target.reshape(incoming, *leaf.shape[1:]))


def barrier(factory: CallFactory) -> Steps:
    """No rank is through before all have come."""
    nothing = np.empty(0, np.uint8)
    yield [factory.call(CallKind.BARRIER, nothing, nothing)]
    return lambda: None


def rebuilt(steps: Steps, rebuild: Callable[[list[Any]], Any]) -> Steps:
    """The same steps, with another result made of theirs."""
    finish = yield from steps
    return lambda: rebuild(finish())


def together(*many: Steps) -> Steps:
    """Several operations as one, whose result is the list of theirs: what they call at
    a step goes out together."""
    finishes: dict[int, Finish] = {}
    while len(finishes) < len(many):
        calls: list[CollectiveCall] = []
        for at, steps in enumerate(many):
            if at not in finishes:
                try:
                    calls += next(steps)
                except StopIteration as end:
                    finishes[at] = end.value
        if len(finishes) < len(many):
            yield calls
    return lambda: [finishes[at]() for at in range(len(many))]


def _target(
    leaves: Sequence[ArrayLeaf], bucket: Bucket, source: np.ndarray, in_place: bool
) -> np.ndarray:
    """Where the reduced bucket goes: over what was packed for it, or what is ours."""
    if bucket.is_packed or _is_own(leaves, bucket, in_place):
        return source
    return POOL.empty(source.size, source.dtype)


def _is_own(leaves: Sequence[ArrayLeaf], bucket: Bucket, in_place: bool) -> bool:
    """Whether the result of a bucket can be made where the user wants it."""
    first = leaves[bucket.members[0]]
    return in_place and not bucket.is_packed and first.is_view


def _copies(
    leaves: Sequence[ArrayLeaf], results: dict[int, np.ndarray]
) -> dict[int, np.ndarray]:
    """Memory for what the root of a broadcast gets: never that which it gave, unless
    nobody can write to it."""
    return {
        at: POOL.empty(leaf.flat.size, leaf.flat.dtype)
        for at, leaf in enumerate(leaves)
        if not leaf.is_jax and results[at].ctypes.data == leaf.flat.ctypes.data
    }


def _kept(leaf: ArrayLeaf, result: np.ndarray) -> Any:
    return leaf.origin if leaf.is_jax else _given(leaf, result)


def _given(leaf: ArrayLeaf, result: np.ndarray) -> Any:
    return leaf.back(result.reshape(leaf.shape))


def _all_delivered(
    leaves: Sequence[ArrayLeaf], results: dict[int, np.ndarray], in_place: bool
) -> list[Any]:
    return [_delivered(leaf, results[at], in_place) for at, leaf in enumerate(leaves)]


def _delivered(leaf: ArrayLeaf, result: np.ndarray, in_place: bool) -> Any:
    if not in_place:
        return _given(leaf, result)
    if not leaf.is_view or result.ctypes.data != leaf.flat.ctypes.data:
        leaf.origin[...] = result.reshape(leaf.shape)
    return leaf.origin

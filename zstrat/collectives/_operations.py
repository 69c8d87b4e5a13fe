"""What the methods of a group do, as steps: calls, then more calls, then a result.

A step is a list of calls that go out together; the next step begins when all of them
are over. The last thing is a function that makes the user's result; it runs in the
thread that asks for it. Nothing here sends anything, so that the same steps serve
blocking and asynchronous callers and any lane.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ._engine import Call, Kind
from ._keys import about, key_of
from ._leaves import Leaf, memory
from ._plans import split
from ._terms import ReduceOp

Finish = Callable[[], Any]
Steps = Generator[list[Call], None, Finish]

PACKED: Final = 128 * 1024
"""Arrays below this many bytes share a call with others: it costs more than to copy
them twice."""

PACK: Final = 4 * 2**20
"""Bytes of one such call: small enough that the next one is packed meanwhile."""

_LENGTHS: Final = np.dtype(np.int64)


@dataclass(slots=True)
class Draft:
    """Makes the calls of one operation of one rank."""

    rank: int
    size: int
    number: int
    words: str
    deadline: float
    timeout: float
    tag: str | None = None
    compression: str | None = None
    algorithm: str | None = None
    parts: int = 0

    def call(
        self,
        kind: Kind,
        source: np.ndarray,
        target: np.ndarray,
        *,
        op: ReduceOp = ReduceOp.SUM,
        root: int = 0,
        sizes: Sequence[int] = (),
        is_frozen: bool = False,
    ) -> Call:
        """The next call of the operation."""
        part, self.parts = self.parts, self.parts + 1
        return Call(
            key_of(self.tag, self.number, part),
            kind,
            source,
            target,
            about(f"{self.words}{part}"),
            self.words,
            self.deadline,
            self.timeout,
            op,
            root,
            tuple(sizes),
            self.tag,
            self.compression,
            f"{self.tag}/{self.words}/{part}",
            self.algorithm,
            is_frozen,
        )


def all_reduce(
    draft: Draft, leaves: Sequence[Leaf], op: ReduceOp, in_place: bool
) -> Steps:
    """Every leaf reduced over all ranks; small ones share calls, the last go first."""
    results: list[np.ndarray | None] = [None] * len(leaves)
    calls = []
    for bucket in _buckets(leaves):
        source, target = _operands(leaves, bucket, in_place)
        frozen = len(bucket) == 1 and leaves[bucket[0]].is_jax
        calls.append(
            draft.call(Kind.ALL_REDUCE, source, target, op=op, is_frozen=frozen)
        )
        sizes = [leaves[at].flat.size for at in bucket]
        for at, result in zip(bucket, split(target, sizes), strict=True):
            results[at] = result
    yield calls

    def finish() -> list[Any]:
        return [
            _delivered(leaf, result, in_place)
            for leaf, result in zip(leaves, results, strict=True)
        ]

    return finish


def broadcast(draft: Draft, leaves: Sequence[Leaf], root: int) -> Steps:
    """The root's leaves on all ranks."""
    calls, results = [], []
    for leaf in leaves:
        is_root = draft.rank == root
        target = leaf.flat if is_root else memory(leaf.flat.size, leaf.flat.dtype)
        calls.append(
            draft.call(Kind.BROADCAST, target, target, root=root, is_frozen=leaf.is_jax)
        )
        results.append(target)
    yield calls

    def finish() -> list[Any]:
        return [
            leaf.origin
            if draft.rank == root and leaf.is_jax
            else leaf.back(
                (result.copy() if draft.rank == root else result).reshape(leaf.shape)
            )
            for leaf, result in zip(leaves, results, strict=True)
        ]

    return finish


def all_gather(draft: Draft, leaves: Sequence[Leaf], axes: Sequence[int]) -> Steps:
    """Leaves of all ranks, one behind the other along their first axis, which is put
    where ``axes`` says in the results."""
    lengths = np.array([leaf.shape[0] for leaf in leaves], _LENGTHS)
    table = np.empty(draft.size * len(leaves), _LENGTHS)
    sizes = [len(leaves)] * draft.size
    yield [draft.call(Kind.ALL_GATHER, lengths, table, sizes=sizes)]
    calls, results = [], []
    for at, leaf in enumerate(leaves):
        rows = [int(each) for each in table[at :: len(leaves)]]
        sizes = [each * leaf.row for each in rows]
        target = memory(sum(sizes), leaf.flat.dtype)
        calls.append(
            draft.call(
                Kind.ALL_GATHER,
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


def reduce_scatter(draft: Draft, leaves: Sequence[Leaf], op: ReduceOp) -> Steps:
    """Every leaf reduced over all ranks, and cut along its first axis: rank r keeps the
    r-th part. The first ``n mod size`` ranks have one row more."""
    calls, results = [], []
    for leaf in leaves:
        row = leaf.row
        short, more = divmod(leaf.shape[0], draft.size)
        rows = [short + (rank < more) for rank in range(draft.size)]
        target = memory(rows[draft.rank] * row, leaf.flat.dtype)
        sizes = [each * row for each in rows]
        calls.append(
            draft.call(
                Kind.REDUCE_SCATTER,
                leaf.flat,
                target,
                op=op,
                sizes=sizes,
                is_frozen=leaf.is_jax,
            )
        )
        results.append(target.reshape(rows[draft.rank], *leaf.shape[1:]))
    yield calls
    return lambda: [
        leaf.back(result) for leaf, result in zip(leaves, results, strict=True)
    ]


def all_to_all(draft: Draft, leaf: Leaf, splits: Sequence[int] | None) -> Steps:
    """Part j of the first axis goes to rank j; the result is what came, in the order of
    ranks. ``splits``: rows for each rank; None: as many for each."""
    size, row = draft.size, leaf.row
    if splits is None:
        rows = np.full(size * size, leaf.shape[0] // size, _LENGTHS)
    else:
        rows = np.empty(size * size, _LENGTHS)
        mine = np.array(splits, _LENGTHS)
        yield [draft.call(Kind.ALL_GATHER, mine, rows, sizes=[size] * size)]
    incoming = int(rows[draft.rank :: size].sum())
    target = memory(incoming * row, leaf.flat.dtype)
    yield [
        draft.call(
            Kind.ALL_TO_ALL,
            leaf.flat,
            target,
            sizes=[int(each) * row for each in rows],
            is_frozen=leaf.is_jax,
        )
    ]
    return lambda: [leaf.back(target.reshape(incoming, *leaf.shape[1:]))]


def barrier(draft: Draft) -> Steps:
    """Nobody is through before all have come."""
    nothing = np.empty(0, np.uint8)
    yield [draft.call(Kind.BARRIER, nothing, nothing)]
    return lambda: None


def rebuilt(steps: Steps, rebuild: Callable[[list[Any]], Any]) -> Steps:
    """The same steps, with another result made of theirs."""
    finish = yield from steps
    return lambda: rebuild(finish())


def together(many: Sequence[Steps], rebuild: Callable[[list[Any]], Any]) -> Steps:
    """Several operations as one: what they call at a step goes out together."""
    finishes: dict[int, Finish] = {}
    while len(finishes) < len(many):
        calls: list[Call] = []
        for at, steps in enumerate(many):
            if at not in finishes:
                try:
                    calls += next(steps)
                except StopIteration as end:
                    finishes[at] = end.value
        if len(finishes) < len(many):
            yield calls
    return lambda: rebuild([finishes[at]() for at in range(len(many))])


def _buckets(leaves: Sequence[Leaf]) -> list[list[int]]:
    """Leaves that share a call, the last leaves first. Dtypes do not mix."""
    buckets: list[list[int]] = []
    open_: dict[np.dtype, tuple[list[int], int]] = {}
    for at in reversed(range(len(leaves))):
        flat = leaves[at].flat
        if flat.nbytes >= PACKED:
            buckets.append([at])
            continue
        bucket, nbytes = open_.get(flat.dtype, ([], 0))
        if not bucket or nbytes + flat.nbytes > PACK:
            bucket, nbytes = [], 0
            buckets.append(bucket)
        bucket.append(at)
        open_[flat.dtype] = bucket, nbytes + flat.nbytes
    return buckets


def _operands(
    leaves: Sequence[Leaf], bucket: Sequence[int], in_place: bool
) -> tuple[np.ndarray, np.ndarray]:
    if len(bucket) > 1:
        flats = [leaves[at].flat for at in bucket]
        packed = memory(sum(flat.size for flat in flats), flats[0].dtype)
        np.concatenate(flats, out=packed)
        return packed, packed
    leaf = leaves[bucket[0]]
    if in_place and leaf.is_view:
        return leaf.flat, leaf.flat
    return leaf.flat, memory(leaf.flat.size, leaf.flat.dtype)


def _delivered(leaf: Leaf, result: np.ndarray | None, in_place: bool) -> Any:
    assert result is not None
    if not in_place:
        return leaf.back(result.reshape(leaf.shape))
    if result is not leaf.flat:
        leaf.origin[...] = result.reshape(leaf.shape)
    return leaf.origin

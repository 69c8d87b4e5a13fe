"""Progress: what all ranks end with, whatever the order in which hops arrive.

When a rank is through, its memory is overwritten: what it sent must have left, or be
other memory (`deliver` looks).
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from collectives_hops import all_made_by, all_reduce_calls, deliver, made_by
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from zstrat.collectives import ScheduleProgress, parts, reduction_of
from zstrat.errors import ProtocolError
from zstrat.wire import DTYPES

ALL_REDUCES = all_made_by("all_reduce")
OPS = ["SUM", "MEAN", "MIN", "MAX"]
every_size = pytest.mark.parametrize("size", range(1, 18))
counts = st.integers(0, 700)
chunks = st.sampled_from([64, 512, 4096])
seeds = st.integers(0, 2**32)


class Memory:
    """What the ranks give and get; a rank's own is wiped when it is through."""

    def __init__(self, results, sources=()) -> None:
        self.results, self.sources = results, sources
        self.kept = [None] * len(results)

    def wipe(self, rank: int) -> None:
        self.kept[rank] = self.results[rank].copy()
        for arrays in (self.results, self.sources):
            if len(arrays):
                arrays[rank].view(np.uint8)[:] = 0xAA


def all_reduce(schedule, values, op, chunk, seed, in_place=False) -> list[np.ndarray]:
    sources = [value.copy() for value in values]
    results = sources if in_place else [np.zeros_like(each) for each in sources]
    calls = all_reduce_calls(schedule, sources, results, op, chunk_bytes=chunk)
    memory = Memory(results, sources)
    deliver(calls, random.Random(seed), memory.wipe)
    return memory.kept


@pytest.mark.parametrize("schedule", ALL_REDUCES)
@every_size
@examples(5)
@given(
    count=counts,
    chunk=chunks,
    op=st.sampled_from(OPS),
    in_place=st.booleans(),
    seed=seeds,
)
def test_all_reduce_is_exact(schedule, size, count, chunk, op, in_place, seed) -> None:
    draw = np.random.default_rng(seed)
    values = draw.integers(-1000, 1000, (size, count)).astype(np.float64)
    expected = {
        "SUM": values.sum(0),
        "MEAN": values.sum(0) / size,
        "MIN": values.min(0),
        "MAX": values.max(0),
    }[op]
    for result in all_reduce(schedule, values, op, chunk, seed, in_place):
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("schedule", ALL_REDUCES)
@every_size
@examples(5)
@given(
    count=counts,
    chunk=chunks,
    dtype=st.sampled_from(["float32", "float64", "float16", "bfloat16", "complex64"]),
    op=st.sampled_from(OPS),
    seed=seeds,
)
def test_all_ranks_have_the_same_bits(
    schedule, size, count, chunk, dtype, op, seed
) -> None:
    """Of values whose sum depends on the order in which they are added, and of zeros of
    both signs, of which numpy takes for the least the one that it is given first."""
    draw = np.random.default_rng(seed)
    values = draw.standard_normal((size, count)).astype(DTYPES[dtype])
    if op in ("MIN", "MAX"):
        if dtype == "complex64":
            return
        values *= 0
    first = all_reduce(schedule, values, op, chunk, seed)
    assert len({result.tobytes() for result in first}) == 1
    again = all_reduce(schedule, values, op, chunk, seed + 1, in_place=True)
    assert again[0].tobytes() == first[0].tobytes()  # in another order of arrival
    if op in ("MIN", "MAX"):
        return
    expected = values.astype(np.complex128 if "complex" in dtype else np.float64).sum(0)
    expected /= size if op == "MEAN" else 1
    close = {"float16": 1e-3, "bfloat16": 8e-3, "float64": 1e-13}.get(dtype, 1e-5)
    np.testing.assert_allclose(
        first[0].astype(expected.dtype), expected, rtol=close, atol=close * size
    )


@pytest.mark.parametrize("schedule", all_made_by("reduce_scatter"))
@every_size
@examples(5)
@given(count=counts, chunk=chunks, frozen=st.booleans(), seed=seeds)
def test_reduce_scatter(schedule, size, count, chunk, frozen, seed) -> None:
    draw = np.random.default_rng(seed)
    values = draw.integers(-99, 99, (size, count)).astype(np.int32)
    expected = [each.copy() for each in parts(values.sum(0, dtype=np.int32), size)]
    results = [np.zeros_like(each) for each in expected]
    calls = [
        ScheduleProgress(
            schedule(rank, size),
            parts(values[rank], size),
            [results[rank] if block == rank else None for block in range(size)],
            reduction=reduction_of("SUM", values.dtype, size),
            chunk_bytes=chunk,
            frozen=frozen,
        )
        for rank in range(size)
    ]
    memory = Memory(results, () if frozen else values)
    deliver(calls, random.Random(seed), memory.wipe)
    for found, wanted in zip(memory.kept, expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("schedule", all_made_by("all_gather"))
@every_size
@examples(5)
@given(data=st.data(), chunk=chunks, frozen=st.booleans(), seed=seeds)
def test_all_gather_of_uneven_blocks(schedule, data, size, chunk, frozen, seed) -> None:
    lengths = data.draw(st.lists(st.integers(0, 90), min_size=size, max_size=size))
    ends = np.cumsum(lengths)[:-1]
    draw = np.random.default_rng(seed)
    expected = draw.integers(0, 255, sum(lengths)).astype(np.uint8)
    gives = [block.copy() for block in np.split(expected, ends)]
    results = [np.zeros_like(expected) for _ in range(size)]
    calls = [
        ScheduleProgress(
            schedule(rank, size),
            [gives[rank] if block == rank else None for block in range(size)],
            np.split(results[rank], ends),
            chunk_bytes=chunk,
            frozen=frozen,
        )
        for rank in range(size)
    ]
    memory = Memory(results, () if frozen else gives)
    deliver(calls, random.Random(seed), memory.wipe)
    for result in memory.kept:
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("schedule", all_made_by("broadcast"))
@every_size
@examples(5)
@given(data=st.data(), count=counts, chunk=chunks, seed=seeds)
def test_broadcast(schedule, data, size, count, chunk, seed) -> None:
    """The root's own array is its result as well."""
    root = data.draw(st.integers(0, size - 1))
    expected = np.random.default_rng(seed).standard_normal(count)
    results = [np.zeros_like(expected) for _ in range(size)]
    results[root][:] = expected
    calls = []
    for rank in range(size):
        made = schedule(rank, size, root)
        cuts = parts(results[rank], len(made.blocks))
        sources = cuts if rank == root else [None] * len(cuts)
        calls.append(ScheduleProgress(made, sources, cuts, chunk_bytes=chunk))
    memory = Memory(results)
    deliver(calls, random.Random(seed), memory.wipe)
    for result in memory.kept:
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("size", range(1, 10))
@examples(5)
@given(data=st.data(), chunk=chunks, seed=seeds)
def test_all_to_all(data, size, chunk, seed) -> None:
    lengths = data.draw(
        st.lists(st.integers(0, 90), min_size=size * size, max_size=size * size)
    )
    draw = np.random.default_rng(seed)
    blocks = [draw.standard_normal(length).astype(np.float32) for length in lengths]
    calls, results, gives = [], [], []
    for rank in range(size):
        give = {rank * size + j: blocks[rank * size + j].copy() for j in range(size)}
        column = [i * size + rank for i in range(size)]
        result = np.zeros(sum(lengths[b] for b in column), np.float32)
        ends = np.cumsum([lengths[b] for b in column])[:-1]
        gets = dict(zip(column, np.split(result, ends), strict=True))
        calls.append(
            ScheduleProgress(
                made_by("all_to_all", "pairwise")(rank, size),
                [give.get(b) for b in range(size * size)],
                [gets.get(b) for b in range(size * size)],
                chunk_bytes=chunk,
            )
        )
        results.append(result)
        gives.append(give)
    memory = Memory(results)
    deliver(calls, random.Random(seed), memory.wipe)
    for rank, result in enumerate(memory.kept):
        wanted = [blocks[i * size + rank] for i in range(size)]
        np.testing.assert_array_equal(result, np.concatenate(wanted))


@every_size
@examples(5)
@given(seed=seeds)
def test_barrier(size, seed) -> None:
    nothing = np.empty(0, np.uint8)
    calls = [
        ScheduleProgress(
            made_by("barrier", "dissemination")(rank, size), [nothing], [None]
        )
        for rank in range(size)
    ]
    hops = deliver(calls, random.Random(seed))
    assert hops == size * (size - 1).bit_length()


RING = made_by("all_reduce", "ring")


def pair(count: int = 300, chunk: int = 1024) -> list[ScheduleProgress]:
    """Two ranks that sum ``count`` ones; blocks of chunks of 1 KiB."""
    ones = np.ones(count, np.float32)
    results = [np.zeros_like(ones) for _ in range(2)]
    return all_reduce_calls(RING, [ones, ones], results, chunk_bytes=chunk)


def test_who_is_waited_for() -> None:
    first, second = pair()
    assert first.waits == frozenset()  # it has not begun
    sends = list(first.start())
    assert first.waits == {1}
    assert not first.is_done
    assert [send.peer for send in sends] == [1]
    list(second.start())
    (reply,) = second.arrived(sends[0].place, sends[0].data)
    assert reply.peer == 0
    assert second.waits == {0}
    first.arrived(reply.place, reply.data)
    assert first.waits == {1}  # for its contribution to the other block


def test_hops_that_come_before_the_start_are_kept() -> None:
    first, second = pair()
    sends = list(second.start())
    assert first.arrived(sends[0].place, sends[0].data) == []
    assert len(list(first.start())) == 2  # its contribution, and a finished block


def test_a_hop_of_another_call_is_refused() -> None:
    first, second = pair()
    list(first.start())
    (send,) = second.start()
    with pytest.raises(ProtocolError):
        first.arrived(send.place + 1, send.data)  # a chunk that is not there
    with pytest.raises(ProtocolError):
        first.arrived(99 << 20, send.data)
    with pytest.raises(ProtocolError):
        first.arrived(send.place, np.zeros(404, np.uint8))
    first.arrived(send.place, send.data)
    with pytest.raises(ProtocolError):
        first.arrived(send.place, send.data)


def test_a_finished_block_of_another_length_is_refused() -> None:
    first, second = pair()
    (send,) = first.start()
    list(second.start())
    (reply,) = second.arrived(send.place, send.data)
    with pytest.raises(ProtocolError):
        first.arrived(reply.place, reply.data[:3])


def test_sources_for_every_block() -> None:
    with pytest.raises(ValueError, match="1 sources and 2 results for a schedule of 2"):
        ScheduleProgress(RING(0, 2), [None], [None, None])


def test_contributions_of_few_bits_travel_as_they_are() -> None:
    """Only sums in part are wider: with two ranks there are none on the wire."""
    values = np.ones((2, 256), np.float16)
    sent = []
    calls = all_reduce_calls(RING, values, values)
    for rank, call in enumerate(calls):
        sent += [(rank, send) for send in call.start()]
    for _, send in list(sent):
        sent += [(send.peer, more) for more in calls[send.peer].arrived(*send[1:])]
    assert [send.data.nbytes for _, send in sent] == [256] * 4

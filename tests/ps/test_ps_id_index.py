"""The index of a table of any id, beside a dict."""

import platform
import re
import resource

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from tiers import examples

from zstrat.ids import BUCKETS, buckets_of, hashes_of
from zstrat.memory import HUGE_PAGE, Reserve
from zstrat.ps.tables import NO_ROW, IdIndex

LIMITS = np.iinfo(np.int64)


def crowded():
    """Ids of three buckets, so that they meet often; and those at the ends."""
    ids = np.arange(-600_000, 600_000)
    ids = ids[buckets_of(hashes_of(ids)) < 3]
    ends = [0, -1, 1, LIMITS.min, LIMITS.max]
    return np.unique(np.concatenate([ids, ends]))


POOL = crowded()


def split_mix_64(number):
    """As published, in integers of Python."""
    mask = 2**64 - 1
    z = (number + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_hashes_are_the_published_ones():
    ids = np.array([0, 1, -1, 12345, LIMITS.min, LIMITS.max])
    wanted = [split_mix_64(int(i) % 2**64) for i in ids]
    assert hashes_of(ids).tolist() == wanted
    assert buckets_of(hashes_of(ids)).tolist() == [h * BUCKETS // 2**64 for h in wanted]


class Indexing(RuleBasedStateMachine):
    @initialize()
    def begin(self):
        self.index, self.rows, self.next = IdIndex(), {}, 0

    def some(self, numbers):
        return POOL[np.unique(np.array(numbers, int) % len(POOL))]

    @rule(numbers=st.lists(st.integers(0, 2000), max_size=80), span=st.integers(1, 40))
    def add(self, numbers, span):
        numbers = [n + k for n in numbers for k in range(span)]
        ids = np.array([i for i in self.some(numbers).tolist() if i not in self.rows])
        ids = ids.astype(np.int64)
        rows = np.arange(self.next, self.next + len(ids))
        self.index.insert(ids, rows)
        self.rows.update(zip(ids.tolist(), rows.tolist(), strict=True))
        self.next += len(ids)

    @rule(numbers=st.lists(st.integers(0, 2000)), span=st.integers(1, 60))
    def remove(self, numbers, span):
        ids = self.some([n + k for n in numbers for k in range(span)])
        wanted = [self.rows.pop(i, NO_ROW) for i in ids.tolist()]
        assert self.index.remove(ids).tolist() == wanted

    @rule(numbers=st.lists(st.integers(0, 2000)), order=st.randoms())
    def look(self, numbers, order):
        ids = self.some(numbers).tolist()
        order.shuffle(ids)
        found = self.index.rows(np.array(ids, np.int64))
        assert found.tolist() == [self.rows.get(i, NO_ROW) for i in ids]

    @rule()
    def list_all(self):
        ids, rows = self.index.items()
        assert dict(zip(ids.tolist(), rows.tolist(), strict=True)) == self.rows
        buckets = buckets_of(hashes_of(ids)).tolist()
        assert sorted(zip(buckets, ids.tolist(), strict=True)) == list(
            zip(buckets, ids.tolist(), strict=True)
        )
        some, _ = self.index.items(1, 2)
        assert some.tolist() == ids[np.array(buckets, int) == 1].tolist()


TestIndexing = Indexing.TestCase
TestIndexing.settings = examples(40, stateful_step_count=30)


def test_many_ids_grow_it_bucket_by_bucket():
    ids = np.random.default_rng(1).permutation(200_000) * 7919 - 10**9
    index = IdIndex()
    for start in range(0, len(ids), 5000):
        index.insert(ids[start : start + 5000], np.arange(start, start + 5000))
    np.testing.assert_array_equal(index.rows(ids), np.arange(len(ids)))
    assert (index.rows(ids + 1) == NO_ROW).all()
    assert index.nbytes <= 100 * len(ids)
    before = index.nbytes
    for start in range(0, len(ids), 5000):  # as many leave as come
        index.remove(ids[start : start + 5000])
        index.insert(ids[start : start + 5000] + 1, np.arange(start, start + 5000))
    assert len(index.items()[0]) == len(ids)
    assert index.nbytes <= 2 * before


def test_what_is_not_there_is_taken_for_nothing():
    index = IdIndex()
    none = np.empty(0, np.int64)
    index.insert(none, none)
    assert index.rows(none).size == index.remove(none).size == 0
    assert index.rows(np.array([0, 1])).tolist() == [NO_ROW, NO_ROW]
    assert [part.size for part in index.items()] == [0, 0]


@pytest.mark.parametrize("grants", [2**38, 2**22])
def test_memory_that_grows_keeps_what_is_there(monkeypatch, grants):
    """Also where the machine grants little address space."""
    import mmap

    real = mmap.mmap

    def granted(fd, size, **options):
        if size > grants:
            raise OSError("no more")
        return real(fd, size, **options)

    monkeypatch.setattr(mmap, "mmap", granted)
    memory = Reserve(10, np.dtype(np.int64))
    memory.array[:] = np.arange(10)
    memory.grow(2**18)
    assert memory.array[:10].tolist() == list(range(10))
    assert not memory.array[10:].any()
    memory.array[:] = 1
    memory.array[1000:3000] = 0
    memory.release(1000, 2000)
    assert memory.array.sum() == 2**18 - 2000
    if grants < 2**38:
        with pytest.raises(MemoryError):
            memory.grow(2**20)
        assert memory.array.sum() == 2**18 - 2000


@pytest.mark.skipif(
    tuple(map(int, re.findall(r"\d+", platform.release())[:2])) < (5, 14),
    reason="the kernel adds no memory ahead",
)
def test_memory_that_is_populated_ahead_is_written_without_faults():
    def faults():
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt

    memory = Reserve(3 * HUGE_PAGE, np.dtype(np.uint8))
    memory.array[:5] = 7
    memory.populate(range(5))  # two of which nothing is used yet
    with memory.populating:
        pass
    memory.grow(5 * HUGE_PAGE)
    before = faults()
    memory.array[5:] = 1
    assert faults() - before <= 2  # of what Python allocates meanwhile
    assert memory.array[:6].tolist() == [7] * 5 + [1]
    memory.release(0, 2 * HUGE_PAGE)
    memory.populate([0])
    with memory.populating:
        pass
    assert not memory.array[0]

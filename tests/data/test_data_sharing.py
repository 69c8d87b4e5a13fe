"""What several workers read of listed, joined, cached and interleaved datasets."""

from __future__ import annotations

import os

import cloudpickle
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from zstrat.data import (
    SHARD_HINT,
    AutoShardPolicy,
    Dataset,
    Options,
    TextLineDataset,
    Worker,
    allotted,
)


def write(folder, names):
    for name in names:
        (folder / f"{name}.txt").write_text(f"{name}1\n{name}2\n")
    return str(folder / "*.txt")


def copied(dataset):
    """As another process makes it."""
    return cloudpickle.loads(cloudpickle.dumps(dataset))


def drawn(dataset, count=2, policy=AutoShardPolicy.AUTO):
    """What each worker draws, and the policy that was found."""
    opted = dataset.with_options(Options(policy))
    parts = [allotted(copied(opted), Worker(count, index)) for index in range(count)]
    (found,) = {part.policy for part in parts}
    return found, [
        [row for batch in part.elements() for row in np.asarray(batch).tolist()]
        for part in parts
    ]


def lines_of(pattern):
    return Dataset.from_text_lines(Dataset.list_files(pattern, shuffle=False))


@pytest.mark.shows("tf.data.Dataset.list_files")
def test_files_are_listed_in_order_or_shuffled(tmp_path):
    pattern = write(tmp_path, "cab")

    def names(dataset):
        return [os.path.basename(name) for name in dataset]

    sorted_ones = Dataset.list_files(pattern, shuffle=False)
    assert names(sorted_ones) == [b"a.txt", b"b.txt", b"c.txt"]
    several = [tmp_path / "c.txt", tmp_path / "a.txt", tmp_path / "c*"]
    assert names(Dataset.list_files(several, shuffle=False)) == [
        b"a.txt",
        b"c.txt",
        b"c.txt",
    ]
    mixed, again = (Dataset.list_files(pattern, seed=3) for _ in range(2))
    passes = [names(mixed) for _ in range(6)]
    assert len({tuple(each) for each in passes}) > 1
    assert passes == [names(again) for _ in range(6)]
    assert all(sorted(each) == [b"a.txt", b"b.txt", b"c.txt"] for each in passes)
    assert len(mixed) == 3
    lines = sorted_ones.interleave(TextLineDataset, cycle_length=2)
    assert list(lines) == [b"a1", b"b1", b"a2", b"b2", b"c1", b"c2"]
    with pytest.raises(ValueError, match=r"No files matched pattern: .*\.foo"):
        Dataset.list_files(str(tmp_path / "*.foo"))


def test_workers_read_the_lines_of_listed_files_of_their_own(tmp_path):
    files = Dataset.list_files(write(tmp_path, "abc"), seed=1)
    lines = files.interleave(TextLineDataset, num_parallel_calls=2)
    policy, (mine, theirs) = drawn(lines.shuffle(9).batch(2))
    assert policy is AutoShardPolicy.FILE
    assert sorted(mine) == [b"a1", b"a2", b"c1", b"c2"]
    assert sorted(theirs) == [b"b1", b"b2"]


def test_files_of_concatenated_datasets_are_counted_through(tmp_path):
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
    first = lines_of(write(tmp_path / "x", "a"))
    second = lines_of(write(tmp_path / "y", "bc"))
    both = first.concatenate(second)
    assert drawn(both.batch(4)) == (
        AutoShardPolicy.FILE,
        [[b"a1", b"a2", b"c1", b"c2"], [b"b1", b"b2"]],
    )
    mixed = both.concatenate(Dataset.from_generator(lambda: [b"d"]))
    assert drawn(mixed.batch(4))[0] is AutoShardPolicy.DATA


def test_zipped_files_are_not_dealt_out(tmp_path):
    lines = lines_of(write(tmp_path, "ab"))
    pairs = Dataset.zip(lines, lines).map(lambda a, b: a).batch(4)
    assert allotted(pairs, Worker(2, 0)).policy is AutoShardPolicy.DATA
    with pytest.raises(ValueError, match=r"AutoShardPolicy\.FILE.*DATA"):
        drawn(pairs, policy=AutoShardPolicy.FILE)


def test_a_hint_behind_a_zip_is_found_and_one_in_it_is_not():
    pair = Dataset.zip(Dataset.range(6), Dataset.range(6)).map(lambda a, b: a + b)
    hinted = pair.shard(SHARD_HINT, SHARD_HINT).batch(2)
    rows = drawn(hinted, policy=AutoShardPolicy.HINT)[1]
    assert rows == [[0, 4, 8], [2, 6, 10]]
    inner = Dataset.range(6).shard(SHARD_HINT, SHARD_HINT)
    with pytest.raises(ValueError, match=r"`zip`.*`concatenate`"):
        drawn(Dataset.zip(inner, inner).batch(2), policy=AutoShardPolicy.HINT)


def test_one_worker_alone_reads_all_wherever_a_hint_is():
    inner = Dataset.range(3).shard(SHARD_HINT, SHARD_HINT)
    for dataset in (inner.concatenate(inner), inner.concatenate(Dataset.range(3))):
        rows = drawn(dataset.batch(2), 1, AutoShardPolicy.HINT)[1]
        assert rows == [[0, 1, 2, 0, 1, 2]]


def test_each_worker_caches_its_own_files(tmp_path):
    lines = lines_of(write(tmp_path, "ab"))
    for path in ("", str(tmp_path / "kept")):
        cached = lines.cache(path).batch(4)
        for _ in range(2):  # in memory nothing is found again, in files all
            assert drawn(cached)[1] == [[b"a1", b"a2"], [b"b1", b"b2"]]
    assert sorted(p.name for p in tmp_path.glob("kept*")) == [
        "kept-00000-of-00002",
        "kept-00001-of-00002",
    ]


def test_the_order_of_a_pass_tells_of_shuffles_that_still_mix():
    sides = [Dataset.range(6).shuffle(6, seed=n) for n in range(2)]
    allotment = allotted(Dataset.zip(*sides).batch(2), Worker(2, 0))
    orders = [allotment.order(allotment.begin()) for _ in range(2)]
    assert orders == ["1.1, 1.1", "1.2, 1.2"]
    cached = allotted(sides[0].cache().batch(2), Worker(2, 0))
    assert [cached.order(cached.begin()) for _ in range(2)] == ["2.1", "2.1"]


@examples(30)
@given(st.integers(0, 12), st.integers(0, 12), st.integers(1, 5), st.booleans())
def test_together_workers_draw_every_row_once(first, second, size, mix):
    dataset = Dataset.range(first).concatenate(Dataset.range(100, 100 + second))
    if mix:
        dataset = dataset.cache().shuffle(7, seed=1)
    dataset = dataset.batch(3).rebatch(size)
    parts = [allotted(copied(dataset), Worker(2, n, 2)) for n in range(2)]
    rows = []
    for part in parts:
        batches = list(part.elements())
        cutter = part.cutter()
        cuts = [cut for b in batches for cut in cutter.take(len(b))] + cutter.finish()
        for piece in (piece for cut in cuts for piece in cut):
            for span in piece:
                rows += batches[span.batch][span.start : span.stop].tolist()
    assert sorted(rows) == [*range(first), *range(100, 100 + second)]

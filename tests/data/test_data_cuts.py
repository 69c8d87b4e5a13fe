"""Who gets which rows: the rules of TF against brute force, and TF's own numbers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zstrat.data import (
    Allotment,
    AutoShardPolicy,
    Dataset,
    Worker,
    allotted,
    as_dataset,
    batch_sizes_for_worker,
)
from zstrat.data._autoshard import sharing_policy
from zstrat.data._replica_rows import cutter

OFF, AUTO = AutoShardPolicy.OFF, AutoShardPolicy.AUTO
FILE, DATA, HINT = AutoShardPolicy.FILE, AutoShardPolicy.DATA, AutoShardPolicy.HINT

clusters = st.tuples(st.integers(1, 4), st.integers(1, 4))
arrivals = st.lists(st.integers(0, 13), max_size=8)


def run(cut, arriving):
    """The steps of one worker: for each replica the rows, as (batch, row)."""
    steps, seen = [], []
    for number, rows in enumerate(arriving):
        done = cut.take(rows)
        seen += [span.batch for step in done for piece in step for span in piece]
        steps += done
        assert all(0 <= batch <= number for batch in seen)
    steps += cut.finish()
    return [[rows_of(piece) for piece in step] for step in steps]


def rows_of(piece):
    assert piece, "a piece without a span tells nobody what it looks like"
    return [(span.batch, row) for span in piece for row in range(span.start, span.stop)]


def flat(arriving):
    return [(n, row) for n, rows in enumerate(arriving) for row in range(rows)]


def padded_steps(pieces, replicas):
    """Pieces distributed to the replicas in turn, the last step filled up with
    nothing."""
    steps = [pieces[n : n + replicas] for n in range(0, len(pieces), replicas)]
    return [step + [[]] * (replicas - len(step)) for step in steps]


def rebatched(arriving, sizes, replicas):
    """Unbatch, then take batches of these sizes again and again."""
    rows, pieces = flat(arriving), []
    for size in itertools.cycle(sizes):
        if not rows:
            return padded_steps(pieces, replicas)
        pieces.append(rows[:size])
        del rows[:size]


def chunked(arriving, workers, replicas):
    """Each batch in equal chunks, filled up with empty ones, of all replicas."""
    count = workers * replicas
    pieces = []
    for number, rows in enumerate(arriving):
        if rows:
            batch = [(number, row) for row in range(rows)]
            size = (rows + count - 1) // count
            chunks = [batch[n : n + size] for n in range(0, rows, size)]
            pieces.append(chunks + [[]] * (count - len(chunks)))
    return pieces


# sizes


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ((8, 1, 2, 0), [4, 4]),
        ((2, 1, 2, 0), [1, 1]),
        ((10, 3, 1, 0), [4, 3, 3]),
        ((10, 3, 1, 1), [3, 3, 4]),
        ((10, 3, 1, 2), [3, 4, 3]),
        ((5, 2, 2, 0), [2, 1, 1, 1]),
        ((5, 2, 2, 1), [1, 1, 2, 1]),
        ((3, 2, 2, 1), [1, 0, 1, 1]),
        ((0, 2, 1, 0), [0, 0]),
    ],
)
def test_batch_sizes_for_worker(args, expected):
    assert batch_sizes_for_worker(*args) == expected


@given(st.integers(0, 50), clusters)
def test_in_every_step_all_replicas_together_take_a_global_batch(size, cluster):
    workers, replicas = cluster
    count = workers * replicas
    sizes = [
        batch_sizes_for_worker(size, workers, replicas, worker)
        for worker in range(workers)
    ]
    for mine in sizes:
        assert len(mine) == count
        assert sum(mine) == size
        assert max(mine) - min(mine) <= 1
    for step in range(0, count, replicas):
        assert sum(sum(mine[step : step + replicas]) for mine in sizes) == size


# cuts


@given(arrivals, st.integers(1, 13), clusters, st.sampled_from([OFF, FILE, HINT]))
def test_known_batch_sizes_rebatch_the_stream(arriving, size, cluster, policy):
    workers, replicas = cluster
    for index in range(workers):
        found = run(cutter(size, policy, Worker(workers, index, replicas)), arriving)
        sizes = batch_sizes_for_worker(size, workers, replicas, index)
        assert found == rebatched(arriving, sizes, replicas)
        assert [row for step in found for rows in step for row in rows] == flat(
            arriving
        )


@given(arrivals, st.none() | st.integers(1, 13), clusters)
def test_workers_that_read_the_same_cut_each_batch_by_itself(arriving, size, cluster):
    workers, replicas = cluster
    found = [
        run(cutter(size, DATA, Worker(workers, index, replicas)), arriving)
        for index in range(workers)
    ]
    expected = chunked(arriving, workers, replicas)
    assert {len(steps) for steps in found} == {len(expected)}
    for step, pieces in enumerate(expected):
        # Replica r of worker w has piece w + r * workers.
        ours = [found[p % workers][step][p // workers] for p in range(len(pieces))]
        assert ours == pieces
        assert max(map(len, ours)) == -(-sum(map(len, pieces)) // len(pieces))
    every = [row for steps in found for step in steps for rows in step for row in rows]
    assert sorted(every) == flat(arriving)


@given(arrivals, clusters, st.sampled_from([OFF, FILE, HINT]))
def test_unknown_batch_sizes_cut_each_batch_by_itself(arriving, cluster, policy):
    workers, replicas = cluster
    pieces = [p for batch in chunked(arriving, workers, replicas) for p in batch]
    for index in range(workers):
        found = run(cutter(None, policy, Worker(workers, index, replicas)), arriving)
        assert found == padded_steps(pieces, replicas)


@given(st.integers(1, 6), st.integers(1, 13), clusters, st.sampled_from([OFF, FILE]))
def test_batches_of_the_size_that_was_promised_are_cut_as_if_it_were_known(
    batches, size, cluster, policy
):
    workers, replicas = cluster
    for index in range(workers):
        who = Worker(workers, index, replicas)
        found, known = (
            cutter(None, policy, who, promised=size),
            cutter(size, policy, who),
        )
        if size >= workers * replicas:  # pieces of no rows are no end of a stream
            assert run(found, [size] * batches) == run(known, [size] * batches)


@given(arrivals, st.none() | st.integers(1, 13), clusters, st.sampled_from([OFF, DATA]))
def test_batches_are_kept_no_longer_than_needed(arriving, size, cluster, policy):
    workers, replicas = cluster
    cut = cutter(size, policy, Worker(workers, 0, replicas))
    for number, rows in enumerate([*arriving, None]):
        oldest = cut.oldest
        steps = cut.finish() if rows is None else cut.take(rows)
        named = [span.batch for step in steps for piece in step for span in piece]
        assert all(batch >= oldest for batch in named)
        assert oldest <= number


def test_a_batch_that_fits_is_one_piece_for_each_replica():
    cut = cutter(4, OFF, Worker(replicas=2))
    assert cut.take(4) == [(((0, 0, 2),), ((0, 2, 4),))]
    assert cut.oldest == 1
    assert cut.finish() == []


@pytest.mark.parametrize("policy", [OFF, DATA])
def test_a_batch_size_of_nothing_is_cut_as_an_unknown_one(policy):
    recipe, worker = as_dataset([np.zeros(2)]).recipe, Worker(replicas=2)
    empty, unknown = (
        Allotment(recipe, worker, policy, size, None).cutter() for size in (0, None)
    )
    for rows in (0, 5, 1):
        assert empty.take(rows) == unknown.take(rows)
    assert empty.finish() == unknown.finish()


def test_rows_without_columns_are_cut_to_nothing():
    allotment = allotted(Dataset.from_tensor_slices(np.zeros((3, 0))), Worker(1, 0, 2))
    cuts = allotment.cutter()
    assert [cuts.take(len(row)) for row in allotment.elements()] == [[], [], []]


# policies


@pytest.mark.shows("tf.data.experimental.AutoShardPolicy.AUTO")
@pytest.mark.parametrize(
    ("policy", "workers", "files", "meaning"),
    [
        (AUTO, 1, None, DATA),  # as TF: one worker is no special case
        (AUTO, 1, 3, OFF),
        (FILE, 1, None, OFF),
        (DATA, 1, 3, DATA),
        (HINT, 1, None, HINT),
        (AUTO, 2, None, DATA),
        (AUTO, 2, 1, DATA),
        (AUTO, 2, 2, FILE),
        (AUTO, 3, 5, FILE),
        (FILE, 2, 2, FILE),
        (DATA, 2, 9, DATA),
        (OFF, 2, 9, OFF),
        (HINT, 2, None, HINT),
    ],
)
def test_what_a_policy_means(policy, workers, files, meaning):
    assert sharing_policy(policy, workers, files) is meaning


def test_files_that_are_too_few_or_unknown_are_an_error():
    with pytest.raises(ValueError, match=r"\b1\b.*\b2\b.*DATA"):
        sharing_policy(FILE, 2, 1)
    with pytest.raises(ValueError, match="DATA"):
        sharing_policy(FILE, 2, None)

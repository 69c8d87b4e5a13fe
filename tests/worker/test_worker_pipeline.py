"""The pipeline with numbers: order, batching, look-ahead, and that nothing is lost."""

from __future__ import annotations

import math

import pytest
from pipeline_drive import Drive, optimizer_steps, pulled

from zstrat.worker import Costs, Do, Pipeline

W, B = "weights", "bias"


def test_a_training_step_is_one_post_with_its_push_and_the_next_pull():
    drive = Drive(Pipeline())
    drive.dispatch(range(1, 5), reads=W, writes=True)
    (first,) = drive.rest()
    assert (first.pushes, pulled(first)) == ([], [[1]])
    # Its pull leaves before the next batch is drawn, which then hides the round trip.
    assert drive.did == ["prepare 1", "post", "prepare 2"]
    post = first
    for number in (1, 2, 3):
        drive.arrive(post)
        (post,) = drive.rest()
        assert post.pushes == [(f"push {number}", number)]
        assert pulled(post) == [[number + 1]]
        ahead = [f"prepare {number + 2}"] if number < 3 else []
        assert drive.did == [f"run {number}", "post", *ahead]
    drive.arrive(post)
    (last,) = drive.rest()
    assert last.pushes == [("push 4", 4)]
    assert not last.pulls


def test_a_window_begins_while_its_pull_is_under_way_and_no_step_before_it_runs():
    drive = Drive(Pipeline())
    drive.dispatch(range(1, 3), reads=W, writes=True, begins=True)
    (first,) = drive.rest()
    assert drive.did == ["prepare 1", "post", "begin 1", "prepare 2"]
    drive.arrive(first)
    (second,) = drive.rest()
    assert drive.did == ["run 1", "post", "begin 2"]
    drive.arrive(second)
    drive.rest()
    assert drive.did == ["run 2", "post"]


def test_a_window_whose_values_are_there_does_not_begin_apart():
    drive = Drive(Pipeline())
    drive.dispatch([1], writes=True, begins=True)
    drive.rest()
    assert drive.did == ["prepare 1", "run 1", "post"]


def test_read_only_steps_share_pulls_and_refill_by_halves():
    drive = Drive(Pipeline(window=8))
    drive.dispatch(range(20), reads=W)
    (first,) = drive.rest()
    assert pulled(first) == [list(range(8))]
    drive.arrive(first)
    posts = drive.rest()
    # At half the window the next half is pulled while the rest runs.
    assert pulled(posts[0]) == [[8, 9, 10, 11]]
    assert drive.did[:9] == [
        *("run 0", "run 1", "run 2", "run 3"),
        *("prepare 8", "prepare 9", "prepare 10", "prepare 11"),
        "post",
    ]
    assert [e for post in posts for e in post.endings] == list(range(8))


def test_different_reads_are_different_pulls_of_one_post():
    drive = Drive(Pipeline())
    drive.dispatch([1, 2], reads=W)
    drive.dispatch([3], reads=B)
    (post,) = drive.rest()
    assert pulled(post) == [[1, 2], [3]]


def test_readers_before_and_behind_a_writer():
    drive = Drive(Pipeline())
    drive.dispatch([1], reads=W)
    drive.dispatch([2], reads=W, writes=True)
    drive.dispatch([3, 4], reads=W)
    (post,) = drive.rest()
    assert pulled(post) == [[1, 2]]  # 3 must see what 2 writes
    drive.arrive(post)
    posts = drive.rest()
    (pulling,) = [p for p in posts if p.pulls]
    assert pulling.pushes == [("push 2", 2)]
    assert pulled(pulling)[0][0] == 3


def test_quick_closures_run_back_to_back_and_share_posts():
    drive = Drive(Pipeline(interval=1e-3), cost=10e-6)
    drive.dispatch(range(1000))
    posts = drive.rest()
    assert [e for post in posts for e in post.endings] == list(range(1000))
    # Twenty microseconds each, a millisecond a post: about fifty share one.
    assert 18 <= len(posts) <= 22


def test_no_ending_waits_for_slow_or_unmeasured_work():
    drive = Drive(Pipeline(interval=1e-3))
    drive.dispatch([1])
    drive.pipeline.dispatched({}, Costs(prepare=0.0, run=5.0), [2], drive.now)
    new = Costs()
    drive.pipeline.dispatched({}, new, [3], drive.now)
    assert new.run == math.inf
    drive.rest()
    assert drive.did == [
        *("prepare 1", "run 1", "prepare 2", "post", "run 2", "post"),
        *("prepare 3", "run 3", "post"),
    ]


def test_updates_without_reads_share_posts():
    drive = Drive(Pipeline())
    drive.dispatch(range(10), writes=True)
    (post,) = drive.rest()
    assert [ending for _, ending in post.pushes] == list(range(10))


def test_a_step_that_talks_by_itself_waits_until_all_is_posted():
    drive = Drive(Pipeline())
    drive.dispatch([1], writes=True)
    drive.dispatch([2], writes=True, alone=True)
    drive.rest()
    assert drive.did.index("post") < drive.did.index("run 2")


def test_the_line_is_bounded_by_bytes():
    drive = Drive(Pipeline(budget=100))
    for number, reads in enumerate("abcdef"):
        drive.dispatch([number], reads=reads, nbytes=60)
    assert sum(len(post.pulls) for post in drive.rest()) == 2
    shared = Drive(Pipeline(budget=100))
    shared.dispatch(range(6), reads=W, nbytes=60)  # one pull, one copy
    assert sum(len(p.steps) for post in shared.rest() for p in post.pulls) == 6


def test_shared_values_count_until_the_last_step_that_has_them_has_run():
    drive = Drive(Pipeline(budget=100))
    drive.dispatch(range(2), reads=W, nbytes=60)
    (post,) = drive.rest()
    drive.arrive(post)
    drive.did = []
    drive.turn()
    assert drive.did == ["run 0"]
    for number in (2, 3):
        drive.dispatch([number], reads=number, nbytes=60)
    drive.rest()
    did = [each for each in drive.did if each != "post"]
    assert did[:2] == ["prepare 2", "run 1"]


def test_cancel_gives_back_in_reverse_and_forgets_the_pull():
    drive = Drive(Pipeline())
    drive.dispatch(range(3), reads=W, writes=True)
    (post,) = drive.rest()
    prepared, queued = drive.pipeline.cancelled()
    assert [step.number for step in prepared] == [1, 0]
    assert [step.number for step in queued] == [2]
    drive.arrive(post)
    assert drive.rest() == []
    assert len(drive.pipeline) == 0


def test_cancel_before_the_pull_is_posted():
    drive = Drive(Pipeline())
    drive.dispatch([1], reads=W)
    assert drive.turn()
    drive.pipeline.cancelled()
    drive.pipeline.validate()
    assert drive.rest() == []


def test_a_failed_pull_is_met_in_order():
    drive = Drive(Pipeline())
    drive.dispatch([1, 2], reads=W, writes=True)
    (post,) = drive.rest()
    lost = OSError("ps 0")
    drive.pipeline.arrived(post.pulls[0], None, drive.now, lost)
    do, step = drive.pipeline.next(drive.now)
    assert (do, step.error) == (Do.RUN, lost)
    drive.pipeline.ran(step, "failed", drive.now, cost=0.0)
    (after,) = drive.rest()
    assert after.endings == ["failed"]
    assert pulled(after) == [[2]]


def test_what_cannot_be_prepared_ends_behind_those_that_can_run():
    drive = Drive(Pipeline(prefetch=2))
    optimizer_steps(drive, 1, 2, 3, 4)
    first, second = [drive.turn() and drive.turn() and drive.posts[-1] for _ in "12"]
    assert (pulled(first), pulled(second)) == ([[1]], [[2]])
    do, step = drive.pipeline.next(drive.now)
    assert (do, step.number) == (Do.PREPARE, 3)
    drive.pipeline.refused(step, "no more elements", drive.now)
    drive.pipeline.validate()
    assert drive.rest() == []  # nothing draws behind it: the dataset may be at its end
    drive.arrive(first)
    (post,) = drive.rest()
    assert (drive.did, post.pushes) == (["run 1", "post"], [("push 1", 1)])
    drive.arrive(second)
    (post,) = drive.rest()
    assert drive.did == ["run 2", "prepare 4", "post"]
    assert (post.pushes, post.endings) == ([("push 2", 2)], ["no more elements"])
    assert pulled(post) == [[4]]


def test_cancel_ends_what_was_refused_as_it_ends_the_others():
    drive = Drive(Pipeline(prefetch=2))
    optimizer_steps(drive, 1, 2, 3)
    drive.turn()
    drive.turn()
    _, step = drive.pipeline.next(drive.now)
    drive.pipeline.refused(step, "no more elements", drive.now)
    prepared, queued = drive.pipeline.cancelled()
    drive.pipeline.validate()
    assert [[s.number for s in steps] for steps in (prepared, queued)] == [[1], [2, 3]]
    drive.dispatch([4])
    assert [post.endings for post in drive.rest()] == [[4]]


@pytest.mark.parametrize("window", [1, 2, 32])
def test_every_window_comes_to_an_end(window):
    drive = Drive(Pipeline(window=window))
    for number in range(40):
        drive.dispatch([number], reads=(None, W, B)[number % 3], writes=number % 5 == 0)
    ended = []
    while posts := drive.rest():
        for post in posts:
            ended += post.endings + [ending for _, ending in post.pushes]
            drive.arrive(post)
    assert sorted(ended) == list(range(40))

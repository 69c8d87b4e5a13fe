"""The pipeline with steps that are pulled while others compute, and with levels."""

from __future__ import annotations

import pytest
from pipeline_drive import Drive, optimizer_steps, pulled

from zstrat.worker import Costs, Do, Pipeline

W = "weights"


def test_with_prefetch_the_values_of_the_next_optimizer_step_travel_meanwhile():
    drive = Drive(Pipeline(prefetch=1))
    optimizer_steps(drive, 1, 2, 3, 4)
    first, second = drive.rest()
    assert (pulled(first), pulled(second)) == ([[1]], [[2]])
    drive.arrive(first)
    drive.arrive(second)  # before step 1 has run: it waits, and 1 is the next to run
    posts = drive.rest()
    # One step ahead and no more: 3 reads what 1 wrote, and is under way while 2 runs.
    assert [post.pushes for post in posts] == [[("push 1", 1)], [("push 2", 2)]]
    assert [pulled(post) for post in posts] == [[[3]], [[4]]]
    assert drive.did == ["run 1", "prepare 3", "post", "run 2", "prepare 4", "post"]


def test_with_prefetch_the_first_post_of_a_step_is_its_pull_alone():
    drive = Drive(Pipeline(prefetch=1))
    optimizer_steps(drive, 1, 2)
    drive.rest()
    assert drive.did == ["prepare 1", "post", "prepare 2", "post"]


def test_without_prefetch_optimizer_steps_wait_for_the_push():
    drive = Drive(Pipeline(prefetch=0))
    optimizer_steps(drive, 1, 2)
    (post,) = drive.rest()
    assert pulled(post) == [[1]]
    drive.arrive(post)
    (post,) = drive.rest()
    assert (post.pushes, pulled(post)) == ([("push 1", 1)], [[2]])


@pytest.mark.parametrize(
    ("before", "behind"),
    [
        ({"optimizes": True, "writes": True}, {"writes": True}),
        ({"optimizes": True, "writes": True}, {}),
        ({"writes": True}, {"optimizes": True, "writes": True}),
        ({"writes": True}, {"writes": True}),
        ({"writes": True}, {}),
    ],
)
def test_with_prefetch_other_steps_see_what_was_written_before_them(before, behind):
    drive = Drive(Pipeline(prefetch=1))
    drive.dispatch([1], reads=W, **before)
    drive.dispatch([2], reads=W, **behind)
    (post,) = drive.rest()
    assert pulled(post) == [[1]]
    drive.arrive(post)
    posts = drive.rest()
    (pulling,) = [post for post in posts if post.pulls]
    assert (pulling.pushes, pulled(pulling)) == ([("push 1", 1)], [[2]])


def test_cancel_forgets_what_was_fetched_early():
    drive = Drive(Pipeline(prefetch=1))
    optimizer_steps(drive, 1, 2, 3)
    posts = drive.rest()
    prepared, queued = drive.pipeline.cancelled()
    assert [step.number for step in prepared] == [2, 1]
    assert [step.number for step in queued] == [3]
    for post in posts:
        drive.arrive(post)
    # An assignment and a reader come next: nothing of the old look-ahead is left.
    drive.dispatch([4], reads=W, writes=True)
    drive.dispatch([5], reads=W)
    (post,) = drive.rest()
    assert pulled(post) == [[4]]


def test_a_failed_early_pull_fails_its_step_and_no_other():
    drive = Drive(Pipeline(prefetch=1))
    optimizer_steps(drive, 1, 2)
    first, second = drive.rest()
    lost = OSError("ps 0")
    drive.pipeline.arrived(second.pulls[0], None, drive.now, lost)
    drive.arrive(first)
    do, step = drive.pipeline.next(drive.now)
    assert (do, step.number, step.error) == (Do.RUN, 1, None)
    drive.pipeline.ran(step, 1, drive.now, cost=0.0, push="push 1")
    steps = [drive.pipeline.next(drive.now)]
    if steps[0][0] is Do.POST:
        drive.pipeline.post()
        steps.append(drive.pipeline.next(drive.now))
    do, step = steps[-1]
    assert (do, step.number, step.error) == (Do.RUN, 2, lost)


def test_with_a_deeper_prefetch_that_many_steps_are_under_way_while_one_computes():
    drive = Drive(Pipeline(prefetch=3))
    optimizer_steps(drive, *range(1, 8))
    posts = drive.rest()
    assert [pulled(post) for post in posts] == [[[1]], [[2]], [[3]], [[4]]]
    drive.arrive(posts[1])  # of the second: it waits for its turn
    assert drive.rest() == []
    drive.arrive(posts[0])
    first, second = drive.rest()
    # 5 reads what 1 wrote, as 6 what 2 wrote: three behind are always under way.
    assert (first.pushes, pulled(first)) == ([("push 1", 1)], [[5]])
    assert (second.pushes, pulled(second)) == ([("push 2", 2)], [[6]])


def test_a_step_that_must_see_all_writes_waits_for_every_one_that_was_fetched_early():
    drive = Drive(Pipeline(prefetch=3))
    optimizer_steps(drive, 1, 2)
    drive.dispatch([3], reads=W)
    optimizer_steps(drive, 4)
    first, second = drive.rest()
    assert drive.did[-1] == "prepare 3"  # and no further
    drive.arrive(first)
    assert not any(post.pulls for post in drive.rest())
    drive.arrive(second)
    posts = [post for post in drive.rest() if post.pulls]
    assert [(post.pushes, pulled(post)) for post in posts] == [
        ([("push 2", 2)], [[3, 4]])
    ]


def test_far_ahead_is_bounded_by_bytes_but_for_one_step():
    drive = Drive(Pipeline(prefetch=5, budget=100))
    drive.dispatch(range(4), reads=W, nbytes=60, levels=0, writes=True, optimizes=True)
    assert [pulled(post) for post in drive.rest()] == [[[0]], [[1]]]
    huge = Drive(Pipeline(prefetch=5, budget=100))
    huge.dispatch(range(4), nbytes=1000, levels=0, writes=True, optimizes=True)
    assert [pulled(post) for post in huge.rest()] == [[[0]], [[1]]]


def test_a_step_with_levels_is_pulled_again_until_it_can_run():
    drive = Drive(Pipeline())
    drive.dispatch([1], levels=2)
    for turn, did in enumerate(["prepare 1", "advance 1", "advance 1"]):
        (post,) = drive.rest()
        assert (drive.did, pulled(post)) == ([did, "post"], [[1]])
        assert post.pulls[0].reads == (1, 2 if turn < 2 else 1)
        drive.arrive(post)
    (post,) = drive.rest()
    assert (drive.did, post.endings) == (["run 1", "post"], [1])


def test_a_level_that_asks_for_nothing_costs_no_round_trip():
    pipeline = Pipeline()
    pipeline.dispatched(None, Costs(), [1], 0.0)
    _, step = pipeline.next(0.0)
    pipeline.prepared(step, 0.0, levels=1)
    assert pipeline.next(0.0) == (Do.ADVANCE, step)
    pipeline.advanced(step, 0.0)
    assert pipeline.next(0.0) == (Do.RUN, step)


def test_steps_fetched_early_advance_before_the_head_runs():
    drive = Drive(Pipeline(prefetch=2))
    drive.dispatch(range(1, 6), levels=1, writes=True, optimizes=True)
    posts = drive.rest()
    assert [pulled(post) for post in posts] == [[[1]], [[2]], [[3]]]
    for post in posts:
        drive.arrive(post)
    posts = drive.rest()
    assert drive.did == [
        *("advance 1", "post", "advance 2", "post", "advance 3", "post")
    ]
    for post in posts:
        drive.arrive(post)
    posts = drive.rest()
    assert drive.did == [
        *("run 1", "prepare 4", "post", "run 2", "prepare 5", "post", "run 3", "post"),
    ]
    assert [pulled(post) for post in posts] == [[[4]], [[5]], []]


def test_without_prefetch_no_level_of_a_step_is_pulled_before_the_push():
    drive = Drive(Pipeline())
    drive.dispatch([1, 2], levels=1, writes=True, optimizes=True)
    for did in ("prepare 1", "advance 1"):
        (post,) = drive.rest()
        assert drive.did[0] == did
        assert pulled(post) == [[1]]
        drive.arrive(post)
    (post,) = drive.rest()
    assert (post.pushes, pulled(post)) == ([("push 1", 1)], [[2]])


def test_rows_are_never_shared_and_readers_with_levels_fill_the_window():
    drive = Drive(Pipeline(window=4))
    drive.dispatch(range(6), levels=1)
    (post,) = drive.rest()
    assert pulled(post) == [[0], [1], [2], [3]]
    drive.arrive(post)
    (post,) = drive.rest()
    assert drive.did == ["advance 0", "advance 1", "advance 2", "advance 3", "post"]
    assert pulled(post) == [[0], [1], [2], [3]]


def test_beyond_the_budget_only_the_head_advances():
    drive = Drive(Pipeline(window=8, budget=100))
    drive.dispatch(range(4), levels=1, nbytes=60)
    (post,) = drive.rest()
    assert pulled(post) == [[0], [1]]
    drive.pipeline.arrived(post.pulls[1], "values", drive.now)
    assert drive.rest() == []  # 120 bytes wait already
    drive.pipeline.arrived(post.pulls[0], "values", drive.now)
    (post,) = drive.rest()
    assert (drive.did, pulled(post)) == (["advance 0", "post"], [[0]])
    drive.arrive(post)
    assert drive.turn()
    assert drive.turn()
    assert drive.did[-2:] == ["run 0", "advance 1"]


def test_the_first_advance_of_a_function_delays_nobody_who_can_run():
    drive = Drive(Pipeline(prefetch=1))
    optimizer_steps(drive, 1)
    drive.pipeline.dispatched(
        {"levels": 1, "writes": True, "optimizes": True},
        Costs(prepare=1e-5, run=1e-5),
        [2],
        drive.now,
    )
    for post in drive.rest():
        drive.arrive(post)
    drive.rest()
    assert drive.did[0] == "run 1"
    assert drive.did.index("post") < drive.did.index("advance 2")


def test_a_step_that_cannot_advance_ends_in_its_turn():
    drive = Drive(Pipeline(prefetch=1))
    drive.dispatch([1, 2], levels=1, writes=True, optimizes=True)
    first, second = drive.rest()
    drive.arrive(second)
    do, step = drive.pipeline.next(drive.now)
    assert (do, step.number) == (Do.ADVANCE, 2)
    drive.pipeline.broke(step, "no such row")
    drive.pipeline.validate()
    assert drive.rest() == []
    drive.arrive(first)
    drive.arrive(drive.rest()[0])
    do, step = drive.pipeline.next(drive.now)
    assert (do, step.number) == (Do.RUN, 1)
    drive.pipeline.ran(step, 1, drive.now, cost=0.0, push="push 1")
    assert drive.pipeline.next(drive.now)[1].ending == "no such row"


def test_cancel_gives_back_what_was_prefetched_last_one_first():
    drive = Drive(Pipeline(prefetch=3))
    drive.dispatch(range(6), levels=1, writes=True, optimizes=True)
    posts = drive.rest()
    drive.arrive(posts[0])
    drive.arrive(posts[2])
    assert drive.turn()
    assert drive.did[-1] == "advance 0"
    prepared, queued = drive.pipeline.cancelled()
    assert [step.number for step in prepared] == [3, 2, 1, 0]
    assert [step.number for step in queued] == [4, 5]
    drive.arrive(posts[1])
    drive.pipeline.validate()
    assert drive.rest() == []

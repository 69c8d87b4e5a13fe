"""The pipeline with numbers: order, batching, look-ahead, and that nothing is lost."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from zstrat.worker._closure import Costs, Do
from zstrat.worker._pipeline import Pipeline

W, B = "weights", "bias"


class Drive:
    """Obeys a pipeline at a clock of its own; every piece of work takes ``cost``."""

    def __init__(self, pipeline, cost=10e-6):
        self.pipeline, self.cost, self.now = pipeline, cost, 0.0
        self.did, self.posts = [], []

    def dispatch(self, numbers, *, reads=None, nbytes=8, **facts):
        plan = {"reads": reads, "nbytes": nbytes, **facts}
        costs = Costs(prepare=self.cost, run=self.cost)
        self.pipeline.dispatched(plan, costs, numbers)

    def turn(self):
        """Does the next thing; False if that is to wait."""
        do, step = self.pipeline.next(self.now)
        if do is Do.WAIT:
            return False
        if do is Do.POST:
            self.posts.append(self.pipeline.post())
            self.did.append("post")
            return True
        self.now += self.cost
        if do is Do.PREPARE:
            self.pipeline.prepared(step, self.now, cost=self.cost, **step.task)
            self.did.append(f"prepare {step.number}")
        else:
            push = f"push {step.number}" if step.writes else None
            self.pipeline.ran(step, step.number, self.now, cost=self.cost, push=push)
            self.did.append(f"run {step.number}")
        self.pipeline.validate()
        return True

    def rest(self):
        """Until there is nothing to do; the posts that this made."""
        self.did, self.posts = [], []
        while self.turn():
            pass
        return self.posts

    def arrive(self, post):
        for pull in post.pulls:
            self.pipeline.arrived(pull, "values")


def pulled(post):
    return [[step.number for step in pull.steps] for pull in post.pulls]


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
    drive.pipeline.dispatched({}, Costs(prepare=0.0, run=5.0), [2])
    new = Costs()
    drive.pipeline.dispatched({}, new, [3])
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
    drive.pipeline.arrived(post.pulls[0], None, lost)
    do, step = drive.pipeline.next(drive.now)
    assert (do, step.error) == (Do.RUN, lost)
    drive.pipeline.ran(step, "failed", drive.now, cost=0.0)
    (after,) = drive.rest()
    assert after.endings == ["failed"]
    assert pulled(after) == [[2]]


def optimizer_steps(drive, *numbers):
    drive.dispatch(numbers, reads=W, writes=True, optimizes=True)


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
    drive.pipeline.arrived(second.pulls[0], None, lost)
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


WRITES = {
    "nothing": {},
    "assigns": {"writes": True},
    "optimizes": {"writes": True, "optimizes": True},
}

KINDS = st.fixed_dictionaries(
    {
        "reads": st.sampled_from([None, W, B]),
        "does": st.sampled_from([*WRITES, "optimizes"]),
        "draws": st.booleans(),
        "cost": st.sampled_from([0.0, 1e-5, 1e-2, math.inf]),
        "refuse": st.sampled_from([False, False, False, True]),
    }
)


class Life(RuleBasedStateMachine):
    """Any order of dispatches, answers, losses and cancels: each closure ends once, in
    order, sees the pushes of those before it, and draws its element in turn."""

    prefetch = False

    def __init__(self):
        super().__init__()
        self.pipeline = Pipeline(
            window=4, interval=1e-3, budget=100, prefetch=self.prefetch
        )
        self.now, self.numbers = 0.0, 0
        self.kinds, self.endings, self.began = {}, [], []
        self.pulls, self.pushes = [], []
        self.wrote, self.posted_pushes = set(), set()
        self.elements, self.element_of = 0, {}
        self.waiting = True

    @rule(kind=KINDS, count=st.integers(1, 6))
    def dispatch(self, kind, count):
        numbers = range(self.numbers, self.numbers + count)
        self.numbers += count
        self.kinds.update(dict.fromkeys(numbers, kind))
        self.pipeline.dispatched(None, Costs(), numbers)

    @rule(turns=st.integers(1, 12))
    def work(self, turns):
        for _ in range(turns):
            do, step = self.pipeline.next(self.now)
            self.waiting = do is Do.WAIT
            if do is Do.PREPARE:
                self.prepare(step, self.kinds[step.number])
            elif do is Do.RUN:
                self.run(step, self.kinds[step.number])
            elif do is Do.POST:
                self.carry(self.pipeline.post())

    def prepare(self, step, kind):
        self.now += 1e-5
        if kind["refuse"]:
            self.pipeline.refused(step, step.number, self.now)
            return
        if kind["draws"]:
            self.element_of[step.number] = self.elements
            self.elements += 1
        facts = {"reads": kind["reads"], "nbytes": 30, **WRITES[kind["does"]]}
        self.pipeline.prepared(step, self.now, cost=kind["cost"], **facts)

    def run(self, step, kind):
        self.now += 1e-5
        assert step.error is not None or kind["reads"] is None or step.values == "v"
        self.began.append(step.number)
        writes = kind["does"] != "nothing"
        push = step.number if writes and step.error is None else None
        self.wrote |= set() if push is None else {push}
        self.pipeline.ran(step, step.number, self.now, cost=kind["cost"], push=push)

    def carry(self, post):
        assert post
        for push, ending in post.pushes:
            self.posted_pushes.add(push)
            self.pushes.append(ending)
        for pull in post.pulls:
            for step in pull.steps:
                assert self.posted_pushes == self.wrote
                self.check_writers_before(step.number)
            self.pulls.append(pull)
        self.endings += post.endings

    def check_writers_before(self, number):
        """All are over, but for one optimizer step before an optimizer step."""
        over = {*self.began, *self.endings}
        kinds = [self.kinds[n]["does"] for n in range(number + 1)]
        missing = [n for n in range(number) if kinds[n] != "nothing" and n not in over]
        if missing:
            assert self.prefetch
            assert len(missing) == 1
            assert [kinds[n] for n in (*missing, number)] == ["optimizes"] * 2

    @precondition(lambda self: self.pulls)
    @rule(data=st.data(), lost=st.sampled_from([False, False, True]))
    def answer(self, data, lost):
        pull = self.pulls.pop(data.draw(st.integers(0, len(self.pulls) - 1)))
        if lost:
            self.pipeline.arrived(pull, None, OSError("ps"))
        else:
            self.pipeline.arrived(pull, "v")

    @precondition(lambda self: self.pushes)
    @rule(data=st.data())
    def acknowledge(self, data):
        place = data.draw(st.integers(0, len(self.pushes) - 1))
        self.endings.append(self.pushes.pop(place))

    @rule()
    def cancel(self):
        prepared, queued = self.pipeline.cancelled()
        for step in prepared:
            if step.number in self.element_of:
                self.elements -= 1  # put back: it must be the one drawn last
                assert self.element_of.pop(step.number) == self.elements
        for step in reversed(prepared):
            self.pipeline.leave(step.number, self.now)
        for step in queued:
            self.pipeline.leave(step.number, self.now)

    @invariant()
    def holds(self):
        self.pipeline.validate()
        assert len(set(self.endings)) == len(self.endings)
        assert self.began == sorted(self.began)
        drawn = sorted(self.element_of.values())
        assert drawn == list(range(self.elements))

    def teardown(self):
        self.waiting = False
        while not self.waiting or self.pulls:
            while self.pulls:
                self.pipeline.arrived(self.pulls.pop(0), "v")
            self.work(1)
        self.endings += self.pushes
        assert sorted(self.endings) == list(range(self.numbers))
        assert len(self.pipeline) == 0


class LifeAhead(Life):
    """The same with prefetch, but that one optimizer step runs behind the next pull."""

    prefetch = True


TestLife, TestLifeAhead = Life.TestCase, LifeAhead.TestCase
TestLife.settings = TestLifeAhead.settings = settings(
    max_examples=120, stateful_step_count=30, deadline=None
)


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

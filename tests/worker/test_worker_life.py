"""Any life of a pipeline, by a state machine: nothing is lost or out of order."""

from __future__ import annotations

import math

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tiers import examples

from zstrat.worker import Costs, Do, Pipeline

W, B = "weights", "bias"


WRITES = {
    "nothing": {},
    "assigns": {"writes": True},
    "optimizes": {"writes": True, "optimizes": True},
}

KINDS = st.fixed_dictionaries(
    {
        "reads": st.sampled_from([None, W, B]),
        "lookups": st.lists(st.booleans(), max_size=3),
        "breaks": st.sampled_from([None] * 6 + [1, 2]),
        "does": st.sampled_from([*WRITES, "optimizes"]),
        "draws": st.booleans(),
        "cost": st.sampled_from([0.0, 1e-5, 1e-2, math.inf]),
        "refuse": st.sampled_from([False] * 7 + [True]),
    }
)
"""``lookups``: for each level, whether it asks for any rows (which are the step's own);
``breaks``: at which level it cannot go on."""

BUDGET, NBYTES = 100, 30


class Life(RuleBasedStateMachine):
    """Any order of dispatches, answers, losses and cancels: each closure ends once, in
    order, sees the pushes of those before it, draws its element in turn, runs with the
    answer to its last pull, and waits within bounds."""

    prefetch = 0

    def __init__(self):
        super().__init__()
        self.pipeline = Pipeline(
            window=4, interval=1e-3, budget=BUDGET, prefetch=self.prefetch
        )
        self.now, self.numbers = 0.0, 0
        self.kinds, self.endings, self.began = {}, [], []
        self.pulls, self.pushes = [], []
        self.wrote, self.posted_pushes = set(), set()
        self.elements, self.element_of = 0, {}
        self.asked = {}
        """By step that is prepared and has not run: what it asked for, by level."""
        self.broken = set()
        self.left = 0
        """All closures below have left, or wait for the acknowledgement alone."""
        self.waiting = True

    @rule(kinds=st.lists(st.tuples(KINDS, st.integers(1, 3)), min_size=1, max_size=5))
    def dispatch(self, kinds):
        for kind, count in kinds:
            numbers = range(self.numbers, self.numbers + count)
            self.numbers += count
            self.kinds.update(dict.fromkeys(numbers, kind))
            cost = kind["cost"]
            self.pipeline.dispatched(None, Costs(cost, cost, cost), numbers, self.now)

    @rule(turns=st.integers(1, 25))
    def work(self, turns):
        for _ in range(turns):
            do, step = self.pipeline.next(self.now)
            self.waiting = do is Do.WAIT
            if do is Do.PREPARE:
                self.prepare(step, self.kinds[step.number])
            elif do is Do.ADVANCE:
                self.advance(step, self.kinds[step.number])
            elif do is Do.RUN:
                self.run(step, self.kinds[step.number])
            elif do is Do.POST:
                self.carry(self.pipeline.post())
            self.pipeline.validate()

    def prepare(self, step, kind):
        self.now += 1e-5
        if self.is_full():  # one behind the writer, which it is the first to wait for
            writers = [n for n in self.asked if self.kinds[n]["does"] != "nothing"]
            assert writers == [max(self.asked)]
        if kind["refuse"]:
            self.pipeline.refused(step, step.number, self.now)
            return
        if kind["draws"]:
            self.element_of[step.number] = self.elements
            self.elements += 1
        lookups = kind["lookups"]
        reads = self.rows(step.number, 0) if lookups else kind["reads"]
        self.asked[step.number] = [reads]
        self.pipeline.prepared(
            step,
            self.now,
            cost=kind["cost"],
            reads=reads,
            nbytes=0 if reads is None else NBYTES,
            levels=max(0, len(lookups) - 1),
            **WRITES[kind["does"]],
        )

    def rows(self, number, level):
        return (number, level) if self.kinds[number]["lookups"][level] else None

    def is_full(self):
        """Whether more waits than the budget; equal reads may have shared a pull."""
        reads = {r for asked in self.asked.values() for r in asked if r is not None}
        return NBYTES * len(reads) > BUDGET

    def advance(self, step, kind):
        self.now += 1e-5
        number, asked = step.number, self.asked[step.number]
        assert step.values == asked[-1]
        level = len(asked)
        assert not self.is_full() or number == min(self.asked)
        if level == kind["breaks"]:
            self.broken.add(number)
            self.pipeline.broke(step, number)
            return
        reads = self.rows(number, level)
        asked.append(reads)
        nbytes = 0 if reads is None else NBYTES
        self.pipeline.advanced(
            step, self.now, cost=kind["cost"], reads=reads, nbytes=nbytes
        )

    def run(self, step, kind):
        self.now += 1e-5
        asked = self.asked.pop(step.number)
        failed = step.error is not None or step.number in self.broken
        if not failed:
            assert len(asked) == max(1, len(kind["lookups"]))
            assert step.values == asked[-1]
        assert (step.ending is not None) == (step.number in self.broken)
        if step.error is not None and step.number in self.element_of:
            self.put_back(step)
        self.began.append(step.number)
        push = step.number if kind["does"] != "nothing" and not failed else None
        self.wrote |= set() if push is None else {push}
        self.pipeline.ran(step, step.number, self.now, cost=kind["cost"], push=push)

    def put_back(self, step):
        """As of a step whose values did not come: what was drawn last goes first."""
        behind = self.pipeline.put_back()
        for each in (*behind, step):
            if each.number in self.element_of:
                self.elements -= 1
                assert self.element_of.pop(each.number) == self.elements
        for each in behind:
            if each.dropped:  # it is prepared once more
                del self.asked[each.number]
                self.broken.discard(each.number)

    def carry(self, post):
        assert post
        for push, ending in post.pushes:
            self.posted_pushes.add(push)
            self.pushes.append(ending)
        for number in post.endings:
            if number not in self.began:  # refused, or cancelled
                assert number >= self.left, "not before those that could run"
            self.left = max(self.left, number + 1)
        self.endings += post.endings
        for pull in post.pulls:
            for step in pull.steps:
                assert self.posted_pushes == self.wrote
                self.check_writers_before(step.number)
            self.pulls.append(pull)

    def check_writers_before(self, number):
        """All are over, but for some optimizer steps before an optimizer step."""
        over = {*self.began, *self.endings}
        kinds = [self.kinds[n]["does"] for n in range(number + 1)]
        missing = [n for n in range(number) if kinds[n] != "nothing" and n not in over]
        assert len(missing) <= self.prefetch
        if missing:
            assert {kinds[n] for n in (*missing, number)} == {"optimizes"}

    @precondition(lambda self: self.pulls)
    @rule(data=st.data(), lost=st.sampled_from([False, False, True]))
    def answer(self, data, lost):
        pull = self.pulls.pop(data.draw(st.integers(0, len(self.pulls) - 1)))
        if lost:
            self.pipeline.arrived(pull, None, self.now, OSError("ps"))
        else:
            self.pipeline.arrived(pull, pull.reads, self.now)

    @precondition(lambda self: self.pushes)
    @rule(data=st.data())
    def acknowledge(self, data):
        place = data.draw(st.integers(0, len(self.pushes) - 1))
        self.endings.append(self.pushes.pop(place))

    @rule(sure=st.sampled_from([False, False, True]))
    def cancel(self, sure):
        if not sure:
            return
        prepared, queued = self.pipeline.cancelled()
        for step in prepared:
            del self.asked[step.number]
            if step.number in self.element_of:
                self.elements -= 1  # put back: it must be the one drawn last
                assert self.element_of.pop(step.number) == self.elements
        for step in (*reversed(prepared), *queued):
            self.pipeline.leave(step.number, self.now)

    @invariant()
    def holds(self):
        self.pipeline.validate()
        assert len(set(self.endings)) == len(self.endings)
        assert self.began == sorted(self.began)
        drawn = sorted(self.element_of.values())
        assert drawn == list(range(self.elements))
        assert len(self.pipeline) >= len(self.asked)

    def teardown(self):
        self.waiting = False
        while not self.waiting or self.pulls:
            while self.pulls:
                pull = self.pulls.pop(0)
                self.pipeline.arrived(pull, pull.reads, self.now)
            self.work(1)
        self.endings += self.pushes
        assert sorted(self.endings) == list(range(self.numbers))
        assert len(self.pipeline) == 0


class LifeAhead(Life):
    """The same with prefetch, but that one optimizer step runs behind the next pull."""

    prefetch = 1


class LifeFarAhead(Life):
    """The same, but that up to three of them do."""

    prefetch = 3


TestLife, TestLifeAhead = Life.TestCase, LifeAhead.TestCase
TestLifeFarAhead = LifeFarAhead.TestCase
for case in (TestLife, TestLifeAhead, TestLifeFarAhead):
    case.settings = examples(70, stateful_step_count=30)
del case  # or pytest takes it for one more

"""Workers as a state machine: a closure is at one of them at most, and only if open."""

import heapq
import math
from collections import deque

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tiers import examples

from zstrat.coordinator._members import MAX_DEPTH, MIN_DEPTH, Members, MemberState
from zstrat.coordinator.parts import Closure

NAMES = [f"/job:worker/task:{index}" for index in range(8)]


def closures(count, first=1):
    return [Closure(None, None, step=first + i) for i in range(count)]


def added(count, *options, **named):
    members = Members(*options, **named)
    for place, name in enumerate(NAMES[:count]):
        members.add(place, name)
    return members


def in_flight(members):
    return sum(len(member.in_flight) for member in members.members)


class MembersMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.members = added(3)
        self.members.start(0.0)
        self.now, self.next_step = 0.0, 1
        self.waiting: list[Closure] = []
        self.suspects: list[Closure] = []
        self.building = dict.fromkeys(range(3), 0)
        self.over = 0

    def _member(self, index):
        return self.members.members[index]

    @rule(count=st.integers(1, 50))
    def schedule(self, count):
        self.waiting += closures(count, self.next_step)
        self.next_step += count

    @rule(index=st.integers(0, 2), resources=st.integers(0, 3))
    def connect(self, index, resources):
        if self._member(index).state in (MemberState.CONNECTING, MemberState.LOST):
            epoch = self._member(index).epoch + 1
            self.members.connected(index, epoch)
            self.members.build(index, resources)
            self.members.built(index, epoch, 0)
            self.building[index] = resources

    @rule(index=st.integers(0, 2))
    def new_resource(self, index):
        if self._member(index).state in (MemberState.OPEN, MemberState.BUILDING):
            self.members.build(index)
            self.building[index] += 1

    @rule(index=st.integers(0, 2), stale=st.booleans())
    def built(self, index, stale):
        member = self._member(index)
        if stale:
            self.members.built(index, member.epoch - 1)
        elif self.building[index]:
            self.members.built(index, member.epoch)
            self.building[index] -= 1

    @rule(index=st.integers(0, 2))
    def lose(self, index):
        orphans = self.members.lost(index, "killed", self.now)
        assert [c.step for c in orphans] == [c.step for c in orphans]
        self.suspects += orphans[:1]
        self.waiting += orphans[1:]
        self.building[index] = 0

    @rule()
    def turn(self):
        running = in_flight(self.members)
        left = running + len(self.waiting)
        grants = self.members.grants(len(self.waiting), len(self.suspects), running)
        granted = {grant.member: grant.count for grant in grants if not grant.alone}
        assert sum(granted.values()) <= len(self.waiting)
        rates = sum(m.rate for m in self.members.members)
        for m in (
            self.members.members if sum(granted.values()) < len(self.waiting) else ()
        ):
            room, has = m.free, len(m.in_flight)
            if m.rate:
                share = max(1, math.floor((left + 1) * m.rate / rates + 1e-9))
                room = min(room, share - has)
            # Shares may be rounded another way.
            assert m is self._reserved or abs(granted.get(m, 0) - max(0, room)) <= 1
            assert m is self._reserved or granted.get(m) or has or not m.free
        for grant in grants:
            source = self.suspects if grant.alone else self.waiting
            batch = [source.pop(0) for _ in range(grant.count)]
            self.members.dispatched(grant.member, batch, self.now, alone=grant.alone)

    @property
    def _reserved(self):
        return self.members._reserved

    @rule(index=st.integers(0, 2), count=st.integers(1, 5))
    def finish(self, index, count):
        member = self._member(index)
        steps = list(member.in_flight)[:count]
        for step in steps:
            del member.in_flight[step]
        self.over += len(steps)
        self.members.ended(member, len(steps), self.now)

    @rule(seconds=st.floats(0.0, 0.1))
    def wait(self, seconds):
        self.now += seconds

    @invariant()
    def nothing_is_lost_or_doubled(self):
        flying = [s for m in self.members.members for s in m.in_flight]
        assert len(set(flying)) == len(flying)
        total = len(flying) + len(self.waiting) + len(self.suspects) + self.over
        assert total == self.next_step - 1

    @invariant()
    def only_workers_that_are_there_hold_closures(self):
        for member in self.members.members:
            assert MIN_DEPTH <= member.depth <= MAX_DEPTH
            assert member.building == self.building[member.place]
            if member.state in (MemberState.LOST, MemberState.CONNECTING):
                assert not member.in_flight
                assert member.reason
            assert not (member.alone and len(member.in_flight) > 1)

    @invariant()
    def absence_is_known(self):
        assert (self.members.alone_since is None) == bool(self.members.usable)


TestMembers = MembersMachine.TestCase
TestMembers.settings = examples(60, stateful_step_count=40)


def opened(count=2, **options):
    members = added(count, **options)
    for index in range(count):
        members.connected(index, 1)
        members.built(index, 1, 0)
    return members


def give(members, ordinary, suspects=0, first=1, now=0.0):
    given = {}
    for grant in members.grants(ordinary, suspects, in_flight(members)):
        batch = closures(grant.count, first)
        first += grant.count
        members.dispatched(grant.member, batch, now, alone=grant.alone)
        given[grant.member.place] = grant.count
    return given


def test_the_least_loaded_worker_is_next():
    members = opened(closures_in_flight=8)
    assert give(members, 1) == {0: 1}
    assert give(members, 1, first=10) == {1: 1}
    assert give(members, 6, first=20) == {0: 3, 1: 3}
    assert give(members, 100, first=40) == {0: 4, 1: 4}


def test_depth_follows_the_rate_and_is_20_ms_of_work_beyond_what_is_worked_on():
    members = opened(1)
    (member,) = members.members
    now = 0.0
    for _ in range(60):
        give(members, member.free, first=round(now * 1e6) + 1, now=now)
        ended = len(member.in_flight)
        now += ended * 0.001
        member.in_flight.clear()
        members.ended(member, ended, now)
    assert member.depth == MIN_DEPTH + 20
    members.lost(0, "killed", now)
    members.connected(0, 1)
    assert member.depth == MIN_DEPTH, "what comes back may be slower"


@pytest.mark.parametrize("seconds", [0.004, 0.03])
@pytest.mark.parametrize("workers", [2, 3, 4, 8])
def test_a_slow_worker_is_hardly_waited_for_at_the_end(workers, seconds):
    """In virtual time: one worker is five times slower, and all together need little
    more time than if they could share out each closure."""
    count = 150
    members = opened(workers, prefetch=1)
    takes = [5 * seconds, *[seconds] * (workers - 1)]
    ends, now, waiting, free_at = [], 0.0, count, [0.0] * workers
    while waiting or ends:
        for grant in members.grants(waiting, 0, in_flight(members)):
            batch = closures(grant.count, count - waiting)
            waiting -= grant.count
            members.dispatched(grant.member, batch, now)
            place = grant.member.place
            for closure in batch:
                free_at[place] = max(free_at[place], now) + takes[place]
                heapq.heappush(ends, (free_at[place], place, closure.step))
        now, place, step = heapq.heappop(ends)
        member = members.members[place]
        del member.in_flight[step]
        members.ended(member, 1, now)
    ideal = count / sum(1 / each for each in takes)
    assert now <= 1.1 * ideal, now / ideal


@pytest.mark.parametrize("round_trip", [0.0, 0.002, 0.04, 0.2])
def test_a_worker_that_is_far_away_always_has_something_to_do(round_trip):
    members = opened(1)
    (member,) = members.members
    members.measured(0, member.epoch, round_trip)
    step, first, idle, free_at, said = 0.002, 1, 0.0, 0.0, deque()
    now = 0.0
    while now < 10.0:
        count = sum(give(members, member.free, first=first, now=now).values())
        for number in range(first, first + count):
            begins = max(free_at, now + round_trip / 2)
            idle += begins - free_at if now > 5.0 else 0.0  # its rate is known
            free_at = begins + step
            said.append((free_at + round_trip / 2, number))
        first += count
        now, number = said.popleft()
        del member.in_flight[number]
        members.ended(member, 1, now)
    assert idle < 0.05 * 5.0
    assert member.depth <= MIN_DEPTH + max(20e-3, 2 * round_trip) / step + 1


def test_what_was_measured_on_a_former_connection_counts_no_more():
    members = opened(1)
    (member,) = members.members
    epoch = member.epoch
    members.measured(0, epoch, 0.1)
    assert member.round_trip == 0.1
    members.lost(0, "killed", 0.0)
    members.connected(0, 2)
    members.measured(0, epoch, 0.3)
    assert member.round_trip == 0.0


def goes_on(members, member, now):
    """One step ends, and the member may get more: how many it gets, if any."""
    del member.in_flight[min(member.in_flight)]
    members.ended(member, 1, now)
    return [*give(members, 100, first=round(now * 1e6), now=now).values()]


@pytest.mark.parametrize("prefetch", [0, 4])
def test_who_has_work_gets_more_when_a_third_of_it_is_over(prefetch):
    members = opened(1, prefetch=prefetch)
    (member,) = members.members
    give(members, 100)
    messages = []
    for step in range(1, 1000):
        got = goes_on(members, member, step * 0.001)
        if step > 300:  # its rate is known
            messages += got
            assert len(member.in_flight) > member.depth * 2 / 3
    depth = MIN_DEPTH + prefetch + 20
    assert member.depth == depth
    assert {*messages} == {-(-depth // 3)}


@pytest.mark.parametrize("depth", [1, 3, 24])
def test_a_member_holds_as_many_closures_as_the_user_says(depth):
    members = opened(1, closures_in_flight=depth)
    (member,) = members.members
    assert give(members, 100) == {0: depth}
    for step in range(1, 100):
        assert goes_on(members, member, step * 0.001) == [1]


def test_who_has_nothing_beyond_what_it_works_on_gets_more_at_once():
    members = opened(1)
    (member,) = members.members
    give(members, 100)
    for step in range(1, 300):
        goes_on(members, member, step * 0.001)
    assert member.depth == MIN_DEPTH + 20
    member.in_flight.clear()
    members.ended(member, 0, 0.3)
    # The program schedules one at a time.
    assert [give(members, 1, first=10**6 + n) for n in range(9)] == [{0: 1}] * 9
    while len(member.in_flight) > 1:
        del member.in_flight[min(member.in_flight)]
        members.ended(member, 0, 0.3)
    assert give(members, 1, first=2 * 10**6) == {0: 1}
    assert give(members, 100, first=3 * 10**6) == {0: MIN_DEPTH + 18}


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_slow_steps_too_are_there_in_time_to_be_prefetched(prefetch):
    members = opened(1, prefetch=prefetch)
    (member,) = members.members
    give(members, member.free)
    # While one runs and one has run and is not acknowledged yet, these can be pulled.
    assert len(member.in_flight) == 2 + prefetch
    for second in range(1, 10):
        del member.in_flight[min(member.in_flight)]
        members.ended(member, 1, float(second))
        assert give(members, 9, first=10 * second, now=float(second)) == {0: 1}


def test_a_suspect_runs_alone_and_the_others_go_on_elsewhere():
    members = opened(closures_in_flight=4)
    assert give(members, 2) == {0: 1, 1: 1}
    assert give(members, 10, suspects=1, first=10) == {1: 3}
    first = members.members[0]
    first.in_flight.clear()
    members.ended(first, 1, 1.0)
    assert give(members, 10, suspects=1, first=20) == {0: 1}
    assert first.alone
    assert first.free == 0
    assert give(members, 10, first=30) == {}
    first.in_flight.clear()
    members.ended(first, 1, 2.0)
    assert give(members, 10, first=40) == {0: 4}


def test_a_suspect_does_not_go_to_a_worker_that_reaches_no_server():
    """It is idle, as it gets nothing, so it would be chosen each time."""
    members = opened(3, closures_in_flight=4)
    members.avoid(0, True)
    assert give(members, 3) == {1: 2, 2: 1}
    assert give(members, 0, suspects=1, first=10) == {}
    members.avoid(2, True)  # which was chosen, and is emptied
    for member in members.members[1:]:
        member.in_flight.clear()
        members.ended(member, 1, 1.0)
    assert give(members, 0, suspects=1, first=20) == {1: 1}


def test_a_suspect_waits_for_the_slowest_worker_as_others_do():
    """Who waits at the bound is idle, so it would be chosen."""
    members = opened(2, closures_in_flight=4, staleness=1)
    assert give(members, 4) == {0: 2, 1: 2}
    slow, quick = members.members
    quick.in_flight.clear()
    members.ended(quick, 2, 1.0)
    assert give(members, 4, suspects=1, first=10) == {}
    del slow.in_flight[min(slow.in_flight)]
    members.ended(slow, 1, 2.0)
    assert give(members, 0, suspects=1, first=20) == {1: 1}
    assert members.largest_lead == 1


def test_a_suspect_at_the_bound_keeps_the_next_one_from_another_worker():
    """Each of them may kill its worker: one after the other."""
    members = opened(2, closures_in_flight=4, staleness=0)
    assert give(members, 0, suspects=2) == {0: 1}
    assert give(members, 0, suspects=1, first=10) == {}
    first = members.members[0]
    first.in_flight.clear()
    members.ended(first, 1, 1.0)
    assert give(members, 0, suspects=1, first=20) == {1: 1}


def test_the_oldest_closure_may_end_while_it_is_described():
    """The loop takes it away, while another thread reads."""

    class Emptied(dict):
        def __len__(self):
            count = super().__len__()
            self.clear()
            return count

    members = opened(1)
    give(members, 1)
    (member,) = members.members
    assert members.oldest().startswith(" (the oldest: step 1")
    member.in_flight = Emptied(member.in_flight)
    assert members.oldest() in (
        "",
        " (the oldest: step 1, closure, on " + NAMES[0] + ")",
    )


def test_those_who_are_missing_are_named_with_the_reason():
    members = opened()
    members.lost(1, "silent for 5.0s", 3.0)
    assert members.absent() == "/job:worker/task:1: silent for 5.0s"
    assert members.alone_since is None
    members.lost(0, "killed", 4.0)
    assert members.alone_since == 4.0


def test_options_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="closures_in_flight=0"):
        Members(0)
    with pytest.raises(ValueError, match=r"closures_in_flight=16385.*\b1\b.*\b16384\b"):
        Members(16385)
    assert added(1, 16384).members[0].depth == 16384


@pytest.mark.parametrize("change", [(0, False), (1, True)], ids=["is back", "all"])
def test_no_worker_waits_for_one_that_gets_no_closures(change):
    """Worker 0 cannot reach a parameter server, and staleness is bounded. When it gets
    closures again (it is back, or no other can), others do not wait until it has made
    as many as they have."""
    members = opened(staleness=1)
    members.avoid(0, True)
    assert [member.place for member in members.sound] == [1]
    assert members.absent().startswith("/job:worker/task:0: ")
    steps = iter(range(1, 100))
    for _ in range(10):
        assert list(give(members, 1, first=next(steps))) == [1]
        members.members[1].in_flight.clear()
        members.ended(members.members[1], 1, 0.0)
    members.avoid(*change)
    assert give(members, 50, first=next(steps)) == {0: 2, 1: 2}
    assert members.largest_lead == 1


def rate_of(ends, now):
    """Of closures that ended at these times, as far as they had by now."""
    members = added(1)
    (member,) = members.members
    for at in ends:
        if at <= now:
            members.ended(member, 1, at)
    return members.rate(now)


def test_the_rate_is_of_the_last_ten_seconds():
    assert rate_of([], 5.0) == 0
    assert rate_of([5.0], 5.0) == 1, "a moment is no measure"
    quick, slow = [n / 100 for n in range(2000)], [20 + n / 10 for n in range(300)]
    assert rate_of(quick, 1.5) == pytest.approx(100, rel=0.02)
    assert rate_of(quick, 20.0) == pytest.approx(100, rel=0.02)
    assert rate_of(quick + slow, 25.0) == pytest.approx(55, rel=0.05)
    assert rate_of(quick + slow, 50.0) == pytest.approx(10, rel=0.02)
    assert rate_of(quick + slow, 70.0) == 0


def test_a_pause_counts_for_ten_seconds_and_not_for_more():
    ends = [0.0, *(1000 + n / 100 for n in range(100))]
    assert rate_of(ends, 1001.0) == pytest.approx(10, rel=0.02)

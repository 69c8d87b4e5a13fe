"""Rounds of programs that are killed, one after the other: each contribution counts
once, on all servers, or nowhere. Servers are stand-ins here; those of
`tests/ps/test_ps_rounds_left.py` and `tests/system/test_system_rounds.py` are real."""

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zstrat as zs
from zstrat.coordinator.rounds import (
    SessionRounds,
    first_free_step,
    inherited_rounds,
)
from zstrat.errors import AlreadyExistsError
from zstrat.wire import HeldRounds, RoundOrder, StepContribution

OPTIMIZER, SERVERS, WORKERS = 7, 3, 2
ALL = frozenset(range(SERVERS))
WEIGHTS = itertools.count(1)
SOME = st.frozensets(st.sampled_from(sorted(ALL)))


def contribution(step, base=0):
    """Its weight names it: the number of a step that has reached no server returns."""
    weight = float(next(WEIGHTS))
    return StepContribution(step, 1, OPTIMIZER, base, weight, coupled=False)


class Server:
    """Keeps contributions and closes rounds, as a parameter server does."""

    def __init__(self):
        self.waiting, self.closed = {}, []
        self.last = RoundOrder(OPTIMIZER, -1, 0, [])

    def close(self, order, kept=(), over=0):
        if order.number < len(self.closed):
            return
        assert order.number == len(self.closed)
        self.closed.append([self.waiting.pop(m.step) for m in order.members])
        self.last = order
        for step in [s for s in self.waiting if s < over and s not in kept]:
            del self.waiting[step]

    def held(self):
        if not self.waiting and not self.closed:
            return {}
        return {OPTIMIZER: HeldRounds(self.last, [*self.waiting.values()], ())}


class Program:
    """Continues on servers what another one has left."""

    def __init__(self, servers, **policy):
        self.servers = servers
        held = [server.held() for server in servers]
        session, self.next = SessionRounds(), first_free_step(held)
        session.inherited = inherited_rounds(held)
        for left in session.inherited.values():
            if left.closed.number >= 0:
                for server in servers:
                    server.close(left.closed)
        session.add(OPTIMIZER, "mine", zs.Rounds(workers=WORKERS, **policy))
        self.rounds, self.open = session.get(OPTIMIZER), set()

    def step(self, reaches):
        """A step whose contribution reaches these servers; it ends if those are all."""
        given, self.next = contribution(self.next, self.rounds.number), self.next + 1
        for server in reaches:
            self.servers[server].waiting[given.step] = given
        if reaches == ALL:
            self.rounds.contributed(0, given, 0.0)
        else:
            self.open.add(given.step)
        return given

    def close(self, reaches):
        """Closes the round that is due on these servers."""
        order, over = self.rounds.close().order, min(self.open, default=self.next)
        for server in reaches:
            self.servers[server].close(order, self.rounds.steps, over)
        self.rounds.closed(0.0)

    @property
    def is_due(self):
        return self.rounds.due(WORKERS, 0.0) is not None


@given(
    lives=st.lists(
        st.tuples(st.lists(SOME | st.just(ALL), max_size=6), SOME), max_size=4
    )
)
def test_each_contribution_counts_once_everywhere_or_nowhere(lives):
    servers = [Server() for _ in range(SERVERS)]
    given_everywhere, under_way = set(), set()
    for steps, reached_at_the_end in [*lives, ([ALL], ALL)]:
        program = Program(servers)
        for place, reaches in enumerate(steps, 1):
            given = program.step(reaches)
            (given_everywhere if reaches == ALL else under_way).add(given)
            if program.is_due:
                is_last = place == len(steps)
                program.close(reached_at_the_end if is_last else ALL)
    if program.rounds.steps:
        program.close(ALL)
    assert all(server.closed == servers[0].closed for server in servers)
    counted = Counter(each for members in servers[0].closed for each in members)
    assert counted == Counter(dict.fromkeys(given_everywhere, 1))
    assert not under_way & set(counted)
    assert all(each == sorted(each) for each in servers[0].closed)


def test_another_run_of_a_step_is_another_contribution():
    """The second run has reached one server when its program was killed."""
    servers, first = [Server(), Server()], contribution(5)
    servers[0].waiting[5] = first
    servers[1].waiting[5] = first._replace(attempt=2)
    held = [server.held() for server in servers]
    assert not inherited_rounds(held)[OPTIMIZER].contributions
    assert first_free_step(held) == 6


def test_what_was_late_with_backup_workers_stays_late():
    """The program before has not counted it, and it has no effect later, either."""
    for late, members in (("drop", [3]), ("next", [2, 3])):
        servers = [Server() for _ in range(SERVERS)]
        before = Program(servers, backup=1, late=late)
        before.step(ALL)
        before.close(ALL)
        was_late = contribution(2, base=0)
        for server in servers:
            server.waiting[2] = was_late
        after = Program(servers, backup=1, late=late)
        after.step(ALL)
        after.close(ALL)
        assert [each.step for each in servers[0].closed[-1]] == members


def test_an_optimizer_that_has_contributions_keeps_its_rounds():
    session = SessionRounds()
    held = HeldRounds(RoundOrder(OPTIMIZER, 3, 0, []), [contribution(1)], ())
    session.inherited = {OPTIMIZER: held}
    with pytest.raises(AlreadyExistsError, match=r"'sgd'.*rounds="):
        session.require_rounds(OPTIMIZER, "sgd")
    session.require_rounds(OPTIMIZER + 1, "sgd")
    session.add(OPTIMIZER, "sgd", zs.Rounds())
    assert session.get(OPTIMIZER).number == 4
    # Servers can close no round before a step of this program has ended.
    assert session.get(OPTIMIZER).due(1, 0.0) is None
    assert not session.is_open_below(100)
    # One that has failed in its constructor has no rounds, and may be made again.
    session.remove(OPTIMIZER)
    assert not session
    session.add(OPTIMIZER, "sgd", zs.Rounds())
    assert session.get(OPTIMIZER).number == 4
    session.restart()
    assert session.get(OPTIMIZER).number == 0
    session.require_rounds(OPTIMIZER, "sgd")

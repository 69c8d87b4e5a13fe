"""One coordinator at a time, and nobody else's requests."""

from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tiers import examples

from zstrat.errors import BusyError, HeldError, StaleSessionError
from zstrat.transport import new_incarnation
from zstrat.wire import Hello, Owner, Ownership

SESSIONS = st.integers(1, 3)


class Line:
    """A connection, which is whole and heard, or not."""

    def __init__(self, *, is_heard=False):
        self.is_heard, self.heard = is_heard, 0


def refusal(tasks, number=2, of=None):
    """What the coordinator of that session gets that wants the task, too."""
    with pytest.raises(BusyError) as raised:
        tasks.open(Owner(number, Line(), of or hello(number)))
    return raised.value


def hello(session: int) -> Hello:
    return Hello(1, "chief", 0, session, f"host{session}", 1000 + session)


def test_a_second_coordinator_waits_until_the_first_is_gone():
    tasks, first, second = Ownership("/job:ps/task:0"), Line(), Line()
    assert tasks.open(Owner(1, first, hello(1)))
    with pytest.raises(BusyError, match=r"task:0.*\b1001\b"):
        tasks.open(Owner(2, second, hello(2)))
    tasks.check(1)
    assert tasks.lost(first)
    tasks.check(1)  # what was sent before still counts, and workers go on
    assert tasks.open(Owner(2, second, hello(2)))
    with pytest.raises(StaleSessionError, match="/job:ps/task:0"):
        tasks.check(1)
    with pytest.raises(StaleSessionError):
        tasks.close(1)
    assert tasks.close(2)
    assert not tasks.close(2)
    with pytest.raises(StaleSessionError, match="/job:ps/task:0"):
        tasks.check(2)


def test_who_is_heard_holds_a_task_and_who_is_not_may_be_gone():
    tasks, store, process = Ownership("ps"), Line(is_heard=True), Line()
    for link in (store, process):
        tasks.open(Owner(1, link, hello(1), program="train.py"), several=True)
    assert type(refusal(tasks)) is BusyError  # it may have been frozen just now
    store.heard += 1
    with pytest.raises(HeldError, match=r"train\.py.*\b1001\b.*ZSTRAT_TURN"):
        tasks.open(Owner(2, Line(), hello(2)))
    store.is_heard = False  # it was killed: its connections broke, and may come back
    assert type(refusal(tasks)) is BusyError
    assert type(refusal(tasks, 3)) is BusyError
    process.is_heard = True
    assert type(refusal(tasks)) is BusyError
    process.heard += 1
    for session in (2, 3):
        assert type(refusal(tasks, session)) is HeldError
    assert type(refusal(tasks, 4)) is BusyError  # each waits for a proof of its own
    # One that opens another session of its own has closed this one, or will.
    process.heard += 1
    assert type(refusal(tasks, 4, replace(hello(1), incarnation=2))) is BusyError
    assert not tasks.lost(process)
    assert tasks.lost(store)
    assert tasks.open(Owner(2, Line(), hello(2)))


def test_a_program_is_not_told_to_stop_itself():
    tasks = Ownership("/job:ps/task:0")
    tasks.open(Owner(1, Line(), hello(1)))
    with pytest.raises(BusyError, match=r"strategy\.close") as raised:
        tasks.open(Owner(2, Line(), replace(hello(1), incarnation=2)))
    assert "1001" not in str(raised.value)


def test_containers_of_one_host_are_told_apart_though_both_have_its_name_and_pid_1():
    tasks, line = Ownership("/job:ps/task:0"), Line(is_heard=True)
    mine, theirs = new_incarnation(), new_incarnation() ^ 1 << 62  # another process
    tasks.open(Owner(mine, line, Hello(1, "chief", 0, mine, "node", 1)))
    refusal(tasks, theirs, Hello(1, "chief", 0, theirs, "node", 1))
    line.heard += 1
    with pytest.raises(HeldError):
        tasks.open(Owner(theirs, Line(), Hello(1, "chief", 0, theirs, "node", 1)))
    again = new_incarnation()
    with pytest.raises(BusyError, match="/job:ps/task:0"):
        tasks.open(Owner(again, Line(), Hello(1, "chief", 0, again, "node", 1)))


def test_a_coordinator_that_reconnects_keeps_its_session_and_old_connections_die_late():
    tasks, old, new = Ownership("ps"), Line(), Line()
    tasks.open(Owner(1, old, hello(1)))
    assert not tasks.open(Owner(1, new, hello(1)))
    assert not tasks.lost(old)
    with pytest.raises(BusyError):
        tasks.open(Owner(2, Line(), hello(2)))
    assert tasks.lost(new)
    assert tasks.open(Owner(2, Line(), hello(2)))


def test_a_coordinator_with_several_connections_is_there_while_one_of_them_is():
    tasks, store, process = Ownership("ps"), Line(), Line()
    for link in (store, process, store, process):
        tasks.open(Owner(1, link, hello(1), name="run"), several=True)
    assert not tasks.lost(process)
    assert (tasks.owner.peer, tasks.owner.alive) == (store, True)
    assert not tasks.adopt(Owner(2, Line(), hello(2), 0.0, name="run"))
    # Who asks for a promotion may do so where nobody hears when it is lost.
    tasks.open(Owner(1, Line(), hello(1)))
    tasks.open(Owner(1, process, hello(1)), several=True)
    assert not tasks.lost(store)
    assert tasks.lost(process)
    assert tasks.adopt(Owner(2, store, hello(2), 0.0, name="run"))
    assert not tasks.lost(process)
    assert tasks.lost(store)


def test_an_order_to_close_does_not_end_what_was_opened_after_it():
    tasks = Ownership("ps")
    for sent in (1.0, 4.0, 3.0):  # by three connections, which keep no order
        tasks.open(Owner(1, Line(), hello(1), sent=sent), several=True)
    for sent in (2.0, 3.5):
        with pytest.raises(StaleSessionError, match="opened again"):
            tasks.close(1, sent)
        tasks.check(1)
    assert tasks.close(1, 4.0)  # both in one turn of the loop, by one connection
    assert not tasks.close(1, 2.0)


def test_each_coordinator_has_a_clock_of_its_own():
    tasks, first, second = Ownership("ps"), Line(), Line()
    tasks.open(Owner(1, first, hello(1), name="run", sent=50.0))
    tasks.lost(first)
    assert tasks.adopt(Owner(2, second, hello(2), name="run", sent=5.0))
    assert tasks.close(2, 6.0)
    tasks.open(Owner(3, second, hello(3), sent=0.5))
    assert tasks.close(3, 0.7)


class OwnershipMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.real = Ownership("ps")
        self.owner, self.alive, self.peers = None, False, {}

    @rule(session=SESSIONS)
    def open(self, session):
        peer = Line()
        if self.owner not in (None, session) and self.alive:
            with pytest.raises(BusyError):
                self.real.open(Owner(session, peer, hello(session)))
            return
        assert self.real.open(Owner(session, peer, hello(session))) == (
            self.owner != session
        )
        self.owner, self.alive, self.peers[session] = session, True, peer

    @rule(session=SESSIONS)
    def lose(self, session):
        peer = self.peers.pop(session, None)
        is_owner = peer is not None and session == self.owner
        assert self.real.lost(peer) == is_owner
        if is_owner:
            self.alive = False

    @rule(session=SESSIONS)
    def close(self, session):
        if self.owner is None:
            assert not self.real.close(session)
        elif session == self.owner:
            assert self.real.close(session)
            self.owner = None
        else:
            with pytest.raises(StaleSessionError):
                self.real.close(session)

    @invariant()
    def only_the_owner_passes(self):
        for session in (1, 2, 3):
            if session == self.owner:
                self.real.check(session)
            else:
                with pytest.raises(StaleSessionError):
                    self.real.check(session)
        assert self.real.session == self.owner


TestOwnership = OwnershipMachine.TestCase
TestOwnership.settings = examples(50, stateful_step_count=20)

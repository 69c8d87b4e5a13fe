"""Whose word counts for which updates are over: the holder's for closures, and each
writer's for its own."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ps_callers import SESSION, Gated, caller

from zstrat.errors import (
    BusyError,
    InvalidArgumentError,
    PermissionDeniedError,
    StaleSessionError,
)
from zstrat.ps.store import CAPACITY, _ledger
from zstrat.wire import Done, Job, Pull, Push, Pushed, RaiseMark, Read, Update, UpdateOp

FAR = 2**62


def add(step, low_water=0, writer=0, part=0):
    update = [Update(1, int(UpdateOp.ADD), 0, 1)]
    return Push(SESSION, step, part, low_water, update, (np.ones(3, "f4"),), writer)


class Rig(Gated):
    def __init__(self):
        super().__init__()
        self.create({1: np.zeros(3, "f4")})
        self.worker = caller(Job.WORKER, 8)

    def applied(self, message, peer=None):
        answer = self.ask(message, peer or self.worker)
        assert isinstance(answer, Pushed)
        return answer.applied

    @property
    def value(self):
        (array,) = self.ask(Pull(SESSION, [Read(1, -1)])).arrays
        return float(array[0])


@pytest.fixture
def rig():
    return Rig()


async def test_a_worker_cannot_have_the_closures_of_others_dropped(rig):
    with pytest.raises(BusyError, match=f"step {FAR}"):
        rig.ask(add(FAR, FAR), rig.worker)
    with pytest.raises(PermissionDeniedError, match="RaiseMark"):
        rig.ask(RaiseMark(SESSION, FAR), rig.worker)
    assert rig.applied(add(CAPACITY - 1, CAPACITY - 1))
    assert [rig.applied(add(step)) for step in (1, 2, 1)] == [True, True, False]
    assert rig.value == 3


async def test_the_holder_of_the_session_says_which_closures_are_over(rig):
    assert rig.applied(add(4))
    assert rig.ask(RaiseMark(SESSION, 4)) == Done()
    assert [rig.applied(add(step)) for step in (3, 4, 5)] == [False, False, True]
    assert rig.ask(RaiseMark(SESSION, 2)) == Done()  # an old word that comes late
    assert not rig.applied(add(3))
    with pytest.raises(StaleSessionError):
        rig.ask(RaiseMark(SESSION + 1, FAR))
    assert rig.applied(add(6))


async def test_an_own_update_that_comes_again_is_applied_once(rig):
    chief, other = rig.chief, caller(Job.WORKER, 9)
    for peer in (chief, other):
        name = peer.hello.incarnation
        found = [rig.applied(add(n, 0, name), peer) for n in (0, 1, 0, 1)]
        assert found == [True, True, False, False]
    assert rig.applied(add(0))  # the closure of that number is another thing
    assert rig.value == 5
    # Number 2 was given up; what still comes of it comes too late.
    assert rig.applied(add(3, 3, chief.hello.incarnation), chief)
    assert not rig.applied(add(2, 2, chief.hello.incarnation), chief)
    assert rig.applied(add(2, 0, other.hello.incarnation), other)
    assert rig.value == 7


async def test_a_mark_of_own_updates_is_raised_by_their_writer_alone(rig):
    chief = rig.chief
    assert rig.applied(add(0, 0, chief.hello.incarnation), chief)
    with pytest.raises(PermissionDeniedError, match="worker:0"):
        rig.ask(add(FAR, FAR, chief.hello.incarnation), rig.worker)
    with pytest.raises(InvalidArgumentError):
        rig.ask(add(1, 2, chief.hello.incarnation), chief)
    assert rig.applied(add(FAR, FAR, rig.worker.hello.incarnation), rig.worker)
    assert rig.applied(add(1, 0, chief.hello.incarnation), chief)
    assert rig.applied(add(1))


async def test_the_latest_writers_are_remembered(rig, monkeypatch):
    monkeypatch.setattr(_ledger, "WRITERS", 2)
    peers = [caller(Job.WORKER, incarnation) for incarnation in (21, 22, 23)]
    for peer in (peers[0], peers[1], peers[0], peers[2], peers[0]):
        rig.ask(add(0, 0, peer.hello.incarnation), peer)
    assert rig.value == 3
    assert rig.service.statistics()["remembered_steps"] == 2


@given(st.lists(st.tuples(st.sampled_from([0, 5, 6]), st.integers(0, 6))))
def test_updates_of_all_writers_are_applied_once_each(sent):
    """Against a set that forgets nothing."""
    rig = Rig()
    peers = {0: rig.worker, 5: caller(Job.CHIEF, 5), 6: caller(Job.WORKER, 6)}
    for writer, step in sent:
        rig.ask(add(step, 0, writer), peers[writer])
    assert rig.value == len(set(sent))

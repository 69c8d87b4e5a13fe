"""Who is a worker of the cluster, as a state machine; and who reads which share."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tiers import examples

from zstrat.coordinator.membership import (
    AdmitWorker,
    InputPipelines,
    Membership,
    MoveWorker,
    RefuseWorker,
    ReleaseWorker,
)
from zstrat.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError

NUMBERS = st.integers(0, 4)
ADDRESSES = st.sampled_from([f"host:{port}" for port in range(1, 8)])
ANSWERS = st.dictionaries(NUMBERS, ADDRESSES, max_size=5)


class MembershipMachine(RuleBasedStateMachine):
    """A model of the shell: who is greeted at which address, by place."""

    def __init__(self):
        super().__init__()
        self.membership = Membership({0: "host:1", 1: "host:2"})
        self.greeted = {0: (0, "host:1"), 1: (1, "host:2")}
        self.alive = {0, 1}
        self.owner = {0: 0, 1: 1}
        """Task number to place."""
        self.removed = {}
        """Number to the address that it had."""

    def _admit(self, change):
        number, address = change.task_number, change.address
        assert self.owner.setdefault(number, change.place) == change.place
        if isinstance(change, AdmitWorker):
            assert change.place not in self.greeted
        else:
            assert change.place in self.greeted
        assert self.removed.pop(number, address) == address, "a number of another one"
        self.greeted[change.place] = number, address

    @rule(address=ADDRESSES, number=st.none() | NUMBERS)
    def add(self, address, number):
        known = {at for _, at in self.greeted.values()}
        numbers = {number for number, _ in self.greeted.values()}
        try:
            change = self.membership.add(address, number)
        except AlreadyExistsError:
            assert address in known or number in numbers
        except InvalidArgumentError:
            assert self.removed[number] != address
        else:
            assert address not in known
            assert number in (None, change.task_number)
            self._admit(change)
            self.membership.joined(change.place)
            self.alive.add(change.place)

    @rule(address=ADDRESSES)
    def remove(self, address):
        try:
            change = self.membership.remove(address)
        except NotFoundError:
            assert address not in {at for _, at in self.greeted.values()}
            return
        number, at = self.greeted.pop(change.place, (None, address))
        assert at == address
        if number is None:  # it was away
            (number,) = [n for n, i in self.owner.items() if i == change.place]
        self.removed[number] = address
        self.alive.discard(change.place)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def die(self, data):
        self.alive.discard(data.draw(st.sampled_from(sorted(self.alive))))

    @precondition(lambda self: self.greeted)
    @rule(data=st.data())
    def join(self, data):
        self.alive.add(data.draw(st.sampled_from(sorted(self.greeted))))

    @rule(answer=ANSWERS)
    def resolve(self, answer):
        lost = set(self.greeted) - self.alive
        lived = {index: self.greeted[index] for index in self.alive}
        for change in self.membership.resolved(answer, lost):
            match change:
                case AdmitWorker() | MoveWorker():
                    assert answer[change.task_number] == change.address
                    self.alive.discard(change.place)
                    self._admit(change)
                case ReleaseWorker(place):
                    assert place not in self.alive, "one that lives was let go"
                    del self.greeted[place]
                case RefuseWorker(number, words):
                    assert number in answer
                    assert words
        for index, (number, address) in lived.items():
            if index not in self.alive:  # it moved
                assert answer[number] != address
                assert address not in answer.values()

    @rule(answer=ANSWERS)
    def what_is_said_twice_changes_nothing_more(self, answer):
        self.resolve(answer)
        lost = set(self.greeted) - self.alive
        again = self.membership.resolved(answer, lost)
        assert [each for each in again if not isinstance(each, RefuseWorker)] == []

    @invariant()
    def both_know_the_same(self):
        assert self.membership.addresses == dict(self.greeted.values())
        assert self.membership.size == len(self.owner)
        assert not {number for number, _ in self.greeted.values()} & set(self.removed)


TestMembership = MembershipMachine.TestCase
TestMembership.settings = examples(30, stateful_step_count=25)


def test_a_list_that_shifts_moves_nobody_who_lives():
    membership = Membership(dict(enumerate(["a:1", "b:1", "c:1"])))
    assert membership.resolved({0: "a:1", 1: "c:1"}, set()) == []
    assert membership.resolved({0: "a:1", 1: "c:1"}, {1}) == [ReleaseWorker(1)]
    assert membership.resolved({0: "a:1", 1: "b:2", 2: "c:1"}, set()) == [
        AdmitWorker(1, 1, "b:2")
    ]
    (refusal,) = membership.resolved({0: "a:1", 1: "c:1", 2: "d:1"}, set())
    assert isinstance(refusal, RefuseWorker)
    assert refusal.task_number == 2
    assert "d:1" in refusal.reason


def test_what_was_added_and_never_came_leaves_its_number_to_the_next():
    membership = Membership({0: "a:1"})
    membership.withdraw(membership.add("b:1").place)
    assert membership.add("c:1") == AdmitWorker(1, 1, "c:1")


def test_what_never_came_is_not_there_to_be_removed():
    membership = Membership({0: "a:1"})
    membership.withdraw(membership.add("b:1").place)
    with pytest.raises(NotFoundError):
        membership.remove("b:1")
    assert membership.add("b:1") == AdmitWorker(1, 1, "b:1")
    assert membership.remove("b:1") == ReleaseWorker(1), "it is being waited for"


def test_a_bound_cluster_takes_back_whom_it_had():
    membership = Membership({0: "a:1", 1: "b:1"})
    membership.fix_places("something has a part for each")
    with pytest.raises(InvalidArgumentError):
        membership.add("c:1")
    (refusal,) = membership.resolved({0: "a:1", 1: "b:1", 2: "c:1"}, set())
    assert "something has a part for each" in refusal.reason
    membership.remove("b:1")
    assert membership.add("b:1") == AdmitWorker(1, 1, "b:1")
    assert membership.resolved({0: "a:1", 1: "b:9"}, {1}) == [MoveWorker(1, 1, "b:9")]


@given(
    st.sets(st.integers(0, 5), min_size=1),
    st.lists(st.tuples(st.booleans(), st.integers(0, 9))),
)
def test_each_share_is_read_as_evenly_as_newcomers_allow(first, changes):
    shares = InputPipelines(first)
    there = dict(zip(sorted(first), range(len(first)), strict=True))
    for comes, worker in changes:
        if not comes:
            shares.leave(worker)
            there.pop(worker, None)
            continue
        read = list(there.values())
        fewest = min(read.count(share) for share in range(shares.count))
        shares.join(worker)
        if worker not in there:
            assert read.count(shares[worker]) == fewest
        assert there.setdefault(worker, shares[worker]) == shares[worker]
    assert shares.count == len(first)
    assert {worker: shares[worker] for worker in there} == there

"""The list at rank 0, and the search for the guilty: decisions without sockets."""

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zstrat.collectives.group import (
    FORGOTTEN,
    FailureInquiry,
    GroupSeat,
    MembershipState,
    seat_of,
    verdict,
)
from zstrat.collectives.group._traffic import (
    FORMING,
    PARTS,
    key_between,
    key_of,
    number_of,
)
from zstrat.errors import (
    AlreadyExistsError,
    CollectiveTimeoutError,
    InvalidArgumentError,
)
from zstrat.wire import CallState, JoinGroup, MemberEntry

SEATS = tuple(GroupSeat("worker", rank, f"host{rank}:1") for rank in range(4))


def request(rank, *, generation=0, size=4, incarnation=None, task=None, timeout=10.0):
    made = incarnation or rank + 100
    task = task or f"/job:worker/task:{rank}"
    member = MemberEntry(task, f"host{rank}:1", "host", made, made, 0, 0, b"")
    return JoinGroup("train", generation, rank, size, member, timeout)


def rendezvous():
    numbers = count(7)
    return MembershipState("train", lambda: next(numbers))


@pytest.mark.parametrize("timeout", [float("nan"), float("inf"), -1.0, 1e308])
def test_no_rank_waits_for_ever_or_for_no_time_at_all(timeout):
    place = rendezvous()
    assert place.ask(request(1, timeout=timeout), "t1", 10.0) == []
    assert 10.0 <= place.due <= 10.0 + 7 * 86400
    assert [token for token, _ in place.tick(place.due)] == ["t1"]
    assert place.is_idle


@given(st.permutations(range(4)), st.integers(0, 4), st.lists(st.integers(0, 9)))
def test_all_get_one_answer_in_whatever_order_they_come(order, opened, generations):
    place = rendezvous()
    asked = dict(zip(range(4), generations + [0] * 4, strict=False))
    orders = []
    for at, rank in enumerate(order):
        if at == opened:
            assert place.open(SEATS) == []
        orders += place.ask(request(rank, generation=asked[rank]), f"t{rank}", 0.0)
    if opened == 4:
        assert orders == []
        return
    tokens, (answer, *others) = zip(*orders, strict=True)
    assert tokens == ("t0", "t1", "t2", "t3")
    assert others == [answer] * 3
    assert answer.generation == max(asked.values())
    assert answer.ticket == 7
    assert [seat_of(member) for member in answer.members] == list(SEATS)
    assert place.is_idle


def test_who_asks_again_is_counted_once():
    place = rendezvous()
    place.open(SEATS)
    for attempt in range(3):
        assert place.ask(request(1), attempt, 0.0) == []
    for rank in (0, 2):
        assert place.ask(request(rank), rank + 10, 0.0) == []
    formed = place.ask(request(3), 13, 0.0)
    assert [token for token, _ in formed] == [10, 2, 12, 13]


def test_who_is_gone_is_missing():
    place = rendezvous()
    place.open(SEATS)
    for rank in (0, 1, 2):
        place.ask(request(rank), rank, 0.0)
    place.leave(2)
    assert place.ask(request(3), 3, 0.0) == []
    formed = place.ask(request(2, incarnation=55), 22, 0.0)
    assert [token for token, _ in formed] == [0, 1, 22, 3]


def test_two_processes_on_one_place():
    place = rendezvous()
    place.ask(request(1), "a", 0.0)
    ((token, error),) = place.ask(request(1, incarnation=9), "b", 0.0)
    assert token == "b"
    assert isinstance(error, AlreadyExistsError)
    assert "pid 101" in str(error)
    assert "pid 9" in str(error)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (request(1, size=3), r"\b3\b.*rank 0.*\b4\b"),
        (request(4), r"\b4\b"),
        (request(2, task="/job:worker/task:7"), "/job:worker/task:2"),
    ],
)
@pytest.mark.parametrize("late", [True, False])
def test_what_does_not_fit_is_refused(wrong, words, late):
    place = rendezvous()
    orders = place.open(SEATS) if not late else place.ask(wrong, "x", 0.0)
    orders += place.open(SEATS) if late else place.ask(wrong, "x", 0.0)
    ((token, error),) = orders
    assert token == "x"
    with pytest.raises(InvalidArgumentError, match=words):
        raise error


def test_timeout_of_rank_0_ends_it_for_all():
    place = rendezvous()
    place.open(SEATS)
    place.ask(request(0, timeout=5.0), 0, 100.0)
    place.ask(request(3, timeout=50.0), 3, 100.0)
    assert place.due == 105.0
    assert place.tick(104.0) == []
    refused = dict(place.tick(105.0))
    assert refused.keys() == {0, 3}
    for error in refused.values():
        assert isinstance(error, CollectiveTimeoutError)
        assert "rank 1 (/job:worker/task:1 at host1:1), rank 2" in str(error)
        assert "rank 3" not in str(error)
    assert place.is_idle


def test_timeout_of_another_rank_ends_it_for_that_one():
    place = rendezvous()
    place.ask(request(2, timeout=1.0), 2, 0.0)
    ((token, error),) = place.tick(1.0)
    assert token == 2
    assert "Group(name=" in str(error)


def test_no_two_calls_have_the_same_key():
    keys = {key_of(None, number, part) for number in (1, 2, 3) for part in range(3)}
    keys |= {
        key_of(tag, number, part)
        for tag in ("", "a", "1")
        for number in (1, 2)
        for part in (0, 1)
    }
    keys |= {key_between(key_of(None, 1, 0), part) for part in range(3)}
    assert len(keys) == 9 + 12 + 3
    assert FORMING not in keys
    assert all(0 <= key < 2**63 for key in keys)
    assert number_of(key_of(None, 17, PARTS - 1)) == 17
    assert number_of(key_of("a", 17, 0)) is None


WORDS = "barrier()"


def waiting(*ranks):
    return CallState(WORDS, list(ranks), False, False)


def test_the_search_follows_who_waits_for_whom():
    inquiry = FailureInquiry(0, WORDS)
    assert inquiry.ask([1]) == [1]
    assert inquiry.answered(1, waiting(2, 0)) == [2]
    assert inquiry.answered(2, waiting(3, 1)) == [3]
    assert inquiry.answered(3, CallState("", [], False, False)) == []
    assert inquiry.guilty == {3: "has not called it"}


def test_who_is_silent_is_guilty():
    inquiry = FailureInquiry(0, WORDS)
    inquiry.ask([1, 2])
    inquiry.answered(1, waiting(2))
    inquiry.silent(2, "does not answer")
    error = verdict(inquiry, "barrier(), call 3", lambda rank: f"rank {rank}", 5.0)
    assert isinstance(error, CollectiveTimeoutError)
    assert "barrier(), call 3: rank 2 does not answer; rank 0 waited 5 s" in str(error)


def test_who_calls_something_else_is_quoted():
    inquiry = FailureInquiry(0, WORDS)
    inquiry.ask([1])
    inquiry.answered(1, CallState("broadcast(float32[3])", [], False, False))
    error = verdict(inquiry, "barrier(), call 3", lambda rank: f"rank {rank}", 5.0)
    assert isinstance(error, InvalidArgumentError)
    assert "rank 1 makes broadcast(float32[3]) instead" in str(error)


def test_nobody_is_guilty_if_all_wait_for_each_other():
    inquiry = FailureInquiry(0, WORDS)
    inquiry.ask([1])
    inquiry.answered(1, waiting(0))
    error = verdict(inquiry, "barrier(), call 3", lambda rank: f"rank {rank}", 5.0)
    assert isinstance(error, CollectiveTimeoutError)
    assert "all ranks take part" in str(error)


@given(st.dictionaries(st.integers(1, 9), st.lists(st.integers(0, 9)), max_size=9))
def test_every_rank_is_asked_at_most_once(graph):
    inquiry = FailureInquiry(0, WORDS)
    asked = []
    open_ = inquiry.ask([1])
    while open_:
        rank = open_.pop()
        asked.append(rank)
        open_ += inquiry.answered(rank, waiting(*graph.get(rank, [])))
    assert len(asked) == len(set(asked))
    assert 0 not in asked
    assert not inquiry.guilty


def test_a_call_that_is_over_and_forgotten_is_no_other_call():
    inquiry = FailureInquiry(0, WORDS)
    assert inquiry.answered(1, CallState(FORGOTTEN, [], True, False)) == []
    assert inquiry.answered(2, CallState(WORDS, [3], True, False)) == []
    assert not inquiry.guilty
    assert not inquiry.differs
    inquiry.answered(3, CallState("broadcast(int8[1])", [], True, False))
    assert inquiry.differs == {3: "broadcast(int8[1])"}

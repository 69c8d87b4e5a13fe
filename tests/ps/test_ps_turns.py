"""Requests that share a name are served in order of arrival; others do not wait."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zstrat.errors import BusyError
from zstrat.ps._serving import RequestTurns

names = st.sets(st.integers(0, 4), max_size=3)


@given(st.data(), st.lists(names, max_size=25))
def test_whoever_shares_a_name_is_served_in_order_and_nobody_starves(data, arrivals):
    turns, running, ended = RequestTurns[int](), {}, []
    todo = list(enumerate(arrivals))
    while todo or running:
        if todo and (not running or data.draw(st.booleans())):
            number, mine = todo.pop(0)
            free = turns.are_free(mine)
            ticket = turns.enter(number, mine)
            if turns.is_turn(ticket):
                running[number] = ticket
            # Free names are a turn; names that are all waited for by others are none.
            assert free == turns.is_turn(ticket)
        else:
            number = data.draw(st.sampled_from(sorted(running)))
            ready = turns.leave(running.pop(number))
            ended.append(number)
            running.update({ticket.request: ticket for ticket in ready})
        held = [name for number in running for name in arrivals[number]]
        assert len(held) == len(set(held))
    assert sorted(ended) == list(range(len(arrivals)))
    for late, mine in enumerate(arrivals):
        for early in range(late):
            if arrivals[early] & mine:
                assert ended.index(early) < ended.index(late)
    assert len(turns) == 0


def test_the_number_of_waiting_requests_is_bounded():
    turns = RequestTurns[str](capacity=2)
    first = turns.enter("a", [1])
    turns.enter("b", [1])
    with pytest.raises(BusyError):
        turns.enter("c", [2])
    assert [ticket.request for ticket in turns.leave(first)] == ["b"]
    turns.enter("c", [2])

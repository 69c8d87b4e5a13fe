"""A peer that asks, and does not read the answers."""

import dataclasses

import pytest
from transport_pair import SMALL, Pair, big, flow, flow_some

from zstrat.wire import Beat, CancelSteps, Done, Inspect, Pulled, Push, Update, encode
from zstrat.wire.connection import Closed, Noticed, Requested

FEW = dataclasses.replace(SMALL, unread=5000, window=2, requests=1000)


@pytest.fixture
def pair():
    return Pair(FEW)


def push(session, size=10):
    return Push(session, -1, 0, 0, [Update(1, 0, 0, 1)], (big(size, session),))


def fill(pair, answers=4):
    """As many answers of 2000 bytes wait for the client, which reads none."""
    for _ in range(answers):
        pair.client.request(Inspect(), "filling", 99.0)
    for order in flow(pair.client, pair.server):
        pair.server.reply(order.number, Pulled([1], (big(2000),)))


def resumed(pair):
    orders = []
    while pair.server.may_resume:
        orders += pair.server.resume()
    return orders


def read(pair):
    """The client reads a message; what the server makes of what it may send then."""
    flow_some(pair.server, pair.client)
    orders = [*resumed(pair), *flow(pair.client, pair.server)]
    for order in orders:
        if isinstance(order, Requested):
            pair.server.reply(order.number, Done())
    return orders


def test_what_an_unread_peer_sends_waits_and_comes_in_order(pair):
    fill(pair)
    for session in range(5):
        pair.client.notify(CancelSteps(session))
        pair.client.request(push(session, 3000), session, 99.0)  # with a body in chunks
    assert flow(pair.client, pair.server) == []
    assert resumed(pair) == []
    orders = [order for _ in range(100) for order in read(pair)]
    assert [type(each) for each in orders] == 5 * [Noticed, Requested]
    assert [each.message.session for each in orders] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert (orders[9].message.arrays[0] == big(3000, 4)).all()


def test_who_asks_on_without_reading_is_cut_off(pair):
    fill(pair)
    orders = []
    for session in range(100):
        pair.client.request(push(session, 500), session, 99.0)
        orders += flow(pair.client, pair.server)
    (closed,) = orders
    assert isinstance(closed, Closed)
    assert "does not read the answers" in closed.reason
    assert not pair.server.held
    assert not pair.server.may_resume


def test_garbage_that_was_held_back_ends_the_connection_when_its_turn_comes(pair):
    fill(pair)
    pair.client.request(Inspect(), "a", 99.0)
    assert flow(pair.client, pair.server) == []
    pair.server.received([encode(Inspect(), 999)[0]], 0.0)
    asked, closed = [order for _ in range(100) for order in read(pair)]
    assert isinstance(asked, Requested)
    assert "were lost" in closed.reason


def test_who_beats_and_reads_nothing_for_long_is_given_up(pair):
    fill(pair)
    orders, now = [], 0.0
    while now < 30.0 and not orders:
        now += 0.5
        pair.server.received([encode(Beat(False))[0]], now)
        orders += pair.server.tick(now)
    (closed,) = orders
    assert "reads nothing" in closed.reason
    assert 10.0 < now < 13.0  # twice the timeout


def test_who_reads_slowly_is_not_given_up(pair):
    fill(pair, 20)
    for now in range(1, 40):
        pair.server.received([encode(Beat(False))[0]], now)
        assert not [each for each in pair.server.tick(now) if isinstance(each, Closed)]
        if now % 6 == 0:
            flow(pair.server, pair.client)
            flow(pair.client, pair.server)  # credits


def test_a_server_that_slept_does_not_blame_who_could_not_be_served(pair):
    fill(pair)
    pair.server.received([encode(Beat(False))[0]], 60.0)
    assert pair.server.tick(60.0) == []

"""Time and breaks: when a peer is asked, given up, or waited for."""

from transport_pair import hello, kinds, new_peer

from zstrat.errors import PeerLostError
from zstrat.wire import Beat, CancelSteps, Inspect, encode
from zstrat.wire.connection import Closed


def test_a_quiet_connection_beats_and_a_busy_one_does_not(pair):
    pair.client.tick(0.9)
    assert pair.client.transmit(0.9) is None
    pair.client.tick(1.0)
    assert kinds(pair.client.transmit(1.0)) is Beat
    pair.client.notify(CancelSteps(1))
    pair.client.transmit(1.8)
    pair.client.tick(2.4)
    assert pair.client.transmit(2.4) is None


def tick_until(peer, start, end, step=0.5):
    now, orders = start, []
    while now < end:
        now += step
        orders += peer.tick(now)
    return orders


def test_silence_loses_the_peer_once_with_all_its_requests(pair):
    pair.client.request(Inspect(), "a", 99.0)
    failed, closed = tick_until(pair.client, 0.0, 20.0)
    assert isinstance(failed.error, PeerLostError)
    assert closed == Closed("it was silent for 5.5 s")
    assert pair.client.received([encode(Beat(False))[0]], 21.0) == ()


def test_a_process_that_slept_does_not_blame_its_peer(pair):
    tick_until(pair.client, 0.0, 3.0)
    assert pair.client.tick(60.0) == []
    assert [type(each) for each in tick_until(pair.client, 60.0, 80.0)] == [Closed]


def test_a_wanted_beat_is_answered(pair):
    pair.server.received([encode(Beat(True))[0]], 0.0)
    assert kinds(pair.server.transmit(0.0)) is Beat


def test_a_broken_connection_fails_the_initiators_requests_at_once(pair):
    pair.client.request(Inspect(), "a", 99.0)
    failed, closed = pair.client.disconnected("its connection broke", 1.0)
    assert isinstance(failed.error, PeerLostError)
    assert closed.broken


def test_an_acceptor_waits_for_a_peer_that_broke_off(pair):
    assert pair.server.disconnected("", 1.0) == ()
    assert pair.server.tick(3.0) == []
    pair.server.received([encode(Beat(False))[0]], 3.0)  # the alarm was false
    assert pair.server.tick(3.5) == []
    pair.server.disconnected("", 4.0)
    (closed,) = tick_until(pair.server, 4.0, 9.0)
    assert "did not come back within 2 s" in closed.reason


def test_who_does_not_greet_in_time_is_given_up():
    server = new_peer(hello("ps", 0), False)
    (closed,) = tick_until(server, 0.0, 6.0)
    assert "did not greet" in closed.reason


def test_what_was_heard_after_a_sleep_is_no_credit_for_later(pair):
    tick_until(pair.client, 0.0, 3.0)
    pair.client.received([encode(Beat(False))[0]], 600.0)  # read before the timer rang
    assert pair.client.tick(600.0) == []
    (closed,) = tick_until(pair.client, 600.0, 610.0)
    assert closed.reason == "it was silent for 5.5 s"


def test_a_process_that_slept_gives_who_broke_off_time_to_return(pair):
    tick_until(pair.server, 0.0, 3.0)
    pair.server.disconnected("", 3.0)
    assert pair.server.tick(600.0) == []  # the return may be there, and be read next
    (closed,) = tick_until(pair.server, 600.0, 610.0)
    assert "did not come back within 2 s" in closed.reason


def test_a_peer_is_heard_until_it_is_late_or_its_connection_breaks(pair):
    assert pair.server.is_heard
    assert tick_until(pair.server, 0.0, 1.5) == []
    assert pair.server.is_heard
    pair.server.tick(2.0)  # no two beats of a second each are missed for nothing
    assert not pair.server.is_heard
    pair.server.received([encode(Beat(False))[0]], 2.0)
    assert pair.server.is_heard
    pair.server.disconnected("", 2.0)
    assert not pair.server.is_heard

"""One connection, driven with frames and numbers."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from zstrat.config import Limits, Timeouts
from zstrat.errors import (
    BusyError,
    DeadlineExceededError,
    NotFoundError,
    PeerLostError,
    ProtocolError,
    VersionMismatchError,
)
from zstrat.wire import (
    PROTOCOL,
    Again,
    Beat,
    CancelSteps,
    Chunk,
    Credit,
    Done,
    Fetched,
    Goodbye,
    Hello,
    Inspect,
    Pulled,
    Push,
    Update,
    decode_header,
    encode,
)
from zstrat.wire._body import Assembly, aligned, allocate, cut
from zstrat.wire._codec import ArraySpec
from zstrat.wire._greeting import mismatch
from zstrat.wire._orders import (
    Answered,
    Closed,
    Failed,
    Greeted,
    Noticed,
    Opened,
    Requested,
    State,
)
from zstrat.wire._peer import Peer, failure

TIMES = Timeouts(beat=1.0, patience=5.0, reconnect=2.0, handshake=4.0)
SMALL = Limits(chunk=1000, window=4, requests=8, streams=2)


def hello(job="worker", index=0, incarnation=7, **changes):
    given = Hello(PROTOCOL, job, index, incarnation, "a-host", 42, {"python": "3.11.7"})
    return dataclasses.replace(given, **changes)


def new_peer(me, initiator, limits=SMALL, expect=None):
    return Peer(
        "/job:ps/task:0",
        me,
        initiator=initiator,
        judge=lambda other: mismatch(me, other, expect),
        timeouts=TIMES,
        limits=limits,
        now=0.0,
    )


def flow(source, target, now=0.0):
    """Carries all that ``source`` may send to ``target``; the orders there."""
    orders = []
    while (frames := source.transmit(now)) is not None:
        orders += target.received([bytes(frame) for frame in frames], now)
    return orders


def flow_some(source, target, now=0.0):
    """One message from ``source`` to ``target``; None if there was none."""
    frames = source.transmit(now)
    return None if frames is None else target.received(frames, now)


class Pair:
    """A worker's link to a ps, greeted."""

    def __init__(self, limits=SMALL):
        self.client = new_peer(hello("worker", 1), True, limits)
        self.server = new_peer(hello("ps", 0), False, limits)
        (greeted,) = flow(self.client, self.server)
        self.server.accept(greeted.hello, 0.0)
        assert flow(self.server, self.client) == [Opened(hello("ps", 0))]

    def both_ways(self, now=0.0):
        """Carries everything until nobody has anything to say."""
        at_server, at_client = [], []
        while True:
            there = flow_some(self.client, self.server, now)
            back = flow_some(self.server, self.client, now)
            at_server += there or ()
            at_client += back or ()
            if there is None and back is None:
                return at_server, at_client


@pytest.fixture
def pair():
    return Pair()


def kinds(frames):
    return decode_header(frames[0], SMALL).message_kind


# ---- greeting ----


def test_the_initiator_speaks_first_and_both_know_each_other(pair):
    assert pair.client.state is pair.server.state is State.OPEN
    assert pair.client.hello == hello("ps", 0)
    assert pair.server.name == "worker:1 (host a-host, pid 42)"


def test_another_protocol_is_refused_with_words_on_both_sides():
    client = new_peer(hello("worker", 1, protocol=99), True)
    server = new_peer(hello("ps", 0), False)
    (closed,) = flow(client, server)
    assert isinstance(closed.refusal, VersionMismatchError)
    (told,) = flow(server, client)
    assert isinstance(told.refusal, VersionMismatchError)
    assert "speaks protocol 99" in str(told.refusal)
    assert "install the same zstrat" in str(told.refusal)


def test_the_wrong_task_behind_an_address_is_named():
    client = new_peer(hello("chief", 0), True, expect=("ps", 0))
    server = new_peer(hello("worker", 3), False)
    (greeted,) = flow(client, server)
    server.accept(greeted.hello, 0.0)
    (closed,) = flow(server, client)
    assert "expected ps:0, but worker:3" in str(closed.refusal)
    (told,) = flow(client, server)
    assert told.refusal is not None


@pytest.mark.parametrize(
    ("one", "other", "fits"),
    [
        ("chief", "worker", False),
        ("worker", "chief", False),
        ("chief", "ps", False),
        ("worker", "ps", True),
        ("observer", "worker", True),
    ],
)
def test_code_travels_only_between_equal_pythons(one, other, fits):
    me = hello(one, versions={"python": "3.11.7"})
    you = hello(other, versions={"python": "3.12.1"})
    error = mismatch(me, you)
    assert (error is None) is fits
    assert fits or "same minor version" in str(error)


def test_an_unknown_job_is_refused():
    assert isinstance(mismatch(hello(), hello("janitor")), ProtocolError)


def test_whoever_does_not_greet_is_told_and_forgotten():
    server = new_peer(hello("ps", 0), False)
    (closed,) = server.received([encode(Beat(False))[0]], 0.0)
    assert "expected Hello, got Beat" in closed.reason
    assert kinds(server.transmit(0.0)) is Goodbye


# ---- requests ----


def test_requests_are_answered_by_number_in_any_order(pair):
    pair.client.request(Inspect(), "a", 10.0)
    pair.client.request(Inspect(), "b", 10.0)
    first, second = flow(pair.client, pair.server)
    pair.server.reply(second.number, Pulled([2], ()))
    pair.server.reply(first.number, Done())
    assert flow(pair.server, pair.client) == [
        Answered("b", Pulled([2], ())),
        Answered("a", Done()),
    ]


def test_a_second_reply_is_ignored(pair):
    pair.client.request(Inspect(), "a", 10.0)
    (request,) = flow(pair.client, pair.server)
    pair.server.reply(request.number, Done())
    pair.server.reply(request.number, Pulled([1], ()))
    assert flow(pair.server, pair.client) == [Answered("a", Done())]


def test_a_failure_arrives_as_the_error(pair):
    pair.client.request(Inspect(), "a", 10.0)
    (request,) = flow(pair.client, pair.server)
    pair.server.reply(request.number, failure(NotFoundError("variable 7")))
    ((token, error),) = flow(pair.server, pair.client)
    assert token == "a"
    assert isinstance(error, NotFoundError)
    assert str(error) == "variable 7"


def test_a_reply_that_cannot_be_sent_is_a_failure(pair):
    pair.client.request(Inspect(), "a", 10.0)
    (request,) = flow(pair.client, pair.server)
    pair.server.reply(request.number, Fetched((np.array(["text"]),)))
    ((_, error),) = flow(pair.server, pair.client)
    assert isinstance(error, TypeError)


def test_a_deadline_passes_once_and_the_late_answer_is_dropped(pair):
    pair.client.request(Inspect(), "a", 2.0)
    pair.client.request(Inspect(), "b", 50.0)
    first, _ = flow(pair.client, pair.server)
    assert pair.client.due <= 2.0
    assert pair.client.tick(1.9) == []
    ((token, error),) = pair.client.tick(2.0)
    assert token == "a"
    assert isinstance(error, DeadlineExceededError)
    assert "Inspect" in str(error)
    pair.server.reply(first.number, Done())
    assert flow(pair.server, pair.client) == []
    assert pair.client.late == 1


def test_too_many_open_requests_are_refused_on_both_sides(pair):
    for token in range(8):
        pair.client.request(Inspect(), token, 10.0)
    with pytest.raises(BusyError, match="8 requests are open"):
        pair.client.request(Inspect(), 8, 10.0)
    server = new_peer(hello("ps", 0), False, Limits(requests=2))
    client = new_peer(hello("worker", 1), True)
    (greeted,) = flow(client, server)
    server.accept(greeted.hello, 0.0)
    flow(server, client)
    for token in "abc":
        client.request(Inspect(), token, 10.0)
    assert len(flow(client, server)) == 2
    ((token, error),) = flow(server, client)
    assert token == "c"
    assert isinstance(error, BusyError)


# ---- bodies ----


def big(nbytes, seed=0):
    return np.random.default_rng(seed).integers(0, 255, nbytes, np.uint8)


def test_a_later_small_message_does_not_overtake_a_large_one(pair):
    pair.client.notify(Push(1, -1, 0, 0, [Update(1, 0, 0, 1)], (big(300_000),)))
    pair.client.notify(CancelSteps(5))
    at_server, _ = pair.both_ways()
    assert [type(order.message) for order in at_server] == [Push, CancelSteps]
    assert np.array_equal(at_server[0].message.arrays[0], big(300_000))


def test_no_more_chunks_than_the_window_without_credit(pair):
    pair.client.notify(Push(1, -1, 0, 0, [Update(1, 0, 0, 1)], (big(100_000),)))
    sent = []
    while (frames := pair.client.transmit(0.0)) is not None:
        sent.append(kinds(frames))
    assert sent == [Push, *[Chunk] * SMALL.window]
    pair.client.received([encode(Credit(0, 2))[0]], 0.0)
    assert kinds(pair.client.transmit(0.0)) is Chunk
    assert kinds(pair.client.transmit(0.0)) is Chunk
    assert pair.client.transmit(0.0) is None


def test_a_beat_passes_a_body_that_waits_for_credit(pair):
    pair.client.notify(Push(1, -1, 0, 0, [Update(1, 0, 0, 1)], (big(100_000),)))
    while pair.client.transmit(0.0) is not None:
        pass
    pair.client.tick(1.0)
    assert kinds(pair.client.transmit(1.0)) is Beat


def test_an_acceptor_gives_no_credit_while_many_bodies_wait_for_their_outcome(pair):
    push = Push(1, -1, 0, 0, [Update(1, 0, 0, 1)], (big(3_000),))
    for token in range(6):
        pair.client.request(push, token, 99.0)
    at_server, _ = pair.both_ways()
    # Two are served, the most that may be; the window lets one more through.
    assert len(at_server) < 6
    while at_server:
        for order in at_server:
            pair.server.reply(order.number, Done())
        at_server, answers = pair.both_ways()
    assert answers[-1].token == 5


@given(
    sizes=st.lists(st.integers(0, 5_000), max_size=12),
    chunk=st.integers(1, 3_000),
)
def test_a_body_arrives_as_it_was(sizes, chunk):
    raws = [big(size, seed) for seed, size in enumerate(sizes)]
    specs = [ArraySpec(np.dtype(np.uint8), (size,)) for size in sizes]
    assembly = Assembly(specs, allocate)
    for offset, data in cut(raws, chunk):
        assert not assembly.is_complete
        assembly.take(offset, data)
    assert assembly.is_complete
    for raw, array in zip(raws, assembly.arrays(), strict=True):
        assert np.array_equal(raw, array)
        assert not array.size or array.ctypes.data % 64 == 0
        assert not array.flags.writeable


@pytest.mark.parametrize(
    ("offset", "size"), [(0, 0), (0, 201), (64, 10), (1, 10), (300, 1)]
)
def test_a_chunk_out_of_place_is_refused(offset, size):
    assembly = Assembly([ArraySpec(np.dtype(np.uint8), (200,))], allocate)
    with pytest.raises(ProtocolError, match="body: expected"):
        assembly.take(offset, bytes(size))


def test_aligned():
    assert [aligned(n) for n in (0, 1, 64, 65)] == [0, 64, 64, 128]


def test_a_lost_chunk_ends_the_connection(pair):
    pair.client.request(
        Push(1, -1, 0, 0, [Update(1, 0, 0, 1)], (big(9_000),)), "a", 99.0
    )
    frames = []
    while (each := pair.client.transmit(0.0)) is not None:
        frames.append(each)
    del frames[2]
    orders = [order for each in frames for order in pair.server.received(each, 0.0)]
    assert [type(order) for order in orders] == [Closed]
    assert "expected the chunk at 1000, got 2000" in orders[0].reason
    failed, closed = flow(pair.server, pair.client)
    assert isinstance(failed.error, PeerLostError)
    assert "you broke the protocol" in closed.reason


def test_a_lost_message_ends_the_connection(pair):
    pair.client.notify(CancelSteps(1))
    pair.client.notify(CancelSteps(2))
    pair.client.transmit(0.0)
    (closed,) = flow(pair.client, pair.server)
    assert "expected message 1, got 2: some were lost" in closed.reason


def test_a_body_without_memory_ends_the_connection(pair):
    def refuse(nbytes):
        raise MemoryError

    pair.server._inbox._allocate = refuse
    pair.client.notify(Push(1, -1, 0, 0, [Update(1, 0, 0, 1)], (big(9_000),)))
    (closed,) = flow(pair.client, pair.server)
    assert "no memory for the 9000 bytes" in closed.reason


# ---- time ----


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


def test_goodbye_ends_both_sides_with_the_reason(pair):
    pair.client.request(Inspect(), "a", 99.0)
    failed, _ = pair.client.leave("the program ended")
    assert isinstance(failed.error, PeerLostError)
    assert not failed.error.left  # it is we who go
    assert flow(pair.client, pair.server) == [
        Closed("it left: the program ended", left=True)
    ]


def test_who_waits_hears_that_the_other_left_on_purpose(pair):
    pair.client.request(Inspect(), "a", 99.0)
    pair.server.leave("it was shut down")
    failed, closed = flow(pair.server, pair.client)
    assert failed.error.left
    assert closed.left
    again = type(failed.error)(*failed.error.args)
    assert (again.peer, again.reason, again.left) == (
        failed.error.peer,
        failed.error.reason,
        True,
    )


# ---- hostile ----


@given(st.lists(st.binary(max_size=60), min_size=1, max_size=4))
def test_garbage_is_refused_and_never_raises(frames):
    pair = Pair()
    for peer in (pair.client, pair.server, new_peer(hello("ps"), False)):
        for order in peer.received(frames, 0.0):
            assert isinstance(order, Closed)


HOSTILE = [
    [encode(Chunk(3, 0))[0], b"x"],
    [encode(hello())[0]],
    [encode(Beat(False), 2)[0]],
    [encode(CancelSteps(1), 0)[0]],
    [encode(CancelSteps(1), 2)[0], b"surplus"],
    [encode(Fetched((big(10),)), 2)[0], b"short"],
]


@pytest.mark.parametrize("frames", HOSTILE)
def test_a_breach_of_the_rules_ends_the_connection(pair, frames):
    (closed,) = pair.server.received(frames, 0.0)
    assert "it broke the protocol" in closed.reason
    assert kinds(pair.server.transmit(0.0)) is Goodbye


class Network(RuleBasedStateMachine):
    """Frames between two peers get lost, doubled and reordered: nothing raises, nothing
    is delivered twice, and what is delivered comes in the order of sending."""

    def __init__(self):
        super().__init__()
        self.pair, self.now, self.sent = Pair(), 0.0, 0
        self.wire = {True: [], False: []}
        self.delivered, self.served, self.outcomes = [], [], []

    def collect(self):
        for up, peer in ((True, self.pair.client), (False, self.pair.server)):
            while (frames := peer.transmit(self.now)) is not None:
                self.wire[up].append([bytes(frame) for frame in frames])

    def obey(self, orders):
        for order in orders:
            match order:
                case Requested(number, message):
                    self.delivered.append(message.session)
                    self.served.append(number)
                case Noticed(message):
                    self.delivered.append(message.session)
                case Answered(token) | Failed(token):
                    self.outcomes.append(token)
                case Closed() | Greeted() | Opened():
                    pass

    def send(self, how, size):
        if self.pair.client.state is not State.OPEN:
            return
        self.sent += 1
        update = [Update(1, 0, 0, 1)]
        message = Push(self.sent, -1, 0, 0, update, (big(size, self.sent),))
        try:
            if how:
                self.pair.client.request(message, self.sent, self.now + 20)
            else:
                self.pair.client.notify(message)
        except BusyError:
            assert how

    @rule(how=st.booleans(), size=st.integers(0, 4_000))
    def say(self, how, size):
        self.send(how, size)
        self.collect()

    @rule(up=st.booleans(), count=st.integers(1, 20))
    def carry(self, up, count):
        target = self.pair.server if up else self.pair.client
        for _ in range(min(count, len(self.wire[up]))):
            self.obey(target.received(self.wire[up].pop(0), self.now))
        self.collect()

    @rule()
    def answer(self):
        while self.served:
            self.pair.server.reply(self.served.pop(), Pulled([1], (big(2_000),)))
        self.collect()

    @rule(up=st.booleans(), what=st.sampled_from(["lose", "double", "swap"]))
    def disturb(self, up, what):
        wire = self.wire[up]
        if what == "lose" and wire:
            del wire[0]
        elif what == "double" and wire:
            wire.insert(0, wire[0])
        elif what == "swap" and len(wire) > 1:
            wire[0], wire[1] = wire[1], wire[0]

    @rule(seconds=st.sampled_from([0.5, 1.0]))
    def wait(self, seconds):
        self.now += seconds
        for peer in (self.pair.client, self.pair.server):
            self.obey(peer.tick(self.now))
        self.collect()

    @invariant()
    def nothing_twice_and_in_order(self):
        assert self.delivered == sorted(set(self.delivered))
        assert len(self.outcomes) == len(set(self.outcomes))

    def teardown(self):
        self.obey(self.pair.client.leave("the end"))
        assert self.pair.client.state is State.CLOSED
        assert len(self.outcomes) == len(set(self.outcomes))


TestNetwork = Network.TestCase
TestNetwork.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_more_arrays_than_frames_travel_as_one_body():
    pair = Pair(dataclasses.replace(SMALL, frames=3, chunk=2000))
    arrays = tuple(np.full(k % 3, k, np.int16) for k in range(40))
    message = Push(1, -1, 0, 0, [Update(1, 0, 0, 40)], arrays)
    pair.client.request(message, "a", 9.0)
    (requested,), _ = pair.both_ways()
    assert isinstance(requested, Requested)
    for sent, got in zip(arrays, requested.message.arrays, strict=True):
        np.testing.assert_array_equal(got, sent)
    pair.server.reply(requested.number, Fetched((np.zeros(0, np.int8),) * 5))
    _, (answered,) = pair.both_ways()
    assert [array.shape for array in answered.message.arrays] == [(0,)] * 5


def test_more_frames_than_agreed_end_the_connection():
    pair = Pair(dataclasses.replace(SMALL, frames=3))
    header, raws = encode(Fetched((np.zeros(1, np.int8),) * 4), 2)
    (closed,) = pair.server.received([header, *raws], 0.0)
    assert "at most 3 frames, got 4" in closed.reason


def test_a_body_that_was_not_kept_is_sent_again_under_a_new_number(pair):
    message = Push(1, -1, 0, 0, [Update(1, 0, 0, 1)], (big(5000, 3),))
    pair.client.request(message, "a", 9.0)
    (first,), _ = pair.both_ways()
    pair.server.reply(first.number, Again())
    (second,), _ = pair.both_ways()
    assert second.number > first.number
    np.testing.assert_array_equal(second.message.arrays[0], big(5000, 3))
    pair.server.reply(second.number, Done())
    _, (answered,) = pair.both_ways()
    assert answered == Answered("a", Done())


def test_the_deadline_of_a_request_that_is_sent_again_stays(pair):
    message = Push(1, -1, 0, 0, [Update(1, 0, 0, 1)], (big(5000),))
    pair.client.request(message, "a", 3.0)
    (requested,), _ = pair.both_ways()
    pair.server.reply(requested.number, Again())
    pair.both_ways()
    (failed,) = pair.client.tick(3.5)
    assert failed.token == "a"
    assert isinstance(failed.error, DeadlineExceededError)


def test_what_left_whole_cannot_be_wanted_again(pair):
    pair.client.request(Inspect(), "a", 9.0)
    (requested,), _ = pair.both_ways()
    pair.server.reply(requested.number, Again())
    _, (failed, closed) = pair.both_ways()
    assert failed.token == "a"
    assert "Again to Inspect, which was not sent in chunks" in closed.reason


class Sums:
    """Takes bytes as they come; the first time it wants them once more."""

    def __init__(self, answers):
        self.answers, self.total, self.places = answers, 0, []

    def take(self, memory, offset, chunk):
        self.total += sum(chunk)
        self.places.append((len(memory), offset))

    def finish(self):
        self.answers.append(self.total)
        return Again() if len(self.answers) == 1 else Done()


def test_a_sink_gets_the_body_of_a_request_and_nothing_else():
    pair, answers, asked, sinks = Pair(), [], [], []

    def absorb(message, specs):
        asked.append((message.session, message.arrays, [spec.nbytes for spec in specs]))
        sinks.append(Sums(answers))
        return sinks[-1]

    pair.server._inbox._absorb = absorb
    update = [Update(1, 0, 0, 1)]
    pair.client.notify(Push(4, -1, 0, 0, update, (big(5000),)))  # a notice
    pair.client.request(Push(5, -1, 0, 0, update, (big(500),)), "s", 9.0)  # in a frame
    pair.client.request(Push(6, -1, 0, 0, update, (np.ones(2500, "u1"),)), "a", 9.0)
    orders, _ = pair.both_ways()
    assert [order.message.session for order in orders] == [4, 5, 6]
    for _ in range(2):
        sink = orders[-1].sink
        assert orders[-1].message.arrays == ()
        assert sink.places == [(2500, 0), (2500, 1000), (2500, 2000)]
        pair.server.reply(orders[-1].number, sink.finish())
        orders, answered = pair.both_ways()
    assert answered == [Answered("a", Done())]
    assert answers == [2500, 2500]
    assert asked == [(6, (), [2500])] * 2

"""Bodies of messages: cut, put together, paid for with credit, sent again."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transport_pair import SMALL, Pair, allocate, big, flow, kinds

from zstrat.errors import DeadlineExceededError, PeerLostError, ProtocolError
from zstrat.wire import (
    Again,
    ArraySpec,
    Beat,
    CancelSteps,
    Chunk,
    Credit,
    Done,
    Fetched,
    Goodbye,
    Inspect,
    Push,
    Update,
    encode,
)
from zstrat.wire.connection import Answered, Closed, Requested, aligned
from zstrat.wire.connection._body import Assembly, cut


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


class SlowChannel:
    """Shared memory into which a body is copied step by step."""

    unread = ()

    def begin(self, raws, nbytes):
        return 4096, iter([None] * (len(raws) + 1))

    def close(self):
        pass


def test_a_body_leaves_when_all_of_it_was_copied():
    client = Pair(channel=SlowChannel()).client
    large = np.zeros(64 * 2**20, np.uint8), np.zeros(1, np.uint8)
    push = Push(1, -1, 0, 0, [Update(1, 0, 0, 2)], large)
    for message in (push, CancelSteps(5), push):
        client.notify(message)
    steps = 0
    while client.outbox.is_copying:
        assert not client.outbox.is_ready
        assert client.transmit(0.0) is None
        steps += 1
        client.tick(float(steps))
        assert kinds(client.transmit(float(steps))) is Beat
        client.outbox.copy()
    assert steps == 4
    assert [kinds(client.transmit(4.0)) for _ in range(2)] == [Push, CancelSteps]
    assert client.outbox.is_copying
    client.leave("enough")
    assert not client.outbox.is_copying
    client.outbox.copy()
    assert kinds(client.transmit(4.0)) is Goodbye
    assert client.transmit(4.0) is None


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
    with pytest.raises(ProtocolError):
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

"""What breaks the rules, and a network that does as it likes."""

import dataclasses
import math
import tracemalloc

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tiers import examples
from transport_pair import SMALL, Pair, big, hello, kinds, new_peer

from zstrat.errors import BusyError
from zstrat.transport._admission import FENCED, Roster
from zstrat.wire import (
    Beat,
    CancelSteps,
    Chunk,
    Fetched,
    Goodbye,
    Inspect,
    Mapped,
    Offer,
    Pulled,
    Push,
    Update,
    encode,
)
from zstrat.wire.connection import (
    Answered,
    Closed,
    Failed,
    Greeted,
    Noticed,
    Opened,
    OrderState,
    Requested,
    mismatch,
)


@given(st.lists(st.binary(max_size=60), min_size=1, max_size=4))
def test_garbage_is_refused_and_never_raises(frames):
    pair = Pair()
    for peer in (pair.client, pair.server, new_peer(hello("ps"), False)):
        for order in peer.received(frames, 0.0):
            assert isinstance(order, Closed)


HOSTILE = [
    [msgpack.packb([Offer.kind, 0, 3, 8192, 100_000])],  # the word would follow
    [msgpack.packb([Mapped.kind, 0, 100_000])],
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
        if self.pair.client.state is not OrderState.OPEN:
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
        assert self.pair.client.state is OrderState.CLOSED
        assert len(self.outcomes) == len(set(self.outcomes))


TestNetwork = Network.TestCase


TestNetwork.settings = examples(60, stateful_step_count=40)


def test_memory_is_offered_once(pair):
    offer = encode(Offer(3, 8192, b"x" * 16))[0]
    assert pair.server.received([offer], 0.0) == ()
    (closed,) = pair.server.received([offer], 0.0)
    assert "offered memory twice" in closed.reason


def test_who_asks_on_and_reads_nothing_is_cut_off(monkeypatch):
    monkeypatch.setattr("zstrat.wire.connection._peer.QUEUE", 5)
    pair = Pair(dataclasses.replace(SMALL, requests=2))
    ordered = [encode(Inspect(), 2 * number + 1)[0] for number in range(1, 9)]
    orders = [order for each in ordered for order in pair.server.received([each], 0.0)]
    assert [type(order) for order in orders] == [Requested, Requested, Closed]
    assert "does not read" in orders[-1].reason


@pytest.mark.parametrize(
    "claim",
    [
        {"host": "h" * 100_000, "protocol": 99},
        {"versions": {"zstrat": "9" * 100_000}, "protocol": 99},
        {"job": "j" * 100_000},
        {"versions": {"python": "3." + "1" * 100_000}},
    ],
)
def test_what_a_stranger_calls_itself_is_cut(claim):
    me, you = hello("chief", 0), hello(**{"job": "worker", "index": 1, **claim})
    assert len(str(mismatch(me, you))) < 600


@pytest.mark.parametrize(
    "claim",
    [
        {"host": "a-host\n2026-01-01 all is well"},
        {"host": "\x1b[2J"},
        {"host": "h" * 256},
        {"versions": {"python": "3.11\r"}},
        {"versions": {str(number): "1" for number in range(17)}},
    ],
)
def test_who_cannot_be_named_on_one_line_is_refused(claim):
    me, you = hello("ps", 0), hello(**{"job": "worker", "index": 1, **claim})
    words = str(mismatch(me, you))
    assert "cannot be remembered" in words
    assert words.isprintable()


def test_what_a_peer_says_when_it_leaves_is_one_line(pair):
    said = encode(Goodbye("bye\n\x1b[31mERROR"))[0]
    (closed,) = pair.server.received([said], 0.0)
    assert closed.reason == r"it left: bye\x0a\x1b[31mERROR"


@pytest.mark.parametrize(
    ("said", "heard"),
    [(60.0, 60.0), (-1.0, 0.0), (1e300, 0.0), (math.inf, 0.0), (math.nan, 0.0)],
)
def test_nobody_is_waited_for_longer_than_a_day(pair, said, heard):
    (closed,) = pair.server.received([encode(Goodbye("bye", said))[0]], 0.0)
    assert (closed.left, closed.returns) == (True, heard)


def test_of_those_that_were_replaced_only_a_line_is_kept():
    roster = Roster()
    versions = {str(number): "1" * 250 for number in range(16)}
    tracemalloc.start()
    for incarnation in range(1, 2000):
        newcomer = hello("worker", 0, incarnation, versions=dict(versions))
        roster.admit(newcomer, lambda _: False)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < FENCED * 1000

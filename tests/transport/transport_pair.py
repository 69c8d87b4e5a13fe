"""Two ends of one connection, driven with frames and numbers."""

import dataclasses

import numpy as np

from zstrat.config import Limits, Timeouts
from zstrat.wire import PROTOCOL, Hello, decode_header
from zstrat.wire.connection import Opened, Peer, mismatch

TIMES = Timeouts(beat=1.0, patience=5.0, reconnect=2.0, handshake=4.0)


SMALL = Limits(chunk=1000, window=4, requests=8, streams=2)


def hello(job="worker", index=0, incarnation=7, **changes):
    given = Hello(PROTOCOL, job, index, incarnation, "a-host", 42, {"python": "3.11.7"})
    return dataclasses.replace(given, **changes)


def new_peer(me, initiator, limits=SMALL, expect=None, lane=None):
    return Peer(
        "/job:ps/task:0",
        me,
        initiator=initiator,
        mismatch=lambda other: mismatch(me, other, expect),
        timeouts=TIMES,
        limits=limits,
        now=0.0,
        lane=lane,
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

    def __init__(self, limits=SMALL, lane=None):
        self.client = new_peer(hello("worker", 1), True, limits, lane=lane)
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


def kinds(frames):
    return decode_header(frames[0], SMALL).message_kind


def big(nbytes, seed=0):
    return np.random.default_rng(seed).integers(0, 255, nbytes, np.uint8)

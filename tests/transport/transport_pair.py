"""Two ends of one connection, driven with frames and numbers."""

import dataclasses

import numpy as np

from zstrat.config import Limits, Timeouts
from zstrat.transport import Pool
from zstrat.wire import PROTOCOL, Hello, decode_header
from zstrat.wire.connection import Carried, Opened, Peer, mismatch

TIMES = Timeouts(beat=1.0, liveness=5.0, reconnect=2.0, handshake=4.0)


class Unknown:
    """A network connection of which the system says nothing."""

    def carried(self):
        return Carried()

    def is_held_by(self, pid):
        return False


UNKNOWN = Unknown()
allocate = Pool(0).allocate
SMALL = Limits(chunk=1000, window=4, requests=8, streams=2)


def hello(job="worker", index=0, incarnation=7, **changes):
    given = Hello(PROTOCOL, job, index, incarnation, "a-host", 42, {"python": "3.11.7"})
    return dataclasses.replace(given, **changes)


def new_peer(me, initiator, limits=SMALL, expect=None, channel=None, **more):
    return Peer(
        "/job:ps/task:0",
        me,
        initiator=initiator,
        mismatch=lambda other: mismatch(me, other, expect),
        limits=limits,
        now=0.0,
        channel=channel,
        **{"timeouts": TIMES, "allocate": allocate, "carrier": UNKNOWN, **more},
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

    def __init__(self, limits=SMALL, channel=None):
        self.client = new_peer(hello("worker", 1), True, limits, channel=channel)
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


class Carrier:
    """What the system knows of a connection, as the test says."""

    def __init__(self, carried=Carried):
        self.carried, self.holder, self.asked = carried, None, 0

    def is_held_by(self, pid):
        self.asked += 1
        return pid == self.holder


class SlowLine:
    """One direction of a line: so many bytes a second, in order; messages arrive when
    they are whole. ``kernel`` of them wait where the system counts them as queued."""

    def __init__(self, rate, kernel=256 * 1024):
        self.rate, self._kernel = rate, kernel
        self._messages, self._moved, self.carried = [], 0.0, 0
        self._end = 0

    def send(self, frames):
        frames = [bytes(frame) for frame in frames]
        self._end += sum(map(len, frames))
        self._messages.append((self._end, frames))

    def pass_on(self, seconds):
        """Messages that are whole after so many seconds more."""
        self._moved = min(self._end, self._moved + seconds * self.rate)
        self.carried = int(self._moved)
        whole = [frames for end, frames in self._messages if end <= self._moved]
        del self._messages[: len(whole)]
        return whole

    @property
    def queued(self):
        return min(self._kernel, self._end - self.carried)


class SlowPair:
    """A client and a server that have greeted, over a slow line, on virtual time."""

    STEP = 0.25

    def __init__(self, rate, limits, timeouts):
        self.now = 0.0
        self._out, self._back = SlowLine(rate), SlowLine(rate)
        given = {"limits": limits, "timeouts": timeouts}
        self.client = new_peer(
            hello("worker", 1), True, carrier=Carrier(self._carried_there), **given
        )
        self.server = new_peer(
            hello("ps", 0), False, carrier=Carrier(self._carried_here), **given
        )
        (greeted,) = flow(self.client, self.server)
        self.server.accept(greeted.hello, 0.0)
        flow(self.server, self.client)
        self.is_client_deaf = False

    def cut(self):
        """Nothing passes from now on."""
        self._out.rate = self._back.rate = 0

    def pass_time(self, seconds):
        """Orders of the client, and of the server, in that time."""
        at_client, at_server = [], []
        for _ in range(round(seconds / self.STEP)):
            self.now += self.STEP
            for peer, line in ((self.client, self._out), (self.server, self._back)):
                self._say(peer, line)
            for peer, line, orders in (
                (self.server, self._out, at_server),
                (self.client, self._back, at_client),
            ):
                for frames in line.pass_on(self.STEP):
                    if peer is self.server or not self.is_client_deaf:
                        orders += peer.received(frames, self.now)
                orders += peer.tick(self.now)
        return at_client, at_server

    def _say(self, peer, line):
        while (frames := peer.transmit(self.now)) is not None:
            line.send(frames)

    def _carried_there(self):
        return Carried(self._back.carried, self._out.carried, self._out.queued)

    def _carried_here(self):
        return Carried(self._out.carried, self._back.carried, self._back.queued)

"""What sockets reach between ranks of one host, plain ones and those of ZeroMQ: the
floors of the TCP transport.

A ring: each rank sends to the next one and receives from the one before, in the order
of Patarasuk and Yuan (2009): ``size - 1`` hops that add, ``size - 1`` that copy. One
thread, sockets that do not block, numpy adds what has come while it is in the cache. It
has no framing and no deadlines, finds no mistakes, and hangs when a rank stops.
"""

from __future__ import annotations

import select
import socket
from typing import Final

import numpy as np
import zmq

MiB = 2**20
CHUNK: Final = MiB
"""The most that is taken from a socket at once: it is still in the cache when added.
With ZeroMQ a message: longer ones wait for fresh memory, page by page."""


class Ring:
    """One rank of a ring of plain sockets, with a line to the next and one from the one
    before."""

    def __init__(
        self, rank: int, size: int, following: socket.socket, before: socket.socket
    ) -> None:
        self._rank, self._size = rank, size
        self._next, self._before = following, before
        for line in (following, before):
            line.setblocking(False)
        self._scratch = np.empty(0, np.float32)

    def sum(self, array: np.ndarray) -> None:
        """Sums ``array`` (float32, one axis) over all ranks, in place."""
        parts = np.array_split(array, self._size)
        if self._scratch.size < parts[0].size:
            self._scratch = np.zeros(parts[0].size, np.float32)
        for hop in range(2 * (self._size - 1)):
            out = parts[(self._rank - hop) % self._size]
            into = parts[(self._rank - hop - 1) % self._size]
            self._hop(out, into, is_sum=hop < self._size - 1)

    def close(self) -> None:
        self._next.close()
        self._before.close()

    def _hop(self, out: np.ndarray, into: np.ndarray, *, is_sum: bool) -> None:
        """Sends one part while another comes in: added to what is there, or in its
        place."""
        came = self._scratch[: into.size] if is_sum else into
        left, room = _bytes(out), _bytes(came)
        got = added = 0
        while left or got < len(room):
            sent = self._send(left) if left else 0
            left = left[sent:]
            new = self._receive(room[got : got + CHUNK]) if got < len(room) else 0
            got += new
            if is_sum:
                whole = got // into.itemsize
                total = into[added:whole]
                np.add(total, came[added:whole], out=total)
                added = whole
            if not sent and not new:
                waiting_in = [self._before] if got < len(room) else []
                select.select(waiting_in, [self._next] if left else [], [])

    def _send(self, view: memoryview) -> int:
        try:
            return self._next.send(view[:CHUNK])
        except BlockingIOError:
            return 0

    def _receive(self, room: memoryview) -> int:
        try:
            count = self._before.recv_into(room)
        except BlockingIOError:
            return 0
        if not count:
            raise ConnectionError("the rank before closed its line")
        return count


def joined(rank: int, addresses: list[str]) -> Ring:
    """The ring of these addresses (``host:port``), when all ranks have come."""
    places = [address.rpartition(":") for address in addresses]
    host, _, port = places[rank]
    with socket.create_server((host, int(port)), backlog=1) as door:
        following = _connected(places[(rank + 1) % len(places)])
        before, _ = door.accept()
    for line in (following, before):
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Ring(rank, len(addresses), following, before)


def _connected(place: tuple[str, str, str]) -> socket.socket:
    host, _, port = place
    while True:
        try:
            return socket.create_connection((host, int(port)))
        except ConnectionRefusedError:  # not there yet: this is a spin
            continue


class ZmqRing:
    """One rank of a ring of ZeroMQ's sockets: a DEALER to the ROUTER of the next. What
    has come is added, or copied out, straight from the message."""

    def __init__(self, rank: int, addresses: list[str]) -> None:
        self._rank, self._size = rank, len(addresses)
        self._context = zmq.Context()
        self._before = self._context.socket(zmq.ROUTER)
        self._next = self._context.socket(zmq.DEALER)
        for line in (self._before, self._next):
            line.linger = 0
            line.set_hwm(0)
        self._before.bind(f"tcp://{addresses[rank]}")
        self._next.connect(f"tcp://{addresses[(rank + 1) % len(addresses)]}")

    def sum(self, array: np.ndarray) -> None:
        """Sums ``array`` (float32, one axis) over all ranks, in place."""
        parts = np.array_split(array, self._size)
        for hop in range(2 * (self._size - 1)):
            self._send(parts[(self._rank - hop) % self._size])
            into = parts[(self._rank - hop - 1) % self._size]
            self._receive(into, is_sum=hop < self._size - 1)

    def close(self) -> None:
        """Ends when all ranks have come here: one may still wait for bytes."""
        self.sum(np.zeros(self._size, np.float32))
        self.sum(np.zeros(self._size, np.float32))
        self._before.close()
        self._next.close()
        self._context.term()

    def _send(self, part: np.ndarray) -> None:
        # Not copied: a part changes again only when its sum comes around, of which what
        # is sent here is one of the summands.
        room = _bytes(part)
        for at in range(0, len(room), CHUNK):
            self._next.send(room[at : at + CHUNK], copy=len(room) < 2**16)

    def _receive(self, into: np.ndarray, *, is_sum: bool) -> None:
        at = 0
        while at < into.size:
            _, frame = self._before.recv_multipart(copy=False)
            came = np.frombuffer(frame.buffer, np.float32)
            place = into[at : at + came.size]
            if is_sum:
                np.add(place, came, out=place)
            else:
                place[:] = came
            at += came.size


def _bytes(array: np.ndarray) -> memoryview:
    return memoryview(array.view(np.uint8))

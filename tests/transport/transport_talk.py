"""What the tests of real sockets say, and a client that says what no link would."""

import asyncio

import zmq

from zstrat.config import Limits
from zstrat.transport import hello, new_incarnation
from zstrat.wire import Pull, Push, Read, Update, decode_header, encode


def soon(seconds=10.0):
    return asyncio.get_running_loop().time() + seconds


def push(*arrays):
    return Push(1, -1, 0, 0, [Update(1, 0, 0, len(arrays))], arrays)


def pull(nbytes):
    return Pull(1, [Read(nbytes, -1)])


class Raw:
    """A DEALER that says what the test wants."""

    def __init__(self, address, routing=None):
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvtimeo = 10_000
        if routing is not None:
            self.socket.routing_id = routing
        self.socket.connect(f"tcp://{address}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()
        self._context.term()

    def say(self, *frames):
        self.socket.send_multipart(frames)

    async def hear(self, kind):
        """The next message of a kind, other kinds thrown away."""
        while True:
            frames = await asyncio.to_thread(self.socket.recv_multipart)
            announced = decode_header(frames[0], Limits())
            if announced.message_kind is kind:
                return announced.build(())


def greeting(job="worker", index=5):
    return encode(hello(job, index, new_incarnation()))[0]

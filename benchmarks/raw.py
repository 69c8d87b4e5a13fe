"""What raw pyzmq reaches between processes: the floor that the cases are compared with.

One plain socket per process, ``add_reader`` on its descriptor, drain until empty: no
framing, no liveness, no types. Servers are spawned, never forked (libzmq contexts do
not survive a fork).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import statistics
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import uvloop
import zmq

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator

MiB = 2**20
CHUNK = MiB
WINDOW = 8


def _pump(
    loop: asyncio.AbstractEventLoop,
    socket: zmq.Socket[bytes],
    on_frames: Callable[[list[bytes]], None],
) -> Callable[[], None]:
    def drain() -> None:
        while True:
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            on_frames(frames)

    loop.add_reader(socket.FD, drain)
    return drain


def serve_echo(port_pipe: object) -> None:
    """Answers every message with itself, for ever."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.linger = 0
    port_pipe.send(socket.bind_to_random_port("tcp://127.0.0.1"))
    loop = uvloop.new_event_loop()
    drain = _pump(loop, socket, lambda frames: socket.send_multipart(frames))
    loop.call_soon(drain)
    loop.run_forever()


def serve_echo_by_thread(port_pipe: object) -> None:
    """The same, where a thread of its own says what each answer is, as a worker's."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.linger = 0
    port_pipe.send(socket.bind_to_random_port("tcp://127.0.0.1"))
    loop = uvloop.new_event_loop()
    inbox: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()

    def work() -> None:
        while True:
            loop.call_soon_threadsafe(answer, inbox.get())

    def answer(frames: list[bytes]) -> None:
        socket.send_multipart(frames)
        drain()

    threading.Thread(target=work, daemon=True).start()
    drain = _pump(loop, socket, inbox.put)
    loop.call_soon(drain)
    loop.run_forever()


def serve_chunks(port_pipe: object, size: int) -> None:
    """A bare parameter server of one array: get offset; add offset, bytes."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.linger = 0
    port_pipe.send(socket.bind_to_random_port("tcp://127.0.0.1"))
    array = np.zeros(size, np.uint8)
    floats = array.view(np.float32)
    view = memoryview(array)
    while True:
        frames = socket.recv_multipart(copy=False)
        who, offset = frames[0].bytes, int.from_bytes(frames[1].bytes, "little")
        if len(frames) == 2:
            socket.send_multipart(
                [who, frames[1].bytes, view[offset : offset + CHUNK]], copy=False
            )
        else:
            delta = np.frombuffer(frames[2].buffer, np.float32)
            target = floats[offset // 4 : offset // 4 + delta.size]
            np.add(target, delta, out=target)
            socket.send_multipart([who, frames[1].bytes])


@contextlib.contextmanager
def server(target: Callable[..., None], *args: object) -> Iterator[str]:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=target, args=(theirs, *args), daemon=True)
    process.start()
    try:
        yield f"tcp://127.0.0.1:{ours.recv()}"
    finally:
        process.kill()
        process.join()


@contextlib.contextmanager
def dealer(address: str) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(address)
    try:
        yield socket
    finally:
        socket.close()
        context.term()


def round_trip(seconds: float = 1.0) -> float:
    """Median of a 64-byte round trip between two event loops, in seconds."""
    with server(serve_echo) as address, dealer(address) as socket:
        loop = uvloop.new_event_loop()
        times: list[float] = []
        began = time.perf_counter()
        stop = began + seconds
        sent = began

        def on_frames(_frames: list[bytes]) -> None:
            nonlocal sent
            now = time.perf_counter()
            times.append(now - sent)
            if now > stop:
                loop.stop()
                return
            sent = now
            socket.send(b"x" * 64)

        drain = _pump(loop, socket, on_frames)

        def begin() -> None:
            socket.send(b"x" * 64)
            drain()

        def turn() -> None:
            # The descriptor is edge-triggered: look again after our own send.
            drain()

        loop.call_soon(begin)
        loop.call_soon(turn)
        loop.run_forever()
        loop.close()
    return statistics.median(times[len(times) // 5 :])


def round_trip_between_threads(seconds: float = 1.0) -> float:
    """Median of a round trip from a thread that blocks, by its loop, to a thread behind
    another loop, and back, in seconds: all hops of a closure, and nothing else."""
    with server(serve_echo_by_thread) as address, dealer(address) as socket:
        loop, rang = uvloop.new_event_loop(), threading.Semaphore(0)
        drain = _pump(loop, socket, lambda _frames: rang.release())

        def send() -> None:
            socket.send(b"x" * 64)
            drain()

        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        times: list[float] = []
        stop = time.perf_counter() + seconds
        while (began := time.perf_counter()) < stop:
            loop.call_soon_threadsafe(send)
            rang.acquire()
            times.append(time.perf_counter() - began)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
    return statistics.median(times[len(times) // 5 :])


def round_trips_per_second(
    servers: int, window: int = 64, seconds: float = 1.0
) -> float:
    """Windowed 64-byte round trips of one client through several echo servers."""
    with contextlib.ExitStack() as stack:
        sockets = []
        for _ in range(servers):
            address = stack.enter_context(server(serve_echo))
            sockets.append(stack.enter_context(dealer(address)))
        loop = uvloop.new_event_loop()
        done = 0
        stop = time.perf_counter() + seconds

        def reader(socket: zmq.Socket[bytes]) -> Callable[[list[bytes]], None]:
            def on_frames(_frames: list[bytes]) -> None:
                nonlocal done
                done += 1
                if done % 64 == 0 and time.perf_counter() > stop:
                    loop.stop()
                socket.send(b"x" * 64)

            return on_frames

        drains = [_pump(loop, socket, reader(socket)) for socket in sockets]

        def begin() -> None:
            for socket, drain in zip(sockets, drains, strict=True):
                for _ in range(window):
                    socket.send(b"x" * 64)
                drain()

        loop.call_soon(begin)
        began = time.perf_counter()
        loop.run_forever()
        elapsed = time.perf_counter() - began
        loop.close()
    return done / elapsed


def pull(size: int, repeats: int) -> float:
    """Bytes per second of reading an array in 1 MiB messages into our own array."""
    with server(serve_chunks, size) as address, dealer(address) as socket:
        target = np.zeros(size, np.uint8)
        return _best(repeats, size, lambda: _pull_once(socket, target))


def push(size: int, repeats: int) -> float:
    """Bytes per second of adding an array to the server's, in 1 MiB messages."""
    with server(serve_chunks, size) as address, dealer(address) as socket:
        source = np.ones(size // 4, np.float32).view(np.uint8)
        return _best(repeats, size, lambda: _push_once(socket, source))


def pull_push_per_second(sizes: list[int], repeats: int) -> float:
    """Pull, then push, of several arrays as one, per second."""
    size = sum(sizes)
    with server(serve_chunks, size + CHUNK) as address, dealer(address) as socket:
        target = np.zeros(size, np.uint8)

        def once() -> None:
            _pull_once(socket, target)
            _push_once(socket, target)

        return _best(repeats, 1, once)


def memcpy(size: int, repeats: int) -> float:
    """Bytes per second of copying an array into another that was touched before."""
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    return _best(repeats, size, lambda: np.copyto(target, source))


def _pull_once(socket: zmq.Socket[bytes], target: np.ndarray) -> None:
    size, asked, got = target.size, 0, 0
    while got < size:
        while asked < size and asked - got < WINDOW * CHUNK:
            socket.send(asked.to_bytes(8, "little"))
            asked += CHUNK
        head, body = socket.recv_multipart(copy=False)
        offset = int.from_bytes(head.bytes, "little")
        piece = np.frombuffer(body.buffer, np.uint8)[: size - offset]
        target[offset : offset + piece.size] = piece
        got += CHUNK


def _push_once(socket: zmq.Socket[bytes], source: np.ndarray) -> None:
    size, sent, done = source.size, 0, 0
    view = memoryview(source)
    while done < size:
        while sent < size and sent - done < WINDOW * CHUNK:
            socket.send(sent.to_bytes(8, "little"), zmq.SNDMORE)
            socket.send(view[sent : sent + CHUNK], copy=False)
            sent += CHUNK
        socket.recv()
        done += CHUNK


def _best(repeats: int, amount: float, once: Callable[[], None]) -> float:
    """Amount over the median duration, after a warm-up."""
    once()
    once()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        once()
        times.append(time.perf_counter() - began)
    return amount / statistics.median(times)

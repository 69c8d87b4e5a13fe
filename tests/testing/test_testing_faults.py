"""Faults of processes, disks and lines; and a look for what is left behind."""

import asyncio
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from zstrat.testing import (
    ProcessResources,
    Relay,
    frozen,
    full_disk,
    in_thread,
    leak_check,
)


def started():
    """A process that echoes a line."""
    program = "print('here', flush=True); print(input())"
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "here\n"
    return process


def state(pid):
    """A letter: "T" is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_frozen_process_is_stopped_and_goes_on():
    with started() as process:
        with frozen(process.pid):
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            assert state(process.pid) == "T"
        assert process.communicate("go on\n")[0] == "go on\n"


def test_a_frozen_process_may_end_meanwhile():
    with started() as process:
        with frozen(process.pid):
            process.kill()
            process.wait()


def test_a_full_disk_is_full_for_the_named_process_and_grows_again(tmp_path):
    with full_disk(10), pytest.raises(OSError, match="File too large"):
        (tmp_path / "mine").write_bytes(bytes(11))
    (tmp_path / "mine").write_bytes(bytes(11))
    with started() as process:
        before = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
        with full_disk(10, process.pid):
            assert resource.prlimit(process.pid, resource.RLIMIT_FSIZE)[0] == 10
            (tmp_path / "mine").write_bytes(bytes(11))
        assert resource.prlimit(process.pid, resource.RLIMIT_FSIZE) == before
        process.communicate("\n")


def test_a_thread_and_a_process_that_are_left_are_named():
    gate = threading.Event()
    left = threading.Thread(target=gate.wait, name="zstrat of the test", daemon=True)
    with pytest.raises(AssertionError, match="zstrat of the test"), leak_check(0.1):
        left.start()
    gate.set()
    left.join()
    with pytest.raises(AssertionError, match=r"input\(\)"), leak_check():
        process = started()
    process.communicate("\n")


def test_what_ends_and_what_was_there_is_no_leak():
    gate = threading.Event()
    mine = threading.Thread(target=gate.wait)
    mine.start()
    with leak_check():
        other = threading.Thread(target=gate.wait)
        other.start()
        gate.set()
    mine.join()
    assert not other.is_alive()


def test_what_a_process_holds(tmp_path):
    before = ProcessResources.held()
    with (tmp_path / "file").open("w"):
        assert ProcessResources.held().descriptors == before.descriptors + 1
    assert ProcessResources.held() == before


@pytest.fixture
async def echo():
    """The address of a server that sends back what comes."""

    async def serve(reader, writer):
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    yield f"{host}:{port}"
    server.close()


@pytest.fixture
async def connect():
    """Connects to a relay: reader and writer."""
    writers = []

    async def connected(relay):
        host, port = relay.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writers.append(writer)
        return reader, writer

    yield connected
    for writer in writers:
        writer.close()


async def test_a_relay_passes_on_what_comes(echo, connect):
    async with in_thread(Relay(echo)) as relay:
        reader, writer = await connect(relay)
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"
        writer.close()
        assert await reader.read() == b""


async def test_a_black_hole_holds_everything_and_lets_it_pass_in_the_end(echo, connect):
    with Relay(echo) as relay:
        old = await connect(relay)
        old[1].write(b"a")
        await old[0].readexactly(1)
        with relay.blackholed():
            new = await connect(relay)
            for _, writer in (old, new):
                writer.write(b"bc")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(old[0].read(1), 0.05)
        for reader, _ in (old, new):
            assert await reader.readexactly(2) == b"bc"


async def test_a_reset_ends_every_so_many_connections(echo, connect):
    with Relay(echo) as relay:
        lines = [await connect(relay) for _ in range(4)]
        for reader, writer in lines:
            writer.write(b"a")
            await reader.readexactly(1)
        relay.reset(2)
        ended = [await dead(reader) for reader, _ in (lines[0], lines[2])]
        assert ended == [True, True]
        for reader, writer in (lines[1], lines[3]):
            writer.write(b"b")
            assert await reader.readexactly(1) == b"b"


async def test_a_relay_that_refuses_hangs_up_on_all(echo, connect):
    with Relay(echo) as relay:
        old, _ = await connect(relay)
        with relay.refusing():
            assert await dead(old)
            assert await dead((await connect(relay))[0])
        reader, writer = await connect(relay)
        writer.write(b"a")
        assert await reader.readexactly(1) == b"a"


async def test_nobody_behind_the_relay(connect):
    with Relay("127.0.0.1:1") as relay:
        assert await dead((await connect(relay))[0])
    relay.close()


async def dead(reader):
    try:
        return await reader.read() == b""
    except ConnectionError:
        return True


async def test_a_context_in_a_thread_judges_the_error_and_is_left_when_cancelled():
    entered, left, gate = threading.Event(), [], threading.Event()

    class Slow:
        def __enter__(self):
            entered.set()
            assert gate.wait(100)
            return self

        def __exit__(self, kind, error, trace):
            left.append(kind)
            return kind is KeyError

    async def use(error):
        async with in_thread(Slow()):
            raise error

    cancelled = asyncio.ensure_future(use(KeyError()))
    await asyncio.to_thread(entered.wait)
    cancelled.cancel()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    await use(KeyError("swallowed"))
    with pytest.raises(ValueError, match="raised"):
        await use(ValueError("raised"))
    assert left == [None, KeyError, ValueError]

"""The compute thread of a ps: in order, bounded, closed while its loop turns."""

from __future__ import annotations

import asyncio
import threading

import pytest

from zstrat.errors import BusyError, ClosedError
from zstrat.ps import _thread


def later(seconds):
    return asyncio.get_running_loop().time() + seconds


async def test_close_finishes_what_waits():
    thread, done = _thread.ComputeThread("compute"), []
    jobs = [thread.submit(lambda n=n: done.append(n)) for n in range(5)]
    assert await thread.close(later(30)) is True
    assert done == [0, 1, 2, 3, 4]
    assert all(job.done() for job in jobs)
    assert await thread.close(later(30)) is True
    with pytest.raises(ClosedError):
        thread.submit(lambda: None)


async def test_a_thread_that_never_began_is_closed():
    assert await _thread.ComputeThread("compute").close(later(0)) is True


async def test_the_loop_turns_while_a_full_thread_is_closed(monkeypatch):
    monkeypatch.setattr(_thread, "CAPACITY", 2)
    thread, began = _thread.ComputeThread("compute"), asyncio.Event()
    loop, gate = asyncio.get_running_loop(), threading.Event()

    def wait():
        loop.call_soon_threadsafe(began.set)
        gate.wait()

    jobs = [thread.submit(wait)]
    async with asyncio.timeout(100):
        await began.wait()
    jobs += [thread.submit(gate.wait) for _ in range(2)]
    with pytest.raises(BusyError):
        thread.submit(gate.wait)
    assert await thread.close(later(0.01)) is False
    loop.call_soon(gate.set)  # only a loop that turns opens it
    assert await thread.close(later(30)) is True
    assert all(job.done() for job in jobs)

"""jax's profile of a worker ends, whoever has begun it, and is of its capture."""

import asyncio
import time

import jax
import pytest

from zstrat.telemetry import WORKER_PHASES, Recorder
from zstrat.wire import BeginCapture, EndCapture
from zstrat.worker import SessionCapture

SESSION = 7


class Thread:
    """Does at once what the executor's thread would do."""

    def __init__(self):
        self.told = asyncio.Event()

    def tell(self, event):
        event()
        self.told.set()

    def submit(self, job):
        future = asyncio.get_running_loop().create_future()
        future.set_result(job())
        return future


@pytest.fixture
def profiled(monkeypatch):
    """The folders of profiles that are under way; there can be one."""
    running = []

    def start(folder):
        if running:
            raise RuntimeError("one at a time")
        running.append(folder)

    monkeypatch.setattr(jax.profiler, "start_trace", start)
    monkeypatch.setattr(jax.profiler, "stop_trace", running.pop)
    return running


def make():
    thread = Thread()
    recorder = Recorder(WORKER_PHASES)
    return thread, SessionCapture(recorder, thread, time.monotonic)


def begin(seconds=60.0, profile=True):
    return BeginCapture(SESSION, 10, seconds, profile)


async def test_a_profile_that_nobody_ends_ends_by_itself(profiled):
    thread, capture = make()
    await capture.serve(begin(-1000.0))
    assert len(profiled) == 1
    async with asyncio.timeout(60):
        await thread.told.wait()
    assert not profiled


async def test_another_capture_ends_the_profile_of_the_one_before(profiled):
    _, capture = make()
    await capture.serve(begin())
    await capture.serve(begin())
    assert len(profiled) == 1
    told = await capture.serve(EndCapture(SESSION))
    assert not profiled
    assert told.profile
    assert not told.problem


async def test_each_capture_tells_of_its_own_profile(profiled):
    _, capture = make()
    profiled.append("that of another session")
    await capture.serve(begin())
    told = await capture.serve(EndCapture(SESSION))
    assert not told.profile
    assert "one at a time" in told.problem
    profiled.clear()
    await capture.serve(begin())
    told = await capture.serve(EndCapture(SESSION))
    assert told.profile
    assert not told.problem
    assert not profiled
    capture.serve(begin(profile=False))
    told = capture.serve(EndCapture(SESSION))
    assert (told.profile, told.problem) == ("", "")

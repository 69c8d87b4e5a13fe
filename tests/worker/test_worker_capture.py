"""jax's profile of a worker ends, whoever has begun it, and is of its capture."""

import asyncio
import shutil
import tempfile
import time

import jax
import jax.numpy as jnp
import pytest

from zstrat.telemetry import WORKER_PHASES, Recorder
from zstrat.telemetry.timeline import from_jax_columns
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


@pytest.fixture(autouse=True)
def temporary(monkeypatch, tmp_path):
    """The folder in which profiles make theirs."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def profiled(monkeypatch):
    """The folders of profiles that are under way; there can be one."""
    running = []

    def start(folder, profiler_options):
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


async def test_a_profile_that_nobody_ends_ends_by_itself(profiled, temporary):
    thread, capture = make()
    await capture.serve(begin(-1000.0))
    assert len(profiled) == 1
    async with asyncio.timeout(60):
        await thread.told.wait()
    assert not profiled
    capture.close()
    assert not list(temporary.iterdir())


async def test_a_profile_that_is_asked_for_late_is_there(profiled, temporary):
    thread, capture = make()
    await capture.serve(begin(-1000.0))
    await thread.told.wait()
    told = await capture.serve(EndCapture(SESSION))
    capture.close()
    assert [told.profile] == [str(path) for path in temporary.iterdir()]


async def test_a_profile_that_is_asked_for_while_it_stops_is_complete(profiled):
    """The thread has yet to stop it, as it has a step to end before."""
    thread, capture = make()
    late = []
    thread.tell = lambda event: (late.append(event), thread.told.set())
    submit = thread.submit

    def submitted(job):
        while late:
            late.pop(0)()
        return submit(job)

    thread.submit = submitted
    await capture.serve(begin(-1000.0))
    await thread.told.wait()
    told = capture.serve(EndCapture(SESSION))
    assert profiled, "the thread has not stopped it"
    told = await told
    assert not profiled
    assert told.profile


async def test_a_session_that_ends_takes_its_profile_with_it(profiled, temporary):
    _, capture = make()
    await capture.serve(begin())
    capture.close()
    assert not profiled
    assert not list(temporary.iterdir())


async def test_a_profile_that_is_lost_leaves_no_folder(
    profiled, monkeypatch, temporary
):
    def stop_trace():
        raise RuntimeError("the disk is full")

    _, capture = make()
    await capture.serve(begin())
    monkeypatch.setattr(jax.profiler, "stop_trace", stop_trace)
    told = await capture.serve(EndCapture(SESSION))
    assert (told.profile, "disk is full" in told.problem) == ("", True)
    assert not list(temporary.iterdir())


async def test_another_capture_ends_the_profile_of_the_one_before(profiled, temporary):
    _, capture = make()
    await capture.serve(begin())
    await capture.serve(begin())
    assert len(profiled) == 1
    told = await capture.serve(EndCapture(SESSION))
    assert not profiled
    assert [told.profile] == [str(path) for path in temporary.iterdir()]
    assert not told.problem
    capture.close()
    assert list(temporary.iterdir())  # the program knows it, and may read it


async def test_each_capture_tells_of_its_own_profile(profiled, temporary):
    _, capture = make()
    profiled.append("that of another session")
    await capture.serve(begin())
    told = await capture.serve(EndCapture(SESSION))
    assert not told.profile
    assert "one at a time" in told.problem
    assert not list(temporary.iterdir())
    profiled.clear()
    await capture.serve(begin())
    told = await capture.serve(EndCapture(SESSION))
    assert told.profile
    assert not told.problem
    assert not profiled
    capture.serve(begin(profile=False))
    told = capture.serve(EndCapture(SESSION))
    assert (told.profile, told.problem) == ("", "")


async def profiled_while(work, spans=10_000):
    """What jax noted while it was done, by a clock that is a thousand seconds ahead."""

    def clock():
        return time.monotonic() + 1000.0

    capture = SessionCapture(Recorder(WORKER_PHASES), Thread(), clock)
    await capture.serve(BeginCapture(SESSION, spans, 60.0, True))
    began = clock()
    work()
    ended = clock()
    told = await capture.serve(EndCapture(SESSION))
    if told.profile:
        shutil.rmtree(told.profile)
    return told, began, ended


async def test_what_jax_notes_is_told_by_the_clock_of_the_worker():
    def work():
        with jax.profiler.TraceAnnotation("mine"):
            jnp.ones(3).block_until_ready()

    told, began, ended = await profiled_while(work)
    assert told.problem == ""
    noted = from_jax_columns(told.arrays[4:])
    words = noted.words.split()
    assert float(words[0]) == len(noted.events)
    error = float(words[words.index("by") + 1]) / 1e3 + 1e-6  # as it is written
    (mine,) = [event for event in noted.events if event.name == "mine"]
    assert began - error <= mine.began < mine.ended <= ended + error
    assert not any(event.name.startswith("zstrat") for event in noted.events)


async def test_of_what_jax_notes_the_last_is_kept():
    def work():
        for number in range(500):
            with jax.profiler.TraceAnnotation(f"mine {number}"):
                pass

    told, *_ = await profiled_while(work, spans=20)
    noted = from_jax_columns(told.arrays[4:])
    assert len(noted.events) == 20
    assert "mine 499" in [event.name for event in noted.events]
    assert "mine 0" not in [event.name for event in noted.events]


async def test_a_process_that_is_profiled_already_says_so(tmp_path):
    with jax.profiler.trace(tmp_path):
        told, *_ = await profiled_while(lambda: None)
    assert len(told.arrays) == 4
    assert "stop the other one first" in told.problem
    assert list(tmp_path.rglob("*.xplane.pb"))  # and the other one goes on

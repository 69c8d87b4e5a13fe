"""The background thread: blocking calls, and every way in which a program ends."""

import asyncio
import gc
import inspect
import math
import signal
import sys
import threading
import weakref
from pathlib import Path

import programs
import pytest
from strikes import strikes

import zstrat.program as zs
from zstrat.coordinator import ClusterCoordinator
from zstrat.errors import CancelledError, ClosedError, DeadlineExceededError
from zstrat.transport import Portal


@zs.function
def good():
    return 1.0


@pytest.fixture
def portal():
    portal = Portal("test")
    yield portal
    portal.close()


async def for_ever():
    await asyncio.get_running_loop().create_future()


async def answer():
    return 42


def test_run_gives_the_outcome(portal):
    assert portal.run(answer(), 20.0, "a test") == 42

    async def fail():
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        portal.run(fail(), 20.0, "a test")


def test_run_has_a_deadline(portal):
    with pytest.raises(DeadlineExceededError):
        portal.run(for_ever(), 0.01, "a test")


def test_a_blocking_call_on_the_loop_itself_is_refused(portal):
    async def wrong():
        portal.run(answer(), 1.0, "a test")

    with pytest.raises(RuntimeError, match="own thread"):
        portal.run(wrong(), 20.0, "a test")


def test_closing_ends_what_runs_and_is_idempotent(portal):
    ended = []

    async def callback():
        ended.append(threading.current_thread().name)

    portal.at_close(callback)
    portal.close()
    portal.close()
    assert ended == ["test"]
    assert not portal._thread.is_alive()
    with pytest.raises(ClosedError):
        portal.run(answer(), 1.0, "a test")
    assert not portal.call_soon(print)


def test_a_close_callback_that_fails_does_not_keep_the_thread(portal, caplog):
    async def callback():
        raise ValueError("boom")

    portal.at_close(callback)
    portal.close()
    assert not portal._thread.is_alive()
    assert "boom" in caplog.text


async def test_it_can_be_awaited_from_any_loop(portal):
    assert await portal.run_async(answer(), "a test") == 42


def test_ctrl_c_in_a_blocking_run(portal):
    begun = threading.Event()

    async def wait():
        begun.set()
        await for_ever()

    def interrupt():
        begun.wait()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        portal.run(wait(), 20.0, "a test")
    thread.join()


WAITING = (
    "/transport/_loop.py",
    "/zstrat/threads.py",
    "/threading.py",
    "/futures/_base.py",
)
"""Files of what a thread executes that waits for another one."""


def test_ctrl_c_anywhere_in_a_blocking_run_leaves_a_loop_that_runs(portal):
    asked = []

    def run():
        asked.append(answer())
        portal.run(asked[-1], 20.0, "a test")

    run()  # all is imported and made
    for _ in strikes(run, *WAITING):
        # Behind what was struck, so that it is over, begun or not.
        assert portal.run(answer(), 20.0, "a test") == 42
        if inspect.getcoroutinestate(asked[-1]) == inspect.CORO_CREATED:
            asked[-1].close()  # nobody was asked for it


def test_work_that_comes_behind_the_last_look_of_a_loop_that_ends_is_refused(portal):
    begun, ends, is_asked = threading.Event(), threading.Event(), threading.Event()

    async def last():
        try:
            yield
        finally:  # behind the end of all tasks
            ends.set()
            is_asked.wait(100)

    async def begin():
        await anext(never_closed)

    def profile(frame, event, value):
        is_post = frame.f_code.co_name == "_post"
        if event == "call" and is_post:
            begun.set()
            ends.wait(100)
        elif event == "return" and is_post:
            is_asked.set()

    def ask():
        sys.setprofile(profile)
        try:
            portal.run(for_ever(), math.inf, "a test")
        except ClosedError as error:
            told.append(str(error))

    told, never_closed = [], last()
    portal.run(begin(), 20.0, "a test")
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    assert begun.wait(100)
    portal.close()
    asking.join(100)
    assert told == ["a test: the session was closed"]


async def test_who_awaits_work_when_it_is_closed_is_told_and_not_cancelled(portal):
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def wait():
        loop.call_soon_threadsafe(begun.set)
        await for_ever()

    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(refused(portal.run_async(wait(), "a test")))
        await begun.wait()
        portal.retire()
    assert "a test: the session was closed" in waiting.result()


async def refused(work):
    with pytest.raises(ClosedError) as caught:
        await work
    return str(caught.value)


def test_dropping_the_strategy_ends_thread_and_tasks(world):
    coordinator = world.coordinator()  # no fixture, which would keep it
    for worker in world.workers:
        worker.held = True
    value = coordinator.schedule(good)
    thread = world.session.portal._thread
    session = weakref.ref(world.session)
    coordinator._core.engine.waiters.watchers = {}  # the world's own knows the session
    world.session = world.strategy = None
    del coordinator
    gc.collect()
    assert session() is None
    thread.join(100)
    assert not thread.is_alive()
    with pytest.raises(CancelledError):
        value.fetch()


PROGRAM = """
import sys, warnings
warnings.simplefilter("error")
sys.path.insert(0, {folder!r})
from coordinator_fakes import World
import zstrat.program as zs

@zs.function
def f():
    return 1.0

world = World()
coordinator = world.coordinator()
assert coordinator.schedule(f).fetch() == 1
for worker in world.workers:
    worker.held = True
values = [coordinator.schedule(f) for _ in range(100)]
{end}
"""


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("print('end')", 0),
        ("raise SystemExit(3)", 3),
        ("import threading; threading.Thread(target=coordinator.shutdown).start()", 0),
        ("del coordinator, values", 0),
    ],
)
def test_a_program_that_just_ends_does_not_hang(end, code):
    text = PROGRAM.format(folder=str(Path(__file__).parent), end=end)
    done = programs.run(["-c", text], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr.decode()) == (code, "")


@pytest.mark.usefixtures("programs")
def test_ctrl_c_ends_a_program_in_a_join():
    text = PROGRAM.format(
        folder=str(Path(__file__).parent),
        end="import sys; print('joining', flush=True); coordinator.join()",
    )
    pipes = {"stdout": programs.PIPE, "stderr": programs.PIPE}
    with programs.Program(["-c", text], **pipes) as program:
        assert program.stdout.readline() == b"joining\n"
        program.send_signal(signal.SIGINT)
        _, errors = program.communicate(timeout=60)
    assert b"KeyboardInterrupt" in errors
    assert program.returncode in (1, 130, -signal.SIGINT)


def test_after_an_interrupted_shutdown_no_step_is_used_again(world, coordinator):
    for _ in range(3):
        coordinator.schedule(good).fetch()
    control = coordinator._core

    def interrupted(*_):
        raise KeyboardInterrupt

    control._on_loop = interrupted
    with pytest.raises(KeyboardInterrupt):
        coordinator.shutdown()
    with pytest.raises(ClosedError):
        coordinator.schedule(good)
    again = ClusterCoordinator(world.strategy)
    assert again.schedule(good).fetch() == 1
    assert control.engine.queue.steps.next == 4
    assert again._core.engine.queue.steps.next == 5


def test_who_waits_for_a_resource_is_told_at_the_end(world):
    for worker in world.workers:
        worker._build = lambda message: None  # it never answers
    coordinator = world.coordinator()
    iterator = iter(coordinator.create_per_worker_dataset([1.0]))
    coordinator.shutdown()
    late = iter(coordinator.create_per_worker_dataset([1.0]))
    for value in (*iterator.values, *late.values):
        with pytest.raises(CancelledError):
            value.fetch(timeout=0.0)

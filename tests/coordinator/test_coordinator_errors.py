"""First error wins, once, when nothing runs; everything else is cancelled."""

import gc
import inspect
import itertools
import signal
import threading
from typing import ClassVar

import pytest
from coordinator_fakes import alone, good

import zstrat.program as zs
from zstrat.coordinator.parts import Kept
from zstrat.errors import BusyError, CancelledError
from zstrat.wire import DropArguments, DropResults, Outcome, encode


@zs.function(eager=True)
def bad(text):
    raise ValueError(text)


@pytest.mark.parametrize("call", ["join", "done", "schedule"])
def test_the_error_is_raised_once_by_the_next_call(coordinator, call):
    value = coordinator.schedule(bad, args=("boom",))
    with pytest.raises(ValueError, match="boom"):
        value.fetch()
    calls = {
        "join": coordinator.join,
        "done": coordinator.done,
        "schedule": lambda: coordinator.schedule(good),
    }
    with pytest.raises(ValueError, match="boom") as raised:
        calls[call]()
    assert "Traceback of the other task" in "".join(raised.value.__notes__)
    coordinator.join()
    assert coordinator.done()
    assert coordinator.schedule(good).fetch() == 1, "and it is usable again"
    for _ in range(2):
        with pytest.raises(ValueError, match="boom"):
            value.fetch()


@pytest.mark.parametrize("call", ["join", "done", "schedule"])
@pytest.mark.parametrize("fetched", [False, True])
def test_a_note_says_which_step_it_was_and_what_is_not_done(coordinator, call, fetched):
    value = coordinator.schedule(bad, args=("boom",))
    line = inspect.currentframe().f_lineno - 1
    coordinator._core.engine.waiters.wait_value(value, 20.0)
    if fetched:
        with pytest.raises(ValueError, match="boom"):
            value.fetch()
    arguments = (good,) if call == "schedule" else ()
    with pytest.raises(ValueError, match="boom") as raised:
        getattr(coordinator, call)(*arguments)
    note = " ".join(raised.value.__notes__)
    assert f"step 1 (bad, scheduled at {__file__}:{line})" in note
    assert f"coordinator.{call}" in note
    assert ("was not scheduled" in note) == (call == "schedule")
    assert ("A fetch has raised it before" in note) == fetched
    assert ("errors_once=True" in note) == fetched
    assert raised.value.args == ("boom",)


def test_a_fetch_says_which_step_it_was_and_says_it_once(coordinator):
    value = coordinator.schedule(bad, args=("boom",))
    line = inspect.currentframe().f_lineno - 1
    for call in (value.fetch, value.fetch, coordinator.join):
        with pytest.raises(ValueError, match="boom") as raised:
            call()
        note = " ".join(raised.value.__notes__)
        assert note.count(f"step 1 (bad, scheduled at {__file__}:{line})") == 1


@pytest.mark.parametrize("call", ["join", "done", "schedule"])
def test_with_errors_once_what_was_fetched_is_not_raised_again(world, call):
    coordinator = world.coordinator(errors_once=True)
    world.on_loop(world.hold)
    value = coordinator.schedule(bad, args=("boom",))
    others = [coordinator.schedule(good) for _ in range(5)]
    world.on_loop(world.release)
    with pytest.raises(ValueError, match="boom"):
        value.fetch()
    getattr(coordinator, call)(*((good,) if call == "schedule" else ()))
    coordinator.join()
    assert [other.fetch() for other in others] == [1] * 5, "nothing was cancelled"


def test_with_errors_once_what_nobody_has_fetched_is_raised(world):
    coordinator = world.coordinator(errors_once=True)
    world.on_loop(world.hold)
    values = [coordinator.schedule(bad, args=(str(i),)) for i in range(3)]
    world.on_loop(world.release)
    for value in values:
        coordinator._core.engine.waiters.wait_value(value, 20.0)
    for at in (0, 2):
        with pytest.raises(ValueError, match=str(at)):
            values[at].fetch()
    with pytest.raises(ValueError, match="1"):
        coordinator.join()
    coordinator.join()
    assert coordinator.schedule(good).fetch() == 1


def test_everything_else_is_cancelled_and_nothing_runs(world):
    coordinator = world.coordinator(closures_in_flight=3)
    world.on_loop(world.hold)
    failing = coordinator.schedule(bad, args=("boom",))
    others = [coordinator.schedule(good) for _ in range(20)]
    world.until(lambda: world.running == 6)
    world.on_loop(next(w for w in world.workers if w.queue[0][3] == 1).work, 1)
    with pytest.raises(ValueError, match="boom"):
        coordinator.join()
    assert world.running == 0
    assert failing.error is not None
    for value in others:
        assert value.is_ready
        with pytest.raises(CancelledError):
            value.fetch()
    metrics = coordinator.metrics()
    assert metrics["queued_closures"] == metrics["inflight_closures"] == 0
    assert metrics["low_water"] == 22


def test_what_cannot_be_cancelled_is_waited_for(world, in_thread):
    coordinator = world.coordinator(closures_in_flight=1)
    world.on_loop(world.hold)
    coordinator.schedule(bad, args=("boom",))
    slow = coordinator.schedule(good)
    world.until(lambda: world.running == 2)
    failing, busy = sorted(world.workers, key=lambda w: w.queue[0][3])
    # The busy one has begun: a cancellation finds nothing in its queue.
    world.on_loop(busy.begin)
    world.on_loop(failing.work)
    joining = in_thread(coordinator.join)
    world.until(lambda: coordinator._core.engine.queue.phase.value == "cancelling")
    assert not joining.done()

    world.on_loop(busy.finish)
    with pytest.raises(ValueError, match="boom"):
        joining.result(100)
    assert slow.fetch() == 1, "its result counts"


def test_the_first_error_wins_and_all_are_listed(coordinator):
    values = [coordinator.schedule(bad, args=(str(i),)) for i in range(3)]
    for i, value in enumerate(values):
        with pytest.raises(ValueError, match=str(i)):
            value.fetch()
    with pytest.raises(ValueError, match=r"[012]") as raised:
        coordinator.join()
    assert coordinator.errors[0] is raised.value
    assert sorted(str(error) for error in coordinator.errors) == ["0", "1", "2"]


def test_of_two_threads_that_join_one_gets_the_error(world, coordinator, in_thread):
    world.on_loop(world.hold)
    coordinator.schedule(bad, args=("boom",))
    joins = [in_thread(coordinator.join) for _ in range(4)]
    world.until(lambda: len(coordinator._core.engine.waiters.watchers) == 4)
    world.on_loop(world.release)
    errors = [join.exception(100) for join in joins]
    assert sorted(type(error).__name__ for error in errors if error) == ["ValueError"]


def test_ctrl_c_while_all_is_cancelled_loses_no_error(world, in_thread):
    coordinator = world.coordinator(closures_in_flight=1)
    world.on_loop(world.hold)
    coordinator.schedule(bad, args=("boom",))
    coordinator.schedule(good)
    world.until(lambda: world.running == 2)
    failing, busy = sorted(world.workers, key=lambda w: w.queue[0][3])
    world.on_loop(busy.begin)
    world.on_loop(failing.work)
    main = threading.main_thread().ident
    engine = coordinator._core.engine

    def interrupt():
        world.until(
            lambda: engine.queue.phase.value == "cancelling" and engine.waiters.watchers
        )
        signal.pthread_kill(main, signal.SIGINT)

    interrupting = in_thread(interrupt)
    with pytest.raises(KeyboardInterrupt):
        coordinator.join()
    interrupting.result(100)

    world.on_loop(busy.finish)
    with pytest.raises(ValueError, match="boom"):
        coordinator.join()


@pytest.mark.parametrize("waits", ["for zstrat", "for a lock"])
def test_ctrl_c_in_a_callback_of_the_collector_is_not_lost(world, coordinator, waits):
    world.on_loop(world.hold)
    value = coordinator.schedule(good)
    strikes = iter([signal.SIGINT])

    def collected(phase, info):
        for each in strikes:
            signal.raise_signal(each)  # raises here, where Python ignores it

    def collect():
        gc.collect()
        if waits == "for zstrat":
            value.fetch(timeout=100)
        else:
            threading.Event().wait(100)

    gc.callbacks.append(collected)
    try:
        with pytest.raises(KeyboardInterrupt):
            collect()
    finally:
        gc.callbacks.remove(collected)
    world.on_loop(world.release)
    coordinator.join()
    assert coordinator.schedule(good).fetch() == 1


class CuriousError(Exception):
    """Looks whether the thread that makes it holds the lock of the engine."""

    lock: ClassVar = threading.RLock()
    held: ClassVar = []

    def __init__(self, *args):
        super().__init__(*args)
        self.held.append(self.lock._is_owned())


@alone
def test_exceptions_of_the_user_are_made_without_the_lock(world, coordinator):
    error = CuriousError("why")
    world.workers[0]._run = lambda *_: (Outcome.FAILED, error)
    coordinator._core.engine.lock = CuriousError.lock
    CuriousError.held.clear()
    value = coordinator.schedule(good)
    with pytest.raises(CuriousError, match="why"):
        value.fetch()
    assert CuriousError.held == [False]
    with pytest.raises(CuriousError):
        coordinator.join()


@alone
def test_a_worker_that_does_not_read_is_told_later_what_to_forget(world, coordinator):
    dispatcher = coordinator._core.dispatcher
    (channel,) = dispatcher.channels.values()
    (worker,) = world.workers
    told = []

    def too_busy(message):
        raise BusyError("a thousand messages wait for it")

    def clean_twice():
        worker.link.notify = too_busy
        channel.arguments.add(99)
        dispatcher.retired.append(99)
        dispatcher._send_drops()
        worker.link.notify = told.append
        dispatcher._send_drops()
        dispatcher._send_drops()

    world.on_loop(clean_twice)
    assert [message.arguments for message in told] == [[99]]


def test_a_worker_is_told_in_messages_that_fit_what_to_forget(make_world):
    world = make_world(workers=1)
    dispatcher = world.coordinator()._core.dispatcher
    (channel,) = dispatcher.channels.values()
    (worker,) = world.workers
    numbers = range(2**40, 2**40 + 60_000)
    told = []

    def clean():
        worker.link.notify = told.append
        channel.arguments.update(numbers)
        dispatcher.retired.extend(numbers)
        epoch = channel.member.epoch
        dispatcher.abandoned.extend(Kept(0, epoch, step, None) for step in numbers)
        dispatcher._send_drops()

    world.on_loop(clean)
    assert [kind for kind, _ in itertools.groupby(map(type, told))] == [
        DropArguments,
        DropResults,
    ]
    for message in told:
        encode(message)
    dropped = [message for message in told if isinstance(message, DropResults)]
    assert [step for message in dropped for step in message.steps] == list(numbers)


@alone
def test_the_end_does_not_need_a_worker_that_reads(world, coordinator):
    (worker,) = world.workers
    world.hold()
    value = coordinator.schedule(good)
    world.until(lambda: worker.queue)

    def too_busy(message):
        raise BusyError("a thousand messages wait for it")

    worker.link.notify = too_busy
    coordinator.shutdown()
    with pytest.raises(CancelledError):
        value.fetch(timeout=0.0)

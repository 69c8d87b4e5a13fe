"""What a fleet decides, without engines: messages and numbers in, orders out."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tiers import examples

from zstrat.errors import (
    DeadlineExceededError,
    UnavailableError,
    VersionMismatchError,
    ZstratError,
)
from zstrat.launch.fleet import FleetState, TaskEnd
from zstrat.launch.fleet.state import (
    KILL_TIMEOUT,
    BeginFailed,
    DrainTask,
    FleetReady,
    FleetStage,
    FleetTimeouts,
    KillTask,
    LogTask,
    StartTask,
    TaskPhase,
)

TASKS = ("ps:0", "worker:0", "worker:1")
TIMEOUTS = FleetTimeouts(start=60, drain=12, restarts=3, window=100)
CRASH = TaskEnd("ended with exit code 1", 1)


def running(timeouts=TIMEOUTS):
    """A fleet that serves since time 0."""
    state = FleetState(TASKS, timeouts)
    state.begin(0)
    for number, task in enumerate(TASKS):
        state.bound(task, 1, f"host:{number}")
    return state


def test_all_start_and_are_ready_when_the_last_one_serves():
    state = FleetState(TASKS, TIMEOUTS)
    assert state.begin(0) == [StartTask(task, 1, "") for task in TASKS]
    assert state.bound("worker:0", 1, "a:1") == []
    assert state.bound("ps:0", 1, "a:2") == []
    assert state.bound("worker:1", 1, "a:3") == [FleetReady()]
    assert state.stage is FleetStage.RUNNING
    assert [state.address(task) for task in TASKS] == ["a:2", "a:1", "a:3"]
    assert state.next_look() is None


def test_one_that_cannot_start_fails_all():
    state = FleetState(TASKS, TIMEOUTS)
    state.begin(0)
    state.bound("ps:0", 1, "a:1")
    end = TaskEnd("ended with exit code 255", 255, "the host is off")
    failed, *kills = state.ended("worker:0", 1, end, 1)
    assert isinstance(failed, BeginFailed)
    assert str(failed.error) == (
        "worker:0 ended with exit code 255 before it was ready: the host is off"
    )
    assert isinstance(failed.error, UnavailableError)
    assert kills == [KillTask("ps:0"), KillTask("worker:1")]
    assert state.ended("ps:0", 1, CRASH, 2) == []
    assert state.stage is FleetStage.ENDING
    assert state.ended("worker:1", 1, CRASH, 2) == []
    assert state.stage is FleetStage.OVER


def test_a_mistake_is_told_as_it_is():
    state = FleetState(["ps:0"], TIMEOUTS)
    state.begin(0)
    mistake = VersionMismatchError("another zstrat")
    orders = state.ended("ps:0", 1, TaskEnd("ended", 2, "", mistake), 1)
    assert orders == [BeginFailed(mistake, "ps:0")]
    assert state.stage is FleetStage.OVER


def test_one_that_is_late_fails_all():
    state = FleetState(TASKS, TIMEOUTS)
    state.begin(0)
    state.bound("ps:0", 1, "a:1")
    assert state.next_look() == 60
    assert state.tick(59.9) == []
    failed, *kills = state.tick(60)
    assert isinstance(failed, BeginFailed)
    assert isinstance(failed.error, DeadlineExceededError)
    assert kills == [KillTask(task) for task in TASKS]


def test_restarts_pause_longer_and_longer_and_then_stop():
    state, starts = running(), []
    now = 10.0
    for attempt in range(1, 4):
        orders = state.ended("worker:0", attempt, CRASH, now)
        assert isinstance(orders[0], LogTask)
        assert "restarting it" in orders[0].message
        if len(orders) == 1:
            now = state.next_look() or 0
            orders += state.tick(now)
        starts.append(now)
        assert orders[1] == StartTask("worker:0", attempt + 1, "host:1")
        state.bound("worker:0", attempt + 1, "host:1")
    assert starts == [10, 11, 13]
    (note,) = state.ended("worker:0", 4, CRASH, now)
    assert isinstance(note, LogTask)
    assert note.message == (
        "worker:0 ended with exit code 1, failure 4 within 100 s; not restarting it"
    )
    assert state.phase("worker:0") is TaskPhase.DOWN
    assert state.stage is FleetStage.RUNNING


def test_what_is_long_ago_does_not_count():
    state = running()
    for attempt in range(1, 20):
        orders = state.ended("ps:0", attempt, CRASH, 101.0 * attempt)
        assert orders[1:] == [StartTask("ps:0", attempt + 1, "host:0")]
        state.bound("ps:0", attempt + 1, "host:0")


def test_a_task_that_drained_stays_down():
    state = running()
    for task in ("worker:0", "worker:1", "ps:0"):
        assert state.stage is FleetStage.RUNNING
        words = f"{task} ended: it drained on request; not restarting it"
        note = LogTask(words, task, is_failure=False)
        assert state.ended(task, 1, TaskEnd("ended", 0), 5) == [note]
    assert state.stage is FleetStage.OVER


def test_a_restart_that_hangs_is_killed_and_tried_again():
    state = running()
    state.ended("worker:0", 1, CRASH, 10)
    note, kill = state.tick(70)
    assert isinstance(note, LogTask)
    assert kill == KillTask("worker:0")
    state.ended("worker:0", 2, TaskEnd("was killed by SIGKILL", -9), 71)
    assert state.tick(72) == [StartTask("worker:0", 3, "host:1")]
    state.tick(132)
    (note,) = state.tick(132 + KILL_TIMEOUT)  # and nobody says that it ended
    assert isinstance(note, LogTask)
    assert note.message == "worker:0 was not ready within 60 s; giving up"


def test_another_address_is_known():
    """As of an engine that cannot have the same one again."""
    state = running()
    state.ended("worker:0", 1, CRASH, 10)
    state.bound("worker:0", 2, "elsewhere:7")
    assert state.address("worker:0") == "elsewhere:7"


def test_late_words_of_an_earlier_attempt_change_nothing():
    state = running()
    state.ended("worker:0", 1, CRASH, 10)
    assert state.bound("worker:0", 1, "old:1") == []
    assert state.ended("worker:0", 1, CRASH, 10) == []
    assert state.address("worker:0") == "host:1"


def test_workers_end_before_what_they_push_to():
    state = running()
    assert state.stop(50) == [DrainTask("worker:0"), DrainTask("worker:1")]
    assert state.stop(50) == []
    assert state.ended("worker:1", 1, TaskEnd("ended", 0), 51) == []
    assert state.ended("worker:0", 1, TaskEnd("ended", 0), 52) == [DrainTask("ps:0")]
    assert state.next_look() == 52 + 12
    assert state.tick(64) == [KillTask("ps:0")]
    assert state.stage is FleetStage.ENDING
    (note,) = state.tick(64 + KILL_TIMEOUT)
    assert isinstance(note, LogTask)
    assert state.stage is FleetStage.OVER
    assert state.next_look() is None


def test_a_fleet_that_ends_starts_nothing():
    state = running()
    for now in (10, 10):
        state.ended("worker:0", state.attempt("worker:0"), CRASH, now)
    assert state.phase("worker:0") is TaskPhase.WAITING
    assert state.stop(10.5) == [DrainTask("worker:1")]
    assert state.phase("worker:0") is TaskPhase.DOWN


@pytest.mark.parametrize(
    ("name", "value"),
    [("start", 0), ("drain", -1), ("window", 0), ("restarts", -1)],
)
def test_a_timeout_that_cannot_be(name, value):
    told = {"start": 1.0, "drain": 1.0, "window": 1.0, "restarts": 1, name: value}
    with pytest.raises(ValueError, match=name):
        FleetTimeouts(**told)


class Fleets(RuleBasedStateMachine):
    """Any order of events: what is ordered fits what runs, and every fleet ends."""

    @initialize(restarts=st.integers(0, 3))
    def begin(self, restarts):
        self.now = 0.0
        self.state = FleetState(TASKS, FleetTimeouts(60, 12, restarts, 100))
        self.alive = {}
        self.killed = set()
        self.starts = {task: [] for task in TASKS}
        self.restarts = restarts
        self.is_over = self.was_stopped = False
        self.obey(self.state.begin(0.0))

    def obey(self, orders):
        assert not (self.is_over and orders)
        for order in orders:
            match order:
                case StartTask(task, attempt, _):
                    assert task not in self.alive
                    assert not self.was_stopped
                    self.alive[task] = attempt
                    self.killed.discard(task)
                    self.starts[task].append(self.now)
                case DrainTask(task):
                    assert task in self.alive
                    left = self.alive.keys() - self.killed  # or given up
                    assert task != "ps:0" or left == {"ps:0"}
                case KillTask(task):
                    assert task in self.alive
                    self.killed.add(task)
                case BeginFailed(error, _):
                    assert isinstance(error, ZstratError)
                    self.was_stopped = True
        self.is_over = self.state.stage is FleetStage.OVER

    @rule(task=st.sampled_from(TASKS))
    def serves(self, task):
        if task in self.alive:
            self.obey(self.state.bound(task, self.alive[task], f"{task}!"))

    @rule(task=st.sampled_from(TASKS), code=st.sampled_from([0, 1, 2, 75, -9]))
    def ends(self, task, code):
        if task in self.alive:
            attempt = self.alive.pop(task)
            self.obey(self.state.ended(task, attempt, TaskEnd("ended", code), self.now))

    @rule(seconds=st.sampled_from([0.5, 5.0, 70.0]))
    def waits(self, seconds):
        self.now += seconds
        self.obey(self.state.tick(self.now))

    @rule()
    def stops(self):
        self.was_stopped = True
        self.obey(self.state.stop(self.now))

    @invariant()
    def restarts_are_bounded(self):
        for times in getattr(self, "starts", {}).values():
            for first in times:
                close = [time for time in times if first < time <= first + 100]
                assert len(close) <= self.restarts + 1

    def teardown(self):
        if not hasattr(self, "state"):
            return
        self.stops()
        for _ in range(8):
            look = self.state.next_look()
            if look is None:
                break
            self.now = look
            self.obey(self.state.tick(self.now))
        assert self.is_over


TestFleets = Fleets.TestCase
TestFleets.settings = examples(40, stateful_step_count=25)

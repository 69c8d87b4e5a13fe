"""The time line of a run of fakes: what is asked of the tasks, what becomes of it, and
what does not become of training if something goes wrong with it."""

import json
import logging
import re

import jax.numpy as jnp
import pytest
from cancels import cancelled_everywhere
from coordinator_fakes import good, note_step
from strikes import strikes

import zstrat as zs
from zstrat.coordinator import AsyncClusterCoordinator
from zstrat.wire import AskClock, EndCapture

NUMBER = re.compile(r"[-+]?[0-9]+\.[0-9]+")


@pytest.fixture
def world(make_world):
    return make_world(workers=1)


@pytest.fixture
def place(tmp_path):
    return tmp_path / "line.json"


def read(place):
    return json.loads(place.read_text("utf-8"))


def spans_in(trace):
    """By task and row, ``(name, ts, end, step)`` in microseconds."""
    events = trace["traceEvents"]
    tasks = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    rows = {
        (e["pid"], e["tid"]): (tasks[e["pid"]], e["args"]["name"])
        for e in events
        if e["name"] == "thread_name"
    }
    found = {}
    for e in events:
        if e["ph"] == "X":
            span = e["name"], e["ts"], e["ts"] + e["dur"], e["args"].get("step")
            found.setdefault(rows[e["pid"], e["tid"]], []).append(span)
    return found


def arrows_in(trace):
    """Pairs of names of spans with their step."""
    events = trace["traceEvents"]
    spans = {
        (e["pid"], e["tid"], e["ts"]): (e["name"], e["args"].get("step"))
        for e in events
        if e["ph"] == "X"
    }
    ends = {"s": {}, "f": {}}
    for e in events:
        if e["ph"] in ends:
            ends[e["ph"]][e["id"]] = spans[e["pid"], e["tid"], e["ts"]]
    return {(ends["s"][number], ends["f"][number]) for number in ends["s"]}


def curve_in(trace, name):
    events = trace["traceEvents"]
    return [e["args"]["count"] for e in events if e["ph"] == "C" and e["name"] == name]


def test_all_tasks_are_shown_on_the_clock_of_the_program(make_world, place):
    world = make_world(ps=1, workers=1)
    coordinator = world.coordinator(closures_in_flight=3)
    world.workers[0].ahead, world.ps[0].ahead = 1000.0, -400.0
    with coordinator.profile(place) as profile:
        world.on_loop(world.hold)
        values = [coordinator.schedule(good) for _ in range(3)]
        world.until(lambda: world.running == 3)
        for step in (1, 2, 3):
            world.on_loop(note_step, world, step)
        world.on_loop(world.release)
        coordinator.join()
    assert values[-1].fetch() == 1
    assert profile.problem == ""
    trace = read(place)
    assert trace["otherData"] == profile.about
    assert profile.about["steps that ended"] == 3
    assert profile.about["ended by"] == "the end of the block"
    spans = spans_in(trace)
    for row, names in {
        ("program", "schedule"): {("schedule", 1), ("schedule", 2), ("schedule", 3)},
        ("worker:0", "compute"): {("compute", 1), ("compute", 2), ("compute", 3)},
        ("ps:0", "apply"): {("apply", 1), ("apply", 2), ("apply", 3)},
    }.items():
        assert {(name, step) for name, *_, step in spans[row]} == names
    assert {name for name, *_ in spans["program", "dispatch"]} == {"to worker:0"}
    # Had the clocks been taken as they are, these were minutes apart.
    whole = profile.about["seconds"] * 1e6 + 5e3
    for row in spans.values():
        assert all(-1 <= begin <= end <= whole for _, begin, end, _ in row)
    assert arrows_in(trace) == {
        pair
        for n in (1, 2, 3)
        for pair in (
            (("schedule", n), ("compute", n)),
            (("compute", n), ("push", n)),
            (("push", n), ("apply", n)),
        )
    }
    assert curve_in(trace, "closures that wait")[-1] == 0
    assert curve_in(trace, "closures at workers")[-1] == 0
    assert max(curve_in(trace, "closures at workers")) == 3


def test_it_says_how_far_each_clock_may_be_wrong(world, coordinator, place):
    world.workers[0].ahead = 5.0
    with coordinator.profile(place) as profile:
        pass
    offset, error = map(float, NUMBER.findall(profile.about["worker:0: clock"]))
    assert 0 < error < 60e3
    assert abs(offset - 5000.0) <= error + 1e-3  # as they are written
    assert float(NUMBER.findall(profile.about["ps:0: clock"])[0]) < 60e3


def train_on(world, coordinator):
    """Until the time line has ended by itself."""
    while world.session.cluster.timeline is not None:
        coordinator.schedule(good).fetch()


def test_it_ends_by_itself_after_so_many_steps(world, coordinator, place):
    with coordinator.profile(place, steps=2) as profile:
        for _ in range(2):
            coordinator.schedule(good).fetch()
        train_on(world, coordinator)
    assert profile.about["ended by"] == "2 steps"
    assert profile.about["steps that ended"] == 2
    # One more may have been scheduled before the program has heard of the second's end.
    schedules = spans_in(read(place))["program", "schedule"]
    assert [step for *_, step in schedules] in ([1, 2], [1, 2, 3])


def test_it_ends_by_itself_after_so_many_seconds(world, coordinator, place):
    with coordinator.profile(place, seconds=0.001) as profile:
        train_on(world, coordinator)
    assert profile.about["ended by"] == "0.001 seconds"
    assert world.workers[0].capturing[0].seconds > 0.001


def test_what_tasks_keep_is_bounded_and_a_cut_is_told(
    world, coordinator, place, caplog
):
    with coordinator.profile(place, max_bytes=3 * 200 * 2) as profile:
        for _ in range(3):
            coordinator.schedule(good).fetch()
    assert world.workers[0].capturing[0].spans == 2
    assert [step for *_, step in spans_in(read(place))["program", "schedule"]] == [1, 2]
    assert "no room" in profile.about["program: cut"]
    assert "program: cut" in caplog.text


def test_a_worker_killed_in_the_middle_is_named(make_world, place, caplog):
    world = make_world(ps=1, workers=2)
    coordinator = world.coordinator()
    with coordinator.profile(place) as profile:
        world.on_loop(note_step, world, 1)
        world.on_loop(world.workers[1].kill)
        coordinator.schedule(good).fetch()
    assert profile.problem == ""
    assert "was lost meanwhile" in profile.about["worker:1: missing"]
    assert "worker:1: missing" in caplog.text
    spans = spans_in(read(place))
    assert ("worker:0", "compute") in spans
    assert not any(task == "worker:1" for task, _ in spans)


def test_a_worker_that_was_started_again_has_forgotten(make_world, place):
    world = make_world(ps=1, workers=2)
    coordinator = world.coordinator()
    with coordinator.profile(place) as profile:
        world.on_loop(world.workers[1].kill)
        world.on_loop(world.workers[1].come_back)
        coordinator.schedule(good).fetch()
        task = world.session.cluster.workers[1]
        world.until(lambda: task.is_ready)
    assert "restarted" in profile.about["worker:1: missing"]


def test_a_task_that_does_not_say_what_it_has_noted_is_named(make_world, place):
    world = make_world(ps=1, workers=2)
    coordinator = world.coordinator()
    world.workers[0].refuses = (AskClock,)
    world.workers[1].refuses = (EndCapture,)
    with coordinator.profile(place) as profile:
        pass
    assert "worker:0 is busy" in profile.about["worker:0: missing"]
    assert "worker:1 is busy" in profile.about["worker:1: missing"]
    assert "ps:0: missing" not in profile.about


def test_one_at_a_time(world, coordinator, place, tmp_path):
    with coordinator.profile(place) as first:
        with pytest.raises(RuntimeError):
            coordinator.profile(tmp_path / "second.json").__enter__()
        with pytest.raises(RuntimeError, match=r"zs\.profile"):
            first.__enter__()
    assert place.exists()
    with coordinator.profile(tmp_path / "third.json"):
        pass


def test_a_place_where_no_file_can_be_is_refused(world, coordinator, tmp_path):
    with pytest.raises(ValueError, match=r"\*\.json.*line\.png"):
        coordinator.profile(tmp_path / "line.png").__enter__()
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"line\.json"):
        coordinator.profile(tmp_path / "file" / "line.json").__enter__()
    assert world.workers[0].capturing == []


@pytest.mark.parametrize("bound", ["steps", "seconds", "max_bytes"])
def test_a_bound_of_nothing_is_refused(coordinator, place, bound):
    with pytest.raises(ValueError, match=f"{bound}=0"):
        coordinator.profile(place, **{bound: 0})


def test_a_file_that_cannot_be_written_costs_only_the_picture(
    coordinator, place, caplog
):
    with coordinator.profile(place) as profile:
        value = coordinator.schedule(good)
        coordinator.join()
        place.mkdir()
    assert value.fetch() == 1
    assert "line.json" in profile.problem
    assert [r.levelname for r in caplog.records if "not written" in r.message] == [
        logging.getLevelName(logging.ERROR)
    ]
    assert list(place.parent.iterdir()) == [place]


def test_an_error_of_the_block_is_raised_and_the_file_written(coordinator, place):

    def block():
        with coordinator.profile(place):
            coordinator.schedule(good).fetch()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        block()
    assert ("program", "schedule") in spans_in(read(place))


def test_a_session_closed_in_the_block_is_shown_until_then(world, coordinator, place):
    with coordinator.profile(place) as profile:
        coordinator.schedule(good).fetch()
        world.on_loop(note_step, world, 1)
        world.session.close()
    assert profile.problem == ""
    assert ("worker:0", "compute") in spans_in(read(place))


async def test_the_awaited_one(make_world, place):
    world = make_world(ps=1, workers=1)
    world.coordinator()
    coordinator = AsyncClusterCoordinator(world.strategy)
    async with coordinator.profile(place, steps=1) as profile:
        value = await coordinator.schedule(good)
        assert await value == 1
    assert profile.about["steps that ended"] == 1
    assert ("program", "schedule") in spans_in(read(place))


async def test_cancelled_anywhere_there_is_a_file_or_it_says_why_not(make_world, place):
    world = make_world(ps=1, workers=1)
    world.coordinator()
    coordinator = AsyncClusterCoordinator(world.strategy)
    profiles = []

    async def profiled():
        profiles.append(coordinator.profile(place))
        async with profiles[-1]:
            profiles.append("entered")

    async for was_cancelled in cancelled_everywhere(profiled):
        entered = profiles.pop() == "entered"
        if entered and not was_cancelled:
            assert profiles[-1].problem == ""
        elif entered:
            assert place.exists() or "CancelledError" in profiles[-1].problem
        place.unlink(missing_ok=True)
    assert await (await coordinator.schedule(good)) == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_anywhere_leaves_a_file_or_why_there_is_none(make_world, place):
    files = "profiling/_profile.py", "profiling/_timeline_run.py", "transport/_loop.py"
    more = "timeline/_assembly.py", "zstrat/threads.py", "zstrat/paths.py"
    coordinator = make_world(ps=1, workers=1).coordinator()
    profiles, kept = [], []

    def call():
        profiles.append(coordinator.profile(place))
        with profiles[-1]:
            profiles.append("entered")

    for number in strikes(call, *files, *more):
        has_entered = profiles and profiles.pop() == "entered"
        if has_entered and not place.exists() and not profiles.pop().problem:
            kept.append(number)
            coordinator = make_world(ps=1, workers=1).coordinator()
        assert [*place.parent.iterdir()] in ([], [place]), number
        with coordinator.profile(place) as profile:
            assert coordinator.schedule(good).fetch() == 1
        assert profile.problem == ""
        place.unlink()
    assert len(kept) <= 1, "where the end of the block has not begun"


def test_without_a_coordinator_it_says_what_to_make(place):
    with pytest.raises(RuntimeError, match=r"zs\.ClusterCoordinator"):
        zs.profile(place).__enter__()


def test_it_finds_the_only_coordinator_of_the_program(make_world, place):
    world = make_world(ps=1, workers=1)
    world.connect()
    with pytest.raises(RuntimeError, match=r"jax\.profiler\.trace"):
        zs.profile(place).__enter__()
    coordinator = world.coordinator()
    with zs.profile(place) as profile:
        coordinator.schedule(good).fetch()
    assert profile.about["steps that ended"] == 1


def test_of_several_coordinators_one_has_to_be_named(make_world, place):
    worlds = [make_world(ps=1, workers=1) for _ in range(2)]
    for number, world in enumerate(worlds):
        world.spec = renamed(world, number)
    coordinators = [world.coordinator() for world in worlds]
    with pytest.raises(RuntimeError, match="2 coordinators"):
        zs.profile(place).__enter__()
    with coordinators[1].profile(place) as profile:
        coordinators[1].schedule(good).fetch()
    assert profile.about["steps that ended"] == 1


def renamed(world, number):
    """The spec with addresses of its own: the same ones would be one cluster."""
    world.tasks = {f"w{number}-{address}": t for address, t in world.tasks.items()}
    jobs = {job: [] for job in ("ps", "worker")}
    for address, task in world.tasks.items():
        jobs[task.job].append(address)
    return zs.ClusterSpec(jobs)


def test_it_is_refused_in_a_step(coordinator, place):

    @zs.function
    def step():
        with zs.profile(place):
            return jnp.float32(1)

    with pytest.raises(RuntimeError, match=r"zs\.profile"):
        coordinator.schedule(step)
    assert not place.exists()

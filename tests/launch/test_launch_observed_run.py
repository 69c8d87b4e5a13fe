"""A cluster as an observer sees it, in the form of a program's metrics."""

from zstrat.launch import ObservedRun, TaskStatus
from zstrat.telemetry import Windowed


def worker(problem="", steps=0.0):
    waited = Windowed()
    waited.add_many([0.25, 0.25], 0.0)
    values = {"rates": {"steps_per_s": steps}, "phases": {"draw": waited.plain(0.0)}}
    values["log"] = "/logs/worker-0.log"
    return TaskStatus(
        "worker:0", "node7:5000", problem, values={} if problem else values
    )


def metrics(run):
    return run.statistics()["coordinator"]


def test_tasks_tell_what_a_program_would():
    run = ObservedRun(None)
    assert metrics(run)["tasks"] == {}
    run.update([TaskStatus("ps:0", "node6:5000"), worker(steps=7.5)])
    told = metrics(run)
    assert (told["steps_per_s"], run.readiness()) == (7.5, "")
    assert told["tasks"]["worker:0"]["phases"]["draw"]["mean"] == 0.25
    assert [each["state"] for each in told["tasks"].values()] == ["open", "open"]
    assert [line[2:] for line in told["logs"]] == [
        ["INFO", "ps:0 is open: node6:5000"],
        ["INFO", "worker:0 is open: node7:5000"],
    ]


def test_who_does_not_answer_is_lost_and_says_why():
    run = ObservedRun(None)
    run.update([worker()])
    for _ in range(3):
        run.update([worker("silent for 5 s")])
    told = metrics(run)
    task = told["tasks"]["worker:0"]
    assert (task["state"], task["last_error"]) == ("lost", "silent for 5 s")
    assert (task["log"], task["steps_per_s"]) == ("/logs/worker-0.log", 0.0)
    assert run.readiness() == "no answer from worker:0"
    # Once, and not each second.
    assert [line[2] for line in told["logs"]] == ["INFO", "ERROR"]
    run.update([worker()])
    assert metrics(run)["tasks"]["worker:0"]["state"] == "open"


def test_a_task_is_lost_when_its_peers_would_take_it_for_lost():
    now = [100.0]
    run = ObservedRun(None, 5.0, clock=lambda: now[0])
    run.update([worker(steps=7.5)])
    for silent in (1.0, 4.0):  # a long compilation, or a busy machine
        now[0] = 100.0 + silent
        run.update([worker("no answer")])
        assert metrics(run)["tasks"]["worker:0"]["state"] == "open"
        assert metrics(run)["steps_per_s"] == 7.5
    now[0] = 105.0
    run.update([worker("no answer")])
    assert metrics(run)["tasks"]["worker:0"]["state"] == "lost"
    run.update([TaskStatus("ps:0", "node6:5000", "refused")])
    assert metrics(run)["tasks"]["ps:0"]["state"] == "lost", "it was never there"

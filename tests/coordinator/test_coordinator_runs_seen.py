"""What a program keeps of its run never comes in the way of the run."""

import logging
from types import SimpleNamespace

import pytest

from zstrat.coordinator._seen import SeenRun


@pytest.fixture
def seen():
    run = SeenRun()
    run.begin()
    yield run
    run.end()


def logs_of(run):
    return [line[1:] for line in run.metrics([], [], [])["logs"]]


def test_a_line_whose_arguments_do_not_fit_is_kept_and_raises_nothing(
    seen, monkeypatch
):
    monkeypatch.setattr(logging, "raiseExceptions", False)
    logging.getLogger("zstrat.coordinator").warning("%d of %d", "one")
    assert logs_of(seen) == [
        ["program", "WARNING", "%d of %d (and arguments that do not fit: ('one',))"]
    ]


def test_a_task_that_came_back_was_lost():
    run = SeenRun()
    run.lost("/job:ps/task:0", "no answer for 10 s")
    task = SimpleNamespace(
        name="/job:ps/task:0", address="a:1", is_ready=False, hello=object()
    )
    told = run.metrics([], [task], [])["tasks"]["ps:0"]
    assert (told["state"], told["last_error"]) == ("lost", "no answer for 10 s")
    task.is_ready = True
    told = run.metrics([], [task], [])["tasks"]["ps:0"]
    assert told["state"] == "open"
    assert told["last_error"] == "was lost, and is back: no answer for 10 s"

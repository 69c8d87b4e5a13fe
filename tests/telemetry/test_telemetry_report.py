"""What the tasks of a run tell, put together: many histograms at once, and a report."""

import numpy as np
import pytest

from zstrat.telemetry import Histogram, TaskReport, Unit, report
from zstrat.telemetry import HistogramTable as Table

NO_HISTOGRAMS = [
    None,
    {},
    {"unit": "seconds"},
    {"unit": "furlongs", "total": 0, "max": 0, "buckets": []},
    {"unit": "seconds", "total": 1, "max": 1, "buckets": [[10**6, 1]]},
    {"unit": "seconds", "total": 1, "max": 1, "buckets": [[-1, 1]]},
    {"unit": "seconds", "total": 1, "max": 1, "buckets": [[3, -1]]},
    {"unit": "seconds", "total": 1, "max": 1, "buckets": [[3, 10**30]]},
    {"unit": "seconds", "total": 1, "max": 1, "buckets": [[3, 1, 4], [1]]},
    {"unit": "seconds", "total": None, "max": 1, "buckets": []},
]


def filled(values, unit=Unit.SECONDS):
    made = Histogram(unit)
    made.add_many(values)
    return made


@pytest.mark.parametrize("unit", [Unit.SECONDS, Unit.COUNTS])
def test_many_histograms_at_once_are_what_each_is_by_itself(unit):
    rng = np.random.default_rng(0)
    values = [np.floor(rng.exponential(100, size)) for size in (0, 1, 2, 50, 1000)]
    alone = {number: filled(some, unit) for number, some in enumerate(values)}
    table = Table({number: each.plain() for number, each in alone.items()}, unit)
    for number, each in alone.items():
        assert table.summary(number) == pytest.approx(each.summary())
    whole = filled(np.concatenate([*values[1:3], values[4]]), unit)
    merged = table.merged([1, 2, 4, "nobody"])
    assert merged.buckets() == whole.buckets()
    assert merged.summary() == pytest.approx(whole.summary())
    assert table.summary("nobody") == Histogram(unit).summary()
    assert Table({}, unit).merged(["nobody"]).count == 0


@pytest.mark.parametrize("wrong", NO_HISTOGRAMS, ids=str)
def test_what_is_no_histogram_is_empty_and_costs_the_others_nothing(wrong):
    good = filled([1.0, 2.0, 4.0])
    table = Table({"good": good.plain(), "wrong": wrong})
    assert table.summary("good") == pytest.approx(good.summary())
    assert table.summary("wrong") == Histogram().summary()
    assert table.merged(["good", "wrong"]).count == 3


def test_tasks_of_any_form_are_reported():
    window = {"recent": filled([0.25] * 4).plain()}
    told = {"phases": {"compute": window, "pull": None, "draw": {}}, "staleness": 3}
    tasks = {"worker:0": told, "worker:1": {"phases": []}, "ps:0": {"phases": {}}}
    made = report({n: TaskReport("open", "a:1", "", each) for n, each in tasks.items()})
    assert made["phases"]["compute"]["count"] == 4
    assert made["tasks"]["worker:0"]["phases"]["compute"]["mean"] == 0.25
    assert made["tasks"]["worker:1"]["phases"]["compute"]["count"] == 0
    assert made["tasks"]["ps:0"]["apply"]["count"] == 0
    assert made["staleness"]["count"] == 0


def of_program(at, lead, **rounds):
    sent = {"at": at, "largest_lead": lead, "rounds": rounds}
    told = {"program": {"seconds": 0.1, "waiting": 3, "metrics": sent}}
    return TaskReport("open", "a:1", "", told)


def test_rounds_are_those_that_the_program_sent_last():
    waits = {"worker:1": {"rounds": 3, "seconds": 0.5}}
    recent = {"rounds": 3, "seconds": 2.0, "waited_for": waits}
    adam = {
        "workers": 2,
        "backup": 0,
        "waiting": 1,
        "closed": 7,
        "per_s": 1.5,
        "late": {"worker:1": 4},
        "dropped": {"worker:1": 4},
        "waited_for": waits,
        "recent": recent,
    }
    tasks = {
        "worker:0": of_program(3.0, 1),
        "worker:1": of_program(4.0, 2, adam=adam),
        "worker:2": TaskReport("open", "a:1"),
    }
    made = report(tasks)
    assert made["rounds"] == {"adam": adam}
    assert made["largest_lead"] == 2
    nothing = report({"worker:2": TaskReport("open", "a:1")})
    assert (nothing["rounds"], nothing["largest_lead"]) == ({}, None)


def test_leases_are_those_that_the_program_sent_last():
    counts = {"epoch": 1, "epochs": None, "examples": 9, "total": None}
    counts |= {"open": 2, "done": 7, "skipped": 0}
    sent = {"at": 3.0, "leases": {"rows": {**counts, "workers": {}}, "odd": 4}}
    told = {"program": {"seconds": 0.1, "metrics": sent}}
    made = report({"worker:0": TaskReport("open", "a:1", "", told)})
    assert made["leases"] == {"rows": counts, "odd": dict.fromkeys(counts)}
    assert report({"worker:2": TaskReport("open", "a:1")})["leases"] == {}


def test_rounds_of_no_form_are_empty():
    odd = {"late": {"worker:0": "3"}, "waited_for": {"worker:0": 4}, "recent": 5}
    made = report({"worker:0": of_program("now", "far", adam=odd, sgd=None)})
    assert made["rounds"]["adam"]["late"] == {"worker:0": 0}
    waited = made["rounds"]["adam"]["waited_for"]
    assert waited == {"worker:0": {"rounds": 0, "seconds": 0.0}}
    assert made["rounds"]["sgd"]["recent"]["rounds"] == 0
    assert made["largest_lead"] == 0


def test_numbers_and_steps_of_no_form_are_zero():
    nan = float("nan")
    told = {
        "process": {"memory": nan},
        "service": {"waiting": float("inf"), "retries": "3"},
        "rates": {"steps_per_s": nan},
        "now": {"phase": "draw"},
    }
    made = report({"worker:0": TaskReport("open", "a:1", "", told)})
    worker = made["tasks"]["worker:0"]
    assert (worker["memory"], worker["waiting"], worker["retries"]) == (0, 0, 0)
    assert made["steps_per_s"] == 0.0
    assert worker["now"] == {"phase": "draw", "step": 0, "seconds": 0.0}


def test_the_queue_is_as_the_worker_knows_it_that_was_handed_closures_last():
    def told(seconds, waiting, full):
        program = {"seconds": seconds, "waiting": waiting, "full": full}
        return TaskReport("open", "a:1", "", {"program": program})

    silent = TaskReport("open", "a:1", "", {"program": {}})
    made = report(
        {"worker:0": told(60.0, 900, True), "worker:1": told(2.0, 3, False)}
        | {"worker:2": silent}
    )
    assert (made["queued_closures"], made["queue_full"]) == (3, False)
    made = report({"worker:2": silent})
    assert (made["queued_closures"], made["queue_full"]) == (0, False)

"""What holds a run up: each bottleneck on purpose, in the numbers that tasks tell."""

import pytest

from zstrat.telemetry import (
    Histogram,
    TaskReport,
    Unit,
    held_up,
    limits,
    over,
    report,
    slowest,
)


def worker(draw=0.0, compute=0.0, pull=0.0, idle=0.0, **more):
    time = {"draw": draw, "compute": compute, "pull": pull, "idle": idle}
    return {"state": "open", "time": time, "steps_per_s": 10.0, **more}


def server(out=0.0, into=0.0, busy=0.0, pulls=0.0):
    return {
        "state": "open",
        "busy": busy,
        "bytes_out_per_s": out,
        "bytes_in_per_s": into,
        "pulls_per_s": pulls,
    }


def worst(staleness=None, queued=0, **tasks):
    """Of a run of these tasks: ``worker_0`` is worker:0."""
    named = {name.replace("_", ":"): task for name, task in tasks.items()}
    metrics = {"tasks": named, "staleness": staleness or {}, "queued_closures": queued}
    found = limits(metrics)
    assert [each.share for each in found] == sorted(
        [each.share for each in found], reverse=True
    )
    return found[0] if found else None


def test_a_run_that_nothing_holds_up_has_no_limit():
    balanced = worker(draw=0.25, compute=0.25, pull=0.25, idle=0.25)
    assert worst(worker_0=balanced, ps_0=server(out=1e6), ps_1=server(out=1e6)) is None
    assert limits({}) == []


def test_compute():
    found = worst(worker_0=worker(compute=0.97), ps_0=server())
    assert (found.task, found.what, found.share) == ("worker:0", "compute", 0.97)
    assert "97 % of its time" in found.words
    assert "add workers" in found.advice


def test_a_step_that_takes_long():
    now = {"phase": "compute", "step": 17, "seconds": 14.2}
    long = worker(compute=1.0, now=now) | {"steps_per_s": 0.0}
    found = worst(worker_0=long, worker_1=worker(compute=0.9))
    assert (found.task, found.what) == ("worker:0", "compute")
    assert found.words.endswith("; step 17 has been in it for 14 s")
    assert found.numbers["so_far"] == 14.2
    metrics = {"tasks": {"worker:0": long, "worker:1": worker(compute=0.9)}}
    assert slowest(metrics) == {"task": "worker:0", "why": found.words}
    soon = worker(compute=1.0, now=now | {"seconds": 3.0})
    assert "step 17" not in worst(worker_0=soon).words


def test_a_worker_that_is_lost_does_not_hide_what_holds_the_others_up():
    lost = {"state": "lost", "time": {}, "steps_per_s": 0.0, "last_error": "killed"}
    tasks = {
        "ps:0": server(busy=0.75),
        "worker:0": lost,
        "worker:1": worker(compute=0.5),
        "worker:2": worker(draw=0.66) | {"steps_per_s": 1.0},
    }
    metrics = {"tasks": tasks, "slowest": slowest({"tasks": tasks})}
    assert metrics["slowest"]["task"] == "worker:2"
    assert "66 %" in metrics["slowest"]["why"]
    tasks_shown = [each["task"] for each in held_up(metrics)]
    assert tasks_shown == ["worker:2", "ps:0", "worker:1"]
    alone = slowest({"tasks": {"worker:0": lost, "ps:0": server()}})
    assert alone == {"task": "worker:0", "why": "is lost: killed"}


def test_the_network_of_one_of_two_parameter_servers():
    slow = worker(pull=0.8, slow_pulls={"ps:0": 0.1, "ps:1": 0.7})
    found = worst(
        worker_0=slow,
        ps_0=server(out=50e6, pulls=10.0),
        ps_1=server(out=50e6, pulls=10.0),
    )
    assert (found.task, found.what) == ("worker:0", "pull of ps:1")
    assert "ps:1 sends 47.7 MiB/s" in found.words
    assert "pull fewer bytes" in found.advice


def test_the_way_to_a_parameter_server_that_sends_little():
    slow = worker(pull=0.9, slow_pulls={"ps:0": 0.9})
    found = worst(worker_0=slow, ps_0=server(out=1000.0, pulls=100.0))
    assert found.what == "pull of ps:0"
    assert "an answer has 10 B" in found.words
    assert "ZSTRAT_PREFETCH" in found.advice


def test_a_parameter_server_that_is_busy_applying():
    slow = worker(pull=0.7, slow_pulls={"ps:0": 0.7})
    metrics = {"tasks": {"worker:0": slow, "ps:0": server(busy=0.9, out=1e6)}}
    push, pull = limits(metrics)
    assert (push.task, push.what, push.share) == ("ps:0", "push", 0.9)
    assert pull.what == "pull of ps:0"
    assert "spends 90 % of its time on updates" in pull.words
    assert "partitioner" in pull.advice


def test_eager_steps_that_wait_for_their_pushes():
    phases = {"push": {"p50": 0.02, "p90": 0.03, "p99": 0.04}}
    eager = worker(compute=0.2, phases=phases)
    eager["time"]["push"] = 0.75
    found = worst(worker_0=eager, ps_0=server(busy=0.1))
    assert (found.task, found.what, found.share) == ("worker:0", "push", 0.75)
    assert "push is 75 % of its time" in found.words
    assert "eager=True" in found.advice
    assert found.numbers["push_p50"] == 0.02
    busy = worst(worker_0=eager, ps_0=server(), ps_1=server(busy=0.7))
    assert "ps:1 spends 70 % of its time on updates" in busy.words
    metrics = {"tasks": {"worker:0": eager, "worker:1": worker(compute=0.9)}}
    assert slowest(metrics) == {"task": "worker:0", "why": found.words}


def test_the_dataset_of_one_of_four_workers():
    quick = worker(compute=0.25, pull=0.25)
    found = worst(
        worker_0=quick,
        worker_1=quick,
        worker_2=quick,
        worker_3=worker(draw=0.81, phases={"draw": {"p50": 0.2}}),
        ps_0=server(),
    )
    assert (found.task, found.what, found.share) == ("worker:3", "draw", 0.81)
    assert "draw is 81 % of its time" in found.words
    assert "prefetch" in found.advice
    assert found.numbers["draw_p50"] == 0.2


def test_a_program_that_does_not_schedule_enough():
    found = worst(worker_0=worker(idle=0.7, compute=0.2), ps_0=server())
    assert (found.task, found.what, found.share) == ("worker:0", "queue", 0.7)
    assert "is idle for 70 %" in found.words
    assert "schedule more steps" in found.advice


def test_workers_that_get_too_little_of_what_waits():
    found = worst(worker_0=worker(idle=0.7), ps_0=server(), queued=500)
    assert found.what == "queue"
    assert "500 closures are queued in the program" in found.words
    assert "closures_in_flight" in found.advice


def test_a_full_queue_is_a_remark_while_workers_are_busy():
    metrics = {
        "tasks": {"worker:0": worker(compute=0.9)},
        "queued_closures": 500,
        "queue_full": True,
    }
    compute, full = limits(metrics)
    assert compute.what == "compute"
    assert (full.task, full.what, full.share) == ("program", "full queue", 0.0)
    assert "queue of 500 closures is full" in full.words


def test_a_queue_that_is_too_short_keeps_workers_waiting():
    metrics = {"tasks": {"worker:0": worker(idle=0.8)}, "queue_full": True}
    queue, _ = limits(metrics)
    assert queue.what == "queue"
    assert "the queue of the program is full" in queue.words
    assert "max_queued" in queue.advice


def test_steps_that_compute_from_old_values():
    four = {f"worker_{n}": worker(compute=0.2) for n in range(4)}
    # One step fetched ahead: between a pull and its push each of the four pushes its
    # own step before and the three others twice.
    usual = {"p50": 7.0, "p99": 9.0}
    assert worst(staleness=usual, ps_0=server(), **four) is None
    found = worst(staleness={"p50": 12.0, "p99": 40.0}, ps_0=server(), **four)
    assert (found.what, found.share) == ("stale", 0.75)
    assert "12 versions old" in found.words
    assert "4 workers alone cause about 3" in found.words
    assert "ZSTRAT_PREFETCH" in found.advice


def rounds(seconds, waits, count=50, **more):
    """Of one optimizer: ``waits`` are by worker (rounds, seconds)."""
    waited = {
        worker.replace("_", ":"): {"rounds": last, "seconds": held}
        for worker, (last, held) in waits.items()
    }
    recent = {"rounds": count, "seconds": seconds, "waited_for": waited}
    return {"workers": 4, "backup": 0, "waiting": 3, "recent": recent, **more}


def test_a_worker_for_which_rounds_wait():
    of_adam = rounds(25.0, {"worker_0": (10, 0.1), "worker_3": (40, 16.0)})
    tasks = {f"worker:{n}": worker(pull=0.66) for n in range(3)}
    tasks["worker:3"] = worker(compute=0.97)
    metrics = {"tasks": tasks, "rounds": {"adam": of_adam}}
    found = limits(metrics)
    (held,) = [each for each in found if each.what == "round"]
    assert held.task == "worker:3"
    assert held.share == pytest.approx(16.1 / 25)
    assert "80 %" in held.words
    assert "0.4 s" in held.words
    # 50 rounds in the 8.9 s in which nobody was alone.
    assert held.numbers["with_backup"] == pytest.approx(50 / 8.9)
    assert "backup=1" in held.advice
    assert "5.62" in held.advice
    # Others that are busy for a third of a second in each step are not that quick.
    busy = {**worker(draw=0.3, compute=0.36), "steps_per_s": 2.0}
    slower = {name: busy if name != "worker:3" else tasks[name] for name in tasks}
    (held, *_) = [
        each for each in limits({**metrics, "tasks": slower}) if each.what == "round"
    ]
    assert held.numbers["with_backup"] == pytest.approx(2.0 / 0.66)
    # The others wait for it and not for values; prefetch= is refused with rounds.
    assert not [each for each in found if "prefetch" in each.advice]
    assert slowest(metrics) == {"task": "worker:3", "why": held.words}
    shown = held_up({**metrics, "slowest": slowest(metrics)})
    assert shown[0] == {"task": "worker:3", "why": held.words}


def test_rounds_that_wait_for_one_worker_after_the_other():
    in_turn = {f"worker_{n}": (12, 2.0) for n in range(4)}
    metrics = {"rounds": {"adam": rounds(16.0, in_turn, count=48, backup=3)}}
    (held,) = limits(metrics)
    assert (held.what, held.share) == ("round", 0.5)
    assert "0.17 s" in held.words
    assert "backup=" not in held.advice  # a round needs one contribution
    quick = rounds(16.0, {"worker_0": (48, 2.0)})
    none = rounds(0.0, {}, count=0)
    assert limits({"rounds": {"adam": quick, "sgd": none}}) == []


def test_workers_that_are_as_far_ahead_as_they_may_be():
    quick, slow = worker(idle=0.8), worker(compute=0.95)
    tasks = {"worker:0": quick, "worker:1": slow}
    metrics = {"tasks": tasks, "queued_closures": 500, "largest_lead": 2}
    _, ahead = limits(metrics)
    assert (ahead.task, ahead.what) == ("worker:0", "lead")
    assert "staleness=" in ahead.advice
    assert limits({**metrics, "largest_lead": None})[1].what == "queue"


def test_bytes_that_lie_on_one_of_two_parameter_servers():
    slow = worker(pull=0.8, slow_pulls={"ps:1": 0.8})
    metrics = {
        "tasks": {
            "worker:0": slow,
            "ps:0": server(out=1e6),
            "ps:1": server(out=80e6, into=19e6),
        }
    }
    pull, imbalance = limits(metrics)
    assert pull.what == "pull of ps:1"
    assert (imbalance.task, imbalance.what) == ("ps:1", "imbalance")
    assert imbalance.share == pytest.approx(0.8 * 0.99)
    assert "99 % of the bytes of all 2" in imbalance.words
    assert "variable_partitioner" in imbalance.advice


def test_an_imbalance_that_nobody_waits_for_is_no_more_than_a_remark():
    metrics = {
        "tasks": {
            "worker:0": worker(compute=0.9, pull=0.05),
            "ps:0": server(out=1e6),
            "ps:1": server(out=99e6),
        }
    }
    compute, imbalance = limits(metrics)
    assert compute.what == "compute"
    assert (imbalance.what, imbalance.share) == ("imbalance", pytest.approx(0.0495))


def told(pull, seconds, versions, memory):
    times, stale = Histogram(), Histogram(Unit.COUNTS)
    times.add_many(seconds)
    stale.add_many(versions)
    return {
        "phases": {"pull": {"recent": times.plain(), "total": times.plain()}},
        "staleness": {"ps:0": {"recent": stale.plain()}},
        "rates": {"steps_per_s": 10.0 * len(seconds)},
        "time": {"pull": pull},
        "process": {"memory": memory},
    }


def test_several_looks_at_a_task_are_one_of_all_that_time():
    looks = [
        TaskReport("open", "a:1", "", told(0.2, [0.25, 0.25], [1], memory=100)),
        TaskReport("lost", "a:1", "no answer"),  # which says nothing about its steps
        TaskReport("open", "a:2", "", told(0.6, [4.0, 4.0], [1, 3], memory=300)),
    ]
    task = report({"worker:0": over(looks)})["tasks"]["worker:0"]
    assert (task["state"], task["address"], task["memory"]) == ("open", "a:2", 300)
    assert task["steps_per_s"] == 20.0
    assert task["time"] == {"pull": pytest.approx(0.4)}
    pulls = task["phases"]["pull"]
    assert (pulls["count"], pulls["mean"], pulls["max"]) == (4, 2.125, 4.0)
    assert task["staleness"]["ps:0"]["count"] == 3


def test_a_task_that_was_never_reached_is_as_it_was_last_seen():
    gone = TaskReport("lost", "a:1", "no answer")
    assert over([gone, gone]) == gone
    with pytest.raises(ValueError, match="samples="):
        over([])

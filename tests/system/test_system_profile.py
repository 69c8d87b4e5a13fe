"""The time line of a run of real daemons: each step is in it, where it was, on one
clock, which on one machine is known to be the same for all."""

import gzip
import json
import re
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zstrat as zs

pytestmark = pytest.mark.processes

TASKS = ("ps:0", "ps:1", "worker:0", "worker:1")


@pytest.fixture(scope="module")
def trained(world):
    """A step that pulls from both parameter servers, and pushes to both."""
    with world.scope(2):
        table = zs.Variable(np.zeros((8, 2), np.float32), name="profiled")
        optimizer = zs.Optimizer(optax.sgd(0.5))

    @zs.function
    def step(x):
        loss, gradient = zs.value_and_grad(lambda t: jnp.sum(t * x))(table)
        optimizer.apply_gradients([(gradient, table)])
        return loss

    return step


def spans_in(trace):
    """By task and kind, ``(step, begin, end)`` in milliseconds."""
    tasks, found = {}, {}
    for event in trace["traceEvents"]:
        if event["name"] == "process_name":
            tasks[event["pid"]] = event["args"]["name"]
        elif event["ph"] == "X" and "step" in event["args"]:
            end = event["ts"] + event["dur"]
            span = event["args"]["step"], event["ts"] / 1e3, end / 1e3
            found.setdefault((tasks[event["pid"]], event["name"]), []).append(span)
    return found


def jax_events_in(trace, task):
    """``(name, begin, end)`` in milliseconds."""
    tasks, rows = {}, {}
    for event in trace["traceEvents"]:
        if event["name"] == "process_name":
            tasks[event["pid"]] = event["args"]["name"]
        elif event["name"] == "thread_name":
            rows[event["pid"], event["tid"]] = event["args"]["name"]
    return [
        (event["name"], event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3)
        for event in trace["traceEvents"]
        if event["ph"] == "X" and tasks[event["pid"]] == task
        if rows[event["pid"], event["tid"]].startswith("jax ")
    ]


def clock_of(profile, task):
    """Offset and error, milliseconds."""
    words = profile.about[f"{task}: clock"]
    offset, error = re.findall(r"[-+]?[0-9]+\.[0-9]+", words)
    return float(offset), float(error)


def test_every_step_is_where_it_was_on_one_clock(world, trained, tmp_path):
    place = tmp_path / "line.json"
    with zs.profile(place) as profile:
        values = [world.coordinator.schedule(trained, args=(1.0,)) for _ in range(20)]
        world.coordinator.join()
    assert profile.problem == ""
    told = {key: words for key, words in profile.about.items() if ": " in key}
    # And nothing that is missing, or was cut: pytest would shorten all of it.
    apart = {key: words for key, words in told.items() if not key.endswith("clock")}
    assert told
    assert not apart, apart
    errors = {"program": 0.0}
    for task in TASKS:
        offset, errors[task] = clock_of(profile, task)
        assert abs(offset) <= errors[task] + 1e-3  # as they are written

    spans = spans_in(json.loads(place.read_text("utf-8")))

    def of(task, kind, step):
        """The only one; a retried step may have run twice, but none is here."""
        (found,) = [span[1:] for span in spans[task, kind] if span[0] == step]
        return found

    def comes_before(cause, effect, *tasks):
        assert cause <= effect + sum(errors[task] for task in tasks) + 1e-3

    for value in values:
        step = value.run.step
        worker = value.run.worker.removeprefix("/job:").replace("/task", "")
        begin, _ = of("program", "schedule", step)
        compute, computed = of(worker, "compute", step)
        push, pushed = of(worker, "push", step)
        comes_before(begin, compute, "program", worker)
        comes_before(computed, push, worker)
        for server in ("ps:0", "ps:1"):
            apply, applied = of(server, "apply", step)
            comes_before(push, applied, worker, server)
            comes_before(apply, pushed, server, worker)


def test_arrows_lead_from_each_step_to_what_became_of_it(world, trained, tmp_path):
    place = tmp_path / "line.json.gz"
    with world.coordinator.profile(place, steps=500) as profile:
        for _ in range(20):
            world.coordinator.schedule(trained, args=(1.0,))
        world.coordinator.join()
    assert profile.about["steps that ended"] == 20
    events = json.loads(gzip.decompress(place.read_bytes()))["traceEvents"]
    spans = {(e["pid"], e["tid"], e["ts"]): e["name"] for e in events if e["ph"] == "X"}
    tails, heads = [
        {e["id"]: spans[e["pid"], e["tid"], e["ts"]] for e in events if e["ph"] == ph}
        for ph in "sf"
    ]
    arrows = [(tails[number], heads[number]) for number in tails]
    assert {arrow: arrows.count(arrow) for arrow in arrows} == {
        ("schedule", "compute"): 20,
        ("compute", "push"): 20,
        ("push", "apply"): 40,
    }


def test_jax_profiles_each_worker_beside_it(world, trained, tmp_path):
    with zs.profile(tmp_path / "line.json.gz", jax_profile=True) as profile:
        for _ in range(4):
            world.coordinator.schedule(trained, args=(1.0,))
        world.coordinator.join()
    folders = [Path(profile.about[f"worker:{n}: jax profile"]) for n in range(2)]
    try:
        for folder in folders:
            (profiled,) = folder.rglob("*.xplane.pb")
            assert profiled.stat().st_size > 0
    finally:
        for folder in folders:
            shutil.rmtree(folder)
    trace = json.loads(gzip.decompress((tmp_path / "line.json.gz").read_bytes()))
    computed = spans_in(trace)
    for number in range(2):
        worker, seen = f"worker:{number}", 0
        words = profile.about[f"{worker}: jax events"].split()
        error = float(words[words.index("by") + 1]) + 1e-3
        events = jax_events_in(trace, worker)
        for _, begin, end in computed.get((worker, "compute"), []):
            inside = [
                name
                for name, began, ended in events
                if begin - error <= began and ended <= end + error
            ]
            assert any("Execute" in name for name in inside)
            seen += 1
        assert seen or number  # one of them may have had none of the four

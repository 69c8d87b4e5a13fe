"""What a real run tells of itself: in the program, to an observer, and after a kill."""

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time

import numpy as np
import optax
import pytest
from click.testing import CliRunner

import zstrat as zs
from zstrat.cli import main
from zstrat.config import Settings
from zstrat.launch import LocalCluster, observe
from zstrat.telemetry import Histogram, metrics_of

BATCH, STEPS = 16, 40


@pytest.fixture(scope="module")
def cluster():
    with LocalCluster(2, 1) as running:
        yield running


def batches():
    while True:
        yield np.ones((BATCH, 4), np.float32)


@contextlib.contextmanager
def training(cluster):
    """A coordinator whose one worker has trained two variables, one on each server."""
    strategy = zs.ParameterServerStrategy(cluster.resolver)
    coordinator = zs.ClusterCoordinator(strategy)
    with strategy.scope():
        weights = [zs.Variable(np.zeros(4, np.float32)) for _ in range(2)]
    iterator = iter(coordinator.create_per_worker_dataset(batches))

    @zs.function
    def step(iterator):
        batch = next(iterator)
        for weight in weights:
            weight.assign_add(batch.sum(0) - weight.value())
        return batch.sum()

    for _ in range(STEPS):
        loss = coordinator.schedule(step, args=(iterator,))
    coordinator.join()
    zs.log_scalar("loss", loss.fetch())
    strategy.weight = weights[0]
    # Before other tests run steps.
    strategy.seen = until(coordinator, all_is_told)
    yield coordinator
    strategy.close()


@pytest.fixture(scope="module")
def trained(cluster):
    with training(cluster) as coordinator:
        yield coordinator


def all_is_told(metrics):
    pushes = metrics["phases"]["push"]["count"]
    applied = [metrics["tasks"][f"ps:{n}"]["apply"]["count"] for n in range(2)]
    return [pushes, *applied] == [STEPS] * 3


def until(coordinator, told):
    """The first metrics of which that is true; tasks tell of themselves by and by."""
    deadline = time.monotonic() + 60
    while not told(metrics := coordinator.metrics()):
        assert time.monotonic() < deadline, json.dumps(metrics["tasks"])
        coordinator.strategy.weight.numpy()  # takes a moment
    return metrics


def test_the_program_sees_what_its_tasks_do(trained):
    metrics = trained.strategy.seen
    assert json.loads(json.dumps(metrics)) == metrics
    counts = {name: each["count"] for name, each in metrics["phases"].items()}
    assert counts == dict.fromkeys(("wait", "draw", "pull", "compute", "push"), STEPS)
    assert all(each["max"] > 0 for each in metrics["phases"].values())
    # One worker, whose steps wait for their turn: nothing is older than it has to be.
    assert metrics["staleness"]["buckets"] == [[0, 2 * STEPS]]
    worker = metrics["tasks"]["worker:0"]
    assert worker["state"] == "open"
    assert worker["examples_per_s"] == pytest.approx(BATCH * worker["steps_per_s"])
    assert set(worker["staleness"]) == {"ps:0", "ps:1"}
    assert worker["cached_programs"] == 1
    assert worker["compilations"] >= 1
    assert worker["memory"] > 2**20
    assert 0 < sum(worker["time"].values()) <= 1
    for transport in worker["transports"].values():
        assert transport["in"] >= 0
    assert worker["transports"]["socket"]["out"] > 0
    for name in ("ps:0", "ps:1"):
        server = metrics["tasks"][name]
        assert 0 < server["busy"] <= 1
        assert server["bytes_in_per_s"] > 0
        assert server["pushes_per_s"] > 0
    _, at, loss = metrics["scalars"]["loss"][-1]  # others of this process count, too
    assert loss == 4 * BATCH
    assert at > 0


def written(folder, **jobs):
    """The file of a cluster."""
    file = folder / "cluster.toml"
    lines = [f"{job} = {json.dumps(addresses)}\n" for job, addresses in jobs.items()]
    file.write_text("[cluster]\n" + "".join(lines))
    return file


def test_an_observer_sees_the_same(cluster, trained, tmp_path):
    # Before the observer asks: what a worker has sent only grows.
    metrics = until(trained, lambda metrics: metrics["tasks"]["worker:0"]["transports"])
    transports = metrics["tasks"]["worker:0"]["transports"]["socket"]
    file = written(tmp_path, **cluster.spec.as_dict())
    told = CliRunner().invoke(
        main, ["top", "--cluster", str(file), "--json", "--count", "1"]
    )
    assert told.exit_code == 0, told.output
    seen = json.loads(told.stdout)
    assert set(seen["tasks"]) == {"worker:0", "ps:0", "ps:1"}
    assert seen["tasks"]["worker:0"]["cached_programs"] >= 1
    assert seen["tasks"]["worker:0"]["transports"]["socket"]["out"] >= transports["out"]
    words = CliRunner().invoke(main, ["top", "--cluster", str(file), "--count", "1"])
    assert "task=worker:0 state=open steps/s=" in words.stdout
    assert "task=ps:1 state=open pulls/s=" in words.stdout


def in_terminal(arguments, height, width):
    """What a terminal of that size shows when the command has ended, line by line."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    command = [sys.executable, "-m", "zstrat.cli", *arguments]
    environment = {**os.environ, "TERM": "xterm"}
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        environment.pop(name, None)
    written = b""
    with subprocess.Popen(command, stdout=its, stderr=its, env=environment):
        os.close(its)
        with open(ours, "rb", 0) as screen, contextlib.suppress(OSError):  # it ended
            while some := screen.read(65536):
                written += some
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode())
    last = text.rindex(" steps/s, ")  # it is written again as it ends
    return text[last:].replace("\r", "").rstrip("\n").splitlines()


def test_a_small_terminal_has_whole_names_and_what_holds_the_run_up(
    cluster, trained, tmp_path
):
    absent = [f"ipc://{tmp_path}/{number}" for number in range(30)]
    jobs = cluster.spec.as_dict()
    file = written(tmp_path, ps=jobs["ps"], worker=jobs["worker"] + absent)
    looks = ["top", "--cluster", str(file), "--count", "1", "--timeout", "6"]
    lines = in_terminal(looks, 24, 60)
    assert not [line for line in lines if "…" in line]
    assert max(map(len, lines)) <= 60
    assert [line for line in lines if line.startswith("slowest: worker:0 ")]
    assert "lost: worker:1, worker:2, worker:3, worker:4 and 26 more" in lines
    more = "\n".join(line for line in lines if line.endswith("neither lost nor slower"))
    assert more, lines
    shown = [line for line in lines if re.match(r"worker:\d+ +(lost|open)", line)]
    assert len(shown) + int(more.split()[0]) == 31
    assert len(lines) <= 24
    assert [line for line in lines if re.match(r"ps:1 +open", line)]


def test_an_error_of_a_step_is_the_last_one_of_its_worker(trained):
    @zs.function(eager=True)
    def bad():
        raise KeyError("no such thing")

    trained.schedule(bad)
    with pytest.raises(KeyError, match="no such thing"):
        trained.join()
    told = trained.metrics()["tasks"]["worker:0"]["last_error"]
    assert told.startswith("step ")
    assert "KeyError" in told


def applied(cluster, ps):
    """How often the server has noted that it applied something."""
    seen = asyncio.run(observe(cluster.spec, Settings(), 60.0))
    (values,) = [each.values for each in seen if each.task == f"ps:{ps}"]
    return Histogram.from_plain(values["phases"]["apply"]["total"]).count


def test_rounds_are_seen_in_the_program_and_by_an_observer(cluster, trained, tmp_path):
    weight = trained.strategy.weight
    with trained.strategy.scope():
        sgd = zs.Optimizer(optax.sgd(0.25), name="sgd", rounds=zs.Rounds())

    @zs.function
    def step():
        sgd.apply_gradients([(weight.value(), weight)])

    before, pushed = weight.numpy(), applied(cluster, weight.spec.ps)
    for _ in range(STEPS):
        trained.schedule(step)
    trained.join()
    np.testing.assert_allclose(weight.numpy(), before * 0.75**STEPS, rtol=1e-5)
    rounds = trained.metrics()["rounds"]["sgd"]
    assert rounds["closed"] == STEPS
    paths = {each.path for each in metrics_of("rounds")}
    assert paths <= {(name,) for name in rounds}
    assert (rounds["workers"], rounds["waiting"], rounds["late"]) == (1, 0, {})
    assert rounds["waited_for"] == {}  # nobody contributed before it
    assert applied(cluster, weight.spec.ps) == pushed + STEPS
    file = written(tmp_path, **cluster.spec.as_dict())
    looks = ["top", "--cluster", str(file), "--count", "1"]
    seen = json.loads(CliRunner().invoke(main, [*looks, "--json"]).stdout)
    assert seen["rounds"]["sgd"]["workers"] == 1
    assert "rounds of 'sgd': " in CliRunner().invoke(main, looks).stdout


def test_what_a_worker_logs_as_scalars_is_refused(trained):
    @zs.function(eager=True)
    def logs():
        zs.log_scalar("loss", 1.0)

    trained.schedule(logs)
    with pytest.raises(RuntimeError, match=r"zs\.log_scalar.*'loss'"):
        trained.join()


@pytest.mark.parametrize(
    ("name", "value", "error", "words"),
    [
        ("", 1.0, ValueError, r"zs\.log_scalar"),
        ("loss", "high", TypeError, r"zs\.log_scalar"),
        ("loss", np.ones(2), TypeError, r"zs\.log_scalar"),
    ],
)
def test_scalars_are_numbers_with_names(name, value, error, words):
    with pytest.raises(error, match=words):
        zs.log_scalar(name, value)
    with pytest.raises(TypeError, match=r"'x'.*step='2'"):
        zs.log_scalar("x", 1.0, step="2")


@pytest.mark.processes
def test_a_killed_worker_is_seen_to_be_lost():
    with LocalCluster(2, 1) as cluster, training(cluster) as trained:
        see_a_worker_lost(cluster, trained)


def see_a_worker_lost(cluster, trained):
    log = f"{cluster.directory}/worker-0.log"
    before = until(trained, lambda m: m["tasks"]["worker:0"]["cores"])
    assert before["tasks"]["worker:0"]["cpu_seconds"] > 0
    assert before["tasks"]["worker:0"]["log"] == log
    cluster.kill("worker:0")
    metrics = until(trained, lambda m: m["tasks"]["worker:0"]["state"] == "lost")
    task = metrics["tasks"]["worker:0"]
    assert task["steps_per_s"] == 0, "what it told is not told any more"
    assert task["last_error"]
    assert task["log"] == log
    assert metrics["slowest"]["task"] == "worker:0"
    assert metrics["slowest"]["why"].startswith("is lost: ")
    assert any(task == "program" for _, task, _, _ in metrics["logs"])

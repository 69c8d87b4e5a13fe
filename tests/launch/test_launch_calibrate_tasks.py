"""A calibration among the tasks of a cluster: ranks are threads that pretend to be on
hosts of their own, one of them may be the command itself."""

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from click.testing import CliRunner

from zstrat.cli import main
from zstrat.cluster import ClusterSpec, SimpleClusterResolver
from zstrat.collectives import ALGORITHMS, Group, fitted, read_choices
from zstrat.config import Settings
from zstrat.launch import Calibration, _calibrate, calibrate_tasks

CHOICES = {call for call, algorithms in ALGORITHMS.items() if len(algorithms) > 1}
SETTINGS = Settings()


@pytest.fixture(autouse=True)
def seldom(monkeypatch):
    """Measures everything once: what is found does not matter here."""
    for name in ("_WARM", "_FEW", "_MANY"):
        monkeypatch.setattr(_calibrate, name, 1)


@pytest.fixture
def cluster(tmp_path):
    return {"worker": [f"ipc://{tmp_path}/{rank}" for rank in range(3)]}


@pytest.fixture
def pretend(monkeypatch):
    """Gives every task the host that its letter names."""

    def pretend(hosts):
        def name_of_host():
            """Each rank asks on the thread of its node, which ends with its number."""
            rank = threading.current_thread().name.rpartition(":")[2]
            return f"host-{hosts[int(rank)]}"

        monkeypatch.setattr(socket, "gethostname", name_of_host)

    return pretend


def part_of(cluster, plan, rank):
    """What one rank does; what it has found."""
    resolver = SimpleClusterResolver(
        ClusterSpec(cluster), task_type="worker", task_id=rank
    )
    with Group(
        resolver, name="calibration", transport="tcp", settings=SETTINGS
    ) as whole:
        return calibrate_tasks(whole, plan, resolver, SETTINGS)


@pytest.mark.parametrize(
    ("hosts", "one_host"), [("abc", {2: False, 3: False}), ("aab", {2: True, 3: False})]
)
def test_measurements_say_whether_they_are_of_one_host(
    cluster, pretend, hosts, one_host
):
    pretend(hosts)
    plan = Calibration(3, (4,))
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(partial(part_of, cluster, plan), range(3)))
    assert {(m.call, m.algorithm, m.ranks, m.nbytes, m.one_host) for m in found[0]} == {
        (call, algorithm, ranks, 4, one_host[ranks])
        for call in CHOICES
        for algorithm in ALGORITHMS[call]
        for ranks in (2, 3)
    }
    assert {m.ranks for m in found[2]} == {3}
    # The rules of a table of them are used between hosts.
    rules = fitted(found[0]).rules
    used = {rule.call for rule in rules if rule.holds(rule.call, 4, 3, one_host=False)}
    assert used == CHOICES


def test_more_ranks_than_tasks(cluster):
    cluster = {"worker": cluster["worker"][:1]}
    with pytest.raises(ValueError, match="ranks=2"):
        part_of(cluster, Calibration(2, (4,)), 0)


@pytest.mark.parametrize("way", ["TF_CONFIG", "--cluster"])
def test_the_command_writes_the_table_of_the_first_task(
    cluster, pretend, tmp_path, monkeypatch, way
):
    pretend("abc")
    file, options = tmp_path / "choices.toml", ["--sizes", "4", "-n", "2"]
    if way == "TF_CONFIG":
        task = {"type": "worker", "index": 0}
        config = json.dumps({"cluster": cluster, "task": task})
        monkeypatch.setenv("TF_CONFIG", config)
    else:
        told = tmp_path / "cluster.toml"
        addresses = json.dumps(cluster["worker"])
        told.write_text(
            f'[cluster]\nworker = {addresses}\n[task]\ntype = "worker"\nindex = 0\n'
        )
        options += ["--cluster", str(told)]
    with ThreadPoolExecutor(2) as threads:
        plan = Calibration(2, (4,))
        others = [threads.submit(part_of, cluster, plan, rank) for rank in (1, 2)]
        arguments = ["bench", "collectives", *options, "--calibrate", str(file)]
        ran = CliRunner().invoke(main, arguments)
    assert ran.exit_code == 0, ran.output
    assert others[1].result() == []
    assert "apply to traffic between hosts" in ran.output
    rules = read_choices(file).rules
    assert {(rule.call, rule.one_host) for rule in rules} == {
        (call, False) for call in CHOICES
    }


def test_another_task_says_who_has_the_results(cluster, pretend, tmp_path, monkeypatch):
    pretend("abc")
    cluster = {"worker": cluster["worker"][:2]}
    task = {"type": "worker", "index": 1}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    file = tmp_path / "no such folder" / "choices.toml"  # it would not write there
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(part_of, cluster, Calibration(2, (4,)), 0)
        arguments = ["bench", "collectives", "--sizes", "4", "--calibrate", str(file)]
        ran = CliRunner().invoke(main, arguments)
    assert first.result()
    assert ran.exit_code == 0, ran.output
    assert ran.stdout == "done; /job:worker/task:0 prints the results\n"


def test_a_program_that_is_no_task_measures_its_own_machine(cluster, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster}))
    plans = []

    async def measure(plan, begins):
        plans.append(plan)
        return []

    monkeypatch.setattr("zstrat.cli._bench.calibrate", measure)
    ran = CliRunner().invoke(main, ["bench", "collectives", "--sizes", "4"])
    assert ran.exit_code == 0, ran.output
    assert plans == [Calibration(4, (4,))]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("-n", "2"), "ranks=2"),
        ((), "ranks=1: expected 2 or more"),
        (("-n", "2", "--calibrate", "no such folder/choices.toml"), "no such folder"),
    ],
)
def test_what_is_refused_before_measuring(cluster, monkeypatch, options, words):
    cluster = {"worker": cluster["worker"][:1]}
    task = {"type": "worker", "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    ran = CliRunner().invoke(main, ["bench", "collectives", "--sizes", "4", *options])
    assert ran.exit_code == 2
    assert words in ran.output


def test_an_interrupted_wait_for_the_others_ends_as_shells_expect(cluster, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("zstrat.cli._bench.Group", interrupted)
    task = {"type": "worker", "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    ran = CliRunner().invoke(main, ["bench", "collectives", "--sizes", "4"])
    assert ran.exit_code == 130, ran.output

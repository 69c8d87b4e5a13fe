"""The program ``zstrat``: what it prints, and with which exit code it ends."""

import io
import json
import os
import re
import shlex
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from zstrat.cli import _options, _tables, main
from zstrat.cluster import ClusterSpec, TomlClusterResolver
from zstrat.collectives import read_choices
from zstrat.errors import UnavailableError
from zstrat.launch import LocalCluster, TaskStatus
from zstrat.telemetry import size


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in ("TF_CONFIG", "ZSTRAT_KEYS", "ZSTRAT_TRANSPORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def short_folder():
    """Its path leaves room for the names of sockets, as not every tmp_path does."""
    with tempfile.TemporaryDirectory(prefix="zstrat-") as folder:
        yield Path(folder)


OPEN_PORTS = (
    "warning: without keys every user of this machine can reach these ports and run "
    "code as you; use --transport ipc or set ZSTRAT_KEYS to prevent that"
)


def toml(spec):
    """The file of a cluster; lists of text are the same in JSON."""
    jobs = [f"{job} = {json.dumps(each)}" for job, each in spec.as_dict().items()]
    return "\n".join(["[cluster]", *jobs, ""])


def zstrat(*argv):
    return CliRunner().invoke(main, argv)


@pytest.fixture(scope="module")
def cluster():
    with LocalCluster(1, 1) as running:
        yield running


@pytest.fixture
def file(cluster, tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(toml(cluster.spec))
    return str(path)


def test_status_lines(file):
    ran = zstrat("status", "--cluster", file)
    assert ran.exit_code == 0, ran.output
    ps, worker = ran.output.splitlines()
    assert re.match(r"task=ps:0 address=\S+ incarnation=[0-9a-f]{8} uptime=\d+s", ps)
    assert " variables=0 held=0 B" in ps
    assert worker.startswith("task=worker:0 ")
    assert "variables" not in worker


@pytest.mark.parametrize("command", ["status", "top"])
def test_a_reader_that_leaves_is_no_error(file, command):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as gone:
        ran = subprocess.run(
            [sys.executable, "-m", "zstrat.cli", command, "--cluster", file],
            stdout=gone,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=60,
        )
    assert (ran.returncode, ran.stderr) == (1, "")


def test_status_json(file, cluster):
    ran = zstrat("status", "--cluster", file, "--json")
    ps, worker = json.loads(ran.output)
    assert (ps["task"], worker["task"]) == ("ps:0", "worker:0")
    assert ps["values"]["task"]["pid"] == cluster.pid("ps:0")
    assert worker["values"]["process"]["memory"] > 2**20


def test_status_of_tf_config(cluster, monkeypatch):
    config = {"cluster": cluster.spec.as_dict()}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    assert zstrat("status").exit_code == 0


@pytest.fixture
def one_absent(cluster, tmp_path):
    """The file of a cluster with a worker more than there are."""
    spec = cluster.spec.as_dict()
    spec["worker"].append("127.0.0.1:9")
    file = tmp_path / "absent.toml"
    file.write_text(toml(ClusterSpec(spec)))
    return str(file)


def test_status_names_who_does_not_answer(one_absent):
    ran = zstrat("status", "--cluster", one_absent, "--timeout", "0.5")
    assert ran.exit_code == 1
    *_, last = ran.output.splitlines()
    assert last.startswith("task=worker:1 address=127.0.0.1:9 unreachable:")


def test_status_of_what():
    ran = zstrat("status")
    assert ran.exit_code == 2
    assert "--cluster" in ran.output


def test_doctor(file):
    ran = zstrat("doctor", "--cluster", file)
    assert ran.exit_code == 0, ran.output
    assert "ok    ps:0" in ran.output
    assert "ok    worker:0" in ran.output
    assert "FAIL" not in ran.output


def test_doctor_of_a_run_that_does_not_train(file):
    ran = zstrat("doctor", "--run", "--cluster", file, "--seconds", "0.01")
    assert ran.exit_code == 0, ran.output
    first, second = ran.output.splitlines()
    assert first.endswith("0.0 steps/s on 1 worker, with 1 parameter server")
    assert second.startswith("no step ended in this time")


def test_doctor_of_a_run_names_who_does_not_answer(one_absent):
    looks = ("--run", "--json", "--seconds", "0.01", "--timeout", "0.5")
    ran = zstrat("doctor", *looks, "--cluster", one_absent)
    assert ran.exit_code == 1
    found = json.loads(ran.output)
    assert set(found["problems"]) == {"worker:1"}
    assert set(found["metrics"]["tasks"]) == {"ps:0", "worker:0", "worker:1"}
    assert found["limits"] == []


def test_doctor_of_a_run_needs_some_time_and_its_options_need_a_run(file):
    for wrong in (("--run", "--seconds", "0"), ("--json",), ("--seconds", "5")):
        ran = zstrat("doctor", "--cluster", file, *wrong)
        assert ran.exit_code == 2, ran.output


def test_doctor_of_a_wrong_file(tmp_path):
    file = tmp_path / "cluster.toml"
    file.write_text("[cluster]\nps = 7\n")
    ran = zstrat("doctor", "--cluster", str(file))
    assert ran.exit_code == 2
    assert "cluster.ps" in ran.output


def test_dashboard_shows_the_cluster_until_it_is_interrupted(file):
    command = [sys.executable, "-m", "zstrat.cli", "dashboard", "--cluster", file]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serving:
        with urllib.request.urlopen(f"{serving.stdout.readline().strip()}events") as at:
            events = (line[6:] for line in at if line.startswith(b"data: {"))
            frames = (json.loads(event) for event in events)
            states = (
                [task["state"] for task in frame["metrics"].get("tasks", {}).values()]
                for frame in frames
            )
            assert next(filter(None, states)) == ["open", "open"]
            serving.send_signal(signal.SIGINT)
            assert b"event: end\n" in at.read()
    assert serving.returncode == 0


def test_dashboard_that_cannot_be_served(file):
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        ran = zstrat("dashboard", "--cluster", file, "--http", taken)
    assert ran.exit_code == 2
    assert f"HTTP at {taken}: another process has that port" in ran.output
    assert zstrat("dashboard").exit_code == 2


def test_keygen(tmp_path):
    ran = zstrat("keygen", str(tmp_path / "keys"))
    assert ran.exit_code == 0, ran.output
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700
    secret = tmp_path / "keys" / "worker.secret"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert "worker.public" in ran.output
    key = secret.read_text().split()[-1]
    assert key not in ran.output


def test_keygen_rotate_says_what_to_do_next(tmp_path):
    folder = str(tmp_path / "keys")
    ran = zstrat("keygen", folder, "--rotate")
    assert ran.exit_code == 2
    assert f"make some with `zstrat keygen {folder}`" in ran.output
    zstrat("keygen", folder)
    assert zstrat("keygen", folder, "--rotate", "--ps", "2").exit_code == 2
    for step, there in (("1 of 3", "next"), ("2 of 3", "previous"), ("3 of 3", "")):
        ran = zstrat("keygen", folder, "--rotate")
        assert ran.exit_code == 0, ran.output
        assert step in ran.output
        assert {p.name for p in (tmp_path / "keys").iterdir() if p.is_dir()} <= {there}


def test_keygen_per_task(tmp_path):
    folder = str(tmp_path / "keys")
    for words in (["--per-task"], ["--ps", "2"], ["--per-task", "--workers", "2"]):
        ran = zstrat("keygen", folder, *words)
        assert ran.exit_code == 2
        assert "--per-task --ps 2 --workers 4" in ran.output
    ran = zstrat("keygen", folder, "--per-task", "--ps", "1", "--workers", "2")
    assert ran.exit_code == 0, ran.output
    there = sorted(path.stem for path in (tmp_path / "keys").glob("*.secret"))
    assert there == ["chief", "evaluator", "observer", "ps-0", "worker-0", "worker-1"]


@pytest.mark.processes
def test_status_of_a_cluster_with_keys(tmp_path):
    keys, file = tmp_path / "keys", tmp_path / "cluster.toml"
    zstrat("keygen", str(keys))
    with LocalCluster(1, 1, transport="tcp", env={"ZSTRAT_KEYS": str(keys)}) as cluster:
        file.write_text(toml(cluster.spec))
        command = ("--cluster", str(file), "--timeout")
        known = zstrat("status", *command, "30", "--keys", str(keys))
        assert known.exit_code == 0, known.output
        healthy = zstrat("doctor", *command, "30", "--keys", str(keys))
        assert healthy.exit_code == 0, healthy.output
        assert "secrets of chief, worker, ps, evaluator, observer" in healthy.output
        stranger = zstrat("status", *command, "1")
    assert stranger.exit_code == 1
    assert stranger.output.count("unreachable: ") == 2


def test_units(tmp_path):
    bindir = tmp_path / "bin"
    bindir.mkdir()
    ran = zstrat("units", "--bindir", str(bindir), "--to", str(tmp_path / "units"))
    assert ran.exit_code == 2
    assert "zstrat-evaluator does not exist" in ran.output
    for name in ("zstrat-evaluator", "zstrat-ps", "zstrat-worker"):
        (bindir / name).touch()
    ran = zstrat("units", "--bindir", str(bindir), "--to", str(tmp_path / "units"))
    assert ran.exit_code == 0
    assert len(ran.output.splitlines()) == 4


@pytest.mark.processes
@pytest.mark.parametrize(
    ("transport", "with_keys", "warned"),
    [("tcp", False, True), ("tcp", True, False), ("auto", False, False)],
)
def test_cluster_in_the_foreground(transport, with_keys, warned, short_folder):
    folder = short_folder / "cluster"
    command = ["cluster", "--ps", "1", "--workers", "1", "--dir", str(folder)]
    env = {k: v for k, v in os.environ.items() if k != "NOTIFY_SOCKET"}
    if with_keys:
        env["ZSTRAT_KEYS"] = str(short_folder / "keys")
        zstrat("keygen", env["ZSTRAT_KEYS"])
    process = subprocess.Popen(
        [sys.executable, "-m", "zstrat.cli", *command, "--transport", transport],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )
    try:
        head = [process.stdout.readline() for _ in range(6)]
        assert head[0].startswith("connect with"), process.stderr.read()
        export = shlex.split(head[1])
        config = json.loads(export[1].removeprefix("TF_CONFIG="))
        spec = TomlClusterResolver(shlex.split(head[2])[1]).cluster_spec()
        assert ClusterSpec(config["cluster"]) == spec
        assert [line.split()[0] for line in head[4:]] == ["task=ps:0", "task=worker:0"]
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, errors) == (0, f"{OPEN_PORTS}\n" * warned)
    assert rest == "stopping all tasks\n"
    assert "ended" in (folder / "ps-0.log").read_text()


def test_the_end_of_a_terminal_ends_what_is_not_to_outlive_it():
    """As whoever starts us with nohup wants it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert _options.endings() == [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert _options.endings() == [signal.SIGINT, signal.SIGTERM]
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    "command",
    [
        ("cluster", "--ps", "0"),
        ("run", "-n", "0", __file__),
        ("bench", "collectives", "-n", "1"),
    ],
)
def test_numbers_that_cannot_be_are_refused_by_the_name_of_their_option(command):
    ran = zstrat(*command)
    assert ran.exit_code == 2
    assert re.search(r"Invalid value for '(-n|--ps)", ran.output)


def test_table_and_lines_say_the_same():
    values = {
        "task": {"incarnation": 1 << 62, "uptime": 3700.0},
        "process": {"memory": 3 << 20},
        "service": {"variables": 2, "bytes": 2048, "slot_bytes": 4096},
    }
    seen = [
        TaskStatus("ps:0", "h:1", values=values),
        TaskStatus("worker:0", "h:2", problem="nothing answers"),
    ]
    assert _tables.lines(seen) == [
        "task=ps:0 address=h:1 incarnation=40000000 uptime=1h 01m memory=3.0 MiB "
        "variables=2 held=6.0 KiB",
        "task=worker:0 address=h:2 unreachable: nothing answers",
    ]
    assert _tables.table(seen).row_count == 2


def test_why_a_task_does_not_answer_can_be_read_on_a_terminal():
    """It was a column of 13 characters, a dozen lines high."""
    problem = "worker:0 at h:2 did not answer within 5 s: nothing answers there; " * 2
    seen = [TaskStatus("worker:0", "h:2", problem=problem)]
    console = Console(width=80, file=io.StringIO())
    console.print(_tables.table(seen))
    text = console.file.getvalue()
    assert len(text.splitlines()) < 6
    assert " ".join(problem.split()) in " ".join(text.split())


def test_second_copies_are_shown_where_they_are():
    backup = {
        "store": 0,
        "address": "h:9",
        "variables": 2,
        "bytes": 2048,
        "replication": {"role": "backup", "view": 1},
    }
    kept = {"role": "primary", "view": 1, "backup": "h:9", "backup_state": "attached"}
    alone = {"role": "primary", "view": 3, "backup": ""}
    never = {"role": "primary", "view": 0, "backup": ""}
    seen = [
        TaskStatus("ps:0", "h:1", values={"service": {"replication": kept}}),
        TaskStatus(
            "ps:1",
            "h:2",
            values={"service": {"replication": alone}, "copies": [backup]},
        ),
        TaskStatus("ps:2", "h:3", values={"service": {"replication": never}}),
    ]
    first, second, copy, third = _tables.lines(seen)
    assert first.endswith("copy=attached h:9")
    assert second.endswith("copy=no backup")
    assert copy.startswith("task=ps:0/copy address=h:9 ")
    assert copy.endswith(" variables=2 held=2.0 KiB copy=backup")
    assert "copy=" not in third
    assert _tables.table(seen).row_count == 4


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0s"), (61, "1m 01s"), (3600, "1h 00m"), (90000, "1d 01h")],
)
def test_spans(seconds, words):
    assert _tables.span(seconds) == words


@pytest.mark.parametrize(
    ("number", "words"), [(0, "0 B"), (1536, "1.5 KiB"), (3 * 2**40, "3.0 TiB")]
)
def test_sizes(number, words):
    assert size(number) == words


@pytest.mark.processes
def test_bench_collectives_prints_what_it_measures_and_writes_a_table(tmp_path):
    file = tmp_path / "choices.toml"
    options = ("--sizes", "400,40", "-n", "2", "--transport", "ipc")
    ran = zstrat("bench", "collectives", *options, "--calibrate", str(file))
    assert ran.exit_code == 0, ran.output
    rows = [line for line in ran.stdout.splitlines() if " ranks " in line]
    pattern = r"(\w+) +2 ranks +(40|400) B  ms: \w+ [\d.]+(, \w+ [\d.]+)+"
    named = [re.fullmatch(pattern, row).group(1, 2) for row in rows]
    calls = {"all_reduce", "all_gather", "reduce_scatter", "broadcast"}
    assert sorted(named) == sorted((c, n) for c in calls for n in ("40", "400"))
    assert {rule.call for rule in read_choices(file).rules} == calls
    assert f"ZSTRAT_CHOICES={file}" in ran.output


@pytest.mark.parametrize("name", ["", "no such folder/choices.toml"])
def test_a_table_that_cannot_be_written_is_refused_before_measuring(tmp_path, name):
    ran = zstrat("bench", "collectives", "--calibrate", str(tmp_path / name))
    assert (ran.exit_code, ran.exception.__class__) == (2, SystemExit), ran.output
    assert str(tmp_path / name) in ran.output
    assert " ranks" not in ran.output


@pytest.mark.parametrize("before", [None, "mine"])
def test_a_table_is_not_touched_before_it_was_measured(tmp_path, monkeypatch, before):
    file = tmp_path / "choices.toml"
    if before is not None:
        file.write_text(before)

    def measure(*_):
        raise UnavailableError("a rank was lost")

    monkeypatch.setattr("zstrat.cli._bench.calibrate", measure)
    ran = zstrat("bench", "collectives", "--calibrate", str(file))
    assert "a rank was lost" in ran.output
    assert (file.read_text() if file.exists() else None) == before


def test_bench_collectives_of_nonsense():
    ran = zstrat("bench", "collectives", "--sizes", "much")
    assert ran.exit_code == 2
    assert "--sizes much: expected bytes" in ran.output

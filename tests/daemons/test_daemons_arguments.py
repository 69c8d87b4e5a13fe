"""What a daemon understands of its arguments, and how it says what it does not."""

import json
from pathlib import Path

import pytest
from zstrat.daemons import options_from, parser, worker

CLUSTER = {"ps": ["127.0.0.1:1", "127.0.0.1:2"], "worker": ["127.0.0.1:3"]}


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in ("TF_CONFIG", "ZSTRAT_KEYS", "ZSTRAT_INSECURE", "ZSTRAT_LOG"):
        monkeypatch.delenv(name, raising=False)


def told(*argv, job="ps"):
    return options_from(parser(job, "").parse_args(argv), job)


def tf_config(monkeypatch, value):
    text = value if isinstance(value, str) else json.dumps(value)
    monkeypatch.setenv("TF_CONFIG", text)


def cluster_file(tmp_path, text='[cluster]\nps = ["h:1", "h:2"]\nworker = ["h:3"]\n'):
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return str(path)


def test_tf_config(monkeypatch):
    task = {"type": "ps", "index": 1}
    tf_config(monkeypatch, {"cluster": CLUSTER, "task": task})
    place = told().task
    assert (place.job, place.index, place.bind) == ("ps", 1, "127.0.0.1:2")
    assert place.task == "ps:1"


def test_arguments_go_before_tf_config(monkeypatch):
    tf_config(monkeypatch, {"cluster": CLUSTER, "task": {"type": "ps", "index": 1}})
    place = told("--index", "0", "--bind", "0.0.0.0:9").task
    assert (place.index, place.bind) == (0, "0.0.0.0:9")


def test_cluster_file(tmp_path):
    place = told("--cluster", cluster_file(tmp_path), "--index", "1").task
    assert (place.index, place.bind) == (1, "h:2")


def test_a_ps_has_the_folder_that_it_is_told_or_that_systemd_has_made(monkeypatch):
    task = "--index", "0", "--bind", "127.0.0.1:0"
    assert told(*task).settings.state is None
    monkeypatch.setenv("STATE_DIRECTORY", "/var/lib/zstrat/ps-0:/var/lib/more")
    assert told(*task).settings.state == Path("/var/lib/zstrat/ps-0")
    assert told(*task, job="worker").settings.state is None
    monkeypatch.setenv("ZSTRAT_STATE", "/srv/state")
    assert told(*task).settings.state == Path("/srv/state")
    told_so = told(*task, "--state-dir", "/tmp/mine")
    assert told_so.settings.state == Path("/tmp/mine")


@pytest.mark.parametrize("job", ["ps", "worker"])
@pytest.mark.parametrize(
    ("mistyped", "meant"),
    [
        (["--bindd", "x"], "'--bind'"),
        (["--indx=0"], "'--index'"),
        (["--log-jsn", "--clustr", "x"], "'--log-json'"),
    ],
)
def test_an_option_that_is_not_there(job, mistyped, meant, capsys):
    with pytest.raises(SystemExit) as ended:
        told(*mistyped, job=job)
    assert ended.value.code == 2
    assert f"did you mean {meant}?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mistyped", "not_there"),
    [
        ("--xyzzy", "did you mean"),
        ("bind", "did you mean"),
        ("--launcher-timeoutt", "--launcher-timeout"),  # for launchers alone
    ],
)
def test_nothing_that_is_not_an_option_for_people_is_meant(mistyped, not_there, capsys):
    with pytest.raises(SystemExit):
        told(mistyped)
    assert not_there not in capsys.readouterr().err.replace("--launcher-timeoutt", "")


def test_address_alone():
    place = told("--index", "3", "--bind", "127.0.0.1:0").task
    assert (place.job, place.index, place.bind) == ("ps", 3, "127.0.0.1:0")


STEP = {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
}


@pytest.mark.parametrize("how", ["auto", "slurm"])
def test_what_started_it(monkeypatch, how):
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    place = told("--resolver", how, "--jobs", "chief=1,ps=2").task
    assert (place.job, place.index, place.bind) == ("ps", 0, "n2:8888")


def test_settings(monkeypatch):
    where = ("--index", "0", "--bind", "127.0.0.1:0")
    monkeypatch.setenv("ZSTRAT_KEYS", "/keys")
    assert told(*where).settings.keys == Path("/keys")
    assert told(*where, "--keys", "/other").settings.keys == Path("/other")
    settings = told(*where, "--insecure", "--log-json").settings
    assert settings.insecure
    assert settings.log_json


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("{", r"TF_CONFIG.*JSON"),
        ([1], "TF_CONFIG"),
        ({"cluster": [1]}, "TF_CONFIG"),
        ({"cluster": {"ps": "h:1"}}, "TF_CONFIG"),
        ({"cluster": {"ps": [7]}}, "TF_CONFIG"),
        ({"cluster": CLUSTER, "task": {"type": "worker"}}, "'worker'"),
        ({"cluster": CLUSTER, "task": {"type": "ps"}}, "--index"),
        ({"cluster": CLUSTER, "task": {"type": "ps", "index": 9}}, r"\b9\b"),
        ({"cluster": CLUSTER, "task": {"type": "ps", "index": "x"}}, "task.index"),
        ({"cluster": {"worker": ["h:1"]}, "task": {"type": "ps"}}, "'ps'"),
    ],
)
def test_wrong_tf_config(monkeypatch, value, words):
    tf_config(monkeypatch, value)
    with pytest.raises(ValueError, match=words):
        told()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = ", "TOML"),
        ("[nodes]\n", "nodes"),
        ("[cluster]\nps = 7\n", "cluster.ps"),
        ("[cluster]\nserver = ['h:1']\n", "server"),
        ("[cluster]\nps = ['h:1']\n", "--index"),
    ],
)
def test_wrong_cluster_file(tmp_path, text, words):
    with pytest.raises(ValueError, match=words):
        told("--cluster", cluster_file(tmp_path, text))


def test_cluster_file_of_another_job(tmp_path):
    text = "[cluster]\nps = ['h:1']\nworker = ['h:2']\n[task]\ntype = 'worker'\n"
    path = cluster_file(tmp_path, text + "index = 0\n")
    with pytest.raises(ValueError, match=r"cluster\.toml.*'worker'"):
        told("--cluster", path)
    assert told("--cluster", path, job="worker").task.bind == "h:2"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--resolver", "auto"), "'ps'"),
        (("--resolver", "slurm"), "SLURM_PROCID"),
        (("--jobs", "ps=1"), "--resolver"),
        (("--resolver", "auto", "--jobs", "ps:1"), "JOB=N"),
        (("--resolver", "auto", "--jobs", "ps=1,worker=1"), "jobs="),
        (("--resolver", "auto", "--cluster", "c.toml"), "--resolver"),
        ((), "--cluster"),
        (("--job", "worker"), "'ps'"),
        (("--index", "-1", "--bind", "127.0.0.1:0"), "--index -1"),
        (("--cluster", "/nowhere.toml"), "cannot read /nowhere.toml"),
    ],
)
def test_wrong_arguments(argv, words):
    with pytest.raises(ValueError, match=words):
        told(*argv)


def test_an_empty_text_is_no_folder(capsys):
    for option in ("--keys", "--state-dir"):
        with pytest.raises(SystemExit):
            told("--index", "0", "--bind", "127.0.0.1:0", option, "")
        assert f"argument {option}: expected a folder" in capsys.readouterr().err


def test_wrong_environment(monkeypatch):
    monkeypatch.setenv("ZSTRAT_DRAIN", "soon")
    with pytest.raises(ValueError, match="ZSTRAT_DRAIN='soon'"):
        told("--index", "0", "--bind", "127.0.0.1:0")


@pytest.mark.parametrize(
    ("platform", "given", "variables"),
    [
        (None, None, {}),
        ("tpu", None, {"JAX_PLATFORMS": "tpu"}),
        ("cpu", "4", {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}),
        ("cuda", "0,2", {"JAX_PLATFORMS": "cuda", "CUDA_VISIBLE_DEVICES": "0,2"}),
    ],
)
def test_devices(platform, given, variables):
    assert worker.devices(platform, given) == variables


@pytest.mark.parametrize(
    ("platform", "given"),
    [("cpu", "0"), ("cpu", "0,1"), ("cpu", "many"), ("tpu", "1"), (None, "1")],
)
def test_devices_that_cannot_be(platform, given):
    with pytest.raises(ValueError, match=f"--devices {given}"):
        worker.devices(platform, given)


def test_a_worker_that_no_cluster_names():
    asked = told("--join", "ps:1", "--bind", "late:2", job="worker")
    assert (asked.join.servers, asked.join.address) == (("ps:1",), "late:2")
    assert (asked.task.index, asked.task.bind) == (-1, "late:2")
    several = told("--join", "ps:1,ps:2", "--bind", "late:2", job="worker")
    assert several.join.servers == ("ps:1", "ps:2")
    numbered = told("--join", "h:1", "--bind", "late:2", "--index", "7", job="worker")
    assert numbered.task.index == 7
    for wrong, words in {
        ("--join", "h:1"): "--bind",
        ("--join", "h:1", "--bind", "0.0.0.0:2"): "0.0.0.0:2",
        ("--join", "h:1", "--bind", "late:0"): r"\b0\b",
        ("--join", "h", "--bind", "late:2"): "'h'",
        ("--join", "h:1,", "--bind", "late:2"): "''",
        ("--join", "h:1", "--cluster", "x.toml"): "--cluster",
    }.items():
        with pytest.raises(ValueError, match=words):
            told(*wrong, job="worker")

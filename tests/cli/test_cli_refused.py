"""What ``zstrat`` is told and cannot be: said in a line, with exit code 2."""

import pytest
from click.testing import CliRunner

from zstrat.cli import main


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in ("TF_CONFIG", "ZSTRAT_KEYS"):
        monkeypatch.delenv(name, raising=False)


def refused(*argv):
    """What the command says; it ends with 2, and by itself."""
    ran = CliRunner().invoke(main, list(map(str, argv)))
    assert (ran.exit_code, ran.exception.__class__) == (2, SystemExit), ran.output
    return ran.output


@pytest.mark.parametrize("seconds", ["nan", "inf", "-1", "0", "1e6"])
@pytest.mark.parametrize(
    "command",
    [("status", "--timeout"), ("top", "--every"), ("doctor", "--run", "--seconds")],
)
def test_seconds_that_nothing_waits_for(command, seconds, tmp_path):
    file = tmp_path / "cluster.toml"
    file.write_text('[cluster]\nps = ["127.0.0.1:1"]\n')
    said = refused(*command, seconds, "--cluster", file)
    assert f"Invalid value for '{command[-1]}'" in said


@pytest.mark.parametrize("jobs", ["", "ps = []\nworker = []\n"])
@pytest.mark.parametrize("command", [("status",), ("doctor",), ("doctor", "--run")])
def test_a_cluster_without_tasks(command, jobs, tmp_path, monkeypatch):
    file = tmp_path / "cluster.toml"
    file.write_text(f"[cluster]\n{jobs}")
    words = ": cluster: has no tasks"
    assert f"{file}{words}" in refused(*command, "--cluster", file)
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {}}')
    assert f"TF_CONFIG{words}" in refused(*command)


@pytest.mark.parametrize(
    "command", [("keygen",), ("cluster", "--dir"), ("units", "--to")]
)
def test_a_file_in_the_place_of_a_folder(command, tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    words = f": {file} is a file, expected a folder: choose another path, or move"
    assert f"{file}{words}" in refused(*command, file)
    assert f"{file / 'below'}{words}" in refused(*command, file / "below")
    assert file.read_text() == "mine"


@pytest.mark.parametrize(
    "command", [("keygen",), ("cluster", "--dir"), ("status", "--keys")]
)
def test_an_empty_text_is_no_folder(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "expected a folder, got an empty string" in refused(*command, "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("mistyped", "meant"),
    [("statsu", "'status'"), ("dashbord", "'dashboard'"), ("ps", "'zstrat-ps'")],
)
def test_a_command_that_is_not_there(mistyped, meant):
    ran = CliRunner().invoke(main, [mistyped, "--index", "0"])
    assert ran.exit_code == 2
    assert f"did you mean {meant}?" in ran.output
    assert "did you mean" not in CliRunner().invoke(main, ["xyzzy"]).output

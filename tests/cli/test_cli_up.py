"""``zstrat up`` and ``zstrat down`` with a program in the place of ssh that says what a
daemon says: what they leave of a folder, whom they end, and how they end themselves."""

import fcntl
import json
import os
import re
import shlex
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner

from zstrat.cli import main
from zstrat.transport import hello

SSH = """#!/bin/sh
for word; do [ "$word" = -G ] && asks=1; done
if [ "$asks" ]; then echo hostname 127.0.0.1; exit; fi
{said}
"""

SERVES = """echo '{greeting}'
read told
echo '{{"address": "127.0.0.1:7"}}'
"""

IS_ENDED_AT_THE_START = "kill -TERM ${STARTER:-$PPID}; cat > /dev/null"


@pytest.fixture
def hosts(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    folder = tmp_path / "a b"
    folder.mkdir()
    file = folder / "hosts.toml"
    file.write_text("ps = 1\nworkers = 0\n[hosts.a]\n")
    return file


def zstrat(*words):
    return CliRunner().invoke(main, [str(word) for word in words])


def ssh(folder, said):
    (folder / "ssh").write_text(SSH.format(said=said))
    (folder / "ssh").chmod(0o700)


def serves():
    mine = hello("ps", 0, 1)
    greeting = {"protocol": mine.protocol, "versions": dict(mine.versions)}
    return SERVES.format(greeting=json.dumps(greeting))


@pytest.mark.parametrize("name", ["notes", "keys/mine"])
def test_files_of_somebody_else_are_left_alone(hosts, tmp_path, name):
    ssh(tmp_path, "exit 255")
    mine = hosts.with_suffix(".up") / name
    mine.parent.mkdir(parents=True)
    mine.write_text("precious")
    ran = zstrat("up", hosts, "true")
    assert ran.exit_code == 2
    assert "move" in ran.output
    (hosts.with_suffix(".up") / "lock").touch()
    assert zstrat("down", hosts).exit_code == 0
    assert mine.read_text() == "precious"


def test_what_a_killed_one_left_is_removed(hosts):
    folder = hosts.with_suffix(".up")
    (folder / "keys").mkdir(parents=True)
    for name in ("lock", "ps-0.log", "up.log", "cluster.toml", "keys/ps.secret"):
        (folder / name).write_text("1")
    assert "no tasks are running for" in zstrat("down", hosts).output
    assert not folder.exists()


def test_logs_of_an_earlier_run_say_nothing_of_this_one(hosts, tmp_path):
    ssh(tmp_path, "echo license server is down >&2; exit 1")
    log = hosts.with_suffix(".up") / "ps-0.log"
    log.parent.mkdir()
    log.write_text("No module named zstrat\n")
    ran = zstrat("up", hosts, "true")
    assert ran.exit_code == 2
    assert "has no zstrat" not in ran.output
    assert log.read_text() == "license server is down\n"


def test_a_start_that_is_interrupted_is_no_success(hosts, tmp_path):
    ssh(tmp_path, IS_ENDED_AT_THE_START)
    ran = zstrat("up", hosts, "true")
    assert (ran.exit_code, ran.output) == (143, "interrupted; all tasks stopped\n")
    assert not hosts.with_suffix(".up").exists()


def test_a_detached_start_that_is_interrupted_ends(hosts, tmp_path, monkeypatch):
    ssh(tmp_path, IS_ENDED_AT_THE_START)
    monkeypatch.setenv("STARTER", str(os.getpid()))
    ran = zstrat("up", "--detach", hosts)
    assert (ran.exit_code, ran.output) == (143, "interrupted; all tasks stopped\n")
    assert not hosts.with_suffix(".up").exists()


def test_a_program_that_is_not_there_is_named_before_anything_starts(hosts):
    ran = zstrat("up", hosts, "no-such-program")
    assert ran.exit_code == 2
    assert "program 'no-such-program' not found" in ran.output
    script = hosts.with_name("train.py")
    ran = zstrat("up", hosts, "python", script)
    assert ran.exit_code == 2
    assert f"program '{script}' does not exist" in ran.output
    script.touch()
    ran = zstrat("up", hosts, script)
    assert ran.exit_code == 2
    assert f"python {script}" in ran.output
    ran = zstrat("up", hosts, "--ps", "1", "python")
    assert ran.exit_code == 2
    assert "--ps: options must come before HOSTS" in ran.output
    assert not hosts.with_suffix(".up").exists()


def test_what_is_to_be_exported_can_be_pasted(hosts, tmp_path):
    ssh(tmp_path, serves())
    ran = zstrat("up", hosts)
    assert "all tasks have failed or ended" in ran.output
    assert ran.exit_code == 1
    (line,) = re.findall(r"export ZSTRAT_KEYS.*", ran.output)
    keys = hosts.with_suffix(".up") / "keys"
    assert shlex.split(line) == ["export", f"ZSTRAT_KEYS={keys}"]


@pytest.mark.parametrize("said", ["", "gone", "stranger"])
def test_nobody_is_ended_who_does_not_hold_the_lock(hosts, said):
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as stranger:
        pid = str(stranger.pid)
        if said == "gone":
            stranger.kill()
            stranger.wait()
        folder = hosts.with_suffix(".up")
        folder.mkdir()
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            lock.write(said and pid)
            lock.flush()
            ran = zstrat("down", hosts)
        assert ran.exit_code == 2
        assert "just started: try again" in ran.output
        stranger.communicate()
    assert stranger.returncode == (-signal.SIGKILL if said == "gone" else 0)


@pytest.mark.parametrize("command", ["up", "down"])
def test_a_file_of_hosts_whose_folder_cannot_be(hosts, command):
    for name in ("b.up", "b.toml"):
        file = hosts.with_name(name)
        file.touch()
        ran = zstrat(command, file)
        assert ran.exit_code == 2
        assert "is a file: rename" in ran.output


def test_a_lock_that_was_removed_meanwhile_is_not_the_lock(
    hosts, tmp_path, monkeypatch
):
    ssh(tmp_path, "exit 255")
    file, locks, flock = hosts.with_suffix(".up") / "lock", [], fcntl.flock

    def locked(lock, how):
        if not locks:
            file.unlink()  # by who held it, between our open and our lock
        flock(lock, how)
        locks.append(
            file.exists() and os.path.samestat(file.stat(), os.stat(lock.fileno()))
        )

    monkeypatch.setattr("fcntl.flock", locked)
    zstrat("up", hosts, "true")
    assert locks == [False, True]


def test_who_queues_begins_when_the_other_one_has_ended(hosts, tmp_path):
    ssh(tmp_path, serves() + "cat > /dev/null\n")
    up = [sys.executable, "-m", "zstrat.cli", "up"]
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    say = ["sh", "-c", "echo has begun >&2; cat; echo $0", "one"]
    with subprocess.Popen([*up, hosts, *say], **pipes, stdout=subprocess.PIPE) as first:
        assert first.stderr.readline() == "has begun\n"
        ran = zstrat("up", hosts, "true")
        who = rf"hosts.up is locked by another `zstrat up` \(pid {first.pid}\)"
        assert re.search(f"{who}: stop it with .* --queue", ran.output), ran.output
        ran = zstrat("up", "--queue", "1", hosts, "true")
        assert re.search(f"{who}, still after 1 s", ran.output), ran.output
        words = [*up, "--queue", str(hosts), "sh", "-c", "echo two --queue"]
        with subprocess.Popen(words, **pipes, stdout=subprocess.PIPE) as second:
            assert re.search(f"waiting: .*{who}", second.stderr.readline())
            assert first.communicate("")[0] == "one\n"
            assert second.communicate()[0] == "two --queue\n"
    assert (first.returncode, second.returncode) == (0, 0)
    assert not hosts.with_suffix(".up").exists()

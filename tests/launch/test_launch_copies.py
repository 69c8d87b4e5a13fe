"""Copies of one program live and die together."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile

import pytest
from launch_ends import wait_gone

from zstrat.launch import Copies, run_copies
from zstrat.transport import run

TOLD = "import json, os; me = json.loads(os.environ['TF_CONFIG'])['task']['index']\n"
FOREVER = "import threading; threading.Event().wait()\n"


def started(code, count, **options):
    lines = []
    command = (sys.executable, "-c", TOLD + code)
    return run(run_copies(Copies(command, count, **options), lines.append)), lines


@pytest.mark.parametrize("sockets", ["ipc", "tcp"])
def test_each_copy_knows_itself_and_all_addresses(sockets):
    code, lines = started("print(os.environ['TF_CONFIG'])", 3, sockets=sockets)

    assert code == 0
    told = {}
    for line in lines:
        name, _, text = line.partition(" | ")
        told[name] = json.loads(text)
    assert sorted(told) == ["worker:0", "worker:1", "worker:2"]
    clusters = {json.dumps(each["cluster"]) for each in told.values()}
    assert len(clusters) == 1
    assert len(set(json.loads(clusters.pop())["worker"])) == 3
    for name, each in told.items():
        assert f"{each['task']['type']}:{each['task']['index']}" == name


def test_a_folder_whose_path_is_too_long_for_sockets(monkeypatch, tmp_path):
    """Each copy ended with a traceback about an address that nobody had given."""
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with pytest.raises(ValueError, match="TMPDIR"):
        started("print(1)", 1)
    assert started("print(1)", 1, sockets="tcp") == (0, ["worker:0 | 1"])
    assert not list(folder.iterdir())


def test_copies_divide_the_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setenv("JAX_PLATFORMS", "")
    code, lines = started("print(os.environ['CUDA_VISIBLE_DEVICES'])", 2)

    assert code == 0
    assert sorted(lines) == ["worker:0 | 0,1", "worker:1 | 2,3"]


def test_the_first_failure_ends_all_and_is_the_exit_code():
    code, lines = started(f"if me == 1: raise SystemExit(7)\n{FOREVER}", 3)

    assert code == 7
    assert lines == ["worker:1 ended with exit code 7: ending the others"]


def test_a_copy_that_was_killed_is_said_to_be():
    kill = "import signal; os.kill(os.getpid(), signal.SIGKILL)"
    code, lines = started(f"if me == 1:\n    {kill}\n{FOREVER}", 2)

    assert code == 128 + 9
    assert lines == ["worker:1 was killed by SIGKILL: ending the others"]


def test_the_others_may_say_whom_they_lost_before_they_end(tmp_path):
    for number in (1, 2):
        os.mkfifo(tmp_path / str(number))
    end = f"[open(f'{tmp_path}/{{n}}', 'w') for n in (1, 2)]; os._exit(3)"
    hear = f"open(f'{tmp_path}/{{me}}').read(); print('lost 0')"
    code, lines = started(f"if me == 0: {end}\n{hear}", 3, notice=60.0)

    assert code == 3
    assert sorted(lines) == [
        "worker:0 ended with exit code 3: ending the others",
        "worker:1 | lost 0",
        "worker:2 | lost 0",
    ]


def test_who_ignores_sigterm_is_killed_after_the_drain():
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    fail = "if me == 1: input()\n"  # at the end of its standard input
    code, _ = started(f"{fail}{deaf}{FOREVER}", 2, drain=0.2)
    assert code == 1


def test_what_a_copy_leaves_behind_ends_with_it():
    leave = (
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {FOREVER!r}])"
    )
    code, _ = started(leave, 1)
    assert code == 0


def test_a_copy_that_fails_is_started_again_while_restarts_are_left(tmp_path):
    once = (
        f"from pathlib import Path; mark = Path({str(tmp_path / 'mark')!r})\n"
        "if me == 1 and not mark.exists(): mark.touch(); raise SystemExit(3)\n"
        "print('done')"
    )
    code, lines = started(once, 2, restarts=1)

    assert code == 0
    assert "worker:1 ended with exit code 3: restarting it" in lines
    assert sorted(line for line in lines if "done" in line) == [
        "worker:0 | done",
        "worker:1 | done",
    ]


def test_restarts_run_out():
    code, lines = started("if me == 1: raise SystemExit(3)", 2, restarts=2)

    assert code == 3
    assert sum("restarting it" in line for line in lines) == 2


def test_output_without_an_end_and_longer_than_a_buffer_arrives():
    code, lines = started("print('x' * 3_000_000, end='')", 1)

    assert code == 0
    text = "".join(line.removeprefix("worker:0 | ") for line in lines)
    assert text == "x" * 3_000_000


def test_output_that_nobody_takes_ends_the_copies():
    pids = []

    def write(line):
        pids.append(int(line.split(" | ")[1]))
        raise BrokenPipeError("the reader is gone")

    command = (sys.executable, "-c", f"import os; print(os.getpid())\n{FOREVER}")
    with pytest.raises(BrokenPipeError):
        run(run_copies(Copies(command, 1), write))
    assert wait_gone(pids[0])


def test_cancelling_ends_the_copies_and_what_they_started(tmp_path):
    nested = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {FOREVER!r}])\n"
        "print(os.getpid(), child.pid)\n"
        f"{FOREVER}"
    )

    async def cancelled():
        said = asyncio.Event()
        lines = []

        def write(line):
            lines.append(line)
            said.set()

        command = (sys.executable, "-c", TOLD + nested)
        task = asyncio.create_task(run_copies(Copies(command, 1), write))
        await said.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return [int(word) for word in lines[0].split(" | ")[1].split()]

    for pid in run(cancelled()):
        assert wait_gone(pid)


def test_the_copies_die_with_their_parent(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"{TOLD}print(os.getpid(), flush=True)\n{FOREVER}")
    command = [sys.executable, "-m", "zstrat.cli", "run", "-n", "2", str(script)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(parent.stdout.readline().split("|")[1]) for _ in range(2)]

    parent.kill()
    parent.wait()
    parent.stdout.close()

    for pid in pids:
        assert wait_gone(pid)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"count": 0}, "count=0"),
        ({"count": 1, "restarts": -1}, "restarts=-1"),
        ({"count": 1, "sockets": "udp"}, "'udp'"),
    ],
)
def test_what_cannot_be_is_refused(options, word):
    with pytest.raises(ValueError, match=word):
        Copies(("true",), **options)


def test_what_follows_the_script_is_for_it_and_its_code_is_returned(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.argv[1:]); sys.exit(5)")
    command = [sys.executable, "-m", "zstrat.cli", "run", "-n", "1", str(script)]
    own = ["--workers", "3", "-n", "4", "--transport", "fast", "--help"]
    done = subprocess.run([*command, *own], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()) == (
        5,
        [f"worker:0 | {own}", "worker:0 ended with exit code 5: ending the others"],
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_command_with_its_number(number, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"print('here', flush=True)\n{FOREVER}")
    command = [sys.executable, "-m", "zstrat.cli", "run", "-n", "1", str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "worker:0 | here\n"
        process.send_signal(number)
        assert process.wait(60) == 128 + number

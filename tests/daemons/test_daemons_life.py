"""The life of real daemons: ready, watched, drained, ended, and refused starts."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys

import pytest

from zstrat.config import Settings
from zstrat.errors import PeerLostError
from zstrat.program import dump_code
from zstrat.transport import Link, generate_keys, hello, new_incarnation, run
from zstrat.wire import CloseSession, CreateOptimizer, Inspect, OpenSession

LOCAL = ("--index", "0", "--bind", "127.0.0.1:0")


@pytest.mark.parametrize("job", ["ps", "worker"])
def test_ready_watched_and_drained(start, job):
    daemon = start(job, *LOCAL, WATCHDOG_USEC="100000", forked=True)
    assert re.search(r"STATUS=serving at 127\.0\.0\.1:\d+", daemon.hear("READY=1"))
    for _ in range(3):
        assert "MiB in memory" in daemon.hear("WATCHDOG=1")
    daemon.process.send_signal(signal.SIGTERM)
    assert "SIGTERM" in daemon.hear("STOPPING=1")
    assert daemon.process.wait(100) == 0
    lines = daemon.words().splitlines()
    head = rf"^\d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{{3}}Z I {job}:0 [0-9a-f]{{8}} "
    assert all(re.match(head, line) for line in lines), lines
    assert lines[-1].endswith("ended")


@pytest.mark.parametrize("job", ["ps", "worker"])
def test_without_standard_streams(start, job):
    daemon = start(job, *LOCAL, without_streams=True)
    daemon.hear("READY=1")
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(100) == 0


@contextlib.asynccontextmanager
async def in_session(daemon):
    """A link to a ps, and the session that it has opened there."""
    address = daemon.hear("READY=1").split()[-1]
    me = hello("chief", 0, new_incarnation())
    link = Link(address, me, name="ps:0", settings=Settings(), expect=("ps", 0))
    link.start()
    try:
        await link.wait_open(asyncio.get_running_loop().time() + 30)
        await link.request(OpenSession(me.incarnation, 0, 1, []))
        yield link, me.incarnation
    finally:
        await link.close()


def test_its_coordinator_ends_it(start):
    daemon = start("ps", *LOCAL, forked=True)

    async def end():
        async with in_session(daemon) as (link, session):
            await link.request(CloseSession(session, exit=True))

    run(end())
    assert "the coordinator shut the cluster down" in daemon.hear("STOPPING=1")
    assert daemon.process.wait(100) == 0


class Elsewhere:
    """An optimizer that never arrives: an expression, which is evaluated where it is
    unpickled, but for here, where it is tried out."""

    def __init__(self, expression):
        self.expression = expression

    def __reduce__(self):
        here = f"__import__('os').getpid() == {os.getpid()}"
        return eval, (f"{here} or {self.expression}",)


STUCK = Elsewhere("__import__('threading').Event().wait()")
SET_ASIDE = Elsewhere(
    "(gc := __import__('gc')).isenabled() and gc.get_freeze_count() > 100_000"
    " and int('set aside')"
)
"""An error that says so where jax is, and no collection of garbage looks at it."""


def test_what_was_not_done_in_time_shows_in_the_exit_code(start):
    daemon = start("ps", *LOCAL, ZSTRAT_DRAIN="0.2", forked=True)

    async def end():
        async with in_session(daemon) as (link, session):
            code = dump_code(SET_ASIDE)
            with pytest.raises(ValueError, match="set aside"):
                await link.request(CreateOptimizer(session, 1, "jax", code))
            code = dump_code(STUCK)
            stuck = link.submit(CreateOptimizer(session, 1, "stuck", code))
            await link.request(Inspect())  # answered after that one was accepted
            daemon.process.terminate()
            with pytest.raises(PeerLostError):
                await stuck

    run(end())
    assert daemon.process.wait(100) == 75
    assert "not finished within 0.2 s" in daemon.words()


def test_a_parent_that_is_gone_already(start):
    gone = subprocess.Popen(["true"])
    gone.wait()
    daemon = start("ps", *LOCAL, "--parent", str(gone.pid), forked=True)
    assert daemon.process.wait(100) == 1
    assert "already ended" in daemon.words()


def test_it_drains_when_the_process_that_it_was_told_ends(start):
    """As under ssh: that is no child's parent, and standard input says nothing."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as shell:
        daemon = start("ps", *LOCAL, "--parent", str(shell.pid), forked=True)
        daemon.hear("READY=1")
    assert f"{shell.pid} of --parent has ended" in daemon.hear("STOPPING=1")
    assert daemon.process.wait(100) == 0


def test_an_interrupt_before_it_serves_is_no_crash(start):
    """A worker that waited for its program ended with a page of traceback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        daemon = start("worker", "--join", address, "--bind", "127.0.0.1:7001")
        server.settimeout(60)
        server.accept()[0].close()
        daemon.process.send_signal(signal.SIGINT)
        assert daemon.process.wait(100) == 0
    assert "Traceback" not in daemon.words()
    assert "ended by SIGINT before it served" in daemon.words()


def test_a_system_that_cannot_watch_its_parent():
    """Other systems than Linux: it crashed."""
    program = (
        "import os, sys; del os.pidfd_open; from zstrat.daemons.ps import main; "
        f"main([*{LOCAL}, '--parent', str(os.getppid())])"
    )
    command = [sys.executable, "-c", program]
    ended = subprocess.run(
        command, stderr=subprocess.PIPE, text=True, timeout=100, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "of --parent: this system has no pidfd_open" in ended.stderr


def test_a_ps_does_without_jax_logs_json_and_ends_by_an_interrupt(start):
    daemon = start("ps", *LOCAL, "--log-json")
    daemon.hear("READY=1")
    with open(f"/proc/{daemon.process.pid}/maps") as maps:
        assert "jaxlib" not in maps.read()
    daemon.process.send_signal(signal.SIGINT)
    assert daemon.process.wait(100) == 0
    entries = [json.loads(line) for line in daemon.words().splitlines()]
    assert {entry["task"] for entry in entries} == {"ps:0"}
    assert len({entry["incarnation"] for entry in entries}) == 1
    assert entries[0]["message"].startswith("ready at 127.0.0.1:")


def test_two_lives_have_two_incarnations(start):
    first, second = [start("ps", *LOCAL, forked=True) for _ in range(2)]
    lives = set()
    for daemon in (first, second):
        daemon.hear("READY=1")
        lives.add(daemon.words().split()[3])
    assert len(lives) == 2


def test_port_taken(start):
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        daemon = start("ps", "--index", "0", "--bind", address, forked=True)
        assert daemon.process.wait(100) == 2
    assert f"cannot bind {address}" in daemon.words()
    assert "Traceback" not in daemon.words()


WRONG = '{"cluster": {"ps": 7}}'


@pytest.mark.parametrize(
    ("job", "argv", "code", "words"),
    [
        # As at boot, before the network is up: the manager is to try again. No machine
        # has this address, which is kept free for examples.
        (
            "ps",
            ["--index", "0", "--bind", "192.0.2.1:7", "--insecure"],
            75,
            "cannot bind 192.0.2.1:7",
        ),
        # As in Kubernetes, where a pod starts before its name is in DNS.
        (
            "ps",
            ["--index", "0", "--bind", "ps-0.ps.invalid:7"],
            75,
            "the name 'ps-0.ps.invalid' cannot be resolved",
        ),
        ("ps", ["--index", "0", "--bind", "0.0.0.0:0"], 2, "zstrat keygen"),
        ("ps", [*LOCAL, "--keys", "/nowhere"], 2, "/nowhere"),
        ("ps", [], 2, "zstrat-ps: TF_CONFIG: cluster.ps"),
        ("worker", [], 2, "zstrat-worker: TF_CONFIG: cluster.ps"),
    ],
)
def test_a_start_that_fails(start, job, argv, code, words):
    daemon = start(job, *argv, TF_CONFIG=WRONG, forked=True)
    assert daemon.process.wait(100) == code
    assert words in daemon.words()
    assert "Traceback" not in daemon.words()


def test_other_machines_need_no_keys_if_they_are_told_so(start):
    insecure = start(
        "ps", "--index", "0", "--bind", "0.0.0.0:0", "--insecure", forked=True
    )
    insecure.hear("READY=1")


def test_keys_from_the_service_manager(start, tmp_path):
    """systemd's access control lists look like group permissions."""
    keys = tmp_path / "keys"
    generate_keys(keys)
    keys.chmod(0o550)
    (keys / "ps.secret").chmod(0o440)
    where = ("--index", "0", "--bind", "0.0.0.0:0", "--keys", str(keys))
    refused = start("ps", *where, forked=True)
    assert refused.process.wait(100) == 2
    assert "mode 0440" in refused.words()
    start("ps", *where, CREDENTIALS_DIRECTORY=str(keys), forked=True).hear("READY=1")
    keys.chmod(0o700)


def test_second_signal_ends_at_once():
    """A drain that would last for ever, in a process that does nothing else."""
    program = """
import asyncio, os, signal
from zstrat.config import Settings
from zstrat.daemons import _main
from zstrat.launch import TaskAddress

def terminate():
    os.kill(os.getpid(), signal.SIGTERM)

class Stuck(_main.Task):
    async def start(self):
        await super().start()
        asyncio.get_running_loop().call_soon(terminate)

    async def stop(self):
        terminate()
        await asyncio.get_running_loop().create_future()

_main.Task = Stuck
task = TaskAddress("ps", 0, "127.0.0.1:0")
_main.leave(_main.run(_main.DaemonOptions(task, Settings())))
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == -signal.SIGTERM, ran.stderr
    assert "once more ends at once" in ran.stderr


@pytest.mark.parametrize("job", ["ps", "worker"])
def test_with_too_few_descriptors_it_says_so_before_libzmq_ends_it(job):
    words = (
        f"ulimit -n 30; exec {sys.executable} -m zstrat.daemons.{job} {' '.join(LOCAL)}"
    )
    command = ["bash", "-c", words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "cannot start: " in done.stderr
    assert f"{job}:0: this process may open 30 files" in done.stderr
    assert "raise `ulimit -n`" in done.stderr

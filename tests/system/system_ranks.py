"""Programs that are ranks of one cluster, each a process, as `zstrat run` starts them.

A rank says things, line by line, and goes on when it is told to; nothing else is
waited for.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

from programs import Program, run

from zstrat.cluster import free_ports

HEAD = """
import json, logging, os, socket, sys, threading
logging.getLogger("zstrat").setLevel("ERROR")  # of what it refuses it warns
task = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
hosts = os.environ.get("HOSTS")
if hosts:  # what tells hosts apart is their name
    socket.gethostname = lambda: hosts[task]

import numpy as np
import zstrat as zs
from zstrat.collectives import Group

def say(*words):
    print(*words, flush=True)

def told(function, *args, **options):
    try:
        found = function(*args, **options)
    except zs.ZstratError as error:
        say(type(error).__name__, error)
    else:
        say("no error", found)

"""
QUICK = {"ZSTRAT_LIVENESS": "2", "JAX_PLATFORMS": "cpu"}


class Ranks:
    """``size`` processes that run one program.

    They are forked (fixture `programs`), unless their command begins with another.

    Args:
        transport: "shm", "tcp", or "hosts": of which the last rank is alone on its own.
        addresses: Where they listen; default: ipc, or loopback ports for "tcp".
        before: What a rank's command begins with.
    """

    def __init__(
        self, size, program, transport="shm", addresses=None, before=None, **environment
    ):
        self.size, self._before = size, before or [[]] * 8
        self.folder = Path(tempfile.mkdtemp(prefix="zs-"))
        self.program = self.folder / "program.py"
        self.program.write_text(HEAD + textwrap.dedent(program))
        if addresses is None and transport == "tcp":
            addresses = [f"127.0.0.1:{port}" for port in free_ports(size)]
        self.addresses = addresses or [f"ipc://{self.folder}/{n}" for n in range(size)]
        if transport == "hosts":
            environment["HOSTS"] = "a" * (size - 1) + "b"
        transports = {"shm": "shm", "tcp": "tcp", "hosts": "auto"}
        self._environment = {
            **os.environ,
            **QUICK,
            "ZSTRAT_TRANSPORT": transports[transport],
        }
        self._environment.update(environment)
        self.all, self._ended = {}, []

    def __enter__(self):
        try:
            for rank in range(self.size):
                self.start(rank)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc):
        for process in [*self.all.values(), *self._ended]:
            process.kill()
            process.communicate()
        shutil.rmtree(self.folder)

    def start(self, rank, **environment):
        """Starts a rank; anew, if it was there."""
        if rank in self.all:
            self._ended.append(self.all[rank])
        task = {"type": "worker", "index": rank}
        config = {"cluster": {"worker": self.addresses}, "task": task}
        given = {"TF_CONFIG": json.dumps(config), **environment}
        options = {
            "env": {**self._environment, **given},
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "text": True,
        }
        program = str(self.program)
        if before := self._before[rank]:
            command = [*before, sys.executable, program]
            self.all[rank] = subprocess.Popen(command, **options)
        else:
            self.all[rank] = Program([program], **options)

    def line(self, rank):
        """What a rank says next.

        Raises:
            AssertionError: It fails; with all that it says of that, and the others.
        """
        said = self.all[rank].stdout.readline().strip()
        if said.startswith("Traceback"):
            rest = self.all[rank].stdout.read()
            told = [f"rank {rank} fails:\n{said}\n{rest}"]
            for other, process in self.all.items():
                if other != rank:  # it may have failed first
                    process.kill()
                    told.append(f"rank {other} says:\n{process.stdout.read()}")
            raise AssertionError("\n".join(told))
        return said

    def lines(self, ranks=None):
        """What each rank says next."""
        return [self.line(rank) for rank in (self.all if ranks is None else ranks)]

    def go_on(self, *ranks):
        """Lets ranks continue that read a line."""
        for rank in ranks:
            self.all[rank].stdin.write("\n")
            self.all[rank].stdin.flush()

    def signal(self, rank, number):
        self.all[rank].send_signal(number)
        if number == signal.SIGKILL:
            self.all[rank].wait()

    def ends(self):
        """Exit codes of all."""
        return [process.wait() for process in self.all.values()]


def zstrat_run(count, program, *options, **environment):
    """What ``zstrat run`` exits with, and the lines of each copy and its own. It is
    forked (fixture `programs`); the copies are started."""
    with tempfile.TemporaryDirectory(prefix="zs-") as folder:
        script = Path(folder) / "program.py"
        script.write_text(HEAD + textwrap.dedent(program))
        command = ["-m", "zstrat.cli", "run", "-n", str(count)]
        done = run(
            [*command, *options, str(script)],
            env={**os.environ, **QUICK, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    said = {}
    for line in done.stdout.splitlines():
        match = re.match(r"worker:(\d+) \| (.*)", line)
        rank, text = (int(match[1]), match[2]) if match else (None, line)
        said.setdefault(rank, []).append(text)
    return done.returncode, said

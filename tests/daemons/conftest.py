"""Real daemons, told who they are by arguments, heard through a notify socket."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from programs import Program


@dataclass
class Daemon:
    """A daemon and the manager's end of its notify socket."""

    process: subprocess.Popen[bytes] | Program
    manager: socket.socket
    log: Path

    def hear(self, word):
        """The datagram that contains ``word``; those before it are thrown away."""
        while True:
            states = self.manager.recv(4096).decode()
            if word in states:
                return states

    def words(self):
        return self.log.read_text()


@pytest.fixture
def start(tmp_path, programs):
    """Starts a daemon: ``start("ps", "--index", "0", ...)``; kills it afterwards.
    ``without_streams``: it has no standard streams. ``forked``: it has imported what it
    needs before, which is most of what one takes that does not serve."""
    running = []

    def begin(job, *argv, without_streams=False, forked=False, **env):
        manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        manager.bind(str(tmp_path / f"notify-{len(running)}"))
        manager.settimeout(60)
        log = tmp_path / f"log-{len(running)}"
        inherited = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
        with log.open("wb") as out:
            command = ["-m", f"zstrat.daemons.{job}", *argv]
            if not forked:
                command = [sys.executable, *command]
            if without_streams:  # `preexec_fn` would fork this process, which has jax
                command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command]
            process = (programs.Program if forked else subprocess.Popen)(
                command,
                env={**inherited, "NOTIFY_SOCKET": manager.getsockname(), **env},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        running.append(Daemon(process, manager, log))
        return running[-1]

    yield begin
    for daemon in running:
        daemon.process.kill()
        daemon.process.wait()
        daemon.manager.close()

"""A fleet on hosts that ssh reaches: the `ssh` program itself, with its own settings.

There is one ssh client for each task. Nothing asks for a password: a key that ssh finds
without a person, or an agent, lets it in. The launcher's heartbeat goes over the
connection. When the client or this program ends, the daemon's standard input ends
there, and its parent, the ssh server's process for this client, which takes a daemon
along that does not hear it.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import threading
from typing import TYPE_CHECKING, Final, Literal, final

from zstrat.cluster import GPUS_VARIABLE
from zstrat.errors import UnavailableError

from ._fleet import Fleet
from ._piped import Piped
from .hosts import hosts_of, is_loopback

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from zstrat.config import Settings

    from ._engine import FleetTask, TaskLaunch
    from .hosts import SshHost

ASKED: Final = 30.0
"""Seconds that ssh has to say what its configuration says: that may run programs."""

AT_A_TIME: Final = 6
"""Clients that knock at one host together: from ten on, an ssh server turns some away
that it does not know yet (MaxStartups)."""

_USUAL: Final = (
    "BatchMode=yes",
    "ConnectTimeout=8",
    "ServerAliveInterval=5",
    "ServerAliveCountMax=3",
)
"""Behind the user's own options, which are the ones that count then."""


@final
class SshEngine(Piped):
    """Runs each daemon behind an ssh client of its own.

    Raises:
        UnavailableError: There is no program ``ssh`` here, or it does not answer.
        ValueError: ssh does not take the options of a host; quotes it. Or some hosts,
            but not all, have loopback addresses.
    """

    name = "ssh"

    def __init__(self, hosts: Sequence[SshHost], program: str = "ssh") -> None:
        found = shutil.which(program)
        if found is None:
            raise UnavailableError(
                f"there is no program {program!r} here: install OpenSSH's client "
                "(on Debian and Ubuntu: apt install openssh-client)"
            )
        self._program = found
        self._hosts = {host.name: host for host in hosts}
        self._addresses = {host.name: self._address(host) for host in hosts}
        _refuse_loopback(self._addresses)
        self._turns = {
            host.name: threading.BoundedSemaphore(AT_A_TIME) for host in hosts
        }

    def command(self, launch: TaskLaunch, daemon: Sequence[str]) -> list[str]:
        host = self._hosts[launch.task.where]
        usual = [word for option in _USUAL for word in ("-o", option)]
        # -T: no terminal, whose line ends and echo would be in the conversation.
        words = [self._program, "-T", "-x", *host.words(), *usual]
        # exec: no shell stays in between, whose child would outlive it.
        return [*words, "--", host.name, f"exec {shlex.join(daemon)}"]

    def host(self, task: FleetTask) -> str:
        return self._addresses[task.where]

    def python(self, task: FleetTask) -> str:
        return self._hosts[task.where].python

    def env(self, task: FleetTask) -> dict[str, str]:
        gpus = self._hosts[task.where].gpus
        return {} if gpus is None else {GPUS_VARIABLE: ",".join(gpus)}

    def turn(self, task: FleetTask) -> threading.BoundedSemaphore:
        return self._turns[task.where]

    def why(self, launch: TaskLaunch, code: int, *, has_served: bool) -> str:
        where = launch.task.where
        python = self._hosts[where].python
        if code == 255 and has_served:  # as ssh says of a signal, too
            return f"it was killed there, or ssh lost {where}"
        if code == 255:
            return f"ssh does not reach {where}, or is not let in"
        if code in (126, 127):
            return f"there is no {python}; set `python` of {where} to one with zstrat"
        if not has_served and "No module named" in launch.said():
            return (
                f"{python} has no zstrat, or another one; install it there, or set "
                f"`python` of {where}"
            )
        return ""

    def _address(self, host: SshHost) -> str:
        """The address of a host as ssh's configuration has it, if the user does not
        say."""
        if host.address:
            return host.address
        words = [self._program, *host.words(), "-G", "--", host.name]
        try:
            asked = subprocess.run(
                words, capture_output=True, text=True, check=False, timeout=ASKED
            )
        except subprocess.TimeoutExpired:
            raise UnavailableError(
                f"{shlex.join(words)} did not answer within {ASKED:g} s: see what "
                "ssh's configuration runs for this host, or set its `address`"
            ) from None
        for line in asked.stdout.splitlines():
            if line.startswith("hostname "):
                return line.removeprefix("hostname ")
        raise ValueError(
            f"ssh does not take the options of {host.name}: "
            f"{asked.stderr.strip() or 'it does not say why'}"
        )


def _refuse_loopback(addresses: Mapping[str, str]) -> None:
    """Refuses loopback for some of several hosts: tasks on the others would look for
    theirs on their own host."""
    at_home = [name for name, address in addresses.items() if is_loopback(address)]
    if at_home and len(at_home) < len(addresses):
        raise ValueError(
            f"{', '.join(at_home)} would be reached at loopback, which is another host "
            "for the others: set `address` to one where they reach it"
        )


def ssh(
    hosts: str | os.PathLike[str] | Sequence[str],
    num_ps: int | None = None,
    num_workers: int | None = None,
    *,
    restarts: int = 5,
    window: float = 600.0,
    env: Mapping[str, str] | None = None,
    logs: Literal["files", "terminal"] = "files",
    directory: str | os.PathLike[str] | None = None,
    settings: Settings | None = None,
    program: str = "ssh",
) -> Fleet:
    """Parameter servers and workers on hosts that ssh reaches, for this program.

        with zs.launch.ssh(["node1", "node2"], num_ps=2, num_workers=8) as cluster:
            strategy = zs.ParameterServerStrategy(cluster)

    Each run has keys of its own, which go to the hosts through ssh. All tasks end with
    the ``with``, with this program, and with their ssh clients.

    Args:
        hosts: A TOML file (docs/engines.md), or names as ssh knows them; tasks are
            distributed to them in turn.
        num_ps, num_workers: How many of each; default: as the file says.
        restarts, window: A task that ends by itself is started again at its address, so
            often at most within so many seconds.
        env: Variables for the tasks.
        logs: "files" in ``directory``, or "terminal".
        directory: Folder for keys and logs, kept; default: a new one, removed at the
            end but for the logs of tasks that ended with an error.
        settings: Timeouts; default: from ``ZSTRAT_*``.
        program: The ssh client.

    Raises:
        ValueError: An argument or the file cannot be.
        UnavailableError: A host does not answer, does not let us in, has no zstrat, or
            a task ended there before it was ready; quotes what was said.
        VersionMismatchError: A host has another zstrat, protocol or Python.
        DeadlineExceededError: A task was not ready in ``timeouts.connect``.
    """
    found = hosts_of(hosts)
    tasks = found.tasks(num_ps, num_workers)
    used = {task.where for task in tasks}
    engine = SshEngine([host for host in found.hosts if host.name in used], program)
    return Fleet(
        engine,
        tasks,
        restarts=restarts,
        window=window,
        env=env,
        logs=logs,
        directory=directory,
        settings=settings,
    )

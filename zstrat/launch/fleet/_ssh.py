"""A fleet on hosts that ssh reaches, by the `ssh` program and its configuration.

There is one ssh client per task. ssh must not need a password: it has to find a key, or
an agent. The launcher's heartbeat goes over the connection. When the client or this
program ends, the standard input of the daemon closes; its parent, the process of the
ssh server for this client, ends as well, for which the kernel kills a daemon that
hangs.
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

CONFIG_TIMEOUT: Final = 30.0
"""Seconds for `ssh -G` to print its configuration, which may run programs."""

AT_A_TIME: Final = 6
"""Number of clients that connect to one host at the same time: from ten unauthenticated
connections on, an ssh server refuses some (MaxStartups)."""

_OPTIONS: Final = (
    "BatchMode=yes",
    "ConnectTimeout=8",
    "ServerAliveInterval=5",
    "ServerAliveCountMax=3",
)
"""After the user's options, which take precedence, as ssh uses the first value."""


@final
class SshEngine(Piped):
    """Runs each daemon with an ssh client of its own.

    Raises:
        UnavailableError: The program ``ssh`` is missing or does not answer.
        ValueError: ssh rejects the options of a host. Or some hosts, but not all, have
            loopback addresses.
    """

    name = "ssh"

    def __init__(self, hosts: Sequence[SshHost], program: str = "ssh") -> None:
        path = shutil.which(program)
        if path is None:
            raise UnavailableError(
                f"program {program!r} not found: install the OpenSSH client "
                "(on Debian and Ubuntu: apt install openssh-client)"
            )
        self._program = path
        self._hosts = {host.name: host for host in hosts}
        self._addresses = {host.name: self._address(host) for host in hosts}
        _refuse_loopback(self._addresses)
        self._turns = {
            host.name: threading.BoundedSemaphore(AT_A_TIME) for host in hosts
        }

    def command(self, launch: TaskLaunch, daemon: Sequence[str]) -> list[str]:
        host = self._hosts[launch.task.where]
        options = [word for option in _OPTIONS for word in ("-o", option)]
        # -T: no terminal, whose line ends and echo would corrupt the conversation.
        command = [self._program, "-T", "-x", *host.options_of_ssh(), *options]
        # exec: without a shell in between, which the daemon would outlive.
        return [*command, "--", host.name, f"exec {shlex.join(daemon)}"]

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
        if code == 255 and has_served:  # ssh returns 255 also after a signal
            return f"it was killed, or ssh lost the connection to {where}"
        if code == 255:
            return f"ssh could not connect to {where} or log in; try: ssh {where}"
        if code in (126, 127):
            return (
                f"{python} not found; set `python` of {where} to an interpreter with "
                "zstrat"
            )
        if not has_served and "No module named" in launch.log_tail():
            return (
                f"{python} has no zstrat, or another version; install it on {where}, "
                f"or set `python` of {where}"
            )
        return ""

    def _address(self, host: SshHost) -> str:
        """Returns the configured address of a host, or the one that ssh uses."""
        if host.address:
            return host.address
        command = [self._program, *host.options_of_ssh(), "-G", "--", host.name]
        try:
            result = subprocess.run(
                command,
                capture_output=True,
                text=True,
                check=False,
                timeout=CONFIG_TIMEOUT,
            )
        except subprocess.TimeoutExpired:
            raise UnavailableError(
                f"{shlex.join(command)} did not answer within {CONFIG_TIMEOUT:g} s: "
                "check the programs in ssh's configuration of this host, or set its "
                "`address`"
            ) from None
        for line in result.stdout.splitlines():
            if line.startswith("hostname "):
                return line.removeprefix("hostname ")
        raise ValueError(
            f"ssh rejects the options of {host.name}: "
            f"{result.stderr.strip() or f'exit code {result.returncode}'}"
        )


def _refuse_loopback(addresses: Mapping[str, str]) -> None:
    """Refuses loopback addresses for some of several hosts, as the others cannot reach
    them."""
    local = [name for name, address in addresses.items() if is_loopback(address)]
    if local and len(local) < len(addresses):
        raise ValueError(
            f"{', '.join(local)} has a loopback address, which the other hosts cannot "
            "reach: set `address` to one that they can reach"
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
    """Starts parameter servers and workers on hosts that ssh reaches.

        with zs.launch.ssh(["node1", "node2"], num_ps=2, num_workers=8) as cluster:
            strategy = zs.ParameterServerStrategy(cluster)

    Each run has its own keys, which are sent to the hosts through ssh. All tasks end
    with the ``with`` block, with this program, and with their ssh clients.

    Args:
        hosts: A TOML file (docs/engines.md), or names that ssh knows. Tasks are
            assigned to the hosts round robin.
        num_ps, num_workers: Number of parameter servers and workers; default: the
            numbers in the file.
        restarts, window: A task that fails is restarted at its address, at most
            ``restarts`` times within ``window`` seconds.
        env: Variables for the tasks.
        logs: "files" in ``directory``, or "terminal".
        directory: Folder for keys and logs, which is kept; default: a temporary folder,
            from which only the logs of failed tasks are kept.
        settings: Timeouts; default: from ``ZSTRAT_*``.
        program: The ssh client.

    Raises:
        ValueError: An argument or the file is invalid.
        UnavailableError: A host does not answer, refuses the login, has no zstrat, or a
            task ended there before it was ready; quotes the output.
        VersionMismatchError: A host has another version of zstrat, its protocol or
            Python.
        DeadlineExceededError: A task was not ready within ``timeouts.connect``.
    """
    cluster = hosts_of(hosts)
    tasks = cluster.tasks(num_ps, num_workers)
    used = {task.where for task in tasks}
    engine = SshEngine([host for host in cluster.hosts if host.name in used], program)
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

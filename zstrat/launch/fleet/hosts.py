"""Fleets on hosts that ssh reaches: the hosts, and the engine that starts tasks there.

The hosts are in a TOML file or a list of names. ssh is the `ssh` program with its
configuration. There is one ssh client per task. ssh must not need a password: it has to
find a key, or an agent. The launcher's heartbeat goes over the connection. When the
client or this program ends, the standard input of the daemon closes; its parent, the
process of the ssh server for this client, ends as well, for which the kernel kills a
daemon that hangs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, final

from zstrat.cluster import GPUS_VARIABLE, visible_gpus
from zstrat.config import did_you_mean, read_toml
from zstrat.errors import UnavailableError

from ._fleet import Fleet
from ._piped import Piped
from .state import FleetTask

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zstrat.config import Settings

    from .state import TaskLaunch


JOBS: Final = ("ps", "worker")
MAX_TASKS: Final = 65536
"""Tasks of a job at most, so that a typo does not fill the memory."""


@dataclass(frozen=True, slots=True)
class SshHost:
    """A host and its ssh options.

    Args:
        name: The host name for ssh.
        address: The address at which other tasks reach it; "": the host name in ssh's
            configuration.
        options: Options for ``ssh -o``.
        python: The Python interpreter with zstrat on that host.
        jobs: The jobs that may run there.
        ps, workers: Number of tasks of each job; -1: a share of the remaining tasks.
        ports: A range such as "7000-7009", from which its tasks take ports in order;
            "": free ports.
        gpus: The GPUs that its workers divide; None: all visible ones.
    """

    name: str
    address: str = ""
    user: str = ""
    port: int = 0
    identity: str = ""
    config: str = ""
    options: tuple[str, ...] = ()
    python: str = sys.executable
    jobs: tuple[str, ...] = JOBS
    ps: int = -1
    workers: int = -1
    ports: str = ""
    gpus: tuple[str, ...] | None = None

    def own(self, job: str) -> int:
        """Returns the number of tasks of a job that is configured for this host; -1 if
        none is."""
        return self.ps if job == "ps" else self.workers

    def port_range(self) -> range:
        """Parses the range of ports for tasks of this host; empty if they use free
        ports.

        Raises:
            ValueError: ``ports`` has another form.
        """
        if not self.ports:
            return range(0)
        first, dash, last = self.ports.partition("-")
        ports = range(int(first), int(last if dash else first) + 1)
        if not ports or ports[0] < 1 or ports[-1] >= 2**16:
            raise ValueError(self.ports)
        return ports

    def options_of_ssh(self) -> list[str]:
        """Builds the command line options of ssh for this host."""
        options: list[str] = []
        given = ("-F", self.config), ("-i", self.identity), ("-l", self.user)
        for option, value in given:
            if value:
                # ssh runs without a shell, which would expand ~.
                path = os.path.expanduser(value) if option != "-l" else value
                options += [option, path]
        options += ["-p", str(self.port)] if self.port else []
        for option in self.options:
            options += ["-o", option]
        return options


@dataclass(frozen=True, slots=True)
class SshHosts:
    """The hosts, and the total numbers of tasks (``ps``, ``workers``) if their file has
    them, else None."""

    hosts: tuple[SshHost, ...]
    ps: int | None = None
    workers: int | None = None

    def tasks(self, num_ps: int | None, num_workers: int | None) -> list[FleetTask]:
        """Assigns tasks to hosts. Hosts with a configured number of tasks get that
        number; the other tasks are assigned round robin to the other hosts, ps before
        workers.

        Raises:
            ValueError: A number of tasks is missing, no host accepts a job, or a host
                has fewer ports than tasks.
        """
        ps = self._assign("ps", self.ps if num_ps is None else num_ps, 0)
        # Workers continue after the last ps that was assigned round robin, so that
        # hosts are filled evenly.
        begin = sum(self._own("ps").get(where) is None for where in ps)
        wanted = self.workers if num_workers is None else num_workers
        workers = self._assign("worker", wanted, begin)
        tasks = [FleetTask("ps", n, where) for n, where in enumerate(ps)]
        tasks += [FleetTask("worker", n, where) for n, where in enumerate(workers)]
        return self._with_ports(tasks)

    def _own(self, job: str) -> dict[str, int]:
        """Returns the configured numbers of tasks of a job by host."""
        return {host.name: host.own(job) for host in self.hosts if host.own(job) >= 0}

    def _assign(self, job: str, count: int | None, begin: int) -> list[str]:
        """Returns the host of each task of a job; round robin starts at ``begin``."""
        own, least = self._own(job), 1 if job == "ps" else 0
        fixed = sum(own.values())
        if count is None and own:
            count = fixed
        if count is None or not least <= count <= MAX_TASKS:
            got = "not specified" if count is None else f"got {count}"
            raise ValueError(
                f"number of tasks of job {job!r}: {got}, expected {least} to "
                f"{MAX_TASKS}; pass --ps and --workers (num_ps=, num_workers=), or set "
                "ps and workers in the file"
            )
        if count < fixed:
            numbers = ", ".join(f"{name}: {number}" for name, number in own.items())
            raise ValueError(
                f"number of tasks of job {job!r}: got {count}, but the hosts are "
                f"configured for {fixed} ({numbers}): expected {fixed} or more"
            )
        free = [h.name for h in self.hosts if job in h.jobs and h.name not in own]
        if count > fixed and not free:
            raise ValueError(
                f"no host accepts {count - fixed} of {count} tasks of job {job!r}: "
                "check `jobs`, `ps` and `workers` of the hosts"
            )
        hosts = [name for name, number in own.items() for _ in range(number)]
        rest = range(begin, begin + count - fixed)
        return hosts + [free[number % len(free)] for number in rest]

    def _with_ports(self, tasks: list[FleetTask]) -> list[FleetTask]:
        """Gives each task the next port of its host's range, if there is one."""
        # A port for each task, also over jobs: ps and workers of a host share the
        # range.
        left = {host.name: list(host.port_range()) for host in self.hosts if host.ports}
        with_ports = []
        for task in tasks:
            ports = left.get(task.where)
            if ports == []:
                count = sum(other.where == task.where for other in tasks)
                raise ValueError(
                    f"ports of {task.where}: expected {count} or more, one per task"
                )
            port = ports.pop(0) if ports else 0
            with_ports.append(dataclasses.replace(task, port=port))
        return with_ports


def hosts_of(given: str | os.PathLike[str] | Sequence[str]) -> SshHosts:
    """Reads the hosts of a TOML file, or makes hosts of a list of names.

    Raises:
        ValueError: The file cannot be read or has an invalid value.
    """
    if isinstance(given, (str, os.PathLike)):
        return _hosts_in(os.fspath(given), read_toml(given))
    return _checked("hosts", SshHosts(tuple(SshHost(name) for name in given)))


_HOST_KEYS: Final = sorted(
    {field.name for field in dataclasses.fields(SshHost)} - {"name"}
)
_KINDS: Final[dict[type, str]] = {int: "number", str: "string", list: "list"}


def _hosts_in(file: str, table: Mapping[str, object]) -> SshHosts:
    # Keys outside of the tables of the hosts are defaults for all of them.
    rest = dict(table)
    named = rest.pop("hosts", None)
    ps, workers = (_number(file, key, rest.pop(key, None)) for key in ("ps", "workers"))
    if not isinstance(named, dict) or not named:
        unknown = sorted(rest.keys() - set(_HOST_KEYS))
        found = f" (there is {unknown[0]!r})" if unknown else ""
        raise ValueError(
            f"{file}: no hosts{found}: expected a table for each host, such as "
            "[hosts.node1]"
        )
    hosts = []
    for name, own in named.items():
        if not isinstance(own, dict):
            raise ValueError(f"{file}: hosts.{name}: expected a table")
        hosts.append(_host(file, name, {**rest, **own}))
    return _checked(file, SshHosts(tuple(hosts), ps, workers))


def _number(file: str, key: str, given: object) -> int | None:
    # True is an int in Python, but no number of tasks.
    if given is None or (isinstance(given, int) and not isinstance(given, bool)):
        return given
    raise ValueError(f"{file}: {key} = {given!r}: expected a number")


def _host(file: str, name: str, table: Mapping[str, object]) -> SshHost:
    # The types of the keys are those of the defaults, so that a new field is read, too.
    kinds = {field.name: field.default for field in dataclasses.fields(SshHost)}
    values: dict[str, object] = {}
    for key, value in table.items():
        if key == "name" or key not in kinds:
            raise ValueError(
                f"{file}: unknown key {key!r} of a host: expected one of "
                f"{', '.join(_HOST_KEYS)}{did_you_mean(key, _HOST_KEYS)}"
            )
        # None is the default of `gpus` alone.
        is_list = kinds[key] is None or isinstance(kinds[key], tuple)
        kind = list if is_list else type(kinds[key])
        # True is an int in Python, but no key of a host is a boolean.
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"{file}: {key} = {value!r}: expected a {_KINDS[kind]}")
        values[key] = tuple(map(str, value)) if isinstance(value, list) else value
    return dataclasses.replace(SshHost(name), **values)  # type: ignore[arg-type]


def _problem(host: SshHost) -> str:
    """Returns the first invalid value and what is expected; "" if all are valid."""
    if host.address and not _is_address(host.address):
        return (
            f"address = {host.address!r}: expected a host name or an IP address, "
            "without a port"
        )
    if not 0 <= host.port < 2**16:
        return f"port = {host.port}: expected a number from 1 to 65535"
    if host.ports and not _is_range(host):
        return f"ports = {host.ports!r}: expected a range such as '7000-7009'"
    for key, job in (("ps", "ps"), ("workers", "worker")):
        if host.own(job) < -1 or (host.own(job) > 0 and job not in host.jobs):
            return f"{key} = {host.own(job)}, jobs = {[*host.jobs]}: expected 0 or more"
    if not host.python.strip() or host.python.startswith("~"):
        return (
            f"python = {host.python!r}: expected an absolute path, or a program in "
            "PATH of that host (~ is not expanded)"
        )
    gpus = list(host.gpus or ())
    # CUDA stops reading at the first invalid entry, silently.
    if visible_gpus({GPUS_VARIABLE: ",".join(gpus)}) != gpus or len({*gpus}) < len(
        gpus
    ):
        return f"gpus = {gpus}: expected distinct numbers, or names such as 'GPU-...'"
    return ""


def _is_range(host: SshHost) -> bool:
    with contextlib.suppress(ValueError):
        return len(host.port_range()) > 0
    return False


def _is_address(text: str) -> bool:
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(text)
        return True
    return (
        re.fullmatch(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?", text) is not None
    )


def is_loopback(host: str) -> bool:
    """Returns whether the address is a loopback address, which on every host means that
    host."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _checked(file: str, cluster: SshHosts) -> SshHosts:
    names = [host.name for host in cluster.hosts]
    if not names or len(set(names)) != len(names):
        raise ValueError(f"{file}: expected one or more distinct hosts, got {names}")
    for host in cluster.hosts:
        # The name is an argument of ssh, to which "-oProxyCommand=..." is an option.
        if not host.name or host.name.startswith("-") or not host.name.isprintable():
            raise ValueError(f"{file}: {host.name!r:.80} is not a host name")
        if set(host.jobs) - set(JOBS):
            raise ValueError(f"{file}: jobs of {host.name}: expected some of {JOBS}")
        if problem := _problem(host):
            raise ValueError(f"{file}: {host.name}: {problem}")
    return cluster


CONFIG_TIMEOUT: Final = 30.0
"""Seconds for `ssh -G` to print its configuration, which may run programs."""

AT_A_TIME: Final = 6
"""Number of ssh clients that connect to one host at the same time: from ten
unauthenticated connections on, an ssh server refuses some (MaxStartups)."""

_OPTIONS: Final = (
    "BatchMode=yes",
    "ConnectTimeout=8",
    "ServerAliveInterval=5",
    "ServerAliveCountMax=3",
)
"""Options for ssh, given after the user's options, which take precedence, as ssh uses
the first value."""


@final
class SshEngine(Piped):
    """Runs each daemon with its own ssh client.

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
        # Once, before any task starts: it runs ssh, and a host that ssh does not know
        # fails the whole fleet.
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
        # --: what follows is a host even if it begins with a dash.
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
        # ssh returns 255 for its own errors, and also if a signal ended the command.
        if code == 255 and has_served:
            return f"it was killed, or ssh lost the connection to {where}"
        if code == 255:
            return f"ssh could not connect to {where} or log in; try: ssh {where}"
        # Of the shell there: not executable, not found.
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
        # -G prints the configuration, after aliases and Match blocks, and does not
        # connect.
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
    # All loopback: the hosts are one machine by several names, as in a trial.
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
    # Hosts without a task need not be reachable, nor known to ssh.
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

"""Hosts of one's own, and which tasks they get: a file, or names in a list."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import os
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from zstrat.cluster import GPUS_VARIABLE, visible_gpus
from zstrat.config import read_toml

from ._engine import FleetTask

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

JOBS: Final = ("ps", "worker")


@dataclass(frozen=True, slots=True)
class SshHost:
    """A host, and how ssh gets there.

    ``name`` is what ssh is told. Others reach its tasks at ``address``; "": the host
    name that ssh's own configuration has for it. ``options`` are those of ``ssh -o``.
    ``python`` is the interpreter there that has zstrat, ``jobs`` what may run there.
    ``ps`` and ``workers`` are how many of each run there, -1: those whose turn it is.
    ``ports`` is a range, as in "7000-7009", that its tasks take theirs from, in their
    order; "": free ones. ``gpus`` are those that its workers divide among them, None:
    all that they see.
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
        """How many tasks of a job it says that it has, -1 if it says nothing."""
        return self.ps if job == "ps" else self.workers

    def port_range(self) -> range:
        """The ports of its tasks; empty if they take free ones.

        Raises:
            ValueError: It is written otherwise.
        """
        if not self.ports:
            return range(0)
        first, dash, last = self.ports.partition("-")
        found = range(int(first), int(last if dash else first) + 1)
        if not found or found[0] < 1 or found[-1] >= 2**16:
            raise ValueError(self.ports)
        return found

    def words(self) -> list[str]:
        """The options of ssh for this host."""
        found: list[str] = []
        given = ("-F", self.config), ("-i", self.identity), ("-l", self.user)
        for option, value in given:
            if value:
                # ssh is called without a shell, which would put a home in place of ~.
                path = os.path.expanduser(value) if option != "-l" else value
                found += [option, path]
        found += ["-p", str(self.port)] if self.port else []
        for option in self.options:
            found += ["-o", option]
        return found


@dataclass(frozen=True, slots=True)
class SshHosts:
    """Hosts, and how many tasks the file wants on them; None: it does not say."""

    hosts: tuple[SshHost, ...]
    ps: int | None = None
    workers: int | None = None

    def tasks(self, num_ps: int | None, num_workers: int | None) -> list[FleetTask]:
        """Who runs where. Hosts that say how many tasks they have get so many, the
        others the rest, distributed in turn, the workers behind the ps.

        Raises:
            ValueError: Nobody says how many, no host takes a job, or a host has fewer
                ports than tasks.
        """
        ps = self._places("ps", self.ps if num_ps is None else num_ps, 0)
        # Workers go on where the servers ended, so that hosts are filled evenly.
        begin = sum(self._own("ps").get(where) is None for where in ps)
        wanted = self.workers if num_workers is None else num_workers
        workers = self._places("worker", wanted, begin)
        tasks = [FleetTask("ps", n, where) for n, where in enumerate(ps)]
        tasks += [FleetTask("worker", n, where) for n, where in enumerate(workers)]
        return self._with_ports(tasks)

    def _own(self, job: str) -> dict[str, int]:
        """How many tasks of a job each host has, of those that say so."""
        return {each.name: each.own(job) for each in self.hosts if each.own(job) >= 0}

    def _places(self, job: str, count: int | None, begin: int) -> list[str]:
        """The host of each task of a job; the first ``begin`` had a turn already."""
        own, least = self._own(job), 1 if job == "ps" else 0
        fixed = sum(own.values())
        if count is None and own:
            count = fixed
        if count is None or count < least:
            said = "nobody says how many" if count is None else str(count)
            raise ValueError(
                f"tasks of job {job!r}: {said}: expected {least} or more; say --ps and "
                "--workers (num_ps=, num_workers=), or ps and workers in the file"
            )
        if count < fixed:
            said = ", ".join(f"{name}: {number}" for name, number in own.items())
            raise ValueError(
                f"{count} tasks of job {job!r}, and hosts say that they have {fixed} "
                f"({said}): expected so many or more"
            )
        takers = [h.name for h in self.hosts if job in h.jobs and h.name not in own]
        if count > fixed and not takers:
            raise ValueError(
                f"no host takes job {job!r}, and {count - fixed} of {count} are left: "
                "see `jobs`, `ps` and `workers` of the hosts"
            )
        places = [name for name, number in own.items() for _ in range(number)]
        turns = range(begin, begin + count - fixed)
        return places + [takers[turn % len(takers)] for turn in turns]

    def _with_ports(self, tasks: list[FleetTask]) -> list[FleetTask]:
        """On hosts with a range of ports each task gets the next one."""
        left = {host.name: list(host.port_range()) for host in self.hosts if host.ports}
        placed = []
        for task in tasks:
            ports = left.get(task.where)
            if ports == []:
                count = sum(each.where == task.where for each in tasks)
                raise ValueError(
                    f"ports of {task.where}: expected {count} or more, one a task"
                )
            port = ports.pop(0) if ports else 0
            placed.append(dataclasses.replace(task, port=port))
        return placed


def hosts_of(given: str | os.PathLike[str] | Sequence[str]) -> SshHosts:
    """The hosts of a TOML file, or of names.

    Raises:
        ValueError: The file cannot be read, or says what cannot be; names file and key.
    """
    if isinstance(given, (str, os.PathLike)):
        return _hosts_in(os.fspath(given), read_toml(given))
    found = tuple(SshHost(name) for name in given)
    return _checked("hosts", SshHosts(found))


def _hosts_in(file: str, table: Mapping[str, object]) -> SshHosts:
    rest = dict(table)
    named = rest.pop("hosts", None)
    counts = {key: rest.pop(key, None) for key in ("ps", "workers")}
    if not isinstance(named, dict) or not named:
        raise ValueError(
            f"{file}: expected a table for each host, such as [hosts.node1]"
        )
    for key, count in counts.items():
        if count is not None and (
            isinstance(count, bool) or not isinstance(count, int)
        ):
            raise ValueError(f"{file}: {key} = {count!r}: expected a number")
    hosts = []
    for name, own in named.items():
        if not isinstance(own, dict):
            raise ValueError(f"{file}: hosts.{name}: expected a table")
        hosts.append(_host(file, name, {**rest, **own}))
    ps, workers = counts["ps"], counts["workers"]
    assert ps is None or isinstance(ps, int)
    assert workers is None or isinstance(workers, int)
    return _checked(file, SshHosts(tuple(hosts), ps, workers))


def _host(file: str, name: str, said: Mapping[str, object]) -> SshHost:
    kinds = {field.name: field.default for field in dataclasses.fields(SshHost)}
    told: dict[str, object] = {}
    for key, value in said.items():
        if key == "name" or key not in kinds:
            known = ", ".join(sorted(kinds.keys() - {"name"}))
            raise ValueError(f"{file}: {key!r} is no setting of a host: only {known}")
        is_list = kinds[key] is None or isinstance(kinds[key], tuple)
        kind = list if is_list else type(kinds[key])
        # True is an int to Python, and no setting of a host is a boolean.
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(
                f"{file}: {key} = {value!r}: expected a {kind.__name__} there"
            )
        told[key] = tuple(map(str, value)) if isinstance(value, list) else value
    return dataclasses.replace(SshHost(name), **told)  # type: ignore[arg-type]


def _wrong(host: SshHost) -> str:
    """What cannot be, and what is expected; "" if all can."""
    if host.address and not _is_address(host.address):
        return f"address = {host.address!r}: expected a name or an IP address, no port"
    if not 0 <= host.port < 2**16:
        return f"port = {host.port}: expected a number from 1 to 65535"
    if host.ports and not _is_range(host):
        return f"ports = {host.ports!r}: expected a range, as in '7000-7009'"
    for key, job in (("ps", "ps"), ("workers", "worker")):
        if host.own(job) < -1 or (host.own(job) > 0 and job not in host.jobs):
            return f"{key} = {host.own(job)}, jobs = {[*host.jobs]}: expected 0 or more"
    if not host.python.strip() or host.python.startswith("~"):
        return (
            f"python = {host.python!r}: expected a path from / on, or a program in "
            "PATH there (no shell puts a home in place of ~)"
        )
    gpus = list(host.gpus or ())
    if visible_gpus({GPUS_VARIABLE: ",".join(gpus)}) != gpus or len({*gpus}) < len(
        gpus
    ):
        return f"gpus = {gpus}: expected different numbers, or names as in 'GPU-...'"
    return ""


def _is_range(host: SshHost) -> bool:
    with contextlib.suppress(ValueError):
        return len(host.port_range()) > 0
    return False


def _is_address(said: str) -> bool:
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(said)
        return True
    return (
        re.fullmatch(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?", said) is not None
    )


def is_loopback(host: str) -> bool:
    """Whether others take this address for themselves."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _checked(file: str, found: SshHosts) -> SshHosts:
    names = [host.name for host in found.hosts]
    if not names or len(set(names)) != len(names):
        raise ValueError(f"{file}: expected one or more different hosts, got {names}")
    for host in found.hosts:
        # It becomes an argument of ssh, which would take "-oProxyCommand=..." for an
        # option.
        if not host.name or host.name.startswith("-") or not host.name.isprintable():
            raise ValueError(f"{file}: {host.name!r:.80} is no name of a host")
        if set(host.jobs) - set(JOBS):
            raise ValueError(f"{file}: jobs of {host.name}: expected some of {JOBS}")
        wrong = _wrong(host)
        if wrong:
            raise ValueError(f"{file}: {host.name}: {wrong}")
    return found

"""The tasks of a cluster: jobs, indices and addresses, validated.

A spec is a value, compared by contents. A job is dense (tasks 0..n-1) or sparse (some
indices are missing: tasks that another task need not know). It resolves no addresses.

The validation of a spec follows TensorFlow, with TensorFlow's messages, for which
people search. Plain data from TF_CONFIG or a file is checked more strictly here: the
error names the key, what was expected and what was found.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, final

from zstrat.config import did_you_mean

_HOST: Final = re.compile(r"[0-9A-Za-z._%-]{1,255}|\[[0-9A-Za-z._%:-]{1,255}\]")
"""Host names and addresses that a peer can connect to."""

Tasks = list[str] | tuple[str, ...] | Mapping[int, str] | Mapping[str, str]


@final
class ClusterSpec:
    """The addresses of all tasks, by job and index.

    Args:
        cluster: Another spec, or job -> list of addresses, or job -> index -> address.

    Raises:
        TypeError: A part of ``cluster`` is of another type; names the job.
    """

    __slots__ = ("_jobs",)

    def __init__(self, cluster: ClusterSpec | Mapping[str, Tasks]) -> None:
        self._jobs: dict[str, dict[int, str]]
        # Copied, as a spec is a value; checked already.
        if isinstance(cluster, ClusterSpec):
            self._jobs = {job: dict(tasks) for job, tasks in cluster._jobs.items()}
        elif isinstance(cluster, Mapping):
            self._jobs = {job: _tasks(job, tasks) for job, tasks in cluster.items()}
        else:
            raise TypeError(
                "`cluster` must be a dictionary mapping one or more job names to lists "
                "of network addresses, or a `ClusterSpec`, "
                f"got {type(cluster).__name__}"
            )

    @property
    def jobs(self) -> list[str]:
        """Names of the jobs, in the order of the cluster that was given."""
        return list(self._jobs)

    def num_tasks(self, job_name: str) -> int:
        """Returns the number of tasks of the job.

        Raises:
            ValueError: No such job.
        """
        return len(self._job(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Indices of the tasks of the job, sorted.

        Raises:
            ValueError: No such job.
        """
        return sorted(self._job(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Address of one task.

        Raises:
            ValueError: No such job, or no task of that index in it.
        """
        tasks = self._job(job_name)
        if task_index not in tasks:
            raise ValueError(
                f"No task with index {task_index!r} in job {job_name!r}, "
                f"which has {sorted(tasks)}"
            )
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Addresses by index, None where an index is missing.

        Raises:
            ValueError: No such job.
        """
        tasks = self._job(job_name)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Returns job -> list of addresses for dense jobs, index -> address for sparse
        ones, and an empty dictionary for jobs without tasks."""
        return {job: _plain(tasks) for job, tasks in self._jobs.items()}

    def as_cluster_def(self) -> dict[str, dict[int, str]]:
        """Returns job -> index -> address: a dictionary in place of TF's message, which
        `ClusterSpec` and ``zs.Server`` accept."""
        return {job: dict(sorted(tasks.items())) for job, tasks in self._jobs.items()}

    def _job(self, job_name: str) -> dict[int, str]:
        if job_name not in self._jobs:
            raise ValueError(
                f"No such job in cluster: {job_name!r}, it has {list(self._jobs)}"
            )
        return self._jobs[job_name]

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ClusterSpec):
            return NotImplemented
        return self._jobs == other._jobs

    __hash__ = None  # type: ignore[assignment]  # as in TensorFlow: equal, never a key

    def __repr__(self) -> str:
        return f"ClusterSpec({self.as_dict()!r})"


def _tasks(job: object, tasks: object) -> dict[int, str]:
    if not isinstance(job, str):
        raise TypeError(f"Job name {job!r} must be a string")
    match tasks:
        case list() | tuple():
            indexed = dict(enumerate(tasks))
        case Mapping():
            indexed = {_index(job, index): task for index, task in tasks.items()}
        case _:
            raise TypeError(
                f"The tasks for job {job!r} must be a list or a dictionary from "
                f"integers to strings, got {type(tasks).__name__}"
            )
    for index, address in indexed.items():
        if not isinstance(address, str):
            raise TypeError(
                f"Task address {address!r} (job {job!r}, task {index}) must be a string"
            )
    return indexed


def _index(job: str, index: object) -> int:
    try:
        number = int(index)  # type: ignore[call-overload]  # JSON has strings as keys
    except (TypeError, ValueError):
        # Refused below, like a negative one.
        number = -1
    if number < 0:
        raise TypeError(
            f"The tasks for job {job!r} must have indices of 0 or more, got {index!r}"
        )
    return int(number)


def _plain(tasks: dict[int, str]) -> list[str] | dict[int, str]:
    if tasks and max(tasks) + 1 == len(tasks):
        return [tasks[index] for index in range(len(tasks))]
    return dict(sorted(tasks.items()))


def spec_from(cluster: object, source: str) -> ClusterSpec:
    """Makes a spec of plain data: job -> addresses, as a list or by index.

    Args:
        source: The origin of the data, with which every message begins.

    Raises:
        ValueError: The data is invalid; names the key.
    """
    if not isinstance(cluster, Mapping):
        raise ValueError(
            f"{source}: cluster: expected an object {{job: [address, ...]}}, "
            f"got {cluster!r:.80}"
        )
    spec = ClusterSpec(
        {
            job: _addresses(tasks, f"{source}: cluster.{job}")
            for job, tasks in cluster.items()
        }
    )
    _check_distinct(spec, source)
    return spec


def check_names(
    names: Collection[str], allowed: Collection[str], where: str, what: str
) -> None:
    """Checks that all names are allowed.

    Raises:
        ValueError: A name is not allowed; lists the allowed names and the closest one.
    """
    for name in names:
        if name not in allowed:
            raise ValueError(
                f"{where}: unknown {what} {name!r}: expected one of "
                f"{', '.join(allowed)}{did_you_mean(name, allowed)}"
            )


def check_task_type(kind: object, allowed: Collection[str], where: str) -> None:
    """Checks the type of a task.

    Raises:
        ValueError: The type is not allowed; lists the allowed types.
    """
    if kind not in allowed:
        raise ValueError(
            f"{where}: task.type: expected one of {', '.join(allowed)}, "
            f"got {kind!r:.80}{did_you_mean(str(kind), allowed)}"
        )


def _check_distinct(spec: ClusterSpec, source: str) -> None:
    """Checks that tasks have distinct addresses. An evaluator has no listening socket,
    so its address is ignored."""
    first: dict[str, str] = {}
    for job in spec.jobs:
        if job == "evaluator":
            continue
        for index in spec.task_indices(job):
            address = spec.task_address(job, index)
            task = f"{job}:{index}"
            # With and without the scheme it is the same address.
            other = first.setdefault(address.removeprefix("tcp://"), task)
            if other != task:
                raise ValueError(
                    f"{source}: cluster: expected distinct addresses, got {address!r} "
                    f"for both {other} and {task}"
                )


def _addresses(tasks: object, where: str) -> Tasks:
    if isinstance(tasks, list):
        return [_address(task, f"{where}[{at}]") for at, task in enumerate(tasks)]
    if not isinstance(tasks, Mapping):
        raise ValueError(f"{where}: expected a list of addresses, got {tasks!r:.80}")
    for index in tasks:
        if not (isinstance(index, str) and index.isascii() and index.isdigit()):
            raise ValueError(f"{where}: expected task indices as keys, got {index!r}")
    # "1" and "01" are two keys and one index.
    if len(set(map(int, tasks))) != len(tasks):
        raise ValueError(f"{where}: expected each task index once, got {list(tasks)}")
    return {
        int(index): _address(task, f"{where}.{index}") for index, task in tasks.items()
    }


def ranked_cluster(
    jobs: Mapping[str, int], addresses: Sequence[str]
) -> tuple[ClusterSpec, list[tuple[str, int]]]:
    """Assigns ranks to jobs in the order of the job names; returns the cluster, and the
    job and index of each rank.

    Args:
        jobs: Job -> number of tasks; the total is the number of addresses.
        addresses: Addresses in the order of ranks.
    """
    names = [(job, index) for job in sorted(jobs) for index in range(jobs[job])]
    cluster: dict[str, list[str]] = {job: [] for job in sorted(jobs)}
    for (job, _), address in zip(names, addresses, strict=True):
        cluster[job].append(address)
    return ClusterSpec(cluster), names


def host_and_port(host: str, port: int | str) -> str:
    """Joins a host and a port to an address, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def task_index(index: Any, what: str) -> int:
    """Converts the index of a task, given as a number of any type or as text.

    Raises:
        ValueError: The value is not an index; the message begins with ``what``.
    """
    # int() alone would accept 1.5 and true.
    if not isinstance(index, bool):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            number = int(index)
            if number >= 0 and (isinstance(index, str) or number == index):
                return number
    raise ValueError(f"{what}: expected an integer of 0 or more, got {index!r:.80}")


def _address(address: object, where: str) -> str:
    if not isinstance(address, str):
        raise ValueError(f'{where}: expected "host:port", got {address!r:.80}')
    scheme, separator, rest = address.rpartition("://")
    # The path of a socket has no parts to check.
    if separator and scheme == "ipc" and rest:
        return address
    # The last colon, as an IPv6 host has several.
    host, colon, port = rest.rpartition(":")
    words = f'{where}: expected "host:port", got {address!r}'
    if separator and scheme != "tcp":
        raise ValueError(f"{words}: expected the scheme tcp:// or ipc://")
    if not colon:
        raise ValueError(f"{words}: the port is missing")
    if not host:
        raise ValueError(f"{words}: the host is missing")
    if host == "*":
        raise ValueError(
            f"{words}: other tasks need the name or address of a machine; to bind all "
            "interfaces start the daemon with --bind '*:PORT'"
        )
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"{words}: expected a port of 1 to 65535")
    if ":" in host and not (host[0] == "[" and host[-1] == "]"):
        raise ValueError(f'{words}: an IPv6 address needs brackets, "[::1]:2222"')
    if _HOST.fullmatch(host) is None:
        raise ValueError(f"{words}: {host!r} is neither a host name nor an IP address")
    return address

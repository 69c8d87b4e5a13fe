"""Who is in a cluster: jobs, task indices, addresses. A value, compared by contents.

A job is dense (tasks 0..n-1) or sparse (some indices are missing: a task that another
one need not know). It holds what it was given and resolves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

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
        """Number of tasks of the job.

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
        """Job -> list of addresses where it is dense, index -> address where it is not.

        A job without tasks is an empty dictionary.
        """
        return {job: _plain(tasks) for job, tasks in self._jobs.items()}

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

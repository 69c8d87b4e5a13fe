"""What a cluster must be: TensorFlow's rules for a spec, ours for what a person writes.

The first half answers with TensorFlow's words, which people search for. The second half
reads plain data that came from TF_CONFIG or a file and says which key is wrong, what
was expected there and what was found.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ._spec import ClusterSpec, Tasks

TASK_TYPES: Final = ("chief", "worker", "evaluator", "ps")
_ALLOWED: Final = (*TASK_TYPES, None)


def normalize_cluster_spec(cluster_spec: object) -> ClusterSpec:
    """A ClusterSpec of a dictionary or of a ClusterSpec.

    Raises:
        ValueError: It is neither.
        TypeError: The dictionary holds something else than addresses.
    """
    if isinstance(cluster_spec, ClusterSpec):
        return cluster_spec
    if isinstance(cluster_spec, dict):
        return ClusterSpec(cluster_spec)
    raise ValueError(
        "`cluster_spec' should be dict or a `ClusterSpec` object, "
        f"got {type(cluster_spec).__name__}"
    )


def task_count(cluster_spec: object, task_type: str) -> int:
    """Number of tasks of the job, 0 if the cluster has no such job."""
    spec = normalize_cluster_spec(cluster_spec)
    return spec.num_tasks(task_type) if task_type in spec.jobs else 0


def validate_cluster_spec(
    cluster_spec: object, task_type: str | None, task_id: int | None
) -> None:
    """Whether this task can be in this cluster.

    ``task_id`` may be None where the job has only one task. The evaluator may be
    missing in the cluster.

    Raises:
        ValueError: In TensorFlow's order: a job that no cluster has, an unknown task
            type, a task type that the cluster lacks, more than one chief or evaluator,
            an id beyond the last task.
    """
    spec = normalize_cluster_spec(cluster_spec)
    if any(job not in _ALLOWED for job in spec.jobs):
        raise ValueError(
            f"Disallowed task type found in cluster spec. Allowed types are {_ALLOWED} "
            f"and the cluster spec is {spec}."
        )
    if task_type not in _ALLOWED:
        raise ValueError(
            f"Unrecognized task_type: {task_type}, valid task types are {_ALLOWED}"
        )
    if task_type and task_type not in spec.jobs and task_type != "evaluator":
        raise ValueError(
            f"`task_type` {task_type!r} not found in cluster_spec, "
            f"which has {spec.jobs}."
        )
    for job in ("chief", "evaluator"):
        if task_count(spec, job) > 1:
            raise ValueError(f"There must be at most one {job!r} job.")
    if task_type in spec.jobs:
        _check_id(spec, task_type, task_id)


def _check_id(spec: ClusterSpec, task_type: str, task_id: int | None) -> None:
    indices = spec.task_indices(task_type)
    last = max(indices, default=-1)
    if task_id is None:
        if len(indices) != 1:
            raise ValueError(
                f"The `task_id` is missing, and {task_type} has {len(indices)} tasks."
            )
    elif task_id > last:
        raise ValueError(
            f"The `task_id` {task_id} exceeds the maximum id of {task_type}, "
            f"which is {last}."
        )
    elif task_id not in indices:
        raise ValueError(f"There is no `task_id` {task_id} in {task_type}: {indices}.")


# ---- what a person wrote ---------------------------------------------------------


def spec_from(cluster: object, source: str) -> ClusterSpec:
    """The spec of plain data: job -> addresses, as a list or by index.

    Args:
        source: What the data came from; begins every message.

    Raises:
        ValueError: Says which key, what was expected and what was found.
    """
    if not isinstance(cluster, Mapping):
        raise ValueError(
            f"{source}: cluster: expected an object {{job: [address, ...]}}, "
            f"got {cluster!r:.80}"
        )
    return ClusterSpec(
        {
            job: _addresses(tasks, f"{source}: cluster.{job}")
            for job, tasks in cluster.items()
        }
    )


def _addresses(tasks: object, where: str) -> Tasks:
    if isinstance(tasks, list):
        return [_address(each, f"{where}[{at}]") for at, each in enumerate(tasks)]
    if not isinstance(tasks, Mapping):
        raise ValueError(f"{where}: expected a list of addresses, got {tasks!r:.80}")
    for index in tasks:
        if not (isinstance(index, str) and index.isascii() and index.isdigit()):
            raise ValueError(f"{where}: expected task indices as keys, got {index!r}")
    if len(set(map(int, tasks))) != len(tasks):
        raise ValueError(f"{where}: expected each task index once, got {list(tasks)}")
    return {
        int(index): _address(each, f"{where}.{index}") for index, each in tasks.items()
    }


def _address(address: object, where: str) -> str:
    if not isinstance(address, str):
        raise ValueError(f'{where}: expected "host:port", got {address!r:.80}')
    scheme, separator, rest = address.rpartition("://")
    if separator and scheme == "ipc" and rest:
        return address
    host, colon, port = rest.rpartition(":")
    words = f'{where}: expected "host:port", got {address!r}'
    if separator and scheme != "tcp":
        raise ValueError(f"{words}: the schemes are tcp:// and ipc://")
    if not colon:
        raise ValueError(f"{words}: the port is missing")
    if not host:
        raise ValueError(f"{words}: the host is missing")
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"{words}: expected a port of 1 to 65535")
    if ":" in host and not (host[0] == "[" and host[-1] == "]"):
        raise ValueError(f'{words}: an IPv6 address goes into brackets, "[::1]:2222"')
    return address

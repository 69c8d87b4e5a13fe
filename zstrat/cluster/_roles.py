"""The roles of tasks: which ones train, which one is the chief, and which one saves.

The functions and their messages, for which people search, are those of TensorFlow. In
TensorFlow some of them are about the calling task; here each takes the task as an
argument.
"""

from __future__ import annotations

from typing import Final

from ._spec import ClusterSpec

TASK_TYPES: Final = ("chief", "worker", "evaluator", "ps")
_ALLOWED: Final = (*TASK_TYPES, None)


def normalize_cluster_spec(cluster_spec: object) -> ClusterSpec:
    """Converts a dictionary to a ClusterSpec; returns a ClusterSpec unchanged.

    Raises:
        ValueError: The argument is not one of these two.
        TypeError: The dictionary has values other than addresses.
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
    """Returns the number of tasks of a job, 0 if the cluster has no such job."""
    spec = normalize_cluster_spec(cluster_spec)
    return spec.num_tasks(task_type) if task_type in spec.jobs else 0


def validate_cluster_spec(
    cluster_spec: object, task_type: str | None, task_id: int | None
) -> None:
    """Checks that a task can be in this cluster.

    ``task_id`` may be None if the job has only one task. The evaluator may be missing
    in the cluster.

    Raises:
        ValueError: In TensorFlow's order: a job that no cluster has, an unknown task
            type, a task type that the cluster lacks, more than one chief or evaluator,
            an id beyond the last task.
    """
    # In TensorFlow's order, so that of several errors the same one is raised.
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
    # In a sparse job an index below the last one may be missing, and task 0, too.
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


def is_chief(cluster_spec: object, task_type: str | None, task_id: int | None) -> bool:
    """Returns whether the task acts for the others of its kind: the chief, an
    evaluator, or worker 0 without a chief.

    Raises:
        ValueError: See `validate_cluster_spec`.
    """
    validate_cluster_spec(cluster_spec, task_type, task_id)
    if task_type in ("chief", "evaluator"):
        return True
    # TensorFlow's rule: index 0, or none, which is the only worker.
    chiefless = "chief" not in normalize_cluster_spec(cluster_spec).jobs
    return chiefless and task_type == "worker" and not task_id


def worker_count(cluster_spec: object, task_type: str) -> int:
    """Returns the number of tasks that train together with a task of this type.

    Raises:
        ValueError: See `validate_cluster_spec`; also for a ps.
    """
    spec = normalize_cluster_spec(cluster_spec)
    # Any existing task will do: in a sparse job task 0 may be missing.
    indices = spec.task_indices(task_type) if task_type in spec.jobs else []
    validate_cluster_spec(spec, task_type, min(indices, default=0))
    if task_type not in ("chief", "worker", "evaluator"):
        raise ValueError(
            f"Unexpected `task_type` {task_type!r}: expected chief, worker or "
            "evaluator, as a ps does not train"
        )
    # An evaluator works by itself; the chief trains like a worker.
    jobs = ("evaluator",) if task_type == "evaluator" else ("chief", "worker")
    return sum(task_count(spec, job) for job in jobs)


def id_in_cluster(cluster_spec: object, task_type: str, task_id: int) -> int:
    """Returns the number of the task among the existing chief and workers, the chief
    first. In a sparse job it may be less than the task's index.

    Raises:
        ValueError: See `validate_cluster_spec`; also for a ps.
    """
    spec = normalize_cluster_spec(cluster_spec)
    validate_cluster_spec(spec, task_type, task_id)
    if task_type == "worker":
        return task_count(spec, "chief") + spec.task_indices("worker").index(task_id)
    if task_type in ("chief", "evaluator"):
        return task_id
    raise ValueError(
        f"There is no id for task_type {task_type!r}: expected chief, worker or "
        "evaluator"
    )


def should_save_checkpoint(
    cluster_spec: object, task_type: str | None, task_id: int | None
) -> bool:
    """Returns whether the checkpoint of the task is kept: that of the first existing
    task, and of every evaluator. Other tasks may have to take part in saving.

    Raises:
        ValueError: See `validate_cluster_spec`.
    """
    if is_chief(cluster_spec, task_type, task_id):
        return True
    # Like `is_chief`, but the first existing worker if worker 0 is missing.
    if task_type != "worker" or task_id is None:
        return False
    spec = normalize_cluster_spec(cluster_spec)
    return "worker" in spec.jobs and id_in_cluster(spec, task_type, task_id) == 0


def should_load_checkpoint(
    cluster_spec: object, task_type: str | None, task_id: int | None
) -> bool:
    """Returns whether the task loads checkpoints. All tasks do but a ps, whose values
    the others send.

    Raises:
        ValueError: See `validate_cluster_spec`.
    """
    validate_cluster_spec(cluster_spec, task_type, task_id)
    return task_type != "ps"


def should_save_summary(
    cluster_spec: object, task_type: str | None, task_id: int | None
) -> bool:
    """Returns whether the task writes summaries: the first training task, and every
    evaluator.

    Raises:
        ValueError: See `validate_cluster_spec`.
    """
    return should_save_checkpoint(cluster_spec, task_type, task_id)

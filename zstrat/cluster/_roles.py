"""The role of a task in its cluster.

In TensorFlow some of these functions are about the calling task; here each takes the
task as an argument.
"""

from __future__ import annotations

from ._spec import normalize_cluster_spec, task_count, validate_cluster_spec


def is_chief(cluster_spec: object, task_type: str | None, task_id: int | None) -> bool:
    """Returns whether the task acts for the others of its kind: the chief, an
    evaluator, or worker 0 without a chief.

    Raises:
        ValueError: See `validate_cluster_spec`.
    """
    validate_cluster_spec(cluster_spec, task_type, task_id)
    if task_type in ("chief", "evaluator"):
        return True
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
    """Returns whether the task loads checkpoints: all tasks but a ps, which receives
    values.

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

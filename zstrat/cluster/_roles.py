"""What a task is among others.

TensorFlow asks some questions of roles about the task that asks; here every function is
told the task.
"""

from __future__ import annotations

from ._spec import normalize_cluster_spec, task_count, validate_cluster_spec


def is_chief(cluster_spec: object, task_type: str | None, task_id: int | None) -> bool:
    """Whether the task acts for its fellows: chief, evaluator (which has none), or
    worker 0 without chief.

    Raises:
        ValueError: As `validate_cluster_spec`.
    """
    validate_cluster_spec(cluster_spec, task_type, task_id)
    if task_type in ("chief", "evaluator"):
        return True
    chiefless = "chief" not in normalize_cluster_spec(cluster_spec).jobs
    return chiefless and task_type == "worker" and not task_id


def worker_count(cluster_spec: object, task_type: str) -> int:
    """Number of tasks that train together with a task of this type.

    Raises:
        ValueError: As `validate_cluster_spec`, and for a ps.
    """
    spec = normalize_cluster_spec(cluster_spec)
    # Nobody asks for one task: in a sparse job 0 may be one of those that are missing.
    indices = spec.task_indices(task_type) if task_type in spec.jobs else []
    validate_cluster_spec(spec, task_type, min(indices, default=0))
    if task_type not in ("chief", "worker", "evaluator"):
        raise ValueError(
            f"Unexpected `task_type` {task_type!r}: expected chief, worker or "
            "evaluator, a ps does not train"
        )
    jobs = ("evaluator",) if task_type == "evaluator" else ("chief", "worker")
    return sum(task_count(spec, job) for job in jobs)


def id_in_cluster(cluster_spec: object, task_type: str, task_id: int) -> int:
    """Number of the task among the chief and the workers that are there, the chief
    first. In a sparse job it is less than the task's index.

    Raises:
        ValueError: As `validate_cluster_spec`, and for a ps.
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
    """Whether what the task saves is kept: what the first of those that are there does,
    and every evaluator. The others may have to take part.

    Raises:
        ValueError: As `validate_cluster_spec`.
    """
    if is_chief(cluster_spec, task_type, task_id):
        return True
    # As `is_chief`, but where worker 0 is not there, the first one that is.
    if task_type != "worker" or task_id is None:
        return False
    spec = normalize_cluster_spec(cluster_spec)
    return "worker" in spec.jobs and id_in_cluster(spec, task_type, task_id) == 0


def should_load_checkpoint(
    cluster_spec: object, task_type: str | None, task_id: int | None
) -> bool:
    """Whether the task loads what was saved: all that compute do, a ps is given it.

    Raises:
        ValueError: As `validate_cluster_spec`.
    """
    validate_cluster_spec(cluster_spec, task_type, task_id)
    return task_type != "ps"


def should_save_summary(
    cluster_spec: object, task_type: str | None, task_id: int | None
) -> bool:
    """Whether the task writes summaries; the first of those that train does, and every
    evaluator.

    Raises:
        ValueError: As `validate_cluster_spec`.
    """
    return should_save_checkpoint(cluster_spec, task_type, task_id)

"""A cluster in a TOML file, for machines without a scheduler.

Only zstrat reads the file, so unknown keys are errors: they are misspelled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, final

from zstrat import config

from ._resolver import SourceResolver
from ._spec import TASK_TYPES, check_names, check_task_type, spec_from

if TYPE_CHECKING:
    import os

    from ._spec import ClusterSpec

_TABLES: Final = ("cluster", "task")


@final
class TomlClusterResolver(SourceResolver):
    """Reads a TOML file, again at each query of the cluster:

        [cluster]
        worker = ["10.0.0.1:2222", "10.0.0.2:2222"]
        ps = ["10.0.0.3:2222"]

        [task]            # optional, or passed to the constructor
        type = "worker"
        index = 0

    Args:
        task_type: Takes precedence over ``task.type`` of the file.
        task_id: Takes precedence over ``task.index`` of the file.

    Raises:
        ValueError: The file is invalid; names the file and the key.
    """

    _may_change = True
    _empty_layer_counts = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        self._path = str(path)
        _, (kind, index) = _read(self._path)
        super().__init__(
            kind if task_type is None else task_type,
            index if task_id is None else task_id,
            rpc_layer,
        )

    def cluster_spec(self) -> ClusterSpec:
        """Reads the cluster from the file.

        Raises:
            ValueError: See the constructor.
        """
        return _read(self._path)[0]


def _read(path: str) -> tuple[ClusterSpec, tuple[str | None, int | None]]:
    """Reads the cluster, and the type and index of the task of this process."""
    tables = config.read_toml(path)
    check_names(tables, _TABLES, path, "table")
    if "cluster" not in tables:
        raise ValueError(f"{path}: the table [cluster] is missing")
    spec = spec_from(tables["cluster"], path)
    check_names(spec.jobs, TASK_TYPES, f"{path}: cluster", "job")
    return spec, _task(tables.get("task", {}), path)


def _task(task: Any, path: str) -> tuple[str | None, int | None]:
    if not isinstance(task, dict):
        raise ValueError(f"{path}: task: expected a table [task], got {task!r:.80}")
    check_names(task, ("type", "index"), f"{path}: task", "key")
    kind, index = task.get("type"), task.get("index")
    if kind is not None:
        check_task_type(kind, TASK_TYPES, path)
    if index is not None and (type(index) is not int or index < 0):
        raise ValueError(
            f"{path}: task.index: expected an integer of 0 or more, got {index!r:.80}"
        )
    return kind, index

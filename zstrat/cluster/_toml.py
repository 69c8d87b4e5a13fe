"""A cluster in a file, for machines that are not managed by anything.

The file is ours, so a key that means nothing is an error: it is a typing mistake.
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
    """Answers from a TOML file, which is read anew at each question for the cluster:

        [cluster]
        worker = ["10.0.0.1:2222", "10.0.0.2:2222"]
        ps = ["10.0.0.3:2222"]

        [task]            # may be left out, or said by the constructor
        type = "worker"
        index = 0

    Args:
        task_type: Goes before ``task.type`` of the file.
        task_id: Goes before ``task.index`` of the file.

    Raises:
        ValueError: Names the file, the key, what was expected and what was found.
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
        """The cluster that is in the file now.

        Raises:
            ValueError: As the constructor.
        """
        return _read(self._path)[0]


def _read(path: str) -> tuple[ClusterSpec, tuple[str | None, int | None]]:
    """The cluster of the file, and the task that it says that this process is."""
    tables = config.read_toml(path)
    check_names(tables, _TABLES, path, "table")
    if "cluster" not in tables:
        raise ValueError(f"{path}: expected a table [cluster], it has none")
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

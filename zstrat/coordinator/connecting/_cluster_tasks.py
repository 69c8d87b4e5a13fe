"""The face of `Cluster` that its parts use: all tasks of a session."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ._task_session import TaskSessionEvents

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zstrat.errors import PSUnavailableError
    from zstrat.ps import PsClient

    from ._store_directory import StoreDirectory
    from ._task_session import TaskSession


class ClusterTasks(TaskSessionEvents, Protocol):
    """The part of `Cluster` that recovery, replication, moves of stores and time lines
    share."""

    @property
    def name(self) -> str:
        """The name under which another program may resume the session; or empty."""
        ...

    @property
    def session(self) -> int:
        """The number of the session on the parameter servers."""
        ...

    @property
    def ps(self) -> Sequence[TaskSession]:
        """The sessions on the servers of the stores, by number of the store."""
        ...

    @property
    def workers(self) -> Sequence[TaskSession]: ...

    @property
    def worker_addresses(self) -> Mapping[int, str]: ...

    @property
    def client(self) -> PsClient: ...

    @property
    def store_directory(self) -> StoreDirectory: ...

    @property
    def failovers(self) -> int:
        """Number of times that a backup became the primary of a store."""
        ...

    @property
    def outage_error(self) -> PSUnavailableError | None:
        """The error that names a store without a server; None if all are served."""
        ...

    def store_lost(self, store: int, reason: str) -> None:
        """Notes that no process serves the store. `TaskSession.gone` says whether it is
        lost for good."""
        ...

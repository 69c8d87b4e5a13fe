"""All tasks of a session, as the parts of a cluster know them."""

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
    """What recovery, second copies, moves of stores and time lines need of the
    `Cluster` that they are parts of. What only one of them needs it says itself."""

    @property
    def name(self) -> str:
        """What the session is called, if another program may go on with it."""
        ...

    @property
    def session(self) -> int:
        """The number that the parameter servers know the session by."""
        ...

    @property
    def ps(self) -> Sequence[TaskSession]:
        """The sessions with those that serve the stores, by number."""
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
        """How often another copy took the place of a server."""
        ...

    @property
    def outage_error(self) -> PSUnavailableError | None:
        """The parameter server that is not there, and no other in its place."""
        ...

    def store_lost(self, store: int, reason: str) -> None:
        """No process serves the store; its task session says whether it is gone for
        good."""
        ...

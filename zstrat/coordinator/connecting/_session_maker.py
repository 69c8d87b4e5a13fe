"""The options of a program's session, and the sessions on its tasks that follow.

The law of this file: only it fills in the message that opens a session.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

from zstrat.wire import JoinSession, OpenSession

from ._task_session import TaskSession

if TYPE_CHECKING:
    from zstrat.config import Timeouts
    from zstrat.transport import MakeTaskLink

    from ._cluster_tasks import StoreDirectory
    from ._task_session import Objection, TaskSessionEvents


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """Options of a program's session on its cluster."""

    prefetch: int = 0
    """Optimizer steps that workers fetch ahead."""
    listens: bool = False
    """Workers send what their steps print."""
    joins: bool = False
    """Another program holds the parameter servers, and creates the variables."""
    is_held_for_others: bool = False
    """Other programs join, and the variables stay when this one ends."""
    replicas: int = 0
    """Copies of what each parameter server holds, in other ones: 0 or 1."""
    stores_per_ps: int = 1
    """Logical servers of each parameter server, which may move."""
    name: str = ""
    """Name of the session: it resumes what an earlier program left under the name, and
    stays for a later one, unless it is ended (`Cluster.end_on_close`)."""
    restart_partial: bool = False
    """Begin empty if only a part is left under the name."""
    program: str = ""
    """Name of this program in the errors of others that want the cluster."""

    @property
    def is_shared(self) -> bool:
        """Whether other programs update the variables, too."""
        return self.joins or self.is_held_for_others


@final
class SessionMaker:
    """Makes the sessions on the tasks of one cluster, not started yet."""

    def __init__(
        self,
        options: SessionOptions,
        timeouts: Timeouts,
        make_link: MakeTaskLink,
        events: TaskSessionEvents,
    ) -> None:
        self.options: Final = options
        self._timeouts, self._make_link, self._events = timeouts, make_link, events

    def server(
        self, session: int, store: int, address: str, workers: int
    ) -> TaskSession:
        """Returns the session on the server of a store.

        Args:
            session: Its number.
            workers: How many places of workers there are.
        """
        timeouts, joins = self._timeouts, self.options.joins
        opening: OpenSession | JoinSession
        if joins:
            opening = JoinSession(session, [], [], timeouts.request)
        else:
            opening = self._opening(session, store, workers, [], [])
        return TaskSession(
            "ps",
            store,
            store,
            address,
            opening,
            self._make_link,
            self._events,
            one_life=True,
            grace=timeouts.reconnect,
            turn=timeouts.request if joins else timeouts.turn,
            notice=timeouts.notice,
            moves=bool(self.options.replicas),
        )

    def worker(
        self,
        session: int,
        task_number: int,
        place: int,
        address: str,
        workers: int,
        stores: StoreDirectory,
        objection: Objection,
    ) -> TaskSession:
        """Returns the session on a worker.

        Args:
            session: Its number.
            workers: How many places of workers there are.
            stores: Where the stores are when the session is opened.
            objection: Says why the worker is not taken.
        """
        return TaskSession(
            "worker",
            task_number,
            place,
            address,
            self._opening(session, place, workers, stores.addresses, stores.views),
            self._make_link,
            self._events,
            turn=self._timeouts.turn,
            notice=self._timeouts.notice,
            objection=objection,
        )

    def _opening(
        self,
        session: int,
        place: int,
        workers: int,
        servers: list[str],
        views: list[int],
    ) -> OpenSession:
        options = self.options
        return OpenSession(
            session,
            place,
            workers,
            servers,
            options.prefetch,
            options.listens,
            views,
            options.name,
            replicas=options.replicas,
            is_shared=options.is_shared,
            program=options.program,
        )

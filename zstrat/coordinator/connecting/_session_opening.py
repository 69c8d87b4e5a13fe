"""Opens the `ClusterSession` of a program.

`connect_session` takes a cluster for this program alone. `hold_session` takes its
parameter servers for several programs, and `join_session` shares those that another
program holds.

The law of this file: an older session of this program that uses some of the same tasks
is closed only when these have answered once more, so that a wrong address leaves it as
it is; and it is closed before the tasks are asked for the new session, as each task
serves one session. So a second strategy, which every rerun of a notebook cell makes,
takes the tasks over from the first one, unless that has unfinished work
(`OpenSessions`). Of the sessions of this program that claim a task, at most one is
open, and at most one is being opened.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Final, final

from zstrat.coordinator._cluster import Cluster
from zstrat.coordinator._servers import session_of
from zstrat.coordinator._session import ClusterSession
from zstrat.errors import BusyError
from zstrat.transport import Portal, new_incarnation, program_name
from zstrat.transport.health import register, serve_from_settings
from zstrat.variables import user_line
from zstrat.wire import Job

from ._arrival import probe
from ._cluster_tasks import SessionOptions
from ._task_links import (
    addresses_of_ps,
    addresses_of_workers,
    check_replicas,
    links_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence

    from zstrat.cluster import ClusterSpec
    from zstrat.config import Settings
    from zstrat.transport import MakeTaskLink


def connect_session(
    spec: ClusterSpec,
    settings: Settings,
    *,
    replicas: int = 0,
    stores_per_ps: int = 1,
    make_link: MakeTaskLink | None = None,
    resume: str = "",
    restart_partial: bool = False,
) -> ClusterSession:
    """Opens a session on all parameter servers of a cluster and at least one worker.

    Blocks for at most ``timeouts.connect``. Other workers join later.

    An older session of this program on the cluster is replaced. It stays open until all
    parameter servers and a worker have answered once more, which may take another
    ``timeouts.connect``; so a wrong address or key, another version, or a dead task
    leave it as it is. Then the older session is closed, before the tasks are asked for
    the new one, as each task serves one session. An error after that leaves no session:
    a task dies at that moment, workers differ in their devices, or tasks that the older
    session did not have belong to another program.

    Args:
        replicas: Number of further copies of what each parameter server holds, in other
            servers: 0 or 1.
        stores_per_ps: Number of stores (parts of the variables that can move) of each
            parameter server. All exist when this returns.
        make_link: Makes the link to a task; default: over ZeroMQ.
        resume, restart_partial: ``name`` and ``restart_partial`` of `SessionOptions`.

    Raises:
        ValueError: The indices of the parameter servers have gaps, or there are too few
            servers for replicas.
        PSUnavailableError: Only a part is left of the session to resume.
        DeadlineExceededError: Tasks did not answer; names each of them.
        BusyError: Another program holds the cluster, or an older session of this one
            has unfinished work.
        VersionMismatchError, PermissionDeniedError: A task will never accept us.
    """
    session = new_incarnation()
    ps, workers = addresses_of_ps(spec), addresses_of_workers(spec)
    check_replicas(replicas, len(ps), settings, stores_per_ps)
    make = make_link or links_of(Job.CHIEF, 0, session, settings)

    options = SessionOptions(
        settings.prefetch,
        listens=settings.output == "program",
        replicas=replicas,
        stores_per_ps=stores_per_ps,
        name=resume,
        restart_partial=restart_partial,
        program=program_name(),
    )
    return _taken(session, ps, workers, settings, make, options)


def hold_session(
    spec: ClusterSpec, settings: Settings, *, make_link: MakeTaskLink | None = None
) -> ClusterSession:
    """Opens a session on the parameter servers for several programs. This program
    creates the variables, which stay when it ends. An older session of this program is
    replaced as in `connect_session`.

    Raises:
        ValueError, DeadlineExceededError, BusyError: As `connect_session`.
    """
    session, ps = new_incarnation(), addresses_of_ps(spec)
    make = make_link or links_of(Job.CHIEF, 0, session, settings)

    options = SessionOptions(is_held_for_others=True, program=program_name())
    return _taken(session, ps, {}, settings, make, options)


def join_session(
    spec: ClusterSpec,
    settings: Settings,
    index: int,
    *,
    make_link: MakeTaskLink | None = None,
) -> ClusterSession:
    """Waits for the session of a program that calls `hold_session`, and joins it.

    That program has to create the same variables in the same order, with the same name,
    shape and dtype: this program waits for each of them for ``timeouts.request``. An
    older session of this program is replaced as in `connect_session`, before it is
    known whether the other program exists.

    Args:
        index: The index of this program among the workers of the cluster.

    Raises:
        DeadlineExceededError: There is no such program, or a ps does not answer.
    """
    ps = addresses_of_ps(spec)
    me = new_incarnation()
    make = make_link or links_of(Job.WORKER, index, me, settings)

    async def cluster() -> Cluster:
        session = await session_of(make, ps[0], settings.timeouts.connect)
        return Cluster(
            session,
            ps,
            {},
            settings.timeouts,
            make,
            SessionOptions(joins=True),
            writer=me,
        )

    # A ps accepts one process as this worker: the older session until it ends.
    observe = make_link or links_of(
        Job.WORKER, index, new_incarnation(), settings, looks=True
    )
    tasks = [(Job.WORKER, index, at) for at in ps]
    look = partial(probe, ps, {}, observe, settings.timeouts.connect)
    return _opened(f"zstrat {me:x}", cluster, look, settings, tasks)


def _taken(
    session: int,
    ps: Sequence[str],
    workers: Mapping[int, str],
    settings: Settings,
    make: MakeTaskLink,
    options: SessionOptions,
) -> ClusterSession:
    """Opens a session whose tasks are already assigned, to this program alone or to
    several."""

    async def cluster() -> Cluster:
        return Cluster(session, ps, workers, settings.timeouts, make, options)

    tasks = [(Job.CHIEF, 0, at) for at in (*ps, *workers.values())]
    look = partial(probe, ps, workers, make, settings.timeouts.connect)
    return _opened(f"zstrat {session:x}", cluster, look, settings, tasks)


def _opened(
    name: str,
    make: Callable[[], Coroutine[Any, Any, Cluster]],
    look: Callable[[], Coroutine[Any, Any, None]],
    settings: Settings,
    tasks: Iterable[ClaimedTask],
) -> ClusterSession:
    """Opens a session on the cluster that ``make`` returns. Before that, and only after
    ``look`` has found that the tasks answer, closes older sessions of this program on
    the same tasks.

    Raises:
        BusyError: An older session has unfinished work.
        ZstratError: As `Cluster.open` and ``look``.
        ValueError, OSError: The HTTP port is not free (``settings.http``).
    """
    # First: a port that is not free is an error before any task is asked.
    serve_from_settings(settings)
    times = settings.timeouts
    # For each part, longer than the deadlines of the cluster, whose errors name the
    # tasks that missed them. There are two such deadlines, as a program that joins a
    # session waits for it first.
    slack = 2 * times.connect + times.turn + times.drain

    async def open_() -> Cluster:
        made = await make()
        try:
            await made.open()
        except BaseException:  # to the caller, who has no session to close
            await made.close(False)
            raise
        return made

    with contextlib.ExitStack() as undo:
        # Before anything is opened, so that a second thread is refused and does not
        # close what this one is opening.
        claim, rivals = open_sessions.claim(tasks)
        undo.callback(open_sessions.drop, claim)
        portal = Portal(name)
        undo.callback(portal.close)
        if rivals:
            portal.run(look(), slack, "looking whether the cluster answers")
            for rival in rivals:
                if not rival.is_over:
                    rival.give_way(claim.made_at)
        cluster = portal.run(open_(), slack, "connecting to the cluster")
        session = ClusterSession(cluster, portal, settings)
        undo.pop_all()
    claim.opened(session)
    job, index, _ = next(iter(claim.tasks))
    name = f"{job}:{index}" if job == Job.CHIEF else f"program:{index}"
    register(session, name, session.portal.loop, anywhere=True)
    return session


ClaimedTask = tuple[str, int, str]
"""The job and the index of this program, and the address of a task that it uses in this
role."""


class SessionClaim:
    """The tasks that one session claims. Does not keep the session alive."""

    def __init__(self, tasks: Iterable[ClaimedTask]) -> None:
        self.tasks = frozenset(tasks)
        self.made_at = "{}:{}".format(*user_line())
        # Weak: a session that the program drops closes itself, and a claim must not
        # prevent that.
        self._session: weakref.ref[ClusterSession] | None = None
        self._portal: weakref.ref[Portal] | None = None

    @property
    def is_opening(self) -> bool:
        return self._session is None

    @property
    def is_over(self) -> bool:
        portal = None if self._portal is None else self._portal()
        return not self.is_opening and (portal is None or portal.is_closed)

    def opened(self, session: ClusterSession) -> None:
        self._session = weakref.ref(session)
        self._portal = weakref.ref(session.portal)

    @property
    def session(self) -> ClusterSession | None:
        """The session; None while it is not open, or when it was collected."""
        return None if self._session is None else self._session()

    def give_way(self, made_at: str) -> None:
        """Closes the session in favour of a newer one.

        Args:
            made_at: The line of the program that makes the newer session.

        Raises:
            BusyError: The session has unfinished work.
        """
        session = self.session
        if session is not None:
            session.give_way(self.made_at, made_at)
        elif self._portal is not None and (portal := self._portal()) is not None:
            portal.close()  # the session was collected, and its portal closes anyway


@final
class OpenSessions:
    """The open sessions of this program. Usable from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._claims: list[SessionClaim] = []

    def claim(
        self, tasks: Iterable[ClaimedTask]
    ) -> tuple[SessionClaim, list[SessionClaim]]:
        """Claims tasks for a session that is being opened. Returns the claim, and those
        of other sessions that use some of the tasks; closes none of these yet.

        Raises:
            BusyError: Another thread is opening a session on some of the tasks.
        """
        claim = SessionClaim(tasks)
        with self._lock:
            self._claims = [other for other in self._claims if not other.is_over]
            rivals = [each for each in self._claims if each.tasks & claim.tasks]
            for rival in rivals:
                if rival.is_opening:
                    raise BusyError(
                        "another thread of this program is connecting to the same "
                        f"cluster (strategy made at {rival.made_at}): make one "
                        "strategy, and use it in all threads"
                    )
            self._claims.append(claim)
        return claim, rivals

    def present(self) -> list[ClusterSession]:
        """Returns the open sessions."""
        with self._lock:
            sessions = [claim.session for claim in self._claims if not claim.is_over]
        return [session for session in sessions if session is not None]

    def drop(self, claim: SessionClaim) -> None:
        """Withdraws the claim of a session that was not opened."""
        with self._lock:
            self._claims.remove(claim)

    def forget(self) -> None:
        """Forgets all sessions after a fork: they belong to the parent."""
        self._lock = threading.Lock()
        for claim in self._claims:
            # The child may use none of the parent's sockets, so sessions are only
            # marked.
            if (session := claim.session) is not None:
                session.forget()
        self._claims = []


open_sessions: Final = OpenSessions()
os.register_at_fork(after_in_child=open_sessions.forget)

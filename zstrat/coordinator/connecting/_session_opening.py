"""How a program comes to its `ClusterSession`.

`connect_session` takes a cluster for this program alone. `hold_session` takes its
parameter servers for several programs, and `join_session` shares what another program
holds.

Law of the file: a session of this program that has some of the same tasks is closed
only when these have greeted the program once more, so a wrong address leaves it as it
is; and it is closed before the tasks are asked for the new session, as each serves one.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from zstrat.coordinator._cluster import Cluster
from zstrat.coordinator._servers import session_of
from zstrat.coordinator._session import ClusterSession
from zstrat.transport import Portal, new_incarnation, program_name
from zstrat.transport.health import register, serve_from_settings
from zstrat.wire import Job

from ._arrival import probe
from ._open_sessions import open_sessions
from ._session_maker import SessionOptions
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

    from ._open_sessions import ClaimedTask, SessionClaim


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
    """Takes the cluster: all its parameter servers, and a worker at least.

    Blocks for at most ``timeouts.connect``. Workers that come later join later.

    A session of this program that has the cluster is replaced. It lives on until
    all parameter servers and a worker have greeted this program once more, which
    may take ``timeouts.connect``, too; so a wrong address or key, another version,
    and a task that is dead leave it as it is. It is closed before the tasks are
    asked for the new session, as each serves one. What can go wrong from then on
    leaves none: a task dies at that moment, workers differ in their devices, or
    tasks that the older session did not have belong to another program.

    Args:
        replicas: Copies of what each parameter server holds, in other ones: 0 or 1.
        stores_per_ps: Logical servers of each parameter server.
            All are made when this returns.
        make_link: How a task is reached; left out: over ZeroMQ.
        resume, restart_partial: What the session is called, and what becomes of it if
            only a part is left, as of `SessionOptions`.

    Raises:
        ValueError: The indices of the parameter servers have gaps, or there cannot
            be replicas.
        PSUnavailableError: Only a part is left of the session to resume.
        DeadlineExceededError: Tasks did not answer; each one is named.
        BusyError: Another program holds the cluster, or a session of this one that
            has something unfinished.
        VersionMismatchError, PermissionDeniedError: A task will never take us.
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
    """Takes the parameter servers for several programs, of which this one creates
    the variables, which stay when it ends. A session of this program is
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
    """Joins the session of a program that calls `hold_session`, and waits for it.

    What this program creates, that one has to create as well, in the same order: it
    is waited for, for ``timeouts.request`` each time, and has to be of the same
    name, shape and dtype. A session of this program is replaced as in
    `connect_session`; whether the other program is there is seen only after that.

    Args:
        index: Of this program among the workers of the cluster.

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

    # A ps lets in one process as a worker: the older session is that until it ends.
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
    """The session of a program that has the tasks for itself, or for several."""

    async def cluster() -> Cluster:
        return Cluster(session, ps, workers, settings.timeouts, make, options)

    tasks = [(Job.CHIEF, 0, at) for at in (*ps, *workers.values())]
    look = partial(probe, ps, workers, make, settings.timeouts.connect)
    return _opened(f"zstrat {session:x}", cluster, look, settings, tasks)


def _opened(
    name: str,
    cluster: Callable[[], Coroutine[Any, Any, Cluster]],
    look: Callable[[], Coroutine[Any, Any, None]],
    settings: Settings,
    tasks: Iterable[ClaimedTask],
) -> ClusterSession:
    """The session, when all that it needs is there. Other sessions of this program that
    claim some of the same tasks are closed before, once ``look`` has found no fault.

    Raises:
        BusyError: One of them has something unfinished.
        ValueError, OSError: Its HTTP port cannot be had (``settings.http``).
    """
    serve_from_settings(settings)
    claim = open_sessions.claim(tasks)
    try:
        portal = Portal(name)
        times = settings.timeouts
        slack = 2 * times.connect + times.turn + times.drain
        opened = _connected(portal, cluster, look, slack, claim)
        session = ClusterSession(opened, portal, settings)
    except BaseException:  # to the caller, who has no session
        open_sessions.drop(claim)
        raise
    claim.opened(session)
    job, index, _ = next(iter(claim.tasks))
    name = f"{job}:{index}" if job == Job.CHIEF else f"program:{index}"
    register(session, name, session.portal.loop, anywhere=True)
    return session


def _connected(
    portal: Portal,
    make: Callable[[], Coroutine[Any, Any, Cluster]],
    look: Callable[[], Coroutine[Any, Any, None]],
    slack: float,
    claim: SessionClaim,
) -> Cluster:
    """A cluster that is open. The portal is closed if this fails.

    Args:
        slack: Seconds for each part. The cluster keeps deadlines of its own, and names
            the tasks that missed them; there are two, as a program that joins a session
            waits for it first.

    Raises:
        BusyError: One of the sessions to be replaced has something unfinished.
        ZstratError, ValueError: As of `Cluster.open` and ``look``.
    """

    async def open_() -> Cluster:
        made = await make()
        try:
            await made.open()
        except BaseException:  # to the caller, who has no session to close
            await made.close(False)
            raise
        return made

    try:
        if open_sessions.has_rivals(claim):
            portal.run(look(), slack, "looking whether the cluster answers")
            open_sessions.take_over(claim)
        return portal.run(open_(), slack, "connecting to the cluster")
    except BaseException:  # to the caller, who has no session to close
        portal.close()
        raise

"""The open sessions of this program: a new session replaces an older one that has the
same tasks.

A task serves one coordinator. So a second strategy, which every rerun of a notebook
cell makes, takes the tasks over from the first one, unless that has unfinished work.
The first session stays open until the new one is known to reach the cluster; it is
closed before the new one asks for the tasks.

The law of this file: of the sessions of this program that claim a task, at most one is
open, and at most one is being opened.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING, Final, final

from zstrat.errors import BusyError
from zstrat.variables import user_line

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zstrat.coordinator._session import ClusterSession
    from zstrat.transport import Portal


ClaimedTask = tuple[str, int, str]
"""The job and the index of this program, and the address of a task that it uses under
these."""


class SessionClaim:
    """The tasks that one session claims. It does not keep the session alive."""

    def __init__(self, tasks: Iterable[ClaimedTask]) -> None:
        self.tasks = frozenset(tasks)
        self.made_at = "{}:{}".format(*user_line())
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
            made_at: The line that makes the newer one.

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
    """The open sessions of this program. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._claims: list[SessionClaim] = []

    def claim(self, tasks: Iterable[ClaimedTask]) -> SessionClaim:
        """Claims tasks for a session that is being opened. Closes nothing yet.

        Raises:
            BusyError: Another thread is opening a session of some of them.
        """
        claim = SessionClaim(tasks)
        with self._lock:
            for rival in self._rivals_of(claim):
                if rival.is_opening:
                    raise BusyError(
                        "another thread of this program is connecting to the same "
                        f"cluster (strategy made at {rival.made_at}): make one "
                        "strategy, and use it in all threads"
                    )
            self._claims.append(claim)
        return claim

    def has_rivals(self, claim: SessionClaim) -> bool:
        """Returns whether other sessions have some of its tasks."""
        with self._lock:
            return bool(self._rivals_of(claim))

    def take_over(self, claim: SessionClaim) -> None:
        """Closes the other sessions that have some of its tasks.

        Raises:
            BusyError: One of them has unfinished work. It and those after it stay open.
        """
        with self._lock:
            rivals = self._rivals_of(claim)
        # Without the lock: closing a session may take a while.
        for rival in rivals:
            rival.give_way(claim.made_at)

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
            if (session := claim.session) is not None:
                session.forget()
        self._claims = []

    def _rivals_of(self, claim: SessionClaim) -> list[SessionClaim]:
        self._claims = [other for other in self._claims if not other.is_over]
        return [
            other
            for other in self._claims
            if other is not claim and other.tasks & claim.tasks
        ]


open_sessions: Final = OpenSessions()
os.register_at_fork(after_in_child=open_sessions.forget)

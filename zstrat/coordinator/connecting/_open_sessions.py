"""The sessions that this program has open: a newer one replaces one of the same tasks.

A task serves one coordinator. So who makes a strategy a second time, as every rerun of
a notebook's cell does, takes the tasks over from the first one, if that has nothing
unfinished. That one lives on until it is known that the new one reaches the cluster; it
is closed before the new one asks for the tasks, so that nobody waits for it.

The law of this file: of the sessions of this program that claim a task at most one is
open, and at most one on its way there.
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
"""The job and the index that the program has, and the address of a task that knows it
as that."""


class SessionClaim:
    """One session, and for which tasks. It does not keep the session alive."""

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
        """None while it is not open, and when the program has dropped it."""
        return None if self._session is None else self._session()

    def give_way(self, made_at: str) -> None:
        """Ends the session, for one that is made there.

        Raises:
            BusyError: It has something unfinished.
        """
        session = self.session
        if session is not None:
            session.give_way(self.made_at, made_at)
        elif self._portal is not None and (portal := self._portal()) is not None:
            portal.close()  # it was dropped, and is on its way out


@final
class OpenSessions:
    """The sessions that this program has open. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._claims: list[SessionClaim] = []

    def claim(self, tasks: Iterable[ClaimedTask]) -> SessionClaim:
        """Says that a session of these tasks is on its way. Nobody is closed for it.

        Raises:
            BusyError: Another thread opens one just now. Nothing is claimed.
        """
        claim = SessionClaim(tasks)
        with self._lock:
            for rival in self._rivals_of(claim):
                if rival.is_opening:
                    raise BusyError(
                        "another thread of this program connects to the same cluster "
                        f"just now (strategy made at {rival.made_at}): make one "
                        "strategy, and use it in all threads"
                    )
            self._claims.append(claim)
        return claim

    def has_rivals(self, claim: SessionClaim) -> bool:
        """Whether open sessions have some of its tasks."""
        with self._lock:
            return bool(self._rivals_of(claim))

    def take_over(self, claim: SessionClaim) -> None:
        """Closes the sessions that have some of its tasks.

        Raises:
            BusyError: One of these has something unfinished. It and those after it stay
                as they are.
        """
        with self._lock:
            rivals = self._rivals_of(claim)
        # Without the lock: it may take a while until one has given way.
        for rival in rivals:
            rival.give_way(claim.made_at)

    def present(self) -> list[ClusterSession]:
        """Those that are open."""
        with self._lock:
            found = [each.session for each in self._claims if not each.is_over]
        return [session for session in found if session is not None]

    def drop(self, claim: SessionClaim) -> None:
        """The session was not opened."""
        with self._lock:
            self._claims.remove(claim)

    def forget(self) -> None:
        """After a fork: the sessions are those of the parent."""
        self._lock = threading.Lock()
        for claim in self._claims:
            if (session := claim.session) is not None:
                session.forget()
        self._claims = []

    def _rivals_of(self, claim: SessionClaim) -> list[SessionClaim]:
        self._claims = [each for each in self._claims if not each.is_over]
        return [
            each
            for each in self._claims
            if each is not claim and each.tasks & claim.tasks
        ]


open_sessions: Final = OpenSessions()
os.register_at_fork(after_in_child=open_sessions.forget)

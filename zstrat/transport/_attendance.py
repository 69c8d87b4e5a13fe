"""Which tasks are here: who greets becomes a `Remote`, and is lost once.

A remote outlives its connection: the same task may come back on another one before it
is missed. Only this file makes remotes and ends them; `Roster` decides who may.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Final

from zstrat.wire._greeting import described
from zstrat.wire._orders import Closed

from ._admission import Complaints, role_of
from ._remote import Remote
from ._roster import Identity, Roster, identity_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from zstrat.wire import Hello
    from zstrat.wire._orders import Order

    from ._curve import Security
    from ._remote import Connection

_LOG: Final = logging.getLogger("zstrat.transport")

ENDED: Final = 4096
"""Connections that were hung up and are remembered: what they said until then may still
be read, and would be taken for the words of as many strangers."""


class Attendance:
    """Of the endpoint of ``task``.

    Args:
        connections: Of that endpoint, by routing id; those that end are taken out.
        ended: Routing ids of those that were, for as long as they may go on talking,
            and whether they were told so.
        on_lost: Told once of each remote that is gone, and why.
    """

    def __init__(
        self,
        task: str,
        connections: dict[bytes, Connection],
        ended: OrderedDict[bytes, bool],
        complaints: Complaints,
        on_lost: Callable[[Remote, str], None],
        security: Security | None,
    ) -> None:
        self._task, self._connections, self._ended = task, connections, ended
        self._complaints, self._on_lost = complaints, on_lost
        self._security = security
        self._remotes: dict[Identity, Remote] = {}
        self._roster = Roster()
        self.counts: Counter[str] = Counter()

    @property
    def names(self) -> list[str]:
        """Of the tasks that are here."""
        return [remote.name for remote in self._remotes.values()]

    def greet(self, connection: Connection, hello: Hello, now: float) -> None:
        """Lets the task in, or says why not."""
        peer = connection.outlet.peer
        role, error = role_of(hello, self._security, connection.user)
        verdict = self._roster.admit(hello, self._answers) if error is None else None
        if verdict is not None:
            for identity in verdict.replaced:
                self._replace(identity, hello)
            error = verdict.refusal
        if error is not None:
            self._end(connection, peer.refuse(error))
            return
        identity = identity_of(hello)
        remote = self._remotes.get(identity)
        if remote is None:
            remote = self._remotes[identity] = Remote(hello, role, connection)
        else:  # it came back before it was lost
            self._leave(remote.connection)
            remote.connection = connection
        connection.remote = remote
        self.counts["greetings"] += 1
        peer.accept(hello, now)

    def forget(self, connection: Connection, reason: str) -> None:
        """The connection is over, and with it the task behind it is lost."""
        self._drop(connection)
        remote = connection.remote
        if remote is None:
            self._complaints.add(reason)
            return
        connection.remote = None
        remote.alive = False
        identity = identity_of(remote.hello)
        self._roster.leave(identity)
        self._remotes.pop(identity, None)
        self.counts["lost"] += 1
        try:
            self._on_lost(remote, reason)
        except Exception:  # to the log: one bad callback must not stop the others
            _LOG.exception("%s: on_lost of %s", self._task, remote.name)

    def close(self) -> None:
        """Nobody is here any more, and nobody is told."""
        for remote in self._remotes.values():
            remote.alive = False
        self._remotes.clear()

    def _answers(self, identity: Identity) -> bool:
        remote = self._remotes.get(identity)
        return remote is not None and not remote.connection.outlet.peer.is_broken

    def _replace(self, identity: Identity, winner: Hello) -> None:
        remote = self._remotes.get(identity)
        if remote is not None:
            reason = f"it was replaced by a newer process: {described(winner)}"
            connection = remote.connection
            self._end(connection, connection.outlet.peer.leave(reason))

    def _leave(self, old: Connection) -> None:
        old.outlet.peer.leave("it has a newer connection")
        self._drop(old)

    def _drop(self, connection: Connection) -> None:
        self._connections.pop(connection.routing, None)
        self._ended.setdefault(connection.routing, False)
        if len(self._ended) > ENDED:
            self._ended.popitem(last=False)
        connection.hang_up()

    def _end(self, connection: Connection, orders: Iterable[Order[None]]) -> None:
        for order in orders:
            assert isinstance(order, Closed)  # an acceptor's peer has no requests open
            self.forget(connection, order.reason)

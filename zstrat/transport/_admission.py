"""Who may reach a task, and as what; and which of two that claim to be one is the one.

A task without keys believes what a peer claims, so only this machine may reach it. With
keys, the role of a connection is that of its key. That is decided before anything is
served.

`Roster` decides, without I/O, who may be here. A worker, ps or evaluator exists once;
workers that have no number yet may be several.
The process that is here and answers stays; another one that claims to be the same task
is refused until the first is lost. A process whose connection broke is replaced by the
newcomer, and its incarnation is refused from then on, so that a process which was
frozen and wakes up does not push its successor aside. There may be several coordinators
and observers; which coordinator is obeyed, the session decides.

A task that greets and may be here becomes a `Remote`, and is lost once. A remote
outlives its connection: the same task may come back on another one before it is lost.

Law of the file: it alone makes remotes and ends them.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from zstrat.errors import BusyError, PermissionDeniedError, ProtocolError, ZstratError
from zstrat.wire import Hello, Job
from zstrat.wire.connection import Closed, described

from ._address import Address, check_directory, check_unused, is_local
from ._rate_limit import RateLimit
from ._remote import Remote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from zstrat.config import Settings
    from zstrat.wire.connection import Order

    from ._curve import Security
    from ._remote import Connection


_LOG: Final = logging.getLogger("zstrat.transport")


async def check_exposure(
    address: Address, task: str, security: Security | None, settings: Settings
) -> None:
    """Whether ``task`` may be bound there.

    Raises:
        PermissionDeniedError: Other machines can reach it, and there are neither keys
            nor ``settings.insecure``.
        PermissionError, FileNotFoundError: Others may enter the folder of an ipc
            address, or there is none.
        OSError: A process listens at that ipc address, or it is no socket.

    Cancellation: nothing has happened.
    """
    if address.scheme == "ipc":
        check_directory(address)
        check_unused(address)
    elif security is None and not settings.insecure and not await is_local(address):
        raise PermissionDeniedError(
            f"{task} will not bind {address.host}:{address.port}: "
            "other machines can reach it, it has no keys, and whoever reaches it "
            "can run code here; make keys with `zstrat keygen DIR` and name them "
            "with ZSTRAT_KEYS=DIR (a daemon: --keys DIR), or bind 127.0.0.1, or "
            "set ZSTRAT_INSECURE=1 (a daemon: --insecure) if only you use the "
            "network"
        )


def role_of(
    hello: Hello, security: Security | None, user: str | None
) -> tuple[Job, ZstratError | None]:
    """The role of whoever greets with the key ``user``, and why it is refused if so."""
    job = Job(hello.job)
    if security is None or user is None:
        return job, None
    role = security.role_of(user)
    if role is None:
        return job, PermissionDeniedError(f"{described(hello)} has no key of ours")
    if job is Job.OBSERVER:  # any key may ask to only look
        return job, None
    index = security.index_of(user)
    if job is role and index in (None, hello.index):
        return job, None
    if job is role:
        return role, PermissionDeniedError(
            f"{described(hello)} has the key of {role}:{index}: it cannot be another"
        )
    return role, PermissionDeniedError(
        f"{described(hello)} has the key of the role {role}: it cannot be a {job}"
    )


class RefusalLog:
    """Counts whom ``task`` refused; logs no more often than a person can read."""

    def __init__(self, task: str, clock: Callable[[], float]) -> None:
        self._task, self._rate_limit = task, RateLimit(clock)

    @property
    def count(self) -> int:
        return self._rate_limit.count

    def add(self, reason: str) -> None:
        """Counts a refused connection, and logs the reason if it may."""
        if self._rate_limit.may_log():
            _LOG.warning(
                "%s refused a connection: %s (%d so far)",
                self._task,
                reason,
                self.count,
            )


_SINGLE: Final = frozenset({Job.WORKER, Job.PS, Job.EVALUATOR})

FENCED: Final = 1024
"""Replaced incarnations that are remembered: each is a restart of some task."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What stays the same when a connection breaks and comes back."""

    job: str
    index: int
    incarnation: int
    link: int


class Verdict(NamedTuple):
    """``replaced`` are the identities that have to go, whether admitted or not."""

    refusal: ZstratError | None
    replaced: tuple[Identity, ...] = ()


def identity_of(hello: Hello) -> Identity:
    return Identity(hello.job, hello.index, hello.incarnation, hello.link)


class Roster:
    """The tasks that are here, and the incarnations that were replaced."""

    def __init__(self) -> None:
        self._present: dict[Identity, Hello] = {}
        self._fenced: OrderedDict[tuple[str, int, int], str] = OrderedDict()
        """Who has replaced them, in words: nothing else of a HELLO is kept."""

    def admit(self, hello: Hello, answers: Callable[[Identity], bool]) -> Verdict:
        """Decides about a task that says HELLO; if admitted, it is present.

        Args:
            answers: Whether the connection of somebody who is present is whole.
        """
        winner = self._fenced.get((hello.job, hello.index, hello.incarnation))
        if winner is not None:
            return Verdict(
                ProtocolError(
                    f"{described(hello)} was replaced by {winner}, which "
                    "greeted later: stop one of the two, or give it another index"
                )
            )
        is_single = hello.job in _SINGLE and hello.index >= 0
        replaced = self._rivals(hello) if is_single else ()
        # Two rounds: a newcomer that is refused must not have replaced anybody.
        for rival in replaced:
            if answers(rival):
                return Verdict(_taken(self._present[rival], hello))
        for rival in replaced:
            del self._present[rival]
            self._fence(rival, hello)
        self._present[identity_of(hello)] = hello
        return Verdict(None, replaced)

    def leave(self, identity: Identity) -> None:
        self._present.pop(identity, None)

    def _rivals(self, hello: Hello) -> tuple[Identity, ...]:
        return tuple(
            each
            for each in self._present
            if (each.job, each.index) == (hello.job, hello.index)
            and each.incarnation != hello.incarnation
        )

    def _fence(self, rival: Identity, winner: Hello) -> None:
        self._fenced[rival.job, rival.index, rival.incarnation] = described(winner)
        if len(self._fenced) > FENCED:
            self._fenced.popitem(last=False)


def _taken(there: Hello, hello: Hello) -> ZstratError:
    return BusyError(
        f"{described(hello)} is not let in: {described(there)} is here as the same "
        "task, and answers. Stop one of the two, or give it another index; if you did "
        "not start it, somebody has the key of your tasks (`zstrat keygen --per-task`)"
    )


ENDED: Final = 4096
"""Connections that were hung up and are remembered: what they said until then may still
be read, and would be taken for the words of as many strangers."""


class Attendance:
    """The tasks that are connected to the endpoint of ``task``, as remotes.

    Args:
        connections: Of that endpoint, by routing id; those that end are taken out.
        ended: Routing ids of connections that ended, as messages of theirs may still
            arrive.
        on_lost: Told once of each remote that is gone, and why.
    """

    def __init__(
        self,
        task: str,
        connections: dict[bytes, Connection],
        ended: OrderedDict[bytes, None],
        refusals: RefusalLog,
        on_lost: Callable[[Remote, str], None],
        security: Security | None,
    ) -> None:
        self._task, self._connections, self._ended = task, connections, ended
        self._refusals, self._on_lost = refusals, on_lost
        self._security = security
        self._remotes: dict[Identity, Remote] = {}
        self._roster = Roster()
        self.counts: Counter[str] = Counter()

    @property
    def names(self) -> list[str]:
        """How errors call the tasks that are connected."""
        return [remote.name for remote in self._remotes.values()]

    def greet(self, connection: Connection, hello: Hello, now: float) -> None:
        """Lets the task behind a connection in, or refuses it with the reason.

        A task that comes back before it was lost keeps its `Remote`; one that takes the
        place of another process ends that one's.
        """
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
            self._refusals.add(reason)
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
        """Ends all remotes without telling anybody, as the endpoint is closed."""
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
        self._ended[connection.routing] = None
        if len(self._ended) > ENDED:
            self._ended.popitem(last=False)
        connection.hang_up()

    def _end(self, connection: Connection, orders: Iterable[Order[None]]) -> None:
        for order in orders:
            assert isinstance(order, Closed)  # an acceptor's peer has no requests open
            self.forget(connection, order.reason)

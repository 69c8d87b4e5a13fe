"""Decides which peers an endpoint admits, in which role, and which of two processes
that claim to be the same task is replaced.

A task without keys trusts what a peer claims, so only this machine may reach the task.
With keys, the role of a connection is the role of its key. Admission and role are
checked before any request is served.

`Roster` decides without I/O. A worker, ps or evaluator exists once; several workers may
have no index yet. If two processes claim to be the same task, the one that is present
and answers stays, and the other one is refused until the first is lost. A process whose
connection broke is replaced by the other one, and its incarnation is refused from then
on, so that a process which was frozen and wakes up does not replace its successor.
There may be several coordinators and observers; the session decides which coordinator's
requests are served.

A task that is admitted becomes a `Remote`, and is lost once. A remote outlives its
connection: the same task may come back on another one before it is lost.

Law of the file: no other file creates or ends a `Remote`.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Final, NamedTuple

from zstrat.errors import BusyError, PermissionDeniedError, ProtocolError, ZstratError
from zstrat.wire import Hello, Job
from zstrat.wire.connection import Closed, described

from ._address import Address, check_directory, check_unused, is_local
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
    """Checks that ``task`` may bind the address.

    Raises:
        PermissionDeniedError: Other machines can reach the address, and there are
            neither keys nor ``settings.insecure``.
        PermissionError, FileNotFoundError: Other users may enter the folder of an ipc
            address, or the folder does not exist.
        OSError: A process listens at the ipc address, or the path is not a socket.
    """
    if address.scheme == "ipc":
        check_directory(address)
        check_unused(address)
    elif security is None and not settings.insecure and not await is_local(address):
        raise PermissionDeniedError(
            f"{task} refuses to bind {address.host}:{address.port} without keys: every "
            "machine that reaches this address could run code here. Create keys with "
            "`zstrat keygen DIR` and set ZSTRAT_KEYS=DIR (a daemon: --keys DIR), or "
            "bind 127.0.0.1, or set ZSTRAT_INSECURE=1 (a daemon: --insecure) if only "
            "you use the network"
        )


def role_of(
    hello: Hello, security: Security | None, user: str | None
) -> tuple[Job, ZstratError | None]:
    """Returns the role of a peer that said ``hello`` and proved to have the key
    ``user``, and the error with which to refuse the peer, or None."""
    job = Job(hello.job)
    # Without keys only this machine, or a network that the user trusts, gets here; see
    # `check_exposure`.
    if security is None or user is None:
        return job, None
    owner = security.owner_of(user)
    if owner is None:
        return job, PermissionDeniedError(
            f"{described(hello)} has a key that is not in the key folder of this task"
        )
    if job is Job.OBSERVER:  # any key may observe
        return job, None
    role, index = owner
    if job is role and index in (None, hello.index):
        return job, None
    if job is role:
        return role, PermissionDeniedError(
            f"{described(hello)} has the key of {role}:{index}: each task needs its own"
        )
    return role, PermissionDeniedError(
        f"{described(hello)} has the key of the role {role}, expected that of {job}"
    )


_SINGLE: Final = frozenset({Job.WORKER, Job.PS, Job.EVALUATOR})

FENCED: Final = 1024
"""Number of replaced incarnations that are remembered. Each is one restart of a
task."""


class Identity(NamedTuple):
    """The fields of a HELLO that stay the same on the next connection of a link."""

    job: str
    task_index: int
    incarnation: int
    link: int


def identity_of(hello: Hello) -> Identity:
    return Identity(hello.job, hello.index, hello.incarnation, hello.link)


class Roster:
    """Decides which tasks are admitted: remembers the tasks that are present, and the
    incarnations that were replaced."""

    def __init__(self) -> None:
        self._present: dict[Identity, Hello] = {}
        self._fenced: OrderedDict[tuple[str, int, int], str] = OrderedDict()
        """For each replaced incarnation, a description of the process that replaced
        it."""

    def admit(
        self, hello: Hello, answers: Callable[[Identity], bool]
    ) -> tuple[ZstratError | None, tuple[Identity, ...]]:
        """Admits or refuses a task that says HELLO. An admitted task counts as present
        until it leaves.

        Args:
            answers: Returns whether the connection of a present task is intact.

        Returns:
            The error of a refusal, or None, and the identities of the tasks that this
            one replaces.
        """
        winner = self._fenced.get((hello.job, hello.index, hello.incarnation))
        if winner is not None:
            error = ProtocolError(
                f"{described(hello)} was replaced by {winner}, which greeted later: "
                "stop one of the two, or give it another index"
            )
            return error, ()
        # A worker without a number (-1) has no rivals: there may be several.
        is_single = hello.job in _SINGLE and hello.index >= 0
        replaced = self._rivals(hello) if is_single else ()
        # Two passes: a peer that is refused must not have replaced any task.
        for rival in replaced:
            if answers(rival):
                return _taken(self._present[rival], hello), ()
        for rival in replaced:
            del self._present[rival]
            self._fence(rival, hello)
        self._present[identity_of(hello)] = hello
        return None, replaced

    def leave(self, identity: Identity) -> None:
        self._present.pop(identity, None)

    def _rivals(self, hello: Hello) -> tuple[Identity, ...]:
        return tuple(
            each
            for each in self._present
            if (each.job, each.task_index) == (hello.job, hello.index)
            and each.incarnation != hello.incarnation
        )

    def _fence(self, rival: Identity, winner: Hello) -> None:
        self._fenced[rival.job, rival.task_index, rival.incarnation] = described(winner)
        if len(self._fenced) > FENCED:
            self._fenced.popitem(last=False)


def _taken(present: Hello, hello: Hello) -> ZstratError:
    return BusyError(
        f"{described(hello)} is refused: {described(present)} is connected as the same "
        "task, and answers. Stop one of the two, or give it another index; if you did "
        "not start it, somebody has the key of your tasks (`zstrat keygen --per-task`)"
    )


ENDED: Final = 4096
"""Number of closed connections that are remembered. Messages that their peers sent
before may still be read, and would otherwise be taken for first messages of new
peers."""


class Admission:
    """Admits, replaces and ends the remotes (connected tasks) of the endpoint of
    ``task``.

    Args:
        connections: Connections of the endpoint, by routing id; ended ones are removed.
        ended: Routing ids of ended connections, whose messages may still arrive.
        refused: Called with the reason of each refused connection.
        on_lost: Called once with each remote that is lost, and the reason.
    """

    def __init__(
        self,
        task: str,
        connections: dict[bytes, Connection],
        ended: OrderedDict[bytes, None],
        refused: Callable[[str], None],
        on_lost: Callable[[Remote, str], None],
        security: Security | None,
    ) -> None:
        self._task, self._connections, self._ended = task, connections, ended
        self._refused, self._on_lost = refused, on_lost
        self._security = security
        self._remotes: dict[Identity, Remote] = {}
        self._roster = Roster()
        self.counts: Counter[str] = Counter()

    @property
    def names(self) -> list[str]:
        """Names of the connected tasks, as errors show them."""
        return [remote.name for remote in self._remotes.values()]

    def greet(self, connection: Connection, hello: Hello, now: float) -> None:
        """Admits the task of a connection, or refuses it with the reason.

        A task that reconnects before it is lost keeps its `Remote`; a task that
        replaces another process ends the `Remote` of that process.
        """
        peer = connection.outlet.peer
        role, error = role_of(hello, self._security, connection.user)
        # The key first: a peer without the right one must not replace anybody.
        if error is None:
            error, replaced = self._roster.admit(hello, self._answers)
            for identity in replaced:
                self._replace(identity, hello)
        if error is not None:
            self._end(connection, peer.refuse(error))
            return
        identity = identity_of(hello)
        remote = self._remotes.get(identity)
        if remote is None:
            remote = self._remotes[identity] = Remote(hello, role, connection)
        else:  # it reconnected before it was lost
            # Its order, which would report a loss, is dropped: the remote lives on.
            remote.connection.outlet.peer.leave("it has a newer connection")
            self._drop(remote.connection)
            remote.connection = connection
        connection.remote = remote
        self.counts["greetings"] += 1
        peer.accept(hello, now)

    def forget(self, connection: Connection, reason: str) -> None:
        """Removes an ended connection, and reports its task as lost; a connection
        without a task counts as refused."""
        self._drop(connection)
        remote = connection.remote
        if remote is None:
            self._refused(reason)
            return
        connection.remote = None
        # Before `on_lost`: what that sends to the remote has to fail.
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
        """Marks all connected tasks (`Remote`) as no longer alive and forgets them,
        because the endpoint closes. Does not call `on_lost`."""
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

    def _drop(self, connection: Connection) -> None:
        self._connections.pop(connection.routing, None)
        self._ended[connection.routing] = None
        # Bounded, as a stranger may open and end connections at will.
        if len(self._ended) > ENDED:
            self._ended.popitem(last=False)
        connection.hang_up()

    def _end(self, connection: Connection, orders: Iterable[Order[None]]) -> None:
        for order in orders:
            assert isinstance(order, Closed)  # an acceptor's peer has no requests open
            self.forget(connection, order.reason)

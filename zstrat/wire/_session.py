"""Decides which coordinator owns a task, and which jobs may send a request.

`Ownership` decides which coordinator owns a task, without I/O: at most one at a time.
The incarnation of a coordinator names its session. The session begins with
`OpenSession` and ends when its coordinator closes it, or when another coordinator takes
over, which is allowed only if the owner is lost. The state of a lost owner stays on the
task until then, as the owner may reconnect. A coordinator may have several connections,
and a task that was frozen may read the newest one first: `OpenSession` and
`CloseSession` have the time when they were sent, so that an old close has no effect.
Only `Ownership` changes the owner; ps and worker check the session before they carry
out a request.

The class of a request declares which jobs may send it, and whether it may be repeated
(`request`). Tasks check senders by that declaration, and refuse a request whose class
has none (`check_sender`).
"""

from __future__ import annotations

import enum
import math
import time
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import (
    TYPE_CHECKING,
    Final,
    NamedTuple,
    Protocol,
    TypeVar,
    dataclass_transform,
    final,
)

from zstrat.errors import (
    BusyError,
    HeldError,
    PeerLostError,
    PermissionDeniedError,
    ProtocolError,
    StaleSessionError,
)

from ._link_messages import Job
from ._messages import Message, message

if TYPE_CHECKING:
    from collections.abc import Callable

    from zstrat.wire._link_messages import Hello


M = TypeVar("M", bound=Message)

COORDINATOR: Final = frozenset({Job.CHIEF})
WORKER: Final = frozenset({Job.WORKER})
SERVER: Final = frozenset({Job.PS})
TRAINING: Final = COORDINATOR | WORKER
READING: Final = TRAINING | {Job.EVALUATOR}
ANY_TASK: Final = frozenset(Job)


class Repeat(enum.Enum):
    """Whether a client of parameter servers may repeat a request that the server may
    have carried out before its connection broke. Other senders ignore this and decide
    for themselves what to send again."""

    NEVER = "never"
    SAFE = "safe"
    """To carry out the request twice has the effect of once."""
    BY_STEP = "by step"
    """The server recognizes a repeated request by its ``step``; a request without a
    step is not repeated."""


class RequestRule(NamedTuple):
    """The jobs whose tasks may send a request, and whether it may be repeated."""

    senders: frozenset[Job]
    repeat: Repeat


REQUESTS: Final[dict[type, RequestRule]] = {}
"""The rule of every class of requests."""


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def request(*, by: frozenset[Job], repeat: Repeat) -> Callable[[type[M]], type[M]]:
    """Makes a class of messages (`message`) that are requests from one task to another.
    ``by``: the jobs that may send them."""

    def decorate(cls: type[M]) -> type[M]:
        made = message(cls)
        REQUESTS[made] = RequestRule(by, repeat)
        return made

    return decorate


READ_ANSWERS: Final[set[type]] = set()
"""The answers that only show what a store holds (`read_answer`)."""


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def read_answer(cls: type[M]) -> type[M]:
    """Makes a class of messages that answer reads (`message`). A parameter server sends
    them before its backup has what they show (docs/consistency.md). No answer to a
    change may be one."""
    made = message(cls)
    READ_ANSWERS.add(made)
    return made


def check_sender(task: str, sender: str, role: Job, message: object) -> None:
    """Raises an error if a task with the role ``role`` may not send the message.

    Args:
        task: Name of the receiver in errors.

    Raises:
        PermissionDeniedError: Only tasks of other roles may send the message.
        ProtocolError: The message is not a request.
    """
    kind = type(message)
    rule = REQUESTS.get(kind)
    if rule is None:
        raise ProtocolError(
            f"{task} got {kind.__name__} from {sender}, which is not a request"
        )
    if role not in rule.senders:
        raise PermissionDeniedError(
            f"{task} takes {kind.__name__} from {' or '.join(sorted(rule.senders))}, "
            f"and {sender} is {role}"
        )


class OwnerPeer(Protocol):
    """A connection of the coordinator that owns a task; connections are compared by
    identity."""

    @property
    def is_heard(self) -> bool:
        """Whether the connection is intact, and a message came on it within the last
        two heartbeats."""
        ...

    @property
    def heard(self) -> object:
        """A value that changes with each message of the coordinator, to compare with a
        later one."""
        ...


@final
class AbsentPeer:
    """Takes the place of a connection of the owner that does not exist yet."""

    is_heard = False
    heard = None

    def notify(self, message: object) -> None:
        """Raises `PeerLostError`, as no coordinator is connected."""
        raise PeerLostError("the coordinator", "it has not come back yet")


@dataclass(frozen=True, slots=True)
class Owner:
    """The coordinator that owns a task. ``peer`` is the coordinator's newest
    connection; ``since`` is when it became the owner, in seconds since 1970, None if
    not known; ``name``, ``origin``, ``is_shared``, ``program`` and ``sent`` are those
    of `OpenSession`, and ``sent`` is that of the newest `OpenSession`."""

    session: int
    peer: OwnerPeer
    hello: Hello
    since: float | None = None
    alive: bool = True
    name: str = ""
    origin: int = 0
    is_shared: bool = False
    program: str = ""
    sent: float = 0.0

    def __str__(self) -> str:
        who = self.hello
        program = f"{self.program}, " if self.program else ""
        return f"{who.job}:{who.index} ({program}pid {who.pid} on {who.host})"

    def is_of(self, other: Hello) -> bool:
        """Returns whether this HELLO is from the process that owns the task.

        Containers with the network of one host share its name, and may both have the
        pid 1, so incarnations are compared, too.
        """
        return _process_of(self.hello) == _process_of(other)

    def to(self, other: Hello) -> str:
        """Describes the owner in the error for another coordinator, ``other``, that
        asks for the task."""
        if self.is_of(other):
            return (
                "another strategy of your own program, created earlier: call "
                "strategy.close() on that one, or use it"
            )
        began = "before you"
        if self.since is not None:
            began = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(self.since))
        return (
            f"the coordinator {self} since {began}: stop that program, or let this one "
            "wait for its turn (ZSTRAT_TURN=SECONDS, or Timeouts(turn=SECONDS))"
        )


def _process_of(hello: Hello) -> tuple[str, int, int]:
    # Incarnations of one process have the same upper bits.
    return hello.host, hello.pid, hello.incarnation >> 32


_REFUSED: Final = 1024
"""Most refused sessions that are remembered; each is a program that waits for the task,
and may have ended."""


class Ownership:
    """The session that one task serves, and the coordinator that owns it. ``task`` is
    the name of the task in errors."""

    def __init__(self, task: str) -> None:
        self._task = task
        self._owner: Owner | None = None
        self._links: list[OwnerPeer] = []
        """Connections by which the owner has opened the session; notices are sent on
        the newest."""
        self._refused: OrderedDict[int, dict[OwnerPeer, object]] = OrderedDict()
        """For each refused session the values of `OwnerPeer.heard` that the owner's
        connections had when the session was first refused."""

    @property
    def session(self) -> int | None:
        """Number of the open session; None before the first one and after a close."""
        return None if self._owner is None else self._owner.session

    @property
    def owner(self) -> Owner | None:
        return self._owner

    def open(self, asked: Owner, *, several: bool = False) -> bool:
        """Makes a coordinator the owner of the task.

        Args:
            asked: The coordinator that asks to be the owner.
            several: Whether the coordinator may have several connections to the task,
                and is lost only with the last one. The caller calls `lost` with each
                ended connection.

        Returns:
            True if the session is new, so that the caller must drop the state of an
            older one. False if this session was open already (the coordinator
            reconnected).

        Raises:
            BusyError: Another coordinator, which is not lost, owns the task.
            HeldError: Another coordinator owns the task and is surely alive: it is
                another process, from which a message came after this session was first
                refused. Until such a message the error is a plain BusyError, as the
                owner may have been killed and be lost soon.
        """
        owner = self._owner
        is_new = owner is None or owner.session != asked.session
        if owner is not None and is_new and owner.alive:
            words = f"{self._task} serves {owner.to(asked.hello)}"
            # A program that opens another session has closed its own, or is about to.
            is_other = not owner.is_of(asked.hello)
            is_alive = is_other and self._has_proved_alive(owner, asked.session)
            raise HeldError(words) if is_alive else BusyError(words)
        # What proves that the owner lives counts from the next refusal.
        self._refused.clear()
        if owner is None or is_new:
            # Keys are counted from the session that began, if this one continues it.
            self._owner = replace(asked, origin=asked.origin or asked.session)
            # Of the previous owner: their ends say nothing of this one.
            self._links = []
        else:
            self._owner = replace(
                owner,
                peer=asked.peer,
                hello=asked.hello,
                alive=True,
                program=owner.program or asked.program,
                # An opening of an earlier connection may be read late.
                sent=max(owner.sent, asked.sent),
            )
        if several:
            self._links = [*self._others(asked.peer), asked.peer]
        return is_new

    def adopt(self, asked: Owner) -> bool:
        """Makes a coordinator the owner of the named session that a lost coordinator
        left.

        The session gets another number, so that late messages of the lost coordinator
        are refused.

        Returns:
            False, without a change, if there is no such session.
        """
        owner = self._owner
        # A living owner keeps its session, and nobody adopts its own.
        if owner is None or owner.alive or owner.session == asked.session:
            return False
        if not asked.name or owner.name != asked.name:
            return False
        self._owner = replace(asked, origin=owner.origin, is_shared=False)
        self._links = [asked.peer]
        self._refused.clear()
        return True

    def inherit(self, owner: Owner) -> None:
        """Continues the session that the previous process of this task served. The
        session's coordinator counts as alive, as it will reconnect; if it is known to
        be lost, the caller calls `lost`."""
        # The links of the old process have ended with it.
        self._owner, self._links = owner, []

    def lost(self, peer: object) -> bool:
        """Removes an ended connection; returns True if it was the owner's last one, so
        that the owner is lost."""
        owner, self._links = self._owner, self._others(peer)
        if owner is None or owner.peer is not peer:
            return False  # a connection that the owner has replaced may end late
        if self._links:
            self._owner = replace(owner, peer=self._links[-1])
            return False
        self._owner = replace(owner, alive=False)
        return True

    def _has_proved_alive(self, owner: Owner, session: int) -> bool:
        """Returns whether a message of the owner has come since ``session`` was first
        refused. Earlier messages do not prove that the owner lives, as it may have been
        killed since."""
        links = dict.fromkeys((owner.peer, *self._links))
        before = self._refused.setdefault(session, {link: link.heard for link in links})
        if len(self._refused) > _REFUSED:
            self._refused.popitem(last=False)
        return any(link.is_heard and link.heard != before.get(link) for link in links)

    def _others(self, peer: object) -> list[OwnerPeer]:
        return [link for link in self._links if link is not peer]

    def close(self, session: int, sent: float = math.inf) -> bool:
        """Ends the session ``session``. Returns False if no session was open, as the
        close may come twice.

        Args:
            sent: Time when its coordinator sent the `CloseSession`, by the clock of
                `Owner.sent`.

        Raises:
            StaleSessionError: Another session is open, or this session was opened again
                after ``sent``.
        """
        owner = self._owner
        if owner is None:
            return False
        self.check(session)
        # After the number: an old order of another session is stale in any case.
        if sent < owner.sent:
            raise StaleSessionError(
                f"{self._task} serves session {session:#x}, which {owner} has opened "
                "again after it was closed: the earlier order to close it has no effect"
            )
        self._owner, self._links = None, []
        return True

    def check(self, session: int) -> None:
        """Checks that ``session`` is open.

        Raises:
            StaleSessionError: Another session is open, or no session.
        """
        owner = self._owner
        if owner is not None and owner.session == session:
            return
        serves = (
            "no session" if owner is None else f"session {owner.session:#x} of {owner}"
        )
        raise StaleSessionError(
            f"{self._task} serves {serves}, not session {session:#x}: the task was "
            "restarted or taken over; reconnect the program to the cluster"
        )

"""Who owns a task: at most one coordinator at a time, decided without I/O.

A session is named by the incarnation of its coordinator. It begins with `OpenSession`
and lasts until its coordinator closes it or another one takes the task over, which is
granted only when the owner is gone: an owner that was lost keeps what it has on the
task (it may come back, or the next one may start afresh), but it cannot keep the task.
A coordinator may have several connections, and a frozen task may hear the last of them
first: openings and closes say when they were sent, so that an old close ends nothing.
Only this file changes who the owner is; ps and worker ask it before they act.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Protocol, final

from zstrat.errors import BusyError, HeldError, PeerLostError, StaleSessionError

if TYPE_CHECKING:
    from zstrat.wire._link_messages import Hello


class OwnerPeer(Protocol):
    """A connection of a coordinator, by identity."""

    @property
    def is_heard(self) -> bool:
        """Whether it is whole, and the coordinator was heard on it just now."""
        ...

    @property
    def heard(self) -> object:
        """Another value after each message of the coordinator."""
        ...


@final
class AbsentPeer:
    """In place of a connection that is not there yet."""

    is_heard = False
    heard = None

    def notify(self, message: object) -> None:
        """Refuses, as nobody would hear it.

        Raises:
            PeerLostError: In any case.
        """
        raise PeerLostError("the coordinator", "it has not come back yet")


@dataclass(frozen=True, slots=True)
class Owner:
    """The coordinator that holds a task; ``peer`` is its last connection, by identity;
    ``since`` is when it took it, in seconds since 1970, None if nobody said that;
    ``name``, ``origin``, ``is_shared``, ``program`` and ``sent`` are those of
    `OpenSession`; ``sent`` that of the last one."""

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
        """Whether this HELLO is of the process that holds the task.

        Containers that have the network of one host have its name, too, and may both
        have the pid 1: incarnations tell them apart.
        """
        return _process_of(self.hello) == _process_of(other)

    def to(self, other: Hello) -> str:
        """What a coordinator is told that wants the task, too."""
        if self.is_of(other):
            return (
                "another strategy of your own program, made before: call "
                "strategy.close() on that one, or use it"
            )
        began = "before you"
        if self.since is not None:
            began = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(self.since))
        return (
            f"the coordinator {self} since {began}: stop that program, or have this "
            "one wait for its turn (ZSTRAT_TURN=SECONDS, or Timeouts(turn=SECONDS))"
        )


def _process_of(hello: Hello) -> tuple[str, int, int]:
    # The upper bits of incarnations that one process draws are alike.
    return hello.host, hello.pid, hello.incarnation >> 32


_REFUSED: Final = 1024
"""Sessions that wait for a task, at most; each is a program that may have gone."""


class Ownership:
    """The session that one task serves. ``task`` names that task in errors."""

    def __init__(self, task: str) -> None:
        self._task = task
        self._owner: Owner | None = None
        self._links: list[OwnerPeer] = []
        """Connections of the owner by which it has opened the session, as it may have
        several; the last one is where it is told of what happens."""
        self._refused: OrderedDict[int, dict[OwnerPeer, object]] = OrderedDict()
        """What was heard of the owner when another session was first refused for it."""

    @property
    def session(self) -> int | None:
        """The session that is open, None before the first and after a close."""
        return None if self._owner is None else self._owner.session

    @property
    def owner(self) -> Owner | None:
        return self._owner

    def open(self, asked: Owner, *, several: bool = False) -> bool:
        """Gives the task to a coordinator.

        Args:
            asked: Who is to hold it.
            several: The coordinator may have several connections to the task, and is
                lost with the last of them. The caller tells `lost` of each that ends.

        Returns:
            True if the session is new: what belongs to an older one is to be dropped.
            False if this session was open already (the coordinator reconnected).

        Raises:
            BusyError: Another coordinator, which is not lost, holds the task.
            HeldError: The same, where the other coordinator is surely alive: another
                process, which was heard after this session was first refused. It is a
                plain BusyError until then, and may pass soon, as after a kill.
        """
        owner = self._owner
        is_new = owner is None or owner.session != asked.session
        if owner is not None and is_new and owner.alive:
            words = f"{self._task} serves {owner.to(asked.hello)}"
            # A program that opens another session has closed its own, or is about to.
            is_other = not owner.is_of(asked.hello)
            is_alive = is_other and self._has_proved_alive(owner, asked.session)
            raise HeldError(words) if is_alive else BusyError(words)
        self._refused.clear()
        if owner is None or is_new:
            self._owner = replace(asked, origin=asked.origin or asked.session)
            self._links = []
        else:
            self._owner = replace(
                owner,
                peer=asked.peer,
                hello=asked.hello,
                alive=True,
                program=owner.program or asked.program,
                sent=max(owner.sent, asked.sent),
            )
        if several:
            self._links = [*self._others(asked.peer), asked.peer]
        return is_new

    def adopt(self, asked: Owner) -> bool:
        """Gives the task to a coordinator that goes on with the session of this name,
        after the coordinator that opened it was lost.

        The session gets another number, so that late messages of the lost coordinator
        are refused.

        Returns:
            False, and nothing has changed, if there is no such session.
        """
        owner = self._owner
        if owner is None or owner.alive or owner.session == asked.session:
            return False
        if not asked.name or owner.name != asked.name:
            return False
        self._owner = replace(asked, origin=owner.origin, is_shared=False)
        self._links = [asked.peer]
        self._refused.clear()
        return True

    def inherit(self, owner: Owner) -> None:
        """Goes on with the session that the process before had open for this task. Its
        coordinator counts as alive, as it will connect again; if it is known to be
        lost, the caller says so by `lost`."""
        self._owner, self._links = owner, []

    def lost(self, peer: object) -> bool:
        """The connection is gone; True if the owner has no other one."""
        owner, self._links = self._owner, self._others(peer)
        if owner is None or owner.peer is not peer:
            return False  # a connection that the owner has replaced may die late
        if self._links:
            self._owner = replace(owner, peer=self._links[-1])
            return False
        self._owner = replace(owner, alive=False)
        return True

    def _has_proved_alive(self, owner: Owner, session: int) -> bool:
        """Whether the owner was heard since ``session`` was first refused. What was
        heard before proves nothing: it may have been killed or frozen just then."""
        links = dict.fromkeys((owner.peer, *self._links))
        before = self._refused.setdefault(session, {link: link.heard for link in links})
        if len(self._refused) > _REFUSED:
            self._refused.popitem(last=False)
        return any(link.is_heard and link.heard != before.get(link) for link in links)

    def _others(self, peer: object) -> list[OwnerPeer]:
        return [link for link in self._links if link is not peer]

    def close(self, session: int, sent: float = math.inf) -> bool:
        """Ends the session; False if none was open (closing twice is no error).

        Args:
            sent: When its coordinator said so, by the clock of `Owner.sent`.

        Raises:
            StaleSessionError: Another session is open, or this one was opened again
                after ``sent``.
        """
        owner = self._owner
        if owner is None:
            return False
        self.check(session)
        if sent < owner.sent:
            raise StaleSessionError(
                f"{self._task} serves session {session:#x}, which {owner} has opened "
                "again after it was closed: the earlier order to close it has no effect"
            )
        self._owner, self._links = None, []
        return True

    def check(self, session: int) -> None:
        """Passes the requests of the open session, and no others.

        Raises:
            StaleSessionError: ``session`` is not the one that is open.
        """
        owner = self._owner
        if owner is not None and owner.session == session:
            return
        serves = (
            "no session" if owner is None else f"session {owner.session:#x} of {owner}"
        )
        raise StaleSessionError(
            f"{self._task} serves {serves}, not session {session:#x}: the task was "
            "restarted or taken over; connect the program to the cluster anew"
        )

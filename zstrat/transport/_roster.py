"""Which tasks are connected, and which of two that claim to be one is the one.

A decision without I/O. A worker, ps or evaluator exists once: who is here and answers
stays, whoever else claims to be the same task, and a newcomer has to wait until he is
missed. One whose connection broke is replaced by a newcomer, and his incarnation
refused from then on, so that a process which wakes up from the dead does not push the
living aside. Coordinators and observers may be several; whose word counts among
coordinators, the session decides.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from zstrat.errors import BusyError, ProtocolError, ZstratError
from zstrat.wire import Hello, Job
from zstrat.wire._greeting import described

if TYPE_CHECKING:
    from collections.abc import Callable

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
        replaced = self._rivals(hello) if hello.job in _SINGLE else ()
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

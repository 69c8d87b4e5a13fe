"""In what order requests may touch variables that others are busy with.

Most requests find everything free and are answered on the spot. A request that goes to
the compute thread *holds* the names that it uses (variable keys, its step, optimizers)
until it is done; whoever needs one of them queues behind, in order of arrival, and
holds the names that it waits for in its turn. So requests that share a name are served
in the order in which they came, whoever sent them, and those that share none do not
wait for each other: a pull does not wait for the compilation of another variable's
optimizer.

No threads and no I/O: the owner calls `enter` and `leave` and runs what is its turn.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from zstrat.errors import BusyError

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Ticket(Generic[T]):
    """A request that holds names, or waits for them (``behind`` of them are taken)."""

    request: T
    names: frozenset[Hashable]
    behind: int = field(default=0)


class RequestTurns(Generic[T]):
    """One queue per name that is in use, at most ``capacity`` requests in all."""

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._queues: dict[Hashable, deque[Ticket[T]]] = {}
        self._tickets = 0

    def __len__(self) -> int:
        return self._tickets

    @property
    def tickets(self) -> set[Ticket[T]]:
        """All that hold names, or wait for them."""
        return {ticket for queue in self._queues.values() for ticket in queue}

    def are_free(self, names: Iterable[Hashable]) -> bool:
        """True if a request that uses only these may be served on the spot."""
        queues = self._queues
        return not queues or not any(name in queues for name in names)

    def enter(self, request: T, names: Iterable[Hashable]) -> Ticket[T]:
        """Takes the names, or queues for them; its turn has come if `is_turn`.

        Raises:
            BusyError: The capacity is reached.
        """
        if self._tickets >= self._capacity:
            raise BusyError(
                f"{self._capacity} requests wait already: send fewer at a time"
            )
        ticket = Ticket(request, frozenset(names))
        for name in ticket.names:
            queue = self._queues.setdefault(name, deque())
            ticket.behind += bool(queue)
            queue.append(ticket)
        self._tickets += 1
        return ticket

    def is_turn(self, ticket: Ticket[T]) -> bool:
        return ticket.behind == 0

    def leave(self, ticket: Ticket[T]) -> list[Ticket[T]]:
        """Frees the names of a ticket that had its turn; returns whose turn comes."""
        self._tickets -= 1
        ready: list[Ticket[T]] = []
        for name in ticket.names:
            queue = self._queues[name]
            assert queue[0] is ticket, "only the first in a queue may leave"
            queue.popleft()
            if not queue:
                del self._queues[name]
                continue
            queue[0].behind -= 1
            if queue[0].behind == 0:
                ready.append(queue[0])
        return ready

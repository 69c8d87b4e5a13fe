"""Requests that wait for their outcome, and their deadlines. No clock, no timers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from ._messages import Message

Token = TypeVar("Token")

SCAN: Final = 0.01
"""Seconds between two looks at all deadlines, at the least."""


class Waiting(NamedTuple, Generic[Token]):
    """``message`` is kept if the other side may ask for it `Again`."""

    token: Token
    deadline: float
    kind: type[Message]
    message: Message | None


class Requests(Generic[Token]):
    """By number. A lower bound of all deadlines costs a request one comparison; looking
    at all of them is dear but rare, because deadlines hardly ever pass."""

    __slots__ = ("_waiting", "due")

    def __init__(self) -> None:
        self._waiting: dict[int, Waiting[Token]] = {}
        self.due = float("inf")

    def __len__(self) -> int:
        return len(self._waiting)

    def add(
        self,
        number: int,
        token: Token,
        deadline: float,
        kind: type[Message],
        message: Message | None = None,
    ) -> None:
        self._waiting[number] = Waiting(token, deadline, kind, message)
        if deadline < self.due:
            self.due = deadline

    def take(self, number: int) -> Waiting[Token] | None:
        """The request of that number, which waits no more."""
        return self._waiting.pop(number, None)

    def take_late(self, now: float) -> list[Waiting[Token]]:
        """Those whose deadline has passed, which wait no more."""
        if now < self.due:
            return []
        late = [n for n, each in self._waiting.items() if each.deadline <= now]
        taken = [self._waiting.pop(number) for number in late]
        earliest = min((each.deadline for each in self._waiting.values()), default=None)
        self.due = float("inf") if earliest is None else max(earliest, now + SCAN)
        return taken

    def take_all(self) -> list[Waiting[Token]]:
        """All of them, for none will be answered."""
        taken = list(self._waiting.values())
        self._waiting.clear()
        self.due = float("inf")
        return taken

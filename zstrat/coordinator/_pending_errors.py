"""Errors of closures that wait to be raised, and from which line each of them comes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from types import CodeType

KEPT_ERRORS: Final = 1024
"""The first ones, and the last."""


CallSite = tuple["CodeType", int]
"""Where `schedule` was called: the code, and the offset of the instruction. A plain
tuple is made in no time; the line is looked up when somebody asks."""


def line_of(site: CallSite) -> str:
    """The file and the line."""
    code, instruction = site
    for begin, end, line in code.co_lines():
        if begin <= instruction < end and line is not None:
            return f"{code.co_filename}:{line}"
    return f"{code.co_filename}:{code.co_firstlineno}"


_SIGNED: Final = "It is the error of"
_SHARED: Final = "Other steps failed with the same error."


@dataclass(frozen=True, slots=True)
class ClosureSource:
    """A closure as a reader knows it."""

    step: int
    name: str
    site: CallSite | None

    def __str__(self) -> str:
        at = "" if self.site is None else f", scheduled at {line_of(self.site)}"
        return f"step {self.step} ({self.name}{at})"

    def sign(self, error: Exception) -> None:
        """Notes whose error it is, for whoever raises it. Steps may share one, as of a
        dataset that could not be made: then it is the first one's, and says so."""
        notes: list[str] = getattr(error, "__notes__", [])
        mine = f"{_SIGNED} {self}."
        if mine in notes:
            return
        if not any(note.startswith(_SIGNED) for note in notes):
            error.add_note(mine)
        elif _SHARED not in notes:
            error.add_note(_SHARED)


@dataclass(slots=True, eq=False)
class PendingError:
    """An error that a call of the user is to raise."""

    error: Exception
    source: ClosureSource | None = None
    """The closure that failed; None if it was something else."""
    was_fetched: bool = False
    """A fetch has raised it already."""

    def raised_by(self, call: str) -> Exception:
        """The error, for ``call`` to raise, with a note that says that it did."""
        if self.source is not None:
            self.error.add_note(self._note(call))
        return self.error.with_traceback(None)

    def _note(self, call: str) -> str:
        words = "A fetch has raised it before. " if self.was_fetched else ""
        words += f"{call} raised it, once"
        if call == "coordinator.schedule":
            words += ", and did not schedule what it was called with: call it again"
        if self.was_fetched:
            words += (
                "; with ClusterCoordinator(strategy, errors_once=True) what was "
                "fetched is not raised again"
            )
        return f"{words}."


class PendingErrors:
    """Those that came with the first one.

    Args:
        once: One that a fetch has raised is not to be raised by another call.
    """

    def __init__(self, once: bool) -> None:
        self._once = once
        self._all: list[PendingError] = []

    @property
    def errors(self) -> list[Exception]:
        return [failure.error for failure in self._all]

    @property
    def first(self) -> PendingError | None:
        """The first one that is still to be raised."""
        waiting = (one for one in self._all if not (self._once and one.was_fetched))
        return next(waiting, None)

    @property
    def unfetched(self) -> PendingError | None:
        """The first one that no fetch has raised."""
        return next((one for one in self._all if not one.was_fetched), None)

    def begin(self) -> None:
        """The next one is the first."""
        self._all.clear()

    def add(self, failure: PendingError) -> None:
        if len(self._all) >= KEPT_ERRORS:
            self._all.pop()
        self._all.append(failure)

    def fetched(self, error: Exception) -> None:
        """A fetch raises the error."""
        for failure in self._all:
            if failure.error is error:
                failure.was_fetched = True

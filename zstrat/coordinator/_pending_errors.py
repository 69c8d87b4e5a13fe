"""Errors of closures that the next call of the user raises, with the line that
scheduled each closure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from types import CodeType

KEPT_ERRORS: Final = 1024
"""The most errors that are kept: the oldest, and the newest."""


CallSite = tuple["CodeType", int]
"""Where `schedule` was called: the code, and the offset of the instruction. A tuple is
quick to make; `line_of` finds the line when it is needed."""


def line_of(site: CallSite) -> str:
    """Returns "FILE:LINE" of a call."""
    code, instruction = site
    for begin, end, line in code.co_lines():
        if begin <= instruction < end and line is not None:
            return f"{code.co_filename}:{line}"
    return f"{code.co_filename}:{code.co_firstlineno}"


_SIGNED: Final = "It is the error of"
_SHARED: Final = "Other steps failed with the same error."


@dataclass(frozen=True, slots=True)
class ClosureSource:
    """Names a closure in messages."""

    step: int
    name: str
    site: CallSite | None

    def __str__(self) -> str:
        at = "" if self.site is None else f", scheduled at {line_of(self.site)}"
        return f"step {self.step} ({self.name}{at})"

    def sign(self, error: Exception) -> None:
        """Adds a note to the error that names the closure. Closures may share an error,
        such as that of a dataset; the note then names the first, and says so."""
        notes: list[str] = getattr(error, "__notes__", [])
        signature = f"{_SIGNED} {self}."
        if signature in notes:
            return
        if not any(note.startswith(_SIGNED) for note in notes):
            error.add_note(signature)
        elif _SHARED not in notes:
            error.add_note(_SHARED)


@dataclass(slots=True, eq=False)
class PendingError:
    """An error that a call of the user has to raise."""

    error: Exception
    source: ClosureSource | None = None
    """The closure that failed; None if the error belongs to no closure."""
    was_fetched: bool = False
    """A fetch has raised it."""

    def raised_by(self, call: str) -> Exception:
        """Returns the error, for ``call`` to raise, with a note that names the call."""
        if self.source is not None:
            self.error.add_note(self._note(call))
        return self.error.with_traceback(None)

    def _note(self, call: str) -> str:
        text = "A fetch has raised it before. " if self.was_fetched else ""
        text += f"{call} raised it, once"
        if call == "coordinator.schedule":
            text += ", and did not schedule its own call: call it again"
        if self.was_fetched:
            text += (
                "; ClusterCoordinator(strategy, errors_once=True) does not raise again "
                "what a fetch has raised"
            )
        return f"{text}."


class PendingErrors:
    """The first error and those after it, until the first is raised.

    Args:
        once: Errors that a fetch has raised are not raised again.
    """

    def __init__(self, once: bool) -> None:
        self._once = once
        self._all: list[PendingError] = []

    @property
    def errors(self) -> list[Exception]:
        return [failure.error for failure in self._all]

    @property
    def first(self) -> PendingError | None:
        """The first error that is still to be raised."""
        pending = (
            failure for failure in self._all if not (self._once and failure.was_fetched)
        )
        return next(pending, None)

    @property
    def unfetched(self) -> PendingError | None:
        """The first error that no fetch has raised."""
        return next((failure for failure in self._all if not failure.was_fetched), None)

    def begin(self) -> None:
        """Forgets all errors, as the next one is a new first."""
        self._all.clear()

    def add(self, failure: PendingError) -> None:
        if len(self._all) >= KEPT_ERRORS:
            self._all.pop()
        self._all.append(failure)

    def fetched(self, error: Exception) -> None:
        """Notes that a fetch raises the error."""
        for failure in self._all:
            if failure.error is error:
                failure.was_fetched = True

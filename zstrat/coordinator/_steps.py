"""Numbers of steps (runs of closures), with the lowest step that has not ended; and the
errors of steps that the next call of the user raises, with the line that scheduled each
step.

A parameter server remembers which steps it has applied, so that a step that runs twice
is applied once. It may forget all steps below the *low water*, the lowest step that has
not ended. `join` uses the same number: everything scheduled before step n has ended
when the low water reaches n.

Ended steps above the low water are stored as runs of neighbours, as millions of quick
closures may overtake one slow one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from types import CodeType


class Steps:
    """Issues step numbers, and finds the lowest step that has not ended."""

    __slots__ = ("_end_of", "_first_of", "low_water", "next")

    def __init__(self, first: int = 1) -> None:
        self.next = first
        """The number of the next step."""
        self.low_water = first
        """The lowest step that has not ended; ``next`` if all steps have."""
        # A run of ended steps [first, end) above the low water, found from both sides.
        self._end_of: dict[int, int] = {}
        self._first_of: dict[int, int] = {}

    @property
    def above(self) -> list[tuple[int, int]]:
        """The runs ``[first, end)`` of ended steps above the low water: at most one
        more than unfinished steps."""
        return sorted(self._end_of.items())

    def issue(self) -> int:
        """Returns a new step number."""
        step = self.next
        self.next = step + 1
        return step

    def end(self, step: int) -> None:
        """Notes that the step has ended. Call it once for each step.

        Raises:
            AssertionError: The step was not issued, or is already below the low water.
        """
        assert self.low_water <= step < self.next, f"step {step} is not open"
        # 0 stands for no run there: numbers start at 1.
        end = self._end_of.pop(step + 1, 0)
        if end:
            del self._first_of[end]
        else:
            end = step + 1
        # A run that touches the low water raises it, and is never stored.
        if step == self.low_water:
            self.low_water = end
            return
        first = self._first_of.pop(step, step)
        self._end_of[first] = end
        self._first_of[end] = first


KEPT_ERRORS: Final = 1024
"""The most errors that are kept: the oldest one, and the newest ones."""


CallSite = tuple["CodeType", int]
"""The place in the user's code that called `schedule`: the code object, and the offset
of the instruction. A tuple is quick to make; `line_of` finds the line when it is
needed."""


def line_of(site: CallSite) -> str:
    """Returns the "FILE:LINE" of a call site."""
    code, instruction = site
    for begin, end, line in code.co_lines():
        if begin <= instruction < end and line is not None:
            return f"{code.co_filename}:{line}"
    return f"{code.co_filename}:{code.co_firstlineno}"


_SIGNED: Final = "It is the error of"
_SHARED: Final = "Other steps failed with the same error."


@dataclass(frozen=True, slots=True)
class ClosureSource:
    """The step, name and call site of a closure, which name it in messages."""

    step: int
    name: str
    site: CallSite | None

    def __str__(self) -> str:
        at = "" if self.site is None else f", scheduled at {line_of(self.site)}"
        return f"step {self.step} ({self.name}{at})"

    def sign(self, error: Exception) -> None:
        """Adds a note to the error that names the closure. Several closures may share
        an error, such as that of a dataset; the note then names the first closure, and
        says so."""
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
    """Whether a fetch has raised the error."""

    def raised_by(self, call: str) -> Exception:
        """Returns the error, for ``call`` to raise, with a note that names the call."""
        if self.source is not None:
            self.error.add_note(self._note(call))
        return self.error.with_traceback(None)

    def _note(self, call: str) -> str:
        text = f"Raised once, by {call}."
        if self.was_fetched:
            text = (
                f"A fetch has raised it before; {call} raises it once more. "
                "ClusterCoordinator(strategy, errors_once=True) does not raise again "
                "what a fetch has raised."
            )
        if call == "coordinator.schedule":
            text += " This call was not scheduled: call it again."
        return text


class PendingErrors:
    """The first error of a failure and those after it, until the first is raised.

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
        """Forgets all errors: the next one is the first of a new failure."""
        self._all.clear()

    def add(self, failure: PendingError) -> None:
        # The last one makes room: the first errors say what began it, and the newest is
        # what happens now.
        if len(self._all) >= KEPT_ERRORS:
            self._all.pop()
        self._all.append(failure)

    def fetched(self, error: Exception) -> None:
        """Notes that a fetch has raised the error."""
        for failure in self._all:
            if failure.error is error:
                failure.was_fetched = True

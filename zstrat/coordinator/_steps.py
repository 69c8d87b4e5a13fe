"""The numbers of closures: unique, growing, and how far everything is over.

A parameter server remembers which steps it has applied, so that a step that runs twice
has its effect once; it may forget all steps below the *low water*, the lowest step that
has not ended. The same number answers `join`: all that was scheduled before step n is
over when the low water has reached n.

Ended steps above the low water are kept as runs of neighbours: one slow closure must
not make millions of quick ones be remembered one by one.
"""

from __future__ import annotations


class Steps:
    """Issues step numbers and knows the lowest that has not ended."""

    __slots__ = ("_end_of", "_first_of", "low_water", "next")

    def __init__(self, first: int = 1) -> None:
        self.next = first
        """The number that the next step will get."""
        self.low_water = first
        """Every step below this one is over; equal to ``next`` when all are."""
        # A run of ended steps [first, end) above the low water, found from both sides.
        self._end_of: dict[int, int] = {}
        self._first_of: dict[int, int] = {}

    @property
    def runs(self) -> int:
        """How many runs are remembered: at most one more than steps are unfinished."""
        return len(self._end_of)

    @property
    def above(self) -> list[tuple[int, int]]:
        """The runs ``[first, end)`` of steps above the low water that are over."""
        return sorted(self._end_of.items())

    def issue(self) -> int:
        """A step number that was never used."""
        step = self.next
        self.next = step + 1
        return step

    def end(self, step: int) -> None:
        """The step is over, however it ended. Each step ends once.

        Raises:
            AssertionError: It was not issued, or it is below the low water already.
        """
        assert self.low_water <= step < self.next, f"step {step} is not open"
        end = self._end_of.pop(step + 1, 0)
        if end:
            del self._first_of[end]
        else:
            end = step + 1
        if step == self.low_water:
            self.low_water = end
            return
        first = self._first_of.pop(step, step)
        self._end_of[first] = end
        self._first_of[end] = first

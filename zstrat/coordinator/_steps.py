"""Step numbers of closures, and the lowest step that has not ended.

A parameter server remembers which steps it has applied, so that a step that runs twice
is applied once. It may forget all steps below the *low water*, the lowest step that has
not ended. `join` uses the same number: everything scheduled before step n has ended
when the low water reaches n.

Ended steps above the low water are kept as runs of neighbours, as one slow closure may
be overtaken by millions of quick ones.
"""

from __future__ import annotations


class Steps:
    """Issues step numbers, and knows the lowest that has not ended."""

    __slots__ = ("_end_of", "_first_of", "low_water", "next")

    def __init__(self, first: int = 1) -> None:
        self.next = first
        """The number of the next step."""
        self.low_water = first
        """The lowest step that has not ended; ``next`` if all have."""
        # A run of ended steps [first, end) above the low water, found from both sides.
        self._end_of: dict[int, int] = {}
        self._first_of: dict[int, int] = {}

    @property
    def runs(self) -> int:
        """Number of runs: at most one more than unfinished steps."""
        return len(self._end_of)

    @property
    def above(self) -> list[tuple[int, int]]:
        """The runs ``[first, end)`` of ended steps above the low water."""
        return sorted(self._end_of.items())

    def issue(self) -> int:
        """Returns a new step number."""
        step = self.next
        self.next = step + 1
        return step

    def end(self, step: int) -> None:
        """Notes that the step has ended. Each step ends once.

        Raises:
            AssertionError: It was not issued, or is already below the low water.
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

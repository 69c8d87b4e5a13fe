"""Values and slots of several variables as the one list that a step makes and takes.

A step computes the next state of all that it moves, and the next call of the same
program takes all of it again. To hand each variable its own in between would cost more
than many a step. So the list is kept as it is, each home knows its place in it, and
takes its own out when somebody asks the home for it.

Law of the file: what a home has taken out is not in the list any more, and who finds
the list whole finds the state of every home in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .gradients._slots import SlotRule


class JointState:
    """The arrays of one step, in the order of its program.

    ``arrays`` are replaced by those of the next step, by whoever has the turn and the
    lock of the residence. ``is_whole``: no home has taken its own out.
    """

    __slots__ = ("arrays", "is_whole")

    def __init__(self, arrays: list[Any]) -> None:
        self.arrays = arrays
        self.is_whole = True

    def taken(self) -> list[Any] | None:
        """All arrays, in a list of the caller's; None: some are elsewhere."""
        found = self.arrays[:]
        # Asked afterwards: a home says so before it takes anything out.
        return found if self.is_whole else None


class JointPlace(NamedTuple):
    """Where in the list the arrays of one home are: the value, and from where to where
    the slots of each optimizer."""

    state: JointState
    value: int
    slots: tuple[tuple[SlotRule, int, int], ...]

    def leave(self) -> None:
        """The home has its arrays elsewhere, and they are not kept here as well."""
        state = self.state
        state.is_whole = False
        state.arrays[self.value] = None
        for _, first, end in self.slots:
            state.arrays[first:end] = [None] * (end - first)

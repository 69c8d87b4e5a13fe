"""The actions of each rank in a collective call, as data.

A call works on *blocks*, parts of one flat array (for a gather: the array of each
rank). For every block a rank has a list of actions, done one after the other; different
blocks do not wait for each other, so a block may be divided further into chunks that
each run through the same list. A *hop* is the transfer of a block from one rank to
another; the sender's and the receiver's action name the same ``place``, the number of
the hop in the call.

The laws that a schedule keeps, for any number of ranks: Every contribution is reduced
into a block exactly once. Exactly one rank finishes a block (divides, rounds,
compresses it), and all ranks that have the block in the end have the bytes that this
rank made; or several ranks finish it that have reduced the same contributions in the
same order. No rank receives two hops of the same place. If a rank has sent a block and
later receives it as finished, then all ranks that it was sent to have received it
before. (A barrier transfers no data, and keeps only the law about places.)
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class Act(enum.Enum):
    """The kinds of actions of a rank on one block."""

    SEND = enum.auto()
    """Sends the present values of the block on this rank to the peer."""
    REDUCE = enum.auto()
    """Reduces the values that come from the peer into those of this rank."""
    REDUCE_FIRST = enum.auto()
    """As REDUCE, with the values of the peer as the first operand."""
    TAKE = enum.auto()
    """Replaces the block's values by those that come from the peer."""
    FINISH = enum.auto()
    """Makes the final values of the block: takes the mean, converts to the dtype of the
    result."""


class Action(NamedTuple):
    """One action on a block. ``peer`` is -1 for `Act.FINISH`. ``place`` is the number
    of the hop in the call, the same in the sender's and the receiver's action."""

    act: Act
    peer: int = -1
    place: int = -1


def first_place(actions: Sequence[Action]) -> int:
    """Returns the place of the first hop that the actions send. Blocks that other ranks
    wait for first have the lowest places."""
    return next((each.place for each in actions if each.act is Act.SEND), 0)


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """One rank's part of a call.

    ``blocks[b]`` are the actions on block b. ``places`` is the number of places of the
    call, the same on all ranks.
    """

    blocks: tuple[tuple[Action, ...], ...]
    places: int

"""The actions of each rank of a collective, as data.

A call works on *blocks*, parts of one flat array (for a gather: what each rank gives).
For every block a rank has a list of actions, done one after the other; different blocks
do not wait for each other, so a block may be cut further into chunks that each run
through the same list. A send and the receive that it meets name the same ``place``
on both sides.

The laws that a schedule keeps, for any size: every contribution is reduced into a
block exactly once; a block is finished (divided, rounded, compressed) by exactly one
rank, and all ranks that hold it in the end hold the bytes that this rank made; or by
several that have reduced the same contributions in the same order. What a rank has sent
of a block and later receives as finished was received before by all whom it was sent
to. No rank receives two hops of the same place. (A barrier moves nothing, and keeps the
last law alone.)
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
    """Sends what this rank has of the block to the peer."""
    REDUCE = enum.auto()
    """Reduces what comes from the peer into what this rank has."""
    REDUCE_FIRST = enum.auto()
    """Reduces what this rank has into what comes from the peer: the other order."""
    TAKE = enum.auto()
    """Takes what comes from the peer for the block from now on."""
    FINISH = enum.auto()
    """The block is complete here: the mean is taken, the dtype of the result made."""


class Action(NamedTuple):
    """One action on a block. ``peer`` is -1 for `Act.FINISH`. ``place`` numbers the hop
    within the call: the sender's and the receiver's action have the same."""

    act: Act
    peer: int = -1
    place: int = -1


def first_place(actions: Sequence[Action]) -> int:
    """Returns the place of the first hop that is sent: blocks that others wait for
    first have the lowest."""
    return next((each.place for each in actions if each.act is Act.SEND), 0)


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """One rank's part of a call.

    ``blocks[b]`` are the actions on block b. ``places`` is the number of places of the
    call, the same on all ranks. ``result`` are the blocks whose values are this rank's
    result.
    """

    blocks: tuple[tuple[Action, ...], ...]
    places: int
    result: tuple[int, ...]

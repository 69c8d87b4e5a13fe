"""The state machine of one store as data: its phases, and the orders that it gives.

    CREATING ──created──▶ ALONE, or ──refused──▶ EMPTY: a process is asked to create a
                                                 store that it does not have by itself.

    ALONE ──host──▶ HOSTING ──attach──▶ ATTACHING ──whole──▶ PAIRED
      ▲ ▲                                   │ │                │ │
      │ └──────────detached── DETACHING ◀───┘─│──backup lost───┘ │
      │                        ▲     │        │                  │
      │              backup    │     │refused │    primary lost  │
      │              refuses,  │     ▼        ▼                  │
      └──promoted── or is lost └─ PROMOTING ◀────────────────────┘
                                     │
    PAIRED ──host──▶ ADDING ──attach──▶ FILLING ──whole──▶ REPLACING ──▶ PAIRED, with
        the third copy as its backup. A third copy that is lost is forgotten.
    PAIRED ──swap──▶ SWAPPING ──▶ PROMOTING, with the former primary as its partner
        ──promoted──▶ PAIRED. If the backup is lost the partner is promoted.
    in all of these ──primary lost──▶ PROMOTING: a copy that cannot lack anything
    any phase ──no live copy is complete──▶ EMPTY: requests for the store fail.
    any phase ──another session (`ReplicatedStore.reset`)──▶ ALONE, or CREATING.

`NEXT_PHASES` is this drawing as data, and `COPIES_IN` says which copies there are in a
phase: `ReplicatedStore.validate` checks a store against both.

Each order goes to one process. It carries the view of its store, a number that grows
with each change of the copies.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from zstrat.wire import OrphanedCopy


class CopyPhase(enum.Enum):
    """The state of a store's copies: the order that is under way, or the state that is
    reached."""

    CREATING = "creating"
    ALONE = "alone"
    HOSTING = "hosting"
    ATTACHING = "attaching"
    PAIRED = "paired"
    ADDING = "adding a copy"
    FILLING = "filling another copy"
    REPLACING = "replacing its backup"
    SWAPPING = "swapping with its backup"
    DETACHING = "detaching"
    PROMOTING = "promoting"
    EMPTY = "empty"


THIRD_BESIDE: Final = (CopyPhase.ADDING, CopyPhase.FILLING)
"""Phases in which a third copy is being made, which does not count as a replica yet."""
WHOLE: Final = (
    CopyPhase.PAIRED,
    *THIRD_BESIDE,
    CopyPhase.REPLACING,
    CopyPhase.SWAPPING,
)
"""Phases in which two copies are complete."""
WITH_BACKUP: Final = (
    CopyPhase.ATTACHING,
    CopyPhase.PAIRED,
    *THIRD_BESIDE,
    CopyPhase.REPLACING,
)
"""Phases in which the primary has a backup, or fills it."""


# From any phase with two copies, as either of them may be lost at any time.
_ONE_LOST: Final = (CopyPhase.DETACHING, CopyPhase.PROMOTING)
NEXT_PHASES: Final[dict[CopyPhase, tuple[CopyPhase, ...]]] = {
    CopyPhase.CREATING: (CopyPhase.ALONE, CopyPhase.EMPTY),
    # Two of them when a program takes a store over from a lost one.
    CopyPhase.ALONE: (
        CopyPhase.ALONE,
        CopyPhase.CREATING,
        CopyPhase.HOSTING,
        CopyPhase.DETACHING,
        CopyPhase.EMPTY,
        CopyPhase.ATTACHING,
        CopyPhase.PROMOTING,
    ),
    CopyPhase.HOSTING: (
        CopyPhase.ALONE,
        CopyPhase.ATTACHING,
        CopyPhase.DETACHING,
        CopyPhase.EMPTY,
    ),
    CopyPhase.ATTACHING: (CopyPhase.PAIRED, *_ONE_LOST),
    CopyPhase.PAIRED: (CopyPhase.ADDING, CopyPhase.SWAPPING, *_ONE_LOST),
    CopyPhase.ADDING: (CopyPhase.FILLING, CopyPhase.PAIRED, *_ONE_LOST),
    CopyPhase.FILLING: (CopyPhase.REPLACING, CopyPhase.ATTACHING, *_ONE_LOST),
    CopyPhase.REPLACING: (CopyPhase.PAIRED, *_ONE_LOST),
    CopyPhase.SWAPPING: (CopyPhase.ATTACHING, *_ONE_LOST),
    CopyPhase.DETACHING: (CopyPhase.ALONE, CopyPhase.PROMOTING, CopyPhase.EMPTY),
    CopyPhase.PROMOTING: (
        CopyPhase.ALONE,
        CopyPhase.PAIRED,
        CopyPhase.EMPTY,
        *_ONE_LOST,
    ),
    # Final in its session: nothing is left that could be served.
    CopyPhase.EMPTY: (),
}
"""The phases that may follow each phase in one session."""

COPIES_IN: Final[dict[CopyPhase, tuple[bool | None, bool | None]]] = {
    CopyPhase.CREATING: (False, False),
    CopyPhase.ALONE: (False, False),
    CopyPhase.HOSTING: (True, False),
    CopyPhase.ATTACHING: (True, False),
    CopyPhase.PAIRED: (True, False),
    CopyPhase.ADDING: (True, True),
    CopyPhase.FILLING: (True, True),
    CopyPhase.REPLACING: (True, True),
    CopyPhase.SWAPPING: (True, False),
    CopyPhase.DETACHING: (None, False),
    CopyPhase.PROMOTING: (True, None),
    CopyPhase.EMPTY: (False, False),
}
"""For each phase: whether there is a backup, and whether there is a third copy; None:
there may be."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of a store; ``life`` is the life of the process which has the copy in
    memory (a number that grows when the process loses its memory)."""

    process: int
    life: int
    address: str
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class Host:
    """An order to a process to host an empty backup. ``beside``: as a third copy, which
    does not count as a replica yet."""

    store: int
    view: int
    process: int
    beside: bool = False


@dataclass(frozen=True, slots=True)
class Establish:
    """An order to a process to serve the store, empty."""

    store: int
    view: int
    process: int


@dataclass(frozen=True, slots=True)
class Attach:
    """An order to the primary to fill the backup, and to keep it equal from then on.
    ``beside``: the primary keeps its other backup, too, until it gets this order
    without ``beside``."""

    store: int
    view: int
    backup: Copy
    beside: bool = False


@dataclass(frozen=True, slots=True)
class Detach:
    """An order to the primary to continue without a backup."""

    store: int
    view: int


@dataclass(frozen=True, slots=True)
class Swap:
    """An order to the process of the primary to hand the store to the backup, and to
    become the backup itself."""

    store: int
    view: int
    process: int
    backup: Copy


@dataclass(frozen=True, slots=True)
class Promote:
    """An order to the backup to become the primary. ``partner``, if any, has the same
    changes, and becomes its backup."""

    store: int
    view: int
    backup: Copy
    partner: Copy | None = None


@dataclass(frozen=True, slots=True)
class Drop:
    """An order to a process to drop its copy of the store, if it has one."""

    store: int
    view: int
    process: int


@dataclass(frozen=True, slots=True)
class Serve:
    """An order to publish the address of the process that serves the store."""

    store: int
    view: int
    primary: Copy


@dataclass(frozen=True, slots=True)
class Lose:
    """An order to mark the store as lost: no process serves it. ``gone``: it cannot
    come back."""

    store: int
    reason: str
    gone: bool = False


Asked = Host | Establish | Attach | Detach | Swap | Promote
"""Orders that processes answer. For each store one is under way at a time: a later one
replaces it."""
PlacementOrder = Asked | Drop | Serve | Lose


class FoundCopy(NamedTuple):
    """A copy that an earlier program has left, and the index of its process."""

    process: int
    copy: OrphanedCopy


class Successor(NamedTuple):
    """The copies with which one store continues in the next program.

    Args:
        chosen: The copy that becomes the primary, or is the primary already.
        partner: The other copy of the same view, if there is one.
        useless: Processes that have older copies.
        view: The newest view (number of a change of copies) that any copy has.
        is_pair: Whether the chosen copy keeps its partner.
    """

    chosen: FoundCopy
    partner: FoundCopy | None
    useless: list[int]
    view: int
    is_pair: bool = False

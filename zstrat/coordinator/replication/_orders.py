"""The machine of one store as data: its phases, and the orders that it gives.

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

Each order is for one process, and is of one view of its store.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from zstrat.wire import OrphanedCopy


class CopyPhase(enum.Enum):
    """The state of a store's copies: the order that is under way, or what is
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
"""A third copy is being made, which does not count yet."""
WHOLE: Final = (
    CopyPhase.PAIRED,
    *THIRD_BESIDE,
    CopyPhase.REPLACING,
    CopyPhase.SWAPPING,
)
"""Two copies are complete."""
WITH_BACKUP: Final = (
    CopyPhase.ATTACHING,
    CopyPhase.PAIRED,
    *THIRD_BESIDE,
    CopyPhase.REPLACING,
)
"""The primary has a backup, or fills it."""


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
"""What may follow a phase in one session."""

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
"""Whether there are a backup and a third copy; None: there may be."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of a store; ``life`` is that of the process which has it in memory."""

    process: int
    life: int
    address: str
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class Host:
    """Make the process host an empty backup. ``beside``: as a third copy, which does
    not count as a replica yet."""

    store: int
    view: int
    process: int
    beside: bool = False


@dataclass(frozen=True, slots=True)
class Establish:
    """Make the process serve the store, empty."""

    store: int
    view: int
    process: int


@dataclass(frozen=True, slots=True)
class Attach:
    """Make the primary fill the backup, and keep it equal from then on. ``beside``:
    keep its other backup, too, until this one is attached without ``beside``."""

    store: int
    view: int
    backup: Copy
    beside: bool = False


@dataclass(frozen=True, slots=True)
class Detach:
    """Make the primary continue without a backup."""

    store: int
    view: int


@dataclass(frozen=True, slots=True)
class Swap:
    """Make the process of the primary hand the store to its backup, and become the
    backup."""

    store: int
    view: int
    process: int
    backup: Copy


@dataclass(frozen=True, slots=True)
class Promote:
    """Make the backup the primary. ``partner`` has the same changes, and becomes its
    backup."""

    store: int
    view: int
    backup: Copy
    partner: Copy | None = None


@dataclass(frozen=True, slots=True)
class Drop:
    """Let the process drop its copy of the store, if it has one."""

    store: int
    view: int
    process: int


@dataclass(frozen=True, slots=True)
class Serve:
    """Publish the address of the process that serves the store."""

    store: int
    view: int
    primary: Copy


@dataclass(frozen=True, slots=True)
class Lose:
    """Mark the store as lost: no process serves it. ``gone``: it cannot come back."""

    store: int
    reason: str
    gone: bool = False


Asked = Host | Establish | Attach | Detach | Swap | Promote
"""Orders that are answered, one at a time for each store: a later one replaces it."""
PlacementOrder = Asked | Drop | Serve | Lose


class FoundCopy(NamedTuple):
    """A copy, and the index of its process."""

    process: int
    copy: OrphanedCopy


class Successor(NamedTuple):
    """The copies by which one store continues in the next program.

    Args:
        chosen: The copy that becomes the primary, or is it already.
        partner: The other copy of its view, if there is one.
        useless: Processes that have older copies.
        view: The newest view that any copy knows of.
        is_pair: The chosen copy keeps its partner.
    """

    chosen: FoundCopy
    partner: FoundCopy | None
    useless: list[int]
    view: int
    is_pair: bool = False

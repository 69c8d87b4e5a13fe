"""What is ordered so that stores have the copies that they are to have: as data.

Each order is for one process, and is of one view of its store.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Copy:
    """Of a store: ``life`` is that of the process that has it in its memory."""

    process: int
    life: int
    address: str
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class Host:
    """The process is to keep a backup, empty for now. ``beside``: a third copy, which
    counts for nothing yet."""

    store: int
    view: int
    process: int
    beside: bool = False


@dataclass(frozen=True, slots=True)
class Establish:
    """The process is to serve the store, which is empty."""

    store: int
    view: int
    process: int


@dataclass(frozen=True, slots=True)
class Attach:
    """The primary is to fill the backup, and to keep it equal. ``beside``: so with its
    other backup, too, which ends when this one is named without that."""

    store: int
    view: int
    backup: Copy
    beside: bool = False


@dataclass(frozen=True, slots=True)
class Detach:
    """The primary is to go on alone."""

    store: int
    view: int


@dataclass(frozen=True, slots=True)
class Swap:
    """The process of the primary is to hand the store to its backup, and to be that."""

    store: int
    view: int
    process: int
    backup: Copy


@dataclass(frozen=True, slots=True)
class Promote:
    """The backup is to be the primary. ``partner`` has the same, and is its backup."""

    store: int
    view: int
    backup: Copy
    partner: Copy | None = None


@dataclass(frozen=True, slots=True)
class Drop:
    """The process need not keep the copy that it may have."""

    store: int
    view: int
    process: int


@dataclass(frozen=True, slots=True)
class Serve:
    """Whoever asks for the store finds it there now."""

    store: int
    view: int
    primary: Copy


@dataclass(frozen=True, slots=True)
class Lose:
    """No process serves the store. ``gone``: none ever will."""

    store: int
    reason: str
    gone: bool = False


Asked = Host | Establish | Attach | Detach | Swap | Promote
"""Orders that are answered, one at a time for each store: a later one replaces it."""
PlacementOrder = Asked | Drop | Serve | Lose


class CopyPhase(enum.Enum):
    """What is asked for a store now."""

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

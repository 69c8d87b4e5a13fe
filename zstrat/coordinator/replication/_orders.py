"""The machine of one store as data, and the choice of its copies at a takeover.

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

`successors` decides with which orphaned copies a program continues. No I/O. Views of a
store are made by the program that holds the session; without a program there are no new
ones. So a copy of the newest view has all that was acknowledged. A view in which only
an empty copy was created does not count. Law: a copy counts as complete only if it is a
primary that continued alone, if both copies are there, or if it lost the other copy
after the program had been lost for so long that the program cannot have noticed.
Otherwise the store is lost, and the session with it, as a model with missing parts is
useless.

Two copies that name each other are a *pair*, whatever their views: an earlier program
may have sent a newer view to one of them. They stay a pair, so that either may be lost
during the takeover.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from zstrat.errors import InvalidArgumentError, PSUnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

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
    """Of a store: ``life`` is that of the process that has it in its memory."""

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
    """The process of the primary is to hand the store to its backup, and to be that."""

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


_AGAIN = (
    "What is left stays until a program takes the cluster without resume=, or with "
    "another name. To start empty, do that and restore the last checkpoint, or pass "
    "on_ps_loss='restore'"
)


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


def successors(
    name: str, session: int, reports: Mapping[int, Sequence[OrphanedCopy]], stores: int
) -> dict[int, Successor]:
    """Returns how each store continues; empty if nothing is left under the name.

    Args:
        name: The name of the session.
        session: Its number now, which no program had before.
        reports: The copies, by process.
        stores: The number of stores of the cluster, numbered from 0.

    Raises:
        PSUnavailableError: A store has no complete copy, and others have one.
        InvalidArgumentError: There are more stores than this program would have.
    """
    found: dict[int, list[FoundCopy]] = {}
    for process, copies in reports.items():
        for copy in copies:
            if copy.origin != session:  # else it is new, and empty
                found.setdefault(copy.store, []).append(FoundCopy(process, copy))
    if not any(each.copy.variables for copies in found.values() for each in copies):
        return {}
    _require_count(name, found, stores)
    chosen = {}
    for store in range(stores):
        others = [f"/job:ps/task:{other}" for other in sorted(found) if other != store]
        chosen[store] = _successor(name, store, found.get(store, []), others)
    if len(origins := {each.chosen.copy.origin for each in chosen.values()}) > 1:
        raise session_lost(
            name, 0, f"there are parts of {len(origins)} different sessions"
        )
    return chosen


def _require_count(name: str, found: Iterable[int], stores: int) -> None:
    if (highest := max(found)) >= stores:
        raise InvalidArgumentError(
            f"resume={name!r}: an earlier program has left store {highest}, and this "
            f"one would have {stores} stores, counted from 0: use as many parameter "
            "servers and the same stores_per_ps=, or another name to start empty"
        )


def _successor(
    name: str, store: int, found: Sequence[FoundCopy], others: Sequence[str]
) -> Successor:
    view = max((each.copy.view for each in found), default=0)
    if (pair := _pair(found)) is not None:
        useless = [each.process for each in found if each not in pair]
        return Successor(*pair, useless, view, is_pair=True)
    newest = [each for each in found if each.copy.view == view]
    if not any(each.copy.is_whole for each in newest):
        newest = _alone(found) or newest
    # The primary first: it has whatever its backup has.
    fit = sorted(
        (each for each in newest if each.copy.is_whole),
        key=lambda each: not each.copy.is_primary,
    )
    if not fit:
        there = ", ".join(others) or "none"
        raise session_lost(
            name,
            store,
            "no parameter server of the cluster has a complete copy of this store "
            f"(other stores that are left: {there})",
        )
    chosen = fit[0]
    if not chosen.copy.is_sure and len(newest) < 2:
        raise session_lost(
            name,
            store,
            "only one of its two copies is left, and it may lack updates that the "
            "other one had acknowledged, which was lost before the servers noticed "
            "the end of the program",
        )
    partners = [each for each in newest if each is not chosen]
    useless = [each.process for each in found if each not in newest]
    return Successor(chosen, partners[0] if partners else None, useless, view)


def _pair(found: Sequence[FoundCopy]) -> tuple[FoundCopy, FoundCopy] | None:
    """Returns a primary and its backup. There is at most one such pair: the backup of
    the first would have been promoted before."""
    for one in found:
        for other in found:
            copies = one.copy, other.copy
            if [each.is_primary for each in copies] != [True, False]:
                continue
            named = other.copy.incarnation, one.copy.incarnation
            if tuple(each.partner for each in copies) == named:
                return one, other
    return None


def _alone(found: Sequence[FoundCopy]) -> list[FoundCopy]:
    """Returns the primary that is alone. It does not have the newest view if the
    program was lost when a process had created an empty copy, and before the primary
    was asked to fill that.

    A primary without any view is complete if it has variables: other copies are copied
    from it, and it gets a view before that. If it has none, its process was restarted.
    """
    alone = [
        each
        for each in found
        if each.copy.is_primary
        and each.copy.is_sure
        and (each.copy.view or each.copy.variables)
    ]
    return sorted(alone, key=lambda each: each.copy.view)[-1:]


def session_lost(name: str, store: int, why: str) -> PSUnavailableError:
    """Returns the error of a store that has no complete copy."""
    words = f"cannot resume the session {name!r}: {why}. {_AGAIN}"
    return PSUnavailableError(f"/job:ps/task:{store}", words, lost=True)

"""Chooses the copies of stores with which a program continues that an earlier program
has left. No I/O.

Views (numbers of changes of the copies) of a store are made by the program that holds
the session; without a program there are no new ones. So a copy of the newest view has
all changes that were acknowledged. A view in which only an empty copy was created does
not count. Law: a copy counts as complete only if it is a primary that continued alone,
if both copies are there, or if it lost the other copy after the program had been lost
for so long that the program cannot have noticed. Otherwise the store is lost, and the
session with it, as a model with missing parts is useless.

Two copies that name each other are a *pair*, whatever their views: an earlier program
may have sent a newer view to one of them. They stay a pair, so that either may be lost
during the takeover.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zstrat.errors import InvalidArgumentError, PSUnavailableError

from ._orders import FoundCopy, Successor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from zstrat.wire import OrphanedCopy

_AGAIN = (
    "What is left stays until a program takes the cluster without resume=, or with "
    "another name. To start empty, do that and restore the last checkpoint, or pass "
    "on_ps_loss='restore'"
)


def successors(
    name: str, session: int, reports: Mapping[int, Sequence[OrphanedCopy]], stores: int
) -> dict[int, Successor]:
    """Returns the copies with which each store continues, by number of the store; empty
    if nothing is left under the name.

    Args:
        name: The name of the session.
        session: The number of the session now, which no program had before.
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
    # Copies without variables are those of a program that has created none yet.
    if not any(each.copy.variables for copies in found.values() for each in copies):
        return {}
    _require_count(name, found, stores)
    chosen = {}
    for store in range(stores):
        others = [f"/job:ps/task:{other}" for other in sorted(found) if other != store]
        chosen[store] = _successor(name, store, found.get(store, []), others)
    # Stores of two programs make no model, and count their keys from other numbers.
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
    # Before views are compared: an order of a newer view may have reached one of the
    # two, which are equal all the same.
    if (pair := _pair(found)) is not None:
        useless = [each.process for each in found if each not in pair]
        return Successor(*pair, useless, view, is_pair=True)
    newest = [each for each in found if each.copy.view == view]
    # The newest view may be one in which only an empty copy was made.
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
    # With the other copy there, neither has acknowledged anything alone.
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
    """Returns a primary and its backup, if both copies are found; else None. There is
    at most one such pair: the backup of the first would have been promoted before."""
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
    """Returns the newest primary that continued alone, as a list; [] if there is none.
    Such a primary does not have the newest view if the program was lost after a process
    had created an empty copy, and before the primary was asked to fill that copy.

    A primary without any view is complete if it has variables: other copies are copied
    from it, and it gets a view before that. If it has no variables, its process was
    restarted.
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

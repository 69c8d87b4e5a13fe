"""Which copies a program goes on with that another one has left. Decides only.

A *view* of a store is made by the program that holds the session, and there is none
while nobody does. So a copy has all that was acknowledged if it is of the newest view
that there ever was; one in which only an empty copy was made does not count. The law of
this file: that is only taken for granted of a primary that went on alone, of two copies
that are both there, and of one whose other copy was lost when the program had been lost
for so long that it cannot have heard of that. Else the store is lost, and with it the
session: a model of which a part is gone is none.

Two copies that both say that they go on together are a *pair*, whatever their views: a
program before may have told one of them of a newer one. They stay a pair, so that
either may be lost while the program takes over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from zstrat.errors import InvalidArgumentError, PSUnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from zstrat.wire import OrphanedCopy

_AGAIN = (
    "What is left stays until a program takes the cluster without resume=, or with "
    "another name. To begin anew, do that and restore the last checkpoint, or give "
    "on_ps_loss='restore'"
)


class FoundCopy(NamedTuple):
    """A copy in the process of that index."""

    process: int
    copy: OrphanedCopy


class Successor(NamedTuple):
    """What becomes of one store.

    Args:
        chosen: Goes on: as primary, or is made it.
        partner: The other copy of its view, if that is there.
        useless: Processes that have older copies.
        view: The newest one that anybody knows of.
        is_pair: The chosen one and its partner go on together.
    """

    chosen: FoundCopy
    partner: FoundCopy | None
    useless: list[int]
    view: int
    is_pair: bool = False


def successors(
    name: str, session: int, told: Mapping[int, Sequence[OrphanedCopy]], stores: int
) -> dict[int, Successor]:
    """The copies to go on with, by store; none if nothing is there under the name.

    Args:
        name: What the session is called.
        session: Its number now, which nobody had before.
        told: By process.
        stores: How many the cluster has, numbered from 0.

    Raises:
        PSUnavailableError: Of a part of the stores no copy is left that has all.
        InvalidArgumentError: There are more stores than this program would have.
    """
    found: dict[int, list[FoundCopy]] = {}
    for process, copies in told.items():
        for copy in copies:
            if copy.origin != session:  # else it is empty, and new
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
            f"resume={name!r}: the program before has left store {highest}, and this "
            f"one would have {stores}, counted from 0: give it as many parameter "
            "servers, and the same stores_per_ps=; or another name, to begin anew"
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
            f"(other stores are still there: {there})",
        )
    chosen = fit[0]
    if not chosen.copy.is_sure and len(newest) < 2:
        raise session_lost(
            name,
            store,
            "of its two copies only one is left, and it may lack updates that the "
            "other one had acknowledged: that one was lost before the servers had "
            "missed the program",
        )
    partners = [each for each in newest if each is not chosen]
    useless = [each.process for each in found if each not in newest]
    return Successor(chosen, partners[0] if partners else None, useless, view)


def _pair(found: Sequence[FoundCopy]) -> tuple[FoundCopy, FoundCopy] | None:
    """A primary and its backup. A second such pair cannot be: the backup of the first
    would have been made the primary before."""
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
    """The primary that is alone. It is not of the newest view if the program was lost
    while a process had made an empty copy, and the primary had not heard of that yet.

    One that has heard of no view at all has all if it has anything: what others have
    was copied from it, and it is told a view before that. If it has nothing, it is a
    process that was started again.
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
    """The error of a store of which no copy is left that has all."""
    words = f"it cannot go on with the session {name!r}: {why}. {_AGAIN}"
    return PSUnavailableError(f"/job:ps/task:{store}", words, lost=True)

"""`ClosureLeases`: which closures have leases, and which wait for some. The part of the
queue that knows of leases; the engine's lock is held by all callers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Generic, NamedTuple, Protocol, TypeVar, final

from zstrat.errors import (
    ClosureInputError,
    OutOfRangeError,
    WorkerLostError,
    ZstratError,
)

from ._session_leases import EndOf, SessionLeases

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ._session_leases import Draw


class Drawing(Protocol):
    """What leases know of a closure."""

    step: int
    draws: Sequence[Draw]
    leases: bytes


C = TypeVar("C", bound=Drawing)


class LeasedClosures(NamedTuple, Generic[C]):
    """What has become of closures that are handed out."""

    ready: list[C]
    parked: list[C]
    """They wait until it is known how leases of others end."""
    over: list[tuple[C, Exception]]
    """There are no data for them."""


@final
class ClosureLeases(Generic[C]):
    """The leases of the closures of one coordinator."""

    def __init__(self, leases: SessionLeases) -> None:
        self._leases: Final = leases
        self._parked: Final[dict[int, list[C]]] = {}
        """By number of the dataset."""
        self.parked = 0
        """The number of closures that wait."""

    def lease(self, taken: list[C]) -> LeasedClosures[C] | None:
        """Leases what these closures draw, but for those that have it; None: all of
        them are ready."""
        if not taken:
            return None
        draws = taken[-1].draws  # one object for all closures of a call
        same = [each for each in taken if each.draws is draws and not each.leases]
        if draws and len(same) == len(taken):
            leases = self._leases.lease_whole([each.step for each in same], draws)
            for closure, lease in zip(same, leases, strict=False):
                closure.leases = lease
            if len(leases) == len(taken):
                return None
        found: LeasedClosures[C] = LeasedClosures([], [], [])
        for closure in taken:
            if not closure.draws or closure.leases or self._lease(closure, found):
                found.ready.append(closure)
        return found

    def ended(self, closure: C, error: Exception | None) -> bool:
        """Notes how a closure with leases has ended. Returns True if its examples are
        skipped, so that the error is raised by a fetch alone."""
        leases, how = self._leases, EndOf.FAILED
        if error is None:
            leases.applied(closure.step, closure.draws)
            return False
        what = leases.held_by(closure.step, closure.draws)
        # An error of the cluster says nothing against the examples.
        skipped = leases.skips(closure.draws) and not isinstance(error, ZstratError)
        if isinstance(error, WorkerLostError):
            how = EndOf.UNKNOWN
            then = "left out, as its updates may have been applied"
        elif skipped:
            then = 'skipped (on_error="skip")'
        else:
            then = (
                'read again by a later step of their epoch; on_error="skip" would '
                "skip them"
            )
        error.add_note(f"The step had leased {what}, which are {then}.")
        leases.ended(closure.step, closure.draws, how, skipped=skipped)
        return skipped

    def unpark(self, resource: int) -> Sequence[C]:
        """Returns closures that waited for leases of the dataset and may try again."""
        if resource in self._parked and not self._leases.books[resource].waits:
            again = self._parked.pop(resource)
            self.parked -= len(again)
            return again
        return ()

    def unpark_all(self) -> list[C]:
        """Returns all closures that wait, which are cancelled."""
        waiting = [closure for parked in self._parked.values() for closure in parked]
        self._parked.clear()
        self.parked = 0
        return waiting

    def give_back(self, resource: int, closures: Iterable[C]) -> None:
        """Takes the leases of the dataset back from closures that have not started, for
        a pass that is moved while nothing runs."""
        for closure in closures:
            if any(draw.resource == resource for draw in closure.draws):
                self._leases.ended(closure.step, closure.draws, EndOf.CANCELLED)
                closure.leases = b""
        self._leases.moved(resource)

    def _lease(self, closure: C, found: LeasedClosures[C]) -> bool:
        """Leases what a closure draws; else notes that it waits, or is over."""
        try:
            leased = self._leases.lease(closure.step, closure.draws)
        except (OutOfRangeError, ClosureInputError) as error:
            found.over.append((closure, error))
            return False
        if isinstance(leased, bytes):
            closure.leases = leased
            return True
        found.parked.append(closure)
        self._parked.setdefault(leased, []).append(closure)
        self.parked += 1
        return False

"""`SessionLeases`: the leases of all leased datasets, and the closures that wait for
leases. All callers hold the engine's lock.

The queue asks for leases when closures are handed out, and reports how each closure has
ended. A closure that draws from several datasets gets all its leases or none.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, Protocol, TypeVar, final

from zstrat.errors import OutOfRangeError, StepError, ZstratError
from zstrat.wire import LEASE

from ._book import done_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from zstrat.coordinator.rounds._optimizer_rounds import OptimizerRounds
    from zstrat.data import Lease
    from zstrat.wire import PlainTree

    from ._book import LeaseBook


REMEMBERED: Final = 4096
"""Number of ended steps that are remembered, as their contributions may wait for a
round, before it is checked which of them do."""


class Draw(NamedTuple):
    """The number of ``batches`` that a step draws from a dataset. ``resource`` is the
    number of the dataset's iterator."""

    resource: int
    batches: int


class Drawing(Protocol):
    """The attributes of a closure that leases use."""

    step: int
    draws: Sequence[Draw]
    leases: bytes
    begun: bool


C = TypeVar("C", bound=Drawing)


class LeasedClosures(NamedTuple, Generic[C]):
    """Closures for which leases were sought; those in ``ready`` have their leases."""

    ready: list[C]
    parked: list[C]
    """Closures that wait until it is known how open leases of other closures end."""
    over: list[tuple[C, Exception]]
    """Closures for which no data are left, each with the error for its value."""


@final
class SessionLeases(Generic[C]):
    """The leased datasets of one coordinator, by number of their iterators."""

    def __init__(self) -> None:
        self.books: dict[int, LeaseBook] = {}
        self.rounds: Iterable[OptimizerRounds] = ()
        """The optimizers to whose rounds steps contribute."""
        self._may_wait: dict[int, Sequence[tuple[LeaseBook, Sequence[Lease]]]] = {}
        self._parked: Final[dict[int, list[C]]] = {}
        """Closures that wait for leases, by number of the dataset."""
        self.parked = 0
        """The number of closures that wait for leases."""

    def lease(self, taken: list[C]) -> LeasedClosures[C] | None:
        """Leases the batches that these closures draw, unless they have their leases
        already. Returns None if all of them are ready."""
        if not taken:
            return None
        draws = taken[-1].draws  # one object for all closures of a call
        # The usual case by one call for all: every step draws one batch of one dataset.
        # What does not fit goes on below, each closure by itself.
        same = [each for each in taken if each.draws is draws and not each.leases]
        if len(draws) == 1 and draws[0].batches == 1 and len(same) == len(taken):
            number, steps = draws[0].resource, [each.step for each in same]
            leases = self.books[number].lease_whole(steps, number)
            for closure, lease in zip(same, leases, strict=False):
                closure.leases = lease
            if len(leases) == len(taken):
                return None
        found: LeasedClosures[C] = LeasedClosures([], [], [])
        for closure in taken:
            if not closure.draws or closure.leases or self._lease(closure, found):
                found.ready.append(closure)
        return found

    def _lease(self, closure: C, found: LeasedClosures[C]) -> bool:
        """Leases the batches that a closure draws; returns whether that succeeded. If
        not, adds the closure to those that wait, as open leases may come back, or to
        those without data."""
        taken: list[LeaseBook] = []
        packed: list[bytes] = []
        for resource, count in closure.draws:
            book = self.books[resource]
            leases = book.lease(closure.step, count)
            if leases:
                taken.append(book)
                packed += [LEASE.pack(resource, *lease) for lease in leases]
                continue
            # All or none: two closures that each hold what the other one needs would
            # never end.
            for other in taken:
                other.give_back(closure.step)
            # Open leases may come back, when their step fails or is cancelled. So it is
            # not over yet for a closure that asks for more than is left.
            if book.waits or book.open:
                found.parked.append(closure)
                self._parked.setdefault(resource, []).append(closure)
                self.parked += 1
            else:
                failure = None if book.size else book.failure()
                found.over.append((closure, failure or _ended(book, count)))
            return False
        closure.leases = b"".join(packed)
        return True

    def applied(self, closure: C) -> None:
        """Notes that the updates of a closure with leases are applied."""
        step = closure.step
        for resource, _ in closure.draws:
            if (book := self.books.get(resource)) is not None:
                if self.rounds:
                    # Its gradients may wait for a round, and are then not in the values
                    # of a checkpoint. Noted before the book forgets what the step
                    # holds.
                    self._note(step, book)
                book.applied(step)

    def cancelled(self, closure: C) -> None:
        """Takes back the leases of a closure that was cancelled without effect."""
        for book in self._books_of(closure):
            book.give_back(closure.step)

    def failed(self, closure: C, error: Exception) -> bool:
        """Notes that a closure with leases has failed. Returns True if its examples are
        skipped, so that only a fetch raises the error."""
        books = list(self._books_of(closure))
        # An error of the cluster says nothing against the examples: `on_error` does
        # not apply.
        of_step = isinstance(error, StepError) or not isinstance(error, ZstratError)
        skipped = of_step and all(
            (book := self.books.get(number)) is not None and book.on_error == "skip"
            for number, _ in closure.draws
        )
        if skipped:
            then = 'skipped (on_error="skip")'
        elif closure.begun:
            then = "left out, as its updates may have been applied"
        else:
            then = (
                'read again by a later step of their epoch; on_error="skip" would '
                "skip them"
            )
        parts = []
        for book in books:
            held = ", ".join(map(str, book.held_by(closure.step)))
            parts.append(f"{held} of {book.name}")
            if skipped or closure.begun:
                book.skip(closure.step)
            else:
                book.give_back(closure.step, failed=True)
        if parts:
            error.add_note(f"The step had leased {'; '.join(parts)}, which are {then}.")
        return skipped

    def unpark(self, resource: int) -> Sequence[C]:
        """Returns closures that waited for leases of the dataset ``resource`` and may
        try again."""
        if resource in self._parked and not self.books[resource].waits:
            again = self._parked.pop(resource)
            self.parked -= len(again)
            return again
        return ()

    def unpark_all(self) -> list[C]:
        """Returns all closures that wait for leases, to be cancelled."""
        waiting = [closure for parked in self._parked.values() for closure in parked]
        self._parked.clear()
        self.parked = 0
        return waiting

    def give_back(self, resource: int, closures: Iterable[C]) -> None:
        """Takes the leases of the dataset ``resource`` from closures that have not
        started, as the pass is about to continue at another position. Nothing may run.
        Also forgets which leases wait for rounds: the new position covers them."""
        for closure in closures:
            if any(draw.resource == resource for draw in closure.draws):
                self.cancelled(closure)
                closure.leases = b""
        book = self.books[resource]
        self._may_wait = {
            step: [pair for pair in pairs if pair[0] is not book]
            for step, pairs in self._may_wait.items()
        }

    def metrics(self, steps: Mapping[str, Sequence[int]]) -> dict[str, PlainTree]:
        """Returns the counts of each pass through a leased dataset, by name of the
        dataset; the name of a second pass ends in the number of its iterator.

        Args:
            steps: By name of a worker: the steps that the worker has.
        """
        metrics: dict[str, PlainTree] = {}
        for number, book in self.books.items():
            name = f"{book.name} {number}" if book.name in metrics else book.name
            having: dict[str, PlainTree] = {
                worker: sum(len(book.held_by(step)) for step in mine)
                for worker, mine in steps.items()
            }
            metrics[name] = {**book.metrics(), "workers": having}
        return metrics

    def packed_done(self, states: Mapping[int, Sequence[str]]) -> bytes:
        """Returns the ranges of each dataset that are done: according to ``states``, by
        number of the iterator, or else now. They are packed as the ``leases`` of a
        `Push` that replaces all earlier ones."""
        packed = []
        for number, book in self.books.items():
            if not (name := book.noted_as):
                continue
            # One state, as all workers share the pass (`LeasedIterator.states_of`).
            found = states.get(number)
            done = done_in(json.loads(found[0])) if found else book.done_leases
            # Without examples: servers forget what they have noted of the dataset.
            packed.append(LEASE.pack(name, 0, 0, 0))
            packed += [LEASE.pack(name, *lease) for lease in done]
        return b"".join(packed)

    def waiting_for_rounds(self, book: LeaseBook) -> list[Lease]:
        """Returns the leases of ended steps whose gradients wait for a round, and so
        are not in the values of variables."""
        self._forget_applied()
        pairs = [pair for pairs in self._may_wait.values() for pair in pairs]
        return [lease for other, leases in pairs if other is book for lease in leases]

    def forget_applied(self) -> None:
        """Forgets the leases of steps that do not wait for a round, if many are
        remembered. Call this only when all ended steps have contributed to their
        rounds."""
        if len(self._may_wait) > REMEMBERED:
            self._forget_applied()

    def _books_of(self, closure: C) -> Iterator[LeaseBook]:
        """Yields the `LeaseBook` of each dataset of which a closure has leases, unless
        the program has dropped the dataset's iterator."""
        for resource, _ in closure.draws:
            book = self.books.get(resource)
            if book is not None and book.held_by(closure.step):
                yield book

    def _note(self, step: int, book: LeaseBook) -> None:
        held = book, book.held_by(step)
        self._may_wait[step] = (*self._may_wait.get(step, ()), held)

    def _forget_applied(self) -> None:
        waiting = {step for each in self.rounds for step in each.steps}
        kept = self._may_wait.keys() & waiting
        self._may_wait = {step: self._may_wait[step] for step in kept}


def _ended(book: LeaseBook, count: int) -> OutOfRangeError:
    left = 0 if book.is_over else book.left_of(book.epoch)
    if not left:
        return OutOfRangeError(f"End of sequence: {book.name} is exhausted")
    return OutOfRangeError(
        f"End of sequence: {book.name} has {left} batches left, and the step draws "
        f"{count}: choose batch= and epochs= so that they come out even, or let "
        "another step draw the rest"
    )

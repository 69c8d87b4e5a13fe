"""`SessionLeases`: the leases of all leased datasets of a coordinator. The engine's
lock is held by all callers.

The queue asks it when a closure is handed out, and reports how each closure has ended.
A closure that draws from several datasets gets all its leases or none.
"""

from __future__ import annotations

import enum
import json
from typing import TYPE_CHECKING, Final, NamedTuple, final

from zstrat.errors import OutOfRangeError
from zstrat.wire import LEASE

from ._book import done_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from zstrat.coordinator.rounds._optimizer_rounds import OptimizerRounds
    from zstrat.data import Lease
    from zstrat.wire import PlainTree

    from ._book import LeaseBook

REMEMBERED: Final = 4096
"""Steps whose contributions may wait for a round, until it is checked which do."""


class Draw(NamedTuple):
    """How many batches of a dataset, by number of its iterator, a step draws."""

    resource: int
    batches: int


class EndOf(enum.Enum):
    """How a closure with leases has ended that was not applied."""

    FAILED = enum.auto()
    """It had no effect."""
    CANCELLED = enum.auto()
    """It had no effect, through no fault of its own."""
    UNKNOWN = enum.auto()
    """It may have been applied, and cannot run again."""


@final
class SessionLeases:
    """The leased datasets of one coordinator, by number of their iterators."""

    def __init__(self) -> None:
        self.books: dict[int, LeaseBook] = {}
        self.rounds: Iterable[OptimizerRounds] = ()
        """The optimizers to whose rounds steps contribute."""
        self._may_wait: dict[int, Sequence[tuple[LeaseBook, Sequence[Lease]]]] = {}

    def lease_whole(self, steps: Sequence[int], draws: Sequence[Draw]) -> list[bytes]:
        """Leases to the first of these steps, which all draw the same, as far as that
        is simple; `lease` does the rest."""
        if len(draws) != 1 or draws[0].batches != 1:
            return []
        resource = draws[0].resource
        return self.books[resource].lease_whole(steps, resource)

    def lease(self, step: int, draws: Sequence[Draw]) -> bytes | int:
        """Leases what a step draws, and returns it packed for its worker; or the
        dataset for which it has to wait, as open leases may come back.

        Raises:
            OutOfRangeError: All leases are done, but for fewer than the step draws.
            ClosureInputError: No worker could build a dataset.
        """
        taken: list[LeaseBook] = []
        packed: list[bytes] = []
        for resource, count in draws:
            book = self.books[resource]
            leases = book.lease(step, count)
            if not leases:
                for other in taken:
                    other.give_back(step)
                if book.waits or book.open:
                    return resource
                failure = None if book.size else book.failure()
                raise failure or _ended(book, count)
            taken.append(book)
            packed += [LEASE.pack(resource, *lease) for lease in leases]
        return b"".join(packed)

    def applied(self, step: int, draws: Sequence[Draw]) -> None:
        """Notes that the updates of a closure with leases are applied."""
        for resource, _ in draws:
            if (book := self.books.get(resource)) is not None:
                if self.rounds:
                    self._note(step, book)
                book.applied(step)

    def ended(
        self, step: int, draws: Sequence[Draw], how: EndOf, *, skipped: bool = False
    ) -> None:
        """Notes how a closure has ended that was not applied; ``skipped``: its failure
        skips examples."""
        for resource, _ in draws:
            book = self.books.get(resource)
            if book is None or not book.held_by(step):
                continue  # the program has dropped the iterator
            match how:
                case EndOf.UNKNOWN:
                    book.skip(step)
                case EndOf.FAILED if skipped:
                    book.skip(step)
                case EndOf.FAILED:
                    book.give_back(step, failed=True)
                case EndOf.CANCELLED:
                    book.give_back(step)

    def skips(self, draws: Sequence[Draw]) -> bool:
        """Returns whether a failure of the step itself skips its examples, and so is
        not raised by `join`."""
        books = [self.books.get(resource) for resource, _ in draws]
        return all(book is not None and book.on_error == "skip" for book in books)

    def held_by(self, step: int, draws: Sequence[Draw]) -> str:
        """Describes the leases of a step, for its error."""
        parts = []
        for resource, _ in draws:
            if (book := self.books.get(resource)) is not None:
                found = ", ".join(map(str, book.held_by(step)))
                parts.append(f"{found} of {book.name}")
        return "; ".join(parts)

    def metrics(self, steps: Mapping[str, Sequence[int]]) -> dict[str, PlainTree]:
        """Returns counts of each pass, by name of its dataset; that of a second one has
        its number behind it.

        Args:
            steps: The steps that each worker has.
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
        """Returns what is done of each dataset in these states, or else now, as
        ``leases`` of a `Push` in place of all before."""
        packed = []
        for number, book in self.books.items():
            if not (name := book.noted_as):
                continue
            found = states.get(number)
            done = done_in(json.loads(found[0])) if found else book.done_leases
            packed.append(LEASE.pack(name, 0, 0, 0))
            packed += [LEASE.pack(name, *lease) for lease in done]
        return b"".join(packed)

    def waiting_for_rounds(self, book: LeaseBook) -> list[Lease]:
        """Returns the leases of ended steps whose gradients wait for a round, so that
        they are not in the values."""
        self._forget_applied()
        pairs = [pair for pairs in self._may_wait.values() for pair in pairs]
        return [lease for other, leases in pairs if other is book for lease in leases]

    def forget_applied(self) -> None:
        """Forgets the leases of steps that wait for no round, if there are many. To be
        called when the rounds have what all ended steps have contributed."""
        if len(self._may_wait) > REMEMBERED:
            self._forget_applied()

    def moved(self, resource: int) -> None:
        """Forgets what waits for rounds of a pass that continues elsewhere: its leases
        are those of the state from now on."""
        book = self.books[resource]
        self._may_wait = {
            step: [pair for pair in pairs if pair[0] is not book]
            for step, pairs in self._may_wait.items()
        }

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

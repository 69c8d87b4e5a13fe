"""Which workers the cluster has, at which addresses, and which share of a dataset each
of them reads. Decides only.

A worker has a *place* among the workers of the session, which grows with each newcomer;
and a *task number*, by which the cluster and its daemon name it (``--index``, the 7 of
worker:7). Both stay together for ever.

    PRESENT ──the program removes it──▶ REMOVED ──it adds the address──▶ PRESENT
       │ ▲
       │ └──the resolver names the number again, or the program does──┐
       └──lost, and the resolver names it no more──▶ AWAY ────────────┘

Laws of the file: a number that the program has removed is never given to another
address; a worker that lives is let go only if the program says so, or if the resolver
names another address for its number and not its own any more; what the program has
removed no resolver brings back, and it does not come back by itself.
"""

from __future__ import annotations

import enum
import itertools
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

from zstrat.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping


PROMISES: Final = 1024
"""Numbers that are kept for workers which may never come; and as many places."""

LARGEST_TASK_NUMBER: Final = 2**31 - 1
"""The largest number that a worker may ask for."""


class Presence(enum.Enum):
    """How a worker stands to the cluster, whether it answers or not."""

    PRESENT = "present"
    AWAY = "away"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class AdmitWorker:
    """A worker is to be greeted at this address."""

    place: int
    task_number: int
    address: str


@dataclass(frozen=True, slots=True)
class MoveWorker:
    """The worker has another address now: a new life in its place."""

    place: int
    task_number: int
    address: str


@dataclass(frozen=True, slots=True)
class ReleaseWorker:
    """The worker is gone: it is not waited for any more."""

    place: int


@dataclass(frozen=True, slots=True)
class RefuseWorker:
    """What the resolver says of this number cannot be followed."""

    task_number: int
    words: str


Change = AdmitWorker | MoveWorker | ReleaseWorker | RefuseWorker


@dataclass(slots=True, eq=False)
class _Worker:
    place: int
    task_number: int
    address: str
    presence: Presence = Presence.PRESENT
    is_listed: bool = True
    """The resolver has named it, at least once."""
    is_dismissed: bool = False
    """The program has removed it, at least once."""
    has_come: bool = False
    """It was in the session: what was added and never came leaves its number to the
    next one."""
    is_own_word: bool = False
    """It has reported itself with this number: if it never comes, that is nobody's."""

    @property
    def is_unknown(self) -> bool:
        """The program has added it, it never came, and nobody waits for it."""
        never = not (self.has_come or self.is_listed)
        return never and self.presence is Presence.AWAY

    @property
    def is_present(self) -> bool:
        return self.presence is Presence.PRESENT


@final
class Membership:
    """All workers that the cluster has, or ever had.

    Args:
        workers: Number to address, as the resolver said at first.
    """

    def __init__(self, workers: Mapping[int, str]) -> None:
        self._workers: list[_Worker] = []
        """By place."""
        self._numbers: dict[int, _Worker] = {}
        self._promised: OrderedDict[str, int] = OrderedDict()
        """Numbers of workers that have asked for one and are not here yet."""
        self._bound: str | None = None
        for task_number, address in sorted(workers.items()):
            self._enter(task_number, address).has_come = True

    @property
    def addresses(self) -> dict[int, str]:
        """Number to address, of those that are present."""
        present = [worker for worker in self._workers if worker.is_present]
        return {each.task_number: each.address for each in present}

    @property
    def size(self) -> int:
        """How many places were given."""
        return len(self._workers)

    def bind(self, why: str) -> None:
        """No place is given any more: something is made of which each worker that there
        was has a part."""
        self._bound = self._bound or why

    def add(self, address: str, task_number: int | None = None) -> AdmitWorker:
        """A worker that the program wants.

        Args:
            task_number: None: that which it had, or else the next one.

        Raises:
            AlreadyExistsError: The address, or the number, is that of a worker.
            InvalidArgumentError: The number is that of another address that was
                removed; or no place is given any more.
        """
        known = self._at(address)
        if known is not None and known.is_present:
            raise AlreadyExistsError(
                f"{address} is worker {known.task_number} of the cluster already"
            )
        if known is not None and task_number in (None, known.task_number):
            return self._revive(known, address, is_listed=False)
        wanted = self._next(address) if task_number is None else task_number
        worker = self._numbers.get(wanted)
        if worker is None:
            self._require_places(address)
            return self._admitted(self._enter(wanted, address, is_listed=False))
        if worker.is_present:
            raise AlreadyExistsError(
                f"worker {wanted} of the cluster is at {worker.address}: remove that, "
                f"or start the one at {address} with another --index, and say index="
            )
        if worker.presence is Presence.REMOVED:
            raise InvalidArgumentError(_taken(wanted, worker.address, address))
        return self._revive(worker, address, is_listed=False)

    def remove(self, address: str) -> ReleaseWorker:
        """A worker that the program does not want any more.

        Raises:
            NotFoundError: There is none of that address.
        """
        worker = self._at(address)
        if worker is None or worker.presence is Presence.REMOVED or worker.is_unknown:
            each = (f"{at} (worker:{n})" for n, at in self.addresses.items())
            there = ", ".join(each) or "no worker"
            raise NotFoundError(f"no worker is at {address}: the cluster has {there}")
        worker.presence, worker.is_dismissed = Presence.REMOVED, True
        return ReleaseWorker(worker.place)

    def withdraw(self, place: int) -> None:
        """What was added did not come, and is not there. A number that it was promised
        stays its own."""
        worker = self._workers[place]
        worker.presence = Presence.REMOVED if worker.is_dismissed else Presence.AWAY

    def came(self, place: int) -> None:
        """The worker was in the session: its number is its own."""
        worker = self._workers[place]
        worker.has_come, worker.is_dismissed = True, False
        self._promised.pop(worker.address, None)

    def promise(self, address: str) -> int:
        """The number that a worker at the address is to have: that which it had, or one
        that nobody else gets.

        Raises:
            PermissionDeniedError, InvalidArgumentError: As `reported`.
        """
        known = self._find(address)
        if known is not None and (known.has_come or known.is_present):
            return known.task_number
        self._require_places(address)
        if address not in self._promised:
            self._promised[address] = self._fresh()
        if len(self._promised) > PROMISES:
            # The one that was promised first, which would have come by now.
            self._promised.popitem(last=False)
        return self._promised[address]

    def reported(self, address: str, task_number: int) -> AdmitWorker | int:
        """A worker that is there, with this number; its place, if it is one of those
        that are present.

        Raises:
            PermissionDeniedError: The program has removed it.
            AlreadyExistsError, InvalidArgumentError: As `add`.
        """
        known = self._find(address)
        if known is not None and known.is_present and known.task_number == task_number:
            return known.place
        if task_number > LARGEST_TASK_NUMBER:
            raise InvalidArgumentError(
                f"worker {task_number} at {address}: expected an --index up to "
                f"{LARGEST_TASK_NUMBER}"
            )
        wanted = self.add(address, task_number)
        self._workers[wanted.place].is_own_word = True
        return wanted

    def _find(self, address: str) -> _Worker | None:
        known = self._at(address)
        if known is not None and known.presence is Presence.REMOVED:
            raise PermissionDeniedError(
                f"the program has removed worker {known.task_number} at {address}, and "
                f"takes it back by strategy.workers.add({address!r})"
            )
        return known

    def resolved(
        self, workers: Mapping[int, str], lost: Collection[int]
    ) -> list[Change]:
        """What follows from an answer of the resolver.

        Args:
            workers: Number to address, all that it names.
            lost: Places of those that do not answer.
        """
        named = set(workers.values())
        settled: set[int] = set()
        changes: list[Change] = []
        open_: dict[int, str] = {}
        for task_number, address in _once(workers, changes).items():
            worker = self._at(address)
            if worker is not None and worker.presence is Presence.REMOVED:
                continue  # by the program, whatever the resolver says
            if worker is None or not self._keeps(worker, task_number, lost):
                open_[task_number] = address
                continue
            worker.is_listed = True
            settled.add(worker.place)
        for task_number, address in open_.items():
            change = self._change_for(task_number, address, named, lost)
            changes.append(change)
            if not isinstance(change, RefuseWorker):
                settled.add(change.place)
        released = self._vanished(settled, lost, set(open_.values()))
        return [*released, *changes]

    @staticmethod
    def _keeps(worker: _Worker, task_number: int, lost: Collection[int]) -> bool:
        """Whether the worker stays what it is, at an address that the resolver names
        under this number: lists shift when a worker leaves, and workers that live do
        not."""
        if not worker.is_present:
            return False
        return worker.task_number == task_number or worker.place not in lost

    def _change_for(
        self,
        task_number: int,
        address: str,
        named: Collection[str],
        lost: Collection[int],
    ) -> AdmitWorker | MoveWorker | RefuseWorker:
        worker = self._numbers.get(task_number)
        if worker is None:
            if self._bound is not None:
                return RefuseWorker(task_number, self._no_place(address))
            return self._admitted(self._enter(task_number, address))
        if worker.presence is Presence.REMOVED:
            return RefuseWorker(
                task_number, _taken(task_number, worker.address, address)
            )
        if worker.presence is Presence.AWAY:
            return self._revive(worker, address, is_listed=True)
        lives = worker.place not in lost
        if lives and (worker.address in named or not worker.is_listed):
            return RefuseWorker(
                task_number,
                f"the resolver names {address} as worker {task_number}, which lives at "
                f"{worker.address}: give workers numbers that stay when others leave, "
                "as those of a StatefulSet or of a table {0 = ..., 2 = ...}",
            )
        worker.address, worker.is_listed = address, True
        return MoveWorker(worker.place, task_number, address)

    def _vanished(
        self, settled: Collection[int], lost: Collection[int], taken: Collection[str]
    ) -> list[ReleaseWorker]:
        """Those that are lost and that the resolver names no more. A resolver that has
        the hiccups dismisses no worker that lives."""
        released = []
        for worker in self._workers:
            gone = worker.is_present and worker.place in lost
            if not gone or worker.place in settled:
                continue
            if worker.is_listed or worker.address in taken:
                worker.presence = Presence.AWAY
                released.append(ReleaseWorker(worker.place))
        return released

    def _at(self, address: str) -> _Worker | None:
        """The worker at the address, or the last one that was there."""
        found = [worker for worker in self._workers if worker.address == address]
        return next((w for w in found if w.is_present), found[-1] if found else None)

    def _next(self, address: str) -> int:
        if address in self._promised:
            return self._promised[address]
        spare = [
            worker.task_number
            for worker in self._workers
            if worker.presence is Presence.AWAY
            and not (worker.has_come or worker.is_own_word)
        ]
        return min(spare) if spare else self._fresh()

    def _fresh(self) -> int:
        """A number that nobody has had: one more than the highest, if there is one."""
        had = {
            w.task_number for w in self._workers if not (w.is_unknown and w.is_own_word)
        }
        had.update(self._promised.values())
        highest = max(had, default=-1)
        if highest < LARGEST_TASK_NUMBER:
            return highest + 1
        return next(number for number in itertools.count() if number not in had)

    def _require_places(self, address: str) -> None:
        if self._bound is not None:
            raise InvalidArgumentError(self._no_place(address))

    def _enter(
        self, task_number: int, address: str, *, is_listed: bool = True
    ) -> _Worker:
        place = self._free_place()
        worker = _Worker(place, task_number, address, is_listed=is_listed)
        self._workers[place : place + 1] = [worker]
        self._numbers[task_number] = worker
        return worker

    def _free_place(self) -> int:
        """The next one; or that of the first that never came, where these are many."""
        unknown = [worker for worker in self._workers if worker.is_unknown]
        if len(unknown) < PROMISES:
            return len(self._workers)
        del self._numbers[unknown[0].task_number]
        return unknown[0].place

    def _revive(self, worker: _Worker, address: str, *, is_listed: bool) -> AdmitWorker:
        worker.presence, worker.address = Presence.PRESENT, address
        worker.is_listed = worker.is_listed or is_listed
        return self._admitted(worker)

    @staticmethod
    def _admitted(worker: _Worker) -> AdmitWorker:
        return AdmitWorker(worker.place, worker.task_number, worker.address)

    def _no_place(self, address: str) -> str:
        return (
            f"{address} cannot be a worker: {self._bound}. Bring one that the cluster "
            "had back at its own index, or make a new strategy"
        )


def _once(workers: Mapping[int, str], changes: list[Change]) -> dict[int, str]:
    """The answer without addresses that it names twice: the first number has them."""
    first: dict[str, int] = {}
    for task_number, address in sorted(workers.items()):
        if first.setdefault(address, task_number) != task_number:
            words = f"the resolver names {address} as workers {first[address]} and"
            changes.append(
                RefuseWorker(task_number, f"{words} {task_number}: it is the first")
            )
    return {task_number: address for address, task_number in first.items()}


def _taken(task_number: int, address: str, newcomer: str) -> str:
    return (
        f"worker {task_number} was at {address} and was removed: its "
        f"index is not given to another address; start the worker at {newcomer} with "
        "an --index that was never used"
    )


@final
class InputPipelines:
    """The shares of one dataset, cut into as many as there were workers when its pass
    was begun. That number stays, and each worker reads one of them. A newcomer takes
    the share that the fewest read, the first of these: that of a worker that was
    removed, if there is one; else it reads again what another one reads, too.

    Args:
        workers: The places of those that there are when it is made.
    """

    __slots__ = ("_of", "count")

    def __init__(self, workers: Iterable[int]) -> None:
        self._of = {place: share for share, place in enumerate(sorted(workers))}
        self.count = max(1, len(self._of))

    def __getitem__(self, worker: int) -> int:
        return self._of[worker]

    def join(self, worker: int) -> None:
        """A worker comes; one that has a share keeps it."""
        if worker not in self._of:
            readers = list(self._of.values())
            self._of[worker] = min(range(self.count), key=readers.count)

    def leave(self, worker: int) -> None:
        """A worker was removed."""
        self._of.pop(worker, None)

"""Decides which workers the cluster has, and which share of a dataset each one reads.

A worker has a *place*, its index among the workers of the session in the order in which
they joined; and a *task number*, by which the cluster and its daemon name it
(``--index``, the 7 of worker:7). A place and its task number stay together.

    PRESENT ──the program removes it──▶ REMOVED ──it adds the address──▶ PRESENT
       │ ▲
       │ └──the resolver names the number again, or the program does──┐
       └──lost, and no longer named by the resolver──▶ AWAY ──────────┘

Laws of this file: a number that the program removed is never given to another address;
a worker that lives leaves only if the program removes it, or if the resolver names
another address for its number and no longer its own; what the program removed, neither
the resolver nor a report of the worker adds again.
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
"""The most task numbers, and places, kept for workers that may never join."""

LARGEST_TASK_NUMBER: Final = 2**31 - 1
"""The largest task number that a worker may ask for."""


class Presence(enum.Enum):
    """Membership of a worker in the cluster, whether it answers or not."""

    PRESENT = "present"
    AWAY = "away"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class AdmitWorker:
    """An order to start a session on the worker at this address."""

    place: int
    task_number: int
    address: str


@dataclass(frozen=True, slots=True)
class MoveWorker:
    """An order to replace the session at a place (index of a worker) by one with the
    process at this address."""

    place: int
    task_number: int
    address: str


@dataclass(frozen=True, slots=True)
class ReleaseWorker:
    """An order to end the session on the worker, and to stop waiting for it."""

    place: int


@dataclass(frozen=True, slots=True)
class RefuseWorker:
    """An order to log why the resolver's address for this number is not used."""

    task_number: int
    reason: str


Change = AdmitWorker | MoveWorker | ReleaseWorker | RefuseWorker


@dataclass(slots=True, eq=False)
class _Worker:
    place: int
    task_number: int
    address: str
    presence: Presence = Presence.PRESENT
    is_listed: bool = True
    """Whether the resolver named the worker at least once."""
    is_dismissed: bool = False
    """Whether the program removed the worker at least once."""
    has_joined: bool = False
    """Whether the worker was in the session. If not, the next worker may get its
    number."""
    is_self_reported: bool = False
    """Whether the worker reported itself with this number. Then no other worker gets
    the number, even if this one never joins."""

    @property
    def is_unknown(self) -> bool:
        """Whether the program added the worker, it never joined, and no call waits for
        it."""
        never = not (self.has_joined or self.is_listed)
        return never and self.presence is Presence.AWAY

    @property
    def is_present(self) -> bool:
        return self.presence is Presence.PRESENT


@final
class Membership:
    """All workers that the cluster has or ever had.

    Args:
        workers: Task number to address, of the resolver's first answer.
    """

    def __init__(self, workers: Mapping[int, str]) -> None:
        self._workers: list[_Worker] = []
        """All workers, by place (index in the session)."""
        self._numbers: dict[int, _Worker] = {}
        self._promised: OrderedDict[str, int] = OrderedDict()
        """By address: numbers promised to workers that asked for one and have not
        joined yet."""
        self._why_fixed: str | None = None
        for task_number, address in sorted(workers.items()):
            self._enter(task_number, address).has_joined = True

    @property
    def addresses(self) -> dict[int, str]:
        """Addresses of the workers that are present, by task number."""
        present = [worker for worker in self._workers if worker.is_present]
        return {worker.task_number: worker.address for worker in present}

    @property
    def size(self) -> int:
        """Number of places (indices of workers in the session) so far."""
        return len(self._workers)

    def fix_places(self, why: str) -> None:
        """Refuses new places from now on, because ``why``: something exists that has a
        part on each worker so far."""
        self._why_fixed = self._why_fixed or why

    def add(self, address: str, task_number: int | None = None) -> AdmitWorker:
        """Adds a worker that the program names.

        Args:
            task_number: None: the number that the address had before, or else the next
                free one.

        Raises:
            AlreadyExistsError: A worker has the address, or the number.
            InvalidArgumentError: The number is that of a removed worker at another
                address; or the places are fixed.
        """
        known = self._at(address)
        if known is not None and known.is_present:
            raise AlreadyExistsError(
                f"{address} is already worker {known.task_number} of the cluster"
            )
        # The program overrules its own removal: a worker that it names again may come
        # back.
        if known is not None and task_number in (None, known.task_number):
            return self._revive(known, address, is_listed=False)
        wanted = self._next(address) if task_number is None else task_number
        worker = self._numbers.get(wanted)
        if worker is None:
            # Only a new place counts: a worker that returns to its own has a part of
            # everything.
            self._require_places(address)
            return self._admitted(self._enter(wanted, address, is_listed=False))
        if worker.is_present:
            raise AlreadyExistsError(
                f"worker {wanted} of the cluster is at {worker.address}: remove it, or "
                f"start the one at {address} with another --index and pass that as "
                "index="
            )
        if worker.presence is Presence.REMOVED:
            raise InvalidArgumentError(_taken(wanted, worker.address, address))
        return self._revive(worker, address, is_listed=False)

    def remove(self, address: str) -> ReleaseWorker:
        """Removes a worker that the program names.

        Raises:
            NotFoundError: No worker has that address.
        """
        worker = self._at(address)
        if worker is None or worker.presence is Presence.REMOVED or worker.is_unknown:
            names = (f"{at} (worker:{n})" for n, at in self.addresses.items())
            known_names = ", ".join(names) or "no worker"
            raise NotFoundError(
                f"no worker is at {address}: the cluster has {known_names}"
            )
        worker.presence, worker.is_dismissed = Presence.REMOVED, True
        return ReleaseWorker(worker.place)

    def withdraw(self, place: int) -> None:
        """Undoes `add` for a worker that did not join. A number that was promised to
        the worker stays promised."""
        worker = self._workers[place]
        worker.presence = Presence.REMOVED if worker.is_dismissed else Presence.AWAY

    def joined(self, place: int) -> None:
        """Notes that the worker was in the session, so that it keeps its number."""
        worker = self._workers[place]
        worker.has_joined, worker.is_dismissed = True, False
        self._promised.pop(worker.address, None)

    def promise(self, address: str) -> int:
        """Returns the number for a worker that asks for one: the number that its
        address had before, or one that no other worker gets.

        Raises:
            PermissionDeniedError, InvalidArgumentError: See `reported`.
        """
        known = self._find(address)
        if known is not None and (known.has_joined or known.is_present):
            return known.task_number
        self._require_places(address)
        if address not in self._promised:
            self._promised[address] = self._fresh()
        if len(self._promised) > PROMISES:
            # The oldest promise; that worker would have joined by now.
            self._promised.popitem(last=False)
        return self._promised[address]

    def reported(self, address: str, task_number: int) -> AdmitWorker | int:
        """Adds a worker that reported itself. Returns its place if the worker is
        present already.

        Raises:
            PermissionDeniedError: The program removed the worker.
            AlreadyExistsError, InvalidArgumentError: See `add`.
        """
        known = self._find(address)
        if known is not None and known.is_present and known.task_number == task_number:
            return known.place
        if task_number > LARGEST_TASK_NUMBER:
            raise InvalidArgumentError(
                f"worker {task_number} at {address}: expected an --index of at most "
                f"{LARGEST_TASK_NUMBER}"
            )
        wanted = self.add(address, task_number)
        self._workers[wanted.place].is_self_reported = True
        return wanted

    def _find(self, address: str) -> _Worker | None:
        known = self._at(address)
        if known is not None and known.presence is Presence.REMOVED:
            raise PermissionDeniedError(
                f"the program removed worker {known.task_number} at {address}; it can "
                f"add it again with strategy.workers.add({address!r})"
            )
        return known

    def resolved(
        self, workers: Mapping[int, str], lost: Collection[int]
    ) -> list[Change]:
        """Applies an answer of the resolver; returns the changes that result.

        Args:
            workers: Task number to address, of all workers that the resolver names.
            lost: Places of the workers that do not answer.
        """
        named = set(workers.values())
        settled: set[int] = set()
        changes: list[Change] = []
        open_: dict[int, str] = {}
        for task_number, address in _once(workers, changes).items():
            worker = self._at(address)
            if worker is not None and worker.presence is Presence.REMOVED:
                continue  # by the program, which overrules the resolver
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
        # Released first: the address of a lost worker may be one that another number
        # gets.
        return [*released, *changes]

    @staticmethod
    def _keeps(worker: _Worker, task_number: int, lost: Collection[int]) -> bool:
        """Returns whether the worker keeps its number when the resolver names its
        address under ``task_number``. A live worker does: the numbers in a list shift
        when another worker leaves."""
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
            if self._why_fixed is not None:
                return RefuseWorker(task_number, self._no_place(address))
            return self._admitted(self._enter(task_number, address))
        if worker.presence is Presence.REMOVED:
            return RefuseWorker(
                task_number, _taken(task_number, worker.address, address)
            )
        if worker.presence is Presence.AWAY:
            # Nobody waits for the one that is away, so the number may go to another
            # address.
            return self._revive(worker, address, is_listed=True)
        lives = worker.place not in lost
        if lives and (worker.address in named or not worker.is_listed):
            return RefuseWorker(
                task_number,
                f"the resolver names {address} as worker {task_number}, but that "
                f"worker is alive at {worker.address}. Give workers numbers that do "
                "not change when others leave, as a StatefulSet or a table {0 = ..., "
                "2 = ...} does",
            )
        worker.address, worker.is_listed = address, True
        return MoveWorker(worker.place, task_number, address)

    def _vanished(
        self, settled: Collection[int], lost: Collection[int], taken: Collection[str]
    ) -> list[ReleaseWorker]:
        """Releases workers that are lost and no longer named by the resolver. A live
        worker stays even if the resolver forgets it for a moment."""
        released = []
        for worker in self._workers:
            is_lost = worker.is_present and worker.place in lost
            if not is_lost or worker.place in settled:
                continue
            # One that the program added stays, although the resolver has never named
            # it, unless its address is named under another number.
            if worker.is_listed or worker.address in taken:
                worker.presence = Presence.AWAY
                released.append(ReleaseWorker(worker.place))
        return released

    def _at(self, address: str) -> _Worker | None:
        """Returns the worker at the address, or else the last one that was there; None
        if there never was one."""
        known = [worker for worker in self._workers if worker.address == address]
        return next((w for w in known if w.is_present), known[-1] if known else None)

    def _next(self, address: str) -> int:
        if address in self._promised:
            return self._promised[address]
        spare = [
            worker.task_number
            for worker in self._workers
            if worker.presence is Presence.AWAY
            and not (worker.has_joined or worker.is_self_reported)
        ]
        return min(spare) if spare else self._fresh()

    def _fresh(self) -> int:
        """Returns a number that no worker has had: one more than the highest, if
        possible."""
        used = {
            w.task_number
            for w in self._workers
            if not (w.is_unknown and w.is_self_reported)
        }
        used.update(self._promised.values())
        highest = max(used, default=-1)
        if highest < LARGEST_TASK_NUMBER:
            return highest + 1
        return next(number for number in itertools.count() if number not in used)

    def _require_places(self, address: str) -> None:
        if self._why_fixed is not None:
            raise InvalidArgumentError(self._no_place(address))

    def _enter(
        self, task_number: int, address: str, *, is_listed: bool = True
    ) -> _Worker:
        place = self._free_place()
        worker = _Worker(place, task_number, address, is_listed=is_listed)
        # Appends it, or replaces one that never joined.
        self._workers[place : place + 1] = [worker]
        self._numbers[task_number] = worker
        return worker

    def _free_place(self) -> int:
        """Returns the next place; or, if many workers never joined, the place of the
        first of them."""
        unknown = [worker for worker in self._workers if worker.is_unknown]
        if len(unknown) < PROMISES:
            return len(self._workers)
        # Else places of workers that never join would add up without a bound.
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
            f"{address} cannot become a worker: {self._why_fixed}. Start a worker that "
            "the cluster had before with its own index, or make a new strategy"
        )


def _once(workers: Mapping[int, str], changes: list[Change]) -> dict[int, str]:
    """Drops repeated addresses of a resolver's answer: the first number keeps the
    address."""
    first: dict[str, int] = {}
    for task_number, address in sorted(workers.items()):
        if first.setdefault(address, task_number) != task_number:
            changes.append(
                RefuseWorker(
                    task_number,
                    f"the resolver names {address} twice, as workers {first[address]} "
                    f"and {task_number}; the first number is used",
                )
            )
    return {task_number: address for address, task_number in first.items()}


def _taken(task_number: int, address: str, newcomer: str) -> str:
    return (
        f"worker {task_number} at {address} was removed, and its index is not given to "
        f"another address; start the worker at {newcomer} with an --index that was "
        "never used"
    )


@final
class InputPipelines:
    """The shares of a dataset (input pipelines), one per worker at the start of a pass.

    The number of shares stays, and each worker reads one of them. A worker that joins
    gets the first of the shares with the fewest readers: the share of a removed worker
    if there is one, else one that another worker reads, too.

    Args:
        workers: Places (indices in the session) of the workers at the start.
    """

    __slots__ = ("_of", "count")

    def __init__(self, workers: Iterable[int]) -> None:
        self._of = {place: share for share, place in enumerate(sorted(workers))}
        self.count = max(1, len(self._of))

    def __getitem__(self, worker: int) -> int:
        return self._of[worker]

    def join(self, worker: int) -> None:
        """Gives a share to a worker that has none."""
        if worker not in self._of:
            readers = list(self._of.values())
            self._of[worker] = min(range(self.count), key=readers.count)

    def leave(self, worker: int) -> None:
        """Frees the share of a worker that was removed."""
        self._of.pop(worker, None)

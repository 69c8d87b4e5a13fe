"""Carries out that parameter servers come and go, while training goes on. On the loop.

`StorePlacement` decides what happens to one store; this shell chooses which store moves
where, moves one after the other, and waits. One change at a time: the next one waits.

Stores count alike: variables are distributed to them evenly (`placement=`), so a
process that serves as many as another one has about as much to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, final

from zstrat.coordinator.connecting import ClusterTasks
from zstrat.errors import (
    AlreadyExistsError,
    BusyError,
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)

from ._orders import CopyPhase

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Mapping, Sequence

    from zstrat.config import Timeouts
    from zstrat.coordinator.connecting import TaskSession
    from zstrat.wire import PlainTree

    from ._replicated_store import ReplicatedStore
    from ._replication import Replication

log = logging.getLogger("zstrat.coordinator")

HEARING: Final = 10.0
"""Seconds for workers to hear where a store is; who does not has no line to hear it."""


class StoreMove(NamedTuple):
    """The store is to be served by the process ``target``."""

    store: int
    target: int


def plan_rebalance(
    serving: Sequence[int], processes: Collection[int]
) -> list[StoreMove]:
    """As few moves as can be, after which none of the processes serves two stores more
    than another one.

    Args:
        serving: The process of each store.
        processes: Those that may serve any. What others serve stays there.
    """
    at = list(serving)
    moves: list[StoreMove] = []
    while processes:
        counts = {process: at.count(process) for process in sorted(processes)}
        most = max(counts, key=counts.__getitem__)
        fewest = min(counts, key=counts.__getitem__)
        if counts[most] - counts[fewest] < 2:
            break
        store = max(store for store, process in enumerate(at) if process == most)
        at[store] = fewest
        moves.append(StoreMove(store, fewest))
    return moves


def plan_drain(
    serving: Sequence[int],
    backups: Mapping[int, int],
    process: int,
    others: Collection[int],
) -> list[StoreMove]:
    """A move for each store of a process that leaves: to where a copy of it is already,
    or else to who serves the fewest.

    Args:
        serving: The process of each store.
        backups: Those that have all of a store besides, by store.
        others: Processes that may serve any, one at least.
    """
    at = list(serving)
    moves: list[StoreMove] = []
    for store in [store for store, where in enumerate(serving) if where == process]:
        target = backups.get(store, -1)
        if target not in others:
            target = min(sorted(others), key=at.count)
        at[store] = target
        moves.append(StoreMove(store, target))
    return moves


class MovingCluster(ClusterTasks, Protocol):
    """The tasks of a session, as far as stores move (`Cluster`)."""

    @property
    def replication(self) -> Replication | None: ...

    def ensure_replication(self) -> Replication:
        """What watches processes and moves stores; it is made the first time."""
        ...


@final
class StoreMoves:
    """Those of one session.

    Args:
        home: Addresses of the processes at first, in task order.
    """

    def __init__(
        self, cluster: MovingCluster, home: Sequence[str], timeouts: Timeouts
    ) -> None:
        self._cluster, self._timeouts = cluster, timeouts
        self._addresses = dict(enumerate(home))
        """Of the processes that the cluster has now, by number."""
        self._home: Final = frozenset(home)
        self._numbers = {address: number for number, address in enumerate(home)}
        """Of all that it ever had."""
        self._changing = asyncio.Lock()
        self._leaving: set[str] = set()

    @property
    def addresses(self) -> dict[int, str]:
        return dict(sorted(self._addresses.items()))

    @property
    def metrics(self) -> dict[str, PlainTree]:
        """Which process serves each store, and how often that changed."""
        if (replication := self._cluster.replication) is not None:
            return replication.status.statistics()
        stores: list[PlainTree] = [
            {
                "store": task.place,
                "process": task.name,
                "address": task.address,
                "backup": "",
                "state": CopyPhase.ALONE.value,
            }
            for task in self._cluster.ps
        ]
        return {"stores_moved": 0, "stores": stores}

    async def add(self, address: str, number: int | None, timeout: float) -> int:
        """Takes a process in, and has it serve some stores, if others serve two more
        than it would; returns its number.

        Raises:
            AlreadyExistsError, InvalidArgumentError: It cannot be one of the cluster.
            DeadlineExceededError: It did not answer within ``timeout`` seconds of the
                end of changes that were under way.
            BusyError: It belongs to another coordinator.
            VersionMismatchError, PermissionDeniedError, ProtocolError: It will never
                take us.
            UnavailableError: It was lost before it served what it was to.
            PSUnavailableError: Another one is lost.

        Cancellation: stores that serve already stay there; it is let go if none does.
        """
        async with self._changing:
            deadline = asyncio.get_running_loop().time() + timeout
            number = self._new_number(address, number)
            replication = await self._watched(deadline)
            process = replication.enter(number, address)
            try:
                await process.wait_ready(deadline)
            except BaseException:  # to the caller, who has no such process
                await replication.dismiss(process, 0.0)
                raise
            self._addresses[number], self._numbers[address] = address, number
            log.info("%s at %s: the program has added it", process.name, address)
            await self._rebalance(replication)
        return number

    async def rebalance(self, timeout: float) -> None:
        """Has those that serve two stores more than another one give some to it.

        Raises:
            DeadlineExceededError: A process is away, for ``timeout`` seconds.
            UnavailableError: A store stays where it was; says why.
            PSUnavailableError: One is lost.

        Cancellation: stores that have moved stay there.
        """
        async with self._changing:
            deadline = asyncio.get_running_loop().time() + timeout
            await self._rebalance(await self._watched(deadline))

    async def vacate(self, address: str, timeout: float | None) -> None:
        """Has others serve all stores of a process, and lets it go.

        Raises:
            NotFoundError: There is none of that address.
            InvalidArgumentError: It is one of the last.
            BusyError: It is drained already.
            DeadlineExceededError: Something is left there after ``timeout`` seconds,
                or another change was under way for so long.
            UnavailableError: No other process takes what it has.
            PSUnavailableError: One is lost.

        Cancellation: it stays, with what it has then; if that is nothing, and its
        session is being closed, it goes.
        """
        number = self._number_of(address)
        if address in self._leaving:
            raise BusyError(f"ps {number} at {address} is being drained already")
        self._leaving.add(address)
        now = asyncio.get_running_loop().time()
        deadline = None if timeout is None else now + timeout
        try:
            async with self._turn(deadline, f"ps {number} at {address}", timeout):
                await self._vacate(number, address, timeout, deadline)
        finally:
            self._leaving.discard(address)

    @contextlib.asynccontextmanager
    async def _turn(
        self, deadline: float | None, who: str, seconds: float | None
    ) -> AsyncIterator[None]:
        """Waits until no other change is under way, and keeps others from it."""
        try:
            async with asyncio.timeout_at(deadline):
                await self._changing.acquire()
        except TimeoutError:
            raise DeadlineExceededError(
                f"{who} stays as it is: for {seconds:g} s another change of the "
                "parameter servers was under way (one at a time); call drain again, "
                "with a longer timeout"
            ) from None
        try:
            yield
        finally:
            self._changing.release()

    async def _vacate(
        self, number: int, address: str, seconds: float | None, deadline: float | None
    ) -> None:
        connecting = asyncio.get_running_loop().time() + self._timeouts.connect
        replication = await self._watched(min(deadline or connecting, connecting))
        process = next(
            each
            for each in reversed(replication.processes)
            if each.address == address and not each.is_closed
        )
        self._require_others(replication, process)
        # Before anything moves: nothing else is to be copied there meanwhile.
        replication.spare(process.place, True)
        try:
            async with asyncio.timeout_at(deadline):
                await self._empty(replication, process)
                # A worker that has not heard would ask the process that is about to go.
                await self._cluster.store_directory.wait_workers_told(HEARING)
        except BaseException as error:  # to the caller: it stays
            replication.spare(process.place, False)
            if isinstance(error, TimeoutError):
                raise DeadlineExceededError(
                    f"{process.name} at {address} has something left after "
                    f"{seconds:g} s, and stays: {_words(replication, process)}; call "
                    "drain again, with a longer timeout"
                ) from None
            raise
        del self._addresses[number]
        await replication.dismiss(process, HEARING)
        log.info("%s at %s is drained, and was let go", process.name, address)

    async def _watched(self, deadline: float) -> Replication:
        """What moves stores (`Replication`), when all processes are there."""
        self._require_whole()
        replication = self._cluster.ensure_replication()
        if not replication.is_started:
            await replication.open(deadline)
            self._require_whole()  # one may have been lost while processes were awaited
        return replication

    def _require_whole(self) -> None:
        """
        Raises:
            PSUnavailableError: A store is lost, or is being filled again.
        """
        if (outage := self._cluster.outage_error) is not None:
            raise outage

    def _new_number(self, address: str, number: int | None) -> int:
        """
        Raises:
            AlreadyExistsError, InvalidArgumentError: As `add`.
        """
        if address in self._addresses.values():
            raise AlreadyExistsError(f"{address} is a ps of the cluster already")
        for worker, at in self._cluster.worker_addresses.items():
            if at == address:
                raise InvalidArgumentError(
                    f"{address} is worker {worker} of the cluster, and no ps"
                )
        if self._cluster.name and address not in self._home:
            raise InvalidArgumentError(
                f"{address} is not in the cluster, and the session has a name "
                f"(resume={self._cluster.name!r}): the next program that goes on with "
                f"it looks for stores only at {', '.join(sorted(self._home))}. Name "
                "the new ps in the cluster, or leave out resume="
            )
        if number is None:
            after = max(self._numbers.values()) + 1
            return self._numbers.get(address, after)
        for other, known in self._numbers.items():
            if known == number and other != address:
                raise AlreadyExistsError(
                    f"ps {number} is the one at {other}: start the new one with "
                    "another --index, and pass that as index="
                )
        return number

    def _number_of(self, address: str) -> int:
        for number, at in self._addresses.items():
            if at == address:
                return number
        workers = self._cluster.worker_addresses.values()
        if address in workers:
            why = "is a worker: strategy.workers.remove lets it go"
        elif address in self._numbers:
            why = "was drained before"
        else:
            known = ", ".join(f"{at} (ps:{n})" for n, at in self.addresses.items())
            why = f"is no ps of the cluster, which has {known}"
        raise NotFoundError(f"{address!r:.80} {why}")

    def _require_others(self, replication: Replication, process: TaskSession) -> None:
        """
        Raises:
            InvalidArgumentError: Too few would be left.
        """
        left, least = len(_others(replication, process)), 1 + replication.replicas
        if left < least:
            copies = ", and each store is to have a second copy" * replication.replicas
            raise InvalidArgumentError(
                f"{process.name} at {process.address} cannot be drained: {left} other "
                f"ps are there, and {least} have to be{copies}; add one first"
            )

    async def _rebalance(self, replication: Replication) -> None:
        placement = replication.placement
        serving = [store.primary.process for store in placement.stores]
        present = [each.place for each in _present(replication)]
        for store, target in plan_rebalance(serving, present):
            await self._move(replication, store, target)
            if placement.stores[store].primary.process != target:
                there = replication.processes[target]
                raise UnavailableError(
                    f"{there.name} at {there.address} is in the cluster, but the "
                    f"store of {self._cluster.ps[store].name} stays where it was: "
                    f"{placement.stores[store].reason}"
                )

    async def _empty(self, replication: Replication, process: TaskSession) -> None:
        """Moves stores until none has anything in the process. A backup there may
        become primary before another one is made."""
        stores, me = replication.placement.stores, process.place
        tried: set[tuple[int, int]] = set()
        while held := [store for store in stores if me in store.copy_processes]:
            if any(store.primary.process == me for store in held):
                await self._move_one(replication, process, tried)
            else:
                await self._evict(replication, held[0], me)

    async def _move_one(
        self,
        replication: Replication,
        process: TaskSession,
        tried: set[tuple[int, int]],
    ) -> None:
        """Has another process serve a store of this one, if it can.

        Raises:
            UnavailableError: All have been tried.
        """
        stores, me = replication.placement.stores, process.place
        others = [each.place for each in _others(replication, process)]
        backups = {
            store.number: store.backup.process
            for store in stores
            if store.backup is not None and store.is_paired
        }
        serving = [store.primary.process for store in stores]
        store, target = plan_drain(serving, backups, me, others or [me])[0]
        untried = [each for each in others if (store, each) not in tried]
        if not untried:
            raise UnavailableError(
                f"no other ps takes the store of {self._cluster.ps[store].name}: "
                f"{stores[store].reason or 'none is there'}; it stays at "
                f"{process.address}"
            )
        target = target if target in untried else untried[0]
        tried.add((store, target))
        await self._move(replication, store, target)

    async def _evict(
        self, replication: Replication, place: ReplicatedStore, process: int
    ) -> None:
        """Has the second copy of a store be in another process, unless it is first
        served here."""
        self._require_whole()
        replication.evict(place.number)
        await replication.wait_until(
            lambda: (
                place.primary.process == process
                or process not in place.copy_processes
                or self._cluster.outage_error is not None
            )
        )
        self._require_whole()
        await self._settled(replication)

    async def _move(self, replication: Replication, store: int, target: int) -> None:
        """Moves a store; once more if the store was away meanwhile, and is back.

        Raises:
            PSUnavailableError: The store is lost, or another one.
        """
        cluster, place = self._cluster, replication.placement.stores[store]
        was_away = True
        while was_away:
            self._require_whole()  # between two moves nobody looked after the store
            await replication.move(store, target)
            if was_away := place.is_reported_lost:
                # It is said to be lost when its line was cut for too long.
                await replication.wait_until(
                    lambda: (
                        not place.is_reported_lost or cluster.outage_error is not None
                    )
                )
        await self._settled(replication)

    async def _settled(self, replication: Replication) -> None:
        """Waits until each store has the copies that it is to have: one store at a time
        lacks one.

        Raises:
            PSUnavailableError: One is lost.
        """
        cluster, placement = self._cluster, replication.placement
        if replication.replicas:
            await replication.wait_until(
                lambda: not placement.without_backup or cluster.outage_error is not None
            )
            if (
                placement.without_backup
                and (outage := cluster.outage_error) is not None
            ):
                raise outage


def _present(replication: Replication) -> list[TaskSession]:
    return [
        process
        for process in replication.processes
        if process.is_ready and not process.is_closed
    ]


def _others(replication: Replication, process: TaskSession) -> list[TaskSession]:
    return [each for each in _present(replication) if each is not process]


def _words(replication: Replication, process: TaskSession) -> str:
    stores = [
        str(store.number)
        for store in replication.placement.stores
        if process.place in store.copy_processes
    ]
    if not stores:
        return "not all workers have heard where its stores are now"
    return f"store {', '.join(stores)}"

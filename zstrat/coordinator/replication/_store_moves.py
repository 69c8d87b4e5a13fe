"""Adds and removes parameter servers, and moves stores, during training. On the loop.

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

NOTICE_SECONDS: Final = 10.0
"""Seconds for workers to get the new address of a store; a worker that does not get it
by then is not connected."""


class StoreMove(NamedTuple):
    """A move of a store to the process ``target``."""

    store: int
    target: int


def plan_rebalance(
    serving: Sequence[int], processes: Collection[int]
) -> list[StoreMove]:
    """Returns the fewest moves after which no process serves two stores more than
    another one.

    Args:
        serving: The process of each store.
        processes: The processes that may serve stores. Stores of other processes stay
            there.
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
    """Returns a move for each store of a process that leaves: to the process of its
    backup, or else to the one that serves the fewest stores.

    Args:
        serving: The process of each store.
        backups: The process of the complete backup, by store.
        others: Processes that may serve stores, at least one.
    """
    at = list(serving)
    moves: list[StoreMove] = []
    for store in [store for store, server in enumerate(serving) if server == process]:
        # Where a complete backup is, the move is a swap, and copies nothing.
        target = backups.get(store, -1)
        if target not in others:
            target = min(sorted(others), key=at.count)
        at[store] = target
        moves.append(StoreMove(store, target))
    return moves


class MovingCluster(ClusterTasks, Protocol):
    """The part of `Cluster` that moves of stores use."""

    @property
    def replication(self) -> Replication | None: ...

    def ensure_replication(self) -> Replication:
        """Returns the `Replication`, which watches processes and moves stores; the
        first call creates it."""


@final
class StoreMoves:
    """The moves of the stores of one session.

    Args:
        home: Addresses of the processes at the beginning, in task order.
    """

    def __init__(
        self, cluster: MovingCluster, home: Sequence[str], timeouts: Timeouts
    ) -> None:
        self._cluster, self._timeouts = cluster, timeouts
        self._addresses = dict(enumerate(home))
        """Addresses of the present processes, by task number."""
        self._home: Final = frozenset(home)
        self._numbers = {address: number for number, address in enumerate(home)}
        """Task numbers of all processes that the cluster has had, by address."""
        self._changing = asyncio.Lock()
        self._leaving: set[str] = set()

    @property
    def addresses(self) -> dict[int, str]:
        return dict(sorted(self._addresses.items()))

    @property
    def metrics(self) -> dict[str, PlainTree]:
        """The process of each store, and the number of moves."""
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
        """Adds a process, and moves stores to it as `rebalance` does; returns its
        number.

        Raises:
            AlreadyExistsError, InvalidArgumentError: The process cannot belong to the
                cluster.
            DeadlineExceededError: The process did not answer within ``timeout`` seconds
                of the end of changes that were under way.
            BusyError: The process belongs to another coordinator.
            VersionMismatchError, PermissionDeniedError, ProtocolError: The process will
                never accept us.
            UnavailableError: The process was lost before it served its stores.
            PSUnavailableError: Another process is lost.

        Cancellation: stores that the process serves stay there; it is removed if it
        serves none.
        """
        async with self._changing:
            deadline = asyncio.get_running_loop().time() + timeout
            number = self._new_number(address, number)
            replication = await self._watched(deadline)
            process = replication.enter(number, address)
            try:
                await process.wait_ready(deadline)
            except BaseException:  # to the caller, for whom it was not added
                await replication.dismiss(process, 0.0)
                raise
            # Known from here on, also if moving stores to it fails: it may be drained.
            self._addresses[number], self._numbers[address] = address, number
            log.info("%s at %s: the program has added it", process.name, address)
            await self._rebalance(replication)
        return number

    async def rebalance(self, timeout: float) -> None:
        """Moves stores until no process serves two more than another one.

        Raises:
            DeadlineExceededError: A process is away, for ``timeout`` seconds.
            UnavailableError: A store stays where it was; says why.
            PSUnavailableError: A process is lost.

        Cancellation: stores that have moved stay there.
        """
        async with self._changing:
            deadline = asyncio.get_running_loop().time() + timeout
            await self._rebalance(await self._watched(deadline))

    async def vacate(self, address: str, timeout: float | None) -> None:
        """Moves all stores of a process to others, and removes the process.

        Raises:
            NotFoundError: No process has the address.
            InvalidArgumentError: Too few processes would be left.
            BusyError: The process is being drained already.
            DeadlineExceededError: A copy is left there after ``timeout`` seconds, or
                another change was under way for so long.
            UnavailableError: No other process takes its stores.
            PSUnavailableError: A process is lost.

        Cancellation: the process stays with the copies that it has then; it is removed
        if it has none, and its session is being closed.
        """
        number = self._number_of(address)
        if address in self._leaving:
            raise BusyError(f"ps {number} at {address} is being drained already")
        # Before its turn, so that a second call fails at once instead of waiting for
        # the first.
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
        """Waits until no other change of stores or processes is under way, and lets
        none begin inside of the block."""
        try:
            async with asyncio.timeout_at(deadline):
                await self._changing.acquire()
        except TimeoutError:
            raise DeadlineExceededError(
                f"{who} was not drained: for {seconds:g} s another change of the "
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
            # The last one: an address that was drained and added again has two.
            for each in reversed(replication.processes)
            if each.address == address and not each.is_closed
        )
        # In its turn: another drain may have taken the last one meanwhile.
        self._require_others(replication, process)
        # Before anything moves, so that nothing is copied there meanwhile.
        replication.cordon(process.place, True)
        try:
            async with asyncio.timeout_at(deadline):
                await self._empty(replication, process)
                # A worker without the new addresses would ask the removed process.
                await self._cluster.store_directory.wait_workers_notified(
                    NOTICE_SECONDS
                )
        except BaseException as error:  # to the caller: it stays
            replication.cordon(process.place, False)
            if isinstance(error, TimeoutError):
                raise DeadlineExceededError(
                    f"{process.name} at {address} has something left after "
                    f"{seconds:g} s, and stays: {_words(replication, process)}; call "
                    "drain again, with a longer timeout"
                ) from None
            raise
        del self._addresses[number]
        await replication.dismiss(process, NOTICE_SECONDS)
        log.info("%s at %s is drained and removed", process.name, address)

    async def _watched(self, deadline: float) -> Replication:
        """Returns the `Replication`, once all its processes are connected and each
        store has its copies."""
        self._require_whole()
        replication = self._cluster.ensure_replication()
        if not replication.is_started:
            await replication.open(deadline)
            self._require_whole()  # one may have been lost while processes were awaited
        return replication

    def _require_whole(self) -> None:
        """Checks that each store has a server.

        Raises:
            PSUnavailableError: A store is lost, or is being filled.
        """
        if (outage := self._cluster.outage_error) is not None:
            raise outage

    def _new_number(self, address: str, number: int | None) -> int:
        """Returns the task number for a process that is to be added.

        Raises:
            AlreadyExistsError, InvalidArgumentError: As `add`.
        """
        if address in self._addresses.values():
            raise AlreadyExistsError(f"{address} is a ps of the cluster already")
        for worker, at in self._cluster.worker_addresses.items():
            if at == address:
                raise InvalidArgumentError(
                    f"{address} is worker {worker} of the cluster, not a ps"
                )
        if self._cluster.name and address not in self._home:
            raise InvalidArgumentError(
                f"{address} is not in the cluster, and the session has a name "
                f"(resume={self._cluster.name!r}): the next program that takes "
                f"it over looks for stores only at {', '.join(sorted(self._home))}. "
                "Name the new ps in the cluster, or leave out resume="
            )
        if number is None:
            # An address keeps the number that it had; a number never goes to another
            # address.
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
            why = "is a worker: call strategy.workers.remove"
        elif address in self._numbers:
            why = "was drained before"
        else:
            known = ", ".join(f"{at} (ps:{n})" for n, at in self.addresses.items())
            why = f"is not a ps of the cluster, which has {known}"
        raise NotFoundError(f"{address!r:.80} {why}")

    def _require_others(self, replication: Replication, process: TaskSession) -> None:
        """Checks that there are enough other processes to take the stores of this one.

        Raises:
            InvalidArgumentError: Too few processes would be left.
        """
        left, least = len(_others(replication, process)), 1 + replication.replicas
        if left < least:
            copies = ", as each store has a second copy" * replication.replicas
            raise InvalidArgumentError(
                f"{process.name} at {process.address} cannot be drained: {left} other "
                f"ps are there, expected at least {least}{copies}; add one first"
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
        """Moves stores until the process has no copy of any store. A backup there may
        become primary before another one is complete."""
        stores, index = replication.placement.stores, process.place
        tried: set[tuple[int, int]] = set()
        # Looked at again after each move: a failover meanwhile may have made a backup
        # here the primary.
        while held := [store for store in stores if index in store.copy_processes]:
            if any(store.primary.process == index for store in held):
                await self._move_one(replication, process, tried)
            else:
                await self._evict(replication, held[0], index)

    async def _move_one(
        self,
        replication: Replication,
        process: TaskSession,
        tried: set[tuple[int, int]],
    ) -> None:
        """Moves one store of this process to another process.

        Raises:
            UnavailableError: All others have been tried.
        """
        stores, index = replication.placement.stores, process.place
        others = [each.place for each in _others(replication, process)]
        backups = {
            store.number: store.backup.process
            for store in stores
            if store.backup is not None and store.is_paired
        }
        serving = [store.primary.process for store in stores]
        store, target = plan_drain(serving, backups, index, others or [index])[0]
        untried = [each for each in others if (store, each) not in tried]
        if not untried:
            raise UnavailableError(
                f"no other ps takes the store of {self._cluster.ps[store].name}: "
                f"{stores[store].reason or 'none is there'}; it stays at "
                f"{process.address}"
            )
        # The plan is made again each time, and may name one that has refused.
        target = target if target in untried else untried[0]
        tried.add((store, target))
        await self._move(replication, store, target)

    async def _evict(
        self, replication: Replication, store: ReplicatedStore, process: int
    ) -> None:
        """Moves the backup of a store to another process, unless the backup becomes
        primary first."""
        self._require_whole()
        # With replicas it stays until another one is complete
        # (`ReplicatedStore.filled`).
        replication.evict(store.number)
        await replication.wait_until(
            lambda: (
                store.primary.process == process
                or process not in store.copy_processes
                or self._cluster.outage_error is not None
            )
        )
        self._require_whole()
        await self._settled(replication)

    async def _move(self, replication: Replication, number: int, target: int) -> None:
        """Moves a store; tries again if the store was away meanwhile, and is back.

        Raises:
            PSUnavailableError: This store, or another one, is lost.
        """
        cluster, store = self._cluster, replication.placement.stores[number]
        was_away = True
        while was_away:
            self._require_whole()  # it may have been lost between two moves
            await replication.move(number, target)
            if was_away := store.is_reported_lost:
                # It counts as lost when its connection was cut for too long.
                await replication.wait_until(
                    lambda: (
                        not store.is_reported_lost or cluster.outage_error is not None
                    )
                )
        await self._settled(replication)

    async def _settled(self, replication: Replication) -> None:
        """Waits until each store has its copies, so that at most one store at a time
        lacks a copy.

        Raises:
            PSUnavailableError: A store is lost.
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
        return "not all workers have the new addresses of its stores"
    return f"store {', '.join(stores)}"

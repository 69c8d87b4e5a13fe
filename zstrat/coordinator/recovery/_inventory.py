"""Remembers what the servers hold, and gives them the next session in a recovery.

Law of `Inventory`: data only. Handles would keep the strategy alive that owns the
connection, and a restore has to continue while the program drops some.

A session has its own number even if it resumes what another program has left under a
name (`adopt`); keys are counted from the number of the first one.

To start empty, parameter servers enter a session with an unused number
(`renew_servers`). When they are filled, the workers enter it, too (`renew_workers`).
Nothing is dispatched meanwhile (`suspend_dispatch`). Law: only `SessionRenewal` changes
the number of a session; tasks refuse what was sent for an earlier number.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import TYPE_CHECKING, Protocol, final

from zstrat.coordinator._session_pause import SessionCut, cut_of
from zstrat.coordinator.connecting import ClusterTasks, all_joined, arrive
from zstrat.data import Lease
from zstrat.errors import PSUnavailableError
from zstrat.initializers import constant
from zstrat.program import dump_code
from zstrat.wire import CloseSession, InitialEntry, VariableEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import numpy as np

    from zstrat.coordinator._dispatch import Dispatcher
    from zstrat.coordinator._fences import Fences
    from zstrat.coordinator.replication import Replication
    from zstrat.coordinator.rounds import RestoredRounds, RoundClosing
    from zstrat.ps import PsClient
    from zstrat.variables import VariableSpec
    from zstrat.wire import TableEntry


class RestorePoint(Protocol):
    """A complete checkpoint, as far as it concerns the servers of one session."""

    @property
    def path(self) -> str: ...

    @property
    def variables(self) -> frozenset[int]:
        """Keys of the variables that it has values of."""
        ...

    @property
    def optimizers(self) -> frozenset[int]:
        """Numbers of the optimizers that it has slots of."""
        ...

    @property
    def lacks(self) -> Sequence[str]:
        """Names of what else it lacks."""
        ...

    @property
    def places(self) -> Mapping[int, Sequence[str]]:
        """Positions of per-worker iterators, by number, one for each input pipeline."""
        ...

    @property
    def rounds(self) -> Mapping[int, RestoredRounds]:
        """The rounds from which windows of local steps continue, by outer optimizer."""
        ...

    async def check(self) -> None:
        """Reads all of it.

        Raises:
            DataLossError: It is damaged.
            NotFoundError, OSError: It no longer exists.
        """
        ...

    async def fill(self, client: PsClient) -> None:
        """Loads it into all servers, whose variables exist. On the client's loop.

        Raises:
            PSUnavailableError: A server is lost.
            ZstratError, OSError: As `zstrat.Checkpoint.restore`.
        """
        ...


@final
class Inventory:
    """The variables, optimizers and optimizer trees of one session. On the loop."""

    def __init__(self) -> None:
        self._variables: dict[int, VariableSpec] = {}
        self._optimizers: dict[int, tuple[str, bytes]] = {}
        self._trees: dict[tuple[int, bytes], None] = {}
        """Trees of optimizers that this program has sent. Workers send those of their
        steps in each session, before the first gradient."""
        self._tables: dict[int, tuple[int, TableEntry, bytes]] = {}
        """Parts of tables of any id, by key: server, entry, and the initializer."""
        self._initial: dict[int, np.ndarray] = {}
        """First values of variables that no checkpoint has, by key."""

    def created(self, specs: Iterable[VariableSpec]) -> None:
        self._variables.update((spec.key, spec) for spec in specs)

    def created_tables(
        self, tables: Iterable[tuple[VariableSpec, TableEntry]], code: bytes
    ) -> None:
        for spec, entry in tables:
            self._variables[spec.key] = spec
            self._tables[spec.key] = spec.ps, entry, code

    def deleted(self, specs: Iterable[VariableSpec]) -> None:
        for spec in specs:
            self._variables.pop(spec.key, None)
            self._tables.pop(spec.key, None)
            self._initial.pop(spec.key, None)

    def note_initial(
        self, specs: Iterable[VariableSpec], values: Iterable[np.ndarray]
    ) -> None:
        """Keeps the first values of variables that cannot be saved."""
        keys = [spec.key for spec in specs]
        self._initial.update(zip(keys, values, strict=True))

    def registered(self, optimizer: int, name: str, code: bytes) -> None:
        self._optimizers[optimizer] = name, code

    def bound(self, optimizer: int, tree: bytes) -> None:
        self._trees[optimizer, tree] = None

    def withdrawn(self, optimizers: Iterable[int]) -> None:
        gone = set(optimizers)
        for number in gone:
            self._optimizers.pop(number, None)
        for at in [at for at in self._trees if at[0] in gone]:
            del self._trees[at]

    def missing_in(self, point: RestorePoint) -> list[str]:
        """Returns names of what would have no value if servers were filled from it."""
        variables = [
            f"variable {spec.name!r}"
            for key, spec in self._variables.items()
            if key not in point.variables and key not in self._initial
        ]
        optimizers = [
            f"optimizer {name!r}"
            for number, (name, _) in self._optimizers.items()
            if number not in point.optimizers
        ]
        return list(dict.fromkeys((*variables, *optimizers, *point.lacks)))

    async def create_again(self, client: PsClient, timeout: float) -> None:
        """Creates everything on empty servers; variables are zero, or have their first
        values if these are known.

        Args:
            timeout: Seconds for creating the variables.

        Raises:
            PSUnavailableError: A server is lost.
        """
        specs = [s for s in self._variables.values() if s.key not in self._tables]
        initial = self._initial
        for ps, entry, code in self._tables.values():
            await client.create_tables([(ps, entry)], code)
        entries = [(spec.ps, _zeros(spec)) for spec in specs if spec.key not in initial]
        await client.create(
            [
                (spec.ps, entry_of(spec), initial[spec.key])
                for spec in specs
                if spec.key in initial
            ]
        )
        if entries:
            deadline = asyncio.get_running_loop().time() + timeout
            code = dump_code(constant(0))
            await client.initialize(entries, code, deadline=deadline)
        for number, (name, code) in self._optimizers.items():
            await client.create_optimizer(number, name, code)
        for number, tree in self._trees:
            await client.bind(number, tree)


def entry_of(spec: VariableSpec) -> VariableEntry:
    """Returns the entry of a variable whose value is sent."""
    return VariableEntry(spec.key, spec.name, spec.trainable, spec.part is not None)


def _zeros(spec: VariableSpec) -> InitialEntry:
    shape = list(spec.shape)
    return InitialEntry(
        spec.key,
        spec.name,
        spec.trainable,
        spec.part is not None,
        spec.dtype,
        shape,
        shape,
        [0] * len(shape),
    )


log = logging.getLogger("zstrat.coordinator")


class RenewedCluster(ClusterTasks, Protocol):
    """The part of a `Cluster` that depends on the session number."""

    @property
    def fences(self) -> Fences: ...

    @property
    def rounds(self) -> RoundClosing: ...

    @property
    def replication(self) -> Replication | None: ...

    @property
    def dispatcher(self) -> Dispatcher | None: ...


@final
class SessionRenewal:
    """The numbers of one session. On the loop.

    Args:
        session: The first number.
        draw: Draws an unused number.
    """

    def __init__(
        self, cluster: RenewedCluster, session: int, draw: Callable[[], int]
    ) -> None:
        self.session = session
        """The number of the session on the parameter servers."""
        self.worker_session = session
        """The number on the workers, which enter another session after the servers."""
        self.origin = session
        """What keys are counted from: the first number of the session."""
        self.resumed = False
        """The session resumes what another program has left."""
        self.done_leases: dict[int, list[Lease]] = {}
        """What it had done of leased datasets: of the first pass, the second one..."""
        self.leased_passes = itertools.count(1)
        self.close_messages: list[CloseSession] = []
        """Close earlier sessions, on a task that still serves one of them."""
        self._cluster, self._draw = cluster, draw

    @property
    def ended_steps(self) -> SessionCut:
        """The steps that ended."""
        dispatcher = self._cluster.dispatcher
        if dispatcher is None:
            return SessionCut(self._cluster.rounds.first_step)
        return cut_of(dispatcher.queue)

    def suspend_dispatch(self) -> None:
        """Stops giving closures to workers."""
        if (dispatcher := self._cluster.dispatcher) is not None:
            dispatcher.suspend(True)

    def resume_dispatch(self) -> None:
        """Gives closures to workers again."""
        if (dispatcher := self._cluster.dispatcher) is not None:
            dispatcher.suspend(False)

    def report_outage(self, error: PSUnavailableError) -> None:
        """Raises the error in every call that schedules or joins, until the servers are
        back."""
        if (dispatcher := self._cluster.dispatcher) is not None:
            dispatcher.engine.fail(error, lasting=True)

    async def adopt(self, name: str, restart_partial: bool, deadline: float) -> None:
        """Resumes what another program has left under the name, if anything is left.

        Args:
            restart_partial: If only a part is left, start empty, in another session.
            deadline: Loop time.

        Raises:
            PSUnavailableError: Only a part is left.
            ZstratError: As `arrive`.

        Cancellation: the tasks stay started.
        """
        try:
            await self._resume(name, deadline)
        except PSUnavailableError as error:
            if not restart_partial:
                raise
            log.warning("the session starts empty, with nothing restored: %s", error)
            await self.start_empty(deadline)

    async def start_empty(self, deadline: float) -> None:
        """Enters another session with all tasks, in which nothing has been created.

        Args:
            deadline: Loop time.

        Raises:
            ZstratError: As `arrive`.

        Cancellation: the tasks stay started.
        """
        cluster = self._cluster
        self.origin = 0  # that of the next session
        self._keep_origin()
        self.renew_servers()
        self.resumed, self.origin = False, self.session
        self.renew_workers({})
        await arrive(cluster.ps, cluster.workers, deadline)
        await all_joined(cluster.workers, deadline)

    async def _resume(self, name: str, deadline: float) -> None:
        cluster, replication = self._cluster, self._cluster.replication
        assert replication is not None, "a session that has a name has one"
        origin = await replication.take_over(deadline)
        if origin is not None:
            self.resumed, self.origin = True, origin
            log.info("resumes what was left of the session %r", name)
        self._keep_origin()
        entered = arrive(cluster.ps, cluster.workers, deadline)
        if origin is None:
            await entered
        else:
            await replication.orphans.unless_lost(entered)
            await replication.orphans.unless_lost(self._inherit_rounds(deadline))
            await replication.orphans.unless_lost(self._inherit_leases(deadline))
            await replication.orphans.unless_lost(replication.open(deadline))

    async def _inherit_rounds(self, deadline: float) -> None:
        rounds = self._cluster.rounds
        await rounds.inherit(deadline)
        if rounds.first_step > 1:  # which may be more than a ledger can remember
            await self._cluster.fences.up_to(rounds.first_step, ())

    async def _inherit_leases(self, deadline: float) -> None:
        self.done_leases.clear()
        for number, *lease in await self._cluster.client.applied_leases(deadline):
            self.done_leases.setdefault(number, []).append(Lease(*lease))

    def _keep_origin(self) -> None:
        for task in self._cluster.ps:
            task.keep_origin(self.origin)
        if (replication := self._cluster.replication) is not None:
            replication.keep_origin(self.origin)

    def renew_servers(self) -> None:
        """Moves all parameter servers to another session, in which they are empty. They
        refuse what is sent for this one from then on."""
        cluster = self._cluster
        self.close_messages.append(CloseSession(self.session, False))
        self.session = self._draw()
        cluster.rounds.restart()
        cluster.client.enter(self.session)
        cluster.fences.enter(self.session)
        # Before the workers: their reports of the earlier session are ignored.
        if (replication := cluster.replication) is not None:
            replication.renew(self.session, self.close_messages)
            stores = range(len(cluster.ps))
            cluster.store_directory.reset_addresses(map(replication.home_of, stores))
        for task in cluster.ps:
            task.renew(self.session, self.close_messages)

    async def close_ended_steps(self, rounds: Mapping[int, RestoredRounds]) -> None:
        """Sends the servers the steps that have ended, and the rounds to continue from.

        Raises:
            PSUnavailableError, DeadlineExceededError: One does not answer.
        """
        cut = self.ended_steps
        await self._cluster.fences.up_to(cut.end, cut.besides)
        await self._cluster.rounds.drop(rounds)

    async def note_leases(self, states: Mapping[int, Sequence[str]]) -> None:
        """Has the servers note what is done of leased datasets, for a program that
        resumes the session: that of these states of iterators, by number, and that of
        other iterators as it is now.

        Raises:
            PSUnavailableError, DeadlineExceededError: One does not answer.
        """
        dispatcher = self._cluster.dispatcher
        if self._cluster.name and dispatcher is not None:
            with dispatcher.engine.lock:
                packed = dispatcher.queue.leases.packed_done(states)
            await self._cluster.client.note_leases(packed)

    def renew_workers(self, places: Mapping[int, Sequence[str]]) -> None:
        """Moves workers to the session of the servers. Their unfinished closures run
        again.

        Args:
            places: Where their iterators begin.
        """
        cluster = self._cluster
        self.worker_session = self.session
        if cluster.replication is not None:
            cluster.replication.start()
        # Before the workers: their reports of the earlier session are ignored.
        if cluster.dispatcher is not None:
            cluster.dispatcher.enter(self.session)
            cluster.dispatcher.builder.start_at(places)
        for task in cluster.workers:
            task.renew(self.session, self.close_messages)

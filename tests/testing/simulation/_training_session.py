"""One session of a simulation: it trains, updates, reads, saves, and believes nothing.

What it learns it gives to the contract (`Training`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from zstrat.coordinator import until_settled
from zstrat.coordinator.parts import Code
from zstrat.data import Dataset
from zstrat.errors import (
    CancelledError,
    ClosureAbortedError,
    DeadlineExceededError,
    PSUnavailableError,
    UnavailableError,
    WorkerLostError,
    ZstratError,
)
from zstrat.program import dump_code
from zstrat.ps import Ref
from zstrat.variables import VariableSpec
from zstrat.wire import StoreEntry, UpdateOp

from ._checkpoints import MemoryPoint, late_of, read_pinned, values_of
from ._cluster_changes import PS_WAIT, ClusterChanges, SessionContext
from ._contract import Saved, Scheduled, Training
from ._late_changes import OPTIMIZER, LateChanges
from ._leased_counts import BATCH, LeasedCounts
from ._script import ANSWER, DENSE, ScriptedFunction, one_hot
from ._strikes import Strikes
from ._table_changes import TABLE_OPTIMIZER, TableChanges
from ._training_rounds import TrainingRounds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zstrat.coordinator import SessionCut
    from zstrat.coordinator.parts import ScheduledCall

    from ._checkpoints import SavedTensor
    from ._loop_coordinator import LoopCoordinator

OWN: Final = 16
"""Own updates of a session, at most."""
QUIET: Final = 1.0
"""Seconds that a program waits when all has healed, for zombies that wake up."""
WORKER_WAIT: Final = 15.0
"""Seconds that a session waits for its last worker."""
LATE_CHANCE: Final = 0.4
"""How often a step is followed by a change of what is made late."""
LIVES: Final = 8
"""Programs that go on one after the other with the same variables, at most."""
QUESTIONS: Final = 48
"""Closures about a change of the coordinator that have no effect but their result."""
PATIENCE: Final = 10.0
"""Seconds between two looks at a session that is broken."""

_PLACE: Final = np.int64


@final
class TrainingSession:
    """One session, from its opening to its end.

    Raises, all coroutines:
        PSUnavailableError, DeadlineExceededError, BusyError: It cannot go on.
    """

    def __init__(
        self, context: SessionContext, coordinator: LoopCoordinator, training: Training
    ) -> None:
        self._context, self._scenario = context, context.scenario
        self._coordinator, self._training = coordinator, training
        self._first = 0
        """How many programs have gone before: each has places of its own."""
        lives = LIVES if self._scenario.resumes else 1
        length, count = lives * self._scenario.steps, training.servers
        # As in real programs, each session counts its keys anew.
        self._marks = _specs(100, "marks", (length,), "int64", count)
        self._own = _specs(200, "own", (lives * OWN,), "int64", count)
        self._tables = _specs(300, "table", (length, 2), "float32", count)
        self._late: Final = LateChanges(
            coordinator,
            training,
            context.draw,
            optimizes=self._scenario.optimizes,
            creates=not self._scenario.restores,
            is_guarded=self._scenario.is_guarded,
            resumes=self._scenario.resumes,
        )
        self._strikes: Final = Strikes(
            context, coordinator, training, self._late, self._look_at_late, self._save
        )
        self._restored = _specs(400, "restored", (2,), "int64", count)
        self._created = (*self._marks, *self._own)
        if not self._scenario.tables:
            self._created += self._tables
        if self._scenario.saves:
            self._created += self._restored
        self._rounds: Final = TrainingRounds(context, coordinator, training)
        self._created += self._rounds.specs
        self._leased: Final = LeasedCounts(
            coordinator, training, 3 * BATCH * length if self._scenario.leases else 0
        )
        if self._scenario.leases:
            self._created += self._leased.specs
        self._table: Final = TableChanges(
            coordinator, training, context.draw, is_guarded=self._scenario.is_guarded
        )
        self._variables: Final = self._created
        if self._scenario.tables:
            self._created += (self._table.spec, *self._table.of_steps)
            self._tables = self._table.of_steps
        self._updates: set[asyncio.Task[None]] = set()
        self._pinned: set[int] = set()
        """Snapshots that were not released, as their servers were away."""
        self._elements = 0
        """The number of the iterators that steps draw from."""
        self._coordinators = 0
        self._beside: asyncio.Task[Any] | None = None
        self._changes: Final = ClusterChanges(context, coordinator, training)

    async def run(self) -> None:
        """Trains, reads and saves as the scenario says, to the session's end."""
        await self._coordinator.cluster.open()
        cluster = self._coordinator.cluster
        before = self._context.go_on(self._training, cluster.renewal.resumed)
        self._first = before * self._scenario.steps
        if self._scenario.restores:
            self._coordinator.cluster.recover(PS_WAIT)
            self._training.recovery = self._coordinator.cluster.recovery
        await self._create()
        if self._scenario.late:
            await self._late.begin(2 if self._scenario.restores else 0)
        self._coordinate()
        if self._scenario.restores:
            await self._save()
        await self._train()
        await self._finish()

    async def _create(self) -> None:
        await self._coordinator.servers.create_variables(
            [(spec, np.zeros(spec.shape, spec.numpy_dtype)) for spec in self._variables]
        )
        await self._rounds.create()
        if self._scenario.tables:
            await self._table.create()
        self._training.has_created = True

    def _coordinate(self) -> None:
        """Makes the coordinator, and the step."""
        self._coordinator.coordinate(
            in_flight=self._scenario.in_flight, max_attempts=4, wait=WORKER_WAIT
        )
        self._coordinators += 1
        if self._scenario.draws:
            numbers = Code(dump_code(Dataset.range(2**20)))
            self._elements = self._coordinator.iterate("numbers", numbers)
        leases = self._leased.start() if self._scenario.leases else 0
        function = ScriptedFunction(
            self._training.number,
            self._marks,
            self._tables,
            self._scenario.by_rows,
            frozenset({self._first + place for place in self._scenario.fails}),
            _nobody,
            self._scenario.reads_ahead,
            self._elements,
            rounds=self._scenario.rounds,
            leases=leases,
            counted=self._leased.specs,
            read=self._training.leased,
        )
        self._call = self._call_of("mark", DENSE, function)
        answer = replace(
            function, marks=(), tables=(), by_rows=False, resource=0, rounds=(),
            leases=0,
        )  # fmt: skip
        self._answer = self._call_of("answer", ANSWER, answer)

    def _call_of(
        self, name: str, does: bytes, function: ScriptedFunction
    ) -> ScheduledCall:
        code = Code(b"%s of session %d" % (does, self._training.number))
        if function.resource and self._coordinators > 1:  # which is another one
            code = Code(b"%s, iterator %d" % (code.code, function.resource))
        self._context.scripts.add(code.code, function)
        return self._coordinator.call(name, code, _PLACE(0), function.leases)

    async def _train(self) -> None:
        draw = self._context.draw
        is_late = self._scenario.late and not self._scenario.strikes
        for place in range(self._first, self._first + self._scenario.steps):
            await asyncio.sleep(-self._scenario.pace * math.log(1.0 - draw()))
            await self._schedule(place)
            if self._scenario.moves:
                self._changes.move_soon(draw())
            if self._scenario.turns_over:
                self._changes.turn_over_soon(draw())
            if not self._scenario.only_steps:
                await self._something_else(draw())
            if self._scenario.changes_coordinator and draw() < 0.2:
                await self._change_coordinator()
            if self._scenario.tables:
                await self._look(self._change_table)
            if is_late and draw() < LATE_CHANCE:
                await self._look(self._change_late)
            if self._scenario.strikes and self._beside is None:
                loop = asyncio.get_running_loop()
                self._beside = loop.create_task(self._strikes.run(), name="strikes")
        if self._beside is not None:
            await self._beside

    async def _something_else(self, chance: float) -> None:
        """Does what a program does besides training, now and then."""
        if self._scenario.saves and chance > 0.7:
            if self._beside is not None:
                await self._beside  # else it is not known what is to be in it
            await (self._save() if chance > 0.85 else self._restore())
        elif chance < 0.25:
            self._update_soon()
        elif chance < 0.32:
            await self._look(partial(self._steadily, self._read))
        elif chance < 0.42:
            await self._fetch()
        elif chance < 0.45 and self._scenario.cancels:
            await self._cancel()
        elif self._scenario.reads_beside:
            pass  # steps go on, whatever the servers do
        elif chance < 0.50:
            await self._join()
        elif chance < (0.58 if self._scenario.restores else 0.53):
            await self._save()

    async def _change_table(self) -> None:
        """Changes the table of any id; or looks, or saves, when the process that serves
        it was killed behind the change."""
        while True:
            await self._table.one()
            if self._context.draw() < 0.3:
                break
        if self._scenario.is_guarded and self._context.draw() < 0.1:
            self._strikes.at_store(self._table.spec.ps)
        if self._context.draw() < 0.5:
            await self._steadily(self._table.look)

    async def _change_late(self) -> None:
        """Changes what was made late; or looks, when the process that serves it was
        killed behind the change."""
        while True:
            await self._late.one()
            if self._context.draw() < 0.5:
                break
        if (store := self._late.changed) is None:
            return
        self._late.changed = None
        if self._scenario.is_guarded and self._context.draw() < 0.7:
            self._strikes.at_store(store)
        if self._context.draw() < 0.3:
            await self._look_at_late()

    async def _look_at_late(self) -> None:
        """What was made late is what it has to be."""
        training = self._training
        training.look()
        fills = training.fills
        found = await self._steadily(self._late.look)
        await self._steadily(self._late.miss)
        if found is None or training.fills != fills or training.is_filling:
            return
        if not training.late.found(found):
            training.broken(f"late is {found}, and not {training.late.worlds}")

    async def _look(self, work: Callable[[], Any]) -> None:
        """Between two steps; or beside them, one look at a time."""
        if not self._scenario.reads_beside:
            await work()
            return
        if self._beside is not None:
            if not self._beside.done():
                return
            await self._beside
        self._beside = asyncio.get_running_loop().create_task(work(), name="beside")

    async def _schedule(self, place: int) -> None:
        training, coordinator = self._training, self._coordinator
        while True:
            known = frozenset() if self._scenario.only_steps else training.done()
            try:
                value = await coordinator.schedule(self._call, _PLACE(place))
            except Exception as error:  # of steps before: see `_told`
                await self._told(error)
                continue
            number = coordinator.engine.queue.steps.next - 1
            training.steps[place] = Scheduled(place, number, value, known)
            return

    async def _change_coordinator(self) -> None:
        """Closures that one coordinator has left on workers are no matter of the next:
        the results of this are its own."""
        coordinator, values = self._coordinator, []
        for number in range(-4 * QUESTIONS, 0, 4):  # none of which is a place
            if number == -2 * QUESTIONS:
                await asyncio.sleep(8 * self._scenario.work * self._context.draw())
                coordinator.shut_down()
                for place, step in self._training.steps.items():
                    if step.fate == "open":
                        self._training.broken(f"step {place} is open behind a shutdown")
                self._coordinate()
            try:
                value = await coordinator.schedule(self._answer, _PLACE(number))
            except Exception as error:  # of steps before: see `_told`
                await self._told(error)
            else:
                values.append((number, value))
        for number, value in values:
            with contextlib.suppress(CancelledError, UnavailableError, WorkerLostError):
                if (result := await value.fetch()) != number:
                    self._training.broken(f"question {number} was answered {result}")

    async def _join(self) -> None:
        """Waits until all that is scheduled has ended."""
        while True:
            try:
                await self._coordinator.engine.join_async()
            except Exception as error:  # of steps before: see `_told`
                await self._told(error)
                continue
            for place, step in self._training.steps.items():
                if step.fate == "open":
                    self._training.broken(f"step {place} is open behind a join")
            return

    async def _fetch(self) -> None:
        """The result of a step is its number; a large one may be lost."""
        steps = self._training.steps
        done = [place for place, step in steps.items() if step.fate == "done"]
        if not done:
            return
        await self._look_at_result(
            done[-1 - int(self._context.draw() * min(4, len(done)))]
        )

    async def _look_at_result(self, place: int) -> None:
        try:
            result = await self._training.steps[place].value.fetch()
        except (ClosureAbortedError, CancelledError, UnavailableError):
            if place % 4 != 1:
                raise
        except DeadlineExceededError:
            pass
        else:
            if not np.array_equal(result, np.full(np.shape(result), place)):
                self._training.broken(f"step {place} has returned {result}")

    async def _cancel(self) -> None:
        """Nothing waits or runs from then on, and what has not begun never will."""
        await self._coordinator.engine.cancel_async()
        for place, step in self._training.steps.items():
            if step.fate == "open":
                self._training.broken(f"step {place} is open behind a cancel")
        values = await self._steadily(self._read)
        self._training.freeze(values[: self._training.servers])

    async def _told(self, error: Exception) -> None:
        """The error of some step, or of the cluster, was raised; nothing runs now."""
        if isinstance(error, PSUnavailableError):
            self._look_at(error)
            if error.lost:
                if self._scenario.hands_over:
                    self._training.broken(f"it had left what it held: {error!r}")
                raise error
            await asyncio.sleep(1.0)
            if self._coordinator.cluster.outage_error is None:
                return
            deadline = asyncio.get_running_loop().time() + PATIENCE
            while self._coordinator.cluster.outage_error is not None:
                if asyncio.get_running_loop().time() > deadline:
                    raise error
                await asyncio.sleep(0.5)
            return
        if not (isinstance(error, WorkerLostError) or "was to fail" in str(error)):
            if not isinstance(error, UnavailableError):
                raise error
            self._look_at(error)
        for place, step in self._training.steps.items():
            if step.fate == "open":
                self._training.broken(f"step {place} is open behind {error!r}")
        values = await self._steadily(self._read)
        self._training.freeze(values[: self._training.servers])

    def _look_at(self, error: ZstratError) -> None:
        """What may never be heard of where one server at a time is lost."""
        if self._scenario.is_guarded:
            self._training.broken(f"one server was lost, and there was {error!r}")

    def _update_soon(self) -> int | None:
        """Begins the next update of the program's own; returns its place."""
        count = len(self._training.own)
        place = self._first // self._scenario.steps * OWN + count
        if count >= OWN:
            return None
        self._training.own[place] = "open"
        task = asyncio.get_running_loop().create_task(
            self._update(place), name=f"own update {place}"
        )
        self._updates.add(task)
        return place

    async def _update(self, place: int) -> None:
        training = self._training
        fills = training.fills
        updates = [
            (spec, UpdateOp.ADD, 0, (one_hot(spec, place),)) for spec in self._own
        ]
        try:
            await self._coordinator.servers.update(updates)
        except ZstratError as error:  # it may have been applied, and may not
            self._look_at(error)
            training.own[place] = "perhaps"
            training.unsure.add(place)
        else:
            same = training.fills == fills and not training.is_filling
            training.own[place] = "done" if same else "perhaps"

    async def _read(self) -> list[np.ndarray]:
        training = self._training
        known, fills = training.done(), training.fills
        own = training.done_own()
        values = await self._coordinator.servers.read((*self._marks, *self._own))
        marks, mine = values[: training.servers], values[training.servers :]
        if training.fills == fills and not training.is_filling:
            training.heard(-fills - 1, marks, known)
            lacking = [place for place in own if any(not each[place] for each in mine)]
            if lacking:
                training.broken(
                    f"own updates {lacking} were done, and a read lacks them"
                )
        return [*marks, *mine]

    async def _steadily(self, work: Callable[[], Any]) -> Any:
        """Asks again while a server is only away."""
        while True:
            try:
                return await work()
            except PSUnavailableError as error:
                await self._told(error)

    @property
    def is_changing(self) -> bool:
        """Whether servers come or go."""
        return self._changes.is_moving

    async def _save(self) -> None:
        """Saves a checkpoint. One that fails is none, where servers may be lost."""
        coordinator, training = self._coordinator, self._training
        if coordinator.cluster.outage_error is not None:
            return
        fills, late = training.fills, training.late
        specs = [*self._marks, *self._own, *self._tables, *self._rounds.specs]
        specs += map(self._late.spec, late.keys)
        specs += self._leased.specs if self._scenario.leases else ()
        optimizers = frozenset({OPTIMIZER} if late.has_optimizer else ())
        if self._scenario.tables:
            specs.append(self._table.spec)
            optimizers |= {TABLE_OPTIMIZER}
        optimizers |= {each.number for each in self._scenario.rounds}
        session = coordinator.cluster.session
        try:
            cut, places, tensors = await until_settled(
                [coordinator.cluster], partial(self._cut, specs, optimizers)
            )
        except ZstratError as error:  # a lost server is reported by the next call, too
            if self._scenario.saves:
                self._look_at(error)
            return
        if training.fills != fills or training.is_filling:
            return
        values, found = values_of(tensors), late_of(tensors, late.keys)
        marks, own = ([values[s.key] for s in of] for of in (self._marks, self._own))
        lost, doubtful = frozenset(training.lost), frozenset(training.doubtful)
        rounds = self._rounds.moment_of(session, tensors)
        for (state,) in places.values():
            counts = [values[spec.key] for spec in self._leased.specs]
            self._leased.check(counts, state)
        table = [self._table.world_of(tensors) if self._scenario.tables else {}]
        saved = Saved(cut, marks, own, lost, doubtful, [found], table, rounds)
        training.saved.append(saved)
        training.check_saved(saved)
        if not late.found(found):
            training.broken(f"a checkpoint has {found} of {late.worlds}")
        if (recovery := coordinator.cluster.recovery) is not None:
            path = f"{len(training.saved)}"
            log = self._context.rounds
            point = MemoryPoint(training, path, saved, tensors, optimizers, log, places)
            if missing := recovery.remember(point, cut, fills):
                training.broken(f"a checkpoint of all lacks {missing}")

    async def _cut(
        self, specs: Sequence[VariableSpec], optimizers: frozenset[int]
    ) -> tuple[SessionCut, Mapping[int, Sequence[str]], list[SavedTensor]]:
        """The values at one moment between two steps, and what is leased."""
        cluster, number = self._coordinator.cluster, self._context.new_number()
        holder, refs = object(), [Ref(spec.ps, spec.key) for spec in specs]
        try:
            cut = await cluster.pause.begin(holder)
            places = self._leased.places() if self._scenario.leases else {}
            update = self._update_soon()
            await asyncio.sleep(0.0)
            self._pinned.add(number)  # though it fails, where a server is away
            pinned = await cluster.client.pin(number, refs, list(optimizers))
            if update is not None and self._training.own[update] == "done":
                self._training.broken(f"own update {update} has passed a pause")
        finally:
            cluster.pause.end(holder)
        delay = self._scenario.delay
        tensors = await read_pinned(cluster.client, number, pinned, delay)
        await cluster.client.release(number)
        self._pinned.discard(number)
        return cut, places, tensors

    async def _restore(self) -> None:
        """Gives variables other values between two steps, as a restore does."""
        coordinator, value = self._coordinator, np.int64(self._context.draw() * 2**40)
        try:
            await until_settled([coordinator.cluster], partial(self._load, value))
        except ZstratError as error:
            self._look_at(error)
            return
        found = await self._steadily(partial(coordinator.servers.read, self._restored))
        if any((each != value).any() for each in found):
            self._training.broken(f"{value} was restored, and a read has {found}")

    async def _load(self, value: np.int64) -> None:
        cluster, holder = self._coordinator.cluster, object()
        try:
            await cluster.pause.begin(holder)
            for spec in self._restored:
                array = np.full(spec.shape, value)
                entry = StoreEntry(spec.key, 0, "", 0)
                await cluster.client.store(spec.ps, [entry], [array])
        finally:
            cluster.pause.end(holder)

    async def _finish(self) -> None:
        await self._join()
        for place, step in self._training.steps.items():
            if step.fate == "done" and place % 4 != 1:  # the others are on workers
                await self._look_at_result(place)
        for task in list(self._updates):
            await task
        await self._changes.end()
        await self._settle()
        loop = asyncio.get_running_loop()
        now = loop.time()
        while (healed := self._context.healed_at()) > now:
            await asyncio.sleep(healed - now)
            now = loop.time()
        await asyncio.sleep(QUIET)
        await self._settle()

    async def _settle(self) -> None:
        """All is over: look at everything, between two restores."""
        training = self._training
        tables: Sequence[np.ndarray] = ()
        counts: Sequence[np.ndarray] = ()
        while True:
            fills = training.fills
            values = await self._steadily(self._read)
            if self._scenario.by_rows:
                tables = await self._steadily(self._read_tables)
            if self._scenario.leases:
                read = partial(self._coordinator.servers.read, self._leased.specs)
                counts = await self._steadily(read)
            if training.fills == fills and not training.is_filling:
                break
        count = training.servers
        marks, own = values[:count], values[count:]
        training.check(marks, own)
        training.freeze(marks)
        if counts:
            self._leased.check(counts)
        # Rows and marks are pushed together.
        for table, mark in zip(tables, marks if tables else (), strict=True):
            if not np.array_equal(table[:, 0], table[:, 1]):
                self._training.broken(f"half of a row: {table}")
            if not np.array_equal(table[:, 0], mark):
                self._training.broken(f"rows {table[:, 0]}, and marks {mark}")
        if self._scenario.late:
            await self._look_at_late()
        if self._scenario.tables:
            await self._steadily(self._table.look)
        await self._look_at_servers()
        await self._steadily(self._rounds.check)

    async def _read_tables(self) -> Sequence[np.ndarray]:
        servers, length = self._coordinator.servers, self._marks[0].shape[0]
        if not self._scenario.tables:
            return await servers.read(self._tables)
        return await servers.read_rows([(x, np.arange(length)) for x in self._tables])

    async def _look_at_servers(self) -> None:
        """They hold what was created, and nothing of what is over."""
        training, late = self._training, self._training.late
        fills = training.fills
        client = self._coordinator.cluster.client
        try:
            told = await self._steadily(client.statistics)
        except PSUnavailableError as error:  # statistics are of a process
            if not (self._scenario.restores and error.lost):
                raise
            return
        if late.is_unsure or training.fills != fills or training.is_filling:
            return
        homes = [spec.ps for spec in self._created]
        homes += [self._late.spec(key).ps for key in late.keys]
        for store, each in enumerate(told):
            if each["variables"] != homes.count(store):
                training.broken(f"store {store} holds {each['variables']} variables")
            if not self._pinned and (each["snapshots"] or each["undo_bytes"]):
                training.broken(f"store {store} keeps {each['snapshots']} snapshots")


def _specs(
    base: int, name: str, shape: tuple[int, ...], dtype: str, servers: int
) -> tuple[VariableSpec, ...]:
    return tuple(
        [
            VariableSpec(base + ps, f"{name}{ps}", shape, dtype, ps)
            for ps in range(servers)
        ]
    )


def _nobody(number: int, values: Sequence[np.ndarray]) -> None:
    raise AssertionError(f"step {number} runs in no worker, with {len(values)} values")

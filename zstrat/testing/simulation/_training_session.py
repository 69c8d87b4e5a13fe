"""One session of a simulation: it trains, updates, reads, saves, and believes nothing.

What it learns it gives to the contract (`Training`).
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from zstrat.coordinator import until_settled
from zstrat.coordinator.unthreaded import Code, LoopCoordinator
from zstrat.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    PSUnavailableError,
    UnavailableError,
    WorkerLostError,
    ZstratError,
)
from zstrat.ps import Ref
from zstrat.variables import VariableSpec
from zstrat.wire import StoreEntry, UpdateOp

from ._contract import Saved, Scheduled, Training
from ._script import DENSE, ScriptedFunction, one_hot

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zstrat.coordinator import SessionCut
    from zstrat.ps import PsClient

    from ._scenario import Scenario
    from ._script import Scripts

OWN: Final = 16
"""Own updates of a session, at most."""
QUIET: Final = 1.0
"""Seconds that a program waits when all has healed, for zombies that wake up."""
PS_WAIT: Final = 20.0
WORKER_WAIT: Final = 15.0
"""Seconds that a session waits for a lost server, or for its last worker."""
LIVES: Final = 8
"""Programs that go on one after the other with the same variables, at most."""
PATIENCE: Final = 10.0
"""Seconds between two looks at a session that is broken."""

_PLACE: Final = np.int64


@final
@dataclass(frozen=True, slots=True)
class SessionContext:
    """What a session has of its program and of its run."""

    scenario: Scenario
    scripts: Scripts
    servers: Sequence[str]
    """Addresses of all that there are."""
    draw: Callable[[], float]
    """A number below 1."""
    new_number: Callable[[], int]
    """A number that no other start, session or snapshot has."""
    kill: Callable[[str, float], object]
    """Kills the server at an address, and starts it again so many seconds later."""
    healed_at: Callable[[], float]
    """When no fault will be left, as far as is known."""
    go_on: Callable[[Training, bool], int]
    """Told that the session is open, and whether it goes on with what another one has
    left; returns how many there were before it of its name."""


@final
class MemoryPoint:
    """Stands for a whole checkpoint (`zstrat.coordinator.RestorePoint`)."""

    def __init__(
        self, training: Training, path: str, saved: Saved, specs: Sequence[VariableSpec]
    ) -> None:
        self._training, self.path, self._saved = training, path, saved
        self._specs = specs
        self.variables = frozenset(spec.key for spec in specs)
        self.optimizers: frozenset[int] = frozenset()
        self.lacks: Sequence[str] = ()
        self.places: Mapping[int, Sequence[str]] = {}
        self.values: list[np.ndarray] = []

    async def check(self) -> None:
        """Does nothing: what is in memory is whole."""

    async def fill(self, client: PsClient) -> None:
        """Has the servers take all values."""
        for spec, value in zip(self._specs, self.values, strict=True):
            await client.store(spec.ps, [StoreEntry(spec.key, 0, "", 0)], [value])
        self._training.filled(self._saved)
        self._look()

    def _look(self) -> None:
        """The restore is over soon, or is not."""
        training = self._training
        if not training.look() and training.is_filling:
            asyncio.get_running_loop().call_later(1e-3, self._look)


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
        self._restored = _specs(400, "restored", (2,), "int64", count)
        self._updates: set[asyncio.Task[None]] = set()
        self._beside: asyncio.Task[Any] | None = None
        self._change: asyncio.Task[None] | None = None

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
        self._coordinator.coordinate(
            in_flight=self._scenario.in_flight, max_attempts=4, wait=WORKER_WAIT
        )
        if self._scenario.restores:
            await self._save()
        await self._train()
        await self._finish()

    async def _create(self) -> None:
        specs = (*self._marks, *self._own, *self._tables)
        if self._scenario.saves:
            specs += self._restored
        await self._coordinator.servers.create_variables(
            [(spec, np.zeros(spec.shape, spec.numpy_dtype)) for spec in specs]
        )
        self._training.has_created = True
        function = ScriptedFunction(
            self._training.number,
            self._marks,
            self._tables,
            self._scenario.by_rows,
            frozenset({self._first + place for place in self._scenario.fails}),
            _nobody,
            self._scenario.reads_ahead,
        )
        code = Code(b"%s of session %d" % (DENSE, self._training.number))
        self._context.scripts.add(code.code, function)
        self._call = self._coordinator.call("mark", code, _PLACE(0))

    async def _train(self) -> None:
        draw = self._context.draw
        for place in range(self._first, self._first + self._scenario.steps):
            await asyncio.sleep(-self._scenario.pace * math.log(1.0 - draw()))
            await self._schedule(place)
            if self._scenario.moves:
                self._change_soon(draw())
            if not self._scenario.only_steps:
                await self._something_else(draw())
        if self._beside is not None:
            await self._beside

    async def _something_else(self, chance: float) -> None:
        """Does what a program does besides training, now and then."""
        if self._scenario.saves and chance > 0.7:
            await (self._save() if chance > 0.85 else self._restore())
        elif chance < 0.25:
            self._update_soon()
        elif chance < 0.32:
            await self._look(partial(self._steadily, self._read))
        elif self._scenario.reads_beside:
            pass  # steps go on, whatever the servers do
        elif chance < 0.37:
            await self._join()
        elif chance < (0.45 if self._scenario.restores else 0.40):
            await self._save()

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
        if not isinstance(error, WorkerLostError | UnavailableError) and (
            "was to fail" not in str(error)
        ):
            raise error
        for place, step in self._training.steps.items():
            if step.fate == "open":
                self._training.broken(f"step {place} is open behind {error!r}")
        values = await self._steadily(self._read)
        self._training.freeze(values[: self._training.servers])

    def _look_at(self, error: ZstratError) -> None:
        """What may never be heard of where one server at a time is lost."""
        if self._scenario.is_guarded:
            self._training.broken(f"one server was lost, and there was {error!r}")

    def _update_soon(self) -> None:
        count = len(self._training.own)
        place = self._first // self._scenario.steps * OWN + count
        if count < OWN:
            self._training.own[place] = "open"
            task = asyncio.get_running_loop().create_task(
                self._update(place), name=f"own update {place}"
            )
            self._updates.add(task)

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
        return self._change is not None and not self._change.done()

    def _change_soon(self, chance: float) -> None:
        """Now and then, one change at a time; the program may think better of it."""
        often = 0.8 if self._scenario.only_moves else 0.2
        if self._change is not None and not self._change.done():
            if chance > 0.98:
                self._change.cancel()
        elif chance < often:
            loop = asyncio.get_running_loop()
            self._change = loop.create_task(self._changed(), name="change of servers")

    async def _changed(self) -> None:
        moves, draw = self._coordinator.cluster.moves, self._context.draw
        present = list(moves.addresses.values())
        away = [each for each in self._context.servers if each not in present]
        try:
            if away and draw() < 0.6:
                await moves.add(away[int(draw() * len(away))], None, PS_WAIT)
            elif draw() < 0.2:
                await moves.level(PS_WAIT)
            else:
                address = present[int(draw() * len(present))]
                await moves.vacate(address, 0.3 + 5.0 * draw())
                self._drained(address)
        except InvalidArgumentError as error:
            if "cannot be drained" not in str(error):
                raise
        except (DeadlineExceededError, UnavailableError, PSUnavailableError) as error:
            if isinstance(error, PSUnavailableError):
                self._look_at(error)

    def _drained(self, address: str) -> None:
        """Nothing is left there that anybody could lose."""
        replication = self._coordinator.cluster.replication
        assert replication is not None
        for store in replication.placement.stores:
            for copy in filter(None, (store.primary, store.backup)):
                process = replication.processes[copy.process]
                if process.address == address and process.is_closed:
                    self._training.broken(f"store {store.number} is in a drained ps")
        if self._context.draw() < 0.5:
            self._context.kill(address, 2.0 * self._context.draw())

    async def _save(self) -> None:
        """Saves a checkpoint. One that fails is none, where servers may be lost."""
        coordinator, training = self._coordinator, self._training
        if coordinator.cluster.outage_error is not None:
            return
        fills = training.fills
        specs = (*self._marks, *self._own, *self._tables)
        try:
            cut, values = await until_settled(
                [coordinator.cluster], partial(self._cut, specs)
            )
        except ZstratError as error:  # a lost server is reported by the next call, too
            if self._scenario.saves:
                self._look_at(error)
            return
        if training.fills != fills or training.is_filling:
            return
        count = training.servers
        marks, own = values[:count], values[count : 2 * count]
        lost, doubtful = frozenset(training.lost), frozenset(training.doubtful)
        saved = Saved(cut, marks, own, lost, doubtful)
        training.saved.append(saved)
        training.check_saved(saved)
        if (recovery := coordinator.cluster.recovery) is not None:
            point = MemoryPoint(training, f"{len(training.saved)}", saved, specs)
            point.values = values
            recovery.remember(point, cut, fills)

    async def _cut(
        self, specs: Sequence[VariableSpec]
    ) -> tuple[SessionCut, list[np.ndarray]]:
        """The values at one moment between two steps."""
        cluster, number = self._coordinator.cluster, self._context.new_number()
        holder, refs = object(), [Ref(spec.ps, spec.key) for spec in specs]
        try:
            cut = await cluster.pause.begin(holder)
            await cluster.client.pin(number, refs, [])
        finally:
            cluster.pause.end(holder)
        values = await self._pinned(cluster.client, number, specs)
        await cluster.client.release(number)
        return cut, values

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

    async def _pinned(
        self, client: PsClient, number: int, specs: Sequence[VariableSpec]
    ) -> list[np.ndarray]:
        """The values of a snapshot; training goes on meanwhile."""
        places = dict.fromkeys(range(self._training.servers), 0)
        values = []
        for spec in specs:
            place, places[spec.ps] = places[spec.ps], places[spec.ps] + 1
            await asyncio.sleep(self._scenario.delay)
            part = await client.read_snapshot(spec.ps, number, place, 0, spec.nbytes)
            values.append(part.view(spec.numpy_dtype).reshape(spec.shape))
        return values

    async def _finish(self) -> None:
        await self._join()
        for task in list(self._updates):
            await task
        if self._change is not None:
            await asyncio.wait([self._change])
            if not self._change.cancelled():
                self._change.result()
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
        while True:
            fills = training.fills
            values = await self._steadily(self._read)
            if self._scenario.by_rows:
                read = partial(self._coordinator.servers.read, self._tables)
                tables = await self._steadily(read)
            if training.fills == fills and not training.is_filling:
                break
        count = training.servers
        marks, own = values[:count], values[count:]
        training.check(marks, own)
        training.freeze(marks)
        # Rows and marks are pushed together.
        for table, mark in zip(tables, marks if tables else (), strict=True):
            if not np.array_equal(table[:, 0], table[:, 1]):
                self._training.broken(f"half of a row: {table}")
            if not np.array_equal(table[:, 0], mark):
                self._training.broken(f"rows {table[:, 0]}, and marks {mark}")


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

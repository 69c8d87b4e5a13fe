"""What a program does to what it makes late: each way there is to change a store.

One change at a time, and what comes of it goes to a `LateModel`. Where each store has a
second copy the process that serves it may be killed behind a change: it has to be there
all the same.
"""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias, final

import numpy as np

from zstrat.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    NotFoundError,
    RetryDiffersError,
    StaleSessionError,
    ZstratError,
)
from zstrat.initializers import constant
from zstrat.program import dump_code
from zstrat.ps import EagerRun, PsUpdate
from zstrat.variables import VariableSpec
from zstrat.wire import (
    InitialEntry,
    LoadEntry,
    MergeRule,
    RoundMember,
    RoundOrder,
    StepContribution,
    StoreEntry,
    UpdateOp,
)

from ._late_model import SHAPE, Held, World, made, updated
from ._rounds_model import optimizer_codes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping

    from zstrat.ps import PsClient

    from ._contract import Training
    from ._late_model import LateModel
    from ._loop_coordinator import LoopCoordinator

OPTIMIZER: Final = 1
"""Its number."""
MOST: Final = 40
"""Changes of one session: values stay exact."""

_FIRST_KEY: Final = 1000
_FIRST_PART: Final = 2**19
"""Eager steps of the program's own: numbers that no closure has."""
_LOADING: Final = 20.0
"""Seconds."""
_DEFECTS: Final = (
    NotFoundError,
    InvalidArgumentError,
    AlreadyExistsError,
    RetryDiffersError,
)
"""What no fault may bring about: what was made is not there, or is something else."""
_DENSE: Final = (UpdateOp.ASSIGN, UpdateOp.ADD, UpdateOp.SUB)
_ROWS: Final = (
    UpdateOp.SCATTER_ADD,
    UpdateOp.SCATTER_SUB,
    UpdateOp.SCATTER_MUL,
    UpdateOp.SCATTER_DIV,
    UpdateOp.SCATTER_MIN,
    UpdateOp.SCATTER_MAX,
    UpdateOp.SCATTER_UPDATE,
)
_GRADIENTS: Final = (UpdateOp.OPTIMIZE, UpdateOp.OPTIMIZE_ROWS)


_PushPart: TypeAlias = "Callable[[int, int], Awaitable[None]]"
"""By attempt and part."""


@final
class LateChanges:
    """The changes of one session.

    Args:
        draw: A number below 1.
        optimizes: An optimizer is among what is made.
        creates: Variables come and go; else all are there from the beginning.
        is_guarded: No change may fail.
        resumes: Programs go on with one another, and know of no rounds of others.
    """

    def __init__(
        self,
        coordinator: LoopCoordinator,
        training: Training,
        draw: Callable[[], float],
        *,
        optimizes: bool,
        creates: bool,
        is_guarded: bool,
        resumes: bool,
    ) -> None:
        self._creates = creates
        self._coordinator, self._training = coordinator, training
        self._draw, self._optimizes = draw, optimizes
        self._is_guarded = is_guarded
        self._knows_optimizer = False
        """This program has made it, or has found it."""
        self._count = self._rounds = 0
        """So many changes were made, and so many rounds closed."""
        self._claimed: tuple[_PushPart, Callable[[World], World], int] | None = None
        """Pushes parts of a step of which a second run has begun; what its end does,
        and on which server."""
        self.changed: int | None = None
        """The store of the last change."""
        work: list[Callable[[], Coroutine[Any, Any, None]]] = [
            self._store,
            *(partial(self._update, op) for op in (*_DENSE, *_ROWS)),
        ]
        if creates:
            work += [self._create, self._initialize, self._delete, self._withdraw]
            work += [self._push_parts]
        if optimizes:
            work += [self._write_slot, self._forget_slots]
            work += 2 * [partial(self._update, op) for op in _GRADIENTS]
        if optimizes and creates and not resumes:
            work.append(self._close_round)
        self.all: Final = tuple(work)
        """Each way to change a store."""

    @property
    def _model(self) -> LateModel:
        return self._training.late

    async def begin(self, count: int) -> None:
        """Makes what is there from the beginning: that many variables at least, and
        all that a program before has left."""
        for key in self._model.keys:
            spec = self.spec(key)

            def kept(world: World, key: int = key) -> World:
                return {key: made(_full(0)), **world}

            await self._do(kept, partial(self._create_one, spec, _full(0)), spec.ps)
        while len(self._model.keys) < count and not self._model.is_unsure:
            await self._create()
        if self._model.has_optimizer or (self._optimizes and not self._creates):
            await self._make_optimizer()

    async def one(self) -> None:
        """Makes one change, if it is known what is there."""
        if self._model.is_unsure or self._count >= MOST:
            return
        await self.end_parts()
        if len(self._model.keys) < 2:
            await self._create()
        elif self._optimizes and not self._knows_optimizer and self._draw() < 0.5:
            await self._make_optimizer()
        else:
            await self.all[int(self._draw() * len(self.all))]()

    async def look(self) -> World | None:
        """What is there now; None: it is not known what was made."""
        keys, servers = self._model.keys, self._coordinator.servers
        worlds = self._model.worlds
        if any(world.keys() != worlds[0].keys() for world in worlds):
            return None
        specs = [self.spec(key) for key in keys]
        if not specs:
            return {}
        values = await servers.read(specs)
        traces: list[np.ndarray] = [_full(0) for _ in keys]
        if self._knows_optimizer:
            for place, slots in enumerate(await servers.read_slots(OPTIMIZER, specs)):
                traces[place] = next(iter(slots.values()), traces[place])
        found = zip(keys, values, traces, strict=True)
        return {key: Held(value, trace) for key, value, trace in found}

    async def miss(self) -> None:
        """What was deleted is not there."""
        for key in sorted(self._model.gone)[-1:]:
            if self._model.is_unsure:
                return
            try:
                await self._coordinator.servers.read([self.spec(key)])
            except NotFoundError:
                continue
            self._training.broken(f"variable {key} was deleted, and is there")

    def spec(self, key: int) -> VariableSpec:
        """The late variable of that key."""
        ps = (key - _FIRST_KEY) % self._training.servers
        return VariableSpec(key, f"late{key}", SHAPE, "float32", ps)

    async def _do(
        self,
        change: Callable[[World], World],
        work: Callable[[], Awaitable[object]],
        store: int | None,
    ) -> None:
        """Asks for a change, and tells the model what came of it."""
        model, training = self._model, self._training
        training.look()
        fills, self._count = training.fills, self._count + 1
        model.begin(change)
        try:
            await work()
        except ZstratError as error:
            was_whole = training.fills == fills and not training.is_filling
            if self._is_guarded or (was_whole and isinstance(error, _DEFECTS)):
                training.broken(f"a late change {work} failed: {error!r}")
            model.failed()
        else:
            training.look()
            if training.fills == fills and not training.is_filling:
                model.done()
            else:
                model.failed()
            self.changed = store

    def _new(self) -> VariableSpec:
        key = _FIRST_KEY + self._model.next_key
        self._model.next_key += 1
        return self.spec(key)

    def _any(self) -> int:
        keys = self._model.keys
        return keys[int(self._draw() * len(keys))]

    def _number(self) -> int:
        return 1 + int(8 * self._draw())

    async def _create_one(self, spec: VariableSpec, value: np.ndarray) -> None:
        await self._coordinator.servers.create_variables([(spec, value)])

    async def _create(self) -> None:
        spec, value = self._new(), _full(self._number())
        change = partial(_with, spec.key, made(value))
        await self._do(change, partial(self._create_one, spec, value), spec.ps)

    async def _initialize(self) -> None:
        spec, number = self._new(), self._number()
        shape = list(SHAPE)
        entry = InitialEntry(
            spec.key, spec.name, True, False, spec.dtype, shape, shape, [0, 0]
        )
        code = dump_code(constant(number))
        work = partial(
            self._coordinator.servers.initialize_variables, [(spec, entry)], code
        )
        await self._do(partial(_with, spec.key, made(_full(number))), work, spec.ps)

    async def _update(self, op: UpdateOp) -> None:
        if op in _GRADIENTS and not self._knows_optimizer:
            await self._make_optimizer()
            if not self._knows_optimizer:
                return
        key = self._any()
        if op in _GRADIENTS:
            key = self._model.keys[0]
        spec, number = self.spec(key), float(self._number())
        if op in (UpdateOp.SCATTER_MUL, UpdateOp.SCATTER_DIV):
            number = 2.0
        arrays: tuple[np.ndarray, ...] = (_full(number),)
        if op in (*_ROWS, UpdateOp.OPTIMIZE_ROWS):
            first = int(self._draw() * 3)
            at = np.array([first, first + 1], np.int64)
            arrays = at, np.full((2, *SHAPE[1:]), number, np.float32)
        optimizer = OPTIMIZER if op in _GRADIENTS else 0
        work = partial(
            self._coordinator.servers.update, [(spec, op, optimizer, arrays)]
        )
        await self._do(partial(_updated, key, op, arrays), work, spec.ps)

    async def _close_round(self) -> None:
        """As a coordinator and two workers, which contribute to a round."""
        if not self._knows_optimizer:
            await self._make_optimizer()
        if not self._knows_optimizer:
            return
        key, arrays = self._model.keys[0], (_full(self._number()),)
        first = _FIRST_PART + 2**18 + 2 * self._rounds
        members = [RoundMember(step, 1, 0.5) for step in (first, first + 1)]
        order = RoundOrder(OPTIMIZER, self._rounds, MergeRule.SUM, members)
        update = PsUpdate(self.spec(key).ps, key, UpdateOp.OPTIMIZE, OPTIMIZER, arrays)

        async def close(client: PsClient) -> None:
            for step, attempt, weight in members:
                given = StepContribution(step, attempt, OPTIMIZER, 0, weight, False)
                await client.contribute([given], [update])
            await client.close_round(order, (), 0)

        self._rounds += 1
        change = partial(_updated, key, UpdateOp.OPTIMIZE, arrays)
        await self._do(change, partial(self._steadily, close), update.ps)

    async def _make_optimizer(self) -> None:
        """It changes no value."""
        model, servers = self._model, self._coordinator.servers
        model.has_optimizer = True

        async def make() -> None:
            await servers.create_optimizer(OPTIMIZER, "late", optimizer_codes()[0])
            await servers.bind_optimizer(OPTIMIZER, tree_of(model.keys[0], SHAPE))

        await self._do(dict, make, self.spec(model.keys[0]).ps)
        self._knows_optimizer = not model.is_unsure

    async def _store(self) -> None:
        """As who restores by hand."""
        key, value = self._any(), _full(self._number())
        entry, ps = StoreEntry(key, 0, "", 0), self.spec(key).ps
        work = partial(
            self._steadily, lambda client: client.store(ps, [entry], [value])
        )
        await self._do(partial(_valued, key, value), work, ps)

    async def _write_slot(self) -> None:
        if not self._knows_optimizer:
            return
        key, trace = self._model.keys[0], _full(self._number())
        spec = self.spec(key)
        (slots,) = await self._coordinator.servers.read_slots(OPTIMIZER, [spec])
        if slots:
            (leaf,) = slots
            write = self._coordinator.servers.write_slot
            work = partial(write, OPTIMIZER, spec, leaf, trace)
            await self._do(partial(_traced, key, trace), work, spec.ps)

    async def _forget_slots(self) -> None:
        if not self._knows_optimizer:
            return
        key = self._model.keys[0]
        entry, ps = LoadEntry(key, OPTIMIZER, "", "", "", 0, 0, 0), self.spec(key).ps
        deadline = asyncio.get_running_loop().time() + _LOADING

        async def forget(client: PsClient) -> None:
            await client.load(ps, [entry], deadline=deadline)

        work = partial(self._steadily, forget)
        await self._do(partial(_traced, key, _full(0)), work, ps)

    async def _delete(self) -> None:
        keys = self._model.keys
        if len(keys) > 2:  # the optimizer has the first
            key = keys[1 + int(self._draw() * (len(keys) - 1))]
            spec = self.spec(key)
            work = partial(self._coordinator.servers.delete_variables, [spec])
            await self._do(partial(_without, key), work, spec.ps)
            if not self._model.is_unsure:
                self._model.gone.add(key)
            await self.miss()

    async def _withdraw(self) -> None:
        """As behind a creation that has failed: its numbers are given again. A program
        that is killed before leaves the variable to the next one."""
        spec, value, servers = self._new(), _full(9), self._coordinator.servers

        async def create() -> None:
            await self._create_one(spec, value)
            await servers.read([spec])

        await self._do(partial(_with, spec.key, made(value)), create, spec.ps)
        if not self._model.is_unsure:
            withdraw = partial(servers.withdraw, [spec], [])
            await self._do(partial(_without, spec.key), withdraw, spec.ps)
        if not self._model.is_unsure:
            self._model.next_key -= 1
            await self._create()

    async def _push_parts(self) -> None:
        """As an eager step whose second run has begun, when its first one had pushed a
        part; `end_parts` ends it."""
        key, value = self._any(), _full(self._number())
        ps = self.spec(key).ps
        step = _FIRST_PART + 100 * self._training.number + self._count
        update = [PsUpdate(ps, key, UpdateOp.ADD, 0, (value,))]

        async def push(attempt: int, part: int) -> None:
            run, names = EagerRun(step, attempt, 0), [f"part {part}"]
            await self._steadily(
                lambda client: client.push_part(run, part, names, update)
            )

        async def claim() -> None:
            applied: Mapping[int, object] = {}

            async def ask(client: PsClient) -> None:
                nonlocal applied
                applied = await client.applied_parts(EagerRun(step, 2, 0))

            await self._steadily(ask)
            if list(applied) != [0]:
                self._training.broken(f"part 0 was applied, and {applied} are known")

        add = partial(_updated, key, UpdateOp.ADD, (value,))
        await self._do(add, partial(push, 1, 0), ps)
        if not self._model.is_unsure:
            await self._do(dict, claim, ps)
            self._claimed = push, add, ps

    async def end_parts(self) -> None:
        """The first run of the eager step goes on, in vain, and the second one ends
        it."""
        claimed, self._claimed = self._claimed, None
        if claimed is None or self._model.is_unsure:
            return
        push, add, ps = claimed
        try:
            await push(1, 2)
        except StaleSessionError:
            pass
        except ZstratError:  # nobody is there who could say so
            if self._is_guarded:
                raise
            return
        else:
            self._training.broken("the first run of a step pushed behind the second")

        async def end() -> None:
            await push(2, 0)
            await push(2, 1)

        await self._do(add, end, ps)

    async def _steadily(self, work: Callable[[PsClient], Awaitable[object]]) -> None:
        """Of what may be asked twice, as `ParameterServers` asks."""
        servers = self._coordinator.servers

        async def ask() -> None:
            await work(servers.client)

        await self._coordinator.cluster.through(ask)


def _full(number: float) -> np.ndarray:
    return np.full(SHAPE, number, np.float32)


def _with(key: int, held: Held, world: World) -> World:
    return {**world, key: held}


def _without(key: int, world: World) -> World:
    return {other: held for other, held in world.items() if other != key}


def _updated(
    key: int, op: UpdateOp, arrays: tuple[np.ndarray, ...], world: World
) -> World:
    return {**world, key: updated(world[key], op, arrays)}


def _valued(key: int, value: np.ndarray, world: World) -> World:
    return {**world, key: world[key]._replace(value=value)}


def _traced(key: int, trace: np.ndarray, world: World) -> World:
    return {**world, key: world[key]._replace(trace=trace)}


def tree_of(key: int, shape: tuple[int, ...]) -> bytes:
    """The optimizer's tree as servers get it, which has one variable, as
    `zstrat.optimizers.Binding.encoded` makes it."""
    kind = [list(shape), "float32"]
    told = {
        "structure": ["d", ["late"], [0]],
        "kinds": [kind],
        "gradients": ["float32"],
        "further": ["d", [], []],
        "further_kinds": [],
        "wide": False,
        "early": False,
        "grows": False,
        "random": ["threefry2x32", True],
        "keys": [[key]],
        "cut": {"slots": [["['trace']"]], "operands": [], "uses": [[]]},
    }
    return json.dumps(told).encode()

"""A parameter server with an optimizer that has rounds, and what numpy makes of one."""

import asyncio
import functools
import operator

import numpy as np
import optax
from ps_callers import SESSION, caller
from ps_trees import message, of_values

from zstrat.config import Settings
from zstrat.ps import PsService
from zstrat.wire import (
    CloseRound,
    Contribute,
    CreateOptimizer,
    CreateVariables,
    Done,
    Job,
    MergeRule,
    OpenSession,
    Pull,
    PullMerged,
    PullRound,
    Read,
    RoundMember,
    RoundNumber,
    RoundOrder,
    StepContribution,
    Update,
    UpdateOp,
    VariableEntry,
)

RULES = {"mean": MergeRule.MEAN, "sum": MergeRule.SUM, "rda": MergeRule.RDA}


def contribution(step, attempt=1, optimizer=1):
    return StepContribution(step, attempt, optimizer, 0, 1.0, coupled=False)


def contribute(step, gradients, attempt=1, optimizer=1):
    """Gradients by key: an array, or indices and rows."""
    updates, arrays = [], []
    for key, given in gradients.items():
        parts = given if isinstance(given, tuple) else (given,)
        op = UpdateOp.OPTIMIZE if len(parts) == 1 else UpdateOp.OPTIMIZE_ROWS
        updates.append(Update(key, int(op), optimizer, len(parts)))
        arrays += parts
    return Contribute(
        SESSION, [contribution(step, attempt, optimizer)], updates, tuple(arrays)
    )


def members(*steps, attempt=1):
    """Of weight 1; or ``(step, weight)``."""
    pairs = [step if isinstance(step, tuple) else (step, 1.0) for step in steps]
    return [RoundMember(step, attempt, weight) for step, weight in pairs]


def close(number, named, *, rule="mean", kept=(), over=0, optimizer=1, operands=()):
    order = RoundOrder(optimizer, number, int(RULES[rule]), named)
    return CloseRound(SESSION, order, [*kept], over, operands)


def merged(number, named, *, rule="mean", optimizer=1):
    order = RoundOrder(optimizer, number, int(RULES[rule]), named)
    return PullMerged(SESSION, order, False)


def after(number, *keys, optimizer=1):
    """Reads variables when so many rounds are closed."""
    reads = [Read(key, -1) for key in keys]
    return PullRound(SESSION, [RoundNumber(optimizer, number)], reads, [], ())


def create_messages(values, transformation, optimizer=1, gradients=None):
    """What makes variables by key, and their optimizer."""
    entries = [VariableEntry(key, f"v{key}", True, False) for key in values]
    told = of_values(transformation, values, gradients)
    return [
        CreateVariables(SESSION, entries, tuple(values.values())),
        CreateOptimizer(SESSION, optimizer, "mine", b"mine"),
        message(SESSION, optimizer, told),
    ]


class Server:
    """A parameter server in this process."""

    def __init__(self, transformation=None):
        self.transformation = transformation or optax.sgd(1.0)
        self.service = PsService(
            load_code=lambda _: self.transformation,
            settings=Settings(),
            task="/job:ps/task:0",
        )
        self.chief, self.worker = caller(), caller(Job.WORKER, 8)
        self.service.handle(self.chief, OpenSession(SESSION, 0, 1, []))

    async def create(self, values, gradients=None):
        for each in create_messages(values, self.transformation, 1, gradients):
            assert await self.ask(each) == Done()

    async def ask(self, asked, peer=None):
        answer = self.service.handle(peer or self.chief, asked)
        if hasattr(answer, "__await__"):
            async with asyncio.timeout(60):
                return await answer
        return answer

    def later(self, asked):
        """Asks as a worker."""
        return asyncio.ensure_future(self.ask(asked, self.worker))

    async def contribute(self, step, gradients, attempt=1):
        asked = contribute(step, gradients, attempt)
        assert await self.ask(asked, self.worker) == Done()

    async def merged(self, *args, **kwargs):
        """Merged gradients by key."""
        answer = await self.ask(merged(*args, **kwargs), self.worker)
        arrays, found = iter(answer.arrays), {}
        for update in answer.updates:
            parts = tuple([next(arrays) for _ in range(update.operands)])
            found[update.key] = parts if len(parts) == 2 else parts[0]
        return found

    async def value(self, key=0):
        return (await self.ask(Pull(SESSION, [Read(key, -1)]))).arrays[0]

    async def versions(self, *keys):
        reads = [Read(key, -1) for key in keys]
        return (await self.ask(Pull(SESSION, reads))).versions

    async def waiting(self):
        """Number of contributions that wait."""
        return self.service.statistics()["contributions"]


def dense(given, shape):
    """A gradient of rows as an array of the variable's shape."""
    if not isinstance(given, tuple):
        return np.asarray(given)
    indices, rows = given
    array = np.zeros(shape, rows.dtype if rows.dtype.itemsize > 2 else "f4")
    np.add.at(array, indices, rows.astype(array.dtype))
    return array


def merge(rule, weighted, shape, wide):
    """What pairs of weight and gradient become, added in their order in ``wide``."""
    pairs = [(w, dense(g, shape).astype(wide)) for w, g in weighted]
    total = sum(w for w, _ in pairs)
    if rule == "rda" and not any(isinstance(g, tuple) for _, g in weighted):
        norms = [np.linalg.norm(g) for _, g in pairs]
        ways = [w * g / n for (w, g), n in zip(pairs, norms, strict=True) if n]
        if not ways:
            return np.zeros(shape, wide)
        way = functools.reduce(operator.add, ways)
        size = sum(w * n for (w, _), n in zip(pairs, norms, strict=True)) / total
        return way / np.linalg.norm(way) * size
    summed = functools.reduce(operator.add, [wide(w) * g for w, g in pairs])
    return summed if rule == "sum" else summed / wide(total)

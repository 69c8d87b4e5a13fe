"""Rounds of a simulation: which optimizers have them, and what a round makes of its
contributions.

The law of the file: as that of `_contract`, nothing here asks the system what is right.
Worlds are computed with numpy, from the gradients that were contributed.

A gradient of a step has four numbers: one, so that each round moves the first number of
its variable; that number as the step has read it, which says from which round; one that
few other runs have; and the weight of the step. Where gradients are of rows, half of
the steps lack the third number, which is NaN here.
"""

from __future__ import annotations

import random
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from unittest import mock
from uuid import UUID

import numpy as np

from zstrat.program import dump_code
from zstrat.variables import Rounds, VariableSpec
from zstrat.wire import MergeRule, UpdateOp

from ._late_model import Momentum, made, updated

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ._late_model import World

FIRST: Final = 11
"""The number of the first optimizer that has rounds."""
COUNT: Final = 4
"""Numbers of a gradient."""
WEIGHTS: Final = (1.0, 0.5, 2.0, 0.0)
"""Of steps, in turns."""

_FIRST_KEY: Final = 600


class DrawnRounds(NamedTuple):
    """The rounds of one optimizer."""

    number: int
    """Of the optimizer."""
    policy: Rounds
    is_coupled: bool
    """Whether the optimizer computes an operand from all gradients of a round."""
    of_rows: bool
    """Whether its gradients are of rows."""

    def specs(self, stores: int) -> tuple[VariableSpec, ...]:
        """Its variables, one on each store."""
        base = _FIRST_KEY + 100 * (self.number - FIRST)
        return tuple(
            [
                VariableSpec(base + ps, f"round{base + ps}", (COUNT,), "float32", ps)
                for ps in range(stores)
            ]
        )

    def zeros(self, stores: int) -> World:
        """What is there before the first round."""
        zero = np.zeros(COUNT, np.float32)
        return {spec.key: made(zero) for spec in self.specs(stores)}

    @property
    def code(self) -> bytes:
        """The optimizer as servers get it."""
        return optimizer_codes()[self.is_coupled]

    def tree(self, stores: int) -> bytes:
        """Its tree as servers get it."""
        return _tree(tuple([s.key for s in self.specs(stores)]), self.is_coupled)


def drawn_rounds(
    seed: int, workers: int, *, is_guarded: bool
) -> tuple[DrawnRounds, ...]:
    """The rounds of a seed; none in most of them.

    Args:
        is_guarded: No error may reach the program, so no round may need a worker that
            is lost.
    """
    chance = random.Random(f"rounds {seed}")
    if chance.random() >= 0.3:
        return ()
    found = []
    for number in range(FIRST, FIRST + chance.choice([1, 1, 2])):
        size = chance.choice([None, None, 1, *range(1, workers + 1)])
        backup = chance.choice([0, 0, 1, 1, 2])
        if size is not None:
            backup = min(backup, size - 1)
        if size is not None and is_guarded and size - backup > 1:
            size = None
        policy = Rounds(
            workers=size,
            backup=backup,
            grace=chance.choice([0.0, 0.02, 0.3]),
            late=chance.choice(["drop", "next"]),
            merge=chance.choice(["mean", "mean", "sum", "sum", "rda"]),
            weights=weight_of if chance.random() < 0.4 else None,
        )
        is_coupled = chance.random() < 0.35
        of_rows = random.Random(f"rows {seed} {number}").random() < 0.4
        found.append(DrawnRounds(number, policy, is_coupled, of_rows))
    return tuple(found)


def weight_of(result: np.ndarray) -> float:
    """The weight of a step, by its result."""
    return WEIGHTS[int(np.ravel(result)[0]) % len(WEIGHTS)]


def gradient_of(
    drawn: DrawnRounds, place: int, attempt: int, store: int, read: np.ndarray
) -> np.ndarray:
    """What a run of a step contributes to a variable that it has read."""
    mark = (37 * place + 11 * attempt + 5 * store) % 64 / 8
    weight = 1.0 if drawn.policy.weights is None else weight_of(np.array(place))
    return np.array([1.0, read[0], mark, weight], np.float32)


def update_of(
    drawn: DrawnRounds, place: int, gradient: np.ndarray
) -> tuple[UpdateOp, tuple[np.ndarray, ...]]:
    """A gradient as a run of a step contributes it."""
    if not drawn.of_rows:
        return UpdateOp.OPTIMIZE, (gradient,)
    at = np.array([3, 0, 1, 2] if place % 2 else [1, 3, 0])
    return UpdateOp.OPTIMIZE_ROWS, (at, gradient[at])


def whole(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """A gradient that was contributed, with NaN for rows that it lacks."""
    if len(arrays) == 1:
        return np.array(arrays[0])
    gradient = np.full(COUNT, np.nan, np.float32)
    gradient[arrays[0]] = arrays[1]
    return gradient


def factor(gradients: Iterable[np.ndarray]) -> np.float32:
    """The operand of a coupled optimizer: by it each gradient is multiplied."""
    total = sum(float(np.nansum(gradient)) for gradient in gradients)
    return np.float32(1.0 + 1.0 / (1.0 + total * total))


def world_after(
    drawn: DrawnRounds,
    world: World,
    members: Sequence[tuple[float, Mapping[int, np.ndarray]]],
) -> World:
    """What is there when a round with these members, each with its weight and its
    gradients by key, was applied once."""
    total = sum(weight for weight, _ in members)
    counted = [member for member in members if member[0]]
    if not counted:
        return world
    rule = drawn.policy.rule
    if drawn.of_rows and rule is MergeRule.RDA:
        rule = MergeRule.MEAN
    merged = {
        key: _merged(rule, [(w, g[key]) for w, g in counted], total) for key in world
    }
    by = factor(merged.values()) if drawn.is_coupled else 1.0
    after = {}
    for key, held in world.items():
        moved = (by * merged[key]).astype(np.float32)
        at = np.flatnonzero(~np.isnan(moved))  # all, unless it is of rows
        after[key] = updated(held, UpdateOp.OPTIMIZE_ROWS, [at, moved[at]])
    return after


def _merged(
    rule: MergeRule, found: Sequence[tuple[float, np.ndarray]], total: float
) -> np.ndarray:
    missing = np.all([np.isnan(gradient) for _, gradient in found], axis=0)
    wide = [(w, np.nan_to_num(gradient.astype(np.float64))) for w, gradient in found]
    if rule is MergeRule.RDA:
        norms = [float(np.linalg.norm(gradient)) for _, gradient in wide]
        pairs = list(zip(wide, norms, strict=True))
        length = sum(weight * norm for (weight, _), norm in pairs)
        direction = sum(weight * gradient / norm for (weight, gradient), norm in pairs)
        return np.asarray(direction * (length / total / np.linalg.norm(direction)))
    summed = sum(weight * gradient for weight, gradient in wide)
    merged = np.asarray(summed if rule is MergeRule.SUM else summed / total)
    return np.where(missing, np.nan, merged)


class CoupledMomentum:
    """`Momentum` of gradients that are multiplied by a number made of all of them."""

    def init(self, params: Mapping[str, Any]) -> object:
        return Momentum().init(params)

    def update(
        self,
        gradients: Mapping[str, Any],
        state: Mapping[str, Mapping[str, Any]],
        params: object = None,
    ) -> tuple[object, object]:
        total = sum(gradient.sum() for gradient in gradients.values())
        by = 1.0 + 1.0 / (1.0 + total * total)
        scaled = {name: gradient * by for name, gradient in gradients.items()}
        return Momentum().update(scaled, state, params)


@cache
def optimizer_codes() -> tuple[bytes, bytes]:
    """`Momentum` and `CoupledMomentum`, pickled: alike in all processes, as their
    classes get no random numbers."""
    numbers = [UUID(int=1), UUID(int=2)]
    with mock.patch("uuid.uuid4", side_effect=numbers):
        return dump_code(Momentum()), dump_code(CoupledMomentum())


@cache
def _tree(keys: tuple[int, ...], is_coupled: bool) -> bytes:
    import jax

    from zstrat.optimizers import Binding, TreeRule, TreeStructure, checked

    names = [f"v{key}" for key in keys]
    make: Any = jax.ShapeDtypeStruct
    kind = make((COUNT,), np.dtype(np.float32))
    rule = TreeRule(
        "rounds",
        checked(CoupledMomentum() if is_coupled else Momentum()),
        TreeStructure(jax.tree.structure(dict.fromkeys(names, 0))),
        (kind,) * len(keys),
        (np.dtype(np.float32),) * len(keys),
    )
    return Binding(rule, tuple([(key,) for key in keys])).encoded()

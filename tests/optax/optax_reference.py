"""What plain optax does with the model, and how far something else is from it.

Nothing of zstrat is imported here: the trajectory is `jax.jit` of ``update`` on the
whole tree, and `optax.apply_updates`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_model as model
from optax_catalogue import built
from optax_recipes import FUNCTIONS, Case
from optax_rows import trained_by_rows
from optax_trajectory import Moment, Trajectory, plain

TOLERANCES = {"float64": 1e-9, "float32": 1e-5, "bfloat16": 2.0**-7}
"""Of the largest element of a leaf. The last one is the distance of two neighbours of
bfloat16, for the smallest of the numbers that share its exponent."""

AXES = {"no scalar": 1, "matrices": 2}
"""How many axes the leaves of a smaller tree have at least."""


@dataclass(frozen=True)
class Difference:
    """The first leaf that is wrong, at the first step at which one is."""

    path: str
    step: int
    largest: float
    expected: str
    got: str

    def __str__(self) -> str:
        return (
            f"leaf {self.path}, step {self.step}: differs by {self.largest:.3g} of the "
            f"largest element; expected {self.expected}, got {self.got}"
        )


def start_of(case: Case, dtype: str) -> Any:
    """The first values of the tree that the case trains."""
    tree = model.cut(model.parameters(dtype), AXES.get(case.tree, 0))
    if case.tree == "lookahead":
        return optax.LookaheadParams(fast=tree, slow=jax.tree.map(np.copy, tree))
    return tree


def trajectory(case: Case, dtype: str) -> Trajectory:
    """All steps of plain optax. What it refuses on this tree says so in ``failed``."""
    start = start_of(case, dtype)
    try:
        if case.gradients == "rows":
            return trained_by_rows(built(case), dtype, start)
        return _trained(case, dtype, start)
    except (TypeError, ValueError) as error:
        return Trajectory(start, failed=f"{type(error).__name__}: {error}")


def couples(case: Case, dtype: str, known: Trajectory) -> bool:
    """Whether other gradients of the head move the leaves that are not in it."""

    def louder(path: Any, leaf: Any) -> Any:
        return leaf * 2 if "head" in model.path_of(path) else leaf

    if case.gradients == "rows":
        return "clip" in case.name
    other = _trained(case, dtype, known.start, louder)
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(known.moments[-1].values),
        jax.tree.leaves(other.moments[-1].values),
        strict=True,
    )
    return any(
        "head" not in model.path_of(path) and not np.array_equal(one, two)
        for (path, one), two in pairs
    )


def _trained(
    case: Case, dtype: str, start: Any, change: Any = lambda path, leaf: leaf
) -> Trajectory:
    transformation = optax.with_extra_args_support(built(case))
    functions = {name: FUNCTIONS[name] for name in case.extra if name in FUNCTIONS}

    @jax.jit
    def train(gradients: Any, state: Any, values: Any, extra: Any) -> Any:
        updates, state = transformation.update(
            gradients, state, values, **extra, **functions
        )
        return optax.apply_updates(values, updates), state

    values = jax.tree.map(jnp.asarray, start)
    state = jax.jit(transformation.init)(values)
    moments = []
    for step in range(model.STEPS):
        gradients = jax.tree_util.tree_map_with_path(
            change, gradients_of(case, dtype, step, values)
        )
        extra = _arrays(case, dtype, step, values, gradients)
        values, state = train(gradients, state, values, extra)
        moments.append(Moment(gradients, extra, jax.tree.map(np.asarray, values)))
    return Trajectory(start, moments, jax.tree.map(plain, state))


def gradients_of(case: Case, dtype: str, step: int, values: Any) -> Any:
    """What plain optax gets at a step, as numpy arrays."""
    if case.gradients == "of the value":
        return jax.tree.map(np.asarray, _slopes(values))
    kind = {
        "plain": model.gradients,
        "spoiled": model.spoiled,
        "of examples": model.of_examples,
    }[case.gradients]
    return model.cut(kind(step, dtype), AXES.get(case.tree, 0))


@jax.jit
def _slopes(values: Any) -> Any:
    return jax.grad(model.objective)(values)


def _arrays(case: Case, dtype: str, step: int, values: Any, gradients: Any) -> Any:
    found: dict[str, Any] = {}
    if "value" in case.extra:
        known = case.gradients == "of the value"
        found["value"] = np.asarray(
            model.objective(values) if known else model.value(step, dtype)
        )
    if "grad" in case.extra:
        found["grad"] = gradients
    return found


def difference(
    expected: Any, got: Any, step: int, *, rounds: bool = False
) -> Difference | None:
    """The leaf of two trees that differs most beyond what its dtype allows; ``rounds``:
    float32 as much as bfloat16."""
    wanted = jax.tree_util.tree_leaves_with_path(expected)
    found = jax.tree.leaves(got)
    if len(wanted) != len(found):
        words = f"{len(wanted)} leaves", f"{len(found)}"
        return Difference("(the tree)", step, np.inf, *words)
    worst: Difference | None = None
    for (path, leaf), other in zip(wanted, found, strict=True):
        one = _difference(model.path_of(path), step, leaf, other, rounds)
        if one is not None and (worst is None or one.largest > worst.largest):
            worst = one
    return worst


def _difference(
    path: str, step: int, wanted: Any, got: Any, rounds: bool
) -> Difference | None:
    wanted, got = plain(wanted), plain(got)
    if wanted.shape != got.shape or wanted.dtype != got.dtype:
        kinds = [f"{x.dtype}{list(x.shape)}" for x in (wanted, got)]
        return Difference(path, step, np.inf, *kinds)
    if wanted.size == 0:
        return None
    name = wanted.dtype.name
    name = "bfloat16" if rounds and name == "float32" else name
    allowed = TOLERANCES.get(name, 0.0)
    a, b = (np.atleast_1d(x).astype(_wide(x.dtype)) for x in (wanted, got))
    same = (a == b) | ((a != a) & (b != b))
    largest = np.max(np.abs(a), where=np.isfinite(a), initial=0.0)
    with np.errstate(invalid="ignore"):
        apart = np.where(same, 0.0, np.abs(a - b) / (largest or 1.0))
    apart = np.where(np.isnan(apart), np.inf, apart)
    place = np.unravel_index(np.argmax(apart), apart.shape)
    if apart[place] <= allowed:
        return None
    return Difference(path, step, float(apart[place]), f"{a[place]}", f"{b[place]}")


def _wide(dtype: Any) -> Any:
    return np.complex128 if np.issubdtype(dtype, np.complexfloating) else np.float64

"""The model that every transformation trains: a nested tree of tiny leaves, and what
each step brings, all from the number of the step.

An embedding table, two matrices, a vector and a scalar. In float64 all leaves are, and
programs agree with plain optax to the last few bits; the mixed tree has float32 and
bfloat16 leaves.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

STEPS = 13
"""Past accumulation over 4 and 8 steps, past a schedule's boundary at 8, past 10."""

SPOILED = 5
"""The step whose gradient is not finite, where a program asks for one."""

EXAMPLES = 8
"""The examples of a batch, for what takes a gradient of each: as many
for each replica, wherever it runs."""

SHAPES = {
    "embed": {"table": (6, 4)},
    "head": {"kernel": (6, 2), "scale": ()},
    "layer": {"bias": (6,), "kernel": (4, 6)},
}

BFLOAT16 = ("head/kernel", "layer/bias")

DTYPES = ("float64", "mixed")


def schedule(first: float = 0.1, then: float = 0.03) -> Any:
    """Two constants, joined where a probe of a few steps does not look."""
    parts = [optax.constant_schedule(first), optax.constant_schedule(then)]
    return optax.join_schedules(parts, [8])


def path_of(path: Any) -> str:
    """The path of a leaf as people write it: ``layer/kernel``."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def by_path(choose: Any) -> Any:
    """A function of a tree: what ``choose`` says of each leaf's path, and the leaf."""
    return lambda tree: jax.tree_util.tree_map_with_path(
        lambda path, leaf: choose(path_of(path), leaf), tree
    )


kernels = by_path(lambda path, leaf: "kernel" in path)
"""A mask: all matrices but the table."""

tables = by_path(lambda path, leaf: path.startswith("embed"))
"""A mask: the table alone."""


def parts(frozen: str = "frozen", slow: str = "slow", rest: str = "rest") -> Any:
    """Labels: the table, the head, and all others."""
    labels = {"embed": frozen, "head": slow}
    return by_path(lambda path, leaf: labels.get(path.split("/", 1)[0], rest))


def cut(tree: Any, axes: int) -> Any:
    """Without the leaves that have fewer axes."""
    return {
        part: {name: leaf for name, leaf in leaves.items() if leaf.ndim >= axes}
        for part, leaves in tree.items()
        if any(leaf.ndim >= axes for leaf in leaves.values())
    }


def parameters(dtype: str) -> Any:
    """The first values, as numpy arrays; ``dtype`` is one of `DTYPES`."""
    return _drawn(100, dtype, spread=1.0)


def gradients(step: int, dtype: str) -> Any:
    return _drawn(step, dtype, spread=0.3)


def spoiled(step: int, dtype: str) -> Any:
    """`gradients`, but for one step in which one leaf has an inf and another a nan."""
    tree = gradients(step, dtype)
    if step == SPOILED:
        tree["layer"]["bias"] = np.where(
            np.arange(6) == 2, np.nan, tree["layer"]["bias"]
        ).astype(tree["layer"]["bias"].dtype)
        tree["embed"]["table"][1, 1] = np.inf
    return tree


def of_examples(step: int, dtype: str) -> Any:
    """A gradient of each example, along a first axis."""
    trees = [_drawn(1000 + EXAMPLES * step + n, dtype, 0.3) for n in range(EXAMPLES)]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


class Rows(NamedTuple):
    """A gradient of some rows of a table; an index that is there twice counts twice."""

    values: Any
    indices: Any


def rows(step: int, dtype: str) -> Any:
    """`gradients`, but of the table only five rows, and never five different ones."""
    tree = gradients(step, dtype)
    table = tree["embed"]["table"]
    indices = np.random.default_rng(2000 + step).integers(0, len(table), 5)
    indices[4] = indices[step % 4]
    values = _drawn(3000 + step, dtype, 0.3)["embed"]["table"][:5]
    return {**tree, "embed": {"table": Rows(values, indices)}}


def value(step: int, dtype: str) -> Any:
    """A loss that falls for three steps and then stands still."""
    kind = np.float64 if dtype == "float64" else np.float32
    return kind(max(1.0, 3.0 - step))


def objective(tree: Any) -> Any:
    """A loss of the values: a bowl with another slope and bottom for each leaf."""
    total = 0.0
    for n, leaf in enumerate(jax.tree.leaves(tree)):
        wide = leaf if leaf.dtype == jnp.float64 else leaf.astype(jnp.float32)
        total = total + 0.25 * (n + 1) * jnp.sum((wide - 0.1 * n) ** 2)
    return total


def _drawn(seed: int, dtype: str, spread: float) -> Any:
    rng = np.random.default_rng(seed)
    found: dict[str, Any] = {}
    for part, leaves in SHAPES.items():
        found[part] = {}
        for name, shape in leaves.items():
            path = f"{part}/{name}"
            array = rng.normal(size=shape) * spread
            found[part][name] = np.asarray(array, _dtype_of(path, dtype))
    return found


def _dtype_of(path: str, dtype: str) -> Any:
    if dtype == "float64":
        return np.dtype(np.float64)
    return jnp.dtype(jnp.bfloat16 if path in BFLOAT16 else jnp.float32)

"""What must a transformation see at a time? Asked once, when it is registered.

A parameter server applies an optimizer to one variable, or to a part of one, and not to
the tree that the user has in mind. That is the same thing for most of optax, and a
different algorithm for the rest: a global norm, a trust ratio, factored moments. Nobody
can tell from the code, so it is tried: a few steps on two arrays together, on each
alone, and on the halves of each. The gradients of the two differ by orders of
magnitude, so that any shared norm shows; they keep a direction, so that an estimate of
the distance shows; and the last one holds an infinity, so that "skip what is not
finite" shows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import jax
import jax.extend.core
import numpy as np

from zstrat.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ._layouts import Transformation

STEPS: Final = 6
"""Enough for algorithms that estimate their step size to begin to move."""

SHAPES: Final = {"matrix": (256, 128), "vector": (6,)}
"""Halves of the matrix have 128 rows: adafactor factors its moments from there on."""

SCALES: Final = {"matrix": 30.0, "vector": 0.01}

TOLERANCE: Final = 1e-3
"""Relative to the largest element: algorithms differ by tenths, XLA rounds by 1e-6."""


def probe(name: str, transformation: Transformation) -> bool:
    """Tries a transformation on arrays together, alone and halved. Cost: about 1 s.

    Returns:
        Whether it may be applied to parts of a variable along its first axis.

    Raises:
        InvalidArgumentError: It cannot be applied to one variable at a time, or it
            calls back into Python, which a parameter server does not do.
    """
    try:
        together, alone, halves = _run(name, transformation)
    except InvalidArgumentError:
        raise
    except Exception as error:  # goes to the caller, with what was tried
        raise InvalidArgumentError(
            f"optimizer {name!r} cannot be applied to one variable at a time, given "
            f"its gradient and value: {type(error).__name__}: {error}"
        ) from error
    if not _agree(together, alone):
        raise InvalidArgumentError(
            f"optimizer {name!r} mixes variables (a norm over all of them, a common "
            "step size, a common test), and a parameter server sees one variable at a "
            "time: apply that part to the gradients in the step function, before "
            "apply_gradients, and register the rest. For clip_by_global_norm: "
            "clip = optax.clip_by_global_norm(c); "
            "grads, _ = clip.update(grads, clip.init(grads))"
        )
    return _agree(alone, halves)


Trajectory = list[dict[str, np.ndarray]]
"""The updates of each step."""


def _run(name: str, transformation: Transformation) -> tuple[Trajectory, ...]:
    """One compiled step of all the variants side by side, called a few times."""
    rng = np.random.default_rng(0)
    values = {k: rng.normal(size=s).astype(np.float32) for k, s in SHAPES.items()}
    directions = {k: 3 * rng.normal(size=s) for k, s in SHAPES.items()}
    variants = _variants(values)

    def step(params: Any, states: Any, grads: Any) -> Any:
        pairs = [
            transformation.update(g, s, p)
            for p, s, g in zip(params, states, grads, strict=True)
        ]
        updates, states = [u for u, _ in pairs], [s for _, s in pairs]
        moved = [
            jax.tree.map(lambda v, u: (v + u).astype(v.dtype), p, u)
            for p, u in zip(params, updates, strict=True)
        ]
        return moved, states, updates

    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        params: Any = variants
        states = jax.jit(lambda vs: [transformation.init(v) for v in vs])(variants)
        _refuse_callbacks(name, jax.make_jaxpr(step)(params, states, variants).jaxpr)
        run, all_updates = jax.jit(step), []
        for turn in range(STEPS):
            grads = {
                k: (SCALES[k] * (directions[k] + rng.normal(size=s))).astype(np.float32)
                for k, s in SHAPES.items()
            }
            if turn == STEPS - 1:
                grads["matrix"][0, 0] = np.inf
            params, states, updates = run(params, states, _variants(grads))
            all_updates.append(jax.tree.map(np.asarray, updates))
    together = [updates[0] for updates in all_updates]
    alone = [dict(zip(SHAPES, updates[1:3], strict=True)) for updates in all_updates]
    halves = [
        {
            k: np.concatenate(updates[at : at + 2])
            for k, at in zip(SHAPES, (3, 5), strict=True)
        }
        for updates in all_updates
    ]
    return together, alone, halves


def _variants(tree: dict[str, np.ndarray]) -> list[Any]:
    """Both arrays together; each alone; both halves of each."""
    variants: list[Any] = [tree, *tree.values()]
    for array in tree.values():
        variants += [array[: len(array) // 2], array[len(array) // 2 :]]
    return variants


def _agree(one: Trajectory, other: Trajectory) -> bool:
    return all(
        _close(a[k], b[k]) for a, b in zip(one, other, strict=True) for k in SHAPES
    )


def _close(a: np.ndarray, b: np.ndarray) -> bool:
    finite = np.isfinite(a)
    if not np.array_equal(finite, np.isfinite(b)):
        return False
    largest = float(np.max(np.abs(a[finite]), initial=0.0))
    return bool(np.all(np.abs(a[finite] - b[finite]) <= TOLERANCE * largest))


def _refuse_callbacks(name: str, jaxpr: jax.extend.core.Jaxpr) -> None:
    """A callback may raise while XLA writes in place, and would run on the server."""
    for primitive in _primitives(jaxpr):
        if "callback" in primitive:
            raise InvalidArgumentError(
                f"optimizer {name!r} calls back into Python ({primitive}), which a "
                "parameter server does not run: take the callback out"
            )


def _primitives(jaxpr: jax.extend.core.Jaxpr) -> Iterator[str]:
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for parameter in jax.tree.leaves(list(equation.params.values())):
            if isinstance(parameter, jax.extend.core.ClosedJaxpr):
                yield from _primitives(parameter.jaxpr)
            elif isinstance(parameter, jax.extend.core.Jaxpr):
                yield from _primitives(parameter)

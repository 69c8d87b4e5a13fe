"""Delayed Nesterov momentum, for updates that arrive one by one from several workers.

After Liu et al., "Asynchronous Local-SGD Training for Language Modeling" (2024),
algorithm 3. Nesterov momentum applied at each arrival multiplies the momentum by the
number of workers, and diverges. Here each of ``period`` updates applies its share of
the step of gradient descent at once, and the last one also applies the step of the
momentum.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class DelayedNesterovState(NamedTuple):
    """The number of updates since the last step of the momentum (``counted``), the
    ``momentum``, and the sum of the updates counted."""

    counted: jax.Array
    momentum: Any
    buffer: Any


def delayed_nesterov(
    learning_rate: float, momentum: float, period: int
) -> optax.GradientTransformation:
    """Makes a transformation in which ``period`` updates together are one step of
    Nesterov momentum.

    ``period`` equal updates change a value as one step of ``optax.sgd(learning_rate,
    momentum, nesterov=True)`` does; with ``period=1`` each update does. The
    transformation is plain optax, and runs on parameter servers unchanged. Use it as
    the outer optimizer of a `zs.LocalOptimizer` whose rounds each take the local steps
    of one worker, for example ``zs.Rounds(workers=1, late="next")``.

    Args:
        period: The number of workers, or more.

    Raises:
        ValueError: ``period`` is less than 1.
    """
    if period < 1:
        raise ValueError(
            f"delayed_nesterov(period={period!r:.80}): expected a whole number, 1 or "
            "more"
        )

    def init(params: Any) -> DelayedNesterovState:
        momentum, buffer = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
        return DelayedNesterovState(jnp.zeros((), jnp.int32), momentum, buffer)

    def update(
        updates: Any, state: DelayedNesterovState, params: Any = None
    ) -> tuple[Any, DelayedNesterovState]:
        del params
        counted = state.counted + 1
        is_last = counted >= period

        def moved(gradient: Any, before: Any, buffer: Any) -> tuple[Any, Any, Any]:
            buffer = buffer + gradient
            after = jnp.where(is_last, momentum * before + buffer / period, before)
            step = gradient / period + jnp.where(is_last, momentum * after, 0)
            kept = jnp.where(is_last, jnp.zeros_like(buffer), buffer)
            return -learning_rate * step, after, kept

        triples = jax.tree.map(moved, updates, state.momentum, state.buffer)
        new, after, kept = jax.tree.transpose(
            jax.tree.structure(updates), jax.tree.structure((0, 0, 0)), triples
        )
        counted = jnp.where(is_last, 0, counted)
        return new, DelayedNesterovState(counted, after, kept)

    return optax.GradientTransformation(init, update)

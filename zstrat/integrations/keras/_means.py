"""Checks that the losses of a model are means over rows, by which replicas count.

A loss says by its reduction whether it is a sum, but a function of the user's own does
not, nor does what a layer adds (``add_loss``). So losses of a few rows are compared
with those of their halves, on one device, before the first step.

In evaluation the halves are different rows: that finds sums, and losses that compare
rows with each other. In training, where a BatchNormalization makes each row depend on
the others, both halves are the same rows, with the mean and variance of the whole: a
mean is exactly equal then, and a sum is twice as large.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
import keras
import numpy as np

from zstrat.program import KerasWarning

from ._private import noted_losses
from ._steps import Batch, trace_step

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Quantities = Callable[[Any, Any, Any], list[Any]]
    """What is to be means, computed of trained values, other state and a batch."""

_MEANS: Final = ("sum_over_batch_size", "mean")

_ROWS: Final = 8
"""Rows of a half. More rows would find more only in a model that draws numbers."""

_TOLERANCE: Final = 0.05
"""How far a loss may be from the mean of those of its halves, but for what draws do."""

_DRAWS: Final = 16
"""How often a model that draws numbers is computed."""

_LEAST: Final = 1e-3
"""A loss that is a smaller part of the largest one is not told from rounding."""

_LEAST_GRADIENT: Final = 0.02
"""Such a part for gradients: in bfloat16 rounding is some 0.4 % of each."""


def require_mean_reductions(model: Any) -> None:
    """Checks the reductions of the losses of a compiled model.

    Raises:
        NotImplementedError: One of them is not a mean over rows.
    """
    for loss in keras.tree.flatten(model.loss):
        kind = getattr(loss, "reduction", _MEANS[0])
        if kind not in _MEANS:
            raise NotImplementedError(
                f"a loss of model {model.name!r} has reduction={kind!r}, but "
                "replicas count by their rows: use "
                'reduction="sum_over_batch_size" (the default of Keras), or a '
                "strategy with one replica"
            )


def require_means(model: Any, mode: str, batch: Batch) -> bool:
    """Checks the losses of a model on some rows of a batch; those of a ``train_step``
    of its own by their gradients. Returns False if there are too few rows.

    Raises:
        NotImplementedError: One of them is not a mean over rows.
    """
    rows = min(_ROWS, batch.rows // 2)
    if not rows:
        return False
    few = _weighted(batch.part(0, 2 * rows))
    first, second = few.part(0, rows), few.part(rows, 2 * rows)
    what = f"losses of model {model.name!r} (of compile, or add_loss)"
    if type(model).train_step is not keras.Model.train_step:  # may compute otherwise
        if mode == "train":
            what = f"gradients in train_step of {model.name!r}"
            _require(model, what, _gradients(model, few), [first] * 2, _LEAST_GRADIENT)
        return True
    _require(model, what, _losses(model, few), [first, second], _LEAST)
    if mode == "train":
        slots = [v.value for v in model.optimizer.variables]
        _require(model, what, _losses(model, few, slots), [first] * 2, _LEAST)
    return True


def _weighted(batch: Batch) -> Batch:
    """Gives rows other sample weights, if they have some: where all are zero any loss
    is a mean, and one that divides by their sum shows if halves differ in it."""
    data = jax.tree.unflatten(batch.treedef, batch.arrays)
    *_, weights = keras.utils.unpack_x_y_sample_weight(data)
    kept = len(batch.arrays) - len(jax.tree.leaves(weights))  # of (x, y, weights)

    def other(array: np.ndarray) -> np.ndarray:
        given = np.linspace(0.5, 2, len(array)) if array.dtype.kind == "f" else 1
        shaped = np.reshape(given, (-1, *(1,) * (array.ndim - 1)))
        return np.broadcast_to(shaped, array.shape).astype(array.dtype)

    arrays = *batch.arrays[:kept], *map(other, batch.arrays[kept:])
    return Batch(batch.treedef, arrays)


def _losses(model: Any, batch: Batch, slots: Any = None) -> Quantities:
    """Computes losses as in training, if there is state of the optimizer (which may
    scale them)."""
    metrics, training = [v.value for v in model.metrics_variables], slots is not None

    def losses(values: Any, state: Any, arrays: Any) -> list[Any]:
        data = jax.tree.unflatten(batch.treedef, arrays)
        given = keras.utils.unpack_x_y_sample_weight(data)
        with noted_losses(model) as found:
            model.compute_loss_and_updates(
                values, state, metrics, *given, training, slots
            )
        return list(map(keras.ops.sum, found))

    return losses


def _gradients(model: Any, batch: Batch) -> Quantities:
    def gradients(values: Any, state: Any, arrays: Any) -> list[Any]:
        step = trace_step(model, "train", Batch(batch.treedef, tuple(arrays)))
        grads = step.function(*values, *state, *arrays)[: step.gradients]
        # One number of each, as noise of draws makes no number of it larger.
        rng = np.random.default_rng(1)
        return [jnp.vdot(g, rng.normal(size=g.shape).astype(g.dtype)) for g in grads]

    return gradients


def _require(
    model: Any, what: str, found: Quantities, halves: Sequence[Batch], least: float
) -> None:
    """Checks that what is found in two halves together is its mean over them."""
    run, rng = jax.jit(found), np.random.default_rng(0)
    trained = [np.asarray(v.value) for v in model.trainable_variables]
    state = [v.value for v in model.non_trainable_variables]
    seeds = [v.dtype == "uint32" for v in state]
    turns = range(_DRAWS if any(seeds) else 1)
    others = list(zip(state, seeds, strict=True))
    drawn = [[v + np.uint32(n) if s else v for v, s in others] for n in turns]
    pairs = zip(*[half.arrays for half in halves], strict=True)
    both = [np.concatenate(pair) if pair[0].ndim else pair[0] for pair in pairs]
    for size in (0.1, 0):
        # Of zeros, as of a kernel at first, a sum is a mean: so values are changed a
        # little, unless the loss has no number then.
        changes = [(size * rng.normal(size=v.shape)).astype(v.dtype) for v in trained]
        values = [v + change for v, change in zip(trained, changes, strict=True)]
        whole, *apart = (
            np.array([run(values, each, arrays) for each in drawn], "float64")
            for arrays in (both, *[half.arrays for half in halves])
        )
        if np.isfinite([whole, *apart]).all():
            break
    else:
        warnings.warn(
            f"{what} are not finite with the first values of the model, so it is not "
            "known whether they are means over rows: a strategy with several replicas "
            "trains others otherwise than Keras",
            KerasWarning,
            stacklevel=2,
        )
        return
    means, sizes = np.mean(apart, 0), abs(np.array(apart)).max((0, 1))
    noise = 4 * (whole.std(0) + means.std(0)) / np.sqrt(len(turns))
    bounds = _TOLERANCE * sizes + least * sizes.max(initial=0) + noise
    for one, mean, bound in zip(whole.mean(0), means.mean(0), bounds, strict=True):
        if abs(one - mean) > bound:
            raise NotImplementedError(
                f"{what} are {one:.4g} for {2 * halves[0].rows} rows, but their mean "
                f"over the halves is {mean:.4g}, and replicas count by their rows: "
                "write a mean over rows (keras.ops.mean in place of sum, "
                "reduction='sum_over_batch_size'), or use a strategy with one replica "
                "or with parameter servers, if rows are compared with each other"
            )

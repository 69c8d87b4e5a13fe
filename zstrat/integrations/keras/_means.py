"""Checks that the losses of a model are means over rows; replicas are weighted by rows.

The reduction of a Keras loss says whether the loss is a sum. A loss function of the
user does not say it, nor does a loss that a layer adds (``add_loss``). So before the
first step, losses of a few rows are computed on one device and compared with the losses
of the two halves of these rows.

In evaluation the halves are different rows, which finds sums, and losses that compare
rows with each other. In training, where a BatchNormalization makes each row depend on
the others, both halves are the same rows, so their mean and variance are those of the
whole: then a mean is exactly equal, and a sum is twice as large.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
import keras
import numpy as np

from zstrat.program import KerasWarning

from ._private import is_seed, noted_losses
from ._steps import Batch, trace_step

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Quantities = Callable[[Any, Any, Any], list[Any]]
    """What is to be means, computed of trained values, other state and a batch."""

_MEANS: Final = ("sum_over_batch_size", "mean")

_ROWS: Final = 8
"""Rows of a half. More rows would only find more in a model that draws random
numbers."""

_TOLERANCE: Final = 0.05
"""How far a loss may be from the mean of the losses of its halves, relative to the
loss; noise of random draws is added."""

_DRAWS: Final = 16
"""How often the losses of a model that draws random numbers are computed."""

_LEAST: Final = 1e-3
"""A loss smaller than this part of the largest loss is not distinguished from rounding
errors."""

_LEAST_GRADIENT: Final = 0.02
"""As `_LEAST`, for gradients: in bfloat16 rounding changes each by some 0.4 %."""


def require_mean_reductions(model: Any) -> None:
    """Checks that the losses given to `compile` have a mean over rows as their
    reduction.

    Raises:
        NotImplementedError: A loss has another reduction.
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
    """Checks on some rows of a batch that the losses of a model are means over rows.
    For a model with its own ``train_step`` the gradients are checked instead. Returns
    False, without a check, if the batch has fewer than two rows.

    Raises:
        NotImplementedError: A loss is not a mean over rows.
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
    """Returns the batch with other sample weights, if it has some: with weights of zero
    any loss is a mean, and weights that differ between halves reveal a loss that
    divides by their sum."""
    data = jax.tree.unflatten(batch.treedef, batch.arrays)
    # A train_step of the user's own may take tuples of other lengths.
    if not isinstance(data, tuple | list) or len(data) != 3:
        return batch
    kept = len(batch.arrays) - len(jax.tree.leaves(data[2]))  # of (x, y, weights)

    def other(array: np.ndarray) -> np.ndarray:
        given = np.linspace(0.5, 2, len(array)) if array.dtype.kind == "f" else 1
        shaped = np.reshape(given, (-1, *(1,) * (array.ndim - 1)))
        return np.broadcast_to(shaped, array.shape).astype(array.dtype)

    arrays = *batch.arrays[:kept], *map(other, batch.arrays[kept:])
    return Batch(batch.treedef, arrays)


def _losses(model: Any, batch: Batch, slots: Any = None) -> Quantities:
    """Makes a function that computes the losses of a model; as in training if
    ``slots``, the state of the optimizer (which may scale losses), is given."""
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
    """Checks that the quantities ``found`` of both halves together are the means of the
    quantities of each half.

    Raises:
        NotImplementedError: A quantity is not such a mean; the error calls it ``what``.
    """
    run, rng = jax.jit(found), np.random.default_rng(0)
    trained = [np.asarray(v.value) for v in model.trainable_variables]
    state = [v.value for v in model.non_trainable_variables]
    seeds = list(map(is_seed, state))
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

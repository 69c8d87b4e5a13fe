"""Training of a Keras model by replicas that compute together.

Each replica gets its rows of a batch, and a gradient counts as much as its replica has
rows, so a step is that of the whole batch, also where a batch cannot be divided evenly.
The state of a BatchNormalization becomes the mean over the replicas, as each sees its
own rows; integers (the counters of seeds) advance as in the first replica.

Several processes run the same program, and see the same metrics. Each has to give the
same batches, of which its replicas take their rows; arrays are shuffled as in the first
process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import jax
import keras
import numpy as np

from zstrat.program import function
from zstrat.strategy import MultiWorkerMirroredStrategy
from zstrat.variables import VariableAggregation, create_variables, values

from ._private import layers_of, noted_losses
from ._steps import Batch, trace_step
from ._training import Training
from .embeddings import layer_table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ._steps import TracedStep
    from ._training import StepResult


_MEANS: Final = ("sum_over_batch_size", "mean")

_TOLERANCE: Final = 0.05
"""How far a loss may be from the mean of those of its rows, as some draw numbers. A sum
is twice as large with two replicas."""


class Ended:
    """The results of a step that has ended."""

    is_ready = True

    def __init__(self, results: Any) -> None:
        self._results: Final = results

    def fetch(self) -> Any:
        return self._results


class ReplicaTraining(Training):
    """Training of a model under a strategy whose replicas compute in step.

    Raises:
        NotImplementedError: A loss is not a mean over rows, by which replicas count. It
            is found by its reduction at once, and by its values at the first step.
    """

    def __init__(self, model: Any, strategy: Any) -> None:
        super().__init__(model, strategy)
        self._is_mean = False
        for loss in keras.tree.flatten(model.loss):
            kind = getattr(loss, "reduction", _MEANS[0])
            if kind not in _MEANS and strategy.num_replicas_in_sync > 1:
                raise NotImplementedError(
                    f"a loss of model {model.name!r} has reduction={kind!r}, but "
                    "replicas count by their rows: use "
                    'reduction="sum_over_batch_size" (the default of Keras), or a '
                    "strategy with one replica"
                )

    def call(
        self, name: str, method: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        if isinstance(self.strategy, MultiWorkerMirroredStrategy):
            # Keras shuffles arrays by numpy's generator.
            kind, keys, place, *rest = np.random.get_state(legacy=True)
            mine = np.append(keys, np.uint32(place))
            first = np.asarray(self.strategy.gather(mine, axis=0))[: mine.size]
            np.random.set_state((kind, first[:-1], int(first[-1]), *rest))
        return super().call(name, method, args, kwargs)

    def prepare(self, step: TracedStep, mode: str, batch: Batch) -> Any:
        steps, parts = {batch.key: step}, self._parts(batch)
        with noted_losses(self.model):
            for part in parts:
                if part.key not in steps:
                    steps[part.key] = trace_step(self.model, mode, part)
        if mode != "predict" and len(parts) > 1 and not self._is_mean:
            self._require_means(batch, parts)
            self._is_mean = True
        return self._step_function(steps, mode, batch)

    def start(self, prepared: Any, batch: Batch) -> StepResult:
        parts = self._parts(batch)
        arrays = batch.arrays
        if len(parts) > 1:
            arrays = self.strategy.experimental_distribute_values_from_function(
                lambda context: parts[context.replica_id_in_sync_group].arrays
            )
        return Ended(prepared(self.learning_rate(), arrays))

    def create(self, trained: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        """Creates variables of the strategy.

        Raises:
            NotImplementedError: The model has a `zs.HashTable`.
        """
        for layer in layers_of(self.model):
            if layer_table(layer) is not None:
                raise NotImplementedError(
                    f"layer {layer.name!r} has a zs.HashTable, and the model is "
                    f"compiled under {self.strategy!r:.100}: compile it in the scope "
                    "of a zs.ParameterServerStrategy"
                )
        name = self.model.name
        with self.strategy.scope():
            made = [*create_variables(list(trained), name=name)]
            for number, array in enumerate(others):
                is_real = array.dtype.kind == "f"
                made += create_variables(
                    [array],
                    name=f"{name}/state_{number}",
                    trainable=False,
                    aggregation=VariableAggregation.MEAN
                    if is_real
                    else VariableAggregation.ONLY_FIRST_REPLICA,
                )
        return made

    def wait(self) -> None:
        """Does nothing: `start` has waited."""

    def _parts(self, batch: Batch) -> list[Batch]:
        """Divides a batch among the replicas of all processes."""
        replicas = self.strategy.num_replicas_in_sync
        if replicas == 1:
            return [batch]
        if batch.rows < replicas:
            raise NotImplementedError(
                f"a batch of {batch.rows} rows for {replicas} replicas: each needs a "
                "row. Choose a batch_size that leaves no such rest, or leave the rest "
                "out (drop_remainder)"
            )
        return [
            Batch(batch.treedef, arrays)
            for arrays in zip(
                *[
                    np.array_split(array, replicas)
                    if array.ndim
                    else [array] * replicas
                    for array in batch.arrays
                ],
                strict=True,
            )
        ]

    def _require_means(self, batch: Batch, parts: Sequence[Batch]) -> None:
        """Checks that each loss of a batch is the mean of those of its parts. Values of
        the model are changed a little: of zeros, a sum is a mean."""
        model, rng = self.model, np.random.default_rng(0)
        if type(model).train_step is not keras.Model.train_step:
            return  # it may compute its loss otherwise
        shaken = [
            np.asarray(v.value) + 0.1 * rng.normal(size=v.shape).astype(v.dtype)
            for v in model.trainable_variables
        ]
        others = [[v.value for v in model.non_trainable_variables]]
        others.append([v.value for v in model.metrics_variables])

        @jax.jit
        def losses(arrays: Any) -> list[Any]:
            data = jax.tree.unflatten(batch.treedef, arrays)
            with noted_losses(model) as found:
                given = keras.utils.unpack_x_y_sample_weight(data)
                model.compute_loss_and_updates(shaken, *others, *given)
            return [keras.ops.sum(loss) for loss in found]

        shares = [part.rows / batch.rows for part in parts]
        apart = np.array([losses(part.arrays) for part in parts]).T
        *added, _ = whole = np.array(losses(batch.arrays))
        for number, (one, mean) in enumerate(zip(whole, apart @ shares, strict=True)):
            if abs(one - mean) > _TOLERANCE * abs(apart[number]).max():
                what = "what is added (add_loss) to " if number < len(added) else ""
                raise NotImplementedError(
                    f"{what}the loss of model {model.name!r} is {one:.4g} for a "
                    f"batch of {batch.rows} rows, but the mean over the rows of "
                    f"{len(parts)} replicas is {mean:.4g}, and replicas count by their "
                    "rows: write a mean over rows (keras.ops.mean in place of sum, "
                    "reduction='sum_over_batch_size'), or use a strategy with one "
                    "replica or with parameter servers, if rows are compared with "
                    "each other"
                )

    def _step_function(
        self, steps: dict[Any, TracedStep], mode: str, batch: Batch
    ) -> Any:
        strategy, optimizer = self.strategy, self.optimizer
        count = len(self.model.trainable_variables)
        params, state = self.variables[:count], self.variables[count:]
        total = batch.rows

        def replica_fn(rate: Any, arrays: Any) -> Any:
            part = Batch(batch.treedef, tuple(arrays))
            step = steps[part.key]
            results = step.function(*values(params), *values(state), *arrays)
            if step.gradients and optimizer is not None:
                share = part.rows / total
                grads = [grad * share for grad in results[: step.gradients]]
                optimizer.apply_gradients(grads, params, learning_rate=rate)
            after = results[step.gradients :]
            for at, value in zip(step.changed, after, strict=False):
                state[at].assign(value)
            rest = after[len(step.changed) :]
            return rest[: step.metrics], rest[step.metrics :]

        def keras_step(rate: Any, arrays: Any) -> Any:
            sums, rest = strategy.run(replica_fn, args=(rate, arrays))
            sums = [strategy.reduce("sum", each, axis=None) for each in sums]
            if mode != "predict":
                rest = [strategy.reduce("mean", each, axis=None) for each in rest]
            return sums, rest

        run = function(keras_step)

        def ran(rate: Any, arrays: Any) -> list[Any]:
            sums, rest = run(rate, arrays)
            if mode == "predict":
                rest = [strategy.gather(each, axis=0) for each in rest]
            return list(map(np.asarray, [*sums, *rest]))

        return ran

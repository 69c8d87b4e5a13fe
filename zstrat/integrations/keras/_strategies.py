"""Trains a Keras model by replicas in step, or on parameter servers.

Replicas compute together. Each replica gets its share of the rows of a batch, and its
gradient is weighted by its number of rows, so a step equals a step of one device on the
whole batch, even if the batch cannot be divided evenly. The state of a
BatchNormalization becomes the mean over the replicas, as each computes it from its own
rows. Integer state (the counters of random seeds) advances as in the first replica,
while the other replicas draw from different seeds.

If several processes train, they run the same program and see the same metrics. Each has
to give the same batches, of which its replicas take their rows; arrays are shuffled as
in the first process.

On parameter servers, the variables of the model are variables of the strategy. Each
step reads them, computes gradients, and sends these to the optimizer on the servers
that store the variables. The increments of the metrics come back as results of the
step.

Non-trainable variables follow a rule. Floating-point state (the averages of a
BatchNormalization) is assigned: of steps that run at the same time, the one that ends
last wins. Integer state (the counters of seeds) is incremented: each step adds its own
increment. With one worker both rules do what Keras does.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zstrat.coordinator import ClusterCoordinator, LeasedDataset
from zstrat.errors import PSUnavailableError
from zstrat.program import function
from zstrat.strategy import MultiWorkerMirroredStrategy, get_replica_context
from zstrat.variables import (
    ShardedVariable,
    Variable,
    VariableAggregation,
    create_variables,
    values,
)

from ._means import require_mean_reductions, require_means
from ._private import is_seed, layers_of, noted_losses
from ._sources import Draw, LeaseSource
from ._steps import Batch, trace_step
from ._training import Training
from .embeddings import Embedding, embeddings_of, is_large, layer_table, warn_of_whole
from .optimizers import OptimizerState, parts_of
from .shipped import step_function

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ._sources import Source
    from ._steps import TracedStep
    from ._training import StepResult


class Ended(NamedTuple):
    """Holds the results of a step that has already ended, as a `StepResult`."""

    results: Any
    is_ready: bool = True

    def fetch(self) -> Any:
        return self.results


class ReplicaTraining(Training):
    """Trains a model under a strategy whose replicas compute each step together.

    Raises:
        NotImplementedError: A loss is not a mean over rows, by which replicas are
            weighted. Its reduction is checked at once, its values before the first
            step.
    """

    def __init__(self, model: Any, strategy: Any) -> None:
        super().__init__(model, strategy)
        self._are_means: Final[set[str]] = set()
        if strategy.num_replicas_in_sync > 1:
            require_mean_reductions(model)

    def call(
        self, name: str, method: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        if isinstance(self.strategy, MultiWorkerMirroredStrategy):
            # Keras shuffles arrays by numpy's generator, and all processes have to have
            # the same batches.
            kind, keys, place, *rest = np.random.get_state(legacy=True)
            mine = np.append(keys, np.uint32(place))
            first = np.asarray(self.strategy.gather(mine, axis=0))[: mine.size]
            np.random.set_state((kind, first[:-1], int(first[-1]), *rest))
        return super().call(name, method, args, kwargs)

    def prepare(
        self, mode: str, steps: Sequence[tuple[Batch, TracedStep]], *, draws: bool
    ) -> Any:
        ((batch, whole),) = steps
        parts = self._parts(batch)
        traced = {batch.key: whole} | self._traced(mode, batch, parts)
        is_new = mode not in {"predict", *self._are_means}
        if is_new and len(parts) > 1 and require_means(self.model, mode, batch):
            self._are_means.add(mode)
        strategy, optimizer = self.strategy, self.optimizer
        count = len(self.model.trainable_variables)
        params, state = self.variables[:count], self.variables[count:]
        is_predicting, replicas = mode == "predict", len(parts)

        def replica_fn(rate: Any, arrays: Any) -> Any:
            part = Batch(batch.treedef, tuple(arrays))
            before, share = values(state), part.rows / batch.rows
            if part.rows:
                step, given = traced[part.key].function, _own_seeds(before)
                results = step(*values(params), *given, *arrays)
            else:
                # A loss of no rows is not a number, so the step does not run; but all
                # replicas take part in the sums of an update.
                results = _nothing(whole, before, is_predicting=is_predicting)
            if whole.gradients and optimizer is not None:
                # The optimizer adds the gradients of replicas up: of means over rows,
                # weighted by rows, that is the mean over the batch.
                grads = [grad * share for grad in results[: whole.gradients]]
                optimizer.apply_gradients(grads, params, learning_rate=rate)
            after = results[whole.gradients :]
            for at, value in zip(whole.changed, after, strict=False):
                # The mean over replicas is to be one over rows. Shares of one size
                # need no factor, which would round.
                is_real = jnp.issubdtype(value.dtype, jnp.floating)
                if part.rows * replicas != batch.rows and is_real:
                    value = before[at] + (value - before[at]) * (share * replicas)
                state[at].assign(value)
            seen = after[len(whole.changed) :]
            sums, rest = seen[: whole.metrics], seen[whole.metrics :]
            return sums, rest if is_predicting else [each * share for each in rest]

        def keras_step(rate: Any, arrays: Any) -> Any:
            sums, rest = strategy.run(replica_fn, args=(rate, arrays))
            sums = [strategy.reduce("sum", each, axis=None) for each in sums]
            if not is_predicting:
                rest = [strategy.reduce("sum", each, axis=None) for each in rest]
            return sums, rest

        run = function(keras_step)

        def ran(rate: Any, arrays: Any) -> list[Any]:
            sums, rest = run(rate, arrays)
            if is_predicting:
                rest = [strategy.gather(each, axis=0) for each in rest]
            return list(map(np.asarray, [*sums, *rest]))

        return ran

    def _traced(
        self, mode: str, batch: Batch, parts: Sequence[Batch]
    ) -> dict[Any, TracedStep]:
        """Traces the step once for each size of the replicas' parts of a batch, if
        there are several parts."""
        traced: dict[Any, TracedStep] = {}
        sizes = {part.key: part for part in parts if part.rows and len(parts) > 1}
        for key, part in sizes.items():
            try:
                with noted_losses(self.model):  # which refuses masks
                    traced[key] = trace_step(self.model, mode, part)
            except ValueError as error:
                error.add_note(
                    f"A replica has {part.rows} of {batch.rows} rows of a batch: a "
                    "model for batches of one size (a stateful RNN, batch_shape) "
                    "trains by one replica, or on parameter servers."
                )
                raise
        return traced

    def start(self, prepared: Any, batch: Batch | Draw) -> StepResult:
        assert isinstance(batch, Batch)
        parts, arrays = self._parts(batch), batch.arrays
        if len(parts) > 1:
            arrays = self.strategy.experimental_distribute_values_from_function(
                lambda context: parts[context.replica_id_in_sync_group].arrays
            )
        return Ended(prepared(self.learning_rate(), arrays))

    def create(self, trained: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        """Creates variables of the strategy for those of the model.

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
            of = VariableAggregation
            for number, array in enumerate(others):
                made += create_variables(
                    [array],
                    name=f"{name}/state_{number}",
                    trainable=False,
                    aggregation=of.MEAN
                    if jnp.issubdtype(array.dtype, jnp.floating)  # bfloat16, too
                    else of.ONLY_FIRST_REPLICA,
                )
        return made

    def wait(self) -> None:
        """Does nothing: `start` returned only after its step had ended."""

    def _parts(self, batch: Batch) -> list[Batch]:
        """Divides the rows of a batch among the replicas of all processes."""
        replicas = self.strategy.num_replicas_in_sync
        if replicas == 1:
            return [batch]
        each, more = divmod(batch.rows, replicas)
        ends = [n * each + min(n, more) for n in range(replicas + 1)]
        return [batch.part(*pair) for pair in itertools.pairwise(ends)]


def _own_seeds(state: Sequence[Any]) -> list[Any]:
    """Returns the state with seeds that differ between replicas, as all would otherwise
    drop the same units."""
    context = get_replica_context()
    assert context is not None
    # The fraction of the golden ratio: multiples of it are far from each other, and
    # from the seeds of other layers, which are often small numbers.
    apart = jnp.uint32(context.replica_id_in_sync_group) * np.uint32(0x9E3779B9)
    return [v + apart if is_seed(v) else v for v in state]


def _nothing(
    step: TracedStep, state: Sequence[Any], *, is_predicting: bool
) -> list[Any]:
    """Returns the results of a step for a part without rows: zero gradients and metric
    increments, unchanged state, and predictions of no rows."""
    kinds = jax.eval_shape(step.function, *[kind.spec() for kind in step.inputs])
    results: list[Any] = [jnp.zeros(kind.shape, kind.dtype) for kind in kinds]
    end = step.gradients + len(step.changed)
    results[step.gradients : end] = [state[at] for at in step.changed]
    if is_predicting:
        results[end:] = [each[:0] for each in results[end:]]
    return results


class ServerTraining(Training):
    """Trains a model under a `ParameterServerStrategy`."""

    def __init__(self, model: Any, strategy: Any) -> None:
        super().__init__(model, strategy)
        self._coordinator = ClusterCoordinator(strategy)
        spec = strategy.cluster_resolver.cluster_spec()
        self.workers = max(1, spec.num_tasks("worker"))

    def call(
        self, name: str, method: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        try:
            return super().call(name, method, args, kwargs)
        except PSUnavailableError as error:
            note = (
                f"Model {self.model.name!r} has the values of its last whole epoch: "
                "compile it in the scope of a new strategy, and give fit an "
                "initial_epoch. With ParameterServerStrategy(..., "
                "on_ps_loss='restore') and the callback zs.keras.ServerCheckpoint fit "
                "continues by itself (docs/moving_keras.md)."
            )
            if note not in getattr(error, "__notes__", ()):  # fit raises it once more
                error.add_note(note)
            raise

    def prepare(
        self, mode: str, steps: Sequence[tuple[Batch, TracedStep]], *, draws: bool
    ) -> Any:
        programs = {batch.key[1]: step.program() for batch, step in steps}
        count, (_, first) = len(self.model.trainable_variables), steps[0]
        params, state = self.variables[:count], self.variables[count:]
        optimizer = self.optimizer if first.gradients else None
        return step_function(
            programs, params, state, optimizer, first.changed, draws=draws
        )

    def start(self, prepared: Any, batch: Batch | Draw) -> StepResult:
        arrays = [batch.iterator] if isinstance(batch, Draw) else batch.arrays
        return self._coordinator.schedule(
            prepared, args=(self.learning_rate(), *arrays)
        )

    def source_of(self, mode: str, data: Any, *, endless: bool) -> Source | None:
        if not isinstance(data, LeasedDataset):
            return super().source_of(mode, data, endless=endless)
        if mode == "predict":
            raise NotImplementedError(
                "predict of a leased dataset: its batches have no order. Give arrays "
                "or a zs.data.Dataset"
            )
        return LeaseSource(data, repeats=mode != "train")

    def create(self, trained: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        """Creates variables of the strategy, which for large embeddings are tables."""
        found = embeddings_of(layers_of(self.model), self.keras_variables)
        self.tables = {n: each for n, each in found.items() if self._is_table(n, each)}
        given = {n: each for n, each in found.items() if layer_table(each) is not None}
        self.unread = frozenset(given)
        _require_one_layer_each(given.values())
        self._require_rows_move_at_once()
        arrays, made = [*trained, *others], {n: layer_table(given[n]) for n in given}
        with self.strategy.scope():
            for number in self.tables.keys() - given:
                made[number] = self._parted(
                    self.keras_variables[number], arrays[number]
                )
            left = [n for n in range(len(arrays)) if n not in made]
            rest: list[Any] = create_variables(
                [arrays[n] for n in left], name=self.model.name
            )
        made |= dict(zip(left, rest, strict=True))
        return [made[n] for n in range(len(arrays))]

    def _parted(self, variable: Any, array: Any) -> Any:
        """Creates a table with the rows of ``array``, partitioned by the partitioner of
        the strategy, or else with one part on each server."""
        name = f"{self.model.name}/{variable.path}"
        if self.strategy.variable_partitioner is not None:
            return Variable(array, name=name)
        spec = self.strategy.cluster_resolver.cluster_spec()
        # Also where all other variables are whole: a server is to hold a part of it.
        parts = np.array_split(array, min(len(array), spec.num_tasks("ps")))
        made = create_variables(parts, name=name)
        return made[0] if len(made) == 1 else ShardedVariable(made, name)

    def _is_table(self, number: int, layer: Any) -> bool:
        """Returns whether steps look up rows of this embedding instead of reading all
        of it. Warns of a large embedding that is read whole because the optimizer also
        changes rows without gradients."""
        if isinstance(layer, Embedding):
            return True
        variable = self.keras_variables[number]
        if not is_large(variable):
            return False
        if number >= len(self.model.trainable_variables):
            return True  # no optimizer moves it
        trained, optimizer = self.model.trainable_variables, self.model.optimizer
        if optimizer is not None and not optimizer.built:
            optimizer.build(trained)
        if optimizer is None or OptimizerState(optimizer).rests(trained, number):
            return True
        warn_of_whole(
            [variable],
            f"as {optimizer.name!r} moves rows without a gradient, too",
            "With zs.keras.Embedding in place of keras.layers.Embedding such rows "
            "rest, and a step costs the rows of its ids",
        )
        return False

    def _require_rows_move_at_once(self) -> None:
        named = [x.name for x in self.tables.values() if isinstance(x, Embedding)]
        if not named or self.model.optimizer is None:
            return
        for optimizer, option in itertools.product(
            parts_of(self.model.optimizer), ("gradient_accumulation_steps", "use_ema")
        ):
            if getattr(optimizer, option):
                raise NotImplementedError(
                    f"optimizer {optimizer.name!r} has {option}, which makes one move "
                    f"of several steps, but rows of {named[0]!r} (zs.keras.Embedding) "
                    "move only in the steps that look them up: leave it out, or use "
                    "keras.layers.Embedding"
                )

    def enter_state(self, *, counts: bool) -> None:
        super().enter_state(counts=counts)
        callbacks = self._call.callbacks
        if not self.unread or callbacks is None:
            return
        if any(getattr(x, "restore_best_weights", False) for x in callbacks.callbacks):
            named = [self.tables[number].name for number in sorted(self.unread)]
            raise NotImplementedError(
                "restore_best_weights would give the model weights of one epoch and "
                f"rows of another: those of {named[0]!r} are on servers alone. Leave "
                "it out, and restore what zs.keras.ServerCheckpoint has saved"
            )

    def on_servers(self) -> dict[str, Any]:
        """Returns the variables, in the order of ``model.variables``, and the
        optimizer, for a checkpoint. Creates them first if needed."""
        self.enter_state(counts=False)
        self._make_optimizer()
        # A checkpoint names variables by their place.
        places = {id(each): n for n, each in enumerate(self.model.variables)}
        known = list(zip(self.keras_variables, self.variables, strict=True))
        known.sort(key=lambda pair: places.get(id(pair[0]), len(places)))
        return {"variables": [own for _, own in known], "optimizer": self.optimizer}

    def wait(self) -> None:
        self._coordinator.join()


def _require_one_layer_each(layers: Iterable[Any]) -> None:
    """Checks that no two layers look up the same table of any id: in one step the
    optimizer updates a table once.

    Raises:
        NotImplementedError: Two layers share a table.
    """
    found: dict[int, Any] = {}
    for layer in layers:
        other = found.setdefault(id(layer.table), layer)
        if other is not layer:
            raise NotImplementedError(
                f"layers {other.name!r} and {layer.name!r} look up the same "
                f"{layer.table}: call one zs.keras.Embedding on both inputs"
            )

"""Training of a Keras model on parameter servers.

The variables of the model are variables of the strategy. Each step reads them, computes
gradients, and pushes these to the optimizer beside the variables; what the batch adds
to the metrics comes back as the result of the step.

What is not trained follows a rule. Floating-point state (the averages of a
BatchNormalization) is assigned: of steps that run at the same time, the one that ends
last counts. Integers (the counters of seeds) advance: each step adds what it has added.
With one worker both are what Keras does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zstrat.coordinator import ClusterCoordinator
from zstrat.program import function
from zstrat.variables import Optimizer, create_variables, values

from ._shipped import ShippedStep
from ._training import Training

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ._steps import Batch, TracedStep
    from ._training import StepResult


class ServerTraining(Training):
    """Training of a model under a `ParameterServerStrategy`."""

    def __init__(self, model: Any, strategy: Any) -> None:
        super().__init__(model, strategy)
        self._coordinator = ClusterCoordinator(strategy)
        spec = strategy.cluster_resolver.cluster_spec()
        self.workers = max(1, spec.num_tasks("worker"))

    def prepare(self, step: TracedStep, mode: str, batch: Batch) -> Any:
        shipped = ShippedStep.of(step.function, [*self.keras_variables, *batch.arrays])
        trained = len(self.model.trainable_variables)
        return _step_function(shipped, self.variables, trained, step, self.optimizer)

    def start(self, prepared: Any, batch: Batch) -> StepResult:
        args = self.learning_rate(), *batch.arrays
        return self._coordinator.schedule(prepared, args=args)

    def create(self, trained: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        with self.strategy.scope():
            made: list[Any] = create_variables(
                [*trained, *others], name=self.model.name
            )
        return made

    def wait(self) -> None:
        self._coordinator.join()


def _step_function(
    shipped: ShippedStep,
    variables: Sequence[Any],
    trained: int,
    step: TracedStep,
    optimizer: Optimizer | None,
) -> Any:
    params, state = list(variables[:trained]), list(variables[trained:])
    gradients, changed = step.gradients, step.changed

    def keras_step(rate: Any, *arrays: Any) -> list[Any]:
        before = values(state)
        results = shipped(*values(params), *before, *arrays)
        if gradients:
            optimizer.apply_gradients(results[:gradients], params, learning_rate=rate)
        for at, after in zip(changed, results[gradients:], strict=False):
            if state[at].dtype.kind in "iu":
                state[at].assign_add(after - before[at])
            else:
                state[at].assign(after)
        return results[gradients + len(changed) :]

    return function(keras_step)

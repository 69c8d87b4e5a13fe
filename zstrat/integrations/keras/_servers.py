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

import numpy as np

from zstrat.coordinator import ClusterCoordinator
from zstrat.program import function
from zstrat.variables import Optimizer, create_variables, values

from ._optimizers import OptimizerState
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
        self._keras: list[Any] = []
        self._known: list[Any] = []
        self._variables: list[Any] = []
        self._slots: OptimizerState | None = None
        self._slots_known: list[Any] = []
        self._optimizer: Optimizer | None = None

    def prepare(self, step: TracedStep, mode: str, batch: Batch) -> Any:
        """Makes a step function of what was traced."""
        shipped = ShippedStep.of(step.function, [*self._keras, *batch.arrays])
        trained = len(self.model.trainable_variables)
        if mode == "train":
            self._make_optimizer()
        return _step_function(shipped, self._variables, trained, step, self._optimizer)

    def start(self, prepared: Any, batch: Batch) -> StepResult:
        rate = np.float32(0) if self._slots is None else self._slots.learning_rate()
        return self._coordinator.schedule(prepared, args=(rate, *batch.arrays))

    def push_values(self) -> None:
        if not self._variables:
            self._create()
        for number, variable in enumerate(self._keras):
            if variable.value is not self._known[number]:
                self._known[number] = variable.value
                self._variables[number].assign(np.asarray(variable.value))
        if self._optimizer is not None and self._slots is not None:
            now = [variable.value for variable in self._slots.variables]
            if any(a is not b for a, b in zip(now, self._slots_known, strict=True)):
                self._slots_known = now
                self._optimizer.state = list(map(np.asarray, now))

    def pull_values(self) -> None:
        self._coordinator.join()
        for number, value in enumerate(values(self._variables)):
            self._keras[number].assign(value)
            self._known[number] = self._keras[number].value
        if self._optimizer is not None and self._slots is not None:
            pairs = zip(self._slots.variables, self._optimizer.state, strict=True)
            for variable, value in pairs:
                variable.assign(value)
            self._slots_known = [variable.value for variable in self._slots.variables]

    def _create(self) -> None:
        model = self.model
        self._keras = [*model.trainable_variables, *model.non_trainable_variables]
        self._known = [variable.value for variable in self._keras]
        arrays = list(map(np.asarray, self._known))
        with self.strategy.scope():
            self._variables = create_variables(arrays, name=model.name)

    def _make_optimizer(self) -> None:
        if self._optimizer is not None:
            return
        model = self.model
        slots = OptimizerState(model.optimizer)
        trained = model.trainable_variables
        shipped = slots.shipped(trained)
        params = self._variables[: len(trained)]
        with self.strategy.scope():
            self._optimizer = Optimizer(shipped, model.optimizer.name, params=params)
        self._slots = slots
        self._slots_known = [variable.value for variable in slots.variables]
        if not slots.is_fresh():
            self._optimizer.state = list(map(np.asarray, self._slots_known))


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

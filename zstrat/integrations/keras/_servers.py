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

import warnings
from typing import TYPE_CHECKING, Any, Final

from zstrat.coordinator import ClusterCoordinator, LeasedDataset
from zstrat.program import KerasWarning
from zstrat.variables import create_variables

from ._sources import Draw, LeaseSource
from ._training import Training
from .shipped import ShippedStep, step_function

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ._steps import Batch, TracedStep
    from ._training import Source, StepResult

LARGE: Final = 64 << 20
"""Bytes of an embedding about which there is a warning."""


class ServerTraining(Training):
    """Training of a model under a `ParameterServerStrategy`."""

    def __init__(self, model: Any, strategy: Any) -> None:
        super().__init__(model, strategy)
        self._coordinator = ClusterCoordinator(strategy)
        self._drawing: dict[Any, tuple[TracedStep, Any]] = {}
        spec = strategy.cluster_resolver.cluster_spec()
        self.workers = max(1, spec.num_tasks("worker"))

    def prepare(self, step: TracedStep, mode: str, batch: Batch) -> Any:
        programs = {batch.key[1]: self._shipped(step, batch)}
        return self._step_function(step, programs, draws=False)

    def start(self, prepared: Any, batch: Batch) -> StepResult:
        args = self.learning_rate(), *batch.arrays
        return self._coordinator.schedule(prepared, args=args)

    def source_of(self, mode: str, data: Any, *, endless: bool) -> Source | None:
        if isinstance(data, LeasedDataset):
            return LeaseSource(data, repeats=mode != "train")
        return super().source_of(mode, data, endless=endless)

    def start_drawn(self, mode: str, draw: Draw) -> tuple[TracedStep, StepResult]:
        if mode == "predict":
            raise NotImplementedError(
                "predict of a leased dataset: its batches have no order. Give arrays "
                "or a zs.data.Dataset"
            )
        key = mode, draw.specs
        if key not in self._drawing:
            made = [self.traced(mode, spec) for spec in draw.specs]
            programs = {
                batch.key[1]: self._shipped(step, batch) for step, batch in made
            }
            step, _ = made[0]
            self._drawing[key] = step, self._step_function(step, programs, draws=True)
        step, run = self._drawing[key]
        args = self.learning_rate(), draw.iterator
        return step, self._coordinator.schedule(run, args=args)

    def create(self, trained: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        for variable, array in zip(self.keras_variables, trained, strict=False):
            if array.nbytes > LARGE and "embedding" in variable.path:
                warnings.warn(
                    f"{variable.path!r} has {array.nbytes >> 20} MiB, and each step "
                    "reads all of it and sends a gradient of the same size. Make it a "
                    "zs.Variable, and look its rows up with zs.embedding_lookup in a "
                    "step of your own (docs/libraries.md)",
                    KerasWarning,
                    stacklevel=2,
                )
        with self.strategy.scope():
            made: list[Any] = create_variables(
                [*trained, *others], name=self.model.name
            )
        return made

    def wait(self) -> None:
        self._coordinator.join()

    def _shipped(self, step: TracedStep, batch: Batch) -> ShippedStep:
        return ShippedStep.of(step.function, [*self.keras_variables, *batch.arrays])

    def _step_function(
        self, step: TracedStep, programs: Mapping[Any, ShippedStep], *, draws: bool
    ) -> Any:
        count = len(self.model.trainable_variables)
        return step_function(
            programs,
            self.variables[:count],
            self.variables[count:],
            self.optimizer if step.gradients else None,
            step.changed,
            draws=draws,
        )

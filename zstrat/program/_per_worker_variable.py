"""`PerWorkerVariable`: one value for each worker (``per_worker_variable=True``).

Each value is a variable on a parameter server, so that a worker that is restarted finds
its value again. In a step, a `PerWorkerVariable` has the value of the worker that runs
the step.

Law: a step gets its worker's index only from `worker_context`, and its trace records
that it did, so that no other worker uses that program.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NoReturn

from zstrat.variables import (
    AbstractVariable,
    UnboundStorage,
    Variable,
    handle,
    read_all,
    recorder,
    refuse_read,
)

from .trace._signature import get_current_worker_index, worker_context

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from zstrat.variables import (
        OptimizerHandle,
        StorageUpdate,
        Table,
        TraceRecorder,
        VariableHandle,
    )
    from zstrat.wire import UpdateOp


class PerWorkerVariable(AbstractVariable):
    """A variable with an independent value for each worker of a coordinator.

    In a scheduled step it behaves like other variables: the step reads and updates the
    value of its worker. The body must capture the variable, which cannot be an
    argument, and optimizers do not update it. Outside of steps `read_all` returns all
    values.

    Args:
        variables: The variables with the values, one for each worker, in order.
    """

    __slots__ = ("_variables",)

    def __init__(self, name: str, variables: Sequence[Variable]) -> None:
        self._variables = tuple(variables)
        self._spec = replace(variables[0].spec, name=name, trainable=False)

    def read_all(self) -> list[np.ndarray]:
        """Reads the values of all workers, in order: read-only arrays. The value of a
        worker that runs a step meanwhile is from before or after an update.

        Raises:
            RuntimeError: Called in a step.
            PSUnavailableError: A parameter server is gone.
        """
        if recorder.get() is not None:
            raise RuntimeError(
                f"read_all of {self._spec} in a step, which can read only the value of "
                "its own worker: write value(), or call read_all outside of steps"
            )
        refuse_read(self._spec)
        return read_all(self._variables)

    @property
    def distribute_strategy(self) -> Any:
        """The strategy of the values; see `zstrat.Variable.distribute_strategy`."""
        return self._variables[0].distribute_strategy

    @property
    def components(self) -> tuple[Variable, ...]:
        return (self._own(),)

    @property
    def table(self) -> Table:
        return self._own().table

    def require_optimizable(self) -> None:
        raise ValueError(
            f"variable {self.name!r} has a value for each worker "
            "(per_worker_variable=True), which optimizers cannot update: leave "
            "per_worker_variable out, or assign to it"
        )

    def _own(self) -> Variable:
        """Returns the variable of the worker that runs the step.

        Raises:
            RuntimeError: No step is traced or run.
        """
        if recorder.get() is None:
            self._refuse()
        number = get_current_worker_index()
        if worker_context.get() is None:  # a coordinator asks for the shapes of results
            return handle(self._variables[0].spec, _NOWHERE)
        return self._variables[number]

    def _refuse(self) -> NoReturn:
        raise RuntimeError(
            f"variable {self.name!r} has a value for each worker "
            "(per_worker_variable=True): read and update the worker's own in the body "
            "of a zs.function that a coordinator schedules (it cannot be an argument); "
            "elsewhere read_all() returns all values"
        )

    def _read_now(self) -> np.ndarray:
        self._refuse()

    async def _read_now_async(self) -> np.ndarray:
        self._refuse()

    def _traced_value(self, recording: TraceRecorder) -> Any:
        return recording.read(self._own())

    def _updates(
        self, op: UpdateOp, value: Any, optimizer: OptimizerHandle | None = None
    ) -> list[StorageUpdate]:
        return self._own()._updates(op, value, optimizer)

    def _target_of_rows(self, op: UpdateOp) -> VariableHandle | Table:
        return self._own()._target_of_rows(op)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self._refuse()

    def __reduce__(self) -> Any:
        return PerWorkerVariable, (self.name, self._variables)

    def __repr__(self) -> str:
        spec = self._spec
        return (
            f"<zstrat.PerWorkerVariable {spec.name!r} shape={spec.shape} "
            f"dtype={spec.dtype} workers={len(self._variables)}>"
        )


class _OnWorkers(UnboundStorage):
    """The storage of a per-worker variable's value in a step that is called in this
    process instead of scheduled."""

    def refusal(self, variable: VariableHandle, what: str) -> RuntimeError:
        return RuntimeError(
            f"{variable.spec} has a value for each worker (per_worker_variable=True), "
            "but this step was called outside of a worker: schedule it with a "
            "ClusterCoordinator"
        )


_NOWHERE: Final = _OnWorkers()

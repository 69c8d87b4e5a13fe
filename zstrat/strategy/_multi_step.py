"""What a loop over a step function brings back: outputs of the last step, and whatever
else the function leaves.

TF's class, of its first version of strategies: a step function gets one, and may be in
the cross-replica context or in that of a replica when it hands something out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from zstrat.collectives import ReduceOp
from zstrat.variables import VariableAggregation

from ._frames import current
from .reduce._values import reduction

if TYPE_CHECKING:
    from ._abstract import AbstractReplicaContext, AbstractStrategy

_FIRST = VariableAggregation.ONLY_FIRST_REPLICA


@final
class MultiStepContext:
    """Given to each call of the function of ``experimental_run_steps_on_iterator``.

    ``run_op`` is None: the steps have run when the loop returns.
    """

    run_op: None = None

    def __init__(
        self, strategy: AbstractStrategy, initial: dict[str, Any] | None = None
    ) -> None:
        self._strategy = strategy
        self._last_step_outputs: dict[str, Any] = dict(initial or {})
        self._non_tensor_outputs: dict[str, Any] = {}

    @property
    def last_step_outputs(self) -> dict[str, Any]:
        """By name what `set_last_step_output` was last given, reduced if it was to be:
        what one replica context gave without it is one value per replica."""
        return self._last_step_outputs

    @property
    def non_tensor_outputs(self) -> dict[str, Any]:
        """By name what `set_non_tensor_output` was last given."""
        return self._non_tensor_outputs

    def set_last_step_output(
        self,
        name: str,
        output: Any,
        reduce_op: ReduceOp | VariableAggregation | str | None = None,
        *,
        aggregation: VariableAggregation | None = None,
    ) -> None:
        """Keeps an output under a name, in place of that of the step before.

        Args:
            reduce_op: "SUM" or "MEAN": the output is reduced over the replicas. Also a
                `VariableAggregation`, as in TF 1.12. In the cross-replica context it
                may be left out, and the output is kept as it is.
            aggregation: TF 1.12's name of the same.

        Raises:
            AssertionError: In a replica context without a reduction.
            ValueError: ``reduce_op`` is none.
        """
        how = _reduction(aggregation if reduce_op is None else reduce_op)
        replica = _replica()
        if replica is None:
            self._keep(name, output, how)
            return
        if how is None:
            raise AssertionError(
                f"set_last_step_output({name!r}) in a replica context needs a "
                "reduction, 'SUM' or 'MEAN': there is one output in each replica"
            )
        replica.merge_call(lambda _, merged: self._keep(name, merged, how), (output,))

    def set_non_tensor_output(self, name: str, output: Any) -> None:
        """Keeps anything under a name; in a replica context that is the list of what
        the replicas give."""
        replica = _replica()
        if replica is None:
            self._non_tensor_outputs[name] = output
            return

        def merge(strategy: AbstractStrategy, merged: Any) -> None:
            given = strategy.experimental_local_results(merged)
            self._non_tensor_outputs[name] = list(given)

        replica.merge_call(merge, (output,))

    def _keep(
        self, name: str, value: Any, how: ReduceOp | VariableAggregation | None
    ) -> None:
        if isinstance(how, ReduceOp):
            value = self._strategy.reduce(how, value, axis=None)
        elif how is _FIRST:
            value = self._strategy.experimental_local_results(value)[0]
        self._last_step_outputs[name] = value


def _replica() -> AbstractReplicaContext | None:
    frame = current()
    return None if frame is None else frame.replica


def _reduction(given: Any) -> ReduceOp | VariableAggregation | None:
    match given:
        case None | VariableAggregation.NONE:
            return None
        case VariableAggregation():
            is_first = given is _FIRST
            return given if is_first else ReduceOp.from_variable_aggregation(given)
    return reduction(given)

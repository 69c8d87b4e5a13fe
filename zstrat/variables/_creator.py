"""Who makes variables: a strategy's scope, or nobody (then they live in this process).

A scope installs itself in the context variable `creator`. Law of the file: whoever sets
it resets it, in the same thread or task.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ._optimizer import Optimizer
    from ._spec import VariableAggregation, VariableSynchronization
    from ._variable import Variable


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked of one new variable, checked only by its creator."""

    initial_value: Any
    shape: tuple[int, ...] | None
    dtype: Any
    name: str
    trainable: bool
    aggregation: VariableAggregation
    synchronization: VariableSynchronization


class Creator(Protocol):
    """Makes variables and knows their optimizers."""

    def create_variables(self, requests: Sequence[Request]) -> list[Variable]:
        """One variable per request, in order, with one round trip for all of them."""
        ...

    def register_optimizer(self, optimizer: Optimizer) -> int:
        """Makes the optimizer known where the variables live; returns its id there."""
        ...


creator: Final[ContextVar[Creator | None]] = ContextVar("zstrat_creator", default=None)
"""The creator of the scope that this thread or task is in, if any."""

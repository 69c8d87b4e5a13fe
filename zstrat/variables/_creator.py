"""Who makes variables: a strategy's scope, or nobody (then they live in this process).

A scope installs itself in the context variable `creator`. Law of the file: whoever sets
it resets it, in the same thread or task.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from ._recorder import recorder
from ._spec import VariableAggregation, VariableSynchronization

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ._abstract import AbstractVariable
    from ._optimizer import Optimizer


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
    is_whole: bool = False
    """Whether it is one component, whatever a partitioner says."""


class Creator(Protocol):
    """Makes variables and knows their optimizers."""

    def create_variables(
        self, requests: Sequence[Request]
    ) -> Sequence[AbstractVariable]:
        """One variable per request, in order, with one round trip for all of them: a
        `Variable`, or a `ShardedVariable`."""
        ...

    def register_optimizer(self, optimizer: Optimizer) -> int:
        """Makes the optimizer known where the variables live; returns its id there."""
        ...


creator: Final[ContextVar[Creator | None]] = ContextVar("zstrat_creator", default=None)
"""The creator of the scope that this thread or task is in, if any."""


def check(request: Request) -> None:
    """Refuses a request that no creator can carry out.

    Raises:
        ValueError: A step is being traced, or a member of an enum is none.
    """
    if recorder.get() is not None:
        raise ValueError(
            f"variable {request.name!r} is created inside a step function: create "
            "variables before it, in strategy.scope(), and use them in its body"
        )
    for given, wanted in (
        (request.aggregation, VariableAggregation),
        (request.synchronization, VariableSynchronization),
    ):
        if not isinstance(given, wanted):
            raise ValueError(
                f"variable {request.name!r}: expected a member of {wanted.__name__}, "
                f"got {given!r}"
            )

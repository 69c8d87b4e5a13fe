"""Who makes variables: a strategy's scope, or nobody (then they live in this process).

A scope installs itself in the context variable `creator`. Law of the file: whoever sets
it resets it, in the same thread or task.
"""

from __future__ import annotations

import inspect
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from . import _convert
from ._operators import ArrayOperators
from ._recorder import recorder
from ._spec import VariableAggregation, VariableSynchronization

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from ._optimizer import Optimizer
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


def initialize(request: Request) -> np.ndarray:
    """The initial value of a request, its callable called.

    Raises:
        ValueError: There is none, or its shape is another one than asked for.
        TypeError: It is no array of numbers or booleans.
    """
    value, dtype = request.initial_value, request.dtype
    if value is None:
        raise ValueError(
            f"variable {request.name!r} needs an initial_value: an array, a number or "
            "a callable"
        )
    if callable(value) and not isinstance(value, ArrayOperators):
        if request.shape is not None and _takes_shape(value, request.name):
            dtype = "float32" if dtype is None else dtype
            value = value(request.shape, _convert.as_dtype(dtype, request.name))
        else:
            value = value()
    return _convert.initial_array(value, request.shape, dtype, request.name)


def _takes_shape(initializer: Any, name: str) -> bool:
    """Whether the callable wants ``(shape, dtype)``."""
    try:
        signature = inspect.signature(initializer)
    except ValueError:  # a builtin that does not say: TF calls it without arguments
        return False
    if next(iter(signature.parameters), "") in ("key", "rng"):
        raise ValueError(
            f"the initializer of variable {name!r} wants a random key first: bind it, "
            "functools.partial(initializer, jax.random.key(0)), or use zs.initializers"
        )
    try:
        signature.bind((), None)
    except TypeError:  # the answer to the question, not an error
        return False
    return True


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

"""Who makes variables: a strategy's scope, or nobody (then they live in this process).

A scope sets itself as the `creator` of its thread or task; a strategy that is current
without a scope is installed for the whole process. Law of the file: whoever sets it
resets it, in the same thread or task.

How the first value of a variable is had follows TF's rules: a callable that can make a
part of its array does so where the part will live; any other is called here, once. What
a callable takes is read from its signature, not tried.
"""

from __future__ import annotations

import inspect
import math
import weakref
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, runtime_checkable

from zstrat.initializers import Initializer, Sliced

from . import _convert
from ._operators import ArrayOperators
from ._spec import VariableAggregation, VariableSynchronization
from ._tracing import recorder

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextvars import Token

    import numpy as np

    from ._abstract import AbstractVariable
    from .gradients._slots import OptimizerHandle


@dataclass(frozen=True, slots=True)
class VariableRequest:
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


@runtime_checkable
class Creator(Protocol):
    """Makes variables and knows their optimizers."""

    def create_variables(
        self, requests: Sequence[VariableRequest]
    ) -> Sequence[AbstractVariable]:
        """One variable per request, in order, with one round trip for all of them: a
        `Variable`, or a `ShardedVariable`."""
        ...

    def register_optimizer(self, optimizer: OptimizerHandle) -> int:
        """Makes the optimizer known where the variables live; returns its id there."""
        ...

    def forget_optimizer(self, optimizer: int) -> None:
        """The last one that was made known has no handle: creating it failed later."""
        ...


class StrategyCreator:
    """What creators of strategies have in common: the strategy that they create for,
    which they do not keep alive."""

    _strategy: weakref.ref[Any] | None = None

    def belong_to(self, strategy: object) -> None:
        """Said whenever the strategy is about to create; always by the same one."""
        # Weakly: the strategy holds its creator.
        if self._strategy is None:
            self._strategy = weakref.ref(strategy)

    @property
    def strategy(self) -> Any:
        """The strategy; None: nobody holds it any more."""
        return None if self._strategy is None else self._strategy()


@runtime_checkable
class PerWorkerCreator(Protocol):
    """A creator of variables of which each worker has one of its own."""

    def create_per_worker(self, request: VariableRequest) -> Any:
        """One variable, with a value for each worker."""
        ...


def create_per_worker(request: VariableRequest) -> Any:
    """A variable of which each worker has one of its own.

    Raises:
        ValueError: The current scope is not that of a strategy with a coordinator; the
            variable is to be trainable; a step is being traced.
    """
    check(request)
    current = creator.get()
    asked = current.inner if isinstance(current, DelegatingCreator) else current
    if not isinstance(asked, PerWorkerCreator):
        raise ValueError(
            f"variable {request.name!r}: per_worker_variable=True is for the scope of "
            "a zs.ParameterServerStrategy, whose coordinator has workers. Elsewhere "
            "synchronization=zs.VariableSynchronization.ON_READ gives each replica a "
            "value of its own, or leave it out"
        )
    return asked.create_per_worker(request)


@runtime_checkable
class DelegatingCreator(Protocol):
    """A creator that asks another one."""

    @property
    def inner(self) -> Creator | None: ...


def require_owner(current: Creator | None, owner: Creator, name: str) -> None:
    """Refuses a copy of a variable in the scope of another strategy than its own.

    Raises:
        RuntimeError: ``current`` is the creator of another one.
    """
    asked = current.inner if isinstance(current, DelegatingCreator) else current
    if asked is None or asked is owner:
        return
    raise RuntimeError(
        f"variable {name!r} of one strategy is copied (copy.deepcopy) in the scope of "
        "another one, and a copy belongs to the strategy of its original: copy it "
        "outside of that scope, or create a new variable there from its value, "
        "zs.Variable(variable.numpy())"
    )


Aside: TypeAlias = "tuple[Creator | None] | None"
"""What a thread or task has set; None: nothing."""
Before: TypeAlias = "Token[Aside]"


class CurrentCreator:
    """A context variable over one value for all threads."""

    def __init__(self) -> None:
        self._own: ContextVar[Aside] = ContextVar("zstrat_creator", default=None)
        self._installed: Creator | None = None

    def get(self) -> Creator | None:
        """The creator that this thread or task has set, else the installed one."""
        own = self._own.get()
        return self._installed if own is None else own[0]

    def set(self, own: Creator | None) -> Before:
        """Sets that of this thread or task; None: variables live in this process."""
        return self._own.set((own,))

    def reset(self, before: Before) -> None:
        """Takes one `set` back, in the context that it was made in."""
        self._own.reset(before)

    def put_aside(self) -> Aside:
        """What this thread or task has set, for `put_back`: which needs no token, so
        that an async generator may be closed in another context than it began in."""
        return self._own.get()

    def put_back(self, aside: Aside) -> None:
        """Sets what was put aside."""
        self._own.set(aside)

    def install(self, installed: Creator | None) -> None:
        """Sets that of all threads and tasks that have set none."""
        self._installed = installed


creator: Final = CurrentCreator()
"""The creator of the scope that this thread or task is in, if any."""


def is_trainable(
    trainable: bool | None, synchronization: VariableSynchronization, name: str
) -> bool:
    """TF's rule: what is not said is True, but for a variable that is brought together
    when it is read.

    Raises:
        ValueError: It is said to be trainable, and is brought together when read.
    """
    is_on_read = synchronization is VariableSynchronization.ON_READ
    if trainable and is_on_read:
        raise ValueError(
            f"variable {name!r}: Synchronization value can be set to "
            "VariableSynchronization.ON_READ only for non-trainable variables. You "
            "have specified trainable=True and "
            "synchronization=VariableSynchronization.ON_READ: leave trainable out, or "
            "leave synchronization out (AUTO) if an optimizer moves the variable"
        )
    return not is_on_read if trainable is None else bool(trainable)


class CreatedInStep(ValueError):
    """A variable is created where a step is being traced."""


def check(request: VariableRequest) -> None:
    """Refuses a request that no creator can carry out.

    Raises:
        ValueError: A step is being traced, or a member of an enum is none.
    """
    current = recorder.get()
    if current is not None and not current.may_create:
        raise CreatedInStep(
            f"variable {request.name!r} is created inside a step function: create "
            "variables before it, in strategy.scope(), and use them in its body. (It "
            "may create them when it is called for the first time, outside of others "
            "and not scheduled, if it keeps them: if self.v is None: self.v = ...)"
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


_SMALL: Final = 2**20
"""Bytes up to which what `zstrat.initializers` make is made here: it is the same
anywhere, and a parameter server need not load code for it."""

_PARTITION: Final = ("partition_shape", "partition_offset")


@dataclass(frozen=True, slots=True)
class DeferredValue:
    """A value that is made where it will live: the whole is never here."""

    shape: tuple[int, ...]
    dtype: np.dtype
    initializer: Initializer


def initial(request: VariableRequest) -> DeferredValue | np.ndarray:
    """How the value of a request is had: there, or here and now.

    Raises:
        ValueError: There is none, or its shape is another one than asked for.
        TypeError: It is no array of numbers or booleans.
    """
    value = request.initial_value
    if not _is_callable(value) or request.shape is None:
        return initialize(request)
    takes_shape = _takes_shape(value, request.name)
    if not takes_shape and request.dtype is None:
        return initialize(request)
    dtype = _dtype(request)
    initializer = _sliced(value, takes_shape)
    small = math.prod(request.shape) * dtype.itemsize <= _SMALL
    # What is sent as code has to be loaded there; a small value of our own initializers
    # is quicker made here, and the same.
    if initializer is None or (small and initializer is value):
        return initialize(request)
    initializer.require_fitting(dtype)
    return DeferredValue(request.shape, dtype, initializer)


def initialize(request: VariableRequest) -> np.ndarray:
    """The initial value of a request, its callable called.

    Raises:
        ValueError: There is none, or its shape is another one than asked for.
        TypeError: It is no array of numbers or booleans.
    """
    value = request.initial_value
    if value is None:
        raise ValueError(
            f"variable {request.name!r} needs an initial_value: an array, a number or "
            "a callable"
        )
    if _is_callable(value):
        value = _called(request)
    return _convert.initial_array(value, request.shape, request.dtype, request.name)


def _called(request: VariableRequest) -> Any:
    value, shape = request.initial_value, request.shape
    if shape is None:
        return value()
    takes_shape = _takes_shape(value, request.name)
    if not takes_shape and request.dtype is None:
        return value()
    initializer = _sliced(value, takes_shape)
    if initializer is not None:
        return initializer(shape, _dtype(request))
    return value(shape, _dtype(request)) if takes_shape else value()


def _sliced(value: Any, takes_shape: bool) -> Initializer | None:
    """The callable as one that makes parts, or None if it makes only the whole."""
    if isinstance(value, Initializer):
        return value
    by_name = _names_parts(value)
    if by_name or _takes_any(value):
        return Sliced(value, takes_shape, by_name)
    return None


def _dtype(request: VariableRequest) -> np.dtype:
    dtype = "float32" if request.dtype is None else request.dtype
    return _convert.as_dtype(dtype, request.name)


def _is_callable(value: Any) -> bool:
    return callable(value) and not isinstance(value, ArrayOperators)


def _takes_shape(initializer: Any, name: str) -> bool:
    """Whether the callable wants ``(shape, dtype)``."""
    signature = _signature(initializer)
    if signature is None:
        return False
    if next(iter(signature.parameters), "") in ("key", "rng"):
        raise ValueError(
            f"the initializer of variable {name!r} wants a random key first: bind it, "
            "functools.partial(initializer, jax.random.key(0)), or use zs.initializers"
        )
    parts = dict.fromkeys(_PARTITION) if _names_parts(initializer) else {}
    try:
        signature.bind((), None, **parts)
    except TypeError:  # the answer to the question, not an error
        return False
    return True


def _names_parts(initializer: Any) -> bool:
    signature = _signature(initializer)
    return signature is not None and set(_PARTITION) <= set(signature.parameters)


def _takes_any(initializer: Any) -> bool:
    signature = _signature(initializer)
    return signature is not None and any(
        parameter.kind is parameter.VAR_KEYWORD
        for parameter in signature.parameters.values()
    )


def _signature(initializer: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(initializer)
    except ValueError:  # a builtin that does not say: TF calls it without arguments
        return None

"""Creation of variables: the current creator, and initial values.

A creator is the object that decides where variables are stored. A strategy's scope sets
its creator in the context variable `creator`; a strategy that is current without a
scope installs its creator for the whole process. Without a creator variables are stored
in this process. Law of the file: the code that sets the creator resets it, in the same
thread or task.

Initial values follow TF's rules: a callable that can make a part of its array is called
on the parameter server that stores the part; any other callable is called once, in this
process. Its arguments are determined from its signature, never by trial calls.
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
from ._recorder import recorder
from ._storage import VariableAggregation, VariableSynchronization

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextvars import Token

    import numpy as np

    from ._abstract import AbstractVariable
    from .gradients._slots import OptimizerHandle


@dataclass(frozen=True, slots=True)
class VariableRequest:
    """The user's arguments for one new variable; the creator checks them."""

    initial_value: Any
    shape: tuple[int, ...] | None
    dtype: Any
    name: str
    trainable: bool
    aggregation: VariableAggregation
    synchronization: VariableSynchronization
    is_whole: bool = False
    """Whether partitioners must leave the variable unsharded."""


@runtime_checkable
class Creator(Protocol):
    """Creates variables, and registers optimizers where the variables are stored."""

    def create_variables(
        self, requests: Sequence[VariableRequest]
    ) -> Sequence[AbstractVariable]:
        """Creates a `Variable` or `ShardedVariable` for each request, in order, with
        one round trip for all of them."""
        ...

    def register_optimizer(self, optimizer: OptimizerHandle) -> int:
        """Registers an optimizer where the variables are stored; returns the id of the
        optimizer."""
        ...

    def forget_optimizer(self, optimizer: int) -> None:
        """Undoes the last registration, because the constructor of the optimizer
        failed."""
        ...


class StrategyCreator:
    """Base of the creators of strategies; it refers weakly to its strategy."""

    _strategy: weakref.ref[Any] | None = None

    def belong_to(self, strategy: object) -> None:
        """Sets the strategy of this creator. All calls must name the same strategy."""
        # Weakly: the strategy holds its creator.
        if self._strategy is None:
            self._strategy = weakref.ref(strategy)

    @property
    def strategy(self) -> Any:
        """The strategy of this creator; None if it is no longer alive."""
        return None if self._strategy is None else self._strategy()


@runtime_checkable
class PerWorkerCreator(Protocol):
    """A creator of variables with one value per worker."""

    def create_per_worker(self, request: VariableRequest) -> Any:
        """Creates one variable with a value for each worker."""
        ...


def create_per_worker(request: VariableRequest) -> Any:
    """Creates a variable with one value per worker.

    Raises:
        ValueError: The current scope does not belong to a strategy with a coordinator;
            the variable is trainable; a step is being traced.
    """
    check(request)
    current = of_strategy(creator.get())
    if not isinstance(current, PerWorkerCreator):
        raise ValueError(
            f"variable {request.name!r}: per_worker_variable=True is for the scope of "
            "a zs.ParameterServerStrategy, whose coordinator has workers. Elsewhere "
            "synchronization=zs.VariableSynchronization.ON_READ gives each replica a "
            "value of its own, or leave it out"
        )
    return current.create_per_worker(request)


@runtime_checkable
class DelegatingCreator(Protocol):
    """A creator that delegates to another one."""

    @property
    def inner(self) -> Creator | None: ...


def of_strategy(current: Creator | None) -> Creator | None:
    """Returns the creator of the current strategy. In a replica that runs sequentially,
    that is the one to which the current creator delegates."""
    return current.inner if isinstance(current, DelegatingCreator) else current


def require_owner(current: Creator | None, owner: Creator, name: str) -> None:
    """Refuses to copy the variable ``name`` in the scope of another strategy than the
    one of ``owner``, its creator.

    Raises:
        RuntimeError: ``current`` is the creator of another strategy than ``owner``.
    """
    current = of_strategy(current)
    if current is None or current is owner:
        return
    raise RuntimeError(
        f"variable {name!r} is copied (copy.deepcopy) in the scope of another strategy "
        "than its own, and a copy belongs to the strategy of its original: copy it "
        "outside of that scope, or create a new variable there from its value, "
        "zs.Variable(variable.numpy())"
    )


Aside: TypeAlias = "tuple[Creator | None] | None"
"""What `put_aside` saves: the creator that a thread or task has set; None if it has set
none."""
Before: TypeAlias = "Token[Aside]"


class CurrentCreator:
    """Holds the current creator: a context variable, with a default for the process."""

    def __init__(self) -> None:
        self._own: ContextVar[Aside] = ContextVar("zstrat_creator", default=None)
        self._installed: Creator | None = None

    def get(self) -> Creator | None:
        """Returns the creator that this thread or task has set, otherwise the installed
        one."""
        own = self._own.get()
        return self._installed if own is None else own[0]

    def set(self, own: Creator | None) -> Before:
        """Sets the creator of this thread or task; with None variables are stored in
        this process. Returns a token for `reset`."""
        # In a tuple: (None,) stores variables here, None alone leaves it to the
        # installed one.
        return self._own.set((own,))

    def reset(self, before: Before) -> None:
        """Undoes the `set` that returned this token, in the same context."""
        self._own.reset(before)

    def put_aside(self) -> Aside:
        """Clears and returns the creator that this thread or task has set, for
        `put_back`.

        Unlike `set`, this needs no token: async generators may end in another context
        than they began in.
        """
        return self._own.get()

    def put_back(self, aside: Aside) -> None:
        """Sets the creator again that `put_aside` returned."""
        self._own.set(aside)

    def install(self, installed: Creator | None) -> None:
        """Sets the default creator, of all threads and tasks that have set none."""
        self._installed = installed


creator: Final = CurrentCreator()
"""The current creator of this thread or task."""


def is_trainable(
    trainable: bool | None, synchronization: VariableSynchronization, name: str
) -> bool:
    """Returns TF's default of ``trainable``: True, unless the synchronization of the
    variable is ON_READ.

    Raises:
        ValueError: ``trainable`` is True, and the synchronization is ON_READ.
    """
    is_on_read = synchronization is VariableSynchronization.ON_READ
    if trainable and is_on_read:
        raise ValueError(
            f"variable {name!r}: Synchronization value can be set to "
            "VariableSynchronization.ON_READ only for non-trainable variables. You "
            "have specified trainable=True and "
            "synchronization=VariableSynchronization.ON_READ: leave trainable out, or "
            "leave synchronization out (AUTO) if an optimizer updates the variable"
        )
    return not is_on_read if trainable is None else bool(trainable)


class CreatedInStep(ValueError):
    """Raised when a variable is created while a step is being traced."""


def check(request: VariableRequest) -> None:
    """Refuses a request that no creator can carry out.

    Raises:
        ValueError: A step is being traced, or ``synchronization`` or ``aggregation`` is
            not a member of its enum.
    """
    current = recorder.get()
    if current is not None and not current.may_create:
        raise CreatedInStep(
            f"variable {request.name!r} is created inside a step function: create "
            "variables before it, in strategy.scope(), and use them in its body. (A "
            "step may create variables at its first call, if that is neither scheduled "
            "nor inside another step, and if it keeps them: "
            "if self.v is None: self.v = ...)"
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
"""Up to this size in bytes, values of `zstrat.initializers` are made in this process:
they are the same anywhere, and a parameter server then need not load code."""

_PARTITION: Final = ("partition_shape", "partition_offset")


@dataclass(frozen=True, slots=True)
class DeferredValue:
    """An initial value that is made by the process that stores it, so that this process
    never holds the whole array."""

    shape: tuple[int, ...]
    dtype: np.dtype
    initializer: Initializer


def initial(request: VariableRequest) -> DeferredValue | np.ndarray:
    """Makes the initial value of a variable, or a `DeferredValue` if the process that
    stores the variable can make it.

    Raises:
        ValueError: The request has no value, or one of another shape.
        TypeError: The value is not an array of numbers or booleans.
    """
    value = request.initial_value
    # Without the shape there are no parts to make.
    if not _is_callable(value) or request.shape is None:
        return initialize(request)
    takes_shape = _takes_shape(value, request.name)
    # Only the value itself can tell its dtype.
    if not takes_shape and request.dtype is None:
        return initialize(request)
    dtype = _dtype(request)
    initializer = _sliced(value, takes_shape)
    small = math.prod(request.shape) * dtype.itemsize <= _SMALL
    # A server has to load code that is sent; a small value of our own initializers is
    # made faster here, and is the same.
    if initializer is None or (small and initializer is value):
        return initialize(request)
    initializer.require_fitting(dtype)
    return DeferredValue(request.shape, dtype, initializer)


def initialize(request: VariableRequest) -> np.ndarray:
    """Makes the initial value of a variable in this process; calls it if it is a
    callable.

    Raises:
        ValueError: The request has no value, or one of another shape.
        TypeError: The value is not an array of numbers or booleans.
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
    """Wraps a callable that can make parts of its array as an initializer; returns None
    if it only makes the whole array."""
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
    """Returns whether the callable takes arguments ``(shape, dtype)``."""
    signature = _signature(initializer)
    if signature is None:
        return False
    # As the initializers of flax and of `jax.nn` do.
    if next(iter(signature.parameters), "") in ("key", "rng"):
        raise ValueError(
            f"the initializer of variable {name!r} takes a random key first: bind it, "
            "functools.partial(initializer, jax.random.key(0)), or use zs.initializers"
        )
    parts = dict.fromkeys(_PARTITION) if _names_parts(initializer) else {}
    try:
        # Binds without calling, because a call may have effects, and TypeErrors of its
        # own.
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
    except ValueError:  # a builtin without one: TF calls it without arguments
        return None

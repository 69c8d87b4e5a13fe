"""How the first value of a variable is had: who calls its callable, and with what.

TF's rules: a callable that can make a part of its array does so where the part will
live; any other is called here, once. Law of the file: what a callable takes is read
from its signature, not tried.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from zstrat.initializers import Initializer, Sliced

from . import _convert
from ._operators import ArrayOperators

if TYPE_CHECKING:
    import numpy as np

    from ._creator import VariableRequest

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
    if initializer is None or (small and initializer is value):
        return initialize(request)
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

"""What a coordinator ships with a step: scope, settings of jax, values, arrays.

The coordinator traces a step in its strategy's scope, and a worker must trace the body
with the same result of ``get_strategy()``. A worker has entered no scope, so the body
enters the strategy's scope itself (`ScopedBody`). It also sets the program's settings
of jax that change results: random numbers, and the precision of matrix products.

Arrays among the arguments of a call are sent at each schedule, outside of the call. The
call is traced, pickled and shipped once, with an `Input` in place of each array, and
each closure has the bytes of its own arrays. So a step that gets another batch each
time costs as much as one without arguments, except for these bytes. This holds inside
of tuples, lists and dicts; a call with other containers is pickled whole.
"""

from __future__ import annotations

import contextlib
import math
import operator
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    NamedTuple,
    Protocol,
    final,
)

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_dataclass

from zstrat.variables import downcast_loss, is_weak, recorder

from ._pickler import WIDE

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable
    from contextlib import AbstractContextManager

    Buffer = bytes | memoryview


class Scoping(Protocol):
    """A strategy; unpickled on a worker it is the worker's stand-in for it."""

    def scope(self) -> AbstractContextManager[object]: ...


@final
@dataclass(frozen=True)
class CarriedValues:
    """Values of variables of the coordinator's process when a step was scheduled.

    They are the first argument of the shipped step, by key of the variable, and are
    traced as any argument.
    """

    keys: tuple[int, ...]
    values: tuple[Any, ...]

    def give(self) -> None:
        """Gives the values to the recorder of the step that is being traced."""
        current = recorder.get()
        assert current is not None
        current.take_values(dict(zip(self.keys, self.values, strict=True)))


register_dataclass(CarriedValues, data_fields=["values"], meta_fields=["keys"])


_SETTINGS: Final[dict[str, tuple[Any, Any]]] = {
    "jax_default_prng_impl": (jax.default_prng_impl, "threefry2x32"),
    "jax_threefry_partitionable": (jax.threefry_partitionable, True),
    "jax_default_matmul_precision": (jax.default_matmul_precision, None),
}
"""Settings of jax that change results, with context manager and default. The default
leaves the worker's own setting, from its environment say."""

_settings: Final = operator.attrgetter("jax_enable_x64", *_SETTINGS)


def jax_settings() -> tuple[Any, ...]:
    """Reads this thread's settings of jax that change results. Runs at each
    schedule."""
    settings: tuple[Any, ...] = _settings(jax.config)
    return settings


def _enter(settings: tuple[Any, ...], entered: contextlib.ExitStack) -> None:
    """Sets the settings of jax on this thread.

    Raises:
        RuntimeError: 64 bits, which a worker's process must have from its start.
    """
    is_wide, *others = settings
    if is_wide and not _settings(jax.config)[0]:
        raise RuntimeError(
            "the program computes with 64 bits (jax_enable_x64), and this worker with "
            "32: start all workers with JAX_ENABLE_X64=1"
        )
    for value, (context, default) in zip(others, _SETTINGS.values(), strict=True):
        if value != default:
            entered.enter_context(context(value))


@final
class ScopedBody:
    """Calls ``step`` in the scope of ``strategy``, with carried values, under the
    settings of jax of the program."""

    __slots__ = ("settings", "step", "strategy")

    def __init__(
        self, step: Callable[..., Any], strategy: Scoping, settings: tuple[Any, ...]
    ) -> None:
        self.step, self.strategy, self.settings = step, strategy, settings

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], CarriedValues):
            args[0].give()
            args = args[1:]
        with contextlib.ExitStack() as entered:
            _enter(self.settings, entered)
            entered.enter_context(self.strategy.scope())
            return self.step(*args, **kwargs)

    def __reduce__(self) -> Any:
        return ScopedBody, (self.step, self.strategy, self.settings)


BESIDE: Final = 64 * 1024
"""From this many bytes an array, or the inputs of a closure, has a frame of its own;
smaller ones are cheaper to copy."""

_NUMBERS: Final = frozenset("biufc")


@final
class Input(NamedTuple):
    """Where an array stood, and where its bytes are. ``kind`` is what it was:
    `numpy.ndarray`, `jax.Array`, or `numpy.generic` for a scalar of numpy."""

    start: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    kind: type

    def taken(self, inputs: Buffer) -> Any:
        """Reads the array from the inputs: a copy, or a read-only view if it has
        `BESIDE` bytes or more."""
        count = math.prod(self.shape)
        array = np.frombuffer(inputs, self.dtype, count, self.start)
        if self.kind is np.generic:
            return array[0]
        array = array.reshape(self.shape)
        if array.nbytes < BESIDE or not array.flags.aligned:
            array = array.copy()
        return jnp.asarray(array) if self.kind is jax.Array else array


def input_key(value: Any) -> Hashable | None:
    """Returns a key that is equal for arrays that can replace each other; None if the
    value is not an array of plain numbers."""
    if type(value) is not np.ndarray and not isinstance(value, np.generic):
        return _key_of_jax_array(value) if isinstance(value, jax.Array) else None
    dtype = value.dtype
    if dtype.kind not in _NUMBERS or not dtype.isnative or not value.nbytes:
        return None
    return type(value), dtype, value.shape


def _key_of_jax_array(value: jax.Array) -> Hashable | None:
    """Returns the key; None for tracers, random keys, weak types, 64 bits, and arrays
    that are donated or not addressable, which the trace and the pickler handle."""
    if isinstance(value, jax.core.Tracer) or is_weak(value):
        return None
    dtype = value.dtype
    if not isinstance(dtype, np.dtype) or dtype.kind not in _NUMBERS or not value.size:
        return None
    if dtype.name in WIDE or value.is_deleted() or not value.is_fully_addressable:
        return None
    return jax.Array, dtype, value.shape


def loses_bits(array: Any) -> bool:
    """Returns whether a downcast by jax would change one of the integers."""
    if array.dtype.itemsize < 8 or array.dtype.kind not in "iu":
        return False
    return downcast_loss(array) is not None


def bytes_of_inputs(inputs: list[Any]) -> bytes:
    """Concatenates the bytes of arrays, in C order."""
    return b"".join(
        [
            # Of a small array a copy is faster than the call.
            np.asarray(array).tobytes()
            if array.nbytes < BESIDE
            else np.ascontiguousarray(array).data
            for array in inputs
        ]
    )


def cut_inputs(value: Any, count: list[int]) -> Any:
    """Replaces each array of an argument by an `Input`.

    Args:
        count: A list of one number, the bytes of inputs so far; it is increased.
    """
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([cut_inputs(item, count) for item in value])
    if kind is dict:
        return {name: cut_inputs(item, count) for name, item in value.items()}
    if input_key(value) is None:
        return value
    start = count[0]
    count[0] += value.nbytes
    kinds = np.ndarray, np.generic, jax.Array
    kind = next(kind for kind in kinds if isinstance(value, kind))
    return Input(start, value.dtype, value.shape, kind)


def fill_inputs(value: Any, inputs: Buffer) -> Any:
    """Undoes `cut_inputs`, with the bytes of these inputs."""
    kind = type(value)
    if kind is Input:
        return value.taken(inputs)
    if kind is tuple or kind is list:
        return kind([fill_inputs(item, inputs) for item in value])
    if kind is dict:
        return {name: fill_inputs(item, inputs) for name, item in value.items()}
    return value

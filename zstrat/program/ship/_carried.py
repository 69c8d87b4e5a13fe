"""What travels with a step beside its code: a scope, settings, values, arrays.

The coordinator traces a step in its strategy's scope, and a worker must trace the same
body with the same answer of ``get_strategy()``. A worker has entered no scope, so the
body brings its own: wherever it is traced or run, at the cost of that alone. It brings
what jax is told in the program, too, of how to compute: which random numbers a key
gives, and how exact a product of matrices is.

Arrays among the arguments of a call travel beside it at each schedule. A call with
other numbers is the same call: it is traced, pickled and shipped once, with an `Input`
where each array stood, and each closure brings the bytes of its own. A step that is
given another batch each time costs what one without arguments does, but for these
bytes. That is so inside of tuples, lists and dicts alone: what other containers do with
what they hold is not known here, and a call with such an argument is pickled whole.
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
    runtime_checkable,
)

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_dataclass

from zstrat.variables import downcast_loss, is_weak, recorder

from ._pickler import WIDE

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping
    from contextlib import AbstractContextManager

    Buffer = bytes | memoryview


class Scoping(Protocol):
    """A strategy: pickled, it arrives as what stands for it on a worker."""

    def scope(self) -> AbstractContextManager[object]: ...


@runtime_checkable
class TakesValues(Protocol):
    """A recorder that takes values of variables which are not where it runs."""

    def take_values(self, values: Mapping[int, Any]) -> None:
        """Gives the variables with these keys these values, during the whole step."""
        ...


@final
@dataclass(frozen=True)
class CarriedValues:
    """Values of variables of the coordinator's process, as they were when the step was
    scheduled; as the first argument they travel with it. Keys are those of the
    variables; values are arrays, which are traced as those of any argument are."""

    keys: tuple[int, ...]
    values: tuple[Any, ...]

    def give(self) -> None:
        """Hands them to the recorder of the step that is being traced."""
        current = recorder.get()
        assert isinstance(current, TakesValues), current
        current.take_values(dict(zip(self.keys, self.values, strict=True)))


register_dataclass(CarriedValues, data_fields=["values"], meta_fields=["keys"])


_SETTINGS: Final[dict[str, tuple[Any, Any]]] = {
    "jax_default_prng_impl": (jax.default_prng_impl, "threefry2x32"),
    "jax_threefry_partitionable": (jax.threefry_partitionable, True),
    "jax_default_matmul_precision": (jax.default_matmul_precision, None),
}
"""What a program may tell jax of how to compute, each with its context manager, and
what it is if nobody says anything: then it is as the worker was told, by its
environment say."""

_settings: Final = operator.attrgetter("jax_enable_x64", *_SETTINGS)


def jax_settings() -> tuple[Any, ...]:
    """What jax is told on this thread, by ``jax.config.update`` or a context manager,
    of that which a step is to be computed with. Asked at each schedule."""
    found: tuple[Any, ...] = _settings(jax.config)
    return found


def _enter(settings: tuple[Any, ...], entered: contextlib.ExitStack) -> None:
    """Has jax compute on this thread as it does where the settings are from.

    Raises:
        RuntimeError: With 64 bits: a worker's process does so from its start, or not.
    """
    is_wide, *others = settings
    if is_wide and not _settings(jax.config)[0]:
        raise RuntimeError(
            "the step was scheduled where jax computes with 64 bits (jax_enable_x64), "
            "and this worker computes with 32: start all workers with JAX_ENABLE_X64=1"
        )
    for value, (context, default) in zip(others, _SETTINGS.values(), strict=True):
        if value != default:
            entered.enter_context(context(value))


@final
class ScopedBody:
    """Calls ``step`` in the scope of ``strategy``, with the values that were carried to
    it, under the settings of jax with which it was shipped."""

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
"""Bytes from which on an array, or the inputs of a closure, travel in a frame of their
own: that costs more than to copy what is smaller."""

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
        """The array: a copy, which a step may keep or write to; one of `BESIDE` bytes
        or more is a view of the inputs, read-only."""
        count = math.prod(self.shape)
        array = np.frombuffer(inputs, self.dtype, count, self.start)
        if self.kind is np.generic:
            return array[0]
        array = array.reshape(self.shape)
        if array.nbytes < BESIDE or not array.flags.aligned:
            array = array.copy()
        return jnp.asarray(array) if self.kind is jax.Array else array


def input_key(value: Any) -> Hashable | None:
    """What all arrays have in common that may take the place of this one; None if it is
    no array of plain numbers."""
    if type(value) is not np.ndarray and not isinstance(value, np.generic):
        return _key_of_jax_array(value) if isinstance(value, jax.Array) else None
    dtype = value.dtype
    if dtype.kind not in _NUMBERS or not dtype.isnative or not value.nbytes:
        return None
    return type(value), dtype, value.shape


def _key_of_jax_array(value: jax.Array) -> Hashable | None:
    """None for tracers, keys, weak types, 64 bits, and an array of which a part is
    elsewhere, or that was donated: of these the trace and the pickler tell."""
    if isinstance(value, jax.core.Tracer) or is_weak(value):
        return None
    dtype = value.dtype
    if not isinstance(dtype, np.dtype) or dtype.kind not in _NUMBERS or not value.size:
        return None
    if dtype.name in WIDE or value.is_deleted() or not value.is_fully_addressable:
        return None
    return jax.Array, dtype, value.shape


def loses_bits(array: Any) -> bool:
    """Whether jax would cut one of its integers, as it computes with 32 bits."""
    if array.dtype.itemsize < 8 or array.dtype.kind not in "iu":
        return False
    return downcast_loss(array) is not None


def bytes_of_inputs(inputs: list[Any]) -> bytes:
    """The bytes of arrays one behind the other, in C order, as they are now."""
    return b"".join([_bytes_of(array) for array in inputs])


def _bytes_of(array: Any) -> Buffer:
    if array.nbytes < BESIDE:  # which the call costs more than its copies
        return np.asarray(array).tobytes()
    return np.ascontiguousarray(array).data


def cut_inputs(value: Any, count: list[int]) -> Any:
    """The argument with an `Input` in the place of each array.

    Args:
        count: One number: the bytes of the inputs before this argument; it is advanced.
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
    """The argument as `cut_inputs` was given it, with these bytes."""
    kind = type(value)
    if kind is Input:
        return value.taken(inputs)
    if kind is tuple or kind is list:
        return kind([fill_inputs(item, inputs) for item in value])
    if kind is dict:
        return {name: fill_inputs(item, inputs) for name, item in value.items()}
    return value

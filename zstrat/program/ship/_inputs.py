"""Small arrays among the arguments of a call, which travel beside it at each schedule.

A call with other numbers is the same call: it is traced, pickled and shipped once, with
an `Input` where each such array stood, and each closure brings the bytes of its own. A
step that is given another learning rate each time costs what one without arguments
does, but for these bytes.

Inside of tuples, lists and dicts alone: what other containers do with what they hold is
not known here, and a call with such an argument is pickled whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

import numpy as np

from zstrat.variables import what_is_lost

if TYPE_CHECKING:
    from collections.abc import Hashable

    Buffer = bytes | memoryview

INPUT_BYTES: Final = 1024
"""Bytes of the inputs of one closure: what is copied into each dispatch, and kept until
the closure has ended. Larger arguments are shipped once and named by number."""

_NUMBERS: Final = frozenset("biufc")


@final
class Input(NamedTuple):
    """Where an array stood, and where its bytes are; ``shape`` None: a numpy scalar."""

    start: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...] | None

    def taken(self, inputs: Buffer) -> Any:
        """A copy of the array, which a step may keep or write to."""
        count = 1 if self.shape is None else int(np.prod(self.shape))
        array = np.frombuffer(inputs, self.dtype, count, self.start)
        return array[0] if self.shape is None else array.reshape(self.shape).copy()


def input_key(value: Any) -> Hashable | None:
    """What all arrays have in common that may take the place of this one; None if it is
    no small array of plain numbers."""
    kind = type(value)
    if kind is not np.ndarray and not isinstance(value, np.generic):
        return None
    dtype = value.dtype
    if dtype.kind not in _NUMBERS or not dtype.isnative:
        return None
    return (kind, dtype, value.shape) if 0 < value.nbytes <= INPUT_BYTES else None


def loses_bits(array: Any) -> bool:
    """Whether jax would cut one of its integers, as it computes with 32 bits."""
    if array.dtype.itemsize < 8 or array.dtype.kind not in "iu":
        return False
    return what_is_lost(array) is not None


def bytes_of_inputs(inputs: list[Any]) -> bytes:
    """The bytes of arrays one behind the other, in C order, as they are now."""
    return b"".join([array.tobytes() for array in inputs])


def cut_inputs(value: Any, count: list[int]) -> Any:
    """The argument with an `Input` in the place of each small array.

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
    return Input(start, value.dtype, value.shape if kind is np.ndarray else None)


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

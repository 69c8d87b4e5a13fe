"""How gradients travel in fewer bytes, and `decode_gradient`.

A *block* is `GRADIENT_BLOCK` numbers in C order (of rows: `ROW_BLOCK`), the last one
maybe fewer, with one scale, float32: the largest magnitude in the block.

===========  ==========================================  =============================
codec        arrays                                      numbers
===========  ==========================================  =============================
BFLOAT16     numbers, bfloat16 in the array's shape      the nearest bfloat16
INT8         codes, int8 ``[n]``; scales                 scale * code / 127
INT4         codes, uint8 ``[(n + 1) // 2]``; scales     scale * (nibble - 8) / 7
E3M0         codes, uint8 ``[(n + 1) // 2]``; scales     a sign and 0 or a power of two
TOP_K        places, uint16 ``[m]``; float32 ``[m]``     the rest is 0
===========  ==========================================  =============================

Two numbers are in a byte, the first in its lower half. A nibble of E3M0 is a sign (bit
3) and an exponent e: 0 for e = 0, else scale * 2**(e - 7). TOP_K keeps the same share
of largest magnitudes of every `CHUNK` numbers in C order, and places count from the
first number of their chunk. The format E3M0 is that of "Streaming DiLoCo" (Douillard et
al., 2025), chunks those of SparseLoCo (2508.15706).

A number that is not finite makes its whole block NaN; in BFLOAT16 and TOP_K it travels
as it is.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

from zstrat.errors import InvalidArgumentError
from zstrat.wire import Codec, dtype_named

if TYPE_CHECKING:
    from collections.abc import Sequence

GRADIENT_BLOCK: Final = 256
"""Numbers with one scale: it costs an eighth of a bit for each of them."""

ROW_BLOCK: Final = 128
"""Numbers of rows with one scale: rows are of very different size."""

CHUNK: Final = 4096
"""Numbers of which the same count of largest ones is kept."""

BFLOAT16: Final = dtype_named("bfloat16")

_LEVELS: Final = np.array([0.0, *(2.0**e for e in range(-6, 1))], np.float32)
"""Magnitudes of E3M0, of the scale."""

_NIBBLES: Final = {
    Codec.INT4: (np.arange(16, dtype=np.float32) - 8) / np.float32(7),
    Codec.E3M0: np.concatenate([_LEVELS, -_LEVELS]),
}
_BYTES: Final = {
    codec: np.stack([np.tile(values, 16), np.repeat(values, 16)], axis=1)
    for codec, values in _NIBBLES.items()
}
"""The two numbers of each byte."""

_DATA: Final = {
    Codec.BFLOAT16: (BFLOAT16,),
    Codec.INT8: (np.dtype(np.int8), np.dtype("<f4")),
    Codec.INT4: (np.dtype(np.uint8), np.dtype("<f4")),
    Codec.E3M0: (np.dtype(np.uint8), np.dtype("<f4")),
    Codec.TOP_K: (np.dtype("<u2"), np.dtype("<f4")),
}


def arrays_of(codec: Codec) -> int:
    """Returns the number of arrays that stand for one."""
    return len(_DATA[codec])


def decode_gradient(
    codec: Codec, shape: tuple[int, ...], arrays: Sequence[np.ndarray], block: int
) -> np.ndarray:
    """Returns the array, float32 of ``shape``.

    Args:
        block: Numbers with one scale.

    Raises:
        InvalidArgumentError: The arrays are not what the codec makes of an array of
            that shape.
    """
    size = math.prod(shape)
    got = [(array.dtype, array.size) for array in arrays]
    if codec is Codec.TOP_K:
        expected = [(_DATA[codec][0], got[0][1]), (_DATA[codec][1], got[0][1])]
    else:
        coded = size if codec in (Codec.BFLOAT16, Codec.INT8) else (size + 1) // 2
        sizes = (coded, -(-size // block))
        expected = list(zip(_DATA[codec], sizes, strict=False))
    if got != expected:
        raise InvalidArgumentError(
            f"codec {codec.name}, an array of shape {shape}: expected arrays of "
            f"{_listed(expected)}, got {_listed(got)}"
        )
    if codec is Codec.BFLOAT16:
        return arrays[0].reshape(shape).astype(np.float32)
    data, numbers = (array.reshape(-1) for array in arrays)
    if codec is Codec.TOP_K:
        return _spread(size, data, numbers).reshape(shape)
    if codec is Codec.INT8:
        values = data.astype(np.float32)
        values /= 127
    else:
        values = _BYTES[codec].take(data, axis=0).reshape(-1)[:size]
    whole = size - size % block
    if whole:
        values[:whole].reshape(-1, block)[:] *= numbers[: whole // block, None]
    if whole < size:
        values[whole:] *= numbers[-1]
    return values.reshape(shape)


def kept_of(count: int, each: int) -> int:
    """Returns how many of the ``count`` numbers of a chunk TOP_K keeps, if it keeps
    ``each`` of a full one: at least one."""
    return -(-count * each // CHUNK)


def _spread(size: int, places: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    values = np.zeros(size, np.float32)
    if not size and not len(places):
        return values
    chunks, last = divmod(size, CHUNK)
    near = len(places) * CHUNK // max(size, 1)
    found = [
        each
        for each in (near - 1, near, near + 1)
        if 0 < each <= CHUNK and chunks * each + kept_of(last, each) == len(places)
    ]
    if not found:
        raise InvalidArgumentError(
            f"codec TOP_K: {len(places)} numbers of {size}: expected the same share of "
            f"each {CHUNK}"
        )
    at = np.arange(len(places)) // found[0] * CHUNK + places
    if int(places.max()) >= CHUNK or int(at.max()) >= size:
        raise InvalidArgumentError(
            f"codec TOP_K: a number of a chunk at place {int(places.max())}, or at "
            f"{int(at.max())} of {size}"
        )
    values[at] = numbers
    return values


def _listed(arrays: Sequence[tuple[np.dtype, int]]) -> str:
    return ", ".join(f"{dtype.name}[{size}]" for dtype, size in arrays)

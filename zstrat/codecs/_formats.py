"""Encodes and decodes gradients in fewer bytes.

A *block* is `GRADIENT_BLOCK` numbers in C order (in rows of tables `ROW_BLOCK`; the
last block may have fewer) that share one scale, float32: the largest magnitude in the
block.

===========  ==========================================  =============================
codec        arrays                                      numbers
===========  ==========================================  =============================
BFLOAT16     numbers, bfloat16 in the array's shape      the nearest bfloat16
INT8         codes, int8 ``[n]``; scales                 scale * code / 127
INT4         codes, uint8 ``[(n + 1) // 2]``; scales     scale * (nibble - 8) / 7
E3M0         codes, uint8 ``[(n + 1) // 2]``; scales     a sign and 0 or a power of two
TOP_K        places, uint16 ``[m]``; float32 ``[m]``     the rest is 0
===========  ==========================================  =============================

INT4 and E3M0 put two numbers in a byte, the first in its lower half. A nibble of E3M0
is a sign (bit 3) and an exponent e: 0 for e = 0, else scale * 2**(e - 7). TOP_K keeps
the same share of numbers, those of largest magnitude, of every chunk: `CHUNK` numbers
in C order. Places are the indices of kept numbers in their chunk. The format E3M0 is
from "Streaming DiLoCo" (Douillard et al., 2025), chunks are from SparseLoCo
(2508.15706).

A number that is not finite makes its whole block NaN; in BFLOAT16 and TOP_K it is sent
unchanged.

INT8, INT4 and E3M0 round at random, up or down, so that the mean is the number that was
rounded; or they round to the nearest, if the error is sent later (`Residuals`). The
random bits are a function of a seed and of the number's index, so that the same step
sends the same bytes again. The function is the finalizer of MurmurHash3 (Appleby,
2011), applied twice: good enough to round with, and much faster than jax's own.

`Wire` is the user's choice of a format for the gradients of an optimizer.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from zstrat.errors import InvalidArgumentError
from zstrat.wire import Codec, dtype_named

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


GRADIENT_BLOCK: Final = 256
"""Numbers of a gradient that share one scale, which costs an eighth of a bit for each
number."""

ROW_BLOCK: Final = 128
"""Numbers that share one scale in gradients of table rows; fewer than `GRADIENT_BLOCK`,
as rows differ much in magnitude."""

CHUNK: Final = 4096
"""Numbers per chunk of TOP_K, which keeps the same count of largest numbers in each
chunk."""

BFLOAT16: Final = dtype_named("bfloat16")

_LEVELS: Final = np.array([0.0, *(2.0**e for e in range(-6, 1))], np.float32)
"""The eight magnitudes that E3M0 can encode, relative to the scale of their block."""

_NIBBLES: Final = {
    Codec.INT4: (np.arange(16, dtype=np.float32) - 8) / np.float32(7),
    Codec.E3M0: np.concatenate([_LEVELS, -_LEVELS]),
}
_BYTES: Final = {
    codec: np.stack([np.tile(values, 16), np.repeat(values, 16)], axis=1)
    for codec, values in _NIBBLES.items()
}
"""By codec, the two numbers that each of the 256 values of a byte encodes, as float32
``[256, 2]``."""

_DATA: Final = {
    Codec.BFLOAT16: (BFLOAT16,),
    Codec.INT8: (np.dtype(np.int8), np.dtype("<f4")),
    Codec.INT4: (np.dtype(np.uint8), np.dtype("<f4")),
    Codec.E3M0: (np.dtype(np.uint8), np.dtype("<f4")),
    Codec.TOP_K: (np.dtype("<u2"), np.dtype("<f4")),
}


def arrays_of(codec: Codec) -> int:
    """Returns the number of arrays into which a codec encodes one array."""
    return len(_DATA[codec])


def decode_gradient(
    codec: Codec, shape: tuple[int, ...], arrays: Sequence[np.ndarray], block: int
) -> np.ndarray:
    """Decodes the arrays of `encode_gradient` to float32 of ``shape``.

    Args:
        block: Count of numbers that share one scale.

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
    # All sizes follow from the shape: a peer cannot make this read past an array.
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
        # By a table of bytes, two numbers at a time. Where there is an odd number of
        # them the last nibble is only padding.
        values = _BYTES[codec].take(data, axis=0).reshape(-1)[:size]
    whole = size - size % block
    if whole:
        values[:whole].reshape(-1, block)[:] *= numbers[: whole // block, None]
    if whole < size:
        values[whole:] *= numbers[-1]
    return values.reshape(shape)


def kept_of(count: int, each: int) -> int:
    """Returns how many of the ``count`` numbers of a chunk TOP_K keeps, at least one.
    ``each`` is how many it keeps of a full chunk."""
    return -(-count * each // CHUNK)


def _spread(size: int, places: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Decodes TOP_K: returns ``size`` numbers, with ``numbers`` at ``places``, and
    zeros elsewhere.

    Raises:
        InvalidArgumentError: The arrays have the wrong length, or places are out of
            range, for ``size`` numbers.
    """
    values = np.zeros(size, np.float32)
    if not size and not len(places):
        return values
    chunks, last = divmod(size, CHUNK)
    # The share is not sent: it follows from the two lengths, up to a rounding.
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


def encode_gradient(
    codec: Codec,
    array: np.ndarray,
    *,
    block: int,
    seed: int | None,
    density: float = 1.0,
) -> tuple[np.ndarray, ...]:
    """Encodes a floating-point array as one or two arrays, which `decode_gradient`
    decodes.

    Args:
        block: Count of numbers that share one scale.
        seed: Seed of random rounding; None rounds to the nearest.
        density: The share of numbers that TOP_K keeps, more than 0.
    """
    if codec is Codec.BFLOAT16:
        return (array.astype(BFLOAT16),)
    flat = np.ascontiguousarray(array, np.float32).reshape(-1)
    if codec is Codec.TOP_K:
        return _largest(flat, density)
    import jax  # here, as parameter servers only decode

    # Padded to one of few sizes, as each is compiled; what is padded is cut off again.
    size = len(flat)
    if more := _rounded(-(-size // block)) * block - size:
        flat = np.pad(flat, (0, more))
    # On the CPU, wherever the step runs: the bytes go to the network from there.
    with jax.default_device(_cpu()):
        mixed = np.uint32(0 if seed is None else _mixed_seed(seed))
        codes, scales = _program(codec, block, seed is None)(flat, mixed)
    coded = size if codec is Codec.INT8 else (size + 1) // 2
    return np.asarray(codes)[:coded], np.asarray(scales)[: -(-size // block)]


def _rounded(blocks: int) -> int:
    """Rounds a number of blocks up to five significant bits. The encoder is compiled
    for each size, and the number of rows differs from step to step."""
    low = max(0, blocks.bit_length() - 5)
    return -(-blocks >> low) << low


def _largest(flat: np.ndarray, density: float) -> tuple[np.ndarray, ...]:
    each = max(1, min(CHUNK, round(density * CHUNK)))
    whole = len(flat) - len(flat) % CHUNK
    places: list[np.ndarray] = []
    # All full chunks at once, then the rest, which keeps fewer.
    for part in (flat[:whole].reshape(-1, CHUNK), flat[None, whole:]):
        if not part.size:
            continue
        count = part.shape[1]
        kept = kept_of(count, each)
        # A NaN is kept, so that it is seen: argpartition takes it as the largest.
        found = np.argpartition(np.abs(part), count - kept, axis=1)[:, count - kept :]
        found = np.sort(found, axis=1)
        places.append(found.astype(np.uint16).reshape(-1))
    if not places:
        return np.empty(0, np.uint16), np.empty(0, np.float32)
    at = np.concatenate(places)
    return at, flat[np.arange(len(at)) // each * CHUNK + at]


def _mixed_seed(seed: int) -> int:
    """Mixes an integer of any size to 32 bits."""
    mixed = 0
    while True:
        mixed = (mixed ^ seed) * 0x9E3779B1 & 0xFFFFFFFF
        mixed ^= mixed >> 15
        seed >>= 32
        if seed in (0, -1):
            return mixed


@functools.cache
def _cpu() -> Any:
    import jax

    return jax.local_devices(backend="cpu")[0]


@functools.cache
def _program(codec: Codec, block: int, is_nearest: bool) -> Callable[..., Any]:
    import jax
    import jax.numpy as jnp

    def random(count: int, seed: Any) -> Any:
        """Returns random numbers of 16 bits, at least 0 and less than 1."""
        bits = jnp.arange(count, dtype=jnp.uint32) + seed
        for _ in range(2):
            bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
            bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
            bits = (bits ^ (bits >> 16)) + seed
        return (bits >> 16).astype(jnp.float32) * np.float32(2**-16)

    def whole(x: Any, most: int, chance: Any) -> Any:
        """Rounds numbers of magnitude at most 1 to integer codes between ``-most`` and
        ``most``."""
        scaled = x * most
        # floor(x + u) with u uniform in [0, 1) is x in the mean.
        rounded = jnp.round(scaled) if is_nearest else jnp.floor(scaled + chance)
        return jnp.clip(rounded, -most, most)

    def exponent(x: Any, chance: Any) -> Any:
        """Rounds numbers of magnitude at most 1 to nibbles of E3M0."""
        size = jnp.abs(x)
        # The exponent of a float32 is in its bits, and exact: log2 may be one off.
        bits = jax.lax.bitcast_convert_type(size, jnp.int32) >> 23
        below = jnp.clip(bits - 120, 0, 7)  # 127 - 7: 2**-6 is level 1
        power = jax.lax.bitcast_convert_type((below + 120) << 23, jnp.float32)
        low = jnp.where(below > 0, power, 0)
        step = jnp.where(below > 0, power, 2.0**-6)
        share = jnp.where(below < 7, (size - low) / step, 0)
        up = share >= 0.5 if is_nearest else share > chance
        return below + up + jnp.where(x < 0, 8, 0)

    def program(flat: Any, seed: Any) -> tuple[Any, Any]:
        blocks = flat.reshape(-1, block)
        scales = jnp.max(jnp.abs(blocks), axis=1)
        scales = jnp.where(jnp.isfinite(scales), scales, jnp.nan)
        # Below it a number is subnormal, and its inverse may be infinite.
        scales = jnp.where(scales < np.finfo(np.float32).tiny, 0, scales)
        # A CPU takes the inverse of the largest scales for 0.
        shrink = jnp.where(scales > 2.0**64, np.float32(2**-64), 1)
        factors = jnp.where(scales > 0, 1 / (scales * shrink), 0)[:, None]
        x = jnp.where(factors > 0, blocks * shrink[:, None] * factors, 0)
        chance = 0 if is_nearest else random(blocks.size, seed).reshape(blocks.shape)
        if codec is Codec.INT8:
            return whole(x, 127, chance).astype(jnp.int8).reshape(-1), scales
        if codec is Codec.INT4:
            nibbles = whole(x, 7, chance).astype(jnp.int32) + 8
        else:
            nibbles = exponent(x, chance)
        pairs = nibbles.astype(jnp.uint8).reshape(-1, 2)
        return pairs[:, 0] | (pairs[:, 1] << 4), scales

    return jax.jit(program)


_PUSH: Final = MappingProxyType(
    {
        "bfloat16": Codec.BFLOAT16,
        "int8": Codec.INT8,
        "int4": Codec.INT4,
        "e3m0": Codec.E3M0,
        "topk": Codec.TOP_K,
    }
)


@dataclass(frozen=True, kw_only=True)
class Wire:
    """The format in which the gradients of an optimizer are sent to parameter servers,
    and the values of its variables are sent back.

    A server decodes gradients to float32 before it adds or applies them. Gradients are
    sent unencoded to a server that shares this host's memory, in arrays of fewer than
    256 numbers, if they are integers or complex, and if their dtype is as small as the
    format.

    Args:
        push: The format of gradients. "bfloat16": half the bytes of float32. "int8",
            "int4", and "e3m0" (4 bits: a sign and a power of two): one float32 scale
            for each 256 numbers, or for each 128 in rows of tables; 0.25 and 0.13 of
            the bytes. "topk": the largest numbers only.
        error_feedback: What rounding leaves out of a gradient is added to the gradient
            of the worker's next step. True takes memory on the worker, one float32 for
            each number of the variables. False: numbers are rounded up or down at
            random, so that their mean is exact. Default: only for "topk", which needs
            it. Rows of tables are rounded at random in any case.
        density: The share of the numbers that "topk" sends.
        pull: The format of values that a step reads, if the step applies the optimizer.
            "bfloat16": float32 variables that the step trains are rounded to the
            nearest bfloat16. Rows of tables are sent in float32. Servers keep float32.

    Raises:
        ValueError: An argument is not valid.
    """

    push: str | None = None
    error_feedback: bool | None = None
    density: float | None = None
    pull: str | None = None

    def __post_init__(self) -> None:
        if self.pull not in (None, "bfloat16"):
            raise ValueError(
                f"Wire(pull={self.pull!r:.80}): expected 'bfloat16' or None"
            )
        if self.push not in [*_PUSH, *([] if self.pull is None else [None])]:
            raise ValueError(
                f"Wire(push={self.push!r:.80}): expected one of "
                f"{', '.join(map(repr, _PUSH))}"
            )
        feeds, is_top = self.error_feedback, self.codec is Codec.TOP_K
        if not isinstance(feeds, bool | None):
            raise ValueError(
                f"Wire(error_feedback={feeds!r:.80}): expected True, False, or None"
            )
        if (feeds and self.codec in (Codec.NONE, Codec.BFLOAT16)) or (
            feeds is False and is_top
        ):
            want = "True: what is not sent would be lost" if is_top else "False"
            raise ValueError(
                f"Wire(push={self.push!r}, error_feedback={feeds}): expected {want}"
            )
        density = self.density
        if (density is None) == is_top or not (
            density is None
            or (isinstance(density, float | np.floating) and 0 < density <= 1)
        ):
            want = "the share of numbers to send, say 0.01" if is_top else "None"
            raise ValueError(
                f"Wire(push={self.push!r}, density={density!r:.80}): expected {want}"
            )

    @property
    def codec(self) -> Codec:
        """The codec of gradients, which ``push`` names."""
        return Codec.NONE if self.push is None else _PUSH[self.push]

    @property
    def has_feedback(self) -> bool:
        """Whether what rounding leaves out of a gradient is added to the next one."""
        if self.error_feedback is None:
            return self.codec is Codec.TOP_K
        return self.error_feedback


def wire_format(wire: Any) -> Wire | None:
    """Returns the format that a user asks for with a `Wire`, the name of a push format,
    or None.

    Raises:
        TypeError: ``wire`` is something else.
        ValueError: No push format has that name.
    """
    if isinstance(wire, str):
        return Wire(push=wire, density=0.01 if wire == "topk" else None)
    if not isinstance(wire, Wire | None):
        raise TypeError(f"wire={wire!r:.80}: expected a zs.Wire, a name, or None")
    return wire

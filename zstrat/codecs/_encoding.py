"""`encode_gradient`: a gradient in the format of a codec.

INT8, INT4 and E3M0 round at random, up or down, so that the mean is the number that was
rounded; or to the nearest, where the error is sent later (`Residuals`). The random bits
are a function of a seed and of the number's place, so that the same step sends the same
bytes again. They are the finalizer of MurmurHash3 (Appleby, 2011), applied twice: good
enough to round with, and much faster than jax's own.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from zstrat.wire import Codec

from ._formats import BFLOAT16, CHUNK, kept_of

if TYPE_CHECKING:
    from collections.abc import Callable


def encode_gradient(
    codec: Codec,
    array: np.ndarray,
    *,
    block: int,
    seed: int | None,
    density: float = 1.0,
) -> tuple[np.ndarray, ...]:
    """Returns the arrays that stand for a floating-point array, for `decode_gradient`.

    Args:
        block: Numbers with one scale.
        seed: Of the rounding; None: to the nearest.
        density: The share of numbers that TOP_K keeps, more than 0.
    """
    if codec is Codec.BFLOAT16:
        return (array.astype(BFLOAT16),)
    flat = np.ascontiguousarray(array, np.float32).reshape(-1)
    if codec is Codec.TOP_K:
        return _largest(flat, density)
    import jax  # here, as parameter servers only decode

    size = len(flat)
    if more := _rounded(-(-size // block)) * block - size:
        flat = np.pad(flat, (0, more))
    with jax.default_device(_cpu()):
        mixed = np.uint32(0 if seed is None else _mixed_seed(seed))
        codes, scales = _program(codec, block, seed is None)(flat, mixed)
    coded = size if codec is Codec.INT8 else (size + 1) // 2
    return np.asarray(codes)[:coded], np.asarray(scales)[: -(-size // block)]


def _rounded(blocks: int) -> int:
    """Rounds up to five significant bits: each size is compiled, and the number of rows
    differs from step to step."""
    low = max(0, blocks.bit_length() - 5)
    return -(-blocks >> low) << low


def _largest(flat: np.ndarray, density: float) -> tuple[np.ndarray, ...]:
    each = max(1, min(CHUNK, round(density * CHUNK)))
    whole = len(flat) - len(flat) % CHUNK
    places: list[np.ndarray] = []
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
    """32 bits of an integer of any size."""
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
        """Numbers of 16 bits, at least 0 and less than 1."""
        bits = jnp.arange(count, dtype=jnp.uint32) + seed
        for _ in range(2):
            bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
            bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
            bits = (bits ^ (bits >> 16)) + seed
        return (bits >> 16).astype(jnp.float32) * np.float32(2**-16)

    def whole(x: Any, most: int, chance: Any) -> Any:
        """Integers for numbers of at most 1."""
        scaled = x * most
        rounded = jnp.round(scaled) if is_nearest else jnp.floor(scaled + chance)
        return jnp.clip(rounded, -most, most)

    def exponent(x: Any, chance: Any) -> Any:
        """Nibbles of E3M0 for numbers of at most 1."""
        size = jnp.abs(x)
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

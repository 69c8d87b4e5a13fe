"""Ids of hash tables (`zs.HashTable`): arbitrary 64-bit integers, distributed by a
hash.

Such a table has no row numbers. The hash of an id determines where its data are: its
bucket, and its record in the index of that bucket. Each table has `BUCKETS` buckets,
and each bucket belongs to one server as a whole. The hash is the same on every machine
and in every version, as files and servers depend on it.

Needs only numpy, as it is used where jax is not loaded.
"""

from __future__ import annotations

import math
from typing import Any, Final, final

import numpy as np

BUCKETS: Final = 4096
"""Number of buckets of a table. Buckets are the unit in which servers exchange rows and
in which a table is divided in files."""

_BUCKET_SHIFT: Final = np.uint64(64 - BUCKETS.bit_length() + 1)

PADDING: Final = 1 - 2**31
"""The id of padding: look-ups return zeros for it."""

_WEYL: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)


def mixed(words: np.ndarray) -> np.ndarray:
    """Returns the hash, uint64, of each word of an array of any shape. It is the
    finalizer of SplitMix64 [Steele, Lea and Flood 2014], which maps different words to
    different hashes."""
    # One array besides the result: fresh memory costs more than the arithmetic.
    hashes = words + _WEYL
    other = hashes >> _SHIFT_1
    hashes ^= other
    hashes *= _MIX_1
    np.right_shift(hashes, _SHIFT_2, out=other)
    hashes ^= other
    hashes *= _MIX_2
    np.right_shift(hashes, _SHIFT_3, out=other)
    hashes ^= other
    return hashes


def hashes_of(ids: np.ndarray) -> np.ndarray:
    """Returns the hashes, uint64, of an array of ids, int64, of any shape. Different
    ids have different hashes."""
    return mixed(ids.view(np.uint64))


def buckets_of(hashes: np.ndarray) -> np.ndarray:
    """Returns the bucket of each hash, from 0 to `BUCKETS` - 1, as intp."""
    return (hashes >> _BUCKET_SHIFT).view(np.int64)


@final
class IdGenerator:
    """Random numbers for rows of ids: row i depends only on the seed and ``ids[i]``, so
    the row of an id is the same on any server, among any other ids. It has the methods
    of `numpy.random.Generator` that initializers call; each call starts at the
    beginning of every row's sequence.

    A number is the hash of a counter [Salmon et al. 2011] and takes 15 ns. Normally
    distributed numbers are made by the Box-Muller transform in float64. On machines
    whose logarithms and cosines differ in the last bit, these numbers may differ in the
    last bit.

    Args:
        ids: ``[n]`` of int64; arrays to fill are ``[n, ...]``.
    """

    def __init__(self, seed: int, ids: np.ndarray) -> None:
        start = np.array([seed & (2**64 - 1)], np.uint64)
        # Mixed first, so that neighbouring seeds have unrelated numbers.
        self._keys = mixed(hashes_of(ids) ^ mixed(start))

    def random(self, *, dtype: type, out: np.ndarray) -> None:
        """Fills ``out`` of dtype float32 or float64 with numbers from [0, 1), which are
        multiples of 2⁻²⁴ or 2⁻⁵³."""
        bits = np.finfo(dtype).nmant + 1
        words = self._words(out[0].size if len(out) else 0)
        words >>= np.uint64(64 - bits)
        numbers: np.ndarray = words.astype(dtype)
        numbers *= dtype(2.0**-bits)
        out[...] = numbers.reshape(out.shape)

    def standard_normal(self, *, dtype: type, out: np.ndarray) -> None:
        """Fills ``out`` with normally distributed numbers, from -6.7 to 6.7."""
        del dtype
        width = out[0].size if len(out) else 0
        words = self._words(-(-width // 2))
        low = (words & np.uint64(2**32 - 1)).astype(np.float64) * (2.0**-32 * math.tau)
        words >>= np.uint64(32)
        # From above 0, which has no logarithm.
        high = (words.astype(np.float64) + 1.0) * 2.0**-32
        radius = np.sqrt(-2.0 * np.log(high))
        pairs = np.stack([radius * np.cos(low), radius * np.sin(low)], axis=-1)
        numbers = pairs.reshape(len(words), 2 * words.shape[1])
        out[...] = numbers[:, :width].reshape(out.shape)

    def integers(
        self, low: int, high: int, shape: tuple[int, ...], dtype: np.dtype
    ) -> np.ndarray:
        """Returns integers from ``low`` to ``high`` - 1."""
        width = math.prod(shape[1:])
        words = self._words(width)
        # The remainder favours small numbers by less than one in 2**64 / (high - low).
        words %= np.uint64(high - low)
        return (words.astype(np.int64) + low).astype(dtype).reshape(shape)

    def _words(self, width: int) -> np.ndarray:
        """Returns random words ``[n, width]``: ``width`` for each id."""
        counters = np.arange(1, width + 1, dtype=np.uint64) * _WEYL
        return mixed(self._keys[:, None] ^ counters)


def hash_ids(values: Any, *, seed: int = 0) -> np.ndarray:
    """Returns int64 ids for texts, bytes or integers, in their shape; the same on every
    machine. With such ids a table (`zs.HashTable`) needs no list of the texts that may
    occur. Among a billion texts, two have the same id with a chance of 3 %.

    Texts are hashed in UTF-8 by XXH3 [Collet 2019], integers by their eight bytes as a
    signed little-endian number: an integer and its decimal text have different ids. The
    function is meant for input pipelines (``dataset.map``), as jax has no texts.

    Args:
        values: A text, or an array or nested lists of equal lengths.
        seed: Use a different seed for each feature, so that features can share a table:
            equal texts then get different ids.

    Raises:
        TypeError: ``values`` contains something other than texts, bytes or integers.
    """
    import xxhash

    array = np.asarray(values)
    if array.dtype.kind in "SU" and not isinstance(values, np.ndarray | np.generic):
        # numpy's texts have lost final zeros, and which of them were numbers.
        array = np.asarray(values, object)
    if array.dtype.kind in "iu" and array.size:
        words = array.astype(np.int64).astype("<i8").reshape(-1)
        parts = [word.tobytes() for word in words]
    elif array.dtype.kind in "SUO" or not array.size:
        parts = [_bytes(value) for value in array.reshape(-1).tolist()]
    else:
        raise TypeError(
            f"hash_ids takes texts, bytes or integers, got {array.dtype.name}: round "
            "numbers to integers, or divide their range into bins (np.digitize)"
        )
    hashes = [xxhash.xxh3_64_intdigest(part, seed) for part in parts]
    ids = np.array(hashes, np.uint64).view(np.int64).reshape(array.shape)
    # Padding has no row, so its id goes to no text.
    ids[ids == PADDING] += 1
    return ids


def _bytes(value: Any) -> bytes:
    match value:
        case str():
            return value.encode()
        case bytes():
            return value
        case int() if not isinstance(value, bool) and -(2**63) <= value < 2**63:
            return value.to_bytes(8, "little", signed=True)
    raise TypeError(
        f"hash_ids takes texts, bytes or integers of 64 bits, got {value!r:.80}"
    )

"""Ids of tables: 64-bit integers that nobody knows beforehand, spread by a hash.

A table of any id has no row numbers. The hash of an id says where everything about it
is: its bucket, of which there are `BUCKETS` in every table and which belong to servers
whole, and its record in the bucket's index. It is the same on every machine and in
every version, as files and servers depend on it.

numpy alone: this is used where jax is not loaded.
"""

from __future__ import annotations

from typing import Final

import numpy as np

BUCKETS: Final = 4096
"""Buckets of a table: what servers exchange, and what a table is divided into in
files."""

_BUCKET_SHIFT: Final = np.uint64(64 - BUCKETS.bit_length() + 1)

_WEYL: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)


def mixed(words: np.ndarray) -> np.ndarray:
    """Returns the hash of each word, uint64 of any shape: the finalizer of SplitMix64
    [Steele, Lea and Flood 2014], which maps different words to different hashes."""
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
    """Returns the hashes, uint64, of ids of int64, of any shape. Different ids have
    different hashes."""
    return mixed(ids.view(np.uint64))


def buckets_of(hashes: np.ndarray) -> np.ndarray:
    """Returns the bucket of each hash, from 0 to `BUCKETS` - 1, as intp."""
    return (hashes >> _BUCKET_SHIFT).view(np.int64)

"""Names of calls on the wire: the same on all ranks, without a word between them.

What a user calls is an *operation*; it may take several calls (buckets, or lengths
before the data). Operations without a tag are numbered in the order of the program;
those of one tag in an order of their own.
"""

from __future__ import annotations

import zlib
from hashlib import blake2b
from typing import Final

PARTS: Final = 2**20
"""Calls of one operation, at most: arrays of one pytree."""

FORMING: Final = 0
"""Key of the call in which a new generation agrees on its transport; operations
begin at 1."""

_NAMED: Final = 1 << 62
"""Set in keys that are digests, and in no other."""


def key_of(tag: str | None, number: int, part: int) -> int:
    """The key of one call: its operation (from 1 on) and its part.

    Keys of tagged operations are digests of 62 bits: two of the few that are under way
    at a time never meet.
    """
    if tag is None:
        return number * PARTS + part
    return _digest(f"{tag}\0{number}\0{part}")


def key_between(key: int, part: int) -> int:
    """The key of a part of a call, among some of the ranks."""
    return _digest(f"{key}/{part}")


def number_of(key: int) -> int | None:
    """The operation that a call belongs to, None for one whose key is a digest."""
    return None if key & _NAMED else key // PARTS


def about(words: str, part: int = 0) -> int:
    """Digest of what is called, and of which of its calls it is: 32 bits."""
    return zlib.crc32(f"{words}{part}".encode())


def _digest(text: str) -> int:
    found = blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(found, "little") % _NAMED | _NAMED

"""What tells that bytes are those that were written: xxh3 of 128 bits, in hex.

Against damage, not against an attacker: who can write a checkpoint can write its
manifest. At memory speed, so that nobody has a reason to leave it out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

from ._disk import bytes_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zstrat.wire import Buffer


def digest_of(parts: Iterable[Buffer]) -> str:
    """The digest of the parts, one after the other."""
    digest = Digest()
    for part in parts:
        digest.update(part)
    return digest.hex()


class Digest:
    """The digest of bytes that come in parts."""

    __slots__ = ("_state",)

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, part: Buffer) -> None:
        self._state.update(bytes_of(part))

    def hex(self) -> str:
        return self._state.hexdigest()

"""What codecs that lose much have left out, kept for the next call of the same kind.

Whoever gives every call another name (a tag per step) never comes back for it. So there
is room for some of it, the longest unused goes, and the one law: **room grows only by
what came back and was gone.** A model that is larger than the room loses what its first
call left out, or some of it, once; names that nobody uses again fill the room and no
more.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from zstrat.config import MiB

if TYPE_CHECKING:
    import numpy as np

    Key = tuple[str, int]
    """Name of a call, and place within it."""

ROOM: Final = 256 * MiB
"""Bytes to begin with: the gradients of 64 million values."""

NAMES: Final = 2**17
"""What is gone and remembered by name: 10 MB at the most, for 16 GiB in chunks."""


class Left:
    """Of one generation, for one compression. Lives on one thread."""

    __slots__ = ("_gone", "_kept", "_room", "nbytes")

    def __init__(self, room: int = ROOM) -> None:
        self._kept: OrderedDict[Key, np.ndarray] = OrderedDict()
        self._gone: OrderedDict[int, None] = OrderedDict()
        """By hash: two of the same make room that nobody needs, and no more."""
        self._room = room
        self.nbytes = 0

    def get(self, key: Key) -> np.ndarray | None:
        """What the last call of this name left out here, if that is still there."""
        return self._kept.get(key)

    def put(self, key: Key, values: np.ndarray) -> None:
        """Keeps ``values`` in place of what there was."""
        before = self._kept.pop(key, None)
        if before is not None:
            self.nbytes -= before.nbytes
        elif self._gone and hash(key) in self._gone:
            del self._gone[hash(key)]
            self._room += values.nbytes
        self._kept[key] = values
        self.nbytes += values.nbytes
        while self.nbytes > self._room:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        key, values = self._kept.popitem(last=False)
        self.nbytes -= values.nbytes
        self._gone[hash(key)] = None
        if len(self._gone) > NAMES:
            self._gone.popitem(last=False)

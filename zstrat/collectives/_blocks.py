"""One block of a call under way: its memory, its chunks, how far each of them is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ._schedule import Act

if TYPE_CHECKING:
    import numpy as np

    from ._schedule import Action

CHUNKS: Final = 2**20
"""Chunks of a block, at most: the place of a hop on the wire is the schedule's place
times this, plus the chunk. With chunks of 1 MiB a block may have a tebibyte."""

_GRAIN: Final = 64
"""Chunks hold a multiple of so many elements: vector units like it."""

_ENDS: Final = (Act.TAKE, Act.FINISH)


class Block:
    """The actions on one block, and how far each of its chunks is."""

    __slots__ = (
        "actions",
        "at",
        "count",
        "forwards",
        "have",
        "is_direct",
        "is_same",
        "is_taken",
        "number",
        "result",
        "source",
        "step",
        "turn",
    )

    def __init__(
        self,
        number: int,
        actions: tuple[Action, ...],
        source: np.ndarray | None,
        result: np.ndarray | None,
    ) -> None:
        acts = [action.act for action in actions]
        some = source if source is not None else result
        self.number, self.actions = number, actions
        self.source, self.result = source, result
        self.count = 0 if some is None else len(some)
        self.turn = next((i for i, act in enumerate(acts) if act in _ENDS), len(acts))
        """The action that makes it finished."""
        self.forwards = Act.SEND in acts[self.turn :]
        """It is sent once it is finished."""
        self.is_taken = Act.TAKE in acts
        """It comes back as finished: until then it may be sent from live memory."""
        self.is_same = _is_same(source, result)
        self.is_direct = False
        """Partial sums are made where the result goes."""
        self.step = 0
        """Elements per chunk."""
        self.at: list[int] = []
        """The action that each chunk stands before; -1: it has not begun."""
        self.have: list[np.ndarray | None] = []
        """What this rank has of each chunk, once it is not the source any more. Of a
        finished chunk: what is sent on, if anything is."""

    def cut(self, elements: int) -> int:
        """Cuts it into chunks of at most so many elements; how many there are."""
        self.step, chunks = cut(self.count, elements)
        self.at, self.have = [-1] * chunks, [None] * chunks
        return chunks

    def part(self, of: np.ndarray, chunk: int) -> np.ndarray:
        """The elements of a chunk."""
        start = chunk * self.step
        return of[start : min(start + self.step, self.count)]


def cut(count: int, elements: int) -> tuple[int, int]:
    """Chunks of ``count`` elements, at most ``elements`` (or `_GRAIN`) in each, alike
    but for the last: elements per chunk, and how many chunks; of nothing one."""
    chunks = -(-count // elements) or 1
    step = -(-count // chunks)
    step = -(-step // _GRAIN) * _GRAIN or _GRAIN
    return step, -(-count // step) or 1


def _is_same(source: np.ndarray | None, result: np.ndarray | None) -> bool:
    if source is None or result is None:
        return False
    return source is result or source.ctypes.data == result.ctypes.data

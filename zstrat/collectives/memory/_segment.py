"""What a rank shares with the ranks of its host: a page of words, and two rooms.

The memory is anonymous (`zstrat.transport.Arena`): each rank writes its own and has the
others' mapped read-only, so no rank can spoil another's, and the kernel frees all of it
with the last process, however that ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from zstrat.transport import Arena, Mapping

from ._barrier import ControlWords

if TYPE_CHECKING:
    import numpy as np

    from zstrat.wire import MemberEntry

ROOM: Final = 2**20
"""Bytes of a room. A chunk and its result stay in the cache of a core on their way:
smaller ones meet more often, larger ones go through memory."""

_WORDS: Final = 64
"""Where the control words lie, a cache line behind the proof of the arena."""
_WORDS_BYTES: Final = 64
_ROOMS: Final = 4096

CAPACITY: Final = _ROOMS + 2 * ROOM


class RankMemory:
    """The memory of one rank, ours or mapped: its ``line`` and its ``rooms``
    (two of uint8 [ROOM])."""

    def __init__(self, rank: int, memory: np.ndarray) -> None:
        # Arrays of the memory keep it mapped; `line` has only an address.
        self.line = ControlWords(
            rank,
            memory[_WORDS : _WORDS + _WORDS_BYTES].data.cast("Q"),
            memory.ctypes.data + _WORDS,
        )
        self.rooms = (
            memory[_ROOMS : _ROOMS + ROOM],
            memory[_ROOMS + ROOM : _ROOMS + 2 * ROOM],
        )


def arena() -> Arena:
    """Memory for one rank of one generation.

    Raises:
        OSError: The kernel gives none.
    """
    return Arena(CAPACITY)


def segment_of(rank: int, member: MemberEntry) -> RankMemory:
    """The memory of another rank of this host.

    Raises:
        OSError: It cannot be mapped, or is not what ``member`` says; says which rank.
    """
    try:
        if member.capacity != CAPACITY:
            raise OSError(f"it has {member.capacity} bytes, expected {CAPACITY}")
        mapping = Mapping(member.pid, member.descriptor, member.capacity, member.word)
    except OSError as error:
        raise OSError(
            f"the shared memory of rank {rank} ({member.task}, pid {member.pid}) "
            f"cannot be mapped: {error}"
        ) from error
    return RankMemory(rank, mapping.memory)

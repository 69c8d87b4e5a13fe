"""Which examples of leased datasets are done, by the pushes that one server applied.

A push carries the ranges that its step has drawn, and they are noted as it is applied:
so they are in the log, in copies, and in what the next program of the session finds.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from operator import itemgetter
from typing import TYPE_CHECKING, Final, final

from zstrat.errors import InvalidArgumentError
from zstrat.wire import LEASE

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKED: Final = 512
"""Ranges of one message: they fit into a header."""


@final
class DoneLeases:
    """Ranges by dataset and epoch: joined, apart, and in order."""

    def __init__(self) -> None:
        self._runs: dict[tuple[int, int], list[tuple[int, int]]] = {}

    @staticmethod
    def require(packed: bytes) -> None:
        """Checks that these are ranges.

        Raises:
            InvalidArgumentError: They are not.
        """
        if len(packed) % LEASE.size:
            raise InvalidArgumentError(
                f"the leases of a push have {len(packed)} bytes, no multiple of "
                f"{LEASE.size}"
            )

    def note(self, packed: bytes) -> None:
        """Notes ranges as done; one without examples forgets those of its dataset."""
        for dataset, epoch, start, size in LEASE.iter_unpack(packed):
            if not size:
                kept = [key for key in self._runs if key[0] != dataset]
                self._runs = {key: self._runs[key] for key in kept}
                continue
            stop = start + size
            runs = self._runs.setdefault((dataset, epoch), [])
            first = bisect_left(runs, start, key=itemgetter(1))
            last = bisect_right(runs, stop, key=itemgetter(0))
            if first < last:  # it touches these
                start, stop = min(start, runs[first][0]), max(stop, runs[last - 1][1])
            runs[first:last] = [(start, stop)]

    def packed(self) -> Iterator[bytes]:
        """Yields all ranges, at most `PACKED` at a time."""
        ranges = [
            LEASE.pack(*key, start, stop - start)
            for key, runs in self._runs.items()
            for start, stop in runs
        ]
        for at in range(0, len(ranges), PACKED):
            yield b"".join(ranges[at : at + PACKED])

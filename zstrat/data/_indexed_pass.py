"""Batches of examples that are found by number, as a dataset like any other.

What a coordinator leases to steps, range by range, this yields in the order of the
positions: all epochs, one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, final

from ._passes import Recipe

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ._leaves import Element


class IndexedBatches(Protocol):
    """A `LeasedSource`, as this file needs it."""

    @property
    def batch(self) -> int: ...

    @property
    def seed(self) -> int | None: ...

    @property
    def drop_remainder(self) -> bool: ...

    def batches(self, start: int) -> Iterator[Element]:
        """Yields the batches of all epochs, without the first ``start``."""
        ...

    def steps(self) -> int:
        """Returns the number of batches, or `INFINITE`, or `UNKNOWN`."""
        ...


@final
@dataclass(frozen=True, slots=True)
class IndexedPass(Recipe):
    """The batches of all epochs, without the first ``start``."""

    source: IndexedBatches
    start: int = 0

    def items(self) -> Iterator[Element]:
        return self.source.batches(self.start)

    def size(self) -> int:
        steps = self.source.steps()
        return steps if steps < 0 else max(0, steps - self.start)

    def without_first(self, count: int) -> Recipe:
        return replace(self, start=self.start + count)

"""Which share of a dataset a worker reads, when workers come and go. Decides only.

A dataset is cut into as many input pipelines as there were workers when its pass was
begun. Law of the file: that number stays, and each worker reads one of them. A newcomer
takes the share that the fewest read, the first of these: that of a worker that was
removed, if there is one; else it reads again what another one reads, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Iterable


@final
class InputPipelines:
    """The shares of one dataset.

    Args:
        workers: The indices of those that there are when it is made.
    """

    __slots__ = ("_of", "count")

    def __init__(self, workers: Iterable[int]) -> None:
        self._of = {index: share for share, index in enumerate(sorted(workers))}
        self.count = max(1, len(self._of))

    def __getitem__(self, worker: int) -> int:
        return self._of[worker]

    def join(self, worker: int) -> None:
        """A worker comes; one that has a share keeps it."""
        if worker not in self._of:
            readers = list(self._of.values())
            self._of[worker] = min(range(self.count), key=readers.count)

    def leave(self, worker: int) -> None:
        """A worker was removed."""
        self._of.pop(worker, None)

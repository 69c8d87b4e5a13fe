"""`LeasedIterator`: the iterator of a leased dataset on a worker. Used on the executor
thread.

A leased dataset has no position on the worker: each step arrives with the ranges of
examples (leases) that it draws, and draws exactly these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, final

from zstrat.data import Lease, LeasedElements
from zstrat.program import StepIterator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zstrat.data import LeasedSource


@final
class LeasedIterator(StepIterator):
    """Yields the batches of a leased dataset to the steps of this worker.

    Args:
        source: The source of examples; it is opened here, and closed with this
            iterator.
        name: Name of the dataset in errors.
        noted_as: See `BuildResource`.
    """

    is_resource = True

    def __init__(self, source: LeasedSource, name: str, noted_as: int = 0) -> None:
        reader = source.open()
        self.noted_as: Final = noted_as
        self._elements: Final = LeasedElements(reader)
        super().__init__(self._elements, name=name, steady=True)
        self.examples: Final = reader.size
        self.first: Final[Any] = reader.read(
            Lease(0, 0, min(source.batch, reader.size))
        )
        """The first batch; all batches have its structure and dtypes."""

    def expect(self, leases: Sequence[Lease]) -> None:
        """Starts to read these leases in advance; their steps will run in this
        order."""
        self._elements.expect(leases)

    def expect_none(self) -> None:
        """Forgets the expected leases, because their steps were cancelled."""
        self._elements.expect_none()

    def begin(self, leases: Sequence[Lease]) -> None:
        """Yields the batches of these leases to the step that draws next. Leases that
        another step has given back are read again when that step runs."""
        self._ready.clear()
        self._elements.begin(leases)

    def require_drawn(self) -> None:
        """Checks that the step has drawn all its leases.

        Raises:
            RuntimeError: The step has drawn fewer; says what to write.
        """
        left = self._elements.left + len(self._ready)
        if left:
            raise RuntimeError(
                f"the step left {left} batches of {self.name} that were leased to it: "
                "a step draws as many batches as when it was first traced, and an "
                "eager step one. Do not draw under a condition"
            )

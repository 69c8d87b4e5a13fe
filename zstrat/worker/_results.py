"""Large results that stay on the worker until the coordinator asks for them."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final, final

from zstrat.errors import NotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np

KEPT_BYTES: Final = 2 * 2**30
"""A program that never fetches its large results must not fill the machine's memory;
one that fetches them within a few steps never comes near this."""


@final
class Results:
    """Results by step; the oldest of more than ``limit`` bytes in all are forgotten."""

    def __init__(self, limit: int = KEPT_BYTES) -> None:
        self.nbytes = 0
        self._limit: Final = limit
        self._kept: OrderedDict[int, Sequence[np.ndarray]] = OrderedDict()
        self._forgotten = 0
        """Every result that was forgotten is of a step up to this one."""

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, step: int, arrays: Sequence[np.ndarray]) -> None:
        """The newest one is kept whatever its size."""
        self.drop([step])
        self._kept[step] = arrays
        self.nbytes += sum(array.nbytes for array in arrays)
        while self.nbytes > self._limit and len(self._kept) > 1:
            oldest = next(iter(self._kept))
            self._forgotten = max(self._forgotten, oldest)
            self.drop([oldest])

    def of(self, step: int) -> Sequence[np.ndarray]:
        """The arrays of a result; it stays.

        Raises:
            NotFoundError: It is not here; says whether it had to be forgotten.
        """
        arrays = self._kept.get(step)
        if arrays is not None:
            return arrays
        why = "it was dropped, or the closure left no large result"
        if step <= self._forgotten:
            why = (
                f"this worker keeps {self._limit >> 20} MiB of large results and had "
                "to forget the oldest: fetch them sooner, or return less from the step"
            )
        raise NotFoundError(f"the result of closure {step} is not here: {why}")

    def drop(self, steps: Iterable[int]) -> None:
        """Forgets results; unknown ones are no error."""
        for step in steps:
            arrays = self._kept.pop(step, None)
            if arrays is not None:
                self.nbytes -= sum(array.nbytes for array in arrays)

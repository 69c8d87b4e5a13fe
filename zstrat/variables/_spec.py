"""`VariableSpec`: the description of a variable without its value.

Law of the file: nothing here holds or moves a value. A spec is equal on every task, so
it identifies a variable in plans, in pickled step functions and on parameter servers.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from zstrat.wire import DTYPES

if TYPE_CHECKING:
    import numpy as np

LOCAL: Final = -1
"""`VariableSpec.ps` of a variable that is stored in the process that created it."""
RESIDENT: Final = -2
"""`VariableSpec.ps` of an array that each worker keeps for itself between windows."""


class VariableSynchronization(enum.Enum):
    """When the copies of a variable are aggregated (TF's names)."""

    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3


class VariableAggregation(enum.Enum):
    """How the updates of several replicas become one (TF's names)."""

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3
    ONLY_FIRST_TOWER = 3  # noqa: PIE796  # an alias
    """TF 1.12's name of ONLY_FIRST_REPLICA."""


@dataclass(frozen=True, slots=True)
class ComponentRows:
    """The rows of a sharded variable that a component has.

    Rows ``[offset, offset + shape[0])`` of ``rows``; component ``index`` of the
    ``count`` components of the variable named ``whole``.
    """

    whole: str
    index: int
    count: int
    offset: int
    rows: int


@dataclass(frozen=True, slots=True)
class VariableSpec:
    """Shape, dtype and location of one variable; ``part`` if it is a component.

    ``key`` is unique in the session: not negative for a variable on a parameter server,
    negative for others. ``ps`` is the task index, `LOCAL` or `RESIDENT` for none.
    """

    key: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    ps: int = LOCAL
    trainable: bool = True
    aggregation: VariableAggregation = VariableAggregation.NONE
    synchronization: VariableSynchronization = VariableSynchronization.AUTO
    part: ComponentRows | None = None
    buckets: tuple[int, int] | None = None
    """Of a part of a table of any id: it has the ids of buckets ``[first, end)``
    (`zstrat.ids`), and the first axis of its shape is nominal."""

    @property
    def device(self) -> str:
        """TF's name of the device. A variable of one process has the CPU of its host:
        only that process knows the real device (`Variable.device`)."""
        if self.ps < 0:
            return "/job:localhost/replica:0/task:0/device:CPU:0"
        return f"/job:ps/replica:0/task:{self.ps}/device:CPU:0"

    @property
    def numpy_dtype(self) -> np.dtype:
        """The dtype as numpy knows it (bfloat16 and the float8 types included)."""
        return DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the value; 0 for a table of any id, which has as many rows as are
        created."""
        if self.buckets is not None:
            return 0
        return math.prod(self.shape) * self.numpy_dtype.itemsize

    def __str__(self) -> str:
        return f"variable {self.name!r} ({self.dtype}{list(self.shape)})"

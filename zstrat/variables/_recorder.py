"""Where a variable turns to when a step function is being traced.

A step function's capture installs itself in the context variable `recorder`; then reads
return traced arrays and updates are written down instead of being done. Law of the
file: the context variable is set by captures alone, and always reset by who set it.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

if TYPE_CHECKING:
    import jax

    from zstrat.wire import UpdateOp

    from ._gradient_call import GradientCall
    from ._optimizer import Optimizer
    from ._table import Table
    from ._variable import Variable


class Recorder(Protocol):
    """What the trace of a step function does with the variables that it meets."""

    def read(self, variable: Variable) -> jax.Array:
        """The value as the trace sees it, writes of the same step included."""
        ...

    def update(
        self,
        variable: Variable,
        op: UpdateOp,
        operands: tuple[jax.Array, ...],
        optimizer: Optimizer | None,
    ) -> None:
        """Notes an update; shapes and dtypes were checked before."""
        ...

    def lookup(self, table: Table, ids: jax.Array) -> jax.Array:
        """The rows of a table, ``ids.shape + row``; ``ids`` are integers."""
        ...

    def update_rows(
        self,
        table: Table,
        op: UpdateOp,
        operands: tuple[jax.Array, jax.Array],
        optimizer: Optimizer | None,
    ) -> None:
        """Notes an update of rows: indices ``[n]`` of the table, rows ``[n, ...]``."""
        ...

    def optimize(self, call: GradientCall) -> None:
        """Notes gradients of the leaves of a tree; what belongs together stays
        together."""
        ...

    def drew(self, leaf: object) -> bool:
        """Whether this very object is (a leaf of) an element that the step drew from an
        iterator. Such arrays are split over the replicas of a worker."""
        ...


@runtime_checkable
class KeepsCopies(Protocol):
    """A recorder outside of replicas, which knows all copies of a variable of which
    each replica has its own."""

    def copies(self, variable: Variable) -> jax.Array:
        """All copies, ``[count, ...]``."""
        ...

    def put_copies(self, variable: Variable, copies: jax.Array) -> None:
        """The copies from now on."""
        ...


recorder: Final[ContextVar[Recorder | None]] = ContextVar(
    "zstrat_recorder", default=None
)
"""The capture that is under way in this thread or task, if any."""

"""The recorder of eager steps: a read or update is done when Python comes to it.

On a worker the storage of the variables may keep an update back until the step reads.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from zstrat.data import native
from zstrat.variables import (
    Gathering,
    Table,
    TraceRecorder,
    apply_now,
    is_staging,
    read_parts,
    recorder,
    row_updates,
    update_all,
)

from . import _refusals, joined
from ._context import current_trace
from ._iterator import StepIterator
from ._updates import device_storage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from zstrat.variables import (
        GradientCall,
        OptimizerHandle,
        Storage,
        StorageRows,
        VariableHandle,
        VariableUpdate,
    )
    from zstrat.wire import UpdateOp


class Immediate(TraceRecorder):
    """Reads and updates through ``storage``, or each variable's own if that is None.

    Values and elements are jax arrays, as in a captured step, but with values. Under
    jax.jit and the like a read becomes a callback: jax keeps what it traced, and a
    value from now would be wrong after the next update.
    """

    def __init__(
        self,
        storage: Storage | None = None,
        draw: Callable[[StepIterator], Any] = StepIterator.draw,
    ) -> None:
        self._storage, self._draw = storage, draw
        self.live = self.has_values = True
        # A worker has no place for new variables.
        self.may_create = storage is None
        self._outermost = current_trace()
        self._drawn: list[Any] = []

    @contextmanager
    def recording(self) -> Iterator[Immediate]:
        """Runs what is inside as the body."""
        self._outermost = current_trace()
        before = recorder.set(self)
        try:
            yield self
        finally:
            recorder.reset(before)

    def read(self, variable: VariableHandle) -> jax.Array:
        storage = self._storage_of(variable)
        if not is_staging():
            return jnp.asarray(storage.read(variable))
        return _later(variable, lambda: storage.read(variable))

    def update(self, update: VariableUpdate) -> None:
        self._require_outside(update.subject, update.op.name, update.operands)
        target, op, operands, optimizer = update
        # Copies: on a CPU they would share the memory of what was computed.
        host = tuple([np.array(operand, order="C") for operand in operands])
        if isinstance(target, Table):
            self._update_rows(target, op, host, optimizer)
        else:
            self._storage_of(target).update_many([(target, op, host, optimizer)])

    def copies(self, variable: VariableHandle) -> jax.Array:
        """All copies of a variable of which each replica has its own."""
        return jnp.asarray(device_storage(variable).copies(variable))

    def copy(self, variable: VariableHandle, number: int) -> jax.Array:
        """The copy of one replica."""
        return jnp.asarray(device_storage(variable).copy(variable, number))

    def put_copies(self, variable: VariableHandle, copies: jax.Array) -> None:
        """Replaces the copies of all replicas."""
        device_storage(variable).put_copies(np.asarray(copies))

    def lookup(self, table: Table, ids: jax.Array) -> jax.Array:
        storage = self._storage
        return rows_now(
            table, ids, read_parts if storage is None else storage.read_rows
        )

    def _update_rows(
        self,
        table: Table,
        op: UpdateOp,
        operands: tuple[np.ndarray, ...],
        optimizer: OptimizerHandle | None,
    ) -> None:
        indices, rows = operands
        table.require_inside(indices)
        updates = row_updates(table, op, (indices, rows), optimizer)
        if self._storage is None:
            update_all(updates)
        else:  # no rows at all: another run of the step may have some in this place
            first, nothing = table.components[0], (indices[:0], rows[:0])
            self._storage.update_many(updates or [(first, op, nothing, optimizer)])

    def optimize(self, call: GradientCall) -> None:
        arrays = call.arrays
        self._require_outside(call.variables[0].spec, "apply_gradients", arrays)
        # Copies: on a CPU they would share the memory of what was computed.
        host = call.with_arrays([np.array(x, order="C") for x in arrays])
        for _, target, sparse, mine in host.leaves():
            if sparse:
                target.table.require_inside(mine[0])
        apply_now(host, self._storage)

    def require_known_end(self, name: str) -> None:
        """Does nothing: elements are real here."""

    def draw(self, iterator: StepIterator) -> Any:
        if self._is_inside():
            raise _refusals.draw_inside()
        element = joined.mapped(_copied, self._draw(iterator))
        self._drawn.extend(joined.leaves(element))
        return element

    def drew(self, leaf: object) -> bool:
        """Whether this very array is (a leaf of) an element drawn in this step."""
        return any(leaf is drawn for drawn in self._drawn)

    def _require_outside(
        self, target: object, what: str, operands: Sequence[Any]
    ) -> None:
        """Refuses an update in what jax transforms.

        Raises:
            RuntimeError: jax transforms what runs now, or an operand is of its trace.
        """
        if self._is_inside() or any(isinstance(x, jax.core.Tracer) for x in operands):
            raise _refusals.update_inside(target, what)

    def _is_inside(self) -> bool:
        """Whether jax transforms what runs now, so that it may never run again."""
        return current_trace() != self._outermost

    def _storage_of(self, variable: VariableHandle) -> Storage:
        return variable.storage if self._storage is None else self._storage


def own_copy_later(variable: VariableHandle, number: int) -> jax.Array:
    """A replica's own copy, in what jax transforms: it is read whenever that runs."""
    storage = device_storage(variable)
    return _later(variable, lambda: storage.copy(variable, number))


def _later(variable: VariableHandle, read: Callable[[], np.ndarray]) -> jax.Array:
    like = jax.eval_shape(lambda: jnp.zeros(variable.shape, variable.dtype))
    value: jax.Array = jax.pure_callback(read, like)
    return value


def _copied(leaf: Any) -> jax.Array:
    """What was drawn, as an array of jax: a copy, as on a CPU asarray would share the
    memory, which is the user's."""
    return jnp.array(native(leaf) if isinstance(leaf, np.ndarray) else leaf)


def rows_now(
    table: Table,
    ids: jax.Array,
    read: Callable[[Sequence[StorageRows]], Sequence[np.ndarray]],
) -> jax.Array:
    """The rows of a table, ``ids.shape + row``. ``read`` gives those of components.

    Raises:
        RuntimeError: There are no ids yet: jax transforms what runs now.
        IndexError: There is no such row.
    """
    if isinstance(ids, jax.core.Tracer) or is_staging():
        raise _refusals.lookup_not_ready(table)
    return jnp.asarray(Gathering.of(table, np.asarray(ids)).read(read))

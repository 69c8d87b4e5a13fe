"""`Immediate`: the recorder of eager steps, which executes reads and updates at once.

On a worker the storage of the variables may delay an update until the next read.
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
    downcast_loss,
    is_staging,
    read_parts,
    recorder,
    row_updates,
    update_all,
)

from . import _refusals, joined
from ._int32_checks import is_integer_downcast
from ._iterator import StepIterator
from ._signature import current_trace
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
    """Executes reads and updates through ``storage``, or through each variable's own
    storage if that is None.

    Values and elements are real jax arrays. Under jax.jit and the like a read becomes a
    callback, because jax keeps the traced program, in which the present value would be
    wrong after the next update.
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
        self._lost = ""
        """Describes an integer among arguments and elements of which jax has dropped
        bits; "": there is none."""

    @contextmanager
    def recording(self) -> Iterator[Immediate]:
        """Executes the code inside of the block as the body of the step."""
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
        """Reads the copies of a variable that all replicas have."""
        return jnp.asarray(device_storage(variable).copies(variable))

    def copy(self, variable: VariableHandle, number: int) -> jax.Array:
        """Reads the copy of a variable that one replica has."""
        return jnp.asarray(device_storage(variable).copy(variable, number))

    def put_copies(self, variable: VariableHandle, copies: jax.Array) -> None:
        """Replaces the copies of a variable that all replicas have."""
        device_storage(variable).put_copies(np.asarray(copies))

    def lookup(self, table: Table, ids: jax.Array) -> jax.Array:
        storage = self._storage
        # The ids may come from an integer that jax has cut already, when another row
        # would be taken.
        if table.is_hashed and self._lost:
            raise ValueError(
                f"an eager step has integers of 64 bits ({self._lost}) and looks up "
                f"rows of {table}: jax has downcast the ids to 32 bits. Leave out "
                "eager=True, or switch on jax_enable_x64"
            )
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
        else:  # also without rows: another run of the step may have some here
            first, nothing = table.components[0], (indices[:0], rows[:0])
            self._storage.update_many(updates or [(first, op, nothing, optimizer)])

    def optimize(self, call: GradientCall) -> None:
        arrays = call.arrays
        self._require_outside(call.variables[0].spec, "apply_gradients", arrays)
        # Copies: on a CPU they would share the memory of what was computed.
        host = call.with_arrays([np.array(x, order="C") for x in arrays])
        for _, target, sparse, own in host.leaves():
            if sparse:
                target.table.require_inside(own[0])
        apply_now(host, self._storage)

    def require_known_end(self, name: str) -> None:
        """Does nothing: elements are real here, so the end of the data is known."""

    def draw(self, iterator: StepIterator) -> Any:
        if self._is_inside():
            raise _refusals.draw_inside()
        element = self._draw(iterator)
        # Before the copy, which has 32 bits.
        self.note_downcasts(joined.leaves(element))
        element = joined.mapped(_copied, element)
        self._drawn.extend(joined.leaves(element))
        return element

    def note_downcasts(self, leaves: Sequence[Any]) -> None:
        """Records which leaves lose bits when they become jax arrays: ids must not have
        lost bits."""
        for leaf in leaves:
            if is_integer_downcast(leaf) and (lost := downcast_loss(leaf)) is not None:
                self._lost = lost

    def drew(self, leaf: object) -> bool:
        """Returns whether an array is, by identity, a leaf of an element drawn in this
        step."""
        return any(leaf is drawn for drawn in self._drawn)

    def _require_outside(
        self, target: object, what: str, operands: Sequence[Any]
    ) -> None:
        """Refuses an update under a transformation of jax.

        Raises:
            RuntimeError: The code runs under a transformation, or an operand is traced.
        """
        if self._is_inside() or any(isinstance(x, jax.core.Tracer) for x in operands):
            raise _refusals.update_inside(target, what)

    def _is_inside(self) -> bool:
        """Returns whether the code runs under a transformation of jax."""
        return current_trace() != self._outermost

    def _storage_of(self, variable: VariableHandle) -> Storage:
        return variable.storage if self._storage is None else self._storage


def own_copy_later(variable: VariableHandle, number: int) -> jax.Array:
    """Returns a replica's own copy of a variable as a traced value, which is read each
    time when the traced code runs."""
    storage = device_storage(variable)
    return _later(variable, lambda: storage.copy(variable, number))


def _later(variable: VariableHandle, read: Callable[[], np.ndarray]) -> jax.Array:
    like = jax.eval_shape(lambda: jnp.zeros(variable.shape, variable.dtype))
    value: jax.Array = jax.pure_callback(read, like)
    return value


def _copied(leaf: Any) -> jax.Array:
    """Copies a leaf to a jax array: on a CPU `jnp.asarray` might share the user's
    memory."""
    return jnp.array(native(leaf) if isinstance(leaf, np.ndarray) else leaf)


def rows_now(
    table: Table,
    ids: jax.Array,
    read: Callable[[Sequence[StorageRows]], Sequence[np.ndarray]],
) -> jax.Array:
    """Reads rows of a table at once, ``ids.shape + row``; ``read`` reads the rows of
    components.

    Raises:
        RuntimeError: The ids are traced, and have no values yet.
        IndexError: An id is outside of the table.
    """
    if isinstance(ids, jax.core.Tracer) or is_staging():
        raise _refusals.lookup_not_ready(table)
    return jnp.asarray(Gathering.of(table, np.asarray(ids)).read(read))

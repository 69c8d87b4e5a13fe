"""Updates in a traced step: their effect on a value, and `Moves`, the updates that the
program itself executes.

The effect of an update is traced for reads after it in the same step. The parameter
server does the same to the stored value, after the step; of duplicate indices in
SCATTER_UPDATE the last one wins, on every device.

The program itself updates variables on this process's devices: values and slots are its
inputs, the next ones its outputs. The step can read such a variable also after an
optimizer has updated it.

Copies of replicas are one array ``[count, ...]`` over the devices, a row on each, in
their `DeviceStorage`. A replica reads and updates its row; code outside of the replicas
sees the first row, or the aggregate of all rows.

Laws of the file. An update of rows changes these rows and their slots; slots that are
shared by all rows (a count) change with each update. All replicas share one array at
first; each gets a copy when one of them updates its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

import jax
import jax.numpy as jnp

from zstrat.variables import (
    ABSENT,
    DeviceStorage,
    TreeStep,
    VariableAggregation,
    VariableSynchronization,
    reaching,
    recorder,
    rows_of_component,
)
from zstrat.wire import UpdateOp

from ._flow import marked

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zstrat.variables import (
        GradientCall,
        OptimizerHandle,
        SlotRule,
        Table,
        TraceRecorder,
        VariableHandle,
    )

    from ._flow import SlotsKey


def updates_copies(variable: VariableHandle, count: int) -> bool:
    """Returns whether an update by one of ``count`` replicas changes only its own
    copy."""
    storage = variable.storage
    # Variables elsewhere, or of another strategy, have no copies that these replicas
    # could own.
    if not isinstance(storage, DeviceStorage) or not storage.pool.copies == count > 1:
        return False
    if is_on_read(variable):
        return True
    # A copy that all replicas share cannot be updated by each for itself (TF's rule).
    shares = storage.pool.travels
    return not shares and variable.aggregation is VariableAggregation.NONE


def has_copies(variable: VariableHandle, count: int) -> bool:
    """Returns whether each of ``count`` replicas has a separate copy of the variable
    now.

    Raises:
        ValueError: The variable has another number of copies.
    """
    storage = variable.storage
    if not isinstance(storage, DeviceStorage) or not storage.is_apart:
        return False
    if storage.pool.copies != count:
        raise ValueError(
            f"{variable.spec} has one value for each of {storage.pool.copies} "
            f"replicas, and is used by a strategy of {count}: use the strategy that it "
            "was created with"
        )
    return True


def is_apart(variable: VariableHandle) -> bool:
    """Returns whether each replica has a separate copy of the variable now."""
    storage = variable.storage
    return isinstance(storage, DeviceStorage) and storage.is_apart


def spread(variable: VariableHandle, value: jax.Array) -> jax.Array:
    """Repeats a value that all replicas share, to ``[count, ...]``; returns copies
    unchanged."""
    # Copies have one axis more than the variable.
    if value.ndim > len(variable.shape):
        return value
    copies = device_storage(variable).pool.copies
    return jnp.broadcast_to(value, (copies, *value.shape))


def is_on_read(variable: VariableHandle) -> bool:
    """Returns whether reads of the variable aggregate the copies of all replicas."""
    return variable.synchronization is VariableSynchronization.ON_READ


def apart_from_now(variable: VariableHandle) -> None:
    """Gives each replica a separate copy of the variable; the copies start equal.

    Raises:
        DataLossError: The value is lost.
    """
    storage = device_storage(variable)
    with storage.pool.turn:  # another thread may do the same
        if storage.is_apart:
            return
        storage.require_kept(variable.name)
        # At once, in a trace, too: this is not part of the program.
        with jax.ensure_compile_time_eval():
            storage.part()


def shown_to(recording: TraceRecorder, variable: VariableHandle) -> jax.Array:
    """Reads a variable under this recorder; aggregates the copies of a variable that is
    ON_READ."""
    if not is_on_read(variable):
        return recording.read(variable)
    before = recorder.set(recording)  # not one that substitutes values
    try:
        value: jax.Array = variable.value()
        return value
    finally:
        recorder.reset(before)


@dataclass(frozen=True, slots=True)
class Recorded:
    """One recorded update of a step; ``where`` is the user's line.

    ``variables`` is the updated variable or, with a ``table``, the table's components;
    with a ``call``, all variables that have gradients.
    """

    variables: tuple[VariableHandle, ...]
    op: UpdateOp
    operands: tuple[jax.Array, ...]
    optimizer: OptimizerHandle | None
    where: str
    table: Table | None = None
    call: GradientCall | None = None

    @property
    def variable(self) -> VariableHandle:
        """The variable, or the first component of the table."""
        return self.variables[0]

    @property
    def target(self) -> str:
        """The name of the updated variable or table, for messages."""
        return str(self.variables[0].spec if self.table is None else self.table)

    def operands_of(self, number: int) -> tuple[jax.Array, ...]:
        """Returns the operands for the variable ``number`` alone."""
        # With one component the indices are those of the table.
        if self.table is None or len(self.variables) == 1:
            return self.operands
        indices, rows = self.operands
        return rows_of_component(self.table, number, indices), rows


Write = tuple[Recorded, int]
"""An update, and which of its variables is meant, by index."""


def after_writes(value: jax.Array, writes: Sequence[Write]) -> jax.Array:
    """Applies updates to a value, in order; shape and dtype stay the same."""
    for update, number in writes:
        value = after(value, update.op, update.operands_of(number))
    return value


_OF_BOOLEANS: Final = {
    UpdateOp.SCATTER_ADD: UpdateOp.SCATTER_MAX,
    UpdateOp.SCATTER_MUL: UpdateOp.SCATTER_MIN,
}


def after(value: jax.Array, op: UpdateOp, operands: tuple[jax.Array, ...]) -> jax.Array:
    """Returns the value that one update makes from a value."""
    match op:
        case UpdateOp.ASSIGN:
            return operands[0]
        case UpdateOp.ADD:
            return value + operands[0]
        case UpdateOp.SUB:
            return value - operands[0]
    # Indices of 8 or 16 bits could not count the rows of a large variable.
    indices, rows = reaching(operands[0]), operands[1]
    if value.dtype == jnp.bool_:  # sums and products of booleans, as in numpy
        op = _OF_BOOLEANS.get(op, op)
    match op:
        case UpdateOp.SCATTER_ADD:
            return value.at[indices].add(rows)
        case UpdateOp.SCATTER_SUB:
            return value.at[indices].add(-rows)
        case UpdateOp.SCATTER_MUL:
            return value.at[indices].multiply(rows)
        case UpdateOp.SCATTER_DIV:
            return _divided(value, indices, rows)
        case UpdateOp.SCATTER_MIN:
            return value.at[indices].min(rows)
        case UpdateOp.SCATTER_MAX:
            return value.at[indices].max(rows)
        case UpdateOp.SCATTER_UPDATE:
            return value.at[_last(indices, value.shape[0])].set(rows, mode="drop")
    raise AssertionError(f"{op.name} needs an optimizer")


def _divided(value: jax.Array, indices: jax.Array, rows: jax.Array) -> jax.Array:
    """Divides rows of a value by ``rows``; integers are truncated towards zero.

    Round k divides by the k-th row of every index: the product of the divisors of one
    row may not fit their dtype.
    """
    if not indices.shape[0]:
        return value
    # Stable, so duplicates of a row are divided in the order of the body.
    order = jnp.argsort(indices, stable=True)
    indices, rows = indices[order], rows[order]
    firsts = jnp.searchsorted(indices, indices, side="left")
    turns = jnp.arange(indices.shape[0], dtype=firsts.dtype) - firsts
    rounds = jnp.max(turns, initial=-1) + 1

    def one(turn: jax.Array, value: jax.Array) -> jax.Array:
        quotients = jax.lax.div(value.at[indices].get(mode="clip"), rows)
        targets = jnp.where(turns == turn, indices, value.shape[0])
        return value.at[targets].set(quotients, mode="drop")

    def each(row: jax.Array, value: jax.Array) -> jax.Array:
        at = indices[row]
        quotient = jax.lax.div(value.at[at].get(mode="clip"), rows[row])
        return value.at[at].set(quotient, mode="drop")

    # A round looks at all rows.
    divided: jax.Array = jax.lax.cond(
        rounds > 32,
        lambda value: jax.lax.fori_loop(0, indices.shape[0], each, value),
        lambda value: jax.lax.fori_loop(0, rounds, one, value),
        value,
    )
    return divided


def _last(indices: jax.Array, size: int) -> jax.Array:
    """Moves all but the last of equal indices out of bounds, because XLA does not
    define which of several wins."""
    # The largest position among equal indices is the last one.
    order = jnp.arange(indices.shape[0], dtype=jnp.int32)
    winner = jnp.full(size, -1, jnp.int32).at[indices].max(order)
    return jnp.where(winner[indices] == order, indices, size)


def is_here(variable: VariableHandle) -> bool:
    """Returns whether the program itself executes updates of this variable, because it
    is on devices of this process."""
    return isinstance(variable.storage, DeviceStorage)


def device_storage(variable: VariableHandle) -> DeviceStorage:
    """Returns the storage of a variable on devices of this process."""
    storage = variable.storage
    assert isinstance(storage, DeviceStorage), storage
    return storage


class SlotFeed(Protocol):
    """Supplies the slots of optimizers; see `TraceFeed`."""

    def slots(self, variable: VariableHandle, rule: SlotRule) -> list[Any]: ...


class Moves:
    """The updates that the program of a step itself executes.

    ``values`` are the last values of updated variables; ``slots`` the last slots of
    optimizers, in the order of their first use; ``notes`` the updates, in the order of
    the body.
    """

    def __init__(self, feed: SlotFeed) -> None:
        self.values: dict[int, tuple[VariableHandle, jax.Array]] = {}
        self.slots: dict[SlotsKey, tuple[VariableHandle, SlotRule, list[Any]]] = {}
        self.notes: list[tuple[tuple[Any, ...], UpdateOp]] = []
        self._feed = feed

    def note(
        self, update: Recorded, current: Callable[[VariableHandle], jax.Array]
    ) -> None:
        """Records an update, and computes the next values of its variables.

        ``current`` returns the present value of a variable; if that is copies ``[count,
        ...]`` of replicas, each copy is updated.
        """
        if len(update.operands) > 1:
            index, rows = update.operands
            update = replace(update, operands=(marked(reaching(index)), rows))
        for number, variable in enumerate(update.variables):
            if update.op is UpdateOp.ASSIGN and not is_apart(variable):
                value = update.operands[0]  # whatever it was before
            else:
                value = _plain(update, number, variable, current(variable))
            self.values[variable.spec.key] = (variable, value)
        specs = tuple([variable.spec for variable in update.variables])
        self.notes.append((specs, update.op))

    def put(self, variable: VariableHandle, copies: jax.Array) -> None:
        """Records the copies of a variable that several replicas have computed."""
        self.values[variable.spec.key] = (variable, copies)
        self.notes.append(((variable.spec,), UpdateOp.ASSIGN))

    def optimize(
        self, call: GradientCall, current: Callable[[VariableHandle], jax.Array]
    ) -> None:
        """Computes the next values and slots of all variables of a call of
        ``apply_gradients``."""
        call = _marked(call)
        # Once for the call: it cuts the transformation into what moves each leaf.
        step = TreeStep(call)
        rules = [(component.variable, component.rule) for component in step.components]
        values = [current(variable) for variable, _ in rules]
        slots = [self._slots_of(variable, rule) for variable, rule in rules]
        moved, kept = step(values, slots, call)
        for (variable, rule), value, leaves in zip(rules, moved, kept, strict=True):
            key = variable.spec.key
            self.values[key] = variable, value
            self.slots[key, rule.id] = variable, rule, leaves
        specs = tuple([variable.spec for variable, _ in rules])
        self.notes.append((specs, UpdateOp.OPTIMIZE))

    def _slots_of(self, variable: VariableHandle, rule: SlotRule) -> list[Any]:
        # Applied twice in one step, the second one continues with the slots of the
        # first.
        known = self.slots.get((variable.spec.key, rule.id))
        return self._feed.slots(variable, rule) if known is None else known[2]


def _marked(call: GradientCall) -> GradientCall:
    """Returns the call with its indices of rows marked (`marked`), which must fit 32
    bits."""
    arrays: list[Any] = []
    for _, _, sparse, own in call.leaves():
        arrays += [marked(reaching(own[0])), own[1]] if sparse else own
    return call.with_arrays([*arrays, *call.further])


def rows_here(
    table: Table, ids: jax.Array, read: Callable[[VariableHandle], jax.Array]
) -> jax.Array:
    """Reads rows of a table of variables on devices of this process, ``ids.shape +
    row``.

    Rows are zeros for `ABSENT`, and NaN for ids outside of the table: a compiled step
    cannot raise.
    """
    # In 8 or 16 bits `ABSENT` would be cut to the number of a row.
    flat = reaching(ids.reshape(-1))
    rows = None
    for number, component in enumerate(table.components):
        here = rows_of_component(table, number, flat)
        # Rows of other components are out of bounds here, and become NaN; see below.
        own = read(component).at[here].get(mode="fill")
        is_own = (here < component.shape[0]).reshape(-1, *[1] * (own.ndim - 1))
        rows = own if rows is None else jnp.where(is_own, own, rows)
    assert rows is not None
    absent_mask = (flat == ABSENT).reshape(-1, *[1] * (rows.ndim - 1))
    rows = jnp.where(absent_mask, jnp.zeros_like(rows), rows)
    shaped: jax.Array = rows.reshape(*ids.shape, *rows.shape[1:])
    return shaped


def moved(op: UpdateOp, operands: tuple[jax.Array, ...], value: jax.Array) -> jax.Array:
    """Returns the value that one update, without an optimizer, makes from the whole
    value of a variable."""
    if op is UpdateOp.ASSIGN:
        return operands[0]
    if len(operands) > 1:  # negative indices do not count from the end
        height, indices = value.shape[0], reaching(operands[0])
        operands = (jnp.where(indices < 0, height, indices), *operands[1:])
    return after(value, op, operands)


def _plain(
    update: Recorded, number: int, variable: VariableHandle, value: jax.Array
) -> jax.Array:
    operands = update.operands_of(number)
    if value.ndim == len(variable.shape):
        return moved(update.op, operands, value)
    copies: jax.Array = jax.vmap(lambda row: moved(update.op, operands, row))(value)
    return copies

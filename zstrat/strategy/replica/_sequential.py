"""A replica function that runs once for each replica, sequentially (`_fibers`).

In a step each replica is traced by itself, into the same program. Elsewhere Python runs
with values: what a replica computes is on its device, and Python may look at it.

Updates of variables follow TF's rules: what is aggregated waits for the other replicas,
what each replica has of its own changes at once. Variables that the function creates
are created by the first replica; the others are given them in the same order.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, final

import jax
import jax.numpy as jnp
import numpy as np

from zstrat.program.trace import (
    Immediate,
    apart_from_now,
    as_replica,
    device_storage,
    has_copies,
    lookup_inside,
    marked,
    moved,
    own_copy_later,
    rows_here,
    rows_now,
    update_inside,
    updates_copies,
)
from zstrat.strategy._context import ReplicaContext
from zstrat.variables import (
    Table,
    creator,
    is_staging,
    recorder,
    refuse_read,
    refuse_update,
    row_updates,
)

from ._arguments import distribute_rows, unwrapped
from ._barriers import brought, optimizing, updating
from ._fibers import run_fibers
from ._per_replica import select_replica
from ._replica_recorder import ReplicaRecorder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zstrat.variables import (
        AbstractVariable,
        Creator,
        GradientCall,
        OptimizerHandle,
        StorageRows,
        TraceRecorder,
        VariableHandle,
        VariableRequest,
        VariableUpdate,
    )
    from zstrat.wire import UpdateOp

    from ._arguments import ReplicaCall
    from ._collective import Team
    from ._fibers import ReplicaFiber


def run_sequentially(call: ReplicaCall, devices: Sequence[jax.Device]) -> list[Any]:
    """What each replica of this process returns.

    Args:
        devices: One for each replica; replicas without one compute where jax does.

    Raises:
        RuntimeError: Replicas do different things, or create different variables; or
            they read or update one while jax traces outside of a step.
        ValueError: The rows of what was drawn do not split evenly.
        Exception: Whatever the function raises; the other replicas are ended.
    """
    outer = recorder.get()
    is_real = outer is None or outer.live
    is_unnoticed = outer is None and is_staging()
    made = _FirstCreations(creator.get())
    team = call.team
    tree = distribute_rows(unwrapped(call.tree), team.local)

    def body(fiber: ReplicaFiber) -> Any:
        number = fiber.number
        # Nothing is reset: the context is this replica's own, and ends with it.
        recorder.set(SequentialReplica(fiber, team, outer, unnoticed=is_unnoticed))
        if is_real:
            creator.set(_SameCreations(made, number))
        selected = select_replica(number, tree)
        if is_real and number < len(devices):
            selected = jax.tree.map(partial(_near, device=devices[number]), selected)
        own_args, own_kwargs = selected
        with ReplicaContext(call.strategy, team.id_of(number)):
            return call.fn(*own_args, **own_kwargs)

    @contextmanager
    def during(number: int) -> Iterator[None]:
        is_placed = is_real and number < len(devices)
        where = jax.default_device(devices[number]) if is_placed else nullcontext()
        with as_replica(team.first + number, team.size), where:
            yield

    return run_fibers([body] * team.local, during)


def _near(leaf: Any, device: jax.Device) -> Any:
    """What is bound to one device, for the replica on this one. What is on several
    stays: no other replica has use for it."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
        return leaf
    return brought(leaf, device) if len(leaf.devices()) == 1 else leaf


@final
class SequentialReplica(ReplicaRecorder):
    """The recorder of one replica: to update what all share it waits for the others."""

    def __init__(
        self,
        fiber: ReplicaFiber,
        team: Team,
        outer: TraceRecorder | None,
        *,
        unnoticed: bool,
    ) -> None:
        super().__init__(Immediate() if outer is None else outer, team)
        self.has_values = self.may_create = self.live
        self._fiber = fiber
        self._is_unnoticed = unnoticed
        """Whether jax traces what runs, and no step does: nobody would hear of it."""

    def read(self, variable: VariableHandle) -> jax.Array:
        if self._is_unnoticed:
            refuse_read(variable.spec)
        is_immediate = isinstance(self.outer, Immediate)
        number, count = self._fiber.number, self._team.local
        if is_immediate and is_staging() and updates_copies(variable, count):
            return own_copy_later(variable, number)
        if not has_copies(variable, count):
            value = self.outer.read(variable)
            # Another object than what the other replicas read: results are merged by
            # identity.
            return value if self.live else jnp.copy(value)
        if isinstance(self.outer, Immediate):
            return self.outer.copy(variable, number)
        row: jax.Array = self.outer.copies(variable)[number]
        return row

    def update(self, update: VariableUpdate) -> None:
        if self._is_unnoticed:
            is_of_rows = isinstance(update.target, Table)
            what = "update rows of" if is_of_rows else "update"
            refuse_update(update.variable.spec, what)
        super().update(update)

    def lookup(self, table: Table, ids: jax.Array) -> jax.Array:
        if not any(has_copies(c, self._team.local) for c in table.components):
            return self.outer.lookup(table, ids)
        if self.live:
            return rows_now(table, ids, self._rows)
        if self._fiber.is_inside:
            # A trace that jax makes of a function of its own cannot hand out what it
            # looks up.
            raise lookup_inside(table)
        return rows_here(table, marked(ids), self.read)

    def optimize(self, call: GradientCall) -> None:
        if self._is_unnoticed:
            refuse_update(call.variables[0].spec, "apply a gradient to")
        # Without a look at whether it is its own: gradients are always summed over
        # replicas.
        self._fiber.wait_at(optimizing(self._team, call, self.outer.optimize))

    def _update_shared(self, update: VariableUpdate) -> None:
        def apply(combined: tuple[jax.Array, ...]) -> None:
            self.outer.update(update._replace(operands=combined))

        _, op, operands, optimizer = update
        self._fiber.wait_at(
            updating(self._team, update.variable, op, operands, optimizer, apply)
        )

    def _rows(self, parts: Sequence[StorageRows]) -> list[np.ndarray]:
        return [np.asarray(self.read(variable))[index] for variable, index in parts]

    def _update_own(self, update: VariableUpdate) -> None:
        variable, op, operands = update.variable, update.op, update.operands
        number = self._fiber.number
        if not self.live:
            apart_from_now(variable)
            copies = self.outer.copies(variable)
            value = moved(op, operands, copies[number])
            self.outer.put_copies(variable, copies.at[number].set(value))
            return
        is_traced = any(isinstance(x, jax.core.Tracer) for x in operands)
        # Real values under another recorder: of what is differentiated.
        if is_traced or not isinstance(self.outer, Immediate):
            raise update_inside(variable.spec, op.name)
        # In numpy: a program that is under way may wait for the turn.
        updates = _own_updates(variable, op, tuple(np.asarray(x) for x in operands))
        # In a trace, too: what happens to the value is no part of the program.
        with jax.ensure_compile_time_eval():
            device_storage(variable).update_copy(variable, number, op, updates)


def _own_updates(
    variable: VariableHandle, op: UpdateOp, operands: tuple[np.ndarray, ...]
) -> list[tuple[np.ndarray, ...]]:
    """Operands of the updates of one copy: of rows those that are there.

    Raises:
        IndexError: There is no such row.
    """
    if len(operands) == 1:
        return [operands]
    index, rows = operands
    table = Table(variable.name, (variable,))
    table.require_inside(index)
    found = row_updates(table, op, (index, rows), None)
    return [tuple(moves) for _, _, moves, _ in found]


class _FirstCreations:
    """What the first replica has created so far, for the others."""

    def __init__(self, inner: Creator | None) -> None:
        self.inner = inner
        self.variables: list[tuple[VariableRequest, AbstractVariable]] = []
        self.optimizers: list[int] = []


class _SameCreations:
    """The creator in one replica: the first one creates, the others find."""

    def __init__(self, made: _FirstCreations, number: int) -> None:
        self._made = made
        self._number = number
        self._variables = 0
        self._optimizers = 0

    @property
    def inner(self) -> Creator | None:
        """Who creates for the first one."""
        return self._made.inner

    def create_variables(
        self, requests: Sequence[VariableRequest]
    ) -> Sequence[AbstractVariable]:
        made = self._made
        if self._number == 0:
            assert made.inner is not None
            found = made.inner.create_variables(requests)
            made.variables += zip(requests, found, strict=True)
            return found
        return [self._found(request) for request in requests]

    def register_optimizer(self, optimizer: OptimizerHandle) -> int:
        made = self._made
        if self._number == 0:
            assert made.inner is not None
            made.optimizers.append(made.inner.register_optimizer(optimizer))
        self._optimizers += 1
        if self._optimizers > len(made.optimizers):
            raise RuntimeError(
                f"replica {self._number} creates an optimizer that replica 0 has not "
                f"created, {optimizer.name!r}: all replicas create the same"
            )
        return made.optimizers[self._optimizers - 1]

    def forget_optimizer(self, optimizer: int) -> None:
        self._optimizers -= 1
        if self._number == 0:
            assert self._made.inner is not None
            self._made.optimizers.pop()
            self._made.inner.forget_optimizer(optimizer)

    def _found(self, request: VariableRequest) -> AbstractVariable:
        place = self._variables
        self._variables += 1
        if place >= len(self._made.variables):
            raise RuntimeError(
                f"Tried to create variable {request.name!r} on replica {self._number}, "
                "that replica 0 has not created: all replicas create the same variables"
            )
        first, variable = self._made.variables[place]
        # Names alone: what else differs (values drawn at random, say) is the first
        # one's, as TF has it.
        if first.name != request.name:
            raise RuntimeError(
                f"Tried to create variable {request.name!r} with mismatching name on "
                f"replica {self._number}: number {place} of replica 0 is "
                f"{first.name!r}. All replicas create the same variables, in the same "
                "order"
            )
        return variable

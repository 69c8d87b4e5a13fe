"""Runs a replica function once for each replica, sequentially (`_fibers`).

In a step each replica is traced separately, into the same program. Elsewhere Python
runs with actual values: results of a replica are on its device, and Python may look at
them.

Updates of variables follow the rules of TF: an update that is aggregated waits for the
other replicas, while a replica changes its own copy at once. The first replica creates
the variables of the function; the other replicas get the same variables, in the same
order.

Replicas that get arrays of different shapes in a step run sequentially, too (`uneven`).
In other processes all arrays may have the same shape, so that their replicas are one
program. All processes must make the same collectives together, and a step combines
collectives whose operands are known at the same time. So sequential replicas are one
part of the program: it takes all inputs together, and all results of a stage are
returned together. The step records their effects at the end, as for replicas that are
one program.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Final, final

import jax
import jax.numpy as jnp
import numpy as np

from zstrat.program.trace import (
    Capture,
    Discovery,
    Immediate,
    Replay,
    apart_from_now,
    as_replica,
    device_storage,
    has_copies,
    joined,
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
from zstrat.strategy.reduce._values import is_whole
from zstrat.variables import (
    Table,
    creator,
    is_staging,
    recorder,
    refuse_read,
    refuse_update,
    row_updates,
)

from ._barriers import optimizing, to_device, updating
from ._fibers import run_fibers
from ._mapped import ReplicaRecorder, in_stages
from ._one_program import (
    UnevenParts,
    distribute_rows,
    needs_sequential,
    require_all_one_each,
    unwrapped,
)
from ._per_replica import regroup, select_replica
from ._regions import TracedRegion

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zstrat.program.trace import TraceFeed
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

    from ._collective import Team
    from ._fibers import ReplicaFiber
    from ._one_program import ReplicaCall


def run_sequentially(call: ReplicaCall, devices: Sequence[jax.Device]) -> list[Any]:
    """Runs the replicas of this process one after the other; returns the result of
    each.

    Args:
        devices: A device for each replica; replicas without one use jax's default
            device.

    Raises:
        RuntimeError: Replicas wait at different barriers or create different variables;
            or a replica reads or updates a variable while jax traces outside of a step.
        ValueError: The rows of a drawn array do not split evenly.
        Exception: Whatever the function raises; the other replicas are ended.
    """
    outer = recorder.get()
    is_real = outer is None or outer.live
    is_unnoticed = outer is None and is_staging()
    inner = creator.get()
    creators: list[_SameCreations] = []
    team = call.team
    tree = distribute_rows(unwrapped(call.tree), team.local)

    def body(fiber: ReplicaFiber) -> Any:
        number = fiber.number
        # Nothing is reset: the context belongs to this replica, and ends with it.
        recorder.set(SequentialReplica(fiber, team, outer, unnoticed=is_unnoticed))
        # Traced steps create nothing, see `CreatedInStep`.
        if is_real:
            first = creators[0] if creators else None
            creators.append(_SameCreations(inner, number, first))
            creator.set(creators[-1])
        selected = select_replica(number, tree)
        # In a program jax places values by itself.
        if is_real and number < len(devices):
            selected = jax.tree.map(partial(_near, device=devices[number]), selected)
        own_args, own_kwargs = selected
        with ReplicaContext(call.strategy, team.id_of(number)):
            return call.fn(*own_args, **own_kwargs)

    @contextmanager
    def during(number: int) -> Iterator[None]:
        # Entered around each stretch of the replica, not around the whole: the replicas
        # alternate on one thread.
        is_placed = is_real and number < len(devices)
        where = jax.default_device(devices[number]) if is_placed else nullcontext()
        with as_replica(team.first + number, team.size), where:
            yield

    return run_fibers([body] * team.local, during)


def _near(leaf: Any, device: jax.Device) -> Any:
    """Moves an array that is bound to one device to the device of the replica. An array
    on several devices is not moved, as no other replica uses it."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
        return leaf
    return to_device(leaf, device) if len(leaf.devices()) == 1 else leaf


@final
class SequentialReplica(ReplicaRecorder):
    """The recorder of one sequential replica. To update a value that all replicas
    share, it waits for the other replicas."""

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
        """Whether jax traces the function outside of a step: an update would be
        lost."""

    def read(self, variable: VariableHandle) -> jax.Array:
        if self._is_unnoticed:
            refuse_read(variable.spec)
        is_immediate = isinstance(self.outer, Immediate)
        number, count = self._fiber.number, self._team.local
        if is_immediate and is_staging() and updates_copies(variable, count):
            return own_copy_later(variable, number)
        if not has_copies(variable, count):
            value = self.outer.read(variable)
            # A different object from those that the other replicas read: results are
            # merged by identity.
            return value if self.live else jnp.copy(value)
        if isinstance(self.outer, Immediate):
            return self.outer.copy(variable, number)
        row: jax.Array = self.outer.copies(variable)[number]
        return row

    def update(self, update: VariableUpdate) -> None:
        if self._is_unnoticed:
            is_of_rows = isinstance(update.target, Table)
            # A table is named by its rows, as the caller did.
            what = "update rows of" if is_of_rows else "update"
            refuse_update(update.variable.spec, what)
        super().update(update)

    def lookup(self, table: Table, ids: jax.Array) -> jax.Array:
        # Rows that all replicas share.
        if not any(has_copies(c, self._team.local) for c in table.components):
            return self.outer.lookup(table, ids)
        if self.live:
            return rows_now(table, ids, self._rows)
        if self._fiber.is_inside:
            # A trace that jax makes of an inner function cannot pass out its lookups.
            raise lookup_inside(table)
        return rows_here(table, marked(ids), self.read)

    def optimize(self, call: GradientCall) -> None:
        if self._is_unnoticed:
            refuse_update(call.variables[0].spec, "apply a gradient to")
        # Also of its own copy: gradients are always summed over replicas.
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
            # In a step: the copies of all replicas are one array of the program.
            apart_from_now(variable)
            copies = self.outer.copies(variable)
            value = moved(op, operands, copies[number])
            self.outer.put_copies(variable, copies.at[number].set(value))
            return
        is_traced = any(isinstance(x, jax.core.Tracer) for x in operands)
        # Real values under another recorder: of what is differentiated.
        if is_traced or not isinstance(self.outer, Immediate):
            raise update_inside(variable.spec, op.name)
        # In numpy: a program that is under way may wait for the lock of the variables.
        updates = _own_updates(variable, op, tuple(np.asarray(x) for x in operands))
        # In a trace, too: the update of the value is not part of the program.
        with jax.ensure_compile_time_eval():
            device_storage(variable).update_copy(variable, number, op, updates)


def _own_updates(
    variable: VariableHandle, op: UpdateOp, operands: tuple[np.ndarray, ...]
) -> list[tuple[np.ndarray, ...]]:
    """Splits an update into updates of one copy, without rows of padding.

    Raises:
        IndexError: An index is not a row of the variable.
    """
    if len(operands) == 1:
        return [operands]
    index, rows = operands
    # As a table of one component, so that the rows are checked and summed as those of
    # any table.
    table = Table(variable.name, (variable,))
    table.require_inside(index)
    updates = row_updates(table, op, (index, rows), None)
    return [tuple(moves) for _, _, moves, _ in updates]


class _SameCreations:
    """The creator of variables in one replica: the first replica creates variables, and
    other replicas get the same ones.

    Args:
        inner: The creator that creates variables for the first replica.
        first: This object of the first replica; None: this is that one.
    """

    def __init__(
        self, inner: Creator | None, number: int, first: _SameCreations | None
    ) -> None:
        self.inner = inner
        self._number = number
        self._first = self if first is None else first
        self._variables: list[tuple[VariableRequest, AbstractVariable]] = []
        self._optimizers: list[int] = []
        """Ids of the optimizers that the first replica has registered so far."""
        self._taken = self._registered = 0

    def create_variables(
        self, requests: Sequence[VariableRequest]
    ) -> Sequence[AbstractVariable]:
        if self._first is not self:
            return [self._variable_of_first(request) for request in requests]
        assert self.inner is not None
        created = self.inner.create_variables(requests)
        self._variables += zip(requests, created, strict=True)
        return created

    def register_optimizer(self, optimizer: OptimizerHandle) -> int:
        if self._first is self:
            assert self.inner is not None
            self._optimizers.append(self.inner.register_optimizer(optimizer))
        # By count, not by name: optimizers have no unique names.
        number, registered = self._registered, self._first._optimizers
        self._registered += 1
        if number >= len(registered):
            raise RuntimeError(
                f"replica {self._number} creates an optimizer that replica 0 has not "
                f"created, {optimizer.name!r}: all replicas create the same"
            )
        return registered[number]

    def forget_optimizer(self, optimizer: int) -> None:
        # The registration failed in the constructor, so the next one has this number
        # again.
        self._registered -= 1
        if self._first is self:
            assert self.inner is not None
            self._optimizers.pop()
            self.inner.forget_optimizer(optimizer)

    def _variable_of_first(self, request: VariableRequest) -> AbstractVariable:
        number, created = self._taken, self._first._variables
        self._taken += 1
        if number >= len(created):
            raise RuntimeError(
                f"Tried to create variable {request.name!r} on replica {self._number}, "
                "that replica 0 has not created: all replicas create the same variables"
            )
        first, variable = created[number]
        # Names alone: of other differences (random values, for example) those of the
        # first replica count, as in TF.
        if first.name != request.name:
            raise RuntimeError(
                f"Tried to create variable {request.name!r} with mismatching name on "
                f"replica {self._number}: number {number} of replica 0 is "
                f"{first.name!r}. All replicas create the same variables, in the same "
                "order"
            )
        return variable


# jax's stubs leave it untyped.
_barrier: Final[Any] = jax.lax.optimization_barrier


def uneven(call: ReplicaCall, devices: Sequence[jax.Device]) -> Any:
    """Runs replicas whose arguments have different shapes, and merges their results.
    The replicas of other processes may be one program.

    Raises:
        UnevenParts: Called in a step where XLA communicates with the other processes,
            so that all have to run one program; or the replicas look up rows that are
            not in this process.
        Exception: As `run_sequentially`.
    """
    team = call.team
    require_all_one_each(call.tree, team.local)
    outside = recorder.get()
    # No other process, or values that are real: nothing has to be cut into stages.
    if team.channel is None or outside is None or outside.live:
        result = regroup(run_sequentially(call, devices))
        # With the members of a dict in the order of a program: they are reduced one
        # after the other, with other processes.
        return jax.tree.map(lambda leaf: leaf, result, is_leaf=is_whole)
    if team.channel.mesh is not None:
        raise UnevenParts(
            "strategy.run in a step was given parts of different shapes, expected one "
            "shape: with implementation=XLA the replicas of all processes run one "
            "program. Use batch(..., drop_remainder=True)"
        )
    distributed = call.given(distribute_rows(unwrapped(call.tree), team.local))
    # A trace whose arguments are those of replica 0: other processes find the same, as
    # they run the same function.
    if needs_sequential(distributed):  # in the other processes, too
        return regroup(run_sequentially(call, devices))
    return _in_one_region(_Region(distributed), outside)


def _in_one_region(region: _Region, outside: TraceRecorder) -> Any:
    variables = region.variables()
    # Read once, outside of the traces of the stages: tracers of those must not leave
    # them.
    held = [
        outside.copies(v) if has_copies(v, region.team.local) else outside.read(v)
        for v in variables
    ]
    keys = [variable.spec.key for variable in variables]

    def one(held: Sequence[Any], inputs: Sequence[Any], _: Any) -> Any:
        known = dict(zip(keys, held, strict=True))
        return region.traced(Replay("strategy.run", known, ()), inputs)

    def mapped(part: Any, own: Sequence[Any], whole: Sequence[Any]) -> Any:
        def together(*given: Any) -> Any:
            # Without it, an argument that is returned as it is would not be a part of
            # this call.
            return _barrier(part(*given))

        # As one call, whose results all depend on all arguments and captured values.
        return jax.jit(together)(held, [*region.inputs, *whole], list(own))

    arrays, operands = in_stages(one, mapped, [], len(region.inputs))
    return region.last.recorded_result(outside, arrays, operands)


class _Region:
    """The sequential replicas as one function of arrays, which is traced for each of
    its stages."""

    def __init__(self, call: ReplicaCall) -> None:
        self.team = call.team
        self._call = call
        self._leaves: list[Any]
        self._treedef: Any  # its stubs lack what we call
        self._leaves, self._treedef = joined.flatten(call.tree)
        # Inputs are what the step traces. All else is a constant of it.
        self.inputs = [x for x in self._leaves if isinstance(x, jax.core.Tracer)]
        self.last: TracedRegion
        """The outcome of the last trace; not set before the first."""

    def variables(self) -> list[VariableHandle]:
        """Lists the variables that the replicas use.

        Raises:
            UnevenParts: The replicas look up rows that are not in this process.
        """

        def abstract(seed: jax.Array, inputs: Sequence[Any]) -> None:
            self.traced(Discovery(seed), inputs)

        # Which variables they use has to be known first, because the stages get their
        # values as inputs.
        jax.eval_shape(abstract, jnp.int8(0), list(self.inputs))
        capture = self.last.capture
        if capture.lookups:
            raise UnevenParts(
                "strategy.run was given parts of different shapes, and looks up rows "
                f"of {capture.lookups[0].table}, which is not in the scope of the "
                "strategy: create it there, or use batch(..., drop_remainder=True)"
            )
        return capture.variables

    def traced(self, feed: TraceFeed, inputs: Sequence[Any]) -> Any:
        """Traces the replicas. Returns the arrays of their results followed by the
        copies of variables that they changed, and the operands of their updates."""
        given = iter(inputs)
        leaves = [
            next(given) if isinstance(x, jax.core.Tracer) else x for x in self._leaves
        ]
        call = self._call.given(self._treedef.unflatten(leaves))
        capture = Capture(feed, is_region=True)
        with capture.recording():
            # No devices: within a program jax places values.
            results = run_sequentially(call, ())
        moves = capture.moves.values.values()
        leaves, treedef = joined.flatten(regroup(results))
        changed = [variable for variable, _ in moves]
        self.last = TracedRegion(leaves, treedef, capture, changed)
        operands = [update.operands for update in capture.updates]
        return [*self.last.arrays, *[copies for _, copies in moves]], operands

"""One replica as its function meets it: of several in a program, or alone in a process.

Where several replicas are one program, the function is mapped over them. Law of the
file: an update is brought together with those of the other replicas, and noted by a
capture of this region; it reaches the step when the region is done.

Where a process has one replica, the only one of its own among those of several
processes, nothing is mapped: its function is called, and what it does to variables is
brought together with what the replicas of the other processes do.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from zstrat.program.gradients import is_live
from zstrat.program.trace import Capture, Discovery, Drawing, Immediate, updates_copies
from zstrat.variables import (
    GradientCall,
    OptimizerHandle,
    Recorder,
    Table,
    VariableAggregation,
    VariableHandle,
    VariableSynchronization,
    recorder,
)

from ._collective import AXIS
from ._spread import by_replica

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from zstrat.program.trace import Element, StepIterator, TraceFeed
    from zstrat.wire import UpdateOp

    from ._collective import Team
    from ._spread import Spread

    ReplicaFunction = Callable[[Sequence[Any], Sequence[Any]], Any]
    """``(shared, own) -> pytree``: called with the shared arrays and this replica's
    own."""


@contextlib.contextmanager
def alone(team: Team) -> Iterator[None]:
    """What is inside runs as the one replica of this process: updates are brought
    together with those of the other processes. Nothing is mapped."""
    outer = recorder.get()
    before = recorder.set(_Alone(Immediate() if outer is None else outer, team))
    try:
        yield
    finally:
        recorder.reset(before)


@contextlib.contextmanager
def merged() -> Iterator[None]:
    """What is inside is done once for all replicas: updates are made as they are."""
    current = recorder.get()
    if not isinstance(current, _Alone):
        yield
        return
    before = recorder.set(current.outer)
    try:
        yield
    finally:
        recorder.reset(before)


class _Alone:
    """The recorder inside a replica function that is the only one of its process."""

    def __init__(self, outer: Recorder, team: Team) -> None:
        self.outer = outer
        self._team = team
        self.live = is_live(outer)
        """Whether values are real, so that nothing is being captured."""

    def read(self, variable: VariableHandle) -> jax.Array:
        return self.outer.read(variable)

    def update(
        self,
        variable: VariableHandle,
        op: UpdateOp,
        operands: tuple[jax.Array, ...],
        optimizer: OptimizerHandle | None,
    ) -> None:
        if optimizer is None and _is_own(variable):
            self.outer.update(variable, op, operands, None)
            return
        combined = self._team.aggregate(variable, op, operands)
        self.outer.update(variable, op, combined, optimizer)

    def lookup(self, table: Table, ids: jax.Array) -> jax.Array:
        return self.outer.lookup(table, ids)

    def update_rows(
        self,
        table: Table,
        op: UpdateOp,
        operands: tuple[jax.Array, jax.Array],
        optimizer: OptimizerHandle | None,
    ) -> None:
        index, rows = operands
        if optimizer is not None or not _is_own(table.components[0]):
            index, rows = self._team.aggregate(table.components[0], op, operands)
        self.outer.update_rows(table, op, (index, rows), optimizer)

    def optimize(self, call: GradientCall) -> None:
        self.outer.optimize(self._team.aggregate_call(call))

    def drew(self, leaf: object) -> bool:
        return self.outer.drew(leaf)

    def draw(self, iterator: StepIterator) -> Any:
        if isinstance(self.outer, Drawing):
            return self.outer.draw(iterator)
        return iterator.draw()


def _is_own(variable: VariableHandle) -> bool:
    """Whether each process has a copy that it updates by itself (TF's rules)."""
    return (
        variable.aggregation is VariableAggregation.NONE
        or variable.synchronization is VariableSynchronization.ON_READ
    )


class OneReplica:
    """The recorder inside a replica function: updates are brought together with those
    of the other replicas, and noted by a capture of this region."""

    def __init__(self, feed: TraceFeed, team: Team) -> None:
        self.capture = Capture(feed, is_region=True)
        self._team = team

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        with self.capture.recording():
            before = recorder.set(self)
            try:
                yield
            finally:
                recorder.reset(before)

    def read(self, variable: VariableHandle) -> jax.Array:
        return self.capture.read(variable)

    def update(
        self,
        variable: VariableHandle,
        op: UpdateOp,
        operands: tuple[jax.Array, ...],
        optimizer: OptimizerHandle | None,
    ) -> None:
        if optimizer is None and updates_copies(variable, self._team.local):
            self.capture.update_own(variable, op, operands)
            return
        combined = self._team.aggregate(variable, op, operands)
        self.capture.update(variable, op, combined, optimizer)

    def lookup(self, table: Table, ids: jax.Array) -> jax.Array:
        return self.capture.lookup(table, ids)

    def update_rows(
        self,
        table: Table,
        op: UpdateOp,
        operands: tuple[jax.Array, jax.Array],
        optimizer: OptimizerHandle | None,
    ) -> None:
        index, rows = self._team.aggregate(table.components[0], op, operands)
        self.capture.update_rows(table, op, (index, rows), optimizer)

    def optimize(self, call: GradientCall) -> None:
        self.capture.optimize(self._team.aggregate_call(call))

    def drew(self, leaf: object) -> bool:
        del leaf  # nothing is drawn in here
        return False

    def draw(self, iterator: StepIterator) -> Any:
        raise RuntimeError(
            f"next() of {iterator.name} inside a replica function, which is one "
            "program for several replicas: draw before it, and give each replica its "
            "rows with strategy.run(fn, args=(next(iterator),))"
        )


def discovered(
    fn: ReplicaFunction, shared: Sequence[Any], split: Sequence[Spread], team: Team
) -> Capture:
    """What the function reads and looks up, and which copies it updates.

    The step itself is not asked inside this trace: what it handed out here would belong
    to a trace that ends before the step does.
    """
    probes: list[OneReplica] = []

    def abstract(seed: jax.Array, shared: Any, own: Any) -> None:
        probe = OneReplica(Discovery(seed, _no_elements), team)
        probes[:] = [probe]
        with probe.recording():
            fn(shared, own)

    mapped = jax.vmap(
        abstract, in_axes=(None, None, 0), axis_name=AXIS, axis_size=team.local
    )
    parts = [by_replica(x, team.local) for x in split]
    jax.eval_shape(mapped, jnp.int8(0), list(shared), parts)
    return probes[0].capture


def _no_elements(ordinal: int, iterator: StepIterator) -> Element:
    raise AssertionError(f"{iterator.name} was drawn from inside a replica")

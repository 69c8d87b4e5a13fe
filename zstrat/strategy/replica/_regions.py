"""Runs a replica function as one program (a *region*) for all replicas of this process.

The function is traced once under a named axis ``replica``, with a traced number of the
replica: collectives inside it are jax's own over that axis. A first, abstract trace
finds which variables the function reads, because a program over a mesh takes its inputs
as arguments. Then the function is mapped over the devices; or, if this process has
fewer devices than replicas (a coordinator that only plans, a debugging run), over an
axis of one device, which gives the same values. The results of a replica stay on its
device.

Law of the file: an update inside a replica is combined here with those of the other
replicas, when it is made, and the step records the combined update once. Gradients are
summed over the replicas; other updates follow the aggregation of the variable. A region
is a separate capture, with the same rules as the capture of a step.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, final

import jax
import jax.numpy as jnp

from zstrat.program.stages import within_mesh
from zstrat.program.trace import (
    Capture,
    Discovery,
    Flow,
    Immediate,
    Replay,
    apart_from_now,
    asked,
    body_program,
    claimed,
    has_copies,
    printed_before,
    uncut,
)
from zstrat.variables import (
    TraceRecorder,
    VariableHandle,
    VariableUpdate,
    read_all,
    recorder,
    refuse_read,
    refuse_update,
)

from ._mapped import ReplicaRecorder, Spread, in_stages, mapped_over, recording_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from jax.sharding import Mesh

    from zstrat.program.trace import BodyProgram, Placeholder, RecordedLookup, TraceFeed

    from ._collective import Team

    ReplicaFunction = Callable[[Sequence[Any], Sequence[Any]], Any]
    """``(shared, own) -> pytree``: called with the shared arrays and this replica's
    own."""


@final
class MappedReplica(ReplicaRecorder):
    """The recorder of replicas that are one program; it passes reads and updates to the
    capture of the region."""

    def __init__(self, feed: TraceFeed, team: Team) -> None:
        # Separate from the capture of the step, whose values belong to another trace.
        self.capture = Capture(feed, is_region=True)
        super().__init__(self.capture, team)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        with self.capture.recording(), recording_by(self):
            yield

    def _update_own(self, update: VariableUpdate) -> None:
        self.capture.update_own(update)


def replicate(
    fn: ReplicaFunction,
    shared: Sequence[Any],
    split: Sequence[Spread],
    *,
    team: Team,
    mesh: Mesh | None = None,
) -> Any:
    """Runs ``fn`` once per replica. Returns its pytree with each array as a `Spread`.

    Leaves that are not jax arrays are the same object in every replica and are returned
    unchanged. Reads and updates of variables are recorded in the step that is being
    traced; without such a step they use the variables' storages. If each replica has a
    separate copy of a variable, the replica reads and updates its copy (see
    `zstrat.program.trace._updates`).

    Args:
        shared: Arrays that every replica gets whole.
        split: Arrays of which each replica gets its part.
        team: The replicas; this process has at least 2 of them.
        mesh: A mesh whose axis `AXIS` has a device for each replica; None: one device
            computes all replicas.

    Raises:
        ValueError: A variable whose aggregation is NONE is updated, or numpy integers
            do not fit the 32 bits that jax computes with.
        NotImplementedError: A scatter update that cannot be aggregated.
        RuntimeError: Inside a replica, a variable is updated under a jax transformation
            or read after an optimizer's update, or an element is drawn; or a variable
            is read or updated while jax traces outside of a step.
    """
    shared = [uncut(x) for x in shared]
    split = [Spread(uncut(x.array), x.stacked) for x in split]
    count = team.local
    # A program over a mesh takes what it reads as arguments, so that has to be known
    # first.
    region = discovered(fn, shared, split, team, mesh)
    capture = region.capture
    # No step records: if jax is tracing, its program would keep the values that are
    # read as constants, and updates would be lost.
    recording = recorder.get()
    if recording is None:
        _refuse_unnoticed(capture)
    outside = Immediate() if recording is None else recording
    # Before the program is built: a program has one input per variable, which is either
    # shared or a copy per replica.
    for variable, _ in capture.own.values():
        apart_from_now(variable)
    own = [v for v in capture.variables if has_copies(v, count)]
    variables = [v for v in capture.variables if not has_copies(v, count)]
    if recording is None:
        values = [jnp.asarray(value) for value in read_all(variables)]
    else:
        values = [recording.read(variable) for variable in variables]
    copies = [Spread(outside.copies(variable), stacked=True) for variable in own]
    given = _Given(len(split), variables, own)

    def mapped(
        one: Callable[..., Any], rows: Sequence[Spread], whole: Sequence[Any] = ()
    ) -> Any:
        own_arrays = [*split, *copies, *rows]
        return mapped_over(one, count, mesh, own_arrays)(values, [*shared, *whole])

    def made(values: Any, shared: Any, own_arrays: Any, rows: Any) -> RegionMade:
        # Mostly the trace of the discovery serves, so that the function is traced once.
        if region.program is not None:
            inputs = [*shared, *given.arguments(own_arrays)]
            known = given.named(values, own_arrays, rows)
            return RegionMade(*region.program(inputs, known))
        replica = MappedReplica(given.feed(values, own_arrays, rows), team)
        with replica.recording(), printed_before():
            result = fn(shared, given.arguments(own_arrays))
        # The last trace counts: jax may trace a function more than once.
        region.read(result, replica.capture)
        return region.made

    rows = _looked_up(made, capture, given, mapped, outside)

    def one(values: Any, shared: Any, own_arrays: Any) -> tuple[list[Any], list[Any]]:
        arrays, copies, operands, _ = made(
            values, shared, own_arrays, own_arrays[given.before_rows :]
        )
        # With an axis of replicas, along which the map concatenates.
        return [*arrays, *[copy[None] for copy in copies]], operands

    # No other processes, or XLA reaches them itself: one program without stages.
    if team.channel is None or within_mesh.get():
        arrays, operands = mapped(one, rows)
    else:
        # Other processes may run their replicas sequentially, by the same order.
        now = recording is None or recording.live
        arrays, operands = in_stages(one, mapped, rows, len(shared), in_order=now)
    traced = region.traced
    results = len(traced.arrays)
    outputs = [*arrays[:results], *[copies.array for copies in arrays[results:]]]
    return traced.recorded_result(outside, outputs, operands)


class RegionMade(NamedTuple):
    """The outputs of one replica: arrays of its result, copies of variables that it
    changed, operands of each update, and ids of its lookups."""

    arrays: list[Any]
    copies: list[Any]
    operands: list[Any]
    ids: list[Any]


@final
class DiscoveredRegion:
    """A replica function that was traced with placeholders for values. ``program`` is
    the trace as a program; None if the function has to be traced again."""

    def __init__(self, capture: Capture, result: Any) -> None:
        self.program: BodyProgram | None = None
        self.read(result, capture)

    def read(self, result: Any, capture: Capture) -> None:
        """Replaces the recorded outcome by that of a later trace."""
        leaves, treedef = jax.tree.flatten(result)
        changed = [variable for variable, _ in capture.own.values()]
        self.capture = capture
        self.traced = TracedRegion(leaves, treedef, capture, changed)

    @property
    def made(self) -> RegionMade:
        """The outputs of the trace, as tracers: valid only inside of it."""
        capture = self.capture
        return RegionMade(
            self.traced.arrays,
            [value for _, value in capture.own.values()],
            [list(update.operands) for update in capture.updates],
            [lookup.ids for lookup in capture.lookups],
        )


@dataclass(frozen=True, slots=True)
class TracedRegion:
    """The outcome of tracing a region: leaves of its result, recorded effects, and the
    variables whose copies the replicas changed."""

    leaves: Sequence[Any]
    treedef: Any
    capture: Capture
    changed: Sequence[VariableHandle]

    @property
    def arrays(self) -> list[jax.Array]:
        """The arrays of the result."""
        return [leaf for leaf in self.leaves if isinstance(leaf, jax.Array)]

    def recorded_result(
        self, outside: TraceRecorder, arrays: Sequence[Any], operands: Sequence[Any]
    ) -> Any:
        """Records the effects of the replicas in the step; returns the replicas'
        result.

        Args:
            outside: The recorder of the step.
            arrays: Outputs of the program: arrays of the result, then copies of
                ``changed``.
            operands: The operands of each update.
        """
        # A replica has asked for the context of its worker, which only the capture of
        # the region has noticed: the plan of the step must serve no other context.
        if self.capture.asked_context and (notify := asked.get()) is not None:
            notify()
        made = iter(arrays)
        result = self.treedef.unflatten(
            [next(made) if isinstance(x, jax.Array) else x for x in self.leaves]
        )
        for variable, copies in zip(self.changed, made, strict=True):
            outside.put_copies(variable, copies)
        self._pass_on(operands, outside)
        return result

    def _pass_on(self, operands: Sequence[Any], outside: TraceRecorder) -> None:
        for update, combined in zip(self.capture.updates, operands, strict=True):
            if update.call is not None:
                outside.optimize(update.call.with_arrays(combined))
                continue
            target = update.variable if update.table is None else update.table
            op, optimizer = update.op, update.optimizer
            outside.update(VariableUpdate(target, op, tuple(combined), optimizer))


@dataclass(frozen=True, slots=True)
class _Given:
    """The inputs of one replica. Its arrays are, in this order, ``count`` arguments,
    its copies of the variables ``own``, and rows that it looks up. All replicas share
    ``variables``."""

    count: int
    variables: Sequence[VariableHandle]
    own: Sequence[VariableHandle]

    def arguments(self, own_arrays: Sequence[Any]) -> Sequence[Any]:
        return own_arrays[: self.count]

    @property
    def before_rows(self) -> int:
        return self.count + len(self.own)

    def feed(
        self, values: Sequence[Any], own_arrays: Sequence[Any], rows: Sequence[Any]
    ) -> Replay:
        """Returns a `Replay`, which supplies the traced function with the values that
        it reads."""
        return Replay("strategy.run", self._known(values, own_arrays), (), rows)

    def named(
        self, values: Sequence[Any], own_arrays: Sequence[Any], rows: Sequence[Any]
    ) -> dict[Any, Any]:
        """Returns the values that the function reads as the named inputs of a
        `BodyProgram`."""
        known = self._known(values, own_arrays)
        named: dict[Any, Any] = {("value", key): x for key, x in known.items()}
        return named | {("rows", number): x for number, x in enumerate(rows)}

    def _known(
        self, values: Sequence[Any], own_arrays: Sequence[Any]
    ) -> dict[int, Any]:
        met = (*self.variables, *self.own)
        copies = own_arrays[self.count : self.before_rows]
        return {
            variable.spec.key: value
            for variable, value in zip(met, (*values, *copies), strict=True)
        }


def discovered(
    fn: ReplicaFunction,
    shared: Sequence[Any],
    split: Sequence[Spread],
    team: Team,
    mesh: Mesh | None = None,
) -> DiscoveredRegion:
    """Traces the function abstractly, in the map over the replicas in which it will
    run. Finds what it reads and looks up, which copies of variables it updates, and its
    program.

    The trace does not read values of the step itself, which would belong to a trace
    that ends before the step does.
    """
    regions: list[tuple[DiscoveredRegion, list[Placeholder]]] = []

    def traced(seed: jax.Array, shared: Any, own: Any) -> Any:
        feed = Discovery(seed)
        probe = MappedReplica(feed, team)
        with probe.recording():
            result = fn(shared, own)
        region = DiscoveredRegion(probe.capture, result)
        regions[:] = [(region, feed.placeholders)]
        return region.made, [each.value for each in feed.placeholders]

    def one(values: Any, shared: Any, own_arrays: Any) -> tuple[list[Any], list[Any]]:
        args = values[0], shared, own_arrays
        closed, (made, _) = jax.make_jaxpr(traced, return_shape=True)(*args)
        # The last one: jax may have traced more than once.
        region, placeholders = regions[0]
        region.program = body_program(closed, placeholders, jax.tree.structure(made))
        return [], []

    def abstract(seed: jax.Array, shared: Any, arrays: Sequence[Any]) -> None:
        own_arrays = [
            Spread(array, each.stacked)
            for array, each in zip(arrays, split, strict=True)
        ]
        mapped_over(one, team.local, mesh, own_arrays)([seed], shared)

    # Abstract: nothing is computed. The seed is traced, so that what is made of it is
    # no constant.
    jax.eval_shape(abstract, jnp.int8(0), list(shared), [x.array for x in split])
    return regions[0][0]


def _refuse_unnoticed(capture: Capture) -> None:
    """Refuses reads and updates of variables by the replicas if jax traces outside of a
    step.

    Raises:
        StagedAccess: There is such a read or update.
    """
    for variable, _ in capture.own.values():
        refuse_update(variable.spec, "update")
    for update in capture.updates:
        refuse_update(update.variables[0].spec, "update")
    for variable in capture.variables:
        refuse_read(variable.spec)


def _looked_up(
    made: Callable[..., RegionMade],
    capture: Capture,
    given: _Given,
    mapped: Callable[[Callable[..., Any], Sequence[Spread]], Any],
    outside: TraceRecorder,
) -> list[Spread]:
    """Looks up the rows that the replicas need, in the step. Returns the rows of each
    lookup.

    The replicas first compute only the ids that depend on no other rows; when the rows
    of these ids are known, the ids that depend only on them; and so on.
    """
    kinds = [_rows_kind(lookup) for lookup in capture.lookups]
    rows: dict[int, Spread] = {}
    before = given.before_rows
    ready: list[int] = []

    def one(values: Any, shared: Any, own_arrays: Any) -> tuple[list[Any], list[Any]]:
        def ids(values: Any, shared: Any, own_arrays: Any, rows: Any) -> list[Any]:
            return made(values, shared, own_arrays, rows).ids

        # Rows that are not known yet are abstract: ids that depend on them come out as
        # not ready.
        known = dict(zip(sorted(rows), own_arrays[before:], strict=True))
        own_rows = [known.get(n, kind) for n, kind in enumerate(kinds)]
        args = (values, shared, own_arrays[:before], own_rows)
        flow, leaves = Flow(jax.make_jaxpr(ids)(*args)), jax.tree.leaves(args)
        unknown = sum(
            1 << n for n, x in enumerate(leaves) if isinstance(x, jax.ShapeDtypeStruct)
        )
        left = [n for n in range(len(kinds)) if n not in rows]
        ready[:] = [n for n in left if not flow.inputs_of([n]) & unknown]
        part, needed = flow.part(ready)
        # Only the ids that are ready: the rest of the function is dead code here.
        return part(*[leaves[n] for n in needed]), []

    while len(rows) < len(kinds):
        # A level at a time; ids of a further level need the rows of this one.
        computed, _ = mapped(one, [rows[n] for n in sorted(rows)])
        for number, ids in zip(tuple(ready), computed, strict=True):
            lookup = capture.lookups[number]
            with claimed(lookup.where):
                found_rows = outside.lookup(lookup.table, ids.array)
            rows[number] = Spread(found_rows, ids.stacked)
    return [rows[n] for n in range(len(kinds))]


def _rows_kind(lookup: RecordedLookup) -> Any:
    table = lookup.table
    dtype: Any = jax.dtypes.canonicalize_dtype(table.dtype)
    kind: Any = jax.ShapeDtypeStruct  # untyped
    return kind((*lookup.ids.shape, *table.shape[1:]), dtype)

"""A replica function as one program for all replicas of this process.

The function is traced once under a named axis ``replica``, with a traced number of the
replica: collectives inside it are jax's own over that axis. What it reads is found by
an abstract trace first, because a program over a mesh takes its inputs as arguments;
then the same function is mapped over the devices, or, where this process has fewer
devices than there are replicas (a coordinator that only plans, a debugging run), over
an axis of one device, which gives the same values. What a replica makes stays on its
device.

Law of the file: an update made inside a replica is brought together with those of the
other replicas here, at the moment it is made, and reaches the step once. Gradients are
summed over the replicas; everything else follows the variable's aggregation. The rules
of captures hold inside too: a region is a capture of its own.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

import jax
import jax.numpy as jnp

from zstrat.program.stages import within_mesh
from zstrat.program.trace import (
    LOOKS,
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
    is_of_shapes,
    printed_before,
    uncut,
)
from zstrat.strategy._context import ReplicaContext
from zstrat.variables import (
    CreatedInStep,
    TraceRecorder,
    ValueWanted,
    VariableHandle,
    VariableUpdate,
    read_all,
    recorder,
    refuse_read,
    refuse_update,
)

from ._arguments import RunArguments
from ._columns import is_slices
from ._fibers import NeedsSequential
from ._per_replica import DistributedValues, PerReplica, is_distributed
from ._region import in_stages
from ._replica_recorder import ReplicaRecorder
from ._spread import Spread, mapped_over

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from jax.sharding import Mesh

    from zstrat.program.trace import BodyProgram, MadeUp, RecordedLookup, TraceFeed

    from ._arguments import ReplicaCall
    from ._collective import Team

    ReplicaFunction = Callable[[Sequence[Any], Sequence[Any]], Any]
    """``(shared, own) -> pytree``: called with the shared arrays and this replica's
    own."""


@final
class MappedReplica(ReplicaRecorder):
    """The recorder inside one of several replicas that are one program: what it is told
    is noted by a capture of this region."""

    def __init__(self, feed: TraceFeed, team: Team) -> None:
        self.capture = Capture(feed, is_region=True)
        super().__init__(self.capture, team)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        with self.capture.recording():
            before = recorder.set(self)
            try:
                yield
            finally:
                recorder.reset(before)

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
    """Runs ``fn`` once per replica and returns its pytree, each array as `Spread`.

    Leaves that are no jax arrays are the same object in every replica and stay what
    they are. Reads and updates of variables go through the step that is being traced,
    or to the variables' storages when none is. A variable of which each replica has a
    copy of its own is read and updated there (see `zstrat.program.trace._updates`).

    Args:
        shared: Arrays that every replica gets whole.
        split: Arrays of which each replica gets its part.
        team: The replicas, of which this process has at least 2.
        mesh: Whose axis `AXIS` has a device for each replica; without it one device
            computes all replicas.

    Raises:
        ValueError: An update of a variable whose aggregation is NONE, or integers of
            numpy that do not fit the 32 bits that jax computes with.
        NotImplementedError: A scatter update that cannot be aggregated.
        RuntimeError: An update under a jax transformation, a read after an optimizer's
            update, or a draw, inside a replica; or any read or update while jax traces
            outside of a step.
    """
    shared = [uncut(x) for x in shared]
    split = [Spread(uncut(x.array), x.stacked) for x in split]
    count = team.local
    # A program over a mesh takes what it reads as arguments, so that has to be known
    # first.
    region = discovered(fn, shared, split, team, mesh)
    found = region.capture
    recording = recorder.get()
    if recording is None:
        _refuse_unnoticed(found)
    outside = Immediate() if recording is None else recording
    for variable, _ in found.own.values():
        apart_from_now(variable)
    own = [v for v in found.variables if has_copies(v, count)]
    variables = [v for v in found.variables if not has_copies(v, count)]
    if recording is None:
        values = [jnp.asarray(value) for value in read_all(variables)]
    else:
        values = [recording.read(variable) for variable in variables]
    copies = [Spread(outside.copies(variable), stacked=True) for variable in own]
    given = _Given(len(split), variables, own)

    def mapped(
        one: Callable[..., Any], rows: Sequence[Spread], whole: Sequence[Any] = ()
    ) -> Any:
        mine = [*split, *copies, *rows]
        return mapped_over(one, count, mesh, mine)(values, [*shared, *whole])

    def made(values: Any, shared: Any, mine: Any, rows: Any) -> RegionMade:
        if region.program is not None:
            inputs = [*shared, *given.arguments(mine)]
            known = given.named(values, mine, rows)
            return RegionMade(*region.program(inputs, known))
        replica = MappedReplica(given.feed(values, mine, rows), team)
        with replica.recording(), printed_before():
            result = fn(shared, given.arguments(mine))
        # The last trace counts: jax may trace a function more than once.
        region.read(result, replica.capture)
        return region.made

    rows = _looked_up(made, found, given, mapped, outside)

    def one(values: Any, shared: Any, mine: Any) -> tuple[list[Any], list[Any]]:
        arrays, copies, operands, _ = made(
            values, shared, mine, mine[given.before_rows :]
        )
        return [*arrays, *[copy[None] for copy in copies]], operands

    # Nobody else, or XLA reaches the others itself: one program without stages.
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
    """What one replica makes: arrays of its result, its copies of variables that it has
    changed, operands of each update, and ids of its lookups."""

    arrays: list[Any]
    copies: list[Any]
    operands: list[Any]
    ids: list[Any]


@final
class DiscoveredRegion:
    """A replica function that was traced under values that were made up. ``program``
    is what was traced, as a program; None if it has to be traced again."""

    def __init__(self, capture: Capture, result: Any) -> None:
        self.program: BodyProgram | None = None
        self.read(result, capture)

    def read(self, result: Any, capture: Capture) -> None:
        """Another trace takes the place of the one before."""
        leaves, treedef = jax.tree.flatten(result)
        changed = [variable for variable, _ in capture.own.values()]
        self.capture = capture
        self.traced = TracedRegion(leaves, treedef, capture, changed)

    @property
    def made(self) -> RegionMade:
        """In the trace itself: what it has made."""
        capture = self.capture
        return RegionMade(
            self.traced.arrays,
            [value for _, value in capture.own.values()],
            [list(update.operands) for update in capture.updates],
            [lookup.ids for lookup in capture.lookups],
        )


@dataclass(frozen=True, slots=True)
class TracedRegion:
    """What the trace of a region left: leaves of its result, its effects, and the
    variables whose copies it has changed."""

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
        """The result, when the step has been told what was done.

        Args:
            arrays: What the program made: of the result, then copies of ``changed``.
            operands: Those of each update.
        """
        if self.capture.asked_context and (tell := asked.get()) is not None:
            tell()
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
    """What a replica is given of its own, in a row: ``arguments`` arrays, its copies of
    the variables ``own``, and rows that it looks up. All share ``variables``."""

    count: int
    variables: Sequence[VariableHandle]
    own: Sequence[VariableHandle]

    def arguments(self, mine: Sequence[Any]) -> Sequence[Any]:
        return mine[: self.count]

    @property
    def before_rows(self) -> int:
        return self.count + len(self.own)

    def feed(
        self, values: Sequence[Any], mine: Sequence[Any], rows: Sequence[Any]
    ) -> Replay:
        """What the function meets."""
        return Replay("strategy.run", self._known(values, mine), (), rows)

    def named(
        self, values: Sequence[Any], mine: Sequence[Any], rows: Sequence[Any]
    ) -> dict[Any, Any]:
        """The same for a `BodyProgram`."""
        known = self._known(values, mine)
        named: dict[Any, Any] = {("value", key): x for key, x in known.items()}
        return named | {("rows", number): x for number, x in enumerate(rows)}

    def _known(self, values: Sequence[Any], mine: Sequence[Any]) -> dict[int, Any]:
        met = (*self.variables, *self.own)
        copies = mine[self.count : self.before_rows]
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
    """What the function reads and looks up, which copies it updates, and its program,
    traced in the map over the replicas in which it runs.

    The step itself is not asked inside this trace: what it handed out here would belong
    to a trace that ends before the step does.
    """
    found: list[tuple[DiscoveredRegion, list[MadeUp]]] = []

    def traced(seed: jax.Array, shared: Any, own: Any) -> Any:
        feed = Discovery(seed)
        probe = MappedReplica(feed, team)
        with probe.recording():
            result = fn(shared, own)
        region = DiscoveredRegion(probe.capture, result)
        found[:] = [(region, feed.made_up)]
        return region.made, [each.value for each in feed.made_up]

    def one(values: Any, shared: Any, mine: Any) -> tuple[list[Any], list[Any]]:
        args = values[0], shared, mine
        closed, (made, _) = jax.make_jaxpr(traced, return_shape=True)(*args)
        region, made_up = found[0]
        region.program = body_program(closed, made_up, jax.tree.structure(made))
        return [], []

    def abstract(seed: jax.Array, shared: Any, arrays: Sequence[Any]) -> None:
        mine = [
            Spread(array, each.stacked)
            for array, each in zip(arrays, split, strict=True)
        ]
        mapped_over(one, team.local, mesh, mine)([seed], shared)

    jax.eval_shape(abstract, jnp.int8(0), list(shared), [x.array for x in split])
    return found[0][0]


def _refuse_unnoticed(found: Capture) -> None:
    """Refuses what the replicas do to variables where jax traces and no step does."""
    for variable, _ in found.own.values():
        refuse_update(variable.spec, "update")
    for update in found.updates:
        refuse_update(update.variables[0].spec, "update")
    for variable in found.variables:
        refuse_read(variable.spec)


def _looked_up(
    made: Callable[..., RegionMade],
    found: Capture,
    given: _Given,
    mapped: Callable[[Callable[..., Any], Sequence[Spread]], Any],
    outside: TraceRecorder,
) -> list[Spread]:
    """The rows of the replicas' lookups, looked up in the step.

    The replicas compute the ids that need no rows, and nothing else; with these rows
    the ids that need no others; and so on.
    """
    kinds = [_rows_kind(lookup) for lookup in found.lookups]
    rows: dict[int, Spread] = {}
    before = given.before_rows
    ready: list[int] = []

    def one(values: Any, shared: Any, mine: Any) -> tuple[list[Any], list[Any]]:
        def ids(values: Any, shared: Any, mine: Any, rows: Any) -> list[Any]:
            return made(values, shared, mine, rows).ids

        known = dict(zip(sorted(rows), mine[before:], strict=True))
        own_rows = [known.get(n, kind) for n, kind in enumerate(kinds)]
        args = (values, shared, mine[:before], own_rows)
        flow, leaves = Flow(jax.make_jaxpr(ids)(*args)), jax.tree.leaves(args)
        unknown = sum(
            1 << n for n, x in enumerate(leaves) if isinstance(x, jax.ShapeDtypeStruct)
        )
        left = [n for n in range(len(kinds)) if n not in rows]
        ready[:] = [n for n in left if not flow.inputs_of([n]) & unknown]
        part, needed = flow.part(ready)
        return part(*[leaves[n] for n in needed]), []

    while len(rows) < len(kinds):
        computed, _ = mapped(one, [rows[n] for n in sorted(rows)])
        for number, ids in zip(tuple(ready), computed, strict=True):
            lookup = found.lookups[number]
            with claimed(lookup.where):
                found_rows = outside.lookup(lookup.table, ids.array)
            rows[number] = Spread(found_rows, ids.stacked)
    return [rows[n] for n in range(len(kinds))]


def _rows_kind(lookup: RecordedLookup) -> Any:
    table = lookup.table
    dtype: Any = jax.dtypes.canonicalize_dtype(table.dtype)
    kind: Any = jax.ShapeDtypeStruct  # untyped
    return kind((*lookup.ids.shape, *table.shape[1:]), dtype)


_LOOKS: Final[tuple[type[Exception], ...]] = (*LOOKS, ValueWanted, CreatedInStep)


def as_one_program(call: ReplicaCall, mesh: Mesh | None) -> Any:
    """What the replicas return: each array as a `PerReplica`, all else as it is.

    Args:
        mesh: The replicas' devices; None: one device computes all of them.

    Raises:
        NeedsSequential: Python looks at a value in the function, or it creates
            variables, or calls ``merge_call``.
        UnevenParts: Replicas are given arrays of different shapes.
        Exception: Whatever the function raises while it is traced.
    """
    count = call.team.local
    sorted_out = RunArguments(call.tree, count)
    result = replicate(
        _replica(call, sorted_out),
        sorted_out.shared,
        sorted_out.split,
        team=call.team,
        mesh=mesh,
    )
    return jax.tree.map(lambda x: _per_replica(x, count), result, is_leaf=is_slices)


def needs_sequential(call: ReplicaCall) -> bool:
    """Whether replicas that are given what the first one is given are no one program.
    The step, if there is one, hears nothing of it.

    Raises:
        Exception: Whatever the function raises while it is traced.
    """
    count = call.team.local

    def first(node: Any) -> Any:
        if not isinstance(node, DistributedValues):
            return node
        return PerReplica((node.values[0],) * count)

    tree = jax.tree.map(first, call.tree, is_leaf=is_distributed)
    sorted_out = RunArguments(tree, count)
    split = [Spread(uncut(x.array), x.stacked) for x in sorted_out.split]
    shared = [uncut(x) for x in sorted_out.shared]
    try:
        discovered(_replica(call, sorted_out), shared, split, call.team)
    except NeedsSequential:
        return True
    return False


def _replica(
    call: ReplicaCall, sorted_out: RunArguments
) -> Callable[[Sequence[Any], Sequence[Any]], Any]:
    def replica(shared: Sequence[Any], own: Sequence[Any]) -> Any:
        own_args, own_kwargs = sorted_out.of_replica(shared, own)
        with ReplicaContext(call.strategy, call.team.replica_id()):
            return _looked_out(call.fn, own_args, own_kwargs)

    return replica


def alone(call: ReplicaCall) -> Any:
    """What the only replica returns, in a step.

    Raises:
        NeedsSequential: As `as_one_program`.
    """
    with ReplicaContext(call.strategy, 0):
        return _looked_out(call.fn, call.args, call.kwargs)


def _looked_out(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    try:
        return fn(*args, **kwargs)
    except _LOOKS as error:
        raise _needs_sequential(error) from error
    except (TypeError, IndexError) as error:
        if not is_of_shapes(error):
            raise
        raise _needs_sequential(error) from error


def _needs_sequential(error: Exception) -> NeedsSequential:
    first = str(error).partition("\n")[0]
    return NeedsSequential(f"{type(error).__name__}: {first}")


def _per_replica(node: Any, count: int) -> Any:
    """An array or an IndexedSlices as one value per replica, all else as it is."""
    if isinstance(node, Spread):
        return PerReplica.of_whole(node.array, count, stacked=node.stacked)
    if not any(isinstance(leaf, Spread) for leaf in jax.tree.leaves(node)):
        return node
    return PerReplica([_of_replica(i, node, count) for i in range(count)])


def _of_replica(replica: int, node: Any, count: int) -> Any:
    return jax.tree.map(
        lambda leaf: (
            _per_replica(leaf, count).values[replica]
            if isinstance(leaf, Spread)
            else leaf
        ),
        node,
    )

"""`Catalog`: what the steps of a plan read, write and send.

A step without lookups reads the same variables each time, so its needs are found once
for its plan. Which rows a step with lookups reads is known only when its ids are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, final
from weakref import WeakKeyDictionary

import numpy as np

from zstrat.program import COPY, Plan, read_sets, resident_name
from zstrat.ps import Ref, RowsRef, SetRef
from zstrat.variables import RESIDENT
from zstrat.wire import Codec, UpdateOp, parts_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from zstrat.codecs import Wire
    from zstrat.program import PlannedUpdate, Wanted
    from zstrat.variables import VariableSpec


_FEEDS: Final = (UpdateOp.OPTIMIZE, UpdateOp.OPTIMIZE_ROWS, UpdateOp.OPERANDS)


class Reads(NamedTuple):
    """A pull of variables and of rows of variables. Two pulls are compared by
    identity."""

    refs: tuple[Ref, ...]
    rows: tuple[RowsRef, ...] = ()
    rounds: tuple[int, ...] = ()
    """Ids of the optimizers to whose rounds the step contributes."""
    waits: bool = True
    """Whether the pull waits for the end of the rounds to which this worker has
    contributed."""
    sets: tuple[SetRef, ...] = ()
    """Groups of small variables whose values a server stores and sends as one array."""


@final
@dataclass(frozen=True, slots=True)
class Needs:
    """What a step of a plan needs. ``reads`` and ``nbytes`` are those of a step without
    lookups."""

    specs: tuple[VariableSpec, ...]
    """Specs of the variables that are read as a whole."""
    reads: Reads | None
    nbytes: int
    writes: bool
    optimizes: bool
    rounds: tuple[int, ...]
    """Ids of the optimizers that update by rounds."""
    wires: Mapping[int, Wire]
    """By number of an optimizer: the format in which its gradients are sent."""
    bfloat16: frozenset[int]
    """Keys of variables whose values are read as bfloat16."""
    has_residents: bool
    """Whether the step reads or writes resident arrays, which stay on this worker from
    one window of local steps to the next."""
    advances: int
    """Number of further pulls, after the first, before a step can run."""
    blocks: tuple[int, ...]
    """For each level of lookups: bytes of the rows that a step makes from the answer.
    There is a row for each id, with repetitions; the answer has each row once."""


@final
class Catalog:
    """The `Needs` of all plans of one session; each is kept as long as its plan."""

    def __init__(self) -> None:
        self._needs: Final = WeakKeyDictionary[Plan, Needs]()
        self._reads: Final[dict[Hashable, Reads]] = {}
        self._row_bytes: Final[dict[int, int]] = {}

    def of(self, plan: Plan) -> Needs:
        """Returns the needs of the steps of a plan."""
        needs = self._needs.get(plan)
        if needs is None:
            needs = self._needs[plan] = self._computed(plan)
        return needs

    def wanted(self, needs: Needs, wanted: Wanted) -> tuple[Reads | None, int]:
        """Returns the pull for what one step wants now, and the size of its answer in
        bytes. The pull is None if there is nothing to read."""
        reads = wanted.reads
        if needs.has_residents:
            reads = tuple([spec for spec in reads if spec.ps != RESIDENT])
        if not wanted.rows:
            return self._whole(reads, needs.rounds, needs.bfloat16), _nbytes(reads)
        if needs.specs == reads:
            whole, nbytes = needs.reads or Reads(()), needs.nbytes
        else:
            whole, nbytes = Reads(_refs(reads, needs.bfloat16)), _nbytes(reads)
        rows = tuple(
            [RowsRef(spec.ps, spec.key, indices) for spec, indices in wanted.rows]
        )
        for spec, indices in wanted.rows:
            nbytes += len(indices) * self._row_nbytes(spec)
        return Reads(whole.refs, rows, needs.rounds, sets=whole.sets), nbytes

    def _computed(self, plan: Plan) -> Needs:
        writes = bool(plan.updates)
        # Resident arrays are on this worker already.
        shared = tuple([spec for spec in plan.reads if spec.ps != RESIDENT])
        optimizers = {rule.id: rule for _, rule in plan.targets if rule is not None}
        rounds = tuple([n for n, rule in optimizers.items() if rule.rounds is not None])
        wires = {n: each.wire for n, each in optimizers.items() if each.wire}
        bfloat16 = _read_as_bfloat16(plan)
        blocks = [0] * plan.levels
        for lookup in plan.lookups:
            row_nbytes = self._row_nbytes(lookup.table.components[0].spec)
            blocks[lookup.level] += lookup.size * row_nbytes
        return Needs(
            specs=shared,
            reads=self._whole(shared, rounds, bfloat16, _sets(plan, rounds, bfloat16)),
            nbytes=_nbytes(shared),
            writes=writes,
            # Only updates that are nothing but gradients allow a prefetch: they leave
            # no value that the next step must see.
            optimizes=writes and all(x.op in _FEEDS for x in plan.updates),
            rounds=rounds,
            wires=wires,
            bfloat16=bfloat16,
            has_residents=len(shared) < len(plan.reads)
            or any(map(_is_kept, plan.updates)),
            advances=plan.levels - 1,
            blocks=tuple(blocks),
        )

    def _whole(
        self,
        specs: Sequence[VariableSpec],
        rounds: tuple[int, ...],
        bfloat16: frozenset[int],
        sets: tuple[SetRef, ...] = (),
    ) -> Reads | None:
        refs = _refs(specs, bfloat16)
        if not refs:
            return None
        # One `Reads` object for the same variables, as the pipeline compares them by
        # identity.
        name = refs, rounds, tuple([each.places for each in sets])
        return self._reads.setdefault(name, Reads(refs, (), rounds, sets=sets))

    def _row_nbytes(self, spec: VariableSpec) -> int:
        nbytes = self._row_bytes.get(spec.key)
        if nbytes is None:
            nbytes = self._row_bytes[spec.key] = spec.nbytes // max(1, spec.shape[0])
        return nbytes


def _is_kept(update: PlannedUpdate) -> bool:
    """Returns whether the update writes a resident array, which stays on this
    worker."""
    return update.op is UpdateOp.ASSIGN and update.spec.ps == RESIDENT


def _refs(specs: Sequence[VariableSpec], bfloat16: frozenset[int]) -> tuple[Ref, ...]:
    code = int(Codec.BFLOAT16)
    return tuple([Ref(x.ps, x.key, code if x.key in bfloat16 else 0) for x in specs])


def _sets(
    plan: Plan, rounds: tuple[int, ...], bfloat16: frozenset[int]
) -> tuple[SetRef, ...]:
    """Returns the groups of variables of a plan that a server stores and sends as one
    array."""
    # Pulls of rounds, and of values in another format, have no form for sets.
    if rounds or bfloat16:
        return ()
    if any(spec.ps == RESIDENT for spec in plan.reads):
        return ()
    found: list[SetRef] = []
    for places in read_sets(plan):
        specs = [plan.reads[place] for place in places]
        keys = np.array([spec.key for spec in specs], np.int64)
        found.append(
            SetRef(specs[0].ps, tuple(places), keys, parts_of([x.shape for x in specs]))
        )
    return tuple(found)


def _read_as_bfloat16(plan: Plan) -> frozenset[int]:
    """Returns the keys of the variables of a plan that are read as bfloat16: those that
    an optimizer with that format trains, in this segment of a window of local steps or
    in another segment."""
    found: set[int] = set()
    for handles, rule in plan.targets:
        if rule is not None and rule.wire is not None and rule.wire.pull is not None:
            found |= {handle.spec.key for handle in handles}
            names = [resident_name(x.spec.name) for x in plan.updates if _is_kept(x)]
            found |= {name.variable for name in names if name.what == COPY}
    floats = {spec.key for spec in plan.reads if spec.dtype == "float32"}
    return frozenset(found & floats)


def _nbytes(specs: Sequence[VariableSpec]) -> int:
    return sum([spec.nbytes for spec in specs])

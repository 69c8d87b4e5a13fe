"""What the pipeline has to know of a plan, and what a step asks the servers for.

Found once per plan. Reads of whole variables are one object for all steps that read the
same ones, so that these share a pull; what a step looks up is its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, final
from weakref import WeakKeyDictionary

from zstrat.program import Plan
from zstrat.ps import Ref, RowsRef
from zstrat.wire import UpdateOp

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zstrat.program import Wanted
    from zstrat.variables import VariableSpec

_FEEDS: Final = (UpdateOp.OPTIMIZE, UpdateOp.OPTIMIZE_ROWS, UpdateOp.OPERANDS)


class Reads(NamedTuple):
    """One pull: variables, and rows of variables. Compared by identity."""

    refs: tuple[Ref, ...]
    rows: tuple[RowsRef, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class Needs:
    """Of a step of this plan; ``reads`` and ``nbytes`` without what it looks up."""

    specs: tuple[VariableSpec, ...]
    """Of the variables that are read whole."""
    reads: Reads | None
    nbytes: int
    writes: bool
    optimizes: bool
    advances: int
    """How often a step is pulled again before it can run."""
    blocks: tuple[int, ...]
    """Bytes of the rows that a step makes of the answer to each level: one for each id,
    however often it is there, while the answer has it once."""


@final
class Catalog:
    """The needs of the plans of one session, as long as somebody has the plan."""

    def __init__(self) -> None:
        self._needs: Final = WeakKeyDictionary[Plan, Needs]()
        self._reads: Final[dict[tuple[Ref, ...], Reads]] = {}
        self._row_bytes: Final[dict[int, int]] = {}

    def of(self, plan: Plan) -> Needs:
        """What steps of this plan need."""
        needs = self._needs.get(plan)
        if needs is None:
            needs = self._needs[plan] = self._found(plan)
        return needs

    def wanted(self, needs: Needs, wanted: Wanted) -> tuple[Reads | None, int]:
        """The pull that answers what one step wants now, and the bytes of its answer;
        None: nothing has to be pulled."""
        if not wanted.rows:
            return self._whole(wanted.reads), _nbytes(wanted.reads)
        if needs.specs == wanted.reads:
            refs, nbytes = () if needs.reads is None else needs.reads.refs, needs.nbytes
        else:
            refs, nbytes = _refs(wanted.reads), _nbytes(wanted.reads)
        rows = tuple(
            [RowsRef(spec.ps, spec.key, indices) for spec, indices in wanted.rows]
        )
        for spec, indices in wanted.rows:
            nbytes += len(indices) * self._row_nbytes(spec)
        return Reads(refs, rows), nbytes

    def _found(self, plan: Plan) -> Needs:
        writes = bool(plan.updates)
        return Needs(
            plan.reads,
            self._whole(plan.reads),
            _nbytes(plan.reads),
            writes,
            writes and all(update.op in _FEEDS for update in plan.updates),
            plan.levels - 1,
            tuple(
                [
                    sum(
                        lookup.size * self._row_nbytes(lookup.table.components[0].spec)
                        for lookup in plan.lookups
                        if lookup.level == level
                    )
                    for level in range(plan.levels)
                ]
            ),
        )

    def _whole(self, specs: Sequence[VariableSpec]) -> Reads | None:
        refs = _refs(specs)
        return self._reads.setdefault(refs, Reads(refs)) if refs else None

    def _row_nbytes(self, spec: VariableSpec) -> int:
        nbytes = self._row_bytes.get(spec.key)
        if nbytes is None:
            nbytes = self._row_bytes[spec.key] = spec.nbytes // max(1, spec.shape[0])
        return nbytes


def _refs(specs: Sequence[VariableSpec]) -> tuple[Ref, ...]:
    return tuple([Ref(spec.ps, spec.key) for spec in specs])


def _nbytes(specs: Sequence[VariableSpec]) -> int:
    return sum([spec.nbytes for spec in specs])

"""A closure on its way through a worker, from its arrival to how it ended.

Its stations are values that cross between thread and loop: `_pipeline` moves them about
and the executor obeys; nothing here decides.

How it ended has the form in which the coordinator hears of it. Endings are made on the
executor thread, complete with the bytes of a small result, so that the loop only puts
them together. What a program returns has the same layout each time: it is numbered and
described once. Tracebacks are as the user wants them: their own lines, not the
machinery around them.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast, final
from weakref import WeakKeyDictionary

from zstrat import errors
from zstrat.program import FLAGS_ARE_NOT_HERE, Plan, trim
from zstrat.ps import Ref, RowsRef
from zstrat.telemetry import StepTimes
from zstrat.wire import (
    Completion,
    Completions,
    Fetched,
    LayoutMessage,
    Outcome,
    UpdateOp,
    decode,
    encode,
)

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    import numpy as np

    from zstrat.config import Limits
    from zstrat.program import ResultLayout, StepResult, Wanted
    from zstrat.ps import Clocks
    from zstrat.variables import VariableSpec
    from zstrat.wire import PlainTree


class Do(enum.Enum):
    """What the executor is to do now."""

    PREPARE = enum.auto()
    ADVANCE = enum.auto()
    RUN = enum.auto()
    POST = enum.auto()
    WAIT = enum.auto()


@final
@dataclass(slots=True, eq=False)
class Costs:
    """The seconds that the last preparation, advance and run of a function took."""

    prepare: float = math.inf
    advance: float = math.inf
    run: float = math.inf


@final
@dataclass(slots=True, eq=False)
class StepNotes:
    """What a step has spent its time with, and from when its values are."""

    drew: float = 0.0
    """Seconds of its preparation."""
    examples: int = 0
    """That it has drawn."""
    asked: float = 0.0
    """When its values were asked for first,"""
    arrived: float = 0.0
    """when they were there last,"""
    pulled: float = 0.0
    """and the seconds in between in which they were awaited."""
    clocks: Clocks | None = None
    """What the servers said of their time when it first read of them."""


@final
@dataclass(slots=True, eq=False)
class ClosureStep:
    """One closure on its way: the executor says what it is, the pipeline where."""

    number: int
    task: Any
    """What to run; shared by the steps of a batch."""
    costs: Costs
    received: float
    """When it came, as all times of the executor's clock."""
    prepared: float = field(init=False)
    """When its preparation had ended."""
    notes: StepNotes | None = None
    """None if it was prepared with the others of its batch, and reads nothing."""
    work: Any = None
    """What the executor made of the task when it prepared the step."""
    reads: Any = None
    """What is pulled for it, compared by identity; None: nothing."""
    nbytes: int = 0
    levels: int = 0
    """How often it still has to advance, and be pulled again, before it can run."""
    writes: bool = False
    optimizes: bool = False
    """All that it writes are gradients for optimizers."""
    alone: bool = False
    ready: bool = False
    values: Any = None
    error: BaseException | None = None
    """Why its values did not come: it cannot run."""
    ending: Any = None
    """Known before its turn, as it could not be prepared or advanced."""
    dropped: bool = False


@final
@dataclass(slots=True, eq=False)
class SharedPull:
    """One request for values, on behalf of the steps that read the same variables."""

    reads: Any
    steps: list[ClosureStep]
    asked: float
    clocks: Clocks = field(default_factory=dict)
    """What the servers say of their time, in the order in which they answer."""


@final
@dataclass(slots=True)
class Post:
    """What crosses to the loop: pushes first, then pulls, so that these read those."""

    pushes: list[tuple[Any, Any]] = field(default_factory=list)
    """Pairs of push and the ending that its acknowledgement releases."""
    read_at: list[Clocks | None] = field(default_factory=list)
    """The time, on the servers, of what each push was computed from."""
    pulls: list[SharedPull] = field(default_factory=list)
    endings: list[Any] = field(default_factory=list)
    times: StepTimes = field(default_factory=StepTimes)
    """Of the steps that ran. Nothing is posted for their sake."""

    def __bool__(self) -> bool:
        return bool(self.pushes or self.pulls or self.endings)


_NO_LAYOUT: Final = 0
_REMEMBERED: Final = 4096
"""Layouts that are found again; an eager step that returns another Python number each
time makes one for each, and they must not pile up."""


@final
@dataclass(slots=True)
class Ending:
    """``data`` are the bytes of a small result, ``kept`` the arrays of a large one."""

    completion: Completion
    layout: LayoutMessage | None = None
    data: bytes = b""
    kept: Sequence[np.ndarray] | None = None


def failed(step: int, error: BaseException) -> Ending:
    """The closure raised, or could not run."""
    return Ending(Completion(step, int(Outcome.FAILED), _NO_LAYOUT, 0, plain(error)))


def cancelled(step: int, error: errors.ZstratError | None = None) -> Ending:
    """The closure did not begin.

    Without an error it was cancelled as asked. With one, this worker does not take it,
    and the error says why; it is retryable: another worker may run the closure.
    """
    assert error is None or error.retryable
    told = None if error is None else plain(error)
    return Ending(Completion(step, int(Outcome.CANCELLED), _NO_LAYOUT, 0, told))


def plain(error: BaseException) -> PlainTree:
    """The error for the wire, with the lines of the user's own traceback."""
    if _is_of_flags(error):
        error.args = (f"{error}: {FLAGS_ARE_NOT_HERE}", *error.args[1:])
    return cast("PlainTree", errors.to_wire(trim(error)))


def _is_of_flags(error: BaseException) -> bool:
    """Whether absl has raised it, because it has no such flag here."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or FLAGS_ARE_NOT_HERE in str(error):
        return False
    package = trace.tb_frame.f_globals.get("__name__", "")
    return str(package).startswith("absl.flags")


_BESIDE: Final = 1024
"""Bytes of a header that are left for what is told with a layout."""


def check_layout(layout: LayoutMessage, limits: Limits, what: str) -> None:
    """Whether the coordinator takes this description of ``what``. To be asked before a
    step has an effect: one whose end cannot be told would have one and fail.

    Raises:
        ValueError: It does not; says why, and what to return instead.
    """
    message = Completions(0, [], [layout], b"")
    try:
        decode(encode(message, limit=limits.header - _BESIDE)[0], (), limits)
    except (TypeError, ValueError, errors.ProtocolError) as error:
        raise ValueError(
            f"{what} that cannot be described to the program: return fewer and larger "
            "arrays, numbers and texts in arrays, too, and nest them less deeply "
            f"({error})"
        ) from None


def _check_fetched(leaves: Sequence[np.ndarray], limits: Limits) -> None:
    """Whether these arrays, which stay here until they are asked for, can be sent."""
    try:
        encode(Fetched(tuple(leaves)), limit=limits.header - _BESIDE)
    except ValueError:  # its advice is about another message
        raise ValueError(
            f"the step returns a pytree of {len(leaves)} arrays, of more than "
            f"{limits.inline} bytes together: one message does not carry as many. "
            "Return fewer and larger arrays: jnp.stack what has one shape"
        ) from None


@final
@dataclass(frozen=True, slots=True)
class _KnownLayout:
    source: ResultLayout  # held, so that its identity is not given to another
    layout: LayoutMessage
    size: int


@final
class ResultLayouts:
    """Numbers the layouts of one session.

    A program has one layout object for all its results, found by identity; eager steps
    make a new one each time, found by value.

    Args:
        limits: Results of more bytes than ``inline`` stay on the worker.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits: Final = limits
        self._numbered = 0
        self._known: dict[int, _KnownLayout] = {}
        self._by_value: dict[Hashable, _KnownLayout] = {}

    def __len__(self) -> int:
        """How many layouts there were."""
        return self._numbered

    def ok(self, step: int, result: StepResult) -> Ending:
        """The closure ran to its end.

        Raises:
            ValueError: The coordinator would not take the description of the result.
        """
        leaves = result.leaves
        known = self._known.get(id(result.layout)) or self._learn(result.layout, leaves)
        layout, size = known.layout, known.size
        if size > self._limits.inline:
            completion = Completion(step, int(Outcome.OK), layout.layout, -1, None)
            return Ending(completion, layout, b"", leaves)
        if len(leaves) == 1:
            data = leaves[0].tobytes()
        else:
            data = b"".join([leaf.tobytes() for leaf in leaves])
        completion = Completion(step, int(Outcome.OK), layout.layout, size, None)
        return Ending(completion, layout, data)

    def _learn(
        self, source: ResultLayout, leaves: Sequence[np.ndarray]
    ) -> _KnownLayout:
        value = (source.dtypes, source.shapes, repr(source.structure))
        known = self._by_value.get(value)
        if known is None:
            shapes = [list(shape) for shape in source.shapes]
            layout = LayoutMessage(
                self._numbered + 1, list(source.dtypes), shapes, source.structure
            )
            size = sum(leaf.nbytes for leaf in leaves)
            check_layout(layout, self._limits, "the step returns a pytree")
            if size > self._limits.inline:
                _check_fetched(leaves, self._limits)
            self._numbered += 1
            known = _KnownLayout(source, layout, size)
            if len(self._by_value) >= _REMEMBERED:
                self._known.clear()
                self._by_value.clear()
            self._by_value[value] = self._known[id(source)] = known
        return known


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

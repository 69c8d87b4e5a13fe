"""The values that describe a closure on a worker, from its arrival to its end.

They cross between the executor thread and the loop; `_pipeline` decides about them.

An `Ending` has the form in which it is reported to the coordinator. It is created on
the executor thread, with the bytes of a small result, so that the loop only joins
several into one message. All results of a program have the same layout, which is
numbered and described once. Tracebacks show the user's lines only.

`Catalog` knows what the steps of each plan read and write.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast, final
from weakref import WeakKeyDictionary

import numpy as np

from zstrat import errors
from zstrat.program import (
    COPY,
    FLAGS_ARE_NOT_HERE,
    Plan,
    read_sets,
    resident_name,
    trim,
)
from zstrat.ps import PsUpdate, Ref, RowsRef, SetRef
from zstrat.telemetry import StepTimes
from zstrat.variables import RESIDENT
from zstrat.wire import (
    Codec,
    Completion,
    Completions,
    Fetched,
    LayoutMessage,
    Outcome,
    StepContribution,
    UpdateOp,
    decode,
    encode,
    parts_of,
)

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from zstrat.codecs import Wire
    from zstrat.config import Limits
    from zstrat.program import PlannedUpdate, ResultLayout, StepResult, Wanted
    from zstrat.ps import Clocks
    from zstrat.variables import VariableSpec
    from zstrat.wire import PlainTree

    from ._server_links import Lent


class Do(enum.Enum):
    """The next work of the executor."""

    PREPARE = enum.auto()
    ADVANCE = enum.auto()
    BEGIN = enum.auto()
    RUN = enum.auto()
    POST = enum.auto()
    WAIT = enum.auto()


@final
@dataclass(slots=True, eq=False)
class Costs:
    """Seconds of the last preparation, advance and run of a function."""

    prepare: float = math.inf
    advance: float = math.inf
    run: float = math.inf


@final
@dataclass(slots=True, eq=False)
class StepNotes:
    """The times that a step spent in its phases, and the age of its values."""

    drew: float = 0.0
    """Seconds of its preparation."""
    examples: int = 0
    """Number of examples drawn."""
    asked: float = 0.0
    """When its values were first requested,"""
    arrived: float = 0.0
    """when the last ones arrived,"""
    pulled: float = 0.0
    """and the seconds in between spent waiting for them."""
    clocks: Clocks | None = None
    """Clocks of the servers at its first pull."""
    rounds: dict[int, int] | None = None
    """The rounds that it has read, by optimizer."""


@final
@dataclass(slots=True, eq=False)
class ClosureStep:
    """One closure: the executor sets what it does, the pipeline its state."""

    number: int
    task: Any
    """The work; shared by the steps of a batch."""
    costs: Costs
    received: float
    """When it arrived. All times are of the executor's clock."""
    prepared: float = field(init=False)
    """When its preparation ended."""
    notes: StepNotes | None = None
    """None if it was prepared with the others of its batch, and reads nothing."""
    work: Any = None
    """The prepared step, made of the task."""
    place: Any = None
    """Its place among the windows of an optimizer that keeps copies."""
    reads: Any = None
    """The pull that it needs, compared by identity; None: nothing."""
    nbytes: int = 0
    levels: int = 0
    """Number of advances, each with another pull, before it can run."""
    writes: bool = False
    optimizes: bool = False
    """It writes only gradients for optimizers."""
    alone: bool = False
    begins: bool = False
    """A part of it is to be computed while it waits for its values."""
    begun: float = 0.0
    """Seconds of that part."""
    ready: bool = False
    values: Any = None
    error: BaseException | None = None
    """Why its values could not be pulled, so that it cannot run."""
    ending: Any = None
    """Its end, if it could not be prepared or advanced."""
    dropped: bool = False


@final
@dataclass(slots=True, eq=False)
class SharedPull:
    """One pull for all steps that read the same variables."""

    reads: Any
    steps: list[ClosureStep]
    asked: float
    clocks: Clocks = field(default_factory=dict)
    """Clocks of the servers, in the order of their answers."""
    rounds: dict[int, int] = field(default_factory=dict)
    """The rounds that were read, by optimizer."""


@final
@dataclass(slots=True)
class Post:
    """The messages that the executor thread passes to the loop. Pushes come first, so
    that pulls read them."""

    pushes: list[tuple[Any, Any]] = field(default_factory=list)
    """Pairs of a push and the ending that is reported after its acknowledgement."""
    read_at: list[Clocks | None] = field(default_factory=list)
    """Clocks of the servers at the pull from which each push was computed."""
    pulls: list[SharedPull] = field(default_factory=list)
    endings: list[Any] = field(default_factory=list)
    times: StepTimes = field(default_factory=StepTimes)
    """Times of the steps that ran. They alone do not cause a post."""

    def __bool__(self) -> bool:
        return bool(self.pushes or self.pulls or self.endings)


# Numbers begin at 1, so 0 can say that there is no result.
_NO_LAYOUT: Final = 0
_REMEMBERED: Final = 4096
"""Most layouts that are kept. An eager step that returns another Python number each
time creates one for each, so they must be bounded."""


@final
@dataclass(slots=True)
class Ending:
    """The end of a closure. ``data`` are the bytes of a small result, ``kept`` the
    arrays of a large one."""

    completion: Completion
    layout: LayoutMessage | None = None
    data: bytes = b""
    kept: Sequence[np.ndarray] | None = None
    contributions: Sequence[StepContribution] = ()
    lent: Sequence[Lent] = ()
    """Residuals of error feedback that its push has taken."""
    leases: bytes = b""
    """What its push notes as done of leased datasets; see `Push`."""


class RoundPush(NamedTuple):
    """The push of a step that contributes gradients to rounds, beside updates that the
    servers apply at once."""

    updates: list[PsUpdate]
    gradients: list[PsUpdate]
    contributions: list[StepContribution]


def failed(step: int, error: BaseException, *, pushed: bool = False) -> Ending:
    """Returns the ending of a closure that raised, or could not run.

    Args:
        pushed: Its updates may have been sent.
    """
    outcome = Outcome.DOUBTFUL if pushed else Outcome.FAILED
    return Ending(Completion(step, int(outcome), _NO_LAYOUT, 0, plain(error)))


def cancelled(step: int, error: errors.ZstratError | None = None) -> Ending:
    """Returns the ending of a closure that did not begin.

    Without an error it was cancelled on request. With one, this worker refuses it; the
    error has the reason and is retryable, so another worker may run the closure.
    """
    assert error is None or error.retryable
    reason = None if error is None else plain(error)
    return Ending(Completion(step, int(Outcome.CANCELLED), _NO_LAYOUT, 0, reason))


def plain(error: BaseException) -> PlainTree:
    """Converts an error for the wire, with the user's lines of its traceback."""
    # absl names the flag, but not that flags of the program do not travel with its
    # steps.
    if _is_of_flags(error):
        error.args = (f"{error}: {FLAGS_ARE_NOT_HERE}", *error.args[1:])
    return cast("PlainTree", errors.to_wire(trim(error)))


def _is_of_flags(error: BaseException) -> bool:
    """Returns whether absl raised the error because a flag is not defined here."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or FLAGS_ARE_NOT_HERE in str(error):
        return False
    package = trace.tb_frame.f_globals.get("__name__", "")
    return str(package).startswith("absl.flags")


_BESIDE: Final = 1024
"""Bytes of a header that are reserved for what is sent with a layout."""


def check_layout(layout: LayoutMessage, limits: Limits, what: str) -> None:
    """Checks that the coordinator accepts this description of ``what``. Call it
    before a step has an effect, as a step that fails must not have one.

    Raises:
        ValueError: The coordinator would refuse it; says what to return.
    """
    message = Completions(0, [], [layout], b"")
    try:
        # Encoded and decoded as the coordinator will do it: nothing else knows for
        # certain what it accepts.
        decode(encode(message, limit=limits.header - _BESIDE)[0], (), limits)
    except (TypeError, ValueError, errors.ProtocolError) as error:
        raise ValueError(
            f"{what} that cannot be described: return fewer and larger arrays, "
            "put numbers and texts into arrays, too, and nest them less deeply "
            f"({error})"
        ) from None


def _check_fetched(leaves: Sequence[np.ndarray], limits: Limits) -> None:
    """Checks that these arrays, which stay here until fetched, fit one message."""
    try:
        encode(Fetched(tuple(leaves)), limit=limits.header - _BESIDE)
    except ValueError:  # its remedy is for another message
        raise ValueError(
            f"the step returns a pytree of {len(leaves)} arrays with more than "
            f"{limits.inline} bytes in total: too many for one message. Return fewer "
            "and larger arrays: jnp.stack arrays of one shape"
        ) from None


@final
@dataclass(frozen=True, slots=True)
class _KnownLayout:
    source: ResultLayout  # kept, so that its id is not reused
    layout: LayoutMessage
    size: int


@final
class ResultLayouts:
    """Numbers the layouts of one session.

    A program has one layout object for all its results, found by identity; eager steps
    create a new one each time, found by value.

    Args:
        limits: Results of more bytes than ``inline`` stay on the worker.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits: Final = limits
        self._numbered = 0
        self._known: dict[int, _KnownLayout] = {}
        self._by_value: dict[Hashable, _KnownLayout] = {}

    def __len__(self) -> int:
        """Returns the number of layouts so far."""
        return self._numbered

    def ok(self, step: int, result: StepResult) -> Ending:
        """Returns the ending of a closure that succeeded.

        Raises:
            ValueError: The result cannot be described in a message.
        """
        leaves = result.leaves
        # By identity first: a program has one layout for all results, so this costs
        # each step a look into a dict.
        known = self._known.get(id(result.layout)) or self._learn(result.layout, leaves)
        layout, size = known.layout, known.size
        if size > self._limits.inline:
            completion = Completion(step, int(Outcome.OK), layout.layout, -1, None)
            return Ending(completion, layout, b"", leaves)
        # The usual result is one scalar; a join would copy it once more.
        if len(leaves) == 1:
            data = leaves[0].tobytes()
        else:
            data = b"".join([leaf.tobytes() for leaf in leaves])
        completion = Completion(step, int(Outcome.OK), layout.layout, size, None)
        return Ending(completion, layout, data)

    def _learn(
        self, source: ResultLayout, leaves: Sequence[np.ndarray]
    ) -> _KnownLayout:
        # As text, as the lists in it are not hashable.
        value = (source.dtypes, source.shapes, repr(source.structure))
        known = self._by_value.get(value)
        if known is None:
            shapes = [list(shape) for shape in source.shapes]
            layout = LayoutMessage(
                self._numbered + 1, list(source.dtypes), shapes, source.structure
            )
            size = sum(leaf.nbytes for leaf in leaves)
            # Before the layout gets a number: a step that fails here leaves nothing
            # behind.
            check_layout(layout, self._limits, "the step returns a pytree")
            if size > self._limits.inline:
                _check_fetched(leaves, self._limits)
            self._numbered += 1
            known = _KnownLayout(source, layout, size)
            # All at once: which of them is still used is not known, and describing them
            # again only costs bytes.
            if len(self._by_value) >= _REMEMBERED:
                self._known.clear()
                self._by_value.clear()
            self._by_value[value] = self._known[id(source)] = known
        return known


_FEEDS: Final = (UpdateOp.OPTIMIZE, UpdateOp.OPTIMIZE_ROWS, UpdateOp.OPERANDS)


class Reads(NamedTuple):
    """A pull of variables and of rows of variables. Compared by identity."""

    refs: tuple[Ref, ...]
    rows: tuple[RowsRef, ...] = ()
    rounds: tuple[int, ...] = ()
    """Optimizers whose rounds the step contributes to."""
    waits: bool = True
    """Whether it waits for the end of the rounds to which this worker has
    contributed."""
    sets: tuple[SetRef, ...] = ()
    """Which of the variables are read side by side."""


@final
@dataclass(frozen=True, slots=True)
class Needs:
    """The resources that a step of a plan needs; ``reads`` and ``nbytes`` without
    lookups."""

    specs: tuple[VariableSpec, ...]
    """Specs of the variables that are read as a whole."""
    reads: Reads | None
    nbytes: int
    writes: bool
    optimizes: bool
    rounds: tuple[int, ...]
    """Optimizers with rounds."""
    wires: Mapping[int, Wire]
    """The formats of gradients, by number of the optimizer."""
    narrow: frozenset[int]
    """Keys of variables whose values are read as bfloat16."""
    has_residents: bool
    """Whether the step reads or leaves resident arrays."""
    advances: int
    """Number of further pulls before a step can run."""
    blocks: tuple[int, ...]
    """Bytes of the rows that a step makes of each level's answer: a row for each id,
    with repetitions, while the answer has each row once."""


@final
class Catalog:
    """The needs of the plans of one session; each is kept as long as its plan."""

    def __init__(self) -> None:
        self._needs: Final = WeakKeyDictionary[Plan, Needs]()
        self._reads: Final[dict[Hashable, Reads]] = {}
        self._row_bytes: Final[dict[int, int]] = {}

    def of(self, plan: Plan) -> Needs:
        """Returns the needs of steps of this plan."""
        needs = self._needs.get(plan)
        if needs is None:
            needs = self._needs[plan] = self._computed(plan)
        return needs

    def wanted(self, needs: Needs, wanted: Wanted) -> tuple[Reads | None, int]:
        """Returns the pull for what one step wants now, and the bytes of its answer;
        None: there is nothing to pull."""
        reads = wanted.reads
        if needs.has_residents:
            reads = tuple([spec for spec in reads if spec.ps != RESIDENT])
        if not wanted.rows:
            return self._whole(reads, needs.rounds, needs.narrow), _nbytes(reads)
        if needs.specs == reads:
            whole, nbytes = needs.reads or Reads(()), needs.nbytes
        else:
            whole, nbytes = Reads(_refs(reads, needs.narrow)), _nbytes(reads)
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
        narrow = _narrow(plan)
        return Needs(
            shared,
            self._whole(shared, rounds, narrow, _sets(plan, rounds, narrow)),
            _nbytes(shared),
            writes,
            # Only updates that are nothing but gradients allow a prefetch: they leave
            # no value that the next step must see.
            writes and all(update.op in _FEEDS for update in plan.updates),
            rounds,
            wires,
            narrow,
            len(shared) < len(plan.reads) or any(map(_is_kept, plan.updates)),
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

    def _whole(
        self,
        specs: Sequence[VariableSpec],
        rounds: tuple[int, ...],
        narrow: frozenset[int],
        sets: tuple[SetRef, ...] = (),
    ) -> Reads | None:
        refs = _refs(specs, narrow)
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
    """Returns whether the update leaves a resident array."""
    return update.op is UpdateOp.ASSIGN and update.spec.ps == RESIDENT


def _refs(specs: Sequence[VariableSpec], narrow: frozenset[int]) -> tuple[Ref, ...]:
    code = int(Codec.BFLOAT16)
    return tuple([Ref(x.ps, x.key, code if x.key in narrow else 0) for x in specs])


def _sets(
    plan: Plan, rounds: tuple[int, ...], narrow: frozenset[int]
) -> tuple[SetRef, ...]:
    """Returns which variables of a plan are read side by side."""
    # Pulls of rounds, and of values in another format, have no form for sets.
    if rounds or narrow:
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


def _narrow(plan: Plan) -> frozenset[int]:
    """Returns the keys of the variables of a plan that are read as bfloat16: what an
    optimizer with that format trains, in this segment of a window or another."""
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

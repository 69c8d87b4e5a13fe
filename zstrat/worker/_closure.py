"""The values that describe a closure on a worker, from its arrival to its end.

The values cross between the executor thread and the loop; `_pipeline` decides what
happens to them.

An `Ending` has the form in which a closure's end is reported to the coordinator. It is
created on the executor thread, with the bytes of a small result, so that the loop only
joins several endings into one message. All results of a program have the same layout,
which is numbered and described once. Tracebacks show the user's lines only.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast, final

from zstrat import errors
from zstrat.program import FLAGS_ARE_NOT_HERE, trim
from zstrat.telemetry import StepTimes
from zstrat.wire import (
    Completion,
    Completions,
    Fetched,
    LayoutMessage,
    Outcome,
    StepContribution,
    decode,
    encode,
)

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    import numpy as np

    from zstrat.config import Limits
    from zstrat.program import ResultLayout, StepResult
    from zstrat.ps import Clocks, PsUpdate
    from zstrat.wire import PlainTree


class Do(enum.Enum):
    """Kinds of work that the executor thread does next."""

    PREPARE = enum.auto()
    ADVANCE = enum.auto()
    BEGIN = enum.auto()
    RUN = enum.auto()
    POST = enum.auto()
    WAIT = enum.auto()


@final
@dataclass(slots=True, eq=False)
class Costs:
    """Seconds that the last preparation, advance and run of a function took."""

    prepare: float = math.inf
    advance: float = math.inf
    run: float = math.inf


@final
@dataclass(slots=True, eq=False)
class StepNotes:
    """Records of one step: the times that it spent in its phases, and the age of the
    variable values that it read."""

    drew: float = 0.0
    """Seconds that the step's preparation took."""
    examples: int = 0
    """Number of examples that the step has drawn."""
    asked: float = 0.0
    """When the step's values were first requested."""
    arrived: float = 0.0
    """When the last of the step's values arrived."""
    pulled: float = 0.0
    """Seconds that the step waited for values, between `asked` and `arrived`."""
    clocks: Clocks | None = None
    """Clocks of the servers at the step's first pull."""
    rounds: dict[int, int] | None = None
    """By optimizer: the round whose values the step has read."""


@final
@dataclass(slots=True, eq=False)
class ClosureStep:
    """One closure on its way through the worker. The executor sets what the closure
    does, the pipeline sets its state."""

    number: int
    task: Any
    """What the closure has to do, as the step runner describes it; shared by the steps
    of a batch."""
    costs: Costs
    received: float
    """When the closure arrived. All times are of the executor's clock."""
    prepared: float = field(init=False)
    """When the closure's preparation ended."""
    notes: StepNotes | None = None
    """Times of the step; None if it was prepared together with the others of its batch,
    and reads nothing."""
    work: Any = None
    """The prepared step, made from ``task``."""
    needs: Any = None
    """What the plan of the step needs (`Needs`)."""
    place: Any = None
    """The step's `WindowPlace`, if it is a window of local steps whose optimizer keeps
    copies on this worker."""
    reads: Any = None
    """The pull that the step needs, compared by identity; None: it reads nothing."""
    nbytes: int = 0
    levels: int = 0
    """Number of advances, each followed by another pull, before the step can run."""
    writes: bool = False
    optimizes: bool = False
    """Whether the step writes nothing but gradients for optimizers."""
    alone: bool = False
    begins: bool = False
    """Whether a part of the step is to be computed while it waits for its values."""
    begun: float = 0.0
    """Seconds that the part took which was computed without values."""
    ready: bool = False
    values: Any = None
    error: BaseException | None = None
    """Why the step's values could not be pulled; the step then cannot run."""
    ending: Any = None
    """The ending of a step that could not be prepared or advanced."""
    dropped: bool = False


@final
@dataclass(slots=True, eq=False)
class SharedPull:
    """One pull whose answer all steps use that read the same variables."""

    reads: Any
    steps: list[ClosureStep]
    asked: float
    clocks: Clocks = field(default_factory=dict)
    """Clocks of the servers in their answers, in the order in which the answers
    arrived."""
    rounds: dict[int, int] = field(default_factory=dict)
    """By optimizer: the round whose values the pull has read."""


@final
@dataclass(slots=True)
class Post:
    """What the executor thread asks the loop to send, as one batch. Pushes are sent
    first, so that the pulls read what the pushes wrote."""

    pushes: list[tuple[Any, Any]] = field(default_factory=list)
    """Pairs of a push and the ending to report after the acknowledgement of the
    push."""
    read_at: list[Clocks | None] = field(default_factory=list)
    """For each push: clocks of the servers at the pull from whose values the push was
    computed."""
    pulls: list[SharedPull] = field(default_factory=list)
    endings: list[Any] = field(default_factory=list)
    times: StepTimes = field(default_factory=StepTimes)
    """Times of the steps that ran. Times alone do not cause a post."""

    def __bool__(self) -> bool:
        return bool(self.pushes or self.pulls or self.endings)


class Lent(NamedTuple):
    """The residual of a variable (what the format of gradients left out earlier) while
    a push that includes it is under way."""

    key: int
    before: np.ndarray | None
    after: np.ndarray
    """What the format leaves out of this push."""


# Numbers begin at 1, so 0 can say that there is no result.
_NO_LAYOUT: Final = 0
_REMEMBERED: Final = 4096
"""Most result layouts to keep. An eager step that returns another Python number each
time creates one layout for each, so the number must be bounded."""


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
    """Residuals of gradients that the closure's push has taken."""
    leases: bytes = b""
    """Ranges of leased datasets that the closure's push marks as done; see `Push`."""


class RoundPush(NamedTuple):
    """The push of a step that contributes gradients to rounds. ``updates`` are the
    step's other updates, which the servers apply at once."""

    updates: list[PsUpdate]
    gradients: list[PsUpdate]
    contributions: list[StepContribution]


def failed(step: int, error: BaseException, *, pushed: bool = False) -> Ending:
    """Returns the ending of a closure that raised an error, or could not run.

    Args:
        pushed: The closure's updates may have been sent.
    """
    outcome = Outcome.DOUBTFUL if pushed else Outcome.FAILED
    return Ending(Completion(step, int(outcome), _NO_LAYOUT, 0, plain(error)))


def cancelled(step: int, error: errors.ZstratError | None = None) -> Ending:
    """Returns the ending of a closure that did not begin.

    Without an error the closure was cancelled on request. With an error, this worker
    refuses the closure; the error has the reason and is retryable, so another worker
    may run the closure.
    """
    assert error is None or error.retryable
    reason = None if error is None else plain(error)
    return Ending(Completion(step, int(Outcome.CANCELLED), _NO_LAYOUT, 0, reason))


def plain(error: BaseException) -> PlainTree:
    """Converts an error to its wire form, with only the user's lines of its
    traceback."""
    # absl names the flag, but not that flags of the program do not travel with its
    # steps.
    if _is_of_flags(error):
        error.args = (f"{error}: {FLAGS_ARE_NOT_HERE}", *error.args[1:])
    return cast("PlainTree", errors.to_wire(trim(error)))


def _is_of_flags(error: BaseException) -> bool:
    """Returns whether absl raised the error because a command-line flag is not defined
    in this process."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or FLAGS_ARE_NOT_HERE in str(error):
        return False
    package = trace.tb_frame.f_globals.get("__name__", "")
    return str(package).startswith("absl.flags")


_BESIDE: Final = 1024
"""Bytes of a message header that are reserved for what is sent with a layout."""


def check_layout(layout: LayoutMessage, limits: Limits, what: str) -> None:
    """Checks that the coordinator accepts this description of ``what``. Call this
    before a step has an effect, because a step that fails must not have one.

    Raises:
        ValueError: The coordinator would refuse the layout; says what to return.
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
    """Checks that the arrays of a large result, which stay here until fetched, fit one
    message."""
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
    """Numbers the layouts of the results of one session.

    A program has one layout object for all its results, found by identity; eager steps
    create a new layout each time, found by value.

    Args:
        limits: Results of more bytes than ``inline`` stay on the worker.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits: Final = limits
        self._numbered = 0
        self._known: dict[int, _KnownLayout] = {}
        self._by_value: dict[Hashable, _KnownLayout] = {}

    def __len__(self) -> int:
        """Returns the number of layouts that have a number."""
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

"""The messages of zstrat: what tasks may say to each other, as plain values.

Peers of different roles meet here and nowhere else: the contract is data. A message is
a frozen dataclass of ints, strings, bytes and arrays; `zstrat.wire._codec` derives the
layout on the wire and the validation from the annotations below, so a field added here
is checked there. A field ``arrays`` travels as raw buffer frames behind the header.

Numbers of kinds are part of the protocol: never reuse one. `PROTOCOL` grows with every
change that an older peer would misunderstand.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import ClassVar, Final, NamedTuple

import numpy as np

PROTOCOL: Final = 3
"""Version of the protocol; HELLO refuses any other."""

Arrays = tuple[np.ndarray, ...]
PlainTree = (
    None | bool | int | float | str | bytes | list["PlainTree"] | dict[str, "PlainTree"]
)
"""Free-form plain data: statistics, layouts of results, details of an error."""


class Job(enum.StrEnum):
    """What a task is; also the role that its key carries."""

    CHIEF = "chief"
    WORKER = "worker"
    PS = "ps"
    EVALUATOR = "evaluator"
    OBSERVER = "observer"


class UpdateOp(enum.IntEnum):
    """What a push does to a variable; the operands are the update's arrays in order."""

    ASSIGN = 0  # value
    ADD = 1  # delta
    SUB = 2  # delta
    SCATTER_ADD = 3  # indices [n], rows [n, ...]: duplicates accumulate
    SCATTER_SUB = 4
    SCATTER_MUL = 5
    SCATTER_DIV = 6
    SCATTER_MIN = 7
    SCATTER_MAX = 8
    SCATTER_UPDATE = 9  # of duplicate indices the last one wins
    OPTIMIZE = 10  # gradient, applied by the update's optimizer
    OPTIMIZE_ROWS = 11  # indices [n], gradient rows [n, ...], applied by the optimizer


class Outcome(enum.IntEnum):
    """How a closure ended on a worker."""

    OK = 0
    FAILED = 1
    CANCELLED = 2


# ---- link ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a connection, and its answer: who I am and what I run.

    ``incarnation`` is drawn at random when the process starts; a peer that returns with
    another one has lost everything that it held. ``link`` numbers the links of one
    process, so that a connection which comes back replaces its own predecessor and not
    that of another link.
    """

    kind: ClassVar = 1
    protocol: int
    job: str
    index: int
    incarnation: int
    host: str
    pid: int
    versions: dict[str, str] = field(default_factory=dict)
    link: int = 0


@dataclass(frozen=True, slots=True)
class Beat:
    """I am alive, said by the event loop itself. Answered with a Beat if ``wanted``."""

    kind: ClassVar = 2
    wanted: bool


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next part of the body of a message announced before (one raw frame)."""

    kind: ClassVar = 3
    stream: int
    offset: int


@dataclass(frozen=True, slots=True)
class Credit:
    """So many more chunks of the stream may be sent."""

    kind: ClassVar = 4
    stream: int
    chunks: int


@dataclass(frozen=True, slots=True)
class Goodbye:
    """I leave on purpose."""

    kind: ClassVar = 5
    reason: str


@dataclass(frozen=True, slots=True)
class Failure:
    """The outcome of a request that failed: `zstrat.errors.to_wire` of the error."""

    kind: ClassVar = 6
    error: PlainTree


@dataclass(frozen=True, slots=True)
class Done:
    """The outcome of a request that has nothing to say but that it succeeded."""

    kind: ClassVar = 7


@dataclass(frozen=True, slots=True)
class Inspect:
    """Asks a task for its statistics; any role may."""

    kind: ClassVar = 8


@dataclass(frozen=True, slots=True)
class Statistics:
    kind: ClassVar = 9
    values: dict[str, PlainTree]


@dataclass(frozen=True, slots=True)
class Offer:
    """This process has memory for bodies that the peer may map, if it is on this host:
    the anonymous file ``descriptor`` of the process in its HELLO. It begins with
    ``word``, which proves to the peer that it has mapped the right one."""

    kind: ClassVar = 10
    descriptor: int
    capacity: int
    word: bytes


@dataclass(frozen=True, slots=True)
class Mapped:
    """Whether the peer has mapped the memory that it was offered."""

    kind: ClassVar = 11
    yes: bool


@dataclass(frozen=True, slots=True)
class Placed:
    """The body of the message announced before lies in the sender's memory."""

    kind: ClassVar = 12
    stream: int
    offset: int


@dataclass(frozen=True, slots=True)
class Released:
    """The bodies at these offsets of the peer's memory are not read any more."""

    kind: ClassVar = 13
    offsets: list[int]


@dataclass(frozen=True, slots=True)
class Again:
    """In place of the outcome of a request whose body came in chunks: nothing was done,
    the body was not kept, send the same once more. The connection does that by itself.
    """

    kind: ClassVar = 64


# ---- session: one coordinator owns a task at a time ---------------------------------


@dataclass(frozen=True, slots=True)
class OpenSession:
    """A coordinator takes this task. Answered by `SessionOpened`, or by a `BusyError`
    while another coordinator that is alive holds it.

    ``session`` is the incarnation of the coordinator; ``ps`` are the addresses that a
    worker pulls from and pushes to, in task order; ``index`` is the receiver's place
    among the tasks of its job that the coordinator knows, from 0, and goes into the
    worker context with ``worker_count``. ``prefetch``: how many optimizer steps a
    worker may fetch ahead. A ps ignores all but the session.
    """

    kind: ClassVar = 16
    session: int
    index: int
    worker_count: int
    ps: list[str]
    prefetch: int = 0


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """``devices``: platform ("cpu", "gpu", "tpu") and number of local devices.

    ``resumed``: the session was open already, and all that it has here is intact.
    ``session``: its number, in the answer to a `JoinSession`.
    """

    kind: ClassVar = 17
    platform: str
    devices: int
    resumed: bool = False
    session: int = 0


@dataclass(frozen=True, slots=True)
class JoinSession:
    """A worker that runs a program of its own asks a ps for the session of the program
    that creates the variables. Answered by `SessionOpened` once ``session`` is open (0:
    any whose coordinator is there) and all these variables and optimizers are in it."""

    kind: ClassVar = 19
    session: int
    keys: list[int]
    optimizers: list[int]


@dataclass(frozen=True, slots=True)
class CloseSession:
    """Drop all of the session; with ``exit`` the process drains and ends."""

    kind: ClassVar = 18
    session: int
    exit: bool


# ---- parameter server ----------------------------------------------------------------


class VariableEntry(NamedTuple):
    """``key`` is unique in the session; the initial value is the array at its place."""

    key: int
    name: str
    trainable: bool
    sharded: bool


@dataclass(frozen=True, slots=True)
class CreateVariables:
    """Creates all or none; answered by `Done`. The same key, shape and dtype again is
    no error and keeps the value that is there."""

    kind: ClassVar = 32
    session: int
    variables: list[VariableEntry]
    arrays: Arrays


class InitialEntry(NamedTuple):
    """A variable whose value is made where it will live: ``shape`` of ``whole``, from
    ``offset`` on (one number per axis each)."""

    key: int
    name: str
    trainable: bool
    sharded: bool
    dtype: str
    shape: list[int]
    whole: list[int]
    offset: list[int]


@dataclass(frozen=True, slots=True)
class InitializeVariables:
    """Creates all or none, as `CreateVariables`, from one shipped initializer:
    ``(shape, dtype, partition_shape=, partition_offset=) -> array``. Taken from a
    coordinator alone."""

    kind: ClassVar = 39
    session: int
    variables: list[InitialEntry]
    code: bytes


@dataclass(frozen=True, slots=True)
class DeleteVariables:
    kind: ClassVar = 33
    session: int
    keys: list[int]


@dataclass(frozen=True, slots=True)
class CreateOptimizer:
    """``code`` is a shipped optax transformation: taken from a coordinator alone."""

    kind: ClassVar = 34
    session: int
    optimizer: int
    name: str
    code: bytes


class Read(NamedTuple):
    """``known`` is the version that the reader holds, -1 for none."""

    key: int
    known: int


@dataclass(frozen=True, slots=True)
class Pull:
    """Reads several variables; answered by `Pulled`. Each one is untorn; together they
    are not a snapshot."""

    kind: ClassVar = 35
    session: int
    reads: list[Read]


@dataclass(frozen=True, slots=True)
class PullRows:
    """`Pull`, and rows of variables besides; answered by `Pulled`.

    ``rows`` are the keys of the variables of which rows are read; the array at its
    place holds their indices, ``[n]`` integers of the variable's first axis.
    """

    kind: ClassVar = 61
    session: int
    reads: list[Read]
    rows: list[int]
    arrays: Arrays


@dataclass(frozen=True, slots=True)
class Pulled:
    """One version per read, in order. ``arrays`` holds the values of those reads whose
    version differs from the one that the reader knew, in order, and behind them the
    rows ``[n, ...]`` for each of `PullRows.rows`."""

    kind: ClassVar = 36
    versions: list[int]
    arrays: Arrays


class Update(NamedTuple):
    """``optimizer`` is 0 unless ``op`` is one of the OPTIMIZE kinds; ``operands`` is
    how many of the push's arrays belong to this update."""

    key: int
    op: int
    optimizer: int
    operands: int


@dataclass(frozen=True, slots=True)
class Push:
    """Applies all the updates or none; answered by `Pushed`.

    ``step`` names the closure: a ps applies the pushes of ``(session, step, part)`` at
    most once. ``step`` -1: not part of a closure, applied as often as it is sent.
    All steps below ``low_water`` are over; a push of one is answered as a duplicate.
    """

    kind: ClassVar = 37
    session: int
    step: int
    part: int
    low_water: int
    updates: list[Update]
    arrays: Arrays


@dataclass(frozen=True, slots=True)
class Pushed:
    """``applied`` is false for a duplicate; versions are those after the push."""

    kind: ClassVar = 38
    applied: bool
    versions: list[int]


@dataclass(frozen=True, slots=True)
class Exchange:
    """`Push`, and behind it `PullRows`, which reads what the push wrote: what training
    needs of a ps per step, in one message. Answered by `Exchanged`.

    ``arrays``: the operands of the updates in order, then the indices for each of
    ``rows``.
    """

    kind: ClassVar = 62
    session: int
    step: int
    part: int
    low_water: int
    updates: list[Update]
    reads: list[Read]
    rows: list[int]
    arrays: Arrays


@dataclass(frozen=True, slots=True)
class Exchanged:
    """``applied`` as in `Pushed`, ``versions`` and ``arrays`` as in `Pulled`.

    Either part may be refused without the other: its error is `errors.to_wire`, and
    None if it was not. Without an answer to the pull, versions and arrays are empty.
    """

    kind: ClassVar = 63
    applied: bool
    push_error: PlainTree
    pull_error: PlainTree
    versions: list[int]
    arrays: Arrays


# ---- snapshots: values and slots as they were at one moment -------------------------


class TensorEntry(NamedTuple):
    """One tensor of a snapshot: the value of a variable (``optimizer`` 0, ``leaf``
    ""), or a leaf of an optimizer's state beside it, named by its path.

    ``rows``: its first axis is the variable's own.
    """

    key: int
    optimizer: int
    leaf: str
    dtype: str
    shape: list[int]
    rows: bool


@dataclass(frozen=True, slots=True)
class PinSnapshot:
    """Keeps values and slots of variables as they are now, until `ReleaseSnapshot`;
    updates go on beside. ``optimizers``: whose slots. Answered by `SnapshotPinned`.

    ``first`` above 0 pins nothing, but asks for those from that place on of a snapshot
    that is there: thousands do not fit into one answer."""

    kind: ClassVar = 40
    session: int
    snapshot: int
    keys: list[int]
    optimizers: list[int]
    first: int = 0


@dataclass(frozen=True, slots=True)
class SnapshotPinned:
    """Tensors from ``first`` on, and how many there are in all."""

    kind: ClassVar = 41
    tensors: list[TensorEntry]
    total: int


@dataclass(frozen=True, slots=True)
class WriteSnapshot:
    """Writes tensors of a snapshot (by their place in `SnapshotPinned`) to the new file
    ``path`` under these names, and syncs it. Answered by `SnapshotWritten`."""

    kind: ClassVar = 42
    session: int
    snapshot: int
    path: str
    tensors: list[int]
    names: list[str]


@dataclass(frozen=True, slots=True)
class SnapshotWritten:
    """Digests in the order of the names; ``size`` of the file in bytes."""

    kind: ClassVar = 43
    digests: list[str]
    size: int


@dataclass(frozen=True, slots=True)
class ReadSnapshot:
    """Asks for ``size`` bytes of a tensor of a snapshot; answered by `SnapshotPart`."""

    kind: ClassVar = 44
    session: int
    snapshot: int
    tensor: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """One array of bytes."""

    kind: ClassVar = 45
    arrays: Arrays


@dataclass(frozen=True, slots=True)
class ReleaseSnapshot:
    kind: ClassVar = 46
    session: int
    snapshot: int


class LoadEntry(NamedTuple):
    """Rows ``[start, stop)`` of tensor ``name`` in the file ``path`` go to rows from
    ``at`` on of a variable's value or slot (as in `TensorEntry`). A tensor without the
    variable's rows goes whole (``start``, ``stop`` and ``at`` are 0). ``name`` "":
    nothing is read, and all that is asked is whether the file is there. ``path`` "" of
    an optimizer: it forgets what it keeps beside the variable, and begins anew."""

    key: int
    optimizer: int
    leaf: str
    path: str
    name: str
    start: int
    stop: int
    at: int


@dataclass(frozen=True, slots=True)
class LoadTensors:
    """Reads values and slots from files that this ps can see. Answered by `Done`."""

    kind: ClassVar = 47
    session: int
    entries: list[LoadEntry]


class StoreEntry(NamedTuple):
    """The array at its place goes to rows from ``at`` on, as in `LoadEntry`."""

    key: int
    optimizer: int
    leaf: str
    at: int


@dataclass(frozen=True, slots=True)
class StoreTensors:
    """Values and slots that were read elsewhere. Answered by `Done`."""

    kind: ClassVar = 60
    session: int
    entries: list[StoreEntry]
    arrays: Arrays


# ---- worker ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PutCode:
    """Ships a pickled object (a step function, a dataset function) once, named by its
    digest. Taken from a coordinator alone. Answered by `Done`."""

    kind: ClassVar = 48
    session: int
    digest: bytes
    code: bytes


@dataclass(frozen=True, slots=True)
class PutArguments:
    """Ships the pickled ``(args, kwargs)`` of closures; large arrays travel beside it
    (pickle protocol 5, out of band, in order). A notice: order on the link suffices."""

    kind: ClassVar = 49
    session: int
    arguments: int
    code: bytes
    arrays: Arrays


@dataclass(frozen=True, slots=True)
class DropArguments:
    kind: ClassVar = 50
    session: int
    arguments: list[int]


class Batch(NamedTuple):
    """Closures that share function and arguments; ``arguments`` 0: called without any.
    ``attempt`` is 1 for the first try."""

    function: bytes
    arguments: int
    attempt: int
    steps: list[int]


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Runs the closures in order. A notice, answered by `Completions` as they end."""

    kind: ClassVar = 51
    session: int
    low_water: int
    batches: list[Batch]


class Completion(NamedTuple):
    """``layout`` names a `Layout` sent before or with it on this link; ``size`` is how
    many bytes of ``results`` are this closure's, -1 if they stay on the worker
    (`Fetch`). ``error`` is `errors.to_wire` or None."""

    step: int
    outcome: int
    layout: int
    size: int
    error: PlainTree


class Layout(NamedTuple):
    """How to cut a result: dtype names and shapes of the leaves, and their structure
    (nested lists and dicts with leaf numbers, or None if it is not plain)."""

    layout: int
    dtypes: list[str]
    shapes: list[list[int]]
    structure: PlainTree


@dataclass(frozen=True, slots=True)
class Completions:
    """Closures that ended; a notice from worker to coordinator. ``results`` is the
    little-endian C-order bytes of all small results, leaf after leaf."""

    kind: ClassVar = 52
    session: int
    completions: list[Completion]
    layouts: list[Layout]
    results: bytes


@dataclass(frozen=True, slots=True)
class CancelSteps:
    """Drops every closure that has not begun; each one is answered in `Completions` as
    cancelled. What runs, runs to its end."""

    kind: ClassVar = 53
    session: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Asks for a result that stayed on the worker; answered by `Fetched`."""

    kind: ClassVar = 54
    session: int
    step: int


@dataclass(frozen=True, slots=True)
class Fetched:
    kind: ClassVar = 55
    arrays: Arrays


@dataclass(frozen=True, slots=True)
class DropResults:
    kind: ClassVar = 56
    session: int
    steps: list[int]


@dataclass(frozen=True, slots=True)
class BuildResource:
    """Builds (again) a per-worker resource from shipped code; answered by
    `ResourceBuilt` or by the `Failure` that the code raised. ``maker`` is the digest of
    a callable, ``purpose`` is "iterator" (its result is iterated) or "value"."""

    kind: ClassVar = 57
    session: int
    resource: int
    purpose: str
    maker: bytes
    arguments: int


@dataclass(frozen=True, slots=True)
class ResourceBuilt:
    """``layout`` describes the elements of an iterator (its first one)."""

    kind: ClassVar = 58
    layout: Layout


@dataclass(frozen=True, slots=True)
class DropResources:
    kind: ClassVar = 59
    session: int
    resources: list[int]


# ---- collectives: ranks of a group talk to each other --------------------------------


class MemberEntry(NamedTuple):
    """One rank of a group. ``descriptor``, ``capacity`` and ``word`` stand for memory
    that ranks of the same host may map, as in `Offer`; capacity 0: there is none."""

    task: str
    address: str
    host: str
    pid: int
    incarnation: int
    descriptor: int
    capacity: int
    word: bytes


@dataclass(frozen=True, slots=True)
class JoinGroup:
    """A rank asks rank 0 to form a generation of a group; answered by `GroupFormed`
    once all ``size`` ranks have asked, or by the error that names who did not within
    ``patience`` seconds. ``generation``: the lowest that will do, 0 for a process that
    was in none."""

    kind: ClassVar = 72
    group: str
    generation: int
    rank: int
    size: int
    member: MemberEntry
    patience: float


@dataclass(frozen=True, slots=True)
class GroupFormed:
    """``ticket`` is drawn at random: what carries another one is of another generation
    and is refused. ``members`` in the order of ranks. ``choices`` is rank 0's table of
    algorithms as plain data: ranks with different ones would wait for each other."""

    kind: ClassVar = 73
    ticket: int
    generation: int
    members: list[MemberEntry]
    choices: dict[str, PlainTree]


@dataclass(frozen=True, slots=True)
class Hop:
    """A notice: part of one call of a collective, from one rank to another.

    ``call`` numbers the calls of a group, ``place`` the hops of a call, alike on all
    ranks. ``about`` is a digest of what is called (operation, dtype, sizes): ranks that
    call different things find it out. ``arrays``: at most one, of bytes.
    """

    kind: ClassVar = 74
    ticket: int
    call: int
    place: int
    about: int
    arrays: Arrays


@dataclass(frozen=True, slots=True)
class AbortCall:
    """A notice: the sender gave a call up, for this reason (`to_wire` of an error), and
    the generation with it. ``lost``: ranks that are gone for good."""

    kind: ClassVar = 75
    ticket: int
    call: int
    error: PlainTree
    lost: list[int]


@dataclass(frozen=True, slots=True)
class AskCall:
    """How far are you with this call? Answered by `CallState`."""

    kind: ClassVar = 76
    ticket: int
    call: int


@dataclass(frozen=True, slots=True)
class CallState:
    """``about``: what the rank calls in words, "" if it has not called yet; ``waits``:
    the ranks that it waits for. ``is_over``: the call has ended there."""

    kind: ClassVar = 77
    about: str
    waits: list[int]
    is_over: bool


@dataclass(frozen=True, slots=True)
class LeaveGroup:
    """A notice: the sender leaves this generation on purpose. ``calls``: how many it
    has made, those with a tag not counted."""

    kind: ClassVar = 78
    ticket: int
    calls: int
    reason: str


Message = (
    Hello
    | Beat
    | Chunk
    | Credit
    | Goodbye
    | Offer
    | Mapped
    | Placed
    | Released
    | Failure
    | Again
    | Done
    | Inspect
    | Statistics
    | OpenSession
    | SessionOpened
    | JoinSession
    | CloseSession
    | CreateVariables
    | InitializeVariables
    | DeleteVariables
    | CreateOptimizer
    | Pull
    | PullRows
    | Pulled
    | Push
    | Pushed
    | Exchange
    | Exchanged
    | PinSnapshot
    | SnapshotPinned
    | WriteSnapshot
    | SnapshotWritten
    | ReadSnapshot
    | SnapshotPart
    | ReleaseSnapshot
    | LoadTensors
    | StoreTensors
    | PutCode
    | PutArguments
    | DropArguments
    | Dispatch
    | Completions
    | CancelSteps
    | Fetch
    | Fetched
    | DropResults
    | BuildResource
    | ResourceBuilt
    | DropResources
    | JoinGroup
    | GroupFormed
    | Hop
    | AbortCall
    | AskCall
    | CallState
    | LeaveGroup
)
"""Everything that a header can announce."""

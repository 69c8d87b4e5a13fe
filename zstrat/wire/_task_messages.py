"""Messages to tasks of any job, and between the ranks of a group.

One coordinator owns a task at a time. It opens a session before anything else, and the
state of the session is dropped with it (`_session`).

No coordinator takes part in a group. The ticket is a random name of one generation
(membership) of a group; a rank refuses messages with another ticket.
"""

from dataclasses import field
from typing import ClassVar, NamedTuple

from ._messages import Message, message
from ._schema import Arrays, PlainTree
from ._session import ANY_TASK, COORDINATOR, TRAINING, WORKER, Repeat, request


@message
class Failure(Message):
    """Reports that a request has failed, with `zstrat.errors.to_wire` of the error."""

    kind: ClassVar = 6
    error: PlainTree


@message
class Done(Message):
    """Reports that a request without a result has succeeded."""

    kind: ClassVar = 7


@request(by=ANY_TASK, repeat=Repeat.SAFE)
class Inspect(Message):
    """Asks a task for its statistics. Answered by `Statistics`."""

    kind: ClassVar = 8


@message
class Statistics(Message):
    """Answers `Inspect` with values by the part of the task."""

    kind: ClassVar = 9
    values: dict[str, PlainTree]


@message
class Telemetry(Message):
    """Sends numbers of a task to the program whose session the task serves, about once
    a second while the values change: the parts of `Statistics` that `zstrat.telemetry`
    computes. A notice; the next one replaces one that is lost."""

    kind: ClassVar = 105
    values: dict[str, PlainTree]


@request(by=COORDINATOR, repeat=Repeat.NEVER)
class OpenSession(Message):
    """Makes a coordinator the owner of a task. Answered by `SessionOpened`, or by a
    `BusyError` while another coordinator that is alive owns the task.

    ``session`` is the incarnation of the coordinator. ``ps`` are the addresses of the
    parameter servers in task order. ``index`` is the receiver's index among the tasks
    of its job that the coordinator knows; the worker's context shows it, with
    ``worker_count``. ``prefetch``: number of optimizer steps for which a worker may
    fetch values ahead. ``listens``: the coordinator wants to receive what its steps
    print (`Printed`). ``views``: view numbers of the stores at ``ps``, which may move
    (`MoveServer`). ``replicas``: number of backups of each store, in other processes.

    A ps uses ``session`` and ``name``: if a coordinator is lost, the ps keeps a named
    session, with variables, slots and keys, for the next coordinator that opens it by
    this name. ``views`` for a ps: the view since which another process serves this ps's
    store, if another does. ``origin`` is the number from which the keys of variables
    are counted; 0: that of the session itself. ``is_shared``: workers that run a
    program of their own may join (`JoinSession`). ``program``: name of the program for
    messages ("train.py"). ``sent``: monotonic time of the coordinator when it sent this
    message, to compare with `CloseSession`.
    """

    kind: ClassVar = 16
    session: int
    index: int
    worker_count: int
    ps: list[str]
    prefetch: int = 0
    listens: bool = False
    views: list[int] = field(default_factory=list)
    name: str = ""
    origin: int = 0
    replicas: int = 0
    is_shared: bool = False
    program: str = ""
    sent: float = 0.0


@message
class SessionOpened(Message):
    """Answers `OpenSession`: the session is open. Has the task's ``platform`` ("cpu",
    "gpu", "tpu") and its number of ``devices``.

    ``resumed``: the session was open before, and its state is intact. ``session``: the
    number of the session, in the answer to a `JoinSession`. ``origin``, of a ps: as in
    `OpenSession`; differs from the session's number if the session continues an older
    one.
    """

    kind: ClassVar = 17
    platform: str
    devices: int
    resumed: bool = False
    session: int = 0
    origin: int = 0


class Awaited(NamedTuple):
    """A variable that another program has to create under this key before a
    `JoinSession` is answered."""

    key: int
    name: str
    dtype: str
    shape: list[int]


class AwaitedOptimizer(NamedTuple):
    """An optimizer that another program has to create under this number before a
    `JoinSession` is answered."""

    optimizer: int
    name: str


@request(by=WORKER, repeat=Repeat.SAFE)
class JoinSession(Message):
    """Asks a ps for the session of the program that creates the variables; sent by a
    worker that runs a program of its own. Answered by `SessionOpened` once ``session``
    is open (0: any session whose coordinator is alive) and has all these variables and
    optimizers. Refused if a variable or optimizer of the session differs, or after
    ``timeout`` seconds."""

    kind: ClassVar = 19
    session: int
    variables: list[Awaited]
    optimizers: list[AwaitedOptimizer]
    timeout: float


@request(by=WORKER, repeat=Repeat.NEVER)
class ReportWorker(Message):
    """Reports a new worker to a parameter server, which passes it on to the program
    whose session it serves. Answered by `AnswerReport` when the worker is part of that
    session. Refused by the program, or after ``timeout`` seconds.

    ``address``: address of the worker. ``index``: its number, or -1 if it asks for one.
    """

    kind: ClassVar = 111
    address: str
    index: int
    timeout: float


@message
class WorkerReported(Message):
    """Passes a `ReportWorker` to the program. A notice, which is sent again under the
    same number ``report`` if the program reopens its session."""

    kind: ClassVar = 112
    session: int
    report: int
    address: str
    index: int
    timeout: float


@request(by=COORDINATOR, repeat=Repeat.NEVER)
class AnswerReport(Message):
    """Answers a `WorkerReported`, and through it the worker's `ReportWorker`: the
    ``index`` of the worker, or `zstrat.errors.to_wire` of the reason of a refusal.
    Answered by `Done`."""

    kind: ClassVar = 113
    session: int
    report: int
    index: int
    error: PlainTree = None


@request(by=COORDINATOR, repeat=Repeat.NEVER)
class CloseSession(Message):
    """Closes the session and drops its state; with ``exit`` the process drains and
    ends. Answered by `Done`.

    Refused if the session was reopened after the time ``sent`` of this message:
    messages of different connections may arrive in another order.
    """

    kind: ClassVar = 18
    session: int
    exit: bool
    sent: float = 0.0


@request(by=COORDINATOR, repeat=Repeat.NEVER)
class AskClock(Message):
    """Asks a task for the time of its clock. Answered at once by `ClockTime`."""

    kind: ClassVar = 106
    session: int


@message
class ClockTime(Message):
    """The answering process's monotonic clock, in seconds."""

    kind: ClassVar = 107
    now: float


@request(by=COORDINATOR, repeat=Repeat.NEVER)
class BeginCapture(Message):
    """Makes a task keep the spans (timed phases) of the session's steps: the last
    ``spans``, for at most ``seconds``. ``profile``: a worker also starts jax's
    profiler, into a new folder. Answered by `Done`."""

    kind: ClassVar = 108
    session: int
    spans: int
    seconds: float
    profile: bool


@request(by=COORDINATOR, repeat=Repeat.NEVER)
class EndCapture(Message):
    """Makes a task stop keeping spans, and asks for them. Answered by `Captured`."""

    kind: ClassVar = 109
    session: int


@message
class Captured(Message):
    """Answers `EndCapture` with the captured spans: steps (int64 [n]), indices into
    ``phases`` (uint8 [n]), starts and ends (float64 [2, n], seconds of the clock of
    `ClockTime`); and times with the bytes received and sent by the process so far
    (float64 [3, m]). ``is_cut``: there were more spans than were kept. ``profile``:
    folder of jax's profile; ``problem``: why there is no profile. A profile adds three
    arrays of its events: indices of rows and names (uint32 [2, k]), starts and ends
    (float64 [2, k]), and a JSON text (uint8) with the rows, the names and a note."""

    kind: ClassVar = 110
    phases: list[str]
    is_cut: bool
    profile: str
    problem: str
    arrays: Arrays


class MemberEntry(NamedTuple):
    """One rank of a group. ``descriptor``, ``capacity`` and ``word`` describe memory
    that ranks of the same host may map, as in `Offer`; capacity 0: no memory."""

    task: str
    address: str
    host: str
    pid: int
    incarnation: int
    descriptor: int
    capacity: int
    word: bytes


# The node of a rank asks again by itself: rank 0 may be another process by then.
@request(by=TRAINING, repeat=Repeat.NEVER)
class JoinGroup(Message):
    """Asks rank 0 to form a generation of a group. Answered by `GroupFormed` once all
    ``size`` ranks have asked, or after ``timeout`` seconds by an error that names the
    missing ranks. ``generation``: the lowest number of the generation that the rank
    accepts, 0 for a new process."""

    kind: ClassVar = 72
    group: str
    generation: int
    rank: int
    size: int
    member: MemberEntry
    timeout: float


@message
class GroupFormed(Message):
    """Answers `JoinGroup`: a generation is formed. ``ticket`` is its random name.
    ``members`` are in the order of ranks. ``choices`` is rank 0's table of algorithms,
    which all ranks use: ranks with different tables would wait for each other."""

    kind: ClassVar = 73
    ticket: int
    generation: int
    members: list[MemberEntry]
    choices: dict[str, PlainTree]


@request(by=TRAINING, repeat=Repeat.NEVER)
class Hop(Message):
    """Sends part of the data of one call of a collective operation, from one rank to
    another. A notice.

    ``call`` numbers the calls of a group, ``place`` the hops of a call, with the same
    numbers on all ranks. ``about`` is a digest of the call (operation, dtype, sizes),
    by which ranks notice that they make different calls. ``arrays``: at most one, of
    bytes.
    """

    kind: ClassVar = 74
    ticket: int
    call: int
    place: int
    about: int
    arrays: Arrays


@request(by=TRAINING, repeat=Repeat.NEVER)
class AbortCall(Message):
    """Reports that the sender ends the generation because of ``error`` (`to_wire`) in a
    call. A notice. ``lost``: ranks that are lost."""

    kind: ClassVar = 75
    ticket: int
    call: int
    error: PlainTree
    lost: list[int]


@request(by=TRAINING, repeat=Repeat.NEVER)
class AskCall(Message):
    """Asks a rank for its progress with a call of a collective operation. Answered by
    `CallState`."""

    kind: ClassVar = 76
    ticket: int
    call: int


@message
class CallState(Message):
    """Answers `AskCall`: the progress of the rank with the call. ``about``: description
    of the call, "" if the rank has not begun it; ``waits``: ranks that the rank waits
    for. ``is_over``: the call has ended on the rank. ``is_broken``: the generation has
    ended on the rank; an `AbortCall` or `LeaveGroup` under way has the reason."""

    kind: ClassVar = 77
    about: str
    waits: list[int]
    is_over: bool
    is_broken: bool


@request(by=TRAINING, repeat=Repeat.NEVER)
class LeaveGroup(Message):
    """Reports that the sender leaves the generation on purpose. A notice. ``calls``:
    number of untagged operations that the sender has begun."""

    kind: ClassVar = 78
    ticket: int
    calls: int
    reason: str

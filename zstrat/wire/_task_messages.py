"""What every task is asked, whatever its job, and the outcomes of any request.

One coordinator owns a task at a time: its session is opened before anything else is
asked, and what belongs to it is dropped with it (`_session`).
"""

from dataclasses import field
from typing import ClassVar, NamedTuple

from ._schema import Arrays, PlainTree, message


@message
class Failure:
    """The outcome of a request that failed: `zstrat.errors.to_wire` of the error."""

    kind: ClassVar = 6
    error: PlainTree


@message
class Done:
    """The outcome of a request that has nothing to say but that it succeeded."""

    kind: ClassVar = 7


@message
class Inspect:
    """Asks a task for its statistics; any role may."""

    kind: ClassVar = 8


@message
class Statistics:
    """What `Inspect` is answered with: values by the part of the task they tell of."""

    kind: ClassVar = 9
    values: dict[str, PlainTree]


@message
class Telemetry:
    """What a task says of itself to the program whose session it serves, about once a
    second while that changes: the parts of `Statistics` that `zstrat.telemetry` makes.
    A notice, and nobody misses one that is lost."""

    kind: ClassVar = 105
    values: dict[str, PlainTree]


@message
class OpenSession:
    """A coordinator takes this task. Answered by `SessionOpened`, or by a `BusyError`
    while another coordinator that is alive holds it.

    ``session`` is the incarnation of the coordinator; ``ps`` are the addresses that a
    worker pulls from and pushes to, in task order; ``index`` is the receiver's place
    among the tasks of its job that the coordinator knows, from 0, and goes into the
    worker context with ``worker_count``. ``prefetch``: how many optimizer steps a
    worker may fetch ahead. ``listens``: the coordinator wants to hear what its steps
    print (`Printed`). ``views``: those of the stores at ``ps``, which may move
    (`MoveServer`). ``replicas``: second copies that these have, in other processes.

    A ps heeds the session and what it is called: under a ``name`` it keeps the session
    of a coordinator that is lost for the next one that opens it by that name, with the
    variables, their slots and their keys. ``views``, to a ps: the one since which
    another process serves its store, if one does. ``origin`` is the number that those
    keys are counted from; 0: the session's own. ``is_shared``: workers that are
    programs of their own may join it (`JoinSession`). ``program``: what runs there, for
    words to a person ("train.py"). ``sent``: when, by the clock that only goes forward
    of the coordinator (`CloseSession`).
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
class SessionOpened:
    """``devices``: platform ("cpu", "gpu", "tpu") and number of local devices.

    ``resumed``: the session was open already, and all that it has here is intact.
    ``session``: its number, in the answer to a `JoinSession`. ``origin``, of a ps: as
    in `OpenSession`; another number than the session's if that goes on with an older
    one.
    """

    kind: ClassVar = 17
    platform: str
    devices: int
    resumed: bool = False
    session: int = 0
    origin: int = 0


class Awaited(NamedTuple):
    """A variable that another program has to create under this key."""

    key: int
    name: str
    dtype: str
    shape: list[int]


class AwaitedOptimizer(NamedTuple):
    """An optimizer that another program has to create under this number."""

    optimizer: int
    name: str


@message
class JoinSession:
    """A worker that runs a program of its own asks a ps for the session of the program
    that creates the variables. Answered by `SessionOpened` once ``session`` is open (0:
    any whose coordinator is there) and all these variables and optimizers are in it;
    refused if another one is there in place of one of them, or after ``timeout``
    seconds."""

    kind: ClassVar = 19
    session: int
    variables: list[Awaited]
    optimizers: list[AwaitedOptimizer]
    timeout: float


@message
class ReportWorker:
    """A worker that no program knows reports itself to a parameter server, which passes
    it on to the program whose session it serves. Answered by `AnswerReport` when it is
    in that session; refused by that program, or after ``timeout`` seconds.

    ``address``: where it is to be reached. ``index`` is its number, and -1 that of a
    worker which asks for one and serves nobody yet.
    """

    kind: ClassVar = 111
    address: str
    index: int
    timeout: float


@message
class WorkerReported:
    """Tells the program of a `ReportWorker`. A notice; it is told again, under the same
    number ``report``, when the program has opened its session anew."""

    kind: ClassVar = 112
    session: int
    report: int
    address: str
    index: int
    timeout: float


@message
class AnswerReport:
    """What becomes of a worker that has reported itself: it has this ``index``; or
    `zstrat.errors.to_wire` of what is in the way."""

    kind: ClassVar = 113
    session: int
    report: int
    index: int
    error: PlainTree = None


@message
class CloseSession:
    """Drop all of the session; with ``exit`` the process drains and ends.

    Refused if the session was opened again after this was ``sent``: the two came by
    different connections, which keep no order.
    """

    kind: ClassVar = 18
    session: int
    exit: bool
    sent: float = 0.0


@message
class AskClock:
    """What does your clock say? Answered by `ClockTime` at once."""

    kind: ClassVar = 106
    session: int


@message
class ClockTime:
    """Seconds, by the clock that only goes forward of the process that answers."""

    kind: ClassVar = 107
    now: float


@message
class BeginCapture:
    """From now on keep the spans of the session's steps, the last ``spans`` of them,
    for at most so many ``seconds``. ``profile``: a worker has jax profile its process
    as well, into a folder of its own. Answered by `Done`."""

    kind: ClassVar = 108
    session: int
    spans: int
    seconds: float
    profile: bool


@message
class EndCapture:
    """Keep them no more, and tell those that there are. Answered by `Captured`."""

    kind: ClassVar = 109
    session: int


@message
class Captured:
    """The spans: steps (int64 [n]), places in ``phases`` (uint8 [n]), begins and ends
    (float64 [2, n], seconds by the clock of `ClockTime`); and times, bytes that the
    process has got and has sent by then (float64 [3, m]). ``is_cut``: there were more
    spans. ``profile``: the folder that jax's profile is in; ``problem``: why there is
    none. If there is one, there are three more arrays, of its events: numbers of rows
    and names (uint32 [2, k]), begins and ends (float64 [2, k]), and a JSON text (uint8)
    of the rows, the names, and what is to be said of it."""

    kind: ClassVar = 110
    phases: list[str]
    is_cut: bool
    profile: str
    problem: str
    arrays: Arrays


TaskMessage = (
    Failure
    | Done
    | Inspect
    | Statistics
    | Telemetry
    | OpenSession
    | SessionOpened
    | JoinSession
    | CloseSession
    | ReportWorker
    | WorkerReported
    | AnswerReport
    | AskClock
    | ClockTime
    | BeginCapture
    | EndCapture
    | Captured
)

"""Who may ask a parameter server for what.

A coordinator owns the session, creates, deletes and ships optimizers; it and the
workers pull, push, and tell which variables an optimizer moves (data, no code); the
evaluator pulls; anybody may inspect. A worker that is a program of its own joins the
session of the one that creates the variables; one that no program knows reports itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from zstrat.errors import (
    PermissionDeniedError,
    ProtocolError,
    StaleSessionError,
)
from zstrat.wire import (
    AnswerReport,
    AskClock,
    AskParts,
    AttachBackup,
    BeginCapture,
    BindOptimizer,
    CloseSession,
    CreateOptimizer,
    CreateVariables,
    DeleteVariables,
    DetachBackup,
    EndCapture,
    Exchange,
    Fence,
    InitializeVariables,
    Inspect,
    Job,
    JoinSession,
    LoadTensors,
    Message,
    OpenLog,
    OpenSession,
    PinSnapshot,
    PromoteBackup,
    Pull,
    PullRows,
    Push,
    PushPart,
    RaiseMark,
    ReadSnapshot,
    ReleaseSnapshot,
    ReportWorker,
    StoreTensors,
    Withdraw,
    WriteSnapshot,
)

if TYPE_CHECKING:
    from zstrat.wire import Hello


class Caller(Protocol):
    """What a parameter server needs to know of a peer (`zstrat.transport.Remote`)."""

    @property
    def name(self) -> str: ...
    @property
    def hello(self) -> Hello: ...
    @property
    def role(self) -> Job: ...
    @property
    def is_heard(self) -> bool: ...
    @property
    def heard(self) -> object: ...
    def promise(self, nbytes: int) -> None: ...
    def notify(self, message: Message) -> None: ...


ROLES: Final[dict[type[Message], frozenset[Job]]] = {
    OpenSession: frozenset({Job.CHIEF}),
    JoinSession: frozenset({Job.WORKER}),
    ReportWorker: frozenset({Job.WORKER}),
    AnswerReport: frozenset({Job.CHIEF}),
    CloseSession: frozenset({Job.CHIEF}),
    CreateVariables: frozenset({Job.CHIEF}),
    InitializeVariables: frozenset({Job.CHIEF}),
    DeleteVariables: frozenset({Job.CHIEF}),
    CreateOptimizer: frozenset({Job.CHIEF}),
    BindOptimizer: frozenset({Job.CHIEF, Job.WORKER}),
    Withdraw: frozenset({Job.CHIEF}),
    Pull: frozenset({Job.CHIEF, Job.WORKER, Job.EVALUATOR}),
    PullRows: frozenset({Job.CHIEF, Job.WORKER, Job.EVALUATOR}),
    Push: frozenset({Job.CHIEF, Job.WORKER}),
    PushPart: frozenset({Job.CHIEF, Job.WORKER}),
    AskParts: frozenset({Job.CHIEF, Job.WORKER}),
    RaiseMark: frozenset({Job.CHIEF}),
    Exchange: frozenset({Job.CHIEF, Job.WORKER}),
    Fence: frozenset({Job.CHIEF}),
    PinSnapshot: frozenset({Job.CHIEF}),
    WriteSnapshot: frozenset({Job.CHIEF}),
    ReadSnapshot: frozenset({Job.CHIEF}),
    ReleaseSnapshot: frozenset({Job.CHIEF}),
    LoadTensors: frozenset({Job.CHIEF}),
    StoreTensors: frozenset({Job.CHIEF}),
    AttachBackup: frozenset({Job.CHIEF}),
    DetachBackup: frozenset({Job.CHIEF}),
    PromoteBackup: frozenset({Job.CHIEF}),
    AskClock: frozenset({Job.CHIEF}),
    BeginCapture: frozenset({Job.CHIEF}),
    EndCapture: frozenset({Job.CHIEF}),
    Inspect: frozenset(Job),
}


def check_role(task: str, remote: Caller, message: Message) -> None:
    """Refuses what a peer may not ask for, by its role.

    Raises:
        ProtocolError: No parameter server answers such a message.
        PermissionDeniedError: It is not for peers of this role, or it is a push that
            claims to be another process's own.
        StaleSessionError: Whoever was the primary before opens its log here.
    """
    what, roles = type(message).__name__, ROLES.get(type(message))
    if isinstance(message, OpenLog):
        raise StaleSessionError(f"{task}: this process is the primary by now")
    if roles is None:
        raise ProtocolError(f"{task} is a parameter server and does not answer {what}")
    if remote.role not in roles:
        raise PermissionDeniedError(
            f"{task} takes {what} from {' or '.join(sorted(roles))}, and {remote.name} "
            f"is {remote.role}"
        )
    if is_forged(remote, message):
        raise PermissionDeniedError(
            f"{task}: {remote.name} names an update as another process's, whose own "
            "would then be taken for repetitions"
        )


def is_forged(remote: Caller, message: Message) -> bool:
    """Whether a push claims to be another process's own."""
    own = isinstance(message, Push) and message.writer
    return bool(own) and own != remote.hello.incarnation

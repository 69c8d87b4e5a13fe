"""Who may ask a parameter server for what.

A coordinator owns the session: only it may ask for what is not listed here. It and the
workers pull, push, and bind variables to optimizers (data, no code); the evaluator
pulls; any peer may inspect. A worker that is a separate program joins the
session of the one that creates the variables; one that no program knows reports itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from zstrat.errors import PermissionDeniedError, StaleSessionError
from zstrat.wire import (
    AskParts,
    BindOptimizer,
    Contribute,
    Exchange,
    Inspect,
    Job,
    JoinSession,
    Message,
    OpenLog,
    Pull,
    PullMerged,
    PullRound,
    PullRows,
    Push,
    PushPart,
    ReportWorker,
)

if TYPE_CHECKING:
    from zstrat.wire import Hello


class Caller(Protocol):
    """The properties of a peer that a parameter server uses
    (`zstrat.transport.Remote`)."""

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


_COORDINATOR: Final = frozenset({Job.CHIEF})
_TRAINING: Final = _COORDINATOR | {Job.WORKER}
_READING: Final = _TRAINING | {Job.EVALUATOR}

ROLES: Final[dict[type[Message], frozenset[Job]]] = {
    JoinSession: frozenset({Job.WORKER}),
    ReportWorker: frozenset({Job.WORKER}),
    BindOptimizer: _TRAINING,
    Pull: _READING,
    PullRows: _READING,
    Push: _TRAINING,
    PushPart: _TRAINING,
    AskParts: _TRAINING,
    Exchange: _TRAINING,
    Contribute: _TRAINING,
    PullMerged: _TRAINING,
    PullRound: _TRAINING,
    Inspect: frozenset(Job),
}
"""Roles that may send a message; any other only a coordinator may send."""


def check_role(task: str, remote: Caller, message: Message) -> None:
    """Refuses requests that a peer of this role may not make.

    Raises:
        PermissionDeniedError: It is not for peers of this role, or it is a push that
            claims to be another process's own.
        StaleSessionError: The former primary of the store opens its log here.
    """
    roles = ROLES.get(type(message), _COORDINATOR)
    if isinstance(message, OpenLog):
        raise StaleSessionError(f"{task}: this process is the primary by now")
    if remote.role not in roles:
        raise PermissionDeniedError(
            f"{task} takes {type(message).__name__} from "
            f"{' or '.join(sorted(roles))}, and {remote.name} is {remote.role}"
        )
    if is_forged(remote, message):
        raise PermissionDeniedError(
            f"{task}: {remote.name} names an update as another process's, whose own "
            "would then be taken for repetitions"
        )


def is_forged(remote: Caller, message: Message) -> bool:
    """Returns whether a push claims to be another process's own."""
    own = isinstance(message, Push) and message.writer
    return bool(own) and own != remote.hello.incarnation

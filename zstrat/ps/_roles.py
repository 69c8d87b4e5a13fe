"""Refuses requests to a parameter server that their sender may not make.

A coordinator owns the session: most requests are its own. It and the workers pull,
push, and bind variables to optimizers (data, no code); the evaluator pulls; any peer
may inspect. A worker that is a separate program joins the session of the program that
creates the variables; a worker that no program knows reports itself. Each class of a
message states its senders (`zstrat.wire.check_sender`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from zstrat.errors import PermissionDeniedError, StaleSessionError
from zstrat.wire import Job, Message, OpenLog, Push, check_sender

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


def check_role(task: str, remote: Caller, message: Message) -> None:
    """Refuses requests that a peer of this role may not send to the server ``task``.

    Raises:
        ProtocolError: The message is not a request.
        PermissionDeniedError: Peers of this role may not send it, or it is an update
            outside of closures that names another process as its writer.
        StaleSessionError: The sender is the former primary of the store and opens its
            log here.
    """
    check_sender(task, remote.name, remote.role, message)
    # Only a backup takes a log, and requests to a backup do not come here.
    if isinstance(message, OpenLog):
        raise StaleSessionError(f"{task}: this process is the primary by now")
    if is_forged(remote, message):
        raise PermissionDeniedError(
            f"{task}: {remote.name} names an update as another process's, whose own "
            "would then be taken for repetitions"
        )


def is_forged(remote: Caller, message: Message) -> bool:
    """Returns whether a push is an update outside of closures that names another
    process than its sender as its writer."""
    own = isinstance(message, Push) and message.writer
    return bool(own) and own != remote.hello.incarnation

"""Who may reach a task, and as what: decided before anything is served.

A task without keys believes what a peer claims, so only this machine may reach it. With
keys, the role of a connection is that of its key.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from zstrat.errors import PermissionDeniedError, ZstratError
from zstrat.wire import Job
from zstrat.wire.connection import described

from ._address import Address, check_directory, check_unused, is_local
from ._seldom import Seldom

if TYPE_CHECKING:
    from collections.abc import Callable

    from zstrat.config import Settings
    from zstrat.wire import Hello

    from ._curve import Security

_LOG: Final = logging.getLogger("zstrat.transport")


async def check_exposure(
    address: Address, task: str, security: Security | None, settings: Settings
) -> None:
    """Whether ``task`` may be bound there.

    Raises:
        PermissionDeniedError: Other machines can reach it, and there are neither keys
            nor ``settings.insecure``.
        PermissionError, FileNotFoundError: Others may enter the folder of an ipc
            address, or there is none.
        OSError: A process listens at that ipc address.

    Cancellation: nothing has happened.
    """
    if address.scheme == "ipc":
        check_directory(address)
        check_unused(address)
    elif security is None and not settings.insecure and not await is_local(address):
        raise PermissionDeniedError(
            f"{task} will not bind {address.host}:{address.port}: "
            "other machines can reach it, it has no keys, and whoever reaches it "
            "can run code here; make keys with `zstrat keygen DIR` and name them "
            "with ZSTRAT_KEYS=DIR (a daemon: --keys DIR), or bind 127.0.0.1, or "
            "set ZSTRAT_INSECURE=1 (a daemon: --insecure) if only you use the "
            "network"
        )


def role_of(
    hello: Hello, security: Security | None, user: str | None
) -> tuple[Job, ZstratError | None]:
    """The role of whoever greets with the key ``user``, and why it is refused if so."""
    job = Job(hello.job)
    if security is None or user is None:
        return job, None
    role = security.role_of(user)
    if role is None:
        return job, PermissionDeniedError(f"{described(hello)} has no key of ours")
    if job is Job.OBSERVER:  # any key may ask to only look
        return job, None
    index = security.index_of(user)
    if job is role and index in (None, hello.index):
        return job, None
    if job is role:
        return role, PermissionDeniedError(
            f"{described(hello)} has the key of {role}:{index}: it cannot be another"
        )
    return role, PermissionDeniedError(
        f"{described(hello)} has the key of the role {role}: it cannot be a {job}"
    )


class Complaints:
    """Counts whom ``task`` refused; logs no more often than a person can read."""

    def __init__(self, task: str, clock: Callable[[], float]) -> None:
        self._task, self._seldom = task, Seldom(clock)

    @property
    def count(self) -> int:
        return self._seldom.count

    def add(self, reason: str) -> None:
        if self._seldom.may_say():
            _LOG.warning(
                "%s refused a connection: %s (%d so far)",
                self._task,
                reason,
                self.count,
            )

"""The task at the far end of a link: who waits for its greeting, and when it is lost.

Callers that wait in vain for the greeting get an error that says what is known of the
cause. A broken connection is not yet a lost task: the same incarnation may come back
within ``reconnect`` seconds. Every other end is a loss at once. `Continuity` decides
that, once for each loss, without I/O.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from zstrat.errors import DeadlineExceededError, PermissionDeniedError
from zstrat.wire.connection import described

if TYPE_CHECKING:
    from zstrat.wire import Hello


_LOG: Final = logging.getLogger("zstrat.transport")

HANDSHAKE_FAILED: Final = (
    "the handshake failed: one side may use keys and the other none, they may have "
    "keys of different clusters, or a task of another job answers there, which has "
    "another key"
)
NOTHING: Final = "nothing answers there"
NOTHING_AT_IPV4: Final = (
    "nothing answers there by IPv4, and a name that has addresses of both kinds is not "
    "tried by IPv6: a task that listens there alone is named by its number"
)
SILENT: Final = (
    "something accepts the connection, but does not answer: the process is stopped or "
    "hangs, or is another program"
)
QUICK: Final = 3.0
"""Seconds from one handshake to the next, at most, of those that fail one after the
other."""
REFUSALS: Final = 8
"""Handshakes that a task may end one after the other, two and a half seconds in all,
before we conclude that it does not let us in. A process that is killed breaks one or
two."""
DOUBTFUL_REFUSALS: Final = 16
"""The same where no task was heard there yet, twenty seconds in all: what ends them may
stand before a daemon that is about to start (a proxy, a published port)."""


class Opening:
    """Callers that wait until a task greets. ``target`` is how errors call the task:
    "/job:ps/task:0 at 10.0.0.1:2222"."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._refusal: Exception | None = None
        self._waiters: set[asyncio.Future[Hello]] = set()
        self._is_logged = False
        self._failed, self._failed_at = 0, 0.0
        self._nothing = NOTHING
        self.trouble = NOTHING
        """What is wrong so far, for whoever waits in vain."""

    async def wait(self, deadline: float) -> Hello:
        """The HELLO of the task, once it is there.

        Args:
            deadline: Loop time.

        Raises:
            DeadlineExceededError: It did not greet in time; says what is known.
            Exception: It refused us, we refused it, or the link was closed.

        Cancellation: nothing is lost.
        """
        if self._refusal is not None:
            raise again(self._refusal)
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[Hello] = loop.create_future()
        self._waiters.add(waiter)
        started = loop.time()
        try:
            async with asyncio.timeout_at(deadline):
                return await waiter
        except TimeoutError:
            raise DeadlineExceededError(
                f"{self._target} did not answer within "
                f"{loop.time() - started:.1f} s: {self.trouble}; {self._advice}"
            ) from None
        finally:
            self._waiters.discard(waiter)

    def opened(self, hello: Hello) -> None:
        """The task greeted."""
        self._refusal, self._is_logged = None, False
        self._failed = 0
        self.trouble = "it was connected before"
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(hello)

    def looked_up(self, nothing: str) -> None:
        """Notes the words for an address at which nothing answers, now that the name of
        the task was looked up."""
        if self.trouble == self._nothing:
            self.trouble = nothing
        self._nothing = nothing

    def connected(self) -> None:
        """Something accepts connections there."""
        if self.trouble == self._nothing:
            self.trouble = SILENT

    def handshake_timed_out(self) -> None:
        """Notes that a handshake was not answered, which decides nothing: a frozen
        process may go on."""
        self._failed, self.trouble = 0, SILENT

    def handshake_failed(self, now: float, by_task: bool) -> None:
        """The other side ended a connection before it could greet.

        Args:
            by_task: It is a task, and nothing that stands before it.
        """
        self._failed = self._failed + 1 if now - self._failed_at < QUICK else 1
        self._failed_at, self.trouble = now, HANDSHAKE_FAILED
        if self._failed >= (REFUSALS if by_task else DOUBTFUL_REFUSALS):
            words = f"{self._target} does not let us in: {HANDSHAKE_FAILED}"
            self.refuse(PermissionDeniedError(f"{words}; {self._advice}"))

    @property
    def asks_who(self) -> bool:
        """Whether it is time to find out if a task listens there: if one does, the next
        handshake that fails decides."""
        return self._failed >= REFUSALS - 1

    @property
    def is_denied(self) -> bool:
        """Whether the other side does not let us in, by all that is known so far."""
        denied = isinstance(self._refusal, PermissionDeniedError)
        return denied or self.trouble == HANDSHAKE_FAILED

    @property
    def _advice(self) -> str:
        if self.is_denied:
            return (
                "give ZSTRAT_KEYS= here, and --keys to the task, a copy of the same "
                "folder that `zstrat keygen` has made"
            )
        if self.trouble == SILENT:
            return "look at its process and its log, and whether the port is its own"
        return (
            "check that it runs, that the address is right and that no firewall is in "
            "between"
        )

    def refuse(self, error: Exception) -> None:
        """Ends the wait of all with the reason why one side refuses the other. If
        nobody waits, the log says it, once until the task greets."""
        if not self._waiters and not self._is_logged:
            self._is_logged = True
            _LOG.warning("%s", error)
        self._refusal = error
        self.fail(error)

    def fail(self, error: Exception) -> None:
        """Ends the wait of all."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(again(error))


def again(error: Exception) -> Exception:
    """A copy of the error for another caller: one that is raised twice collects the
    tracebacks of both."""
    return type(error)(*error.args)


class Continuity:
    """Whether the task behind the connections of one link is still the same one."""

    def __init__(self, reconnect: float) -> None:
        self._reconnect = reconnect
        self._hello: Hello | None = None
        self._broken: tuple[str, float] | None = None

    @property
    def due(self) -> float | None:
        """When `tick` has something to decide."""
        return None if self._broken is None else self._broken[1] + self._reconnect

    def opened(self, hello: Hello) -> str | None:
        """A task greeted. Returns why the one before it is lost, if it is."""
        before, self._hello, self._broken = self._hello, hello, None
        if before is None or before.incarnation == hello.incarnation:
            return None
        return f"it was replaced by a new process: {described(hello)}"

    def closed(self, reason: str, broken: bool, now: float) -> str | None:
        """The connection ended. Returns why the task is lost, if it is at once."""
        if self._hello is None:
            return None
        if broken:
            if self._broken is None:
                self._broken = reason, now
            return self.tick(now)
        return self._lose(reason)

    def tick(self, now: float) -> str | None:
        """Time has passed. Returns why the task is lost, if it is now."""
        if self._broken is None or now < self._broken[1] + self._reconnect:
            return None
        return self._lose(self._broken[0])

    def _lose(self, reason: str) -> str:
        self._hello = self._broken = None
        return reason

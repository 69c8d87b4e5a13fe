"""Dials a task and exchanges greetings with it.

A greeting is the HELLO of this process, answered by the HELLO of the task. Callers that
wait in vain for the answer get an error that says what is known about the cause. A
broken connection is not yet a lost task: the same incarnation may come back within
``reconnect`` seconds. Every other end is a loss at once. `Continuity` decides whether a
task is lost, once for each loss, without I/O.

A `Dial` opens a socket per connection, one after the other. When a connection ends, its
socket is closed with everything that libzmq still holds for it, and the next one is
opened after a pause that grows with every attempt. Events and messages of the present
socket go to the owner of the `Dial`.

A second socket can find out whether ZeroMQ is spoken at the address (`Dial.ask`): a
ZeroMQ listener sends its greeting before it knows who connects, with keys or without.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import secrets
import socket
import sys
from contextlib import ExitStack
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import zmq

from zstrat.errors import DeadlineExceededError, PermissionDeniedError
from zstrat.wire import PROTOCOL, Hello
from zstrat.wire.connection import described

from ._address import is_name, looked_up, unknown
from ._socket import ZEROMQ, Event, EventKind, Sockets

if TYPE_CHECKING:
    from collections.abc import Callable

    from zstrat.config import Settings

    from ._address import Address
    from ._pump import Pump, Receive


AnyError = TypeVar("AnyError", bound=Exception)

_PACKAGES: Final = ("zstrat", "jax", "numpy")
_LONGEST_NAME: Final = 80


def new_incarnation() -> int:
    """Returns a number that no other start of any task has: 63 random bits, never 0.
    The upper 31 bits are those of this process, see `zstrat.wire.Owner.is_of`."""
    return _process_bits(os.getpid()) | secrets.randbits(32) | 1


@cache
def _process_bits(pid: int) -> int:
    """Returns 31 random bits of this process, the upper half of its incarnations; a
    child that it forks gets others."""
    del pid
    return secrets.randbits(31) << 32


def hello(job: str, index: int, incarnation: int) -> Hello:
    """Returns the HELLO of this process as a task. Finds the versions of packages
    without importing them."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:  # a ps without jax, say
            continue
    return Hello(
        PROTOCOL, job, index, incarnation, socket.gethostname(), os.getpid(), versions
    )


def program_name() -> str:
    """Returns the name of this program, for messages to persons: "train.py"."""
    path = Path(sys.argv[0])
    name = path.parent.name if path.name == "__main__.py" else path.name
    name = f"python {name}" if name in ("-c", "-m") else name
    return name[:_LONGEST_NAME] if name.isprintable() else ""


_LOG: Final = logging.getLogger("zstrat.transport")

HANDSHAKE_FAILED: Final = (
    "the handshake failed: one side may use keys and the other none, they may have "
    "keys of different clusters, or a task of another job answers there, which has "
    "another key"
)
NOTHING: Final = "nothing answers there"
NOTHING_AT_IPV4: Final = (
    "nothing answers there by IPv4, and a name that has addresses of both kinds is not "
    "tried by IPv6: if the task listens only there, give its address as a number"
)
SILENT: Final = (
    "something accepts the connection, but does not answer: the process is stopped or "
    "hangs, or is another program"
)
QUICK: Final = 3.0
"""Most seconds between failed handshakes that count as one series."""
REFUSALS: Final = 8
"""Number of handshakes in a row (two and a half seconds in all) after which a task that
breaks them counts as refusing this process. A process that is killed breaks one or
two."""
DOUBTFUL_REFUSALS: Final = 16
"""Number of handshakes in a row (twenty seconds in all) that must break where no task
has greeted yet: a proxy, or a published port whose daemon is about to start, may break
them."""


class Opening:
    """Collects what is known about the connection before the task has greeted, and
    wakes the callers that wait for the greeting.

    ``target`` is the name of the task in errors: "/job:ps/task:0 at 10.0.0.1:2222".
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self._refusal: Exception | None = None
        self._waiters: set[asyncio.Future[Hello]] = set()
        self._is_logged = False
        self._failed, self._failed_at = 0, 0.0
        self._nothing = NOTHING
        self.trouble = NOTHING
        """Why the task has not greeted so far, for the error of callers that wait in
        vain."""

    async def wait(self, deadline: float) -> Hello:
        """Waits until the task greets, and returns its HELLO.

        Args:
            deadline: Loop time.

        Raises:
            DeadlineExceededError: The task did not greet in time; the error says what
                is known about the cause.
            Exception: The error that `refuse` or `fail` was given: one side refused the
                other, or the link was closed.
        """
        if self._refusal is not None:
            raise copied_error(self._refusal)
        loop = asyncio.get_running_loop()
        # A future each: a cancelled caller must not cancel the others.
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
        """Wakes all callers with the HELLO of the task."""
        self._refusal, self._is_logged = None, False
        self._failed = 0
        self.trouble = "it was connected before"
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(hello)

    def looked_up(self, nothing: str) -> None:
        """Sets the trouble of an address where nothing answers to ``nothing``, after a
        lookup of its name."""
        if self.trouble == self._nothing:
            self.trouble = nothing
        self._nothing = nothing

    def connected(self) -> None:
        """Notes that something accepts connections at the address."""
        if self.trouble == self._nothing:
            self.trouble = SILENT

    def handshake_timed_out(self) -> None:
        """Notes that the other side did not answer a handshake. That is not a refusal:
        a frozen process may continue."""
        self._failed, self.trouble = 0, SILENT

    def handshake_failed(self, now: float, by_task: bool) -> None:
        """Notes that the other side closed a connection before the greeting, and gives
        up after several such failures in a row.

        Args:
            by_task: Whether a task closed the connection, and not a proxy between.
        """
        self._failed = self._failed + 1 if now - self._failed_at < QUICK else 1
        self._failed_at, self.trouble = now, HANDSHAKE_FAILED
        if self._failed >= (REFUSALS if by_task else DOUBTFUL_REFUSALS):
            words = f"{self._target} refuses this process: {HANDSHAKE_FAILED}"
            self.refuse(PermissionDeniedError(f"{words}; {self._advice}"))

    @property
    def asks_who(self) -> bool:
        """Whether to find out now if a task listens at the address (`Dial.ask`). If one
        does, the next failed handshake is a refusal."""
        return self._failed >= REFUSALS - 1

    @property
    def is_denied(self) -> bool:
        """Whether the other side refuses this process, as far as known."""
        denied = isinstance(self._refusal, PermissionDeniedError)
        return denied or self.trouble == HANDSHAKE_FAILED

    @property
    def _advice(self) -> str:
        if self.is_denied:
            return (
                "set ZSTRAT_KEYS= here and --keys of the task to copies of the same "
                "folder, created by `zstrat keygen`"
            )
        if self.trouble == SILENT:
            return "check its process and log, and that no other process has its port"
        return (
            "check that it runs, that the address is right, and that no firewall "
            "blocks it"
        )

    def refuse(self, error: Exception) -> None:
        """Raises the error of a refusal in all callers that wait, and in later ones. If
        none waits, logs the error, once until the task greets."""
        if not self._waiters and not self._is_logged:
            self._is_logged = True
            _LOG.warning("%s", error)
        # Kept for later callers: a link that is refused dials on, and may be admitted
        # later.
        self._refusal = error
        self.fail(error)

    def fail(self, error: Exception) -> None:
        """Raises the error in all callers that wait now."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(copied_error(error))


def copied_error(error: AnyError) -> AnyError:
    """Copies an error for another caller: an exception that is raised twice would
    collect the tracebacks of both callers."""
    return type(error)(*error.args)


class Continuity:
    """Decides whether a reconnected task is still the same, and when a task whose
    connection broke is lost."""

    def __init__(self, reconnect: float) -> None:
        self._reconnect = reconnect
        self._hello: Hello | None = None
        self._broken: tuple[str, float] | None = None

    @property
    def due(self) -> float | None:
        """Loop time at which `tick` has to decide whether the task is lost; None: no
        connection has broken."""
        return None if self._broken is None else self._broken[1] + self._reconnect

    def opened(self, hello: Hello) -> str | None:
        """Notes the greeting of the task. Returns why the previous task at the address
        is lost, or None."""
        before, self._hello, self._broken = self._hello, hello, None
        if before is None or before.incarnation == hello.incarnation:
            return None
        return f"it was replaced by a new process: {described(hello)}"

    def closed(self, reason: str, broken: bool, now: float) -> str | None:
        """Notes the end of the connection. Returns why the task is lost, or None if it
        may reconnect."""
        if self._hello is None:
            return None
        if broken:
            # The first break counts: attempts that fail meanwhile give the task no more
            # time.
            if self._broken is None:
                self._broken = reason, now
            return self.tick(now)
        return self._lose(reason)

    def tick(self, now: float) -> str | None:
        """Returns why the task is lost, or None if it may still reconnect."""
        if self._broken is None or now < self._broken[1] + self._reconnect:
            return None
        return self._lose(self._broken[0])

    def _lose(self, reason: str) -> str:
        self._hello = self._broken = None
        return reason


_FIRST_PAUSE: Final = 0.02
_LONGEST_PAUSE: Final = 2.0
"""Most seconds of the pause between two attempts to connect; each pause is twice as
long as the one before."""

_SIGNATURE: Final = b"\xff"
"""First byte of ZMTP's greeting. Text and other protocols do not begin with it."""


class Dial:
    """Connects to the address ``where``, with a new socket after each end of a
    connection.

    Args:
        arm: Called with each socket before it connects, to set its keys.
        happened: Called with each event of the present connection.
        received: Called with the frames of each message.
        failed: Called with the reason if no socket could be opened. Another attempt
            follows.
        sockets: Creates the sockets; ``context`` must be one of its contexts.
    """

    def __init__(
        self,
        context: Any,
        where: Address,
        settings: Settings,
        *,
        arm: Callable[[zmq.Socket[bytes]], None],
        happened: Callable[[Event], None],
        received: Receive,
        failed: Callable[[Exception], None],
        sockets: Sockets = ZEROMQ,
    ) -> None:
        self._context, self._where, self._settings = context, where, settings
        self._arm, self._happened, self._received = arm, happened, received
        self._failed, self._sockets = failed, sockets
        self._loop = asyncio.get_running_loop()
        self._pause = _FIRST_PAUSE
        self._retry: asyncio.TimerHandle | None = None
        self._look_up: asyncio.Task[None] | None = None
        self.pump: Pump | None = None
        """Reads and writes the present socket; None: there is no socket now."""
        self._question: Pump | None = None
        # Nothing, such as a proxy, comes before a socket in a folder.
        self._speaks: Final = where.scheme == "ipc"
        self.is_task = self._speaks
        """Whether ZeroMQ was spoken at the address when `ask` was called last."""

    def now(self) -> None:
        """Opens a socket now, which connects by itself as soon as the task listens."""
        self._retry = None
        try:
            self._open()
        except (zmq.ZMQError, OSError) as error:  # no descriptor is left, for example
            self._failed(error)
            self.later()

    def later(self) -> None:
        """Opens the next socket after a pause, which doubles with each attempt."""
        self._retry = self._loop.call_later(self._pause, self._again)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def _again(self) -> None:
        try:
            self.now()
        # Only here: at the first attempt `Link.start` raises it to its caller.
        except ValueError as error:  # a key file has gone meanwhile
            self._failed(error)
            self.later()

    def look_up(
        self, has_changed: Callable[[], None], learned: Callable[[str], None]
    ) -> None:
        """Resolves the host name of the task in the background, after a failed attempt
        to connect.

        Args:
            has_changed: Called if the name has only IPv6 addresses, so that the next
                socket will be an IPv6 socket.
            learned: Called with a description of why nothing answers at the address.
        """
        # Once, unless it fails: libzmq resolves names itself, and lacks only the kind
        # of address.
        if self._look_up is None and is_name(self._where):
            look_up = self._looked_up(has_changed, learned)
            self._look_up = self._loop.create_task(look_up, name="looks up a name")

    async def _looked_up(
        self, has_changed: Callable[[], None], learned: Callable[[str], None]
    ) -> None:
        try:
            address, has_both = await looked_up(self._where)
        except OSError as error:
            learned(unknown(self._where.host, error))
            self._look_up = None  # tried again at the next failure
            return
        learned(NOTHING_AT_IPV4 if has_both else NOTHING)
        if address != self._where:
            self._where = address
            has_changed()

    def ask(self) -> None:
        """Connects a second socket without a handshake, to find out whether ZeroMQ is
        spoken at the address; sets `is_task` when an answer comes."""
        if self._speaks:
            return
        # The previous one may still wait for its answer.
        self.end_question()
        try:
            socket = self._socket(zmq.STREAM)
        except (zmq.ZMQError, OSError):  # no descriptor is left: `is_task` stays False
            return
        self._question = self._sockets.pump(socket, self._heard)
        socket.connect(self._where.endpoint)

    def end_question(self) -> None:
        """Forgets the answer to `ask`, and closes its socket."""
        self.is_task = self._speaks
        if self._question is not None:
            self._question.close(0)
            self._question = None

    def _heard(self, frames: list[zmq.Frame]) -> None:
        if frames[-1].bytes[:1] == _SIGNATURE:
            self.is_task = True

    def succeeded(self) -> None:
        """Notes that the task has answered, so that the next pause is short again."""
        self._pause = _FIRST_PAUSE
        self.end_question()

    def drop(self, linger: float) -> None:
        """Closes the present socket; sent messages have ``linger`` seconds to leave."""
        if self.pump is not None:
            # First: closing a monitor calls the socket.
            self._monitor.close()
            self.pump.close(linger)
            self.pump = None

    def close(self, linger: float) -> None:
        """Closes the present socket as `drop` does, and stops connecting."""
        for waits in (self._retry, self._look_up):
            if waits is not None:
                waits.cancel()
        self.end_question()
        self.drop(linger)

    def _open(self) -> None:
        with ExitStack() as undo:
            socket = self._socket(zmq.DEALER)
            undo.callback(socket.close, 0)
            self._arm(socket)
            watched = tuple(EventKind)
            # Before it connects: libzmq keeps no events for a monitor that comes later.
            monitor = self._sockets.monitor(socket, watched, self._happened)
            undo.callback(monitor.close)
            socket.connect(self._where.endpoint)
            self.pump = self._sockets.pump(socket, self._received)
            self._monitor = monitor
            # From here on `drop` closes them.
            undo.pop_all()

    def _socket(self, kind: int) -> Any:
        return self._sockets.socket(self._context, kind, self._where, self._settings)

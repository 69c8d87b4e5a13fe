"""The runtime of groups in this process: one node per task, and its loop.

A daemon has a loop and an endpoint; it registers its node with `announce`. A program
that is itself a member of a group gets its loop and endpoint here: a thread with a
loop, and an endpoint at the address of its task. All groups of one task share a
runtime, which ends with the last group.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from zstrat.errors import ClosedError
from zstrat.transport import (
    Endpoint,
    LoopCall,
    Portal,
    Security,
    hello,
    new_incarnation,
)
from zstrat.transport.health import register, serve_from_settings

from ._node import GROUP_MESSAGES, GroupNode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from zstrat.config import Settings
    from zstrat.transport import Remote
    from zstrat.wire import Message, PlainTree

    from ._rendezvous import GroupSeat

T = TypeVar("T")

_BINDING: Final = 30.0
"""Seconds to bind a socket, including the lookup of a name."""


class GroupRuntime:
    """The node of a task and its loop, for use from other threads."""

    def __init__(self, node: GroupNode) -> None:
        self.node = node
        self.users = 0
        self.is_ending = False
        """Whether `end` was called; Ctrl-C may have interrupted it."""
        self._portal: Portal | None = None
        self._endpoint: Endpoint | None = None

    def run(self, work: Coroutine[Any, Any, T], timeout: float, what: str) -> T:
        """Runs the coroutine on the loop, and blocks until its end; see
        `Portal.run`."""
        return LoopCall(self.node.loop, work, what).run(timeout)

    async def run_async(self, work: Coroutine[Any, Any, T], what: str) -> T:
        """Runs the coroutine on the runtime's loop, and awaits its result on the
        caller's loop. Cancellation: cancels the coroutine."""
        return await LoopCall(self.node.loop, work, what).run_async()

    def call_soon(self, function: Callable[..., object], *args: object) -> bool:
        """Calls the function on the loop. Returns False if the loop has ended."""
        try:
            self.node.loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            return False
        return True

    def release(self) -> None:
        """Releases the runtime when a group closes. For the last group, blocks until
        the address is free for the next runtime of the task."""
        with _lock:
            if self.users == 1:
                self.end()
            # Last: if Ctrl-C interrupts the end, the next call continues it.
            self.users -= 1

    def end(self) -> None:
        """Ends the runtime of a program. The caller holds `_lock`. Idempotent."""
        if self._portal is None:
            return
        self.is_ending = True
        self._portal.close()
        # After the close: until the address is free, nobody may bind it again.
        for key in [key for key, each in _runtimes.items() if each is self]:
            del _runtimes[key]

    def readiness(self) -> str:
        """Returns "", as a member of groups is ready once it is bound."""
        return ""

    def statistics(self) -> dict[str, PlainTree]:
        """Returns the statistics of endpoint and groups, in the form that tasks
        report."""
        endpoint = {} if self._endpoint is None else self._endpoint.statistics()
        # Counts and names only, though its type does not say so.
        return {
            "endpoint": cast("PlainTree", endpoint),
            "groups": dict(self.node.statistics()),
        }

    def _handle(
        self, remote: Remote, message: Message
    ) -> Message | Awaitable[Message] | None:
        if type(message) in GROUP_MESSAGES:
            return self.node.handle(remote, message)
        raise ClosedError(f"{type(message).__name__}: this process serves only groups")

    async def _open(self, address: str, security: Security | None) -> None:
        self._endpoint = Endpoint(
            self.node.me,
            self._handle,
            settings=self.node.settings,
            on_lost=lambda remote, reason: self.node.lost(remote),
            security=security,
        )
        await self._endpoint.bind(address)

    async def _close(self) -> None:
        await self.node.close("its program ended")
        if self._endpoint is not None:
            await self._endpoint.close()

    @classmethod
    def settle(cls, seat: GroupSeat, bind: str, settings: Settings) -> GroupRuntime:
        """Creates the runtime of a program, bound at ``bind`` ("": not bound, for a
        group of one rank).

        Raises:
            OSError, ValueError, ZstratError: The address cannot be bound, or keys are
                missing; the error says why.
        """
        folder = settings.keys
        security = None
        if folder is not None:
            security = Security.load(folder, seat.job, seat.number)
        serve_from_settings(settings)
        portal = Portal(f"zstrat groups {seat.job}:{seat.number}")

        async def begin() -> GroupRuntime:
            me = hello(seat.job, seat.number, new_incarnation())
            runtime = cls(GroupNode(me, settings, security))
            portal.at_close(runtime._close)  # even if the caller is interrupted
            if bind:
                await runtime._open(bind, security)
            return runtime

        try:
            runtime = portal.run(begin(), _BINDING, f"binding {bind}")
        except BaseException:  # to the caller; Ctrl-C, too
            portal.close()
            raise
        runtime._portal = portal
        register(runtime, f"{seat.job}:{seat.number}", portal.loop)
        return runtime


def runtime_for(seat: GroupSeat, bind: str, settings: Settings) -> GroupRuntime:
    """Returns the runtime of a task of this process; creates it if there is none.

    Blocks while binding. Release it with `GroupRuntime.release`.
    """
    counted: GroupRuntime | None = None
    try:
        # Binding included: two groups of one task must not bind its address twice.
        with _lock:
            with _announcing:
                daemon = _daemons.get((seat.job, seat.number))
            runtime = _runtimes.get((seat.job, seat.number, bind))
            if runtime is not None and runtime.is_ending:
                # Its end was interrupted: it may still hold the address.
                runtime.end()
                runtime = None
            runtime = runtime or daemon
            if runtime is None:
                runtime = GroupRuntime.settle(seat, bind, settings)
                _runtimes[seat.job, seat.number, bind] = runtime
            runtime.users += 1
            # For Ctrl-C between here and the caller, who would never release it.
            counted = runtime
        return runtime
    except BaseException:  # to the caller that makes a group; of Ctrl-C
        if counted is not None:
            counted.release()
        raise


def announce(node: GroupNode) -> None:
    """Notes that a daemon of this process has a node, and passes messages to the
    node."""
    with _announcing:
        _daemons[node.me.job, node.me.index] = GroupRuntime(node)


def withdraw(node: GroupNode) -> None:
    """Notes that the daemon with this node ends."""
    with _announcing, suppress(KeyError):
        if _daemons[node.me.job, node.me.index].node is node:
            del _daemons[node.me.job, node.me.index]


def only_daemon() -> tuple[str, int] | None:
    """Returns job and index of the only daemon in this process, if there is one."""
    with _announcing:
        return next(iter(_daemons)) if len(_daemons) == 1 else None


_lock = threading.Lock()
"""Lock of the runtimes of programs; held while a runtime is bound or closed."""
_announcing = threading.Lock()
"""Lock of the nodes of daemons. A separate lock, so that a daemon's loop never waits
long."""
_runtimes: Final[dict[tuple[str, int, str], GroupRuntime]] = {}
_daemons: Final[dict[tuple[str, int], GroupRuntime]] = {}


def _forget() -> None:
    """Forgets all runtimes after a fork: their loops run in the parent."""
    global _lock, _announcing
    _lock, _announcing = threading.Lock(), threading.Lock()
    _runtimes.clear()
    _daemons.clear()


os.register_at_fork(after_in_child=_forget)

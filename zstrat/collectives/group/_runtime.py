"""Where the groups of this process live: one node per task, and the loop it runs on.

A daemon has a loop and an endpoint; it announces its node with `announce`. A program
that is a member itself gets both here: a thread with a loop, and an endpoint at the
address that the cluster gives its task. All groups of one task share them, and the
last one that closes ends them.
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
"""Seconds to bind a socket; a name may have to be looked up."""


class GroupRuntime:
    """A node, and how other threads reach its loop."""

    def __init__(self, node: GroupNode) -> None:
        self.node = node
        self.users = 0
        self.is_ending = False
        """Its end has begun; Ctrl-C may have interrupted that."""
        self._portal: Portal | None = None
        self._endpoint: Endpoint | None = None

    def run(self, work: Coroutine[Any, Any, T], timeout: float, what: str) -> T:
        """Blocks until the work has ended on the loop; see `Portal.run`."""
        return LoopCall(self.node.loop, work, what).run(timeout)

    async def run_async(self, work: Coroutine[Any, Any, T], what: str) -> T:
        """As `run`, awaitable from any loop. Cancellation: cancels the work."""
        return await LoopCall(self.node.loop, work, what).run_async()

    def call_soon(self, function: Callable[..., object], *args: object) -> bool:
        """Runs the function on the loop; False: the loop has ended."""
        try:
            self.node.loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            return False
        return True

    def release(self) -> None:
        """A group that used it is closed. Blocks while the last one is, so that the
        next runtime of the task finds its address free."""
        with _lock:
            if self.users == 1:
                self.end()
            # Last: if Ctrl-C keeps it from ending, the next call goes on with that.
            self.users -= 1

    def end(self) -> None:
        """Ends it, if it is of a program; `_lock` is held. Idempotent."""
        if self._portal is None:
            return
        self.is_ending = True
        self._portal.close()
        for key in [key for key, each in _runtimes.items() if each is self]:
            del _runtimes[key]

    def readiness(self) -> str:
        """A member of groups is there for the others as soon as it is bound."""
        return ""

    def statistics(self) -> dict[str, PlainTree]:
        """What `Task.statistics` has of these."""
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
        raise ClosedError(
            f"{type(message).__name__}: this process is a member of groups and serves "
            "nothing else"
        )

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
        """A runtime of this process's own, bound at ``bind`` ("": nowhere, for a group
        of one).

        Raises:
            OSError, ValueError, ZstratError: The address cannot be bound, or the keys
                are missing; says why.
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
            portal.at_close(runtime._close)  # whatever becomes of who waits for this
            if bind:
                await runtime._open(bind, security)
            return runtime

        try:
            runtime = portal.run(begin(), _BINDING, f"binding {bind}")
        except BaseException:  # to whoever makes a group; Ctrl-C, too
            portal.close()
            raise
        runtime._portal = portal
        register(runtime, f"{seat.job}:{seat.number}", portal.loop)
        return runtime


def runtime_for(seat: GroupSeat, bind: str, settings: Settings) -> GroupRuntime:
    """The runtime of a task of this process, made if there is none.

    Blocks while it binds. Give it back with `GroupRuntime.release`.
    """
    counted: GroupRuntime | None = None
    try:
        with _lock:
            with _announcing:
                daemon = _daemons.get((seat.job, seat.number))
            runtime = _runtimes.get((seat.job, seat.number, bind))
            if runtime is not None and runtime.is_ending:
                runtime.end()
                runtime = None
            runtime = runtime or daemon
            if runtime is None:
                runtime = GroupRuntime.settle(seat, bind, settings)
                _runtimes[seat.job, seat.number, bind] = runtime
            runtime.users += 1
            counted = runtime
        return runtime
    except BaseException:  # to whoever makes a group; of Ctrl-C
        if counted is not None:
            counted.release()
        raise


def announce(node: GroupNode) -> None:
    """A daemon of this process has a node, and will hand it its messages."""
    with _announcing:
        _daemons[node.me.job, node.me.index] = GroupRuntime(node)


def withdraw(node: GroupNode) -> None:
    """The daemon ends."""
    with _announcing, suppress(KeyError):
        if _daemons[node.me.job, node.me.index].node is node:
            del _daemons[node.me.job, node.me.index]


def only_daemon() -> tuple[str, int] | None:
    """Job and index of the daemon that this process is, if it is one."""
    with _announcing:
        return next(iter(_daemons)) if len(_daemons) == 1 else None


_lock = threading.Lock()
"""Of the runtimes of programs; held while one is bound or closed."""
_announcing = threading.Lock()
"""Of the daemons, whose loops it does not hold up."""
_runtimes: Final[dict[tuple[str, int, str], GroupRuntime]] = {}
_daemons: Final[dict[tuple[str, int], GroupRuntime]] = {}


def _forget() -> None:
    """After a fork: the loops of all of them are the parent's."""
    global _lock, _announcing
    _lock, _announcing = threading.Lock(), threading.Lock()
    _runtimes.clear()
    _daemons.clear()


os.register_at_fork(after_in_child=_forget)

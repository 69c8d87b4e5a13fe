"""The daemon of one task beside a process of an engine that has actors: Ray, Dask.

The actor is on the machine where the task is to be; in it a `TaskHost` starts the
daemon as a process of its own, with its own jax, and talks to it as ssh does. So the
daemon is a daemon as anywhere, whatever the engine's process has loaded, and ends with
that process, however it ends.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from concurrent.futures import Future
from typing import TYPE_CHECKING, final

from zstrat.cluster import host_and_port

from ._piped import Piped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ._engine import End, FleetTask, TaskLaunch


@final
class _Beside(Piped):
    """Runs the command as it is, here."""

    name = "a process beside this one"

    def __init__(self, host: str) -> None:
        self._host = host

    def command(self, launch: TaskLaunch, daemon: Sequence[str]) -> list[str]:
        return list(daemon)

    def host(self, task: FleetTask) -> str:
        return self._host

    def python(self, task: FleetTask) -> str:
        return sys.executable


class TaskHost:
    """Made in the process of the engine; its coroutines are called from the program.

    What the daemon logs goes where the errors of this process go: the engine has a
    place for these.

    Args:
        host: The address of this machine, as the other tasks reach it.
    """

    def __init__(self, launch: TaskLaunch, host: str) -> None:
        self._bound: Future[str] = Future()
        self._over: Future[End] = Future()
        port = launch.bind.rpartition(":")[2]
        if launch.bind != host_and_port(host, port):
            port = "0"  # of another machine, on which that one may be taken
        bind = launch.bind and host_and_port(host, port)
        here = dataclasses.replace(launch, log=None, bind=bind)
        self._running = _Beside(host).start(here, self)

    def bound(self, address: str) -> None:
        self._bound.set_result(address)

    def ended(self, end: End) -> None:
        if not self._bound.done():
            self._bound.set_result("")
        self._over.set_result(end)

    async def address(self) -> str:
        """Where the task serves, once it does; "" if it has ended before."""
        return await asyncio.wrap_future(self._bound)

    async def over(self) -> End:
        """How it ended, once it has."""
        return await asyncio.wrap_future(self._over)

    async def drain(self) -> None:
        """Has it end in an orderly way."""
        self._running.drain()

    async def kill(self) -> None:
        """Ends it now."""
        self._running.kill()

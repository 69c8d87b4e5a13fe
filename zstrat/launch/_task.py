"""One task of this process: an endpoint and the service that answers its requests.

Law: the differences between a ps and a worker are decided here, and in no module that
uses this one. A worker imports jax when its service is made, and a ps when it receives
its first optimizer; importing this module does not import jax.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

from zstrat.collectives import GROUP_MESSAGES, GroupNode, announce, withdraw
from zstrat.config import GRACE, environment
from zstrat.ps import RESTART, PsProcess, PsService
from zstrat.telemetry import resident_bytes
from zstrat.transport import Endpoint, Link, Security, hello, new_incarnation
from zstrat.transport.health import register, serve_from_settings, unregister
from zstrat.wire import Inspect, Job, Statistics

from ._own_process import kept_for_good

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from zstrat.config import Settings
    from zstrat.transport import Absorber, Handler, Remote
    from zstrat.wire import Hello, Message, PlainTree
    from zstrat.worker import Listen, WorkerService


log = logging.getLogger("zstrat.task")

SERVED = (Job.PS, Job.WORKER)
"""The jobs that daemons serve; chief and evaluator are programs of the user."""


@dataclass(frozen=True, slots=True)
class TaskAddress:
    """Job and index of a task, and the address that it binds."""

    job: str
    index: int
    bind: str

    @property
    def task(self) -> str:
        return f"{self.job}:{self.index}"


class Task:
    """A ps or worker that this process serves; see `serve`.

    Args:
        is_alone: Whether this process does nothing else.
        listen: Sets the listener that receives the output of this process
            (`ProcessOutput`); None: the output is not forwarded.
    """

    def __init__(
        self,
        place: TaskAddress,
        settings: Settings,
        incarnation: int | None = None,
        *,
        is_alone: bool = False,
        listen: Listen | None = None,
    ) -> None:
        if place.job not in SERVED:
            raise ValueError(
                f"job {place.job!r}: a server runs tasks of {' or '.join(SERVED)}; run "
                "chief and evaluator as programs of your own"
            )
        self.place = place
        self.address = ""
        self._settings, self._is_alone, self._listen = settings, is_alone, listen
        self._security = load_keys(settings.keys, place.job, place.index)
        self._began = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[str] = self._loop.create_future()
        self._ps: PsProcess | None = None
        """The parameter server that this task serves; None for a worker."""
        self.worker: WorkerService | None = None
        """The worker that this task serves; None for a ps."""
        self._returns = 0.0
        """Seconds within which another process takes over the state of the ps; 0: none
        does."""
        me = hello(place.job, place.index, incarnation or new_incarnation())
        # The service comes before the endpoint: a ps that takes over a state has the
        # incarnation of the process before, with which the endpoint must greet.
        if place.job == Job.WORKER:
            self.worker = self._make_worker(me)
        else:
            self._ps = self._make_ps(me)
        self._make_endpoint(me)

    def _make_endpoint(self, me: Hello) -> None:
        """Makes the endpoint with the handshake ``me``. A ps that takes over the state
        of a previous process uses the handshake of that process instead."""
        absorb: Absorber | None = None
        on_waited: Callable[[float, float], None] | None = None
        if self._ps is not None:
            me, service = self._ps.me, self._ps.service
            absorb, on_waited = service.absorb, service.waited
            self._service: PsService | WorkerService = service
            self._answer: Handler = self._ps.handle
        elif self.worker is not None:
            self._service, self._answer = self.worker, self.worker.handle
        self.hello: Hello = me
        self._node = GroupNode(me, self._settings, self._security)
        self._endpoint = Endpoint(
            me,
            self._handle,
            settings=self._settings,
            absorb=absorb,
            on_lost=self._lost,
            security=self._security,
            on_waited=on_waited,
        )

    async def start(self) -> None:
        """Binds the address and starts to answer, also over HTTP if configured."""
        # First: an HTTP port that is taken fails the start before copies are hosted.
        serve_from_settings(self._settings)
        if self._ps is not None and not await self._ps.inherit():
            # It begins empty after all, so it greets with another incarnation.
            self._make_endpoint(self._ps.me)
        self.address = await self._endpoint.bind(self.place.bind)
        if self._ps is not None:
            # Nothing may be awaited since `bind`: a message that is handled before this
            # would find the variables of the predecessor missing.
            self._ps.take_over()
        register(self, self.place.task, self._loop)
        if self.place.job == Job.WORKER:
            announce(self._node)

    def end(self, reason: str) -> None:
        """Requests the end of the task; only the first reason counts."""
        if not self._end.done():
            self._end.set_result(reason)

    def end_soon(self, reason: str) -> None:
        """Calls `end` from any thread; does nothing if the task has ended."""
        # Closed: the task ended meanwhile.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.end, reason)

    async def wait_end(self) -> str:
        """Waits for `end`, or for the coordinator that owns the task to shut it down;
        returns the reason.

        Raises:
            Exception: A defect of zstrat ended the service.

        Cancellation: loses nothing; the call may be repeated.
        """
        # A waiter that is cancelled must not cancel the end for all others.
        return await asyncio.shield(self._end)

    async def stop(self) -> bool:
        """Finishes the accepted requests within ``timeouts.drain``, then closes.

        Returns whether all requests were finished in time.
        """
        drain = longest = self._settings.timeouts.drain
        # A ps writes its state after the drain, for which it has a timeout of its own.
        if self._ps is not None and self._settings.state is not None:
            longest += self._settings.timeouts.handover
        drained = False
        try:
            # The service keeps to its deadline; the grace is for reporting that.
            async with asyncio.timeout(longest + GRACE):
                drained = await self._service.drain()
                if self._ps is not None:
                    endpoint = self._endpoint
                    self._returns = await self._ps.leave(endpoint, drained=drained)
                if self.worker is not None:
                    await self.worker.close()
        except TimeoutError:
            drained = False
        finally:
            unregister(self)
            withdraw(self._node)
            # Groups before the endpoint: the other ranks are notified that this one
            # leaves; otherwise they would merely lose it.
            await self._node.close("its task ended")
            if self._returns:
                await self._endpoint.close(RESTART, self._returns)
            else:
                await self._endpoint.close()
        if not drained:
            log.warning("accepted requests were not finished within %g s", drain)
        return drained

    def readiness(self) -> str:
        """Returns why no coordinator can open a session on the task; "" if one can."""
        if not self._end.done():
            return ""
        failed = self._end.cancelled() or self._end.exception() is not None
        return "crashed" if failed else f"ending: {self._end.result()}"

    def statistics(self) -> dict[str, PlainTree]:
        """Returns the answer to the request `Inspect`: plain data about the process,
        its links, and its service."""
        task: dict[str, PlainTree] = {
            "job": self.place.job,
            "index": self.place.index,
            "address": self.address,
            "incarnation": self.hello.incarnation,
            "host": self.hello.host,
            "pid": self.hello.pid,
            "versions": dict(self.hello.versions),
            "uptime": time.monotonic() - self._began,
            "time": time.time(),
        }
        hosted = [] if self._ps is None else self._ps.statistics_of_copies()
        return {
            "task": task,
            # Has only counts and names, but a wider type.
            "endpoint": cast("PlainTree", self._endpoint.statistics()),
            **self._service.telemetry(),
            "service": self._service.statistics(),
            "groups": dict(self._node.statistics()),
            "copies": hosted,
        }

    def summary(self) -> str:
        """Describes the task in one line, for people."""
        megabytes = resident_bytes() / 2**20
        return f"serving at {self.address}, {megabytes:.0f} MiB in memory"

    def _handle(
        self, remote: Remote, message: Message
    ) -> Message | Awaitable[Message] | None:
        # Answered even if no session is open, and for observers, who own nothing.
        if isinstance(message, Inspect):
            return Statistics(self.statistics())
        if type(message) in GROUP_MESSAGES:
            return self._node.handle(remote, message)
        return self._answer(remote, message)

    def _lost(self, remote: Remote, reason: str) -> None:
        self._service.lost(remote, reason)
        self._node.lost(remote)

    def _make_ps(self, me: Hello) -> PsProcess:
        return PsProcess(
            me,
            self.place.bind,
            load_code=self._load_code,
            settings=self._settings,
            security=self._security,
            on_exit=self._shut_down,
            make_service=partial(PsService, tells=True),
        )

    def _make_worker(self, me: Hello) -> WorkerService:
        # Imports jax, which a ps does without.
        from zstrat.worker import WorkerService

        return WorkerService(
            self._settings,
            me,
            partial(Link, me=me, settings=self._settings, security=self._security),
            on_exit=self._shut_down,
            on_crash=self._crashed,
            is_alone=self._is_alone,
            listen=self._listen,
            tells=True,
        )

    def _load_code(self, code: bytes) -> object:
        """Loads the code that a coordinator sent; imports jax."""
        # Collections are frozen only in a process of our own, and only for the import
        # itself: later garbage of this call is freed as usual.
        is_first = self._is_alone and "jax" not in sys.modules
        with kept_for_good() if is_first else contextlib.nullcontext():
            from zstrat.program import load
        return load(code)

    def _crashed(self, error: BaseException) -> None:
        if not self._end.done():
            self._end.set_exception(error)

    def _shut_down(self) -> None:
        self.end("the coordinator shut the cluster down")


def load_keys(folder: Path | None, job: str, index: int) -> Security | None:
    """Loads the keys of a task; None without a folder.

    In a folder of systemd credentials the file modes are not checked: systemd controls
    access to them by access control lists.

    Raises:
        ValueError, PermissionDeniedError: As `Security.load`.
    """
    if folder is None:
        return None
    guarded = environment().get("CREDENTIALS_DIRECTORY", "") == str(folder)
    return Security.load(folder, job, index, guarded=guarded)


@contextlib.asynccontextmanager
async def serve(place: TaskAddress, settings: Settings) -> AsyncIterator[Task]:
    """Serves one task: binds its address on entry, drains and closes it on exit.

    Raises:
        ValueError: The job is not "ps" or "worker".
        ZstratError, OSError: The address cannot be bound, or the keys are missing.
    """
    task = Task(place, settings)
    try:
        await task.start()
        yield task
    finally:
        await task.stop()

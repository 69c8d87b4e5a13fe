"""One task of this process: an endpoint, and the service that answers behind it.

Law: what differs between a ps and a worker is decided here and nowhere above. jax is
loaded by a worker when its service is made, and by a ps when it is given its first
optimizer; importing this module loads neither.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, cast

from zstrat.collectives import GROUP_MESSAGES, GroupNode, announce, withdraw
from zstrat.config import GRACE, environment
from zstrat.ps import (
    Handover,
    HostedStores,
    Inherited,
    PsService,
    backup_links,
)
from zstrat.telemetry import resident_bytes
from zstrat.transport import Endpoint, Link, Security, hello, new_incarnation
from zstrat.transport.health import register, serve_as_told, unregister
from zstrat.wire import AskCopies, DropStore, HostStore, Inspect, Job, Statistics

from ._imports import kept_for_good

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from zstrat.config import Settings
    from zstrat.transport import Absorber, Remote
    from zstrat.wire import Hello, Message, PlainTree
    from zstrat.worker import Listen, WorkerService


log = logging.getLogger("zstrat.task")

SERVED = (Job.PS, Job.WORKER)
"""The jobs that are served by a daemon; the others are programs of the user."""

_RESTART: Final = "it is started again, and goes on with all it holds"


class Service(Protocol):
    """What stands behind an endpoint."""

    def handle(
        self, remote: Remote, message: Message
    ) -> Message | Awaitable[Message] | None: ...
    def lost(self, remote: Remote, reason: str) -> None: ...
    async def drain(self) -> bool: ...
    def statistics(self) -> dict[str, PlainTree]: ...
    def telemetry(self) -> dict[str, PlainTree]: ...


Served = tuple[Service, Callable[[], Awaitable[None]], "Absorber | None"]
"""A service, what closes it after the drain, and who works on bodies on their way."""


@dataclass(frozen=True, slots=True)
class TaskPlace:
    """Which task this is, and the address that it binds."""

    job: str
    index: int
    bind: str

    @property
    def task(self) -> str:
        return f"{self.job}:{self.index}"


class Task:
    """A ps or worker that is being served; made by `serve`. ``is_alone``: this process
    does nothing else. ``listen``: says who hears what it prints (`ProcessOutput`)."""

    def __init__(
        self,
        place: TaskPlace,
        settings: Settings,
        incarnation: int | None = None,
        *,
        is_alone: bool = False,
        listen: Listen | None = None,
    ) -> None:
        if place.job not in SERVED:
            raise ValueError(
                f"job {place.job!r}: a server runs a task of {' or '.join(SERVED)}; "
                "chief and evaluator are programs of your own"
            )
        self.place = place
        self.address = ""
        self._settings, self._is_alone, self._listen = settings, is_alone, listen
        self._security = load_keys(settings.keys, place.job, place.index)
        self._began = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[str] = self._loop.create_future()
        self._hosted: HostedStores | None = None
        """Of a ps."""
        self._ps: PsService | None = None
        self.worker: WorkerService | None = None
        """If it is one."""
        self._returns = 0.0
        """Seconds in which another process goes on with what was here."""
        self._handover, self._inherited = self._left()
        if self._inherited is not None:
            incarnation = self._inherited.incarnation
        self._make(incarnation or new_incarnation())

    def _make(self, incarnation: int) -> None:
        place, settings = self.place, self._settings
        self.hello: Hello = hello(place.job, place.index, incarnation)
        make = self._make_worker if place.job == Job.WORKER else self._make_ps
        self._service, self._close_service, absorb = make()
        self._node = GroupNode(self.hello, settings, self._security)
        self._endpoint = Endpoint(
            self.hello,
            self._handle,
            settings=settings,
            absorb=absorb,
            on_lost=self._lost,
            security=self._security,
            on_waited=None if self._ps is None else self._ps.waited,
        )

    async def start(self) -> None:
        """Binds; from now on the task answers, over HTTP too if it is told to."""
        serve_as_told(self._settings)
        await self._inherit_copies()
        self.address = await self._endpoint.bind(self.place.bind)
        self._take_over()  # nobody was heard yet: nothing was awaited since
        register(self, self.place.task, self._loop)
        if self.place.job == Job.WORKER:
            announce(self._node)

    def end(self, reason: str) -> None:
        """Asks whoever serves the task to stop; the first reason stays."""
        if not self._end.done():
            self._end.set_result(reason)

    def end_soon(self, reason: str) -> None:
        """`end`, from any thread; no error if the task is over already."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing to end
            self._loop.call_soon_threadsafe(self.end, reason)

    async def wait_end(self) -> str:
        """Until `end` was called, or a coordinator that owns the task shut it down.

        Raises:
            Exception: A defect of zstrat ended the service.

        Cancellation: loses nothing; it may be awaited again.
        """
        return await asyncio.shield(self._end)

    async def stop(self) -> bool:
        """Finishes what was accepted, within ``timeouts.drain``; then closes.

        Returns whether everything was finished in time.
        """
        patience = longest = self._settings.timeouts.drain
        if self._handover is not None:
            longest += self._settings.timeouts.handover
        drained = False
        try:
            async with asyncio.timeout(longest + GRACE):
                drained = await self._service.drain()
                if self._ps is not None and self._hosted is not None:
                    await self._leave(self._ps, self._hosted, drained)
                await self._close_service()
        except TimeoutError:
            drained = False
        finally:
            unregister(self)
            withdraw(self._node)
            await self._node.close("its task ended")
            if self._returns:
                await self._endpoint.close(_RESTART, self._returns)
            else:
                await self._endpoint.close()
        if not drained:
            log.warning("not everything was done in %gs", patience)
        return drained

    def readiness(self) -> str:
        """Why no coordinator can open a session; "" if one can, once it is its turn."""
        if not self._end.done():
            return ""
        failed = self._end.cancelled() or self._end.exception() is not None
        return "it crashed" if failed else f"it ends: {self._end.result()}"

    def statistics(self) -> dict[str, PlainTree]:
        """What `Inspect` is answered with: the process, its links, its service."""
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
            "memory_bytes": resident_bytes(),
            "cpu_seconds": time.process_time(),
        }
        hosted = [] if self._hosted is None else self._hosted.statistics()
        return {
            "task": task,
            # Counts and names only, though its type does not say so.
            "endpoint": cast("PlainTree", self._endpoint.statistics()),
            "service": self._service.statistics(),
            **self._service.telemetry(),
            "groups": dict(self._node.statistics()),
            "copies": hosted,
        }

    def summary(self) -> str:
        """What the task says of itself in one line, for people."""
        megabytes = resident_bytes() / 2**20
        return f"serving at {self.address}, {megabytes:.0f} MiB in memory"

    def _handle(
        self, remote: Remote, message: Message
    ) -> Message | Awaitable[Message] | None:
        if isinstance(message, Inspect):
            return Statistics(self.statistics())
        if type(message) in GROUP_MESSAGES:
            return self._node.handle(remote, message)
        hosting = AskCopies | HostStore | DropStore
        if isinstance(message, hosting) and self._hosted is not None:
            return self._hosted.handle(remote, message)
        return self._service.handle(remote, message)

    def _lost(self, remote: Remote, reason: str) -> None:
        self._service.lost(remote, reason)
        self._node.lost(remote)

    def _left(self) -> tuple[Handover | None, Inherited | None]:
        """Where a parameter server leaves what it has, and what was left there. It is
        loaded here and now: nobody is served yet who might be held up."""
        folder, index = self._settings.state, self.place.index
        if self.place.job != Job.PS or folder is None:
            return None, None
        handover = Handover(folder, index, f"/job:ps/task:{index}")
        largest = self._settings.limits.body
        return handover, handover.take(self._load_code, largest=largest)

    async def _inherit_copies(self) -> None:
        """Where they were, or nothing of what was left is taken: whoever knows this
        process by its incarnation would look for them."""
        left, hosted = self._inherited, self._hosted
        if left is None or hosted is None or self._handover is None:
            return
        try:
            await hosted.inherit(left.owner, left.copies)
        except OSError as error:
            log.error(
                "what the process before has left is not used, and this one begins "
                "empty: the address of a copy that it kept is taken: %s",
                error,
            )
            self._handover.took()
            self._inherited = None
            self._make(new_incarnation())

    def _take_over(self) -> None:
        if self._inherited is None or self._handover is None or self._ps is None:
            return
        self._handover.took()
        self._ps.take_over(self._inherited.owner)
        if self._hosted is not None:
            self._hosted.take_over()

    async def _leave(self, ps: PsService, hosted: HostedStores, drained: bool) -> None:
        """What a ps holds, for the next process, if that is wished and can be done."""
        owner, patience = ps.owner, self._settings.timeouts.handover
        if self._handover is None or owner is None:
            await hosted.close()
            return
        copies = await hosted.leave(_RESTART, patience)
        if not drained or copies is None:
            log.error(
                "what this process holds is lost with it: something that it had "
                "accepted did not end within ZSTRAT_DRAIN"
            )
            return
        left = Inherited(
            self.hello.incarnation,
            owner,
            ps.role.state_for_successor(self.place.index),
            copies,
        )
        if ps.role.is_replicated:  # others need not wait until that is written
            await self._endpoint.close(_RESTART, patience)
        if await self._handover.leave(left, patience):
            self._returns = patience

    def _make_ps(self) -> Served:
        left = self._inherited
        self._ps = service = PsService(
            load_code=self._load_code,
            settings=self._settings,
            task=f"/job:ps/task:{self.place.index}",
            incarnation=self.hello.incarnation,
            tells=True,
            on_exit=self._shut_down,
            connect=backup_links(self.hello, self._settings, self._security),
            on_cleared=lambda: hosted.look(),
            on_new_owner=lambda owner: hosted.follow_new_owner(owner),
            keeps_state=self._handover is not None,
            inherited=None if left is None else left.own,
        )
        hosted = self._hosted = HostedStores(
            service,
            self.hello,
            self.place.bind,
            load_code=self._load_code,
            settings=self._settings,
            security=self._security,
            make_service=partial(PsService, tells=True),
            keeps_state=self._handover is not None,
        )
        return service, _nothing, service.absorb

    def _make_worker(self) -> Served:
        from zstrat.worker import WorkerService

        service = WorkerService(
            self._settings,
            self.hello,
            partial(
                Link, me=self.hello, settings=self._settings, security=self._security
            ),
            on_exit=self._shut_down,
            on_crash=self._crashed,
            is_alone=self._is_alone,
            listen=self._listen,
            tells=True,
        )
        self.worker = service
        return service, service.close, None

    def _load_code(self, code: bytes) -> object:
        """Loads what a coordinator shipped; brings jax with it."""
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
    """The keys of a task, None without a folder.

    systemd lets a service into its credentials by an access control list, so their
    modes say nothing; it is systemd that keeps everybody else out.

    Raises:
        ValueError, PermissionDeniedError: As `Security.load`.
    """
    if folder is None:
        return None
    guarded = environment().get("CREDENTIALS_DIRECTORY", "") == str(folder)
    return Security.load(folder, job, index, guarded=guarded)


@contextlib.asynccontextmanager
async def serve(place: TaskPlace, settings: Settings) -> AsyncIterator[Task]:
    """Serves one task: bound on entry, drained and closed on exit.

    Raises:
        ValueError: The job is not one that is served.
        ZstratError, OSError: The address cannot be bound, or the keys are missing.
    """
    task = Task(place, settings)
    try:
        await task.start()
        yield task
    finally:
        await task.stop()


async def _nothing() -> None:
    pass

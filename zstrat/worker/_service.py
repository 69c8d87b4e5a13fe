"""A worker as a handler of messages: everything but the sockets it listens on.

Runs on the loop. One coordinator at a time owns the worker and may run code on it;
whoever else asks is refused, but for statistics. When the owner is lost its closures,
datasets and code are dropped and the worker is ready for the next one.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, assert_never, final

import jax

from zstrat import program
from zstrat.data import InputContext
from zstrat.errors import (
    PermissionDeniedError,
    ProtocolError,
    StaleSessionError,
    WorkerLostError,
)
from zstrat.wire import (
    BuildResource,
    CancelSteps,
    CloseSession,
    Dispatch,
    Done,
    DropArguments,
    DropResources,
    DropResults,
    Failure,
    Fetch,
    Fetched,
    Hello,
    Inspect,
    Job,
    Message,
    OpenSession,
    Ownership,
    PlainTree,
    PutArguments,
    PutCode,
    ResourceBuilt,
    SessionOpened,
    Statistics,
)

from . import _ending
from ._direct import Asking, Direct
from ._executor import Executor
from ._resources import Load, Resources
from ._tenancy import Tenancy
from ._workshop import Prepare, RunEager, Workshop

if TYPE_CHECKING:
    from zstrat.config import Settings
    from zstrat.transport import Link, Remote

MakeLink = Callable[[str, str], "Link"]
"""A link that is not started yet, from the address of a task and its name."""

_OWNED = (
    PutCode
    | PutArguments
    | DropArguments
    | Dispatch
    | CancelSteps
    | Fetch
    | DropResults
    | BuildResource
    | DropResources
)
"""What belongs to the open session."""


@final
class WorkerService:
    """Answers the messages of one worker. Made and used on the loop.

    Args:
        me: Whom errors and statistics name.
        make_link: Makes the way to a parameter server.
        on_exit: Called once, when the coordinator ends the process.
        on_crash: Called if the executor thread dies of a defect of zstrat's own.
    """

    def __init__(
        self,
        settings: Settings,
        me: Hello,
        make_link: MakeLink,
        *,
        on_exit: Callable[[], None] | None = None,
        on_crash: Callable[[BaseException], None] | None = None,
        load: Load = program.load,
        prepare: Prepare = program.prepare,
        run_eager: RunEager = program.run_eager,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._me, self._make_link = settings, me, make_link
        self._task = f"/job:{me.job}/task:{me.index}"
        self._on_exit, self._on_crash = on_exit, on_crash
        self._load, self._prepare, self._run_eager = load, prepare, run_eager
        self._clock, self._started_at = clock, clock()
        self._ownership = Ownership(self._task)
        self._tenancy: Tenancy | None = None
        self._leaving: set[asyncio.Task[None]] = set()
        self._counts: Counter[str] = Counter()
        self._platform, self._devices = "", 0
        self._refusal: WorkerLostError | None = None
        self._executor = Executor(self._task, on_crash=self._crashed)

    # The Endpoint's handler

    def handle(
        self, remote: Remote, message: Message
    ) -> Message | Awaitable[Message] | None:
        """Answers a request, or takes a notice.

        Raises:
            PermissionDeniedError: The peer is no coordinator.
            StaleSessionError: Its session is not the one that is open here.
            BusyError: Another coordinator, which is alive, has this worker.
        """
        if isinstance(message, Inspect):
            return Statistics(self.statistics())
        if not isinstance(message, _OWNED | OpenSession | CloseSession):
            raise ProtocolError(
                f"{self._task} is a worker and does not answer {type(message).__name__}"
            )
        if remote.role is not Job.CHIEF:
            raise PermissionDeniedError(
                f"{self._task} takes {type(message).__name__} from a chief, and "
                f"{remote.name} is {remote.role}"
            )
        match message:
            case OpenSession():
                return self._open(remote, message)
            case CloseSession():
                return self._close(message)
            case _:
                return self._serve(self._tenancy_of(message.session), message)

    def lost(self, remote: Remote, reason: str) -> None:
        """A connection ended; if it was the owner's, all that is its is dropped."""
        if self._ownership.lost(remote):
            session = self._ownership.session
            assert session is not None
            # What it had is gone, so it has to open the session again to go on.
            self._ownership.close(session)
            self._drop(f"its coordinator was lost: {reason}")

    def _serve(
        self, tenancy: Tenancy, message: _OWNED
    ) -> Message | Awaitable[Message] | None:
        shop, executor = tenancy.shop, self._executor
        resources = shop.resources
        match message:
            case Dispatch():
                tenancy.dispatch(message)
            case CancelSteps():
                tenancy.cancel()
            case PutArguments(arguments=number, code=code, arrays=arrays):
                executor.tell(partial(resources.put_arguments, number, code, arrays))
            case DropArguments(arguments=numbers):
                executor.tell(partial(resources.drop_arguments, numbers))
            case DropResources(resources=numbers):
                executor.tell(partial(resources.drop, numbers))
            case DropResults(steps=steps):
                tenancy.results.drop(steps)
            case Fetch(step=step):
                return Fetched(tuple(tenancy.results.of(step)))
            case PutCode(digest=digest, code=code):
                return executor.submit(partial(_put_code, resources, digest, code))
            case BuildResource():
                return executor.submit(partial(_build, shop, message))
            case _:
                assert_never(message)
        return Done()

    # Sessions

    def _tenancy_of(self, session: int) -> Tenancy:
        self._ownership.check(session)
        if self._tenancy is None:
            raise StaleSessionError(
                f"{self._task} is not ready for session {session:#x}: wait until it "
                "has answered OpenSession"
            )
        return self._tenancy

    async def _open(self, remote: Remote, message: OpenSession) -> SessionOpened:
        if self._refusal is not None:
            raise self._refusal
        new = self._ownership.open(message.session, remote, remote.hello)
        if new or self._tenancy is None:
            self._drop("another coordinator took its place")
            self._tenancy = self._move_in(remote, message)
        else:
            self._tenancy.return_to(remote)
        tenancy = self._tenancy
        deadline = asyncio.get_running_loop().time() + self._settings.timeouts.connect
        try:
            self._platform, self._devices = await self._executor.submit(_devices)
            await tenancy.open(deadline)
        except BaseException:
            if self._tenancy is tenancy:
                self._ownership.close(message.session)
                self._drop("its session could not be opened")
            raise
        return SessionOpened(self._platform, self._devices)

    def _move_in(self, remote: Remote, message: OpenSession) -> Tenancy:
        links = [
            self._make_link(address, f"/job:ps/task:{number}")
            for number, address in enumerate(message.ps)
        ]
        tenancy = Tenancy(message.session, remote, links, counts=self._counts)
        asking = Asking(
            asyncio.get_running_loop(),
            tenancy.client,
            2 * self._settings.timeouts.request,
        )
        index, count = message.index, message.worker_count
        shop = Workshop(
            Resources(self._task, self._load, partial(_input_context, index, count)),
            index=index,
            count=count,
            prepare=self._prepare,
            run_eager=self._run_eager,
            home=partial(Direct, asking),
            carry=tenancy.carry,
            inline=self._settings.limits.inline,
        )
        tenancy.occupy(self._executor, shop)
        return tenancy

    def _close(self, message: CloseSession) -> Done:
        if self._ownership.close(message.session):
            self._drop("its coordinator closed the session")
        if message.exit and self._on_exit is not None:
            on_exit, self._on_exit = self._on_exit, None
            on_exit()
        return Done()

    def _drop(self, reason: str) -> None:
        tenancy, self._tenancy = self._tenancy, None
        if tenancy is None:
            return
        tenancy.leave()
        task = asyncio.get_running_loop().create_task(
            tenancy.close_links(reason), name=f"close session {tenancy.session:#x}"
        )
        self._leaving.add(task)  # awaited by close()
        task.add_done_callback(self._leaving.discard)

    # The end

    async def drain(self) -> bool:
        """Stops taking closures and finishes those that run.

        What has not begun, and whatever is dispatched from now on, is sent back as
        cancelled with a retryable `WorkerLostError`, so that another worker runs it.

        Returns:
            False if a closure was still running after ``timeouts.drain``.

        Cancellation: closures that come are still sent back.
        """
        self._refusal = WorkerLostError(self._task, "it is shutting down")
        if self._tenancy is None:
            return True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.timeouts.drain
        return await self._tenancy.drain(self._refusal, deadline)

    async def close(self) -> None:
        """Ends the session and the executor thread; a closure that does not return
        within ``timeouts.drain`` is left behind on its daemon thread.

        Cancellation: the thread ends with the process.
        """
        self._drop("the worker was shut down")
        await asyncio.gather(*self._leaving)
        await self._executor.close(self._settings.timeouts.drain)

    def _crashed(self, error: BaseException) -> None:
        self._drop("its executor failed")
        if self._on_crash is not None:
            self._on_crash(error)

    # What it says about itself

    def statistics(self) -> dict[str, PlainTree]:
        """Plain numbers, cheap enough to ask for at any time. Bytes and seconds."""
        tenancy, owner = self._tenancy, self._ownership.owner
        values: dict[str, PlainTree] = {
            "job": self._me.job,
            "task": self._task,
            "incarnation": self._me.incarnation,
            "uptime": self._clock() - self._started_at,
            "session": 0 if owner is None else owner.session,
            "owner": "" if owner is None else str(owner),
            "draining": self._refusal is not None,
            "queued": 0 if tenancy is None else tenancy.queued,
            "kept_results": 0 if tenancy is None else len(tenancy.results),
            "kept_bytes": 0 if tenancy is None else tenancy.results.nbytes,
            "rss": _resident_bytes(),
            "platform": self._platform,
            "devices": self._devices,
        }
        for name in _COUNTED:
            values[name] = self._counts[name]
        values.update({} if tenancy is None else tenancy.shop.statistics())
        return values


_COUNTED: Final = ("done", "failed", "cancelled", "duplicates", "pushes", "pulls")


# On the executor thread


def _put_code(resources: Resources, digest: bytes, code: bytes) -> Message:
    try:
        resources.put_code(digest, code)
    except BaseException as error:  # goes to the coordinator
        return Failure(_ending.plain(error))
    return Done()


def _build(shop: Workshop, message: BuildResource) -> Message:
    try:
        return ResourceBuilt(shop.build(message))
    except BaseException as error:  # goes to the coordinator, with the user's lines
        return Failure(_ending.plain(error))


def _devices() -> tuple[str, int]:
    """Starts jax's backend, which can take seconds."""
    devices = jax.local_devices()
    return devices[0].platform, len(devices)


def _input_context(index: int, count: int) -> InputContext:
    return InputContext(count, index, jax.local_device_count())


def _resident_bytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    except OSError:  # not Linux
        return 0
    return pages * os.sysconf("SC_PAGESIZE")

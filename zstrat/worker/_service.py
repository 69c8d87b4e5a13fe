"""The message handler of a worker: everything except the sockets.

Runs on the loop. One coordinator at a time owns the worker and may run code on it;
requests of others are refused, except for statistics. When the owner is lost, its
closures, datasets and code are dropped, and the worker is ready for the next owner.

The handler also reports on the process: devices, memory, compilations.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Final, final

import jax

from zstrat import program
from zstrat.data import InputContext
from zstrat.errors import (
    ProtocolError,
    StaleSessionError,
    WorkerLostError,
)
from zstrat.telemetry import Kind, metrics_of
from zstrat.transport.health import TelemetryNotices, process_report, process_totals
from zstrat.wire import (
    CloseSession,
    Done,
    Hello,
    Inspect,
    Message,
    OpenSession,
    Owner,
    Ownership,
    PlainTree,
    SessionOpened,
    Statistics,
    check_sender,
)

from ._direct import Asking, Direct, bind
from ._executor import Executor
from ._pushes import PushEncoding, Residuals
from ._reports import Listen, StepOutput, unbegun, unheard
from ._resources import Load, Resources
from ._server_links import ServerLinks
from ._step_runner import StepRunner
from ._worker_session import Owned, WorkerSession

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from zstrat.config import Settings
    from zstrat.transport import MakeTaskLink, Remote

    from ._executor import WorkerThread
    from ._step_runner import Prepare, RunEager

    MakeExecutor = Callable[..., WorkerThread]
    """Creates and starts the thread for user code: `Executor`, or what a test has in
    its place. Called with a name and ``on_crash``, as `Executor`."""


OPENING: Final = 10.0
"""Most seconds to wait for the parameter servers when a session opens. After that time
the coordinator gets an error that says why, and asks again; so its user need not read
the logs of the workers."""


@final
class WorkerService:
    """Answers the messages of one worker. Created and used on the loop.

    Args:
        me: The HELLO message of this task.
        make_link: Creates the link to a parameter server.
        on_exit: Called once, when the coordinator ends the process.
        on_crash: Called if the executor thread dies of a defect of zstrat itself.
        is_alone: Nothing else in this process uses jax, so jax's caches are cleared
            after each session; otherwise they keep the traces of functions that are
            never called again.
        listen: Redirects the output of this process to a session; None: no redirection.
        load, prepare, run_eager: Unpickle and run user code.
        make_executor: Creates the thread for user code.
        compilations: Counts compilations of XLA; None: creates its own counter.
        find_devices: Returns the platform and the number of local devices.
        tells: Whether to send telemetry to the coordinator about once a second.
    """

    def __init__(
        self,
        settings: Settings,
        me: Hello,
        make_link: MakeTaskLink,
        *,
        on_exit: Callable[[], None] | None = None,
        on_crash: Callable[[BaseException], None] | None = None,
        is_alone: bool = False,
        listen: Listen | None = None,
        load: Load = program.load,
        prepare: Prepare = program.prepare,
        run_eager: RunEager = program.run_eager,
        clock: Callable[[], float] = time.monotonic,
        make_executor: MakeExecutor = Executor,
        compilations: Compilations | None = None,
        find_devices: Callable[[], tuple[str, int]] | None = None,
        tells: bool = False,
    ) -> None:
        self._settings, self._me, self._make_link = settings, me, make_link
        self._task = f"/job:{me.job}/task:{me.index}"
        self._on_exit, self._on_crash = on_exit, on_crash
        self._is_alone, self._listen = is_alone, listen
        self._load, self._prepare, self._run_eager = load, prepare, run_eager
        self._clock = clock
        self._ownership = Ownership(self._task)
        self._session: WorkerSession | None = None
        self.sessions = 0
        """Number of sessions opened since the start of the process."""
        self._left = asyncio.Event()
        self._leaving: set[asyncio.Task[None]] = set()
        self._counts: Counter[str] = Counter()
        self._platform, self._devices = "", 0
        self._find_devices = find_devices or devices
        self._refusal: WorkerLostError | None = None
        self._tells: Final = tells
        self._compilations = compilations or Compilations()
        self._executor = make_executor(self._task, on_crash=self._crashed)

    # The Endpoint's handler

    def handle(
        self, remote: Remote, message: Message
    ) -> Message | Awaitable[Message] | None:
        """Answers a request, or handles a notice.

        Raises:
            PermissionDeniedError: The sender is not a coordinator.
            StaleSessionError: The session of the sender is not the open one.
            BusyError: Another coordinator, which is alive, owns this worker.
        """
        # Before the sender is checked: anybody who is connected may look.
        if isinstance(message, Inspect):
            return Statistics(self.statistics())
        if not isinstance(message, Owned | OpenSession | CloseSession):
            raise ProtocolError(
                f"{self._task} is a worker, and {type(message).__name__} is not a "
                "message for workers"
            )
        check_sender(self._task, remote.name, remote.role, message)
        match message:
            case OpenSession():
                return self._open(remote, message)
            case CloseSession():
                return self._close(message)
            case _:
                return self._session_of(message.session).serve(message)

    def lost(self, remote: Remote, reason: str) -> None:
        """Handles the end of a connection: drops the session if the connection was the
        owner's."""
        # False for a session that another connection of the same program has taken
        # over.
        if self._ownership.lost(remote):
            session = self._ownership.session
            assert session is not None
            # The state of the session is gone, so its owner has to open it again.
            self._ownership.close(session)
            self._drop(f"its coordinator was lost: {reason}")

    # Sessions

    def _session_of(self, session: int) -> WorkerSession:
        self._ownership.check(session)
        if self._session is None:
            raise StaleSessionError(
                f"{self._task} is not ready for session {session:#x}: wait for the "
                "answer to OpenSession"
            )
        return self._session

    def _open(self, remote: Remote, message: OpenSession) -> Awaitable[SessionOpened]:
        """Makes the sender the owner at once; returns an awaitable that answers when
        the worker is ready.

        If the owner were set later, a close message that arrives together with the
        opening could be handled first, and a lost coordinator would own the worker
        forever.
        """
        if self._refusal is not None:
            raise self._refusal
        owner = Owner(
            message.session,
            remote,
            remote.hello,
            time.time(),
            program=message.program,
            sent=message.sent,
        )
        new = self._ownership.open(owner)
        # A coordinator that reconnects has given its closures to other workers, so the
        # session starts empty, except for compiled code.
        before = None if new else self._session
        self._session = session = self._new_session(remote, message, before)
        self.sessions += 1
        return self._opened(session)

    async def _opened(self, session: WorkerSession) -> SessionOpened:
        timeout = min(self._settings.timeouts.connect, OPENING)
        deadline = asyncio.get_running_loop().time() + timeout
        try:
            # On the thread: starting jax's backend may take seconds, for which the loop
            # must not stop. Without a limit, as a closure of the session before may
            # still run there: giving up would drop what this session inherits.
            self._platform, self._devices = await self._executor.submit(
                self._find_devices
            )
            await session.wait_open(deadline)
        except BaseException:  # to the coordinator, as the answer
            # A newer session may have replaced it while it waited.
            if self._session is session:
                self._ownership.close(session.session)
                self._drop("its session could not be opened")
            raise
        return SessionOpened(self._platform, self._devices)

    def _new_session(
        self, remote: Remote, message: OpenSession, before: WorkerSession | None
    ) -> WorkerSession:
        """Replaces the present session by a new one, which takes over the code, the
        resident arrays and the residuals of gradients of ``before``."""
        timeouts = self._settings.timeouts
        servers = ServerLinks(
            self._make_link,
            message.ps,
            message.views,
            timeouts,
            replicas=message.replicas,
        )
        output = None
        if message.listens and self._listen is not None:
            output = StepOutput(message.session, remote)
        session = WorkerSession(
            message.session,
            remote,
            servers,
            timeout=timeouts.request,
            counts=self._counts,
            clock=self._clock,
            output=output,
        )
        session.recorder.start(self._sums(), self._clock())
        if self._tells:
            session.notices = TelemetryNotices(self.telemetry, remote.notify)
        # Residuals at once, as any thread may use them; code moves on the thread,
        # below.
        residuals = None if before is None else before.runner.encoding.residuals
        runner = self._make_runner(session, message, output, residuals)
        # Before the session before is dropped: dropping it has the thread empty these
        # resources.
        if before is not None:
            inherit = runner.resources.inherit
            self._executor.tell(partial(inherit, before.runner.resources))
        self._drop("its coordinator opened a new session", is_over=before is None)
        session.start(self._executor, runner, self._listen or unheard)
        return session

    def _make_runner(
        self,
        session: WorkerSession,
        opening: OpenSession,
        output: StepOutput | None,
        residuals: Residuals | None,
    ) -> StepRunner:
        index, count = opening.index, opening.worker_count
        asking = Asking(asyncio.get_running_loop(), session.client)
        encoding = PushEncoding(session.client.shares_memory, self._counts, residuals)
        return StepRunner(
            Resources(
                self._task,
                self._load,
                partial(_input_context, index, count),
                self._settings.limits,
            ),
            index=index,
            count=count,
            prepare=self._prepare,
            run_eager=self._run_eager,
            storage=partial(Direct, asking, encoding, self._clock),
            bind=partial(bind, asking),
            carry_out=session.carry_out,
            limits=self._settings.limits,
            encoding=encoding,
            prefetch=opening.prefetch,
            clock=self._clock,
            end_lines=unbegun if output is None else output.end_lines,
        )

    def _close(self, message: CloseSession) -> Done:
        if self._ownership.close(message.session, message.sent):
            self._drop("its coordinator closed the session")
        if message.exit and self._on_exit is not None:
            # Once, although the coordinator may send its message again.
            on_exit, self._on_exit = self._on_exit, None
            on_exit()
        return Done()

    def _drop(self, reason: str, *, is_over: bool = True) -> None:
        session, self._session = self._session, None
        if session is None:
            return
        self._left.set()
        session.leave()
        # After the orders of `leave`, on the thread: jax must not lose its caches in
        # the middle of a trace.
        if is_over and self._is_alone:
            self._executor.tell(jax.clear_caches)
        # A task, as `lost` and `_open` cannot wait; links may need a while to close.
        task = asyncio.get_running_loop().create_task(
            session.close_links(reason), name=f"close session {session.session:#x}"
        )
        self._leaving.add(task)  # awaited by close()
        task.add_done_callback(self._leaving.discard)

    async def wait_left(self, since: int) -> None:
        """Waits until a session that was opened after the first ``since`` `sessions` is
        over, and no other session is open."""
        # Checked again after each wake-up: another program may have opened the next
        # session by then.
        while self._session is not None or self.sessions == since:
            self._left.clear()
            await self._left.wait()

    # The end

    async def drain(self) -> bool:
        """Stops accepting closures, and waits for those that run.

        Closures that have not begun, or arrive from now on, are sent back as cancelled
        with a retryable `WorkerLostError`, so that another worker runs them.

        Returns:
            False if a closure was still running after ``timeouts.drain``.

        Cancellation: closures that arrive are still sent back.
        """
        self._refusal = WorkerLostError(self._task, "it is shutting down")
        if self._session is None:
            return True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.timeouts.drain
        return await self._session.drain(self._refusal, deadline)

    async def close(self) -> None:
        """Ends the session and the executor thread. A closure that does not return
        within ``timeouts.drain`` keeps running on its daemon thread.

        Cancellation: the thread ends with the process.
        """
        # Links first, then the thread: a closure that waits for a server ends with its
        # link.
        self._drop("the worker was shut down")
        await asyncio.gather(*self._leaving)
        await self._executor.close(self._settings.timeouts.drain)
        self._compilations.close()

    def _crashed(self, error: BaseException) -> None:
        self._drop("its executor failed")
        if self._on_crash is not None:
            self._on_crash(error)

    # Reports

    def statistics(self) -> dict[str, PlainTree]:
        """Returns statistics as plain numbers, in bytes and seconds; cheap at any
        time."""
        session, owner = self._session, self._ownership.owner
        values: dict[str, PlainTree] = {
            # First: who counts by itself, below, is right.
            **_NEVER_COUNTED,
            **self._counts,
            "job": self._me.job,
            "task": self._task,
            "incarnation": self._me.incarnation,
            "session": 0 if owner is None else owner.session,
            "owner": "" if owner is None else str(owner),
            "draining": self._refusal is not None,
            "waiting": 0 if session is None else session.queued,
            "kept_results": 0 if session is None else len(session.results),
            "kept_bytes": 0 if session is None else session.results.nbytes,
            "compilations": self._compilations.count,
            "compile_seconds": self._compilations.seconds,
            "platform": self._platform,
            "devices": self._devices,
        }
        if session is not None:
            values |= session.runner.statistics()
            values["retries"] = session.client.repeats
            values["residual_bytes"] = session.runner.encoding.residuals.nbytes
        return values

    def telemetry(self) -> dict[str, PlainTree]:
        """Returns the values of `zstrat.telemetry.TaskReport` for the process and the
        present session."""
        session, now = self._session, self._clock()
        values = {**process_report(), "service": self.statistics()}
        if session is not None:
            session.recorder.reach(self._sums(), now)
            values |= session.recorder.plain(now, session.under_way)
            values["program"] = session.program_left(now)
        return values

    def _sums(self) -> dict[str, float]:
        """Returns totals over all sessions, from which rates are reported."""
        pulls, pushes = self._counts["pulls"], self._counts["pushes"]
        return {"pulls_per_s": pulls, "pushes_per_s": pushes, **process_totals()}


_NEVER_COUNTED: Final = {
    metric.name: 0
    for metric in metrics_of("worker")
    if metric.kind is Kind.COUNTER and metric.path == ("service", metric.name)
}
"""What is reported of a counter before it has counted."""


def _input_context(index: int, count: int) -> InputContext:
    share, shares = program.input_pipeline.get() or (index, count)
    return InputContext(shares, share, jax.local_device_count())


_COMPILED: Final = "/jax/core/compile/backend_compile_duration"


def devices() -> tuple[str, int]:
    """Returns the platform and the number of local devices. Starts jax's backend, which
    can take seconds: do not call this on the loop."""
    found = jax.local_devices()
    return found[0].platform, len(found)


@final
class Compilations:
    """Counts compilations of XLA in this process, until `close`."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._note)

    def close(self) -> None:
        """Stops counting."""
        jax.monitoring.unregister_event_duration_listener(self._note)

    def _note(self, event: str, duration_secs: float, **details: str | int) -> None:
        del details
        if event == _COMPILED:
            self.count += 1
            self.seconds += duration_secs

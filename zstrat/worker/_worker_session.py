"""The session of one coordinator on this worker: the part that runs on the loop.

The session owns the links to the parameter servers, carries out what the executor
thread posts (pushes, then pulls, then endings) and reports the outcome of closures.
Whatever unpickles or runs user code is passed to the executor thread in the order of
its arrival, so that a closure finds what was shipped before it. `Reports` keeps which
closures are open, and which endings the coordinator has received.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, assert_never, final

from zstrat.errors import BusyError, ZstratError
from zstrat.ps import PsClient
from zstrat.telemetry import WORKER_PHASES, Phase, Recorder
from zstrat.wire import (
    AskClock,
    AskIteratorFit,
    AskIteratorState,
    BeginCapture,
    BuildResource,
    CancelSteps,
    Dispatch,
    Done,
    DropArguments,
    DropResources,
    DropResults,
    EndCapture,
    Fetch,
    Fetched,
    IteratorState,
    MergedOperands,
    MergeOperands,
    Message,
    MoveServer,
    PinSnapshot,
    PutArguments,
    PutCode,
    ReadSnapshot,
    ReleaseSnapshot,
    RestartWindows,
    RoundNumber,
    SnapshotPart,
    StoreTensors,
)

from . import _closure
from ._capture import SessionCapture
from ._closure import RoundPush
from ._reports import Reports, Results
from ._shipments import answered, build, with_inputs

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Awaitable, Callable, Sequence

    import numpy as np

    from zstrat.ps import Clocks, PsUpdate
    from zstrat.telemetry import StepUnderWay
    from zstrat.transport import Remote
    from zstrat.transport.health import TelemetryNotices
    from zstrat.wire import Batch, PlainTree

    from ._closure import Ending, Post, SharedPull
    from ._executor import WorkerThread
    from ._reports import Listen, StepOutput
    from ._server_links import ServerLinks
    from ._step_runner import StepRunner

MAX_OPEN: Final = 16384
"""Most closures that may wait. A coordinator keeps less than half a second of work on a
worker by default; more closures are a mistake, and are sent back before they begin."""


Owned = (
    PutCode
    | PutArguments
    | DropArguments
    | Dispatch
    | CancelSteps
    | Fetch
    | DropResults
    | BuildResource
    | AskIteratorState
    | AskIteratorFit
    | DropResources
    | MoveServer
    | MergeOperands
    | RestartWindows
    | StoreTensors
    | PinSnapshot
    | ReadSnapshot
    | ReleaseSnapshot
    | AskClock
    | BeginCapture
    | EndCapture
)
"""The messages about the open session, whose senders have been checked."""


@final
class WorkerSession:
    """A coordinator's session on this worker, without the executor thread. Only the
    loop uses this object.

    Args:
        remote: The coordinator.
        servers: Links to all parameter servers; the session closes them.
        timeout: Seconds that a request waits for an unreachable server.
        counts: The worker's counters, over all sessions.
        clock: The clock of the executor.
        output: Sends printed output to the coordinator; None: output is not redirected.
    """

    def __init__(
        self,
        session: int,
        remote: Remote,
        servers: ServerLinks,
        *,
        timeout: float,
        counts: Counter[str],
        clock: Callable[[], float] = time.monotonic,
        output: StepOutput | None = None,
    ) -> None:
        self.recorder: Final = Recorder(WORKER_PHASES)
        self.notices: TelemetryNotices | None = None
        """Sends telemetry to the coordinator."""
        self._clock: Final = clock
        self.session: Final = session
        self._output: Final = output
        self.client: Final = PsClient(servers.links, session, request_timeout=timeout)
        servers.attach(self.client.lines)
        self.results: Final = Results()
        self._reports: Final = Reports(session, remote, self.results, counts)
        self._servers, self._counts = servers, counts
        self.client.counts = counts
        self._refusal: ZstratError | None = None
        self._low_water = 0
        self._contributed: defaultdict[int, list[int]] = defaultdict(list)
        """By optimizer: the rounds of this worker's contributions that are under way,
        and of the last acknowledged one."""
        self._program: tuple[float, int, bool] | None = None
        """When the program last sent closures, how many it had left to send, and
        whether its queue was full."""
        self._program_metrics: PlainTree = None
        self._last_post = 0.0
        """When the executor thread last posted."""
        self._closed = False

    def start(self, executor: WorkerThread, runner: StepRunner, listen: Listen) -> None:
        """Starts to use the executor, and to connect to the servers. Called once,
        before all other methods.

        Args:
            listen: Redirects the output of the process.
        """
        self._executor, self.runner, self._listen = executor, runner, listen
        self.recorder.on_capture = runner.capture
        self._capture = SessionCapture(self.recorder, executor, self._clock)
        executor.tell(partial(executor.work_for, runner))
        # On the thread: until then closures of another session run.
        output = self._output
        executor.tell(partial(listen, None if output is None else output.hear))
        self._servers.start()

    async def wait_open(self, deadline: float) -> None:
        """Waits until all parameter servers have answered.

        Raises:
            DeadlineExceededError: A server did not answer by ``deadline`` (loop time);
                names it.
            ClosedError: The session ended meanwhile.

        Cancellation: the links keep connecting.
        """
        await self._servers.wait_open(deadline)

    @property
    def queued(self) -> int:
        """Number of closures that have not ended."""
        return len(self._reports)

    @property
    def under_way(self) -> StepUnderWay | None:
        """The step that the executor thread runs now."""
        return self.runner.pipeline.under_way(self._last_post)

    def program_left(self, now: float) -> dict[str, PlainTree]:
        """Returns how many closures were ``waiting`` in the program when it last sent
        some, ``seconds`` ago, whether its queue was ``full``, and the last ``metrics``
        that it sent to this worker; {} if it has sent none."""
        if self._program is None:
            return {}
        sent, waiting, full = self._program
        return {
            "seconds": now - sent,
            "waiting": waiting,
            "full": full,
            "metrics": self._program_metrics,
        }

    # From the coordinator

    def serve(self, message: Owned) -> Message | Awaitable[Message]:
        """Carries out a message; returns the answer, or a future of it.

        Raises:
            NotFoundError: The worker does not have the result.
        """
        executor, resources = self._executor, self.runner.resources
        residents = resources.residents
        match message:
            case Dispatch():
                self.dispatch(message)
            case CancelSteps():
                self.cancel()
            case PutArguments(arguments=number, code=code, arrays=arrays):
                # By the thread's inbox, like all that a closure uses: it keeps the
                # order in which messages came.
                executor.tell(partial(resources.put_arguments, number, code, arrays))
            case DropArguments(arguments=numbers):
                executor.tell(partial(resources.drop_arguments, numbers))
            case DropResources(resources=numbers):
                executor.tell(partial(resources.drop, numbers))
            case DropResults(steps=steps):
                self.results.drop(steps)
            case Fetch(step=step):
                return Fetched(tuple(self.results.of(step)))
            case PutCode(digest=digest, code=code):
                return self._answered(partial(resources.put_code, digest, code))
            case MoveServer():
                return self._servers.move(message)
            case BuildResource():
                self._servers.use()
                return self._answered(partial(build, self.runner, message))
            case AskIteratorState(resource=number):
                return self._answered(lambda: IteratorState(resources.state(number)))
            case AskIteratorFit(resource=number, state=state):
                return self._answered(partial(resources.require_fit, number, state))
            case MergeOperands():
                return self._merged_operands(message)
            case RestartWindows(optimizer=number, number=first):
                # A restore: residuals are what was left out of gradients at values that
                # are gone now.
                self.runner.encoding.residuals.clear()
                executor.tell(partial(residents.restart, number, first))
            case StoreTensors():
                executor.tell(partial(residents.store, message))
            case PinSnapshot():
                return executor.submit(partial(residents.pin, message))
            case ReadSnapshot():
                # On the loop, beside the thread: pinned arrays are never written to.
                return SnapshotPart((residents.read(message),))
            case ReleaseSnapshot(snapshot=number):
                residents.release(number)
            case AskClock() | BeginCapture() | EndCapture():
                return self._capture.serve(message)
            case _:
                assert_never(message)
        return Done()

    def _answered(self, work: Callable[[], Message | None]) -> Awaitable[Message]:
        return self._executor.submit(partial(answered, work))

    async def _merged_operands(self, message: MergeOperands) -> Message:
        """Computes what an optimizer needs from all gradients of a round.

        Cancellation: changes nothing.
        """
        trees, merged = await self.client.pull_merged(message.order)
        operands = partial(self.runner.pushes.operands, message, trees, merged)
        return MergedOperands(tuple(await self._executor.submit(operands)))

    def dispatch(self, message: Dispatch) -> None:
        """Queues closures; ignores those that are open already."""
        self._servers.use()
        batches = []
        for batch, inputs in with_inputs(message):
            taken = self._reports.opened(batch)
            # Inputs are in the order of the batch, so those of closures that are open
            # already go, too.
            if batch.size and taken.steps is not batch.steps:
                inputs = [inputs[batch.steps.index(step)] for step in taken.steps]
            batches.append((taken, inputs))
        refusal = self._refusal
        if refusal is None and len(self._reports) > MAX_OPEN:
            refusal = BusyError(f"more than {MAX_OPEN} closures wait on this worker")
        if refusal is not None:
            self._send_back(batches, refusal)
            return
        self._low_water = message.low_water
        self._program = self._clock(), message.waiting, message.full
        if message.metrics is not None:
            self._program_metrics = message.metrics
        self._executor.tell(partial(self.runner.dispatch, batches, message.low_water))
        if self.notices is not None:
            self.notices.touch()

    def cancel(self, error: ZstratError | None = None) -> None:
        """Cancels every closure that has not begun; the error, if given, is reported
        with them."""
        self._executor.tell(partial(self.runner.cancel, error))

    # From the executor

    def carry_out(self, post: Post) -> None:
        """Carries out what the executor thread has posted: pushes first, so that the
        pulls read what the pushes wrote."""
        # The links are closed, but residuals outlive the session: the next one of the
        # same coordinator needs what these pushes have taken.
        if self._closed:
            for _, ending in post.pushes:
                self.runner.encoding.residuals.settle(ending.lent, is_sent=False)
            return
        pushes, pulls = post.pushes, post.pulls
        self._counts["pushes"] += len(pushes)
        self._counts["pulls"] += len(pulls)
        self._last_post = now = self._clock()
        # The usual step: one message per server has the push and the pull of the next
        # step.
        if len(pushes) == 1 and len(pulls) == 1 and not _is_of_round(pushes, pulls):
            self._exchange(*pushes[0], post.read_at[0], pulls[0], now)
        else:
            for (push, ending), read_at in zip(pushes, post.read_at, strict=True):
                self._push(push, ending, read_at, now)
            for pull in pulls:
                self._pull(pull)
        # After pushes and pulls: the coordinator may wait a moment, the next step may
        # not.
        self._reports.now(post.endings)
        # Last: nothing waits for the records.
        self.recorder.ran(post.times, now)
        if self.notices is not None:
            self.notices.touch()

    def _exchange(
        self,
        updates: list[PsUpdate],
        ending: Ending,
        read_at: Clocks | None,
        pull: SharedPull,
        now: float,
    ) -> None:
        step, reads = ending.completion.step, pull.reads
        push = _PushUnderWay(ending, read_at, now)
        try:
            pushed, pulled = self.client.exchange(
                step,
                0,
                self._low_water,
                updates,
                reads.refs,
                reads.rows,
                reads.sets,
                clocks=(push.clocks, pull.clocks),
                leases=ending.leases,
            )
        except Exception as error:  # goes to the coordinator as the steps' outcome
            self._not_sent(ending, error)
            self._arrived(pull, None, error)
        else:
            pushed.add_done_callback(partial(self._pushed, push))
            pulled.add_done_callback(partial(self._pulled, pull))

    def _push(
        self,
        updates: list[PsUpdate] | RoundPush,
        ending: Ending,
        read_at: Clocks | None,
        now: float,
    ) -> None:
        step = ending.completion.step
        if isinstance(updates, RoundPush):
            self._contribute(updates, ending, read_at, now)
            return
        push = _PushUnderWay(ending, read_at, now)
        try:
            future = self.client.push(
                step,
                0,
                self._low_water,
                updates,
                clocks=push.clocks,
                leases=ending.leases,
            )
        except Exception as error:  # goes to the coordinator as this step's outcome
            self._not_sent(ending, error)
        else:
            future.add_done_callback(partial(self._pushed, push))

    def _contribute(
        self, sent: RoundPush, ending: Ending, read_at: Clocks | None, now: float
    ) -> None:
        """Sends the gradients of a step to rounds, together with the step's other
        updates."""
        step = ending.completion.step
        ending.contributions = [
            # A step that read nothing (base -1) counts for the first round that this
            # worker has not given to.
            contribution._replace(base=self._next_round(contribution.optimizer))
            if contribution.base < 0
            else contribution
            for contribution in sent.contributions
        ]
        # Before it is sent: a pull that follows must wait for this round even while the
        # contribution is under way.
        for contribution in ending.contributions:
            self._contributed[contribution.optimizer].append(contribution.base)
        push = _PushUnderWay(ending, read_at, now)
        try:
            parts: list[asyncio.Future[Any]] = [
                self.client.contribute(ending.contributions, sent.gradients)
            ]
            if sent.updates:
                parts.append(
                    self.client.push(
                        step, 0, self._low_water, sent.updates, clocks=push.clocks
                    )
                )
        except Exception as error:  # goes to the coordinator as this step's outcome
            self._not_contributed(ending)
            self._not_sent(ending, error)
        else:
            # Both have to be acknowledged; either failure fails the step.
            asyncio.gather(*parts).add_done_callback(partial(self._pushed, push))

    def _next_round(self, optimizer: int) -> int:
        """Returns the first round of an optimizer to which this worker has not
        contributed."""
        return max(self._contributed[optimizer], default=-1) + 1

    def _pushed(self, push: _PushUnderWay, future: asyncio.Future[bool]) -> None:
        error, ending = _error_of(future), push.ending
        # Also at the end: the next session of the coordinator has them.
        self.runner.encoding.residuals.settle(ending.lent, is_sent=error is None)
        if self._closed:
            return
        if error is not None:
            self._not_contributed(ending)
            # The servers may have applied a part before the error, so the outcome is in
            # doubt.
            ending = _closure.failed(ending.completion.step, error, pushed=True)
        else:
            for contribution in ending.contributions:
                # Later pulls wait for the newest round alone, so older entries are of
                # no use.
                rounds = self._contributed[contribution.optimizer]
                rounds[:] = [base for base in rounds if base >= contribution.base]
            if ending.contributions:
                self._settle(ending.completion.step, failed=False)
            self._acknowledged(push)
        self._reports.soon(ending)

    def _not_contributed(self, ending: Ending) -> None:
        """Records that the contributions of a step failed. Later pulls then do not wait
        for its rounds, unless another step has contributed to them."""
        for contribution in ending.contributions:
            if contribution.base in (
                rounds := self._contributed[contribution.optimizer]
            ):
                rounds.remove(contribution.base)
        if ending.contributions:
            self._settle(ending.completion.step, failed=True)

    def _not_sent(self, ending: Ending, error: Exception) -> None:
        """Reports a step as failed whose push could not be sent."""
        self.runner.encoding.residuals.settle(ending.lent, is_sent=False)
        step = ending.completion.step
        # To some servers it may have been.
        self._reports.later(_closure.failed(step, error, pushed=True))

    def _settle(self, step: int, *, failed: bool) -> None:
        """Makes the executor thread keep the resident arrays that a step has written,
        or, if the step failed, restore the previous ones."""
        settle = self.runner.resources.residents.settle
        self._executor.tell(partial(settle, step, failed=failed))

    def _acknowledged(self, push: _PushUnderWay) -> None:
        """Records how long a push took, and its staleness: how many pushes of other
        steps each server applied between the pull of the step and this push. Skips a
        server whose backup has taken over, because the backup counts differently."""
        recorder, read_at = self.recorder, push.read_at
        step = push.ending.completion.step
        recorder.spent(Phase.PUSH, step, push.since, self._clock())
        if not read_at:
            return
        for ps, clock in push.clocks.items():
            behind = clock - 1 - read_at.get(ps, clock)
            if behind >= 0:
                recorder.stale(f"ps:{ps}", behind)

    def _pull(self, pull: SharedPull) -> None:
        refs, rows, rounds, waits, sets = pull.reads
        clocks = pull.clocks
        try:
            # A pull of a round waits on the server until the rounds with our
            # contributions are closed, so the step reads what they became.
            if rounds:
                after = [
                    RoundNumber(optimizer, self._next_round(optimizer) if waits else 0)
                    for optimizer in rounds
                ]
                future = self.client.pull_round(
                    after, refs, rows, clocks=clocks, numbers=pull.rounds
                )
            else:
                future = self.client.pull(refs, rows, sets, clocks=clocks)
        except Exception as error:  # goes to the coordinator as the steps' outcome
            self._arrived(pull, None, error)
        else:
            future.add_done_callback(partial(self._pulled, pull))

    def _pulled(
        self, pull: SharedPull, future: asyncio.Future[list[np.ndarray]]
    ) -> None:
        error = _error_of(future)
        self._arrived(pull, None if error is not None else future.result(), error)

    def _arrived(
        self,
        pull: SharedPull,
        values: list[np.ndarray] | None,
        error: BaseException | None,
    ) -> None:
        # The pipeline belongs to the thread, so the answer goes there as an event.
        arrived = self.runner.pipeline.arrived
        self._executor.tell(partial(arrived, pull, values, self._clock(), error))

    def _send_back(
        self, batches: Sequence[tuple[Batch, Sequence[memoryview]]], error: ZstratError
    ) -> None:
        steps = [step for batch, _ in batches for step in batch.steps]
        self._reports.now([_closure.cancelled(step, error) for step in steps])

    # The end

    async def drain(self, refusal: ZstratError, deadline: float) -> bool:
        """Sends back closures that have not begun or arrive later, and waits for the
        rest.

        Returns:
            False if a closure was still running at the deadline (loop time).
        """
        self._refusal = refusal
        # Closures that run cannot be stopped, so wait for their pushes, which count.
        self.cancel(refusal)
        try:
            async with asyncio.timeout_at(deadline):
                await self._reports.wait_idle()
        except TimeoutError:
            return False
        return True

    def leave(self) -> None:
        """Ends the session at once. A running closure continues, and its outcome is
        dropped."""
        if self._closed:
            return
        self._closed = True
        if self.notices is not None:
            self.notices.close()
        self._reports.close()
        self._capture.close()
        if self._output is not None:
            self._output.close()
        # In this order on the thread: stop taking work, then give the output back, then
        # free what the closures used.
        self._executor.tell(partial(self._executor.work_for, None))
        self._executor.tell(partial(self._listen, None))
        self._executor.tell(self.runner.close)

    async def close_links(self, reason: str) -> None:
        """Closes the links to the parameter servers. Called at the very end of the
        session.

        Cancellation: links that are not closed yet stay open.
        """
        await self._servers.close(reason)


@final
@dataclass(frozen=True, slots=True)
class _PushUnderWay:
    """A push that was sent and is not acknowledged. ``read_at``: clocks of the servers
    at the pull of its step."""

    ending: Ending
    read_at: Clocks | None
    since: float
    clocks: Clocks = field(default_factory=dict)


def _is_of_round(
    pushes: Sequence[tuple[Any, Ending]], pulls: Sequence[SharedPull]
) -> bool:
    """Returns whether the first push or the first pull belongs to a round. The pull may
    then wait longer than the push, so they are sent in separate messages."""
    return isinstance(pushes[0][0], RoundPush) or bool(pulls[0].reads.rounds)


def _error_of(future: asyncio.Future[Any]) -> BaseException | None:
    if future.cancelled():
        return asyncio.CancelledError("the request was cancelled")
    return future.exception()

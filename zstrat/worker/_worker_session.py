"""One coordinator's stay on this worker, as the loop sees it.

A tenancy owns the links to the parameter servers, carries out the posts of the executor
thread (pushes, then pulls, then endings) and tells the coordinator how its closures
ended. The law: a closure is *open* from its dispatch until its ending was put into a
message; one that is open is not taken again, and one that is not open is not reported.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Final, final

from zstrat.errors import BusyError, ClosedError, ZstratError
from zstrat.ps import PsClient

from . import _closure
from ._reports import Reports, Results

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence

    import numpy as np

    from zstrat.ps import PsUpdate
    from zstrat.transport import Link, Remote
    from zstrat.wire import Batch, Dispatch

    from ._closure import Ending, Post, SharedPull
    from ._executor import Executor
    from ._step_runner import StepRunner
    from ._way import ServerWay

MAX_OPEN: Final = 16384
"""Closures that may wait here. A coordinator keeps 20 ms of work on a worker, at most
hundreds of closures; more is a mistake, and they are not begun but sent back."""


@final
class WorkerSession:
    """Loop side of a session. Only the loop touches it.

    Args:
        remote: The coordinator's connection.
        links: To all parameter servers, in task order; owned by the tenancy.
        ways: What the links tell how they stand.
        patience: Seconds that a request waits for a server that is away.
        counts: The worker's counters, over all sessions.
    """

    def __init__(
        self,
        session: int,
        remote: Remote,
        links: Sequence[Link],
        ways: Sequence[ServerWay],
        *,
        patience: float,
        counts: Counter[str],
    ) -> None:
        self.session: Final = session
        self.client: Final = PsClient(links, session, patience=patience)
        for way, line in zip(ways, self.client.lines, strict=True):
            way.line = line
        self.results: Final = Results()
        self._reports: Final = Reports(session, remote, self.results, counts)
        self._links, self._ways, self._counts = links, ways, counts
        self._refusal: ZstratError | None = None
        self._low_water = 0
        self._closed = False

    def occupy(self, executor: Executor, shop: StepRunner) -> None:
        """Takes the executor and begins to connect. Called once, before all else."""
        self._executor, self.shop = executor, shop
        executor.tell(partial(executor.present, shop))
        for link in self._links:
            link.start()

    async def wait_open(self, deadline: float) -> None:
        """Waits until all parameter servers have answered.

        Raises:
            DeadlineExceededError: One did not by ``deadline`` (loop time); names it.
            ClosedError: The session ended meanwhile.

        Cancellation: the links go on connecting.
        """
        for link in self._links:
            await link.wait_open(deadline)

    @property
    def queued(self) -> int:
        """Closures that have not ended."""
        return len(self._reports)

    # From the coordinator

    def dispatch(self, message: Dispatch) -> None:
        """Takes closures; those that are here already are ignored."""
        batches = [self._reports.opened(batch) for batch in message.batches]
        refusal = self._refusal
        if refusal is None and len(self._reports) > MAX_OPEN:
            refusal = BusyError(f"{MAX_OPEN} closures wait on this worker already")
        if refusal is not None:
            self._send_back(batches, refusal)
            return
        self._low_water = message.low_water
        self._executor.tell(partial(self.shop.dispatch, batches, message.low_water))

    def cancel(self, error: ZstratError | None = None) -> None:
        """Ends every closure that has not begun, with the error if one is given."""
        self._executor.tell(partial(self.shop.cancel, error))

    # From the executor

    def carry(self, post: Post) -> None:
        """Carries out a post: the pushes first, the pulls read what they wrote."""
        if self._closed:
            return
        pushes, pulls = post.pushes, post.pulls
        self._counts["pushes"] += len(pushes)
        self._counts["pulls"] += len(pulls)
        if len(pushes) == 1 and len(pulls) == 1:
            self._exchange(*pushes[0], pulls[0])
        else:
            for push, ending in pushes:
                self._push(push, ending)
            for pull in pulls:
                self._pull(pull)
        self._reports.now(post.endings)

    def _exchange(
        self, updates: list[PsUpdate], ending: Ending, pull: SharedPull
    ) -> None:
        step, reads = ending.completion.step, pull.reads
        try:
            pushed, pulled = self.client.exchange(
                step, 0, self._low_water, updates, *reads
            )
        except Exception as error:  # goes to the coordinator as the steps' outcome
            self._reports.later(_closure.failed(step, error))
            self._arrived(pull, None, error)
        else:
            pushed.add_done_callback(partial(self._pushed, ending))
            pulled.add_done_callback(partial(self._pulled, pull))

    def _push(self, updates: list[PsUpdate], ending: Ending) -> None:
        step = ending.completion.step
        try:
            future = self.client.push(step, 0, self._low_water, updates)
        except Exception as error:  # goes to the coordinator as this step's outcome
            self._reports.later(_closure.failed(step, error))
        else:
            future.add_done_callback(partial(self._pushed, ending))

    def _pushed(self, ending: Ending, future: asyncio.Future[bool]) -> None:
        error = _error_of(future)
        if self._closed:
            return
        if error is not None:
            ending = _closure.failed(ending.completion.step, error)
        self._reports.soon(ending)

    def _pull(self, pull: SharedPull) -> None:
        try:
            future = self.client.pull(*pull.reads)
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
        self._executor.tell(partial(self.shop.pipeline.arrived, pull, values, error))

    def _send_back(self, batches: Sequence[Batch], error: ZstratError) -> None:
        steps = [step for batch in batches for step in batch.steps]
        self._reports.now([_closure.cancelled(step, error) for step in steps])

    # The end

    async def drain(self, refusal: ZstratError, deadline: float) -> bool:
        """Sends back what has not begun and all that comes, and waits for the rest.

        Returns:
            False if a closure was still running at the deadline (loop time).
        """
        self._refusal = refusal
        self.cancel(refusal)
        try:
            async with asyncio.timeout_at(deadline):
                await self._reports.wait_idle()
        except TimeoutError:
            return False
        return True

    def leave(self) -> None:
        """Forgets the session at once; what runs goes on to its end, unheard of."""
        if self._closed:
            return
        self._closed = True
        self._reports.close()
        self._executor.tell(partial(self._executor.present, None))
        self._executor.tell(self.shop.close)

    async def close_links(self, reason: str) -> None:
        """Closes the links to the parameter servers; the last thing.

        Cancellation: links that are not closed yet are left open.
        """
        for way in self._ways:
            way.close(ClosedError(reason))
        await asyncio.gather(*[link.close(reason) for link in self._links])


def _error_of(future: asyncio.Future[Any]) -> BaseException | None:
    if future.cancelled():
        return asyncio.CancelledError("the request was cancelled")
    return future.exception()

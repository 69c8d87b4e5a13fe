"""What both coordinators of a strategy are: the blocking one and the awaited one.

`ClusterCoordinator` and `AsyncClusterCoordinator` hold the same `CoordinatorCore`. It
lives on the user's side and keeps the functions that were scheduled. The engine and the
dispatcher do not know it, so when both coordinators are dropped, it is, and ends them.
"""

from __future__ import annotations

import abc
import contextlib
import math
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, final

from zstrat.errors import ClosedError, DeadlineExceededError, ForkedError
from zstrat.transport import require_own, warn_of_blocking

from ._calls import CallTable, Code, PickledArguments
from ._dispatch import Dispatcher
from ._engine import ClosureEngine
from ._queue import MAX_ATTEMPTS, MAX_QUEUED, Queue
from ._resources import Record
from ._values import RemoteValue

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import numpy as np

    from zstrat.program import Plan
    from zstrat.transport import Portal
    from zstrat.wire import PlainTree

    from ._session import ClusterSession
    from ._values import Kept
    from ._waiting import Cancelling


WORKER_WAIT_SECONDS: Final = 600.0
"""Seconds without any worker until `join` gives up: long enough to boot a machine."""
STOP_SECONDS: Final = 10.0
"""Seconds for the loop to begin with a dispatcher, or to stop it: it waits for nothing
there."""


class CoordinatedStrategy(abc.ABC):
    """A strategy whose steps a `ClusterCoordinator` schedules on workers.

    It is shipped with each of them: pickled, it arrives as what stands for it there.
    """

    @property
    @abc.abstractmethod
    def session(self) -> ClusterSession:
        """The cluster, connected."""

    @abc.abstractmethod
    def scope(self) -> AbstractContextManager[object]:
        """Entered around each trace of a scheduled function, here and on workers."""

    @abc.abstractmethod
    def require_known(self, plan: Plan) -> None:
        """Refuses a step that the parameter servers of this session cannot serve.

        Raises:
            NotFoundError: It uses variables or optimizers of another session.
        """


@final
class CoordinatorCore:
    """Schedules calls of a strategy.

    Args:
        max_queued, max_attempts, errors_once: See `Queue`.
        closures_in_flight: Per worker; None: see `Members`.
        worker_wait_timeout: Seconds that work waits when there is no worker at all.
    """

    def __init__(
        self,
        strategy: CoordinatedStrategy,
        *,
        max_queued: int | None = None,
        closures_in_flight: int | None = None,
        max_attempts: int | None = None,
        worker_wait_timeout: float | None = None,
        errors_once: bool = False,
    ) -> None:
        self.strategy = strategy
        self.session: ClusterSession = strategy.session
        portal = self.portal = self.session.portal
        queue = Queue(
            MAX_QUEUED if max_queued is None else max_queued,
            MAX_ATTEMPTS if max_attempts is None else max_attempts,
            self.session.next_step,
            errors_once=errors_once,
        )
        loop = _LoopCalls(portal)
        self.engine = ClosureEngine(queue, loop)
        self.dispatcher = loop.dispatcher = Dispatcher(
            self.engine,
            self.session.session,
            (),  # they are told when it is attached
            self.session.cluster.fences,
            self.session.cluster.ps,
            closures_in_flight=closures_in_flight,
            prefetch=self.session.cluster.options.prefetch,
            worker_wait_timeout=(
                WORKER_WAIT_SECONDS
                if worker_wait_timeout is None
                else worker_wait_timeout
            ),
        )
        self.calls = CallTable(strategy, self.dispatcher.retired)
        self._on_loop(self.session.cluster.attach, self.dispatcher)
        self._finalizer = weakref.finalize(
            self, portal.call_soon, self.dispatcher.stop, "the coordinator is gone"
        )
        self._finalizer.atexit = False

    def create_resource(
        self,
        purpose: str,
        name: str,
        maker: Code,
        arguments: PickledArguments | None = None,
        *,
        kind: type[RemoteValue] = RemoteValue,
    ) -> Record:
        """Has something built on every worker; returns before it is. ``kind`` are the
        values that say how that went."""
        self.require_kept()
        record = Record(
            self.engine,
            [member.place for member in self.dispatcher.members.members],
            name=name,
            purpose=purpose,
            maker=maker,
            arguments=arguments,
            kind=kind,
        )
        self.dispatcher.builder.add_soon(record)
        self.portal.call_soon(self.dispatcher.turn_soon)
        return record

    @property
    def drop_resource(self) -> Callable[[int], None]:
        """For finalizers: forgets a resource by its number."""
        return self.dispatcher.builder.drop_soon

    def require_kept(self) -> None:
        """Refuses the resources of a coordinator whose cluster another strategy has.

        Raises:
            ClosedError: That is so.
        """
        if self.engine.taken_over is not None:
            raise self.engine.closed_error()

    @property
    def errors(self) -> list[Exception]:
        """All errors that came with the one that was raised last, the first first."""
        with self.engine.lock:
            return list(self.engine.queue.errors)

    def metrics(self) -> dict[str, PlainTree]:
        """Counters and gauges, as plain data; from any thread. With second copies the
        servers are asked whether they live, unless this is the loop's thread.

        Raises:
            ForkedError: Nothing of what happens is known in a forked process.
        """
        require_own(self.portal.loop, "metrics")
        queue, dispatcher = self.engine.queue, self.dispatcher
        workers: dict[str, PlainTree] = {
            member.name: {
                "index": member.place,
                "address": self.session.cluster.workers[member.place].address,
                "state": "leaving" if member.retired else member.state.value,
                "in_flight": len(member.in_flight),
                "depth": member.depth,
                "completed": member.completed,
                "losses": member.losses,
                "reason": member.reason,
            }
            for member in dispatcher.members.members
        }
        recovery = self.session.cluster.recovery
        cluster = self.session.cluster
        return {
            **cluster.run_status.metrics(
                tuple(cluster.workers), tuple(cluster.ps), dispatcher.members.members
            ),
            "queued_closures": queue.queued,
            "queue_full": queue.is_full,
            "inflight_closures": queue.running,
            "scheduled_closures": queue.steps.next - 1,
            "low_water": queue.steps.low_water,
            "steps_per_s": dispatcher.members.rate(self.portal.loop.time()),
            "fetches": self.engine.waiters.fetches,
            "traces": self.calls.traces,
            "turns": dispatcher.turns,
            "dispatches": dispatcher.shipping.messages,
            "stale_completions": dispatcher.outcomes.stale,
            "ps_restores": 0 if recovery is None else recovery.restores,
            "steps_lost": 0 if recovery is None else recovery.steps_lost,
            **self._store_metrics(),
            "recoverable_worker_failures": dispatcher.members.losses,
            **self.session.cluster.turnover.metrics,
            "workers": workers,
        }

    def _store_metrics(self) -> dict[str, PlainTree]:
        cluster, name = self.session.cluster, "stores_without_backup"
        metrics, replication = cluster.moves.metrics, cluster.replication
        if replication is None or name not in metrics or self.portal.is_here:
            return metrics
        timeout = 2 * self.session.settings.timeouts.beat
        asking = replication.status.ask_without_backup(timeout)
        try:
            bare = self.portal.run(asking, 2 * timeout, "asking parameter servers")
        except DeadlineExceededError:  # nothing is known of any
            bare = len(cluster.ps)
        except ClosedError:
            return metrics
        return {**metrics, name: bare}

    def shutdown(self, cluster: bool) -> None:
        """Cancels what waits and runs; with ``cluster`` the daemons end. Idempotent."""
        cause = "the coordinator was shut down"
        # In a forked process nothing is left to end.
        with contextlib.suppress(ForkedError), self.session.lock:
            if self.session.coordinators.get("core") is self:
                # In this order, for an interrupt may come between any two lines: who
                # makes the next coordinator must not issue a step number again.
                self.engine.close(cause)
                self.session.next_step = self.engine.queue.steps.next
                self.session.coordinators.clear()
        if self._finalizer.alive:
            self._on_loop(self.dispatcher.stop, cause)
            self._finalizer.detach()
            self.calls.forget()
        if cluster:
            self.session.close(exit=True)

    def _on_loop(self, function: Callable[..., None], *args: object) -> None:
        async def call() -> None:
            function(*args)

        if not self.portal.is_closed:
            self.portal.run(call(), STOP_SECONDS, function.__name__)


class _LoopCalls:
    """The loop, as the engine knows it. It keeps no `CoordinatorCore` alive."""

    dispatcher: Dispatcher
    """Set before the engine calls anything: it is made of the engine."""

    def __init__(self, portal: Portal) -> None:
        self._portal = portal

    def wake(self) -> None:
        self._portal.call_soon(self.dispatcher.turn)

    def cancel_waiting(self, wish: Cancelling | None = None) -> None:
        self._portal.call_soon(self.dispatcher.cancel_waiting, wish)

    def fence(self, end: int, doubtful: list[int]) -> None:
        self._portal.call_soon(self.dispatcher.fence, end, doubtful)

    def bring(self, kept: Kept) -> list[np.ndarray]:
        warn_of_blocking("the remote value itself")
        # Bounded by the deadline of the request, which is put off while bodies move.
        fetching = self.dispatcher.bring(kept)
        return self._portal.run(fetching, math.inf, "fetching a result")

    async def bring_async(self, kept: Kept) -> list[np.ndarray]:
        fetching = self.dispatcher.bring(kept)
        return await self._portal.run_async(fetching, "fetching a result")


_Options = Mapping[str, Any]


def core_of(strategy: object, options: _Options) -> CoordinatorCore:
    """The core of the strategy's coordinators; made by the first who asks.

    Raises:
        ValueError: It is no strategy for a coordinator, or it has a coordinator with
            other options already.
        ClosedError: The strategy is closed.
    """
    if not isinstance(strategy, CoordinatedStrategy):
        raise ValueError(
            "a coordinator needs a strategy that works with parameter servers "
            f"(zstrat.ParameterServerStrategy); got {type(strategy).__name__}"
        )
    session = strategy.session
    given = {name: value for name, value in options.items() if value is not None}
    with session.lock:
        if session.portal.is_closed:
            raise ClosedError(
                session.taken_over or "the strategy is closed; make a new one"
            )
        made = session.coordinators
        core: CoordinatorCore | None = made.get("core")
        if core is None:
            core = made["core"] = CoordinatorCore(strategy, **given)
            made["options"] = given
        elif given and given != made["options"]:
            raise ValueError(
                "this strategy has a coordinator already, made with the options "
                f"{made['options']}; got {given}: there is one per strategy"
            )
        return core

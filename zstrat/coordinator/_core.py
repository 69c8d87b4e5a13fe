"""`CoordinatorCore`: the queue, the dispatcher and the known functions of a strategy.

`ClusterCoordinator` and `AsyncClusterCoordinator` share one core. The engine and the
dispatcher have no reference to the core: it is collected when the program drops the
strategy and both coordinators, and its finalizer then stops the dispatcher.
"""

from __future__ import annotations

import abc
import contextlib
import math
import weakref
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from zstrat.errors import ClosedError, DeadlineExceededError, ForkedError
from zstrat.transport import require_own, warn_of_blocking

from ._calls import CallTable, Code, PickledArguments
from ._dispatch import Dispatcher
from ._engine import ClosureEngine
from ._queue import MAX_ATTEMPTS, MAX_QUEUED, Queue
from ._resources import Record
from ._values import RemoteValue

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from zstrat.program import Plan
    from zstrat.transport import Portal
    from zstrat.wire import PlainTree

    from ._session import ClusterSession
    from ._values import Kept
    from ._waiting import Cancelling
    from .leases import LeaseBook


WORKER_WAIT_SECONDS: Final = 600.0
"""Seconds without any worker until `join` fails: long enough to boot a machine."""
STOP_SECONDS: Final = 10.0
"""Seconds for the loop to start or stop a dispatcher, which takes no time by itself."""


class CoordinatedStrategy(abc.ABC):
    """A strategy whose steps a `ClusterCoordinator` schedules on workers.

    The strategy is pickled with each step, and unpickled as its counterpart on the
    worker.
    """

    @property
    @abc.abstractmethod
    def session(self) -> ClusterSession:
        """The connected cluster."""

    @abc.abstractmethod
    def scope(self) -> AbstractContextManager[object]:
        """Returns the context in which each scheduled function is traced, here and on
        workers."""

    @abc.abstractmethod
    def require_known(self, plan: Plan) -> None:
        """Checks that the parameter servers of this session can serve a step.

        Raises:
            NotFoundError: The step uses variables or optimizers of another session.
        """


@final
class CoordinatorCore:
    """Schedules the calls of one strategy. See `ClusterCoordinator` for the options."""

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
        self.options: Mapping[str, Any] = {}
        """The options that the program gave to its coordinator, by name."""
        self.blocking: Any = None
        """The `ClusterCoordinator`, if there is one."""
        self.session: ClusterSession = strategy.session
        portal = self.portal = self.session.portal
        queue = Queue(
            MAX_QUEUED if max_queued is None else max_queued,
            MAX_ATTEMPTS if max_attempts is None else max_attempts,
            # Above the steps of an earlier coordinator, and of a program before whose
            # contributions wait on the servers.
            max(self.session.next_step, self.session.cluster.rounds.first_step),
            errors_once=errors_once,
        )
        loop = _LoopCalls(portal)
        self.engine = ClosureEngine(queue, loop, self.session.cluster.rounds.rounds)
        self.dispatcher = loop.dispatcher = Dispatcher(
            self.engine,
            self.session.session,
            self.session.cluster.fences,
            self.session.cluster.rounds,
            closures_in_flight=closures_in_flight,
            prefetch=self.session.cluster.options.prefetch,
            staleness=self.session.staleness,
            worker_wait_timeout=(
                WORKER_WAIT_SECONDS
                if worker_wait_timeout is None
                else worker_wait_timeout
            ),
        )
        self.calls = CallTable(strategy, self.dispatcher.retired)
        self._on_loop(self.session.cluster.attach, self.dispatcher)
        self._finalizer = weakref.finalize(
            self, portal.call_soon, self.dispatcher.stop, "the coordinator was dropped"
        )
        # At exit the portal closes the cluster, which stops the dispatcher.
        self._finalizer.atexit = False

    def create_resource(
        self,
        purpose: str,
        name: str,
        maker: Code,
        arguments: PickledArguments | None = None,
        *,
        kind: type[RemoteValue] = RemoteValue,
        book: LeaseBook | None = None,
        from_start: bool = False,
    ) -> Record:
        """Starts to build a resource (a dataset, iterator or value) on every worker;
        returns its record. ``kind`` is the type of the values that hold the outcome on
        each worker. ``book`` has the leases of a leased dataset, which begins
        ``from_start`` or continues where an earlier program has left it."""
        # Else it would wait for workers that another strategy has.
        self.require_kept()
        record = Record(
            self.engine,
            [member.place for member in self.dispatcher.members.members],
            name=name,
            purpose=purpose,
            maker=maker,
            arguments=arguments,
            kind=kind,
            book=book,
        )
        if book is not None:
            cluster = self.session.cluster
            if cluster.name and not from_start:
                book.noted_as = number = next(cluster.renewal.leased_passes)
                book.inherited = cluster.renewal.done_leases.pop(number, ())
            with self.engine.lock:
                self.engine.queue.leases.books[record.number] = book
        self.dispatcher.builder.add_soon(record)
        self.portal.call_soon(self.dispatcher.turn_soon)
        return record

    @property
    def drop_resource(self) -> Callable[[int], None]:
        """A function that drops a resource, given its number; finalizers may call
        it."""
        return self.dispatcher.builder.drop_soon

    def require_kept(self) -> None:
        """Checks that the workers still have the resources of this coordinator.

        Raises:
            ClosedError: A newer strategy took the cluster over.
        """
        if self.engine.taken_over is not None:
            raise self.engine.closed_error()

    @property
    def errors(self) -> list[Exception]:
        """All errors of the failure that was raised last, oldest first."""
        with self.engine.lock:
            return list(self.engine.queue.errors)

    def metrics(self) -> dict[str, PlainTree]:
        """Returns counters and gauges as plain data. Callable from any thread. With
        replicas, asks the servers for the state of their backups, except on the loop's
        own thread.

        Raises:
            ForkedError: Called in a forked process.
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
        cluster = self.session.cluster
        recovery = cluster.recovery
        return {
            **cluster.run_status.metrics(
                # Copies, as the loop adds workers while this thread reads.
                tuple(cluster.workers),
                tuple(cluster.ps),
                dispatcher.members.members,
            ),
            "queued_closures": queue.queued,
            "queue_full": queue.is_full,
            "inflight_closures": queue.running,
            "scheduled_closures": queue.steps.next - cluster.rounds.first_step,
            "low_water": queue.steps.low_water,
            "leases": self._lease_metrics(),
            **dispatcher.consistency(self.portal.loop.time()),
            "steps_per_s": dispatcher.members.rate(self.portal.loop.time()),
            "fetches": self.engine.waiters.fetches,
            "traces": self.calls.traces,
            "turns": dispatcher.turns,
            "dispatches": dispatcher.shipping.messages,
            "stale_completions": dispatcher.outcomes.stale,
            "ps_restores": cluster.restores,
            "steps_lost": 0 if recovery is None else recovery.steps_lost,
            **self._store_metrics(),
            "recoverable_worker_failures": dispatcher.members.losses,
            **cluster.turnover.metrics,
            "workers": workers,
        }

    def _lease_metrics(self) -> dict[str, PlainTree]:
        members = self.dispatcher.members.members
        with self.engine.lock:
            having = {member.name: list(member.in_flight) for member in members}
            return self.engine.queue.leases.metrics(having)

    def _store_metrics(self) -> dict[str, PlainTree]:
        cluster, name = self.session.cluster, "stores_without_backup"
        metrics, replication = cluster.moves.metrics, cluster.replication
        # On the loop's thread it would wait for itself.
        if replication is None or name not in metrics or self.portal.is_here:
            return metrics
        timeout = 2 * self.session.settings.timeouts.beat
        # Asked, not known: a server that was killed a moment ago is not missed yet.
        asking = replication.status.ask_without_backup(timeout)
        try:
            without_backup = self.portal.run(
                asking, 2 * timeout, "asking parameter servers for backups"
            )
        except DeadlineExceededError:  # no store is known to have a backup
            without_backup = len(cluster.ps)
        except ClosedError:
            return metrics
        return {**metrics, name: without_backup}

    def shutdown(self, cluster: bool) -> None:
        """Cancels all closures; with ``cluster`` also ends the daemons. Idempotent."""
        cause = "the coordinator was shut down"
        # In a forked process there is nothing to end.
        with contextlib.suppress(ForkedError), self.session.lock:
            if self.session.core is self:
                # In this order, as Ctrl-C may strike between any two lines: the next
                # coordinator must not issue a step number again.
                self.engine.close(cause)
                self.session.next_step = self.engine.queue.steps.next
                self.session.core = self.blocking = None
        if self._finalizer.alive:
            self._on_loop(self.dispatcher.stop, cause)
            # Last: if Ctrl-C comes before, the finalizer stops the dispatcher.
            self._finalizer.detach()
            self.calls.forget()
        if cluster:
            self.session.close(exit=True)

    def _on_loop(self, function: Callable[..., None], *args: object) -> None:
        async def call() -> None:
            function(*args)

        # A closed portal has stopped the dispatcher, with the cluster.
        if not self.portal.is_closed:
            self.portal.run(call(), STOP_SECONDS, function.__name__)


class _LoopCalls:
    """Passes the engine's requests on to the loop thread. Has no reference to the
    `CoordinatorCore`."""

    dispatcher: Dispatcher
    """The dispatcher, which is set after construction, as it needs the engine."""

    def __init__(self, portal: Portal) -> None:
        self._portal = portal

    def wake(self) -> None:
        self._portal.call_soon(self.dispatcher.turn)

    def cancel_waiting(self, request: Cancelling | None = None) -> None:
        self._portal.call_soon(self.dispatcher.cancel_waiting, request)

    def fence(self, end: int, doubtful: list[int]) -> None:
        self._portal.call_soon(self.dispatcher.fence, end, doubtful)

    def fetch_kept(self, kept: Kept) -> list[np.ndarray]:
        warn_of_blocking("the remote value itself")
        # The request has a deadline, which moves while bytes of the result arrive.
        fetching = self.dispatcher.fetch_kept(kept)
        return self._portal.run(fetching, math.inf, "fetching a result")

    async def fetch_kept_async(self, kept: Kept) -> list[np.ndarray]:
        fetching = self.dispatcher.fetch_kept(kept)
        return await self._portal.run_async(fetching, "fetching a result")


def core_of(strategy: object, options: Mapping[str, Any]) -> CoordinatorCore:
    """Returns the core that the coordinators of a strategy share; the first call
    creates it.

    Raises:
        ValueError: The strategy does not use parameter servers, it already has a
            coordinator with other options, or an option has a wrong value.
        ClosedError: The strategy is closed.
    """
    if not isinstance(strategy, CoordinatedStrategy):
        raise ValueError(
            "a coordinator needs a zstrat.ParameterServerStrategy; got "
            f"{type(strategy).__name__}"
        )
    session = strategy.session
    given = {name: value for name, value in options.items() if value is not None}
    with session.lock:
        if session.portal.is_closed:
            raise ClosedError(
                session.taken_over or "the strategy is closed; make a new one"
            )
        core: CoordinatorCore | None = session.core
        if core is None:
            _check_options(given)
            core = session.core = CoordinatorCore(strategy, **given)
            core.options = given
        elif given and given != core.options:
            raise ValueError(
                f"this strategy already has a coordinator with {core.options}; got "
                f"{given}. A strategy has one coordinator: pass the same options, or "
                "none"
            )
        return core


def _check_options(given: Mapping[str, Any]) -> None:
    # A wrong timeout would only fail in the loop when no worker is left, unseen.
    for name, value in given.items():
        match name:
            case "worker_wait_timeout":
                known = _is_number(value, int, float) and value >= 0
                expected = "a number of seconds, 0 or more"
            case "errors_once":
                known, expected = isinstance(value, bool), "True or False"
            case _:
                known = _is_number(value, int) and value >= 1
                expected = "a whole number, 1 or more"
        if not known:
            raise ValueError(f"{name}={value!r:.80}: expected {expected}, or None")


def _is_number(value: object, *kinds: type) -> bool:
    return isinstance(value, (*kinds, np.integer)) and not isinstance(value, bool)

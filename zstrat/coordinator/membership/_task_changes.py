"""``strategy.workers`` and ``strategy.parameter_servers``: the tasks of a session,
which a program may add and remove while it trains."""

from __future__ import annotations

import asyncio
import contextlib
import math
import operator
from typing import TYPE_CHECKING, Any, Final, TypeVar, final

from zstrat.errors import InvalidArgumentError
from zstrat.transport import check_address, check_reachable, warn_of_blocking

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from zstrat.cluster import ClusterSpec
    from zstrat.coordinator._session import ClusterSession

T = TypeVar("T", float, None)

SLACK_SECONDS: Final = 10.0
"""Seconds added to the timeout of a change, so that the error raised is that of the
loop."""


def finite_seconds(timeout: float | None, default: T) -> float | T:
    """Returns the seconds of a timeout that the user gave, checked; ``default`` for
    None.

    Raises:
        InvalidArgumentError: The timeout is negative, infinite, or not a number.
    """
    if timeout is None:
        return default
    with contextlib.suppress(TypeError):
        if 0 <= timeout < float("inf"):
            return float(timeout)
    raise InvalidArgumentError(
        f"timeout={timeout!r:.80}: expected a finite number of seconds, 0 or more"
    )


def require_reachable(address: str, what: str) -> None:
    """Checks the address of a task that the user names.

    Args:
        what: The job of the task, "worker" or "ps".

    Raises:
        ValueError: No task can listen there.
    """
    try:
        if isinstance(address, str):
            return check_reachable(address)
    except ValueError:
        pass
    raise ValueError(
        f"address {address!r:.80}: expected HOST:PORT of a {what}, with a port above "
        "0, or ipc:///PATH"
    )


def task_number(index: int | None) -> int | None:
    """Returns the task index that the user gave, checked; None stays None.

    Raises:
        InvalidArgumentError: The index is not an integer of 0 or more.
    """
    if index is None:
        return None
    with contextlib.suppress(TypeError):
        number = operator.index(index)
        if number >= 0 and not isinstance(index, bool):
            return number
    raise InvalidArgumentError(f"index={index!r:.80}: expected an integer, 0 or more")


def named_address(task: str, job: str, addresses: Mapping[int, str]) -> str:
    """Returns the address of a task that is named as "ps:0" or "/job:ps/task:0".
    Returns any other text as it is, so it may be an address."""
    # An address first: a host may be called "worker".
    if task not in addresses.values():
        for number, address in addresses.items():
            if task in (f"{job}:{number}", f"/job:{job}/task:{number}"):
                return address
    return task


@final
class Workers:
    """``strategy.workers``: the workers that run steps.

    A worker has the number with which its daemon was started (``--index``). The number
    of a removed worker is never given to another address.
    """

    def __init__(self, session: ClusterSession) -> None:
        self._session = session

    @property
    def addresses(self) -> dict[int, str]:
        """Addresses of all workers that the cluster has now, by number. Some may not
        answer."""
        return self._session.cluster.turnover.membership.addresses

    def __len__(self) -> int:
        return len(self.addresses)

    def __repr__(self) -> str:
        names = ", ".join(f"{n} at {address}" for n, address in self.addresses.items())
        return f"<zstrat workers: {names or 'none'}>"

    def add(
        self, address: str, index: int | None = None, timeout: float | None = None
    ) -> int:
        """Adds a worker while training continues; blocks until the worker has joined.
        Per-worker datasets and resources are built there before its first closure.

        Args:
            address: Where the worker's daemon listens. The daemon may still be
                starting.
            index: The number that the daemon was started with. Default: the number that
                the address had before, or one more than the highest so far.
            timeout: Seconds for the worker to join. Default: ``timeouts.connect``.

        Returns:
            The number of the worker.

        Raises:
            ValueError: The address is malformed.
            AlreadyExistsError: The cluster already has this address, or this number, or
                the same process at another address.
            InvalidArgumentError: The index is not an integer, or belongs to a removed
                worker at another address; the worker has another number of devices than
                the others; or the strategy has variables with a value per worker.
            DeadlineExceededError: The worker did not answer in time.
            BusyError: Another program uses the worker.
            VersionMismatchError, ProtocolError, PermissionDeniedError: The task is not
                a worker, or refuses this program.
        """
        seconds, number = self._timeout(address, timeout), task_number(index)
        warn_of_blocking("strategy.workers.add_async(address)")
        work = self._session.cluster.turnover.add(address, number, seconds)
        return self._session.run(work, f"adding {address}", seconds + SLACK_SECONDS)

    async def add_async(
        self, address: str, index: int | None = None, timeout: float | None = None
    ) -> int:
        """Adds a worker like `add`, without blocking. Cancellation: the worker is not
        added."""
        seconds, number = self._timeout(address, timeout), task_number(index)
        # Who cancels is on another event loop, and may come when the worker has just
        # joined.
        turnover, added = self._session.cluster.turnover, False

        async def add() -> int:
            nonlocal added
            joined = await turnover.add(address, number, seconds)
            added = True
            return joined

        def undo() -> None:  # on the loop, where `add` may have ended meanwhile
            if added:
                turnover.remove_soon(address)

        try:
            return await self._session.run_async(add(), f"adding {address}")
        except asyncio.CancelledError:
            self._session.portal.call_soon(undo)
            raise

    def remove(self, address: str, timeout: float | None = None) -> None:
        """Removes a worker while training continues; blocks until the worker has left.

        The worker gets no more closures. Those that it runs end there, or on another
        worker if it is lost or they take longer than ``timeout``. Its session is
        closed, and its daemon serves the next program. The last worker may be removed,
        too: closures then wait for ``worker_wait_timeout`` seconds.

        Args:
            address: The worker's address, or its name, "worker:1" or
                "/job:worker/task:1".
            timeout: Seconds for the closures that the worker runs. Default:
                ``timeouts.drain``.

        Raises:
            NotFoundError: No worker has that address or name; lists the workers.
        """
        warn_of_blocking("strategy.workers.remove_async(address)")
        address = named_address(address, "worker", self.addresses)
        work, seconds = self._removing(address, timeout)
        self._session.run(work, f"removing {address}", seconds)

    async def remove_async(self, address: str, timeout: float | None = None) -> None:
        """Removes a worker like `remove`, without blocking. Cancellation: the worker is
        removed all the same, and others run its closures."""
        address = named_address(address, "worker", self.addresses)
        work, _ = self._removing(address, timeout)
        try:
            await self._session.run_async(work, f"removing {address}")
        except asyncio.CancelledError:
            remove_soon = self._session.cluster.turnover.remove_soon
            # The removal may not have started.
            self._session.portal.call_soon(remove_soon, address)
            raise

    def accept_joining(self, accept: bool = True) -> None:
        """Adds workers that report themselves from now on: daemons started with
        ``zstrat-worker --join`` that have a worker's key. Before the first call they
        are refused after ten seconds, and after ``accept_joining(False)`` at once."""
        reported = self._session.cluster.turnover.reported
        self._session.portal.call_soon(reported.accept, accept)

    def follow(self, ask: Callable[[], ClusterSpec]) -> None:
        """Adds, moves and releases workers as the clusters that ``ask`` returns
        require. ``ask`` is called on a thread every ``timeouts.resolve`` seconds, and
        when a worker is lost; its errors are logged, and change nothing."""

        def workers() -> dict[int, str]:
            spec = ask()
            indices = spec.task_indices("worker") if "worker" in spec.jobs else []
            addresses = {n: spec.task_address("worker", n) for n in indices}
            for address in addresses.values():
                # On the resolver's thread, so that a wrong address is an error of the
                # resolver: the workers stay as they are.
                check_address(address)
            return addresses

        every = self._session.settings.timeouts.resolve
        turnover = self._session.cluster.turnover
        self._session.portal.call_soon(turnover.watch, workers, every)

    def bind(self, why: str) -> int:
        """Refuses workers that are new to the cluster from now on, with the reason
        ``why``. Returns the number of places (indices of workers) that exist."""
        membership = self._session.cluster.turnover.membership

        # On the loop, so that no worker is added between the refusal and the count.
        async def fix_places() -> int:
            membership.fix_places(why)
            return membership.size

        return self._session.run(fix_places(), "counting workers")

    def _timeout(self, address: str, timeout: float | None) -> float:
        """Returns the seconds for a worker to join at ``address``. Checks both
        arguments."""
        require_reachable(address, "worker")
        return finite_seconds(timeout, self._session.settings.timeouts.connect)

    def _removing(
        self, address: str, timeout: float | None
    ) -> tuple[Coroutine[Any, Any, None], float]:
        """Returns the coroutine that removes a worker, and the seconds to wait for its
        end."""
        seconds = finite_seconds(timeout, self._session.settings.timeouts.drain)
        work = self._session.cluster.turnover.remove(address, seconds)
        return work, seconds + SLACK_SECONDS


@final
class StoreServers:
    """``strategy.parameter_servers``: the processes that hold the variables.

    Variables are in *stores*: ``stores_per_ps`` for each ps of the cluster at first. A
    store moves to another process as a whole, with the optimizer slots of its
    variables, and variables on the program's side stay valid. Training continues while
    stores move: no step fails, and each store is unavailable only for the moment in
    which its server changes.
    """

    def __init__(self, session: ClusterSession) -> None:
        self._session = session

    @property
    def addresses(self) -> dict[int, str]:
        """Addresses of all parameter servers that the cluster has now, by number. Some
        may not answer."""
        return self._session.cluster.moves.addresses

    def __len__(self) -> int:
        return len(self.addresses)

    def __repr__(self) -> str:
        names = ", ".join(f"{n} at {address}" for n, address in self.addresses.items())
        return f"<zstrat parameter servers: {names}>"

    def add(
        self, address: str, index: int | None = None, timeout: float | None = None
    ) -> int:
        """Adds a ps while training continues, and moves stores to it until no ps serves
        two more than another; blocks until they have moved. With one store per ps the
        new one serves none, until another is drained or lost.

        Args:
            address: Where the ps's daemon listens. The daemon may still be starting.
            index: The number that the daemon was started with. Default: the number that
                the address had before, or one more than the highest so far.
            timeout: Seconds for the ps to join, after earlier changes have ended.
                Default: ``timeouts.connect``. Moving stores has no time limit.

        Returns:
            The number of the ps.

        Raises:
            ValueError: The address is malformed.
            AlreadyExistsError: The cluster already has this address, or this number, or
                the same process at another address.
            InvalidArgumentError: The task is a worker of the cluster, or the session
                has a name (``resume=``) and was opened without this ps.
            DeadlineExceededError: The ps did not answer in time.
            BusyError: Another program uses the ps.
            VersionMismatchError, ProtocolError, PermissionDeniedError: The task is not
                a ps, or refuses this program.
            UnavailableError: The new ps was lost before a store had moved; the store
                stays where it was.
            PSUnavailableError: A ps is lost.
        """
        warn_of_blocking("strategy.parameter_servers.add_async(address)")
        # No limit: moving stores takes as long as there are data.
        work, seconds = self._adding(address, index, timeout), math.inf
        return self._session.run(work, f"adding {address}", seconds)

    async def add_async(
        self, address: str, index: int | None = None, timeout: float | None = None
    ) -> int:
        """Adds a ps like `add`, without blocking. Cancellation: if the ps has joined it
        stays, with the stores that it serves by then; else it is not added."""
        work = self._adding(address, index, timeout)
        return await self._session.run_async(work, f"adding {address}")

    def drain(self, address: str, timeout: float | None = None) -> None:
        """Moves all stores of a ps to others while training continues, then removes the
        ps; blocks until it has left. Its session is closed, and its daemon serves the
        next program, or may be stopped.

        Args:
            address: The ps's address, or its name, "ps:0" or "/job:ps/task:0".
            timeout: Seconds to move the stores, including the wait for earlier changes.
                Default: no limit.

        Raises:
            NotFoundError: No ps has that address or name; lists the parameter servers.
            InvalidArgumentError: There is no other ps, or with ``replicas=1`` only one.
            BusyError: The ps is already being drained.
            DeadlineExceededError: Stores are left on the ps after ``timeout``, and
                stay; or an earlier change took all of the time, and nothing was
                changed.
            UnavailableError: No other ps takes a store, which stays; says why.
            PSUnavailableError: A ps is lost.
        """
        warn_of_blocking("strategy.parameter_servers.drain_async(address)")
        work = self._vacating(address, timeout)
        self._session.run(work, f"draining {address}", math.inf)

    async def drain_async(self, address: str, timeout: float | None = None) -> None:
        """Drains a ps like `drain`, without blocking. Cancellation: the ps stays, with
        the stores that it still serves; if all have moved it leaves."""
        work = self._vacating(address, timeout)
        await self._session.run_async(work, f"draining {address}")

    def rebalance(self) -> None:
        """Moves stores while training continues until no ps serves two more than
        another; blocks until they have moved. After a failover a ps may serve several
        stores, as stores do not move back by themselves.

        Raises:
            DeadlineExceededError: A ps did not answer for ``timeouts.connect`` seconds.
            UnavailableError: A store could not move; says why.
            PSUnavailableError: A ps is lost.
        """
        warn_of_blocking("strategy.parameter_servers.rebalance_async()")
        self._session.run(self._rebalancing(), "rebalancing", math.inf)

    async def rebalance_async(self) -> None:
        """Moves stores like `rebalance`, without blocking. Cancellation: stores that
        have moved stay there."""
        await self._session.run_async(self._rebalancing(), "rebalancing")

    def _rebalancing(self) -> Coroutine[Any, Any, None]:
        return self._session.cluster.moves.rebalance(
            self._session.settings.timeouts.connect
        )

    def _adding(
        self, address: str, index: int | None, timeout: float | None
    ) -> Coroutine[Any, Any, int]:
        require_reachable(address, "ps")
        seconds = finite_seconds(timeout, self._session.settings.timeouts.connect)
        return self._session.cluster.moves.add(address, task_number(index), seconds)

    def _vacating(
        self, address: str, timeout: float | None
    ) -> Coroutine[Any, Any, None]:
        seconds = finite_seconds(timeout, None)
        address = named_address(address, "ps", self.addresses)
        return self._session.cluster.moves.vacate(address, seconds)

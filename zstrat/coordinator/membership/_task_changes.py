"""The workers and the parameter servers of a session, as a program sees them, and
changes them while it trains."""

from __future__ import annotations

import asyncio
import contextlib
import math
import operator
from typing import TYPE_CHECKING, Any, Final, final

from zstrat.errors import InvalidArgumentError
from zstrat.transport import check_address, check_reachable, warn_of_blocking

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from zstrat.cluster import ClusterSpec
    from zstrat.coordinator._session import ClusterSession

SLACK_SECONDS: Final = 10.0
"""Beyond the time of a change, for the loop to say itself that it is over."""


def finite_seconds(timeout: float) -> float:
    """How long the user is ready to wait.

    Raises:
        InvalidArgumentError: It is negative, infinite or no number.
    """
    with contextlib.suppress(TypeError):
        if 0 <= timeout < float("inf"):
            return float(timeout)
    raise InvalidArgumentError(
        f"timeout={timeout!r:.80}: expected a finite number of seconds, 0 or more"
    )


def require_reachable(address: str, what: str) -> None:
    """Checks the address of a task that the user names.

    Args:
        what: What it is to be, "worker" or "ps".

    Raises:
        ValueError: No such task can be reached there; says what was expected.
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
    """The number of a task that the user names, None if he does not.

    Raises:
        InvalidArgumentError: It is none.
    """
    if index is None:
        return None
    with contextlib.suppress(TypeError):
        number = operator.index(index)
        if number >= 0 and not isinstance(index, bool):
            return number
    raise InvalidArgumentError(f"index={index!r:.80}: expected a number, 0 or more")


def named_address(task: str, job: str, addresses: Mapping[int, str]) -> str:
    """The address of a task that the user names: by that, or as messages do, "ps:0" or
    "/job:ps/task:0". What names none of them is left to whoever looks for it, and an
    address that looks like a name is the address."""
    if task not in addresses.values():
        for number, address in addresses.items():
            if task in (f"{job}:{number}", f"/job:{job}/task:{number}"):
                return address
    return task


@final
class Workers:
    """``strategy.workers``: the workers that compute steps, and changes of them.

    A worker has a number, with which its daemon was started (``--index``). A number
    that was removed is never given to another address.
    """

    def __init__(self, session: ClusterSession) -> None:
        self._session = session

    @property
    def addresses(self) -> dict[int, str]:
        """Number to address, of all that the cluster has now; some may not answer."""
        return self._session.cluster.turnover.membership.addresses

    def __len__(self) -> int:
        return len(self.addresses)

    def __repr__(self) -> str:
        each = ", ".join(f"{n} at {address}" for n, address in self.addresses.items())
        return f"<zstrat workers: {each or 'none'}>"

    def add(
        self, address: str, index: int | None = None, timeout: float | None = None
    ) -> int:
        """Takes a worker in while training goes on; blocks until it is in the session.
        Per-worker datasets and resources are built there before its first closure.

        Args:
            address: Where its daemon listens. It may be started later, in time.
            index: The number that the daemon was started with. Left out: that which the
                address had before, or else one more than the highest so far.
            timeout: Seconds that it has to come; ``timeouts.connect`` if left out.

        Returns:
            Its number.

        Raises:
            ValueError: The address is none.
            AlreadyExistsError: The cluster has this address, or number, already, or the
                same process by another address.
            InvalidArgumentError: The number is none, or that of another address, which
                was removed; the worker has another number of devices than the others;
                or the strategy has variables with a value per worker.
            DeadlineExceededError: It did not answer in time.
            BusyError: Another program has it.
            VersionMismatchError, ProtocolError, PermissionDeniedError: It is none that
                could join.
        """
        seconds, number = self._timeout(address, timeout), task_number(index)
        warn_of_blocking("strategy.workers.add_async(address)")
        work = self._session.cluster.turnover.add(address, number, seconds)
        return self._session.run(work, f"adding {address}", seconds + SLACK_SECONDS)

    async def add_async(
        self, address: str, index: int | None = None, timeout: float | None = None
    ) -> int:
        """As `add`, awaited. Cancellation: it is not taken in."""
        seconds, number = self._timeout(address, timeout), task_number(index)
        turnover, added = self._session.cluster.turnover, False

        async def add() -> int:
            nonlocal added
            given = await turnover.add(address, number, seconds)
            added = True
            return given

        def undo() -> None:  # on the loop, where it may have ended meanwhile
            if added:
                turnover.expel(address)

        try:
            return await self._session.run_async(add(), f"adding {address}")
        except asyncio.CancelledError:
            self._session.portal.call_soon(undo)
            raise

    def remove(self, address: str, timeout: float | None = None) -> None:
        """Lets a worker go while training goes on; blocks until it has gone.

        It gets nothing new. What it has begun runs to its end there, or on another
        worker if it is lost or has not ended in time; its session is closed, and its
        daemon serves the next program. The last one may be removed, too: closures
        wait then, for ``worker_wait_timeout``.

        Args:
            address: Its address, or its name, "worker:1" or "/job:worker/task:1".
            timeout: Seconds for what it has begun; ``timeouts.drain`` if left out.

        Raises:
            NotFoundError: No worker of the cluster is at that address, or has that
                name; says which there are.
        """
        warn_of_blocking("strategy.workers.remove_async(address)")
        address = named_address(address, "worker", self.addresses)
        work, seconds = self._removing(address, timeout)
        self._session.run(work, f"removing {address}", seconds)

    async def remove_async(self, address: str, timeout: float | None = None) -> None:
        """As `remove`, awaited. Cancellation: it is gone all the same, and what it has
        runs on another worker."""
        address = named_address(address, "worker", self.addresses)
        work, _ = self._removing(address, timeout)
        try:
            await self._session.run_async(work, f"removing {address}")
        except asyncio.CancelledError:
            expel = self._session.cluster.turnover.expel
            self._session.portal.call_soon(expel, address)  # it may not have begun
            raise

    def accept_joining(self, accept: bool = True) -> None:
        """From now on workers are taken in, as by `add`, that report themselves:
        daemons started with ``zstrat-worker --join``, which have a worker's key. Up to
        then they are refused when they have waited ten seconds, and behind
        ``accept_joining(False)`` at once."""
        reports = self._session.cluster.turnover.reports
        self._session.portal.call_soon(reports.accept, accept)

    def follow(self, ask: Callable[[], ClusterSpec]) -> None:
        """From now on the workers are those of which ``ask`` tells. It is called on a
        thread, when a worker was lost and every ``timeouts.resolve`` seconds; what it
        raises is logged, and changes nothing."""

        def workers() -> dict[int, str]:
            spec = ask()
            indices = spec.task_indices("worker") if "worker" in spec.jobs else []
            found = {index: spec.task_address("worker", index) for index in indices}
            for address in found.values():
                check_address(address)
            return found

        every = self._session.settings.timeouts.resolve
        turnover = self._session.cluster.turnover
        self._session.portal.call_soon(turnover.watch, workers, every)

    def bind(self, why: str) -> int:
        """No worker that is new to the cluster is taken any more, for that reason;
        returns how many places were given."""
        membership = self._session.cluster.turnover.membership

        async def bound() -> int:
            membership.bind(why)
            return membership.size

        return self._session.run(bound(), "counting workers")

    def _timeout(self, address: str, timeout: float | None) -> float:
        """For how long to wait for a worker that is added there."""
        require_reachable(address, "worker")
        seconds = self._session.settings.timeouts.connect
        return seconds if timeout is None else finite_seconds(timeout)

    def _removing(
        self, address: str, timeout: float | None
    ) -> tuple[Coroutine[Any, Any, None], float]:
        """The work, and for how long to wait for it."""
        seconds = self._session.settings.timeouts.drain
        seconds = seconds if timeout is None else finite_seconds(timeout)
        work = self._session.cluster.turnover.remove(address, seconds)
        return work, seconds + SLACK_SECONDS


@final
class StoreServers:
    """``strategy.parameter_servers``: which processes hold the variables, and how that
    changes while steps run.

    Variables are in *stores*, as many as there are ps at first, times
    ``stores_per_ps``. A store moves as a whole, with what optimizers keep beside its
    variables; handles stay as they are. Meanwhile training goes on: no step fails, and
    each store is away for a moment, when it is served elsewhere.
    """

    def __init__(self, session: ClusterSession) -> None:
        self._session = session

    @property
    def addresses(self) -> dict[int, str]:
        """Number to address, of all that the cluster has now; some may not answer."""
        return self._session.cluster.moves.addresses

    def __len__(self) -> int:
        return len(self.addresses)

    def __repr__(self) -> str:
        each = ", ".join(f"{n} at {address}" for n, address in self.addresses.items())
        return f"<zstrat parameter servers: {each}>"

    def add(
        self, address: str, index: int | None = None, timeout: float | None = None
    ) -> int:
        """Takes a ps in while training goes on, and moves stores to it, until no ps
        serves two more than another one; blocks until they are there. So with one store
        per ps it serves none, until another one is drained or lost.

        Args:
            address: Where its daemon listens. It may be started later, in time.
            index: The number that the daemon was started with. Left out: that which the
                address had before, or else one more than the highest so far.
            timeout: Seconds that it has to come; ``timeouts.connect`` if left out. They
                count from its turn: changes go one at a time. What moves has as long as
                it takes.

        Returns:
            Its number.

        Raises:
            ValueError: The address is none.
            AlreadyExistsError: The cluster has this address, or number, already, or the
                same process by another address.
            InvalidArgumentError: It is a worker of the cluster, or the session has a
                name (``resume=``) and began without it.
            DeadlineExceededError: It did not answer in time.
            BusyError: Another program has it.
            VersionMismatchError, ProtocolError, PermissionDeniedError: It is none that
                could join.
            UnavailableError: It was lost before it served what it was to; that is where
                it was.
            PSUnavailableError: A ps is lost.
        """
        warn_of_blocking("strategy.parameter_servers.add_async(address)")
        work, seconds = self._adding(address, index, timeout), math.inf
        return self._session.run(work, f"adding {address}", seconds)

    async def add_async(
        self, address: str, index: int | None = None, timeout: float | None = None
    ) -> int:
        """As `add`, awaited. Cancellation: it stays, with the stores that it serves by
        then; if it was not in the session yet it is not taken in."""
        work = self._adding(address, index, timeout)
        return await self._session.run_async(work, f"adding {address}")

    def drain(self, address: str, timeout: float | None = None) -> None:
        """Moves all stores of a ps to others while training goes on, and lets it go;
        blocks until it has gone. Its session is closed, and its daemon serves whoever
        comes next, or may be stopped.

        Args:
            address: Its address, or its name, "ps:0" or "/job:ps/task:0".
            timeout: Seconds until nothing is left there, also those in which another
                change is under way; left out: as long as it takes.

        Raises:
            NotFoundError: No ps of the cluster is at that address, or has that name;
                says which there are.
            InvalidArgumentError: No other one is there, or with ``replicas=1`` only one
                is.
            BusyError: It is being drained already.
            DeadlineExceededError: Some stores are there after ``timeout``, and stay; or
                another change was under way all that time, and nothing was changed.
            UnavailableError: No other ps takes a store, which stays; says why.
            PSUnavailableError: A ps is lost.
        """
        warn_of_blocking("strategy.parameter_servers.drain_async(address)")
        work = self._vacating(address, timeout)
        self._session.run(work, f"draining {address}", math.inf)

    async def drain_async(self, address: str, timeout: float | None = None) -> None:
        """As `drain`, awaited. Cancellation: it stays, with the stores that it serves
        then; it goes if its session is being closed, behind the last of them."""
        work = self._vacating(address, timeout)
        await self._session.run_async(work, f"draining {address}")

    def rebalance(self) -> None:
        """Moves stores while training goes on, until no ps serves two more than another
        one, and blocks until they are there. Behind a failover one may serve several,
        as nothing moves back by itself.

        Raises:
            DeadlineExceededError: A ps is away, for ``timeouts.connect``.
            UnavailableError: A store stays where it was; says why.
            PSUnavailableError: A ps is lost.
        """
        warn_of_blocking("strategy.parameter_servers.rebalance_async()")
        self._session.run(self._rebalancing(), "rebalancing", math.inf)

    async def rebalance_async(self) -> None:
        """As `rebalance`, awaited. Cancellation: stores that have moved stay there."""
        await self._session.run_async(self._rebalancing(), "rebalancing")

    def _rebalancing(self) -> Coroutine[Any, Any, None]:
        return self._session.cluster.moves.rebalance(
            self._session.settings.timeouts.connect
        )

    def _adding(
        self, address: str, index: int | None, timeout: float | None
    ) -> Coroutine[Any, Any, int]:
        require_reachable(address, "ps")
        seconds = self._session.settings.timeouts.connect
        if timeout is not None:
            seconds = finite_seconds(timeout)
        return self._session.cluster.moves.add(address, task_number(index), seconds)

    def _vacating(
        self, address: str, timeout: float | None
    ) -> Coroutine[Any, Any, None]:
        seconds = None if timeout is None else finite_seconds(timeout)
        address = named_address(address, "ps", self.addresses)
        return self._session.cluster.moves.vacate(address, seconds)

"""The workers of a session, as a program sees and changes them while it trains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, final

from zstrat.errors import InvalidArgumentError
from zstrat.transport import check_address, check_told

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from zstrat.cluster import ClusterSpec
    from zstrat.config import Settings
    from zstrat.transport import Portal

    from ._turnover import Turnover

T = TypeVar("T")

SLACK_SECONDS: Final = 10.0
"""Beyond the time of a change, for the loop to say itself that it is over."""


Tasks_co = TypeVar("Tasks_co", covariant=True)


class ChangingSession(Protocol[Tasks_co]):
    """What carries out changes of its tasks on its loop: `ClusterSession`."""

    @property
    def cluster(self) -> Tasks_co: ...

    @property
    def settings(self) -> Settings: ...

    @property
    def portal(self) -> Portal: ...

    def run(
        self, work: Coroutine[Any, Any, T], what: str, timeout: float | None = None
    ) -> T: ...

    async def run_async(self, work: Coroutine[Any, Any, T], what: str) -> T: ...


def finite_seconds(timeout: float) -> float:
    """How long the user is ready to wait.

    Raises:
        InvalidArgumentError: It is negative, infinite or no number.
    """
    if not 0 <= timeout < float("inf"):
        raise InvalidArgumentError(
            f"timeout={timeout!r}: expected a finite number of seconds, 0 or more"
        )
    return float(timeout)


def require_reachable(address: str, what: str) -> None:
    """Checks the address of a task that the user names.

    Args:
        what: What it is to be, "worker" or "ps".

    Raises:
        ValueError: No such task can be reached there; says what was expected.
    """
    try:
        if isinstance(address, str):
            return check_told(address)
    except ValueError:
        pass
    raise ValueError(
        f"address {address!r:.80}: expected HOST:PORT of a {what}, with a port above "
        "0, or ipc:///PATH"
    )


class TurnoverCluster(Protocol):
    """The tasks of a session, as far as they come and go."""

    @property
    def turnover(self) -> Turnover: ...


@final
class Workers:
    """``strategy.workers``: the workers that compute steps, and changes of them.

    A worker has a number, with which its daemon was started (``--index``). A number
    that was removed is never given to another address.
    """

    def __init__(self, session: ChangingSession[TurnoverCluster]) -> None:
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
            InvalidArgumentError: The number is that of another address, which was
                removed; the worker has another number of devices than the others; or
                the strategy has variables with a value per worker.
            DeadlineExceededError: It did not answer in time.
            BusyError: Another program has it.
            VersionMismatchError, ProtocolError, PermissionDeniedError: It is none that
                could join.
        """
        require_reachable(address, "worker")
        patience = self._patience(timeout, self._session.settings.timeouts.connect)
        work = self._session.cluster.turnover.add(address, index, patience)
        return self._session.run(work, f"adding {address}", patience + SLACK_SECONDS)

    async def add_async(
        self, address: str, index: int | None = None, timeout: float | None = None
    ) -> int:
        """As `add`, awaited. Cancellation: it is not taken in."""
        require_reachable(address, "worker")
        patience = self._patience(timeout, self._session.settings.timeouts.connect)
        work = self._session.cluster.turnover.add(address, index, patience)
        return await self._session.run_async(work, f"adding {address}")

    def remove(self, address: str, timeout: float | None = None) -> None:
        """Lets a worker go while training goes on; blocks until it has gone.

        It gets nothing new. What it has begun runs to its end there, or on another
        worker if it is lost or has not ended in time; its session is closed, and its
        daemon serves the next program. The last one may be removed, too: closures
        wait then, for ``worker_wait_timeout``.

        Args:
            timeout: Seconds for what it has begun; ``timeouts.drain`` if left out.

        Raises:
            NotFoundError: No worker of the cluster is at that address.
        """
        patience = self._patience(timeout, self._session.settings.timeouts.drain)
        work = self._session.cluster.turnover.remove(address, patience)
        self._session.run(work, f"removing {address}", patience + SLACK_SECONDS)

    async def remove_async(self, address: str, timeout: float | None = None) -> None:
        """As `remove`, awaited. Cancellation: it is gone all the same, and what it has
        runs on another worker."""
        patience = self._patience(timeout, self._session.settings.timeouts.drain)
        work = self._session.cluster.turnover.remove(address, patience)
        await self._session.run_async(work, f"removing {address}")

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

    @staticmethod
    def _patience(timeout: float | None, default: float) -> float:
        return default if timeout is None else finite_seconds(timeout)

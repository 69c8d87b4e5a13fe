"""The parameter servers of a session, as a program sees and changes them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol, final

from zstrat.coordinator.membership import finite_seconds, require_reachable

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

    from zstrat.coordinator.membership import ChangingSession

    from ._store_moves import StoreMoves


class StoresCluster(Protocol):
    """The tasks of a session, as far as stores move."""

    @property
    def moves(self) -> StoreMoves: ...


@final
class StoreServers:
    """``strategy.parameter_servers``: which processes hold the variables, and how that
    changes while steps run.

    Variables lie in *stores*, as many as there are ps at first, times
    ``stores_per_ps``. A store moves as a whole, with what optimizers keep beside its
    variables; handles stay as they are. Meanwhile training goes on: no step fails, and
    each store is away for a moment, when it is served elsewhere.
    """

    def __init__(self, session: ChangingSession[StoresCluster]) -> None:
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
            timeout: Seconds until nothing is left there, also those in which another
                change is under way; left out: as long as it takes.

        Raises:
            NotFoundError: No ps of the cluster is at that address.
            InvalidArgumentError: No other one is there, or with ``replicas=1`` only one
                is.
            BusyError: It is being drained already.
            DeadlineExceededError: Some stores are there after ``timeout``, and stay; or
                another change was under way all that time, and nothing was changed.
            UnavailableError: No other ps takes a store, which stays; says why.
            PSUnavailableError: A ps is lost.
        """
        work = self._vacating(address, timeout)
        self._session.run(work, f"draining {address}", math.inf)

    async def drain_async(self, address: str, timeout: float | None = None) -> None:
        """As `drain`, awaited. Cancellation: it stays, with the stores that it serves
        then; it goes if its session is being closed, behind the last of them."""
        work = self._vacating(address, timeout)
        await self._session.run_async(work, f"draining {address}")

    def level(self) -> None:
        """Moves stores while training goes on, until no ps serves two more than another
        one, and blocks until they are there. Behind a failover one may serve several,
        as nothing moves back by itself.

        Raises:
            DeadlineExceededError: A ps is away, for ``timeouts.connect``.
            UnavailableError: A store stays where it was; says why.
            PSUnavailableError: A ps is lost.
        """
        self._session.run(self._levelling(), "levelling", math.inf)

    async def level_async(self) -> None:
        """As `level`, awaited. Cancellation: stores that have moved stay there."""
        await self._session.run_async(self._levelling(), "levelling")

    def _levelling(self) -> Coroutine[Any, Any, None]:
        return self._session.cluster.moves.level(
            self._session.settings.timeouts.connect
        )

    def _adding(
        self, address: str, index: int | None, timeout: float | None
    ) -> Coroutine[Any, Any, int]:
        require_reachable(address, "ps")
        patience = self._session.settings.timeouts.connect
        if timeout is not None:
            patience = finite_seconds(timeout)
        return self._session.cluster.moves.add(address, index, patience)

    def _vacating(
        self, address: str, timeout: float | None
    ) -> Coroutine[Any, Any, None]:
        patience = None if timeout is None else finite_seconds(timeout)
        return self._session.cluster.moves.vacate(address, patience)

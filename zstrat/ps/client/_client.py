"""A client that pulls from, and pushes to, all parameter servers of a cluster.

Lives on the event loop that owns the links. A call sends its messages before it
returns, one to each server (several to read or create thousands of variables); its
future is done when all servers have answered. Requests to one server arrive in the
order of the calls, so that a pull which follows a push on the same client reads what
the push wrote.

Every request to a server that is lost raises `PSUnavailableError`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, final

from zstrat.ps.store._ledger import PACKED, DoneLeases, named
from zstrat.wire import (
    LEASE,
    AppliedLeases,
    AppliedParts,
    AskLeases,
    AskParts,
    Codec,
)

from ._asking import CallPart, nothing
from ._line import REQUEST_TIMEOUT
from ._pushing import OwnUpdates, Pushing, RoundCalls, exchange, pulling
from ._reading import Known, Reading
from ._snapshot_client import SnapshotCalls
from ._variable_client import VariableCalls

if TYPE_CHECKING:
    import asyncio
    from collections import Counter
    from collections.abc import Iterable, Sequence

    import numpy as np

    from zstrat.ps.store._ledger import EagerRun
    from zstrat.transport import TaskLink

    from ._pushing import PsUpdate
    from ._reading import Clocks, Ref, RowsRef, SetRef

MEMORY: Final = 256 * 2**20
"""Default bound of the values that a client caches, in bytes."""


@final
class PsClient(VariableCalls, SnapshotCalls, RoundCalls):
    """Pulls from and pushes to all parameter servers of one session.

    Args:
        links: One per parameter server, in task order, opened by the caller.
        session: The session that is open on all of them.
        writer: The incarnation in the HELLO of the links, which names the updates that
            `update` sends; 0: they have no name, so they are not repeated safely.
        memory: Bytes of values to cache, so that a variable which did not change is not
            sent again; 0 caches nothing.
        request_timeout: Seconds that a request without a deadline waits for a server
            that is not connected.
    """

    def __init__(
        self,
        links: Sequence[TaskLink],
        session: int,
        *,
        writer: int = 0,
        memory: int = MEMORY,
        request_timeout: float = REQUEST_TIMEOUT,
    ) -> None:
        super().__init__(links, session, request_timeout)
        self.unreleased = set()
        self._own = OwnUpdates(writer)
        self._memory = memory
        self.counts: Counter[str] | None = None
        """Counts the bytes of values before they were encoded for the wire
        (``encoded_from``), and after (``encoded_to``); None: they are not counted."""
        self._known = Known(memory)
        self._incarnations: list[int | None] = [None] * len(self.lines)

    def enter(self, session: int) -> None:
        """Switches to another session, which is open on all servers. Results of reads
        that began in the former session are not cached."""
        self.session = session
        self.unreleased = set()
        # Another object: answers that are under way go to the former one.
        self._known = Known(self._memory)

    def shares_memory(self, ps: int) -> bool:
        """Returns whether large bodies to a server go through shared memory. Any thread
        may call it."""
        return self.lines[ps].shares_memory

    def pull(
        self,
        refs: Sequence[Ref],
        rows: Sequence[RowsRef] = (),
        sets: Sequence[SetRef] = (),
        *,
        deadline: float | None = None,
        clocks: Clocks | None = None,
    ) -> asyncio.Future[list[np.ndarray]]:
        """Reads variables, and rows of variables, as read-only arrays: first the values
        in the order of ``refs``, then an array ``[n, ...]`` for each of ``rows``.
        ``sets`` says which of ``refs`` are read together as one array.

        Each array is of one whole version of its variable; all arrays together are not
        a snapshot.

        Args:
            deadline: In loop time; None: the default of the link.
            clocks: Filled with the number of pushes that each server has applied
                (`Clocks`), before the future is done.

        Raises (in the future):
            PSUnavailableError: A parameter server is gone.
            InvalidArgumentError: Indices are not integers, or out of range; the error
                names the variable.
            NotFoundError, StaleSessionError: A server refuses the request.
        """
        reading = self._reading(refs, rows, clocks, sets)
        parts = [pulling(asked, self.session) for asked in reading.messages()]
        return self._ask(parts, reading.result, deadline)

    def push(
        self,
        step: int,
        part: int,
        low_water: int,
        updates: Sequence[PsUpdate],
        *,
        deadline: float | None = None,
        clocks: Clocks | None = None,
        leases: bytes = b"",
    ) -> asyncio.Future[bool]:
        """Applies updates: each server applies all of its updates, or none.

        Args:
            step: The number of the closure that makes the updates, -1 for none. A
                server applies ``(step, part)`` at most once in a session.
            low_water: All steps below this number are over. Servers use it only from
                updates outside of closures (`update`).
            clocks: Filled with the number of pushes that each server of an update has
                applied (`Clocks`).
            leases: Ranges of leased datasets that the step has used, see `Push`.

        Returns:
            Whether any server applied the push; False if all had applied it before.

        Raises (in the future):
            PSUnavailableError: A parameter server is gone.
            InvalidArgumentError, NotFoundError, StaleSessionError, BusyError: A server
                refuses the push. Other servers may have applied their updates.
            ValueError: The updates of one server do not fit one message (those of about
                ten thousand variables), so the server could not apply all or none.
        """
        pushing = Pushing(
            self.session, step, part, low_water, updates, clocks=clocks, leases=leases
        )
        return self._ask(pushing.parts(), pushing.result, deadline)

    def update(
        self, updates: Sequence[PsUpdate], *, deadline: float | None = None
    ) -> asyncio.Future[bool]:
        """Pushes an update that this process makes outside of closures. Each server
        applies the update once, however often it has to be sent; all else is as in
        `push`."""
        return self._update(updates, deadline)

    async def note_leases(self, leases: bytes) -> None:
        """Makes all servers note ranges of leased datasets as done; see `Push`.

        Raises:
            PSUnavailableError: A parameter server is gone.
        """
        # Ranges are in the header of a message, which is bounded.
        for at in range(0, len(leases), PACKED * LEASE.size):
            part = leases[at : at + PACKED * LEASE.size]
            await self._update((), None, part, range(self.count))

    async def applied_leases(self, deadline: float) -> list[tuple[int, ...]]:
        """Returns the ranges of leased datasets that any server has noted as done, each
        as the fields of a `LEASE`.

        Raises:
            PSUnavailableError: A parameter server is gone.
        """
        asked = [(ps, AskLeases(self.session)) for ps in range(self.count)]
        answers = await self.each(asked, AppliedLeases, deadline=deadline)
        # Servers know different ranges: a push notes them where its updates are.
        joined = DoneLeases()
        for answer in answers:
            joined.note(answer.arrays[0].tobytes())
        return [lease for part in joined.packed() for lease in LEASE.iter_unpack(part)]

    def _update(
        self,
        updates: Sequence[PsUpdate],
        deadline: float | None,
        leases: bytes = b"",
        servers: Iterable[int] = (),
    ) -> asyncio.Future[bool]:
        number, low_water = self._own.begin()
        writer = self._own.writer
        try:
            pushing = Pushing(
                self.session, number, 0, low_water, updates, writer,
                leases=leases, servers=servers,
            )  # fmt: skip
            done = self._ask(pushing.parts(), pushing.result, deadline)
        except BaseException:  # to the caller: what was not sent holds no mark back
            self._own.end(number)
            raise
        done.add_done_callback(lambda _: self._own.end(number))
        return done

    def push_part(
        self,
        run: EagerRun,
        part: int,
        names: Sequence[str],
        updates: Sequence[PsUpdate],
        *,
        clocks: Clocks | None = None,
    ) -> asyncio.Future[bool]:
        """Pushes the next part of an eager step: the updates since its last part. All
        else is as in `push`.

        Args:
            names: For each update, where in the step it is made, and what it does.
            clocks: Filled with the number of pushes that each server of an update has
                applied (`Clocks`).

        Raises (in the future), besides what `push` does:
            RetryDiffersError: An earlier run of the step has pushed something else as
                this part.
            StaleSessionError: A later run of the step has begun.
        """
        step, attempt, low_water, leases = run
        pushing = Pushing(
            self.session, step, part, low_water, updates, clocks=clocks, leases=leases
        )
        parts = [
            pushing.part(ps, named(push, attempt, names))
            for ps, push in pushing.messages.items()
        ]
        return self._ask(parts, pushing.result)

    async def applied_parts(self, run: EagerRun) -> dict[int, tuple[str, ...]]:
        """Returns what earlier runs of an eager step have pushed: the names of the
        updates of each part. Ends those runs: they have no further effect.

        Raises:
            PSUnavailableError: A parameter server is gone.
            StaleSessionError: A later run of the step has begun.

        Cancellation: the earlier runs may have ended.
        """
        found: dict[int, tuple[str, ...]] = {}
        asked_from = dict.fromkeys(range(self.count), 0)

        def take(ps: int, answer: AppliedParts) -> None:
            found.update((part, tuple(names)) for part, names in answer.parts)
            asked = asked_from.pop(ps)
            # Else a server that repeats itself would be asked without end.
            if answer.more and answer.more <= asked:
                raise ValueError(f"parts from {asked} on, and more from {answer.more}")
            if answer.more:
                asked_from[ps] = answer.more

        while asked_from:
            parts = [
                CallPart(
                    ps,
                    AskParts(self.session, run.step, run.attempt, first),
                    AppliedParts,
                    partial(take, ps),
                )
                for ps, first in asked_from.items()
            ]
            await self._ask(parts, nothing)
        return found

    def exchange(
        self,
        step: int,
        part: int,
        low_water: int,
        updates: Sequence[PsUpdate],
        refs: Sequence[Ref],
        rows: Sequence[RowsRef] = (),
        sets: Sequence[SetRef] = (),
        *,
        deadline: float | None = None,
        clocks: tuple[Clocks, Clocks] | None = None,
        leases: bytes = b"",
    ) -> tuple[asyncio.Future[bool], asyncio.Future[list[np.ndarray]]]:
        """Pushes updates and then pulls values, in half as many messages as `push` and
        `pull` take. Either may fail without the other, unless a server is lost.

        Args:
            deadline: Of both, in loop time; None: the default of the link.
            clocks: The arguments ``clocks`` of `push` and of `pull`.
            leases: As in `push`.

        Returns:
            The futures that `push` and `pull` would have returned.
        """
        push_clocks, pull_clocks = clocks or (None, None)
        pushing = Pushing(
            self.session, step, part, low_water, updates,
            clocks=push_clocks, leases=leases,
        )  # fmt: skip
        reading = self._reading(refs, rows, pull_clocks, sets)
        return exchange(self.lines, self.session, pushing, reading, deadline)

    def _reading(
        self,
        refs: Sequence[Ref],
        rows: Sequence[RowsRef],
        clocks: Clocks | None,
        sets: Sequence[SetRef] = (),
    ) -> Reading:
        # First: the messages name the versions that are remembered.
        self._forget_restarted()
        shares = self.shares_memory
        return Reading(refs, rows, self._known, clocks, shares, self.counts, sets)

    def _forget(self, refs: Iterable[Ref]) -> None:
        for ref in refs:
            # A float32 value may be remembered twice, as it is and as bfloat16.
            self._known.drop(ref)
            self._known.drop(ref._replace(codec=int(Codec.BFLOAT16)))

    def _forget_restarted(self) -> None:
        """Drops cached values of servers that were restarted: a new process counts
        versions from the start."""
        for ps, line in enumerate(self.lines):
            peer = line.peer
            if peer is not None and peer.incarnation != self._incarnations[ps]:
                if self._incarnations[ps] is not None:
                    self._known.clear()
                self._incarnations[ps] = peer.incarnation

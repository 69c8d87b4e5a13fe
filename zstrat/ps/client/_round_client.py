"""Requests about rounds to all parameter servers of a session."""

from __future__ import annotations

import abc
import asyncio
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from zstrat.wire import (
    CloseRound,
    Contribute,
    Done,
    Merged,
    MergeRule,
    PulledRound,
    PullMerged,
    PullRound,
    RoundMember,
    RoundNumber,
)

from ._asking import AskedServers, CallPart, nothing
from ._pushing import Pushing

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from ._pushing import PsUpdate
    from ._reading import Clocks, Reading, Ref, RowsRef, ServerPull

UNLIMITED: Final = 10.0**9
"""Seconds that a pull waits for its round: the coordinator decides when that is too
long."""


class RoundMembers(NamedTuple):
    """The members of one round of an optimizer, and how they are merged."""

    optimizer: int
    number: int
    rule: MergeRule
    members: Sequence[RoundMember]


class RoundCalls(AskedServers, abc.ABC):
    """The calls of `PsClient` about rounds."""

    @abc.abstractmethod
    def _reading(
        self, refs: Sequence[Ref], rows: Sequence[RowsRef], clocks: Clocks | None
    ) -> Reading:
        """Begins a pull."""

    def contribute(
        self, step: int, attempt: int, updates: Sequence[PsUpdate]
    ) -> asyncio.Future[None]:
        """Has the servers keep the gradients of a step for rounds.

        Raises (in the future):
            PSUnavailableError: A parameter server is gone.
            InvalidArgumentError, NotFoundError, StaleSessionError, BusyError: As the
                server says. Others may have kept their part.
        """
        pushing = Pushing(self.session, step, 0, 0, updates)
        parts = [
            CallPart(
                ps,
                Contribute(self.session, step, attempt, push.updates, push.arrays),
                Done,
                nothing,
            )
            for ps, push in pushing.messages.items()
        ]
        return self._ask(parts, nothing)

    def pull_round(
        self,
        after: Sequence[RoundNumber],
        refs: Sequence[Ref],
        rows: Sequence[RowsRef] = (),
        *,
        clocks: Clocks | None = None,
        numbers: dict[int, int],
    ) -> asyncio.Future[list[np.ndarray]]:
        """`PsClient.pull`, when all rounds before those of ``after`` are closed.

        Args:
            numbers: Gets for each optimizer the earliest round in which a server was
                read.
        """
        reading = self._reading(refs, rows, clocks)

        def take(asked: ServerPull, answer: PulledRound) -> None:
            for each, number in zip(after, answer.numbers, strict=True):
                before = numbers.get(each.optimizer, number)
                numbers[each.optimizer] = min(before, number)
            asked.take(answer)

        parts = [
            CallPart(
                asked.ps,
                PullRound(
                    self.session, list(after), asked.reads, asked.rows, asked.indices
                ),
                PulledRound,
                partial(take, asked),
            )
            for asked in reading.messages()
        ]
        deadline = asyncio.get_running_loop().time() + UNLIMITED
        return self._ask(parts, reading.result, deadline)

    async def close_round(
        self,
        closed: RoundMembers,
        kept: Sequence[int],
        over: int,
        operands: Sequence[np.ndarray] = (),
    ) -> None:
        """Closes a round on all servers; see `CloseRound`.

        Raises:
            PSUnavailableError: A parameter server is gone.
            ZstratError: As the server says.

        Cancellation: some servers may have closed it.
        """
        message = CloseRound(
            self.session,
            closed.optimizer,
            closed.number,
            int(closed.rule),
            list(closed.members),
            list(kept),
            over,
            tuple(operands),
        )
        await self.each([(ps, message) for ps in range(self.count)], Done)

    async def pull_merged(
        self, closed: RoundMembers
    ) -> dict[int, tuple[np.ndarray, ...]]:
        """Reads the merged gradients of the members, by key of the variable: an array,
        or indices and rows.

        Raises: As `close_round`.

        Cancellation: changes nothing.
        """
        message = PullMerged(
            self.session,
            closed.optimizer,
            closed.number,
            int(closed.rule),
            list(closed.members),
        )
        found: dict[int, tuple[np.ndarray, ...]] = {}
        servers = range(self.count)
        for answer in await self.each([(ps, message) for ps in servers], Merged):
            arrays = iter(answer.arrays)
            for update in answer.updates:
                found[update.key] = tuple(
                    [next(arrays) for _ in range(update.operands)]
                )
        return found

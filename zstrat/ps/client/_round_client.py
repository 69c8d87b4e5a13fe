"""Requests about rounds to all parameter servers of a session."""

from __future__ import annotations

import abc
import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from zstrat.wire import (
    AskRounds,
    CloseRound,
    Contribute,
    Done,
    HeldRounds,
    Merged,
    PulledRound,
    PullMerged,
    PullRound,
)

from ._asking import AskedServers, CallPart, nothing
from ._pushing import Pushing

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from zstrat.wire import RoundNumber, RoundOrder, StepContribution

    from ._pushing import PsUpdate
    from ._reading import Clocks, Reading, Ref, RowsRef, ServerPull

UNLIMITED: Final = 10.0**9
"""Seconds that a pull waits for its round: the coordinator decides when that is too
long."""


class RoundCalls(AskedServers, abc.ABC):
    """The calls of `PsClient` about rounds."""

    @abc.abstractmethod
    def _reading(
        self, refs: Sequence[Ref], rows: Sequence[RowsRef], clocks: Clocks | None
    ) -> Reading:
        """Begins a pull."""

    def contribute(
        self, given: Sequence[StepContribution], updates: Sequence[PsUpdate]
    ) -> asyncio.Future[None]:
        """Has all servers keep the gradients of a step for rounds.

        Raises (in the future):
            PSUnavailableError: A parameter server is gone.
            InvalidArgumentError, NotFoundError, StaleSessionError, BusyError: As the
                server says. Others may have kept their part.
        """
        pushes = Pushing(self.session, 0, 0, 0, updates).messages
        parts: list[CallPart[Any]] = []
        for ps in range(self.count):
            push = pushes.get(ps)
            content = ([], ()) if push is None else (push.updates, push.arrays)
            asked = Contribute(self.session, list(given), *content)
            parts.append(CallPart(ps, asked, Done, nothing))
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
                    self.session, list(after), asked.reads, asked.rows, asked.arrays
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
        order: RoundOrder,
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
        message = CloseRound(self.session, order, list(kept), over, tuple(operands))
        await self.each([(ps, message) for ps in range(self.count)], Done)

    async def pull_merged(
        self, order: RoundOrder
    ) -> tuple[list[bytes], dict[int, tuple[np.ndarray, ...]]]:
        """Reads the trees of the optimizer (`zstrat.optimizers.Binding.encoded`), and
        the merged gradients of the members, by key of the variable: an array, or
        indices and rows.

        Raises: As `close_round`.

        Cancellation: changes nothing.
        """
        # All servers have all trees.
        asked = [PullMerged(self.session, order, ps == 0) for ps in range(self.count)]
        trees: list[bytes] = []
        found: dict[int, tuple[np.ndarray, ...]] = {}
        for answer in await self.each(list(enumerate(asked)), Merged):
            arrays = iter(answer.arrays)
            trees += [next(arrays).tobytes() for _ in range(answer.trees)]
            for update in answer.updates:
                found[update.key] = tuple(
                    [next(arrays) for _ in range(update.operands)]
                )
        return trees, found

    async def held_rounds(self, deadline: float) -> list[dict[int, HeldRounds]]:
        """Returns for each server the rounds of all optimizers, by number.

        Raises: As `close_round`.

        Cancellation: changes nothing.
        """

        async def held_on(ps: int) -> dict[int, HeldRounds]:
            found: dict[int, HeldRounds] = {}
            while True:
                asked = ps, AskRounds(self.session, max(found, default=0))
                (held,) = await self.each([asked], HeldRounds, deadline=deadline)
                if not held.closed.optimizer:
                    return found
                found[held.closed.optimizer] = held

        return await asyncio.gather(*map(held_on, range(self.count)))

"""Requests about steps and about synchronous rounds.

Requests about steps declare steps as over, or ask what steps have applied. Law: from
the moment at which such a request arrives, pushes that it forbids have no effect; its
answer waits for the pushes that are under way at that moment. In between another
process may have taken the store over, so that is checked again before the answer.

Contributions to rounds, and the orders that close rounds, are served as all other
requests of the store (`Serving`), and so are pulls whose round is open.

Law: a pull that waits for a round holds no name, so no other request waits for the
pull; it is checked again when the round is closed, because another process may serve
the store by then.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, final

import numpy as np

from zstrat.wire import (
    AppliedLeases,
    AppliedParts,
    AskLeases,
    AskParts,
    AskRounds,
    Done,
    Fence,
    Fenced,
    Message,
    PullRound,
    RaiseMark,
)

from .store._changes import acknowledged

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ._serving import Serving
    from .store._store import Store


StepRequest = AskLeases | AskParts | Fence | RaiseMark


@final
class StepRequests:
    """Answers requests about steps. Lives on the event loop.

    Args:
        require_place: Raises if the session is over, or another process serves the
            store.
    """

    def __init__(
        self, store: Store, serving: Serving, require_place: Callable[[int], None]
    ) -> None:
        self._store, self._serving = store, serving
        self._require_place = require_place

    def handle(self, message: StepRequest) -> Message | Awaitable[Message]:
        """Answers a request of the open session.

        Raises:
            StaleSessionError: A later run of the step has begun.
        """
        match message:
            case AskLeases():
                return self._applied_leases(message)
            case AskParts():
                # Before what waits: earlier runs of the step push in vain from here on.
                self._store.claim(message.step, message.attempt)
                return self._applied_parts(message)
            case Fence():
                # Nothing of these steps begins from here on. They are forgotten when
                # what is under way has ended.
                self._store.close_steps(message.low_water, message.over)
                return self._fenced(message)
            case RaiseMark():
                self._store.raise_mark(message.low_water)
                return Done()

    async def _applied_parts(self, asked: AskParts) -> AppliedParts:
        # A part of an earlier run may be computed now, and has to be in the answer.
        await self._serving.settled()
        self._require_place(asked.session)
        applied = self._store.applied_parts(asked.step, asked.first)
        return await acknowledged(self._store.log, applied)

    async def _applied_leases(self, asked: AskLeases) -> AppliedLeases:
        # Pushes that are under way carry leases, which are done when these are applied.
        await self._serving.settled()
        self._require_place(asked.session)
        packed = b"".join(self._store.leases.packed())
        applied = AppliedLeases((np.frombuffer(packed, np.uint8),))
        return await acknowledged(self._store.log, applied)

    async def _fenced(self, fence: Fence) -> Fenced:
        # Nothing of these steps begins any longer, so after this wait nothing more is
        # applied.
        await self._serving.settled()
        self._require_place(fence.session)
        fenced = Fenced(self._store.end_steps(fence.low_water, fence.asked))
        return await acknowledged(self._store.log, fenced)


RoundRequest = AskRounds | PullRound


@final
class RoundRequests:
    """Answers pulls that may have to wait for a round, and questions about rounds.
    Lives on the event loop.

    Args:
        require_place: Raises if the session is over, or another process serves the
            store.
    """

    def __init__(
        self, store: Store, serving: Serving, require_place: Callable[[int], None]
    ) -> None:
        self._store, self._serving = store, serving
        self._require_place = require_place
        store.round_closed = self.wake
        self._waiting: list[asyncio.Future[None]] = []
        """Futures of the pulls that wait for a round to be closed."""

    def handle(self, message: RoundRequest) -> Message | Awaitable[Message]:
        """Answers a request of the open session.

        Raises:
            ZstratError: The request is refused; nothing has changed.
        """
        match message:
            case AskRounds():
                # In no turn: rounds change on the loop alone.
                return self._store.rounds.held(message.after)
            case PullRound():
                if self._has_to_wait(message):
                    return self._pull_later(message)
                return self._serving.answer_request(message)

    def wake(self) -> None:
        """Wakes all pulls that wait for a round, so that each checks whether it may
        continue."""
        # Replaced before they are woken: one that has to wait again joins the new list.
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if not each.done():
                each.set_result(None)

    def _has_to_wait(self, message: PullRound) -> bool:
        rounds = self._store.rounds
        return any(rounds.number(o) < number for o, number in message.after)

    async def _pull_later(self, message: PullRound) -> Message:
        while self._has_to_wait(message):
            woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(woken)
            await woken
            self._require_place(message.session)
        # By now it is a request like others, and may have to wait for its turn.
        answer = self._serving.answer_request(message)
        return answer if isinstance(answer, Message) else await answer

"""Requests about rounds: contributions, the orders that close rounds, and pulls that
wait for them. They take turns with all other requests of the store (`Serving`).

Law of the file: a pull that waits for a round holds no name, so no other request waits
for it; it is checked again when the round is closed, as another process may serve the
store by then.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, final

from zstrat.wire import AskRounds, Message, PullRound

from ._round_serving import RoundStored

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ._serving import Serving
    from .store._store import Store

RoundRequest = RoundStored | AskRounds


@final
class RoundRequests:
    """Answers requests about rounds. Lives on the loop.

    Args:
        require_place: Raises if the session is over, or another process serves the
            store.
    """

    def __init__(
        self, store: Store, serving: Serving, require_place: Callable[[int], None]
    ) -> None:
        self._store, self._serving = store, serving
        self._require_place = require_place
        serving.round_closed = self.wake
        self._waiting: list[asyncio.Future[None]] = []
        """Of the pulls that wait for a round."""

    def handle(self, message: RoundRequest) -> Message | Awaitable[Message]:
        """Answers a request of the open session.

        Raises:
            ZstratError: It is refused; nothing has changed.
        """
        match message:
            case AskRounds():
                return self._store.rounds.held(message.after)
            case PullRound() if self._has_to_wait(message):
                return self._pull_later(message)
            case _:
                return self._serving.take(message)

    def wake(self) -> None:
        """Has all waiting pulls checked again."""
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
        answer = self._serving.take(message)
        return answer if isinstance(answer, Message) else await answer

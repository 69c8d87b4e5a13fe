"""Requests about rounds: contributions, the orders that close rounds, and pulls that
wait for them. They take turns with all other requests of the store (`Serving`).

Law of the file: a pull that waits for a round holds no name, so no other request waits
for it; it is checked again when the round is closed, as another process may serve the
store by then.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, assert_never, final

import numpy as np

from zstrat.wire import (
    AskRounds,
    CloseRound,
    Contribute,
    Done,
    Merged,
    Message,
    PulledRound,
    PullMerged,
    PullRound,
)

from ._requests import INLINE, compute_short, decode_updates, pull
from .store._decoding import is_coded
from .store._plans import push_plan
from .store._rounds import merged_push, updates_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable

    from ._requests import Running
    from ._serving import Serving
    from .store._store import Store

RoundStored = Contribute | CloseRound | PullMerged | PullRound
"""Requests that use the store, and so take turns."""

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


def names_of_round(store: Store, message: RoundStored) -> list[Hashable]:
    """Returns the names that a request uses; see `names_of`."""
    match message:
        case Contribute():  # changes no variable
            return []
        case PullRound(reads=reads, rows=rows):
            return [*(read.key for read in reads), *rows]
        case CloseRound(order=order) | PullMerged(order=order):
            return store.rounds.keys(order)


def serve_round(
    store: Store,
    message: RoundStored,
    require_place: Callable[[int], None],
    closed: Callable[[], None],
) -> Running[Message]:
    """Serves a request.

    Args:
        require_place: As in `RoundRequests`.
        closed: Called when a round was closed.

    Raises:
        ZstratError: It is refused; nothing has changed.
    """
    match message:
        case Contribute():
            if is_coded(message.updates):
                message = yield from decode_updates(store, message)
                require_place(message.session)  # it may have ended meanwhile
            store.contribute(message)
            return Done()
        case CloseRound():
            done = yield from close_round(store, message)
            closed()
            return done
        case PullMerged():
            return (yield from _merge(store, message))
        case PullRound():
            numbers = [store.rounds.number(each.optimizer) for each in message.after]
            pulled = yield from pull(store, message.reads, message.rows, message.arrays)
            return PulledRound(numbers, pulled.versions, pulled.arrays, pulled.clock)
        case _:
            assert_never(message)


def close_round(store: Store, message: CloseRound) -> Running[Done]:
    """Applies a round; changes nothing if it was closed before. A backup does the same.

    Raises:
        ProtocolError: An earlier round is open.
        NotFoundError: The contribution of a member is not here.
        ZstratError: The merged update is refused; the round stays open.
    """
    merging = store.rounds.merging(message.order)
    if merging is None:
        return Done()
    if merging.work <= INLINE:
        merging.compute()
    else:
        yield merging
    push = merged_push(message, merging)
    plan = push_plan(push, store.variables, store.engine)
    if not compute_short(store, plan, INLINE):
        yield plan
    store.commit_round(message, plan)
    return Done()


def _merge(store: Store, message: PullMerged) -> Running[Merged]:
    merging, optimizer = store.rounds.merging(message.order), message.order.optimizer
    if merging is None:
        return Merged(0, [], ())
    yield merging
    trees: list[np.ndarray] = []
    if message.trees:
        known = store.engine.get(optimizer).bindings.encoded
        trees = [np.frombuffer(data, np.uint8) for data, _ in known]
    updates, arrays = updates_of(optimizer, merging.merged)
    return Merged(len(trees), updates, (*trees, *arrays))

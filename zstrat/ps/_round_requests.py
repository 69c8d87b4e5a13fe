"""Requests about rounds: contributions, the orders that close rounds, and pulls that
wait for them.

Law of the file: a pull that waits for a round holds no name, so no other request waits
for it; it is checked again when the round is closed, as another process may serve the
store by then.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar, final

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

from ._requests import (
    INLINE,
    PendingRequest,
    advance,
    compute_short,
    decode_updates,
    pull,
)
from .store._changes import acknowledged
from .store._decoding import is_coded
from .store._plans import push_plan
from .store._rounds import merged_push, updates_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ._requests import Running
    from ._serving import Serving
    from ._thread import JobThread
    from .store._store import Store

RoundRequest = Contribute | CloseRound | PullMerged | PullRound | AskRounds

T = TypeVar("T")


@final
class RoundRequests:
    """Answers requests about rounds. Lives on the loop.

    Args:
        require_place: Raises if the session is over, or another process serves the
            store.
    """

    def __init__(
        self,
        store: Store,
        serving: Serving,
        thread: JobThread,
        require_place: Callable[[int], None],
    ) -> None:
        self._store, self._serving, self._thread = store, serving, thread
        self._require_place = require_place
        self._waiting: list[asyncio.Future[None]] = []
        """Of the pulls that wait for a round."""

    def handle(self, message: RoundRequest) -> Message | Awaitable[Message]:
        """Answers a request of the open session.

        Raises:
            ZstratError: It is refused; nothing has changed.
        """
        match message:
            case Contribute(updates=updates):
                if is_coded(updates):
                    return self._contribute(message)
                self._store.contribute(message)
                log = self._store.log
                return Done() if log is None else log.hold(Done())
            case CloseRound():
                return self._close(message)
            case PullMerged():
                return self._merge(message)
            case PullRound():
                return self._pull(message)
            case AskRounds():
                return self._store.rounds.held(message.after)

    def wake(self) -> None:
        """Has all waiting pulls checked again."""
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if not each.done():
                each.set_result(None)

    async def _contribute(self, message: Contribute) -> Message:
        async with self._serving.turn([update.key for update in message.updates]):
            self._require_place(message.session)
            plain = await self._run(decode_updates(self._store, message))
            self._require_place(message.session)  # it may have ended meanwhile
            self._store.contribute(plain)
        return await acknowledged(self._store.log, Done())

    async def _close(self, message: CloseRound) -> Message:
        keys = self._store.rounds.keys(message.order)
        async with self._serving.turn(keys):
            self._require_place(message.session)
            with self._serving.applying_round():
                await self._run(close_round(self._store, message))
        self.wake()
        return await acknowledged(self._store.log, Done())

    async def _merge(self, message: PullMerged) -> Message:
        keys = self._store.rounds.keys(message.order)
        async with self._serving.turn(keys):
            self._require_place(message.session)
            merging = self._store.rounds.merging(message.order)
            if merging is None:
                return Merged(0, [], ())
            await self._thread.submit(merging.compute)
            optimizer, trees = message.order.optimizer, list[np.ndarray]()
            if message.trees:
                known = self._store.engine.get(optimizer).bindings.encoded
                trees = [np.frombuffer(data, np.uint8) for data, _ in known]
            updates, arrays = updates_of(optimizer, merging.merged)
            return Merged(len(trees), updates, (*trees, *arrays))

    async def _pull(self, message: PullRound) -> Message:
        rounds = self._store.rounds
        while any(rounds.number(o) < number for o, number in message.after):
            woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(woken)
            await woken
            self._require_place(message.session)
            rounds = self._store.rounds
        names = [*(read.key for read in message.reads), *message.rows]
        async with self._serving.turn(names):
            self._require_place(message.session)
            numbers = [rounds.number(each.optimizer) for each in message.after]
            reads, rows, arrays = message.reads, message.rows, message.arrays
            pulled = await self._run(pull(self._store, reads, rows, arrays))
        return PulledRound(numbers, pulled.versions, pulled.arrays, pulled.clock)

    async def _run(self, running: Running[T]) -> T:
        served = advance(running)
        while isinstance(served, PendingRequest):
            error: BaseException | None = None
            try:
                await self._thread.submit(served.plan.compute)
            except Exception as raised:  # goes to the request
                self._store.gave_up(served.plan)
                error = raised
            served = advance(served.running, error)
        return served


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

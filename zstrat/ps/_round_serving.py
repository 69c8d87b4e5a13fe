"""Serves requests about synchronous rounds, and finds the names that each of them uses
(see `_requests`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

import numpy as np

from zstrat.wire import (
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
    from collections.abc import Callable, Hashable

    from ._requests import Running
    from .store._store import Store

RoundStored = Contribute | CloseRound | PullMerged | PullRound
"""Requests about rounds that use the store, and so wait for their turn."""


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
    """Serves a request about rounds.

    Args:
        require_place: As in `RoundRequests`.
        closed: Called when a round was closed.

    Raises:
        ZstratError: The request is refused; nothing has changed.
    """
    match message:
        case Contribute():
            if is_coded(message.updates):
                message = yield from decode_updates(store, message)
                # The thread may have decoded it, and the session ended meanwhile.
                require_place(message.session)
            store.contribute(message)
            return Done()
        case CloseRound():
            done = yield from close_round(store, message)
            # Only now: pulls that are woken read the number of the round and the new
            # values.
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
    """Applies the merged gradients of a round; changes nothing if the round was closed
    before. A backup replays rounds with this function, too.

    Raises:
        ProtocolError: An earlier round is open.
        NotFoundError: The contribution of a member is not here.
        ZstratError: The merged update is refused; the round stays open.
    """
    merging = store.rounds.merging(message.order)
    # The order came again: its answer was lost, or the program before had sent it.
    if merging is None:
        return Done()
    if merging.work <= INLINE:
        merging.compute()
    else:
        yield merging
    push = merged_push(message, merging)
    # Not `Store.plan_push`: the ledger knows a round by its members.
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

"""Saves and restores of the same objects are made one after the other.

Two that run side by side, in threads or in tasks, would mix: a save would take some
values of before a restore and some of after it, and two saves would take one number.

Law of the file: who comes later waits for those alone that came before and have an
object in common with it, so no two wait for each other. A turn may be waited for from
any thread and any event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ._blocking import held_up
from ._graph import graph_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Hashable


@dataclass(slots=True, eq=False)
class _Turn:
    keys: frozenset[Hashable]
    loop: asyncio.AbstractEventLoop
    waiting: list[Future[None]] = field(default_factory=list)


_lock: Final = threading.Lock()
_turns: Final[list[_Turn]] = []
"""Those that have begun or wait, in the order in which they came."""


@contextlib.asynccontextmanager
async def in_turn(root: Any) -> AsyncIterator[None]:
    """Waits until no earlier save or restore has an object in common with what is below
    ``root``; later ones wait until this is over. Inside of one there is no other.

    Raises:
        TypeError: Something below it cannot be saved.
        RuntimeError: An earlier one is on the event loop that this one, a blocking
            call, holds up: neither would end.

    Cancellation: the turn is given up.
    """
    graph = graph_of(root)  # held: ids are of living objects
    mine = _Turn(frozenset(_keys_of(graph.nodes)), asyncio.get_running_loop())
    before: list[Future[None]] = []
    with _lock:
        # Those, too, that the earlier ones wait for.
        keys, loops = mine.keys, set[asyncio.AbstractEventLoop]()
        for turn in reversed(_turns):
            if not turn.keys.isdisjoint(keys):
                keys |= turn.keys
                loops.add(turn.loop)
        if held_up.get() in loops:
            raise RuntimeError(
                "a save or restore of the same objects is under way on the event loop "
                "of this thread, which a blocking call would hold up: await that one "
                "first, or call the form that ends in _async"
            )
        for turn in _turns:
            if not turn.keys.isdisjoint(mine.keys):
                before.append(Future())
                turn.waiting.append(before[-1])
        _turns.append(mine)
    try:
        for each in before:
            await asyncio.wrap_future(each)
        yield
    finally:
        with _lock:
            _turns.remove(mine)
        for waiter in mine.waiting:
            if waiter.set_running_or_notify_cancel():
                waiter.set_result(None)


def _keys_of(nodes: Any) -> list[Hashable]:
    """What names the root, and each variable, optimizer and iterator below it; two
    handles of one variable have the same."""
    keys: list[Hashable] = [id(nodes[0].value)]
    for node in nodes:
        if node.kind == "variable":
            parts = node.value.components
            keys += [(id(part.home), part.spec.key) for part in parts]
        elif node.kind != "group":
            keys.append(id(node.value))
    return keys

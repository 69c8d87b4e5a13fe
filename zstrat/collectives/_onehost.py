"""The engine of a group whose ranks all run on one host: every call in its rooms.

An algorithm that a caller names says how messages go. Here none go, so it says nothing,
and the call stays in memory: a name must not make it slower.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from ._engine import CallKind
from ._reduction import reduction_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ._engine import CollectiveCall
    from ._rooms import Rooms


class OneHost:
    """The engine of a group whose ranks all run on this host. ``closed`` is called
    when it is closed."""

    def __init__(self, rooms: Rooms, closed: Callable[[], object]) -> None:
        self._rooms: Rooms | None = rooms
        self._closed = closed

    def takes(self, call: CollectiveCall) -> bool:
        return may_take(call)

    def run(self, call: CollectiveCall) -> None:
        rooms = self._rooms
        assert rooms is not None, "the group runs nothing after close()"
        with rooms.meeting.call(call.about, call.deadline):
            carry_out(rooms, call)

    def waits(self) -> Sequence[int]:
        rooms = self._rooms
        return () if rooms is None else rooms.meeting.waits()

    def abort(self, error: Exception) -> None:
        rooms = self._rooms
        if rooms is not None:
            rooms.meeting.abort(error)

    def close(self) -> None:
        self._rooms = None
        self._closed()


def may_take(call: CollectiveCall) -> bool:
    """Whether shared memory is for this call, whatever its kind."""
    # Tagged calls may come in another order elsewhere: here the order is all there is.
    return call.tag is None and call.compression is None


def carry_out(rooms: Rooms, call: CollectiveCall) -> None:
    """A call among the ranks of ``rooms`` alone."""
    source, target = call.source, call.target
    match call.kind:
        case CallKind.ALL_REDUCE:
            reduction = reduction_of(call.op, source.dtype, rooms.size)
            rooms.all_reduce(reduction, source, target)
        case CallKind.BROADCAST:
            rooms.broadcast(call.root, source, target)
        case CallKind.ALL_GATHER:
            rooms.all_gather(call.sizes, source, target)
        case CallKind.REDUCE_SCATTER:
            reduction = reduction_of(call.op, source.dtype, rooms.size)
            rooms.reduce_scatter(reduction, call.sizes, source, target)
        case CallKind.ALL_TO_ALL:
            rooms.all_to_all(call.sizes, source, target)
        case CallKind.BARRIER:
            rooms.meeting.meet()
        case _:
            assert_never(call.kind)

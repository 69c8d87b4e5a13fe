"""Builds per-worker resources: on every worker, and again on each that returns.

A worker gets no closure while it builds. What fails to build stays with the value of
that worker and reaches the user through the closures that need it. On the loop thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final, final

from zstrat.errors import PeerLostError, StaleSessionError
from zstrat.wire import BuildResource, Message, ResourceBuilt

from ._members import Members, MemberState

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._engine import ClosureEngine
    from ._resources import Record
    from ._seat import WorkerChannel

BUILD_DEADLINE: Final = 600.0
"""Seconds for one resource: a dataset function may read or download a lot."""


@final
class Builder:
    """Knows all records, and has them built."""

    def __init__(
        self,
        engine: ClosureEngine,
        members: Members,
        seats: list[WorkerChannel],
        turn_soon: Callable[[], None],
    ) -> None:
        self._engine, self._members, self._seats = engine, members, seats
        self._turn_soon = turn_soon
        self._records: dict[int, Record] = {}
        self._new: deque[Record] = deque()
        self._gone: deque[int] = deque()
        self._over: str | None = None
        """Why nothing is built any more, once that is so. Guarded by the lock."""

    def add_soon(self, record: Record) -> None:
        """A new resource; from any thread. No closure put later overtakes it."""
        with self._engine.lock:
            if self._over is None:
                self._new.append(record)
            else:
                record.ended(self._over)

    def take_new(self) -> list[Record]:
        """What was added since the last call. Lock held."""
        new = list(self._new)
        self._new.clear()
        return new

    def add(self, record: Record) -> None:
        """Builds it on every worker that is there, and later on the others."""
        self._records[record.number] = record
        for seat in self._seats:
            if seat.member.state in (MemberState.OPEN, MemberState.BUILDING):
                self._members.build(seat.member.index)
                self._build(seat, record)
            else:
                with self._engine.lock:
                    member = seat.member
                    record.aborted(member.index, member.name, member.reason)
                    self._engine.notify()

    def drop_soon(self, number: int) -> None:
        """Nobody holds the resource any more; from any thread, takes no lock."""
        self._gone.append(number)

    def dropped(self) -> list[int]:
        """The resources that were dropped since the last call."""
        gone, unknown = [], []
        while self._gone:
            number = self._gone.popleft()
            if self._records.pop(number, None) is not None:
                gone.append(number)
            else:
                unknown.append(number)
        if unknown:
            # One that was added and dropped since the last turn: it is built in the
            # next one, like any other, and dropped then.
            with self._engine.lock:
                new = {record.number for record in self._new}
            self._gone.extend(number for number in unknown if number in new)
        return gone

    def drop_all(self) -> None:
        self._gone.extend(self._records)

    def stop(self, cause: str) -> None:
        """Nothing is built any more; who waits for a value is told. Lock held."""
        self._over = cause
        for record in (*self._records.values(), *self.take_new()):
            record.ended(cause)

    def rebuild(self, seat: WorkerChannel) -> None:
        """The worker (re)joined: all resources from the beginning, then it is open."""
        records = list(self._records.values())
        self._members.build(seat.member.index, len(records))
        with self._engine.lock:
            for record in records:
                record.begin(seat.member.index)
        for record in records:
            self._build(seat, record)
        self._built(seat, seat.member.epoch, 0)

    def abort(self, seat: WorkerChannel, reason: str) -> None:
        """The worker is gone, and its resources with it. Lock held."""
        for record in self._records.values():
            record.aborted(seat.member.index, seat.member.name, reason)

    # ---- private ---------------------------------------------------------------------

    def _build(self, seat: WorkerChannel, record: Record) -> None:
        seat.resources.add(record.number)
        loop = asyncio.get_running_loop()
        epoch = seat.member.epoch
        try:
            seat.put_code(record.maker)
            arguments = seat.put_arguments(record.arguments)
        except PeerLostError:
            return  # its loss is told, and all is built again when it returns
        message = BuildResource(
            seat.session, record.number, record.purpose, record.maker.digest, arguments
        )
        future = seat.lane.link.submit(message, deadline=loop.time() + BUILD_DEADLINE)
        future.add_done_callback(lambda f: self._answered(seat, epoch, record, f))

    def _answered(
        self,
        seat: WorkerChannel,
        epoch: int,
        record: Record,
        answer: asyncio.Future[Message],
    ) -> None:
        if answer.cancelled():
            return
        error = answer.exception()
        if seat.member.epoch != epoch or isinstance(error, PeerLostError):
            return
        if isinstance(error, StaleSessionError):
            seat.lane.reopen("it is not in our session any more")
            return
        worker, name = seat.member.index, seat.member.name
        with self._engine.lock:
            if error is None:
                message = answer.result()
                assert isinstance(message, ResourceBuilt), message
                record.built(worker, message.layout)
            else:
                assert isinstance(error, Exception)
                seat.failed[record.number] = record.failed(worker, name, error)
            self._engine.notify()
        self._built(seat, epoch, 1)

    def _built(self, seat: WorkerChannel, epoch: int, count: int) -> None:
        self._members.built(seat.member.index, epoch, count)
        if seat.member.state is MemberState.OPEN:
            self._turn_soon()

"""Per-worker resources: what every worker is to have before it runs closures.

A *record* says how to build one (shipped code, its arguments) and keeps one value per
worker, which says how that went, and which share of a dataset that one reads. It
outlives connections: whenever a worker (re)joins, all records are built there again,
iterators from the beginning or from where a checkpoint has them, before its next
closure.

The record does not know the handle that the user holds; when that is dropped, the
record's number goes to the dispatcher, which has it forgotten everywhere.

A worker gets no closure while it builds. What fails to build stays with the value of
that worker and reaches the user through the closures that need it. Building is done on
the loop thread.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final, final

from zstrat.errors import (
    ClosureAbortedError,
    ClosureInputError,
    OutOfRangeError,
    PeerLostError,
    StaleSessionError,
)
from zstrat.wire import BuildResource, Message, ResourceBuilt

from ._members import Members, MemberState
from ._values import RemoteValue, RemoteValueStatus, Result
from .membership import InputPipelines

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zstrat.wire import LayoutMessage

    from ._calls import Code, PickledArguments
    from ._engine import ClosureEngine
    from ._shipping import WorkerChannel

_LOG: Final = logging.getLogger("zstrat.coordinator")

_AWAY: Final = (
    "%s: the worker of input pipeline %d is away while its iterator is saved, so the "
    "place of the last save (or the beginning) stays: when it returns, it draws again "
    "what it has drawn since"
)

_numbers: Final = itertools.count(1)
READY: Final = RemoteValueStatus.READY
NOT_READY: Final = RemoteValueStatus.NOT_READY


class Record:
    """How to build one resource, and how that went on each worker.

    The values change with the engine's lock held.
    """

    __slots__ = (
        "_made",
        "_values",
        "arguments",
        "layout",
        "maker",
        "name",
        "number",
        "pipelines",
        "purpose",
        "states",
    )

    def __init__(
        self,
        engine: ClosureEngine,
        workers: Sequence[int],
        *,
        name: str,
        purpose: str,
        maker: Code,
        arguments: PickledArguments | None = None,
        kind: type[RemoteValue] = RemoteValue,
    ) -> None:
        self.number = next(_numbers)
        self.name, self.purpose = name, purpose
        self.maker, self.arguments = maker, arguments
        self.layout: LayoutMessage | None = None
        """Of an element (or of the value), once a worker has told."""
        self.pipelines = InputPipelines(workers)
        self.states: dict[int, str] = {}
        """Where an iterator begins when it is built, by input pipeline: its place in
        the checkpoint that was saved or restored last; at the beginning where none
        was. Replaced as a whole."""
        self._made = partial(kind, engine, Result(name, None))
        self._values = {place: self._made() for place in workers}

    @property
    def values(self) -> tuple[RemoteValue, ...]:
        """One per worker that the cluster has now, in the order of their places."""
        return tuple([value for _, value in sorted(self._values.items())])

    @property
    def is_known(self) -> bool:
        """A worker has built it and told what it looks like."""
        return self.layout is not None

    @property
    def is_settled(self) -> bool:
        """Whether no worker is building it."""
        return all(value.state is not NOT_READY for value in self.values)

    @property
    def failure(self) -> Exception | None:
        """What the first worker says that could not build it, once nobody builds it any
        more. A worker that is away says nothing, and is not waited for."""
        if not self.is_settled:
            return None
        errors = (value.error for value in self.values if value.state is READY)
        return next((error for error in errors if error is not None), None)

    @property
    def workers(self) -> list[int]:
        """The places of those that have a value."""
        return list(self._values)

    def join(self, worker: int, task: str, reason: str) -> None:
        """The cluster has another worker, which is not there yet."""
        self.pipelines.join(worker)
        # As a whole: the threads of the user look at it.
        self._values = {**self._values, worker: self._made()}
        self.aborted(worker, task, reason)

    def leave(self, worker: int) -> None:
        """The cluster has the worker no more. Its value stays aborted."""
        self.pipelines.leave(worker)
        self._values = {n: value for n, value in self._values.items() if n != worker}

    def begin(self, worker: int) -> None:
        """The worker starts to build it."""
        self._values[worker]._begin_again()

    def is_building(self, worker: int) -> bool:
        return self._values[worker].state is NOT_READY

    def begin_at(self, states: Sequence[str]) -> None:
        """From now on iterators begin there, when they are built."""
        self.states = {n: state for n, state in enumerate(states) if state}

    def built(self, worker: int, layout: LayoutMessage) -> None:
        self.layout = self.layout or layout
        self._values[worker]._settle_built()

    def failed(self, worker: int, task: str, error: Exception) -> Exception:
        """Building raised; returns what closures get that want to use it there. A
        dataset of no element is at its end, as any that was read to it: a worker says
        that by an `OutOfRangeError` of its own, none that the user's function raised.
        """
        wrapped: Exception
        if isinstance(error, OutOfRangeError):
            words = f"End of sequence: {self.name} has no element on {task}"
            wrapped = OutOfRangeError(words)
            wrapped.__cause__ = error
        else:
            words = f"{self.name} could not be built on {task}"
            wrapped = ClosureInputError(words, error)
            wrapped.__cause__ = wrapped.original_exception
        self._values[worker]._settle_error(wrapped)
        return wrapped

    def ended(self, cause: str) -> None:
        """Nothing is built any more where it is not built yet."""
        for value in self.values:
            if value.state is NOT_READY:
                value._abort(ClosureAbortedError(f"{self.name} is not built: {cause}"))

    def aborted(self, worker: int, task: str, reason: str) -> None:
        """The worker is gone, or not there yet."""
        self._values[worker]._abort(
            ClosureAbortedError(
                f"{self.name} is not on {task} ({reason}); it is built when "
                "that returns"
            )
        )


BUILD_DEADLINE: Final = 600.0
"""Seconds for one resource: a dataset function may read or download a lot."""


@final
class Builder:
    """Knows all records, and has them built."""

    def __init__(
        self,
        engine: ClosureEngine,
        members: Members,
        channels: Mapping[int, WorkerChannel],
        turn_soon: Callable[[], None],
    ) -> None:
        self._engine, self._members, self._channels = engine, members, channels
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
        with self._engine.lock:  # some may have come or gone since it was made
            for place in set(record.workers) - set(self._channels):
                record.aborted(place, "a worker", "it was removed")
                record.leave(place)
            for channel in self._channels.values():
                self._joined(record, channel)
        for channel in self._channels.values():
            if channel.member.state in (MemberState.OPEN, MemberState.BUILDING):
                self._members.build(channel.member.place)
                self._build(channel, record)
            else:
                with self._engine.lock:
                    member = channel.member
                    record.aborted(member.place, member.name, member.reason)
                    self._engine.waiters.notify()

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

    def rebuild(self, channel: WorkerChannel) -> None:
        """The worker (re)joined: all resources are built, then it is open."""
        records = list(self._records.values())
        self._members.build(channel.member.place, len(records))
        with self._engine.lock:
            for record in records:
                record.begin(channel.member.place)
        for record in records:
            self._build(channel, record)
        self._built(channel, channel.member.epoch, 0)

    async def states(self, record: Record) -> list[str]:
        """Where the iterators of all input pipelines are in their data, as JSON; of one
        whose worker is away, or builds it, where it will begin: "" is the beginning.

        Raises:
            InvalidArgumentError: That of a worker cannot be told; says why.
        """
        found: dict[int, str | None] = {}
        asked: dict[int, WorkerChannel] = {}
        for place, channel in self._having(record).items():
            pipeline = record.pipelines[place]
            if record.is_building(place):  # nobody has drawn from it
                found[pipeline] = ""
            else:  # of several that read one share the one that reads it longest
                asked.setdefault(pipeline, channel)
        deadline = asyncio.get_running_loop().time() + BUILD_DEADLINE
        told = await asyncio.gather(
            *(each.iterator_state(record.number, deadline) for each in asked.values())
        )
        found |= zip(asked, told, strict=True)
        for n in range(record.pipelines.count):
            if found.get(n) is None:
                _LOG.warning(_AWAY, record.name, n)
        count = record.pipelines.count
        return [found.get(n) or record.states.get(n, "") for n in range(count)]

    async def require_fit(self, record: Record, states: Sequence[str]) -> None:
        """Asks the workers that are there whether their iterators can go to places that
        `states` gave.

        Raises:
            InvalidArgumentError: One cannot; says why.
        """
        deadline = asyncio.get_running_loop().time() + BUILD_DEADLINE
        pairs = (
            (channel, states[record.pipelines[place]])
            for place, channel in self._having(record).items()
        )
        await asyncio.gather(
            *(
                channel.require_fit(record.number, state, deadline)
                for channel, state in pairs
                if state
            )
        )

    def begin_at(self, states: Mapping[int, Sequence[str]]) -> None:
        """From now on the iterators of these numbers begin there, when they are
        built."""
        for number in states.keys() & self._records.keys():
            self._records[number].begin_at(states[number])

    async def go_to(self, record: Record, states: Sequence[str]) -> None:
        """Builds the iterators anew, where `states` said that they were. Closures that
        were put later wait for them."""
        record.begin_at(states)
        for channel in self._channels.values():
            place = channel.member.place
            if channel.member.state in (MemberState.OPEN, MemberState.BUILDING):
                with self._engine.lock:
                    record.begin(place)
                self._members.build(place)
                self._build(channel, record)

    def abort(self, channel: WorkerChannel, reason: str) -> None:
        """The worker is gone, and its resources with it. Lock held."""
        for record in self._records.values():
            record.aborted(channel.member.place, channel.member.name, reason)

    def join(self, channel: WorkerChannel) -> None:
        """The cluster has another worker. Lock held."""
        for record in self._records.values():
            self._joined(record, channel)

    def leave(self, channel: WorkerChannel) -> None:
        """The cluster has it no more. Lock held."""
        for record in self._records.values():
            record.leave(channel.member.place)

    def _having(self, record: Record) -> dict[int, WorkerChannel]:
        """The workers that are there and have it, or build it, by their places."""
        return {
            place: channel
            for place, channel in sorted(self._channels.items())
            if channel.task.is_ready and record.number in channel.resources
        }

    @staticmethod
    def _joined(record: Record, channel: WorkerChannel) -> None:
        member = channel.member
        if member.place not in record.workers:
            record.join(member.place, member.name, member.reason)

    def _build(self, channel: WorkerChannel, record: Record) -> None:
        channel.resources.add(record.number)
        loop = asyncio.get_running_loop()
        epoch = channel.member.epoch
        try:
            channel.put_code(record.maker)
            arguments = channel.put_arguments(record.arguments)
        except PeerLostError:
            return  # its loss is told, and all is built again when it returns
        pipeline = record.pipelines[channel.member.place]
        message = BuildResource(
            channel.session,
            record.number,
            record.purpose,
            record.maker.digest,
            arguments,
            pipeline,
            record.pipelines.count,
            record.states.get(pipeline, ""),
        )
        future = channel.task.link.submit(
            message, deadline=loop.time() + BUILD_DEADLINE
        )
        future.add_done_callback(lambda f: self._answered(channel, epoch, record, f))

    def _answered(
        self,
        channel: WorkerChannel,
        epoch: int,
        record: Record,
        answer: asyncio.Future[Message],
    ) -> None:
        if answer.cancelled():
            return
        error = answer.exception()
        if channel.member.epoch != epoch or isinstance(error, PeerLostError):
            return
        if self._channels.get(channel.member.place) is not channel:
            return  # the worker was removed meanwhile
        if isinstance(error, StaleSessionError):
            channel.task.reopen("it is not in our session any more")
            return
        worker, name = channel.member.place, channel.member.name
        with self._engine.lock:
            channel.failed.pop(record.number, None)
            if error is None:
                message = answer.result()
                assert isinstance(message, ResourceBuilt), message
                record.built(worker, message.layout)
            else:
                assert isinstance(error, Exception)
                channel.failed[record.number] = record.failed(worker, name, error)
            self._engine.waiters.notify()
        self._built(channel, epoch, 1)

    def _built(self, channel: WorkerChannel, epoch: int, count: int) -> None:
        self._members.built(channel.member.place, epoch, count)
        if channel.member.state is MemberState.OPEN:
            self._turn_soon()

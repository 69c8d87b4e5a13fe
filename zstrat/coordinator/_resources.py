"""Per-worker resources (datasets, iterators, values), which every worker builds before
it runs closures.

A `Record` has what it takes to build a resource (code and arguments), a value for the
outcome on each worker, and the share of a dataset that each worker reads. It outlives
connections: when a worker (re)joins, all records are built there before its next
closure, with iterators at their start or at their position in a checkpoint.

A record has no reference to the user's handle. When the handle is dropped, the number
of the record is sent to the dispatcher, which makes all workers drop the resource.

A worker gets no closures while it builds. If building fails, the closures that need the
resource fail on that worker with the error. `Builder` runs on the loop thread.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final, final

from zstrat.errors import (
    ClosureAbortedError,
    ClosureInputError,
    InvalidArgumentError,
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
    from .leases import LeaseBook

_LOG: Final = logging.getLogger("zstrat.coordinator")

_AWAY: Final = (
    "%s: the worker of input pipeline %d is lost while its iterator is saved, so the "
    "position of the last save (or the start) is kept: when it returns, it reads again "
    "what it has read since"
)

_numbers: Final = itertools.count(1)
READY: Final = RemoteValueStatus.READY
NOT_READY: Final = RemoteValueStatus.NOT_READY


class Record:
    """The recipe to build a resource, and the outcome on each worker.

    The values change with the engine's lock held.
    """

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
        book: LeaseBook | None = None,
    ) -> None:
        self.book = book
        """The `LeaseBook` of a leased dataset; None for other resources."""
        self.number = next(_numbers)
        self.name, self.purpose = name, purpose
        self.maker, self.arguments = maker, arguments
        self.layout: LayoutMessage | None = None
        """The layout of an element (or of the value), once a worker has built the
        resource."""
        self.pipelines = InputPipelines(workers)
        self.states: dict[int, str] = {}
        """By input pipeline (a share of the dataset): the position at which its
        iterator starts, from the last checkpoint that was saved or restored; without an
        entry, at the start of the data. Replaced as a whole."""
        self._make_value = partial(kind, engine, Result(name, None))
        self._values = {place: self._make_value() for place in workers}
        if book is not None:
            book.failure = lambda: self.failure

    @property
    def values(self) -> tuple[RemoteValue, ...]:
        """One value per present worker, in the order of their places (indices in the
        session)."""
        return tuple([value for _, value in sorted(self._values.items())])

    @property
    def is_known(self) -> bool:
        """Whether a worker has built the resource, so that its layout is known."""
        return self.layout is not None

    @property
    def is_settled(self) -> bool:
        """Whether no worker is building the resource."""
        return all(value.state is not NOT_READY for value in self.values)

    @property
    def failure(self) -> Exception | None:
        """The error of the first worker that failed to build the resource; None while a
        worker is building it. Lost workers do not count."""
        if not self.is_settled:
            return None
        errors = (value.error for value in self.values if value.state is READY)
        return next((error for error in errors if error is not None), None)

    @property
    def workers(self) -> list[int]:
        """The places (indices in the session) of the workers that have a value."""
        return list(self._values)

    def add_worker(self, worker: int, task: str, reason: str) -> None:
        """Adds a worker, which may not be connected yet."""
        self.pipelines.join(worker)
        # Replaced as a whole, as threads of the user read it.
        self._values = {**self._values, worker: self._make_value()}
        self.aborted(worker, task, reason)

    def remove_worker(self, worker: int) -> None:
        """Removes a worker, whose value stays aborted."""
        self.pipelines.leave(worker)
        self._values = {n: value for n, value in self._values.items() if n != worker}

    def begin_build(self, worker: int) -> None:
        """Notes that the worker starts to build the resource."""
        self._values[worker]._begin_again()

    def is_building(self, worker: int) -> bool:
        return self._values[worker].state is NOT_READY

    def start_at(self, states: Sequence[str]) -> None:
        """Sets the positions at which iterators start when they are built. For leased
        data: leases again the examples whose updates a lost server has lost."""
        if self.book is not None:
            # Leases belong to no worker, so there is one state, and nothing to begin
            # at.
            self.book.rewind(json.loads(states[0]))
            return
        self.states = {n: state for n, state in enumerate(states) if state}

    def misfit(self, examples: int) -> InvalidArgumentError | None:
        """Returns the error if a leased dataset cannot have this number of examples on
        a worker; None if it can."""
        why = "" if self.book is None else self.book.built(examples)
        return InvalidArgumentError(f"{self.name}: {why}") if why else None

    def built(self, worker: int, layout: LayoutMessage) -> None:
        # That of the first worker: traces have been made with it.
        self.layout = self.layout or layout
        self._values[worker]._settle(None)

    def failed(self, worker: int, task: str, error: Exception) -> Exception:
        """Notes that building failed on a worker, and returns the error for closures
        that use the resource there. An empty dataset is at its end, like one that was
        read to its end: the worker reports that by its own `OutOfRangeError`, never by
        one that the user's function raised."""
        wrapped: Exception
        if isinstance(error, OutOfRangeError):
            wrapped = OutOfRangeError(
                f"End of sequence: {self.name} has no element on {task}"
            )
            wrapped.__cause__ = error
        else:
            wrapped = ClosureInputError(
                f"{self.name} could not be built on {task}", error
            )
            wrapped.__cause__ = wrapped.original_exception
        self._values[worker]._settle_error(wrapped)
        return wrapped

    def ended(self, cause: str) -> None:
        """Makes the values that are not built yet raise `ClosureAbortedError`, as
        building has stopped because of ``cause``."""
        for value in self.values:
            if value.state is NOT_READY:
                value._abort(ClosureAbortedError(f"{self.name} is not built: {cause}"))

    def aborted(self, worker: int, task: str, reason: str) -> None:
        """Makes the value of a worker that is lost, or has not joined yet, raise
        `ClosureAbortedError`."""
        self._values[worker]._abort(
            ClosureAbortedError(
                f"{self.name} is not on {task} ({reason}); it is built when that task "
                "returns"
            )
        )


BUILD_DEADLINE: Final = 600.0
"""Seconds to build one resource: a dataset function may read or download a lot."""


@final
class Builder:
    """Makes workers build the resources of all records. On the loop thread."""

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
        self._dropped: deque[int] = deque()
        self._why_stopped: str | None = None
        """Why building has stopped, after `stop`. Guarded by the engine's lock."""

    def add_soon(self, record: Record) -> None:
        """Adds a resource. Closures that are scheduled later wait for it. Callable from
        any thread."""
        with self._engine.lock:
            if self._why_stopped is None:
                self._new.append(record)
            else:
                record.ended(self._why_stopped)

    def take_new(self) -> list[Record]:
        """Returns the records added since the last call. Lock held."""
        new = list(self._new)
        self._new.clear()
        return new

    def add(self, record: Record) -> None:
        """Builds a resource on every connected worker, and on the others when they
        join."""
        self._records[record.number] = record
        with self._engine.lock:  # workers may have joined or left since it was made
            for place in set(record.workers) - set(self._channels):
                record.aborted(place, "a worker", "it was removed")
                record.remove_worker(place)
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
        """Drops a resource. Takes no lock. Callable from any thread."""
        self._dropped.append(number)

    def dropped(self) -> list[int]:
        """Returns the numbers of resources dropped since the last call."""
        numbers, unknown = [], []
        while self._dropped:
            number = self._dropped.popleft()
            if (record := self._records.pop(number, None)) is not None:
                numbers.append(number)
                if record.book is not None:
                    with self._engine.lock:
                        # Closures that still draw from it hold a claim on the handle,
                        # so there are none.
                        self._engine.queue.leases.books.pop(number, None)
            else:
                unknown.append(number)
        if unknown:
            # Added and dropped since the last turn: it is built in the next turn, like
            # any other, and dropped then.
            with self._engine.lock:
                new = {record.number for record in self._new}
            self._dropped.extend(number for number in unknown if number in new)
        return numbers

    def stop(self, cause: str) -> None:
        """Stops building, makes the values that are not built raise
        `ClosureAbortedError`, and drops all resources. Lock held."""
        self._why_stopped = cause
        for record in (*self._records.values(), *self.take_new()):
            record.ended(cause)
        # The next `dropped` has all workers free them.
        self._dropped.extend(self._records)

    def build_all(self, channel: WorkerChannel) -> None:
        """Builds all resources on a worker that (re)joined; after that the worker gets
        closures."""
        records = list(self._records.values())
        self._members.build(channel.member.place, len(records))
        with self._engine.lock:
            for record in records:
                record.begin_build(channel.member.place)
        for record in records:
            self._build(channel, record)
        # Without any resource nothing would be answered, and the worker never opened.
        self._built(channel, 0)

    async def states(self, record: Record) -> list[str]:
        """Returns the positions of the iterators of all input pipelines (shares of the
        dataset), as JSON; "" is the start. If the worker of a pipeline is lost, or is
        building its iterator: the position at which the iterator will start.

        Raises:
            InvalidArgumentError: A dataset has no position that can be saved.
        """
        states: dict[int, str | None] = {}
        channels: dict[int, WorkerChannel] = {}
        for place, channel in self._channels_with(record).items():
            pipeline = record.pipelines[place]
            if record.is_building(place):  # nothing was read from it
                states[pipeline] = ""
            else:  # of several workers that read a share, the first
                channels.setdefault(pipeline, channel)
        deadline = asyncio.get_running_loop().time() + BUILD_DEADLINE
        answers = await asyncio.gather(
            *(
                channel.iterator_state(record.number, deadline)
                for channel in channels.values()
            )
        )
        states |= zip(channels, answers, strict=True)
        count = record.pipelines.count
        for n in range(count):
            if states.get(n) is None:
                _LOG.warning(_AWAY, record.name, n)
        return [states.get(n) or record.states.get(n, "") for n in range(count)]

    async def require_fit(self, record: Record, states: Sequence[str]) -> None:
        """Checks with the connected workers that their iterators can continue at
        positions that `states` returned.

        Raises:
            InvalidArgumentError: An iterator cannot continue there; says why.
        """
        deadline = asyncio.get_running_loop().time() + BUILD_DEADLINE
        pairs = (
            (channel, states[record.pipelines[place]])
            for place, channel in self._channels_with(record).items()
        )
        await asyncio.gather(
            *(
                channel.require_fit(record.number, state, deadline)
                for channel, state in pairs
                if state
            )
        )

    def start_at(self, states: Mapping[int, Sequence[str]]) -> None:
        """Sets the positions at which iterators start when they are built, by number of
        the resource."""
        with self._engine.lock:
            for number in states.keys() & self._records.keys():
                self._records[number].start_at(states[number])
                self._engine.queue.leases_changed(number)

    async def go_to(self, record: Record, states: Sequence[str]) -> None:
        """Rebuilds the iterators at positions that `states` returned. Closures that are
        scheduled later wait for this."""
        # Before they are rebuilt, which sends these positions.
        record.start_at(states)
        for channel in self._channels.values():
            place = channel.member.place
            if channel.member.state in (MemberState.OPEN, MemberState.BUILDING):
                with self._engine.lock:
                    record.begin_build(place)
                self._members.build(place)
                self._build(channel, record)

    def abort_worker(self, channel: WorkerChannel, reason: str) -> None:
        """Makes the values that resources have on a lost worker raise
        `ClosureAbortedError`, and lets closures that wait for leases try again. Lock
        held."""
        for record in self._records.values():
            # With it the last worker may be gone that was building: closures that wait
            # for the size of a leased dataset end then with the error of the others.
            record.aborted(channel.member.place, channel.member.name, reason)
            self._engine.queue.leases_changed(record.number)

    def add_worker(self, channel: WorkerChannel) -> None:
        """Adds a worker to all records. Lock held."""
        for record in self._records.values():
            self._joined(record, channel)

    def remove_worker(self, channel: WorkerChannel) -> None:
        """Removes a worker from all records. Lock held."""
        for record in self._records.values():
            record.remove_worker(channel.member.place)
            self._engine.queue.leases_changed(record.number)

    def _channels_with(self, record: Record) -> dict[int, WorkerChannel]:
        """Returns the connected workers that have the resource, or build it, by place
        (index in the session)."""
        return {
            place: channel
            for place, channel in sorted(self._channels.items())
            if channel.task.is_ready and record.number in channel.resources
        }

    @staticmethod
    def _joined(record: Record, channel: WorkerChannel) -> None:
        member = channel.member
        if member.place not in record.workers:
            record.add_worker(member.place, member.name, member.reason)

    def _build(self, channel: WorkerChannel, record: Record) -> None:
        # Noted before it is built, as a drop that comes meanwhile has to reach the
        # worker, too.
        channel.resources.add(record.number)
        epoch = channel.member.epoch
        try:
            answer = self._request(channel, record)
        except PeerLostError:
            return  # its session reports the loss, and all is rebuilt when it returns
        except Exception as error:  # to those who use it: it cannot be sent
            self._outcome(channel, record, error)
            return
        answer.add_done_callback(lambda f: self._answered(channel, epoch, record, f))

    @staticmethod
    def _request(channel: WorkerChannel, record: Record) -> asyncio.Future[Message]:
        """Sends a worker the request to build a resource; returns the future of the
        answer. Raises what sending raises."""
        channel.put_code(record.maker)
        arguments = channel.put_arguments(record.arguments)
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
            0 if record.book is None else record.book.noted_as,
        )
        deadline = asyncio.get_running_loop().time() + BUILD_DEADLINE
        return channel.task.link.submit(message, deadline=deadline)

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
        # It joined again meanwhile, and builds everything again; or it will.
        if channel.member.epoch != epoch or isinstance(error, PeerLostError):
            return
        if self._channels.get(channel.member.place) is not channel:
            return  # the worker was removed meanwhile
        if isinstance(error, StaleSessionError):
            channel.task.reopen("it is no longer in our session")
            return
        self._outcome(channel, record, error or answer.result())

    def _outcome(
        self, channel: WorkerChannel, record: Record, outcome: Message | BaseException
    ) -> None:
        """Handles a worker's answer to the request to build a resource, or the error in
        its place."""
        worker, name = channel.member.place, channel.member.name
        with self._engine.lock:
            # Of an earlier attempt: a position may have been set since (`go_to`).
            channel.failed.pop(record.number, None)
            if isinstance(outcome, ResourceBuilt):
                outcome = record.misfit(outcome.examples) or outcome
            if isinstance(outcome, ResourceBuilt):
                record.built(worker, outcome.layout)
            else:
                assert isinstance(outcome, Exception), outcome
                channel.failed[record.number] = record.failed(worker, name, outcome)
            self._engine.queue.leases_changed(record.number)
            self._engine.waiters.notify()
        self._built(channel, 1)

    def _built(self, channel: WorkerChannel, count: int) -> None:
        self._members.built(channel.member.place, channel.member.epoch, count)
        if channel.member.state is MemberState.OPEN:
            self._turn_soon()

"""The engine of ranks that share no memory, in which the calling thread drives the
sockets.

The engine carries out the same schedules as the messages of links (`_traffic`), one
call after the other, in the thread that waits for the result. Small calls by links take
most of their time for the way to the loop and back, and for the handling of messages on
the loop. Large calls take little of theirs for that, and gain more from loops that work
at the same time.

No rank is ahead of another rank by more than one call: a call ends only when every rank
has contributed, and hops of the next call are kept until this rank makes the call.

The engine does not support broadcasts: their root waits for no other rank, so it could
be ahead by many calls.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from zstrat.collectives._engine import CallKind, ConnectionEnded, Differs, Overdue
from zstrat.collectives.schedules._plans import progress_of
from zstrat.config import MiB
from zstrat.errors import BusyError, ClosedError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zstrat.collectives._engine import CollectiveCall
    from zstrat.collectives.schedules._choice import Choices
    from zstrat.collectives.schedules._progress import ScheduleProgress, Send
    from zstrat.transport import DataConnections

LARGEST: Final = MiB
"""Bytes of the largest call that the engine runs. With keys, calls of 256 KB by two
ranks take three quarters of the time that they take by links, 1 MB about the same, 2 MB
more."""

EARLY: Final = 256 * MiB
"""Most bytes of hops kept for the next call: several times what honest ranks send."""

_HEAD: Final = struct.Struct("<QQI")
"""Header of a hop: key of the call, place in the schedule, and digest of the call."""

_NOTHING: Final = np.empty(0, np.uint8)


class EarlyHop(NamedTuple):
    """A hop (data of a call) that came before this rank made the call."""

    rank: int
    place: int
    about: int
    data: np.ndarray


class SocketEngine:
    """Runs calls through data connections, in the thread that calls.

    Args:
        one_host: Whether all ranks are on one machine, and share its cores.
        choices: The table of algorithms of the group.
    """

    def __init__(
        self,
        connections: DataConnections,
        rank: int,
        size: int,
        *,
        one_host: bool,
        choices: Choices,
    ) -> None:
        self._connections, self._rank, self._size = connections, rank, size
        self._one_host, self._choices = one_host, choices
        self._queues: dict[int, deque[tuple[bytes, memoryview]]] = {}
        """Hops that wait for room on the connection to a rank, by rank."""
        self._early: dict[int, list[EarlyHop]] = {}
        self._early_bytes = 0
        self._error: Exception | None = None
        self._progress: ScheduleProgress | None = None
        self._moved = 0.0
        self._waited = dict.fromkeys(range(size), 0.0)

    def takes(self, call: CollectiveCall) -> bool:
        # Tagged calls may come in another order elsewhere: here the order is all there
        # is. What a compression leaves out is kept where all such calls go.
        if call.tag is not None or call.compression is not None:
            return False
        if call.kind is CallKind.BROADCAST:
            return False
        sizes = np.sum(call.sizes) * call.source.itemsize if call.sizes else 0
        return bool(max(call.source.nbytes, sizes) <= LARGEST)

    def run(self, call: CollectiveCall) -> None:
        if self._error is not None:
            raise self._error
        progress = progress_of(
            call,
            self._rank,
            self._size,
            one_host=self._one_host,
            choices=self._choices,
        )
        self._progress, self._moved = progress, time.monotonic()
        try:
            with self._connections.held:
                self._carry_out(call, progress)
        except Exception as error:  # to the caller, and to every call after it
            self._error = self._error or error
            raise
        except BaseException as error:  # Ctrl-C in a blocking call
            self._error = ClosedError(
                f"a call was interrupted by {type(error).__name__}"
            )
            raise
        self._progress = None  # after a failure others ask whom it waited for
        # Once a call: the counters of the process take a lock.
        self._connections.settle()

    def waits(self) -> Sequence[int]:
        progress = self._progress
        # A copy of the keys: the thread that runs continues meanwhile.
        full = list(self._queues)
        return sorted({*progress.waits, *full}) if progress is not None else ()

    def waited(self) -> Mapping[int, float]:
        return self._waited

    def abort(self, error: Exception) -> None:
        self._error = self._error or error
        self._connections.wake()

    def close(self) -> None:
        # After a failure nobody waits for what is on its way.
        if self._error is None or isinstance(self._error, ClosedError):
            self._connections.close()
        else:
            self._connections.close(0.0)

    def _carry_out(self, call: CollectiveCall, progress: ScheduleProgress) -> None:
        for send in progress.start():
            self._send(call, send)
            # A full connection: the peer may be waiting for us to read.
            while self._queues:
                self._turn(call, progress)
        for hop in self._early.pop(call.key, ()):
            self._early_bytes -= hop.data.nbytes
            self._deliver(call, progress, hop)
        while self._queues or not progress.is_done:
            self._turn(call, progress)

    def _turn(self, call: CollectiveCall, progress: ScheduleProgress) -> None:
        """Waits until a hop comes or can be sent; takes the hop into the call's
        progress, and sends hops."""
        if self._error is not None:
            raise self._error
        left = call.deadline - time.monotonic()
        if left <= 0:
            raise Overdue(self.waits())
        has_changed = self._connections.wait(self._queues, left)
        arrival = self._connections.receive()
        if arrival is None and not has_changed:
            # Nothing for a while: had a rank been lost, its link would have said so.
            ended = self._connections.ended(self.waits())
            # Its last message may have come just before the end.
            arrival = self._connections.receive()
            if arrival is None and ended:
                raise ConnectionEnded(ended[0])
        if arrival is not None:
            self._take(call, progress, *arrival)
        if self._queues:
            self._flush()

    def _take(
        self,
        call: CollectiveCall,
        progress: ScheduleProgress,
        rank: int,
        header: bytes,
        data: memoryview,
    ) -> None:
        if len(header) != _HEAD.size:
            raise ProtocolError(
                f"{call.words}: rank {rank} sent a header of {len(header)} bytes, "
                f"expected {_HEAD.size}: all ranks have to run the same zstrat"
            )
        key, place, about = _HEAD.unpack(header)
        array = np.frombuffer(data, np.uint8) if len(data) else _NOTHING
        hop = EarlyHop(rank, place, about, array)
        if key != call.key:
            self._keep(call, key, hop)
            return
        now = time.monotonic()
        self._waited[rank] += now - self._moved
        self._moved = now
        self._deliver(call, progress, hop)

    def _keep(self, call: CollectiveCall, key: int, hop: EarlyHop) -> None:
        self._early.setdefault(key, []).append(hop)
        self._early_bytes += hop.data.nbytes
        # More than a call ahead: the ranks have lost each other's order.
        if self._early_bytes > EARLY:
            raise BusyError(
                f"{call.words}: {self._early_bytes >> 20} MiB arrived, the last from "
                f"rank {hop.rank}, for calls that this rank has not made yet: they do "
                "not make the same calls"
            )

    def _deliver(
        self, call: CollectiveCall, progress: ScheduleProgress, hop: EarlyHop
    ) -> None:
        if hop.about != call.about:
            raise Differs(hop.rank, hop.about)
        try:
            sends = progress.arrived(hop.place, hop.data)
        except ProtocolError as error:
            raise ProtocolError(f"{call.words}: rank {hop.rank}: {error}") from None
        for send in sends:
            self._send(call, send)

    def _send(self, call: CollectiveCall, send: Send) -> None:
        peer, place, data = send
        head = _HEAD.pack(call.key, place, call.about)
        if peer in self._queues or not self._connections.send(peer, head, data.data):
            self._queues.setdefault(peer, deque()).append((head, data.data))

    def _flush(self) -> None:
        """Sends hops that found no room before."""
        for peer, queue in list(self._queues.items()):
            while queue and self._connections.send(peer, *queue[0]):
                queue.popleft()
            if not queue:
                del self._queues[peer]

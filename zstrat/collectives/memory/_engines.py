"""Engines that run a group's calls in shared memory: on one host, or within each host.

*Ranks on one host.* Every call runs in the slots of the ranks. An algorithm that the
caller names concerns messages, and is ignored here: naming one must not make the call
slower.

*Ranks on several hosts.* The ranks of a host share memory, and the first rank of the
host sends messages on behalf of all. A reduction runs in parts. Each part is reduced
inside the host, then the first ranks of all hosts reduce it by messages, while the next
part is reduced inside the host; finally the other ranks of the host copy the result. So
the network carries each element once per host, not once per rank, and both kinds of
work overlap (the hierarchy of Horovod [Sergeev and Del Balso 2018] and of MPI's
two-level trees). The first ranks use the algorithm that the caller names, or the table
chooses.

Partial sums (f32 for f16 and bf16) are sent between hosts. Each first rank divides and
rounds them, from the same bits, so that all ranks have the same result.

*The choice of the engine* depends on whose memory each rank could map, which the ranks
exchange when the group forms. A rank creates its memory before that, and keeps it until
the group is closed.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, TypeVar, assert_never

import numpy as np

from zstrat.collectives._engine import CallKind
from zstrat.collectives._reduction import ReduceOp, Reduction, reduction_of
from zstrat.transport import Arena

from ._barrier import IS_AVAILABLE
from ._shm_collectives import CAPACITY, RankMemory, ShmCollectives, segment_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from zstrat.collectives._engine import (
        Between,
        CollectiveCall,
        CollectiveEngine,
        Started,
    )
    from zstrat.wire import MemberEntry

Part = TypeVar("Part")

_LOG: Final = logging.getLogger("zstrat.collectives")


class OneHost:
    """The engine of a group whose ranks are all on this host.

    Args:
        closed: Called when the engine is closed.
    """

    def __init__(self, shared: ShmCollectives, closed: Callable[[], object]) -> None:
        self._shared: ShmCollectives | None = shared
        self._waited, self._closed = shared.barrier.waited, closed

    def takes(self, call: CollectiveCall) -> bool:
        return may_take(call)

    def run(self, call: CollectiveCall) -> None:
        shared = self._shared
        assert shared is not None, "the group does not run calls after close()"
        shared.barrier.begin(call.about, call.deadline)
        try:
            self._execute(shared, call)
        except BaseException as error:  # to the caller, and to every call after it
            shared.barrier.cut_off(error)
            raise

    def waits(self) -> Sequence[int]:
        shared = self._shared  # another thread may close the engine meanwhile
        return () if shared is None else shared.barrier.waits()

    def waited(self) -> Mapping[int, float]:
        return self._waited

    def abort(self, error: Exception) -> None:
        shared = self._shared
        if shared is not None:
            shared.barrier.abort(error)

    def close(self) -> None:
        # Mapped memory stays while anything refers to it.
        self._shared = None
        self._closed()

    def _execute(self, shared: ShmCollectives, call: CollectiveCall) -> None:
        source, target = call.source, call.target
        match call.kind:
            case CallKind.ALL_REDUCE:
                reduction = reduction_of(call.op, source.dtype, shared.size)
                shared.all_reduce(reduction, source, target)
            case CallKind.BROADCAST:
                shared.broadcast(call.root, source, target)
            case CallKind.ALL_GATHER:
                shared.all_gather(call.sizes, source, target)
            case CallKind.REDUCE_SCATTER:
                reduction = reduction_of(call.op, source.dtype, shared.size)
                shared.reduce_scatter(reduction, call.sizes, source, target)
            case CallKind.ALL_TO_ALL:
                shared.all_to_all(call.sizes, source, target)
            case CallKind.BARRIER:
                shared.barrier.meet()
            case _:
                assert_never(call.kind)


def may_take(call: CollectiveCall) -> bool:
    """Returns whether shared memory supports the tag and the compression of a call."""
    # Tagged calls may come in another order on other ranks; engines need one order.
    return call.tag is None and call.compression is None


PART: Final = 4 * 2**20
"""Bytes of a part: four slots (buffers of a rank), so that a ring of a few hosts still
has hops of 1 MiB."""

AHEAD: Final = 8
"""Most parts under way at a time: 32 MiB, which 25 Gb/s carry in 10 ms. The number also
bounds the partial sums of f16 and bf16 that first ranks keep besides the result."""

_KINDS: Final = (CallKind.ALL_REDUCE, CallKind.BROADCAST, CallKind.BARRIER)


@dataclass(frozen=True, slots=True)
class LocalRank:
    """Where a rank runs: the index of its host, and its index among the ranks of the
    host."""

    host: int
    rank: int


def local_ranks_of(hosts: Sequence[object]) -> tuple[list[LocalRank], list[int]]:
    """Returns the `LocalRank` of each rank, and the first rank of each host. ``hosts``
    has equal values for ranks of one host."""
    seen: dict[object, list[int]] = {}
    for rank, host in enumerate(hosts):
        seen.setdefault(host, []).append(rank)
    numbers = {host: number for number, host in enumerate(seen)}
    places = [
        LocalRank(numbers[host], seen[host].index(rank))
        for rank, host in enumerate(hosts)
    ]
    return places, [ranks[0] for ranks in seen.values()]


class HostsEngine(OneHost):
    """The engine of a group on several hosts. It does not run all_gather,
    reduce_scatter and all_to_all, for which it would save nothing: they go as
    messages."""

    def __init__(
        self,
        shared: ShmCollectives,
        rank: int,
        places: Sequence[LocalRank],
        leaders: Sequence[int],
        between: Between,
        closed: Callable[[], object],
    ) -> None:
        super().__init__(shared, closed)
        self._places, self._leaders = tuple(places), tuple(leaders)
        self._host, self._leads = places[rank].host, places[rank].rank == 0
        self._others = tuple(leader for leader in leaders if leader != rank)
        self._between = between
        self._is_between = False

    def takes(self, call: CollectiveCall) -> bool:
        # Else each rank is alone on its host, and has nobody to share memory with.
        shares = len(self._leaders) < len(self._places)
        return shares and call.kind in _KINDS and may_take(call)

    def waits(self) -> Sequence[int]:
        return self._others if self._is_between else super().waits()

    def _execute(self, shared: ShmCollectives, call: CollectiveCall) -> None:
        if call.kind is CallKind.ALL_REDUCE:
            self._all_reduce(shared, call)
        elif call.kind is CallKind.BROADCAST:
            self._broadcast(shared, call)
        else:
            self._barrier(shared, call)

    def _all_reduce(self, shared: ShmCollectives, call: CollectiveCall) -> None:
        """Reduces an array part by part: within the host, between the first ranks of
        hosts, then copies the part to all ranks.

        Cost on the network, per host: one all-reduce of the array.
        """
        whole = reduction_of(call.op, call.source.dtype, len(self._places))
        # A mean is divided once, at the end: parts and hosts only add.
        op = ReduceOp.SUM if call.op is ReduceOp.MEAN else call.op
        within = Reduction(op, whole.accumulator, whole.accumulator, shared.size)

        def started() -> Iterator[tuple[slice, np.ndarray, Started | None]]:
            for number, part in enumerate(_parts(call, whole.accumulator)):
                total, between = call.target[part], None
                # Partial sums have more bits than the result, so they need other
                # memory.
                if whole.rounds and self._leads:
                    total = np.empty(total.size, whole.accumulator)
                shared.reduce(within, call.source[part], total)
                if self._leads:
                    across = replace(call, source=total, target=total, op=op)
                    between = self._between.start(across, self._leaders, number)
                yield part, total, between

        for part, total, between in _some_ahead(started()):
            target = call.target[part]
            if between is not None:
                self._wait(between)
                whole.finish(total, target if whole.rounds else total)
            # Of every part, on every rank of the host, in the same order: steps are
            # counted.
            shared.broadcast(0, target, target)

    def _broadcast(self, shared: ShmCollectives, call: CollectiveCall) -> None:
        """Sends an array part by part: on the root's host, between the first ranks of
        hosts, then on the other hosts.

        Cost on the network: one broadcast of the array among the hosts.
        """
        root = self._places[call.root]
        is_here = root.host == self._host

        def started() -> Iterator[tuple[np.ndarray, Started | None]]:
            for number, part in enumerate(_parts(call, call.source.dtype)):
                target, between = call.target[part], None
                if is_here:
                    # The memory of the root may be read-only: nothing is written to it
                    # if source and target are the same.
                    is_same = call.source is call.target
                    source = target if is_same else call.source[part]
                    shared.broadcast(root.rank, source, target)
                if self._leads:
                    across = replace(call, source=target, target=target, root=root.host)
                    between = self._between.start(across, self._leaders, number)
                yield target, between

        for target, between in _some_ahead(started()):
            if between is not None:
                self._wait(between)
            if not is_here:
                shared.broadcast(0, target, target)

    def _barrier(self, shared: ShmCollectives, call: CollectiveCall) -> None:
        """Waits for the ranks of the host, then for all hosts, then releases the
        host."""
        shared.barrier.meet()
        if self._leads:
            self._wait(self._between.start(call, self._leaders, 0))
        shared.barrier.meet()

    def _wait(self, started: Started) -> None:
        self._is_between = True
        try:
            started.wait()
        finally:
            self._is_between = False


def _some_ahead(started: Iterator[Part]) -> Iterator[Part]:
    """Yields the started parts in order: each one when `AHEAD` parts are under way, or
    all were started."""
    travelling: deque[Part] = deque()
    for part in started:
        travelling.append(part)
        if len(travelling) >= AHEAD:
            yield travelling.popleft()
    yield from travelling


def _parts(call: CollectiveCall, dtype: np.dtype) -> Iterator[slice]:
    """Yields the slice of each part of the array. At least one: ranks also compare
    empty calls."""
    step, size = PART // dtype.itemsize, call.source.size
    for start in range(0, max(size, 1), step):
        yield slice(start, min(start + step, size))


class SharedMemory:
    """The shared memory of this rank. Created before the group forms, as its descriptor
    is sent with the members."""

    def __init__(self) -> None:
        """Raises: OSError: The kernel does not provide anonymous memory."""
        arena = Arena(CAPACITY)
        self._arena: Arena | None = arena
        self.descriptor, self.word = arena.descriptor, arena.word
        self.capacity: Final = CAPACITY
        self._segments: dict[int, RankMemory] = {}
        """Memory that `reach` has mapped, by rank, for `attach`."""

    def reach(self, rank: int, members: Sequence[MemberEntry]) -> list[bool]:
        """Maps the memory of the other ranks of this machine. Returns for each rank
        whether its memory was mapped. Only mapping proves that a rank is on this
        machine: machines may share a name, and process IDs are not unique then."""
        assert self._arena is not None, "the memory is closed"
        self._segments = {rank: RankMemory(rank, self._arena.memory)}
        for other, member in enumerate(members):
            # Another name is another machine; the same name may be, too.
            if other == rank or member.host != members[rank].host:
                continue
            try:
                self._segments[other] = segment_of(other, member)
            except OSError as error:  # another machine, user, or container
                _LOG.info("rank %d goes by messages: %s", rank, error)
        return [other in self._segments for other in range(len(members))]

    def attach(
        self, rank: int, hosts: Sequence[int], between: Between
    ) -> CollectiveEngine:
        """Returns the engine of one generation. Call it after `reach`. ``hosts`` is
        what `hosts_of` returns for the results of `reach` on all ranks."""
        places, leaders = local_ranks_of(hosts)
        me = places[rank]
        segments = [
            self._segments[other]
            for other, place in enumerate(places)
            if place.host == me.host
        ]
        self._segments = {}
        shared = ShmCollectives(me.rank, segments, len(os.sched_getaffinity(0)))
        if len(leaders) == 1:
            return OneHost(shared, self.close)
        return HostsEngine(shared, rank, places, leaders, between, self.close)

    def close(self) -> None:
        """Releases the memory. Idempotent, as the engine's `close` also calls it."""
        self._segments = {}
        if self._arena is not None:
            self._arena.close()
            self._arena = None  # a closed group must not keep the memory


def hosts_of(reached: Sequence[Sequence[bool]]) -> list[int]:
    """Returns for each rank the first rank of its machine. ``reached[i][j]``: rank i
    has mapped the memory of rank j. Ranks of one machine have all mapped each other's
    memory."""
    hosts: list[int] = []
    for rank in range(len(reached)):
        machine = rank
        # The first machine of which this rank has mapped all, and all of it this rank.
        for first in dict.fromkeys(hosts):
            others = [at for at, host in enumerate(hosts) if host == first]
            if all(reached[rank][at] and reached[at][rank] for at in others):
                machine = first
                break
        hosts.append(machine)
    return hosts


def host_memory(transport: str) -> SharedMemory | None:
    """Creates the shared memory of this rank; None if ``transport`` or the system
    allows messages alone."""
    if transport not in ("auto", "shm") or not IS_AVAILABLE:
        return None
    try:
        return SharedMemory()
    except OSError as error:
        _LOG.info("calls of this rank go by socket, not by shared memory: %s", error)
        return None

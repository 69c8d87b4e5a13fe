"""Forms a generation of a group: joins the other ranks, agrees with them on a
transport, and opens data connections where ranks share no memory."""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from zstrat.collectives._engine import (
    CallKind,
    CollectiveCall,
    ConnectionEnded,
    Overdue,
    margin_of,
)
from zstrat.collectives.memory._engines import host_memory, hosts_of
from zstrat.errors import ClosedError, PermissionDeniedError
from zstrat.transport import DataConnections, reached_as
from zstrat.wire import JoinGroup, MemberEntry

from ._executors import MessageExecutor
from ._scheduler import OperationScheduler
from ._socket_engine import SocketEngine
from ._traffic import FORMING, about

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zstrat.collectives._engine import Between, CollectiveEngine
    from zstrat.collectives.memory._engines import SharedMemory

    from ._generation import Generation
    from ._invitation import FormingRequest
    from ._runtime import GroupRuntime

_LOG: Final = logging.getLogger("zstrat.collectives")

_PORTS, _ADMITTED, _MET = range(FORMING + 1, FORMING + 4)
"""Keys of the calls that ranks make while they form a generation; no operation has
these keys."""

_PLACE: Final = struct.Struct("<H40s")
"""Port and credential of a rank's data connections, packed; port 0: the rank has
none."""

_BARRIER_TIMEOUT: Final = 2.0
"""Seconds that the first messages on data connections may take. A firewall that drops
them delays the forming of each generation by this."""


async def form(runtime: GroupRuntime, wanted: FormingRequest) -> OperationScheduler:
    """Forms a generation: joins it, agrees with the other ranks on its engine, and
    returns the scheduler of its operations. Runs on the runtime's loop.

    Raises:
        CollectiveTimeoutError, InvalidArgumentError, AlreadyExistsError,
            PeerLostError: See `GroupNode.join`.

    Cancellation: this rank has not joined.
    """
    node = runtime.node
    # Before the ranks meet: its descriptor travels with the request to join.
    memory = host_memory(wanted.transport)
    try:
        request = JoinGroup(
            wanted.group,
            wanted.generation,
            wanted.rank,
            len(wanted.seats),
            _entry(runtime, wanted, memory),
            wanted.timeout,
        )
        generation = await node.join(
            request, wanted.seats, wanted.transport, wanted.choices
        )
        messages = MessageExecutor(runtime, generation)
        try:
            engine = await _agree(generation, memory, messages, wanted.timeout)
            if engine is None:
                if memory is not None:
                    memory.close()
                engine = await connect_data(runtime, generation, wanted.timeout)
        except BaseException:  # to `Group`, with cancellation: the others are notified
            await node.leave(generation, "it could not agree on a transport")
            raise
    except BaseException:  # to `Group`; no engine has the memory
        if memory is not None:
            memory.close()
        raise
    return OperationScheduler(generation, messages, engine)


async def _agree(
    generation: Generation,
    memory: SharedMemory | None,
    between: Between,
    timeout: float,
) -> CollectiveEngine | None:
    """Agrees with all ranks on an engine. Returns the engine for shared memory if all
    ranks have such memory and some share it, else None. Acts as a barrier: no rank
    returns before all have called the function."""
    size, rank = generation.size, generation.rank
    mapped = [False] * size
    if memory is not None:
        mapped = memory.reach(rank, generation.members)
    # Every rank sends what it could map, so that all come to the same result.
    answers = await exchange(
        generation, FORMING, np.packbits(mapped).tobytes(), timeout
    )
    bits = np.frombuffer(b"".join(answers), np.uint8).reshape(size, -1)
    reached = np.unpackbits(bits, axis=1, count=size).astype(bool).tolist()
    # A rank without memory has not even reached itself.
    if memory is None or not all(reached[each][each] for each in range(size)):
        return None
    hosts = hosts_of(reached)
    generation.hosts = len(set(hosts))
    # A single rank may as well use its own memory.
    if generation.hosts == size > 1:
        return None
    return memory.attach(rank, hosts, between)


def _entry(
    runtime: GroupRuntime, wanted: FormingRequest, memory: SharedMemory | None
) -> MemberEntry:
    me, seat = runtime.node.me, wanted.seats[wanted.rank]
    shared = (0, 0, b"")
    if memory is not None:
        shared = (memory.descriptor, memory.capacity, memory.word)
    return MemberEntry(
        seat.task, seat.address, me.host, me.pid, me.incarnation, *shared
    )


async def exchange(
    generation: Generation, key: int, word: bytes, timeout: float
) -> Sequence[bytes]:
    """Sends ``word`` to all ranks, and returns the words of all ranks in their order.

    All ranks must call it with the same ``key`` and equally long words.

    Raises:
        As the calls of a group.

    Cancellation: the word of this rank may have been sent.
    """
    loop = asyncio.get_running_loop()
    call = _gathering(generation, key, word, timeout)
    over: asyncio.Future[None] = loop.create_future()
    generation.traffic.start(call, partial(_settle, over))
    await over
    return [bytes(each) for each in call.target.reshape(generation.size, -1)]


async def connect_data(
    runtime: GroupRuntime, generation: Generation, timeout: float
) -> CollectiveEngine | None:
    """Opens data connections between all ranks, and returns their engine; None if some
    ranks cannot connect. ``timeout`` in seconds.

    Data connections are sockets that the calling thread drives itself, for groups whose
    ranks share no memory. Each rank binds a port for them, in addition to the port of
    its task, and draws a credential. The ranks exchange port and credential over links,
    so nobody else can connect. The connections are used only if a first call through
    them succeeds: a firewall may let only the port of the task through, and then calls
    go as messages over links.

    Raises, cancellation: as `exchange`; no data connection is left open.
    """
    # Equal on all ranks, so none waits for another one here.
    if not 1 < generation.size <= DataConnections.MOST:
        return None
    connections = await _bound(runtime, generation)
    try:
        place = _PLACE.pack(0, b"")
        if connections is not None:
            place = _PLACE.pack(connections.port, connections.credential)
        answers = await exchange(generation, _PORTS, place, timeout)
        places = [_PLACE.unpack(each) for each in answers]
        if connections is None or not all(port for port, _ in places):
            return None
        engine = SocketEngine(
            connections,
            generation.rank,
            generation.size,
            one_host=generation.hosts == 1,
            choices=generation.traffic.choices,
        )
        others = [rank for rank in range(generation.size) if rank != generation.rank]
        for rank in others:
            connections.admit(rank, places[rank][1])
        # A rank that connects before it is admitted would be refused for good.
        await exchange(generation, _ADMITTED, b"\1", timeout)
        ports = {rank: places[rank] for rank in others}
        # No early return: whatever fails here, the others wait in the last exchange.
        is_ready = await _connected(connections, generation, ports)
        is_ready = is_ready and await _have_joined(engine, generation)
        is_ready = is_ready and _shut(connections, generation)  # all are here
        # Other ranks may have spent that much longer waiting for a first message.
        timeout += _BARRIER_TIMEOUT
        if b"\0" not in await exchange(generation, _MET, bytes([is_ready]), timeout):
            connections = None  # the engine's
            return engine
        _LOG.info("%s: its ranks cannot reach each other's data port", generation.title)
        return None
    finally:
        if connections is not None:
            connections.close(0.0)


async def _bound(
    runtime: GroupRuntime, generation: Generation
) -> DataConnections | None:
    node, rank = runtime.node, generation.rank
    address = generation.members[rank].address
    if address.startswith("ipc:"):
        return None
    try:
        return await DataConnections.bound(
            rank, generation.size, address, node.settings, node.security
        )
    except (OSError, PermissionDeniedError) as error:
        _LOG.info("%s uses links, not data connections: %s", generation.title, error)
        return None


async def _connected(
    connections: DataConnections,
    generation: Generation,
    ports: dict[int, tuple[int, bytes]],
) -> bool:
    """Starts a connection to each rank, and returns whether all addresses resolve.
    ``ports``: port and credential of each rank."""
    for rank, (port, credential) in ports.items():
        address = reached_as(f"*:{port}", generation.members[rank].address)
        try:
            await connections.connect(rank, address, credential)
        except OSError as error:  # the name does not resolve any longer
            _LOG.info("%s: its rank %d: %s", generation.title, rank, error)
            return False
    return True


async def _have_joined(engine: SocketEngine, generation: Generation) -> bool:
    """Makes a first call on the data connections. Returns whether a message of every
    rank arrived."""
    # In the algorithm "direct" all send to all, so that every connection is used.
    call = _gathering(generation, _MET, b"\1", _BARRIER_TIMEOUT, "direct")
    # The engine blocks its thread, and the loop has to run the authenticators
    # meanwhile.
    barrier = asyncio.ensure_future(asyncio.to_thread(engine.run, call))
    try:
        await asyncio.shield(barrier)
    except (Overdue, ConnectionEnded):
        return False
    except asyncio.CancelledError:
        # Nothing else may use the connections until the thread has ended.
        engine.abort(ClosedError("the group was not formed"))
        with suppress(ClosedError):
            await barrier
        raise
    return True


def _shut(connections: DataConnections, generation: Generation) -> bool:
    try:
        connections.shut()
    except OSError as error:
        _LOG.info("%s uses links, not data connections: %s", generation.title, error)
        return False
    return True


def _gathering(
    generation: Generation,
    key: int,
    word: bytes,
    timeout: float,
    algorithm: str | None = None,
) -> CollectiveCall:
    source, words = np.frombuffer(word, np.uint8), "forming the group"
    return CollectiveCall(
        key,
        CallKind.ALL_GATHER,
        source,
        np.empty(generation.size * len(source), np.uint8),
        about(words),
        words,
        time.monotonic() + timeout - margin_of(timeout),
        timeout,
        sizes=(len(source),) * generation.size,
        algorithm=algorithm,
    )


def _settle(future: asyncio.Future[None], error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)

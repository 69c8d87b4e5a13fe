"""How a new generation agrees: what all ranks say, and whether they have connections of
their own for data.

Such connections are for groups whose ranks share no memory. Each rank binds a port for
them, beside that of its task, and draws a credential. The ranks tell each other both,
over links: who is not told cannot connect. They are used if a call by them ends well: a
firewall that lets only the port of the task through is found out here, and all goes by
the messages of links then.
"""

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
from zstrat.errors import ClosedError, PermissionDeniedError
from zstrat.transport import DataConnections, reached_as

from ._keys import FORMING, about
from ._socket_engine import SocketEngine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zstrat.collectives._engine import CollectiveEngine

    from ._generation import Generation
    from ._runtime import GroupRuntime

log = logging.getLogger("zstrat.collectives")

_PORTS, _ADMITTED, _MET = range(FORMING + 1, FORMING + 4)
"""Keys of calls, which no operation has."""

_PLACE: Final = struct.Struct("<H40s")
"""Port and credential; a port of 0: there are none."""

_MEETING: Final = 2.0
"""Seconds in which the first messages have to come. A firewall that drops them costs
so much, each time that a generation is formed."""


def shares_memory(generation: Generation) -> bool:
    """Whether any two ranks run on one host and offer memory; a rank by itself may as
    well use its own."""
    hosts = [each.host for each in generation.members if each.capacity]
    return len(set(hosts)) < len(hosts) or generation.size == 1


async def told(
    generation: Generation, key: int, word: bytes, patience: float
) -> Sequence[bytes]:
    """What every rank says in answer to the question ``key``, all in as many bytes, in
    the order of ranks.

    Raises:
        As the calls of a group.

    Cancellation: this rank has spoken.
    """
    loop = asyncio.get_running_loop()
    call = _gathering(generation, key, word, patience)
    over: asyncio.Future[None] = loop.create_future()
    generation.traffic.start(call, partial(_settle, over))
    await over
    return [bytes(each) for each in call.target.reshape(generation.size, -1)]


async def all_agree(
    generation: Generation, key: int, has: bool, patience: float
) -> bool:
    """Whether all ranks say yes. Raises, cancellation: as `told`."""
    return b"\0" not in await told(generation, key, bytes([has]), patience)


async def connect_data(
    runtime: GroupRuntime, generation: Generation, patience: float
) -> CollectiveEngine | None:
    """The engine of ranks with data connections, if all of them have one to each other.
    ``patience`` in seconds.

    Raises, cancellation: as `told`; no connection is left.
    """
    if not 1 < generation.size <= DataConnections.MOST:
        return None
    connections = await _bound(runtime, generation)
    try:
        place = _PLACE.pack(0, b"")
        if connections is not None:
            place = _PLACE.pack(connections.port, connections.credential)
        said = await told(generation, _PORTS, place, patience)
        places = [_PLACE.unpack(each) for each in said]
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
        # Whoever is not admitted yet is refused for good.
        await told(generation, _ADMITTED, b"\1", patience)
        ports = {rank: places[rank] for rank in others}
        is_ready = await _connected(connections, generation, ports)
        is_ready = is_ready and await _have_met(engine, generation)
        is_ready = is_ready and _shut(connections, generation)  # all are here
        # Others may have waited so long for a word that they will not get.
        if await all_agree(generation, _MET, is_ready, patience + _MEETING):
            connections = None  # the engine's
            return engine
        log.info("%s: its ranks cannot reach each other's data port", generation.title)
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
        log.info("%s goes by the messages of links: %s", generation.title, error)
        return None


async def _connected(
    connections: DataConnections,
    generation: Generation,
    ports: dict[int, tuple[int, bytes]],
) -> bool:
    """Whether a connection to each rank has begun; ``ports``: port and credential."""
    for rank, (port, credential) in ports.items():
        address = reached_as(f"*:{port}", generation.members[rank].address)
        try:
            await connections.connect(rank, address, credential)
        except OSError as error:  # a name that was known when its link was made
            log.info("%s: its rank %d: %s", generation.title, rank, error)
            return False
    return True


async def _have_met(engine: SocketEngine, generation: Generation) -> bool:
    """Whether something of every rank has come to this one."""
    # An algorithm by which all send to all, so that it takes every connection.
    call = _gathering(generation, _MET, b"\1", _MEETING, "direct")
    meeting = asyncio.ensure_future(asyncio.to_thread(engine.run, call))
    try:
        await asyncio.shield(meeting)
    except (Overdue, ConnectionEnded):
        return False
    except asyncio.CancelledError:
        # Until the thread is through, nobody else may touch the connections.
        engine.abort(ClosedError("the group was not formed"))
        with suppress(ClosedError):
            await meeting
        raise
    return True


def _shut(connections: DataConnections, generation: Generation) -> bool:
    try:
        connections.shut()
    except OSError as error:
        log.info("%s goes by the messages of links: %s", generation.title, error)
        return False
    return True


def _gathering(
    generation: Generation,
    key: int,
    word: bytes,
    patience: float,
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
        time.monotonic() + patience - margin_of(patience),
        patience,
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

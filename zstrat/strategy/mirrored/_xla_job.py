"""One job of XLA over the devices of several processes.

Rank 0 is the coordinator of `jax.distributed`: it listens on a free port of its address
in the cluster and announces the port to the group of processes. That port does not
authenticate anyone, so the address must not be reachable from the internet.

If the program has initialized jax.distributed itself, the processes find each other
through jax, and need no other cluster.

Law: jax.distributed is initialized once in a process, before its first use of any
device; the job cannot be formed again while the process lives.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from typing import TYPE_CHECKING, Any, Final

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from zstrat.cluster import Launch, free_ports, host_and_port, resolver_of
from zstrat.program.stages import PROCESS
from zstrat.strategy.replica._collective import AXIS

if TYPE_CHECKING:
    from zstrat.cluster import ClusterResolver
    from zstrat.program.stages import Collective


_MAX_ANNOUNCED_BYTES: Final = 1024
"""Maximum size in bytes of an announcement, which is an address or an error."""


_NOWHERE: Final = (
    (socket.AF_INET, "192.0.2.1"),
    (socket.AF_INET6, "2001:db8::1"),
)
"""Reserved addresses (RFC 5737, RFC 3849), to which nothing is sent: the route to them
tells from which own address packets to other hosts are sent."""


_REFUSAL: Final = "!"
"""The prefix of an announced error; no address begins with it."""


def is_in_job() -> bool:
    """Returns whether jax has connected this process with others."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def resolver_of_jax() -> ClusterResolver:
    """Returns the cluster of the processes that jax has connected: all are workers, in
    the order of jax. Each process takes a free port and announces it, so all processes
    must call this."""
    host = _own_address()
    (port,) = free_ports(1, "::" if ":" in host else "0.0.0.0")
    gathered = multihost_utils.process_allgather(
        _sent(f"{socket.gethostname()} {host} {port}")
    )
    announced = [_received(row).split() for row in np.asarray(gathered)]
    # All on one host: its loopback suffices, which is not reachable from outside.
    if len({(name, host) for name, host, _ in announced}) == 1:
        announced = [[name, "127.0.0.1", port] for name, _, port in announced]
    addresses = tuple(host_and_port(host, port) for _, host, port in announced)
    count, index = jax.process_count(), jax.process_index()
    return resolver_of(Launch("jax.process_count()", "", count, index, addresses))


def _own_address() -> str:
    """Returns the address from which this host sends, where other hosts can reach it.
    Sends nothing."""
    for family, nowhere in _NOWHERE:
        # No route by IPv4, or no IPv6 at all: try the other family, or use the
        # loopback.
        with (
            contextlib.suppress(OSError),
            socket.socket(family, socket.SOCK_DGRAM) as probe,
        ):
            # Connecting a socket of datagrams sends nothing: it only chooses the route.
            # Port 9 is that of `discard`.
            probe.connect((nowhere, 9))
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def _sent(text: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    sent = np.zeros(_MAX_ANNOUNCED_BYTES, np.uint8)
    raw = text.encode()[:_MAX_ANNOUNCED_BYTES]
    sent[: len(raw)] = np.frombuffer(raw, np.uint8)
    return sent


def _received(row: np.ndarray[Any, np.dtype[np.uint8]]) -> str:
    return row.tobytes().rstrip(b"\0").decode(errors="replace")


def join_job(collective: Collective, host: str, timeout: float) -> Mesh:
    """Starts the job of XLA, or uses the existing one. Returns the devices of all
    processes, one row for each rank.

    Args:
        host: The address on which rank 0 listens.
        timeout: Seconds to wait for the other processes.

    Raises:
        ValueError: The address is not a loopback or private one. All processes raise
            this.
        OSError: Rank 0 cannot listen on the address. Only rank 0 raises this.
        RuntimeError: jax was used before, or another job has been formed, or the
            processes have different numbers of devices.
    """
    # The program may have formed it, or a strategy before this one.
    if not jax.distributed.is_initialized():
        address = _broadcast_address(collective, host)
        jax.distributed.initialize(
            address,
            collective.size,
            collective.rank,
            # jax would listen on every interface, and it authenticates nobody.
            coordinator_bind_address=address if collective.rank == 0 else None,
            initialization_timeout=max(1, int(timeout)),
        )
    return _mesh(collective)


def require_private(host: str) -> None:
    """Refuses an address that is reachable from the public internet.

    Raises:
        ValueError: The address is public, or cannot be resolved.
    """
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError as error:
        raise ValueError(
            f"implementation=XLA: the address {host!r} of the first task cannot be "
            f"resolved here ({error}): give it as a number in the cluster"
        ) from error
    public = [x for x in found if not ipaddress.ip_address(x).is_private]
    if public:
        raise ValueError(
            f"implementation=XLA: the first task has the public address {public[0]}, "
            "and jax.distributed does not authenticate those who connect: give the "
            "address of a private network in the cluster, or use implementation=RING"
        )


def _broadcast_address(collective: Collective, host: str) -> str:
    """Sends the address of the coordinator from rank 0 to all processes, or the reason
    why there is none."""
    refused: Exception | None = None
    text = ""
    if collective.rank == 0:
        try:
            text = _address(host)
        # Sent, too: no process should wait for one that has given up.
        except (ValueError, OSError) as error:
            refused, text = error, f"{_REFUSAL}{error}"
    received = np.asarray(collective.broadcast([_sent(text)], 0)[0])
    if refused is not None:
        raise refused
    result = _received(received)
    if result.startswith(_REFUSAL):
        raise ValueError(f"rank 0 formed no job of XLA: {result[len(_REFUSAL) :]}")
    return result


def _address(host: str) -> str:
    require_private(host)
    (port,) = free_ports(1, host)
    return host_and_port(host, port)


def _mesh(collective: Collective) -> Mesh:
    if (jax.process_index(), jax.process_count()) != (collective.rank, collective.size):
        raise RuntimeError(
            f"this process is {jax.process_index()} of {jax.process_count()} of a job "
            f"of jax.distributed, and rank {collective.rank} of {collective.size} of "
            "the strategy: leave jax.distributed.initialize to the strategy"
        )
    rows: list[list[Any]] = [[] for _ in range(collective.size)]
    # By id, so that all processes make the same mesh.
    for device in sorted(jax.devices(), key=lambda device: device.id):
        rows[device.process_index].append(device)
    counts = [len(row) for row in rows]
    if len(set(counts)) > 1:
        raise RuntimeError(
            f"the processes have {counts} devices: implementation=XLA needs as many in "
            "each"
        )
    return Mesh(np.array(rows), (PROCESS, AXIS))

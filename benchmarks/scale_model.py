"""Where a cluster saturates, as formulae of what its parts cost. Measures nothing.

One *core* is a second of the processor per second. A program's loop, a parameter server
and a worker are one thread each where it counts, so each has one core. Of a cluster of
``workers`` and ``servers``, with ``rate`` steps per second in all, and ``nbytes`` of
variables that a step reads and pushes, evenly on all servers:

    program   rate step + (workers + servers) beat / T
    server    rate (exchange + byte nbytes / servers) + (workers + 1) beat / T
    worker    one step after the other: compute + own + servers call

A turn of the program's loop looks at each worker once, whatever has come since the last
one. So that costs no steps per second where the loop is busy, as more come in each
turn; it makes turns longer, and with them the time until a worker gets its next step:

    turn      scan workers / (1 - program's share)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

PERIOD: Final = 0.5
"""T, seconds between two beats of a connection (`zstrat.config.Timeouts.beat`)."""


@dataclass(frozen=True)
class Costs:
    """Seconds of one core, unless the name says bytes or a count."""

    step: float
    """Program's loop: to hand a step out, and to take its end, each in a message."""
    packed: float
    """The same where messages carry many steps, as of very short ones."""
    scan: float
    """Program's loop: what a turn costs for each worker that there is."""
    submit: float
    """The program's own thread: to schedule a step."""
    beat: float
    """A connection on one side, per beat: one is sent, one received."""
    exchange: float
    """A server: the requests of one step, without what their bytes cost."""
    byte: float
    """A server: each byte of a variable that a step reads and pushes."""
    own: float
    """A worker: a step, without servers."""
    call: float
    """A worker: what each server adds to a step."""
    connection_bytes: float
    """Memory of a connection on one side."""
    connection_files: float
    """Descriptors of one on the side that connects."""
    entry: float
    """A server: to look a push up in its ledger, and to note it there."""
    entry_bytes: float
    """Memory of a push in the ledger."""


def program_share(
    costs: Costs, rate: float, workers: float, servers: int, period: float = PERIOD
) -> float:
    """Of the core of the program's loop; 1: it is full."""
    return rate * costs.step + (workers + servers) * costs.beat / period


def program_rate(
    costs: Costs, workers: int, servers: int, period: float = PERIOD
) -> float:
    """Steps per second at which the program's loop is full; for `Costs.packed` put that
    in the place of ``step``."""
    left = 1.0 - (workers + servers) * costs.beat / period
    return max(0.0, left) / costs.step


def turn_seconds(
    costs: Costs, rate: float, workers: int, servers: int, period: float = PERIOD
) -> float:
    """A turn t of the program's loop: t = scan workers + share t. Infinite where it is
    full."""
    left = 1.0 - program_share(costs, rate, workers, servers, period)
    return costs.scan * workers / left if left > 0.0 else math.inf


def server_share(
    costs: Costs,
    rate: float,
    workers: int,
    servers: int,
    nbytes: float,
    period: float = PERIOD,
) -> float:
    """Of the core of one of the servers."""
    stepping = rate * (costs.exchange + costs.byte * nbytes / servers)
    return stepping + (workers + 1) * costs.beat / period


def server_rate(
    costs: Costs, workers: int, servers: int, nbytes: float, period: float = PERIOD
) -> float:
    """Steps per second at which all servers are full."""
    left = 1.0 - (workers + 1) * costs.beat / period
    return max(0.0, left) / (costs.exchange + costs.byte * nbytes / servers)


def step_seconds(costs: Costs, compute: float, servers: int) -> float:
    """From one step of a worker to its next, while nothing is full."""
    return compute + costs.own + servers * costs.call


def offered_rate(costs: Costs, compute: float, workers: int, servers: int) -> float:
    """Steps per second that all workers would make while nothing is full."""
    return workers / step_seconds(costs, compute, servers)


def rate_of(
    costs: Costs, compute: float, workers: int, servers: int, nbytes: float
) -> float:
    """Steps per second: the least of what workers, servers and the program can do."""
    return min(
        offered_rate(costs, compute, workers, servers),
        server_rate(costs, workers, servers, nbytes),
        program_rate(costs, workers, servers),
    )


def program_workers(
    costs: Costs, compute: float, servers: int, period: float = PERIOD
) -> float:
    """Workers from which on the program's loop is full, n in
    n step / t + (n + servers) beat / T = 1, with t of `step_seconds`."""
    t, beats = step_seconds(costs, compute, servers), costs.beat / period
    return max(0.0, 1.0 - servers * beats) / (costs.step / t + beats)


def server_workers(
    costs: Costs, compute: float, servers: int, nbytes: float, period: float = PERIOD
) -> float:
    """Workers from which on the servers are full."""
    t = step_seconds(costs, compute, servers)
    step = (costs.exchange + costs.byte * nbytes / servers) / t
    beats = costs.beat / period
    return max(0.0, 1.0 - beats) / (step + beats)


@dataclass(frozen=True)
class Link:
    """Between a worker and its servers."""

    bits: float
    """Per second, each way."""
    round_trip: float
    """Seconds."""


@dataclass(frozen=True)
class Exchange:
    """`zstrat.LocalOptimizer` with its ``every``, ``fragments`` and ``overlap``;
    ``every`` of 1: synchronous rounds."""

    every: int = 1
    fragments: int = 1
    overlap: int = 0


def exchange_seconds(costs: Costs, link: Link, nbytes: float, how: Exchange) -> float:
    """From the end of a window until the values are there that it leads to: difference
    and values on the link, a round trip for the push, and one for the order to close
    the round and the answer of the pull, which waits there."""
    part = nbytes / how.fragments
    return 2 * (8 * part / link.bits + link.round_trip) + (
        costs.exchange + costs.byte * part
    )


def utilization(
    costs: Costs, link: Link, compute: float, nbytes: float, how: Exchange
) -> float:
    """The share of its time that a worker computes steps of ``compute`` seconds, if all
    are equally fast and the link of a server is as wide as those of all workers."""
    window = compute * how.every / how.fragments
    waits = exchange_seconds(costs, link, nbytes, how) - compute * how.overlap
    return window / (window + max(0.0, waits) + costs.own + costs.call)


def connections(workers: int, servers: int) -> dict[str, int]:
    """Of one process of each kind, and in all."""
    return {
        "program": workers + servers,
        "server": workers + 1,
        "worker": servers + 1,
        "all": workers + servers + workers * servers,
    }

"""What a seed says: how a cluster is, what its program does, and what befalls it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final, NamedTuple

FAULTS_UNTIL: Final = 6.0
"""Seconds in which faults begin. All have healed, and every process lives again,
`LONGEST` seconds later."""
LONGEST: Final = 5.0


class Fault(NamedTuple):
    """``kind`` befalls ``target`` (and ``other``, of a path) at ``at``, for ``length``
    seconds."""

    at: float
    kind: str
    target: str
    other: str
    length: float


@dataclass(frozen=True)
class Scenario:
    """All that is drawn before a run; the rest is drawn while it runs."""

    seed: int
    workers: int
    servers: int
    steps: int
    pace: float
    """Seconds between two calls of the program, in the mean."""
    by_rows: bool
    reads_ahead: bool
    prefetch: int
    in_flight: int | None
    capacity: int
    """Messages that a connection holds."""
    threaded: bool
    """Servers compute every push on their thread."""
    delay: float
    """Seconds that a message takes at least."""
    work: float
    """Seconds of a short piece of work, in the mean."""
    chunk: int
    restores: bool
    fails: frozenset[int]
    faults: tuple[Fault, ...]

    @property
    def names(self) -> list[str]:
        """Of all processes."""
        return _names(self.workers, self.servers)


def _names(workers: int, servers: int) -> list[str]:
    daemons = [f"worker{i}" for i in range(workers)] + [
        f"ps{i}" for i in range(servers)
    ]
    return [*daemons, "chief0"]


def drawn(seed: int, *, workers: int = 3, servers: int = 3) -> Scenario:
    """The scenario of a seed."""
    chance = random.Random(f"scenario {seed}")
    steps = chance.randint(12, 40)
    fails = chance.sample(range(steps), chance.choice([0, 0, 0, 1, 2]))
    restores = chance.random() < 0.4
    return Scenario(
        seed,
        workers,
        servers,
        steps,
        pace=chance.choice([0.02, 0.1, 0.25]),
        by_rows=chance.random() < 0.3,
        reads_ahead=chance.random() < 0.5,
        prefetch=chance.choice([0, 1, 2]),
        in_flight=chance.choice([None, 1, 2, 8]),
        capacity=chance.choice([3, 30, 500]),
        threaded=chance.random() < 0.5,
        delay=chance.choice([5e-5, 5e-4, 5e-3]),
        work=chance.choice([1e-4, 2e-3, 2e-2]),
        chunk=chance.choice([100, 2**20]),
        restores=restores,
        fails=frozenset(fails),
        faults=_faults(chance, _names(workers, servers), restores),
    )


def _faults(
    chance: random.Random, names: list[str], restores: bool
) -> tuple[Fault, ...]:
    count = chance.choice([0, 1, 1, 2, 2, 3, 4, 6])
    found = [_fault(chance, names, restores) for _ in range(count)]
    return tuple(sorted(found))


def _fault(chance: random.Random, names: list[str], restores: bool) -> Fault:
    at = chance.uniform(0.0, FAULTS_UNTIL)
    length = chance.choice([0.01, 0.2, 1.0, 2.5, LONGEST]) * chance.uniform(0.5, 1.0)
    kind = chance.choice(["kill", "kill", "power", "freeze", "reset", "cut", "slow"])
    target, other = chance.sample(names, 2)
    if kind in ("kill", "power"):
        if target == "chief0" and chance.random() < 0.5:
            target = other
        if target.startswith("ps") and not restores and chance.random() < 0.6:
            kind = "freeze"
    if kind in ("reset", "cut", "slow") and target.startswith("worker"):
        other = chance.choice([n for n in names if not n.startswith("worker")])
    return Fault(at, kind, target, other, length)

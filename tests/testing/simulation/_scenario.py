"""What a seed says: how a cluster is, what its program does, and what befalls it."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, final

from zstrat.ps import CHANGES

from ._rounds_model import DrawnRounds, drawn_rounds

MAX_FAULT_SECONDS: Final = 4.0
"""Seconds that a fault lasts at most."""


_MOVING: Final = frozenset({6, 15, 23, 29, 31, 33, 35, 36})
"""Of each forty seeds those in which stores move."""


_STRUCK: Final = 15
"""Of each forty seeds that in which a server is killed behind each change of some
kinds."""
_LEASED: Final = frozenset({3, 13, 14, 34})
"""Of each forty seeds those with a leased dataset: with second copies, with programs
that go on, and with none of these."""
_HURRIED: Final = 32
"""Of each forty seeds that in which lines break while workers always have work."""
_WITH_TABLE: Final = frozenset({7, 18, 38, 39})
"""Of each forty seeds those with a table of any id: with second copies, and without."""
_ASKING: Final = 12
"""Of each forty seeds that in which programs change their coordinator."""
ONCE: Final = ("CreateOptimizer", "BindOptimizer", "CopyTree")
"""Messages about an optimizer that a program sends once, also to copies."""
RESUMED: Final = frozenset({"ChangeProgram", "CopyKept"})
"""Messages of a program that goes on with what another one has left."""
_OF_TABLES: Final = frozenset({"CreateTables", "StoreTable"})
"""Messages about tables of any id, which programs with strikes do not have."""


class Fault(NamedTuple):
    """``kind`` befalls ``target`` (and ``other``, of a path) at ``at``, for ``length``
    seconds.

    Kinds: "kill" (SIGKILL, started again at the end), "power" (the same, but nobody
    hangs up), "retire" (SIGTERM, to a server; the same), "astray" (the same, but it is
    there again a moment before the end, up to which it reaches workers alone, and these
    hear late of what the program says), "freeze" (SIGSTOP), "reset" (the connections of
    the two break), "snap" (the same, after a moment from which nothing has arrived),
    "cut" (nothing gets through, and no connection breaks; if it is long, in one
    direction alone), "slow", "isolate" (the target is cut off from everybody), "apart"
    (from everybody but workers), "sever" (from the other, and killed a moment later),
    "takeover" (the target, which is the program, is killed and started again at the
    end; and the other, a server, is killed when it goes on), "both" (the same, but the
    other is killed a moment after the target).
    """

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
    """Steps look rows up, and push rows, besides."""
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
    """Bytes above which a body travels in pieces."""
    restores: bool
    """``on_ps_loss="restore"``; else "raise"."""
    fails: frozenset[int]
    """Steps whose function raises."""
    faults: tuple[Fault, ...]
    replicas: int = 0
    """Second copies of each server."""
    is_guarded: bool = False
    """What befalls servers waits until each store has two copies that are well; so no
    error may reach the program."""
    reads_beside: bool = False
    """The program reads beside its steps, for which nobody waits; else between two of
    them, and it joins and saves, too."""
    only_steps: bool = False
    """The program does nothing else. What steps read is not looked at, only the end."""
    hands_over: bool = False
    """Servers that are told to stop leave what they hold to the next process. Nothing
    else takes it from them, so none may be said to be lost."""
    resumes: bool = False
    """A program that is started again goes on with what the one before has left."""
    saves: bool = False
    """The program saves and restores now and then, and each has to succeed."""
    moves: bool = False
    """The program drains servers, adds them again and rebalances, beside its steps."""
    stores_per_ps: int = 1
    tables: bool = False
    """The program changes a table of any id, beside its steps."""
    leases: bool = False
    """Each step reads a batch of a leased dataset, too."""
    late: bool = False
    """The program makes variables late, and changes them by all that there is; where
    nothing may be lost, the server that has made a change may be killed behind it."""
    optimizes: bool = False
    """An optimizer is among what it makes late."""
    draws: bool = False
    """Steps draw elements from an iterator of their worker."""
    strikes: tuple[str, ...] = ()
    """Kinds of messages to second copies. One after the other: whatever changes stores
    is done until the first of that kind has arrived, and its sender is killed."""
    cancels: bool = False
    """The program cancels what waits, now and then."""
    turns_over: bool = False
    """It lets workers go, and takes them in again."""
    only_moves: bool = False
    """Servers come and go again and again, so that faults come amid moves."""
    changes_coordinator: bool = False
    """The program makes another coordinator amid closures that have no effect."""
    rounds: tuple[DrawnRounds, ...] = ()
    """Optimizers with rounds, to which each step contributes."""

    @property
    def runs_once(self) -> bool:
        """Whether no step may run twice: nothing happens but that connections between
        workers and servers break, and come back."""
        return not (self.turns_over or self.replicas or self.moves) and all(
            fault.kind in ("reset", "snap")
            and fault.target.startswith("worker")
            and fault.other.startswith("ps")
            for fault in self.faults
        )


def scenario_of(seed: int, *, workers: int = 3, servers: int = 3) -> Scenario:
    """The scenario of a seed. It has a theme: faults of all kinds, workers that wake up
    when their steps are over, lost servers, or lines that break often. In each fourth
    seed there are second copies of the servers. In each tenth servers are told to stop
    and started again, and in each twentieth they are replaced and do not know. In each
    tenth programs are killed, and others go on with what they have left; in one of
    forty they begin a new session on servers with second copies. In eight of forty, of
    all these kinds, servers come and go, and in one of these again and again while
    servers with second copies are lost, or the program and one of these. In one of
    forty lines break while workers always have work, and in one programs change their
    coordinator. In three of ten, of all these kinds but those in which programs are
    killed, steps contribute to rounds. In each eightieth a server with a second copy
    comes back to workers first, or is lost while its second copy is away. In one of ten
    steps read a leased dataset, and in one of ten there is a table of any id."""
    drawn = _with_copies if seed % 4 == 3 else _without_copies
    scenario = drawn(seed, workers, servers)
    chance = random.Random(f"workers {seed}")
    scenario = replace(
        scenario,
        draws=chance.random() < 0.4,
        cancels=chance.random() < 0.3,
        turns_over=workers > 2 and chance.random() < 0.25,
    )
    if scenario.replicas or scenario.restores or scenario.hands_over:
        chance = random.Random(f"late {seed}")
        late, optimizes = chance.random() < 0.8, chance.random() < 0.5
        scenario = replace(scenario, late=late, optimizes=late and optimizes)
    if seed % 40 in _LEASED:
        return replace(scenario, leases=True)
    if seed % 40 == _STRUCK:
        return _with_strikes(scenario, seed // 40)
    scenario = _with_rounds(scenario)
    if seed % 40 in _WITH_TABLE:
        return replace(scenario, tables=True, by_rows=True)
    if seed % 40 == _ASKING:
        scenario = replace(scenario, work=1e-4, delay=5e-5, in_flight=8)
        return replace(scenario, changes_coordinator=True)
    if seed % 40 == _HURRIED:
        return _hurried(scenario)
    if seed % 40 not in _MOVING:
        return scenario
    chance = random.Random(f"moves {seed}")
    stores = chance.choice([1, 1, 2])
    scenario = replace(scenario, moves=True, stores_per_ps=stores)
    if seed % 40 != 23:
        return scenario
    steps = 60 if scenario.is_guarded else 20
    return replace(scenario, only_moves=True, servers=servers, steps=steps, pace=0.25)


def _with_rounds(scenario: Scenario) -> Scenario:
    """Nobody goes on with rounds of a program that is lost, nor reads ahead."""
    guarded = scenario.is_guarded
    rounds = drawn_rounds(scenario.seed, scenario.workers, is_guarded=guarded)
    if scenario.resumes or not rounds:
        return scenario
    return replace(scenario, rounds=rounds, reads_ahead=False, prefetch=0, chunk=2**20)


def _hurried(scenario: Scenario) -> Scenario:
    """Each step of a worker is pushed as the next one is pulled, and lines break."""
    chance = random.Random(f"hurried {scenario.seed}")
    fate = _Fate(chance, scenario.workers, scenario.servers, False, 1.0)
    return replace(
        scenario,
        steps=80,
        pace=1e-3,
        reads_ahead=False,
        prefetch=0,
        in_flight=8,
        delay=5e-3,
        restores=False,
        fails=frozenset(),
        faults=tuple(sorted(fate._snap() for _ in range(4))),
        only_steps=True,
        late=False,
    )


def _with_strikes(scenario: Scenario, number: int) -> Scenario:
    """With a third of the kinds of changes: three such scenarios have all."""
    names = {kind.__name__ for kind in CHANGES}
    others = sorted(names - RESUMED - _OF_TABLES - set(ONCE))
    third = number % 3
    return replace(
        scenario,
        workers=2,
        servers=3,
        steps=60,
        pace=0.2,
        delay=5e-4,
        work=2e-3,
        restores=False,
        faults=(),
        is_guarded=True,
        reads_beside=False,
        only_steps=True,
        turns_over=False,
        late=True,
        optimizes=True,
        strikes=(ONCE[third], *others[third::3]),
    )


def _without_copies(seed: int, workers: int, servers: int) -> Scenario:
    chance = random.Random(f"scenario {seed}")
    theme = chance.choice(["mixed", "zombies", "losses", "lines"])
    hands_over = seed % 20 == 9
    if hands_over:
        theme = "restarts"
    if resumes := seed % 20 == 13:
        theme = "programs"
        if hands_over := chance.random() < 0.3:
            theme = "programs and restarts"
    steps, pace = chance.randint(12, 40), chance.choice([0.005, 0.03, 0.1])
    if theme == "lines":
        pace = max(pace, 0.03)  # as lines break amid the work
    fails = chance.choice([1, 2, 3] if theme == "zombies" else [0, 0, 1, 2])
    restores = theme == "losses" or chance.random() < 0.25
    restores &= not resumes
    fate = _Fate(chance, workers, servers, restores, 0.4 + 1.1 * steps * pace)
    return Scenario(
        seed,
        workers,
        servers,
        steps,
        pace,
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
        fails=frozenset(chance.sample(range(steps), fails)),
        faults=fate.faults(theme),
        hands_over=hands_over,
        resumes=resumes,
    )


def _with_copies(seed: int, workers: int, servers: int) -> Scenario:
    chance = random.Random(f"copies {seed}")
    servers = chance.choice([2, servers, servers])
    steps, pace = chance.randint(12, 50), chance.choice([0.02, 0.05, 0.1, 0.2])
    themes = {7: "restarts of copies", 11: "successors", 19: "old primaries"}
    rare = {23: "losses amid moves", 27: "ends of copies", 3: "strangers"}
    rarest = {39: "copies astray", 63: "ends amid moves", 47: "a copy away"}
    theme = rarest.get(seed % 80) or rare.get(seed % 40) or themes.get(seed % 20, "")
    is_guarded = chance.random() < 0.7 or bool(theme)
    is_guarded &= theme not in _LOSING
    restores = not (is_guarded or theme) and chance.random() < 0.5
    fate = _Fate(chance, workers, servers, restores, steps * pace)
    if not (is_guarded or theme):
        theme = chance.choice(["mixed", "losses", "lines", "both copies"])
    return Scenario(
        seed,
        workers,
        servers,
        steps,
        pace,
        by_rows=chance.random() < 0.3,
        reads_ahead=chance.random() < 0.5,
        prefetch=chance.choice([0, 1, 2]),
        in_flight=chance.choice([None, 1, 2, 8]),
        capacity=chance.choice([30, 500]),
        threaded=chance.random() < 0.5,
        delay=5e-3
        if theme in ("old primaries", "copies astray")
        else chance.choice([5e-5, 5e-4, 5e-3]),
        work=chance.choice([1e-4, 2e-3, 2e-2]),
        chunk=chance.choice([100, 2**20, 2**20]),
        restores=restores,
        fails=frozenset(chance.sample(range(steps), chance.choice([0, 0, 1]))),
        faults=fate.faults(theme or "copies"),
        hands_over=theme in ("restarts of copies", "copies astray"),
        replicas=1,
        is_guarded=is_guarded,
        # A save is of one moment, so nothing else is done beside it.
        reads_beside=not restores
        and chance.random() < 0.5
        and theme != "ends of copies",
        resumes=theme in ("successors", "ends amid moves"),
        saves=theme == "ends of copies",
    )


_LOSING: Final = ("a copy away", "ends amid moves")
"""Themes of copies in which more may be lost than one server."""


@final
class _Fate:
    """Draws faults that begin before ``until``, in seconds."""

    def __init__(
        self,
        chance: random.Random,
        workers: int,
        servers: int,
        restores: bool,
        until: float,
    ) -> None:
        self._chance, self._restores, self._until = chance, restores, until
        self._workers = [f"worker{index}" for index in range(workers)]
        self._servers = [f"ps{index}" for index in range(servers)]

    def faults(self, theme: str) -> tuple[Fault, ...]:
        """The faults of a scenario with that theme."""
        count, draw = {
            "mixed": ([0, 1, 2, 3, 5], self._any),
            "zombies": ([2, 3, 4], self._absence),
            "losses": ([1, 2, 3], self._loss),
            "lines": ([3, 6, 10], self._break),
            "copies": ([1, 2, 3], self._trouble),
            "both copies": ([0, 0, 1], self._loss),
            "restarts": ([1, 2, 4], self._restart),
            "restarts of copies": ([1, 2], self._restart),
            "ends of copies": ([1, 2, 3], self._restart),
            "losses amid moves": ([4, 6, 8], self._trouble),
            "ends amid moves": ([2, 3], self._both_ends),
            "a copy away": ([0, 0, 1], self._loss),
            "copies astray": ([1, 2, 3], self._astray),
            "old primaries": ([0, 0, 1], self._trouble),
            "programs": ([1, 2, 3], self._killed),
            "programs and restarts": ([1, 2, 3], self._killed),
            "successors": ([1, 2], self._killed),
            "strangers": ([2, 3], self._killed_or_trouble),
        }[theme]
        found = [draw() for _ in range(self._chance.choice(count))]
        more = _MORE.get(theme, _Fate._any)
        found += [more(self) for _ in range(self._chance.choice([0, 0, 1]))]
        if theme == "zombies":
            found += self._late_push()
        if theme == "lines":
            found += [self._unreached(), *(self._snap() for _ in range(4))]
        if theme == "both copies":
            found += self._both()
        if theme == "a copy away":
            found += self._one_away()
        if theme == "old primaries":
            found += self._replaced()
        if theme in ("programs", "successors"):
            found.append(self._succeeded())
        if theme == "losses" and self._chance.random() < 0.5:
            found.append(self._absence())
        if theme == "losses":
            found.append(self._away_after(max(found)))
        return tuple(sorted(found))

    def _late_push(self) -> list[Fault]:
        """A worker that dies while what it has sent to a server is on its way, and is
        there for long."""
        at, worker = self._begin(), self._chance.choice(self._workers)
        away, death = self._chance.uniform(1.0, 1.7), self._chance.uniform(0.02, 0.3)
        return [
            *[Fault(at, "cut", worker, server, away) for server in self._servers],
            Fault(at + death, "kill", worker, "chief0", 2.0),
        ]

    def _unreached(self) -> Fault:
        """A worker does not reach a server for so long that its steps fail there, or
        just not as long."""
        worker = self._chance.choice(self._workers)
        server = self._chance.choice(self._servers)
        length = self._chance.uniform(1.9, MAX_FAULT_SECONDS)
        return Fault(self._begin(), "cut", worker, server, length)

    def _snap(self) -> Fault:
        """What a worker and a server have told each other is lost, amid their work."""
        worker, server = map(self._chance.choice, (self._workers, self._servers))
        length = self._chance.choice([0.02, 0.1, 0.3]) * self._chance.random()
        return Fault(0.3 + self._begin(), "snap", worker, server, length)

    def _away_after(self, fault: Fault) -> Fault:
        """When all is well again, a server is away, and loses nothing."""
        at = fault.at + fault.length + self._chance.uniform(1.0, 3.0)
        length = self._chance.uniform(2.3, MAX_FAULT_SECONDS)
        return Fault(at, "freeze", self._chance.choice(self._servers), "chief0", length)

    def _both(self) -> list[Fault]:
        """Both copies of a store are lost, one just after the other."""
        at = 0.3 + self._begin()
        lost = self._chance.sample(self._servers, 2)
        later = self._chance.choice([0.01, 0.1, 0.5]) * self._chance.random()
        return [
            Fault(at + i * later, "kill", server, "chief0", self._length())
            for i, server in enumerate(lost)
        ]

    def _one_away(self) -> list[Fault]:
        """Of the copies of a store one is lost and the other one, which has all, is
        away for long; who has lost the first one is there again before it."""
        at, index = 0.8 + self._begin(), self._chance.randrange(len(self._servers))
        away = (self._servers * 2)[index + 1]  # which is asked first to have the second
        kind = self._chance.choice(["freeze", "isolate"])
        lost_at = at + self._chance.uniform(-0.3, 0.6)
        lost = self._servers[index]
        return [
            Fault(at, kind, away, "chief0", self._chance.uniform(2.3, 3.5)),
            Fault(lost_at, "kill", lost, "chief0", self._chance.uniform(0.1, 0.7)),
        ]

    def _both_ends(self) -> Fault:
        """The program and a server are lost, one just after the other."""
        server, length = self._chance.choice(self._servers), self._length()
        return Fault(0.8 + self._begin(), "both", "chief0", server, length)

    def _astray(self) -> Fault:
        """A server that is told to stop, and comes back to workers first."""
        server, at = self._chance.choice(self._servers), 0.8 + self._begin()
        length = self._chance.uniform(1.1, 2.5)
        return Fault(at, "astray", server, "chief0", length)

    def _replaced(self) -> list[Fault]:
        """A server whose second copy takes its place meanwhile, and which the others
        reach again before workers have heard where to go."""
        server, at = self._chance.choice(self._servers), 0.8 + self._begin()
        away = self._chance.uniform(1.9, 2.9)
        return [
            Fault(at, "apart", server, "chief0", away),
            *[
                Fault(at + 0.5, "slow", worker, "chief0", away + 2.5)
                for worker in self._workers
            ],
        ]

    def _any(self) -> Fault:
        draw = self._chance.choice([self._death, self._freeze, self._break])
        return draw()

    def _absence(self) -> Fault:
        """A worker that the program gives up, and that does not know."""
        length = self._chance.uniform(2.0, MAX_FAULT_SECONDS)
        worker = self._chance.choice(self._workers)
        kind = self._chance.choice(["freeze", "freeze", "cut"])
        return Fault(self._begin(), kind, worker, "chief0", length)

    def _loss(self) -> Fault:
        """A server that comes back empty."""
        kind = self._chance.choice(["kill", "power"])
        server, at = self._chance.choice(self._servers), 0.15 + self._begin()
        return Fault(at, kind, server, "chief0", self._length())

    def _killed(self) -> Fault:
        """The program, which is started again."""
        kind = self._chance.choice(["kill", "kill", "power"])
        at = self._chance.choice([0.0, 0.3]) + self._begin()
        return Fault(at, kind, "chief0", self._servers[0], self._length())

    def _succeeded(self) -> Fault:
        """A server is lost while the next program takes over, when it is sure that the
        one before cannot have acted unheard."""
        server = self._chance.choice(self._servers)
        # Patience and reconnect behind the moment in which servers notice its end: when
        # its connections have not come back for so long, at the next look.
        length = self._chance.uniform(3.4, MAX_FAULT_SECONDS)
        return Fault(0.3 + self._begin(), "takeover", "chief0", server, length)

    def _restart(self) -> Fault:
        """A server is restarted on purpose."""
        server, at = self._chance.choice(self._servers), 0.15 + self._begin()
        return Fault(at, "retire", server, "chief0", self._length())

    def _killed_or_trouble(self) -> Fault:
        return self._chance.choice([self._killed, self._trouble])()

    def _absence_or_break(self) -> Fault:
        return self._chance.choice([self._absence, self._break])()

    def _trouble(self) -> Fault:
        """A server that has a second copy is in trouble, whoever notices."""
        server = self._chance.choice(self._servers)
        at = self._chance.choice([0.3, 1.2, 1.2]) + self._begin()  # opening, or later
        others = [name for name in self._servers if name != server]
        if self._chance.random() < 0.3:
            length = self._chance.choice([0.3, 1.0, 2.0])
            return Fault(at, "sever", server, self._chance.choice(others), length)
        kinds = ["kill", "power", "freeze", "isolate", "apart", "apart", "cut", "reset"]
        others += [*self._workers, *["chief0"] * len(self._workers)]
        kind, other = self._chance.choice(kinds), self._chance.choice(others)
        if (
            kind in ("freeze", "isolate", "apart", "cut")
            and self._chance.random() < 0.5
        ):
            # It is replaced meanwhile.
            length = self._chance.uniform(2.0, MAX_FAULT_SECONDS)
            return Fault(at, kind, server, other, length)
        return Fault(at, kind, server, other, self._length())

    def _death(self) -> Fault:
        """A worker dies, mostly."""
        kind = self._chance.choice(["kill", "power"])
        who = self._chance.random()
        target = self._chance.choice(self._workers)
        if who < 0.2:
            target = "chief0"
        elif who < (0.6 if self._restores else 0.3):
            target = self._chance.choice(self._servers)
        return Fault(self._begin(), kind, target, "chief0", self._length())

    def _freeze(self) -> Fault:
        all_names = [*self._workers, *self._servers, "chief0"]
        target = self._chance.choice(all_names)
        return Fault(self._begin(), "freeze", target, "chief0", self._length())

    def _break(self) -> Fault:
        """The lines between two tasks break that talk to each other."""
        kind = self._chance.choice(["reset", "snap", "cut", "slow"])
        target, other = self._chance.choice(self._workers), "chief0"
        if self._chance.random() < 0.6:
            other = self._chance.choice(self._servers)
            if self._chance.random() < 0.5:
                target = "chief0"
        return Fault(self._begin(), kind, target, other, self._length())

    def _begin(self) -> float:
        return self._chance.uniform(0.0, self._until)

    def _length(self) -> float:
        longest = self._chance.choice([0.01, 0.1, 0.7, 2.0, MAX_FAULT_SECONDS])
        return longest * self._chance.uniform(0.5, 1.0)


_MORE: Final = {
    "copies": _Fate._absence,
    "restarts": _Fate._absence_or_break,
    "restarts of copies": _Fate._trouble,
    "losses amid moves": _Fate._absence,
    "ends amid moves": _Fate._absence,
    "a copy away": _Fate._absence,
    "copies astray": _Fate._absence,
    "old primaries": _Fate._absence,
    "programs and restarts": _Fate._restart,
    "successors": _Fate._trouble,
}
"""What may come besides; of themes that are not here, anything."""

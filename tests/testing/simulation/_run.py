"""One seed: a cluster is made, faults befall it, and the contract is checked."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import importlib
import itertools
import logging
import random
import secrets
import sys
import tempfile
import traceback
import warnings
import zlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, cast
from unittest import mock

from zstrat import wire
from zstrat.optimizers import Binding

from ._cluster_changes import SessionContext
from ._contract import BrokenPromiseError, GivenOut, Readers
from ._faults import Faults
from ._paths import Weather
from ._process import (
    TIMES,
    Process,
    ProgramProcess,
    ServerProcess,
    Surroundings,
    WorkerProcess,
    settings_with,
)
from ._program import TrainingProgram
from ._rounds_log import RoundsLog
from ._scenario import Fault, Scenario, scenario_of
from ._script import Scripts
from ._sockets import Network, digest_of
from ._world import START, SpinningError, StuckError, VirtualLoop, World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ._contract import Training
    from ._paths import Way
    from ._world import Meter

LIMIT: Final = 240.0
"""Seconds in which every program has come to its end."""

KINDS: Final = {kind.__name__: kind.kind for kind in wire.MESSAGES.values()}
"""Of messages, by name."""

_programs_of: Final = functools.cache(
    importlib.import_module("zstrat.ps.engine._xla").UpdatePrograms
)
"""By number and name of an optimizer. It is traced and compiled once for all simulated
servers: that takes longer than all else of a seed, and no message depends on it."""
_decode: Final = Binding.decoded
_decoded: Final[dict[tuple[str, bytes], Binding]] = {}

_FIRST_PORT: Final = 7000
"""That of the first server or worker; the others have the ones behind it."""


@dataclass(frozen=True)
class SeedVerdict:
    """What came of a seed. ``failure``: why the contract was not kept, or None.

    ``trace`` is a digest of all messages and when they arrived: two runs of a seed have
    the same one.
    """

    seed: int
    failure: str | None
    trace: int
    events: int
    messages: int
    steps: int
    seconds: float
    """Of virtual time."""


class Run:
    """All that one seed makes.

    Args:
        state: An empty folder, for what servers leave that are told to stop.
    """

    def __init__(
        self,
        scenario: Scenario,
        told: Callable[[str], None] | None = None,
        meter: Meter | None = None,
        state: Path | None = None,
    ) -> None:
        self._scenario, self._told = scenario, told
        self._world = world = World(scenario.seed)
        world.meter = meter
        self._trace = self._messages = 0
        self._is_over = False
        self._strikes_at = ""
        """A kind of message whose sender is killed next."""
        self._struck: set[str] = set()
        """Those of which it was."""
        weather = Weather(world, scenario.delay)
        self._network = Network(world, weather, scenario.capacity, self._note)
        settings = settings_with(scenario.chunk, state)
        self._around = Surroundings(world, self._network, settings, self._quick)
        self._readers = Readers()
        self._program: TrainingProgram
        self._given_out = GivenOut(self._broken, in_pieces=scenario.chunk < 2**20)
        stores = scenario.servers * scenario.stores_per_ps
        self._rounds = RoundsLog(scenario.rounds, stores, self._broken)
        self._processes = {each.name: each for each in self._made()}
        self._faults = Faults(
            world,
            self._network,
            self._processes,
            self._program,
            told,
            amid_moves=scenario.only_moves,
        )

    def verdict(self) -> SeedVerdict:
        """Lets it happen."""
        failure = None
        try:
            for process in self._processes.values():
                process.start()
            for fault in self._scenario.faults:
                self._faults.plan(fault, is_guarded=self._scenario.is_guarded)
            self._world.run(START + LIMIT, self._ended)
            if not self._is_over and not self._around.defects:
                failure = f"the program has not ended: {self._waits()}"
        except (BrokenPromiseError, SpinningError, StuckError) as error:
            failure = f"{type(error).__name__}: {error}"
        if self._around.defects:
            failure = "; ".join(self._around.defects[:3])
        for process in self._processes.values():
            process.kill(silently=True)
        return SeedVerdict(
            self._scenario.seed,
            failure,
            self._trace,
            self._world.events,
            self._messages,
            self._readers.runs,
            self._world.now - START,
        )

    def _made(self) -> Iterator[Process]:
        scenario, around = self._scenario, self._around
        scripts = Scripts(self._readers.ran, self._broken)
        ports = itertools.count(_FIRST_PORT)
        ps = [f"127.0.0.1:{next(ports)}" for _ in range(scenario.servers)]
        workers = [f"127.0.0.1:{next(ports)}" for _ in range(scenario.workers)]
        for index, address in enumerate(ps):
            yield ServerProcess(around, "ps", index, address)
        for index, address in enumerate(workers):
            yield WorkerProcess(around, index, address, scripts)
        context = partial(self._context, scripts, ps)
        self._program = TrainingProgram(
            around, scenario, self._readers, (ps, workers), context=context,
            over=self._end,
        )  # fmt: skip
        yield ProgramProcess(around, self._program.main)

    def _context(
        self,
        scripts: Scripts,
        ps: Sequence[str],
        go_on: Callable[[Training, bool], int],
    ) -> SessionContext:
        return SessionContext(
            self._scenario,
            scripts,
            ps,
            draw=self._world.random.random,
            new_number=self._around.draw,
            kill=self._kill,
            strike=self._strike,
            strike_at=self._strike_at,
            has_struck=self._struck.__contains__,
            is_calm=lambda: self._faults.is_calm,
            healed_at=lambda: self._faults.healed_at,
            rounds=self._rounds,
            go_on=go_on,
        )

    def _quick(self) -> float:
        random = self._world.random
        rare = 50.0 if random.random() < 0.01 else 1.0
        seconds = rare * random.expovariate(1.0 / self._scenario.work)
        # A server that is told to stop leaves what it holds if what it has begun ends
        # within that time: a job that takes longer is no break of the promise.
        return min(seconds, TIMES.drain / 2)

    def _kill(self, address: str, seconds: float) -> None:
        process = self._processes[self._network.hosts[f"tcp://{address}"]]
        process.kill()
        self._world.at(self._world.now + seconds, process.start_again)

    def _strike(self, address: str) -> None:
        name, now = self._network.hosts[f"tcp://{address}"], self._world.now - START
        length = self._world.random.choice((0.1, 1.0, 3.0))
        self._faults.strike(Fault(now, "kill", name, "chief0", length))

    def _strike_at(self, name: str) -> None:
        if name not in self._struck:
            self._strikes_at = name

    def _look_at_change(self, way: Way, frames: Sequence[bytes]) -> None:
        """Kills who has sent a change to a second copy, if it is of that kind, as soon
        as nothing is lost by that."""
        if not (way.source.startswith("ps") and way.target.startswith("ps")):
            return
        header = frames[0]
        if len(header) < 2 or header[1] != KINDS.get(self._strikes_at):
            return
        self._struck.add(self._strikes_at)
        self._strikes_at = ""
        now = self._world.now - START
        fault = Fault(now, "kill", way.source, "chief0", 0.5)
        self._faults.plan(fault, is_guarded=True)

    def _end(self) -> None:
        self._is_over = True

    def _ended(self) -> bool:
        return self._is_over or bool(self._around.defects)

    def _waits(self) -> str:
        """Where the program waits."""
        lines = []
        for loop in self._world.loops:
            if loop.name == "chief0" and not loop.is_closed():
                lines += loop.waits()
        return " | ".join(lines)

    def _note(self, way: Way, frames: tuple[bytes, ...]) -> None:
        if not frames:
            return
        self._messages += 1
        words = f"{self._world.now:.9f} {way.source} {way.target} {digest_of(frames)}"
        self._trace = zlib.crc32(words.encode(), self._trace)
        if self._told is not None:
            now = self._world.now - START
            self._told(f"{now:10.6f} {way.source} -> {way.target} {frames}")
        self._given_out.note(way, frames)
        self._rounds.note(way, frames)
        if self._strikes_at:
            self._look_at_change(way, frames)

    def _broken(self, words: str) -> None:
        at = self._world.now - START
        self._around.defects.append(f"{at:.6f} {words}")


def run_seed(seed: int, told: Callable[[str], None] | None = None) -> SeedVerdict:
    """Runs the scenario of a seed.

    Args:
        told: Told of each fault and each message, as it happens.
    """
    return run_scenario(scenario_of(seed), told)


def run_scenario(
    scenario: Scenario,
    told: Callable[[str], None] | None = None,
    meter: Meter | None = None,
) -> SeedVerdict:
    """Runs a scenario that may have been made by hand.

    Args:
        meter: Measures what each process computes.
    """
    with _alone(scenario), _buried(), _state_folder(scenario) as state:
        try:
            return Run(scenario, told, meter, state).verdict()
        except Exception:  # to whoever reads the verdict: it is a defect, with its seed
            words = traceback.format_exc()
            return SeedVerdict(scenario.seed, words, 0, 0, 0, 0, 0.0)


def _decoded_once(name: str, transformation: Any, data: bytes) -> Binding:
    found = _decoded.get((name, data))
    if found is None:
        found = _decoded[name, data] = _decode(name, transformation, data)
    return found


@contextlib.contextmanager
def _state_folder(scenario: Scenario) -> Iterator[Path | None]:
    if not scenario.hands_over:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@contextlib.contextmanager
def _buried() -> Iterator[None]:
    """Coroutines of processes that were killed end when they are collected: here, where
    whatever they do at their end is heard by nobody."""
    gc.freeze()  # so that only what the run has made is looked at
    hook = sys.unraisablehook
    try:
        yield
    finally:
        grave = VirtualLoop(World(0), "grave", lambda context: None)
        grave.end()
        sys.unraisablehook = lambda unraisable: None
        asyncio._set_running_loop(cast("asyncio.AbstractEventLoop", grave))
        try:
            with warnings.catch_warnings():
                # A process was killed before they had begun; one that a process has
                # forgotten to await was told of while it lived.
                warnings.filterwarnings("ignore", ".* was never awaited")
                gc.collect()
        finally:
            asyncio._set_running_loop(None)
            sys.unraisablehook = hook
            gc.unfreeze()


_randbits: Final = secrets.randbits


def _drawn(chance: random.Random, bits: int) -> int:
    """The number of a snapshot, which is sent, is that of the seed; others are drawn
    once in a process."""
    return chance.getrandbits(bits) if bits == 62 else _randbits(bits)


@contextlib.contextmanager
def _alone(scenario: Scenario) -> Iterator[None]:
    """What is of the whole process begins again for a run: numbers that are counted on
    or drawn, the time of day in errors, the collector of memory, and the limit from
    which on a server computes on its thread. Nothing is logged."""
    log = logging.getLogger("zstrat")
    level, was_collecting = log.level, gc.isenabled()
    log.setLevel(logging.CRITICAL + 1)
    gc.disable()
    clock = SimpleNamespace(gmtime=lambda since: since, strftime=lambda *_: "then")
    patches: list[Any] = [
        mock.patch("zstrat.wire._session.time", clock),
        mock.patch("secrets.randbits", partial(_drawn, random.Random(scenario.seed))),
        mock.patch("zstrat.transport._link._NUMBERS", itertools.count(1)),
        mock.patch(
            "zstrat.coordinator._calls.PickledArguments._numbers", itertools.count(1)
        ),
        mock.patch("zstrat.coordinator._resources._numbers", itertools.count(1)),
        mock.patch("zstrat.optimizers.Binding.decoded", _decoded_once),
        mock.patch("zstrat.ps.engine._xla.UpdatePrograms", _programs_of),
        # Else it would depend on the runs before.
        mock.patch(
            "zstrat.ps.store._plans.PushPlan.is_compiled", not scenario.threaded
        ),
        mock.patch("zstrat.ps._requests.INLINE", 0 if scenario.threaded else 4 * 2**20),
    ]
    try:
        with contextlib.ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            yield
    finally:
        log.setLevel(level)
        if was_collecting:
            gc.enable()

"""Carries out what befalls a cluster, each fault at its time.

With second copies any one server may be lost at any moment. So where the contract is
held against that, what befalls a server waits until each store has two copies that are
well: in processes that have had no trouble for a while, and which the program knows.
A program that goes on with what a killed one has left is held against the same, if a
server is lost no sooner after that one than `Timeouts.liveness` and ``reconnect``.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, final

from ._process import TIMES
from ._world import START

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ._process import Process
    from ._program import TrainingProgram
    from ._scenario import Fault
    from ._sockets import Network
    from ._world import World

WELL: Final = 3.0
"""Seconds after its trouble in which everybody knows what has become of a process: more
than their patience, and what it takes to connect anew."""

_LOOK: Final = 0.02
"""Seconds between two looks of a fault that waits for its servers to be well."""
_LOOK_AT_MOVES: Final = 0.005
"""The same, where it waits for a store to move, too."""
_MOVE: Final = 0.1
"""Seconds that a move takes, about."""
_MOMENT: Final = 0.3
"""Seconds of which what is sent is lost when a connection snaps, at most."""
_BROKEN: Final = 0.1
"""Seconds after which both ends know of that, or will before anything arrives."""
_ASTRAY: Final = 1.0
"""Seconds in which a server that was started again reaches workers alone."""
_LATEST: Final = 15.0
"""Seconds that a fault waits; then it does not happen."""


@final
class Faults:
    """What befalls the cluster of one run.

    Args:
        program: Knows which processes have copies of stores, if each store has two.
        told: Told of each fault as it happens.
        amid_moves: What befalls servers waits until a store moves.
    """

    def __init__(
        self,
        world: World,
        network: Network,
        processes: Mapping[str, Process],
        program: TrainingProgram,
        told: Callable[[str], None] | None,
        *,
        amid_moves: bool,
    ) -> None:
        self._amid_moves, self._were_whole = amid_moves, False
        self._world, self._network, self._processes = world, network, processes
        self._program, self._told = program, told
        self._ill_until: dict[str, float] = {}
        """When the trouble of a server is over, or was."""
        self.healed_at = START
        """When no fault will be left, as far as is known now."""
        self.happened = 0

    def plan(self, fault: Fault, *, is_guarded: bool) -> None:
        """Has it happen; ``is_guarded``: not to a server that is the only one to have
        something, nor to any between two moves where it is to come amid one."""
        at = START + fault.at
        self.healed_at = max(self.healed_at, at + fault.length)
        concerns_copies = self._servers_of(fault) or self._is_of_program(fault)
        if (is_guarded or self._amid_moves) and concerns_copies:
            self._world.at(at, partial(self._wait, fault, at + _LATEST))
        else:
            self._world.at(at, partial(self._happen, fault))

    def strike(self, fault: Fault) -> None:
        """Has it happen now, unless it befalls the only one to have something."""
        self._wait(fault, self._world.now)

    def _servers_of(self, fault: Fault) -> list[str]:
        """Whom it concerns of the servers, all of which are then said to be ill."""
        ends = (fault.target, fault.other)
        servers = [name for name in ends if name.startswith("ps")]
        if fault.kind in _KILLING and not fault.target.startswith("ps"):
            return []
        return servers[:1] if fault.kind in _OF_ONE else servers

    def _is_of_program(self, fault: Fault) -> bool:
        return fault.kind in _KILLING and fault.target == "chief0"

    def _wait(self, fault: Fault, latest: float) -> None:
        now, copies = self._world.now, self._program.copies()
        servers = self._servers_of(fault)
        concerned = [*(copies or ()), "chief0"]
        if self._is_of_program(fault) and not self._processes["chief0"].is_alive:
            copies = None  # it cannot be lost once more
        elif fault.kind in ("kill", "power") and not servers:
            concerned.pop()  # however often
        is_of_program = self._is_of_program(fault) and fault.kind != "takeover"
        if is_of_program and self._program.is_changing:
            copies = []
            concerned = [name for name in self._ill_until if name != "chief0"]
        elif self._program.is_changing and fault.kind == "takeover":
            copies = None  # the next program may find no copy that is known to have all
        is_due, look = True, _LOOK
        if self._amid_moves:
            copies, look = self._copies_amid_moves(copies), _LOOK_AT_MOVES
            is_due, concerned = self._program.is_moving, list(self._processes)
        if copies is not None and is_due and all(map(self._is_well, concerned)):
            # At any moment of a move, which may be over before it is seen again.
            later = _MOVE * self._world.random.random() if self._amid_moves else 0.0
            both = (fault.target, fault.other) if fault.kind == "both" else ()
            for name in both or servers:
                self._ill_until[name] = now + later + fault.length
            self.healed_at = max(self.healed_at, now + later + fault.length)
            if later:
                self._world.at(now + later, partial(self._happen, fault))
            else:
                self._happen(fault)
        elif now < latest:
            self.healed_at = max(self.healed_at, now + look + fault.length)
            self._world.at(now + look, partial(self._wait, fault, latest))

    @property
    def is_calm(self) -> bool:
        """Whether no server has trouble that others may not know of."""
        servers = [name for name in self._ill_until if name.startswith("ps")]
        return all(self._is_well(name) for name in servers)

    def _copies_amid_moves(self, copies: list[str] | None) -> list[str] | None:
        """All servers, if each store has had two copies since the last trouble: moving
        one is no reason to have fewer, whatever the program believes of it."""
        is_calm = all(map(self._is_well, self._processes))
        self._were_whole = is_calm and (self._were_whole or copies is not None)
        return list(self._processes) if self._were_whole else None

    def _is_well(self, name: str) -> bool:
        until = self._ill_until.get(name)
        return until is None or until + WELL < self._world.now

    def _happen(self, fault: Fault) -> None:
        world, process = self._world, self._processes[fault.target]
        self.happened += 1
        if self._told is not None:
            self._told(f"{world.now - START:10.6f} {fault}")
        end = world.now + fault.length
        self.healed_at = max(self.healed_at, end)
        match fault.kind:
            case "kill" | "power":
                self._kill(fault.target, end, silently=fault.kind == "power")
            case "takeover":
                self._kill(fault.target, end)
                at = end + world.random.choice((0.02, 0.1, 0.5)) * world.random.random()
                self._ill_until[fault.other] = at + 1.0
                self.healed_at = max(self.healed_at, at + 1.0)
                world.at(at, partial(self._kill, fault.other, at + 1.0))
            case "both":
                self._kill(fault.target, end)
                draw = world.random
                at = world.now + draw.choice((0.02, 4.0)) * draw.random()
                end = self._ill_until[fault.other] = max(at, end)
                self.healed_at = max(self.healed_at, end)
                world.at(at, partial(self._kill, fault.other, end))
            case "retire":
                process.retire(end)
            case "astray":
                began = end - _ASTRAY
                process.retire(began)
                self._among_workers(fault, end)
                world.at(began - 1e-6, partial(self._from_all, fault, self._block))
                world.at(end, partial(self._from_all, fault, self._free))
            case "freeze":
                process.freeze()
                world.at(end, process.thaw)
            case "reset":
                self._reset(fault)
            case "snap":
                self._between(fault, self._network.weather.block)
                at = world.now + min(fault.length, _MOMENT)
                world.at(at, partial(self._reset, fault))
                at += _BROKEN
                world.at(at, partial(self._between, fault, self._free))
            case "cut":
                self._between(fault, self._network.weather.block)
                world.at(end, partial(self._between, fault, self._free))
            case "slow":
                self._between(fault, partial(self._slow, 100.0))
                world.at(end, partial(self._between, fault, partial(self._slow, 1.0)))
            case "isolate" | "apart":
                self._from_all(fault, self._network.weather.block)
                world.at(end, partial(self._from_all, fault, self._free))
            case "sever":
                self._between(fault, self._network.weather.block)
                world.at(end - 1e-6, partial(self._between, fault, self._free))
                at = world.now + 0.3 * fault.length
                world.at(at, partial(self._kill, fault.target, end))
            case _:
                raise AssertionError(fault.kind)

    def _kill(self, name: str, until: float, *, silently: bool = False) -> None:
        process = self._processes[name]
        if name == "chief0" and process.is_alive:
            self._program.died()
            noticed = self._world.now + (TIMES.liveness if silently else 0.0)
            self._ill_until[name] = max(self._ill_until.get(name, 0.0), noticed)
        elif name.startswith("ps"):
            self._program.hurt(name)
        process.kill(silently=silently)
        self._world.at(until, process.start_again)

    def _reset(self, fault: Fault) -> None:
        for line in self._network.lines_of(fault.target, fault.other):
            line.reset()

    def _between(self, fault: Fault, work: Callable[[str, str], Any]) -> None:
        work(fault.target, fault.other)
        if fault.kind != "cut" or fault.length < 1.0:  # else half open
            work(fault.other, fault.target)

    def _from_all(self, fault: Fault, work: Callable[[str, str], Any]) -> None:
        target = fault.target
        for name in self._processes:
            spared = fault.kind in _NEAR_WORKERS and name.startswith("worker")
            if name != target and not spared:
                work(target, name)
                work(name, target)

    def _among_workers(self, fault: Fault, until: float) -> None:
        """What the program says comes late to workers."""
        for name in self._processes:
            if name.startswith("worker"):
                self._slow(100.0, "chief0", name)
                self._world.at(until, partial(self._slow, 1.0, "chief0", name))

    def _block(self, source: str, target: str) -> None:
        self._network.weather.block(source, target)

    def _free(self, source: str, target: str) -> None:
        self._network.weather.free(source, target)

    def _slow(self, factor: float, source: str, target: str) -> None:
        self._network.weather.slow(source, target, factor)


_KILLING: Final = ("kill", "power", "takeover", "both")
_NEAR_WORKERS: Final = ("apart", "astray")
_OF_ONE: Final = ("sever", "isolate", *_NEAR_WORKERS)
"""Kinds of which the ``other`` has no trouble of its own when they are over."""

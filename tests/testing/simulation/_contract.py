"""What every run has to keep, whatever happens: the promises of the documentation.

A `Training` is what one program did in one session, as the program knows it: which
steps it scheduled, how they ended, what it read. `Training.check` compares that with
what is on the servers in the end. The law of the file: nothing here asks the system
what is right.

Each step leaves a one at its own place on each server, so what has happened can be
counted:

- a step that was acknowledged is on every server exactly once;
- one that failed, or was cancelled before it began, is on none, then and later;
- any other step is on each server at most once;
- what was acknowledged before a read began is in it, and reads never go back;
- a checkpoint holds a step on all servers or on none;
- servers are filled from the last checkpoint, and if there is one, that succeeds;
- a step reads what those had done that ran on its worker before;
- no step runs twice because a connection to a server broke, and came back;
- who goes on with what a lost program has left finds that so, and it does not change.

What servers give out is looked at as one who watches the network sees it (`GivenOut`).
A reader that has a version of a variable is told "not modified" for as long as the
server has the same number. So two things have to be so, whichever copy of a server
answers: a number names one content of a variable in a session, for ever; and what is
asked later on one connection is not older, whichever answer leaves first. And a reader
has only what it was given in that session.
"""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

import numpy as np

from zstrat.config import Limits
from zstrat.errors import CancelledError, ProtocolError
from zstrat.wire import (
    Exchange,
    Exchanged,
    Pull,
    Pulled,
    PulledRound,
    PullRound,
    PullRows,
    decode,
)

from ._late_model import LateModel
from ._script import FailedStepError
from ._world import START

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zstrat.coordinator import AsyncRemoteValue, SessionCut
    from zstrat.coordinator.recovery import Recovery
    from zstrat.wire import Message

    from ._late_model import World as LateWorld
    from ._paths import Way
    from ._rounds_log import RoundsAt
    from ._script import ScriptedFunction
    from ._world import World


class BrokenPromiseError(AssertionError):
    """A run did not keep the contract; says at what time, and how."""


@dataclass(slots=True)
class Scheduled:
    """A step, as the program knows it. ``number`` is that of the session."""

    place: int
    number: int
    value: AsyncRemoteValue
    known: frozenset[int]
    """Places that were acknowledged when it was scheduled, none lost by a restore."""

    @property
    def fate(self) -> str:
        """ "done", "never" had an effect, or "perhaps"; "open" if it has not ended."""
        if not self.value.is_ready:
            return "open"
        error = self.value.error
        if error is None:
            return "done"
        if isinstance(error, FailedStepError) or "was to fail" in str(error):
            return "never"
        # The remedy says whether a worker had started it: then it may not be repeated.
        if isinstance(error, CancelledError) and "Please reschedule" in str(error):
            return "never"
        return "perhaps"


@dataclass(slots=True)
class Saved:
    """A checkpoint: its cut, and what was on the servers at that moment."""

    cut: SessionCut
    marks: list[np.ndarray]
    own: list[np.ndarray]
    lost: frozenset[int]
    """Places that an earlier restore had lost."""
    doubtful: frozenset[int]
    late: Sequence[LateWorld] = ({},)
    """What it may have of what was made late."""
    table: Sequence[LateWorld] = ({},)
    """What its table of any id may have."""
    rounds: RoundsAt | None = None
    """Between which rounds it is."""

    def holds(self, number: int) -> bool:
        """Whether the step of that number is in it, as the coordinator says."""
        runs = self.cut.besides
        return number < self.cut.end or any(r.first <= number < r.end for r in runs)


@dataclass(frozen=True, slots=True)
class Past:
    """What programs before have left, by place: "done", "never" or "perhaps"."""

    steps: dict[int, str]
    own: dict[int, str]
    found: list[dict[int, int]]
    """By server: what the first look has found of it, once there was one."""


@dataclass(slots=True)
class Training:
    """One session of a program."""

    number: int
    """Which session of the run."""
    world: World
    servers: int
    past: Past = field(default_factory=lambda: Past({}, {}, []))
    """What it goes on with."""
    has_created: bool = False
    """All its variables are acknowledged."""
    has_copies: bool = False
    """A read may show what is not acknowledged, and after a failover not any more; what
    one copy shows is looked at on its way (`GivenOut`)."""
    steps: dict[int, Scheduled] = field(default_factory=dict)
    own: dict[int, str] = field(default_factory=dict)
    """Own updates by place: "open", "done" or "perhaps"."""
    unsure: set[int] = field(default_factory=set)
    """Own updates whose call has raised: of these each server has all or nothing."""
    saved: list[Saved] = field(default_factory=list)
    recovery: Recovery | None = None
    """Fills the servers again, if that is wished."""
    lost: set[int] = field(default_factory=set)
    """Places that were done, and were in no checkpoint when the servers were filled."""
    doubtful: set[int] = field(default_factory=set)
    """Places that ended while they were filled: done before, or after."""
    frozen: dict[int, list[int]] = field(default_factory=dict)
    """Places that are over, and what is there for good."""
    read_by: dict[int, list[np.ndarray]] = field(default_factory=dict)
    """What was read last, by reader."""
    late: LateModel = field(default_factory=LateModel)
    """What the program makes late."""
    table: LateModel = field(default_factory=LateModel)
    """Its table of any id."""
    leased: dict[int, list[int]] = field(default_factory=dict)
    """The examples that each step has read of the leased dataset, by place."""

    _seen: int = 0
    """Restores of which the fields above know."""
    _filled: tuple[Saved, frozenset[int]] | None = None
    """From what the servers were filled last, and what was done at that moment."""

    @property
    def fills(self) -> int:
        """How often the servers were filled again."""
        return 0 if self.recovery is None else self.recovery.restores

    @property
    def is_filling(self) -> bool:
        """Whether what is on the servers may be another thing in a moment."""
        self.look()
        return self.recovery is not None and self.recovery.is_under_way

    def filled(self, saved: Saved) -> None:
        """The servers have the values of this checkpoint; `look` again and again until
        it is known that training goes on with them."""
        if saved is not self.saved[-1]:
            self.broken("servers are filled from an older checkpoint than the last one")
        done = {p for p, step in self.steps.items() if step.fate == "done"}
        self._filled = saved, frozenset(done)

    def look(self) -> bool:
        """Whether there was a restore since the last look."""
        if self.fills == self._seen or self._filled is None:
            return False
        self._seen, (saved, before) = self.fills, self._filled
        done = {p for p, step in self.steps.items() if step.fate == "done"}
        held = {p for p in done if saved.holds(self.steps[p].number)}
        self.lost = set(before - held) | saved.lost
        self.doubtful = (done - held - before) | saved.doubtful
        for place, fate in self.own.items():
            self.own[place] = "perhaps" if fate == "done" else fate
        self.frozen.clear()
        self.late.restored(saved.late)
        self.table.restored(saved.table)
        return True

    def done(self) -> frozenset[int]:
        """Places that have to be on all servers."""
        self.look()
        places = {p for p, step in self.steps.items() if step.fate == "done"}
        places |= {p for p, fate in self.past.steps.items() if fate == "done"}
        return frozenset(places - self.lost - self.doubtful)

    def done_own(self) -> frozenset[int]:
        """The own updates that are known to be done."""
        self.look()
        fates = (*self.own.items(), *self.past.own.items())
        return frozenset(p for p, fate in fates if fate == "done")

    def go_on_with(self, lost: Training) -> None:
        """Another program, which is lost, has left what is there."""
        past = self.past
        self.leased.update(lost.leased)
        if lost.late.next_key:  # else it has made nothing, and may not have looked
            self.late = lost.late
            self.late.go_on()
        for place, step in lost.steps.items():
            past.steps[place] = "perhaps" if step.fate == "open" else step.fate
        for place, fate in lost.own.items():
            past.own[place] = "perhaps" if fate == "open" else fate

    def heard(self, reader: int, values: Sequence[np.ndarray], known: Any) -> None:
        """Somebody has read the marks of all servers.

        Args:
            reader: Whose reads never go back.
            known: Places that were acknowledged before the read began.
        """
        for server, marks in enumerate(values):
            if marks.max(initial=0) > 1:
                self.broken(f"twice on ps{server}: {np.flatnonzero(marks > 1)}")
            missing = [place for place in sorted(known) if not marks[place]]
            if missing:
                self.broken(f"{missing} were done, and a read of ps{server} lacks them")
        self._look_back(values)
        before = self.read_by.get(reader)
        if before is not None and not self.has_copies:
            for server, (old, new) in enumerate(zip(before, values, strict=True)):
                if (new < old).any():
                    self.broken(f"a read of ps{server} went back: {old} {new}")
        self.read_by[reader] = [np.array(marks) for marks in values]

    def _look_back(self, values: Sequence[np.ndarray]) -> None:
        """What programs before have done is over."""
        now = [{place: int(m[place]) for place in self.past.steps} for m in values]
        found = self.past.found
        if not found:
            found.extend(now)
        for server, (before, here) in enumerate(zip(found, now, strict=True)):
            if before != here:
                changed = [place for place in before if before[place] != here[place]]
                self.broken(f"ps{server}: steps {changed} of a lost program changed")

    def check(
        self,
        marks: Sequence[np.ndarray],
        own: Sequence[np.ndarray],
    ) -> None:
        """Compares what is on the servers with what has to be."""
        self.look()
        for place, step in self.steps.items():
            self._check_step(place, step, [int(each[place]) for each in marks])
        for server, each in enumerate(marks):
            known = self.steps.keys() | self.past.steps.keys()
            strange = set(np.flatnonzero(each).tolist()) - known
            if strange:
                self.broken(f"{sorted(strange)} on ps{server}: nobody scheduled them")
        for place, fate in self.past.steps.items():
            self._check_past(place, fate, [int(each[place]) for each in marks])
        for place, fate in (*self.own.items(), *self.past.own.items()):
            found = [int(each[place]) for each in own]
            wanted = {"done": (1,), "perhaps": (0, 1), "open": (0, 1)}[fate]
            if any(count not in wanted for count in found):
                self.broken(f"own update {place} is {fate}, and on the servers {found}")
        for each_saved in self.saved:
            self.check_saved(each_saved)

    def _check_step(self, place: int, step: Scheduled, found: list[int]) -> None:
        fate = step.fate
        words = f"step {place} (number {step.number}) is {fate}, on the servers {found}"
        if any(count > 1 for count in found):
            self.broken(words)
        if fate == "done":
            if place in self.doubtful:
                wrong = len(set(found)) > 1
            else:
                wrong = any(count != (place not in self.lost) for count in found)
        else:
            wrong = fate == "never" and any(found)
        if wrong:
            self.broken(f"{words}: {step.value!r}")
        if place in self.frozen and self.frozen[place] != found:
            self.broken(f"{words}, where {self.frozen[place]} was found before")

    def _check_past(self, place: int, fate: str, found: list[int]) -> None:
        wanted = {"done": (1,), "never": (0,), "perhaps": (0, 1)}[fate]
        if any(count not in wanted for count in found):
            self.broken(f"step {place} of a lost program is {fate}, and {found}")

    def freeze(self, marks: Sequence[np.ndarray]) -> None:
        """All steps so far are over: what is there now stays."""
        for place, step in self.steps.items():
            if step.fate != "open":
                self.frozen[place] = [int(each[place]) for each in marks]

    def check_saved(self, saved: Saved) -> None:
        """Whether a checkpoint is a cut."""
        for place, step in self.steps.items():
            found = [int(each[place]) for each in saved.marks]
            if step.fate != "done":
                wrong = step.fate == "never" and any(found)
            elif place in saved.doubtful:
                wrong = len(set(found)) > 1
            else:
                held = saved.holds(step.number) and place not in saved.lost
                wrong = any(count != held for count in found)
            if wrong:
                self.broken(f"a checkpoint has {found} of step {place} ({step.fate})")
        for place in range(len(saved.own[0])):
            found = [int(each[place]) for each in saved.own]
            before = self.past.own.get(place) == "perhaps"
            may_differ = before or place in self.unsure
            if len(set(found)) > 1 and not may_differ:
                self.broken(f"a checkpoint has {found} of own update {place}")

    def broken(self, words: str) -> None:
        """The contract is not kept.

        Raises:
            BrokenPromiseError: Always.
        """
        at = self.world.now - START
        raise BrokenPromiseError(f"{at:.6f} s: {words}")


class Readers:
    """What the steps of all workers have read."""

    def __init__(self) -> None:
        self.training: Training | None = None
        self.runs = 0
        self._numbers: Final[dict[int, int]] = {}
        self._kept: Final[list[ScriptedFunction]] = []
        self._ran: Final[dict[int, list[int]]] = {}
        """Steps that ran, by reader."""
        self._count: Final = Counter[tuple[int, int]]()
        """How often each step of a session ran."""
        self._lacking: Final[list[tuple[int, int, list[int]]]] = []
        """Sessions with steps that did not read what those had done which ran on their
        worker before."""

    def ran(
        self,
        worker: str,
        function: ScriptedFunction,
        number: int,
        values: Sequence[np.ndarray],
    ) -> None:
        """A step runs."""
        del worker
        self.runs += 1
        training = self.training
        reader = self._numbers.get(id(function))
        if reader is None:
            self._kept.append(function)  # so that its id is nobody else's
            reader = self._numbers[id(function)] = len(self._kept)
        if training is None or function.training != training.number:
            return  # of a session that is over
        if not values:
            return  # it has no effect but its result
        before = self._ran.setdefault(reader, [])
        if not function.reads_ahead:
            own = values[: training.servers]
            lacks = [n for n in before if any(not marks[n] for marks in own)]
            self._lacking.append((training.number, number, lacks))
        before.append(number)
        self._count[training.number, number] += 1
        step = training.steps.get(number)
        known = step.known if step is not None and not training.fills else ()
        training.heard(reader, values[: training.servers], known)

    def check(self, training: Training, *, runs_once: bool) -> None:
        """Steps have read what those had done which their worker ran before; and none
        has run twice, if that is so."""
        twice = [step for step, count in self._count.items() if count > 1]
        if runs_once and twice:
            training.broken(f"steps ran twice, of these sessions: {sorted(twice)}")
        if training.fills:
            return
        for session, number, lacks in self._lacking:
            if session != training.number:
                continue
            for before in lacks:
                ran_once = self._count[session, before] == 1
                step = training.steps.get(before)
                if step is not None and step.fate == "done" and ran_once:
                    training.broken(f"step {number} lacks step {before} of its worker")


_LIMITS: Final = Limits()
_KINDS: Final = frozenset(
    kind.kind
    for kind in (Pull, PullRows, PullRound, Exchange, Pulled, PulledRound, Exchanged)
)


class _PullAsked(NamedTuple):
    session: int
    reads: tuple[tuple[int, int], ...]
    """Keys, with the versions that the reader has."""


@final
class GivenOut:
    """Contents by their numbers, of one run.

    Args:
        broken: Told in words what must not be.
        in_pieces: Messages may travel in pieces, so that not all are looked at.
    """

    def __init__(self, broken: Callable[[str], None], *, in_pieces: bool) -> None:
        self._broken, self._in_pieces = broken, in_pieces
        self._asked: dict[tuple[int, int], _PullAsked] = {}
        """By line and number of the request."""
        self._named: dict[tuple[int, int, int], int] = {}
        """Digests by session, key and version."""
        self._read: dict[tuple[int, int, int], tuple[int, int]] = {}
        """The last request and its version, by line, session and key."""
        self._given: set[tuple[str, int, int, int]] = set()
        """Versions that somebody was given: who, session, key and version."""

    def note(self, way: Way, frames: Sequence[bytes]) -> None:
        """A message has arrived. One that travels in pieces says nothing here."""
        header = frames[0]
        if len(header) < 2 or header[1] not in _KINDS:
            return
        try:
            request, message = decode(header, frames[1:], _LIMITS)
        except ProtocolError:
            return
        if isinstance(message, Pull | PullRows | PullRound | Exchange):
            reads = tuple([(read.key, read.known) for read in message.reads])
            self._require_given(way.source, message.session, reads)
            self._asked[way.line, request] = _PullAsked(message.session, reads)
        else:
            asked = self._asked.pop((way.line, request), None)
            if asked is not None:
                self._answered(way, request, asked, message)

    def _answered(
        self, way: Way, request: int, asked: _PullAsked, message: Message
    ) -> None:
        assert isinstance(message, Pulled | PulledRound | Exchanged), message
        arrays = iter(message.arrays)
        for (key, known), version in zip(asked.reads, message.versions, strict=False):
            if not isinstance(message, PulledRound):  # which waits for its round
                self._require_order(way, (asked.session, key), (request, version))
            self._given.add((way.target, asked.session, key, version))
            if version != known:
                digest = zlib.crc32(next(arrays).tobytes())
                self._require_same(way, (asked.session, key, version), digest)

    def _require_given(
        self, reader: str, session: int, reads: Sequence[tuple[int, int]]
    ) -> None:
        for key, known in reads:
            name = reader, session, key, known
            if known >= 0 and not (self._in_pieces or name in self._given):
                self._broken(
                    f"{reader} knows version {known} of variable {key}, which nobody "
                    f"has given it in session {session}"
                )

    def _require_order(
        self, way: Way, name: tuple[int, int], read: tuple[int, int]
    ) -> None:
        place = (way.line, *name)
        earlier, later = sorted((self._read.get(place, read), read))
        if earlier[1] > later[1]:
            self._broken(
                f"{way.source} gives version {later[1]} of variable {name[1]} to "
                f"{way.target}, which had asked before and got {earlier[1]}"
            )
        self._read[place] = later

    def _require_same(self, way: Way, name: tuple[int, int, int], digest: int) -> None:
        if self._named.setdefault(name, digest) != digest:
            self._broken(
                f"{way.source} gives variable {name[1]} to {way.target}: its version "
                f"{name[2]} names another content than before"
            )

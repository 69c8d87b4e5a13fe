"""The log of closed rounds, as one who watches the network sees it.

An order to close a round names its members. The log has the first order of each round,
and the world that numpy makes of it (`world_after`). The law of the file: as that of
`_contract`, nothing here asks the system what is right. What has to be so:

- every server gets the same order to close a round, however often it is sent;
- rounds are closed one after the other, from the first one on;
- a contribution is acknowledged by all servers before it is a member, and is a member
  of one round at most, in the order of steps and with the weight of its step;
- with ``late="drop"`` each member was computed from the values before its round;
- who pulls after a round gets no values before it, and gets those of the log;
- a worker contributes to a round once, unless it runs a step that ran before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, final

import numpy as np

from zstrat.config import Limits
from zstrat.errors import ProtocolError
from zstrat.wire import (
    CloseRound,
    Completions,
    Contribute,
    Done,
    OpenSession,
    PulledRound,
    PullRound,
    decode,
)

from ._rounds_model import DrawnRounds, whole, world_after

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zstrat.wire import Message, StepContribution

    from ._late_model import World
    from ._paths import Way

_LIMITS: Final = Limits()
_KINDS: Final = frozenset(
    kind.kind
    for kind in (
        CloseRound,
        Completions,
        Contribute,
        Done,
        OpenSession,
        PulledRound,
        PullRound,
    )
)

Run: TypeAlias = tuple[int, int]
"""Step and attempt."""


class Order(NamedTuple):
    """What an order to close a round says, but for its number."""

    rule: int
    members: tuple[tuple[int, int, float], ...]
    operands: tuple[bytes, ...]


class RoundsAt(NamedTuple):
    """A moment between two rounds: the session, and how many of each optimizer were
    closed."""

    session: int
    numbers: Mapping[int, int]


@dataclass(slots=True)
class OptimizerLog:
    """The closed rounds of an optimizer in one session."""

    worlds: list[World]
    """The one before the first round, and the one after each."""
    orders: list[Order] = field(default_factory=list)
    member_of: dict[int, int] = field(default_factory=dict)
    """By step, the number of its round; -1: it was before the session."""
    bases: dict[tuple[int, int], int] = field(default_factory=dict)
    """By line of the worker and round, the step whose first run has contributed."""

    def forget_line(self, line: int) -> None:
        """Forgets what the worker at this line has contributed."""
        self.bases = {key: x for key, x in self.bases.items() if key[0] != line}


@dataclass(slots=True)
class SessionLog:
    """What was seen of one session."""

    optimizers: dict[int, OptimizerLog]
    given: dict[Run, dict[int, np.ndarray]] = field(default_factory=dict)
    """Gradients by key."""
    kept: dict[Run, set[int]] = field(default_factory=dict)
    """Keys of the gradients that a server has acknowledged."""
    contents: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    """By key and version."""


@final
class RoundsLog:
    """The log of one run.

    Args:
        stores: The number of stores.
        broken: Called with what must not be.
    """

    def __init__(
        self,
        drawn: Sequence[DrawnRounds],
        stores: int,
        broken: Callable[[str], None],
    ) -> None:
        self._drawn: Final = {each.number: each for each in drawn}
        self._stores, self._broken = stores, broken
        self._keys: Final = {
            spec.key: each.number for each in drawn for spec in each.specs(stores)
        }
        self._sessions: dict[int, SessionLog] = {}
        self._asked: dict[tuple[int, int], Contribute | PullRound] = {}
        """By line and number of the request."""

    def note(self, way: Way, frames: Sequence[bytes]) -> None:
        """A message has arrived."""
        header = frames[0]
        if not self._drawn or len(header) < 2 or header[1] not in _KINDS:
            return
        if way.source.startswith("ps") and way.target.startswith("ps"):
            return  # a log for a second copy
        try:
            request, message = decode(header, frames[1:], _LIMITS)
        except ProtocolError:
            return
        match message:
            case CloseRound():
                if (
                    message.order.optimizer in self._drawn
                ):  # else made late by the program
                    self._ordered(message)
            case Contribute():
                self._contributed(message)
                self._asked[way.line, request] = message
            case PullRound():
                self._asked[way.line, request] = message
            case Completions():
                for each in message.contributions:
                    self._reported(way, message.session, each)
            case OpenSession():  # the worker begins again, and its steps run elsewhere
                for session in self._sessions.values():
                    for optimizer in session.optimizers.values():
                        optimizer.forget_line(way.line)
            case _:
                asked = self._asked.pop((way.line, request), None)
                if asked is not None:
                    self._answered(way, asked, message)

    def continue_at(self, session: int, before: RoundsAt) -> None:
        """The servers of a new session are filled with what was there at a moment of an
        earlier one."""
        logs = {}
        for number, log in self.session(before.session).optimizers.items():
            count = before.numbers[number]
            there = {s: -1 for s, at in log.member_of.items() if at < count}
            logs[number] = OptimizerLog([log.worlds[count]], member_of=there)
        self._sessions[session] = SessionLog(logs)

    def session(self, session: int) -> SessionLog:
        """The log of a session."""
        found = self._sessions.get(session)
        if found is None:
            logs = {
                number: OptimizerLog([each.zeros(self._stores)])
                for number, each in self._drawn.items()
            }
            found = self._sessions[session] = SessionLog(logs)
        return found

    def moment_of(self, session: int, world: World) -> RoundsAt | None:
        """The last moment at which this was there, on all servers and of all
        optimizers; None: there was none."""
        numbers = {}
        for optimizer, log in self.session(session).optimizers.items():
            for number in reversed(range(len(log.worlds))):
                if _is_within(log.worlds[number], world):
                    numbers[optimizer] = number
                    break
            else:
                return None
        return RoundsAt(session, numbers)

    def _ordered(self, message: CloseRound) -> None:
        session, ordered = self.session(message.session), message.order
        log = session.optimizers[ordered.optimizer]
        members = tuple([(m.step, m.attempt, m.weight) for m in ordered.members])
        operands = tuple([array.tobytes() for array in message.arrays])
        order, number = Order(ordered.rule, members, operands), ordered.number
        if number < len(log.orders):
            if log.orders[number] != order:
                self._broken(
                    f"round {number} of optimizer {ordered.optimizer} is to be closed "
                    f"with {order}, and was with {log.orders[number]}"
                )
            return
        who = f"round {number} of optimizer {ordered.optimizer}"
        if number > len(log.orders):
            self._broken(f"{who} is closed behind {len(log.orders)} rounds")
            return
        log.orders.append(order)
        if list(members) != sorted(members):
            self._broken(f"{who}: its members are in no order: {members}")
        counted = []
        for step, attempt, weight in members:
            before = log.member_of.setdefault(step, number)
            if before != number:
                self._broken(f"{who}: step {step} was in round {before}")
            gradients = session.given.get((step, attempt), {})
            self._check_member(who, log, gradients, (step, attempt, weight))
            if session.kept.get((step, attempt)) != set(self._keys):
                self._broken(f"{who}: not all servers have step {step} ({attempt})")
                return
            counted.append((weight, gradients))
        drawn = self._drawn[ordered.optimizer]
        log.worlds.append(world_after(drawn, log.worlds[-1], counted))

    def _check_member(
        self,
        who: str,
        log: OptimizerLog,
        gradients: Mapping[int, np.ndarray],
        member: tuple[int, int, float],
    ) -> None:
        """Looks at the weight of a member, and from which round it is."""
        for key, held in log.worlds[-1].items():
            if key not in gradients:
                continue
            _, read, _, weight = gradients[key].tolist()
            if weight != member[2]:
                self._broken(f"{who}: the weight of {member} is {weight}")
            policy = self._drawn[self._keys[key]].policy
            if policy.drops_late and not _is_close(read, held.value[0]):
                self._broken(
                    f"{who}: {member} has read {read} of variable {key}, where "
                    f"{held.value[0]} was before that round"
                )

    def _contributed(self, message: Contribute) -> None:
        given = self.session(message.session).given
        run, arrays = _run_of(message), iter(message.arrays)
        gradients = given.setdefault(run, {})
        for update in message.updates:
            gradient = whole([next(arrays) for _ in range(update.operands)])
            before = gradients.setdefault(update.key, gradient)
            if not np.array_equal(before, gradient, equal_nan=True):
                self._broken(f"two gradients of run {run}: {before} and {gradient}")

    def _reported(self, way: Way, session: int, given: StepContribution) -> None:
        if given.attempt > 1:
            return
        bases = self.session(session).optimizers[given.optimizer].bases
        before = bases.setdefault((way.line, given.base), given.step)
        if before != given.step:
            self._broken(
                f"{way.source} has contributed to round {given.base} of optimizer "
                f"{given.optimizer} by steps {before} and {given.step}"
            )

    def _answered(
        self, way: Way, asked: Contribute | PullRound, answer: Message
    ) -> None:
        session = self.session(asked.session)
        if isinstance(asked, Contribute) and isinstance(answer, Done):
            kept = session.kept.setdefault(_run_of(asked), set())
            kept.update([update.key for update in asked.updates])
        elif isinstance(asked, PullRound) and isinstance(answer, PulledRound):
            self._pulled(way, session, asked, answer)

    def _pulled(
        self, way: Way, session: SessionLog, asked: PullRound, answer: PulledRound
    ) -> None:
        numbers = {}
        for after, number in zip(asked.after, answer.numbers, strict=True):
            count = len(session.optimizers[after.optimizer].orders)
            if not after.number <= number <= count:
                self._broken(
                    f"{way.target} asks {way.source} for optimizer {after.optimizer} "
                    f"after {after.number} rounds, of {count}, and gets {number}"
                )
                return
            numbers[after.optimizer] = number
        arrays = iter(answer.arrays)
        for (key, known, _), version in zip(asked.reads, answer.versions, strict=True):
            if version != known:
                session.contents[key, version] = np.array(next(arrays))
            optimizer = self._keys.get(key)
            if optimizer is None:
                continue
            found = session.contents[key, version]
            world = session.optimizers[optimizer].worlds[numbers[optimizer]]
            if not _is_close(world[key].value, found):
                self._broken(
                    f"{way.source} gives {found} of variable {key} after "
                    f"{numbers[optimizer]} rounds, and not {world[key].value}"
                )


def _is_within(wanted: World, found: World) -> bool:
    """Whether all that is wanted was found."""
    return all(
        key in found
        and _is_close(held.value, found[key].value)
        and _is_close(held.trace, found[key].trace)
        for key, held in wanted.items()
    )


def _is_close(wanted: object, found: object) -> bool:
    return bool(np.allclose(np.asarray(wanted), np.asarray(found), 1e-3, 1e-3))


def _run_of(message: Contribute) -> tuple[int, int]:
    """The step and the run of it that contributes."""
    first = message.contributions[0]
    return first.step, first.attempt

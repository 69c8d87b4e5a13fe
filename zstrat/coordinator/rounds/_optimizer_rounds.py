"""`OptimizerRounds`: decides which contributions (gradients of steps) are the members
of a round, which becomes one update, and when the round closes. Without clock or
socket.

The law of this file: a contribution that was accepted is a member of exactly one round,
or is counted as dropped. Only here is it decided which; the parameter servers are given
the members, so no two of them differ.

    OPEN ──all workers have contributed, or the grace is over──▶ CLOSING
      ▲                                                            │
      └──────────────── all servers have applied it ───────────────┘

While a round is closing, contributions are to the next one.

`RoundStatistics` measures how many rounds are closed, and for which workers they wait.
A round that is closed with the contributions of several workers has waited for the last
one: since the contribution before it, all others had contributed. The sum of these
seconds is what the same rounds would have saved with one backup worker more.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, NamedTuple, final

from zstrat.errors import AlreadyExistsError
from zstrat.telemetry import Throughput
from zstrat.wire import HeldRounds, RoundMember, RoundOrder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import numpy as np

    from zstrat.variables import Rounds
    from zstrat.wire import PlainTree, StepContribution


RECENT_ROUNDS: Final = 64
"""Number of latest rounds from which metrics derive the workers that hold rounds up
now."""


class _Wait(NamedTuple):
    """Number of rounds that waited for one worker alone, the last to contribute, and
    the sum of these waits in seconds."""

    rounds: int = 0
    seconds: float = 0.0


_Waits = dict[int, _Wait]  # by worker


@final
@dataclass(slots=True)
class RoundStatistics:
    """Counts of the rounds of one optimizer, and their waiting times. Workers are given
    by place (index in the session)."""

    closed: int = 0
    """Number of rounds that all servers have applied."""
    late: Counter[int] = field(default_factory=Counter)
    """Number of contributions to a round that was already closed, by worker."""
    dropped: Counter[int] = field(default_factory=Counter)
    """Number of late contributions that were dropped without effect, by worker."""
    _waits: _Waits = field(default_factory=dict)
    _rate: Throughput = field(default_factory=Throughput)
    _recent: deque[tuple[float, _Waits]] = field(
        default_factory=lambda: deque(maxlen=RECENT_ROUNDS + 1)
    )
    """The last rounds: when each was applied, and for which workers it waited."""
    _closing: _Waits = field(default_factory=dict)
    """The waits of the round that is being closed; {} if only one contribution is a
    member."""

    def contributed_late(self, worker: int, *, is_dropped: bool) -> None:
        """Counts a contribution to a round that was already closed."""
        self.late[worker] += 1
        if is_dropped:
            self.dropped[worker] += 1

    def closing(self, contributed: Iterable[tuple[float, int]]) -> None:
        """Notes the members of the round that is being closed: time and worker of
        each."""
        in_order = sorted(contributed)
        self._closing = {}
        if len(in_order) > 1:
            # Between the last two all others were there: so long the round waited for
            # one worker.
            (before, _), (at, worker) = in_order[-2:]
            self._closing = {worker: _Wait(1, at - before)}

    def applied(self, now: float) -> None:
        """Notes that all servers have applied the round."""
        self.closed += 1
        if now >= self._rate.next_mark:
            self._rate.mark(now, self.closed - 1, self.closed)
        _add(self._waits, self._closing)
        self._recent.append((now, self._closing))

    def metrics(self, now: float, most: int | None = None) -> dict[str, PlainTree]:
        """Returns the counts as plain data, by name of the worker: at most ``most``
        workers, those with the largest numbers."""
        (first, _), *others = tuple(self._recent) or ((now, {}),)
        waits: _Waits = {}
        for _, each in others:
            _add(waits, each)
        return {
            "closed": self.closed,
            "per_s": self._rate.rate(now, self.closed),
            "late": _counts(self.late, most),
            "dropped": _counts(self.dropped, most),
            "waited_for": _plain(self._waits, most),
            "recent": {
                "rounds": len(others),
                "seconds": others[-1][0] - first if others else 0.0,
                "waited_for": _plain(waits, most),
            },
        }


def _add(waits: _Waits, more: _Waits) -> None:
    for worker, (rounds, seconds) in more.items():
        before = waits.get(worker, _Wait())
        waits[worker] = _Wait(before.rounds + rounds, before.seconds + seconds)


def _counts(of_workers: Counter[int], most: int | None) -> dict[str, PlainTree]:
    # A copy: the loop may add a worker while another thread asks.
    largest = of_workers.copy().most_common(most)
    return {f"worker:{worker}": count for worker, count in largest}


def _plain(waits: _Waits, most: int | None) -> dict[str, PlainTree]:
    largest = sorted(dict(waits).items(), key=lambda item: -item[1].seconds)[:most]
    return {f"worker:{worker}": each._asdict() for worker, each in largest}


_NAMED: Final = 64
"""The most members of a round that its errors name."""

FORMER: Final = -1
"""Place that is used for workers of the program before this one, of which nothing is
known."""


class Contributed(NamedTuple):
    """A contribution: the worker, the time of its report, the member that servers know,
    and whether it came after its round was closed."""

    worker: int
    at: float
    member: RoundMember
    is_late: bool


class RestoredRounds(NamedTuple):
    """The number of the open round in a checkpoint. A restore may continue with a later
    number instead, a multiple of ``cycle`` away: numbers of rounds that were closed
    since are not used again."""

    number: int
    cycle: int


@dataclass(slots=True)
class ClosingRound:
    """A round that is being closed, with the order to servers."""

    order: RoundOrder
    operands: Sequence[np.ndarray] | None
    """Values that the optimizer computes from all gradients; None: they are not known
    yet, and no server has the order."""
    sources: str
    """The members and their workers, for errors."""


@final
@dataclass(slots=True)
class OptimizerRounds:
    """The rounds of one optimizer. Workers are given by place (index in the
    session)."""

    optimizer: int
    name: str
    policy: Rounds
    number: int = 0
    """Number of the open round, which is how many were closed before."""
    is_closing: bool = False
    """Whether the round before the open one is being applied."""
    is_left_open: bool = False
    """Whether the coordinator before this one has left a round open. That round is
    closed with the contributions it has: a worker may wait for it whose contribution
    was not reported here."""
    coupled: bool = False
    """Whether the optimizer computes values (a global norm) from all gradients of a
    round."""
    statistics: RoundStatistics = field(default_factory=RoundStatistics)
    _members: dict[int, Contributed] = field(default_factory=dict)
    """Contributions to the open round, by step."""
    _inherited: Sequence[StepContribution] = ()
    """Contributions of the program before this one to the open round. Servers can use
    them when a step has bound the optimizer, so they count from the first contribution
    of this program on."""
    _enough_at: float | None = None
    """Time from which the open round has enough contributions to close after the grace;
    None if it has too few."""

    def contributed(self, worker: int, given: StepContribution, now: float) -> None:
        """Adds a contribution that all servers have to the open round."""
        inherited, self._inherited = self._inherited, ()
        for each in inherited:
            self._take(FORMER, each, now)
        self._take(worker, given, now)

    def _take(self, worker: int, given: StepContribution, now: float) -> None:
        self.coupled |= given.coupled
        is_late = given.base < self.number
        if is_late:
            is_dropped = self.policy.drops_late
            if worker != FORMER:
                self.statistics.contributed_late(worker, is_dropped=is_dropped)
            if is_dropped:
                return
        member = RoundMember(given.step, given.attempt, given.weight)
        # By step: a later attempt takes the place of an earlier one, as on the servers.
        self._members[given.step] = Contributed(worker, now, member, is_late)

    @property
    def steps(self) -> list[int]:
        """The steps whose contributions wait for the round to be closed."""
        return list(self._members)

    def is_open_below(self, step: int) -> bool:
        """Returns whether a contribution of a step below ``step`` waits. Callable from
        any thread."""
        return any(each < step for each in self.steps)

    @property
    def _on_time(self) -> list[Contributed]:
        """The contributions made for the open round itself. Late ones, made for an
        earlier round, are members in addition: if they counted instead of contributions
        that are on time, those would be late from then on."""
        return [each for each in self._members.values() if not each.is_late]

    @property
    def contributors(self) -> set[int]:
        """The workers that have contributed to the open round."""
        return {each.worker for each in self._on_time}

    def size(self, there: int) -> int:
        """Returns the number of contributions for which a round waits, if ``there``
        workers are present."""
        return self.policy.workers or there

    def enough(self, there: int) -> int:
        """Returns the least number of contributions with which a round can close, if
        ``there`` workers are present."""
        return max(1, self.size(there) - self.policy.backup)

    def due(self, there: int, now: float, *, is_awaited: bool = False) -> float | None:
        """Returns the time at which the open round is to be closed; None: the round
        waits for more contributions. With ``is_awaited`` it does not wait for more, as
        a call of the user waits for the round."""
        count = len(self._on_time)
        if not self.is_closing and (self.is_left_open or is_awaited):
            return now
        # The grace begins again, as more workers may be there by now than when there
        # were enough.
        if self.is_closing or count < self.enough(there):
            self._enough_at = None
            return None
        if count >= self.size(there):
            return now
        if self._enough_at is None:
            self._enough_at = now
        return self._enough_at + self.policy.grace

    def close(self) -> ClosingRound:
        """Closes the open round with the contributions that it has, and opens the
        next."""
        assert not self.is_closing, self.name
        found = list(self._members.values())
        self.statistics.closing((each.at, each.worker) for each in self._on_time)
        # In the order of the steps: floating-point sums are then the same on each
        # server, and whenever the order is repeated.
        members = sorted([each.member for each in found])
        operands = None if self.coupled and members else ()
        order = RoundOrder(self.optimizer, self.number, int(self.policy.rule), members)
        sources = sources_of((each.member.step, each.worker) for each in found)
        closing = ClosingRound(order, operands, sources)
        self.begin(self.number + 1)
        self.is_closing, self.is_left_open = True, False
        return closing

    def closed(self, now: float) -> None:
        """Notes that all servers have applied the round."""
        self.is_closing = False
        self.statistics.applied(now)

    def order_to_drop(self, restored: RestoredRounds | None) -> RoundOrder | None:
        """Returns the order to close the open round without the contributions that
        wait, and to continue from a restored round; None: there is nothing to do."""
        last, waits = self.number, bool(self._members or self._inherited)
        if restored is not None:
            # Not the next one, which a worker may have begun.
            least = self.number + 2 if self.number or waits else 0
            more = -(-max(0, least - restored.number) // restored.cycle)
            last = restored.number + more * restored.cycle - 1
        if not waits and (restored is None or last < self.number):
            return None
        return RoundOrder(self.optimizer, last, int(self.policy.rule), [])

    def begin(self, number: int, inherited: Sequence[StepContribution] = ()) -> None:
        """Opens the round ``number``, with only the contributions that the program
        before this one has made to it."""
        self.number, self._inherited = number, inherited
        self._members, self._enough_at, self.is_closing = {}, None, False

    def metrics(
        self, there: int, now: float, most: int | None = None
    ) -> dict[str, PlainTree]:
        """Returns the counts of the rounds, if ``there`` workers are present, for
        `ClusterCoordinator.metrics`; see `RoundStatistics.metrics` for ``most``."""
        return {
            "workers": self.size(there),
            "backup": self.policy.backup,
            "waiting": len(self._members) + len(self._inherited),
            **self.statistics.metrics(now, most),
        }


@final
class SessionRounds:
    """The rounds of all optimizers of a session, by number of the optimizer."""

    def __init__(self) -> None:
        self._rounds: dict[int, OptimizerRounds] = {}
        self.flush_below = 0
        """A step number: once no closure is left, rounds with contributions of earlier
        steps are closed with the contributions they have, as a call waits for them. Any
        thread may increase it."""
        self.inherited: Mapping[int, HeldRounds] = {}
        """Rounds that the program before this one has left, by number of the
        optimizer."""

    def __bool__(self) -> bool:
        """Whether any optimizer has rounds."""
        return bool(self._rounds)

    def __iter__(self) -> Iterator[OptimizerRounds]:
        # A copy: any thread may ask while the loop adds an optimizer.
        return iter(tuple(self._rounds.values()))

    def require_rounds(self, optimizer: int, name: str) -> None:
        """Checks that an optimizer may be created without rounds.

        Raises:
            AlreadyExistsError: The program before has left contributions to the
                optimizer's rounds.
        """
        left = self.inherited.get(optimizer)
        if left is not None and left.contributions:
            raise AlreadyExistsError(
                f"{len(left.contributions)} contributions to rounds of optimizer "
                f"{name!r} wait on the parameter servers: give it rounds="
            )

    def add(self, optimizer: int, name: str, policy: Rounds) -> None:
        """Adds the rounds of an optimizer that was created on the servers."""
        rounds = OptimizerRounds(optimizer, name, policy)
        self._rounds[optimizer] = rounds
        if (left := self.inherited.get(optimizer)) is not None:
            rounds.begin(left.closed.number + 1, left.contributions)

    def remove(self, optimizer: int) -> None:
        """Removes an optimizer that no longer has a handle, if it has rounds."""
        self._rounds.pop(optimizer, None)

    def orders_to_drop(
        self, restored: Mapping[int, RestoredRounds]
    ) -> list[RoundOrder]:
        """Returns the orders to close all open rounds without the contributions that
        wait."""
        orders = [
            RoundOrder(optimizer, left.closed.number + 1, 0, [])
            for optimizer, left in self.inherited.items()
            if left.contributions and optimizer not in self._rounds
        ]
        more = [each.order_to_drop(restored.get(each.optimizer)) for each in self]
        return [*orders, *[order for order in more if order is not None]]

    def dropped(self, order: RoundOrder) -> None:
        """Notes that all servers have dropped the contributions that waited."""
        # Also for an optimizer that is created later: it continues after the dropped
        # round.
        left = HeldRounds(order, [], ())
        self.inherited = {**self.inherited, order.optimizer: left}
        if order.optimizer in self._rounds:
            self._rounds[order.optimizer].begin(order.number + 1)

    def restart(self) -> None:
        """Begins again at round 0, on servers that are empty."""
        self.inherited = {}
        for each in self:
            each.begin(0)

    def get(self, optimizer: int) -> OptimizerRounds | None:
        """Returns the rounds of the optimizer; None if it has none."""
        return self._rounds.get(optimizer)

    def is_open_below(self, step: int) -> bool:
        """Returns whether a contribution of a step below ``step`` waits, or a round is
        being applied. Callable from any thread."""
        return any(each.is_closing or each.is_open_below(step) for each in self)

    @property
    def waiting(self) -> int:
        """Number of ended steps with a contribution that waits for a round."""
        return len({step for each in self for step in each.steps})

    @property
    def contributors(self) -> set[int]:
        """The workers that have contributed to an open round."""
        return {worker for each in self for worker in each.contributors}

    def metrics(
        self, there: int, now: float, most: int | None = None
    ) -> dict[str, PlainTree]:
        """Returns the counts of all rounds, if ``there`` workers are present, by name
        of the optimizer. If two optimizers have the same name, that of the second one
        ends in its number."""
        metrics: dict[str, PlainTree] = {}
        for each in self:
            taken = each.name in metrics
            name = f"{each.name} {each.optimizer}" if taken else each.name
            metrics[name] = each.metrics(there, now, most)
        return metrics


def sources_of(members: Iterable[tuple[int, int]]) -> str:
    """Describes the members of a round, by step and worker, for errors."""
    return ", ".join(
        f"step {step} of "
        + ("the program before" if worker == FORMER else f"worker {worker}")
        for step, worker in sorted(members)[:_NAMED]
    )


def inherited_rounds(held: Sequence[Mapping[int, HeldRounds]]) -> dict[int, HeldRounds]:
    """Decides which rounds a program continues that others have left on its servers.

    A contribution that every server has belongs to the open round. A contribution that
    only some have is of a step that was under way, and has no effect. The order to
    close a round may have reached some servers only: the others get it with the same
    members. So each contribution is in one round, on all servers, or in none.

    Args:
        held: For each server its rounds, by number of the optimizer.

    Returns:
        By number of the optimizer: the round that all servers have to close if they
            have not, and the contributions to the next one, in the order of their
            steps.
    """
    decided: dict[int, HeldRounds] = {}
    for optimizer in sorted({number for each in held for number in each}):
        there = [each[optimizer] for each in held if optimizer in each]
        last = max(there, key=lambda each: each.closed.number)
        common: set[StepContribution] = set()
        # A server that knows nothing of the optimizer has no contribution that all
        # share.
        if len(there) == len(held):
            common = set.intersection(*[set(each.contributions) for each in there])
        decided[optimizer] = replace(last, contributions=sorted(common))
    return decided


def first_free_step(held: Sequence[Mapping[int, HeldRounds]]) -> int:
    """Returns a step number above those of all contributions: the least that the next
    program may use."""
    taken = [
        given.step
        for each in held
        for rounds in each.values()
        for given in rounds.contributions
    ]
    return max(taken, default=0) + 1

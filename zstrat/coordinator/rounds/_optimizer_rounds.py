"""`OptimizerRounds`: decides which contributions are the members of a round, and when
it closes. Without clock or socket.

The law of this file: a contribution that was accepted is a member of exactly one round,
or is counted as dropped. Only here is it decided which; the parameter servers are given
the members, so no two of them differ.

    OPEN ──all workers have contributed, or the grace is over──▶ CLOSING
      ▲                                                            │
      └──────────────── all servers have applied it ───────────────┘

While a round is closing, contributions are to the next one.

`RoundStatistics` measures how many rounds are closed, and for which workers they wait.
A round that is closed with the contributions of several workers has waited for the last
one: since the contribution before it, all others were there. The sum of these seconds
is what the same rounds would have saved with one backup worker more.
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
"""Rounds from which it is derived who holds rounds up now."""


class _Wait(NamedTuple):
    """Number of rounds that waited for one worker alone, the last to contribute, and
    the seconds of all these waits."""

    rounds: int = 0
    seconds: float = 0.0


_Waits = dict[int, _Wait]  # by worker


@final
@dataclass(slots=True)
class RoundStatistics:
    """Counts of the rounds of one optimizer, and their waiting times. Workers are known
    by their place."""

    closed: int = 0
    """Rounds that all servers have applied."""
    late: Counter[int] = field(default_factory=Counter)
    """By worker: contributions to a round that was closed already."""
    dropped: Counter[int] = field(default_factory=Counter)
    """By worker: those of them without effect."""
    _waits: _Waits = field(default_factory=dict)
    _rate: Throughput = field(default_factory=Throughput)
    _recent: deque[tuple[float, _Waits]] = field(
        default_factory=lambda: deque(maxlen=RECENT_ROUNDS + 1)
    )
    """When rounds were applied, and for whom each of them waited."""
    _closing: _Waits = field(default_factory=dict)
    """Of the round that is being closed; {} if only one contribution is a member."""

    def contributed_late(self, worker: int, *, is_dropped: bool) -> None:
        """Counts a contribution to a round that was closed already."""
        self.late[worker] += 1
        if is_dropped:
            self.dropped[worker] += 1

    def closing(self, contributed: Iterable[tuple[float, int]]) -> None:
        """Notes the members of the round that is being closed: when they contributed,
        and which worker did."""
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
        """Returns the numbers as plain data, workers by name: at most ``most``, those
        with the largest ones."""
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
"""Members of a round that its errors name at most."""

FORMER: Final = -1
"""Stands for the workers of the program before, of which nothing is known."""


class Contributed(NamedTuple):
    """A contribution: its worker, the time of its report, the member that servers know,
    and whether it came after its round was closed."""

    worker: int
    at: float
    member: RoundMember
    is_late: bool


class RestoredRounds(NamedTuple):
    """The number of the open round in a checkpoint. A restore may continue with a later
    one instead, a multiple of ``cycle`` away: numbers of rounds that were closed since
    are not used again."""

    number: int
    cycle: int


@dataclass(slots=True)
class ClosingRound:
    """A round that is to be closed."""

    order: RoundOrder
    operands: Sequence[np.ndarray] | None
    """What the optimizer computes from all gradients; None: it is not known yet, and no
    server has the order."""
    sources: str
    """The members and their workers, for errors."""


@final
@dataclass(slots=True)
class OptimizerRounds:
    """The rounds of one optimizer. Workers are known by their place."""

    optimizer: int
    name: str
    policy: Rounds
    number: int = 0
    """The open round: how many were closed."""
    is_closing: bool = False
    """Whether the round before the open one is being applied."""
    is_left_open: bool = False
    """Whether the coordinator before has left a round open, which is closed with what
    it has: a worker may wait for it whose contribution was not reported here."""
    coupled: bool = False
    """Whether the optimizer computes operands from all gradients of a round."""
    statistics: RoundStatistics = field(default_factory=RoundStatistics)
    _members: dict[int, Contributed] = field(default_factory=dict)
    """Contributions to the open round, by step."""
    _inherited: Sequence[StepContribution] = ()
    """What the program before has contributed to the open round. Servers can use them
    when a step has bound the optimizer, so they count with the first contribution."""
    _enough_at: float | None = None
    """When the open round could do without the others."""

    def contributed(self, worker: int, given: StepContribution, now: float) -> None:
        """Takes a contribution that all servers have."""
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
        """The steps whose contributions wait."""
        return list(self._members)

    def is_open_below(self, step: int) -> bool:
        """Returns whether a contribution of a step below ``step`` waits. From any
        thread."""
        return any(each < step for each in self.steps)

    @property
    def _on_time(self) -> list[Contributed]:
        """The contributions for the open round itself. Late ones are members besides:
        if they took the place of others, those would be late, too, from then on."""
        return [each for each in self._members.values() if not each.is_late]

    @property
    def contributors(self) -> set[int]:
        """The workers that have contributed to the open round."""
        return {each.worker for each in self._on_time}

    def size(self, there: int) -> int:
        """Returns the number of contributions that a round waits for, of ``there``
        workers."""
        return self.policy.workers or there

    def enough(self, there: int) -> int:
        """Returns the number of contributions that a round needs."""
        return max(1, self.size(there) - self.policy.backup)

    def due(self, there: int, now: float, *, is_awaited: bool = False) -> float | None:
        """Returns when the open round is to be closed; None: it waits for more
        contributions. ``is_awaited``: it does not, as a call waits for it."""
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
        """Closes the open round with the contributions that there are."""
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
        """Returns the order to close the open round without what waits, and to
        continue from one that is restored; None: there is nothing to do."""
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
        """Continues with this round, and with nothing but what the program before has
        contributed to it."""
        self.number, self._inherited = number, inherited
        self._members, self._enough_at, self.is_closing = {}, None, False

    def metrics(
        self, there: int, now: float, most: int | None = None
    ) -> dict[str, PlainTree]:
        """Returns the numbers of the rounds with ``there`` workers, for
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
        """Once no closure is left, rounds with contributions of steps below this are
        closed with what they have: a call waits for them. Any thread raises it."""
        self.inherited: Mapping[int, HeldRounds] = {}
        """What the program before has left, by number of the optimizer."""

    def __bool__(self) -> bool:
        """Whether an optimizer has rounds."""
        return bool(self._rounds)

    def __iter__(self) -> Iterator[OptimizerRounds]:
        # A copy: any thread may ask while the loop adds an optimizer.
        return iter(tuple(self._rounds.values()))

    def require_rounds(self, optimizer: int, name: str) -> None:
        """Checks that an optimizer may be created without rounds.

        Raises:
            AlreadyExistsError: The program before has left contributions to its rounds.
        """
        left = self.inherited.get(optimizer)
        if left is not None and left.contributions:
            raise AlreadyExistsError(
                f"{len(left.contributions)} contributions to rounds of optimizer "
                f"{name!r} wait on the parameter servers: give it rounds="
            )

    def add(self, optimizer: int, name: str, policy: Rounds) -> None:
        """Adds an optimizer that was created on the servers."""
        rounds = OptimizerRounds(optimizer, name, policy)
        self._rounds[optimizer] = rounds
        if (left := self.inherited.get(optimizer)) is not None:
            rounds.begin(left.closed.number + 1, left.contributions)

    def remove(self, optimizer: int) -> None:
        """Removes an optimizer that has no handle, if it is there."""
        self._rounds.pop(optimizer, None)

    def orders_to_drop(
        self, restored: Mapping[int, RestoredRounds]
    ) -> list[RoundOrder]:
        """Returns the orders to close open rounds without what waits for them."""
        orders = [
            RoundOrder(optimizer, left.closed.number + 1, 0, [])
            for optimizer, left in self.inherited.items()
            if left.contributions and optimizer not in self._rounds
        ]
        more = [each.order_to_drop(restored.get(each.optimizer)) for each in self]
        return [*orders, *[order for order in more if order is not None]]

    def dropped(self, order: RoundOrder) -> None:
        """Notes that all servers have dropped what waited."""
        # Also for an optimizer that is created later: it continues after the dropped
        # round.
        left = HeldRounds(order, [], ())
        self.inherited = {**self.inherited, order.optimizer: left}
        if order.optimizer in self._rounds:
            self._rounds[order.optimizer].begin(order.number + 1)

    def restart(self) -> None:
        """Begins again on servers that are empty."""
        self.inherited = {}
        for each in self:
            each.begin(0)

    def get(self, optimizer: int) -> OptimizerRounds | None:
        """Returns the rounds of the optimizer; None if it has none."""
        return self._rounds.get(optimizer)

    def is_open_below(self, step: int) -> bool:
        """Returns whether a contribution of a step below ``step`` waits, or a round is
        being applied. From any thread."""
        return any(each.is_closing or each.is_open_below(step) for each in self)

    @property
    def waiting(self) -> int:
        """Number of ended steps of which a contribution waits."""
        return len({step for each in self for step in each.steps})

    @property
    def contributors(self) -> set[int]:
        """The workers that have contributed to an open round."""
        return {worker for each in self for worker in each.contributors}

    def metrics(
        self, there: int, now: float, most: int | None = None
    ) -> dict[str, PlainTree]:
        """Returns the numbers of all rounds with ``there`` workers, by name of the
        optimizer; the second one of a name has its number behind it."""
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
    """Decides what a program continues that others have left on its servers.

    A contribution that every server has is one to the open round. One that only some
    have is of a step that was under way, and has no effect. The order to close a round
    may have reached some servers only: the others get it with the same members. So each
    contribution is in one round, on all servers, or in none.

    Args:
        held: For each server the rounds that it has, by number of the optimizer.

    Returns:
        By number of the optimizer the round that all servers have to close if they have
        not, and the contributions to the next one, in the order of their steps.
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
    """Returns the first step number above those of all contributions, the least that
    the next program may use."""
    taken = [
        given.step
        for each in held
        for rounds in each.values()
        for given in rounds.contributions
    ]
    return max(taken, default=0) + 1

"""Messages about rounds: contributions of steps, and the orders that close a round.

A *round* of an optimizer collects the gradients of several steps and applies them as
one update. Its *number* is how many rounds of the optimizer were closed before. The
coordinator alone decides which contributions are the *members* of a round, and orders
the same on every parameter server.
"""

import enum
from typing import ClassVar, NamedTuple

from ._schema import Arrays, message
from ._session import COORDINATOR, TRAINING, Repeat, read_answer, request
from ._step_messages import StepContribution
from ._variable_messages import Read, Update


class MergeRule(enum.IntEnum):
    """How the gradients of a round become one; w are the weights of its members."""

    MEAN = 0  # sum of w times gradient, over the sum of w
    SUM = 1  # sum of w times gradient
    RDA = 2  # mean of norms times the direction of the mean of directions, by leaf


class RoundNumber(NamedTuple):
    """A round of an optimizer."""

    optimizer: int
    number: int


class RoundMember(NamedTuple):
    """A contribution to a round: the run of a step, and its weight."""

    step: int
    attempt: int
    weight: float


class RoundOrder(NamedTuple):
    """A round of an optimizer, and how its members are merged: in this order, by a
    `MergeRule`."""

    optimizer: int
    number: int
    rule: int
    members: list[RoundMember]


@request(by=TRAINING, repeat=Repeat.SAFE)
class Contribute:
    """Keeps the gradients of a step for rounds. Answered by `Done`. The newest
    ``attempt`` of a step replaces earlier ones. Every server of the session gets it,
    those without a variable of the step without gradients, so a server that lacks a
    member of a round has lost it. Each update has the optimizer of a contribution."""

    kind: ClassVar = 118
    session: int
    contributions: list[StepContribution]
    updates: list[Update]
    arrays: Arrays


@request(by=COORDINATOR, repeat=Repeat.SAFE)
class CloseRound:
    """Applies the contributions of the members as one update of the optimizer; sent by
    a coordinator. Answered by `Done`, also if it was closed before. Without members it
    changes no variable, and may skip rounds.

    Drops contributions of steps below ``over`` that are neither members nor ``kept``
    for a later round. ``arrays`` are the operands that the optimizer computes from all
    merged gradients, if it needs any (`MergeOperands`).
    """

    kind: ClassVar = 119
    session: int
    order: RoundOrder
    kept: list[int]
    over: int
    arrays: Arrays


@request(by=TRAINING, repeat=Repeat.SAFE)
class PullMerged:
    """Reads the merged gradients of members of the open round, which is closed later;
    with ``trees`` also the trees of the optimizer. Answered by `Merged`."""

    kind: ClassVar = 120
    session: int
    order: RoundOrder
    trees: bool


@read_answer
class Merged:
    """Answers `PullMerged` with an update for each variable that has a gradient. The
    first arrays are ``trees``, as `BindOptimizer` has sent them."""

    kind: ClassVar = 121
    trees: int
    updates: list[Update]
    arrays: Arrays


@request(by=TRAINING, repeat=Repeat.SAFE)
class PullRound:
    """Reads as `PullRows`, when all rounds before those of ``after`` are closed.
    Answered by `PulledRound`; until then it waits without a limit."""

    kind: ClassVar = 122
    session: int
    after: list[RoundNumber]
    reads: list[Read]
    rows: list[int]
    arrays: Arrays


@read_answer
class PulledRound:
    """Answers `PullRound`, as `Pulled`. ``numbers``: for each of ``after`` the round
    that was open when the values were read."""

    kind: ClassVar = 123
    numbers: list[int]
    versions: list[int]
    arrays: Arrays
    clock: int


@request(by=COORDINATOR, repeat=Repeat.NEVER)
class MergeOperands:
    """Asks a worker for the operands that an optimizer computes from all merged
    gradients of a round (a global norm); sent by a coordinator, after the `PutCode` of
    the optimizer with the digest ``code``. Answered by `MergedOperands`."""

    kind: ClassVar = 124
    session: int
    order: RoundOrder
    code: bytes


@request(by=COORDINATOR, repeat=Repeat.SAFE)
class RestartWindows:
    """Has a worker drop what windows of an optimizer keep there, as values were
    restored, and count from round ``number``; sent by a coordinator. `StoreTensors`
    follow, with the arrays of a checkpoint, if it has some. It also drops what formats
    of gradients have left out so far; ``optimizer`` 0: only that. Answered by
    `Done`."""

    kind: ClassVar = 127
    session: int
    optimizer: int
    number: int


@message
class MergedOperands:
    """Answers `MergeOperands`."""

    kind: ClassVar = 125
    arrays: Arrays


@request(by=COORDINATOR, repeat=Repeat.SAFE)
class AskRounds:
    """Asks for the rounds of the first optimizer above ``after``; sent by a coordinator
    that continues the session of another program. Answered by `HeldRounds`."""

    kind: ClassVar = 68
    session: int
    after: int


@message
class HeldRounds:
    """The rounds of an optimizer on a server (0: there is none): the round that was
    closed last (-1: none was), ``arrays`` with its operands, and the contributions that
    wait. A backup gets those as `Contribute`."""

    kind: ClassVar = 126
    closed: RoundOrder
    contributions: list[StepContribution]
    arrays: Arrays


RoundMessage = (
    Contribute
    | CloseRound
    | PullMerged
    | Merged
    | PullRound
    | PulledRound
    | MergeOperands
    | RestartWindows
    | MergedOperands
    | AskRounds
    | HeldRounds
)

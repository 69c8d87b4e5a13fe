"""Messages about rounds of an optimizer: the gradients that steps contribute, and the
orders that close a round.

A *round* of an optimizer collects the gradients of several steps and applies them as
one update. Its *number* is how many rounds of the optimizer were closed before. The
coordinator alone decides which contributions are the *members* of a round, and sends
the same order to every parameter server.
"""

import enum
from typing import ClassVar, NamedTuple

from ._messages import Message, message
from ._schema import Arrays
from ._session import COORDINATOR, TRAINING, Repeat, read_answer, request
from ._step_messages import StepContribution
from ._variable_messages import Read, Update


class MergeRule(enum.IntEnum):
    """How the gradients of a round become one gradient; w are the weights of the
    members."""

    MEAN = 0  # sum of w times gradient, over the sum of w
    SUM = 1  # sum of w times gradient
    RDA = 2  # mean of norms times the direction of the mean of directions, by leaf


class RoundNumber(NamedTuple):
    """An optimizer and the number of one of its rounds."""

    optimizer: int
    number: int


class RoundMember(NamedTuple):
    """A contribution to a round: one run (``attempt``) of a step, and its weight."""

    step: int
    attempt: int
    weight: float


class RoundOrder(NamedTuple):
    """The order to merge a round of an optimizer: its members, to be merged in their
    order by a `MergeRule`."""

    optimizer: int
    number: int
    rule: int
    members: list[RoundMember]


@request(by=TRAINING, repeat=Repeat.SAFE)
class Contribute(Message):
    """Sends the gradients of a step, which the server keeps for rounds. Answered by
    `Done`. The newest ``attempt`` of a step replaces earlier ones. Every server of the
    session gets the message, a server without a variable of the step without gradients;
    so a server that lacks a member of a round has lost it. The optimizer of each update
    is one that the step contributes to."""

    kind: ClassVar = 118
    session: int
    contributions: list[StepContribution]
    updates: list[Update]
    arrays: Arrays


@request(by=COORDINATOR, repeat=Repeat.SAFE)
class CloseRound(Message):
    """Closes a round: applies the contributions of its members as one update of the
    optimizer; sent by a coordinator. Answered by `Done`, also if the round was closed
    before. An order without members changes no variable, and its number may skip
    rounds.

    The server drops contributions of steps below ``over`` that are neither members nor
    ``kept`` for a later round. ``arrays`` are the operands that the optimizer computes
    from all merged gradients, if it needs any (`MergeOperands`).
    """

    kind: ClassVar = 119
    session: int
    order: RoundOrder
    kept: list[int]
    over: int
    arrays: Arrays


@request(by=TRAINING, repeat=Repeat.SAFE)
class PullMerged(Message):
    """Reads the merged gradients of the members of a round that is still open; with
    ``trees`` also the trees of variables that the optimizer updates. Answered by
    `Merged`."""

    kind: ClassVar = 120
    session: int
    order: RoundOrder
    trees: bool


@read_answer
class Merged(Message):
    """Answers `PullMerged` with an update for each variable that has a gradient. The
    first ``trees`` arrays are trees of variables, as `BindOptimizer` has sent them."""

    kind: ClassVar = 121
    trees: int
    updates: list[Update]
    arrays: Arrays


@request(by=TRAINING, repeat=Repeat.SAFE)
class PullRound(Message):
    """Reads as `PullRows` does, once all rounds before those of ``after`` are closed.
    Waits for that without a limit. Answered by `PulledRound`."""

    kind: ClassVar = 122
    session: int
    after: list[RoundNumber]
    reads: list[Read]
    rows: list[int]
    arrays: Arrays


@read_answer
class PulledRound(Message):
    """Answers `PullRound` with the fields of `Pulled`. ``numbers``: for each optimizer
    of ``after`` the number of the round that was open when the values were read."""

    kind: ClassVar = 123
    numbers: list[int]
    versions: list[int]
    arrays: Arrays
    clock: int


@request(by=COORDINATOR, repeat=Repeat.NEVER)
class MergeOperands(Message):
    """Asks a worker for the operands that an optimizer computes from all merged
    gradients of a round (for example a global norm); sent by a coordinator, after the
    `PutCode` of the optimizer with the digest ``code``. Answered by
    `MergedOperands`."""

    kind: ClassVar = 124
    session: int
    order: RoundOrder
    code: bytes


@request(by=COORDINATOR, repeat=Repeat.SAFE)
class RestartWindows(Message):
    """Makes a worker drop the state that it keeps between windows (runs of several
    local steps) of an optimizer, and count from round ``number``, as variables were
    restored; sent by a coordinator. `StoreTensors` follow with that state, if the
    checkpoint has it. The worker also drops the remainders that lossy formats of
    gradients have not sent yet; ``optimizer`` 0: these alone. Answered by `Done`."""

    kind: ClassVar = 127
    session: int
    optimizer: int
    number: int


@message
class MergedOperands(Message):
    """Answers `MergeOperands` with the computed operands."""

    kind: ClassVar = 125
    arrays: Arrays


@request(by=COORDINATOR, repeat=Repeat.SAFE)
class AskRounds(Message):
    """Asks a server for the rounds of the optimizer with the lowest number above
    ``after``; sent by a coordinator that continues the session of another program.
    Answered by `HeldRounds`."""

    kind: ClassVar = 68
    session: int
    after: int


@message
class HeldRounds(Message):
    """Answers `AskRounds`: the rounds of an optimizer on a server (0: no optimizer is
    left). The fields are the round that was closed last (-1: none was), its operands in
    ``arrays``, and the contributions that wait for a round. A backup gets these as
    `Contribute`."""

    kind: ClassVar = 126
    closed: RoundOrder
    contributions: list[StepContribution]
    arrays: Arrays

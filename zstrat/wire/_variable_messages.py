"""What coordinators and workers say to a parameter server about variables.

Variables are created, read, and pushed to; a push applies as a whole and at most once.
"""

import enum
from dataclasses import field
from typing import ClassVar, NamedTuple

from ._schema import Arrays, PlainTree, message


class UpdateOp(enum.IntEnum):
    """What a push does to a variable; the operands are the update's arrays in order."""

    ASSIGN = 0  # value
    ADD = 1  # delta
    SUB = 2  # delta
    SCATTER_ADD = 3  # indices [n], rows [n, ...]: duplicates accumulate
    SCATTER_SUB = 4
    SCATTER_MUL = 5
    SCATTER_DIV = 6
    SCATTER_MIN = 7
    SCATTER_MAX = 8
    SCATTER_UPDATE = 9  # of duplicate indices the last one wins
    OPTIMIZE = 10  # gradient, applied by the update's optimizer
    OPTIMIZE_ROWS = 11  # indices [n], gradient rows [n, ...], applied by the optimizer
    OPERANDS = 12  # what the optimizer makes of all gradients: it changes no variable


class VariableEntry(NamedTuple):
    """A variable to create, under a ``key`` that is unique in the session. Its initial
    value is the array at the same place in the message."""

    key: int
    name: str
    trainable: bool
    sharded: bool


@message
class CreateVariables:
    """Creates all or none; answered by `Done`. The same key, name, shape and dtype
    again is no error and keeps the value that is there."""

    kind: ClassVar = 32
    session: int
    variables: list[VariableEntry]
    arrays: Arrays


class InitialEntry(NamedTuple):
    """A variable whose value is made where it will live: ``shape`` of ``whole``, from
    ``offset`` on (one number per axis each)."""

    key: int
    name: str
    trainable: bool
    sharded: bool
    dtype: str
    shape: list[int]
    whole: list[int]
    offset: list[int]


@message
class InitializeVariables:
    """Creates all or none, as `CreateVariables`, from one shipped initializer:
    ``(shape, dtype, partition_shape=, partition_offset=) -> array``. Taken from a
    coordinator alone."""

    kind: ClassVar = 39
    session: int
    variables: list[InitialEntry]
    code: bytes


@message
class DeleteVariables:
    """Frees the variables of these keys, and their slots. Answered by `Done`."""

    kind: ClassVar = 33
    session: int
    keys: list[int]


@message
class CreateOptimizer:
    """``code`` is a shipped optax transformation: taken from a coordinator alone."""

    kind: ClassVar = 34
    session: int
    optimizer: int
    name: str
    code: bytes


@message
class BindOptimizer:
    """Which variables an optimizer moves, and what their tree looks like. One array of
    bytes: data, never code, so that whoever applies gradients may send it. Answered by
    `Done`. The same again is no error."""

    kind: ClassVar = 66
    session: int
    optimizer: int
    arrays: Arrays


@message
class Withdraw:
    """A creation has failed, and its numbers will be given to others: drops what is
    there of these variables and optimizers. Answered by `Done`, also if nothing is."""

    kind: ClassVar = 65
    session: int
    keys: list[int]
    optimizers: list[int]


class Read(NamedTuple):
    """One variable of a `Pull`. ``known`` is the version of it that the reader has,
    whose value need not be sent again; -1 for none."""

    key: int
    known: int


@message
class Pull:
    """Reads several variables; answered by `Pulled`. Each one is untorn; together they
    are not a snapshot."""

    kind: ClassVar = 35
    session: int
    reads: list[Read]


@message
class PullRows:
    """`Pull`, and rows of variables besides; answered by `Pulled`.

    ``rows`` are the keys of the variables of which rows are read; the array at its
    place holds their indices, ``[n]`` integers of the variable's first axis.
    """

    kind: ClassVar = 61
    session: int
    reads: list[Read]
    rows: list[int]
    arrays: Arrays


@message
class Pulled:
    """One version per read, in order. ``arrays`` holds the values of those reads whose
    version differs from the one that the reader knew, in order, and behind them the
    rows ``[n, ...]`` for each of `PullRows.rows`. ``clock`` counts the pushes that the
    server had applied by then, of whatever variables: two of them say how many came in
    between. It says nothing of the answer, and takes no part in comparing."""

    kind: ClassVar = 36
    versions: list[int]
    arrays: Arrays
    clock: int = field(default=0, compare=False)


class Update(NamedTuple):
    """One change of one variable. ``operands`` is how many of the push's arrays belong
    to it.

    ``optimizer`` is 0 unless ``op`` is one of the OPTIMIZE kinds, or OPERANDS. Such an
    update changes nothing by itself: all updates of the same optimizer that follow in
    the push share its arrays, and its ``key`` may be that of any variable.
    """

    key: int
    op: int
    optimizer: int
    operands: int


@message
class Push:
    """Applies all the updates or none; answered by `Pushed`.

    ``step`` names the closure: a ps applies the pushes of ``(session, step, part)`` at
    most once. ``step`` -1: nobody's, applied as often as it is sent.

    ``writer``: 0 for the closures of the session. Else it is the incarnation of the
    process that sends this, and ``step`` the number of an update of its own: all of
    its updates below ``low_water`` are over, which says nothing about anybody else's.
    """

    kind: ClassVar = 37
    session: int
    step: int
    part: int
    low_water: int
    updates: list[Update]
    arrays: Arrays
    writer: int = 0


@message
class RaiseMark:
    """All closures below ``low_water`` are over: pushes of them that still come are
    duplicates, and none has to be remembered. A notice, from a coordinator alone."""

    kind: ClassVar = 71
    session: int
    low_water: int


@message
class PushPart:
    """`Push` of an eager step, whose parts are numbered in the order of its run.

    ``names`` say where in the step each update was made, and what it does; ``attempt``
    is that of the run. A part that differs from one that was applied under its number
    is refused, and so is one of a run that is not the newest.
    """

    kind: ClassVar = 100
    session: int
    step: int
    part: int
    low_water: int
    attempt: int
    names: list[str]
    updates: list[Update]
    arrays: Arrays


@message
class AskParts:
    """An eager step is about to run again: what of it was applied, from the part with
    the number ``first`` on? Answered by `AppliedParts`; what runs before ``attempt``
    push from then on is refused."""

    kind: ClassVar = 101
    session: int
    step: int
    attempt: int
    first: int


class PartEntry(NamedTuple):
    """A part of an eager step that was applied; ``names`` as in `PushPart`."""

    part: int
    names: list[str]


@message
class AppliedParts:
    """The parts that one server has applied, in order. ``more`` is the number from
    which to ask on, as one answer may not hold all; 0 if it does."""

    kind: ClassVar = 102
    parts: list[PartEntry]
    more: int


class StepRun(NamedTuple):
    """Steps ``[first, end)``."""

    first: int
    end: int


@message
class Fence:
    """All steps below ``low_water``, and those of ``over``, are over, whoever still
    works on one: what they push from now on is answered as a duplicate. Answered by
    `Fenced` when what they had pushed before is done. Taken from a coordinator alone.
    """

    kind: ClassVar = 103
    session: int
    low_water: int
    over: list[StepRun]
    asked: list[int]


@message
class Fenced:
    """Which of the steps that were ``asked`` about have applied something here."""

    kind: ClassVar = 104
    applied: list[int]


@message
class Pushed:
    """``applied`` is false for a duplicate; versions are those after the push, and
    ``clock``, as in `Pulled`, counts it, too."""

    kind: ClassVar = 38
    applied: bool
    versions: list[int]
    clock: int = field(default=0, compare=False)


@message
class Exchange:
    """`Push`, and behind it `PullRows`, which reads what the push wrote: what training
    needs of a ps per step, in one message. Answered by `Exchanged`.

    ``arrays``: the operands of the updates in order, then the indices for each of
    ``rows``.
    """

    kind: ClassVar = 62
    session: int
    step: int
    part: int
    low_water: int
    updates: list[Update]
    reads: list[Read]
    rows: list[int]
    arrays: Arrays


@message
class Exchanged:
    """``applied`` as in `Pushed`; ``versions``, ``arrays``, ``clock`` as in `Pulled`.

    Either part may be refused without the other: its error is `errors.to_wire`, and
    None if it was not. Without an answer to the pull, versions and arrays are empty.
    """

    kind: ClassVar = 63
    applied: bool
    push_error: PlainTree
    pull_error: PlainTree
    versions: list[int]
    arrays: Arrays
    clock: int = field(default=0, compare=False)


VariableMessage = (
    CreateVariables
    | InitializeVariables
    | DeleteVariables
    | CreateOptimizer
    | BindOptimizer
    | Withdraw
    | Pull
    | PullRows
    | Pulled
    | Push
    | Pushed
    | PushPart
    | AskParts
    | AppliedParts
    | Fence
    | Fenced
    | RaiseMark
    | Exchange
    | Exchanged
)

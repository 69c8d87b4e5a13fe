"""Messages from coordinators and workers to a parameter server about variables.

A *push* sends updates of variables; the server applies it as a whole and at most once.
A *pull* reads variables. Keys, versions and slots (optimizer states) belong to
variables. A *table of any id* has rows under ids of any int64 value, which are created
(born) at first use; its ids are divided into buckets.
"""

import enum
from dataclasses import field
from typing import ClassVar, Final, NamedTuple

from ._messages import Message, message
from ._schema import Arrays, PlainTree
from ._session import COORDINATOR, READING, TRAINING, Repeat, read_answer, request


class UpdateOp(enum.IntEnum):
    """What an update of a push does to its variable; the operands are the update's
    arrays in order."""

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
    REMOVE_ROWS = 13  # ids [n] of a table of any id, whose rows are dropped
    EVICT_ROWS = 14  # rule, limit, first bucket, end: float64 [4], `EvictionRule`
    FORGET_REMOVED = 15  # cut: int64 [1], of a table; which ids were removed up to it
    NOTE_TIME = 16  # now, age: float64 [2], seconds: a time for `EvictionRule.AGE`
    OPTIMIZE_SET = 17  # keys: int64 [n]; gradients of these small variables, in order
    # and side by side, [elements]: as OPTIMIZE of each (`in_sets`)


class EvictionRule(enum.IntEnum):
    """By what limit `UpdateOp.EVICT_ROWS` chooses the rows of some buckets of a table
    that it removes."""

    UNUSED = 0  # without a gradient in the last pushes to the table, so many
    NORM = 1  # whose Euclidean norm is less
    RECENT = 2  # all but so many that had a gradient last
    FREQUENT = 3  # all but so many that had the most gradients
    WAITING = 4  # counts of ids without rows: all but so many that are largest
    AGE = 5  # without a gradient since a time, in seconds, that was noted by then


class Codec(enum.IntEnum):
    """The formats in which a gradient may travel; `zstrat.codecs` implements them."""

    NONE = 0
    BFLOAT16 = 1
    INT8 = 2
    INT4 = 3
    E3M0 = 4
    TOP_K = 5


CODED: Final = 256
"""Factor of the `Codec` in the ``op`` of an update, which is its `UpdateOp` plus this
times the gradient's `Codec`."""


class VariableEntry(NamedTuple):
    """A variable to create, under a ``key`` that is unique in the session. Its initial
    value is the array at the same position in the message."""

    key: int
    name: str
    trainable: bool
    sharded: bool


@request(by=COORDINATOR, repeat=Repeat.SAFE)
class CreateVariables(Message):
    """Creates all variables of the message or none. Answered by `Done`. Creating a
    variable of the same key, name, shape and dtype again is allowed and keeps its
    value."""

    kind: ClassVar = 32
    session: int
    variables: list[VariableEntry]
    arrays: Arrays


class InitialEntry(NamedTuple):
    """A variable whose initial value the server computes: the part of the shape
    ``shape`` from ``offset`` in an array of the shape ``whole`` (one number per axis
    each)."""

    key: int
    name: str
    trainable: bool
    sharded: bool
    dtype: str
    shape: list[int]
    whole: list[int]
    offset: list[int]


@request(by=COORDINATOR, repeat=Repeat.SAFE)
class InitializeVariables(Message):
    """Creates all variables or none, as `CreateVariables`, from pickled code of an
    initializer: ``(shape, dtype, partition_shape=, partition_offset=) -> array``.
    Answered by `Done`."""

    kind: ClassVar = 39
    session: int
    variables: list[InitialEntry]
    code: bytes


TABLE_ROW_BYTES: Final = 2**16
"""Most bytes of a row of a table of any id: a 16th of what an undo log of a server
takes, so that rows of its slots, which may be of a wider dtype, are not too long
either."""


class TableEntry(NamedTuple):
    """A part of a table of any id to create, without rows at first. ``row`` is the
    shape of a row; ``seed``, from 0 to 2**63 - 1, and an id give the row's first value.

    ``gradients``: how many pushes must have a gradient for an id until the id is born;
    gradients before that are dropped. ``chance``: the share of all ids that are born at
    all. Updates that are not those of an optimizer create any id at once. ``tracks``:
    the server notes when rows had gradients, and how many, for rules of eviction.
    ``follows``: the server notes which rows have changed since any *cut*, the number of
    the last change of the part at some moment (each session counts on from another
    number), and which ids were removed. ``sketch``: the server counts gradients
    approximately, in so many bytes for each bucket; 0: exactly."""

    key: int
    name: str
    trainable: bool
    dtype: str
    row: list[int]
    seed: int
    gradients: int = 1
    chance: float = 1.0
    tracks: bool = False
    follows: bool = False
    sketch: int = 0


@request(by=COORDINATOR, repeat=Repeat.SAFE)
class CreateTables(Message):
    """Creates all tables of any id of the message or none, as `CreateVariables` does.
    Pickled code of an initializer (`zstrat.initializers.Initializer`) computes the
    first values of rows. Answered by `Done`.

    Reads and updates of rows of a table have int64 ids in place of indices. The ids of
    `PullRows` and of `UpdateOp.OPTIMIZE_ROWS` are distinct, and their hashes
    (`zstrat.ids.hashes_of`) ascend.
    """

    kind: ClassVar = 69
    session: int
    tables: list[TableEntry]
    code: bytes


@request(by=READING, repeat=Repeat.SAFE)
class PullTable(Message):
    """Reads the rows of a table of any id whose ids are in the buckets from ``first``
    to before ``last`` (`zstrat.ids.buckets_of`). Answered by `Pulled`, with the table's
    version and two arrays: ids ``[n]``, sorted by bucket and then by id, and rows ``[n,
    ...]``.

    ``since`` of 0 or more: a cut of the table, which must have been created to follow
    its changes (`TableEntry`). The answer has only the rows that have changed since the
    cut, and two more arrays: ids that were removed since the cut, int64 ``[m]``, and
    the present cut, int64 ``[1]``.

    ``arrays``: empty, or distinct ids to read in place of buckets, int64 ``[k]``. The
    answer has those ids that have rows, in their order."""

    kind: ClassVar = 70
    session: int
    key: int
    first: int
    last: int
    since: int = -1
    arrays: Arrays = ()


@request(by=READING, repeat=Repeat.SAFE)
class AskTables(Message):
    """Asks how large tables of any id are. Answered by `TableSizes`."""

    kind: ClassVar = 130
    session: int
    keys: list[int]


@read_answer
class TableSizes(Message):
    """Answers `AskTables`, with one number per table in each field: rows; bytes of
    rows, ids, index and slots; rows that were born, and removed or evicted, since the
    server has the table; ids that wait to be born; gradients of rows that were dropped,
    as their ids were not born yet; changes of rows, 0 if the server does not note
    them."""

    kind: ClassVar = 131
    rows: list[int]
    nbytes: list[int]
    births: list[int]
    removed: list[int]
    waiting: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)


# A second one would find nothing to delete: a client repeats it with ``again``.
@request(by=COORDINATOR, repeat=Repeat.NEVER)
class DeleteVariables(Message):
    """Frees the variables of these keys, and their slots. Answered by `Done`. All must
    exist, unless the request is sent ``again``: the first one may have been carried
    out."""

    kind: ClassVar = 33
    session: int
    keys: list[int]
    again: bool = False


@request(by=COORDINATOR, repeat=Repeat.SAFE)
class CreateOptimizer(Message):
    """Creates an optimizer. ``code`` is a pickled optax transformation. Answered by
    `Done`."""

    kind: ClassVar = 34
    session: int
    optimizer: int
    name: str
    code: bytes


@request(by=TRAINING, repeat=Repeat.SAFE)
class BindOptimizer(Message):
    """Sends the tree (nested structure) of the variables that an optimizer updates, as
    one array of bytes. The bytes are data, never code, so every task that applies
    gradients may send them. Answered by `Done`. Sending the same tree again is
    allowed."""

    kind: ClassVar = 66
    session: int
    optimizer: int
    arrays: Arrays


@request(by=COORDINATOR, repeat=Repeat.SAFE)
class Withdraw(Message):
    """Drops variables and optimizers after their creation failed, as their numbers will
    be reused. Answered by `Done`, even if they do not exist."""

    kind: ClassVar = 65
    session: int
    keys: list[int]
    optimizers: list[int]


class Read(NamedTuple):
    """One variable of a `Pull`. ``known`` is the version that the reader has already,
    whose value is not sent again; -1: it has none. ``codec``: a `Codec` in which a
    float32 value is sent, NONE or BFLOAT16."""

    key: int
    known: int
    codec: int = 0


@request(by=READING, repeat=Repeat.SAFE)
class Pull(Message):
    """Reads several variables. Answered by `Pulled`. Each value is consistent; together
    they are not a snapshot."""

    kind: ClassVar = 35
    session: int
    reads: list[Read]


@request(by=READING, repeat=Repeat.SAFE)
class PullRows(Message):
    """Reads several variables as `Pull` does, rows of other variables, and sets of
    small variables. Answered by `Pulled`.

    ``rows`` are the keys of the variables whose rows are read; the array at the same
    position has the indices, ``[n]`` integers of the variable's first axis.

    ``sets`` has one item for each set, which is variables of one dtype that are read as
    one array: the version of the set that the reader has, -1 for none. The array at the
    same position after those of ``rows`` has the keys of the variables, int64 ``[n]``.
    The version of a set is the sum of the versions of its variables. As no version ever
    falls, equal sums mean that no variable of the set has changed.
    """

    kind: ClassVar = 61
    session: int
    reads: list[Read]
    rows: list[int]
    arrays: Arrays
    sets: list[int] = field(default_factory=list)


@read_answer
class Pulled(Message):
    """Answers a pull: one version per read, in order, and one per set. ``arrays`` has,
    in order, the values of the reads and sets whose version differs from the known one
    (of a set the array ``[elements]``), and then the rows ``[n, ...]`` for each of
    `PullRows.rows`. ``clock`` is the number of pushes to any variables that the server
    has applied: the difference of two clocks is the number of pushes in between.
    Comparisons of messages ignore ``clock``."""

    kind: ClassVar = 36
    versions: list[int]
    arrays: Arrays
    clock: int = field(default=0, compare=False)


class Update(NamedTuple):
    """One change of one variable. ``op`` is an `UpdateOp`, with the `Codec` of the
    gradient (`CODED`). ``operands`` is the number of its arrays in the push.

    The ``key`` of OPTIMIZE_SET is the first key of the set.

    ``optimizer`` is 0 unless ``op`` is one of the OPTIMIZE kinds, or OPERANDS. Such an
    update changes nothing by itself: all updates of the same optimizer that follow in
    the push share its arrays, and its ``key`` may be that of any variable.
    """

    key: int
    op: int
    optimizer: int
    operands: int


@request(by=TRAINING, repeat=Repeat.BY_STEP)
class Push(Message):
    """Applies all its updates or none. Answered by `Pushed`.

    ``step`` is the number of the closure: a ps applies the push of ``(session, step,
    part)`` at most once. ``step`` -1: the ps applies the push as often as it is sent.

    ``writer``: 0 for closures of the session. Otherwise the incarnation of the sending
    process, which pushes outside of closures: ``step`` is then a number that the
    process gives to the push, and all its pushes below ``low_water`` have ended.

    ``leases``: `LEASE` structures, the ranges of leased datasets that are done once the
    push is applied. A range of no examples comes first, and makes the server forget all
    ranges of its dataset that were done before.
    """

    kind: ClassVar = 37
    session: int
    step: int
    part: int
    low_water: int
    updates: list[Update]
    arrays: Arrays
    writer: int = 0
    leases: bytes = b""


@request(by=COORDINATOR, repeat=Repeat.NEVER)
class RaiseMark(Message):
    """Notifies a server that all closures below ``low_water`` have ended: it treats
    later pushes of these closures as duplicates, and need not remember them one by one.
    A notice."""

    kind: ClassVar = 71
    session: int
    low_water: int


@request(by=TRAINING, repeat=Repeat.BY_STEP)
class PushPart(Message):
    """Applies a part of an eager step (which runs as Python and may update several
    times), as `Push` does; the parts of a step are numbered in their order. Answered by
    `Pushed`.

    ``names`` describe each update and its line in the step's code; ``attempt`` is the
    number of the run. Refused if a different part was applied under this number, or if
    the run is not the newest.
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
    leases: bytes = b""


@request(by=TRAINING, repeat=Repeat.SAFE)
class AskParts(Message):
    """Asks which parts of an eager step were applied, from part ``first``, before the
    step runs again. Answered by `AppliedParts`. From then on the server refuses pushes
    of runs before ``attempt``."""

    kind: ClassVar = 101
    session: int
    step: int
    attempt: int
    first: int


class PartEntry(NamedTuple):
    """An applied part of an eager step; ``names`` as in `PushPart`."""

    part: int
    names: list[str]


@message
class AppliedParts(Message):
    """Answers `AskParts`: the parts that a server has applied, in order. ``more`` is
    the part from which to ask again, if one answer cannot have all parts; else 0."""

    kind: ClassVar = 102
    parts: list[PartEntry]
    more: int


@request(by=COORDINATOR, repeat=Repeat.SAFE)
class AskLeases(Message):
    """Asks which ranges of leased datasets are done by the pushes that the server has
    applied so far. Answered by `AppliedLeases`."""

    kind: ClassVar = 129
    session: int


@message
class AppliedLeases(Message):
    """Answers `AskLeases` with `LEASE` structures as in ``leases`` of `Push`, in one
    array uint8 [bytes]."""

    kind: ClassVar = 128
    arrays: Arrays


class StepRun(NamedTuple):
    """The steps from ``first`` to before ``end``."""

    first: int
    end: int


@request(by=COORDINATOR, repeat=Repeat.SAFE)
class Fence(Message):
    """Makes a server end all steps below ``low_water``, and the steps of ``over``, even
    if a worker still runs one: the server answers their later pushes as duplicates.
    Answered by `Fenced` once their earlier pushes are done."""

    kind: ClassVar = 103
    session: int
    low_water: int
    over: list[StepRun]
    asked: list[int]


@message
class Fenced(Message):
    """Answers `Fence` with those steps of ``asked`` that have applied a push on this
    server."""

    kind: ClassVar = 104
    applied: list[int]


@message
class Pushed(Message):
    """Answers a push. ``applied`` is false for a duplicate; versions are those after
    the push. ``clock`` is as in `Pulled`, and counts this push, too."""

    kind: ClassVar = 38
    applied: bool
    versions: list[int]
    clock: int = field(default=0, compare=False)


@request(by=TRAINING, repeat=Repeat.BY_STEP)
class Exchange(Message):
    """Applies a push, then reads as `PullRows` does: one request for all that a
    training step needs from a ps. Answered by `Exchanged`.

    ``arrays``: the operands of the updates in order, then the indices for each of
    ``rows``, then the keys for each of ``sets``.
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
    leases: bytes = b""
    sets: list[int] = field(default_factory=list)


@message
class Exchanged(Message):
    """Answers `Exchange`. ``applied`` as in `Pushed`; ``versions``, ``arrays`` and
    ``clock`` as in `Pulled`.

    The push and the pull may fail separately: each has an error (`errors.to_wire`) or
    None. If the pull fails, versions and arrays are empty.
    """

    kind: ClassVar = 63
    applied: bool
    push_error: PlainTree
    pull_error: PlainTree
    versions: list[int]
    arrays: Arrays
    clock: int = field(default=0, compare=False)

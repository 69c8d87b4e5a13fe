"""Messages from a coordinator to a parameter server to save and to restore. A worker
takes them for what windows of an optimizer keep there.

A snapshot has the values and slots of one moment. It is pinned, then written to a file
or read, and released. Loading reads values and slots from files or from messages.
"""

from dataclasses import field
from typing import ClassVar, NamedTuple

from ._schema import Arrays, message
from ._session import COORDINATOR, Repeat, request


class TensorEntry(NamedTuple):
    """One tensor of a snapshot: the value of a variable (``optimizer`` 0, ``leaf``
    ""), or a leaf of an optimizer's state beside it, named by its path. A table of any
    id has what is known of its ids (``optimizer`` 0, ``leaf`` ".ids" and so on) after
    its value.

    ``rows``: its first axis is the variable's own.
    """

    key: int
    optimizer: int
    leaf: str
    dtype: str
    shape: list[int]
    rows: bool


@request(by=COORDINATOR, repeat=Repeat.NEVER)
class PinSnapshot:
    """Keeps the present values and slots of variables until `ReleaseSnapshot`, while
    updates continue. ``optimizers``: optimizers with the slots. Answered by
    `SnapshotPinned`.

    ``first`` above 0 asks for more tensors of an existing snapshot, from that index:
    thousands do not fit into one answer.

    ``since``, one number for each key, if there are any: of a table of any id that
    ``follows`` (`TableEntry`), the rows that have changed since a cut, and which ids
    were removed (".gone"); -1: all of it. The cut of the snapshot is ".cut"[0]."""

    kind: ClassVar = 40
    session: int
    snapshot: int
    keys: list[int]
    optimizers: list[int]
    first: int = 0
    since: list[int] = field(default_factory=list)


@message
class SnapshotPinned:
    """The tensors of a snapshot from index ``first``, and their total number."""

    kind: ClassVar = 41
    tensors: list[TensorEntry]
    total: int


@request(by=COORDINATOR, repeat=Repeat.NEVER)
class WriteSnapshot:
    """Writes tensors of a snapshot (by index in `SnapshotPinned`) to the new file
    ``path`` under these names, and syncs it. Answered by `SnapshotWritten`."""

    kind: ClassVar = 42
    session: int
    snapshot: int
    path: str
    tensors: list[int]
    names: list[str]


@message
class SnapshotWritten:
    """A snapshot was written. Digests in the order of the names; ``size`` of the file
    in bytes."""

    kind: ClassVar = 43
    digests: list[str]
    size: int


@request(by=COORDINATOR, repeat=Repeat.NEVER)
class ReadSnapshot:
    """Asks for ``size`` bytes of a tensor of a snapshot; answered by `SnapshotPart`."""

    kind: ClassVar = 44
    session: int
    snapshot: int
    tensor: int
    offset: int
    size: int


@message
class SnapshotPart:
    """Answers `ReadSnapshot`: one array of bytes."""

    kind: ClassVar = 45
    arrays: Arrays


@request(by=COORDINATOR, repeat=Repeat.NEVER)
class ReleaseSnapshot:
    """Drops a snapshot, with the old values that it keeps. Answered by `Done`."""

    kind: ClassVar = 46
    session: int
    snapshot: int


class LoadEntry(NamedTuple):
    """Loads rows ``[start, stop)`` of tensor ``name`` in the file ``path`` into the
    rows from ``at`` of a variable's value or slot (as in `TensorEntry`). A tensor
    without the variable's rows is loaded whole (``start``, ``stop`` and ``at`` are 0).
    ``name`` "": only checks that the file exists. ``path`` "" with an optimizer: resets
    the optimizer's state of the variable.

    ``rows``: the slot has the variable's rows. Needed while the server does not know
    the state of the optimizer yet."""

    key: int
    optimizer: int
    leaf: str
    path: str
    name: str
    start: int
    stop: int
    at: int
    rows: bool = False


@request(by=COORDINATOR, repeat=Repeat.NEVER)
class LoadTensors:
    """Loads values and slots from files that the ps can read. Answered by `Done`."""

    kind: ClassVar = 47
    session: int
    entries: list[LoadEntry]


class StoreEntry(NamedTuple):
    """The destination of one array: the rows from ``at``, as in `LoadEntry`."""

    key: int
    optimizer: int
    leaf: str
    at: int
    rows: bool = False


@request(by=COORDINATOR, repeat=Repeat.NEVER)
class StoreTensors:
    """Sends values and slots to store. Answered by `Done`."""

    kind: ClassVar = 60
    session: int
    entries: list[StoreEntry]
    arrays: Arrays


class TableLeaf(NamedTuple):
    """What is kept beside the ids of a table of any id: the value (``optimizer`` 0,
    ``leaf`` ""), or a slot. ``rows``: it has a row for each id."""

    optimizer: int
    leaf: str
    rows: bool


class TableTensor(NamedTuple):
    """A tensor ``name`` in the file ``path`` with a row for each id of the tensor
    ``ids`` in the same file; ``ids`` "": a slot without rows."""

    optimizer: int
    leaf: str
    path: str
    name: str
    ids: str


@request(by=COORDINATOR, repeat=Repeat.NEVER)
class LoadTable:
    """Loads rows of a table of any id, with their ids and slots, from files that the ps
    can read: those whose ids are in the buckets from ``first`` to before ``last``
    (`zstrat.ids.buckets_of`). Answered by `Done`.

    ``replaces``: the table has these rows alone afterwards, and these slots; if that
    fails, it is as before. Otherwise rows of the same ids are replaced."""

    kind: ClassVar = 132
    session: int
    key: int
    first: int
    last: int
    replaces: bool
    tensors: list[TableTensor]


@request(by=COORDINATOR, repeat=Repeat.NEVER)
class StoreTable:
    """Sends rows of a table of any id to store, as `LoadTable` of all buckets. The
    arrays are ids, int64 ``[n]``, and one for each leaf. Answered by `Done`."""

    kind: ClassVar = 133
    session: int
    key: int
    replaces: bool
    leaves: list[TableLeaf]
    arrays: Arrays


SnapshotMessage = (
    PinSnapshot
    | SnapshotPinned
    | WriteSnapshot
    | SnapshotWritten
    | ReadSnapshot
    | SnapshotPart
    | ReleaseSnapshot
    | LoadTensors
    | StoreTensors
    | LoadTable
    | StoreTable
)

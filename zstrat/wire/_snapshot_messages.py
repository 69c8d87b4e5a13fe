"""Messages from a coordinator to a parameter server to save and restore variables. A
worker accepts them for the state that it keeps between windows (runs of several local
steps) of an optimizer.

A snapshot has the values and slots (optimizer states) of one moment. A server pins it,
writes it to a file or sends it, and releases it. Loading takes values and slots from
files or from messages. A *table of any id* has rows under ids of any int64 value, which
are created at first use.
"""

from dataclasses import field
from typing import ClassVar, NamedTuple

from ._messages import Message, message
from ._schema import Arrays
from ._session import COORDINATOR, Repeat, request


class TensorEntry(NamedTuple):
    """One tensor of a snapshot: the value of a variable (``optimizer`` 0, ``leaf`` ""),
    or a leaf of an optimizer's state of the variable, named by its path. After the
    value of a table of any id come tensors about its ids (``optimizer`` 0, ``leaf``
    ".ids" and so on).

    ``rows``: the tensor's first axis is that of the variable.
    """

    key: int
    optimizer: int
    leaf: str
    dtype: str
    shape: list[int]
    rows: bool


@request(by=COORDINATOR, repeat=Repeat.NEVER)
class PinSnapshot(Message):
    """Keeps the present values and slots of variables until `ReleaseSnapshot`, while
    updates continue. ``optimizers``: optimizers whose slots are kept, too. Answered by
    `SnapshotPinned`.

    ``first`` above 0 asks for the list of more tensors of an existing snapshot, from
    that index: thousands do not fit into one answer.

    ``since``: empty, or one cut (number of the last change at some moment) for each
    key. Of a table of any id that ``follows`` changes (`TableEntry`), the snapshot then
    has only the rows that have changed since the cut, and the ids that were removed
    (".gone"); -1: the whole table. The cut of the snapshot itself is ".cut"[0]."""

    kind: ClassVar = 40
    session: int
    snapshot: int
    keys: list[int]
    optimizers: list[int]
    first: int = 0
    since: list[int] = field(default_factory=list)


@message
class SnapshotPinned(Message):
    """Answers `PinSnapshot`: the tensors of a snapshot from index ``first``, and their
    total number."""

    kind: ClassVar = 41
    tensors: list[TensorEntry]
    total: int


@request(by=COORDINATOR, repeat=Repeat.NEVER)
class WriteSnapshot(Message):
    """Writes tensors of a snapshot (by index in `SnapshotPinned`) to the new file
    ``path`` under ``names``, and syncs the file. Answered by `SnapshotWritten`."""

    kind: ClassVar = 42
    session: int
    snapshot: int
    path: str
    tensors: list[int]
    names: list[str]


@message
class SnapshotWritten(Message):
    """Answers `WriteSnapshot`: the digest of each tensor in the order of the names, and
    the ``size`` of the file in bytes."""

    kind: ClassVar = 43
    digests: list[str]
    size: int


@request(by=COORDINATOR, repeat=Repeat.NEVER)
class ReadSnapshot(Message):
    """Asks for ``size`` bytes of a tensor of a snapshot. Answered by `SnapshotPart`."""

    kind: ClassVar = 44
    session: int
    snapshot: int
    tensor: int
    offset: int
    size: int


@message
class SnapshotPart(Message):
    """Answers `ReadSnapshot` with one array of bytes."""

    kind: ClassVar = 45
    arrays: Arrays


@request(by=COORDINATOR, repeat=Repeat.NEVER)
class ReleaseSnapshot(Message):
    """Drops a snapshot, with the old values that it keeps. Answered by `Done`."""

    kind: ClassVar = 46
    session: int
    snapshot: int


class LoadEntry(NamedTuple):
    """Rows to load: ``[start, stop)`` of tensor ``name`` in the file ``path``, into the
    rows from ``at`` of a variable's value or slot (as in `TensorEntry`). A tensor
    without the variable's rows is loaded whole (``start``, ``stop`` and ``at`` are 0).
    ``name`` "": the server only checks that the file exists. ``path`` "" with an
    optimizer: the server resets the optimizer's state of the variable.

    ``rows``: the slot has a row for each row of the variable. The server needs this
    while it does not know the state of the optimizer yet."""

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
class LoadTensors(Message):
    """Loads values and slots from files that the ps can read. Answered by `Done`."""

    kind: ClassVar = 47
    session: int
    entries: list[LoadEntry]


class StoreEntry(NamedTuple):
    """The destination of one array of `StoreTensors`: the rows from ``at``, as in
    `LoadEntry`."""

    key: int
    optimizer: int
    leaf: str
    at: int
    rows: bool = False


@request(by=COORDINATOR, repeat=Repeat.NEVER)
class StoreTensors(Message):
    """Sends values and slots, which the receiver stores. Answered by `Done`."""

    kind: ClassVar = 60
    session: int
    entries: list[StoreEntry]
    arrays: Arrays


class TableLeaf(NamedTuple):
    """A tensor of a table of any id: its value (``optimizer`` 0, ``leaf`` ""), or a
    slot. ``rows``: the tensor has a row for each id."""

    optimizer: int
    leaf: str
    rows: bool


class TableTensor(NamedTuple):
    """A tensor of a table in a file: ``name`` in the file ``path`` has a row for each
    id of the tensor ``ids`` in the same file; ``ids`` "": a slot without rows."""

    optimizer: int
    leaf: str
    path: str
    name: str
    ids: str


@request(by=COORDINATOR, repeat=Repeat.NEVER)
class LoadTable(Message):
    """Loads rows of a table of any id, with their ids and slots, from files that the ps
    can read: those whose ids are in the buckets from ``first`` to before ``last``
    (`zstrat.ids.buckets_of`). Answered by `Done`.

    ``replaces``: afterwards the table has the loaded rows and slots alone; if loading
    fails, the table is as before. Otherwise the loaded rows replace rows of the same
    ids."""

    kind: ClassVar = 132
    session: int
    key: int
    first: int
    last: int
    replaces: bool
    tensors: list[TableTensor]


@request(by=COORDINATOR, repeat=Repeat.NEVER)
class StoreTable(Message):
    """Sends rows of a table of any id, which the server stores as by a `LoadTable` of
    all buckets. The arrays are ids, int64 ``[n]``, and one for each leaf. Answered by
    `Done`."""

    kind: ClassVar = 133
    session: int
    key: int
    replaces: bool
    leaves: list[TableLeaf]
    arrays: Arrays

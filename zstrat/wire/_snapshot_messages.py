"""What a coordinator says to a parameter server to save and to restore.

A snapshot is values and slots as they were at one moment; it is pinned, then written to
a file or read, and released. Loading goes the other way, from files or from messages.
"""

from typing import ClassVar, NamedTuple

from ._schema import Arrays, message


class TensorEntry(NamedTuple):
    """One tensor of a snapshot: the value of a variable (``optimizer`` 0, ``leaf``
    ""), or a leaf of an optimizer's state beside it, named by its path.

    ``rows``: its first axis is the variable's own.
    """

    key: int
    optimizer: int
    leaf: str
    dtype: str
    shape: list[int]
    rows: bool


@message
class PinSnapshot:
    """Keeps values and slots of variables as they are now, until `ReleaseSnapshot`;
    updates go on beside. ``optimizers``: whose slots. Answered by `SnapshotPinned`.

    ``first`` above 0 pins nothing, but asks for those from that place on of a snapshot
    that is there: thousands do not fit into one answer."""

    kind: ClassVar = 40
    session: int
    snapshot: int
    keys: list[int]
    optimizers: list[int]
    first: int = 0


@message
class SnapshotPinned:
    """Tensors from ``first`` on, and how many there are in all."""

    kind: ClassVar = 41
    tensors: list[TensorEntry]
    total: int


@message
class WriteSnapshot:
    """Writes tensors of a snapshot (by their place in `SnapshotPinned`) to the new file
    ``path`` under these names, and syncs it. Answered by `SnapshotWritten`."""

    kind: ClassVar = 42
    session: int
    snapshot: int
    path: str
    tensors: list[int]
    names: list[str]


@message
class SnapshotWritten:
    """Digests in the order of the names; ``size`` of the file in bytes."""

    kind: ClassVar = 43
    digests: list[str]
    size: int


@message
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
    """One array of bytes."""

    kind: ClassVar = 45
    arrays: Arrays


@message
class ReleaseSnapshot:
    """Nobody reads the snapshot any more: the old values that it kept may go."""

    kind: ClassVar = 46
    session: int
    snapshot: int


class LoadEntry(NamedTuple):
    """Rows ``[start, stop)`` of tensor ``name`` in the file ``path`` go to rows from
    ``at`` on of a variable's value or slot (as in `TensorEntry`). A tensor without the
    variable's rows goes whole (``start``, ``stop`` and ``at`` are 0). ``name`` "":
    nothing is read, and all that is asked is whether the file is there. ``path`` "" of
    an optimizer: it forgets what it keeps beside the variable, and begins anew.

    ``rows``: the slot has the variable's rows. Asked while the server does not know yet
    what the optimizer keeps beside the variable."""

    key: int
    optimizer: int
    leaf: str
    path: str
    name: str
    start: int
    stop: int
    at: int
    rows: bool = False


@message
class LoadTensors:
    """Reads values and slots from files that this ps can see. Answered by `Done`."""

    kind: ClassVar = 47
    session: int
    entries: list[LoadEntry]


class StoreEntry(NamedTuple):
    """The array at its place goes to rows from ``at`` on, as in `LoadEntry`."""

    key: int
    optimizer: int
    leaf: str
    at: int
    rows: bool = False


@message
class StoreTensors:
    """Values and slots that were read elsewhere. Answered by `Done`."""

    kind: ClassVar = 60
    session: int
    entries: list[StoreEntry]
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
)

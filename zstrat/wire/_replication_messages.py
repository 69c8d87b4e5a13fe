"""Messages that keep a backup of a parameter server's store, and promote it.

A *store* is the state of one logical parameter server: variables, slots, ledger and
versions, under the index that handles have. One process serves it, the *primary*; with
replicas another process, the *backup*, has a copy in memory, at its own address. A
*view* of the store, a growing number, says which is which. The coordinator of the
session draws it, and sends it to all that need it before it is used. A message with an
older view than its receiver knows is refused as stale.

The second part are the messages by which a primary sends its store and its changes to
the backup.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

from ._schema import Arrays, message
from ._session import COORDINATOR, SERVER, Repeat, request


@request(by=COORDINATOR, repeat=Repeat.NEVER)
class HostStore:
    """Makes a parameter server's process host a backup of ``store``, empty at first, at
    an own address; sent by a coordinator. Answered by `StoreHosted`, the same if asked
    again in the same view. ``primary`` is the incarnation of the primary, the only
    process from which the copy accepts changes. ``serves``: host the primary of a new
    store instead. ``beside``: host a third copy, which is not a backup until its
    primary says so in a newer view (`OpenLog`). ``swaps``: the process is the primary,
    and becomes the complete backup of its backup ``primary``, which will be promoted;
    it stops serving."""

    kind: ClassVar = 80
    session: int
    store: int
    view: int
    serves: bool = False
    primary: int = 0
    beside: bool = False
    swaps: bool = False


@message
class StoreHosted:
    """A process hosts the copy, with this ``incarnation``, at ``address``."""

    kind: ClassVar = 81
    address: str
    incarnation: int


@request(by=COORDINATOR, repeat=Repeat.NEVER)
class DropStore:
    """Drops the copy of ``store`` that the process hosts. Answered by `Done`."""

    kind: ClassVar = 82
    session: int
    store: int
    view: int


@request(by=COORDINATOR, repeat=Repeat.NEVER)
class AskCopies:
    """Asks a parameter server's process for its copies of stores; sent by a coordinator
    that continues the session of a lost one. Answered by `CopiesReport`."""

    kind: ClassVar = 98
    session: int


class OrphanedCopy(NamedTuple):
    """A copy of a store of a lost program.

    Args:
        view: The newest view of the store that the copy knows.
        address, incarnation: Its address and incarnation; "": those of its process.
        origin: The origin of its session (`OpenSession`).
        is_primary: It serves the store, unless it was replaced.
        is_whole: It has everything that was acknowledged in this view.
        is_sure: Nothing else can have been acknowledged, although the other copy is
            lost: this is a primary that continued alone, or it lost the other copy when
            the program had been lost for so long that it could not promote anything.
        variables: Number of variables.
        partner: The incarnation of the other copy, if one of the two is the backup of
            the other; else 0.
    """

    store: int
    view: int
    address: str
    incarnation: int
    origin: int
    is_primary: bool
    is_whole: bool
    is_sure: bool
    variables: int
    partner: int = 0


@message
class CopiesReport:
    """Answers `AskCopies`: the copies that a process has."""

    kind: ClassVar = 99
    copies: list[OrphanedCopy]


@request(by=COORDINATOR, repeat=Repeat.NEVER)
class AttachBackup:
    """Gives the primary an empty backup; sent by a coordinator. Answered by `Done` once
    the backup is complete: from then on only changes that it has are acknowledged.
    Training continues meanwhile. ``beside``: the present backup of the primary stays.
    Otherwise it is dropped once the new one is complete."""

    kind: ClassVar = 83
    session: int
    view: int
    address: str
    incarnation: int
    beside: bool = False


@request(by=COORDINATOR, repeat=Repeat.NEVER)
class DetachBackup:
    """Makes the primary continue without backup, and acknowledge what waits for it.
    Answered by `Done`, even without a backup. Sent only by a coordinator: a primary
    that has lost its backup acknowledges nothing by itself."""

    kind: ClassVar = 84
    session: int
    view: int


@message
class BackupLost:
    """Reports that the primary cannot reach its backup, or that the backup differs. A
    notice to the coordinator."""

    kind: ClassVar = 85
    session: int
    view: int
    reason: str


@request(by=COORDINATOR, repeat=Repeat.NEVER)
class PromoteBackup:
    """Promotes a backup to the primary of its store; sent by a coordinator. It accepts
    no more changes from the old primary, and serves. Answered by `Done`. All versions
    jump past those that the old primary can have sent. Refused by an incomplete backup.
    ``incarnation`` is that of an equal copy at ``address`` (`HostStore.swaps`), which
    becomes its backup at once; 0: none."""

    kind: ClassVar = 86
    session: int
    view: int
    address: str = ""
    incarnation: int = 0


@request(by=COORDINATOR, repeat=Repeat.NEVER)
class MoveServer:
    """Sends a worker the new address of a store; sent by a coordinator. ``view`` is
    that of the store. Answered by `Done` once the worker's open requests are on their
    way there."""

    kind: ClassVar = 87
    session: int
    index: int
    view: int
    address: str


ReplicationMessage = (
    AskCopies
    | AttachBackup
    | BackupLost
    | CopiesReport
    | DetachBackup
    | DropStore
    | HostStore
    | MoveServer
    | PromoteBackup
    | StoreHosted
)


@request(by=SERVER, repeat=Repeat.NEVER)
class OpenLog:
    """Announces the changes of a primary in ``view``. Answered by `LogTaken`; the
    primary continues with the change after that."""

    kind: ClassVar = 88
    session: int
    view: int


@message
class LogTaken:
    """Acknowledges that the backup has all changes up to ``number`` in memory. Also
    sent as a notice."""

    kind: ClassVar = 89
    number: int


@message
class LogMade:
    """Reports that the backup has applied all changes up to ``number``. A notice, sent
    only while the backup is being filled; later only `LogTaken` is sent."""

    kind: ClassVar = 97
    number: int


class CopiedVariable(NamedTuple):
    """A variable to create on the backup. ``lost``: why its value is lost, until it is
    assigned; "": not lost."""

    key: int
    name: str
    trainable: bool
    sharded: bool
    version: int
    dtype: str
    shape: list[int]
    lost: str


@message
class CopyVariables:
    """Creates variables without values. New ones begin with ``first_version``."""

    kind: ClassVar = 90
    first_version: int
    variables: list[CopiedVariable]


class CopiedSlot(NamedTuple):
    """A leaf of an optimizer's state of a variable, as in `TensorEntry`. ``filled``:
    starts and ends of its rows that have a value."""

    key: int
    optimizer: int
    leaf: str
    rows: bool
    dtype: str
    shape: list[int]
    filled: list[int]


@message
class CopySlots:
    """Creates slots without values."""

    kind: ClassVar = 91
    slots: list[CopiedSlot]


class CopiedPart(NamedTuple):
    """The destination of one array: the bytes from ``start`` of a value (``optimizer``
    0, ``leaf`` "") or a slot."""

    key: int
    optimizer: int
    leaf: str
    start: int


@message
class CopyParts:
    """Sends bytes of values and slots."""

    kind: ClassVar = 92
    parts: list[CopiedPart]
    arrays: Arrays


@message
class CopyLedger:
    """Sends which pushes were applied: of the session (``writer`` 0), or own updates of
    a process. Two arrays of int64: ``[n, 2]`` steps with their parts, and ``[m, 2]``
    ranges of ended steps."""

    kind: ClassVar = 93
    writer: int
    low_water: int
    arrays: Arrays


class KeptOptimizer(NamedTuple):
    """An optimizer of an earlier program, which may have slots."""

    optimizer: int
    name: str


@message
class CopyKept:
    """Sends the optimizers and variables of an earlier program, which a failed creation
    must not remove. One array of int64: the keys of the variables. ``are_loaded``: all
    optimizers that are loaded are that program's, too."""

    kind: ClassVar = 79
    optimizers: list[KeptOptimizer]
    are_loaded: bool
    arrays: Arrays


@message
class CopyTree:
    """Sends the tree of an optimizer as one array of uint8, and the keys of the
    variables that it binds (int64 [n]); other variables of these keys came later."""

    kind: ClassVar = 96
    optimizer: int
    arrays: Arrays


@message
class ChangeProgram:
    """Notes that another program continues the session under this number, with new
    steps and new code of optimizers."""

    kind: ClassVar = 114
    session: int


@message
class CopyWhole:
    """Marks the backup as complete, so that it may become the primary."""

    kind: ClassVar = 94


@message
class RaiseWriterMark:
    """Notes that all own updates of a process below ``low_water`` have ended."""

    kind: ClassVar = 95
    writer: int
    low_water: int


BackupMessage = (
    OpenLog
    | LogMade
    | LogTaken
    | ChangeProgram
    | CopyVariables
    | CopySlots
    | CopyParts
    | CopyLedger
    | CopyKept
    | CopyTree
    | CopyWhole
    | RaiseWriterMark
)

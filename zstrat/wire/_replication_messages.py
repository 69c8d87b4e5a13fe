"""Messages by which parameter servers keep backups of their stores, and a backup is
promoted.

A *store* is the state of one logical parameter server: variables, slots (states of
optimizers), the ledger of applied pushes, and versions, under the index that variable
handles refer to. One process serves it, the *primary*; with replicas another process,
the *backup*, has a copy in memory, at its own address. A *view* of the store, a growing
number, says which is which. The coordinator of the session chooses a view's number, and
sends it to all tasks that need it before the view is used. A task refuses a message
with an older view than it knows as stale.

The second part are the messages by which a primary sends its store and its changes to
the backup.
"""

from typing import ClassVar, NamedTuple

from ._messages import Message, message
from ._schema import Arrays
from ._session import COORDINATOR, SERVER, Repeat, request


@request(by=COORDINATOR, repeat=Repeat.NEVER)
class HostStore(Message):
    """Makes a parameter server's process host a backup of ``store``, empty at first, at
    an address for that store alone; sent by a coordinator. Answered by `StoreHosted`,
    with the same answer to a repeated request in the same view. ``primary`` is the
    incarnation of the primary, the only process from which the backup accepts changes.
    ``serves``: the process hosts the primary of a new store instead. ``beside``: the
    process hosts a third copy, in addition to the present backup; it is not a backup
    until its primary opens the log to it in a newer view (`OpenLog`). ``swaps``: the
    process is the primary, and becomes the complete backup of its backup ``primary``,
    which will be promoted; it stops serving."""

    kind: ClassVar = 80
    session: int
    store: int
    view: int
    serves: bool = False
    primary: int = 0
    beside: bool = False
    swaps: bool = False


@message
class StoreHosted(Message):
    """Answers `HostStore`: the process hosts the copy, with this ``incarnation``, at
    ``address``."""

    kind: ClassVar = 81
    address: str
    incarnation: int


@request(by=COORDINATOR, repeat=Repeat.NEVER)
class DropStore(Message):
    """Makes a process drop its copy of ``store``. Answered by `Done`."""

    kind: ClassVar = 82
    session: int
    store: int
    view: int


@request(by=COORDINATOR, repeat=Repeat.NEVER)
class AskCopies(Message):
    """Asks a parameter server's process for its copies of stores; sent by a coordinator
    that continues the session of a lost coordinator. Answered by `CopiesReport`."""

    kind: ClassVar = 98
    session: int


class OrphanedCopy(NamedTuple):
    """A copy of a store whose program is lost, as a process reports it.

    Args:
        view: The newest view of the store that the copy knows.
        address, incarnation: Address and incarnation of the copy; "": those of its
            process.
        origin: The ``origin`` of the copy's session (`OpenSession`).
        is_primary: The copy serves the store, unless another copy has replaced it.
        is_whole: The copy has every change that was acknowledged in this view.
        is_sure: No other change can have been acknowledged, although the other copy is
            lost: this copy is a primary that continued alone, or lost the other copy
            when the program had been lost for so long that it could not promote any
            copy.
        variables: Number of variables in the copy.
        partner: The incarnation of the other copy, if one of the two copies is the
            backup of the other; else 0.
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
class CopiesReport(Message):
    """Answers `AskCopies` with the copies of stores that a process has."""

    kind: ClassVar = 99
    copies: list[OrphanedCopy]


@request(by=COORDINATOR, repeat=Repeat.NEVER)
class AttachBackup(Message):
    """Gives a primary an empty backup to fill; sent by a coordinator. Answered by
    `Done` once the backup is complete: from then on the primary acknowledges only
    changes that the backup has. Training continues meanwhile. ``beside``: the primary
    keeps its present backup, too. Otherwise it drops the present backup once the new
    one is complete."""

    kind: ClassVar = 83
    session: int
    view: int
    address: str
    incarnation: int
    beside: bool = False


@request(by=COORDINATOR, repeat=Repeat.NEVER)
class DetachBackup(Message):
    """Makes a primary continue without a backup, and acknowledge the changes that wait
    for the backup. Answered by `Done`, even if the primary has no backup. Sent only by
    a coordinator: a primary that has lost its backup acknowledges nothing by itself."""

    kind: ClassVar = 84
    session: int
    view: int


@message
class BackupLost(Message):
    """Notifies the coordinator that a primary cannot reach its backup, or that the
    backup differs from the primary. A notice."""

    kind: ClassVar = 85
    session: int
    view: int
    reason: str


@request(by=COORDINATOR, repeat=Repeat.NEVER)
class PromoteBackup(Message):
    """Promotes a backup to the primary of its store; sent by a coordinator. The backup
    accepts no more changes from the old primary, and serves. Answered by `Done`. All
    versions jump past those that the old primary can have sent. An incomplete backup
    refuses. ``incarnation`` is that of an equal copy at ``address``
    (`HostStore.swaps`), which becomes the backup of the new primary at once; 0: there
    is no such copy."""

    kind: ClassVar = 86
    session: int
    view: int
    address: str = ""
    incarnation: int = 0


@request(by=COORDINATOR, repeat=Repeat.NEVER)
class MoveServer(Message):
    """Sends a worker the new address of a store; sent by a coordinator. ``view`` is the
    new view of the store. Answered by `Done` once the worker has sent its open requests
    to the new address."""

    kind: ClassVar = 87
    session: int
    index: int
    view: int
    address: str


@request(by=SERVER, repeat=Repeat.NEVER)
class OpenLog(Message):
    """Announces to a backup that the primary sends its changes in ``view``. Answered by
    `LogTaken`; the primary continues with the change after the one that the answer
    names."""

    kind: ClassVar = 88
    session: int
    view: int


@message
class LogTaken(Message):
    """Acknowledges that the backup has received all changes up to ``number``, and keeps
    them in memory. Also sent as a notice."""

    kind: ClassVar = 89
    number: int


@message
class LogMade(Message):
    """Reports that the backup has applied all changes up to ``number``. A notice, which
    is sent only while the backup is being filled; later `LogTaken` alone is sent."""

    kind: ClassVar = 97
    number: int


class CopiedVariable(NamedTuple):
    """A variable to create on the backup. ``lost``: why the variable's value is lost,
    until a new value is assigned; "": it is not lost."""

    key: int
    name: str
    trainable: bool
    sharded: bool
    version: int
    dtype: str
    shape: list[int]
    lost: str


@message
class CopyVariables(Message):
    """Creates variables without values on the backup. Later new variables begin with
    ``first_version``."""

    kind: ClassVar = 90
    first_version: int
    variables: list[CopiedVariable]


class CopiedSlot(NamedTuple):
    """A slot to create on the backup: a leaf of an optimizer's state of a variable, as
    in `TensorEntry`. ``filled``: starts and ends of the ranges of rows that have a
    value."""

    key: int
    optimizer: int
    leaf: str
    rows: bool
    dtype: str
    shape: list[int]
    filled: list[int]


@message
class CopySlots(Message):
    """Creates slots without values on the backup."""

    kind: ClassVar = 91
    slots: list[CopiedSlot]


class CopiedPart(NamedTuple):
    """The destination of one array of bytes: from byte ``start`` of a variable's value
    (``optimizer`` 0, ``leaf`` "") or of a slot."""

    key: int
    optimizer: int
    leaf: str
    start: int


@message
class CopyParts(Message):
    """Sends bytes of values and slots to the backup, one array for each part."""

    kind: ClassVar = 92
    parts: list[CopiedPart]
    arrays: Arrays


@message
class CopyLedger(Message):
    """Sends the backup the ledger of applied pushes: those of the session's closures
    (``writer`` 0), or those that the process ``writer`` made outside of closures. Two
    arrays of int64: ``[n, 2]`` steps with their parts, and ``[m, 2]`` ranges of ended
    steps."""

    kind: ClassVar = 93
    writer: int
    low_water: int
    arrays: Arrays


class KeptOptimizer(NamedTuple):
    """An optimizer that an earlier program of the session created, and that may have
    slots."""

    optimizer: int
    name: str


@message
class CopyKept(Message):
    """Sends the backup the optimizers and variables of an earlier program of the
    session, which must stay if the present program fails to create them again. One
    array of int64: the keys of the variables. ``are_loaded``: all optimizers that the
    server has loaded are those of the earlier program, too."""

    kind: ClassVar = 79
    optimizers: list[KeptOptimizer]
    are_loaded: bool
    arrays: Arrays


@message
class CopyTree(Message):
    """Sends the tree of an optimizer as one array of uint8, and the keys of the
    variables that the tree binds (int64 [n]). Variables that were created later under
    one of these keys are not bound."""

    kind: ClassVar = 96
    optimizer: int
    arrays: Arrays


@message
class ChangeProgram(Message):
    """Tells the backup that another program continues the session ``session``, with new
    steps and new code of optimizers."""

    kind: ClassVar = 114
    session: int


@message
class CopyWhole(Message):
    """Marks the backup as complete, so that it may become the primary."""

    kind: ClassVar = 94


@message
class RaiseWriterMark(Message):
    """Notes on the backup that all updates of the process ``writer`` outside of
    closures below the number ``low_water`` have ended."""

    kind: ClassVar = 95
    writer: int
    low_water: int

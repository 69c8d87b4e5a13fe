"""What keeps a second copy of what a parameter server holds, and puts it in its place.

A *store* is what one logical parameter server holds: variables, slots, ledger and
versions, under the number that handles have of it. One process serves it, the
*primary*; with replicas another one has a copy in its memory, the *backup*, at an
address of its own. Which is which is a *view* of the store: a number that only grows,
made by the coordinator that holds the session, and told to whoever is concerned before
it is used. Whatever names an older view than its receiver knows is refused as stale.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

from ._schema import Arrays, message


@message
class HostStore:
    """A coordinator has the process of a parameter server keep a backup of ``store``,
    empty for now, at an address of its own. Answered by `StoreHosted`; asked again in
    the same view it answers the same. ``primary`` is the incarnation of who serves it,
    from whom alone the copy takes changes. ``serves``: it is no backup, but the primary
    of a store that is new. ``beside``: it is a third copy, which counts for nothing
    until its primary says so in a newer view (`OpenLog`). ``swaps``: the process serves
    the store, and hands it to its backup ``primary``, which is to be promoted: it
    serves nobody from now on, and what it has is the copy, which is whole."""

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
    """``incarnation`` is that of the copy, which greets with it at ``address``."""

    kind: ClassVar = 81
    address: str
    incarnation: int


@message
class DropStore:
    """A coordinator does not need the copy of ``store`` that the process hosts."""

    kind: ClassVar = 82
    session: int
    store: int
    view: int


@message
class AskCopies:
    """A coordinator that goes on with what another one has left asks the process of a
    parameter server which copies of stores it has. Answered by `CopiesReport`."""

    kind: ClassVar = 98
    session: int


class OrphanedCopy(NamedTuple):
    """A copy of a store that a lost program has left.

    Args:
        view: The newest one of the store that it knows of.
        address, incarnation: Where it greets, and as whom; "": at that of its process.
        origin: Of the session that it belongs to.
        is_primary: It serves the store, if nobody has taken its place.
        is_whole: It has all that was acknowledged, in this view.
        is_sure: Nobody can have acknowledged what is not here, although another copy is
            gone: this is a primary that went on alone, or it lost the other copy when
            the program itself had been lost for so long that it could replace nobody.
        variables: How many it holds.
        partner: The incarnation of the other one of two copies, if this one follows it,
            or is followed by it; else 0.
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
    """The copies that one process has, in answer to `AskCopies`."""

    kind: ClassVar = 99
    copies: list[OrphanedCopy]


@message
class AttachBackup:
    """A coordinator gives the primary a backup, which is empty. Answered by `Done` when
    the backup has all: from then on nothing is acknowledged that it has not. Training
    goes on meanwhile. ``beside``: the backup that the primary has stays, too. Without
    that it ends when the other one, which has all, is named."""

    kind: ClassVar = 83
    session: int
    view: int
    address: str
    incarnation: int
    beside: bool = False


@message
class DetachBackup:
    """The primary goes on alone; what waits for its backup is acknowledged. Answered by
    `Done`, also if there is none. Only a coordinator may say so: a primary that
    has lost its backup acknowledges nothing by itself."""

    kind: ClassVar = 84
    session: int
    view: int


@message
class BackupLost:
    """The primary cannot reach its backup, or the backup differs from it. A notice to
    the coordinator."""

    kind: ClassVar = 85
    session: int
    view: int
    reason: str


@message
class PromoteBackup:
    """A coordinator makes the backup the primary of its store: it takes nothing from
    the old one any more, and serves. Answered by `Done`. All versions jump
    past whatever the old primary can have given out. Refused by a backup that
    does not have all yet. ``incarnation`` is that of a copy at ``address`` that has the
    same (`HostStore.swaps`): it is the new primary's backup from the beginning; 0: it
    has none."""

    kind: ClassVar = 86
    session: int
    view: int
    address: str = ""
    incarnation: int = 0


@message
class MoveServer:
    """A coordinator tells a worker that the parameter server of this index is at
    another address. ``view`` is that of its store. Answered by `Done`, when what the
    worker has for it is on its way there."""

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


@message
class OpenLog:
    """The primary of a store in ``view`` is about to send its changes. Answered by
    `LogTaken`: what comes next is the change behind that one."""

    kind: ClassVar = 88
    session: int
    view: int


@message
class LogTaken:
    """The backup has all changes up to this one in memory. Also a notice."""

    kind: ClassVar = 89
    number: int


@message
class LogMade:
    """The backup has made all changes up to this one. A notice, while it is filled:
    from then on its primary is only told what is taken."""

    kind: ClassVar = 97
    number: int


class CopiedVariable(NamedTuple):
    """``lost``: why its value is gone, until somebody assigns it; "" if it is there."""

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
    """Room for variables. New ones begin with ``first_version``."""

    kind: ClassVar = 90
    first_version: int
    variables: list[CopiedVariable]


class CopiedSlot(NamedTuple):
    """A leaf of what an optimizer keeps beside a variable, as in `TensorEntry`.
    ``filled``: starts and ends of its rows that have a value."""

    key: int
    optimizer: int
    leaf: str
    rows: bool
    dtype: str
    shape: list[int]
    filled: list[int]


@message
class CopySlots:
    """Room for slots."""

    kind: ClassVar = 91
    slots: list[CopiedSlot]


class CopiedPart(NamedTuple):
    """The array at its place goes to the bytes from ``start`` on of a value
    (``optimizer`` 0, ``leaf`` "") or a slot."""

    key: int
    optimizer: int
    leaf: str
    start: int


@message
class CopyParts:
    """Bytes of values and slots."""

    kind: ClassVar = 92
    parts: list[CopiedPart]
    arrays: Arrays


@message
class CopyLedger:
    """Which pushes were applied: of the session (``writer`` 0), or own updates of a
    process. Two arrays of int64: ``[n, 2]`` steps with their parts, and ``[m, 2]`` runs
    of steps that are over."""

    kind: ClassVar = 93
    writer: int
    low_water: int
    arrays: Arrays


class KeptOptimizer(NamedTuple):
    """An optimizer of an earlier program, of which there may be slots."""

    optimizer: int
    name: str


@message
class CopyKept:
    """What an earlier program has left, which no creation that fails takes back. One
    array of int64: the keys of variables."""

    kind: ClassVar = 79
    optimizers: list[KeptOptimizer]
    arrays: Arrays


@message
class CopyTree:
    """A tree of an optimizer, in one array of uint8, and the keys of the variables that
    it binds ([n] of int64): others, that are here under its keys, came later."""

    kind: ClassVar = 96
    optimizer: int
    arrays: Arrays


@message
class ChangeProgram:
    """Another program goes on with what is here, in the session of this number: its
    steps, and the code of its optimizers, are new ones."""

    kind: ClassVar = 114
    session: int


@message
class CopyWhole:
    """Nothing is missing any more: a backup that has this may become the primary."""

    kind: ClassVar = 94


@message
class RaiseWriterMark:
    """All own updates of a process below ``low_water`` are over."""

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

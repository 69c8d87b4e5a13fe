"""What a primary says to the backup of its store, and what it hears back.

All changes of a store go to its backup as notices, in their order: the very messages
that made them, with operands, and without what only answers needed. Both sides count
them from 1 on, so no number travels. First of all come the messages of this file that
make a copy of what was there before.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

from ._schema import Arrays, message


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

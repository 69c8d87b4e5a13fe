"""Messages between the ranks of a group: forming it, its calls, and its end.

No coordinator takes part. A ticket names one generation of a group, and messages with
another ticket are refused.
"""

from typing import ClassVar, NamedTuple

from ._requests import TRAINING, Repeat, request
from ._schema import Arrays, PlainTree, message


class MemberEntry(NamedTuple):
    """One rank of a group. ``descriptor``, ``capacity`` and ``word`` describe memory
    that ranks of the same host may map, as in `Offer`; capacity 0: no memory."""

    task: str
    address: str
    host: str
    pid: int
    incarnation: int
    descriptor: int
    capacity: int
    word: bytes


@request(by=TRAINING, repeat=Repeat.NEVER)
class JoinGroup:
    """Asks rank 0 to form a generation of a group. Answered by `GroupFormed` once all
    ``size`` ranks have asked, or after ``timeout`` seconds by an error that names the
    missing ranks. ``generation``: the lowest acceptable one, 0 for a new process."""

    kind: ClassVar = 72
    group: str
    generation: int
    rank: int
    size: int
    member: MemberEntry
    timeout: float


@message
class GroupFormed:
    """A generation is formed. ``ticket`` is its random name. ``members`` are in the
    order of ranks. ``choices`` is rank 0's table of algorithms, for all: ranks with
    different tables would wait for each other."""

    kind: ClassVar = 73
    ticket: int
    generation: int
    members: list[MemberEntry]
    choices: dict[str, PlainTree]


@request(by=TRAINING, repeat=Repeat.NEVER)
class Hop:
    """A notice with part of one call of a collective, from one rank to another.

    ``call`` numbers the calls of a group, ``place`` the hops of a call, the same on all
    ranks. ``about`` is a digest of the call (operation, dtype, sizes), by which ranks
    notice that they make different calls. ``arrays``: at most one, of bytes.
    """

    kind: ClassVar = 74
    ticket: int
    call: int
    place: int
    about: int
    arrays: Arrays


@request(by=TRAINING, repeat=Repeat.NEVER)
class AbortCall:
    """A notice: the sender ends the generation because of ``error`` (`to_wire`) in a
    call. ``lost``: ranks that are lost."""

    kind: ClassVar = 75
    ticket: int
    call: int
    error: PlainTree
    lost: list[int]


@request(by=TRAINING, repeat=Repeat.NEVER)
class AskCall:
    """Asks a rank for its progress with a call. Answered by `CallState`."""

    kind: ClassVar = 76
    ticket: int
    call: int


@message
class CallState:
    """The progress of a rank with a call. ``about``: description of the call, "" if the
    rank has not made it; ``waits``: ranks that it waits for. ``is_over``: the call has
    ended there. ``is_broken``: the generation has ended there; an `AbortCall` or
    `LeaveGroup` under way has the reason."""

    kind: ClassVar = 77
    about: str
    waits: list[int]
    is_over: bool
    is_broken: bool


@request(by=TRAINING, repeat=Repeat.NEVER)
class LeaveGroup:
    """A notice: the sender leaves the generation on purpose. ``calls``: number of
    untagged operations that it has begun."""

    kind: ClassVar = 78
    ticket: int
    calls: int
    reason: str


GroupMessage = (
    JoinGroup | GroupFormed | Hop | AbortCall | AskCall | CallState | LeaveGroup
)

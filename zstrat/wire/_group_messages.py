"""What the ranks of a group of workers say to each other: how it forms, calls and ends.

Ranks talk without a coordinator. A ticket names one generation of a group, and what
carries another one is refused.
"""

from typing import ClassVar, NamedTuple

from ._schema import Arrays, PlainTree, message


class MemberEntry(NamedTuple):
    """One rank of a group. ``descriptor``, ``capacity`` and ``word`` stand for memory
    that ranks of the same host may map, as in `Offer`; capacity 0: there is none."""

    task: str
    address: str
    host: str
    pid: int
    incarnation: int
    descriptor: int
    capacity: int
    word: bytes


@message
class JoinGroup:
    """A rank asks rank 0 to form a generation of a group; answered by `GroupFormed`
    once all ``size`` ranks have asked, or by the error that names who did not within
    ``timeout`` seconds. ``generation``: the lowest that will do, 0 for a process that
    was in none."""

    kind: ClassVar = 72
    group: str
    generation: int
    rank: int
    size: int
    member: MemberEntry
    timeout: float


@message
class GroupFormed:
    """``ticket`` is drawn at random: what carries another one is of another generation
    and is refused. ``members`` in the order of ranks. ``choices`` is rank 0's table of
    algorithms as plain data: ranks with different ones would wait for each other."""

    kind: ClassVar = 73
    ticket: int
    generation: int
    members: list[MemberEntry]
    choices: dict[str, PlainTree]


@message
class Hop:
    """A notice: part of one call of a collective, from one rank to another.

    ``call`` numbers the calls of a group, ``place`` the hops of a call, alike on all
    ranks. ``about`` is a digest of what is called (operation, dtype, sizes): ranks that
    call different things find it out. ``arrays``: at most one, of bytes.
    """

    kind: ClassVar = 74
    ticket: int
    call: int
    place: int
    about: int
    arrays: Arrays


@message
class AbortCall:
    """A notice: the sender gave a call up, for this reason (`to_wire` of an error), and
    the generation with it. ``lost``: ranks that are gone for good."""

    kind: ClassVar = 75
    ticket: int
    call: int
    error: PlainTree
    lost: list[int]


@message
class AskCall:
    """How far are you with this call? Answered by `CallState`."""

    kind: ClassVar = 76
    ticket: int
    call: int


@message
class CallState:
    """``about``: what the rank calls in words, "" if it has not called yet; ``waits``:
    the ranks that it waits for. ``is_over``: the call has ended there. ``is_broken``:
    so has the generation; an `AbortCall` or `LeaveGroup` that is under way says why."""

    kind: ClassVar = 77
    about: str
    waits: list[int]
    is_over: bool
    is_broken: bool


@message
class LeaveGroup:
    """A notice: the sender leaves this generation on purpose. ``calls``: how many it
    has made, those with a tag not counted."""

    kind: ClassVar = 78
    ticket: int
    calls: int
    reason: str


GroupMessage = (
    JoinGroup | GroupFormed | Hop | AbortCall | AskCall | CallState | LeaveGroup
)

"""Messages about a connection itself: greeting, liveness, transfer of bodies, goodbye.

They are the same for all tasks. Above a connection only `Hello` is visible.
"""

import enum
from dataclasses import field
from typing import ClassVar, Final

from ._schema import message

PROTOCOL: Final = 27
"""Version of the protocol; HELLO refuses any other."""


class Job(enum.StrEnum):
    """The job of a task, and the role of its key."""

    CHIEF = "chief"
    WORKER = "worker"
    PS = "ps"
    EVALUATOR = "evaluator"
    OBSERVER = "observer"


@message
class Hello:
    """The first message of a connection, and its answer: identifies task and process.

    ``incarnation`` is drawn at random when a process starts. A peer that returns with
    another incarnation has lost its state; a parameter server that continues with the
    saved state of its predecessor keeps the incarnation. ``link`` numbers the links of
    one process, so that a reconnect replaces the connection of the same link. A worker
    without a number has the ``index`` -1; there may be several.
    """

    kind: ClassVar = 1
    protocol: int
    job: str
    index: int
    incarnation: int
    host: str
    pid: int
    versions: dict[str, str] = field(default_factory=dict)
    link: int = 0


@message
class Beat:
    """Shows that the event loop of the sender runs. Answered by a Beat if
    ``wanted``."""

    kind: ClassVar = 2
    wanted: bool


@message
class Chunk:
    """The next part of the body of an announced message, as one raw frame."""

    kind: ClassVar = 3
    stream: int
    offset: int


@message
class Credit:
    """Allows the receiver to send ``chunks`` more chunks of a stream."""

    kind: ClassVar = 4
    stream: int
    chunks: int


@message
class Goodbye:
    """The sender leaves on purpose. ``returns``: seconds until its successor, which has
    its state and incarnation, will be there; 0: there will be no successor."""

    kind: ClassVar = 5
    reason: str
    returns: float = 0.0


@message
class Offer:
    """Offers shared memory for bodies to a peer on the same host: the anonymous file
    ``descriptor`` of the sender's process. The memory begins with ``word``, by which
    the peer checks that it has mapped the right file."""

    kind: ClassVar = 10
    descriptor: int
    capacity: int
    word: bytes


@message
class Mapped:
    """Answers an `Offer`. ``proof`` is read from the offered memory, after the word,
    and so proves that it was mapped. Empty: the memory cannot be mapped."""

    kind: ClassVar = 11
    proof: bytes


@message
class Placed:
    """The body of an announced message is in the sender's memory, at ``offset``."""

    kind: ClassVar = 12
    stream: int
    offset: int


@message
class Released:
    """The sender no longer reads the bodies at these offsets of the peer's memory."""

    kind: ClassVar = 13
    offsets: list[int]


@message
class Again:
    """Asks to send a request with a body in chunks once more. Nothing was done, and the
    body was not kept. The connection answers it by itself.
    """

    kind: ClassVar = 64


LinkMessage = (
    Hello | Beat | Chunk | Credit | Goodbye | Offer | Mapped | Placed | Released | Again
)

"""Messages about a connection itself: greeting, liveness, transfer of bodies (the
arrays of a message), goodbye.

They are the same for all tasks. The code that uses a connection sees `Hello` alone; the
connection handles the others itself.
"""

import enum
from dataclasses import field
from typing import ClassVar, Final

from ._messages import Message, message

PROTOCOL: Final = 27
"""Version of the protocol; a HELLO with any other version is refused."""


class Job(enum.StrEnum):
    """The jobs of tasks. A key has a job as its role."""

    CHIEF = "chief"
    WORKER = "worker"
    PS = "ps"
    EVALUATOR = "evaluator"
    OBSERVER = "observer"


@message
class Hello(Message):
    """The first message of a connection, and the answer to it. Identifies the sender's
    task and process.

    ``incarnation`` is drawn at random when a process starts. A peer that returns with
    another incarnation has lost its state; a parameter server that continues with the
    saved state of its predecessor keeps the incarnation. ``link`` numbers the links of
    one process, so that a reconnect replaces the connection of the same link. A worker
    that has no index yet sends the ``index`` -1; there may be several.
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
class Beat(Message):
    """A heartbeat: shows that the event loop of the sender runs. Answered by another
    Beat if ``wanted``."""

    kind: ClassVar = 2
    wanted: bool


@message
class Chunk(Message):
    """Sends the next part of the body of message number ``stream``, from ``offset``, as
    one raw frame."""

    kind: ClassVar = 3
    stream: int
    offset: int


@message
class Credit(Message):
    """Allows the receiver to send ``chunks`` more chunks of bodies, or messages with a
    large body."""

    kind: ClassVar = 4
    stream: int
    chunks: int


@message
class Goodbye(Message):
    """Announces that the sender leaves on purpose. ``returns``: seconds until its
    successor, which has its state and incarnation, will be there; 0: there will be no
    successor."""

    kind: ClassVar = 5
    reason: str
    returns: float = 0.0


@message
class Offer(Message):
    """Offers the sender's shared memory for bodies to a peer on the same host: the
    anonymous file ``descriptor`` of the sender's process. The memory begins with
    ``word``, by which the peer checks that it has mapped the right file."""

    kind: ClassVar = 10
    descriptor: int
    capacity: int
    word: bytes


@message
class Mapped(Message):
    """Answers an `Offer`. ``proof`` is read from the offered memory, after the word,
    and so proves that the memory was mapped. Empty: the memory cannot be mapped."""

    kind: ClassVar = 11
    proof: bytes


@message
class Placed(Message):
    """Replaces the body of message number ``stream``: the body is in the sender's
    memory (`Offer`), at ``offset``."""

    kind: ClassVar = 12
    stream: int
    offset: int


@message
class Released(Message):
    """Reports that the sender no longer reads the bodies at these offsets of the
    receiver's memory."""

    kind: ClassVar = 13
    offsets: list[int]


@message
class Again(Message):
    """Answers a request whose body came in chunks: it must be sent once more, as
    nothing was done, and the body was not kept. The connection sends the request again
    by itself."""

    kind: ClassVar = 64

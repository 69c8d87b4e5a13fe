"""What the two ends of a connection say to each other about the connection itself.

Whatever task is behind them: who they are, that they live, how a body travels, and that
they leave. Nobody above a connection ever sees one of these but `Hello`.
"""

import enum
from dataclasses import field
from typing import ClassVar, Final

from ._schema import message

PROTOCOL: Final = 20
"""Version of the protocol; HELLO refuses any other."""


class Job(enum.StrEnum):
    """What a task is; also the role that its key carries."""

    CHIEF = "chief"
    WORKER = "worker"
    PS = "ps"
    EVALUATOR = "evaluator"
    OBSERVER = "observer"


@message
class Hello:
    """First message of a connection, and its answer: who I am and what I run.

    ``incarnation`` is drawn at random when the process starts; a peer that returns with
    another one has lost everything that it held, and a parameter server that goes on
    with what the process before it has left keeps its number. ``link`` numbers the
    links of one process, so that a connection which comes back replaces its own
    predecessor and not that of another link. A worker that has no number yet has the
    ``index`` -1; there may be several of these.
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
    """I am alive, said by the event loop itself. Answered with a Beat if ``wanted``."""

    kind: ClassVar = 2
    wanted: bool


@message
class Chunk:
    """The next part of the body of a message announced before (one raw frame)."""

    kind: ClassVar = 3
    stream: int
    offset: int


@message
class Credit:
    """So many more chunks of the stream may be sent."""

    kind: ClassVar = 4
    stream: int
    chunks: int


@message
class Goodbye:
    """I leave on purpose. ``returns``: seconds in which a process will be here that has
    all that this one held, and says so by the same incarnation; 0 if none will."""

    kind: ClassVar = 5
    reason: str
    returns: float = 0.0


@message
class Offer:
    """This process has memory for bodies that the peer may map, if it is on this host:
    the anonymous file ``descriptor`` of the process in its HELLO. It begins with
    ``word``, which proves to the peer that it has mapped the right one."""

    kind: ClassVar = 10
    descriptor: int
    capacity: int
    word: bytes


@message
class Mapped:
    """``proof`` is what the offered memory says behind the word of the offer: only who
    has mapped it can tell. Empty: it cannot be mapped."""

    kind: ClassVar = 11
    proof: bytes


@message
class Placed:
    """The body of the message announced before is in the sender's memory."""

    kind: ClassVar = 12
    stream: int
    offset: int


@message
class Released:
    """The bodies at these offsets of the peer's memory are not read any more."""

    kind: ClassVar = 13
    offsets: list[int]


@message
class Again:
    """In place of the outcome of a request whose body came in chunks: nothing was done,
    the body was not kept, send the same once more. The connection does that by itself.
    """

    kind: ClassVar = 64


LinkMessage = (
    Hello | Beat | Chunk | Credit | Goodbye | Offer | Mapped | Placed | Released | Again
)

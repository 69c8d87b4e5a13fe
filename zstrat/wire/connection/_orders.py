"""Orders that a `Peer` returns to its shell (the code that does the I/O), which carries
them out in turn."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from zstrat.wire._link_messages import Hello
    from zstrat.wire._messages import Message

    from ._body import Sink

Token = TypeVar("Token")


class OrderState(enum.Enum):
    """The stages of a connection, which never goes back to an earlier one."""

    GREETING = enum.auto()
    OPEN = enum.auto()
    CLOSED = enum.auto()


class Greeted(NamedTuple):
    """The other side has sent its HELLO; call `Peer.accept` or `Peer.refuse`."""

    hello: Hello


class Opened(NamedTuple):
    """The other side has answered the HELLO of this side, so the connection is open."""

    hello: Hello


class Requested(NamedTuple):
    """A request has arrived. Pass the message on, or finish the sink that took its
    arrays, and call `Peer.reply` with ``number`` exactly once."""

    number: int
    message: Message
    sink: Sink | None = None


class Noticed(NamedTuple):
    """A notice has arrived. Pass the message on; it gets no answer."""

    message: Message


class Answered(NamedTuple, Generic[Token]):
    """The request with this token has succeeded: give its caller the answer."""

    token: Token
    message: Message


class Failed(NamedTuple, Generic[Token]):
    """The request with this token has failed: raise the error to its caller."""

    token: Token
    error: Exception


class Closed(NamedTuple):
    """The connection is over. ``refusal`` is set if one side refused the other;
    ``broken`` if only the network connection failed, so that the peer may reconnect;
    ``left`` if the peer said goodbye, with ``returns`` as in its `Goodbye`."""

    reason: str
    refusal: Exception | None = None
    broken: bool = False
    left: bool = False
    returns: float = 0.0


Order = (
    Greeted | Opened | Requested | Noticed | Answered[Token] | Failed[Token] | Closed
)

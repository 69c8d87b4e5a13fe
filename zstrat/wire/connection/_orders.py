"""Orders of a `Peer` to its shell, which carries them out in turn."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from zstrat.wire._link_messages import Hello
    from zstrat.wire._messages import Message

    from ._body import Sink

Token = TypeVar("Token")


class OrderState(enum.Enum):
    """The stages of a connection; it only goes forward."""

    GREETING = enum.auto()
    OPEN = enum.auto()
    CLOSED = enum.auto()


class Greeted(NamedTuple):
    """The other side said HELLO; say `Peer.accept` or `Peer.refuse`."""

    hello: Hello


class Opened(NamedTuple):
    """Our HELLO was answered."""

    hello: Hello


class Requested(NamedTuple):
    """A request arrived. Pass it on, or finish the sink that took its arrays, and call
    `Peer.reply` with its number exactly once."""

    number: int
    message: Message
    sink: Sink | None = None


class Noticed(NamedTuple):
    """Hand the notice on; nothing is answered."""

    message: Message


class Answered(NamedTuple, Generic[Token]):
    """The request of this token has succeeded: give its caller the answer."""

    token: Token
    message: Message


class Failed(NamedTuple, Generic[Token]):
    """The request of this token has failed: raise the error to its caller."""

    token: Token
    error: Exception


class Closed(NamedTuple):
    """The connection is over. ``refusal`` is set if one side refused the other;
    ``broken`` if only the connection failed, so that the peer may come back; ``left``
    if the peer said goodbye, ``returns`` as it then said."""

    reason: str
    refusal: Exception | None = None
    broken: bool = False
    left: bool = False
    returns: float = 0.0


Order = (
    Greeted | Opened | Requested | Noticed | Answered[Token] | Failed[Token] | Closed
)

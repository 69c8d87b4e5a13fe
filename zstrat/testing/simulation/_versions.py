"""What servers give out, as whoever watches the network sees it.

A reader that has a version of a variable is told "not modified" for as long as the
server has the same number. So two things have to be so, whichever copy of a server
answers: a number names one content of a variable in a session, for ever; and what is
asked later on one connection is not older, whichever answer leaves first.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Final, NamedTuple, final

from zstrat.config import Limits
from zstrat.errors import ProtocolError
from zstrat.wire import Exchange, Exchanged, Pull, Pulled, PullRows, decode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zstrat.wire import Message

    from ._paths import Way

_LIMITS: Final = Limits()
_KINDS: Final = frozenset(
    kind.kind for kind in (Pull, PullRows, Exchange, Pulled, Exchanged)
)


class _PullAsked(NamedTuple):
    session: int
    reads: tuple[tuple[int, int], ...]
    """Keys, with the versions that the reader has."""


@final
class GivenOut:
    """Contents by their numbers, of one run.

    Args:
        broken: Told in words what must not be.
    """

    def __init__(self, broken: Callable[[str], None]) -> None:
        self._broken = broken
        self._asked: dict[tuple[int, int], _PullAsked] = {}
        """By line and number of the request."""
        self._named: dict[tuple[int, int, int], int] = {}
        """Digests by session, key and version."""
        self._read: dict[tuple[int, int, int], tuple[int, int]] = {}
        """The last request and its version, by line, session and key."""

    def note(self, way: Way, frames: Sequence[bytes]) -> None:
        """A message has arrived. One that travels in pieces says nothing here."""
        header = frames[0]
        if len(header) < 2 or header[1] not in _KINDS:
            return
        try:
            request, message = decode(header, frames[1:], _LIMITS)
        except ProtocolError:
            return
        if isinstance(message, Pull | PullRows | Exchange):
            reads = tuple([(read.key, read.known) for read in message.reads])
            self._asked[way.line, request] = _PullAsked(message.session, reads)
        else:
            asked = self._asked.pop((way.line, request), None)
            if asked is not None:
                self._answered(way, request, asked, message)

    def _answered(
        self, way: Way, request: int, asked: _PullAsked, message: Message
    ) -> None:
        assert isinstance(message, Pulled | Exchanged), message
        arrays = iter(message.arrays)
        for (key, known), version in zip(asked.reads, message.versions, strict=False):
            self._require_order(way, (asked.session, key), (request, version))
            if version != known:
                digest = zlib.crc32(next(arrays).tobytes())
                self._require_same(way, (asked.session, key, version), digest)

    def _require_order(
        self, way: Way, name: tuple[int, int], read: tuple[int, int]
    ) -> None:
        place = (way.line, *name)
        earlier, later = sorted((self._read.get(place, read), read))
        if earlier[1] > later[1]:
            self._broken(
                f"{way.source} gives version {later[1]} of variable {name[1]} to "
                f"{way.target}, which had asked before and got {earlier[1]}"
            )
        self._read[place] = later

    def _require_same(self, way: Way, name: tuple[int, int, int], digest: int) -> None:
        if self._named.setdefault(name, digest) != digest:
            self._broken(
                f"{way.source} gives variable {name[1]} to {way.target}: its version "
                f"{name[2]} names another content than before"
            )

"""A very small HTTP server.

It answers GET and HEAD, one request a connection, and everything is bounded. It runs in
a process that trains, is open to everyone on the network that can reach it, and must
answer probes with nothing but zstrat installed. So it is not a framework: a request is
a line and headers of 8 KiB together, which have five seconds to come, and there are at
most 64 connections. When one more comes, the server drops the connection that has kept
it waiting longest, for the request or for taking the answer: so a peer that only holds
connections open cannot keep a probe out.

An answer may be a stream, for a page that is open. A client has five seconds to take
each piece, and the next piece is made after the client has taken the one before: a
browser that is frozen holds one piece, and is dropped. The source of the streams bounds
their number.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import re
import socket
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from zstrat.transport._descriptors import give_up

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable


CONNECTIONS: Final = 64
"""Most open connections: a prober, a scraper, some browsers. Each takes a descriptor
and some KiB."""
HEAD: Final = 8192
"""Most bytes of the request line and the headers. Browsers send 1 KiB."""
ARRIVAL: Final = 5.0
"""Seconds that a request has to come, and again that an answer has to be taken."""

TEXT: Final = "text/plain; charset=utf-8"

_LINE: Final = re.compile(rb"([A-Z]{1,16}) (/[!-~]*) HTTP/1\.[01]")
_HEADER: Final = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}):[ \t]*([ -~\t]*)")
_REASONS: Final = {
    200: "OK",
    303: "See Other",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    421: "Misdirected Request",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    501: "Not Implemented",
    503: "Service Unavailable",
}

log = logging.getLogger("zstrat.transport.health")


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A parsed request. ``query`` follows the question mark of the address; ``accept``,
    ``host``, ``cookie`` and ``authorization`` are headers."""

    path: str
    accept: str
    host: str
    is_head: bool
    query: str = ""
    cookie: str = ""
    authorization: str = ""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """An answer of the server. ``headers`` are sent besides those that every answer
    has; they must come from zstrat alone, as nothing checks them for line ends."""

    status: int
    body: str
    kind: str = TEXT
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class HttpStream:
    """An answer in ``pieces``, with the status 200. Each piece is sent as soon as the
    iterator yields it, until it ends."""

    pieces: AsyncGenerator[bytes, None]
    kind: str


class BadRequest(ValueError):
    """The client sent something that is not an HTTP request, or that this server does
    not answer. ``status`` is that of the answer."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


def parse_request(head: bytes) -> HttpRequest:
    """Parses the bytes of a request, up to the empty line.

    Raises:
        BadRequest: The bytes are not a request, or one that this server does not
            answer.
    """
    first, *lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    line = _LINE.fullmatch(first)
    if line is None:
        raise BadRequest(400, "expected a request as in: GET /healthz HTTP/1.1")
    headers = {}
    for each in lines:
        header = _HEADER.fullmatch(each)
        if header is None:
            raise BadRequest(400, "expected headers as in: Host: 127.0.0.1")
        headers[header[1].lower()] = header[2].decode("ascii").strip()
    # After the headers: a malformed request is 400 whatever its method.
    if line[1] not in (b"GET", b"HEAD"):
        raise BadRequest(405, "only GET and HEAD are answered here")
    path, _, query = line[2].decode("ascii").partition("?")
    return HttpRequest(
        path,
        accept=headers.get(b"accept", ""),
        host=headers.get(b"host", ""),
        is_head=line[1] == b"HEAD",
        query=query,
        cookie=headers.get(b"cookie", ""),
        authorization=headers.get(b"authorization", ""),
    )


def is_own_name(host: str) -> bool:
    """Returns whether a ``Host`` header names this machine as its users do: by a name
    of loopback, or a number. Any other name may be that of a stranger's web page, which
    makes the name resolve to loopback to read the answers."""
    name = re.sub(r":\d*$", "", host).strip("[]").lower()
    if name in ("", "localhost"):
        return True
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(name))
    return False


def _on_all_interfaces(port: int) -> socket.socket:
    """Returns a socket that listens on all interfaces: for IPv4, and for IPv6 where the
    system has it."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=True
        )
    return socket.create_server(("", port))


class HttpServer:
    """Answers requests with what ``answer`` returns, on the running loop.

    Args:
        arrival: Seconds that a client has to send its request, and again to take the
            answer.
    """

    def __init__(
        self,
        answer: Callable[[HttpRequest], Awaitable[HttpAnswer | HttpStream]],
        arrival: float = ARRIVAL,
    ) -> None:
        self._answer, self._arrival = answer, arrival
        self._server: asyncio.Server | None = None
        self._open = 0
        self._waited_for: dict[asyncio.StreamWriter, None] = {}
        """Connections whose client has to send its request, or to take its answer.
        First the one that has kept the server waiting longest."""
        self.is_local = True
        """Whether only this machine can reach the server."""

    async def start(self, host: str, port: int) -> int:
        """Binds the address, and answers requests from now on; returns the port.

        Raises:
            OSError: The address cannot be bound.
        """
        # Beyond the limit the reader raises LimitOverrunError, and keeps no more.
        serve = partial(
            asyncio.start_server, self._converse, limit=HEAD, backlog=CONNECTIONS
        )
        if host == "*":
            self._server = await serve(sock=_on_all_interfaces(port))
        else:
            self._server = await serve(host, port)
        bound = [each.getsockname() for each in self._server.sockets]
        self.is_local = all(ipaddress.ip_address(at[0]).is_loopback for at in bound)
        return int(bound[0][1])

    def close(self) -> None:
        """Stops listening. Open connections end with the loop."""
        if self._server is not None:
            self._server.close()

    def forget(self) -> None:
        """Replaces the listening descriptor in a forked process: the port belongs to
        the parent."""
        if self._server is not None:
            give_up(each.fileno() for each in self._server.sockets)

    async def _converse(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self._open >= CONNECTIONS and not self._let_go():
            writer.transport.abort()
            return
        self._open += 1
        self._waited_for[writer] = None
        # Whatever the network does to a connection ends this connection only. Who
        # cancels is the loop at its end: streams log that as an error.
        ends = OSError, EOFError, TimeoutError, asyncio.CancelledError
        try:
            with contextlib.suppress(*ends):
                await self._serve(reader, writer)
        finally:
            self._open -= 1
            # Computing the answer is our own time: it is not waited for.
            self._waited_for.pop(writer, None)
            # At once, without a linger: an answer was taken before this, see `_serve`.
            writer.transport.abort()

    def _let_go(self) -> bool:
        """Drops the connection that has kept the server waiting longest. Returns False
        if none keeps it waiting."""
        for oldest in self._waited_for:
            del self._waited_for[oldest]
            oldest.transport.abort()
            return True
        return False

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        answer: HttpAnswer | HttpStream
        answer, is_head = HttpAnswer(408, "the request did not come in time"), False
        try:
            async with asyncio.timeout(self._arrival):
                head = await reader.readuntil(b"\r\n\r\n")
            self._waited_for.pop(writer, None)
            asked = parse_request(head)
            is_head = asked.is_head
            # Otherwise a web page whose name resolves to loopback could read what only
            # users of this machine may see.
            if self.is_local and not is_own_name(asked.host):
                raise BadRequest(421, f"this is not {asked.host:.80}")
            answer = await self._answer(asked)
        except asyncio.LimitOverrunError:
            answer = HttpAnswer(431, f"expected a request of at most {HEAD} bytes")
        except BadRequest as error:
            answer = HttpAnswer(error.status, str(error))
        # A TimeoutError is an OSError, and has to come before it.
        except TimeoutError:  # the answer says so
            pass
        except (OSError, EOFError):
            raise
        except Exception:  # a defect of ours: to the log, and this one request fails
            log.exception("answering over HTTP")
            answer = HttpAnswer(500, "an internal error: see the log of this process")
        if isinstance(answer, HttpStream):
            await self._stream(writer, answer, is_head)
        else:
            await self._send(writer, encoded(answer, is_head))
        async with self._waited(writer):
            writer.write_eof()
            # Until the other side has it all: an abort would take it back.
            while await reader.read(HEAD):
                pass

    async def _stream(
        self, writer: asyncio.StreamWriter, stream: HttpStream, is_head: bool
    ) -> None:
        """Sends the pieces of a stream. Drops a client that does not take one in
        time."""
        # Nothing is kept for a client that does not read, but what the kernel keeps.
        writer.transport.set_write_buffer_limits(0)
        await self._send(writer, _head_of(200, stream.kind))
        async with contextlib.aclosing(stream.pieces) as pieces:
            if not is_head:
                async for piece in pieces:
                    await self._send(writer, piece)

    async def _send(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        async with self._waited(writer):
            writer.write(data)
            await writer.drain()

    @contextlib.asynccontextmanager
    async def _waited(self, writer: asyncio.StreamWriter) -> AsyncIterator[None]:
        """Runs a block that waits for the client, ``arrival`` seconds at most.
        Registers the wait, so that `_let_go` can drop the connection.

        Raises:
            ConnectionResetError: The client has gone.
            TimeoutError: The block took more than ``arrival`` seconds.
        """
        if writer.is_closing():  # to write then is a mistake, says uvloop
            raise ConnectionResetError
        self._waited_for[writer] = None
        async with asyncio.timeout(self._arrival):
            yield
        self._waited_for.pop(writer, None)


def encoded(answer: HttpAnswer, is_head: bool) -> bytes:
    """Returns the bytes of an answer, without the body if ``is_head``."""
    body = f"{answer.body}\n".encode() if answer.kind == TEXT else answer.body.encode()
    more = [f"Content-Length: {len(body)}"]
    more += [f"{name}: {value}" for name, value in answer.headers]
    if answer.status == 405:
        more.append("Allow: GET, HEAD")
    head = _head_of(answer.status, answer.kind, *more)
    return head if is_head else head + body


def _head_of(status: int, kind: str, *more: str) -> bytes:
    lines = [
        f"HTTP/1.1 {status} {_REASONS[status]}",
        f"Content-Type: {kind}",
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
        # One request a connection: nothing has to be kept for the next one.
        "Connection: close",
        *more,
    ]
    return "\r\n".join([*lines, "", ""]).encode("ascii")

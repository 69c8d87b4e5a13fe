"""A very small HTTP server, and the page that it serves.

GET and HEAD, one request a connection, everything bounded. It stands beside training,
on the network, open to all that can reach it, and probes must work with nothing but
zstrat installed. So it is not a framework: a request is a line and headers of 8 KiB
together, which have five seconds to come, and there are at most 64 connections. When
one more comes, the one goes that was waited for longest, for its request or for taking
its answer: a peer that only holds connections open cannot keep a probe out.

An answer may be a stream, for a page that is open. Each of its pieces has five seconds
to be taken, and the next is asked for then: a browser that is frozen holds one piece,
and is dropped. The number of streams is bounded by their source.

The page is one document. It needs nothing else and runs nothing else. Its script and
style are those of this package, by their digests: whatever else got into the page, out
of the name of a task or a line of a log, would not run, and could load nothing and send
nothing anywhere.

If other machines can reach the port, the page is for users who have its token. That
comes once in the address that its owner gives away (``/?token=...``); the page then
moves it into a cookie, so that it stands in no history, no log of a proxy and no
screenshot. Programs send ``Authorization: Bearer ...``.

Threats: guessing, so a token has to be long, and comparing takes the same time for all
wrong ones; another site that uses the cookie, so that it is sent by navigation alone,
nothing here changes anything, and no other site can read an answer. A connection is not
encrypted: anyone who can read the network between can read the token. Use ``ssh -L``
there.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import ipaddress
import json
import logging
import re
import secrets
import socket
from dataclasses import dataclass
from functools import cache, partial
from importlib import resources
from typing import TYPE_CHECKING, Final, final
from urllib.parse import parse_qs

from zstrat.telemetry import COLUMNS, Kind, task_metrics
from zstrat.transport._descriptors import give_up

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable


CONNECTIONS: Final = 64
"""A prober, a scraper, some browsers; each takes a descriptor and some KiB."""
HEAD: Final = 8192
"""Bytes of the request line and the headers. Browsers send 1 KiB."""
ARRIVAL: Final = 5.0
"""Seconds for the request to come, and again for the answer to be taken."""

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
    """The subject of a request: ``query`` is what follows the question mark, and
    ``accept``, ``host``, ``cookie`` and ``authorization`` are headers."""

    path: str
    accept: str
    host: str
    is_head: bool
    query: str = ""
    cookie: str = ""
    authorization: str = ""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """``headers`` are added to those that every answer has; ours alone, for nothing
    looks for line ends in them."""

    status: int
    body: str
    kind: str = TEXT
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class HttpStream:
    """An answer of 200 in ``pieces``, each of which is sent when it is there, until
    there are no more."""

    pieces: AsyncGenerator[bytes, None]
    kind: str


class BadRequest(ValueError):
    """The other side sent something else than a request that is answered here."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


def parse_request(head: bytes) -> HttpRequest:
    """Parses the bytes of a request, up to the empty line.

    Raises:
        BadRequest: They are not a request, or not one that this server answers.
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
    """Returns whether a ``Host`` header names this machine as its users do: loopback,
    or a number. Any other name may be that of a stranger's page, which has it resolve
    to loopback, to read what is here."""
    name = re.sub(r":\d*$", "", host).strip("[]").lower()
    if name in ("", "localhost"):
        return True
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(name))
    return False


def _on_all_interfaces(port: int) -> socket.socket:
    """Listens on all interfaces: for IPv4, and for IPv6 where the system has it."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=True
        )
    return socket.create_server(("", port))


class HttpServer:
    """Answers requests with what ``answer`` returns, on the running loop.

    Args:
        arrival: Seconds that a request may take to come, and an answer to be taken.
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
        """Those that have to send their request, or to take their answer, the one that
        was waited for longest first."""
        self.is_local = True
        """Whether only this machine can reach it."""

    async def start(self, host: str, port: int) -> int:
        """Binds, and answers from now on; returns the port.

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
        """Stops listening. Connections end with the loop."""
        if self._server is not None:
            self._server.close()

    def forget(self) -> None:
        """Gives up the port in a forked process: it is the parent's."""
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
        """Drops the connection that was waited for longest, if there is one."""
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
            answer = HttpAnswer(500, "an error that the log of this process has")
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
        """Sends the pieces. A client that does not take one is dropped."""
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
        """Runs a block that waits for the other side, ``arrival`` seconds at most.
        Registers the wait, so that the connection that waits longest can be dropped.

        Raises:
            ConnectionResetError: The other side has gone.
            TimeoutError: It took too long.
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


_FORM: Final = re.compile(r"[A-Za-z0-9_-]{16,128}")
"""Characters that are not special in an address or a cookie. 16 of them are 96 bits."""


@final
class PageToken:
    """The token of one port.

    Args:
        secret: The token; None makes one.

    Raises:
        ValueError: It is short enough to be guessed, or has other characters.
    """

    def __init__(self, secret: str | None = None) -> None:
        token = secrets.token_urlsafe(24) if secret is None else secret
        if _FORM.fullmatch(token) is None:
            raise ValueError(
                "the token of a page has 16 to 128 letters, digits, - and _, as "
                f"secrets.token_urlsafe() makes them; this one has {len(token)} "
                "characters, or others"
            )
        self.secret: Final = token

    def is_same(self, secret: str) -> bool:
        """Returns whether this text is the token. Takes the same time for all that are
        not."""
        return hmac.compare_digest(secret.encode(), self.secret.encode())

    def is_in_address(self, asked: HttpRequest) -> bool:
        """Returns whether the address has the token, which then becomes a cookie."""
        return any(map(self.is_same, parse_qs(asked.query).get("token", ())))

    def is_shown(self, asked: HttpRequest, port: int) -> bool:
        """Returns whether the cookie, or the header for programs, has the token."""
        scheme, _, secret = asked.authorization.partition(" ")
        if scheme.lower() == "bearer" and self.is_same(secret.strip()):
            return True
        pairs = (each.strip().partition("=") for each in asked.cookie.split(";"))
        return any(name == _name(port) and self.is_same(it) for name, _, it in pairs)

    def cookie(self, port: int) -> str:
        """Returns the value of ``Set-Cookie``. A link in a letter works, so it is
        Lax."""
        return f"{_name(port)}={self.secret}; Path=/; HttpOnly; SameSite=Lax"


def _name(port: int) -> str:
    """Returns the name of the cookie of a port. Browsers send the cookies of a host to
    all its ports, so each port needs its own name."""
    return f"zstrat_{port}"


_SCRIPTS: Final = ("charts.js", "page.js")
"""In this order; what the first defines the second uses."""


@cache
def document() -> HttpAnswer:
    """Returns the answer that has the page."""
    style = f"\n{_asset('page.css')}"
    known = {each.name: each for job in ("ps", "worker") for each in task_metrics(job)}
    numbers = [
        [heading, name, known[name].unit, known[name].kind is Kind.RATE]
        for name, heading in COLUMNS.items()
        if heading
    ]
    parts = [f"const NUMBERS = {json.dumps(numbers)};", *map(_asset, _SCRIPTS)]
    script = "\n" + "\n".join(parts)
    text = _asset("page.html").replace("{style}", style).replace("{script}", script)
    policy = (
        "default-src 'none'",
        f"script-src {_digest(script)}",
        f"style-src {_digest(style)}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
    return HttpAnswer(
        200,
        text,
        "text/html; charset=utf-8",
        (
            ("Content-Security-Policy", "; ".join(policy)),
            ("Cross-Origin-Opener-Policy", "same-origin"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("Referrer-Policy", "no-referrer"),
            ("X-Frame-Options", "DENY"),
        ),
    )


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("page", name).read_text("utf-8")


def _digest(text: str) -> str:
    """Returns the name of a script or style in a Content-Security-Policy: the digest of
    the text in its element."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"

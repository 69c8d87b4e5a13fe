"""The HTTP server of this process: one for all tasks in it.

``/healthz``: whether the event loops run. ``/readyz``: whether the tasks are ready.
``/metrics``: counts, for Prometheus. ``/``: the web page, with ``/events``. The server
has its own thread, so it answers even if an event loop hangs, and does not slow down
training.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import socket
import threading
from typing import TYPE_CHECKING, Final, cast, final

from zstrat.config import Timeouts, environment, settings_from
from zstrat.transport._loop import Portal

from ._http import HttpAnswer, HttpRequest, HttpServer, HttpStream
from ._page import PageToken, document
from ._register import REGISTER, exposition
from ._watch import VIEWERS, RunWatch

if TYPE_CHECKING:
    from zstrat.config import Settings

    from ._register import RegisterEntry, TaskStatistics

_BINDING: Final = 10.0
"""Seconds that binding may take, including the lookup of a name."""

_NO_TOKEN: Final = (
    "other machines need a token for this page: set ZSTRAT_HTTP_TOKEN, use "
    "zs.dashboard, or bind it to loopback and connect by ssh -L; /healthz, /readyz and "
    "/metrics need none"
)
_WRONG: Final = (
    "this page needs a token: open the address with ?token=... from "
    "zs.dashboard(...).url of the program, or send it as Authorization: Bearer ..."
)

log = logging.getLogger("zstrat.transport.health")


def address_of(text: str) -> tuple[str, int]:
    """Parses ``127.0.0.1:9100``, ``[::1]:9100`` or ``9100`` (on loopback).

    Raises:
        ValueError: The text is not such an address.
    """
    pattern = r"(?:\[([0-9A-Fa-f:.]+)\]:|([^\s:/\[\]]+):)?(\d{1,5})"
    match = re.fullmatch(pattern, text) if isinstance(text, str) else None
    if match is None or int(match[3]) > 65535:
        raise ValueError(
            f"HTTP at {text!r:.80}: expected HOST:PORT, as in 127.0.0.1:9100, or "
            "*:9100 for all interfaces"
        )
    return match[1] or match[2] or "127.0.0.1", int(match[3])


@final
class HealthServer:
    """The HTTP server of this process, until `close` or the end of the program.

    A context manager. Created by `serve_http`, and with ``has_page`` by `dashboard`.
    """

    def __init__(
        self,
        text: str,
        liveness_timeout: float,
        token: PageToken | None,
        has_page: bool,
    ) -> None:
        self.asked_for = text
        self._timeout, self._token = liveness_timeout, token
        self._http = HttpServer(self._answer)
        self._watch = RunWatch(liveness_timeout)
        host, port = address_of(text)
        self._portal = Portal("zstrat http")
        try:
            # Before the bind, so that an interrupted one is closed, too.
            self._portal.at_close(self._end)
            bound = self._portal.run(
                self._http.start(host, port), _BINDING, f"binding {text} for HTTP"
            )
            self.port = bound
            self.address = f"[{host}]:{bound}" if ":" in host else f"{host}:{bound}"
            """HOST:PORT of the server, with the actual port if 0 was asked for."""
            if has_page:
                self.open_page(None)
            log.info("http://%s has /healthz, /readyz and /metrics", self.address)
            # Here, not in `_serve`: a Ctrl-C between the two would leave a port that no
            # later call finds.
            _PRESENT.server = self
        except BaseException as error:  # to the caller; Ctrl-C, too
            self._portal.close()
            if isinstance(error, OSError):
                raise _worded(error, text) from error
            raise

    @property
    def url(self) -> str:
        """URL of the page, with the page's token if it has one."""
        host, _, port = self.address.rpartition(":")
        if host in ("*", "0.0.0.0", "[::]"):
            host = socket.gethostname()
        query = "" if self._token is None else f"?token={self._token.secret}"
        return f"http://{host}:{port}/{query}"

    def open_page(self, secret: str | None) -> None:
        """Starts to serve the web page to readers that have the token ``secret``. None:
        the present token, or a new one if other machines can reach the page.

        Raises:
            ValueError: The token is invalid, or the page has another one.
        """
        if self._token is None and (secret is not None or not self._http.is_local):
            self._token = PageToken(secret)
        elif self._token and secret is not None and not self._token.is_same(secret):
            raise ValueError(
                f"the page at {self.address} already has another token: leave the "
                "token out, or close the server first"
            )
        self._portal.call_soon(self._watch.begin)

    @property
    def is_open(self) -> bool:
        return not self._portal.is_closed

    def close(self) -> None:
        """Stops the server. Idempotent."""
        self._portal.close()

    def forget(self) -> None:
        """Gives up the port in a forked process, where it belongs to the parent."""
        self._http.forget()

    def __enter__(self) -> HealthServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _end(self) -> None:
        self._http.close()
        await self._watch.end()

    async def _answer(self, asked: HttpRequest) -> HttpAnswer | HttpStream:
        match asked.path:
            case "/" | "/events":
                return self._refused(asked) or self._page(asked.path)
            case "/healthz":
                return await self._probed(ready=False)
            case "/readyz":
                return await self._probed(ready=True)
            case "/metrics":
                return await self._metrics(asked.accept)
        return HttpAnswer(404, "not found; there are /, /healthz, /readyz and /metrics")

    def _page(self, path: str) -> HttpAnswer | HttpStream:
        if path == "/":
            return document()
        if self._watch.is_full:
            words = f"at most {VIEWERS} pages may be open: close one first"
            return HttpAnswer(503, words)
        return HttpStream(self._watch.events(), "text/event-stream")

    def _refused(self, asked: HttpRequest) -> HttpAnswer | None:
        """Returns the answer that refuses a request for the page; None if the request
        is allowed."""
        if self._token is None:
            return None if self._http.is_local else HttpAnswer(403, _NO_TOKEN)
        if self._token.is_shown(asked, self.port):
            return None
        if asked.path == "/" and self._token.is_in_address(asked):
            cookie = ("Set-Cookie", self._token.cookie(self.port))
            # The address with the token must not travel to other sites either.
            no_referrer = ("Referrer-Policy", "no-referrer")
            # The browser asks again, without the token in what it shows and remembers.
            to = ("Location", "./")
            return HttpAnswer(303, "see ./", headers=(to, cookie, no_referrer))
        return HttpAnswer(401, _WRONG, headers=(("WWW-Authenticate", "Bearer"),))

    async def _probed(self, *, ready: bool) -> HttpAnswer:
        registered = REGISTER.present()
        states = await asyncio.gather(*(self._state(each) for each in registered))
        # A process without tasks is alive, but not ready.
        lines, fails = [], ready and not registered
        for each, (turns, reason) in zip(registered, states, strict=True):
            # Alive is a loop that turns; ready is a task without a reason to wait.
            wrong = not turns or (ready and bool(reason))
            fails = fails or wrong
            # Other machines get no reasons, which contain addresses.
            words = reason if self._http.is_local or not turns else "not ready"
            lines.append(f"{each.name}: {words if wrong else 'ok'}")
        if not registered:
            lines.append("no task runs in this process yet" if ready else "ok")
        return HttpAnswer(503 if fails else 200, "\n".join(lines))

    async def _state(self, registered: RegisterEntry) -> tuple[bool, str]:
        """Returns whether the loop of a registered owner runs, and why the owner is not
        ready."""
        try:
            return True, await registered.readiness.ask(self._timeout)
        except TimeoutError:
            words = f"its event loop has not turned for {self._timeout:g} s"
            return False, words
        except RuntimeError:  # its loop was closed meanwhile
            return True, "it has ended"

    async def _statistics(self, registered: RegisterEntry) -> TaskStatistics | None:
        """Returns name and statistics of a registered owner; None if its loop hangs or
        has ended (/healthz reports that)."""
        try:
            return registered.name, await registered.statistics(self._timeout)
        except (TimeoutError, RuntimeError):
            return None

    async def _metrics(self, accept: str) -> HttpAnswer:
        # Concurrently: several hanging loops delay the answer no longer than one.
        reported = await asyncio.gather(*map(self._statistics, REGISTER.present()))
        tasks = [each for each in reported if each is not None]
        try:
            return HttpAnswer(
                200, *exposition(tasks, accept, names=self._http.is_local)
            )
        except ImportError as error:
            return HttpAnswer(501, str(error))


def _worded(error: OSError, text: str) -> OSError:
    """Converts an error of binding to one that names a remedy. A host name that cannot
    be resolved becomes EADDRNOTAVAIL."""
    number = error.errno or errno.EADDRNOTAVAIL
    if isinstance(error, socket.gaierror):
        number, words = (
            errno.EADDRNOTAVAIL,
            f"that name cannot be resolved ({error.strerror})",
        )
    elif number == errno.EADDRINUSE:
        words = "another process has that port; choose another one, or 0 for any"
    elif number == errno.EADDRNOTAVAIL:
        words = "this machine does not have that address"
    elif isinstance(error, PermissionError):
        words = "this user may not bind it; choose a port from 1024 on"
    else:
        words = error.strerror or str(error)
    return OSError(number, f"HTTP at {text}: {words}")


class _Present:
    """Holds the HTTP server of this process, if there is one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.server: HealthServer | None = None

    def forget(self) -> None:
        """Forgets the server after a fork: its thread runs in the parent."""
        if self.server is not None:
            self.server.forget()
        self.lock, self.server = threading.Lock(), None


_PRESENT: Final = _Present()
os.register_at_fork(after_in_child=_PRESENT.forget)


def serve_http(
    address: str | int,
    *,
    liveness_timeout: float | None = None,
    token: str | None = None,
) -> HealthServer:
    """Serves ``/healthz``, ``/readyz`` and ``/metrics`` of this process, and the page
    of `dashboard` at ``/``.

    On loopback the server shows everything to every client. At another address it shows
    health and counts to every client, and the page to clients that have the ``token``.
    A process serves HTTP at one port.

    Args:
        address: ``HOST:PORT``, or a port of loopback, as text or a number; 0 is any
            free port.
        liveness_timeout: Seconds after which an event loop that does not run is
            reported as hanging. None: the default of ``Timeouts.liveness``.
        token: The token that a client needs to see the page, 16 characters or more.
            None: on loopback no token is needed; elsewhere the page is not shown.

    Raises:
        ValueError: The address or the token is invalid, or this process serves HTTP at
            another address.
        OSError: The address cannot be bound; the error says why.

    Cancellation: Ctrl-C leaves no port, or the port that the next call returns.
    """
    return _serve(
        address, liveness_timeout or Timeouts().liveness, token, has_page=False
    )


def _serve(
    address: str | int, liveness_timeout: float, token: str | None, *, has_page: bool
) -> HealthServer:
    """Returns the HTTP server of this process, and starts one if there is none.

    Raises, cancellation: as `serve_http`.
    """
    is_number = isinstance(address, int) and not isinstance(address, bool)
    text = str(address) if is_number else cast("str", address)
    with _PRESENT.lock:
        server = _PRESENT.server
        if server is None or not server.is_open:
            known = None if token is None else PageToken(token)
            return HealthServer(text, liveness_timeout, known, has_page)
        if server.asked_for != text:
            raise ValueError(
                f"HTTP at {text}: this process already serves it at {server.address}: "
                "close that server first"
            )
        if has_page or token is not None:
            server.open_page(token)
        return server


def dashboard(
    address: str | int | None = None, *, token: str | None = None
) -> HealthServer:
    """Serves a web page that shows the run of this program. Open ``url`` of the
    returned server in a browser.

    The page shows steps per second, values of `log_scalar`, how each worker spends its
    time, staleness, bytes, memory, the tasks with their states and last errors, and
    their logs. It is updated once a second, on a separate thread, and needs no network
    except to this process. A page that is open when the program ends says so, and keeps
    the last values.

    On loopback every user of this machine can see it; from another machine use
    ``ssh -L 9100:127.0.0.1:9100``. At another address it needs a token, which is
    created if none is given, and is part of ``url``. The connection is not encrypted.

    Args:
        address: See `serve_http`. None: the port of this process, or any free port of
            loopback.
        token: The token that a client needs to see the page, 16 characters or more.
            None: ``ZSTRAT_HTTP_TOKEN``, if set.

    Raises:
        ValueError, OSError: As `serve_http`.

    Cancellation: Ctrl-C leaves no port, or the one that the next call returns.
    """
    token = token or settings_from(environment()).http_token or None
    with _PRESENT.lock:
        server = _PRESENT.server
    # Wherever it is: a process has one port for all.
    if address is None and server is not None and server.is_open:
        server.open_page(token)
        return server
    place = 0 if address is None else address
    return _serve(place, Timeouts().liveness, token, has_page=True)


def serve_from_settings(settings: Settings) -> None:
    """Serves HTTP at ``settings.http``, unless this process already serves HTTP.

    Raises:
        ValueError, OSError: As `serve_http`.
    """
    with _PRESENT.lock:
        has_one = _PRESENT.server is not None and _PRESENT.server.is_open
    if settings.http and not has_one:
        token = settings.http_token or None
        serve_http(
            settings.http, liveness_timeout=settings.timeouts.liveness, token=token
        )

"""The page over real HTTP: who sees it, what comes, and what a slow reader costs."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import re
import socket
import struct
import threading

import pytest

import zstrat as zs
from zstrat.transport import Portal
from zstrat.transport.health import (
    VIEWERS,
    HttpServer,
    HttpStream,
    _watch,
    register,
    serve_http,
    unregister,
)

HOSTILE = "</script><img src=x onerror=alert(1)>\n\ndata: {}\n\n\u2028\udc80"


class Session:
    """A program's session as the port sees it: what it says, when it is asked."""

    def __init__(self, metrics):
        self.metrics = metrics
        self.asked = 0
        self.asked_by = set()

    def readiness(self):
        return ""

    def statistics(self):
        self.asked += 1
        self.asked_by.add(threading.current_thread().name)
        return {"coordinator": self.metrics} if self.metrics is not None else {}


@contextlib.contextmanager
def running(metrics, name="chief:0", **how):
    portal, session = Portal("zstrat run of a test"), Session(metrics)
    register(session, name, portal.loop, **how)
    session.loop = portal.loop
    try:
        yield session
    finally:
        unregister(session)
        portal.close()


def line_to(server):
    return http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)


def get(server, path, **headers):
    with contextlib.closing(line_to(server)) as line:
        line.request("GET", path, headers=headers)
        reply = line.getresponse()
        return reply.status, reply.read().decode(), reply.headers


@contextlib.contextmanager
def events(server, **headers):
    """The events of the page: pairs of a name and its data."""
    with contextlib.closing(line_to(server)) as line:
        line.request("GET", "/events", headers=headers)
        with contextlib.closing(line.getresponse()) as reply:
            assert reply.status == 200
            assert reply.headers["Content-Type"] == "text/event-stream"
            yield read_events(reply)


def first_of(seen, state):
    return next(frame for _, frame in seen if frame["state"] == state)


def read_events(reply):
    name, data = "message", ""
    for each in iter(reply.readline, b""):
        field, _, value = each.decode().rstrip("\n").partition(": ")
        if field == "data":
            data = value
        elif field == "event":
            name = value
        elif not field and data:
            yield name, json.loads(data)
            name, data = "message", ""


def test_the_numbers_of_the_page_are_those_of_the_run():
    told = {
        "steps_per_s": 1 / 3,
        "tasks": {HOSTILE: {"state": "lost", "last_error": HOSTILE}},
        "logs": [[1.0, "worker:0", "ERROR", HOSTILE]],
    }
    with running(told) as session, zs.dashboard() as server:
        with events(server) as first, events(server) as second:
            for seen in (first, second):
                name, frame = next(seen)
                assert (name, frame["state"], frame["kind"]) == (
                    "message",
                    "runs",
                    "whole",
                )
                assert frame["metrics"] == told
            session.metrics = {**told, "steps_per_s": 2 / 3}
            changes = (frame for _, frame in first)
            change = next(
                each for each in changes if each["metrics"]["steps_per_s"] == 2 / 3
            )
            assert change["kind"] == "change"
            assert change["metrics"]["logs"] == []
            server.close()
            assert [name for name, _ in second][-1] == "end"


@pytest.mark.parametrize("anywhere", [True, False])
def test_what_takes_long_is_put_together_where_the_page_is(anywhere):
    with (
        running({"steps_per_s": 1.0}, anywhere=anywhere) as session,
        zs.dashboard() as server,
        events(server) as seen,
    ):
        assert first_of(seen, "runs")["metrics"] == {"steps_per_s": 1.0}
    where = "http" if anywhere else "run of a test"
    assert session.asked_by == {f"zstrat {where}"}


def test_a_run_whose_loop_hangs_is_not_asked_from_elsewhere():
    hangs = threading.Event()
    with (
        running({}, anywhere=True) as session,
        serve_http(0, liveness_timeout=0.05) as server,
    ):
        session.loop.call_soon_threadsafe(hangs.wait)
        server.open_page(None)
        with events(server) as seen:
            frame = first_of(seen, "hangs")
        hangs.set()
    assert frame["words"] == "its event loop has not turned for 0.05 s"
    assert not session.asked


def test_the_document_runs_nothing_but_its_own_and_loads_nothing():
    with zs.dashboard() as server:
        status, text, headers = get(server, "/")
        policy = headers["Content-Security-Policy"]
        assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        assert get(server, "/?x=y")[0] == 200
        assert get(server, "/page.js")[0] == 404
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert headers["Referrer-Policy"] == "no-referrer"
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert not re.search(r"(inner|outer)HTML|insertAdjacent|document\.write|eval", text)
    assert "{style}" not in text
    assert "{script}" not in text


def test_a_process_without_a_run_says_so_and_shows_the_one_that_comes():
    with zs.dashboard() as server, events(server) as seen:
        assert next(seen)[1]["state"] == "none"
        with running(None) as session:
            words = first_of(seen, state="waits")["words"]
            assert "it has no ClusterCoordinator yet" in words
            session.metrics = {"steps_per_s": 7.0}
            assert first_of(seen, state="runs")["metrics"] == {"steps_per_s": 7.0}
        assert first_of(seen, state="ended")["metrics"] == {"steps_per_s": 7.0}


def test_off_loopback_the_page_is_shown_for_its_token_alone():
    with running({"steps_per_s": 1.0}), zs.dashboard("0.0.0.0:0") as server:
        secret = server.url.partition("?token=")[2]
        assert len(secret) >= 32
        for path in ("/", "/events", "/?token=" + "a" * 32, f"/events?token={secret}"):
            status, words, headers = get(server, path)
            assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
            assert "steps_per_s" not in words
            assert secret not in words
        assert get(server, "/healthz")[0] == 200
        status, words, headers = get(server, f"/?token={secret}")
        assert (status, headers["Location"]) == (303, "./")
        assert {"HttpOnly", "SameSite=Lax"} <= {*headers["Set-Cookie"].split("; ")}
        cookie = headers["Set-Cookie"].partition(";")[0]
        assert get(server, "/", Cookie=cookie)[0] == 200
        with events(server, Authorization=f"Bearer {secret}") as seen:
            assert next(seen)[1]["metrics"] == {"steps_per_s": 1.0}
        with pytest.raises(ValueError, match="another token"):
            zs.dashboard(token="b" * 32)
        assert zs.dashboard(token=secret) is server
        assert zs.dashboard() is server


def test_a_port_for_probes_shows_no_page_to_other_machines():
    with zs.serve_http("0.0.0.0:0") as server:
        status, words, _ = get(server, "/")
        assert (status, "ZSTRAT_HTTP_TOKEN" in words) == (403, True)
        assert get(server, "/events")[0] == 403
    with zs.serve_http("127.0.0.1:0", token="c" * 20) as server:
        assert get(server, "/")[0] == 401
        assert get(server, "/", Authorization=f"Bearer {'c' * 20}")[0] == 200


def test_a_page_of_a_stranger_cannot_be_led_here():
    with zs.dashboard() as server:
        assert get(server, "/events", Host="evil.example")[0] == 421


def test_pages_are_bounded_and_probes_get_through():
    with zs.dashboard() as server, contextlib.ExitStack() as open_pages:
        for _ in range(VIEWERS):
            next(open_pages.enter_context(events(server)))
        status, words, _ = get(server, "/events")
        assert (status, f"at most {VIEWERS} pages" in words) == (503, True)
        assert get(server, "/healthz")[0] == 200


def test_nobody_is_asked_while_nobody_looks():
    with running({"steps_per_s": 1.0}) as session:
        with zs.serve_http("127.0.0.1:0") as server:
            assert get(server, "/")[0] == 200
            assert session.asked == 0
            with events(server) as seen:
                next(seen)
            assert session.asked > 0


def test_a_page_that_goes_is_no_error(caplog):
    with running({"steps_per_s": 1.0}) as session, zs.dashboard() as server:
        at = ("127.0.0.1", server.port)
        with events(server) as stays, socket.create_connection(at, timeout=60) as goes:
            goes.sendall(b"GET /events HTTP/1.1\r\n\r\n")
            assert goes.recv(4)
            # Not a goodbye, but a reset: what is sent there from now on fails.
            goes.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
            goes.close()
            last = session.asked + 3
            assert next(frame for _, frame in stays if session.asked > last)
    assert [each for each in caplog.records if each.levelno > logging.INFO] == []


async def test_who_does_not_read_is_dropped_and_holds_one_piece():
    made, over = 0, asyncio.Event()

    async def pieces():
        nonlocal made
        try:
            while True:
                made += 1
                yield bytes(8 * 2**20)
        finally:
            over.set()

    async def answer(_):
        return HttpStream(pieces(), "text/event-stream")

    server = HttpServer(answer, arrival=0.2)
    port = await server.start("127.0.0.1", 0)
    with socket.create_connection(("127.0.0.1", port), timeout=60) as frozen:
        frozen.sendall(b"GET /events HTTP/1.1\r\n\r\n")
        await asyncio.wait_for(over.wait(), 60)
    assert made < 4  # the kernel may have taken a piece or two
    server.close()


async def test_a_page_that_leaves_too_late_for_the_end_is_no_error(monkeypatch):
    monkeypatch.setattr(_watch, "_PARTING", 0.01)
    watch = _watch.RunWatch(60.0)
    pieces = watch.events()
    assert (await anext(pieces)).startswith(b"retry:")
    await watch.end()
    await pieces.aclose()

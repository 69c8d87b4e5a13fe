"""The HTTP port of a process: what is answered, and to whom it is not."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import http.client
import itertools
import logging
import math
import socket
import sys
import threading
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strikes import is_struck, strikes

import zstrat as zs
from zstrat.cluster import free_ports
from zstrat.config import Settings
from zstrat.telemetry import Unit, Windowed
from zstrat.transport import Portal
from zstrat.transport.health import (
    CONNECTIONS,
    BadRequest,
    HttpServer,
    parse_request,
    register,
    unregister,
)


class Thing:
    """What lives on a loop and says how it is."""

    def __init__(self, reason="", values=None):
        self.reason, self.values = reason, values or {}

    def readiness(self):
        return self.reason

    def statistics(self):
        return self.values


@pytest.fixture
def port():
    with zs.serve_http("127.0.0.1:0", liveness_timeout=20) as server:
        yield server.address


@contextlib.contextmanager
def living(thing, name):
    portal = Portal("zstrat thing of a test")
    register(thing, name, portal.loop)
    try:
        yield portal
    finally:
        unregister(thing)
        portal.close()


def test_what_has_ended_is_not_kept_though_nobody_asks():
    """As a program does that makes one session after the other, without HTTP."""
    ended = []
    for _ in range(4):
        thing, portal = Thing(), Portal("zstrat thing of a test")
        register(thing, "gone", portal.loop)
        portal.close()
        ended.append(weakref.ref(portal.loop))
    del thing, portal
    with living(Thing(), "here"):
        gc.collect()
        assert [loop() for loop in ended] == [None] * 4


def get(address, path, method="GET", **headers):
    host, _, number = address.rpartition(":")
    connection = http.client.HTTPConnection(host.strip("[]"), int(number), timeout=60)
    with contextlib.closing(connection):
        connection.request(method, path, headers=headers)
        reply = connection.getresponse()
        return reply.status, reply.read().decode()


def sent(address, data):
    """All that comes back for these bytes, until the other side ends it."""
    host, _, number = address.rpartition(":")
    with socket.create_connection((host, int(number)), timeout=60) as line:
        line.sendall(data)
        line.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            return b"".join(iter(lambda: line.recv(65536), b""))
    return b""


def test_a_process_without_anything_is_healthy_and_not_ready(port):
    assert get(port, "/healthz") == (200, "ok\n")
    assert get(port, "/readyz") == (503, "no task runs in this process yet\n")


def test_what_lives_here_is_ready_or_says_why(port):
    with living(Thing(), "ps:0"), living(Thing("it ends: SIGTERM"), "worker:1"):
        assert get(port, "/healthz?x=1") == (200, "ps:0: ok\nworker:1: ok\n")
        words = "ps:0: ok\nworker:1: it ends: SIGTERM\n"
        assert get(port, "/readyz") == (503, words)
    assert get(port, "/readyz")[0] == 503


def test_a_loop_that_hangs_is_said_by_a_thread_that_does_not():
    release = threading.Event()
    thing = Thing()
    with (
        zs.serve_http("127.0.0.1:0", liveness_timeout=0.3) as server,
        living(thing, "ps:0") as portal,
    ):
        portal.call_soon(release.wait)
        words = "ps:0: its event loop has not turned for 0.3 s\n"
        assert get(server.address, "/healthz") == (503, words)
        assert get(server.address, "/readyz") == (503, words)
        release.set()
    with zs.serve_http("127.0.0.1:0") as server, living(thing, "ps:0"):
        assert get(server.address, "/healthz") == (200, "ps:0: ok\n")


def test_loops_that_hang_are_waited_for_together():
    """All are asked before one of them has answered: the first answers when the second
    has been asked."""
    pytest.importorskip("prometheus_client")
    asked = threading.Event()

    class First(Thing):
        def statistics(self):
            assert asked.wait(60)
            return self.values

    class Second(Thing):
        def statistics(self):
            asked.set()
            return self.values

    told = {"task": {"uptime": 1.0}}
    first, second = First(values=told), Second(values=told)
    with (
        living(first, "ps:0"),
        living(second, "ps:1"),
        zs.serve_http("127.0.0.1:0", liveness_timeout=30) as server,
    ):
        status, text = get(server.address, "/metrics")
    assert status == 200
    for task in ("ps:0", "ps:1"):
        assert f'zstrat_uptime_seconds{{task="{task}"}} 1.0\n' in text


def test_head_has_no_body_and_other_methods_are_refused(port):
    assert get(port, "/healthz", "HEAD") == (200, "")
    assert get(port, "/healthz", "POST")[0] == 405
    assert get(port, "/none")[0] == 404
    assert b"Allow: GET, HEAD" in sent(port, b"DELETE / HTTP/1.1\r\n\r\n")


def test_a_page_that_was_led_here_by_its_own_name_learns_nothing(port):
    assert get(port, "/healthz", Host="evil.example:9100")[0] == 421
    assert get(port, "/healthz", Host="LOCALHOST:9100")[0] == 200
    assert get(port, "/healthz", Host="[::1]:9100")[0] == 200


def test_off_loopback_nobody_hears_why_or_where():
    pytest.importorskip("prometheus_client")
    values = {"task": {"uptime": 2.5, "host": "node7", "versions": {"jax": "0.1"}}}
    thing = Thing("/job:ps/task:0 at node7 is gone", values)
    with living(thing, "ps:0"), zs.serve_http("0.0.0.0:0") as server:
        at = "127.0.0.1:" + server.address.rpartition(":")[2]
        assert get(at, "/readyz", Host="ps-0.ps") == (503, "ps:0: not ready\n")
        status, text = get(at, "/metrics")
        assert (status, "node7" in text) == (200, False)
        assert 'zstrat_uptime_seconds{task="ps:0"} 2.5\n' in text
    with living(thing, "ps:0"), zs.serve_http("127.0.0.1:0") as server:
        assert 'host="node7",jax="0.1"' in get(server.address, "/metrics")[1]


def test_off_loopback_a_loop_that_hangs_is_said():
    go_on = threading.Event()
    with (
        living(Thing("/job:ps/task:0 at node7 is gone"), "ps:0") as portal,
        zs.serve_http("0.0.0.0:0", liveness_timeout=0.2) as server,
    ):
        portal.call_soon(go_on.wait, 60)
        at = "127.0.0.1:" + server.address.rpartition(":")[2]
        said = "ps:0: its event loop has not turned for 0.2 s\n"
        assert get(at, "/healthz") == (503, said)
        go_on.set()


def test_without_prometheus_the_extra_is_named(port, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    status, words = get(port, "/metrics")
    assert status == 501
    assert "pip install 'zstrat[prometheus]'" in words
    assert get(port, "/healthz")[0] == 200


def test_a_port_that_is_taken(port):
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"serves it at {port}"):
            zs.serve_http(taken)
        zs.serve_http("127.0.0.1:0").close()  # the one that is there
        with pytest.raises(OSError, match=f"{taken}: another process has that port"):
            zs.serve_http(taken)
    with pytest.raises(OSError, match="HTTP"):
        zs.serve_http("192.0.2.1:9100")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_anywhere_leaves_no_port_or_one_that_the_next_call_has():
    files = "health/_served.py", "transport/_loop.py", "zstrat/threads.py"
    (number,) = free_ports(1)
    made = []
    for _ in strikes(lambda: made.append(zs.dashboard(number)), *files):
        with zs.dashboard(number) as server:
            assert get(server.address, "/healthz") == (200, "ok\n")
    for place in itertools.count(1):
        with made.pop() as server:  # and closes it again
            struck = is_struck(server.close, place, *files)
        if not struck:
            break
        made.append(zs.dashboard(number))
    assert place > 10


@pytest.mark.parametrize("text", ["", ":80", "a:b", "1:2:3", "http://a:1", "1:70000"])
def test_an_address_that_is_none(text):
    with pytest.raises(ValueError, match=r"HOST.*PORT.*\b127\.0\.0\.1\b"):
        zs.serve_http(text)


@pytest.mark.parametrize("wrong", [None, True, -1, 65536, 1.5, b"9100"])
def test_what_is_no_address_at_all(wrong):
    with pytest.raises(ValueError, match=r"HTTP.*HOST.*PORT"):
        zs.serve_http(wrong)


def test_a_port_may_be_a_number():
    with zs.serve_http(0) as server:
        assert get(server.address, "/healthz") == (200, "ok\n")
        assert zs.serve_http("0") is server


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\xfc" * 9 + b"\r\n\r\n", b"400"),
        (b"GET /healthz\r\n\r\n", b"400"),
        (b"GET http://127.0.0.1/ HTTP/1.1\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nno header\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nA: " + b"x" * 9000 + b"\r\n\r\n", b"431"),
        (b"GET / HTTP/1.1\r\n", b""),
        (b"", b""),
    ],
)
def test_garbage_costs_its_own_connection(port, data, status):
    assert sent(port, data)[9:12] == status
    assert get(port, "/healthz")[0] == 200


@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_or_refused(head):
    with contextlib.suppress(BadRequest):
        assert parse_request(head + b"\r\n\r\n").path.startswith("/")


def test_who_holds_connections_open_cannot_keep_a_probe_out(port):
    host, _, number = port.rpartition(":")
    at = (host, int(number))
    with contextlib.ExitStack() as held:
        for _ in range(2 * CONNECTIONS):
            line = held.enter_context(socket.create_connection(at, timeout=60))
            line.sendall(b"GET /healthz HTTP/1.1\r\nA: ")
        assert get(port, "/healthz") == (200, "ok\n")


def test_the_end_is_quiet_whoever_is_still_connected(caplog, capfd):
    server = zs.serve_http("127.0.0.1:0")
    host, _, number = server.address.rpartition(":")
    with socket.create_connection((host, int(number)), timeout=60) as idle:
        assert get(server.address, "/healthz")[0] == 200
        server.close()
        with contextlib.suppress(ConnectionResetError):
            assert idle.recv(1) == b""
    gc.collect()
    assert [each for each in caplog.records if each.levelno > logging.INFO] == []
    assert "Traceback" not in capfd.readouterr().err


async def test_a_request_that_never_ends_does():
    async def answer(_):
        raise AssertionError

    server = HttpServer(answer, arrival=0.1)
    port = await server.start("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /healthz HTTP/1.1\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
    writer.close()
    await writer.wait_closed()
    server.close()


def test_settings_that_name_no_address_serve_nothing():
    from zstrat.transport.health import serve_from_settings

    before = threading.active_count()
    serve_from_settings(Settings())
    assert threading.active_count() == before


def test_histograms_are_told_as_prometheus_counts_them():
    """Against the values themselves: how many are not above each edge."""
    pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    took = [1e-7, 2.0**-17, 0.001, 0.001, 0.25, 100.0, 5000.0]
    old = [0, 0, 1, 2, 3, 3, 8, 40_000]
    pulled, stale = Windowed(), Windowed(Unit.COUNTS)
    # None is on an edge: ours belong to the bucket above, those there to the one below.
    pulled.add_many(np.array(took) / 1.01, 0.0)
    stale.add_many(old, 0.0)
    values = {
        "phases": {"pull": pulled.plain(0.0), "odd": {"total": {"buckets": 3}}},
        "staleness": {"ps:0": stale.plain(0.0)},
        "coordinator": {"scalars": {'lo"ss': [[0, 0.0, 1.0], [1, 1.0, 0.5]], "n": []}},
    }
    with living(Thing(values=values), "worker:0"), zs.serve_http(0) as server:
        _, text = get(server.address, "/metrics")
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {**sample.labels}
            edge = float(labels.pop("le", "nan"))
            key = sample.name, labels.pop("task", ""), *labels.values()
            found.setdefault(key, {})[edge] = sample.value
    seconds = found["zstrat_phase_seconds_bucket", "worker:0", "pull"]
    assert len(seconds) == 25
    for edge, count in seconds.items():
        assert count == sum(each / 1.01 <= edge for each in took), edge
    versions = found["zstrat_staleness_versions_bucket", "worker:0", "ps:0"]
    for edge, count in versions.items():
        assert count == sum(each <= edge for each in old), edge
    assert {0.0, 1.0, 3.0, 7.0, math.inf} <= set(versions)
    (total,) = found["zstrat_staleness_versions_sum", "worker:0", "ps:0"].values()
    assert total == sum(old)
    assert [*found["zstrat_scalar", "worker:0", 'lo"ss'].values()] == [0.5]
    assert not [key for key in found if key[2:] in (("odd",), ("n",))]


def test_rounds_and_leases_have_labels_for_optimizer_dataset_and_worker():
    pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    adam = {
        "closed": 9,
        "waiting": 2,
        "per_s": 1.5,
        "late": {"worker:1": 4},
        "dropped": {"worker:1": 3},
        "waited_for": {"worker:0": {"rounds": 5, "seconds": 0.25}},
    }
    data = {"epoch": 1, "done": 7, "open": 2, "total": None, "workers": {"worker:1": 2}}
    values = {"coordinator": {"largest_lead": 2, "rounds": {"adam": adam, "odd": 3}}}
    values["coordinator"]["leases"] = {"data": data, "odd": 3}
    with living(Thing(values=values), "chief:0"), zs.serve_http(0) as server:
        _, text = get(server.address, "/metrics")
    found = {
        (sample.name, *sorted({**sample.labels, "task": ""}.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if any(word in sample.name for word in ("round", "lead", "lease"))
    }
    assert found == {
        ("zstrat_lease_epoch", "", "data"): 1,
        ("zstrat_lease_examples_done", "", "data"): 7,
        ("zstrat_leases_open", "", "data"): 2,
        ("zstrat_leases_held", "", "data", "worker:1"): 2,
        ("zstrat_largest_lead", ""): 2,
        ("zstrat_rounds_closed_total", "", "adam"): 9,
        ("zstrat_rounds_per_second", "", "adam"): 1.5,
        ("zstrat_round_contributions_waiting", "", "adam"): 2,
        ("zstrat_round_contributions_late_total", "", "adam", "worker:0"): 0,
        ("zstrat_round_contributions_late_total", "", "adam", "worker:1"): 4,
        ("zstrat_round_contributions_dropped_total", "", "adam", "worker:0"): 0,
        ("zstrat_round_contributions_dropped_total", "", "adam", "worker:1"): 3,
        ("zstrat_round_waits_total", "", "adam", "worker:0"): 5,
        ("zstrat_round_waits_total", "", "adam", "worker:1"): 0,
        ("zstrat_round_waited_seconds_total", "", "adam", "worker:0"): 0.25,
        ("zstrat_round_waited_seconds_total", "", "adam", "worker:1"): 0,
    }

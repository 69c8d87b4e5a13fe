"""The words of systemd's protocol, at the end of a socket that we hold."""

import json
import logging
import socket

import pytest
from zstrat.daemons._supervision import JsonFormatter, LineFormatter, Notifier


@pytest.fixture
def manager(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.settimeout(5)
        yield listening


def test_states_arrive_in_one_datagram(manager):
    notifier = Notifier({"NOTIFY_SOCKET": manager.getsockname()})
    notifier.send("READY=1", "STATUS=serving")
    assert manager.recv(4096) == b"READY=1\nSTATUS=serving"
    notifier.close()
    notifier.send("STOPPING=1")  # after close: nothing happens


def test_abstract_socket():
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind("\0zstrat-test-notify")
        listening.settimeout(5)
        notifier = Notifier({"NOTIFY_SOCKET": "@zstrat-test-notify"})
        notifier.send("READY=1")
        assert listening.recv(100) == b"READY=1"
        notifier.close()


def test_no_manager():
    notifier = Notifier({})
    assert not notifier.is_connected
    notifier.send("READY=1")
    assert notifier.watchdog == 0


def test_a_manager_that_went_away(manager, tmp_path):
    notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "gone")})
    notifier.send("WATCHDOG=1")
    notifier.close()


@pytest.mark.parametrize(
    ("text", "seconds"), [("3000000", 1.5), ("", 0), ("soon", 0), ("-1", 0)]
)
def test_watchdog_is_fed_twice_in_its_time(text, seconds):
    assert Notifier({"WATCHDOG_USEC": text}).watchdog == seconds


def record(**words):
    return logging.makeLogRecord(
        {"name": "zstrat.x", "levelname": "INFO", "msg": "hello %s", "args": ("you",)}
        | {"created": 1.0, "msecs": 7.0, **words}
    )


def test_line():
    line = LineFormatter("ps:0", 0xABCDEF0123456789).format(record())
    assert line == "1970-01-01T00:00:01.007Z I ps:0 abcdef01 hello you"


def test_json_line():
    line = JsonFormatter("ps:0", 1).format(record())
    assert json.loads(line) == {
        "time": "1970-01-01T00:00:01.007Z",
        "level": "info",
        "task": "ps:0",
        "incarnation": "00000000",
        "logger": "zstrat.x",
        "message": "hello you",
    }


def test_tracebacks_are_logged():
    try:
        raise RuntimeError("boom")
    except RuntimeError as error:
        info = (RuntimeError, error, error.__traceback__)
    assert "RuntimeError: boom" in LineFormatter("ps:0", 1).format(
        record(exc_info=info)
    )
    entry = json.loads(JsonFormatter("ps:0", 1).format(record(exc_info=info)))
    assert entry["traceback"].endswith("RuntimeError: boom")


def test_no_entry_looks_like_another_one_or_moves_the_cursor():
    forged = "left: bye\n1970-01-01T00:00:01.007Z E ps:0 abcdef01 all is lost\x1b[2J\r"
    line = LineFormatter("ps:0", 1).format(record(msg="%s", args=(forged,)))
    first, second = line.split("\n")
    assert first.endswith("left: bye")
    assert second.startswith("    1970")
    assert second.endswith(r"all is lost\x1b[2J\x0d")

"""Strangers on the port of a rank, and a network that is cut."""

import contextlib
import socket

import pytest
from system_ranks import Ranks
from system_worlds import keygen

from zstrat.cluster import free_ports
from zstrat.testing import NoNamespacesError, switched_network

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("programs")]


ADDING = """
at_end = threading.Event()
def listen():
    sys.stdin.readline()
    at_end.set()
with Group(timeout=30, rendezvous_timeout=float(os.environ.get("HURRY", 60))) as group:
    total = group.all_reduce(np.full(300_000, task + 1.0))
    say("sum", total[-1])
    threading.Thread(target=listen, daemon=True).start()
    while not group.all_reduce(np.array([at_end.wait(0.02)]), "max")[0]:
        assert (group.all_reduce(np.full(300_000, task + 1.0)) == 3).all()
    # By links, so that the loop turns, which hears of strangers.
    group.barrier(tag="end")
    group.barrier(tag="end")
    counts = group._runtime._endpoint.statistics()["counts"]
    say("at its end", counts.get("refused", 0) > 0, group.generation)
"""
STRANGER = """
told(lambda: Group(bind=os.environ["AT"], rendezvous_timeout=2))
"""


def test_a_stranger_with_other_keys_is_refused_and_disturbs_nobody(tmp_path):
    ours, theirs = keygen(tmp_path / "ours"), keygen(tmp_path / "theirs")
    with (
        Ranks(2, ADDING, "tcp", ZSTRAT_KEYS=ours) as ranks,
        Ranks(0, STRANGER, "tcp", addresses=ranks.addresses) as strangers,
    ):
        assert ranks.lines() == ["sum 3.0"] * 2
        for keys in ({"ZSTRAT_KEYS": theirs}, {}):
            (port,) = free_ports(1)
            strangers.start(1, AT=f"127.0.0.1:{port}", **keys)
            said = strangers.line(1)
            # By then it may know that it is refused: eight handshakes have failed.
            known = "CollectiveTimeoutError group 'group'", "PermissionDeniedError "
            assert said.startswith(known), said
            assert f"/job:worker/task:0 at {ranks.addresses[0]}" in said
            assert "they may have keys of different clusters" in said
        ranks.go_on(0, 1)
        assert ranks.line(0) == "at its end True 0"
        assert ranks.line(1) == "at its end False 0"
        assert ranks.ends() == [0, 0]


_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
GARBAGE = (
    b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
    bytes(range(256)) * 100,
    _GREETING + b"\x04\x03\x09abc",
)


def shout(address, data):
    """Sends the bytes, and returns when the other side has hung up."""
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        with contextlib.suppress(OSError):  # it may hang up in the middle
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass


def test_garbage_on_the_port_of_a_rank_disturbs_nobody():
    with Ranks(2, ADDING, "tcp") as ranks:
        assert ranks.lines() == ["sum 3.0"] * 2
        for address in ranks.addresses:
            for data in GARBAGE:
                shout(address, data)
        ranks.go_on(0, 1)
        for rank in (0, 1):
            assert ranks.line(rank) == "at its end True 0"
        assert ranks.ends() == [0, 0]


@pytest.fixture
def machines():
    """Three machines on one switch; skips the test where we may not make them."""
    try:
        with switched_network(3) as made:
            yield made
    except NoNamespacesError as error:
        pytest.skip(str(error))


CUT = """
group = Group(timeout=30, rendezvous_timeout=60)
data, steps = np.ones(4_000_000, np.float32), 0
try:
    while True:
        group.all_reduce(data)
        steps += 1
        if steps == 1:
            say("reduces")
except zs.ZstratError as error:
    say(type(error).__name__, error)
sys.stdin.readline()
group.reform(timeout=60)
say("sum", *group.all_reduce(np.array([task])))
"""


def test_a_rank_that_is_cut_off_is_named_and_comes_back(machines, tmp_path):
    with Ranks(
        3,
        CUT,
        "hosts",
        addresses=[f"{host}:7070" for host in machines.addresses[:3]],
        before=[machines.inside(name) for name in machines.names],
        ZSTRAT_KEYS=keygen(tmp_path / "keys"),
        HOSTS="abc",
    ) as ranks:
        assert ranks.lines() == ["reduces"] * 3
        with machines.unplugged(1):
            for rank in (0, 2):
                said = ranks.line(rank)
                assert said.startswith(
                    "PeerLostError lost rank 1 (/job:worker/task:1"
                ), said
                assert "silent" in said
            assert ranks.line(1).startswith("PeerLostError lost rank ")
        ranks.go_on(0, 1, 2)
        assert ranks.lines() == ["sum 3"] * 3
        assert ranks.ends() == [0] * 3

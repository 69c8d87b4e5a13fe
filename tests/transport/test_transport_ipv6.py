"""Machines that have addresses of IPv6 alone, and names that lead to these."""

import asyncio
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import zstrat as zs
from zstrat.cluster import free_ports
from zstrat.config import Settings
from zstrat.errors import DeadlineExceededError
from zstrat.transport import Link, Security, generate_keys, hello
from zstrat.wire import Inspect

INTERFACES = Path("/proc/net/if_inet6")
HAS_IPV6 = INTERFACES.exists() and f"{1:032x}" in INTERFACES.read_text()
pytestmark = pytest.mark.skipif(not HAS_IPV6, reason="loopback has no ::1 here")

HOSTS = """
127.0.0.1 localhost
::1 six
::1 both
127.0.0.1 both
"""

NAMED = """
import asyncio, sys
from zstrat.cluster import free_ports
from zstrat.config import Settings
from zstrat.transport import Endpoint, Link, hello, new_incarnation

class Nobody:
    def handle(self, remote, message): ...

async def main(bound, name):
    endpoint = Endpoint(hello("ps", 0, 1), Nobody().handle, settings=Settings())
    where = await endpoint.bind(bound)
    settings = Settings()
    link = Link(
        f"{name}:{where.rpartition(':')[2]}", hello("worker", 0, 2), name="ps",
        settings=settings,
    )
    link.start()
    await link.wait_open(asyncio.get_running_loop().time() + 30)
    print(where.rpartition(":")[0], free_ports(1, name) != [])
    await link.close()
    await endpoint.close()

for pair in sys.argv[1:]:
    asyncio.run(main(*pair.split(">")))
"""


MEMBERS = """
import asyncio, sys
from zstrat.config import Settings
from zstrat.transport import DataConnections

async def main(name):
    pair = [
        await DataConnections.bound(n, 2, f"{name}:1", Settings(), None) for n in (0, 1)
    ]
    pair[1].admit(0, pair[0].credential)
    await pair[0].connect(1, f"{name}:{pair[1].port}", pair[1].credential)
    pair[0].send(1, b"hello", memoryview(b"you"))
    found = await asyncio.to_thread(received, pair[1])
    print(found.member, bytes(found.data))
    for each in pair:
        each.close()

def received(connections):
    while (found := connections.receive()) is None:
        connections.wait([], 60)
    return found

for name in sys.argv[1:]:
    asyncio.run(main(name))
"""


def in_a_namespace(tmp_path, *words):
    """What a program says where the machine knows the names of HOSTS alone."""
    if (unshare := shutil.which("unshare")) is None:
        pytest.skip("not installed: unshare")
    (tmp_path / "hosts").write_text(HOSTS)
    own = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    script = 'mount --bind "$0" /etc/hosts && exec "$@"'
    words = ["--mount", "sh", "-c", script, str(tmp_path / "hosts"), *words]
    tried = [unshare, *own, *words[:5], "true"]
    if subprocess.run(tried, capture_output=True, check=False).returncode:
        pytest.skip("this user may make no namespace of mounts")
    return subprocess.run(
        [unshare, *own, *words], capture_output=True, text=True, check=False
    )


def test_names(tmp_path):
    """Of tasks that bind, and are reached, by a name; a name that leads to both kinds
    of addresses leads to that of IPv4, on both sides."""
    pairs = ["six:0>six", "both:0>both", "127.0.0.1:0>both", "[::1]:0>six"]
    ran = in_a_namespace(tmp_path, sys.executable, "-c", NAMED, *pairs)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == [
        "[::1] True",
        "127.0.0.1 True",
        "127.0.0.1 True",
        "[::1] True",
    ]


def test_members_of_a_group_connect_by_names(tmp_path):
    ran = in_a_namespace(tmp_path, sys.executable, "-c", MEMBERS, "six", "both")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["0 b'you'"] * 2


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        ([], "'localhost'"),
        ([socket.AF_INET], "nothing answers there; check that"),
        (
            [socket.AF_INET, socket.AF_INET6],
            "IPv4",
        ),
    ],
)
async def test_what_is_said_of_a_name_that_leads_nowhere(monkeypatch, kinds, words):
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()

    async def getaddrinfo(*_, **__):
        asked.set()
        if not kinds:
            raise socket.gaierror(socket.EAI_NONAME, "no address")
        return [(kind,) for kind in kinds]

    monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
    me = hello("worker", 0, 2)
    address = f"localhost:{free_ports(1)[0]}"
    link = Link(address, me, name="ps", settings=Settings())
    link.start()
    await asked.wait()
    with pytest.raises(DeadlineExceededError, match=words):
        await link.wait_open(loop.time())
    await link.close()


async def test_all_interfaces_are_those_of_ipv6_too(net, tmp_path):
    keys = tmp_path / "keys"
    generate_keys(keys)
    _, address, _ = await net.serve("*:0", security=Security.load(keys, "ps"))
    port = address.rpartition(":")[2]
    for index, host in enumerate(("127.0.0.1", "[::1]")):
        link, _ = await net.open(
            f"{host}:{port}",
            index=index,
            expect=("ps", 0),
            security=Security.load(keys, "worker"),
        )
        assert await link.request(Inspect())


async def test_loopback_of_ipv6_needs_no_keys(net):
    _, address, _ = await net.serve("[::1]:0", settings=Settings())
    assert address.startswith("[::1]:")
    link, _ = await net.open(address)
    assert link.is_open


@pytest.mark.parametrize("where", ["[::1]:0", "*:0"])
async def test_the_http_port(where):
    with zs.serve_http(where) as server:
        for host in ("::1", "127.0.0.1")[: 1 + (where == "*:0")]:
            reader, writer = await asyncio.open_connection(host, server.port)
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: [::1]:1\r\n\r\n")
            assert (await reader.readline()).split()[1] == b"200"
            writer.close()
        assert server.url.endswith(f":{server.port}/")
        assert ("[::1]" in server.url) == (where == "[::1]:0")

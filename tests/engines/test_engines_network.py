"""A fleet behind real ssh servers, each on a machine of its own as far as the network
goes: namespaces with a bridge between them, and the program in the one with the bridge.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import needed, ssh_settings
from engines_ask import eventually

HERE = Path(__file__).parent
HOSTS = """
ps = 1
workers = 2
config = "{folder}/ssh.conf"
[hosts.node1]
[hosts.node2]
{more}
"""


def ip(*words):
    return subprocess.check_output(["ip", *map(str, words)], text=True)


@pytest.fixture
def net(folder):
    """The names of the namespaces of the program, of node1 and of node2."""
    needed("ip")
    if os.geteuid() != 0:
        pytest.skip("the test makes its network namespaces as root")
    program, *nodes = names = [f"zs{os.getpid()}{each}" for each in "p12"]
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", program, "link", "add", "bridge", "type", "bridge")
        ip("-n", program, "addr", "add", "10.77.0.254/24", "dev", "bridge")
        ip("-n", program, "link", "set", "bridge", "up")
        for n, node in enumerate(nodes, start=1):
            ends = ["node", "type", "veth", "peer", "name", f"to{n}", "netns", program]
            ip("-n", node, "link", "add", *ends)
            ip("-n", node, "addr", "add", f"10.77.0.{n}/24", "dev", "node")
            ip("-n", node, "link", "set", "node", "up")
            ip("-n", program, "link", "set", f"to{n}", "master", "bridge", "up")
        # Nobody has that number: what is sent to 10.77.0.9 vanishes.
        hole = ["10.77.0.9", "lladdr", "02:00:00:00:00:09", "dev", "bridge"]
        ip("-n", program, "neigh", "add", *hole)
        yield names
    finally:  # nobody is left in them, or the kernel keeps them until then
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


@pytest.fixture
def servers(net, folder):
    """The pids of the ssh servers of node1 and node2."""
    words = ssh_settings(folder, 22, [f"10.77.0.{node}" for node in (1, 2)])
    running = [
        subprocess.Popen(
            ["ip", "netns", "exec", node, *words], stderr=subprocess.DEVNULL
        )
        for node in net[1:]
    ]
    inside = ["ip", "netns", "exec", net[0], "ssh", "-F", str(folder / "ssh.conf")]
    for node in ("node1", "node2"):
        knock = [*inside, "-o", "BatchMode=yes", node, "true"]
        eventually(lambda k=knock: subprocess.run(k, check=False).returncode == 0)
    yield {each.pid for each in running}
    for each in running:
        each.terminate()
        each.wait()


def left(net, servers):
    """What runs on the nodes beside the servers."""
    there = " ".join(ip("netns", "pids", node) for node in net[1:])
    return {int(pid) for pid in there.split()} - servers


def test_hosts_that_will_not_do_and_one_that_is_lost(net, servers, folder):
    installed = folder / "old" / "zstrat-0.0.1.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Name: zstrat\nVersion: 0.0.1\n")
    old = folder / "python"
    old.write_text(f'#!/bin/sh\nPYTHONPATH={folder}/old exec {sys.executable} "$@"\n')
    old.chmod(0o755)
    hole = 'options = ["HostName=10.77.0.9"]'
    for name, more in (
        ("hosts", ""),
        ("hole", hole),
        ("versions", f'python = "{old}"'),
    ):
        text = HOSTS.format(folder=folder, more=more)
        (folder / f"{name}.toml").write_text(text)
    words = [sys.executable, HERE / "on_ssh_network.py", folder, "to2"]
    ran = subprocess.run(
        ["ip", "netns", "exec", net[0], *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-6000:]
    print(ran.stdout.splitlines()[-1])
    seen = json.loads(ran.stdout.splitlines()[-1])
    kind, words, _ = seen["hole"]
    assert kind == "UnavailableError"
    assert "node2" in words
    assert "timed out" in words
    kind, words, _ = seen["versions"]
    assert kind == "VersionMismatchError"
    assert "node2 has zstrat 0.0.1 (here" in words
    assert seen["done"] == 20, "each acknowledged step counts once"
    eventually(lambda: not left(net, servers))

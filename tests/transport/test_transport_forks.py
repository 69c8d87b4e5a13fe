"""What a process that was forked holds of its parent's, once that has ended: nothing
that keeps the next one out."""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from zstrat.checkpoint import FolderLock
from zstrat.errors import BusyError

PARENT = """
import asyncio, json, os, signal, sys
import zstrat as zs
from zstrat.checkpoint import FolderLock
from zstrat.config import Settings
from zstrat.transport import Endpoint, hello, new_incarnation, run

def handle(remote, message): ...

async def main():
    me = hello("ps", 0, new_incarnation())
    endpoint = Endpoint(me, handle, settings=Settings())
    address = await endpoint.bind("127.0.0.1:0")
    with FolderLock(sys.argv[1]), zs.serve_http("127.0.0.1:0") as http:
        print(json.dumps([address, http.address]), flush=True)
        sys.stdin.readline()  # somebody has connected
        own = [os.pipe()[0], os.open(sys.argv[1], os.O_RDONLY)]
        if (child := os.fork()) == 0:
            for each in own:
                os.fstat(each)
            os.write(1, b"begun\\n")  # in one piece, among what the parent says
            while True:
                signal.pause()
        os.write(1, b"%d\\n" % child)
        signal.pause()

run(main())
"""


@pytest.fixture
def parent(tmp_path):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", PARENT, str(tmp_path / "lock")]
    with subprocess.Popen(command, **pipes) as process:
        yield process
        process.kill()


def at(address):
    host, port = address.split(":")
    return host, int(port)


def test_a_child_that_stays_keeps_no_port_no_connection_and_no_lock(parent, tmp_path):
    addresses = [at(each) for each in json.loads(parent.stdout.readline())]
    lines = [socket.create_connection(each, timeout=60) for each in addresses]
    assert lines[0].recv(1) == b"\xff", "ZeroMQ greets"
    parent.stdin.write("\n")
    parent.stdin.flush()
    said = {parent.stdout.readline().strip(), parent.stdout.readline().strip()}
    (child,) = map(int, said - {"begun"})
    try:
        with pytest.raises(BusyError):  # the parent has it
            FolderLock(str(tmp_path / "lock"))
        parent.kill()
        parent.wait()
        with lines[0] as line:
            while line.recv(4096):  # until its end
                pass
        for address in addresses:
            socket.create_server(address).close()
        with FolderLock(str(tmp_path / "lock")):
            pass
    finally:
        os.kill(child, signal.SIGTERM)
        for line in lines:
            line.close()

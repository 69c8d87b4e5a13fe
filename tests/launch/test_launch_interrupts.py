"""Ctrl-C anywhere while tasks start and stop leaves none behind, and no lock locked."""

import itertools
import os
import socket
import subprocess
import sys

import psutil
import pytest
from strikes import is_struck, strikes

from zstrat.launch import ForkServer, LocalCluster, Server
from zstrat.threads import SteadyThread

pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),  # what was struck
]

FILES = "launch/_local.py", "launch/_child.py", "launch/_fork_server.py"


def test_no_daemon_is_left_by_a_start_and_the_next_cluster_starts(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = []
    # The fork server of tests before would be struck while it is ended.
    LocalCluster(1, 0, coordinates=False).stop()
    others = set(psutil.Process().children(recursive=True))  # of tests before

    def start():
        made.append(LocalCluster(1, 0, coordinates=False))

    more = "launch/_run_folder.py", "launch/_started_tasks.py"
    for _ in strikes(start, *FILES, *more, every=2):
        while made:  # struck behind its last line
            made.pop().stop()
        assert not any(tmp_path.iterdir())
    with made.pop() as cluster:
        daemon = psutil.Process(cluster.pid("ps:0"))
        assert set(psutil.Process(daemon.ppid()).children()) - others == {daemon}


def test_a_fork_server_that_is_struck_at_its_start_is_gone():
    made, others = [], set(psutil.Process().children())
    for _ in strikes(
        lambda: made.append(ForkServer(os.environ, ("-c", "pass"))), FILES[-1]
    ):
        made.clear()
        assert set(psutil.Process().children()) <= others


def test_a_stop_is_gone_on_with_by_the_next_one():
    number, struck = 1, True
    while struck:
        cluster = LocalCluster(1, 0, coordinates=False)
        daemon = psutil.Process(cluster.pid("ps:0"))
        struck = is_struck(cluster.stop, number, *FILES)
        cluster.stop()
        assert not daemon.is_running(), number
        assert not cluster.directory.exists(), number
        number += 5
    assert number > 20


def test_a_server_that_begins_ends_and_one_that_ends_can_be_ended_again():
    with socket.create_server(("127.0.0.1", 0)) as free:
        one = {"ps": [f"127.0.0.1:{free.getsockname()[1]}"]}
    files = "launch/_server.py", "zstrat/threads.py", "/threading.py"
    made = []
    for _ in strikes(lambda: made.append(Server(one)), *files):
        while made:  # struck behind its last line
            made.pop().stop()
    for number in itertools.count(1):
        struck = is_struck(made[-1].stop, number, *files)
        made.pop().stop()
        if not struck:
            break
        made.append(Server(one))  # the address is free again
    assert number > 3


JOINED = """
import os, signal, threading
from zstrat.launch import Server

server = Server({"ps": ["127.0.0.1:0"]})
threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    server.join()
except KeyboardInterrupt:
    server.stop()
    print([thread.name for thread in threading.enumerate() if "server" in thread.name])
"""


def test_a_server_that_was_joined_when_ctrl_c_came_is_stopped():
    program = [sys.executable, "-c", JOINED]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_a_server_that_is_stopped_before_its_thread_has_begun(monkeypatch):
    starts = SteadyThread.start

    def late(thread):
        server.stop()  # as another thread may
        starts(thread)

    with socket.create_server(("127.0.0.1", 0)) as free:
        one = {"ps": [f"127.0.0.1:{free.getsockname()[1]}"]}
    server = Server(one, start=False)
    monkeypatch.setattr(SteadyThread, "start", late)
    server.start()
    server.join()

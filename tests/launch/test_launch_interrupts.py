"""Ctrl-C anywhere while tasks start and stop leaves none behind, and no lock locked."""

from __future__ import annotations

import psutil
import pytest
from strikes import is_struck, strikes

from zstrat.launch import LocalCluster

pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),  # what was struck
]

FILES = "launch/_local.py", "launch/_child.py", "launch/_fork_server.py"


def test_no_daemon_is_left_by_a_start_and_the_next_cluster_starts():
    made = []

    def start():
        made.append(LocalCluster(1, 0, coordinates=False))

    for _ in strikes(start, *FILES, every=2):
        while made:  # struck behind its last line
            made.pop().stop()
    with made.pop() as cluster:
        daemon = psutil.Process(cluster.pid("ps:0"))
        assert psutil.Process(daemon.ppid()).children() == [daemon]


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

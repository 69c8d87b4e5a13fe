"""Groups of real processes: killed, stopped, started anew; nothing is left behind."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from contextlib import contextmanager

import pytest

HEAD = """
import gc, os, sys, threading
import numpy as np
from zstrat.cluster import ClusterSpec, SimpleClusterResolver
from zstrat.collectives import Group
from zstrat.config import Settings, Timeouts
from zstrat.errors import *

rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
spec = ClusterSpec({"worker": [f"ipc://{folder}/{i}" for i in range(size)]})
resolver = SimpleClusterResolver(spec, task_type="worker", task_id=rank)
times = Timeouts(beat=0.2, patience=2.0, reconnect=0.3)
settings = Settings(timeouts=times, lane=os.environ.get("ZSTRAT_LANE", "tcp"))

def say(*words):
    print(*words, flush=True)

def make(**options):
    return Group(resolver, settings=settings, timeout=20, **options)
"""


class Processes:
    """Ranks as processes that run one script."""

    def __init__(self, size, script, folder):
        self.size, self.folder = size, folder
        self._script = HEAD + textwrap.dedent(script)
        self.all = {}
        for rank in range(size):
            self.start(rank)

    def start(self, rank):
        command = [sys.executable, "-c", self._script, str(rank), str(self.size)]
        self.all[rank] = subprocess.Popen(
            [*command, self.folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self, rank):
        """What a rank says next."""
        return self.all[rank].stdout.readline().strip()

    def lines(self):
        return [self.line(rank) for rank in self.all]

    def go_on(self, *ranks):
        """Lets ranks continue that read a line."""
        for rank in ranks:
            self.all[rank].stdin.write("\n")
            self.all[rank].stdin.flush()

    def signal(self, rank, number):
        self.all[rank].send_signal(number)

    def end(self):
        for process in self.all.values():
            process.kill()
            process.communicate()


@contextmanager
def processes(size, script):
    folder = tempfile.mkdtemp(prefix="zs-")
    running = Processes(size, script, folder)
    try:
        yield running
    finally:
        running.end()
        shutil.rmtree(folder)


REDUCING = """
group = make()
say("here")
data = np.ones(4_000_000, np.float32)
try:
    while True:
        group.all_reduce(data, in_place=True)
        data[:] = 1
        if (steps := globals().get("steps", 0) + 1) == 3:
            say("works")
except ZstratError as error:
    say(type(error).__name__, error)
    try:
        group.all_reduce(data)
    except UnavailableError as error:
        say(error)
sys.stdin.readline()
if rank != 1:
    group.reform(ranks=[0, 2])
    say(*group.all_reduce(np.array([group.rank + 1])), group.members)
"""


@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGKILL, "connection"), (signal.SIGSTOP, "silent")]
)
def test_a_rank_that_dies_or_hangs_in_a_large_reduce_is_named(number, words):
    with processes(3, REDUCING) as ranks:
        assert ranks.lines() == ["here"] * 3
        assert ranks.lines() == ["works"] * 3
        ranks.signal(1, number)
        for rank in (0, 2):
            said = ranks.line(rank)
            assert said.startswith("PeerLostError lost rank 1 (/job:worker/task:1")
            assert words in said
            assert "reform()" in ranks.line(rank)
        ranks.go_on(0, 2)
        members = "('/job:worker/task:0', '/job:worker/task:2')"
        for rank in (0, 2):
            assert ranks.line(rank) == f"3 {members}"


RESTARTED = """
group = make()
say("here", group.generation)
def work():
    for step in range(3):
        total = group.all_reduce(np.full(100_000, rank + 1.0))
    say("sum", total[0])
work()
if rank == 1 and group.generation == 0:
    sys.stdin.readline()
try:
    group.barrier()
except ZstratError as error:
    say(type(error).__name__)
    group.reform()
    say("generation", group.generation)
    work()
"""


def test_a_restarted_process_joins_the_next_generation():
    with processes(3, RESTARTED) as ranks:
        assert ranks.lines() == ["here 0"] * 3
        assert ranks.lines() == ["sum 6.0"] * 3
        ranks.signal(1, signal.SIGKILL)
        ranks.all[1].communicate()
        ranks.start(1)
        for rank in (0, 2):
            assert ranks.line(rank) == "PeerLostError"
            assert ranks.line(rank) == "generation 1"
        assert ranks.line(1) == "here 1"
        assert ranks.lines() == ["sum 6.0"] * 3


THOUSAND = """
def fds():
    return len(os.listdir("/proc/self/fd"))

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

before = threads = None
with make() as group:
    small, large = np.ones(100), np.ones(300_000, np.float32)
    def work(times):
        for step in range(times):
            group.all_reduce(small)
            group.all_gather_async(small).result()
            if not step % 10:
                group.all_reduce(large)
                group.broadcast(large, step // 10 % size)
    work(100)
    gc.collect()
    before = fds(), threading.active_count(), resident()
    work(400)
    gc.collect()
    after = fds(), threading.active_count(), resident()
    grown = after[2] - before[2]
    say(after[0] <= before[0], after[1] <= before[1], grown < 20 << 20)
left = [thread.name for thread in threading.enumerate() if "zstrat" in thread.name]
say(left, [name for name in os.listdir("/dev/shm") if "zstrat" in name])
"""


def test_a_thousand_operations_leave_nothing():
    with processes(2, THOUSAND) as ranks:
        assert ranks.lines() == ["True True True"] * 2
        assert ranks.lines() == ["[] []"] * 2
        assert [each.wait(20) for each in ranks.all.values()] == [0, 0]


ABANDONED = """
group = make()
try:
    pending = [group.all_reduce_async(np.ones(1_000_000)) for _ in range(3)]
except ZstratError:
    pass  # the other one has ended already
say("3")
"""


def test_a_program_may_end_without_closing_its_group():
    with processes(2, ABANDONED) as ranks:
        assert ranks.lines() == ["3"] * 2
        assert [each.wait(20) for each in ranks.all.values()] == [0, 0]


def test_ctrl_c_in_a_call_that_waits_for_another_one():
    script = """
    group = make(lane="shm")
    try:
        say("here")
        if rank == 0:
            pending = group.all_reduce_async(np.ones(10))  # as nobody else does
            group.all_reduce(np.ones(10))
        sys.stdin.readline()
    except KeyboardInterrupt:
        group.close()
        say("closed")
    """
    with processes(2, script) as ranks:
        assert ranks.lines() == ["here"] * 2
        ranks.signal(0, signal.SIGINT)
        assert ranks.line(0) == "closed"
        assert ranks.all[0].wait(20) == 0


def test_ctrl_c_ends_a_call_and_tells_the_others():
    script = """
    group = make()
    try:
        say("here")
        if rank == 0 or sys.stdin.readline():
            group.all_reduce(np.ones(4_000_000))
    except KeyboardInterrupt:
        say("interrupted")
        group.close()
    except ZstratError as error:
        say(error)
    """
    with processes(2, script) as ranks:
        assert ranks.lines() == ["here"] * 2
        ranks.signal(0, signal.SIGINT)
        assert ranks.line(0) == "interrupted"
        ranks.go_on(1)
        assert "rank 0" in ranks.line(1)
        assert os.waitpid(ranks.all[0].pid, 0)[1] == 0

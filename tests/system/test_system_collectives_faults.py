"""Ranks that die, hang, are cut off or come back; and what is left behind."""

import contextlib
import os
import signal
from pathlib import Path

import pytest
from system_ranks import Ranks, zstrat_run

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("programs")]

TRANSPORTS = ("shm", "tcp", "hosts")

REDUCING = """
group = Group(timeout=20, rendezvous_timeout=60)
if not os.environ["LOST"]:  # it is started anew
    say(group.generation, *group.all_gather(np.array([task])))
    sys.exit()
data = np.zeros(int(os.environ["COUNT"]), np.float32)
said = 0
try:
    while True:
        group.all_reduce(data, in_place=bool(os.environ["IN_PLACE"]))
        said += 1
        if said == 2:
            say("reduces")
except zs.ZstratError as error:
    say(type(error).__name__, error)
told(group.barrier)
sys.stdin.readline()
lost = int(os.environ["LOST"])
group.reform(ranks=[rank for rank in range(group.size) if rank != lost])
say(group.generation, *group.all_gather(np.array([task])), *group.members)
group.reform(timeout=60)
say(group.generation, *group.all_gather(np.array([task])))
"""


@pytest.mark.parametrize(
    ("transport", "number", "lost", "in_place", "count"),
    [
        ("shm", signal.SIGKILL, 0, "", "4_000_000"),
        ("shm", signal.SIGSTOP, 1, "", "4_000_000"),
        ("tcp", signal.SIGSTOP, 2, "", "4_000_000"),
        ("tcp", signal.SIGKILL, 1, "yes", "4_000_000"),
        # By data connections.
        ("tcp", signal.SIGSTOP, 1, "yes", "200_000"),
        ("tcp", signal.SIGKILL, 0, "", "1000"),
        ("hosts", signal.SIGKILL, 2, "yes", "4_000_000"),
    ],
)
def test_who_dies_or_hangs_in_a_reduce_is_named(
    transport, number, lost, in_place, count
):
    left = [rank for rank in range(3) if rank != lost]
    # Who is dead is known by the connection: long before one is silent for too long.
    is_dead = number == signal.SIGKILL
    patience, words = ("60", "connection") if is_dead else ("2", "silent")
    told = {"LOST": str(lost), "IN_PLACE": in_place, "ZSTRAT_LIVENESS": patience}
    told["COUNT"] = count
    with Ranks(3, REDUCING, transport, **told) as ranks:
        assert ranks.lines() == ["reduces"] * 3
        ranks.signal(lost, number)
        for rank in left:
            said = ranks.line(rank)
            assert said.startswith(f"PeerLostError lost rank {lost} (/job:worker/"), (
                said
            )
            assert transport != "tcp" or words in said, said
            said = ranks.line(rank)
            assert said.startswith("UnavailableError"), said
            assert "reform()" in said
        ranks.go_on(*left)
        survivors = [*map(str, left), *(f"/job:worker/task:{rank}" for rank in left)]
        assert ranks.lines(left) == [" ".join(["1", *survivors])] * 2
        ranks.signal(lost, signal.SIGKILL)
        ranks.start(lost, LOST="")
        assert ranks.lines() == ["2 0 1 2"] * 3
        for rank in range(3):
            assert ranks.all[rank].wait() == 0, ranks.all[rank].stdout.read()


# Who has waited for so long asks the others, and gives them a quarter of that time, a
# second at most: with less a busy machine is too slow to say who has not called.
NOT_CALLED = """
say("here")
data = np.ones(1_000_000)
for transport, names in (("shm", "aaa"), ("tcp", "aaa"), ("auto", "aab")):
    socket.gethostname = lambda: names[task]
    with Group(timeout=60, transport=transport) as group:
        group.barrier()
        if task == 1:
            sys.stdin.readline()
        told(group.all_reduce, data, timeout=4.0)
        group.reform()
        group.barrier()
        if task == 0:
            pending = group.all_reduce_async(data)
            say("has called")
            told(pending.result)
        elif sys.stdin.readline():
            told(group.all_reduce, data, timeout=4.0 if task == 2 else 60.0)
"""


def test_who_does_not_call_is_named_to_all_and_who_waits_for_it_is_not():
    """Between hosts, rank 2 waits for rank 0, and that for rank 1 in its memory."""
    with Ranks(3, NOT_CALLED, "tcp", ZSTRAT_LIVENESS="60") as ranks:
        assert ranks.lines() == ["here"] * 3
        for transport in TRANSPORTS:
            has_not_called(ranks, transport)
            assert ranks.line(0) == "has called"
            ranks.go_on(2)
            has_not_called(ranks, transport)
        assert ranks.ends() == [0] * 3


def has_not_called(ranks, transport):
    """Rank 1 has not, and hears of it when it does."""
    words = "CollectiveTimeoutError all_reduce(float64[1000000], SUM), call 2 of"
    for rank in (0, 2):
        said = ranks.line(rank)
        assert said.startswith(f"{words} group 'group'"), (transport, said)
        guilty, *others = said.split("; ")
        assert "rank 1 (/job:worker/task:1 at " in guilty, (transport, said)
        assert guilty.endswith("has not called it"), (transport, said)
        assert others[0].startswith("rank "), (transport, said)
        assert "rank 0 (" not in guilty, (transport, said)
    ranks.go_on(1)
    assert "has not called it" in ranks.line(1), transport


RESTARTED = """
group = Group(timeout=30, rendezvous_timeout=60)
say("in", group.generation)
while group.generation == 0:
    try:
        total = group.all_reduce(np.full(1_000_000, task + 1.0))
        assert total[-1] == 6
        if task == 1:
            os.kill(os.getpid(), 9)
    except zs.PeerLostError as error:
        say(error.peer)
        group.reform()
total = group.all_reduce(np.full(1_000_000, task + 1.0))
say("sum", total[0], group.generation)
"""


def test_zstrat_run_starts_a_dead_copy_anew_and_the_others_take_it_in():
    code, said = zstrat_run(3, RESTARTED, "--restarts", "1")
    assert code == 0, said
    assert said[None] == ["worker:1 was killed by SIGKILL: restarting it"]
    assert said[1] == ["in 0", "in 1", "sum 6.0 1"]
    for rank in (0, 2):
        assert said[rank][0] == "in 0"
        assert said[rank][1].startswith("rank 1 (/job:worker/task:1 at ipc://")
        assert said[rank][2] == "sum 6.0 1"


ALONE = """
with Group(timeout=20) as group:
    group.barrier()
    if task == 1:
        os.kill(os.getpid(), 9)
    told(group.barrier)
"""


def test_zstrat_run_lets_the_others_say_whom_they_lost():
    code, said = zstrat_run(3, ALONE)
    assert code == 128 + signal.SIGKILL, said
    assert said[None] == ["worker:1 was killed by SIGKILL: ending the others"]
    for rank in (0, 2):
        assert said[rank][0].startswith("PeerLostError lost rank 1 (/job:worker/"), said


USED = """
import gc, time

def used():
    gc.collect()
    maps = open("/proc/self/maps").read().count("memfd:")
    return len(os.listdir("/proc/self/fd")), threading.active_count(), maps

def resident():
    pages = int(open("/proc/self/statm").read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")

small, large = np.ones(100), np.ones(150_000, np.float32)
with Group(timeout=20) as group:
    group.all_reduce(large)
    group.broadcast(large)
nothing = used()  # ZeroMQ keeps some descriptors of a process, pyzmq a thread
group = Group(timeout=20)
def work(times):
    for step in range(times):
        group.all_reduce(small)
        group.all_gather_async(small).result()
        group.barrier(tag="mine")
        group.broadcast(large, step % group.size)
        if step % 10 == 0:
            group.all_reduce(large)
work(10)
before, held = used(), resident()
def more(than):
    until = time.monotonic() + 20  # ZeroMQ closes on a thread of its own
    while True:
        found = [max(now - then, 0) for now, then in zip(used(), than)]
        if not any(found) or time.monotonic() > until:
            return found
work(125)
say("more after 500 operations:", more(before), resident() - held < 20 << 20)
for _ in range(5):
    group.reform()
work(2)
say("more after 5 generations:", more(before))
if task == 2:
    sys.stdin.readline()
told(group.barrier)
group.reform(ranks=[0, 1])
work(2)
say("more with one less:", more(before))
group.close()
names = [thread.name for thread in threading.enumerate()]
say("left:", more(nothing), [name for name in names if "zstrat" in name])
"""


def shared_files(pid):
    """What a process has mapped or open of /dev/shm: other programs of this machine
    make and remove files there all the time."""
    found = [
        line.split(maxsplit=5)[5]
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
        if " /dev/shm/" in line
    ]
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since the listing
            found.append(os.readlink(link))
    return {path for path in found if path.startswith("/dev/shm/")}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_nothing_is_left_after_500_operations_and_a_kill(transport):
    with Ranks(3, USED, transport) as ranks:
        assert ranks.lines() == ["more after 500 operations: [0, 0, 0] True"] * 3
        assert ranks.lines() == ["more after 5 generations: [0, 0, 0]"] * 3
        shared = {
            path for rank in ranks.all.values() for path in shared_files(rank.pid)
        }
        ranks.signal(2, signal.SIGKILL)
        for rank in (0, 1):
            assert ranks.line(rank).startswith("PeerLostError lost rank 2 ")
        assert ranks.lines([0, 1]) == ["more with one less: [0, 0, 0]"] * 2
        assert ranks.lines([0, 1]) == ["left: [0, 0, 0] []"] * 2
        assert [ranks.all[rank].wait() for rank in (0, 1)] == [0, 0]
        # The socket of one that was killed stays; whoever is started there takes it.
        sockets = {path.name for path in ranks.folder.iterdir()} - {"program.py"}
        assert sockets <= {"2"}
    assert not [path for path in shared if Path(path).exists()]

"""Programs that end with a group open: by themselves, and by Ctrl-C in a call."""

import signal

import pytest
from system_ranks import Ranks

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("programs")]

ABANDONED = """
group = Group(timeout=20)
try:
    pending = [group.all_reduce_async(np.ones(1_000_000)) for _ in range(3)]
except zs.ZstratError:
    pass  # the other one has ended already
say("ends")
"""


def test_a_program_may_end_without_closing_its_group():
    with Ranks(2, ABANDONED, "tcp") as ranks:
        assert ranks.lines() == ["ends"] * 2
        assert ranks.ends() == [0, 0]


WAITING = """
group = Group(timeout=20)
try:
    say("here")
    if task == 0:
        pending = group.all_reduce_async(np.ones(10))  # as nobody else does
        group.all_reduce(np.ones(10))
    sys.stdin.readline()
except KeyboardInterrupt:
    group.close()
    say("closed")
"""


def test_ctrl_c_in_a_call_that_waits_for_another_one():
    with Ranks(2, WAITING, "shm") as ranks:
        assert ranks.lines() == ["here"] * 2
        ranks.signal(0, signal.SIGINT)
        assert ranks.line(0) == "closed"
        assert ranks.all[0].wait() == 0


INTERRUPTED = """
group = Group(timeout=20)
try:
    say("here")
    if task == 0 or sys.stdin.readline():
        group.all_reduce(np.ones(4_000_000))
except KeyboardInterrupt:
    say("interrupted")
    group.close()
except zs.ZstratError as error:
    say(error)
"""


def test_ctrl_c_ends_a_call_and_tells_the_others():
    with Ranks(2, INTERRUPTED, "tcp") as ranks:
        assert ranks.lines() == ["here"] * 2
        ranks.signal(0, signal.SIGINT)
        assert ranks.line(0) == "interrupted"
        ranks.go_on(1)
        assert "rank 0" in ranks.line(1)
        assert ranks.ends() == [0, 0]


STRUCK = """
import itertools

class Strikes:
    # Raises as Ctrl-C does, where Python looks for it for that time: a function of
    # what begins operations begins, or calls one that is not written in Python.
    def __init__(self, number):
        self.left = number
    def __call__(self, frame, event, value):
        if not frame.f_code.co_filename.endswith(("_scheduler.py", "_executors.py")):
            return
        self.left -= event in ("call", "c_return")
        if event in ("call", "c_return") and not self.left:
            sys.setprofile(None)
            raise KeyboardInterrupt

for number in itertools.count(1):
    group = Group(timeout=0.2, rendezvous_timeout=60, name=f"group{number}")
    if task == 1:
        if sys.stdin.readline() == "end\\n":
            break
    else:
        try:
            sys.setprofile(Strikes(number))
            pending = group.all_reduce_async(np.ones(10))  # as nobody else does
            group.all_reduce(np.ones(10))
        except KeyboardInterrupt:
            group.close()
            say("closed")
        except zs.CollectiveTimeoutError:
            sys.setprofile(None)
            say("nothing was left to strike")
            break
    group.close()
"""


def test_ctrl_c_anywhere_in_the_beginning_of_a_call_leaves_a_group_that_closes():
    with Ranks(2, STRUCK, "shm") as ranks:
        closed = 0
        while (said := ranks.line(0)) == "closed":
            closed += 1
            ranks.go_on(1)
        assert said == "nothing was left to strike"
        assert closed > 15
        ranks.all[1].stdin.write("end\n")
        ranks.all[1].stdin.flush()
        assert ranks.ends() == [0, 0]

"""A process that is forked keeps no handler of zstrat, and wakes no loop of its parent.

Each test is a program of its own, whose parts end by assertions: a process of pytest
has handlers and threads that are not to be forked.
"""

import subprocess
import sys

import pytest

FORK = """
import os, signal, threading

for each in (signal.SIGTERM, signal.SIGHUP):  # nohup ignores one of them
    signal.signal(each, signal.SIG_DFL)

SENT = {signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}

def handles():
    \"\"\"Handles what comes. Not by signal.pause, which waits for the next signal if
    one came just before: Python's handlers run between two instructions.\"\"\"
    while True:
        number = signal.sigwait(SENT)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SENT)
        signal.raise_signal(number)
        signal.pthread_sigmask(signal.SIG_BLOCK, SENT)

def forked():
    \"\"\"A process that has begun, forked by a thread that is not the main one.\"\"\"
    begun, told = os.pipe()
    pids = []
    def fork():
        if (pid := os.fork()) == 0:
            signal.pthread_sigmask(signal.SIG_BLOCK, SENT)
            os.write(told, b"!")
            handles()
        pids.append(pid)
    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
    os.read(begun, 1)
    return pids[0]

def end_of(pid, number):
    os.kill(pid, number)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


def passes(text):
    done = subprocess.run([sys.executable, "-c", FORK + text], timeout=60)
    assert done.returncode == 0


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_a_signal_to_a_child_ends_it_and_is_not_heard_by_the_loop(kind):
    passes(f"""
import asyncio, {kind}
from zstrat.signals import handle_on

async def main():
    heard = []
    came = asyncio.Event()
    def hear(number):
        heard.append(number)
        came.set()
    loop = asyncio.get_running_loop()
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        handle_on(loop, each, hear, each)
    assert end_of(forked(), signal.SIGTERM) == -signal.SIGTERM
    assert end_of(forked(), signal.SIGHUP) == -signal.SIGHUP
    os.kill(os.getpid(), signal.SIGINT)
    await came.wait()
    # What a child had sent would have come before it.
    assert heard == [signal.SIGINT], heard

asyncio.Runner(loop_factory={kind}.new_event_loop).run(main())
""")


def test_a_signal_that_comes_while_the_child_begins_is_for_the_child():
    passes("""
def end_soon():
    if ends:
        os.kill(os.getpid(), signal.SIGTERM)

ends = False
os.register_at_fork(after_in_child=end_soon)  # before the handlers are reset
import asyncio
from zstrat.signals import handle_on

async def main():
    global ends
    heard = []
    came = asyncio.Event()
    loop = asyncio.get_running_loop()
    handle_on(loop, signal.SIGTERM, heard.append, "SIGTERM")
    handle_on(loop, signal.SIGINT, came.set)
    ends = True
    pid = os.fork()
    if pid == 0:
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
    os.kill(os.getpid(), signal.SIGINT)
    await came.wait()
    assert not heard
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())

asyncio.run(main())
""")


def test_a_child_has_the_handlers_that_stood_before_ours():
    passes("""
from zstrat.signals import handle

def mine(number, frame):
    os._exit(3)

signal.signal(signal.SIGTERM, mine)
outer = handle(signal.SIGTERM, lambda number, frame: None)
inner = handle(signal.SIGTERM, lambda number, frame: None)
assert end_of(forked(), signal.SIGTERM) == 3
signal.signal(signal.SIGTERM, inner)  # as ours do when they are over
assert end_of(forked(), signal.SIGTERM) == 3
signal.signal(signal.SIGTERM, lambda number, frame: os._exit(4))  # of the program
assert end_of(forked(), signal.SIGTERM) == 4

handle(signal.SIGUSR1, mine, in_children=signal.SIG_IGN)
child = forked()
os.kill(child, signal.SIGUSR1)
assert end_of(child, signal.SIGTERM) == 4
handle(signal.SIGUSR2, signal.SIG_IGN)
assert end_of(forked(), signal.SIGUSR2) == -signal.SIGUSR2
""")

"""A daemon, and the program that started it: whether that says that it is there."""

import os
import sys

import pytest
from zstrat.daemons import ParentWatch

from zstrat.testing import FakeClock

TIMEOUT = 300.0


class Loop:
    """As far as a `ParentWatch` needs one, on a clock that the test moves."""

    def __init__(self):
        self.clock = FakeClock()
        self.call_later = self.clock.call_later
        self.readers = {}

    def add_reader(self, descriptor, callback):
        self.readers[descriptor] = callback

    def remove_reader(self, descriptor):
        del self.readers[descriptor]


class Watched:
    """``said``: the other end of standard input. ``ends``: why the daemon is to end."""

    def __init__(self, timeout):
        standard_input, self.said = os.pipe()
        self.file = os.fdopen(standard_input)
        self.loop, self.ends = Loop(), []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdin", self.file)
            self.watch = ParentWatch(self.loop, self.ends.append, timeout)

    def hear(self):
        """The loop sees that there is something to be read."""
        (reader,) = self.loop.readers.values()
        reader()


@pytest.fixture
def watched():
    made = Watched(TIMEOUT)
    yield made
    made.file.close()
    os.close(made.said)


def test_a_daemon_that_hears_nothing_for_so_long_ends(watched):
    for _ in range(3):
        watched.loop.clock.advance(TIMEOUT - 1)
        os.write(watched.said, b"\n")
        watched.hear()
    assert not watched.ends
    watched.loop.clock.advance(TIMEOUT)
    (reason,) = watched.ends
    assert "300 s" in reason
    assert watched.watch.is_late
    assert not watched.loop.readers
    assert watched.loop.clock.timers == ()


def test_a_daemon_that_was_stopped_itself_looks_before_it_ends(watched):
    os.write(watched.said, b"\n\n\n")
    watched.loop.clock.advance(TIMEOUT)  # the timer is first, and not who reads
    assert not watched.ends
    watched.loop.clock.advance(TIMEOUT)
    assert watched.watch.is_late


def test_the_end_of_the_program_is_no_silence(watched):
    os.close(watched.said)
    watched.hear()
    watched.said = os.dup(2)
    assert len(watched.ends) == 1
    assert not watched.watch.is_late
    assert watched.loop.clock.timers == ()


def test_a_parent_that_never_says_anything_may_be_silent():
    watched = Watched(0.0)
    assert watched.loop.clock.timers == ()
    watched.file.close()
    os.close(watched.said)

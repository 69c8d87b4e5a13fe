"""Lines so slow that one chunk takes longer than a peer may be silent."""

import dataclasses

import numpy as np
import pytest
from transport_pair import SlowPair, big

from zstrat.config import Limits, MiB, Timeouts
from zstrat.wire import Done, Pulled, Push
from zstrat.wire.connection import Answered, Closed, Requested

SLOW = 32_000
"""Bytes a second: 256 kbit/s."""
LIMITS = Limits(window=2)
TIMES = Timeouts()


@pytest.fixture
def slow():
    return SlowPair(SLOW, LIMITS, TIMES)


def test_a_large_push_over_a_slow_line_loses_nobody(slow):
    sent = big(4 * MiB)
    slow.client.request(Push(1, -1, 0, 0, [], (sent,)), "a", 1e9)
    at_client, at_server = slow.pass_time(150)
    assert at_client == []
    (asked,) = at_server
    assert isinstance(asked, Requested)
    assert np.array_equal(asked.message.arrays[0], sent)
    slow.server.reply(asked.number, Done())
    assert slow.pass_time(5) == ([Answered("a", Done())], [])


def test_a_large_answer_over_a_slow_line_loses_nobody(slow):
    slow.client.request(Push(1, -1, 0, 0, [], ()), "a", 1e9)
    _, (asked,) = slow.pass_time(1)
    answer = big(4 * MiB)
    slow.server.reply(asked.number, Pulled([1], (answer,)))
    (answered,), at_server = slow.pass_time(150)
    assert at_server == [], "a client that a slow line keeps waiting is not deaf"
    assert np.array_equal(answered.message.arrays[0], answer)


def test_a_line_that_falls_silent_in_the_middle_of_a_chunk_is_lost(slow):
    slow.client.request(Push(1, -1, 0, 0, [], (big(MiB),)), "a", 1e9)
    assert slow.pass_time(10) == ([], [])
    slow.cut()
    _, (closed,) = slow.pass_time(7)
    assert isinstance(closed, Closed)
    assert "silent" in closed.reason


def test_a_client_that_takes_bytes_and_reads_nothing_is_deaf_when_all_are_there():
    times = dataclasses.replace(TIMES, patience=200.0)  # it beats all the time
    slow = SlowPair(4 * SLOW, LIMITS, times)
    slow.client.request(Push(1, -1, 0, 0, [], ()), "a", 1e9)
    _, (asked,) = slow.pass_time(1)
    slow.server.reply(asked.number, Pulled([1], (big(4 * MiB),)))
    slow.is_client_deaf = True
    _, at_server = slow.pass_time(190)
    assert at_server == [], "the line carries what is under way, and the clock begins"
    _, (closed,) = slow.pass_time(250)
    assert "reads nothing" in closed.reason

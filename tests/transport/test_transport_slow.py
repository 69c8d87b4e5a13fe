"""Lines so slow that one chunk takes longer than a peer may be silent."""

import dataclasses

import numpy as np
import pytest
from transport_pair import SlowPair, big

from zstrat.config import Limits, MiB, Timeouts
from zstrat.errors import DeadlineExceededError
from zstrat.wire import Done, Inspect, Pulled, Push
from zstrat.wire.connection import Answered, Closed, Failed, Requested

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
    times = dataclasses.replace(TIMES, liveness=200.0)  # it beats all the time
    slow = SlowPair(4 * SLOW, LIMITS, times)
    slow.client.request(Push(1, -1, 0, 0, [], ()), "a", 1e9)
    _, (asked,) = slow.pass_time(1)
    slow.server.reply(asked.number, Pulled([1], (big(4 * MiB),)))
    slow.is_client_deaf = True
    _, at_server = slow.pass_time(190)
    assert at_server == [], "the line carries what is under way, and the clock begins"
    _, (closed,) = slow.pass_time(250)
    assert "reads nothing" in closed.reason


CHUNK = MiB / SLOW
"""Seconds that one chunk takes, 33."""


def test_a_deadline_is_put_off_as_long_as_a_body_moves(slow):
    slow.client.request(Push(1, -1, 0, 0, [], (big(4 * MiB),)), "push", 40.0, 40.0)
    slow.client.request(Inspect(), "behind it", 40.0, 40.0)
    at_client, at_server = slow.pass_time(4 * CHUNK + 5)
    assert at_client == []
    push, behind = at_server
    slow.server.reply(push.number, Pulled([1], (big(4 * MiB),)))
    slow.server.reply(behind.number, Done())
    (first, second), _ = slow.pass_time(4 * CHUNK + 5)
    assert (first.token, second) == ("push", Answered("behind it", Done()))


def test_an_answer_that_does_not_come_is_late_behind_the_last_progress(slow):
    slow.client.request(Push(1, -1, 0, 0, [], (big(3 * MiB),)), "push", 40.0, 40.0)
    at_client, _ = slow.pass_time(3 * CHUNK + 38)
    assert at_client == []
    (failed,), _ = slow.pass_time(5)
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, DeadlineExceededError)


def test_a_deadline_that_is_final_is_not_put_off(slow):
    slow.client.request(Push(1, -1, 0, 0, [], (big(3 * MiB),)), "push", 40.0)
    (failed,), _ = slow.pass_time(41)
    assert isinstance(failed.error, DeadlineExceededError)


def test_later_requests_do_not_keep_one_that_nobody_answers(slow):
    """Their answers move all the time; those of requests that were sent in its first 40
    seconds count, as its own may stand behind them."""
    slow.client.request(Inspect(), "stuck", 40.0, 40.0)
    slow.client.request(Inspect(), 0, 1e9)
    _, (stuck, asked) = slow.pass_time(1)
    failed, answered = [], []
    while not failed and slow.now < 400:
        slow.client.request(Inspect(), len(answered) + 1, 1e9)
        slow.server.reply(asked.number, Pulled([1], (big(int(1.5 * MiB)),)))
        at_client, (asked,) = slow.pass_time(1.5 * CHUNK + 2)
        failed += [each for each in at_client if type(each) is Failed]
        answered += [each.token for each in at_client if type(each) is Answered]
    assert [each.token for each in failed] == ["stuck"]
    assert answered == [0, 1, 2]
    assert stuck.number < asked.number

"""A peer floods, reads nothing, and resets its connection while much of it waits."""

import time
from contextlib import ExitStack

import pytest
from attack_peers import claim, frame, keyed, raw
from attack_tasks import HARD, target

from zstrat.wire import Inspect, Job, encode

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]

FLOOD = 1500
"""Three times what ZeroMQ takes before it stops reading a peer."""

BEATS = 2.0
"""Seconds between the heartbeats of ZeroMQ, with which these resets were deadly."""


def flood(first):
    return b"".join(
        frame(encode(Inspect(), 2 * number + 1)[0])
        for number in range(first, first + FLOOD)
    )


def wait_until(moment):
    while time.monotonic() < moment:
        time.sleep(0.002)


@pytest.mark.parametrize("job", [Job.PS, pytest.param(Job.WORKER, marks=HARD)])
def test_a_flood_and_a_reset(job, folder, rounds):
    with target(job, folder) as task, ExitStack() as peers:
        wanted, at_once = rounds(6, 200), 6
        for _ in range(-(-wanted // at_once)):
            began = time.monotonic()
            some = [
                peers.enter_context(raw(task.address, claim(Job.OBSERVER, index)))
                for index in range(at_once)
            ]
            for number, peer in enumerate(some):
                # The timer of its connection fires while what it sent still waits.
                wait_until(began + BEATS - 0.02 * (number + 1))
                peer.force(flood(1))
            for peer in some:
                peer.reset()
            assert task.is_alive, task.words
        assert task.inspect()["task"]["job"] == job


@pytest.mark.parametrize("job", [pytest.param(Job.PS, marks=HARD), Job.WORKER])
def test_a_flood_and_a_reset_with_a_key(job, folder, keys, rounds):
    with target(job, folder, keys) as task:
        for _ in range(rounds(1, 50)):
            began = time.monotonic()
            with ExitStack() as stack:
                peers = [
                    stack.enter_context(keyed(task.address, keys, Job.OBSERVER, job))
                    for _ in range(rounds(1, 4))
                ]
                wait_until(began + BEATS - 0.06 * len(peers))
                for peer in peers:
                    peer.relay.deaf.set()
                    for _ in range(FLOOD):
                        peer.ask(Inspect())
                wait_until(began + BEATS - 0.02)
                for peer in peers:
                    peer.reset()
            assert task.is_alive, task.words
        assert task.inspect()["task"]["job"] == job

"""Peers that connect and say nothing, or say nothing any more."""

from contextlib import ExitStack, suppress

import numpy as np
import pytest
from attack_peers import claim, dial, frame, framed, raw
from attack_tasks import target

from zstrat.wire import Done, Failure, Hop, Job, Pull, Read

PER_ADDRESS = 256
"""How many of one address may be there that have not greeted."""

MORE = 1
"""The flag of a frame that another one follows."""

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


def test_who_falls_silent_is_hung_up_without_its_help(folder):
    with (
        target(Job.PS, folder, ZSTRAT_LIVENESS="1") as ps,
        raw(ps.address, claim(Job.OBSERVER)) as peer,
    ):
        peer.hung_up()  # else its connection would stay for as long as TCP lets it
        assert ps.inspect()["endpoint"]["counts"]["lost"] >= 1


def test_a_crowd_that_says_nothing_does_not_shut_others_out(ps, rounds):
    before, threads = ps.descriptors, ps.threads
    for _ in range(rounds(1, 20)):
        with ExitStack() as crowd:
            for _ in range(1000):
                crowd.callback(dial(ps.address).close)
            assert ps.inspect()["endpoint"]["counts"]["newcomers"] <= PER_ADDRESS
            while ps.descriptors > before + PER_ADDRESS + 10:
                ps.inspect()  # those that it has given up are being closed
    assert ps.threads == threads
    assert ps.log_bytes < 5000, ps.words


def test_who_only_looks_and_who_is_a_stranger_may_not_say_much(ps):
    """Reading a long header takes a loop tens of milliseconds."""
    long = framed(Pull(7, [Read(1, -1)] * 3000), 3)
    with raw(ps.address, claim(Job.OBSERVER)) as peer:
        peer.answer()
        peer.send(long)
        peer.hung_up()
    with raw(ps.address) as peer:
        peer.send(long)
        peer.hung_up()
    with raw(ps.address, claim(Job.WORKER)) as peer:
        peer.answer()
        peer.send(long)
        assert isinstance(peer.answer(), Failure)  # there is no such session
    assert ps.log_bytes < 5000, ps.words


def test_who_only_looks_may_not_send_a_body(ps):
    """It would be in memory before it is known that nobody wants it."""
    announced = framed(Hop(1, 1, 1, 1, (np.zeros(2**16, "u1"),)), 3)
    for job, is_let in ((Job.OBSERVER, False), (Job.WORKER, True)):
        with raw(ps.address, claim(job)) as peer:
            peer.answer()
            peer.send(announced)
            if is_let:
                assert peer.answer() == Done()
            else:
                with pytest.raises(ConnectionError):
                    peer.answer()


def test_who_only_looks_may_not_send_a_message_without_an_end(folder):
    """libzmq keeps all of its parts, however many, until the last one is there."""
    with target(Job.PS, folder, ZSTRAT_LIVENESS="60", ZSTRAT_HANDSHAKE="60") as ps:
        for hello in (claim(Job.OBSERVER), None):
            with raw(ps.address, hello) as peer:
                if hello is not None:
                    peer.answer()
                with suppress(OSError):  # hung up on in the midst of it
                    for _ in range(12):
                        peer.send(frame(bytes(2**21), MORE))
                peer.hung_up()
        assert "a message without an end" in ps.words


def test_nor_may_a_worker(folder):
    """Its silence would be noticed much later."""
    with (
        target(Job.PS, folder, ZSTRAT_LIVENESS="60") as ps,
        raw(ps.address, claim(Job.WORKER)) as peer,
    ):
        peer.answer()
        peer.line.settimeout(0.1)
        with suppress(OSError):  # hung up on in the midst of it
            for _ in range(40):
                for _ in range(4):
                    peer.send(frame(bytes(2**21), MORE))
                with suppress(TimeoutError):
                    peer.hung_up()
                    break
        assert "a message without an end" in ps.words

"""Who connects and says nothing: bounded in number, and sent away in time."""

import asyncio
import ctypes
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zstrat.config import Settings, Timeouts
from zstrat.transport._remote import Newcomers


def newcomers(**options):
    return Newcomers(5.0, lambda count: 0, **options)


def test_the_bound_of_an_address_leaves_other_addresses_alone():
    some = newcomers(per_address=2)
    assert some.came(1, "a1", "a", 0.0) is None
    assert some.came(2, "b1", "b", 0.0) is None
    assert some.came(3, "a2", "a", 0.0) is None
    assert some.came(4, "a3", "a", 0.0) == "a1"
    assert len(some) == 3


def test_above_the_bound_of_all_the_address_with_the_most_makes_room():
    some = newcomers(in_all=3)
    for descriptor, address in enumerate("abb"):
        assert some.came(descriptor, (address, descriptor), address, 0.0) is None
    assert some.came(3, ("c", 3), "c", 0.0) == ("b", 1)


def test_who_greeted_in_time_is_left_alone_and_who_did_not_is_named_once():
    some = newcomers()
    some.came(1, "greets", "a", 0.0)
    some.came(2, "waits", "a", 1.0)
    some.gone(1)
    assert some.late(6.0) == []
    assert some.late(6.5) == ["waits"]
    assert some.late(60.0) == []
    assert len(some) == 0


@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from("abc"), st.booleans())))
def test_there_are_never_more_than_the_bounds(steps):
    some = Newcomers(5.0, random.Random(0).randrange, per_address=4, in_all=8)
    here = {}
    for descriptor, address, comes in steps:
        if comes:
            here[descriptor] = address
            gone = some.came(descriptor, descriptor, address, 0.0)
            here.pop(gone, None)
        else:
            here.pop(descriptor, None)
            some.gone(descriptor)
        assert len(some) == len(here) <= 8
        assert max(map(list(here.values()).count, "abc")) <= 4
    assert sorted(some.late(9.0)) == sorted(here)


@pytest.fixture
def hasty_greeting():
    return Settings(timeouts=Timeouts(beat=0.1, handshake=0.3))


async def test_a_silent_connection_is_hung_up(net, hasty_greeting):
    endpoint, address, _ = await net.serve(settings=hasty_greeting)
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    await reader.readexactly(10)  # the signature of ZeroMQ, which speaks first
    assert await reader.read() == b""
    writer.close()
    assert endpoint.statistics()["counts"]["newcomers"] == 0


async def test_the_memory_of_a_crowd_that_has_gone_is_given_back(net, monkeypatch):
    """glibc keeps what libzmq had for its connections, unless it is asked to trim."""
    loop, trimmed = asyncio.get_running_loop(), asyncio.Event()

    class Library:
        def __init__(self, name):
            assert name is None

        def malloc_trim(self, pad):
            loop.call_soon_threadsafe(trimmed.set)

    _, address, _ = await net.serve(settings=Settings(timeouts=Timeouts(beat=0.1)))
    monkeypatch.setattr(ctypes, "CDLL", Library)
    host, port = address.split(":")
    for _ in range(100):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.close()
    async with asyncio.timeout(100):
        await trimmed.wait()

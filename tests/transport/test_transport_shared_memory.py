"""Memory that two processes of one host share: what is read is never overwritten."""

import dataclasses
import gc
import itertools
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zstrat.transport import Arena, Mapping, hello
from zstrat.transport._shared_memory import Blocks, Quota, ShmChannel

PAGE = 4096


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40_000)), max_size=60))
def test_blocks_never_overlap_and_all_of_it_comes_back(steps):
    blocks, taken = Blocks(PAGE, 40 * PAGE), {}
    for take, number in steps:
        if take:
            start = blocks.take(number)
            if start is not None:
                taken[start] = start + -(-number // PAGE) * PAGE
        elif taken:
            assert blocks.give_back(taken.popitem()[0])
        places = sorted(taken.items())
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(places))
        assert all(start >= PAGE and end <= 40 * PAGE for start, end in places)
    for start in taken:
        assert blocks.give_back(start)
        assert not blocks.give_back(start)
    assert blocks.take(39 * PAGE) == PAGE


@pytest.fixture
def arena():
    arena = Arena(64 * PAGE)
    yield arena
    arena.close()


def test_a_body_is_released_when_its_last_array_dies(arena):
    raws = [np.full(5_000, 7, np.uint8), np.full(100, 9, np.uint8)]
    offset = arena.place(raws, 5_056 + 100)
    mapping = Mapping(os.getpid(), arena.descriptor, arena.capacity, arena.word)
    released = []
    memory = mapping.body(offset, 5_156, released.append)
    array = np.ndarray((100,), np.uint8, memory[5_056:5_156])
    part = array[50:].reshape(5, 10)
    del memory, array
    gc.collect()
    assert released == []
    assert (part == 9).all()
    del part
    assert released == [offset]


def test_nobody_writes_into_the_memory_of_a_peer(arena):
    mapping = Mapping(os.getpid(), arena.descriptor, arena.capacity, arena.word)
    offset = arena.place([np.zeros(10, np.uint8)], 10)
    with pytest.raises((TypeError, ValueError)):
        mapping.body(offset, 10, print)[0] = 1


@pytest.mark.parametrize("change", ["word", "capacity", "descriptor"])
def test_memory_that_is_not_what_was_said_is_not_mapped(arena, change):
    about = [arena.descriptor, arena.capacity, arena.word]
    at = ["descriptor", "capacity", "word"].index(change)
    about[at] = [os.open("/dev/null", os.O_RDONLY), 32 * PAGE, b"x" * 16][at]
    try:
        with pytest.raises(OSError):  # noqa: PT011 (each says something else)
            Mapping(os.getpid(), *about)
    finally:
        if change == "descriptor":
            os.close(about[0])


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 1), (1, 1), (PAGE, 64 * PAGE)])
def test_a_body_outside_of_the_arena_is_refused(arena, offset, nbytes):
    mapping = Mapping(os.getpid(), arena.descriptor, arena.capacity, arena.word)
    with pytest.raises(ValueError, match="outside of the arena"):
        mapping.body(offset, nbytes, print)


def test_another_host_gets_no_offer():
    me = hello("ps", 0, 1)
    assert ShmChannel(me).offer(dataclasses.replace(me, host="elsewhere")) is None


def test_all_arenas_together_keep_to_the_quota():
    quota = Quota(40 * PAGE)
    one, two = Arena(64 * PAGE, quota), Arena(64 * PAGE, quota)
    body = [np.zeros(30 * PAGE, np.uint8)]
    offset = one.place(body, 30 * PAGE)
    assert offset is not None
    assert two.place(body, 30 * PAGE) is None
    assert two.place([np.zeros(PAGE, np.uint8)], PAGE) == PAGE
    assert one.give_back(offset)  # its pages stay, and are used again
    assert one.place(body, 30 * PAGE) == offset
    one.close()
    assert two.place(body, 30 * PAGE) is not None
    two.close()


def test_nothing_is_placed_for_who_only_claims_to_have_mapped_the_memory():
    me = hello("ps", 0, 1)
    channel = ShmChannel(me)
    offer = channel.offer(dataclasses.replace(me, index=1))
    body = [np.zeros(100_000, np.uint8)]
    assert not channel.agreed(offer.word)  # all that was said of it
    assert channel.place(body, 100_000) is None
    other = ShmChannel(me)
    offer = other.offer(me)
    assert other.agreed(ShmChannel(me).accept(offer, me))
    assert other.place(body, 100_000) is not None
    other.close()

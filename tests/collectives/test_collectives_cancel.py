"""A program that stops to wait for its group, at whichever await, can begin again; the
other ranks hear of it at once, and nothing stays open."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cancels import cancelled_everywhere
from collectives_groups import QUICK, ranks_of
from strikes import is_struck, strikes

from zstrat.cluster import ClusterSpec, SimpleClusterResolver
from zstrat.collectives import Group
from zstrat.errors import PeerLostError, StaleSessionError, UnavailableError
from zstrat.transport import Endpoint, Link, hello, new_incarnation
from zstrat.wire import (
    AskCall,
    CallState,
    GroupFormed,
    JoinGroup,
    LeaveGroup,
    MemberEntry,
)


def shared():
    """Segments of memory that this process maps."""
    return Path("/proc/self/maps").read_text().count("memfd:zstrat")


async def joined(join):
    """Until all have joined: the other rank may have been cancelled meanwhile, of which
    this one hears at once, and not when time is up."""
    while True:
        try:
            return await join()
        except PeerLostError:
            continue


async def sums(group):
    """As `joined`."""
    while True:
        try:
            return await group.all_reduce_async(np.ones(3))
        except (PeerLostError, UnavailableError):
            await joined(group.reform_async)


async def both(*work):
    np.testing.assert_array_equal(await asyncio.gather(*work), np.full((2, 3), 2.0))


@pytest.fixture(
    params=[
        ("tcp", "tcp", True),
        ("tcp", "ipc", True),
        ("shm", "ipc", True),
        ("auto", "tcp", False),
    ]
)
def make(request):
    """Makes groups of two ranks, which have other groups besides, or none."""
    transport, over, has_others = request.param
    before = shared()
    with ranks_of(2, over=over) as ranks:
        others = ranks.groups(name="others") if has_others else []
        options = {"timeout": 20, "rendezvous_timeout": 20}
        options["settings"] = replace(QUICK, transport=transport)
        yield lambda rank: Group.create(ranks.resolver(rank), **options)
        for found in ranks.each(lambda group: group.all_reduce(np.ones(3)), others):
            np.testing.assert_array_equal(found, np.full(3, 2.0))
    gc.collect()  # ZeroMQ warns of a socket that nobody has closed
    assert shared() == before


@pytest.mark.parametrize("rank", [0, 1])
async def test_making_a_group_that_is_cancelled_anywhere(make, rank):
    made, count = [], 0

    async def create():
        made.append(await joined(lambda: make(rank)))

    async def other():
        async with await joined(lambda: make(1 - rank)) as group:
            return await sums(group)

    asking = asyncio.create_task(other())
    async for was_cancelled in cancelled_everywhere(create):
        assert was_cancelled != bool(made)
        if was_cancelled:
            await create()
        async with made.pop() as group:
            await both(asking, sums(group))
        count += 1
        asking = asyncio.create_task(other())
    await create()
    async with made.pop() as group:
        await both(asking, sums(group))
    assert count > 4


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_reform_that_is_cancelled_anywhere(make, rank):
    groups = await asyncio.gather(make(0), make(1))
    count = 0
    async with groups[0], groups[1]:
        mine, other = groups[rank], groups[1 - rank]

        async def again():
            await joined(other.reform_async)
            return await sums(other)

        asking = asyncio.create_task(again())
        async for was_cancelled in cancelled_everywhere(mine.reform_async):
            if was_cancelled:
                await joined(mine.reform_async)
            await both(sums(mine), asking)
            count += 1
            asking = asyncio.create_task(again())
        await joined(mine.reform_async)
        await both(sums(mine), asking)
    assert count > 4


async def test_reforms_that_are_cancelled_at_any_moment_of_the_other_threads():
    """What one rank is cancelled in, the others may take for done."""
    moments = random.Random(7)
    with ranks_of(3) as ranks:
        groups = await asyncio.to_thread(ranks.groups)

        async def again(group):
            await joined(group.reform_async)
            return await sums(group)

        for number in range(30):
            mine, *others = groups[number % 3 :] + groups[: number % 3]
            asking = [asyncio.create_task(again(group)) for group in others]
            forming = asyncio.create_task(mine.reform_async())
            for _ in range(moments.randrange(700)):
                await asyncio.sleep(0)  # the loop of the group goes on
            forming.cancel()
            await asyncio.wait([forming])
            for found in await asyncio.gather(again(mine), *asking):
                np.testing.assert_array_equal(found, np.full(3, 3.0))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_anywhere_in_the_life_of_a_group_leaves_nothing_bound():
    files = "group/_group.py", "group/_runtime.py", "group/_calls.py"
    files = *files, "group/_invitation.py"
    more = "transport/_loop.py", "zstrat/threads.py", "group/_scheduler.py"
    with ranks_of(1, over="tcp") as ranks:
        made = []

        def make():
            made.append(Group(ranks.resolver(0), settings=QUICK))

        def is_left_alone():
            while made:
                made.pop().close()
            with Group(ranks.resolver(0), settings=QUICK) as group:
                assert group.all_reduce(np.ones(2)).tolist() == [1.0, 1.0]
            for each in ours():  # one may have begun a moment after Ctrl-C
                each.join(100)
            assert not ours()

        def ours():
            return [each for each in threading.enumerate() if "groups" in each.name]

        for _ in strikes(make, *files, *more):
            is_left_alone()
        for _ in strikes(made[0].reform, *files, *more):
            made[0].reform()
        assert made[0].all_reduce(np.ones(2)).tolist() == [1.0, 1.0]
        for number in itertools.count(1):
            struck = is_struck(made[0].close, number, *files, *more)
            is_left_alone()
            if not struck:
                break
            make()
        assert number > 20
    assert not ours()


CALLS = {
    "all_reduce": (lambda group: group.all_reduce_async(np.arange(2.0)), [0, 2]),
    "all_gather": (lambda group: group.all_gather_async(np.ones(1)), [1, 1]),
    "broadcast": (lambda group: group.broadcast_async(np.arange(2.0)), [0, 1]),
    "all_to_all": (lambda group: group.all_to_all_async(np.ones(2)), [1, 1]),
    "reduce_scatter": (lambda group: group.reduce_scatter_async(np.ones(4)), [2, 2]),
    "barrier": (lambda group: group.barrier_async(), None),
}


async def test_a_wait_that_is_cancelled_anywhere_cancels_no_call(make):
    groups = await asyncio.gather(make(0), make(1))
    async with groups[0], groups[1]:
        for call, expected in CALLS.values():
            pending = []

            async def waiting(call=call, pending=pending):
                pending.append(call(groups[0]))
                asyncio.get_running_loop().call_soon(
                    lambda: pending.append(call(groups[1]))
                )
                await pending[0]

            async for _ in cancelled_everywhere(waiting):
                for result in await asyncio.gather(*pending):
                    np.testing.assert_array_equal(result, expected)
                pending.clear()


async def test_a_group_that_is_left_is_closed_though_that_is_cancelled_at_once(make):
    """And though every thread of the program waits for another rank to hear of it."""
    groups = await asyncio.gather(make(0), make(1))
    loop, only = asyncio.get_running_loop(), ThreadPoolExecutor(1)
    loop.set_default_executor(only)

    async def leave():
        async with groups[0]:
            pass

    async with groups[1]:
        waiting = loop.run_in_executor(None, groups[1].barrier)
        leaving = asyncio.create_task(leave())
        await asyncio.sleep(0)  # it waits
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        with pytest.raises(PeerLostError, match="rank 0"):
            await waiting


async def test_a_rank_that_gives_up_before_another_knows_that_it_has_joined(tmp_path):
    """The notice comes on another connection than the answer of rank 0, and before."""
    ticket = 7
    me = hello("worker", 0, new_incarnation())
    addresses = [f"ipc://{tmp_path}/{rank}" for rank in range(2)]

    async def answer(request):
        link = Link(addresses[1], me, name="/job:worker/task:1", settings=QUICK)
        link.start()
        await link.wait_open(asyncio.get_running_loop().time() + 60)
        link.notify(LeaveGroup(ticket, 0, "it was cancelled"))
        with pytest.raises(StaleSessionError):  # behind the notice
            await link.request(AskCall(ticket, 1))
        await link.close("it was cancelled")
        who = "/job:worker/task:0", addresses[0], me.host, me.pid, me.incarnation
        first = MemberEntry(*who, 0, 0, b"")
        return GroupFormed(ticket, 1, [first, request.member], {})

    def handle(_, message):
        if isinstance(message, JoinGroup):
            return answer(message)
        return CallState("", [], False, False) if isinstance(message, AskCall) else None

    endpoint = Endpoint(me, handle, settings=QUICK)
    await endpoint.bind(addresses[0])
    resolver = SimpleClusterResolver(
        ClusterSpec({"worker": addresses}), task_type="worker", task_id=1
    )
    with pytest.raises(PeerLostError) as caught:
        await Group.create(resolver, settings=QUICK, rendezvous_timeout=10)
    assert caught.value.left
    await endpoint.close()

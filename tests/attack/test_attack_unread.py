"""A peer asks for more than it reads: the task neither fills up nor slows down."""

import asyncio
import threading
import time

import numpy as np
import pytest
from attack_peers import claim, raw
from attack_tasks import MiB

from zstrat.errors import InvalidArgumentError, ResourceExhaustedError
from zstrat.ps.client import READS
from zstrat.wire import (
    CreateVariables,
    Inspect,
    Job,
    OpenSession,
    Pull,
    PullRows,
    Push,
    Read,
    Update,
    UpdateOp,
    VariableEntry,
)

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

SESSION, KEY, SIZE = 7, 1, 256 * 1024


@pytest.fixture
async def chief(ps):
    """A coordinator with one variable of a MiB, all zeros."""
    async with ps.honest(Job.CHIEF) as link:
        await link.request(OpenSession(SESSION, 0, 1, []))
        zeros = (np.zeros(SIZE, np.float32),)
        entry = VariableEntry(KEY, "v", True, False)
        await link.request(CreateVariables(SESSION, [entry], zeros))
        yield link


class Swamp:
    """A worker that pushes and pulls on a thread of its own, and reads nothing."""

    def __init__(self, address, index):
        self._address, self._index = address, index
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._flood)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()

    def _flood(self):
        while not self._over.is_set():
            with raw(self._address, claim("worker", self._index)) as peer:
                while not self._over.is_set():
                    some = [peer.ask(ADD)]
                    some += [peer.ask(Pull(SESSION, [Read(KEY, -1)])) for _ in "12345"]
                    some += [peer.ask(Inspect()) for _ in range(200)]
                    try:
                        peer.send(b"".join(some))
                    except OSError:  # it was cut off: on to the next connection
                        break


ADD = Push(
    SESSION,
    -1,
    0,
    0,
    [Update(KEY, UpdateOp.ADD, 0, 1)],
    (np.ones(SIZE, np.float32),),
)


async def value(chief):
    return (await chief.request(Pull(SESSION, [Read(KEY, -1)]))).arrays[0]


async def test_a_worker_that_does_not_read_fills_nothing(ps, chief, rounds):
    await value(chief)
    before, most, slowest = ps.rss, 0, 0.0
    began = time.monotonic()
    with Swamp(ps.address, 1):
        while (now := time.monotonic()) < began + rounds(2, 40):
            await value(chief)
            slowest = max(slowest, time.monotonic() - now)
            most = max(most, ps.rss)
    print(f"{before / MiB:.0f} MiB, then {most / MiB:.0f}; {slowest * 1000:.0f} ms")
    assert most < before + 60 * MiB
    assert await ps.settles(before + 25 * MiB) < before + 25 * MiB
    # A last addition of the swamp may still wait at the ps: the chief counts elsewhere.
    entry = VariableEntry(KEY + 1, "w", True, False)
    await chief.request(CreateVariables(SESSION, [entry], (np.zeros(4, np.float32),)))
    addition = Update(KEY + 1, UpdateOp.ADD, 0, 1)
    ones = (np.ones(4, np.float32),)
    assert (await chief.request(Push(SESSION, -1, 0, 0, [addition], ones))).applied
    pulled = await chief.request(Pull(SESSION, [Read(KEY + 1, -1)]))
    np.testing.assert_array_equal(pulled.arrays[0], np.ones(4))
    assert ps.log_bytes < 5000, ps.words


async def test_all_answers_come_to_who_asks_for_many_at_once(ps, chief):
    """More than the bound in answers, asked for before the first of them is read."""
    asked = [chief.submit(Pull(SESSION, [Read(KEY, -1)])) for _ in range(50)]
    asked.append(chief.submit(ADD))
    asked += [chief.submit(Pull(SESSION, [Read(KEY, -1)])) for _ in range(50)]
    answers = await asyncio.gather(*asked)
    sums = [answer.arrays[0].sum() for answer in answers if hasattr(answer, "arrays")]
    assert sums == 50 * [0.0] + 50 * [SIZE]


async def test_short_lookups_of_many_rows_are_gathered_one_at_a_time(ps, chief):
    ids = np.zeros(60_000, np.int32)  # of rows of 256 bytes: 15 MiB an answer
    table = VariableEntry(KEY + 1, "table", True, False)
    zeros = (np.zeros((1000, 64), np.float32),)
    await chief.request(CreateVariables(SESSION, [table], zeros))
    asked = PullRows(SESSION, [], [KEY + 1], (ids,))
    before, most = ps.rss, 0
    with raw(ps.address, claim("worker", 1)) as peer:
        peer.force(b"".join(peer.ask(asked) for _ in range(40)))
        for _ in range(300):
            await value(chief)
            most = max(most, ps.rss)
    assert most < before + 75 * MiB


async def test_a_lookup_is_bounded_by_the_memory_that_is_left(ps, chief):
    entry = VariableEntry(KEY + 1, "wide", True, False)
    wide = np.zeros((2, 2**18), np.float32)
    await chief.request(CreateVariables(SESSION, [entry], (wide,)))
    ids = np.zeros(2**19, np.int8)  # half a TiB of answer
    with pytest.raises((ResourceExhaustedError, InvalidArgumentError)):
        await chief.request(PullRows(SESSION, [], [KEY + 1], (ids,)))
    assert (await value(chief)).shape == (SIZE,)


async def test_a_short_message_does_not_hold_up_the_others(ps, chief):
    reads = 8000 * [Read(KEY, -1)]  # 24 KB
    with pytest.raises(InvalidArgumentError, match=r"\b8000\b"):
        await chief.request(Pull(SESSION, reads))
    answer = await chief.request(Pull(SESSION, READS * [Read(KEY, 0)]))
    assert answer.versions == READS * [0]

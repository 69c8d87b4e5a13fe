"""Messages of every kind that are nearly right, from every role, to every task.

Nothing of what arrives ends a task, slows it for long, fills its memory or its log, or
changes what honest peers see of it unless its sender may do that.
"""

import asyncio
import contextlib
import random
import time
from functools import partial

import numpy as np
import pytest
from attack_fuzz import made_up, mutated, swollen
from attack_peers import claim, frame, keyed, raw
from attack_recorder import recorded
from attack_tasks import HARD, IS_HARD, MiB, target

from zstrat.config import Limits
from zstrat.errors import ProtocolError
from zstrat.wire import (
    Beat,
    BuildResource,
    CloseSession,
    CreateOptimizer,
    CreateTables,
    CreateVariables,
    DeleteVariables,
    Goodbye,
    InitializeVariables,
    Inspect,
    Job,
    LoadTable,
    LoadTensors,
    OpenSession,
    PinSnapshot,
    Pull,
    PutCode,
    Read,
    StoreTable,
    StoreTensors,
    VariableEntry,
    Withdraw,
    WriteSnapshot,
    decode_header,
    encode,
)

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1800)]

SESSION, KEY = 7, 1

TRUSTED = {
    *(BuildResource, CloseSession, CreateOptimizer, CreateTables, CreateVariables),
    *(
        DeleteVariables,
        Withdraw,
        InitializeVariables,
        LoadTensors,
        OpenSession,
        PinSnapshot,
        PutCode,
    ),
    *(StoreTensors, WriteSnapshot, LoadTable, StoreTable),
}
"""What a chief may make a task do: run code, write files, fill its memory, drop what
is there, end."""


LATE = 5.0
"""Milliseconds of work of the loop, behind which a message must not wait."""


class Line:
    """Sends cases on a connection for as long as that lasts."""

    def __init__(self, peer):
        self._peer, self._number = peer, 0

    def try_out(self, chance, seed):
        """Sends a case and, behind it, a beat. Whether that was answered."""
        self._number += 1
        number = chance.choice([2 * self._number + 1] * 8 + [2 * self._number, 0])
        self._send(mutated(chance, seed, number))
        self._number -= number == 0
        self._send([encode(Beat(True))[0]])
        while True:
            kind = decode_header(self._peer.hear()[0], Limits()).message_kind
            if kind in (Beat, Goodbye):
                return kind is Beat

    def _send(self, frames):
        if hasattr(self._peer, "socket"):
            self._peer.socket.send_multipart(frames)
        else:
            self._peer.send(
                b"".join([frame(each, 1) for each in frames[:-1]]) + frame(frames[-1])
            )


def attack(seeds, connect, chance, cases):
    """How many cases were tried."""
    tried = 0
    while tried < cases:
        with contextlib.suppress(ConnectionError), connect() as peer:
            line = Line(peer)
            going = True
            while going and tried < cases:
                tried += 1
                going = line.try_out(chance, chance.choice(seeds))
    return tried


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    """Made up; in the long form also recorded from a training."""
    some = made_up(random.Random(1), SESSION)
    if IS_HARD:
        for seed in recorded(tmp_path_factory.mktemp("recorded")):
            if seed.header[2:] and isinstance(seed.header[2], int):
                seed.header[2] = SESSION
            some.append(seed)
    return some


def allowed(seeds, role):
    return [each for each in seeds if role != Job.CHIEF or each.kind not in TRUSTED]


@contextlib.asynccontextmanager
async def owned(task, job):
    """An honest coordinator that has the task, and a variable on it if it is a ps."""
    async with task.honest(Job.CHIEF) as chief:
        await chief.request(OpenSession(SESSION, 0, 1, []))
        if job == Job.PS:
            entry = VariableEntry(KEY, "v", True, False)
            value = (np.arange(3, dtype=np.float32),)
            await chief.request(CreateVariables(SESSION, [entry], value))
        yield chief


async def besiege(task, job, attackers, may_write, measure=contextlib.nullcontext):
    """Runs the attackers on threads; an honest coordinator works on meanwhile."""
    async with owned(task, job) as chief:
        await asyncio.sleep(0)
        before = task.rss, task.descriptors, task.threads, task.log_bytes
        most, times = before[0], []
        with measure():
            running = asyncio.gather(*[asyncio.to_thread(each) for each in attackers])
            while not running.done():
                began = time.monotonic()
                await chief.request(Inspect())
                times.append(time.monotonic() - began)
                most = max(most, task.rss)
                if job == Job.PS:
                    answer = await chief.request(Pull(SESSION, [Read(KEY, -1)]))
                    assert answer.arrays[0].shape == (3,)
                    assert may_write or answer.arrays[0].tolist() == [0, 1, 2]
                await asyncio.wait([running], timeout=0.01)
            tried = sum(await running)
        times.sort()
        print(
            f"{job}: {tried} cases; memory +{(most - before[0]) / MiB:.1f} MiB, "
            f"log +{task.log_bytes - before[3]} bytes, descriptors "
            f"{task.descriptors - before[1]:+}, answers in "
            f"{1000 * times[len(times) // 2]:.1f} ms, "
            f"99 % in {1000 * times[len(times) * 99 // 100]:.1f} ms"
        )
        assert task.is_alive, task.words
        assert most < before[0] + 40 * MiB
        assert task.threads <= before[2] + 4
        assert task.descriptors <= before[1] + 100
        assert task.log_bytes - before[3] < 50_000 + tried // 10, task.words
        assert "Traceback" not in task.words
        await asyncio.to_thread(task.inspect)
    return tried


def stranger(address, chance, cases):
    """Has no key, or does not greet: bytes that are no protocol, and messages."""
    some, tried = made_up(chance, SESSION), 0
    while tried < cases:
        tried += 1
        with contextlib.suppress(ConnectionError, TimeoutError), raw(address) as peer:
            for _ in range(3):
                frames = mutated(chance, chance.choice(some), chance.choice([0, 2, 3]))
                peer.force(b"".join(frame(each, 1) for each in frames[:-1]))
                peer.force(frame(frames[-1]))
            if chance.random() < 0.5:
                peer.force(chance.randbytes(300))
    return tried


@pytest.mark.parametrize("job", [Job.PS, Job.WORKER])
async def test_without_keys(job, folder, seeds, rounds):
    cases = rounds(60, 15_000)

    def attacker(role):
        chance = random.Random(f"{job} {role}")
        some = allowed(seeds, role)
        return lambda: attack(some, lambda: greeted(task.address, role), chance, cases)

    with target(job, folder) as task:
        for role in Job:
            await besiege(task, job, [attacker(role)], role in (Job.CHIEF, Job.WORKER))
        chance = random.Random("stranger")
        await besiege(
            task, job, [lambda: stranger(task.address, chance, cases // 20)], False
        )


@HARD
@pytest.mark.parametrize("job", [Job.PS, Job.WORKER])
async def test_the_loop_of_what_is_attacked_turns_quickly(job, folder, seeds):
    with target(job, folder, noting=True) as task:
        for role in Job:

            def attacker(role=role):
                chance = random.Random(f"{job} {role} turns")
                some = allowed(seeds, role)
                return attack(some, lambda: greeted(task.address, role), chance, 5000)

            may_write = role in (Job.CHIEF, Job.WORKER)
            await besiege(task, job, [attacker], may_write, partial(quick, task))


@HARD
@pytest.mark.parametrize("job", [Job.PS, Job.WORKER])
async def test_no_message_holds_up_the_loop_for_long(job, folder):
    some = swollen(SESSION, Limits().header)
    with target(job, folder, noting=True) as task:
        for role in Job:

            def attacker(role=role):
                chance = random.Random(f"{job} {role} long")
                kinds = allowed(some, role)
                return attack(kinds, lambda: greeted(task.address, role), chance, 500)

            await besiege(task, job, [attacker], role in (Job.CHIEF, Job.WORKER))
        turns = task.turns()
        print(f"longest headers: 99 % of the turns in {turns.within(0.99):.1f} ms")
        assert turns.within(0.99) <= LATE


@contextlib.contextmanager
def quick(task):
    """What is sent meanwhile holds up nobody: 99 % of the turns of the loop, and of the
    moments in which a message may come, meet with less than 5 ms of work."""
    began, before = time.monotonic(), task.turns()
    yield
    elapsed, turns = time.monotonic() - began, task.turns(before)
    late = turns.longer(LATE) / elapsed
    print(
        f"{turns.count} turns: 99 % in {turns.within(0.99):.2f} ms, the longest in "
        f"{turns.longest:.1f} ms; {100 * late:.2f} % of the time in longer ones"
    )
    assert turns.within(0.99) <= LATE
    assert late <= 0.01


@contextlib.contextmanager
def greeted(address, role):
    with raw(address, claim(role, 40)) as peer:
        peer.answer()
        yield peer


@HARD
@pytest.mark.parametrize("job", [Job.PS, Job.WORKER])
async def test_with_each_key(job, folder, keys, seeds):
    with target(job, folder, keys) as task:
        for role in Job:

            def attacker(role=role):
                return attack(
                    allowed(seeds, role),
                    lambda: keyed(task.address, keys, role, job, claim(role, 40)),
                    random.Random(f"{job} {role}"),
                    3000,
                )

            await besiege(task, job, [attacker], role in (Job.CHIEF, Job.WORKER))
        chance = random.Random("stranger")
        await besiege(task, job, [lambda: stranger(task.address, chance, 500)], False)


def test_what_is_mutated_is_often_still_a_message():
    """Else the codec would refuse all of it, and nothing behind it would be tested."""
    chance, right, cases = random.Random(5), 0, 3000
    some = made_up(chance, SESSION)
    for _ in range(cases):
        header, *_ = mutated(chance, chance.choice(some), 3)
        with contextlib.suppress(ProtocolError):
            decode_header(header, Limits())
            right += 1
    assert cases // 4 < right < cases

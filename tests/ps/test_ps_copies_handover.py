"""Stores with second copies that are left in a file: who may serve them afterwards."""

import asyncio

import numpy as np
import pytest
from ps_callers import SESSION
from ps_copies import JUMP, TASK, create, later, pull, push, turns

from zstrat.config import Settings
from zstrat.errors import NotPrimaryError, StaleSessionError, UnavailableError
from zstrat.ps import Handover, Inherited, StoreRole
from zstrat.ps._process import PsProcess
from zstrat.testing import FakeRemote
from zstrat.wire import (
    CreateOptimizer,
    DetachBackup,
    Done,
    Job,
    OpenLog,
    OpenSession,
    PromoteBackup,
)


class Process:
    """Ends with one store, and begins again with what is in ``folder``."""

    def __init__(self, copies, folder):
        folder.chmod(0o700)
        self.copies, self.handover = copies, Handover(folder, 0, TASK)

    async def end(self, service):
        service._keeps_state = True
        assert await service.drain()
        owner = self.copies.primary.owner
        left = Inherited(5, owner, service.role.state_for_successor(0))
        assert await self.handover.leave(left, 60)

    def begin(self):
        left = self.handover.take(self.copies.load, largest=2**36)
        self.handover.took()
        self.role = left.own.role
        is_backup = self.role in (StoreRole.BACKUP, StoreRole.NOTHING)
        options = {"backup_of": (left.owner, left.own.view, 0)} if is_backup else {}
        service = self.copies.service(
            connect=self.copies.connect, inherited=left.own, **options
        )
        if not is_backup:
            service.take_over(left.owner)
        return service


@pytest.fixture
def process(copies, tmp_path):
    return Process(copies, tmp_path)


async def handed_over(process, service):
    await process.end(service)
    return process.begin()


async def test_a_primary_that_comes_back_serves_nobody_until_it_is_told(
    copies, process
):
    await copies.attach()
    await copies.ask(push(1))
    service = await handed_over(process, copies.primary)
    assert process.role is StoreRole.PRIMARY
    for asked in (push(2), pull(0), create(9)):
        with pytest.raises(NotPrimaryError):
            await copies.ask(asked, service)
    assert (await copies.ask(OpenSession(SESSION, 0, 1, []), service)).resumed
    with pytest.raises(StaleSessionError):
        await copies.ask(DetachBackup(SESSION, 0), service)
    assert await copies.ask(DetachBackup(SESSION, 2), service) == Done()
    assert not (await copies.ask(push(1), service)).applied
    assert (await copies.ask(push(2), service)).applied


async def test_a_primary_that_was_replaced_gives_up_what_it_comes_back_with(
    copies, process
):
    await copies.attach()
    service = await handed_over(process, copies.primary)
    service.give_up(5)
    assert service.statistics()["variables"] == 0
    with pytest.raises(NotPrimaryError):
        await copies.ask(DetachBackup(SESSION, 6), service)
    service = await handed_over(process, service)  # and once more, with nothing
    assert process.role is StoreRole.NOTHING
    with pytest.raises(NotPrimaryError):
        await copies.ask(DetachBackup(SESSION, 7), service)


async def test_a_backup_that_comes_back_may_take_its_place_and_follows_nobody(
    copies, process
):
    await copies.attach()
    assert (await copies.ask(push(1))).versions == [1]
    service = await handed_over(process, copies.backup)
    assert process.role is StoreRole.BACKUP
    with pytest.raises(UnavailableError):
        await copies.ask(OpenLog(SESSION, 1), service, FakeRemote(Job.PS, 0))
    assert await copies.ask(PromoteBackup(SESSION, 2), service) == Done()
    assert not (await copies.ask(push(1), service)).applied
    assert (await copies.ask(pull(0), service)).versions == [1 + JUMP]
    service = await handed_over(process, service)
    assert process.role is StoreRole.ALONE
    # Nobody had heard its answer: it is asked again.
    assert await copies.ask(PromoteBackup(SESSION, 2), service) == Done()
    assert (await copies.ask(pull(0), service)).versions == [1 + JUMP]


async def test_what_a_backup_has_taken_is_made_before_it_is_left(copies, process):
    await copies.attach()
    copies.gate.clear()
    copies.shipped[b"late"] = copies.shipped[b"adam"]()
    await copies.ask(CreateOptimizer(SESSION, 3, "late", b"late"))
    assert (await copies.ask(push(1))).applied  # it waits there, and counts as taken
    ending = asyncio.ensure_future(process.end(copies.backup))
    await turns()
    copies.gate.set()
    await ending
    service = process.begin()
    await copies.ask(PromoteBackup(SESSION, 2), service)
    (value,) = (await copies.ask(pull(0), service)).arrays
    assert np.array_equal(value, np.ones(3))


async def test_what_a_backup_hears_when_it_ends_is_not_acknowledged(copies, process):
    await copies.attach()
    ending = asyncio.ensure_future(process.end(copies.backup))
    await asyncio.sleep(0)
    waiting = later(copies, push(1))
    await ending
    assert not waiting.done()
    service = process.begin()
    await copies.ask(PromoteBackup(SESSION, 2), service)
    assert (await copies.ask(push(1), service)).applied
    waiting.cancel()
    copies.link.cut()


async def test_a_copy_that_is_not_whole_is_not_left(copies, process):
    service = await handed_over(process, copies.backup)
    assert process.role is StoreRole.NOTHING
    with pytest.raises(UnavailableError):
        await copies.ask(PromoteBackup(SESSION, 2), service)


@pytest.mark.parametrize("late", ["own", "first", "second"])
async def test_peers_wait_for_no_next_process_if_nothing_is_left_to_it(tmp_path, late):
    tmp_path.chmod(0o700)
    settings = Settings(state=tmp_path)
    process = PsProcess(
        FakeRemote(Job.PS, 5).hello, "ipc:unused", load_code=bytes, settings=settings
    )
    chief, said = FakeRemote(Job.CHIEF, 1), []
    process.service.handle(chief, OpenSession(SESSION, 0, 1, []))

    class Copy:
        def __init__(self, name):
            self.name, self.service, self.endpoint = name, self, self

        async def drain(self):
            return self.name != late

        async def close(self, reason, returns=0.0):
            said.append((reason, returns))

    process._copies.update({1: Copy("first"), 2: Copy("second")})
    assert await process.leave(None, drained=late != "own") == 0.0
    assert len(said) == 2
    for reason, returns in said:
        assert returns == 0.0
        assert "next process" not in reason

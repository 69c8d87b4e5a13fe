"""A store in two processes: who serves it, who is refused, who takes over."""

import asyncio
import threading
from dataclasses import replace

import numpy as np
import pytest
from ps_callers import SESSION, caller
from ps_copies import JUMP, OPTIMIZERS, create, later, pull, push, turns

from zstrat.errors import (
    NotPrimaryError,
    StaleSessionError,
    UnavailableError,
)
from zstrat.wire import (
    ArraySpec,
    AttachBackup,
    CloseSession,
    CreateOptimizer,
    DetachBackup,
    Done,
    Fence,
    Inspect,
    Job,
    OpenLog,
    OpenSession,
    PromoteBackup,
    Push,
    Pushed,
    StoreEntry,
    StoreTensors,
    Update,
    UpdateOp,
)


async def test_a_backup_that_has_not_all_does_not_take_over(copies):
    with pytest.raises(UnavailableError):
        await copies.promote()


async def test_a_backup_serves_nobody(copies):
    await copies.attach()
    for asked in (pull(), push(0), OpenSession(SESSION, 0, 1, [])):
        with pytest.raises(NotPrimaryError):
            await copies.ask(asked, copies.backup)
    assert (await copies.ask(Inspect(), copies.backup)).values["job"] == "ps"
    stranger = caller(Job.PS, 99)
    with pytest.raises(NotPrimaryError):
        await copies.ask(push(0), copies.backup, stranger)
    with pytest.raises(NotPrimaryError):
        await copies.ask(PromoteBackup(SESSION, 5), copies.backup, caller(Job.WORKER))


async def test_a_promoted_backup_has_the_session(copies):
    await copies.ask(push(0))
    await copies.attach()
    await copies.promote()
    opened = await copies.ask(OpenSession(SESSION, 0, 1, []), copies.backup)
    assert opened.resumed
    worker = caller(Job.WORKER, 3)
    pulled = await copies.ask(pull(), copies.backup, worker)
    assert pulled.versions == [JUMP + 1]
    assert await copies.ask(push(0), copies.backup, worker) == Pushed(False, [JUMP + 1])
    assert await copies.ask(PromoteBackup(SESSION, 2), copies.backup) == Done()
    assert await copies.ask(PromoteBackup(SESSION, 4), copies.backup) == Done()
    with pytest.raises(StaleSessionError):
        await copies.ask(PromoteBackup(SESSION, 3), copies.backup)


async def test_versions_of_what_is_created_later_jump_too(copies):
    await copies.attach()
    await copies.promote()
    await copies.ask(create(9), copies.backup)
    assert (await copies.ask(pull(9), copies.backup)).versions == [JUMP]


async def test_a_replaced_primary_acknowledges_nothing(copies):
    await copies.attach()
    copies.link.hold()
    answer = later(copies, push(0))
    await turns()
    await copies.promote()
    with pytest.raises(NotPrimaryError):
        await answer
    for asked in (pull(), push(1), AttachBackup(SESSION, 3, "nowhere:1", 1)):
        with pytest.raises(NotPrimaryError):
            await copies.ask(asked)
    again = await copies.ask(OpenSession(SESSION, 0, 1, []))
    assert again.resumed  # whatever else its process holds
    with pytest.raises(NotPrimaryError):
        await copies.ask(pull())
    assert not (await copies.ask(pull(), copies.backup)).arrays[0].any()


async def test_who_is_taken_with_nothing_while_its_store_is_elsewhere_serves_nobody(
    copies,
):
    """It would answer that it has no such variable, and the step would fail."""
    empty, chief, worker = copies.service(), caller(), caller(Job.WORKER, 3)
    opening = OpenSession(SESSION, 0, 1, [], views=[4])
    assert not (await copies.ask(opening, empty, chief)).resumed
    for asked in (pull(), push(0)):
        with pytest.raises(NotPrimaryError):
            await copies.ask(asked, empty, worker)
    empty.give_up(4)  # it is told so once more
    with pytest.raises(StaleSessionError):
        empty.give_up(3)
    await copies.ask(CloseSession(SESSION, False), empty, chief)
    anew = OpenSession(SESSION + 1, 0, 1, [])
    assert not (await copies.ask(anew, empty, chief)).resumed
    assert await copies.ask(replace(create(9), session=SESSION + 1), empty, chief)


async def test_one_that_slept_hears_it_when_it_is_back(copies):
    await copies.attach()
    copies.link.cut()
    await copies.promote()
    answer = later(copies, push(0))
    await turns()
    assert not answer.done()
    copies.link.connect()
    with pytest.raises(NotPrimaryError):
        await answer


async def test_a_replaced_primary_that_is_wanted_after_all_goes_on(copies):
    """The one that took over is gone, and has acknowledged nothing since."""
    await copies.ask(push(0))
    await copies.attach()
    await copies.promote()
    await turns()
    with pytest.raises(NotPrimaryError):
        await copies.ask(pull())
    await copies.ask(DetachBackup(SESSION, 3))
    assert (await copies.ask(pull())).versions == [1]


async def test_what_a_replaced_primary_held_can_be_dropped(copies):
    await copies.attach()
    await copies.promote()
    copies.primary.give_up(3)
    assert copies.primary.statistics()["variables"] == 0
    with pytest.raises(NotPrimaryError):
        await copies.ask(DetachBackup(SESSION, 4))
    copies.primary.lost(copies.chief, "it ended")
    opened = await copies.ask(OpenSession(SESSION + 1, 0, 1, []), peer=copies.chief)
    assert not opened.resumed  # another program starts afresh
    with pytest.raises(StaleSessionError):
        await copies.ask(pull())


async def test_older_views_are_refused(copies):
    await copies.attach(view=5)
    for asked in (
        AttachBackup(SESSION, 4, "nowhere:1", copies.incarnation),
        DetachBackup(SESSION, 4),
    ):
        with pytest.raises(StaleSessionError):
            await copies.ask(asked)
    for view in (1, 4):
        with pytest.raises(StaleSessionError):
            await copies.ask(PromoteBackup(SESSION, view), copies.backup)
        old = caller(Job.PS, 99)
        with pytest.raises(StaleSessionError):
            await copies.ask(OpenLog(SESSION, view), copies.backup, old)
    with pytest.raises(StaleSessionError):
        await copies.ask(PromoteBackup(SESSION + 1, 9), copies.backup)


async def test_asked_again_it_is_attached_once(copies):
    await asyncio.gather(copies.attach(), copies.attach())
    await copies.attach()
    assert len(copies.links) == 1


async def test_another_session_ends_it(copies):
    await copies.attach()
    copies.link.hold()
    answer = later(copies, push(0))
    await turns()
    await copies.ask(CloseSession(SESSION, False))
    with pytest.raises(StaleSessionError):
        await answer
    await turns()
    assert copies.link.is_closed


async def test_a_primary_that_shuts_down_sends_them_to_its_backup(copies):
    await copies.attach()
    copies.link.hold()
    accepted = later(copies, push(0))
    await turns()
    draining = asyncio.ensure_future(copies.primary.drain())
    await turns()
    with pytest.raises(NotPrimaryError):
        await copies.ask(push(1))
    copies.link.release()
    assert (await accepted).applied
    assert await draining
    for asked in (create(8), push(1), pull()):
        with pytest.raises(NotPrimaryError):
            await copies.ask(asked)
    await copies.promote()
    assert (await copies.ask(push(1), copies.backup)).applied


async def test_a_backup_that_differs_is_never_the_primary(copies, caplog):
    await copies.attach()
    copies.primary._store.log.append(push(0, key=77))  # which cannot be
    await turns()
    copies.link.cut()
    copies.link.connect()
    await turns()
    assert copies.primary.statistics()["replication"]["backup_state"] == "lost"
    assert "differs from its primary" in caplog.text
    assert "77" in copies.chief.notices[0].reason
    with pytest.raises(UnavailableError, match="77"):
        await copies.promote()


async def test_what_is_added_on_its_way_is_refused_if_another_one_serves(copies):
    size = 2**20
    await copies.ask(create(5, size=size))
    spec = ArraySpec(np.dtype("f4"), (size,))
    header = Push(SESSION, 3, 0, 0, [Update(5, UpdateOp.ADD, 0, 1)], ())
    sink = copies.primary.absorb(copies.chief, header, [spec])
    sink.take(memoryview(bytearray(4 * size)), 0, np.ones(size, "f4").tobytes())
    await copies.attach()
    await copies.promote()
    await turns()
    assert copies.primary.absorb(copies.chief, header, [spec]) is None
    with pytest.raises(NotPrimaryError):
        sink.finish()


async def test_a_promotion_that_fails_half_way_leaves_the_primary_what_it_is(copies):
    """It is asked for when a change waits that cannot be made here."""
    await copies.attach()
    copies.gate.clear()
    copies.shipped[b"late"] = OPTIMIZERS[b"adam"]()
    await copies.ask(CreateOptimizer(SESSION, 3, "late", b"late"))
    copies.shipped[b"late"] = None  # no optimizer, as the backup finds out
    assert (await copies.ask(push(1))).applied
    promoting = asyncio.ensure_future(copies.promote())
    unheard = later(copies, push(2))
    await turns()
    assert (await copies.ask(pull())).versions  # it was told nothing yet
    copies.gate.set()
    with pytest.raises(UnavailableError, match="CreateOptimizer"):
        await promoting
    await turns()
    assert not unheard.done()
    assert await copies.ask(DetachBackup(SESSION, 3)) == Done()
    assert (await unheard).applied
    assert (await copies.ask(push(3))).applied


async def test_a_promoted_backup_has_the_name_of_the_session(copies):
    await copies.ask(CloseSession(SESSION, False))
    named = OpenSession(SESSION, 0, 1, [], name="run", origin=3)
    await copies.ask(named)
    await copies.ask(create(0))
    copies.host()
    await copies.attach()
    await copies.promote()
    opened = await copies.ask(OpenSession(SESSION, 0, 1, []), copies.backup)
    assert (opened.resumed, opened.origin) == (True, 3)
    assert copies.backup.statistics()["session_name"] == "run"


@pytest.mark.parametrize("is_dropped", [False, True])
async def test_what_a_replaced_primary_computed_is_not_acknowledged(copies, is_dropped):
    """It was under way on the thread, or behind that, when another one took over."""
    size, gate = 2**21, threading.Event()
    await copies.ask(create(9, size=size))
    await copies.attach()
    copies.primary._thread.submit(gate.wait)
    pushes = [push(step, 9, size=size) for step in range(2)]
    stored = StoreTensors(SESSION, [StoreEntry(9, 0, "", 0)], pushes[0].arrays)
    asked = [*pushes, pull(9), stored, Fence(SESSION, 0, [], [0])]
    answers = [later(copies, each) for each in asked]
    await turns()
    await copies.promote()
    await turns()
    if is_dropped:
        copies.primary.give_up(3)
    gate.set()
    for answer in answers:
        with pytest.raises(NotPrimaryError):
            await answer
    applied = await copies.ask(pushes[0], copies.backup)
    assert applied == Pushed(True, [JUMP + 1])

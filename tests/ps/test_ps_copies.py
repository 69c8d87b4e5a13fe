"""A store in two processes: what is acknowledged, and what the second one gets."""

import asyncio

import numpy as np
import pytest
from ps_callers import SESSION, caller
from ps_copies import JUMP, OPTIMIZERS, Copies, create, later, pull, push, turns
from ps_trees import message, of_values

from zstrat.errors import (
    InvalidArgumentError,
    NotPrimaryError,
    UnavailableError,
)
from zstrat.wire import (
    Again,
    ArraySpec,
    AskParts,
    BackupLost,
    CopyParts,
    CreateOptimizer,
    DetachBackup,
    Done,
    Exchange,
    Exchanged,
    Fence,
    Fenced,
    InitialEntry,
    InitializeVariables,
    Job,
    JoinSession,
    OpenSession,
    Push,
    Pushed,
    Read,
    StoreEntry,
    StoreTensors,
    Update,
    UpdateOp,
)


class ByHand:
    """A compute thread on which nothing happens by itself."""

    def __init__(self, name):
        self.jobs = []
        self.waiting = 0

    def submit(self, job):
        done = asyncio.get_running_loop().create_future()
        self.jobs.append((job, done))
        return done

    async def do(self):
        await turns()
        job, done = self.jobs.pop(0)
        job()
        done.set_result(None)
        await turns()

    async def close(self, deadline):
        return not self.jobs


async def test_who_creates_without_end_does_not_put_off_a_copy():
    """Its moment came when nothing had been created since it was asked for: here the
    next update is under way each time."""
    made = []

    class Slow(Copies):
        def service(self, **options):
            if "backup_of" in options:
                return super().service(**options)
            make = lambda name: made.append(ByHand(name)) or made[-1]  # noqa: E731
            return super().service(make_thread=make, **options)

    copies, large = Slow(), 2 * 2**20  # elements, of 8 MiB: it goes to the thread
    thread = made[0]
    creating = later(copies, create(0, size=large))
    await thread.do()
    assert await creating == Done()
    pushes = [later(copies, push(1, size=large))]
    await turns()
    attaching = asyncio.ensure_future(copies.attach())
    await turns()
    pushes.append(later(copies, push(2, size=large)))
    await copies.ask(create(7))
    await thread.do()
    assert not attaching.done()  # but all of it is told: the second push waits
    assert copies.backup.statistics()["variables"] == 2
    await thread.do()
    await attaching
    assert all([(await each).applied for each in pushes])
    await copies.close()


CHANGING = (
    push(1),
    push(0),  # a repetition
    create(7),
    Exchange(SESSION, 2, 0, 0, [], [Read(0, -1)], [], ()),
    Fence(SESSION, 1, [], []),
    AskParts(SESSION, 5, 1, 0),
    StoreTensors(SESSION, [StoreEntry(0, 0, "", 0)], (np.ones(3, "f4"),)),
)


@pytest.mark.parametrize("asked", CHANGING, ids=lambda asked: type(asked).__name__)
async def test_no_answer_leaves_before_the_backup_has_it(copies, asked):
    await copies.ask(push(0))
    await copies.attach()
    copies.link.hold()
    first = later(copies, push(10))
    answer = later(copies, asked)
    await turns()
    assert not first.done()
    assert not answer.done()
    assert (await copies.ask(pull(1))).versions == [0]  # reading waits for nobody
    copies.link.release()
    await answer


async def test_without_a_backup_answers_leave_at_once(copies):
    assert copies.primary.handle(copies.chief, push(0)) == Pushed(True, [1])
    await copies.attach()
    assert await copies.ask(DetachBackup(SESSION, 2)) == Done()
    assert copies.primary.handle(copies.chief, push(1)) == Pushed(True, [2])


async def test_a_primary_without_its_backup_acknowledges_nothing_by_itself(copies):
    await copies.attach()
    copies.link.cut("it fell silent")
    (lost,) = copies.chief.notices
    # Who tells of it names the store, so the reason is the reason alone.
    assert lost == BackupLost(SESSION, 1, "it fell silent")
    answer = later(copies, push(0))
    await turns()
    assert not answer.done()
    assert copies.primary.statistics()["replication"]["unacknowledged"] == 1
    await copies.ask(DetachBackup(SESSION, 2))
    assert await answer == Pushed(True, [1])


async def test_a_coordinator_that_was_away_hears_again_of_the_loss(copies):
    await copies.attach()
    copies.primary.lost(copies.chief, "it broke")
    copies.link.cut()
    assert copies.chief.notices == []
    back = caller()
    opened = await copies.ask(OpenSession(SESSION, 0, 1, []), peer=back)
    assert opened.resumed
    assert isinstance(back.notices[0], BackupLost)


async def test_a_backup_that_comes_back_goes_on_where_it_was(copies):
    await copies.attach()
    copies.link.hold()
    answers = [later(copies, push(step)) for step in range(5)]
    await turns()
    copies.link.cut()  # what was on its way is gone
    copies.link.connect()
    for answer in answers:
        await answer
    await copies.promote()
    (value,) = (await copies.ask(pull(), copies.backup)).arrays
    assert (value == 5).all()


async def test_a_backup_that_was_started_anew_is_lost(copies):
    await copies.attach()
    copies.link.cut()
    anew = caller(Job.PS, 12345).hello
    copies.link.connect(anew)
    answer = later(copies, push(0))
    await turns()
    assert not answer.done()
    assert copies.chief.notices
    await copies.ask(DetachBackup(SESSION, 2))
    await answer


async def test_a_backup_that_diverges_while_it_is_cut_off_is_lost(copies):
    """Its notice of that is lost with the connection."""
    await copies.attach()
    copies.link.hold()
    copies.primary._store.log.append(push(0, key=77))  # which cannot be
    copies.link.release()
    copies.link.cut()
    await turns()
    copies.link.connect()
    await turns()
    assert copies.primary.statistics()["replication"]["backup_state"] == "lost"
    answer = later(copies, push(1))
    await turns()
    assert not answer.done()
    await copies.ask(DetachBackup(SESSION, 2))
    await answer


async def test_a_copy_that_diverges_while_its_log_is_opened_is_lost(copies):
    await copies.attach()
    copies.link.cut()
    copies.link.hold()
    copies.link.connect()
    copies.primary._store.log.mark_diverged("an update failed half way")
    copies.link.release()
    await turns()
    assert copies.primary.statistics()["replication"]["backup_state"] == "lost"
    answer = later(copies, push(0))
    await turns()
    assert not answer.done()
    await copies.ask(DetachBackup(SESSION, 2))
    await answer


async def test_what_comes_while_a_copy_is_made_is_in_it(copies):
    """And nobody waits for it."""
    await copies.ask(create(5, size=2**21))
    attaching = asyncio.ensure_future(copies.attach())
    for step in range(200):
        answer = copies.primary.handle(copies.chief, push(step, 5, size=2**21))
        if attaching.done():
            break
        if asyncio.isfuture(answer):
            answer = await answer
        assert answer.applied
        await asyncio.sleep(0)
    await attaching
    one = await copies.ask(pull(5))
    await copies.promote()
    other = await copies.ask(pull(5), copies.backup)
    assert other.versions == [one.versions[0] + JUMP]
    assert (one.arrays[0] == other.arrays[0]).all()


async def test_a_copy_whose_last_change_cannot_be_sent_ends_before_it_is_whole(copies):
    """Nobody waits for it: it is not attached."""
    copies.holds = True
    attaching = asyncio.ensure_future(copies.attach())
    await turns()
    link, notify = copies.link, copies.link.notify

    def notify_none(message):
        if isinstance(message, Push):
            raise ValueError("it does not fit into a header")
        if isinstance(message, CopyParts):
            link.hold()
        notify(message)

    link.notify = notify_none
    link.release()
    await turns()
    assert await copies.ask(push(0)) == Pushed(True, [1])  # after all others were sent
    link.release()
    with pytest.raises(UnavailableError, match="does not fit"):
        await attaching
    copies.holds = False
    assert copies.primary.statistics()["replication"]["backup"] == ""
    assert await copies.ask(push(1)) == Pushed(True, [2])


async def test_a_copy_that_fails_is_told_and_training_goes_on(copies):
    copies.holds = True
    attaching = asyncio.ensure_future(copies.attach())
    await turns()
    copies.link.cut("the machine burns")
    with pytest.raises(UnavailableError):
        await attaching
    assert await copies.ask(push(0)) == Pushed(True, [1])
    copies.holds = False
    copies.host(view=2)
    await copies.attach(view=2)
    await copies.promote(view=3)


async def test_a_backup_that_falls_behind_holds_its_primary_up(copies):
    """It takes so many bytes into its memory, and then says no more that it has."""
    size = 3 * 2**20
    await copies.ask(create(5, size=size))
    await copies.attach()
    copies.gate.clear()
    await copies.ask(CreateOptimizer(SESSION, 9, "momentum", b"momentum"))
    answers = [later(copies, push(step, 5, size=size)) for step in range(6)]
    async with asyncio.timeout(60):
        await asyncio.gather(*answers[:2])
    await turns()
    assert sum(answer.done() for answer in answers) <= 4
    copies.gate.set()
    async with asyncio.timeout(60):
        await asyncio.gather(*answers)
    await copies.promote()
    (value,) = (await copies.ask(pull(5), copies.backup)).arrays
    assert (value == 6).all()


async def test_what_is_added_on_its_way_comes_again_if_there_is_a_backup_now(copies):
    """It has kept no operand that could be shipped to the backup."""
    size = 2**20
    await copies.ask(create(5, size=size))
    spec = ArraySpec(np.dtype("f4"), (size,))
    header = Push(SESSION, 3, 0, 0, [Update(5, UpdateOp.ADD, 0, 1)], ())
    sink = copies.primary.absorb(copies.chief, header, [spec])
    sink.take(memoryview(bytearray(4 * size)), 0, np.ones(size, "f4").tobytes())
    await copies.attach()
    assert copies.primary.absorb(copies.chief, header, [spec]) is None
    assert await copies.outcome(sink.finish()) == Again()
    assert (await copies.ask(push(3, 5, size=size))).applied


async def test_values_that_an_initializer_draws_are_the_same(copies):
    copies.shipped[b"draw"] = lambda shape, dtype, **_: np.random.default_rng().random(
        shape, dtype
    )
    await copies.attach()
    entry = InitialEntry(8, "drawn", True, False, "float32", [4], [4], [0])
    await copies.ask(InitializeVariables(SESSION, [entry], b"draw"))
    (one,) = (await copies.ask(pull(8))).arrays
    await copies.promote()
    (other,) = (await copies.ask(pull(8), copies.backup)).arrays
    assert (one == other).all()
    assert one.any()


async def test_an_update_that_fails_half_way_makes_the_copy_diverge(
    copies, monkeypatch
):
    """Values are lost here, and may not be there."""
    values = {0: np.zeros(3, "f4")}
    await copies.ask(CreateOptimizer(SESSION, 9, "momentum", b"momentum"))
    told = of_values(OPTIMIZERS[b"momentum"](), values)
    await copies.ask(message(SESSION, 9, told))
    gradient = Update(0, UpdateOp.OPTIMIZE, 9, 1)
    pushed = Push(SESSION, 1, 0, 0, [gradient], (np.ones(3, "f4"),))
    await copies.ask(pushed)
    await copies.attach()
    copies.break_optimizers(monkeypatch)
    with pytest.raises(RuntimeError, match="broken"):
        await copies.ask(Push(SESSION, 2, 0, 0, [gradient], (np.ones(3, "f4"),)))
    assert "half way" in copies.chief.notices[0].reason
    await copies.ask(DetachBackup(SESSION, 2))
    copies.host(view=3)
    await copies.attach(view=3)  # a copy of what is lost is as lost
    await copies.promote(view=4)
    for service in (copies.primary, copies.backup):
        with pytest.raises((UnavailableError, NotPrimaryError)):
            await copies.ask(pull(), service)
    assigned = push(3, op=UpdateOp.ASSIGN)
    assert (await copies.ask(assigned, copies.backup)).applied


async def test_workers_that_are_programs_of_their_own_are_refused(copies):
    await copies.attach()
    join = JoinSession(SESSION, [], [], 1.0)
    with pytest.raises(InvalidArgumentError, match="BetweenGraphStrategy"):
        await copies.ask(join, peer=caller(Job.WORKER, 3))


async def test_parts_of_an_exchange_are_shipped_without_the_pull(copies):
    await copies.attach()
    asked = Exchange(
        SESSION,
        4,
        0,
        0,
        [Update(0, UpdateOp.ADD, 0, 1)],
        [Read(0, -1)],
        [1],
        (np.ones(3, "f4"), np.array([0, 2])),
    )
    answer = await copies.ask(asked)
    assert isinstance(answer, Exchanged)
    (sent,) = [each for each in copies.link.sent if isinstance(each, Push)]
    assert len(sent.arrays) == 1


async def test_the_mark_of_a_writer_rises_with_a_repetition(copies):
    def own(step, low_water):
        return Push(SESSION, step, 0, low_water, [], (), SESSION)

    await copies.ask(own(5, 0))
    await copies.attach()
    assert not (await copies.ask(own(5, 5))).applied
    await copies.promote()
    assert not (await copies.ask(own(4, 0), copies.backup)).applied


async def test_a_fence_holds_on_the_backup(copies):
    await copies.attach()
    assert isinstance(await copies.ask(Fence(SESSION, 3, [], [1])), Fenced)
    await copies.promote()
    assert not (await copies.ask(push(2), copies.backup)).applied
    assert (await copies.ask(push(3), copies.backup)).applied

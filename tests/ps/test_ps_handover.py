"""A parameter server that ends leaves all that it holds to the one after it, once."""

import asyncio
import json
import os
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ps_callers import SESSION, caller
from ps_successors import CODES, TASK, successors
from ps_trees import message, of_values
from tiers import examples

from zstrat.checkpoint import digest_of
from zstrat.errors import (
    BusyError,
    NotFoundError,
    PermissionDeniedError,
    RetryDiffersError,
    StaleSessionError,
    UnavailableError,
    ZstratError,
)
from zstrat.ps import Handover, Inherited
from zstrat.ps._thread import ComputeThread
from zstrat.ps.handover._state_files import StateFiles
from zstrat.testing import FakeClock, full_disk
from zstrat.wire import (
    CloseSession,
    CreateOptimizer,
    CreateVariables,
    DeleteVariables,
    Fence,
    Inspect,
    Job,
    OpenSession,
    Pull,
    Pulled,
    Push,
    PushPart,
    RaiseMark,
    Read,
    StepRun,
    StoreEntry,
    StoreTensors,
    Update,
    UpdateOp,
    VariableEntry,
)

ZEROS = np.zeros((4, 2), "f4")
ONES = np.ones((4, 2), "f4")


def created(key, value=ZEROS):
    entry = VariableEntry(key, f"t{key}", True, True)
    return CreateVariables(SESSION, [entry], (value,))


def push(step, key, op=UpdateOp.ADD, arrays=(ONES,), *, optimizer=0, writer=0, low=0):
    update = Update(key, int(op), optimizer, len(arrays))
    return Push(SESSION, step, 0, low, [update], arrays, writer)


async def value_of(successors, key, known=-1):
    answer = await successors.answer(Pull(SESSION, [Read(key, known)]))
    assert isinstance(answer, Pulled)
    return answer.versions[0], *map(np.asarray, answer.arrays)


KEYS = st.integers(0, 2)
STEPS = st.integers(1, 6)
CHANGES = st.one_of(
    st.builds(created, KEYS),
    st.builds(lambda key: DeleteVariables(SESSION, [key]), KEYS),
    st.builds(push, STEPS, KEYS),
    st.builds(lambda n, key, low: push(n, key, writer=SESSION, low=low), *[STEPS] * 3),
    st.builds(lambda n: RaiseMark(SESSION, n), STEPS),
    st.builds(
        lambda low, first, asked: Fence(
            SESSION, low, [StepRun(first, first + 2)], asked
        ),
        STEPS,
        STEPS,
        st.lists(STEPS, max_size=2),
    ),
    st.builds(
        lambda n, key, run, name: PushPart(
            SESSION, n, 1, 0, run, [name], [Update(key, 1, 0, 1)], (ONES,)
        ),
        STEPS,
        KEYS,
        st.integers(1, 2),
        st.sampled_from("ab"),
    ),
    st.builds(lambda key, known: Pull(SESSION, [Read(key, known)]), KEYS, STEPS),
)


async def outcome(side, asked):
    """In a form that can be compared."""
    try:
        answer = await side.answer(asked)
    except ZstratError as error:
        return type(error), error.args
    if isinstance(answer, Pulled):
        return answer.versions, [each.tolist() for each in answer.arrays]
    return answer


@examples(25)
@given(st.lists(st.one_of(CHANGES, CHANGES, st.none()), max_size=30))
def test_nobody_can_tell_that_another_process_answers(tmp_path_factory, asked):
    """None: the one side is handed over. Values, versions, and what was applied."""

    async def compared():
        one, other = (tmp_path_factory.mktemp("state") for _ in range(2))
        async with successors(one) as moved, successors(other) as stayed:
            for each in asked:
                if each is None:
                    await moved.hand_over()
                    assert moved.went_on
                else:
                    assert await outcome(moved, each) == await outcome(stayed, each)

    asyncio.run(compared())


async def test_optimizers_go_on_to_the_bit(tmp_path):
    values = {1: ZEROS, 2: ZEROS}
    (tmp_path / "a").mkdir(mode=0o700)
    async with (
        successors(tmp_path / "a") as moved,
        successors(tmp_path / "b") as stayed,
    ):
        for side in (moved, stayed):
            for key, value in values.items():
                await side.answer(created(key, value))
            await side.answer(CreateOptimizer(SESSION, 9, "mine", b"adam"))
            told = of_values(CODES[b"adam"], values)
            await side.answer(message(SESSION, 9, told))
        rows = np.array([2, 0]), np.full((2, 2), 0.3, "f4")
        for step in range(1, 7):
            for side in (moved, stayed):
                op, arrays = UpdateOp.OPTIMIZE, (ONES / step,)
                await side.answer(push(2 * step, 1, op, arrays, optimizer=9))
                op, arrays = UpdateOp.OPTIMIZE_ROWS, rows
                await side.answer(push(2 * step + 1, 2, op, arrays, optimizer=9))
            if step % 2:
                await moved.hand_over()
        for key in values:
            found, wanted = await value_of(moved, key), await value_of(stayed, key)
            assert found[0] == wanted[0] == 6
            assert found[1].tobytes() == wanted[1].tobytes() != ZEROS.tobytes()
        await moved.answer(created(3))
        stranger = push(99, 3, UpdateOp.OPTIMIZE, (ONES,), optimizer=9)
        with pytest.raises(NotFoundError, match="'mine'"):
            await moved.answer(stranger)


async def test_slots_of_which_a_part_was_loaded_are_as_they_were(tmp_path):
    async with successors(tmp_path / "s") as side:
        await side.answer(created(1))
        await side.answer(CreateOptimizer(SESSION, 9, "mine", b"adam"))
        entry = StoreEntry(1, 9, "[0].mu", 1, True)
        await side.answer(StoreTensors(SESSION, [entry], (ONES[:2],)))
        await side.hand_over()
        told = of_values(CODES[b"adam"], {1: ZEROS})
        await side.answer(message(SESSION, 9, told))
        step = push(1, 1, UpdateOp.OPTIMIZE, (ONES,), optimizer=9)
        with pytest.raises(ZstratError):
            await side.answer(step)


async def test_while_it_leaves_nobody_is_told_anything(tmp_path):
    async with successors(tmp_path / "s") as side:
        await side.answer(created(1))
        leaving = asyncio.ensure_future(side.service.drain())
        await asyncio.sleep(0)
        for asked in (
            push(1, 1),
            Pull(SESSION, [Read(1, -1)]),
            OpenSession(9, 0, 1, []),
        ):
            assert not side.service.handle(side.chief, asked).done()
        assert await leaving
        assert side.service.handle(side.chief, Inspect()).values["variables"] == 1
        await side.hand_over()
        assert (await side.answer(push(1, 1))).applied  # nothing of it was done


async def test_its_coordinator_has_a_while_before_others_may_have_it(tmp_path):
    async with successors(tmp_path / "s") as side:
        await side.answer(created(1))
        await side.hand_over()
        other = caller(Job.CHIEF, 9)
        with pytest.raises(BusyError):
            await side.answer(OpenSession(9, 0, 1, []), other)
        assert (await side.answer(push(1, 1), side.worker)).applied
        assert (await side.answer(OpenSession(SESSION, 0, 1, []))).resumed
        side.service.lost(side.chief, "it left")
        await side.hand_over()
        assert not (await side.answer(OpenSession(9, 0, 1, []), other)).resumed
        with pytest.raises(StaleSessionError):
            await side.answer(push(2, 1), side.worker)


async def test_a_coordinator_that_does_not_come_back_was_lost_when_its_while_is_over(
    tmp_path, monkeypatch
):
    clock = FakeClock()
    async with successors(tmp_path / "s") as side:
        with monkeypatch.context() as patched:
            loop = asyncio.get_running_loop()
            patched.setattr(loop, "call_later", clock.call_later)
            await side.hand_over()
        assert (side.service.owner.alive, side.service.coordinator_lost_at) == (
            True,
            None,
        )
        clock.advance(60)
        assert not side.service.owner.alive
        assert side.service.coordinator_lost_at is not None


async def test_without_a_session_nothing_is_left(tmp_path):
    side_folder = tmp_path / "s"
    async with successors(side_folder) as side:
        await side.answer(created(1))
        side.service.lost(side.chief, "")
        await side.answer(OpenSession(SESSION, 0, 1, []))
        await side.answer(CloseSession(SESSION, False))
        await side.hand_over()
        assert not side.went_on
        assert not side.has_left
    assert not os.listdir(side_folder)


async def left_in(folder):
    async with successors(folder) as side:
        await side.answer(created(1, ONES))
        await side.end()
    return Handover(folder, 0, TASK)


def take(handover):
    return handover.take(CODES.__getitem__, largest=2**36)


async def test_a_state_is_there_until_it_is_used_and_then_no_more(tmp_path):
    folder = tmp_path / "s"
    handover = await left_in(folder)
    assert len(os.listdir(folder)) == 2
    assert take(handover) is not None  # and that process is killed
    found = take(handover)
    assert found.incarnation == 77
    assert np.array_equal(found.own.store.read([Read(1, -1)])[1][0], ONES)
    handover.took()
    assert take(handover) is None
    assert not os.listdir(folder)


def _flipped(folder):
    (file,) = folder.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    place = data.index(ONES.tobytes())
    data[place + 5] ^= 4
    file.write_bytes(data)


def _cut_short(folder):
    (file,) = folder.glob("*.safetensors")
    os.truncate(file, file.stat().st_size - 1)


def _without_arrays(folder):
    (file,) = folder.glob("*.safetensors")
    file.unlink()


def _changed(folder):
    file = folder / "ps-0.json"
    file.write_text(file.read_text().replace("77", "78"))


def _torn(folder):
    file = folder / "ps-0.json"
    file.write_bytes(file.read_bytes()[:-9])


def _of_tomorrow(folder):
    file = folder / "ps-0.json"
    text = json.loads(file.read_text())["state"].replace('"version": 2', '"version": 3')
    digest = digest_of([text.encode()])
    file.write_text(json.dumps({"digest": digest, "state": text}))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_flipped, "bytes changed"),
        (_cut_short, "DataLossError"),
        (_without_arrays, "NotFoundError"),
        (_changed, "bytes changed"),
        (_torn, "ps-0.json"),
        (_of_tomorrow, "this process reads"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
async def test_a_damaged_state_is_refused_with_words(tmp_path, caplog, damage, words):
    folder = tmp_path / "s"
    handover = await left_in(folder)
    damage(folder)
    assert take(handover) is None
    assert words in caplog.text
    assert "begins empty" in caplog.text
    assert not os.listdir(folder)


async def test_a_full_disk_leaves_no_state_and_says_so(tmp_path, caplog):
    folder = tmp_path / "s"
    async with successors(folder) as side:
        await side.answer(created(1, np.zeros(2**18, "f4")))
        with full_disk(2**19):
            await side.end()
        assert not side.has_left
    assert "lost with it: ResourceExhaustedError" in caplog.text
    assert take(Handover(folder, 0, TASK)) is None
    assert not os.listdir(folder)


async def test_what_was_lost_stays_lost(tmp_path):
    async with successors(tmp_path / "s") as side:
        await side.answer(created(1))
        side.service._store.variables[1].cell.lose("an optimizer failed")
        await side.hand_over()
        with pytest.raises(UnavailableError):
            await side.answer(push(1, 1))
        anew = push(2, 1, UpdateOp.ASSIGN, (ONES,))
        assert (await side.answer(anew)).applied


def test_a_folder_that_others_may_write_to_is_refused(tmp_path):
    tmp_path.chmod(0o770)
    with pytest.raises(PermissionDeniedError, match=r"\b0770\b.*\b700\b"):
        Handover(tmp_path, 0, TASK)


async def test_parts_of_eager_steps_are_remembered(tmp_path):
    def part(name, run):
        update = [Update(1, int(UpdateOp.ADD), 0, 1)]
        return PushPart(SESSION, 3, 1, 0, run, [name], update, (ONES,))

    async with successors(tmp_path / "s") as side:
        await side.answer(created(1))
        await side.answer(part("here", 1))
        await side.hand_over()
        assert not (await side.answer(part("here", 2))).applied
        with pytest.raises(RetryDiffersError):
            await side.answer(part("there", 2))
        with pytest.raises(StaleSessionError):
            await side.answer(part("here", 1))


def test_a_folder_that_cannot_be_is_called_what_it_is(tmp_path):
    (tmp_path / "file").touch()
    for wrong in ("file", "file/below"):
        words = f"state folder {tmp_path / wrong} cannot be made: "
        with pytest.raises(OSError, match=words):
            Handover(tmp_path / wrong, 0, TASK)


async def test_a_state_that_comes_too_late_is_not_left(tmp_path, monkeypatch):
    """Its process has said that it does not return."""
    folder = tmp_path / "s"
    async with successors(folder) as now:
        await now.answer(created(1))
        assert await now.service.drain()
        now.is_over, go_on, commit = True, threading.Event(), StateFiles.commit

        def late(*args):
            assert go_on.wait(60)
            commit(*args)

        monkeypatch.setattr(StateFiles, "commit", late)
        own = now.service.role.state_for_successor(0)
        left = Inherited(77, now.service.owner, own)
        asyncio.get_running_loop().call_later(0.4, go_on.set)
        assert not await now.handover.leave(left, 0.2)
    assert take(Handover(folder, 0, TASK)) is None


async def test_a_state_that_is_complete_in_time_is_left(tmp_path, monkeypatch):
    """Its thread ends only after the time that it had."""
    folder, close = tmp_path / "s", ComputeThread.close
    async with successors(folder) as now:
        await now.answer(created(1))
        assert await now.service.drain()
        now.is_over = True

        async def late(thread, deadline):
            loop = asyncio.get_running_loop()
            before = loop.time
            with monkeypatch.context() as patched:
                patched.setattr(loop, "time", lambda: before() + 60.0)
                for _ in range(3):  # timers that are due run
                    await asyncio.sleep(0)
            return await close(thread, deadline)

        monkeypatch.setattr(ComputeThread, "close", late)
        own = now.service.role.state_for_successor(0)
        left = Inherited(77, now.service.owner, own)
        assert await now.handover.leave(left, 30.0)
    assert take(Handover(folder, 0, TASK)) is not None

"""Snapshots: pinned, read, written; files, faults, roles. No sockets."""

import asyncio
import os

import ml_dtypes
import numpy as np
import optax
import pytest
from ps_callers import SESSION, caller
from ps_snapshot_rig import TASK, halt, size_of, snapshot_rig, wait
from ps_trees import binding
from ps_trees import message as bind_message
from safetensors.numpy import load_file

from zstrat.config import Settings
from zstrat.errors import (
    AlreadyExistsError,
    BusyError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    PSUnavailableError,
    ResourceExhaustedError,
    StaleSessionError,
    UnavailableError,
)
from zstrat.ps import PsService, Ref
from zstrat.ps.snapshots import _snapshot as snapshot_module
from zstrat.ps.snapshots import _snapshot_files as disk_module
from zstrat.ps.snapshots import _snapshot_service as service_module
from zstrat.ps.store import Pin
from zstrat.wire import (
    CreateOptimizer,
    Done,
    Job,
    OpenSession,
    PinSnapshot,
    Push,
    ReadSnapshot,
    ReleaseSnapshot,
    Update,
    UpdateOp,
    WriteSnapshot,
)


@pytest.fixture
async def rig():
    async with snapshot_rig() as rig:
        yield rig


async def test_a_snapshot_that_fails_keeps_nothing_pinned(rig):
    """Else rows that are written would be logged as long as the variable lives."""
    refs = [await rig.create(0, key, np.zeros((4, 2), "f4")) for key in (1, 2)]
    variables = rig.services[0]._store.variables
    variables[2].cell.lose("a test")
    with pytest.raises(UnavailableError):
        await rig.client.pin(1, refs, [])
    assert not variables[1].cell.is_pinned


async def test_a_pin_names_values_and_slots_and_keeps_them(rig):
    rows = np.random.default_rng(0).normal(size=(6, 3)).astype("f4")
    table, bias = await rig.create(0, 1, rows), await rig.create(1, 2, np.float64(4))
    await rig.optimizer("adam", table)
    gradient = np.ones((6, 3), "f4")
    await rig.update(table, UpdateOp.OPTIMIZE, gradient, optimizer=9)
    value = np.array(await rig.read(table))
    pinned = await rig.client.pin(1, [table, bias], [9, 10])
    state = optax.adam(0.1).init(rows)
    _, state = optax.adam(0.1).update(gradient, state, rows)
    names = ["", "[0].count", "[0].mu", "[0].nu"]
    assert [(t.ps, t.entry.leaf, t.entry.rows) for t in pinned] == [
        *zip([0] * 4, names, [True, False, True, True], strict=True),
        (1, "", False),
    ]
    assert [t.place for t in pinned] == [0, 1, 2, 3, 0]
    await rig.update(table, UpdateOp.OPTIMIZE, gradient, optimizer=9)
    await rig.update(table, UpdateOp.ASSIGN, gradient)
    await rig.update(bias, UpdateOp.ADD, np.float64(1))
    got = [await rig.bytes_of(tensor) for tensor in pinned]
    np.testing.assert_array_equal(got[0], value)
    assert got[1] == 1
    np.testing.assert_allclose(got[2], state[0].mu, rtol=1e-6)
    np.testing.assert_allclose(got[3], state[0].nu, rtol=1e-6)
    assert got[4] == 4
    await rig.client.release(1)
    with pytest.raises(NotFoundError):
        await rig.bytes_of(pinned[0])
    assert rig.statistics()["snapshots"] == 0


async def test_a_pin_keeps_rows_while_rows_are_trained(rig):
    value = np.random.default_rng(0).normal(size=(50, 4)).astype("f4")
    table = await rig.create(0, 1, value)
    await rig.optimizer("momentum", table)
    indices, gradient = np.array([3, 40]), np.ones((2, 4), "f4")
    push = (UpdateOp.OPTIMIZE_ROWS, indices, gradient)
    await rig.update(table, *push, optimizer=9)
    before = np.array(await rig.read(table))
    pinned = await rig.client.pin(1, [table], [9])
    assert [t.entry.leaf for t in pinned] == ["", "[0].trace"]
    for _ in range(3):
        await rig.update(table, *push, optimizer=9)
    assert rig.statistics()["undo_bytes"] > 0
    np.testing.assert_array_equal(await rig.bytes_of(pinned[0]), before)
    trace = np.zeros((50, 4), "f4")
    trace[indices] = 1
    np.testing.assert_array_equal(await rig.bytes_of(pinned[1]), trace)


async def test_requests_come_between_the_pieces_of_a_large_tensor(rig, monkeypatch):
    monkeypatch.setattr(service_module, "PIECE", 64)
    value = np.random.default_rng(0).normal(size=(50, 4)).astype("f4")
    table = await rig.create(0, 1, value)
    (pinned,) = await rig.client.pin(1, [table], [])
    copy, updates, sizes = Pin.copy, [], []

    def spied(pin, start, out):
        sizes.append(len(out))
        copy(pin, start, out)
        change = np.array([len(sizes) % 50]), np.ones((1, 4), "f4")
        update = rig.update(table, UpdateOp.SCATTER_ADD, *change)
        updates.append(asyncio.create_task(update))

    monkeypatch.setattr(Pin, "copy", spied)
    np.testing.assert_array_equal(await rig.bytes_of(pinned), value)
    assert sizes == [64] * 12 + [32]
    assert updates[0].done()
    await asyncio.gather(*updates)


async def test_thousands_of_tensors_are_described_in_several_answers(rig, monkeypatch):
    monkeypatch.setattr(service_module, "ENTRIES", 3)
    refs = [await rig.create(0, key, np.full(2, key, "f4")) for key in range(1, 9)]
    pinned = await rig.client.pin(1, refs, [])
    assert [t.entry.key for t in pinned] == list(range(1, 9))
    assert (await rig.bytes_of(pinned[7])).tolist() == [8, 8]


async def test_pins_that_cannot_be_made_leave_nothing(rig, monkeypatch):
    monkeypatch.setattr(snapshot_module, "MAX_SNAPSHOTS", 2)
    ref = await rig.create(0, 1, np.ones(2))
    with pytest.raises(NotFoundError):
        await rig.client.pin(1, [ref, Ref(0, 5)], [])
    with pytest.raises(InvalidArgumentError):
        await rig.client.pin(1, [ref, ref], [])
    await rig.client.pin(1, [ref], [])
    with pytest.raises(AlreadyExistsError):
        await rig.client.pin(1, [ref], [])
    await rig.client.pin(2, [ref], [])
    with pytest.raises(BusyError):
        await rig.client.pin(3, [ref], [])
    with pytest.raises(NotFoundError):
        await rig.client.read_snapshot(0, 1, 1, 0, 1)
    with pytest.raises(InvalidArgumentError):
        await rig.client.read_snapshot(0, 1, 0, 8, 9)
    await rig.client.release(1)
    await rig.client.release(1)


async def test_what_a_server_that_was_away_has_is_released_with_the_next(
    rig, monkeypatch
):
    ref = await rig.create(0, 1, np.ones(4, "f4"))
    await rig.client.pin(1, [ref], [])

    async def is_away(messages, want):
        raise PSUnavailableError(TASK, "it is frozen")

    with monkeypatch.context() as patched:
        patched.setattr(rig.client, "each", is_away)
        with pytest.raises(PSUnavailableError):
            await rig.client.release(1)
    await rig.client.pin(2, [ref], [])
    await rig.client.release(2)
    assert rig.statistics()["snapshots"] == 0


async def test_a_coordinator_that_was_lost_gets_no_pin_any_more(rig):
    """Nobody would ever release what is pinned behind a long request."""
    await rig.create(0, 1, np.ones((4, 2), "f4"))
    service = rig.services[0]
    optimizer = service.handle(rig.chief, CreateOptimizer(SESSION, 9, "adam", b"adam"))
    head = Update(1, int(UpdateOp.OPTIMIZE), 9, 1)
    gradient = np.ones((4, 2), "f4")
    told = binding(optax.adam(0.1), {"w": ((1,), (4, 2), "f4")})
    bound = service.handle(rig.chief, bind_message(SESSION, 9, told))
    push = service.handle(rig.chief, Push(SESSION, -1, 0, 0, [head], (gradient,)))
    waiting = asyncio.ensure_future(
        service.handle(rig.chief, PinSnapshot(SESSION, 1, [1], []))
    )
    await asyncio.sleep(0)
    service.lost(rig.chief, "gone")
    with pytest.raises(UnavailableError, match=f"{TASK}: the coordinator"):
        await waiting
    await optimizer
    assert await bound == Done()
    assert (await push).applied
    assert rig.statistics()["snapshots"] == 0


@pytest.mark.parametrize(
    "message",
    [
        PinSnapshot(SESSION, 1, [1], [], 1),
        WriteSnapshot(SESSION, 1, "/nowhere/part", [0], ["t"]),
        ReadSnapshot(SESSION, 1, 0, 0, 8),
    ],
)
async def test_a_request_for_a_snapshot_never_meets_the_next_one(rig, message):
    """A coordinator that comes back may count its snapshots from one again."""
    ref = await rig.create(0, 1, np.ones(4))
    service = rig.services[0]
    await rig.client.pin(1, [ref], [])
    asked = service.handle(rig.chief, message)
    service.lost(rig.chief, "gone")
    service.handle(rig.chief, OpenSession(SESSION, 0, 1, []))
    await rig.client.pin(1, [ref], [])
    with pytest.raises(UnavailableError):
        await asked
    assert rig.statistics()["snapshots"] == 1


async def test_a_file_has_every_tensor_as_it_was(rig, tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot_module, "PIECE", 64)
    rng = np.random.default_rng(1)
    values = {
        1: rng.normal(size=(40, 5)).astype("f4"),
        2: np.int64(77),
        3: rng.normal(size=(300,)).astype(ml_dtypes.bfloat16),
        4: np.zeros((0, 3), "f4"),
        5: rng.normal(size=(1, 200)),
        6: np.arange(5, dtype="i1"),
    }
    refs = [await rig.create(0, key, value) for key, value in values.items()]
    pinned = await rig.client.pin(1, refs, [])
    path = str(tmp_path / "part.safetensors")
    places, names = [t.place for t in pinned], [f"t{t.entry.key}" for t in pinned]
    writing = asyncio.ensure_future(
        rig.client.write_snapshot(0, 1, path, places, names)
    )
    for turn in range(6):
        rows = np.arange(turn, 40, 3)
        await rig.update(
            refs[0], UpdateOp.SCATTER_ADD, rows, np.ones((len(rows), 5), "f4")
        )
        await rig.update(refs[4], UpdateOp.ADD, np.ones((1, 200)))
    written = await writing
    assert written.size == size_of(path)
    assert len(set(written.digests)) == len(written.digests) == 6
    found = load_file(path)
    for key, value in values.items():
        np.testing.assert_array_equal(found[f"t{key}"], np.asarray(value))
    with pytest.raises(NotFoundError):
        await rig.client.write_snapshot(0, 1, path + "2", places, names)
    await rig.client.release(1)
    assert rig.statistics()["undo_bytes"] == 0


async def test_training_goes_on_while_the_disk_hangs(rig, tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot_module, "PIECE", 1024)
    value = np.arange(4096.0).reshape(512, 8)
    ref = await rig.create(0, 1, value)
    reached, onward = halt(monkeypatch, "write")
    await rig.client.pin(1, [ref], [])
    path = str(tmp_path / "part")
    writing = asyncio.ensure_future(rig.client.write_snapshot(0, 1, path, [0], ["t"]))
    await wait(reached)
    for row in range(512):
        rows = np.array([row, 511 - row])
        await rig.update(ref, UpdateOp.SCATTER_UPDATE, rows, np.zeros((2, 8)))
    assert not (await rig.read(ref)).any()
    await rig.update(ref, UpdateOp.ADD, np.ones((512, 8)))
    assert not writing.done()
    onward.set()
    await writing
    np.testing.assert_array_equal(load_file(path)["t"], value)


async def test_a_file_that_exists_is_left_alone(rig, tmp_path):
    ref = await rig.create(0, 1, np.ones(2))
    await rig.client.pin(1, [ref], [])
    path = tmp_path / "part"
    path.write_bytes(b"mine")
    with pytest.raises(AlreadyExistsError, match=rf"{TASK}.*{path}"):
        await rig.client.write_snapshot(0, 1, str(path), [0], ["t"])
    assert path.read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("path", "names", "error", "words"),
    [
        ("part", ["t"], InvalidArgumentError, f"{TASK}.*'part'"),
        ("/nowhere/at/all", ["t"], NotFoundError, f"{TASK}.*no such file or folder"),
        ("/proc/version/x", ["t"], NotFoundError, f"{TASK}.*/proc/version is a file"),
        ("/tmp/x", [], InvalidArgumentError, r"\b1\b.*\b0\b"),
    ],
)
async def test_paths_that_cannot_be_written(rig, path, names, error, words):
    ref = await rig.create(0, 1, np.ones(2))
    await rig.client.pin(1, [ref], [])
    with pytest.raises(error, match=words):
        await rig.client.write_snapshot(0, 1, path, [0], names)


async def test_a_folder_that_is_not_ours_is_named(rig, tmp_path, monkeypatch):
    def refused(*_: object):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(disk_module, "TensorWriter", refused)
    ref = await rig.create(0, 1, np.ones(2))
    await rig.client.pin(1, [ref], [])
    with pytest.raises(PermissionDeniedError, match=f"{TASK}: writing {tmp_path}/x"):
        await rig.client.write_snapshot(0, 1, f"{tmp_path}/x", [0], ["t"])


async def test_a_full_disk_is_an_error_and_leaves_no_file(rig, tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot_module, "PIECE", 1024)
    ref = await rig.create(0, 1, np.ones(10_000))
    real, room = os.write, [3000]

    def write(descriptor, data):
        room[0] -= len(data)
        if room[0] < 0:
            raise OSError(28, "No space left on device")
        return real(descriptor, data)

    await rig.client.pin(1, [ref], [])
    monkeypatch.setattr(os, "write", write)
    with pytest.raises(ResourceExhaustedError, match=f"{TASK}.*{tmp_path}/part"):
        await rig.client.write_snapshot(0, 1, f"{tmp_path}/part", [0], ["t"])
    monkeypatch.undo()
    await rig.services[0].drain()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("end", ["release", "lost", "replaced", "cancelled"])
async def test_an_unwanted_write_leaves_no_file(rig, tmp_path, monkeypatch, end):
    monkeypatch.setattr(snapshot_module, "PIECE", 1024)
    ref = await rig.create(0, 1, np.ones(10_000))
    reached, onward = halt(monkeypatch, "write")
    await rig.client.pin(1, [ref], [])
    message = WriteSnapshot(SESSION, 1, f"{tmp_path}/part", [0], ["t"])
    writing = asyncio.ensure_future(rig.services[0].handle(rig.chief, message))
    await wait(reached)
    match end:
        case "release":
            await rig.client.release(1)
        case "lost":
            rig.services[0].lost(rig.chief, "gone")
        case "replaced":
            rig.services[0].lost(rig.chief, "gone")
            rig.services[0].handle(caller(incarnation=8), OpenSession(8, 0, 1, []))
        case "cancelled":
            writing.cancel()
    onward.set()
    with pytest.raises(asyncio.CancelledError if end == "cancelled" else NotFoundError):
        await writing
    if end == "cancelled":
        await rig.client.release(1)
    assert rig.statistics()["snapshots"] == 0
    await rig.services[0].drain()
    assert list(tmp_path.iterdir()) == []


async def test_drain_finishes_a_write(rig, tmp_path, monkeypatch):
    ref = await rig.create(0, 1, np.ones(10))
    reached, onward = halt(monkeypatch, "finish")
    await rig.client.pin(1, [ref], [])
    path = f"{tmp_path}/part"
    writing = asyncio.ensure_future(rig.client.write_snapshot(0, 1, path, [0], ["t"]))
    await wait(reached)
    draining = asyncio.ensure_future(rig.services[0].drain())
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError):
        await rig.client.pin(2, [ref], [])
    onward.set()
    await writing
    assert await draining
    assert load_file(path)["t"].all()


async def test_deleted_variables_stay_in_their_snapshot(rig):
    ref = await rig.create(0, 1, np.arange(5.0))
    pinned = await rig.client.pin(1, [ref], [])
    await rig.client.delete([ref])
    await rig.create(0, 1, np.zeros(3))
    assert (await rig.bytes_of(pinned[0])).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("role", [Job.WORKER, Job.EVALUATOR, Job.OBSERVER])
def test_only_a_coordinator_has_snapshots(role):
    service = PsService(load_code=lambda code: code, settings=Settings(), task=TASK)
    for message in (
        PinSnapshot(SESSION, 1, [], []),
        WriteSnapshot(SESSION, 1, "/tmp/x", [], []),
        ReleaseSnapshot(SESSION, 1),
    ):
        with pytest.raises(PermissionDeniedError, match="from chief"):
            service.handle(caller(role), message)


async def test_another_session_has_no_snapshots_here(rig):
    with pytest.raises(StaleSessionError):
        rig.services[0].handle(rig.chief, PinSnapshot(8, 1, [], []))

"""Values and slots that are loaded: from files, and from messages."""

import os

import ml_dtypes
import numpy as np
import pytest
from ps_snapshot_rig import TASK, size_of, snapshot_rig

from zstrat.errors import DataLossError, InvalidArgumentError, NotFoundError
from zstrat.wire import LoadEntry, StoreEntry, UpdateOp


@pytest.fixture
async def rig():
    async with snapshot_rig() as rig:
        yield rig


async def save(rig, tmp_path, refs, optimizers=()):
    """One file with all tensors of server 0, named key/optimizer/leaf."""
    pinned = await rig.client.pin(99, refs, optimizers)
    names = [f"{t.entry.key}/{t.entry.optimizer}/{t.entry.leaf}" for t in pinned]
    path = f"{tmp_path}/part{len(os.listdir(tmp_path))}"
    await rig.client.write_snapshot(0, 99, path, [t.place for t in pinned], names)
    await rig.client.release(99)
    return path, pinned


@pytest.mark.parametrize(
    ("op", "dtype"),
    [(UpdateOp.OPTIMIZE, ml_dtypes.bfloat16), (UpdateOp.OPTIMIZE_ROWS, np.float32)],
)
async def test_values_and_slots_move_to_other_pieces(rig, tmp_path, op, dtype):
    """A variable of 6 rows, trained, comes back as two of 4 and 2 that train on."""
    value = np.random.default_rng(2).normal(size=(6, 3)).astype(dtype)
    gradient = np.random.default_rng(3).normal(size=(6, 3)).astype("f4")
    whole = await rig.create(0, 1, value)
    await rig.optimizer("adam", whole)

    async def train(ref, part):
        arrays = [part] if op is UpdateOp.OPTIMIZE else [np.arange(len(part)), part]
        await rig.update(ref, op, *arrays, optimizer=9)

    await train(whole, gradient)
    await train(whole, gradient)
    path, pinned = await save(rig, tmp_path, [whole], [9])
    parts = {2: slice(0, 4), 3: slice(4, 6)}
    refs = [
        await rig.create(1, key, np.zeros((part.stop - part.start, 3), dtype), True)
        for key, part in parts.items()
    ]
    await rig.bind("adam", *refs)
    entries = []
    for key, part in parts.items():
        for tensor in pinned:
            _, optimizer, leaf, _, _, rows = tensor.entry
            name = f"1/{optimizer}/{leaf}"
            if not rows:
                entries.append(LoadEntry(key, optimizer, leaf, path, name, 0, 0, 0))
                continue
            for at in range(part.start, part.stop):  # row by row
                place = at - part.start
                entries.append(
                    LoadEntry(key, optimizer, leaf, path, name, at, at + 1, place)
                )
    await rig.client.load(1, entries)
    old = await rig.read(whole)
    new = np.concatenate(await rig.client.pull(refs))
    np.testing.assert_array_equal(new, old)
    await train(whole, gradient)
    for ref, part in zip(refs, parts.values(), strict=True):
        await train(ref, gradient[part])
    old, new = await rig.read(whole), np.concatenate(await rig.client.pull(refs))
    assert np.abs(old.astype("f4") - value.astype("f4")).max() > 0.2
    np.testing.assert_array_equal(new, old)


async def test_readers_see_what_was_loaded(rig, tmp_path):
    ref = await rig.create(0, 1, np.arange(4.0))
    path, _ = await save(rig, tmp_path, [ref])
    await rig.update(ref, UpdateOp.ASSIGN, np.zeros(4))
    lease = await rig.read(ref)
    await rig.client.load(0, [LoadEntry(1, 0, "", path, "1/0/", 1, 3, 2)])
    assert (await rig.read(ref)).tolist() == [0, 0, 1, 2]
    assert lease.tolist() == [0, 0, 0, 0]
    entry = StoreEntry(1, 0, "", 1)
    await rig.client.store(0, [entry], [np.array([9.0])])
    assert (await rig.read(ref)).tolist() == [0, 9, 1, 2]


async def test_what_is_loaded_does_not_change_a_snapshot(rig, tmp_path):
    ref = await rig.create(0, 1, np.arange(4.0))
    pinned = await rig.client.pin(1, [ref], [])
    await rig.client.store(0, [StoreEntry(1, 0, "", 1)], [np.array([9.0])])
    assert (await rig.bytes_of(pinned[0])).tolist() == [0, 1, 2, 3]


REFUSED = [
    (StoreEntry(1, 0, "", 0), np.zeros((2, 4), "f4"), InvalidArgumentError, "'v1'"),
    (
        StoreEntry(1, 0, "", 5),
        np.zeros((2, 3), "f4"),
        InvalidArgumentError,
        r"\b5\b",
    ),
    (StoreEntry(1, 0, "", 0), np.zeros((2, 3)), InvalidArgumentError, "float64"),
    (StoreEntry(8, 0, "", 0), np.zeros((2, 3), "f4"), NotFoundError, r"\b8\b"),
    (StoreEntry(1, 4, "x", 0), np.zeros((2, 3), "f4"), NotFoundError, r"\b4\b"),
    (
        StoreEntry(1, 9, ".mu", 0),
        np.zeros((2, 3), "f4"),
        NotFoundError,
        r"'adam'.*\[0\]",
    ),
    (
        StoreEntry(1, 9, "[0].count", 0),
        np.zeros((2,), "i4"),
        InvalidArgumentError,
        r"\[0\].*\[\].*\[2\]",
    ),
    (
        StoreEntry(1, 9, "[0].count", 0),
        np.zeros((), "f4"),
        InvalidArgumentError,
        "does not fit",
    ),
]


async def test_what_does_not_fit_is_refused_and_nothing_changes(rig):
    ref = await rig.create(0, 1, np.ones((6, 3), "f4"))
    await rig.optimizer("adam", ref)
    first, row = StoreEntry(1, 0, "", 0), np.zeros((1, 3), "f4")
    for entry, array, error, words in REFUSED:
        with pytest.raises(error, match=words):
            await rig.client.store(0, [first, entry], [row, array])
    assert (await rig.read(ref)).all()
    assert rig.statistics()["slot_bytes"] == 0


async def test_a_load_without_a_path_forgets_slots(rig):
    """The next gradient makes them anew: Adam's first step again, of the rate 0.1."""
    ref = await rig.create(0, 1, np.zeros((4, 2), "f4"))
    await rig.optimizer("adam", ref)
    push = (UpdateOp.OPTIMIZE, np.ones((4, 2), "f4"))
    for _ in range(3):
        await rig.update(ref, *push, optimizer=9)
    entries = [LoadEntry(1, 9, "", "", "", 0, 0, 0)]
    await rig.client.load(0, entries)
    assert rig.statistics()["slot_bytes"] == 0
    await rig.client.load(0, entries)  # nothing to forget is no error
    before = np.array(await rig.read(ref))
    await rig.update(ref, UpdateOp.OPTIMIZE, np.full((4, 2), -3, "f4"), optimizer=9)
    np.testing.assert_allclose(await rig.read(ref), before + 0.1, rtol=1e-5)


@pytest.mark.parametrize("place", ["file", "name", "shape", "key"])
async def test_a_load_that_is_refused_forgets_no_slots(rig, tmp_path, place):
    ref = await rig.create(0, 1, np.zeros((4, 2), "f4"))
    await rig.optimizer("adam", ref)
    await rig.update(ref, UpdateOp.OPTIMIZE, np.ones((4, 2), "f4"), optimizer=9)
    path, _ = await save(rig, tmp_path, [ref])
    slots = rig.statistics()["slot_bytes"]
    assert slots
    bad = {
        "file": LoadEntry(1, 0, "", "/nowhere/part", "1/0/", 0, 0, 0),
        "name": LoadEntry(1, 0, "", path, "x", 0, 0, 0),
        "shape": LoadEntry(1, 0, "", path, "1/0/", 0, 2, 3),
        "key": LoadEntry(8, 9, "", "", "", 0, 0, 0),
    }
    forget = LoadEntry(1, 9, "", "", "", 0, 0, 0)
    with pytest.raises((NotFoundError, InvalidArgumentError)):
        await rig.client.load(0, [forget, bad[place]])
    assert rig.statistics()["slot_bytes"] == slots


async def test_what_is_loaded_beside_forgotten_slots_goes_to_new_ones(rig, tmp_path):
    ref = await rig.create(0, 1, np.zeros((4, 2), "f4"))
    await rig.optimizer("momentum", ref)
    push = (UpdateOp.OPTIMIZE, np.ones((4, 2), "f4"))
    await rig.update(ref, *push, optimizer=9)
    path, _ = await save(rig, tmp_path, [ref], [9])
    await rig.update(ref, *push, optimizer=9)
    half = LoadEntry(1, 9, "[0].trace", path, "1/9/[0].trace", 0, 2, 0)
    await rig.client.load(0, [LoadEntry(1, 9, "", "", "", 0, 0, 0), half])
    await rig.client.store(0, [StoreEntry(1, 0, "", 0)], [np.zeros((4, 2), "f4")])
    await rig.update(ref, *push, optimizer=9)
    # The trace was 1 in two rows and 0 in the others; it becomes 0.9 of it plus 1.
    want = -0.1 * np.array([[1.9] * 2, [1.9] * 2, [1] * 2, [1] * 2])
    np.testing.assert_allclose(await rig.read(ref), want, rtol=1e-6)


async def test_files_that_are_not_there_or_not_whole(rig, tmp_path):
    ref = await rig.create(0, 1, np.arange(4.0))
    path, _ = await save(rig, tmp_path, [ref])

    async def load(path, name, start=0, stop=0):
        await rig.client.load(0, [LoadEntry(1, 0, "", path, name, start, stop, 0)])

    with pytest.raises(NotFoundError, match=f"{TASK}.*{tmp_path}/other"):
        await load(f"{tmp_path}/other", "1/0/")
    with pytest.raises(NotFoundError, match="'x'"):
        await load(path, "x")
    with pytest.raises(InvalidArgumentError):
        await load(path, "1/0/", 3, 5)
    with pytest.raises(InvalidArgumentError, match="'part'"):
        await load("part", "1/0/")
    os.truncate(path, size_of(path) - 1)
    with pytest.raises(DataLossError, match=path):
        await load(path, "1/0/")
    assert await rig.client.sees(path) == [True, True]
    assert await rig.client.sees(f"{tmp_path}/other") == [False, False]
    assert (await rig.read(ref)).tolist() == [0, 1, 2, 3]

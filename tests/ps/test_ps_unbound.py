"""Slots that are loaded before anybody tells the tree, and slots that are assigned."""

import numpy as np
import optax
import pytest
from ps_snapshot_rig import OPTIMIZERS, snapshot_rig

from zstrat.errors import InvalidArgumentError
from zstrat.wire import StoreEntry, UpdateOp

ONES = np.ones((4, 2), "f4")
MU, NU, COUNT = "[0].mu", "[0].nu", "[0].count"


@pytest.fixture
async def rig():
    async with snapshot_rig() as rig:
        yield rig


async def trained(rig, key: int, steps: int):
    """A variable after steps of Adam, and what is kept beside it, by name."""
    ref = await rig.create(0, key, np.zeros((4, 2), "f4"))
    await rig.optimizer("adam", ref)
    for _ in range(steps):
        await rig.update(ref, UpdateOp.OPTIMIZE, ONES, optimizer=9)
    pinned = await rig.client.pin(key, [ref], [9])
    found = {t.entry.leaf: await rig.bytes_of(t, key) for t in pinned}
    await rig.client.release(key)
    return ref, found


async def store(rig, key: int, leaves, *, rows=(MU, NU), at=0) -> None:
    entries = [
        StoreEntry(key, 9 if leaf else 0, leaf, at, leaf in rows or not leaf)
        for leaf in leaves
    ]
    await rig.client.store(0, entries, list(leaves.values()))


@pytest.mark.parametrize("pieces", [1, 2])
async def test_what_was_restored_first_trains_on_as_the_original(rig, pieces):
    original, found = await trained(rig, 1, 2)
    copy = await rig.create(0, 2, np.zeros((4, 2), "f4"))
    count = {COUNT: found.pop(COUNT)}
    await store(rig, 2, dict(reversed([*count.items(), (MU, found.pop(MU))])))
    for at in range(0, 4, 4 // pieces):
        some = {name: each[at : at + 4 // pieces] for name, each in found.items()}
        await store(rig, 2, some, at=at)
    pinned = await rig.client.pin(3, [copy], [9])
    assert {t.entry.leaf: t.entry.rows for t in pinned} == {
        "": True, MU: True, NU: True, COUNT: False
    }  # fmt: skip
    await rig.client.release(3)
    await rig.bind("adam", copy)
    for step in (
        (UpdateOp.OPTIMIZE_ROWS, np.arange(4), ONES),
        (UpdateOp.OPTIMIZE, ONES),
    ):
        for ref in (original, copy):
            await rig.update(ref, *step, optimizer=9)
        np.testing.assert_allclose(
            await rig.read(copy), await rig.read(original), rtol=1e-6
        )


async def test_rows_that_were_not_restored_are_missed_before_they_count(rig):
    _, found = await trained(rig, 1, 1)
    ref = await rig.create(0, 2, np.zeros((4, 2), "f4"))
    found.pop("")
    found[NU] = found[NU][:3]
    await store(rig, 2, found)
    words = r"'v2'.*\[0\].*\b3\b"
    with pytest.raises(InvalidArgumentError, match=words):
        await rig.client.pin(3, [ref], [9])
    await rig.bind("adam", ref)
    with pytest.raises(InvalidArgumentError, match=words):
        await rig.update(ref, UpdateOp.OPTIMIZE, ONES, optimizer=9)
    await store(rig, 2, {NU: np.zeros((1, 2), "f4")}, at=3)
    await rig.update(ref, UpdateOp.OPTIMIZE, ONES, optimizer=9)
    assert (await rig.read(ref)).all()


WRONG = {
    "less": ({MU: ONES, NU: ONES}, (MU, NU), r"'\[0\].count' \(int32\[\]\)"),
    "more": (
        {MU: ONES, NU: ONES, COUNT: np.int32(1), ".x": ONES},
        (MU, NU, ".x"),
        r"restored were .*'.x' \(float32\[4, 2\], by rows\), and it keeps",
    ),
    "not by rows": (
        {MU: ONES, NU: ONES, COUNT: np.int32(1)}, (MU,),
        r"'\[0\].nu' \(float32\[4, 2\]\).* and it keeps.*'\[0\].nu' .*by rows\)",
    ),
    "shape": (
        {MU: ONES, NU: ONES[:, :1], COUNT: np.int32(1)}, (MU, NU),
        r"float32\[4, 1\], by rows\).* and it keeps",
    ),
    "dtype": (
        {MU: ONES, NU: ONES, COUNT: np.float32(1)}, (MU, NU),
        r"'\[0\].count' \(float32\[\]\).* and it keeps",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
async def test_what_is_restored_of_another_optimizer_is_refused_with_both(rig, what):
    leaves, rows, words = WRONG[what]
    ref = await rig.create(0, 2, np.zeros((4, 2), "f4"))
    await rig.client.create_optimizer(9, "adam", b"adam")
    await store(rig, 2, {k: np.asarray(v) for k, v in leaves.items()}, rows=rows)
    await rig.bind("adam", ref)
    for op, *arrays in (
        (UpdateOp.OPTIMIZE, ONES), (UpdateOp.OPTIMIZE_ROWS, np.arange(4), ONES)
    ):  # fmt: skip
        with pytest.raises(InvalidArgumentError, match=f"'v2'.*'adam'.*{words}"):
            await rig.update(ref, op, *arrays, optimizer=9)
    assert not (await rig.read(ref)).any()


async def test_a_request_that_is_refused_leaves_unbound_slots_as_they_were(rig):
    _, found = await trained(rig, 1, 1)
    ref = await rig.create(0, 2, np.zeros((4, 2), "f4"))
    found.pop("")
    await store(rig, 2, found)
    with pytest.raises(InvalidArgumentError, match="'adam'"):
        await store(rig, 2, {".more": ONES, MU: np.ones((9, 2), "f4")}, rows=(MU,))
    await rig.bind("adam", ref)
    await rig.update(ref, UpdateOp.OPTIMIZE, ONES, optimizer=9)


@pytest.mark.parametrize("rows", [False, True])
async def test_a_learning_rate_is_assigned_while_training_goes_on(
    rig, rows, monkeypatch
):
    made = optax.inject_hyperparams(optax.adam)
    monkeypatch.setitem(OPTIMIZERS, b"rate", lambda: made(learning_rate=0.1))
    refs = [await rig.create(0, key, np.zeros((4, 2), "f4")) for key in (1, 2)]
    await rig.optimizer("rate", *refs)
    op, arrays = UpdateOp.OPTIMIZE, [ONES]
    if rows:
        op, arrays = UpdateOp.OPTIMIZE_ROWS, [np.arange(4), ONES]
    want = made(learning_rate=0.1)
    value, state = np.zeros((4, 2), "f4"), want.init(ONES)
    for turn in range(5):
        if turn in (2, 3):
            rate = np.float32(0.01 * turn)
            leaf = ".hyperparams['learning_rate']"
            await rig.client.store(0, [StoreEntry(1, 9, leaf, 0)], [rate])
            state.hyperparams["learning_rate"] = rate
        for ref in refs:
            await rig.update(ref, op, *arrays, optimizer=9)
        updates, state = want.update(ONES, state, value)
        value = optax.apply_updates(value, updates)
        np.testing.assert_allclose(await rig.read(refs[0]), value, rtol=1e-5)
    # The other one's was not assigned.
    np.testing.assert_allclose(
        await rig.read(refs[1]), np.full((4, 2), -0.5), rtol=1e-5
    )

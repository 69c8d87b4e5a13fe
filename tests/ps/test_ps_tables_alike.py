"""Whatever is asked of the primary of a table, and whatever happens to its link, the
backup has the table bit for bit."""

import asyncio

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from ps_callers import SESSION
from ps_copies import Copies
from ps_tables import (
    BEGIN,
    UNIFORM,
    WIDTH,
    beginning,
    content,
    eviction,
    in_order,
    timing,
)
from test_ps_copies_alike import Story, interruptions

from zstrat.wire import (
    DeleteVariables,
    DetachBackup,
    EvictionRule,
    LoadEntry,
    LoadTensors,
    PullRows,
    Push,
    StoreTable,
    TableLeaf,
    Update,
    UpdateOp,
)

RULES = {"gradients": 2, "chance": 0.9, "tracks": True, "follows": True}
SCATTERS = UpdateOp.SCATTER_ADD, UpdateOp.SCATTER_UPDATE
ids = st.lists(st.integers(-10, 60), max_size=25)
steps, number = st.integers(-1, 30), st.integers(-3, 3)


def push(step, *updates):
    heads = [Update(1, int(op), optimizer, len(x)) for op, optimizer, *x in updates]
    arrays = tuple(array for _, _, *x in updates for array in x)
    return Push(SESSION, step, 0, 0, heads, arrays)


def train(step, some, filled, removed):
    some = in_order(some)
    rows = np.full((len(some), WIDTH), filled, "f4")
    drop = UpdateOp.REMOVE_ROWS, 0, np.array(removed, np.int64)
    return push(step, drop, (UpdateOp.OPTIMIZE_ROWS, 1, some, rows))


def scatter(step, op, some, filled):
    rows = np.full((len(some), WIDTH), filled, "f4")
    return push(step, (op, 0, np.array(some, np.int64), rows))


def store(some, filled, replaces, slots):
    some = np.unique(np.array(some, np.int64))
    rows = np.full((len(some), WIDTH), filled, "f4")
    leaves = [TableLeaf(0, "", True), TableLeaf(1, "[0].trace", True)][: 1 + slots]
    return StoreTable(SESSION, 1, replaces, leaves, (some, *[rows] * len(leaves)))


def forget(cut):
    return push(-1, (UpdateOp.FORGET_REMOVED, 0, np.array([BEGIN + cut])))


asked = st.one_of(
    st.builds(train, steps, ids, number, ids | st.just([])),
    st.builds(train, steps, ids, number, st.just([])),
    st.builds(scatter, steps, st.sampled_from(SCATTERS), ids, number),
    st.builds(
        eviction,
        steps,
        st.sampled_from(EvictionRule),
        st.integers(0, 20),
        st.sampled_from((0, 2000)),
    ),
    st.builds(store, ids, number, st.booleans(), st.booleans()),
    st.builds(forget, steps),
    st.builds(timing, st.integers(500, 600), st.floats(0, 300), st.just(60.0)),
    st.builds(lambda x: PullRows(SESSION, [], [1], (np.array(x, np.int64),)), ids),
    st.just(LoadTensors(SESSION, [LoadEntry(1, 1, "", "", "", 0, 0, 0)])),
    st.just(DeleteVariables(SESSION, [1])),
    st.just(beginning("momentum", **RULES)[0]),
)


@given(
    before=st.lists(asked, max_size=12),
    during=st.lists(asked, max_size=8),
    after=st.lists(asked | interruptions, max_size=20),
)
@settings(max_examples=20)
def test_tables_are_alike(before, during, after):
    async def run():
        rig = Copies()
        rig.shipped[b"-1 1"] = UNIFORM
        story = Story(rig)
        for each in beginning("momentum", **RULES):
            story.happen(each)
        await story.tell(before)
        attaching = asyncio.ensure_future(rig.attach())
        await story.tell(during)
        await attaching
        await story.tell(after)
        await story.end()
        await rig.ask(DetachBackup(SESSION, 8))
        await rig.promote(9)
        stores = rig.primary._store, rig.backup._store
        assert (1 in stores[0]) == (1 in stores[1])
        if 1 in stores[0]:
            one, other = map(content, stores)
            assert one.keys() == other.keys()
            for name, array in one.items():
                np.testing.assert_array_equal(array, other[name], err_msg=name)
        await rig.close()

    asyncio.run(run())

"""Tables of any id in files, and back on any number of servers."""

import asyncio
import itertools
from contextlib import asynccontextmanager

import numpy as np
import pytest
from ps_callers import SESSION, Gated, caller
from ps_copies import Copies
from ps_tables import (
    BEGIN,
    UNIFORM,
    WIDTH,
    beginning,
    creation,
    entry,
    eviction,
    first_rows,
    in_order,
    items,
    training,
)

from zstrat.checkpoint import TensorInfo, TensorReader, TensorWriter
from zstrat.errors import (
    DataLossError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from zstrat.ids import BUCKETS, buckets_of, hashes_of
from zstrat.ps import OptimizerEngine, Store
from zstrat.ps._thread import ComputeThread
from zstrat.ps.snapshots._snapshot import RowOrder, SnapshotTensor, SortedPin
from zstrat.ps.snapshots._snapshot_service import SnapshotService
from zstrat.ps.store import Pin
from zstrat.wire import (
    Done,
    EvictionRule,
    LoadEntry,
    LoadTable,
    LoadTensors,
    PinSnapshot,
    PullRows,
    PullTable,
    Push,
    ReleaseSnapshot,
    StoreTable,
    TableLeaf,
    TableTensor,
    TensorEntry,
    Update,
    UpdateOp,
    WriteSnapshot,
)

ROWS = int(UpdateOp.OPTIMIZE_ROWS)


IDS_OF = {".counts": "0.waiting", ".gone": "0.gone"}
RULES = {"gradients": 2, "chance": 0.9, "tracks": True}


class Server:
    """A parameter server; the buckets that it is to have are the caller's business."""

    def __init__(self, optimizer="adam", **rules):
        self.chief, self.optimizer, self.rules = caller(), optimizer, rules
        self.copies = Copies()
        self.copies.shipped[b"-1 1"] = UNIFORM

    async def ask(self, message):
        return await self.copies.ask(message)

    @property
    def store(self):
        return self.copies.primary._store

    async def begin(self, binds=True):
        for asked in beginning(self.optimizer, **self.rules)[: 3 if binds else 2]:
            assert await self.ask(asked) == Done()

    async def save(self, path, number=9, since=-1):
        """Returns the names of what was written: by optimizer and leaf."""
        pin = PinSnapshot(SESSION, number, [1], [1], since=[since])
        pinned = await self.ask(pin)
        names = [f"{e.optimizer}{e.leaf}" for e in pinned.tensors]
        places = list(range(len(names)))
        await self.ask(WriteSnapshot(SESSION, number, str(path), places, names))
        await self.ask(ReleaseSnapshot(SESSION, number))
        return pinned.tensors

    async def load(self, first, last, files, replaces=True, leaves=None):
        tensors = [
            TableTensor(
                e.optimizer,
                e.leaf,
                str(path),
                f"{e.optimizer}{e.leaf}",
                IDS_OF.get(e.leaf, "0.ids" if e.rows else ""),
            )
            for path, entries in files
            for e in entries
            if e.leaf not in (".ids", ".waiting", ".cut")
            if leaves is None or (not e.optimizer and e.leaf in leaves)
        ]
        tensors.sort(key=lambda tensor: tensor.leaf != ".gone")
        tensors.sort(key=lambda tensor: tensor.path)
        return await self.ask(LoadTable(SESSION, 1, first, last, replaces, tensors))


@asynccontextmanager
async def servers(number, optimizer="adam", binds=True, **rules):
    made = [Server(optimizer, **rules) for _ in range(number)]
    for each in made:
        await each.begin(binds)
    yield made
    for each in made:
        await each.copies.close()


def bounds(count):
    """The buckets of so many servers."""
    ends = [BUCKETS * n // count for n in range(count + 1)]
    return list(itertools.pairwise(ends))


def together(made):
    """The rows of all servers by id, with their slots."""
    found = {}
    for each in made:
        held = each.store.variables[1]
        rows = [held.cell.look()]
        slots = held.slots.get(1)
        if slots is not None:
            pairs = zip(slots.cells, slots.leaves, strict=True)
            rows += [cell.look() for cell, leaf in pairs if leaf.rows]
            for cell, leaf in zip(slots.cells, slots.leaves, strict=True):
                if not leaf.rows:
                    found[leaf.name] = cell.look().tobytes()
        for number, row in zip(
            held.table.ids.look().tolist(), zip(*rows, strict=True), strict=True
        ):
            assert number not in found
            found[number] = b"".join(each.tobytes() for each in row)
    return found


@pytest.mark.parametrize("binds", [True, False])
@pytest.mark.parametrize("optimizer", ["adam", "momentum"])
async def test_from_one_server_to_three_to_two(tmp_path, optimizer, binds):
    rng = np.random.default_rng(2)
    async with servers(1, optimizer) as one, servers(3, optimizer, binds) as three:
        for number in range(5):
            await one[0].ask(training(rng, number, removes=number == 3))
        files = [(tmp_path / "a", await one[0].save(tmp_path / "a"))]
        for each, pair in zip(three, bounds(3), strict=True):
            assert await each.load(*pair, files) == Done()
            ids = each.store.variables[1].table.ids.look()
            buckets = buckets_of(hashes_of(ids))
            assert buckets.min() >= pair[0]
            assert buckets.max() < pair[1]
        assert together(three) == together(one)
        if not binds:
            for each in three:
                await each.ask(beginning(optimizer)[2])
        push = training(rng, 50)
        ids, gradient = push.arrays
        await one[0].ask(push)
        for each, (first, last) in zip(three, bounds(3), strict=True):
            buckets = buckets_of(hashes_of(ids))
            here = (buckets >= first) & (buckets < last)
            update = [Update(1, ROWS, 1, 2)]
            await each.ask(Push(SESSION, 50, 0, 0, update, (ids[here], gradient[here])))
        assert together(three) == together(one)
        files = [
            (tmp_path / f"{n}", await each.save(tmp_path / f"{n}"))
            for n, each in enumerate(three)
        ]
        async with servers(2, optimizer) as two:
            for each, pair in zip(two, bounds(2), strict=True):
                await each.ask(training(rng, 7))  # it is replaced
                await each.load(*pair, files)
            assert together(two) == together(one)


async def test_equal_tables_are_equal_bytes(tmp_path):
    rng = np.random.default_rng(2)
    async with servers(2, **RULES) as (one, other):
        for number in range(5):
            await one.ask(training(rng, number, removes=number == 3))
        files = [(tmp_path / "a", await one.save(tmp_path / "a"))]
        for first, last in bounds(3)[::-1]:
            await other.load(first, last, files, replaces=last == BUCKETS)
        held = [each.store.variables[1].table.ids.look() for each in (one, other)]
        assert set(held[0].tolist()) == set(held[1].tolist())
        assert held[0].tolist() != held[1].tolist()
        await other.save(tmp_path / "b")
        assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
        with TensorReader(str(tmp_path / "a")) as reader:
            ids = reader.read("0.ids", 0, len(held[0]))
        wanted = np.lexsort((ids, buckets_of(hashes_of(ids))))
        np.testing.assert_array_equal(wanted, np.arange(len(ids)))


FOLLOWS = {"follows": True}


async def test_a_base_and_differences_are_the_whole(tmp_path):
    rng, sizes = np.random.default_rng(2), []
    async with servers(2, **FOLLOWS, **RULES) as (one, other):
        files, cut = [], -1
        for turn in range(4):
            for number in range(4 * turn, 4 * turn + 4):
                await one.ask(training(rng, number, removes=number % 3 == 2))
                await one.ask(eviction(number, EvictionRule.NORM, 1.2, 0, 500))
            path = tmp_path / f"{turn}"
            files.append((path, await one.save(path, since=cut)))
            with TensorReader(str(path)) as reader:
                cut = int(reader.read("0.cut", 0, 2)[0])
                sizes.append(reader.info("0.ids").shape[0])
        assert max(sizes[1:]) < one.store.variables[1].cell.shape[0]
        last = one.store.variables[1].table.cut
        assert last == cut
        await other.ask(training(rng, 3))
        await other.load(0, BUCKETS, files)
        assert together([other]) == together([one])
        assert noted([other])[0] == noted([one])[0]
        async with servers(2, **FOLLOWS) as two:
            for each, pair in zip(two, bounds(2), strict=True):
                await each.load(*pair, files, leaves=("", ".gone"))
            parts = [items(each.store) for each in two]
            ids, rows = items(one.store)
            np.testing.assert_array_equal(np.concatenate([x for x, _ in parts]), ids)
            np.testing.assert_array_equal(np.concatenate([x for _, x in parts]), rows)
        written = await one.save(tmp_path / "one")
        await other.save(tmp_path / "other")
        with (
            TensorReader(str(tmp_path / "one")) as a,
            TensorReader(str(tmp_path / "other")) as b,
        ):
            names = {f"{each.optimizer}{each.leaf}" for each in written}
            for name in names - {"0.cut", "0.waiting", "0.counts"}:
                assert a.read(name).tobytes() == b.read(name).tobytes(), name


async def test_changes_since_a_cut_are_read():
    async with servers(1, **FOLLOWS) as (one,):
        ones = np.ones((1, WIDTH), "f4")

        async def put(number, value):
            update = [Update(1, int(UpdateOp.SCATTER_UPDATE), 0, 2)]
            arrays = np.array([number]), ones * value
            await one.ask(Push(SESSION, -1, 0, 0, update, arrays))

        async def change(op, array):
            await one.ask(Push(SESSION, -1, 0, 0, [Update(1, int(op), 0, 1)], (array,)))

        async def since(cut, first=0, last=BUCKETS):
            answer = await one.ask(PullTable(SESSION, 1, first, last, cut))
            ids, rows, gone, (now,) = answer.arrays
            pairs = sorted(zip(ids.tolist(), rows[:, 0].tolist(), strict=True))
            return pairs, sorted(gone.tolist()), now

        assert await since(BEGIN) == ([], [], BEGIN)
        for number in 1, 2, 3:
            await put(number, number)
        _, _, cut = await since(BEGIN)
        await put(2, 7)
        await put(4, 8)
        await change(UpdateOp.REMOVE_ROWS, np.array([1, 4, 99]))
        await put(4, 9)
        assert await since(cut) == ([(2, 7), (4, 9)], [1], cut + 4)
        bucket = int(buckets_of(hashes_of(np.array([1])))[0])
        assert (await since(cut, bucket, bucket + 1))[1] == [1]
        await change(UpdateOp.FORGET_REMOVED, np.array([cut + 1]))
        with pytest.raises(InvalidArgumentError, match="'t1'"):
            await since(cut)
        assert (await since(cut + 1))[1] == [1]
        await change(UpdateOp.FORGET_REMOVED, np.array([cut + 4]))
        assert await since(cut + 4) == ([], [], cut + 4)
        assert not len(one.store.variables[1].table.gone)
        for wrong in cut + 5, cut + 2**40, 0, 3:  # 3: of another session
            with pytest.raises(InvalidArgumentError, match="'t1'"):
                await since(wrong)
        leaf = [TableLeaf(0, "", True)]
        await one.ask(StoreTable(SESSION, 1, True, leaf, (np.array([5]), ones)))
        with pytest.raises(InvalidArgumentError, match="'t1'"):
            await since(cut + 4)
        with pytest.raises(InvalidArgumentError):
            await one.ask(PinSnapshot(SESSION, 1, [1], [], since=[0, 0]))
    async with servers(1) as (one,):
        for asked in (
            PullTable(SESSION, 1, 0, 1, 0),
            PinSnapshot(SESSION, 1, [1], [], since=[0]),
        ):
            with pytest.raises(InvalidArgumentError, match="'t1'"):
                await one.ask(asked)


@pytest.mark.parametrize("is_sent", [True, False])
async def test_no_cut_is_known_after_a_load_that_brought_no_rows(tmp_path, is_sent):
    async with servers(2, **FOLLOWS) as (one, empty):
        await one.ask(training(np.random.default_rng(2), 0))
        await one.copies.attach()
        cut = one.store.variables[1].table.cut
        if is_sent:
            none = np.empty((0, WIDTH), "f4")
            arrays, leaf = (np.empty(0, np.int64), none), [TableLeaf(0, "", True)]
            await one.ask(StoreTable(SESSION, 1, True, leaf, arrays))
        else:
            files = [(tmp_path / "a", await empty.save(tmp_path / "a"))]
            await one.load(0, BUCKETS, files)
        now = one.store.variables[1].table.cut
        primary = one.copies.primary
        for backup in None, one.copies.backup:
            if backup is not None:
                await one.copies.promote()
                one.copies.primary = backup
            assert one.store.variables[1].cell.shape[0] == 0
            for asked in (
                PullTable(SESSION, 1, 0, BUCKETS, cut),
                PinSnapshot(SESSION, 1, [1], [1], since=[cut]),
            ):
                with pytest.raises(InvalidArgumentError, match="'t1'"):
                    await one.ask(asked)
            ids, _, removed, (cut_now,) = (
                await one.ask(PullTable(SESSION, 1, 0, BUCKETS, now))
            ).arrays
            assert (len(ids), len(removed), cut_now) == (0, 0, now)
        one.copies.primary = primary


async def test_a_snapshot_has_the_rows_of_its_moment(tmp_path):
    rng = np.random.default_rng(2)
    async with servers(2) as (one, other):
        for number in range(3):
            await one.ask(training(rng, number))
        pinned = await one.ask(PinSnapshot(SESSION, 1, [1], [1]))
        before = together([one])
        for number in range(3, 9):
            await one.ask(training(rng, number, removes=True))
        names = [f"{e.optimizer}{e.leaf}" for e in pinned.tensors]
        path = str(tmp_path / "a")
        await one.ask(WriteSnapshot(SESSION, 1, path, list(range(len(names))), names))
        assert await other.load(0, BUCKETS, [(path, pinned.tensors)]) == Done()
        assert together([other]) == before


async def test_counts_of_a_sketch_that_are_sent_again_are_there_once():
    async with servers(1, gradients=3, sketch=256) as (one,):
        await one.ask(training(np.random.default_rng(2), 0))
        waiting = one.store.variables[1].table.waiting
        arrays = [cell.look().copy() for cell in (waiting.ids, waiting.numbers)]
        apart = [TableLeaf(0, ".counts", True)]
        for _ in range(2):
            await one.ask(StoreTable(SESSION, 1, False, apart, tuple(arrays)))
        waiting = one.store.variables[1].table.waiting
        kept = dict(
            zip(waiting.ids.look().tolist(), waiting.numbers.look(), strict=True)
        )
        assert len(waiting) == len(kept) == len(arrays[0])
        for name, counters in zip(*arrays, strict=True):
            np.testing.assert_array_equal(kept[int(name)], counters)


async def test_a_table_of_another_name_and_seed_goes_on_with_the_counts(tmp_path):
    rules, ids = {"gradients": 3, "sketch": 64}, in_order(range(500))
    push = [Update(1, ROWS, 1, 2)], (ids, np.ones((500, WIDTH), "f4"))
    async with servers(1, **rules) as (one,):
        for number in range(2):
            await one.ask(Push(SESSION, number, 0, 0, *push))
        files = [(tmp_path / "a", await one.save(tmp_path / "a"))]
    other = Server(**rules)
    created = entry(1, **rules)._replace(name="other", seed=77)
    for asked in creation(SESSION, created), *beginning(**rules)[1:]:
        await other.ask(asked)
    await other.load(0, BUCKETS, files, leaves=("", ".counts"))
    await other.ask(Push(SESSION, 5, 0, 0, *push))
    assert other.store.variables[1].cell.shape[0] == 500
    await other.copies.close()
    async with servers(1, gradients=3, sketch=128) as (larger,):
        with pytest.raises(InvalidArgumentError, match="admission="):
            await larger.load(0, BUCKETS, files, leaves=("", ".counts"))


async def test_rows_that_are_sent_are_added_or_replace_all():
    async with servers(1) as (one,):
        ids, rows = in_order(range(30)), np.ones((30, WIDTH), "f4")
        await one.ask(Push(SESSION, 0, 0, 0, [Update(1, ROWS, 1, 2)], (ids, rows)))
        some, value = np.arange(20, 50), np.full((30, WIDTH), 4, "f4")
        leaves = [TableLeaf(0, "", True)]
        version = one.store.variables[1].version
        await one.ask(StoreTable(SESSION, 1, False, leaves, (some, value)))
        assert one.store.variables[1].version > version
        pulled = await one.ask(PullRows(SESSION, [], [1], (np.arange(50),)))
        np.testing.assert_array_equal(pulled.arrays[0][20:], 4)
        np.testing.assert_allclose(
            pulled.arrays[0][:20], first_rows(range(20)) - 0.1, 1e-3
        )
        slots = one.store.variables[1].slots[1]
        moments = dict(zip([x.name for x in slots.leaves], slots.cells, strict=True))
        rows = one.store.variables[1].table.index.rows(np.array([25, 45]))
        first, second = moments["[0].mu"].look()[rows]
        assert first.all()  # of the row as it was
        assert not second.any()  # as of a new one
        await one.ask(StoreTable(SESSION, 1, True, leaves, (some, value)))
        assert sorted(items(one.store)[0].tolist()) == some.tolist()
        assert 1 not in one.store.variables[1].slots
        await one.ask(StoreTable(SESSION, 1, True, [], (np.array([1, 2]),)))
        np.testing.assert_array_equal(
            items(one.store)[1], first_rows(items(one.store)[0])
        )


@pytest.mark.parametrize(
    "load",
    [
        StoreTable(SESSION, 1, True, [], (np.array([1, 2]),)),
        LoadTable(SESSION, 1, 0, BUCKETS, True, []),
    ],
)
async def test_a_load_without_leaves_waits_for_its_turn_at_the_table(load):
    rig = Gated({b"-1 1": UNIFORM})
    rig.gate.clear()
    created = rig.ask(creation(SESSION, entry(1)))
    loaded = asyncio.ensure_future(rig.ask(load))
    await asyncio.wait([loaded], timeout=0.1)
    assert not loaded.done()
    rig.gate.set()
    assert [await created, await loaded] == [Done()] * 2


async def test_what_does_not_fit_leaves_a_table_as_it_was(tmp_path):
    rng = np.random.default_rng(2)
    async with servers(1) as (one,):
        await one.ask(training(rng, 0))
        before, ids = together([one]), np.arange(4)
        path = str(tmp_path / "a")
        infos = [
            TensorInfo("ids", "int64", (4,)),
            TensorInfo("value", "float32", (4, WIDTH)),
            TensorInfo("few", "float32", (3, WIDTH)),
        ]
        writer = TensorWriter(path, infos)
        for array in ids, np.ones((4, WIDTH), "f4"), np.ones((3, WIDTH), "f4"):
            writer.write(array.reshape(-1).view(np.uint8).data)
        writer.finish()
        value = TableTensor(0, "", path, "value", "ids")
        wrong = [
            value._replace(ids="value"),
            value._replace(name="few"),
            value._replace(name="none"),
            value._replace(leaf=".ids"),
            value._replace(path="a"),
            value._replace(path=path + "x"),
            value._replace(optimizer=1, leaf="[0].nope"),
            value._replace(optimizer=1, leaf="[0].count", ids=""),
            value._replace(optimizer=4, leaf="[0].mu"),
        ]
        for tensor in wrong:
            with pytest.raises((InvalidArgumentError, NotFoundError, DataLossError)):
                await one.ask(LoadTable(SESSION, 1, 0, 9, True, [value, tensor]))
        leaf = TableLeaf(0, "", True)
        for leaves, arrays in [
            ([leaf], (ids,)),
            ([leaf], (ids, np.ones((3, WIDTH), "f4"))),
            ([leaf], (ids, np.ones((4, WIDTH), "f8"))),
            ([leaf], (ids, np.ones((4, WIDTH + 1), "f4"))),
            ([leaf, leaf], (ids, *[np.ones((4, WIDTH), "f4")] * 2)),
            ([leaf], (ids.astype("f8"), np.ones((4, WIDTH), "f4"))),
            ([], ()),
        ]:
            with pytest.raises(InvalidArgumentError):
                await one.ask(StoreTable(SESSION, 1, True, leaves, arrays))
        load = LoadEntry(1, 0, "", path, "value", 0, 0, 0)
        with pytest.raises(InvalidArgumentError):
            await one.ask(LoadTensors(SESSION, [load]))
        assert together([one]) == before
        assert await one.ask(LoadTable(SESSION, 1, 0, BUCKETS, True, [value])) == Done()


def noted(made):
    """By id what servers have noted of rows, and of ids that wait."""
    found, waiting = {}, {}
    for each in made:
        leaves = each.store.variables[1].table.leaves()
        ids, uses = leaves[".ids"].look(), leaves[".uses"].look()
        found |= dict(zip(ids.tolist(), uses.tolist(), strict=True))
        ids, counts = leaves[".waiting"].look(), leaves[".counts"].look()
        waiting |= dict(zip(ids.tolist(), counts.tolist(), strict=True))
    return found, waiting


async def test_what_is_noted_of_ids_is_saved(tmp_path):
    rng = np.random.default_rng(2)
    async with servers(1, **RULES) as one, servers(2, **RULES) as two:
        for number in range(5):
            await one[0].ask(training(rng, number, removes=number == 3))
        files = [(tmp_path / "a", await one[0].save(tmp_path / "a"))]
        for each, pair in zip(two, bounds(2), strict=True):
            assert await each.load(*pair, files) == Done()
            assert each.store.variables[1].table.now == 5
        assert noted(two) == noted(one)
        assert all(map(len, noted(one)))
        assert together(two) == together(one)
        async with servers(1) as (plain,):
            with pytest.raises(NotFoundError, match="'t1'"):
                await plain.load(0, BUCKETS, files)


async def test_a_table_that_was_lost_comes_back_from_a_file(tmp_path):
    rng = np.random.default_rng(2)
    async with servers(1) as (one,):
        for number in range(3):
            await one.ask(training(rng, number))
        files = [(tmp_path / "a", await one.save(tmp_path / "a"))]
        before = together([one])
        held = one.store.variables[1]
        held.cell.lose("XLA had no memory")  # as an update that fails half way
        held.slots.clear()
        asked = PullRows(SESSION, [], [1], (np.arange(3),))
        for refused in (
            asked,
            training(rng, 5),
            PinSnapshot(SESSION, 3, [1], [1]),
            StoreTable(SESSION, 1, False, [], (np.arange(3),)),
        ):
            with pytest.raises(UnavailableError, match="'t1'"):
                await one.ask(refused)
        await one.copies.attach()  # the backup has lost it, too
        await one.load(0, BUCKETS, files)
        assert together([one]) == before
        await one.ask(asked)
        await one.copies.promote()
        one.copies.primary, kept = one.copies.backup, one.copies.primary
        assert together([one]) == before
        one.copies.primary = kept


@pytest.mark.parametrize("rules", [{}, RULES, RULES | FOLLOWS])
async def test_a_backup_has_what_was_loaded(tmp_path, rules):
    rng = np.random.default_rng(2)
    async with servers(2, **rules) as (one, other):
        for number in range(3):
            await one.ask(training(rng, number))
        files = [(tmp_path / "a", await one.save(tmp_path / "a"))]
        await other.ask(training(rng, 5))
        await other.copies.attach()
        await other.load(0, 2000, files)
        await other.load(2000, BUCKETS, files, replaces=False)
        added = np.array([10**9, 10**9 + 1])
        leaf = [TableLeaf(0, "", True)]
        rows = np.ones((2, WIDTH), "f4")
        await other.ask(StoreTable(SESSION, 1, False, leaf, (added, rows)))
        await other.ask(training(rng, 6, removes=True))
        await other.copies.promote()
        kept, wanted = other.copies.primary, together([other])
        before = noted([other]) if rules else None
        leaves = kept._store.variables[1].table.leaves()
        other.copies.primary = other.copies.backup
        assert together([other]) == wanted
        assert not rules or noted([other]) == before
        for name, cell in other.store.variables[1].table.leaves().items():
            # Of the load it has only the outcome, and so knows less of what was before.
            some = slice(0, 1 if name == ".cut" else None)
            pair = cell.look()[some], leaves[name].look()[some]
            np.testing.assert_array_equal(*pair, name)
        other.copies.primary = kept


async def test_reads_at_the_same_time_put_the_rows_of_a_table_in_order_once():
    """Else one of them gives up the ids that another one has not copied yet."""
    turns, first_is_done = [], asyncio.Event()

    @asynccontextmanager
    async def turn(names):
        turns.append(names)
        if len(turns) > 1:
            await first_is_done.wait()
        yield

    order = RowOrder(Pin(np.arange(8), frozen=False))
    value = SortedPin(Pin(np.arange(8), frozen=True), order)
    tensor = SnapshotTensor(TensorEntry(1, 0, "", "int64", [8], True), value, order)
    service = SnapshotService(
        "ps:0", Store(OptimizerEngine(lambda _: None)), turn, print, None, ComputeThread
    )
    first, second = (asyncio.ensure_future(service._sort(tensor)) for _ in range(2))
    await first
    first_is_done.set()
    await second
    assert len(turns) == 1
    assert await service.close(asyncio.get_running_loop().time() + 5.0)

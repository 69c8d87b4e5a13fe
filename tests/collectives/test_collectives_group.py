"""Every operation of a group, against numpy, with ranks as threads."""

import asyncio
import inspect
import threading
from functools import reduce

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from collectives_groups import ranks_of
from tiers import combined

import zstrat as zs
from zstrat.collectives.group import _invitation
from zstrat.errors import ClosedError, InvalidArgumentError
from zstrat.threads import ThreadBell

UFUNCS = {"sum": np.add, "min": np.minimum, "max": np.maximum}
DTYPES = ["float32", "float64", "float16", "bfloat16", "int8", "int32", "int64"]
DTYPES += ["uint8", "uint32", "complex64"]
CALLS = ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"]


@pytest.fixture(scope="module", params=["ipc", "tcp"])
def trio(request):
    with ranks_of(3, over=request.param) as ranks:
        ranks.all = ranks.groups()
        # The thread of an engine is made now: later it would belong to some test.
        ranks.each(lambda group: group.barrier_async().result(60), ranks.all)
        yield ranks


@pytest.fixture
def on_all(trio):
    """Calls a function with each group at the same time."""
    return lambda function: trio.each(function, trio.all)


def numbers(rank, dtype, shape):
    """Small integers: exact in every dtype, in any order of summing."""
    rng = np.random.default_rng(rank)
    return rng.integers(0, 8, shape).astype(np.dtype(dtype))


def equal(got, expected):
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    np.testing.assert_array_equal(got, expected)


def test_ranks_know_who_they_are(on_all):
    found = on_all(lambda group: (group.rank, group.size, group.generation))
    assert found == [(0, 3, 0), (1, 3, 0), (2, 3, 0)]
    names = tuple(f"/job:worker/task:{rank}" for rank in range(3))
    assert on_all(lambda group: group.members) == [names] * 3


@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        case
        for case in combined([*DTYPES], ["sum", "min", "max"])
        if case.values[0] != "complex64" or case.values[1] == "sum"  # without order
    ],
)
def test_all_reduce_of_every_dtype(on_all, dtype, op):
    data = [numbers(rank, dtype, (7, 1000)) for rank in range(3)]
    for result in on_all(lambda group: group.all_reduce(data[group.rank], op)):
        equal(result, reduce(UFUNCS[op], data))


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_mean(on_all, dtype):
    data = [3 * numbers(rank, dtype, 50) for rank in range(3)]
    expected = (sum(d.astype(np.float64) for d in data) / 3).astype(dtype)
    for result in on_all(lambda group: group.all_reduce(data[group.rank], "MEAN")):
        equal(result, expected)


def test_half_floats_are_rounded_once(on_all):
    # 1 + 2^-9 + 2^-9: each addition in bfloat16 alone would lose both small parts.
    parts = np.array([1.0, 2**-8, 2**-8], ml_dtypes.bfloat16)
    results = on_all(lambda group: group.all_reduce(parts[group.rank : group.rank + 1]))
    expected = np.array([1 + 2**-7], np.float32).astype(ml_dtypes.bfloat16)
    for result in results:
        equal(result, expected)


def test_all_ranks_have_the_same_bits(on_all):
    rng = np.random.default_rng(7)
    data = rng.standard_normal((3, 300_000)).astype(np.float32)
    results = on_all(lambda group: group.all_reduce(data[group.rank]))
    assert len({result.tobytes() for result in results}) == 1
    np.testing.assert_allclose(results[0], data.sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2,), (4, 0, 3), (5, 7), (65_537,)])
def test_every_shape(on_all, shape):
    data = [numbers(rank, "float32", shape) for rank in range(3)]
    for result in on_all(lambda group: group.all_reduce(data[group.rank])):
        equal(np.asarray(result), np.asarray(sum(data), np.float32))


def test_arrays_that_are_no_plain_memory(on_all):
    whole = [numbers(rank, "float32", (40, 30)) for rank in range(3)]
    ways = [lambda a: a.T, lambda a: a[::2, 3:], lambda a: a.astype(">f4")]
    for way in ways:
        expected = sum(way(each).astype(np.float32) for each in whole)
        for result in on_all(lambda g, way=way: g.all_reduce(way(whole[g.rank]))):
            equal(result, expected)


def test_the_operand_is_left_alone(on_all):
    data = [numbers(rank, "float32", 500_000) for rank in range(3)]
    copies = [each.copy() for each in data]
    on_all(lambda group: group.all_reduce(data[group.rank]))
    on_all(lambda group: group.reduce_scatter(data[group.rank]))
    on_all(lambda group: group.all_gather(data[group.rank]))
    for before, after in zip(copies, data, strict=True):
        equal(after, before)


def test_pytrees_of_many_arrays(on_all):
    shapes = [(3,), (1000,), (), (200, 100), (0,), (64, 1024), (5, 5)]

    def tree(rank):
        return {
            "f32": [numbers(rank, "float32", shape) for shape in shapes],
            "f64": tuple(numbers(rank, "float64", shape) for shape in shapes),
            "int": {"n": rank, "none": None},
        }

    trees = [tree(rank) for rank in range(3)]
    expected = jax.tree.map(lambda *leaves: np.asarray(sum(leaves)), *trees)
    for result in on_all(lambda group: group.all_reduce(trees[group.rank])):
        assert jax.tree.structure(result) == jax.tree.structure(expected)
        jax.tree.map(np.testing.assert_array_equal, result, expected)


def test_jax_arrays_stay_jax_arrays(on_all):
    def work(group):
        tree = {"w": jnp.full((300, 40), group.rank + 1.0), "n": np.float32(1)}
        return group.all_reduce(tree)

    for result in on_all(work):
        assert isinstance(result["w"], jax.Array)
        assert not isinstance(result["n"], jax.Array)
        equal(np.asarray(result["w"]), np.full((300, 40), 6, np.float32))


def test_traced_arrays_are_refused(trio):
    group = trio.all[0]
    with pytest.raises(TypeError, match=r"jax\.jit"):
        jax.jit(group.all_reduce)(jnp.ones(3))


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_all_gather_of_uneven_arrays(on_all, axis):
    def mine(rank):
        shape = [2, 3, 4]
        shape[axis] = 2 * rank  # rank 0 has none
        return numbers(rank, "int32", shape)

    expected = np.concatenate([mine(rank) for rank in range(3)], axis)
    for result in on_all(lambda group: group.all_gather(mine(group.rank), axis)):
        equal(result, expected)


def test_all_gather_of_pytrees(on_all):
    def mine(rank):
        return {"a": numbers(rank, "bool", (rank + 1,)), "b": jnp.ones((2, rank))}

    for result in on_all(lambda group: group.all_gather(mine(group.rank), -1)):
        parts = [mine(rank) for rank in range(3)]
        equal(result["a"], np.concatenate([part["a"] for part in parts]))
        equal(np.asarray(result["b"]), np.ones((2, 3), np.float32))
        assert isinstance(result["b"], jax.Array)


@pytest.mark.parametrize("rows", [0, 1, 3, 10])
def test_reduce_scatter(on_all, rows):
    data = [numbers(rank, "float32", (rows, 3)) for rank in range(3)]
    expected = np.array_split(sum(data), 3)
    results = on_all(lambda group: group.reduce_scatter(data[group.rank]))
    for result, part in zip(results, expected, strict=True):
        equal(result, part)


@pytest.mark.parametrize(("root", "count"), combined([0, 2], [0, 10, 1_000_000]))
def test_broadcast(on_all, root, count):
    data = [numbers(rank, "float32", count) for rank in range(3)]
    for result in on_all(lambda group: group.broadcast(data[group.rank], root)):
        equal(result, data[root])


@pytest.mark.parametrize("count", [1, 10, 1_000_000])
def test_what_the_root_changes_after_an_async_broadcast_shows_nowhere(on_all, count):
    data = [np.full((2, count), rank, "f4") for rank in range(3)]

    def call(group):
        pending = group.broadcast_async(list(data[group.rank]), 1)
        bell = ThreadBell()
        if pending._enlist(bell):
            bell.wait(10)
        assert pending.done()
        data[group.rank][...] = 7
        return pending.result()

    for result in on_all(call):
        equal(np.stack(result), np.ones((2, count), "f4"))


@pytest.mark.parametrize("rows", [0, 6])
def test_all_to_all(on_all, rows):
    data = [numbers(rank, "int64", (rows, 2)) for rank in range(3)]
    cut = [np.split(each, 3) for each in data]
    results = on_all(lambda group: group.all_to_all(data[group.rank]))
    for rank, result in enumerate(results):
        equal(result, np.concatenate([cut[sender][rank] for sender in range(3)]))


@pytest.mark.parametrize(
    "splits",
    [
        [[1, 0, 4], [2, 2, 0], [0, 3, 1]],
        # Not all ranks see the largest part; all cut theirs alike.
        [[0, 1_300_000, 0], [0, 0, 92_160], [10, 10, 10]],
    ],
)
def test_all_to_all_of_uneven_parts(on_all, splits):
    data = [numbers(rank, "float64", sum(splits[rank])) for rank in range(3)]
    cut = [np.split(d, np.cumsum(s)[:-1]) for d, s in zip(data, splits, strict=True)]
    results = on_all(lambda g: g.all_to_all(data[g.rank], splits=splits[g.rank]))
    for rank, result in enumerate(results):
        equal(result, np.concatenate([cut[sender][rank] for sender in range(3)]))


def test_sparse_gradients_are_concatenated(on_all):
    def mine(rank):
        values = np.full((rank + 1, 2), rank + 1.0, np.float32)
        return zs.IndexedSlices(values, np.arange(rank + 1), (9, 2))

    for result in on_all(lambda group: group.all_reduce(mine(group.rank), "mean")):
        assert result.dense_shape == (9, 2)
        np.testing.assert_array_equal(result.indices, [0, 0, 1, 0, 1, 2])
        values = np.float32([[1], [2], [2], [3], [3], [3]]) / np.float32(3)
        equal(result.values, np.tile(values, 2))


@pytest.mark.parametrize("module", [np, jnp])
def test_sparse_gradients_become_dense(on_all, module):
    def mine(rank):
        values = module.ones((2, 2), module.float32)
        return zs.IndexedSlices(values, module.array([0, rank]), (3, 2))

    for result in on_all(lambda g: g.all_reduce(mine(g.rank), densify=True)):
        np.testing.assert_array_equal(result, [[4, 4], [1, 1], [1, 1]])


@pytest.mark.parametrize(
    ("dtype", "least"), [(np.float64, 0.1), (np.int64, 2**40 + 1), (np.uint8, 1)]
)
def test_numbers_of_64_bits_stay_what_they_are_when_they_become_dense(
    on_all, dtype, least
):
    def mine(rank):
        values = np.array([least, least, 7], dtype)
        return zs.IndexedSlices(values, np.array([1, 1 - rank, -1]), (2,))

    for result in on_all(lambda g: g.all_reduce(mine(g.rank), densify=True)):
        assert type(result) is np.ndarray
        want = [least, least + least + least + least]  # rank 2 names no row once
        np.testing.assert_array_equal(result, np.array(want, dtype))


def test_many_operations_in_flight(on_all):
    def work(group):
        data = [np.full(1000 * (i + 1), group.rank + i) for i in range(50)]
        pending = [group.all_reduce_async(each) for each in data]
        gathered = group.all_gather_async(np.array([group.rank]))
        return [each.result() for each in reversed(pending)], gathered.result()

    for results, gathered in on_all(work):
        for i, result in enumerate(reversed(results)):
            equal(result, np.full(1000 * (i + 1), 3 + 3 * i))
        equal(gathered, np.arange(3))


def test_pending_results_can_be_awaited(on_all):
    async def work(group):
        pending = [group.all_reduce_async(np.array([i])) for i in range(3)]
        return [int(each[0]) for each in await asyncio.gather(*pending)]

    assert on_all(lambda group: asyncio.run(work(group))) == [[0, 3, 6]] * 3


def test_tagged_calls_may_come_in_any_order(on_all):
    def work(group):
        tags = ["a", "b", "c"]
        turned = tags[group.rank :] + tags[: group.rank]
        pending = {
            tag: group.all_reduce_async(np.array([ord(tag)]), tag=tag) for tag in turned
        }
        return [int(pending[tag].result()[0]) for tag in tags]

    assert on_all(work) == [[3 * ord(tag) for tag in "abc"]] * 3


def test_barrier_waits_for_all(trio):
    came = []

    def work(group):
        came.append(group.rank)
        group.barrier()
        return len(came)

    assert trio.each(work, trio.all) == [3, 3, 3]


SLICES = zs.IndexedSlices(np.ones((2, 3), np.float32), np.array([0, 4]), (5, 3))
MASKED = np.ma.array([1.0, 2.0], mask=[False, True])


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda g: g.all_reduce(np.ones(3, int), "mean"), TypeError, "MEAN"),
        (lambda g: g.all_reduce(np.ones(3), "product"), ValueError, "reduce_op"),
        (lambda g: g.all_reduce("text"), TypeError, "got str"),
        (lambda g: g.all_reduce({1}), TypeError, "pytrees of them, got set"),
        (lambda g: g.all_reduce(np.array(["a"])), TypeError, "<U1 cannot be sent to"),
        (lambda g: g.all_reduce(MASKED), TypeError, "masked array.*fill it"),
        (lambda g: g.all_reduce(SLICES, in_place=True), TypeError, "in_place.*Indexed"),
        (lambda g: g.all_reduce(SLICES, "max"), TypeError, "MAX.*IndexedSlices.*SUM"),
        (lambda g: g.all_gather(np.ones(3), 1), ValueError, "all_gather"),
        (lambda g: g.all_gather(1.0), ValueError, "all_gather"),
        (lambda g: g.reduce_scatter(1.0), ValueError, "reduce_scatter"),
        (lambda g: g.broadcast(1.0, 3), ValueError, r"\b3\b"),
        (lambda g: g.all_to_all(np.float32(1)), ValueError, "all_to_all"),
        (lambda g: g.all_to_all(np.ones(4)), ValueError, "all_to_all"),
        (lambda g: g.all_to_all(np.ones(4), splits=[1, 1, 1]), ValueError, "splits="),
        (lambda g: g.all_reduce(jnp.ones(3), in_place=True), TypeError, "in_place"),
        (lambda g: g.barrier(timeout=0), ValueError, r"\b0\b"),
        (lambda g: g.barrier(inplace=True), TypeError, "keyword argument 'inplace'"),
    ],
)
def test_wrong_arguments_are_refused_and_number_nothing(trio, call, error, words):
    with pytest.raises(error, match=words):
        call(trio.all[1])
    trio.each(lambda group: group.barrier(), trio.all)


def test_two_groups_in_one_process_overlap():
    with ranks_of(3) as ranks:
        everybody = ranks.groups(name="everybody")
        tasks = ["worker:2", "worker:0"]
        pair = ranks.each(
            lambda rank: ranks.group(rank, name="pair", tasks=tasks), [0, 2]
        )
        assert [group.rank for group in pair] == [1, 0]
        pending = [group.all_reduce_async(np.arange(5)) for group in everybody]
        sums = ranks.each(lambda group: group.all_gather(np.array([group.rank])), pair)
        np.testing.assert_array_equal(sums, [[0, 1], [0, 1]])
        for each in pending:
            np.testing.assert_array_equal(each.result(), 3 * np.arange(5))


def test_a_group_of_one_needs_no_cluster():
    with zs.collectives.Group(
        zs.cluster_resolver.SimpleClusterResolver(zs.ClusterSpec({}))
    ) as group:
        assert (group.rank, group.size) == (0, 1)
        for name in CALLS:
            found = getattr(group, name)(np.arange(3))
            np.testing.assert_array_equal(found, range(3))
        np.testing.assert_array_equal(group.all_reduce(np.ones(3), "mean"), np.ones(3))
        group.barrier()


def test_a_closed_group_says_so():
    with ranks_of(2) as ranks:
        groups = ranks.groups()
        groups[0].close()
        groups[0].close()
        with pytest.raises(ClosedError, match="'group'"):
            groups[0].barrier()


async def test_groups_for_async_programs():
    with ranks_of(2) as ranks:
        make = zs.collectives.Group.create
        options = {"rendezvous_timeout": 20, "transport": "tcp"}
        first, second = await asyncio.gather(
            make(ranks.resolver(0), **options), make(ranks.resolver(1), **options)
        )
        async with first, second:
            found = await asyncio.gather(
                first.all_reduce_async(np.ones(3)), second.all_reduce_async(np.ones(3))
            )
            np.testing.assert_array_equal(found, np.full((2, 3), 2.0))


async def test_making_a_group_that_is_cancelled_leaves_nothing_bound(monkeypatch):
    binds, may_bind, released = (threading.Event() for _ in range(3))

    class Bound:
        release = released.set

    def bind(*where):
        binds.set()
        may_bind.wait(100)
        return Bound

    monkeypatch.setattr(_invitation, "runtime_for", bind)
    with ranks_of(1) as ranks:
        making = asyncio.create_task(
            zs.collectives.Group.create(ranks.resolver(0)), name="making"
        )
        assert await asyncio.to_thread(binds.wait, 30)
        making.cancel()
        with pytest.raises(asyncio.CancelledError):
            await making
        assert not released.is_set()
        may_bind.set()
        assert await asyncio.to_thread(released.wait, 30)


def test_ranks_that_differ_in_the_group_are_told():
    with ranks_of(3) as ranks:
        tasks = {0: None, 1: ["worker:0", "worker:1"]}
        first = ranks.start(lambda: ranks.group(0, rendezvous_timeout=1))
        words = r"\b2\b.*rank 0.*\b3\b"
        with pytest.raises(InvalidArgumentError, match=words):
            ranks.group(1, tasks=tasks[1])
        assert "worker/task:1" in str(first.exception(20))


@pytest.mark.parametrize("name", [*CALLS, "barrier", "reform"])
def test_both_forms_of_a_call_show_the_same_parameters(name):
    blocking = inspect.signature(getattr(zs.collectives.Group, name))
    awaitable = inspect.signature(getattr(zs.collectives.Group, f"{name}_async"))
    assert blocking.parameters == awaitable.parameters
    assert {"timeout", "kwargs"} & {*blocking.parameters} == {"timeout"}


def test_a_group_is_made_with_the_same_parameters_in_both_forms():
    made = inspect.signature(zs.collectives.Group).parameters
    assert made == inspect.signature(zs.collectives.Group.create).parameters
    assert list(made)[:3] == ["resolver", "name", "tasks"]
    assert made["name"].default == "group"


def test_each_rank_knows_for_whom_it_has_waited(trio, on_all):
    """A node is shared by the groups of a process: here each rank has its own."""

    def waited(group):
        for _ in range(5):
            group.all_reduce(np.ones(4, np.float32))
        return dict(group._runtime.node.statistics()["waited"])

    names = [f"/job:worker/task:{rank}" for rank in range(3)]
    for rank, found in enumerate(on_all(waited)):
        others = [name for name in names if name != names[rank]]
        assert set(found) <= set(others)
        assert sum(found.values()) > 0


def test_waits_in_the_memory_of_one_host_are_counted_as_those_by_message():
    def waited(group):
        return dict(group._runtime.node.statistics()["waited"])

    with ranks_of(2) as ranks:
        groups = ranks.groups(transport="shm")
        before = [waited(group) for group in groups]  # forming goes by messages
        while [waited(group) for group in groups] == before:
            ranks.each(lambda group: group.all_reduce(np.ones(4)), groups)
        for rank, group in enumerate(groups):
            assert set(waited(group)) <= {f"/job:worker/task:{1 - rank}"}

"""Groups as programs use them: ranks are processes, on every transport."""

import pytest
from system_ranks import Ranks, zstrat_run

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("programs")]


EVERYTHING = """
import zlib
import jax.numpy as jnp
import ml_dtypes

REDUCED = {"sum": np.add, "min": np.minimum, "max": np.maximum}
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
digest = 0

def same(got, want):
    global digest
    got, want = np.asarray(got), np.asarray(want)
    assert (got.dtype, got.shape) == (want.dtype, want.shape), (got, want)
    np.testing.assert_array_equal(got, want)
    digest = zlib.crc32(got.tobytes(), digest)

def small(rank, shape, dtype):
    # Sums of a few small whole numbers are exact in every dtype and every order.
    return np.random.default_rng(rank).integers(0, 8, shape).astype(dtype)

def reduced(op, parts):
    wide = [part.astype("f8") for part in parts]
    total = REDUCED["sum" if op == "mean" else op].reduce(wide)
    return np.asarray(total / len(parts) if op == "mean" else total, parts[0].dtype)

def reductions(group, dtype, shape):
    parts = [small(rank, shape, dtype) for rank in range(group.size)]
    mine = parts[group.rank]
    for op in ("sum", "mean", "min", "max"):
        if op == "mean" and dtype in INTEGERS:
            continue
        want = reduced(op, parts)
        same(group.all_reduce(mine, op), want)
        if shape:
            cut = np.array_split(want, group.size)
            got = group.reduce_scatter(mine, op)
            np.testing.assert_array_equal(got, cut[group.rank])
            given = mine.copy()
            assert group.all_reduce(given, op, in_place=True) is given
            same(given, want)

def moves(group, dtype, shape):
    parts = [small(rank, shape, dtype) for rank in range(group.size)]
    for root in range(group.size):
        same(group.broadcast(parts[group.rank], root), parts[root])
    if shape:
        shapes = [(3 * rank, *shape[1:]) for rank in range(group.size)]
        uneven = [small(r, each, dtype) for r, each in enumerate(shapes)]
        same(group.all_gather(uneven[group.rank]), np.concatenate(uneven))

def everything(group, integers):
    global digest
    size, rank = group.size, group.rank
    for dtype in ["float32", "float64", "float16", "bfloat16", *integers]:
        for shape in [(), (0,), (50_001,)]:
            reductions(group, dtype, shape)
            moves(group, dtype, shape)
    flags = [np.array([r == 0, True, False]) for r in range(size)]
    same(group.all_reduce(flags[rank], "min"), np.logical_and.reduce(flags))
    same(group.all_reduce(flags[rank], "max"), np.logical_or.reduce(flags))
    for op, data in (("sum", flags[rank]), ("mean", np.arange(3))):
        try:
            group.all_reduce(data, op)
        except TypeError as error:
            assert ".astype" in str(error)
    rows = [small(r, (40, 50), "float32") for r in range(size)]
    same(group.all_reduce(rows[rank].T[::2, ::-3]), reduced("sum", rows).T[::2, ::-3])
    same(group.all_gather(rows[rank], axis=-1), np.concatenate(rows, 1))
    sent = [np.arange(6) + 100 * r for r in range(size)]
    splits = [[1, 2, 3], [3, 0, 3], [0, 6, 0]]
    got = group.all_to_all(sent[rank], splits=splits[rank])
    cuts = [np.split(x, np.cumsum(s)[:-1]) for x, s in zip(sent, splits)]
    np.testing.assert_array_equal(got, np.concatenate([cut[rank] for cut in cuts]))
    tree = {"a": jnp.full(3, rank + 1.0), "b": [np.float64(rank), np.ones(2, "i4")]}
    got = group.all_reduce(tree)
    assert isinstance(got["a"], type(jnp.zeros(1)))
    same(got["a"], np.full(3, 6, "f4"))
    same(got["b"][1], np.full(2, 3, "i4"))
    noise = [np.random.default_rng(r).normal(size=300_001) for r in range(size)]
    got = group.all_reduce(noise[rank].astype("f4"))
    np.testing.assert_allclose(got, np.sum(noise, 0), rtol=1e-5, atol=1e-5)
    digest = zlib.crc32(got.tobytes(), digest)

# All integers on data connections, half of them in each kind of memory.
for transport, names, integers in (
    ("shm", "aaa", INTEGERS[::2]),
    ("tcp", "aaa", INTEGERS),
    ("auto", "aab", INTEGERS[1::2]),
):
    socket.gethostname = lambda: names[task]
    with Group(timeout=30, transport=transport) as group:
        everything(group, integers)
        say(type(group._work.engine).__name__, digest)
"""


@pytest.mark.thorough
def test_every_dtype_and_operation_is_that_of_numpy():
    code, said = zstrat_run(3, EVERYTHING, "--transport", "tcp")
    assert code == 0, said
    assert said[0] == said[1] == said[2]  # bit by bit
    assert [line.split()[0] for line in said[0]] == [
        "OneHost",
        "SocketEngine",
        "HostsEngine",
    ]


OVERLAPPING = """
names = [["worker:0", "worker:1", "worker:2"], ["worker:3", "worker:2", "worker:1"]]
mine = [n for n in (0, 1) if f"worker:{task}" in names[n]]
if task == 2:
    mine.reverse()  # they may be formed in any order, on threads of their own
def make(n, transport):
    name = f"{transport} {n}"
    groups[n] = Group(name=name, tasks=names[n], timeout=30, transport=transport)
for transport in ("shm", "tcp"):
    groups = {}
    threads = [threading.Thread(target=make, args=(n, transport)) for n in mine]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    data = np.full(300_000, task + 1.0)
    for step in range(5):
        pending = {n: groups[n].all_reduce_async(data * 10**n) for n in mine}
        for n in reversed(mine):
            assert (pending[n].result(100) == (6, 90)[n]).all()
    if 0 in mine:
        groups[0].close()
    if 1 in mine:  # and lives on
        say(*groups[1].all_gather(np.array([groups[1].rank * 10 + task])))
        groups[1].close()
    left = [t.name for t in threading.enumerate() if "zstrat" in t.name]
    say("over", left)
"""


def test_groups_that_overlap():
    with Ranks(4, OVERLAPPING, "tcp") as ranks:
        for _ in ("shm", "tcp"):
            assert ranks.lines() == ["over []", *["3 12 21"] * 3]
            assert ranks.lines([1, 2, 3]) == ["over []"] * 3
        assert ranks.ends() == [0] * 4


COMPRESSED = """
def mean_of(group, values, how, steps):
    got = [group.all_reduce(values, compression=how) for _ in range(steps)]
    return np.mean(got, 0) / group.size

with Group(timeout=30) as group:
    # Beside 127 the step of int8 is 1: 0.3 is nothing, if it is not remembered.
    values = np.full(1000, 0.3, "f4")
    values[0] = 127
    assert abs(group.all_reduce(values)[1] - 0.9) < 1e-6
    np.testing.assert_allclose(mean_of(group, values, "int8", 100), values, atol=0.02)
    # A tenth travels each time: the others would be nothing for ever.
    values = np.linspace(1, 2, 300, dtype="f4")
    got = mean_of(group, values, "topk:0.1", 200)
    np.testing.assert_allclose(got, values, rtol=0.2)
    for how, error in (("bf16", 2**-8), ("f16", 2**-11)):
        got = mean_of(group, values, how, 1)
        np.testing.assert_allclose(got, values, rtol=3 * error)
    try:
        group.all_reduce(np.arange(3), compression="int8")
    except TypeError as error:
        say(error)
    try:
        group.all_reduce(values, compression="zip")
    except ValueError as error:
        say(error)
    group.barrier()
"""


def test_what_compression_leaves_out_is_sent_later():
    with Ranks(3, COMPRESSED) as ranks:
        for line in ranks.lines():
            assert "real floating numbers" in line
        for line in ranks.lines():
            assert "'zip': expected 'bf16', 'f16', 'int8', 'topk'" in line
        assert ranks.ends() == [0] * 3


DISORDER = """
import gc
calls = {
    "small": lambda: group.all_reduce(np.ones(10)),
    "large": lambda: group.all_reduce(np.ones(500_000, np.float32)),
    "dtype": lambda: group.all_reduce(np.ones(10, np.float32)),
    "barrier": lambda: group.barrier(),
    "max": lambda: group.all_reduce(np.ones(10), "max"),
    "root": lambda: group.broadcast(np.ones(10), root=1),
}
for transport, names in (("shm", "aaa"), ("tcp", "aaa"), ("auto", "aab")):
    socket.gethostname = lambda: names[task]
    # A rank that only receives hears nothing: what it waits for comes to light when a
    # second is left, in one of the cases of each transport over sockets.
    group = Group(timeout=10, transport=transport)
    for usual, other in (
        ("small", "large"), ("large", "small"), ("small", "dtype"),
        ("small", "barrier"), ("large", "barrier"), ("small", "max"),
        ("small", "root"), ("barrier", "large"),
    ):
        for odd in range(3):
            first, second = (other, usual) if task == odd else (usual, other)
            try:
                calls[first]()
                calls[second]()
            except zs.InvalidArgumentError as error:
                assert "same calls in the same order" in str(error)
                assert f"rank {odd} (/job:worker/task:{odd} at " in str(error), error
            else:
                say("no error", transport, usual, other, odd)
            group.reform()
    group.barrier()
    group.close()
gc.collect()
say("over")
"""


def test_calls_in_another_order_are_an_error_that_says_so_everywhere():
    with Ranks(3, DISORDER, "tcp") as ranks:
        assert ranks.lines() == ["over"] * 3
        assert ranks.ends() == [0] * 3

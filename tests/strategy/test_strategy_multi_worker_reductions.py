"""Several processes, here as threads: what they reduce and gather outside of replicas,
in a step and at once, with numpy as the oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from in_replicas import context
from ranks import ranks

import zstrat as zs

FLOATS = ["float16", "bfloat16", "float32", "complex64"]
# Of what dtype sums and means are. jax makes float32 of integers.
SUMS = {name: name for name in (*FLOATS, "int8", "int32")} | {"bool": "int32"}
MEANS = {name: name for name in FLOATS}
MEANS |= dict.fromkeys(["int8", "int32", "bool"], "float32")


def slices(rank, rows=2):
    """Rank 0 has rows 0 and 1, of the value 1; rank 1 rows 1 and 2, of the value 2."""
    indices = jnp.arange(rows) + rank
    return zs.IndexedSlices(jnp.full((rows, 3), rank + 1.0), indices, (5, 3))


def wide_slices(rank):
    """Of two replicas, in a container; rows of 64 bits."""
    rows = [np.array([2**33 + 2 * rank + n]) for n in range(2)]
    each = [{"x": zs.IndexedSlices(np.ones((1, 2), np.float32), row)} for row in rows]
    return zs.PerReplica(each)


def in_numpy(found):
    """With IndexedSlices as a pair."""
    if isinstance(found, zs.IndexedSlices):
        return np.asarray(found.values), np.asarray(found.indices)
    return np.asarray(found)


def reduced(op, axis=None):
    return lambda strategy, x: strategy.reduce(op, x, axis)


def gathered(axis):
    return lambda strategy, x: strategy.gather(x, axis)


def of_dtype(name, axis, is_distributed):
    """Ranks have zeros and ones."""

    def make(rank):
        array = jnp.full(2, rank, name)
        return zs.PerReplica([array]) if is_distributed else array

    total = np.ones(2) if axis is None else np.array(2.0)
    mean = total / 2 if axis is None else np.array(0.5)
    # jax adds the elements of bytes as integers.
    sums = "int32" if axis is not None and name == "int8" else SUMS[name]
    return [
        (reduced("sum", axis), make, total.astype(jnp.dtype(sums))),
        (reduced("mean", axis), make, mean.astype(jnp.dtype(MEANS[name]))),
    ]


NARROW = [[200, 100, 3], [100, 100, 4]]
ROWS = [0, 1, 1, 2]
MIRRORED = zs.Mirrored((np.float32(3), np.float32(3)))
# What is done with the value of each rank, and what comes of it in both.
CASES = [
    (reduced("sum"), lambda rank: np.float32(rank + 1), np.float32(3)),
    (reduced("mean", 0), lambda rank: np.arange(4, dtype="f4") + rank, np.float32(2)),
    (
        lambda strategy, x: strategy.reduce("mean", {"a": x, "b": [x * 2]})["b"][0],
        lambda rank: np.float32(rank + 1),
        np.float32(3),
    ),
    (
        gathered(0),
        lambda rank: np.full((2, 2), rank, np.float32),
        np.repeat(np.float32([0, 1]), 4).reshape(4, 2),
    ),
    *[
        case
        for kind in (int, np.array, jnp.int32)
        for case in [
            (
                gathered(kind(1)),
                lambda rank: np.full((1, 2), rank, np.float32),
                np.float32([[0, 0, 1, 1]]),
            ),
            (
                reduced("sum", kind(1)),
                lambda rank: np.full((1, 2), rank + 1, np.float32),
                np.float32([6]),
            ),
        ]
    ],
    (
        reduced("mean"),
        lambda rank: np.uint8(NARROW[rank]),
        np.array([150, 100, 3.5]),  # does not wrap
    ),
    (reduced("sum"), lambda rank: np.uint8(NARROW[rank]), np.uint8([44, 200, 7])),
    (reduced("sum"), lambda rank: MIRRORED, np.float32(12)),
    (reduced("mean"), lambda rank: MIRRORED, np.float32(3)),
    *[
        (
            reduced(op),
            slices,
            (np.repeat(np.float32([1, 2]) / count, 6).reshape(4, 3), np.int32(ROWS)),
        )
        for op, count in (("sum", 1), ("mean", 2))
    ],
    *[
        case
        for name in SUMS
        for axis in (None, 0)
        for is_distributed in (True, False)
        for case in of_dtype(name, axis, is_distributed)
    ],
]
# The same for what a step cannot: ranks bring different lengths, or 64 bits.
OUTSIDE = [
    (reduced("mean", 0), lambda rank: np.arange(1.0 + 3 * rank), np.float64(6 / 5)),
    (
        gathered(1),
        lambda rank: np.full((1, rank + 1), rank, np.int64),
        np.array([[0, 1, 1]]),
    ),
    (
        reduced("mean"),
        lambda rank: slices(rank, rows=2 * rank),
        (np.ones((2, 3), np.float32), np.int32([1, 2])),
    ),
    (
        lambda strategy, x: strategy.reduce("mean", x)["x"],
        wide_slices,
        (np.full((4, 2), 0.25, np.float32), 2**33 + np.arange(4)),
    ),
    *[
        (reduced(op), lambda rank, d=dtype: np.full(2, rank, d), np.ones(2, dtype) / n)
        for dtype in (np.float16, np.float32, np.float64)
        for op, n in (("sum", dtype(1)), ("mean", dtype(2)))
    ],
    (reduced("sum"), lambda rank: np.full(2, rank), np.ones(2, int)),
    (reduced("mean"), lambda rank: np.full(2, rank), np.ones(2) / 2),
]


@pytest.mark.parametrize("way", ["in a step", "by itself", "by itself alone"])
def test_what_ranks_reduce_and_gather(way):
    cases = OUTSIDE if way.endswith("alone") else CASES

    def program(strategy, rank):
        def together(given):
            pairs = zip(cases, given, strict=True)
            return [do(strategy, value) for (do, _, _), value in pairs]

        given = [make(rank) for _, make, _ in cases]
        found = (zs.function(together) if way == "in a step" else together)(given)
        return [in_numpy(each) for each in found]

    for found in ranks(2, program):
        for number, (each, (*_, wanted)) in enumerate(zip(found, cases, strict=True)):
            jax.tree.map(
                lambda one, other, n=number: require_equal(one, other, f"case {n}"),
                each,
                wanted,
            )


def require_equal(found, expected, where):
    if expected.dtype != np.float64 or found.dtype.kind != "f":
        assert found.dtype == expected.dtype, where
    assert found.shape == expected.shape, where
    wide = [np.asarray(x).astype(complex) for x in (found, expected)]
    np.testing.assert_allclose(*wide, rtol=1e-6, err_msg=where)


def test_slices_keep_their_shape_and_go_in_one_collective():
    def program(strategy, rank):
        total = strategy.reduce("sum", slices(rank))
        assert total.dense_shape == (5, 3)
        calls = strategy._team().channel.collective.board.calls
        before = len(calls)
        strategy.reduce("sum", [slices(rank), slices(rank)], None)
        return total.to_dense(), calls[before:]

    (dense, calls), _ = ranks(2, program)
    np.testing.assert_array_equal(dense[:, 0], [1, 3, 2, 0, 0])
    assert [(what, len(kinds)) for what, kinds in calls] == [("gather", 4)]


def test_gradients_of_replicas():
    """As a replica function returns them, in a step and at once."""
    table = np.arange(8.0, dtype=np.float32).reshape(4, 2)

    def program(strategy, rank):
        def rows(ids):
            def mine(ids):
                return zs.IndexedSlices(2 * jnp.asarray(table)[ids], ids, (4, 2))

            return strategy.reduce("sum", strategy.run(mine, (ids,)), None).to_dense()

        ids = jnp.array([rank, 3])
        return jax.tree.map(np.asarray, [rows(ids), zs.function(rows)(ids)])

    expected = 2 * table * np.array([[1], [1], [0], [2]])
    for found in ranks(2, program):
        for each in found:
            np.testing.assert_array_equal(each, expected)


def gathered_in_replicas(strategy, rank, axis):
    """Rank n has n + 1 rows, or columns, of its number."""
    mine = jnp.full((rank + 1, 2) if axis == 0 else (2, rank + 1), rank)
    return strategy.run(lambda: context().all_gather(mine, axis))


@pytest.mark.parametrize(
    ("axis", "expected"), [(0, [[0, 0], [1, 1], [1, 1]]), (1, [[0, 1, 1]] * 2)]
)
def test_replicas_give_different_lengths_outside_of_steps(axis, expected):
    for found in ranks(2, lambda *my: gathered_in_replicas(*my, axis)):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("what", [0, 1, "slices"])
def test_a_step_has_one_length_for_all_processes(what):
    def program(strategy, rank):
        if what == "slices":
            step = zs.function(lambda mine: strategy.reduce("sum", mine))
            return step(slices(rank, rows=rank + 1))
        return zs.function(lambda: gathered_in_replicas(strategy, rank, what))()

    with pytest.raises(ValueError, match=r"zs\.RaggedIds"):
        ranks(2, program)


def test_what_cannot_be_done_is_refused_before_another_is_waited_for():
    def program(strategy, rank):
        mine = slices(rank)
        mixed = zs.PerReplica((mine, jnp.ones((5, 3))))
        refused = [
            (gathered(0.5), np.ones(2), TypeError, "axis must be an integer"),
            (reduced("sum", 0), mine, ValueError, "axis=None"),
            (reduced("sum"), mixed, ValueError, "IndexedSlices"),
            *[
                (gathered(0), value, NotImplementedError, "IndexedSlices")
                for value in (mine, zs.PerReplica((mine, mine)), {"a": mine})
            ],
        ]
        for do, value, error, words in refused:
            with pytest.raises(error, match=words):
                do(strategy, value)

    ranks(2, program)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("aggregation", ["SUM", "MEAN", "ONLY_FIRST_REPLICA"])
def test_a_variable_with_a_value_in_each_process_is_reduced_once(compiled, aggregation):
    def program(strategy, rank):
        with strategy.scope():
            v = zs.Variable(
                np.float32([0]),
                aggregation=zs.VariableAggregation[aggregation],
                synchronization=zs.VariableSynchronization.ON_READ,
            )
        strategy.run(lambda: v.assign_add(jnp.float32([rank + 1])))
        (mine,) = strategy.experimental_local_results(v)

        def together():
            return (
                mine.value(),
                strategy.reduce("sum", v),
                strategy.reduce("mean", v),
                strategy.gather(v, 0),
            )

        found = (zs.function(together) if compiled else together)()
        mine.assign_add([5.0])
        again = strategy.gather(v, 0)
        return [np.asarray(each).tolist() for each in (*found, mine.value(), again)]

    assert ranks(2, program) == [
        [[n], [3.0], [1.5], [1.0, 2.0], [n + 5], [6.0, 7.0]] for n in (1.0, 2.0)
    ]


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("kind", [zs.OneDeviceStrategy, zs.MirroredStrategy])
def test_one_replica_has_the_same_dtypes(kind, compiled):
    strategy = kind("CPU:0" if kind is zs.OneDeviceStrategy else ["CPU:0"])
    cases = [(op, name) for name in SUMS for op in ("sum", "mean")]

    def all_of():
        return [strategy.reduce(op, jnp.array([1, 0], name)) for op, name in cases]

    found = (zs.function(all_of) if compiled else all_of)()
    for (op, name), value in zip(cases, found, strict=True):
        assert isinstance(value, jax.Array)
        assert value.dtype.name == (SUMS if op == "sum" else MEANS)[name]
        assert np.asarray(value).astype(complex).tolist() == [1, 0]
    assert strategy.reduce("mean", np.zeros(2, np.int32)).dtype == np.float64
    assert strategy.reduce("sum", np.zeros(2, np.int32)).dtype == np.int32
    assert strategy.reduce("mean", 3) == 3

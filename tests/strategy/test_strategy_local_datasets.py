"""Distributed datasets of the local strategies: their elements, absent components, and
their positions in checkpoints."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from in_replicas import values
from ranks import ranks

import zstrat as zs
from zstrat.data import Dataset
from zstrat.experimental import CentralStorageStrategy

R = 4


FOUR = [f"CPU:{n}" for n in range(R)]


X = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)


Y = np.random.default_rng(1).normal(size=24).astype(np.float32)


def devices_of(element):
    return [next(iter(shard.data.devices())) for shard in shards(element)]


def shards(element):
    return sorted(element.whole.addressable_shards, key=lambda shard: shard.index)


def test_a_batch_that_splits_is_one_array_over_the_devices():
    strategy = zs.MirroredStrategy(FOUR)
    data = {"x": X, "y": Y}
    dataset = Dataset.from_tensor_slices(data).batch(8)
    found = list(strategy.experimental_distribute_dataset(dataset))
    assert len(found) == 3
    for number, element in enumerate(found):
        mine = slice(8 * number, 8 * number + 8)
        for name in data:
            np.testing.assert_array_equal(element[name].whole, data[name][mine])
            assert devices_of(element[name]) == jax.local_devices()[:R]
        assert [part.shape for part in element["x"].values] == [(2, 3)] * R


def test_the_last_batch_comes_in_parts():
    strategy = zs.MirroredStrategy(FOUR)
    dataset = Dataset.from_tensor_slices((X[:9], Y[:9])).batch(8)
    *_, (x, y) = strategy.experimental_distribute_dataset(dataset)
    assert [part.shape for part in x.values] == [(1, 3), (0, 3), (0, 3), (0, 3)]
    np.testing.assert_array_equal(y.values[0], Y[8:9])
    spec = strategy.experimental_distribute_dataset(dataset).element_spec
    assert [each.shape for each in spec[0].values] == [(2, 3)] * R


def test_the_spec_has_the_dtypes_that_elements_have():
    strategy = zs.MirroredStrategy(FOUR)
    data = {"n": np.arange(8), "x": np.ones((8, 2), np.float16)}
    distributed = strategy.experimental_distribute_dataset(
        Dataset.from_tensor_slices(data).batch(8)
    )
    spec = distributed.element_spec
    element = next(iter(distributed))
    assert spec["n"].values[0].dtype == np.int32  # as jax keeps int64
    for name in data:
        for one, part in zip(spec[name].values, element[name].values, strict=True):
            assert (one.dtype, one.shape) == (part.dtype, part.shape)


def test_one_input_function_for_each_replica():
    strategy = zs.MirroredStrategy(FOUR)
    options = zs.InputOptions(
        experimental_replication_mode=zs.InputReplicationMode.PER_REPLICA,
        experimental_fetch_to_device=False,
        experimental_place_dataset_on_device=True,
    )

    def dataset_fn(context):
        number = context.input_pipeline_id
        assert (context.num_input_pipelines, context.num_replicas_in_sync) == (R, R)
        return Dataset.range(10 * number, 10 * number + 2).batch(1)

    made = strategy.distribute_datasets_from_function(dataset_fn, options)
    assert [values(x) for x in made] == [
        [[0], [10], [20], [30]],
        [[1], [11], [21], [31]],
    ]


@pytest.mark.parametrize(
    "make",
    [
        lambda: zs.OneDeviceStrategy("CPU:1"),
        lambda: zs.CentralStorageStrategy(["CPU:0", "CPU:2"], "CPU:1"),
    ],
)
def test_other_strategies_put_elements_on_their_devices(make):
    strategy = make()
    options = zs.InputOptions(
        experimental_replication_mode=zs.InputReplicationMode.PER_REPLICA
    )
    with pytest.raises(NotImplementedError, match="PER_REPLICA"):
        strategy.distribute_datasets_from_function(lambda _: [X], options)
    (element,) = strategy.experimental_distribute_dataset(
        Dataset.from_tensor_slices(X).batch(24)
    )
    parts = strategy.experimental_local_results(element)
    np.testing.assert_array_equal(np.concatenate(parts), X)
    wanted = [1] if len(parts) == 1 else [0, 2]
    assert [next(iter(part.devices())).id for part in parts] == wanted
    sums = strategy.run(jnp.sum, args=(element,))
    total = strategy.reduce("sum", sums, None)
    np.testing.assert_allclose(total, X.sum(), rtol=1e-4)


def test_elements_may_stay_on_the_host():
    strategy = zs.MirroredStrategy(FOUR)
    options = zs.InputOptions(experimental_fetch_to_device=False)
    (element,) = strategy.experimental_distribute_dataset(
        Dataset.from_tensor_slices(X).batch(24), options
    )
    assert element.whole is None
    assert all(isinstance(part, np.ndarray) for part in element.values)


@pytest.mark.parametrize("devices", [1, 4])
def test_bytes_may_come_in_the_order_of_another_machine(devices):
    """As files have them; jax takes those of this machine alone."""
    strategy = zs.MirroredStrategy(jax.devices()[:devices])
    given = np.arange(8, dtype=">f4"), np.arange(8, dtype=">i8")
    whole = Dataset.from_tensor_slices(given).batch(8)
    parts = whole.unbatch().batch(3)  # a replica's rows are of two of them
    for dataset in (whole, parts, [given]):
        found = [
            strategy.reduce(
                "sum",
                strategy.run(lambda x: (x[0].sum(), x[1].sum()), (batch,)),
                axis=None,
            )
            for batch in strategy.experimental_distribute_dataset(dataset)
        ]
        assert sum(float(x) for x, _ in found) == sum(range(8))
        assert sum(int(y) for _, y in found) == sum(range(8))


DEVICES = ["CPU:0", "CPU:1"]


@pytest.fixture(params=["mirrored", "central"])
def two(request):
    if request.param == "mirrored":
        return zs.MirroredStrategy(DEVICES)
    return CentralStorageStrategy(DEVICES)


def batches(count, size):
    """The numbers below ``count`` in batches, each beside a None."""
    rows = Dataset.from_generator(lambda: ((np.float32(i), None) for i in range(count)))
    return rows.batch(size)


def parts(strategy, element):
    x, absent = element
    assert absent is None
    values = strategy.experimental_local_results(x)
    return [np.asarray(value).tolist() for value in values]


def absence(x, absent):
    assert absent is None
    return x.sum()


@pytest.mark.parametrize(
    ("count", "size", "expected"),
    [
        (8, 4, [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]),
        (5, 4, [[[0, 1], [2, 3]], [[4], []]]),
        (3, 3, [[[0, 1], [2]]]),
        (1, 4, [[[0], []]]),
    ],
)
def test_an_absent_component_stays_absent(two, count, size, expected):
    distributed = two.experimental_distribute_dataset(batches(count, size))
    assert [parts(two, element) for element in distributed] == expected
    sums = [two.run(absence, args=element) for element in distributed]
    found = [[float(x) for x in two.experimental_local_results(s)] for s in sums]
    assert found == [[sum(part) for part in step] for step in expected]


def test_elements_of_a_function_may_lack_one(two):
    def dataset_fn(context):
        return [{"x": np.full(2, i, np.float32), "y": None} for i in range(3)]

    found = list(two.distribute_datasets_from_function(dataset_fn))
    assert [element["y"] for element in found] == [None, None]
    values = [two.experimental_local_results(element["x"]) for element in found]
    assert [[np.asarray(v).tolist() for v in step] for step in values] == [
        [[0, 0], [1, 1]],
        [[2, 2], []],
    ]


@pytest.mark.parametrize("count", [8, 3])
def test_its_description_lacks_it_too(two, count):
    distributed = two.experimental_distribute_dataset(batches(count, count))
    described, absent = distributed.element_spec
    assert absent is None
    assert [each.shape for each in described.values] == (
        [(4,), (4,)] if count == 8 else [(2,), (1,)]
    )


def test_replicas_need_the_same_components(two):
    elements = [(np.ones(2), None), (np.ones(2), np.ones(2))]
    distributed = two.distribute_datasets_from_function(lambda context: elements)
    with pytest.raises(ValueError, match="tree_map"):
        next(iter(distributed))


ROWS = 22


def mixed():
    """Its last batch is an uneven one."""
    return Dataset.range(ROWS).shuffle(ROWS).batch(8).repeat(2)


def drawn(strategy, iterator, count=9):
    return [
        [np.asarray(part).tolist() for part in strategy.experimental_local_results(x)]
        for x in itertools.islice(iterator, count)
    ]


@pytest.mark.parametrize(
    "make",
    [
        lambda: zs.MirroredStrategy([f"CPU:{n}" for n in range(3)]),
        lambda: zs.MirroredStrategy(["CPU:0", "CPU:1"]),
        lambda: zs.TPUStrategy(),
        lambda: zs.OneDeviceStrategy("CPU:1"),
        lambda: zs.CentralStorageStrategy(),
    ],
    ids=["mirrored 3", "mirrored 2", "tpu", "one device", "central storage"],
)
@pytest.mark.parametrize("by_function", [False, True])
def test_the_steps_behind_a_restore_are_those_of_one_run(make, by_function, tmp_path):
    strategy = make()

    @zs.function
    def step(total, iterator):
        sums = strategy.run(lambda x: jnp.sum(x), args=(next(iterator),))
        total.assign_add(strategy.reduce("sum", sums, None))

    def training():
        dataset = mixed()
        if strategy.num_replicas_in_sync == 8:  # whose shapes are static
            dataset = Dataset.range(ROWS).shuffle(ROWS).batch(8, drop_remainder=True)
        if by_function:
            made = strategy.distribute_datasets_from_function(lambda _: dataset)
        else:
            made = strategy.experimental_distribute_dataset(dataset)
        with strategy.scope():
            total = zs.Variable(np.int32(0))
        iterator = iter(made)
        return total, iterator, zs.Checkpoint(total=total, iterator=iterator)

    total, iterator, checkpoint = training()
    is_one = by_function and strategy.num_replicas_in_sync == 8
    if not is_one:  # eight elements are one step, and there are two
        step(total, iterator)
    path = checkpoint.save(tmp_path / "a")
    here, rest = int(total.numpy()), drawn(strategy, iterator)
    iterator.close()
    total, iterator, checkpoint = training()
    drawn(strategy, iterator, 1)
    checkpoint.restore(path).assert_consumed()
    assert int(total.numpy()) == here
    assert drawn(strategy, iterator) == rest
    iterator.close()


def test_one_file_serves_all_workers(tmp_path):
    def program(strategy, rank, path=None):
        dataset = Dataset.range(ROWS).shuffle(ROWS, seed=3).batch(4).repeat(2)
        distributed = strategy.experimental_distribute_dataset(dataset)
        iterator = iter(distributed)
        checkpoint = zs.Checkpoint(iterator=iterator)
        if path is None:
            drawn(strategy, iterator, 7)
            path = checkpoint.write(tmp_path / f"of {rank}")
        else:
            checkpoint.read(path).assert_consumed()
        return path, drawn(strategy, iterator, 20), drawn(strategy, distributed, 3)

    (path, *first), (_, *second) = ranks(2, program)
    found = ranks(2, lambda strategy, rank: program(strategy, rank, path))
    assert [each[1:] for each in found] == [tuple(first), tuple(second)]
    assert len(first[0]) == 5

"""Distributed datasets of one process: pieces, ends, options, optionals, errors."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from process_inputs import drawn, inputs, parts_of, values

import zstrat as zs
from zstrat.data import (
    AutoShardPolicy,
    Dataset,
    InputContext,
    Options,
)
from zstrat.errors import OutOfRangeError
from zstrat.program import dump_code, load
from zstrat.strategy import PerReplica, ProcessInputs, Share, per_replica


@pytest.fixture
def two(make_cluster):
    """A strategy of two replicas, as it comes to a worker."""
    strategy = make_cluster(devices=2).strategy
    return load(dump_code(lambda: strategy))()


# the documented example


def test_the_example_of_the_documentation(two):
    global_batch_size = 2
    dataset = zs.data.Dataset.range(4).batch(global_batch_size)
    dist_dataset = two.experimental_distribute_dataset(dataset)
    assert drawn(dist_dataset) == [[[0], [1]], [[2], [3]]]

    @zs.function
    def replica_fn(x):
        return x * 2

    result = [two.run(replica_fn, args=(x,)) for x in dist_dataset]
    assert [values(each) for each in result] == [[[0], [2]], [[4], [6]]]
    assert all(isinstance(each, PerReplica) for each in result)


@pytest.mark.shows("iter(DistributedDataset), next(iterator)")
def test_a_step_draws_what_a_loop_does(two):
    dataset = Dataset.from_tensor_slices({"x": np.arange(8, dtype=np.float32)}).batch(4)
    iterator = iter(two.experimental_distribute_dataset(dataset))

    @zs.function
    def step(iterator):
        both = next(iterator)
        assert isinstance(both["x"], PerReplica)
        found = two.run(lambda batch: jnp.sum(batch["x"]), args=(both,))
        return two.reduce("sum", found, None)

    assert [float(step(iterator)), float(step(iterator))] == [6.0, 22.0]
    with pytest.raises(OutOfRangeError):
        step(iterator)
    assert step.trace_count == 1


# pieces


@given(
    st.lists(st.integers(1, 9), max_size=6),
    st.integers(1, 9),
    st.integers(1, 5),
)
def test_every_row_comes_once_and_in_order(lengths, size, replicas):
    total = sum(lengths)
    x = np.arange(total * 2, dtype=np.float32).reshape(total, 2)
    dataset = Dataset.from_tensor_slices({"x": x, "y": np.arange(total)})
    found = list(inputs(replicas).of_dataset(dataset.batch(size)))
    parts = [part for element in found for part in parts_of(element)]
    np.testing.assert_array_equal(
        np.concatenate([np.zeros((0, 2)), *(part["x"] for part in parts)]), x
    )
    for part in parts:
        assert part["x"].shape == (len(part["y"]), 2)
        assert (part["x"].dtype, part["y"].dtype) == (np.float32, np.int64)
    piece = -(-size // replicas)
    sizes = [max(0, min(size - piece * n, piece)) for n in range(replicas)]
    whole = [len(part["y"]) for part in parts[: total // size * replicas]]
    assert whole == sizes * (total // size)


def test_the_last_batch_leaves_replicas_without_rows():
    dataset = Dataset.from_tensor_slices(np.ones((9, 3), np.int8)).batch(8)
    *_, last = inputs(4).of_dataset(dataset)
    assert [part.shape for part in last.values] == [(1, 3), (0, 3), (0, 3), (0, 3)]
    assert {part.dtype for part in last.values} == {np.dtype(np.int8)}


def test_batches_of_unknown_size_are_cut_one_by_one():
    def batches():
        for size in (4, 1, 5):
            yield {"x": np.arange(size), "pad": np.zeros((size, size))}

    found = list(inputs(3).of_dataset(Dataset.from_generator(batches)))
    assert [[len(p["x"]) for p in parts_of(each)] for each in found] == [
        [2, 2, 0],
        [1, 0, 0],
        [2, 2, 1],
    ]
    assert [p.shape for p in found[0]["pad"].values] == [(2, 4), (2, 4), (0, 4)]


def test_where_shapes_are_static_a_step_without_all_is_none():
    dataset = Dataset.range(9).batch(4)
    assert drawn(inputs(2, static_shapes=True).of_dataset(dataset)) == [
        [[0, 1], [2, 3]],
        [[4, 5], [6, 7]],
    ]
    static = inputs(2, static_shapes=True)
    with pytest.raises(ValueError, match="3 does not split evenly over 2 replicas"):
        static.of_dataset(Dataset.range(9).repeat().batch(3))
    unknown = Dataset.from_generator(lambda: [np.arange(n) for n in (4, 1, 4)])
    with pytest.raises(ValueError, match=r"\b1\b.*drop_remainder=True"):
        drawn(static.of_dataset(unknown))  # the last 4 would be left out
    made = static.of_function(lambda _: dataset)
    assert drawn(made) == [[[0, 1, 2, 3], [4, 5, 6, 7]]]


def test_one_replica_draws_the_elements_as_they_are():
    batches = [np.arange(3), np.float32(1)]
    (first, second) = inputs(1).of_dataset(batches)
    assert first is batches[0]
    assert second is batches[1]


def test_arrays_themselves_are_no_batches():
    x = np.arange(4)
    with pytest.raises(ValueError, match="`batch`"):
        inputs(2).of_dataset((x, x))
    assert drawn(inputs(2).of_dataset(np.arange(8).reshape(4, 2))) == [
        [[0], [1]],
        [[2], [3]],
        [[4], [5]],
        [[6], [7]],
    ]


@pytest.mark.parametrize(
    "element", [np.int32(1), {"x": np.zeros(2), "y": np.zeros(3)}, {}]
)
def test_what_is_no_batch_is_refused_when_it_comes(element):
    distributed = inputs(2).of_dataset(iter([element]))
    with pytest.raises(ValueError, match="`batch`"):
        next(iter(distributed))
    with pytest.raises(ValueError, match="multiple of the 2 workers"):
        ProcessInputs(InputContext(2, 0, 3), 1).of_dataset(Dataset.range(6).batch(3))


def test_elements_of_functions_need_no_rows():
    """TF, too, makes a scalar that lacks zero."""
    made = inputs(2).of_function(lambda _: Dataset.range(3))
    assert drawn(made) == [[0, 1]]
    unknown = inputs(2).of_function(lambda _: Dataset.from_generator(lambda: range(3)))
    assert drawn(unknown) == [[0, 1], [2, 0]]


# shares


def test_a_batch_that_splits_evenly_is_handed_over_whole():
    batch = {"x": np.arange(8.0).reshape(4, 2), "y": np.arange(4)}
    seen = []

    def place(share):
        seen.append(share)
        return per_replica(share)

    list(inputs(2, place=place).of_dataset([batch, batch]))
    assert [share.whole for share in seen] == [batch, batch]
    assert seen[0].whole["x"] is batch["x"]
    for part, rows in zip(seen[0].parts, (slice(0, 2), slice(2, 4)), strict=True):
        np.testing.assert_array_equal(part["x"], batch["x"][rows])
        assert np.shares_memory(part["x"], batch["x"])


def test_what_is_uneven_or_apart_is_handed_over_in_parts():
    seen = []
    here = inputs(2, place=lambda share: seen.append(share) or share)
    list(here.of_dataset([np.arange(5)]))
    assert seen[-1].whole is None
    assert [part.tolist() for part in seen[-1].parts] == [[0, 1, 2], [3, 4]]
    list(here.of_dataset(Dataset.from_generator(lambda: [np.arange(3)] * 2)))
    assert all(share.whole is None for share in seen)
    # Every second piece, so what a worker gets of a batch are no neighbours.
    there = inputs(2, 2, 1, place=lambda share: seen.append(share) or share)
    list(there.of_dataset([np.arange(8)]))
    assert seen[-1].whole is None
    assert [part.tolist() for part in seen[-1].parts] == [[2, 3], [6, 7]]


def test_an_empty_share_looks_like_the_others():
    share = Share((2, 1), {"x": np.ones((3, 2), np.int8)}).emptied()
    assert [part["x"].shape for part in share.parts] == [(0, 2), (0, 2)]
    assert share.parts[0]["x"].dtype == np.int8
    scalars = Share((), apart=(np.float32(3), np.float32(4))).emptied()
    assert values(per_replica(scalars)) == [0.0, 0.0]


@pytest.mark.shows("tf.distribute.InputOptions")
def test_elements_are_placed_unless_options_say_no():
    here = inputs(2, place=lambda share: "placed")
    dataset = Dataset.range(2).batch(2)
    assert list(here.of_dataset(dataset)) == ["placed"]
    keep = zs.InputOptions(experimental_fetch_to_device=False)
    assert drawn(here.of_dataset(dataset, keep)) == [[[0], [1]]]
    assert drawn(here.of_function(lambda _: dataset, keep)) == [[[0, 1], []]]


# functions


@pytest.mark.shows("tf.distribute.InputContext")
def test_a_function_knows_its_pipeline_and_replicas_take_turns():
    contexts = []

    def dataset_fn(context):
        contexts.append(context)
        size = context.get_per_replica_batch_size(8)
        return Dataset.range(10).shard(2, context.input_pipeline_id).batch(size)

    made = inputs(2, 2, 1).of_function(dataset_fn)
    assert drawn(made) == [[[1, 3], [5, 7]], [[9], []]]
    assert contexts == [InputContext(2, 1, 4)]


@pytest.mark.shows("InputReplicationMode")
def test_one_function_for_each_replica():
    contexts = []

    def dataset_fn(context):
        contexts.append((context.num_input_pipelines, context.input_pipeline_id))
        return Dataset.range(3 + context.input_pipeline_id).batch(2)

    options = zs.InputOptions(
        experimental_replication_mode=zs.InputReplicationMode.PER_REPLICA,
        experimental_fetch_to_device=False,
        experimental_place_dataset_on_device=True,
    )
    mirrored = inputs(3, per_replica=True)
    made = mirrored.of_function(dataset_fn, options)
    assert contexts == [(3, 0), (3, 1), (3, 2)]
    assert drawn(made) == [
        [[0, 1], [0, 1], [0, 1]],
        [[2], [2, 3], [2, 3]],
        [[], [], [4]],
    ]
    for refused in (
        lambda: mirrored.of_dataset(Dataset.range(4).batch(2), options),
        lambda: inputs(3).of_function(dataset_fn, options),
    ):
        with pytest.raises(NotImplementedError, match="PER_REPLICA"):
            refused()


def test_what_a_function_must_return():
    with pytest.raises(TypeError, match=r"zs\.data"):
        inputs().of_function(lambda _: 3)
    with pytest.raises(TypeError, match="InputContext"):
        inputs().of_function(Dataset.range(3))
    with pytest.raises(ZeroDivisionError):
        inputs().of_function(lambda _: 1 // 0)


# options


def test_options_are_those_of_tensorflow():
    options = zs.InputOptions()
    assert options.experimental_fetch_to_device is None
    assert options.experimental_place_dataset_on_device is False
    assert options.experimental_per_replica_buffer_size == 1
    mode = options.experimental_replication_mode
    assert mode is zs.InputReplicationMode.PER_WORKER
    assert [m.name for m in zs.InputReplicationMode] == ["PER_WORKER", "PER_REPLICA"]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (
            {"experimental_place_dataset_on_device": True},
            ValueError,
            "`PER_REPLICA`",
        ),
        (
            {
                "experimental_place_dataset_on_device": True,
                "experimental_replication_mode": zs.InputReplicationMode.PER_REPLICA,
                "experimental_fetch_to_device": True,
            },
            ValueError,
            "experimental_fetch_to_device",
        ),
        (
            {
                "experimental_place_dataset_on_device": True,
                "experimental_replication_mode": zs.InputReplicationMode.PER_REPLICA,
            },
            ValueError,
            "experimental_fetch_to_device",
        ),
        ({"experimental_per_replica_buffer_size": 0}, ValueError, r"\b1\b"),
        ({"experimental_replication_mode": "PER_WORKER"}, TypeError, "PER_W"),
    ],
)
def test_options_that_do_not_go_together(options, error, words):
    with pytest.raises(error, match=words):
        zs.InputOptions(**options)


def test_what_is_no_options_is_refused():
    with pytest.raises(TypeError, match=r"zs\.InputOptions"):
        inputs().of_dataset(Dataset.range(2).batch(2), {"fetch": True})


def test_every_iter_is_a_fresh_pass():
    distributed = inputs().of_dataset(Dataset.range(6).shuffle(6, seed=1).batch(2))
    first, second = drawn(distributed), drawn(distributed)
    assert sorted(x for each in first for part in each for x in part) == [*range(6)]
    assert first != second


# iterators


def test_get_next_and_optionals():
    iterator = iter(inputs().of_dataset(Dataset.range(4).batch(2)))
    assert values(iterator.get_next()) == [[0], [1]]
    optional = iterator.get_next_as_optional()
    assert optional.has_value()
    assert values(optional.get_value()) == [[2], [3]]
    nothing = iterator.get_next_as_optional()
    assert not nothing.has_value()
    with pytest.raises(ValueError, match=r"has_value\(\)"):
        nothing.get_value()
    with pytest.raises(OutOfRangeError):
        iterator.get_next()
    with pytest.raises(StopIteration):
        next(iterator)


def test_an_optional_in_a_step_gives_its_value(two):
    iterator = iter(two.experimental_distribute_dataset(Dataset.range(4).batch(4)))

    @zs.function
    def step(iterator):
        return iterator.get_next_as_optional().get_value()

    assert values(step(iterator)) == [[0, 1], [2, 3]]
    with pytest.raises(OutOfRangeError):
        step(iterator)


def test_a_replica_does_not_draw(two):
    iterator = iter(two.experimental_distribute_dataset(Dataset.range(4).batch(2)))
    for draw in (next, lambda it: it.get_next(), lambda it: it.get_next_as_optional()):
        with pytest.raises(ValueError, match="replica_fn"):
            two.run(lambda draw=draw: draw(iterator))
    assert values(next(iterator)) == [[0], [1]]
    for distribute in (
        two.experimental_distribute_dataset,
        two.distribute_datasets_from_function,
    ):
        with pytest.raises(RuntimeError, match="get_replica_context"):
            two.run(lambda method=distribute: method(Dataset.range(2).batch(2)))


def test_a_step_of_a_worker_takes_the_iterator_not_the_dataset(two):
    distributed = two.experimental_distribute_dataset(Dataset.range(4).batch(2))

    @zs.function
    def step():
        return [x for x in distributed]  # noqa: C416

    with pytest.raises(RuntimeError, match=r"range\(n\).*next\(iterator\)"):
        step.plan()


@pytest.mark.shows("tf.distribute.DistributedDataset")
def test_nothing_is_added_to_a_distributed_dataset():
    distributed = inputs().of_dataset(Dataset.range(4).batch(2))
    for name in ("map", "batch", "shuffle", "prefetch", "with_options", "take"):
        with pytest.raises(
            AttributeError, match=f"no more transformations: call {name}"
        ):
            getattr(distributed, name)
    with pytest.raises(AttributeError, match="'colour'"):
        distributed.colour  # noqa: B018
    with pytest.raises(TypeError, match="distributed already"):
        inputs().of_dataset(distributed)
    with pytest.raises(TypeError, match="distributed already"):
        inputs().of_function(lambda _: distributed)


def test_one_worker_shards_nothing():
    for policy in AutoShardPolicy:
        dataset = Dataset.range(4).batch(2).with_options(Options(policy))
        assert drawn(inputs().of_dataset(dataset)) == [[[0], [1]], [[2], [3]]]

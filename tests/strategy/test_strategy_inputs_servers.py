"""Datasets of a parameter-server strategy: a handle here, elements on the workers."""

import numpy as np
import pytest

import zstrat as zs
from zstrat.config import Limits
from zstrat.data import Dataset
from zstrat.program import WorkerContext, dump_code, load, rebuild, worker_context
from zstrat.strategy import PerReplica
from zstrat.wire import BuildResource
from zstrat.worker._resources import Resources


@pytest.fixture
def strategy(make_cluster):
    return make_cluster(devices=2).strategy


def test_what_is_wrong_is_refused_before_a_worker_sees_it(strategy):
    per_replica = zs.InputOptions(
        experimental_replication_mode=zs.InputReplicationMode.PER_REPLICA
    )
    for distribute, source, wrong in (
        (
            strategy.experimental_distribute_dataset,
            [np.ones(2)],
            [(3, r"zs\.data\.Dataset"), (lambda context: [], r"zs\.data\.Dataset")],
        ),
        (
            strategy.distribute_datasets_from_function,
            lambda context: [],
            [(3, "InputContext"), (Dataset.range(4).batch(2), "InputContext")],
        ),
    ):
        with pytest.raises(NotImplementedError, match="PER_REPLICA"):
            distribute(source, per_replica)
        with pytest.raises(TypeError, match=r"zs\.InputOptions"):
            distribute(source, {"prefetch": 2})
        distribute(source, zs.InputOptions())
        for other, words in wrong:
            with pytest.raises(TypeError, match=words):
                distribute(other)


def test_what_is_distributed_is_not_distributed_again(strategy):
    dataset = Dataset.range(4).batch(2)
    other = zs.OneDeviceStrategy("CPU:0").experimental_distribute_dataset(dataset)
    for source in (other, *handles(strategy)):
        with pytest.raises(TypeError, match="distributed already"):
            strategy.experimental_distribute_dataset(source)
    elements = iter([np.ones(2)])
    strategy.experimental_distribute_dataset(elements)
    assert len(list(elements)) == 1  # a generator is not read


@pytest.fixture
def on_a_worker():
    """The context of worker 1 of 3."""
    before = worker_context.set(WorkerContext(1, 3))
    yield
    worker_context.reset(before)


def handles(strategy):
    dataset = Dataset.range(6).batch(4)
    return (
        strategy.experimental_distribute_dataset(dataset),
        strategy.distribute_datasets_from_function(lambda context: dataset),
    )


def values(dataset):
    return [[part.tolist() for part in element.values] for element in dataset]


def test_the_coordinator_has_no_elements(strategy):
    for handle in handles(strategy):
        with pytest.raises(ValueError, match="create_per_worker_dataset"):
            iter(handle)
        with pytest.raises(ValueError, match="create_per_worker_dataset"):
            handle.element_spec  # noqa: B018
        with pytest.raises(AttributeError, match=r"map\(\)"):
            handle.map  # noqa: B018


@pytest.mark.usefixtures("on_a_worker")
def test_a_worker_builds_what_travels_to_it_or_what_it_distributes(strategy):
    def dataset_fn():
        return strategy.distribute_datasets_from_function(
            lambda context: Dataset.range(4).batch(
                context.get_per_replica_batch_size(2)
            )
        )

    def whole_fn():
        return strategy.experimental_distribute_dataset(Dataset.range(4).batch(2))

    for make in (whole_fn, dataset_fn):
        assert values(load(dump_code(make))()) == [[[0], [1]], [[2], [3]]]
    of_batches, of_elements = (load(dump_code(each)) for each in handles(strategy))
    assert values(of_batches) == [[[0, 1], [2, 3]], [[4], [5]]]
    assert values(of_elements) == [[[0, 1, 2, 3], [4, 5]]]


@pytest.mark.shows("ParameterServerStrategy.distribute_datasets_from_function")
@pytest.mark.usefixtures("on_a_worker")
def test_functions_know_their_worker(strategy):
    def dataset_fn():
        return strategy.distribute_datasets_from_function(
            lambda context: Dataset.from_tensor_slices(
                np.array(
                    [
                        context.num_input_pipelines,
                        context.input_pipeline_id,
                        context.num_replicas_in_sync,
                        0,  # for the other replica of the last step
                    ]
                )
            )
        )

    (first, second) = load(dump_code(dataset_fn))()
    assert [int(x) for x in (*first.values, second.values[0])] == [3, 1, 2]


@pytest.mark.usefixtures("on_a_worker")
def test_a_worker_tells_the_layout_of_what_replicas_get(strategy):
    def dataset_fn():
        data = {"x": np.zeros((4, 3), np.float32)}
        dataset = Dataset.from_tensor_slices(data).batch(4)
        return strategy.experimental_distribute_dataset(dataset)

    resources = Resources("worker:1", load, lambda: None, Limits())
    resources.put_code(b"maker", dump_code(dataset_fn))
    layout = resources.build(BuildResource(1, 7, "iterator", b"maker", 0))
    assert layout.dtypes == ["float32"] * 2
    assert layout.shapes == [[2, 3]] * 2
    described = rebuild(layout.structure, ["first", "second"])
    assert isinstance(described["x"], PerReplica)
    assert described["x"].values == ("first", "second")
    resources.close()


@pytest.mark.usefixtures("on_a_worker")
def test_a_worker_goes_to_the_place_of_what_replicas_get(strategy):
    def dataset_fn():
        rows = Dataset.range(24).shuffle(24)
        return strategy.experimental_distribute_dataset(rows.batch(4))

    def built(state=""):
        order = BuildResource(1, 7, "iterator", b"maker", 0, state=state)
        resources.build(order)
        return resources._resource(7)

    resources = Resources("worker:1", load, lambda: None, Limits())
    resources.put_code(b"maker", dump_code(dataset_fn))
    iterator = built()
    before = values([next(iterator) for _ in range(2)])
    state = resources.state(7)
    expected = values(iterator)
    assert sorted(np.ravel(before + expected)) == list(range(24))
    assert values(built(state)) == expected
    assert resources.state(7) != state
    resources.close()

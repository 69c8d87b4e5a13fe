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


def test_one_function_for_each_replica_is_refused_at_once(strategy):
    options = zs.InputOptions(
        experimental_replication_mode=zs.InputReplicationMode.PER_REPLICA
    )
    with pytest.raises(NotImplementedError, match="PER_REPLICA"):
        strategy.experimental_distribute_dataset(Dataset.range(2).batch(2), options)
    with pytest.raises(NotImplementedError, match="PER_REPLICA"):
        strategy.distribute_datasets_from_function(lambda _: [], options)


@pytest.mark.usefixtures("on_a_worker")
def test_a_worker_builds_what_travels_to_it(strategy):
    of_batches, of_elements = (load(dump_code(each)) for each in handles(strategy))
    assert values(of_batches) == [[[0, 1], [2, 3]], [[4], [5]]]
    assert values(of_elements) == [[[0, 1, 2, 3], [4, 5]]]


@pytest.mark.usefixtures("on_a_worker")
def test_a_dataset_function_distributes_on_its_worker(strategy):
    contexts = []

    def dataset_fn():
        def inner(context):
            contexts.append(context)
            return Dataset.range(4).batch(context.get_per_replica_batch_size(2))

        return strategy.distribute_datasets_from_function(inner)

    def whole_fn():
        return strategy.experimental_distribute_dataset(Dataset.range(4).batch(2))

    assert values(load(dump_code(whole_fn))()) == [[[0], [1]], [[2], [3]]]
    made = load(dump_code(dataset_fn))()
    assert values(made) == [[[0], [1]], [[2], [3]]]


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

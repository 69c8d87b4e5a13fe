"""Elements that are no data, or have no rows to cut, do not reach replica functions."""

import numpy as np
import pytest

import zstrat as zs
from zstrat.data import Dataset, InputContext
from zstrat.strategy import ProcessInputs

SLICES = zs.IndexedSlices(np.ones((2, 3), np.float32), np.array([0, 5]), (8, 3))
HOST = zs.InputOptions(experimental_fetch_to_device=False)


class Thing:
    pass


def generated(element):
    return Dataset.from_generator(lambda: iter([element] * 2))


def function_of(dataset):
    return lambda context: dataset


@pytest.fixture
def one():
    return zs.OneDeviceStrategy("CPU:0")


@pytest.mark.parametrize("options", [None, HOST])
@pytest.mark.parametrize("element", [SLICES, Thing(), np.array([Thing()], object)])
def test_objects_of_a_generator(one, element, options):
    dataset = generated((np.ones(2), element))
    for distributed in (
        one.experimental_distribute_dataset(dataset, options),
        one.distribute_datasets_from_function(function_of(dataset), options),
    ):
        with pytest.raises(TypeError, match=r"component \[1\] is .*(Sli|Thi)"):
            next(iter(distributed))


@pytest.mark.parametrize("options", [None, HOST])
def test_objects_of_others(one, options):
    batches = [{"x": np.ones(2), "thing": Thing()}]
    for distributed in (
        one.experimental_distribute_dataset(batches, options),
        one.distribute_datasets_from_function(function_of(batches), options),
        one.distribute_datasets_from_function(lambda _: iter(batches), options),
    ):
        with pytest.raises(TypeError, match=r"\['thing'\]"):
            next(iter(distributed))


def test_slices_of_others_reach_the_function_as_they_are(one):
    """jax knows the class: a replica gets all of it."""
    distributed = one.distribute_datasets_from_function(function_of([SLICES]))
    (element,) = distributed
    want = np.zeros((8, 3), np.float32)
    want[[0, 5]] = 1
    np.testing.assert_array_equal(one.run(lambda x: x.to_dense(), (element,)), want)


def inputs(**kwargs):
    return ProcessInputs(InputContext(num_replicas_in_sync=2), 2, **kwargs)


def test_slices_are_not_cut_for_replicas():
    distributed = inputs().of_dataset([{"x": SLICES}])
    with pytest.raises(ValueError, match=r"\['x'\].*IndexedSlices"):
        next(iter(distributed))


def test_each_replica_may_have_its_own():
    other = zs.IndexedSlices(2 * SLICES.values, SLICES.indices, (8, 3))
    distributed = inputs().of_function(function_of([SLICES, other]))
    (element,) = distributed
    found = [part.sum() for part in element.values.values]
    assert found == [6, 12]


def test_where_shapes_are_static_they_are_not_put_on_devices():
    """As TPUStrategy's, whose replicas run one program."""
    static = inputs(static_shapes=True)
    refused = static.of_function(function_of([SLICES, SLICES]))
    with pytest.raises(ValueError, match="experimental_fetch_to_device=False"):
        next(iter(refused))
    (element,) = static.of_function(function_of([SLICES, SLICES]), HOST)
    assert [part.shape for part in element.values.values] == [(2, 3), (2, 3)]


def test_one_replica_of_static_shapes_refuses_them_too():
    alone = ProcessInputs(InputContext(), 1, static_shapes=True)
    for distributed in (
        alone.of_dataset([SLICES]),
        alone.of_function(function_of([SLICES])),
    ):
        with pytest.raises(ValueError, match="experimental_fetch_to_device=False"):
            next(iter(distributed))

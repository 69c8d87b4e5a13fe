"""What 1.12's strategy refuses, on one device."""

import numpy as np
import pytest

from zstrat.contrib import distribute


@pytest.fixture
def distribution():
    return distribute.ParameterServerStrategy()


def test_a_value_is_wanted_somewhere(distribution):
    with distribution.scope():
        with pytest.raises(ValueError, match="destinations can not be empty: name a"):
            distribution.broadcast(np.ones(2), [])
        here = distribution.worker_devices
        np.testing.assert_array_equal(distribution.broadcast(np.ones(2), here), [1, 1])


class Thing:
    pass


def test_towers_get_no_objects(distribution):
    for source in ([{"x": Thing()}], iter([{"x": Thing()}])):
        iterator = iter(distribution.distribute_dataset(lambda made=source: made))
        with pytest.raises(TypeError, match=r"\['x'\]"):
            next(iterator)


def test_a_tower_is_asked_for_by_itself(distribution):
    outside = distribute.get_tower_context()

    def fn():
        distribute.require_tower_context(distribute.get_tower_context())
        with pytest.raises(RuntimeError, match="TowerContext"):
            distribute.require_tower_context(outside)
        return 1

    with distribution.scope():
        assert distribution.unwrap(distribution.call_for_each_tower(fn)) == [1]

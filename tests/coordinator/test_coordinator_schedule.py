"""Scheduling through the whole shell, on fakes."""

import numpy as np
import pytest

import zstrat.program as zs
from zstrat.coordinator import ClusterCoordinator


@zs.function
def add(a, b):
    return {"sum": a + b, "parts": (a, [b])}


def test_a_result_comes_back_in_its_structure(world):
    coordinator = world.coordinator()
    value = coordinator.schedule(add, args=(np.float32(1.5), np.arange(3.0)))
    result = value.fetch()
    np.testing.assert_array_equal(result["sum"], [1.5, 2.5, 3.5])
    assert result["parts"][0] == np.float32(1.5)
    assert not result["sum"].flags.writeable
    coordinator.join()
    assert coordinator.done()

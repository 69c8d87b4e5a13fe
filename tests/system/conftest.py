"""A cluster for all tests of a module that break nothing for good."""

import pytest
from system_worlds import connected

import zstrat as zs


@pytest.fixture(scope="module")
def world():
    with zs.LocalCluster(num_ps=2, num_workers=2) as local, connected(local) as made:
        yield made

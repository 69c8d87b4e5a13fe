"""A cluster for all tests that break nothing for good, and what is connected to it."""

import pytest
from system_worlds import connected

import zstrat as zs


@pytest.fixture(scope="session")
def daemons():
    """For one program after another: no test kills or freezes one of them."""
    with zs.LocalCluster(num_ps=2, num_workers=2) as local:
        yield local


@pytest.fixture(scope="module")
def world(daemons):
    with connected(daemons) as made:
        yield made

"""What is connected to the cluster of all tests that break nothing for good, and the
cluster of a file whose tests do: each finds all its tasks running."""

import pytest
from system_worlds import all_running, connected

from zstrat.testing import leak_check


@pytest.fixture(scope="module")
def world(daemons):
    with connected(daemons) as made:
        yield made


@pytest.fixture
def local(cluster):
    return all_running(cluster)


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    """As everywhere, but that what is started again for a test may stay."""
    if {"cluster", "local"} <= {*request.fixturenames}:
        request.getfixturevalue("local")
    with leak_check():
        yield

"""What is connected to the cluster of all tests that break nothing for good."""

import pytest
from system_worlds import connected


@pytest.fixture(scope="module")
def world(daemons):
    with connected(daemons) as made:
        yield made

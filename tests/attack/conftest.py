"""How hard the attacks are: a few rounds with the suite, all by `make attack`."""

import pytest
from attack_tasks import IS_HARD, target

from zstrat.transport import generate_keys
from zstrat.wire import Job


@pytest.fixture(scope="session")
def rounds():
    """Of an attack that is made again and again: a function of the short number."""
    return lambda few, many: many if IS_HARD else few


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("attack")


@pytest.fixture(scope="module")
def keys(folder):
    generate_keys(folder / "keys")
    return folder / "keys"


@pytest.fixture
def ps(folder):
    with target(Job.PS, folder) as one:
        yield one


@pytest.fixture
def worker(folder):
    with target(Job.WORKER, folder) as one:
        yield one

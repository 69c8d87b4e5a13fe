"""Clusters of fakes, each closed at the end of its test."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from coordinator_fakes import World


@pytest.fixture
def world(request):
    world = World(**getattr(request, "param", {}))
    yield world
    world.close()


@pytest.fixture
def coordinator(world):
    return world.coordinator()


@pytest.fixture
def make_world():
    worlds = []

    def make(**sizes):
        worlds.append(World(**sizes))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


@pytest.fixture
def in_thread():
    """Calls a function in another thread, and returns the future of its end."""
    threads = ThreadPoolExecutor(8)
    yield threads.submit
    threads.shutdown(wait=False)  # the end of the world ends them

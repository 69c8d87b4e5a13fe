"""Keras computes with jax in these tests, and is imported before a scope is entered."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import pytest

import zstrat as zs


@pytest.fixture(scope="module")
def servers():
    """A strategy of one server and one worker, which cannot import Keras."""
    from keras_fits import cluster_without_keras  # most processes need none

    with cluster_without_keras(num_workers=1) as cluster:
        strategy = zs.ParameterServerStrategy(cluster.resolver)
        yield strategy
        strategy.close()

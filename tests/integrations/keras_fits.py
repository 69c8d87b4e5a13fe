"""Models of Keras that are trained with a strategy and without, and compared."""

import contextlib

import keras
import numpy as np
import pytest

import zstrat as zs

layers = keras.layers

QUIET = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept a copy:DeprecationWarning",
    "ignore:Explicitly requested dtype:UserWarning",  # of Keras, from jax 0.12 on
)

X = np.random.default_rng(0).normal(size=(60, 5)).astype("float32")
Y = (X[:, :3].sum(1) > 0).astype("int64")
DATA = {"x": X, "y": Y}
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def dense(**options):
    """A model of two layers; ``options`` are those of compile."""
    model = keras.Sequential(
        [
            keras.Input((5,)),
            layers.Dense(8, activation="relu", kernel_regularizer="l2"),
            layers.Dense(2),
        ]
    )
    model.compile(
        **{"optimizer": "adam", "loss": LOSS, "metrics": ["accuracy"], **options}
    )
    return model


def fitted(make, strategy=None, **arguments):
    """Trains a model; returns it and its history. Arguments that are callable are
    called first."""
    keras.utils.set_random_seed(1)
    if strategy is None:
        model = make()
    else:
        with strategy.scope():
            model = make()
    keras.utils.set_random_seed(2)
    given = {"verbose": 0, "epochs": 2, "batch_size": 16, **arguments}
    made = {name: each() if callable(each) else each for name, each in given.items()}
    return model, model.fit(**made).history


def require_equal(model, plain, history, expected):
    """Compares histories, weights and the state of optimizers."""
    assert list(history) == list(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5, atol=1e-7)
    pairs = zip(
        [*model.variables, *model.optimizer.variables],
        [*plain.variables, *plain.optimizer.variables],
        strict=True,
    )
    for mine, its in pairs:
        np.testing.assert_allclose(
            np.asarray(mine.value), np.asarray(its.value), rtol=1e-4, atol=1e-6
        )


def compared(make, strategy=None, **arguments):
    """Trains with a strategy and without; returns both models."""
    strategy, given = strategy or zs.OneDeviceStrategy("CPU:0"), DATA | arguments
    plain, expected = fitted(make, **given)
    model, history = fitted(make, strategy, **given)
    require_equal(model, plain, history, expected)
    return model, plain


@contextlib.contextmanager
def cluster_without_keras(**size):
    """Its tasks cannot import Keras."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_BACKEND", "none of them")
        cluster = zs.LocalCluster(num_ps=1, **size)
    with cluster:
        yield cluster

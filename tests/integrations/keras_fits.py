"""Models of Keras that are trained with a strategy and without, and compared."""

import keras
import numpy as np


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

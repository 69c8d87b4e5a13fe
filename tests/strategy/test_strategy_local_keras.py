"""Replicas of a mirrored strategy train a model of Keras as Keras does alone."""

import os

import numpy as np
import pytest

import zstrat as zs

os.environ["KERAS_BACKEND"] = "jax"
keras = pytest.importorskip("keras")

X = np.random.default_rng(0).normal(size=(29, 4)).astype("float32")
Y = (X[:, :2].sum(1) > 0).astype("int32")


class Adds(keras.layers.Layer):
    """Adds to the loss what a function makes of its inputs, which are zero at first."""

    def __init__(self, loss):
        super().__init__()
        self.loss, self.inner = loss, keras.layers.Dense(2, kernel_initializer="zeros")

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        self.add_loss(self.loss(self.inner(x)))
        return x


def make(reduction="sum_over_batch_size", loss=None, added=None):
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(6, activation="relu", kernel_regularizer="l2"),
            keras.layers.Dense(2),
        ]
    )
    if added is not None:
        model.add(Adds(added))
    if loss is None:
        loss = keras.losses.SparseCategoricalCrossentropy(True, reduction=reduction)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


def test_batches_that_cannot_be_divided_evenly():
    """29 rows are batches of 8, 8, 8 and 5, of which two replicas get 3 and 2."""
    keras.utils.set_random_seed(1)
    plain = make()
    with zs.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = make()
    model.set_weights([np.asarray(variable.value) for variable in plain.variables])
    histories = []
    for each in (plain, model):
        keras.utils.set_random_seed(2)
        trained = each.fit(X, Y, batch_size=8, epochs=2, verbose=0)
        histories.append(trained.history)
    assert list(histories[1]) == ["accuracy", "loss"]
    for name, values in histories[0].items():
        np.testing.assert_allclose(histories[1][name], values, rtol=1e-5)
    expected, found = (each.predict(X, verbose=0) for each in (plain, model))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reduction", ["sum", "mean_with_sample_weight"])
def test_a_loss_that_is_no_mean_over_rows_is_refused(reduction):
    """Replicas count by their rows, so its gradient would be another one."""
    two = zs.MirroredStrategy(["CPU:0", "CPU:1"])
    with two.scope(), pytest.raises(NotImplementedError, match=reduction):
        make(reduction)
    keras.utils.set_random_seed(1)
    expected = make(reduction).fit(X, Y, verbose=0, shuffle=False).history
    keras.utils.set_random_seed(1)
    with zs.MirroredStrategy(["CPU:0"]).scope():
        model = make(reduction)
    history = model.fit(X, Y, verbose=0, shuffle=False).history
    np.testing.assert_allclose(history["loss"], expected["loss"], rtol=1e-5)


@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        ({"added": lambda x: keras.ops.sum(keras.ops.square(x - 1))}, "add_loss"),
        ({"added": lambda x: keras.ops.square(x - 1)}, "add_loss"),  # its sum is added
        ({"loss": lambda y, x: keras.ops.sum(keras.ops.square(x))}, "keras.ops.mean"),
        ({"loss": keras.losses.Circle()}, "one replica"),  # it compares rows
        ({"added": lambda x: keras.ops.mean(keras.ops.square(x - 1))}, None),
        ({"reduction": "mean"}, None),
    ],
)
def test_a_loss_is_a_mean_over_rows_or_refused(option, remedy):
    keras.utils.set_random_seed(1)
    expected = make(**option).fit(X, Y, batch_size=8, verbose=0, shuffle=False).history
    keras.utils.set_random_seed(1)
    with zs.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = make(**option)
    if remedy is not None:
        with pytest.raises(NotImplementedError, match=remedy):
            model.fit(X, Y, batch_size=8, verbose=0, shuffle=False)
        return
    history = model.fit(X, Y, batch_size=8, verbose=0, shuffle=False).history
    np.testing.assert_allclose(history["loss"], expected["loss"], rtol=1e-5)


class AsTold(keras.layers.Layer):
    """Draws numbers, in evaluation too, or adds a sum to the loss of training alone."""

    def __init__(self, *, draws):
        super().__init__()
        self.draws, self.seeds = draws, keras.random.SeedGenerator(3)

    def call(self, x, training=False):
        if self.draws:
            return x + 3 * keras.random.normal(keras.ops.shape(x), seed=self.seeds)
        if training:
            self.add_loss(keras.ops.sum(keras.ops.square(x)))
        return x


@pytest.mark.parametrize("draws", [True, False], ids=["draws", "trains"])
def test_a_loss_that_draws_is_trained_and_a_sum_of_training_refused(draws):
    keras.utils.set_random_seed(1)
    with zs.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = keras.Sequential([AsTold(draws=draws), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    given = {"x": X[:8], "y": X[:8, :1], "batch_size": 8, "verbose": 0}
    model.evaluate(**given)
    if draws:
        assert np.isfinite(model.fit(**given).history["loss"]).all()
        return
    with pytest.raises(NotImplementedError, match="add_loss"):
        model.fit(**given)


def test_a_loss_with_a_mask_is_refused():
    """It is a mean over what the mask lets through, of which replicas have different
    numbers."""

    def make():
        model = keras.Sequential(
            [
                keras.Input((4,), dtype="int32"),
                keras.layers.Embedding(3, 2, mask_zero=True),
                keras.layers.Dense(1),
            ]
        )
        model.compile("sgd", "mse")
        return model

    given = np.tril(np.ones((8, 4), "int32")), np.ones((8, 4, 1), "float32")
    with zs.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = make()
    with pytest.raises(NotImplementedError, match="sample_weight"):
        model.fit(*given, verbose=0)
    with zs.MirroredStrategy(["CPU:0"]).scope():
        model = make()
    assert model.fit(*given, verbose=0).history["loss"][0] > 0

"""Replicas of a mirrored strategy train a model of Keras as Keras does alone."""

import contextlib
import os

import jax
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


def replicated(make, replicas=2):
    """A model of a strategy."""
    with zs.MirroredStrategy([f"CPU:{n}" for n in range(replicas)]).scope():
        return make()


def alone_and_replicated(make, replicas=2):
    """The same model twice, with equal weights."""

    def seeded():
        keras.utils.set_random_seed(1)
        return make()

    return seeded(), replicated(seeded, replicas)


@pytest.mark.parametrize(("replicas", "size"), [(2, 8), (4, 14)])
def test_batches_that_cannot_be_divided_evenly(replicas, size):
    """29 rows are batches of 8, 8, 8 and 5, of which two replicas get 3 and 2; or else
    of 14, 14 and 1, and three of four replicas get none."""
    plain, model = alone_and_replicated(make, replicas)
    given = {"batch_size": size, "verbose": 0, "validation_data": (X[:3], Y[:3])}
    histories = []
    for each in (plain, model):
        keras.utils.set_random_seed(2)
        histories.append(each.fit(X, Y, epochs=2, **given).history)
    assert list(histories[1]) == ["accuracy", "loss", "val_accuracy", "val_loss"]
    for name, values in histories[0].items():
        np.testing.assert_allclose(histories[1][name], values, rtol=1e-5)
    for rows in (29, 1):
        expected, found = (each.predict(X[:rows], verbose=0) for each in (plain, model))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("replicas", "rows", "size", "dtype"),
    [(4, 5, 3, "float32"), (2, 8, 8, "bfloat16")],
)
def test_averages_of_replicas_count_rows(replicas, rows, size, dtype):
    """Of three rows four replicas get 1, 1, 1 and 0: the average is one over rows, as
    the layer is the first, and each replica moves the average by its own mean."""

    def make():
        normal = keras.layers.BatchNormalization(momentum=0.5, dtype=dtype)
        model = keras.Sequential([keras.Input((4,)), normal, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    both = alone_and_replicated(make, replicas)
    for each in both:
        each.fit(X[:rows], Y[:rows], batch_size=size, shuffle=False, verbose=0)
    expected, found = (
        np.asarray(each.layers[0].moving_mean.value, "float32") for each in both
    )
    rtol = 1e-5 if dtype == "float32" else 0.02
    np.testing.assert_allclose(found, expected, rtol=rtol)


@pytest.mark.parametrize("reduction", ["sum", "mean_with_sample_weight"])
def test_a_loss_that_is_no_mean_over_rows_is_refused(reduction):
    """Replicas count by their rows, so its gradient would be another one."""
    with pytest.raises(NotImplementedError, match=reduction):
        replicated(lambda: make(reduction))
    plain, model = alone_and_replicated(lambda: make(reduction), replicas=1)
    given = {"x": X, "y": Y, "verbose": 0, "shuffle": False}
    expected, history = plain.fit(**given).history, model.fit(**given).history
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
    plain, model = alone_and_replicated(lambda: make(**option))
    given = {"x": X, "y": Y, "batch_size": 8, "verbose": 0, "shuffle": False}
    if remedy is not None:
        with pytest.raises(NotImplementedError, match=remedy):
            model.fit(**given)
        return
    expected, history = plain.fit(**given).history, model.fit(**given).history
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


class Own(keras.Model):
    """A model with a `train_step` of its own, whose loss is a sum or a mean."""

    def __init__(self, reduce):
        super().__init__()
        self.reduce, self.last = reduce, keras.layers.Dense(2)
        self.inner = keras.layers.Dense(3)
        self.normal = keras.layers.BatchNormalization()

    def call(self, x, training=False):
        return self.last(self.normal(self.inner(x), training=training))

    def train_step(self, state, data):
        values, others, slots, sums = state

        def loss_fn(values):
            outputs, after = self.stateless_call(values, others, data[0], training=True)
            return self.reduce(keras.ops.square(outputs - 1)), after

        given = jax.value_and_grad(loss_fn, has_aux=True)(values)
        (loss, others), grads = given
        values, slots = self.optimizer.stateless_apply(slots, grads, values)
        return {"loss": loss}, (values, others, slots, sums)


@pytest.mark.parametrize("is_mean", [True, False])
def test_the_gradients_of_an_own_step_are_checked(is_mean):
    with zs.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = Own(keras.ops.mean if is_mean else keras.ops.sum)
        model.compile("sgd")
    if is_mean:
        model.fit(X, Y, verbose=0)
        return
    with pytest.raises(NotImplementedError, match=r"in train_step.*keras\.ops\.mean"):
        model.fit(X, Y, verbose=0)


class Fitted(keras.Model):
    """A model with a `train_step` of its own that fits the mean of the last array of a
    batch, and gives `stateless_apply` its arguments by name."""

    def __init__(self):
        super().__init__()
        self.last = keras.layers.Dense(1, kernel_initializer="zeros")

    def call(self, x):
        return self.last(x)

    def train_step(self, state, data):
        values, others, slots, sums = state

        def loss_fn(values):
            outputs, _ = self.stateless_call(values, others, data[0])
            return keras.ops.mean(keras.ops.square(outputs - data[-1].mean()))

        loss, grads = jax.value_and_grad(loss_fn)(values)
        values, slots = self.optimizer.stateless_apply(
            optimizer_variables=slots, grads=grads, trainable_variables=values
        )
        return {"loss": loss}, (values, others, slots, sums)


@pytest.mark.parametrize("others", [0, 2])
def test_an_own_step_takes_tuples_of_any_length_and_arrays_of_other_lengths(others):
    batch = X[:8], *[X[:8, :1]] * others, np.arange(20, dtype="float32")

    def trained():
        model = Fitted()
        model(X[:1])
        model.compile("sgd")
        model.optimizer.build(model.trainable_variables)
        return model

    plain, model = alone_and_replicated(trained)
    for each in (plain, model):
        each.fit((x for x in [batch]), steps_per_epoch=1, shuffle=False, verbose=0)
    np.testing.assert_allclose(model.last.bias, plain.last.bias, rtol=1e-5)


def test_a_sum_is_found_whatever_weights_the_first_rows_have():
    class Sum(keras.losses.Loss):
        def __call__(self, y, x, sample_weight=None):
            return keras.ops.sum(keras.ops.square(x[:, 0] - 1) * sample_weight)

    with zs.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = make(loss=Sum())
    weights = np.zeros(29, "float32")
    with pytest.raises(NotImplementedError, match=r"keras\.ops\.mean"):
        model.fit(X, Y, verbose=0, sample_weight=weights)


@pytest.mark.parametrize("is_always", [True, False])
def test_a_loss_without_a_number_is_told_of(is_always):
    """Unless it has one before the values of the model are changed for the check."""

    def loss(y, x):
        return keras.ops.mean(keras.ops.sqrt(0 * x - 1 if is_always else x))

    with zs.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = keras.Sequential([keras.layers.Dense(2, kernel_initializer="zeros")])
        model.compile("sgd", loss)
    with contextlib.ExitStack() as stack:
        if is_always:
            stack.enter_context(pytest.warns(zs.KerasWarning, match="not finite"))
        model.fit(X, Y, verbose=0)


def test_the_first_step_runs_once_and_its_check_on_few_rows():
    """Also where a model draws, and is computed several times."""
    rows = []

    class Notes(keras.layers.Layer):
        def call(self, x):
            jax.debug.callback(lambda x: rows.append(len(x)), x)
            return x

    with zs.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        dropout = keras.layers.Dropout(0.5, seed=3)
        model = keras.Sequential([Notes(), dropout, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    large = np.ones((4096, 4), "float32")
    model.fit(large, large[:, :1], batch_size=4096, verbose=0)
    jax.effects_barrier()
    assert rows.count(2048) == 2  # once by each replica
    assert sum(rows) < 1.5 * 4096


def test_replicas_drop_different_values():
    seen = []

    class Notes(keras.layers.Layer):
        def call(self, x):
            jax.debug.callback(lambda x: seen.append(np.asarray(x)), x)
            return x

    with zs.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        inner = [keras.layers.Dropout(0.5, seed=3), Notes(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((64,)), *inner])
        model.compile("sgd", "mse")
    model.fit(np.ones((4, 64)), np.ones(4), epochs=2, verbose=0)
    jax.effects_barrier()
    drops = [x.tobytes() for x in seen[-4:]]  # before these the losses are checked
    assert len(set(drops)) == 4
    (state,) = model.non_trainable_variables
    assert state.value.tolist() == [3, 2]


def test_replicas_count_alike_with_a_counter_of_the_users_own():
    """It has the dtype of seeds, but is not one."""

    class Counts(keras.layers.Layer):
        def build(self, shape):
            kind = {"dtype": "uint32", "trainable": False, "initializer": "zeros"}
            self.count = self.add_weight(shape=(), **kind)

        def call(self, x):
            self.count.assign(self.count + 1)
            return x * keras.ops.cast(self.count < 100, "float32")

    def make():
        model = keras.Sequential([keras.Input((4,)), Counts(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    plain, model = alone_and_replicated(make)
    for each in (plain, model):
        each.fit(X[:16], Y[:16], batch_size=8, shuffle=False, verbose=0)
    for found, expected in zip(model.variables, plain.variables, strict=True):
        np.testing.assert_allclose(found.value, expected.value, rtol=1e-5, atol=1e-7)


def test_a_model_for_batches_of_one_size_is_refused():
    with zs.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        given, inner = keras.Input(batch_shape=(4, 2, 2)), keras.layers.SimpleRNN(1)
        inner.stateful = True
        model = keras.Sequential([given, inner])
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="stateful") as refused:
        model.fit(np.ones((4, 2, 2)), np.ones((4, 1)), batch_size=4, verbose=0)
    assert any("by one replica" in note for note in refused.value.__notes__)


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
    with pytest.raises(NotImplementedError, match="sample_weight"):
        replicated(make).fit(*given, verbose=0)
    assert replicated(make, 1).fit(*given, verbose=0).history["loss"][0] > 0

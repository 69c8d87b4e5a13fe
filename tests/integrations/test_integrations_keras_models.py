"""What a model may be: Keras trains it alone, and a strategy trains it the same way."""

import contextlib
import functools

import jax
import numpy as np
import pytest

import zstrat as zs

keras = pytest.importorskip("keras")
from keras_fits import LOSS, QUIET, X, Y, compared, dense  # noqa: E402  # imports keras

layers = keras.layers
pytestmark = QUIET


def several():
    """A model of two inputs and two outputs."""
    a, b = keras.Input((5,), name="a"), keras.Input((5,), name="b")
    both = layers.Concatenate()([layers.Dense(4)(a), layers.Dense(4)(b)])
    outputs = {
        "p": layers.Dense(2, name="p")(both),
        "q": layers.Dense(1, name="q")(both),
    }
    model = keras.Model({"a": a, "b": b}, outputs)
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9),
        {"p": LOSS, "q": "mse"},
        loss_weights={"p": 1.0, "q": 0.5},
        metrics={"p": ["accuracy"]},
        weighted_metrics={"q": ["mae"]},
    )
    return model


def masked():
    """A model that computes with masks."""
    model = keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            layers.Embedding(7, 3, mask_zero=True),
            layers.SimpleRNN(4),
            layers.Dense(2),
        ]
    )
    model.compile("rmsprop", LOSS, metrics=["accuracy"])
    return model


def table_rows():
    """Columns of a table: numbers, which are normalized, and categories."""
    numbers, kind = (
        keras.Input((5,), name="x"),
        keras.Input((1,), dtype="int32", name="kind"),
    )
    known = layers.Normalization()
    known.adapt(X)
    coded = layers.CategoryEncoding(3, output_mode="one_hot")(kind)
    both = layers.Concatenate()([known(numbers), coded])
    model = keras.Model({"x": numbers, "kind": kind}, layers.Dense(1)(both))
    model.compile("rmsprop", "mse", metrics=[keras.metrics.RootMeanSquaredError()])
    return model


class Ratings(keras.Model):
    """Collaborative filtering: users and films, as pairs of numbers."""

    def __init__(self):
        super().__init__()
        for name, size in (("users", 7), ("films", 5)):
            setattr(self, name, layers.Embedding(size, 4, "he_normal", "l2"))
            setattr(self, f"{name}_bias", layers.Embedding(size, 1))

    def call(self, pairs):
        users, films = pairs[:, 0], pairs[:, 1]
        match = keras.ops.sum(self.users(users) * self.films(films), 1, keepdims=True)
        return keras.ops.sigmoid(
            match + self.users_bias(users) + self.films_bias(films)
        )


def ratings():
    model = Ratings()
    model.compile("adam", "binary_crossentropy")
    return model


class Own(keras.Model):
    """A model with a `train_step` of its own, which also logs a norm."""

    def __init__(self):
        super().__init__()
        self.inner, self.last = layers.Dense(4, activation="relu"), layers.Dense(2)

    def call(self, x):
        return self.last(self.inner(x))

    def train_step(self, state, data):
        values, others, slots, sums = state
        x, y = data

        def loss_fn(values):
            outputs, after = self.stateless_call(values, others, x)
            return self.compute_loss(x, y, outputs), after

        (loss, others), grads = jax.value_and_grad(loss_fn, has_aux=True)(values)
        values, slots = self.optimizer.stateless_apply(slots, grads, values)
        tracker = self.metrics[0]
        sums = tracker.stateless_update_state(sums, loss)
        norm = sum(keras.ops.sum(grad**2) for grad in grads)
        logs = {"loss": tracker.stateless_result(sums), "norm": norm}
        return logs, (values, others, slots, sums)


def own():
    model = Own()
    model.compile("adam", LOSS)
    return model


class Adversaries(keras.Model):
    """A generator and a discriminator (GAN), each with its own optimizer."""

    def __init__(self, *, apart):
        super().__init__()
        self.apart = apart
        self.made = keras.Sequential([keras.Input((2,)), layers.Dense(5)])
        self.judged = keras.Sequential([keras.Input((5,)), layers.Dense(1)])
        self.losses_of = [keras.metrics.Mean(name=name) for name in ("made", "judged")]
        self.built = True

    def train_step(self, state, x):
        values, others, slots, sums = state
        cut = len(self.made.trainable_variables)
        parts = values[:cut], values[cut:]

        def losses(made, judged):
            fakes, _ = self.made.stateless_call(made, [], x[:, :2])
            fake, _ = self.judged.stateless_call(judged, [], fakes)
            real, _ = self.judged.stateless_call(judged, [], x)
            right = jax.nn.softplus(fake).mean() + jax.nn.softplus(-real).mean()
            return jax.nn.softplus(-fake).mean(), right

        grads, logs = [], {}
        for number, tracker in enumerate(self.losses_of):
            run = jax.value_and_grad(lambda *parts, n=number: losses(*parts)[n], number)
            loss, some = run(*parts)
            grads += some
            at = 2 * number + 2  # Keras' own is the first
            sums[at : at + 2] = tracker.stateless_update_state(sums[at : at + 2], loss)
            logs[tracker.name] = tracker.stateless_result(sums[at : at + 2])
        if self.apart:
            _, optimizer = self.optimizer.optimizers
            its = slots[-len(optimizer.variables) :]
            optimizer.stateless_apply(its, grads[:cut], values[:cut])
        else:
            values, slots = self.optimizer.stateless_apply(slots, grads, values)
        return logs, (values, others, slots, sums)


def adversaries(*, apart=False):
    of = keras.optimizers
    if not hasattr(of, "MultiOptimizer"):
        pytest.skip("this version of Keras has no MultiOptimizer")
    model = Adversaries(apart=apart)
    own = of.RMSprop(0.1)
    judged = {v.path: own for v in model.judged.trainable_variables}
    model.compile(of.MultiOptimizer(of.OptimizerMap(of.Adam(0.01), judged)))
    return model


CASES = {
    "classes": (dense, {"class_weight": {0: 1.0, 1: 3.0}, "validation_split": 0.25}),
    "weights": (
        lambda: dense(weighted_metrics=["accuracy"]),
        {"sample_weight": np.linspace(0.1, 2, 60)},
    ),
    "several": (several, {"x": {"a": X, "b": X[::-1]}, "y": {"p": Y, "q": X[:, :1]}}),
    "three": (lambda: dense(steps_per_execution=3), {}),
    "rows": (table_rows, {"x": {"x": X, "kind": np.arange(60)[:, None] % 3}}),
    "masks": (masked, {"x": (X > 0).astype("int32") * 3}),
    "own": (own, {}),
    "ratings": (ratings, {"x": np.stack([np.arange(60) % 7, np.arange(60) % 5], 1)}),
    "adversaries": (adversaries, {"y": None}),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_model_may_be(case):
    make, arguments = CASES[case]
    compared(make, **arguments)


@pytest.mark.parametrize("case", ["classes", "weights", "several", "three", "rows"])
def test_what_replicas_may_train(case):
    """Three of them get 6, 5 and 5 rows of a batch of 16."""
    make, arguments = CASES[case]
    three = zs.MirroredStrategy([f"CPU:{n}" for n in range(3)])
    compared(make, three, **arguments)


def test_two_optimizers_that_a_step_calls_are_refused():
    with zs.OneDeviceStrategy("CPU:0").scope():
        model = adversaries(apart=True)
    with pytest.raises(NotImplementedError, match="MultiOptimizer"):
        model.fit(X, verbose=0)


IMAGES = np.random.default_rng(0).normal(size=(48, 8, 8, 1)).astype("float32")
TOKENS = np.arange(288).reshape(48, 6) % 9
CLASSES = (np.arange(48) % 3 > 0).astype("int64")


def images(*, draws):
    """A small convolutional network. What draws, or sees rows together, does otherwise
    in each replica."""
    inner = [
        layers.Conv2D(4, 3, activation="relu"),
        layers.BatchNormalization(momentum=0.9)
        if draws
        else layers.GroupNormalization(2),
        layers.MaxPooling2D(),
        *([layers.Dropout(0.2)] if draws else []),
        layers.Flatten(),
    ]
    last = layers.Dense(2, dtype="float32")
    model = keras.Sequential([keras.Input((8, 8, 1)), *inner, last])
    model.compile(keras.optimizers.AdamW(0.01), LOSS, metrics=["accuracy"])
    return model


def texts(*, draws):
    """A small transformer, as of Keras' guide to classify texts."""
    tokens = keras.Input((6,), dtype="int32")
    x = layers.Embedding(9, 8)(tokens) + layers.Embedding(6, 8)(np.arange(6))
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4)(x, x))
    inner = layers.Dense(8)(layers.Dense(8, activation="relu")(x))
    if draws:
        inner = layers.Dropout(0.1)(inner)
    pooled = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x + inner))
    model = keras.Model(tokens, layers.Dense(2, dtype="float32")(pooled))
    model.compile("adam", LOSS, metrics=["accuracy"])
    return model


def lived(make, x, policy, scope, path):
    """Trains a model, saves and loads it, and trains that on; returns all histories and
    what it predicts."""
    with scope():
        keras.utils.set_random_seed(1)
        keras.mixed_precision.set_dtype_policy(policy)
        try:
            model = make()
        finally:
            keras.mixed_precision.set_dtype_policy("float32")
    found = []
    given = {"batch_size": 16, "verbose": 0, "validation_data": (x[:16], CLASSES[:16])}
    for epochs in (2, 1):
        keras.utils.set_random_seed(epochs)
        history = model.fit(x, CLASSES, epochs=epochs, **given).history
        found += history.items()
        model.save(path)
        with scope():
            model = keras.models.load_model(path)
    return found, model.predict(x[:16], verbose=0)


@pytest.mark.parametrize("where", ["servers", "mirrored"])
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize(("make", "x"), [(images, IMAGES), (texts, TOKENS)])
def test_a_life_of_a_model(make, x, policy, where, servers, tmp_path):
    """In bfloat16 two replicas add what they have rounded apart."""
    two = zs.MirroredStrategy(["CPU:0", "CPU:1"])
    scope = (servers if where == "servers" else two).scope
    given = functools.partial(make, draws=where == "servers"), x, policy
    mine, predicted = lived(*given, scope, tmp_path / "a.keras")
    its, expected = lived(*given, contextlib.nullcontext, tmp_path / "b.keras")
    is_exact = where == "servers" or policy == "float32"
    for (name, values), (same, others) in zip(mine, its, strict=True):
        assert name == same
        np.testing.assert_allclose(values, others, rtol=1e-5 if is_exact else 1e-2)
    near = {"rtol": 1e-4, "atol": 1e-5} if is_exact else {"atol": 5e-2}
    np.testing.assert_allclose(predicted, expected, **near)

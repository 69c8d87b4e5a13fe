"""Models of Keras train where the strategy says, and as plain Keras trains them.

The oracle is Keras: the same model, the same data and seeds, without a strategy. Most
tests take a strategy of one process, which runs the same code and needs no daemons.
"""

import contextlib
import gc
import json
import weakref

import jax
import numpy as np
import pytest

import zstrat as zs

keras = pytest.importorskip("keras")
from keras_fits import fitted, require_equal  # noqa: E402  # imports keras

layers, callbacks = keras.layers, keras.callbacks
pytestmark = pytest.mark.filterwarnings(
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


class Scale(layers.Layer):
    """Multiplies by one number, which is trained."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        return x * self.scale


def noisy():
    """A model with state that no gradient moves."""
    model = keras.Sequential(
        [
            keras.Input((5,)),
            layers.Dense(8, activation="relu"),
            layers.BatchNormalization(momentum=0.9),
            layers.Dropout(0.3),
            Scale(),
            layers.Dense(2),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01), LOSS, metrics=["accuracy"])
    return model


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


@pytest.fixture(scope="module")
def servers():
    with cluster_without_keras(num_workers=1) as cluster:
        strategy = zs.ParameterServerStrategy(cluster.resolver)
        yield strategy
        strategy.close()


def test_a_server_and_a_worker_do_what_keras_does(servers):
    model, plain = compared(noisy, servers, epochs=3, validation_data=(X[:20], Y[:20]))
    np.testing.assert_allclose(
        model.predict(X, verbose=0), plain.predict(X, verbose=0), rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(
        model.evaluate(X, Y, verbose=0), plain.evaluate(X, Y, verbose=0), rtol=1e-5
    )
    # What is assigned in between goes to the servers; the moments of Adam stay there.
    for each in (model, plain):
        each.set_weights([0.5 * value for value in each.get_weights()])
        keras.utils.set_random_seed(3)
        each.fit(X, Y, verbose=0)
    for mine, its in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-4, atol=1e-5)
    # One step: what the batch alone gives.
    ours, theirs = (each.train_on_batch(X, Y) for each in (model, plain))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)


def test_a_loaded_model_continues_with_the_state_of_its_optimizer(servers, tmp_path):
    plain, _ = fitted(dense, **DATA)
    plain.save(tmp_path / "model.keras")
    with servers.scope():
        model = keras.models.load_model(tmp_path / "model.keras")
    saves = zs.keras.ServerCheckpoint(tmp_path / "saves")
    given = DATA | {"verbose": 0, "shuffle": False}
    expected = plain.fit(**given).history
    history = model.fit(**given, callbacks=[saves]).history
    require_equal(model, plain, history, expected)


class Seen(callbacks.Callback):
    """Notes every event with its logs; the values of the model are not asked for."""

    def __init__(self):
        super().__init__()
        self.events = []

    def _note(name):
        def note(self, *arguments, logs=None):
            number = [each for each in arguments if not isinstance(each, dict)]
            found = [each for each in (*arguments, logs) if isinstance(each, dict)]
            self.events.append((name, number, dict(*found)))

        return note

    for _when in ("begin", "end"):
        for _what in ("train", "epoch", "train_batch", "test", "test_batch"):
            locals()[f"on_{_what}_{_when}"] = _note(f"{_what} {_when}")


def test_callbacks_see_what_keras_shows_them(tmp_path):
    seen = []

    def made():
        seen.append(Seen())
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        return [
            seen[-1],
            callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
            callbacks.ReduceLROnPlateau(patience=1, min_delta=1.0),
            callbacks.EarlyStopping(
                patience=2, min_delta=0.5, restore_best_weights=True
            ),
            callbacks.ModelCheckpoint(folder / "model.keras"),
            callbacks.CSVLogger(folder / "log.csv"),
            callbacks.BackupAndRestore(folder / "backup"),
            callbacks.TerminateOnNaN(),
        ]

    compared(dense, epochs=5, validation_data=(X, Y), callbacks=made)
    its, mine = (each.events for each in seen)
    assert [each[:2] for each in mine] == [each[:2] for each in its]
    for (_, _, logs), (_, _, expected) in zip(mine, its, strict=True):
        assert logs == pytest.approx(expected, rel=1e-5)
    logs = [(tmp_path / name / "log.csv").read_text().count("\n") for name in "01"]
    assert logs[0] == logs[1] > 2
    saved = keras.models.load_model(tmp_path / "1" / "model.keras")
    assert saved.optimizer.iterations.value == 3 * 4


def test_batches_are_delivered_in_order_when_their_steps_have_ended():
    from zstrat.integrations.keras.callbacks import InOrder

    class Scheduling:
        def scheduled(self, begin, end):
            events.append(("scheduled", begin, end))

        def begin(self, mode):
            events.append(("begin", mode))

        def deliver_all(self):
            events.append("delivered")

    events, seen = [], Seen()
    every = InOrder(Scheduling(), [seen], verbose=0)
    every.on_epoch_begin(0)
    every.on_train_batch_begin(0)
    every.on_train_batch_end(1, {"loss": 9.0})
    assert [each[0] for each in seen.events] == ["epoch begin"]
    every.deliver("train", 0, 1, {"loss": 2.0})
    every.on_epoch_end(0, {"loss": 2.0})
    assert events == [("begin", "train"), ("scheduled", 0, 1), "delivered"]
    assert seen.events[1:] == [
        ("train_batch begin", [0], {}),
        ("train_batch end", [1], {"loss": 2.0}),
        ("epoch end", [0], {"loss": 2.0}),
    ]


@pytest.mark.skipif(
    hasattr(keras.Model, "_enforce_jax_state_sharding"),
    reason="this version of Keras itself fails when a callback of fit calls predict",
)
def test_callbacks_may_use_the_model():
    """Also between batches, when other steps are under way."""

    class Uses(callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.found = []

        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                self.found.append(self.model.predict(X[:3], verbose=0).sum())
            self.found.append(logs["loss"])

        def on_epoch_end(self, epoch, logs=None):
            self.found += self.model.evaluate(X, Y, verbose=0, callbacks=[Seen()])
            self.model.optimizer.learning_rate = 0.5

    used = [Uses(), Uses()]
    each = iter(used)
    compared(
        lambda: dense(optimizer=keras.optimizers.SGD(0.1)),
        validation_data=(X, Y),
        callbacks=lambda: [next(each)],
    )
    assert len(used[0].found) == 2 * (4 + 1 + 2)
    np.testing.assert_allclose(used[1].found, used[0].found, rtol=1e-4)


def test_a_callback_that_raises_gets_no_further_batches():
    class Raises(callbacks.Callback):
        batches = 0

        def on_train_batch_end(self, batch, logs=None):
            self.batches += 1
            if batch == 1:
                raise LookupError("enough")

    raises = Raises()
    with zs.OneDeviceStrategy("CPU:0").scope():
        model = dense()
    with pytest.raises(LookupError):
        model.fit(X, Y, batch_size=16, verbose=0, callbacks=[raises])
    assert raises.batches == 2
    before = model.optimizer.iterations.value
    model.fit(X, Y, batch_size=16, verbose=0)
    assert model.optimizer.iterations.value == before + 4


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


def texts():
    """A small transformer, as of Keras' guide to classify texts."""
    tokens = keras.Input((6,), dtype="int32")
    positions = layers.Embedding(6, 8)(np.arange(6))
    x = layers.Embedding(9, 8)(tokens) + positions
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4)(x, x))
    inner = keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(8)])
    x = layers.LayerNormalization()(x + layers.Dropout(0.1)(inner(x)))
    model = keras.Model(tokens, layers.Dense(2)(layers.GlobalAveragePooling1D()(x)))
    model.compile("adam", LOSS, metrics=["accuracy"])
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


class Pages(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, number):
        return X[number * 20 :][:20], Y[number * 20 :][:20]


def grains():
    """What grain reads: each example once, in order."""
    grain = pytest.importorskip("grain")
    if hasattr(keras.Model, "_enforce_jax_state_sharding"):
        pytest.skip("this version of Keras itself does not read grain")
    rows = grain.MapDataset.source(list(zip(X, Y, strict=True)))
    without_threads = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return rows.batch(16).to_iter_dataset(without_threads)


def tensors():
    """A pipeline of TensorFlow, with weights of examples."""
    data = pytest.importorskip("tensorflow").data.Dataset
    weights = np.linspace(0.1, 2, 60)
    return data.from_tensor_slices((X, Y, weights)).batch(16).prefetch(2)


def halves():
    """Training in bfloat16."""
    keras.mixed_precision.set_dtype_policy("mixed_bfloat16")
    try:
        return dense()
    finally:
        keras.mixed_precision.set_dtype_policy("float32")


@pytest.mark.filterwarnings("ignore:.*ran out of data:UserWarning")  # of grain
@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (dense, {"class_weight": {0: 1.0, 1: 3.0}, "validation_split": 0.25}),
        (
            lambda: dense(weighted_metrics=["accuracy"]),
            {"sample_weight": np.linspace(0.1, 2, 60)},
        ),
        (
            several,
            {"x": {"a": X, "b": X[::-1]}, "y": {"p": Y, "q": X[:, :1]}},
        ),
        (masked, {"x": (X > 0).astype("int32") * 3}),
        (own, {}),
        (lambda: dense(steps_per_execution=3), {}),
        (halves, {}),
        (dense, {"x": Pages, "y": None, "batch_size": None}),
        (dense, {"x": grains, "y": None, "batch_size": None, "shuffle": False}),
        (
            dense,
            {"x": tensors, "validation_data": tensors, "y": None, "batch_size": None}
            | {"shuffle": False},
        ),
        (texts, {"x": np.arange(360).reshape(60, 6) % 9}),
        (table_rows, {"x": {"x": X, "kind": np.arange(60)[:, None] % 3}}),
        (ratings, {"x": np.stack([np.arange(60) % 7, np.arange(60) % 5], 1)}),
    ],
    ids=[
        *("classes", "weights", "several", "masks", "own", "three", "half"),
        *("pages", "grain", "tensors", "texts", "rows", "ratings"),
    ],
)
def test_what_a_model_may_be(make, arguments):
    compared(make, **arguments)


def test_a_dataset_ends_by_itself():
    def data():
        rows = zs.data.Dataset.from_tensor_slices((X, Y))
        return rows.filter(lambda x, y: True).batch(16)  # of unknown length

    _, expected = fitted(dense, **DATA, shuffle=False, validation_data=(X, Y))
    with pytest.warns(UserWarning, match="ran out of data"):
        _, history = fitted(
            dense,
            zs.OneDeviceStrategy("CPU:0"),
            x=data,
            y=None,
            batch_size=None,
            validation_data=data,
        )
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5)


class Quarters(keras.utils.PyDataset):
    """What Keras itself reads: four batches of 15."""

    def __len__(self):
        return 4

    def __getitem__(self, number):
        rows = slice(15 * number, 15 * number + 15)
        return X[rows], Y[rows]


@pytest.mark.filterwarnings("ignore:.*ran out of data:UserWarning")
@pytest.mark.parametrize("steps", [2, 3])
def test_epochs_of_some_steps_begin_again_where_those_of_keras_do(steps):
    def rows():
        return zs.data.Dataset.from_tensor_slices((X, Y)).batch(15)

    given = {"epochs": 4, "y": None, "batch_size": None, "shuffle": False}
    given |= {"steps_per_epoch": steps, "validation_steps": 2}
    plain, expected = fitted(dense, x=Quarters, validation_data=Quarters, **given)
    one = zs.OneDeviceStrategy("CPU:0")
    model, history = fitted(dense, one, x=rows, validation_data=rows, **given)
    assert model.optimizer.iterations.value == plain.optimizer.iterations.value
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5)


OPTIMIZERS = {
    "sgd": lambda of: of.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda of: of.Adam(of.schedules.ExponentialDecay(0.1, 2, 0.5)),
    "amsgrad": lambda of: of.Adam(0.1, amsgrad=True, clipvalue=0.5),
    "adamw": lambda of: of.AdamW(0.1, clipnorm=0.5),
    "adagrad": lambda of: of.Adagrad(0.1, global_clipnorm=0.5),
    "rmsprop": lambda of: of.RMSprop(0.1, momentum=0.5, centered=True),
    "lion": lambda of: of.Lion(0.01),
    "adamax": lambda of: of.Adamax(0.1),
    "nadam": lambda of: of.Nadam(0.1),
    "adadelta": lambda of: of.Adadelta(0.1),
    "ftrl": lambda of: of.Ftrl(0.1, l1_regularization_strength=0.01),
    "averaged": lambda of: of.Adam(0.1, use_ema=True, ema_overwrite_frequency=2),
    "accumulated": lambda of: of.Adam(0.1, gradient_accumulation_steps=2),
    "scaled": lambda of: of.SGD(0.1, loss_scale_factor=8.0),
}
SHAPES = [(4, 3), (3,)]


def shipped(optimizer):
    """An optimizer of Keras, built for two variables, and what is sent of it."""
    from zstrat.integrations.keras.optimizers import OptimizerState

    rng = np.random.default_rng(0)
    variables = [keras.Variable(rng.normal(size=shape)) for shape in SHAPES]
    optimizer.build(variables)
    state = OptimizerState(optimizer)
    return variables, state, state.shipped(variables)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_step_by_step(name):
    """On variables of this process, that is by one program for all."""
    variables, state, update = shipped(OPTIMIZERS[name](keras.optimizers))
    params = zs.create_variables([np.asarray(variable.value) for variable in variables])
    optimizer = zs.Optimizer(update, params=params)
    if not state.is_fresh():
        optimizer.state = [np.asarray(variable.value) for variable in state.variables]
    rng = np.random.default_rng(1)
    for size in (1.0, 0.1, 5.0, 1.0):
        grads = [jax.numpy.float32(size * rng.normal(size=shape)) for shape in SHAPES]
        optimizer.apply_gradients(grads, params, learning_rate=state.learning_rate())
        state._optimizer.apply(grads)
    for mine, its in zip(params, variables, strict=True):
        np.testing.assert_allclose(
            mine.numpy(), np.asarray(its.value), rtol=1e-4, atol=1e-6
        )
    for mine, its in zip(optimizer.state, state.variables, strict=True):
        np.testing.assert_allclose(mine, np.asarray(its.value), rtol=1e-4, atol=1e-6)


def test_optimizers_of_servers(servers):
    """All that they do is one variable's own, or computed of gradients alone."""
    with servers.scope():
        params = zs.create_variables([np.zeros(shape, "float32") for shape in SHAPES])
        for make in OPTIMIZERS.values():
            *_, update = shipped(make(keras.optimizers))
            zs.Optimizer(update, params=params)  # refuses what mixes variables
        mixing = keras.optimizers.Adam(
            0.1, gradient_accumulation_steps=2, global_clipnorm=0.5
        )
        *_, update = shipped(mixing)
        with pytest.raises(ValueError, match="mixes variables"):
            zs.Optimizer(update, params=params)


def test_a_worker_is_killed_and_each_example_counts_once():
    class Rows(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="rows")
            self.rows = self.add_variable((), "zeros")

        def update_state(self, y, _, sample_weight=None):
            self.rows.assign_add(float(y.shape[0]))

        def result(self):
            return self.rows.value

    class Kill(callbacks.Callback):
        def __init__(self, cluster):
            super().__init__()
            self.cluster, self.batches = cluster, []

        def on_train_batch_end(self, batch, logs=None):
            self.batches.append((batch, logs["rows"]))
            if len(self.batches) == 10:
                self.cluster.kill("worker:0")

    size = 10 * len(X)
    data = np.tile(X, (10, 1)), np.tile(Y, 10)
    with cluster_without_keras(num_workers=2) as cluster:
        strategy = zs.ParameterServerStrategy(cluster.resolver)
        coordinator = zs.ClusterCoordinator(strategy)
        with strategy.scope():
            model = dense(metrics=[Rows()])
        leased = coordinator.create_leased_dataset(
            data, batch=16, shuffle_seed=1, epochs=None
        )
        kill = Kill(cluster)
        history = model.fit(
            leased,
            epochs=2,
            verbose=0,
            callbacks=[kill],
            validation_data=coordinator.create_leased_dataset(data, batch=100),
        ).history
        strategy.close()
    assert history["rows"] == history["val_rows"] == [size, size]
    assert [batch for batch, _ in kill.batches] == [*range(38)] * 2
    assert [rows for _, rows in kill.batches][37::38] == [size, size]
    assert model.optimizer.iterations.value == 2 * 38


def refusals():
    def compiled(optimizer):
        return dense(optimizer=optimizer)

    class Longest(keras.metrics.Metric):
        def __init__(self):
            super().__init__()
            self.most = self.add_variable((), "zeros")

        def update_state(self, y, _, sample_weight=None):
            self.most.assign(keras.ops.maximum(self.most, keras.ops.max(y)))

        def result(self):
            return self.most.value

    class Frozen(Own):
        def train_step(self, state, data):
            return {}, state

    def frozen():
        model = Frozen()
        model.compile("adam", LOSS)
        return model

    of = keras.optimizers
    return {
        "loss scale": (lambda: compiled(of.LossScaleOptimizer(of.SGD())), "bfloat16"),
        "rate": (lambda: compiled(of.SGD(lambda: 0.1)), "LearningRateSchedule"),
        "metric": (lambda: dense(metrics=[Longest()]), "Keep sums"),
        "eager": (lambda: dense(run_eagerly=True), "jax.debug.print"),
        "step": (frozen, "apply its gradients once"),
    }


@pytest.mark.parametrize("case", ["loss scale", "rate", "metric", "eager", "step"])
def test_what_is_refused(case):
    make, remedy = refusals()[case]
    with pytest.raises(NotImplementedError, match=remedy):
        fitted(make, zs.OneDeviceStrategy("CPU:0"), **DATA)


def test_a_misspelt_argument_names_the_method():
    with pytest.raises(TypeError, match=r"^fit\(\).*'epoch'"):
        fitted(dense, zs.OneDeviceStrategy("CPU:0"), epoch=1)


def test_trainable_changes_after_compile():
    """As in Keras: the model is evaluated as it is, and trained when compiled again."""

    def make():
        inner = [layers.Dense(5, name) for name in ("tanh", "relu")]
        model = keras.Sequential([keras.Input((5,)), *inner, layers.Dense(5)])
        model.compile(keras.optimizers.Adam(0.01), LOSS)
        return model

    model, plain = compared(make, shuffle=False)
    for each in (plain, model):
        each.layers[0].trainable = False
    found, expected = (each.evaluate(X, Y, verbose=0) for each in (model, plain))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    with pytest.raises(ValueError, match="1:1"):
        model.fit(X, Y, batch_size=16, verbose=0)
    for each in (plain, model):
        each.compile(keras.optimizers.Adam(0.01), LOSS)
        each.fit(X, Y, batch_size=16, shuffle=False, verbose=0)
    for mine, its in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-4, atol=1e-6)


def test_a_strategy_that_does_not_train_models():
    with zs.CentralStorageStrategy().scope(), pytest.raises(NotImplementedError):
        dense()


@pytest.mark.parametrize(
    "name", ["Model._get_jax_state", "src.backend.jax.trainer._distribute_data"]
)
def test_a_keras_that_lacks_a_private_name_is_refused(monkeypatch, name):
    from zstrat.integrations.keras._private import check

    check.cache_clear()
    monkeypatch.setattr(f"keras.{name}", None)
    with zs.OneDeviceStrategy("CPU:0").scope():
        with pytest.raises(ImportError, match=name.rpartition(".")[2]):
            dense()
        monkeypatch.undo()
        assert dense().make_train_function.__module__.startswith("zstrat.")


def test_who_trains():
    """The scope of compile, else the scope in which the model was made."""
    strategy = zs.OneDeviceStrategy("CPU:0")
    with strategy.scope():
        model = keras.Sequential([keras.Input((5,)), layers.Dense(2)])
    model.compile(run_eagerly=False, loss=LOSS)
    assert model.make_train_function.__module__.startswith("zstrat.")
    outside = dense()
    assert outside.make_train_function.__module__.startswith("keras.")
    with strategy.scope():
        outside.compile(loss=LOSS)
    assert outside.make_train_function.__module__.startswith("zstrat.")
    outside.compile(loss=LOSS)
    assert outside.make_train_function.__module__.startswith("keras.")


def test_a_model_is_freed_with_its_last_reference():
    with zs.OneDeviceStrategy("CPU:0").scope():
        model = weakref.ref(dense())
    gc.collect()
    assert model() is None


def test_what_is_sent_needs_no_keras():
    """A worker and a server unpickle it in a process that has not imported Keras."""
    import pickle
    import subprocess
    import sys

    from zstrat.integrations.keras.shipped import ShippedStep

    *_, update = shipped(keras.optimizers.Adam(0.1))
    step = ShippedStep.of(lambda x, y: [x @ y, x.sum()], [X, X.T])
    program = (
        "import json, pickle, sys; import numpy as np\n"
        "step, update, x = pickle.load(sys.stdin.buffer)\n"
        "product, total = step(x, x.T)\n"
        "assert len(update.init([np.zeros((4, 3)), np.zeros(3)])) == 5\n"
        "has_keras = 'keras' in sys.modules\n"
        "print(json.dumps([float(product.sum()), float(total), has_keras]))"
    )
    found = subprocess.run(
        [sys.executable, "-c", program],
        input=pickle.dumps((step, update, X)),
        capture_output=True,
        check=True,
    )
    product, total, has_keras = json.loads(found.stdout)
    assert product == pytest.approx((X @ X.T).sum(), rel=1e-4)
    assert total == pytest.approx(X.sum(), rel=1e-4)
    assert not has_keras

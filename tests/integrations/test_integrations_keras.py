"""Models of Keras train where the strategy says, and as plain Keras trains them.

The oracle is Keras: the same model, the same data and seeds, without a strategy. Most
tests take a strategy of one process, which runs the same code and needs no daemons.
"""

import gc
import weakref

import numpy as np
import pytest

import zstrat as zs

keras = pytest.importorskip("keras")
from keras_fits import (  # noqa: E402  # imports keras
    DATA,
    LOSS,
    QUIET,
    X,
    Y,
    cluster_without_keras,
    compared,
    dense,
    fitted,
    require_equal,
)

layers, callbacks = keras.layers, keras.callbacks
pytestmark = QUIET


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

    class Frozen(keras.Sequential):
        def train_step(self, state, data):
            return {}, state

    def frozen():
        model = Frozen([layers.Dense(2)])
        model.compile("adam", LOSS)
        return model

    class Warming(keras.Sequential):
        """Looks at the number of steps, which is the optimizer's."""

        def train_step(self, state, data):
            logs, after = super().train_step(state, data)
            return {**logs, "step": state[2][0]}, after

    class Averaging(keras.Sequential):
        """Looks at the values after the step."""

        def train_step(self, state, data):
            logs, after = super().train_step(state, data)
            return {**logs, "norm": keras.ops.sum(after[0][0] ** 2)}, after

    def looking(kind):
        model = kind([layers.Dense(2)])
        model.compile("adam", LOSS)
        return model

    of = keras.optimizers
    return {
        "loss scale": (lambda: compiled(of.LossScaleOptimizer(of.SGD())), "bfloat16"),
        "rate": (lambda: compiled(of.SGD(lambda: 0.1)), "LearningRateSchedule"),
        "metric": (lambda: dense(metrics=[Longest()]), "Keep sums"),
        "eager": (lambda: dense(run_eagerly=True), "jax.debug.print"),
        "step": (frozen, "apply its gradients once"),
        "state": (lambda: looking(Warming), "count steps in a weight"),
        "after": (lambda: looking(Averaging), "use_ema=True"),
    }


@pytest.mark.parametrize(
    "case",
    ["loss scale", "rate", "metric", "eager", "step", "state", "after"],
)
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

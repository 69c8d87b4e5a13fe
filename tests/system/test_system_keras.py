"""Keras' fit in several processes, and when a parameter server is lost."""

import contextlib
import importlib
import importlib.util
import json
import os
import signal

import numpy as np
import pytest
from system_ranks import zstrat_run

import zstrat as zs

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="no keras"),
    pytest.mark.filterwarnings(
        "ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"
    ),
]


@pytest.fixture(scope="module")
def keras():
    """Imported by the process that runs these tests, not by all that collect them."""
    os.environ["KERAS_BACKEND"] = "jax"
    return importlib.import_module("keras")


PROGRAM = """
import keras

def fitted(strategy=None):
    keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).normal(size=(25, 4)).astype("float32")
    inner, last = keras.layers.Dense(3), keras.layers.Dense(1)
    model = keras.Sequential([keras.Input((4,)), inner, last])
    if strategy is not None:
        with strategy.scope():
            model.compile("adam", "mse", metrics=["mae"])
    else:
        model.compile("adam", "mse", metrics=["mae"])
    # Each process would shuffle in its own order.
    keras.utils.set_random_seed(2 + (task if strategy else 0))
    history = model.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0).history
    predicted = model.predict(x, batch_size=8, verbose=0)
    return history, predicted.ravel().tolist()
"""


def test_two_processes_train_as_one(keras, programs):
    """The last batch has one row, so the second process has none of it."""
    code, said = zstrat_run(
        2,
        PROGRAM
        + """
with zs.MultiWorkerMirroredStrategy() as strategy:
    say(json.dumps(fitted(strategy)))
""",
        KERAS_BACKEND="jax",
    )
    assert code == 0, said
    found = [json.loads(said[rank][-1]) for rank in range(2)]
    assert found[0] == found[1]
    given = {"np": np, "keras": keras, "task": 0}
    exec(PROGRAM, given)
    history, predicted = given["fitted"]()
    for name, values in history.items():
        np.testing.assert_allclose(found[0][0][name], values, rtol=1e-5)
    np.testing.assert_allclose(found[0][1], predicted, rtol=1e-4, atol=1e-6)


SAVING = """
import os, signal, sys

import keras
import numpy as np
import zstrat as zs

class Dies(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == (2, 1):
            os.kill(os.getpid(), signal.SIGKILL)

def history(scope, *callbacks):
    keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    normal, last = keras.layers.BatchNormalization(), keras.layers.Dense(1)
    with scope():
        model = keras.Sequential([keras.Input((4,)), normal, last])
        model.compile("adam", "mse", metrics=["mae"])
    given = {"epochs": 4, "batch_size": 16, "validation_data": (x[:20], x[:20, :1])}
    return model.fit(
        x, x[:, :1], verbose=0, shuffle=False, callbacks=callbacks, **given
    ).history
"""


def test_a_killed_program_continues_from_its_backup(keras, programs, tmp_path):
    """Keras' own BackupAndRestore: the third epoch begins again as if it had not."""
    text = (
        SAVING
        + f"""
import json
with zs.LocalCluster(num_ps=1, num_workers=1) as cluster:
    strategy = zs.ParameterServerStrategy(cluster.resolver)
    backup = keras.callbacks.BackupAndRestore({str(tmp_path / "backup")!r})
    dies = [Dies()] * ("dies" in sys.argv)
    print(json.dumps(history(strategy.scope, backup, *dies)))
    strategy.close()
"""
    )
    path = tmp_path / "program.py"
    path.write_text(text)
    given = {"capture_output": True, "text": True, "timeout": 100}
    given["env"] = {**os.environ, "KERAS_BACKEND": "jax"}
    killed = programs.run([path, "dies"], **given)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    continued = programs.run([path], **given)
    assert continued.returncode == 0, continued.stderr
    found, modules = json.loads(continued.stdout), {}
    exec(SAVING, modules)  # with `keras`, which this process has imported
    for name, values in modules["history"](contextlib.nullcontext).items():
        np.testing.assert_allclose(found[name], values[2:], rtol=1e-5)


def killing(keras, cluster, *, restarts):
    """Kills a server in the middle of the second epoch."""
    batches = 0

    def on_train_batch_end(batch, logs):
        nonlocal batches
        batches += 1
        if batches == 12:
            cluster.kill("ps:1")
            if restarts:
                cluster.restart("ps:1")

    return keras.callbacks.LambdaCallback(on_train_batch_end=on_train_batch_end)


@pytest.mark.parametrize("policy", ["raise", "restore"])
def test_a_parameter_server_is_lost_in_an_epoch(keras, policy, tmp_path):
    x = np.random.default_rng(0).normal(size=(160, 4)).astype("float32")
    ids = np.arange(160) << 33
    restarts = policy == "restore"
    with (
        zs.LocalCluster(num_ps=2, num_workers=1) as cluster,
        zs.ParameterServerStrategy(cluster.resolver, on_ps_loss=policy) as strategy,
    ):
        with strategy.scope():
            table = zs.HashTable(2, name="users")
            given, key = keras.Input((4,)), keras.Input((), dtype="int32")
            looked_up = zs.keras.Embedding(table)(key)
            both = keras.layers.Concatenate()([given, looked_up])
            hidden = keras.layers.BatchNormalization()(keras.layers.Dense(3)(both))
            model = keras.Model([given, key], keras.layers.Dense(1)(hidden))
            model.compile("adam", "mse")
        saves = zs.keras.ServerCheckpoint(tmp_path)
        callbacks = [saves, killing(keras, cluster, restarts=restarts)]

        def fit():
            return model.fit(
                [x, ids], x[:, :1], batch_size=16, epochs=4, verbose=0,
                callbacks=callbacks,
            )  # fmt: skip

        if restarts:
            losses = fit().history["loss"]
            assert zs.ClusterCoordinator(strategy).metrics()["ps_restores"] == 1
            assert len(losses) == 4
            assert losses[-1] < losses[0]
            assert len(table) == 160
            lost = 40 - int(model.optimizer.iterations.value)
            assert 0 <= lost <= 10  # those of the second epoch
        else:
            with pytest.raises(zs.PSUnavailableError, match="ps/task:1") as lost:
                fit()
            assert any("ServerCheckpoint" in note for note in lost.value.__notes__)

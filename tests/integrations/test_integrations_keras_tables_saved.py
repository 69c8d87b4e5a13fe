"""What models with tables have on parameter servers, saved and restored."""

import numpy as np
import pytest

import zstrat as zs

keras = pytest.importorskip("keras")
from keras_fits import QUIET  # noqa: E402  # imports keras
from keras_tables import IDS, OTHERS, Y, by_id, towers, two_servers  # noqa: E402

__all__ = ["two_servers"]
layers = keras.layers
pytestmark = QUIET


def test_servers_and_model_are_restored_together(strategy, tmp_path):
    with strategy.scope():
        table = zs.HashTable(2, name="restored")
        model = by_id(zs.keras.Embedding(table), lambda ids: ids)
    x = np.linspace(0, 1, 60, dtype="float32")[:, None]
    given = [IDS[:, :2], x]
    saves = zs.keras.ServerCheckpoint(tmp_path)
    with pytest.raises(RuntimeError, match="callback"):
        saves.restore()
    model.fit(given, x, verbose=0, callbacks=[saves])
    weights, rows = model.get_weights(), table.lookup(np.arange(50))
    state = [np.asarray(v.value) for v in model.optimizer.variables]
    model.fit(given, x, epochs=2, verbose=0)
    assert saves.restore() == saves.manager.latest_checkpoint
    np.testing.assert_array_equal(table.lookup(np.arange(50)), rows)
    for found, expected in [
        (model.get_weights(), weights),
        ([np.asarray(v.value) for v in model.optimizer.variables], state),
    ]:
        for mine, its in zip(found, expected, strict=True):
            np.testing.assert_array_equal(mine, its)


def test_best_weights_without_the_rows_of_a_table_are_refused(strategy):
    with strategy.scope():
        table = zs.HashTable(2, name="best")
        model = by_id(zs.keras.Embedding(table), lambda ids: ids)
    best = keras.callbacks.EarlyStopping("loss", restore_best_weights=True)
    given = [IDS[:, :2], np.ones((60, 1))], np.ones((60, 1))
    with pytest.raises(NotImplementedError, match="ServerCheckpoint"):
        model.fit(*given, verbose=0, callbacks=[best])
    model.fit(*given, verbose=0)


def test_another_program_continues_from_what_was_saved(strategy, tmp_path):
    def fit(model, epochs, *callbacks):
        given = {"epochs": epochs, "shuffle": False, "callbacks": callbacks}
        model.fit([IDS, OTHERS], Y, batch_size=16, verbose=0, **given)
        return model.get_weights()

    def made():
        keras.utils.set_random_seed(1)
        with strategy.scope():
            return towers(zs.keras.Embedding, "adam")

    saves = zs.keras.ServerCheckpoint(tmp_path)
    model, whole = made(), fit(made(), 3)
    fit(model, 1, saves)
    fit(model, 1, saves)
    numbers = [path.rpartition("-")[2] for path in saves.manager.checkpoints]
    assert numbers == ["3", "4"]
    with pytest.raises(ValueError, match="resume=True"):
        fit(made(), 1, zs.keras.ServerCheckpoint(tmp_path))
    again = zs.keras.ServerCheckpoint(tmp_path, resume=True)
    with strategy.scope():
        other = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
        other.compile("adam", "mse")
    for _ in range(2):  # and replaces nothing
        with pytest.raises(zs.ZstratError):
            other.fit(IDS, Y, verbose=0, callbacks=[again])
    for mine, its in zip(fit(made(), 1, again), whole, strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-5, atol=1e-7)


def test_what_is_trainable_may_change_before_weights_are_restored(strategy, tmp_path):
    def made(trainable):
        with strategy.scope():
            twins = [layers.Dense(4, name="a", trainable=trainable), layers.Dense(4)]
            model = keras.Sequential([keras.Input((4,)), *twins, layers.Dense(1)])
            model.compile("sgd", "mse")
        return model

    def fit(model, **options):
        saves = zs.keras.ServerCheckpoint(tmp_path, **options)
        model.fit(IDS * 0.01, Y, verbose=0, callbacks=[saves], shuffle=False)
        return model.get_weights()

    before = fit(made(True))
    after = fit(model := made(False), resume=True)
    for mine, its in zip(after[:2], before[:2], strict=True):
        np.testing.assert_array_equal(mine, its)
    saves = zs.keras.ServerCheckpoint(tmp_path, resume=True)
    model.fit(IDS * 0.01, Y, verbose=0, callbacks=[saves])
    model.layers[0].trainable = True
    model.evaluate(IDS * 0.01, Y, verbose=0)
    with pytest.raises(RuntimeError, match="compile"):
        saves.restore()

"""A Keras model that is made in a scope trains without the strategy, and says so. A
module with its two methods stands for Keras; the example runs with the real one."""

import sys
import types
import warnings

import pytest

import zstrat as zs


@pytest.fixture
def model(monkeypatch):
    keras = types.ModuleType("keras")

    class Model:
        def compile(self, loss=None):
            return f"compiled {loss}"

        def fit(self, x):
            return f"fitted {x}"

    keras.Model = Model
    monkeypatch.setitem(sys.modules, "keras", keras)
    return Model


@pytest.mark.parametrize("call", ["compile", "fit"])
def test_a_model_in_a_scope(model, call):
    strategy = zs.OneDeviceStrategy("CPU:0")
    words = rf"model\.{call} of Keras in .*stateless_call.*examples/keras_ps\.py"
    with strategy.scope(), strategy.scope(), pytest.warns(zs.KerasWarning, match=words):
        assert getattr(model(), call)("it") in {"compiled it", "fitted it"}


def test_outside_of_scopes_nothing_is_said(model):
    with zs.OneDeviceStrategy("CPU:0").scope():
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model().compile(loss="mse") == "compiled mse"
        assert model().fit(3) == "fitted 3"


def test_a_keras_that_is_just_being_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "keras", types.ModuleType("keras"))
    with zs.OneDeviceStrategy("CPU:0").scope() as strategy:
        assert strategy.num_replicas_in_sync == 1

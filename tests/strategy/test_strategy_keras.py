"""A Keras model that is made in a scope trains without the strategy, and says so. A
module with its two methods stands for Keras; the example runs with the real one."""

import sys
import types
import warnings

import jax.numpy as jnp
import pytest

import zstrat as zs


@pytest.fixture
def model(monkeypatch):
    keras = types.ModuleType("keras")

    class Model:
        def compile(self, loss=None):
            return f"compiled {loss}"

        def fit(self, x):
            self.evaluate(x)  # as Keras does with data for validation
            return f"fitted {x}"

        def evaluate(self, x):
            return f"evaluated {x}"

        predict = train_on_batch = test_on_batch = predict_on_batch = evaluate

    keras.Model = Model
    monkeypatch.setitem(sys.modules, "keras", keras)
    return Model


@pytest.mark.parametrize(
    "call",
    [
        *("compile", "fit", "evaluate", "predict"),
        *("train_on_batch", "test_on_batch", "predict_on_batch"),
    ],
)
def test_a_model_in_a_scope(model, call):
    strategy = zs.OneDeviceStrategy("CPU:0")
    words = rf"model\.{call} of Keras in .*stateless_call.*examples/keras_ps\.py"
    with (
        strategy.scope(),
        strategy.scope(),
        pytest.warns(zs.KerasWarning, match=words) as warned,
    ):
        done = getattr(model(), call)("it")
    assert done in {"compiled it", "fitted it", "evaluated it"}
    assert len(warned) == 1
    assert warned[0].filename == __file__


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


class Variable:
    def __init__(self, value):
        self.value = value


@pytest.fixture
def layer(monkeypatch):
    keras = types.ModuleType("keras")

    class Layer:
        name = "dense"

        def __init__(self, *below):
            self.variables, self.below = [Variable(jnp.float32(2))], below

        def __call__(self, x):
            for each in self.below:
                x = each(x)
            return self.variables[0].value * x

        def stateless_call(self, value, x):
            before, self.variables = self.variables, [Variable(value)]
            try:
                return self(x)
            finally:
                self.variables = before

    keras.Layer = Layer
    monkeypatch.setitem(sys.modules, "keras", keras)
    return Layer


def test_a_model_that_a_step_calls_keeps_its_values(layer):
    """And the warning says so at the line, not for the layers below."""
    below = layer()
    below.name = "below"
    model = layer(below, layer())
    step = zs.function(lambda x: model(x))
    words = r"'dense'.*model\.stateless_call"
    with pytest.warns(zs.KerasWarning, match=words) as warned:
        step(1.0)
    assert {each.filename for each in warned} == {__file__}
    assert not any("'below'" in str(each.message) for each in warned)


def test_a_model_that_is_given_its_values_is_not_warned_about(layer):
    model, value = layer(), zs.Variable(3.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = zs.function(lambda x: model.stateless_call(value.value(), x))
        assert step(2.0) == 6
        assert model(2.0) == 4
        # In an eager step of this process it is the model itself.
        assert zs.function(lambda x: model(x), eager=True)(2.0) == 4

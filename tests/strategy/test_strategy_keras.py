"""A Keras model that a step calls keeps its values, and says so. A module with a class
of layers stands for Keras; tests/integrations has the real one."""

import sys
import types
import warnings

import jax.numpy as jnp
import pytest

import zstrat as zs


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

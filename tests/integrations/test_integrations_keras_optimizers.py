"""Optimizers of Keras are traced, and step as Keras' own."""

import json

import jax
import numpy as np
import pytest

import zstrat as zs

keras = pytest.importorskip("keras")
from keras_fits import QUIET, X  # noqa: E402  # imports keras

pytestmark = QUIET


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
    "lamb": lambda of: of.Lamb(0.1),
    "adafactor": lambda of: of.Adafactor(0.1),
    "muon": lambda of: of.Muon(0.1),
    "free": lambda of: of.ScheduleFreeAdamW(0.1),
    "several": lambda of: of.MultiOptimizer(
        of.OptimizerMap(of.Adam(0.1), {".*first": of.SGD(0.1, momentum=0.5)})
    ),
    "scaled": lambda of: of.SGD(0.1, loss_scale_factor=8.0),
}


SHAPES = [(4, 3), (3,)]


def shipped(optimizer):
    """An optimizer of Keras, built for two variables, and what is sent of it."""
    from zstrat.integrations.keras.optimizers import OptimizerState

    rng = np.random.default_rng(0)
    pairs = zip(("first", "second"), SHAPES, strict=True)
    variables = [keras.Variable(rng.normal(size=x), name=name) for name, x in pairs]
    optimizer.build(variables)
    state = OptimizerState(optimizer)
    return variables, state, state.shipped(variables)


def made(name):
    try:
        return OPTIMIZERS[name](keras.optimizers)
    except AttributeError:
        pytest.skip("this version of Keras does not have it")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_step_by_step(name):
    """On variables of this process, that is by one program for all."""
    variables, state, update = shipped(made(name))
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


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_servers(servers, name):
    """All that they do is one variable's own, or computed of gradients alone."""
    *_, update = shipped(made(name))
    with servers.scope():
        params = zs.create_variables([np.zeros(shape, "float32") for shape in SHAPES])
        zs.Optimizer(update, params=params)  # refuses what mixes variables


def test_what_mixes_variables_is_refused(servers):
    mixing = keras.optimizers.Adam(
        0.1, gradient_accumulation_steps=2, global_clipnorm=0.5
    )
    *_, update = shipped(mixing)
    with servers.scope():
        params = zs.create_variables([np.zeros(shape, "float32") for shape in SHAPES])
        with pytest.raises(ValueError, match="mixes variables"):
            zs.Optimizer(update, params=params)


@pytest.mark.parametrize("parts", [{"first": 0}, (keras.optimizers.SGD(),)])
def test_an_own_optimizer_with_an_attribute_named_optimizers(parts):
    """It is one of its parts, and they are those that are optimizers."""
    from zstrat.integrations.keras.optimizers import parts_of

    optimizer = keras.optimizers.SGD(weight_decay=0.1)
    optimizer.optimizers = parts
    own = [x for x in parts if isinstance(x, keras.optimizers.Optimizer)]
    assert parts_of(optimizer) == [optimizer, *own]


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

"""A small classifier, as that of the digits, and what three steps of gradient descent
make of it: in float64, by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

RATE, STEPS = 0.5, 3
ROWS, FEATURES, HIDDEN, CLASSES = 48, 16, 12, 10
"""Rows split evenly over 1, 2, 3, 4, 6 or 8 devices."""

_rng = np.random.default_rng(0)
PIXELS = _rng.normal(size=(ROWS, FEATURES)).astype(np.float32)
LABELS = _rng.integers(0, CLASSES, ROWS).astype(np.int32)
START = {
    "w": (0.3 * _rng.normal(size=(FEATURES, HIDDEN))).astype(np.float32),
    "b": np.zeros(HIDDEN, np.float32),
    "out": (0.3 * _rng.normal(size=(HIDDEN, CLASSES))).astype(np.float32),
    "bias": np.zeros(CLASSES, np.float32),
}


def loss(params, pixels, labels):
    """The part that these rows have in the mean over all."""
    hidden = jnp.tanh(pixels @ params["w"] + params["b"])
    scores = jax.nn.log_softmax(hidden @ params["out"] + params["bias"])
    return -jnp.sum(jnp.take_along_axis(scores, labels[:, None], axis=1)) / ROWS


def expected():
    """The losses of the steps, and the parameters after the last one."""
    w, b, out, bias = (START[name].astype(np.float64) for name in START)
    rows, losses = np.arange(ROWS), []
    for _ in range(STEPS):
        hidden = np.tanh(PIXELS @ w + b)
        chances = np.exp(hidden @ out + bias)
        chances /= chances.sum(1, keepdims=True)
        losses.append(-np.log(chances[rows, LABELS]).mean())
        wrong = chances
        wrong[rows, LABELS] -= 1
        wrong /= ROWS
        back = (wrong @ out.T) * (1 - hidden**2)
        out = out - RATE * hidden.T @ wrong
        bias = bias - RATE * wrong.sum(0)
        w = w - RATE * PIXELS.T @ back
        b = b - RATE * back.sum(0)
    return losses, {"w": w, "b": b, "out": out, "bias": bias}


def same(losses, params):
    """Fails unless they are what is expected, but for the rounding of float32."""
    numbers, values = expected()
    np.testing.assert_allclose(losses, numbers, rtol=1e-4)
    for name, value in values.items():
        np.testing.assert_allclose(params[name], value, rtol=1e-4, atol=1e-6)

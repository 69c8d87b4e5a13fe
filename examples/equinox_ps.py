"""A model of equinox, trained asynchronously on parameter servers.

The model is a class of this script, which the workers do not have: it travels to them
with the step. Its arrays become variables on two parameter servers, and what is not an
array (sizes, the activation) stays in the step. It learns the sum of the squares of its
four inputs from random ones.

    python examples/equinox_ps.py
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import zstrat as zs

if TYPE_CHECKING:
    from collections.abc import Callable

INPUTS = 4
GOAL = 0.1
"""Mean squared error on fresh inputs; 0.36 by the mean of the targets alone."""


class Perceptron(eqx.Module):
    """Layers with an activation between them, as `equinox.nn.MLP` has."""

    layers: list[eqx.nn.Linear]
    activation: Callable = eqx.field(static=True, default=jax.nn.gelu)

    def __init__(self, width, depth, key, activation=jax.nn.gelu):
        sizes = [INPUTS, *[width] * depth, 1]
        keys = jax.random.split(key, len(sizes) - 1)
        pairs = zip(sizes[:-1], sizes[1:], keys, strict=True)
        self.layers = [eqx.nn.Linear(i, o, key=key) for i, o, key in pairs]
        self.activation = activation

    def __call__(self, x):
        *hidden, last = self.layers
        for layer in hidden:
            x = self.activation(layer(x))
        return last(x)[0]


def batches(seed, size):
    """Inputs [size, 4] and the sums of their squares [size], without end."""
    random = np.random.default_rng(seed)
    while True:
        x = random.uniform(-1, 1, (size, INPUTS)).astype(np.float32)
        yield x, (x**2).sum(1)


def error(model, batch):
    """Mean squared error of a batch."""
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def train(strategy, options):
    """The model after the training; prints losses on the way."""
    model = Perceptron(options.width, options.depth, jax.random.key(options.seed))
    arrays, rest = eqx.partition(model, eqx.is_array)
    with strategy.scope():
        params = zs.create_variables(arrays)  # a Perceptron of variables
        optimizer = zs.Optimizer(optax.adam(options.rate))

    @zs.function
    def train_step(iterator):
        def loss_fn(params, batch):
            return error(eqx.combine(params, rest), batch)

        loss, grads = zs.value_and_grad(loss_fn)(params, next(iterator))
        optimizer.apply_gradients(grads, params)
        return loss

    coordinator = zs.ClusterCoordinator(strategy)
    iterator = iter(
        coordinator.create_per_worker_dataset(
            lambda context: batches(context.input_pipeline_id, options.batch)
        )
    )
    losses = [
        coordinator.schedule(train_step, args=(iterator,)) for _ in range(options.steps)
    ]
    for step in range(options.every, options.steps + 1, options.every):
        print(f"step {step}/{options.steps}  loss {losses[step - 1].fetch():.4f}")
    coordinator.join()
    trained = jax.tree.map(lambda variable: variable.numpy(), params)
    coordinator.shutdown(cluster=True)
    return eqx.combine(trained, rest)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--ps", type=int, default=2, help="parameter servers to start here")
    add("--workers", type=int, default=2, help="workers to start here")
    add("--width", type=int, default=32, help="of each hidden layer")
    add("--depth", type=int, default=2, help="hidden layers")
    add("--steps", type=int, default=600)
    add("--batch", type=int, default=64)
    add("--rate", type=float, default=1e-3, help="learning rate of Adam")
    add("--every", type=int, default=100, help="steps between two lines")
    add("--seed", type=int, default=0)
    return parser.parse_args()


def main():
    options = arguments()
    print(f"starting {options.ps} ps and {options.workers} workers on this machine")
    with zs.LocalCluster(options.ps, options.workers) as cluster:
        model = train(zs.ParameterServerStrategy(cluster.resolver), options)
    found = float(error(model, next(batches(1000, 4096))))
    print(f"test error {found:.4f} (goal {GOAL})")
    return 0 if found <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())

"""A model of flax nnx on parameter servers: handwritten digits.

The recipe:

- ``nnx.split`` splits a model into its graph, its parameters and the rest of its state
  (here: the averages of a BatchNorm). Graph and layers travel with the step; parameters
  and state become variables of the strategy, trees of the same structure.
- In the step ``nnx.merge`` makes a model of the values that the step works with, with
  ``copy=True``, because flax lets no function that is differentiated write to what was
  made outside of it. ``nnx.state`` takes the new averages out again.
- After the training the model is merged from the values on the servers.

Two ps and two workers on this machine, the digits of scikit-learn.

    python examples/flax_nnx_ps.py
"""

from __future__ import annotations

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits import CLASSES, load_digits
from flax import nnx

import zstrat as zs

GOAL = 0.95


class DigitsModel(nnx.Module):
    """Logits [n, 10] of images [n, 8, 8, 1]."""

    def __init__(self, width, rngs):
        self.first = nnx.Linear(64, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, momentum=0.9, rngs=rngs)
        self.last = nnx.Linear(width, CLASSES, rngs=rngs)

    def __call__(self, images):
        x = images.reshape(len(images), -1)
        return self.last(jax.nn.relu(self.norm(self.first(x))))


def make_step(graph, params, averages, optimizer):
    """The step of a worker: gradients move ``params``, ``averages`` are assigned."""

    @zs.function
    def train_step(iterator):
        images, labels = next(iterator)

        def loss_fn(params, averages):
            model = nnx.merge(graph, params, averages, copy=True)
            losses = optax.softmax_cross_entropy_with_integer_labels(
                model(images), labels
            )
            return losses.mean(), nnx.state(model, nnx.BatchStat)

        step = zs.value_and_grad(loss_fn, has_aux=True)
        (loss, after), grads = step(params, zs.values(averages))
        optimizer.apply_gradients(grads, params)
        jax.tree.map(lambda variable, value: variable.assign(value), averages, after)
        return loss

    return train_step


def train(strategy, data, options):
    """The trained model and the last losses. Each epoch has each image once, but for a
    last few that are no batch, though a worker dies."""
    model = DigitsModel(options.width, nnx.Rngs(options.seed))
    graph, params, averages = nnx.split(model, nnx.Param, nnx.BatchStat)
    with strategy.scope():
        params = zs.create_variables(params)
        averages = zs.create_variables(averages)
        optimizer = zs.Optimizer(optax.adam(options.rate))
    step = make_step(graph, params, averages, optimizer)

    with zs.ClusterCoordinator(strategy) as coordinator:
        leased = coordinator.create_leased_dataset(  # each image once in each epoch
            data, options.batch, shuffle_seed=options.seed, epochs=options.epochs,
            drop_remainder=True,
        )  # fmt: skip
        iterator = iter(leased)
        with iterator.progress():
            for _ in iterator.epochs:
                losses = coordinator.schedule_epoch(step, iterator)
        trained, averages = zs.values(params), zs.values(averages)
        return nnx.merge(graph, trained, averages), coordinator.fetch(losses[-10:])


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--ps", type=int, default=2, help="parameter servers to start here")
    add("--workers", type=int, default=2, help="workers to start here")
    add("--epochs", type=int, default=18)
    add("--batch", type=int, default=64)
    add("--width", type=int, default=128, help="of the hidden layer")
    add("--rate", type=float, default=0.003, help="learning rate of Adam")
    add("--seed", type=int, default=0)
    return parser.parse_args()


def main():
    options = arguments()
    data, (images, labels) = load_digits()
    print(f"starting {options.ps} ps and {options.workers} workers on this machine")
    with zs.LocalCluster(options.ps, options.workers) as cluster:
        with zs.ParameterServerStrategy(cluster.resolver) as strategy:
            model, losses = train(strategy, data, options)
    model.eval()  # from here on with the averages, not with those of the batch
    accuracy = float(jnp.mean(model(images).argmax(-1) == labels))
    print(f"loss {np.mean(losses):.3f}, test accuracy {accuracy:.1%} (goal {GOAL:.0%})")
    return 0 if accuracy >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())

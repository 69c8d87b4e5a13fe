"""A Keras model, trained on parameter servers.

``model.fit`` knows nothing of a zstrat strategy: it trains in this process. The recipe:

- the values of the model become variables of the strategy (`zs.create_variables`);
- a step function computes with ``model.stateless_call``, which takes them as arguments;
- the trained values are put back, and ``model.evaluate``, ``predict`` and ``save`` are
  Keras' own again.

Two ps and two workers on this machine, the digits of scikit-learn.

    python examples/keras_ps.py
"""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "jax"  # before keras is imported, here and in the workers

import argparse
import sys

import keras
import numpy as np
import optax
from digits import load_digits

import zstrat as zs

GOAL = 0.9


def make_model():
    """Logits [n, 10] of images [n, 8, 8, 1]."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.Dense(10),
        ]
    )


def make_loss():
    """The loss of logits [n, 10] and labels [n]."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def values_of(keras_variables):
    """Their first values, for `zs.create_variables`."""
    return [variable.numpy() for variable in keras_variables]


def make_step(model, params, state, optimizer):
    """The step of a worker: ``params`` are moved by gradients, ``state`` (the averages
    of a BatchNormalization) is assigned."""
    loss_of = make_loss()

    @zs.function
    def train_step(iterator):
        images, labels = next(iterator)

        def loss_fn(params, state):
            logits, state = model.stateless_call(params, state, images, training=True)
            return loss_of(labels, logits), state

        (loss, after), grads = zs.value_and_grad(loss_fn, has_aux=True)(params, state)
        optimizer.apply_gradients(grads, params)
        for variable, value in zip(state, after, strict=True):
            variable.assign(value)
        return loss

    return train_step


def put_back(keras_variables, variables):
    """The trained values, into the model of this process."""
    for mine, trained in zip(keras_variables, variables, strict=True):
        mine.assign(trained.numpy())


def train(strategy, model, data, steps):
    """The last losses; the model has the trained values afterwards."""
    with strategy.scope():
        params = zs.create_variables(values_of(model.trainable_variables))
        state = zs.create_variables(values_of(model.non_trainable_variables))
        optimizer = zs.Optimizer(optax.adam(0.003))
    step = make_step(model, params, state, optimizer)

    def dataset_fn(context):
        rows = zs.data.Dataset.from_tensor_slices(data)
        return rows.shuffle(2000, seed=context.input_pipeline_id).repeat().batch(64)

    with zs.ClusterCoordinator(strategy) as coordinator:
        iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
        losses = [coordinator.schedule(step, args=(iterator,)) for _ in range(steps)]
        coordinator.join()
        put_back(model.trainable_variables, params)
        put_back(model.non_trainable_variables, state)
        return coordinator.fetch(losses[-10:])


def main():
    parser = argparse.ArgumentParser(description="A Keras model on parameter servers.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    data, test = load_digits()
    model = make_model()
    with zs.LocalCluster(2, options.workers) as cluster:
        strategy = zs.ParameterServerStrategy(cluster.resolver)
        losses = train(strategy, model, data, options.steps)
    # Not before: a compiled model takes its optimizer along to the workers.
    model.compile(loss=make_loss(), metrics=["accuracy"])
    _, accuracy = model.evaluate(*test, verbose=0)
    print(f"loss {np.mean(losses):.3f}, test accuracy {accuracy:.1%} (goal {GOAL:.0%})")
    return 0 if accuracy >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())

"""Handwritten digits, trained synchronously: N processes compute what one would.

The model and the images of `digits`; every process takes its rows of each batch, and
gradients are summed over all of them before each update. At the end the first process
trains once more, alone and with whole batches, in plain JAX and optax, and compares the
two curves of the loss. By default this program starts four of itself on this machine.

    python examples/digits_allreduce.py
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

import jax
import numpy as np
import optax
from digits import GOAL, init_params, load_digits, loss_fn, predict

import zstrat as zs

TOLERANCE = 1e-5
"""Of the loss, relative: what float32 leaves of sums in another order."""


def batches(train, options):
    """The whole batches, in an order that every process draws alike."""
    images, labels = train
    random = np.random.default_rng(options.seed)
    while True:
        order = random.permutation(len(labels))
        for start in range(0, len(order) - options.batch + 1, options.batch):
            rows = order[start : start + options.batch]
            yield {"image": images[rows], "label": labels[rows]}


def rows_of(batch, rank, ranks):
    """The rows of one process."""
    return jax.tree.map(lambda x: np.split(x, ranks)[rank], batch)


def train_together(strategy, train, options):
    """Loss of every step, and the trained weights."""
    replicas = strategy.num_replicas_in_sync
    if options.batch % replicas:
        raise SystemExit(f"--batch {options.batch}: not a multiple of {replicas}")
    with strategy.scope():
        params = zs.create_variables(init_params(options.seed))
        optimizer = zs.Optimizer(optax.adam(options.rate))

    @zs.function
    def train_step(iterator):
        def replica_fn(batch):
            def share(params):
                return loss_fn(params, batch) / replicas

            loss, grads = zs.value_and_grad(share)(params)
            optimizer.apply_gradients(grads, params)  # summed over all replicas
            return loss

        losses = strategy.run(replica_fn, args=(next(iterator),))
        return strategy.reduce("sum", losses, axis=None)

    def dataset_fn(context):
        rank, ranks = context.input_pipeline_id, context.num_input_pipelines
        return (rows_of(batch, rank, ranks) for batch in batches(train, options))

    iterator = iter(strategy.distribute_datasets_from_function(dataset_fn))
    losses = [train_step(iterator) for _ in range(options.steps)]
    weights = jax.tree.map(lambda variable: variable.numpy(), params)
    return np.array([float(loss) for loss in losses]), weights


def train_alone(train, options):
    """The same steps in one process without zstrat."""
    optimizer = optax.adam(options.rate)

    @jax.jit
    def step(params, state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = init_params(options.seed)
    state, losses = optimizer.init(params), []
    for batch, _ in zip(batches(train, options), range(options.steps), strict=False):
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
    return np.array(losses)


def report(losses, weights, train, test, seconds, options):
    """Prints the comparison; whether all goals are reached."""
    images, labels = test
    alone = train_alone(train, options)
    apart = np.max(np.abs(losses - alone) / np.abs(alone))
    accuracy = np.mean(np.asarray(predict(weights, images)) == labels)
    for step in range(0, options.steps, max(1, options.steps // 8)):
        print(f"step {step:4}  loss {losses[step]:.6f}  alone {alone[step]:.6f}")
    print(f"{options.steps} steps in {seconds:.1f} s")
    print(f"largest difference of the losses: {apart:.1e} (goal {TOLERANCE:.0e})")
    print(f"test accuracy {accuracy:.2%} (goal {GOAL:.0%})")
    return apart <= TOLERANCE and accuracy >= GOAL


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--workers", type=int, default=4, help="processes to start here")
    add("--steps", type=int, default=300)
    add("--batch", type=int, default=128, help="images, over all processes")
    add("--rate", type=float, default=1e-3, help="learning rate of Adam")
    add("--seed", type=int, default=0)
    return parser.parse_args()


def main():
    options = arguments()
    if not os.environ.get("TF_CONFIG"):
        copies = [sys.executable, "-m", "zstrat.cli", "run", "-n", str(options.workers)]
        return subprocess.call([*copies, __file__, *sys.argv[1:]])
    train, test = load_digits()
    with zs.MultiWorkerMirroredStrategy() as strategy:
        began = time.perf_counter()
        losses, weights = train_together(strategy, train, options)
        seconds = time.perf_counter() - began
        saves = strategy.extended.should_checkpoint
    if not saves:
        return 0
    return 0 if report(losses, weights, train, test, seconds, options) else 1


if __name__ == "__main__":
    sys.exit(main())

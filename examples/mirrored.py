"""Handwritten digits on all devices of one machine: a copy of the model on each.

The model and the images of `digits`. Each batch is cut into one piece for each device;
the gradients of all pieces are summed before every copy makes the same update. With no
accelerator the devices are parts of the CPU, eight unless told otherwise.

    python examples/mirrored.py
    python examples/mirrored.py --devices 4
"""

from __future__ import annotations

import argparse
import sys
import time

import jax
import numpy as np
import optax
from digits import GOAL, init_params, load_digits, loss_fn, predict
from rich.progress import track

import zstrat as zs


class Training:
    """The copies of the variables, and the step that keeps them equal."""

    def __init__(self, strategy, train, options):
        images, labels = train
        self.strategy = strategy
        with strategy.scope():
            self.params = zs.create_variables(init_params(options.seed))
            self.optimizer = zs.Optimizer(optax.adam(options.rate))
        dataset = zs.data.Dataset.from_tensor_slices({"image": images, "label": labels})
        dataset = dataset.shuffle(len(labels), seed=options.seed).repeat()
        dataset = dataset.batch(options.batch, drop_remainder=True)
        self.iterator = iter(strategy.experimental_distribute_dataset(dataset))
        self.step = zs.function(self._step)

    def _step(self, iterator):
        def replica_fn(batch):
            def share(params):
                return loss_fn(params, batch) / self.strategy.num_replicas_in_sync

            loss, grads = zs.value_and_grad(share)(self.params)
            self.optimizer.apply_gradients(grads, self.params)  # summed over replicas
            return loss

        losses = self.strategy.run(replica_fn, args=(next(iterator),))
        return self.strategy.reduce("sum", losses, axis=None)

    def accuracy(self, test):
        """Of the test images, by the weights as they are now."""
        images, labels = test
        weights = jax.tree.map(lambda variable: variable.numpy(), self.params)
        return float(np.mean(np.asarray(predict(weights, images)) == labels))


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--devices", type=int, default=8, help="parts of the CPU, without accelerators")
    add("--steps", type=int, default=600)
    add("--batch", type=int, default=64, help="images of a step, over all devices")
    add("--rate", type=float, default=2e-3, help="learning rate of Adam")
    add("--seed", type=int, default=0)
    return parser.parse_args()


def main():
    options = arguments()
    # Before jax looks for its devices; no accelerator takes notice of it.
    jax.config.update("jax_num_cpu_devices", options.devices)
    strategy = zs.MirroredStrategy()
    replicas = strategy.num_replicas_in_sync
    print(f"{replicas} replicas on {jax.devices()[0].device_kind} devices")
    train, test = load_digits()
    training = Training(strategy, train, options)
    began = time.perf_counter()
    for _ in track(range(options.steps), "training", disable=not sys.stdout.isatty()):
        loss = training.step(training.iterator)
    seconds = time.perf_counter() - began
    accuracy = training.accuracy(test)
    print(f"{options.steps} steps in {seconds:.1f} s; last loss {float(loss):.4f}")
    print(f"test accuracy {accuracy:.2%} (goal {GOAL:.0%})")
    return 0 if accuracy >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())

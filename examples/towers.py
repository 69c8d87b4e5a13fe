"""Handwritten digits in the manner of TF 1.12: programs of towers, and no coordinator.

The model and the images of `digits`. Every worker runs this whole program. Its towers
take a batch each and meet in a ``merge_call``, where the mean of their gradients
updates the variables, which live on parameter servers. Workers do not wait for each
other: they share the variables, and a count of steps that tells them when to end. By
default this program starts two parameter servers, and two of itself, on this machine;
if TF_CONFIG is set it is one worker of that cluster.

    python examples/towers.py
    python examples/towers.py --workers 3 --towers 4
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time

import jax
import numpy as np
from digits import GOAL, init_params, load_digits, loss_fn, predict

import zstrat as zs
from zstrat.contrib import distribute

MEAN = zs.VariableAggregation.MEAN
FIRST = zs.VariableAggregation.ONLY_FIRST_TOWER


class Training:
    """The variables that all workers share, and the step that each makes by itself."""

    def __init__(self, distribution, train, task, options):
        images, labels = train
        self.distribution = distribution
        self.rate = options.rate
        with distribution.scope():  # made by the first worker; the others wait for them
            self.params = zs.create_variables(init_params(options.seed))
            self.steps = zs.Variable(np.int32(0), aggregation=FIRST, name="steps")

        def dataset_fn():
            data = zs.data.Dataset.from_tensor_slices(
                {"image": images, "label": labels}
            )
            data = data.shuffle(len(labels), seed=options.seed + task)
            return data.repeat().batch(options.batch, drop_remainder=True)

        self.iterator = iter(distribution.distribute_dataset(dataset_fn))
        self.step = zs.function(self._step)

    def _step(self, iterator):
        losses = self.distribution.call_for_each_tower(self._tower, next(iterator))
        loss = self.distribution.reduce(MEAN, losses, self.steps)
        return loss, self.steps.value()

    def _tower(self, batch):
        """What each tower does with its batch."""
        loss, grads = zs.value_and_grad(loss_fn)(self.params, batch)
        self.steps.assign_add(1)  # by the first tower of every worker
        zs.get_tower_context().merge_call(self._merge, jax.tree.leaves(grads))
        return loss

    def _merge(self, distribution, grads):
        """What happens once, when all towers have come with their gradients."""
        variables = jax.tree.leaves(self.params)
        pairs = list(zip(grads, variables, strict=True))
        means = distribution.batch_reduce(MEAN, pairs)
        for variable, mean in zip(variables, means, strict=True):
            distribution.update(variable, self._descend, mean)

    def _descend(self, variable, gradient):
        """What happens where the variable is."""
        return variable.assign_sub(self.rate * gradient)

    def until(self, steps, every):
        """Trains until all workers together have made so many steps; returns how many
        were made here."""
        here = count = 0
        with self.distribution.scope():
            while count < steps:
                loss, count = (float(x) for x in self.step(self.iterator))
                here += 1
                if here % every == 0:
                    print(f"step {count:.0f}/{steps}  loss {loss:.4f}")
        return here

    def accuracy(self, test):
        """Of the test images, by the weights as they are on the ps now."""
        images, labels = test
        weights = jax.tree.map(lambda variable: variable.numpy(), self.params)
        return float(np.mean(np.asarray(predict(weights, images)) == labels))


def join_cluster(options):
    """The strategy of this worker, and its number among the workers."""
    resolver = zs.cluster_resolver.TFConfigClusterResolver()
    cluster = resolver.cluster_spec().as_dict()
    if options.servers:
        cluster["ps"] = options.servers.split(",")
    if "ps" not in cluster:
        sys.exit(
            "TF_CONFIG names no ps: start zstrat-ps, and name it there or say "
            "--servers HOST:PORT,..."
        )
    # Before jax looks for its devices; no accelerator takes notice of it.
    jax.config.update("jax_num_cpu_devices", options.towers)
    distribution = distribute.ParameterServerStrategy(options.towers)
    task = {"task_type": resolver.task_type, "task_id": resolver.task_id}
    distribution.configure(cluster_spec=cluster, **task)
    return distribution, resolver.task_id


def train_here(options):
    """One worker of the cluster; the exit code of this program."""
    train, test = load_digits()
    distribution, task = join_cluster(options)
    with contextlib.closing(distribution):
        servers = len(distribution.parameter_devices)
        print(f"{distribution.num_towers} towers here, variables on {servers} ps")
        training = Training(distribution, train, task, options)
        began = time.perf_counter()
        here = training.until(options.steps, options.every)
        print(f"made {here} steps in {time.perf_counter() - began:.1f} s")
        if not distribution.should_checkpoint:
            return 0
        accuracy = training.accuracy(test)
    print(f"test accuracy {accuracy:.2%} (goal {GOAL:.0%})")
    return 0 if accuracy >= GOAL else 1


def start_all(options):
    """Parameter servers and workers on this machine; the exit code of the workers."""
    print(
        f"starting {options.ps} ps and {options.workers} workers on this machine",
        flush=True,
    )
    with zs.LocalCluster(options.ps, num_workers=0) as cluster:
        copies = [sys.executable, "-m", "zstrat.cli", "run", "-n", str(options.workers)]
        servers = ["--servers", ",".join(cluster.spec.job_tasks("ps"))]
        return subprocess.call([*copies, __file__, *sys.argv[1:], *servers])


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--servers", help="addresses of ps that run already, HOST:PORT,...")
    add("--ps", type=int, default=2, help="parameter servers to start here")
    add("--workers", type=int, default=2, help="workers to start here")
    add("--towers", type=int, default=2, help="of each worker, a device for each")
    add("--steps", type=int, default=800, help="of all workers together")
    add("--batch", type=int, default=32, help="images of a step, for each tower")
    add("--rate", type=float, default=0.1, help="of gradient descent")
    add("--every", type=int, default=100, help="steps of a worker between two lines")
    add("--seed", type=int, default=0)
    return parser.parse_args()


def main():
    options = arguments()
    try:
        started = os.environ.get("TF_CONFIG")  # by zstrat run, or on a cluster
        return train_here(options) if started else start_all(options)
    except zs.errors.ZstratError as error:
        print(f"cannot go on: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # who started the workers has ended them
        return 130


if __name__ == "__main__":
    sys.exit(main())

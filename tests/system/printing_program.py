"""A program whose workers print in every way there is; run by `test_system_printing`.

What it says itself begins with ``--``.
"""

import logging
import os
import select
import signal
import sys
import warnings

import jax
import numpy as np

import zstrat as zs

FLOOD = 30_000


def dataset_fn(context):
    print("dataset of", context.input_pipeline_id)

    def batches():
        while True:
            yield np.ones(3, "float32")

    return batches()


@zs.function
def traced(iterator):
    print("traced")
    jax.debug.print("sum {}", next(iterator).sum())


@zs.function(eager=True)
def eager():
    print("eager", end="")
    print("to stderr", file=sys.stderr)
    logging.warning("logged")
    warnings.warn("warned", stacklevel=1)


@zs.function(eager=True)
def flood():
    for number in range(FLOOD):
        print("flood", number)


@zs.function(eager=True)
def die():
    if zs.get_worker_context().attempt == 1:
        print("last words")
        os.kill(os.getpid(), signal.SIGSEGV)


def main():
    cluster = zs.LocalCluster(num_ps=1, num_workers=1)
    strategy = zs.ParameterServerStrategy(cluster.resolver)
    coordinator = zs.ClusterCoordinator(strategy)
    iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
    for _ in range(2):
        coordinator.schedule(traced, args=(iterator,)).fetch()
        print("-- traced", flush=True)
    for _ in range(2):
        coordinator.schedule(eager).fetch()
        print("-- eager", flush=True)
    coordinator.schedule(flood)
    coordinator.join()
    print("-- flood", cluster.log("worker:0").count("flood "), flush=True)
    strategy.close()
    with zs.ParameterServerStrategy(cluster.resolver, output="files") as silent:
        zs.ClusterCoordinator(silent).schedule(eager).fetch()
    print("-- files", flush=True)
    with zs.ParameterServerStrategy(cluster.resolver) as last:
        coordinator = zs.ClusterCoordinator(last)
        died = os.pidfd_open(cluster.pid("worker:0"))
        value = coordinator.schedule(die)
        select.select([died], [], [])
        cluster.restart("worker:0")
        value.fetch()
    print("-- end", flush=True)


if __name__ == "__main__":
    main()

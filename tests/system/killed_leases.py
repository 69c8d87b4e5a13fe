"""A program that counts leased examples in a session called "leases", and is killed in
the midst of it.

python killed_leases.py '{"ps": [...], "worker": [...]}' SIZE CHECKPOINT
"""

import json
import os
import signal
import sys

import jax.numpy as jnp
import numpy as np

import zstrat as zs


class CountingLeases:
    """Each step adds one to the counter of each example that it reads."""

    def __init__(self, strategy, size, eager=False):
        self.coordinator = zs.ClusterCoordinator(strategy)
        with strategy.scope():
            counts = self.counts = zs.Variable(np.zeros(size, "i4"), name="counts")
        data = self.coordinator.create_leased_dataset(
            np.arange(size), 8, shuffle_seed=5, epochs=3
        )
        self.data, self.iterator = data, iter(data)
        self.checkpoint = zs.Checkpoint(counts=counts, iterator=self.iterator)

        @zs.function(eager=eager)
        def count(iterator):
            ids = jnp.asarray(next(iterator))
            counts.assign_add(jnp.zeros(size, jnp.int32).at[ids].add(1))
            return len(ids)

        self.step = count

    def schedule(self, steps):
        schedule = self.coordinator.schedule
        return [schedule(self.step, (self.iterator,)) for _ in range(steps)]

    def rest(self):
        for epoch in self.iterator.epochs:
            for _ in epoch:
                self.schedule(1)


if __name__ == "__main__":
    spec, size, path = json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    resolver = zs.cluster_resolver.SimpleClusterResolver(zs.ClusterSpec(spec))
    strategy = zs.ParameterServerStrategy(resolver, resume="leases")
    assert not strategy.resumed
    work = CountingLeases(strategy, size)
    work.checkpoint.restore(path)
    work.schedule(30)
    work.coordinator.join()
    work.schedule(60)[20].fetch()
    os.kill(os.getpid(), signal.SIGKILL)

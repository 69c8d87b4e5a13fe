"""A program that trains in a session called "run" and is killed in the midst of it.

python killed_program.py '{"ps": [...], "worker": [...]}' JOINED MORE [REPLICAS]
"""

import json
import os
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zstrat as zs

SLOTS = 400
IDS = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, (SLOTS, 1))


class Counting:
    """Each step adds one to a slot of its own on each server, and to the row of an id.

    Args:
        learns: It moves ``w`` by Adam, too, which has the servers load jax.
    """

    def __init__(self, strategy, learns=False):
        self.coordinator = zs.ClusterCoordinator(strategy)
        with strategy.scope():
            self.counts = [zs.Variable(np.zeros(SLOTS, "f4"), name=n) for n in "ab"]
            self.w = zs.Variable(np.zeros(3, "f4"), name="w")
            zeros = zs.initializers.constant(0.0)
            self.table = zs.HashTable(1, initializer=zeros, seed=1, name="table")
            adam = zs.Optimizer(optax.adam(0.1)) if learns else None
        a, b, w, table = *self.counts, self.w, self.table

        @zs.function
        def step(i, number):
            table.lookup(number)
            table.scatter_add(zs.IndexedSlices(jnp.ones((1, 1)), number))
            hot = jax.nn.one_hot(i, SLOTS, dtype=jnp.float32)
            a.assign_add(hot)
            b.assign_add(hot)
            if adam is not None:
                adam.apply_gradients([(jnp.ones(3), w)])
            return i

        self.step = step

    def schedule(self, numbers):
        schedule = self.coordinator.schedule
        return [schedule(self.step, args=(np.int32(i), IDS[i])) for i in numbers]

    def check_table(self):
        """Each id has been counted as often as its slot."""
        rows = self.table.lookup(IDS[:, 0])[:, 0]
        np.testing.assert_array_equal(rows, self.counts[0].numpy())
        assert len(self.table) == np.count_nonzero(rows)


if __name__ == "__main__":
    spec, joined, more = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    resolver = zs.cluster_resolver.SimpleClusterResolver(zs.ClusterSpec(spec))
    replicas = int(sys.argv[4]) if len(sys.argv) > 4 else 0
    strategy = zs.ParameterServerStrategy(resolver, resume="run", replicas=replicas)
    work = Counting(strategy, learns=bool(replicas))
    work.schedule(range(joined))
    work.coordinator.join()
    work.schedule(range(joined, joined + more))[0].fetch()
    os.kill(os.getpid(), signal.SIGKILL)

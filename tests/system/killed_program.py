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


class Counting:
    """Each step adds one to a slot of its own on each server.

    Args:
        learns: It moves ``w`` by Adam, too, which has the servers load jax.
    """

    def __init__(self, strategy, learns=False):
        self.coordinator = zs.ClusterCoordinator(strategy)
        with strategy.scope():
            self.counts = [zs.Variable(np.zeros(SLOTS, "f4"), name=n) for n in "ab"]
            self.w = zs.Variable(np.zeros(3, "f4"), name="w")
            adam = zs.Optimizer(optax.adam(0.1)) if learns else None
        a, b, w = *self.counts, self.w

        @zs.function
        def step(i):
            hot = jax.nn.one_hot(i, SLOTS, dtype=jnp.float32)
            a.assign_add(hot)
            b.assign_add(hot)
            if adam is not None:
                adam.apply_gradients([(jnp.ones(3), w)])
            return i

        self.step = step

    def schedule(self, numbers):
        schedule = self.coordinator.schedule
        return [schedule(self.step, args=(np.int32(i),)) for i in numbers]


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

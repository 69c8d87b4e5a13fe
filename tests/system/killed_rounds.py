"""A program whose steps contribute to rounds in a session called "rounds", and which is
killed in the midst of them.

python killed_rounds.py '{"ps": [...], "worker": [...]}' FIRST FETCHED MORE
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

SLOTS, WORKERS = 300, 2


class CountingRounds:
    """Each step takes one from a slot of its own on each server, in a round. The
    optimizer needs a norm of all gradients, which a worker computes."""

    def __init__(self, strategy):
        self.coordinator = zs.ClusterCoordinator(strategy)
        with strategy.scope():
            self.counts = [zs.Variable(np.zeros(SLOTS, "f4"), name=n) for n in "ab"]
            optimizer = zs.Optimizer(
                optax.chain(optax.clip_by_global_norm(1e6), optax.sgd(1.0)),
                rounds=zs.Rounds(workers=WORKERS, merge="sum"),
            )
        a, b = self.counts

        @zs.function
        def step(i):
            hot = jax.nn.one_hot(i, SLOTS, dtype=jnp.float32)
            optimizer.apply_gradients([(hot + 0 * a.value(), a), (hot, b)])
            return i

        self.step = step

    def schedule(self, numbers):
        schedule = self.coordinator.schedule
        return [schedule(self.step, args=(np.int32(i),)) for i in numbers]


if __name__ == "__main__":
    spec, (first, fetched, more) = json.loads(sys.argv[1]), map(int, sys.argv[2:])
    resolver = zs.cluster_resolver.SimpleClusterResolver(zs.ClusterSpec(spec))
    work = CountingRounds(zs.ParameterServerStrategy(resolver, resume="rounds"))
    for value in work.schedule(range(first, first + fetched)):
        value.fetch()
    if more:
        first += fetched
        work.schedule(range(first, first + more))[0].fetch()
    os.kill(os.getpid(), signal.SIGKILL)

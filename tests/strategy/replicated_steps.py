"""Steps of four replicas, planned here and run on a worker."""

import jax.numpy as jnp
import numpy as np

from zstrat.program import StepIterator, function

R = 4
RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 3)).astype(np.float32)
Y = RNG.normal(size=(8,)).astype(np.float32)
W = RNG.normal(size=3).astype(np.float32)


def loss_fn(w, x, y):
    return jnp.mean((x @ w - y) ** 2)


def batches(*elements):
    return StepIterator(iter(elements), elements[0])


def run(cluster, body, *args):
    """The body as a step: planned here, run on the worker from shipped code."""
    step = function(body)
    plan = step.plan(args)
    shipped = cluster.ship(step)
    result = cluster.run(shipped, *args)
    there = shipped.plan(args) if not any_iterator(args) else plan
    assert there.reads == plan.reads
    assert [u.op for u in there.updates] == [u.op for u in plan.updates]
    return result


def any_iterator(args):
    return any(isinstance(arg, StepIterator) for arg in args)

"""A region that is traced by itself hands its reads and updates on explicitly.

This is how the replicas of ``strategy.run`` meet the capture of the step around them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import zstrat.program as zs
from zstrat.variables import VariableUpdate, recorder

MESH = Mesh(np.array(jax.devices()[:1]), ("replica",))


class Given:
    """A feed of values that were read outside of the region."""

    def __init__(self, values):
        self._values = values

    def value(self, spec):
        return self._values[spec.key]

    def element(self, ordinal, iterator):
        raise AssertionError("draws happen outside")


def replicate(fn, x):
    """``fn`` on each shard of ``x``; updates are summed over the replicas."""
    outer = recorder.get()
    found = []

    def discovered(seed, x):
        capture = zs.Capture(zs.Discovery(seed, supply=None))
        with capture.recording():
            result = fn(x)
        found.append(capture)
        return result

    lifted = jax.vmap(discovered, axis_name="replica", in_axes=(None, 0))
    jax.eval_shape(lifted, jnp.float32(0), x[None])
    probe = found[0]
    values = {key: outer.read(v) for key, v in probe.reads.items()}

    def body(values, x):
        capture = zs.Capture(Given(values))
        with capture.recording():
            result = fn(x)
        sums = [jax.lax.psum(u.operands, "replica") for u in capture.updates]
        return jnp.asarray(result)[None], sums

    everywhere, split = PartitionSpec(), PartitionSpec("replica")
    mapped = jax.shard_map(
        body,
        mesh=MESH,
        in_specs=(everywhere, split),
        out_specs=(split, everywhere),
        check_vma=False,
    )
    results, operands = mapped(values, x)
    for update, arrays in zip(probe.updates, operands, strict=True):
        outer.update(
            VariableUpdate(update.variable, update.op, tuple(arrays), update.optimizer)
        )
    return results


def test_a_region_in_a_step(storage):
    v = storage.variable(np.array([1.0, 2.0], np.float32))

    @zs.function
    def step(x):
        def replica(x):
            grads = zs.grad(lambda v: jnp.sum(x @ v))(v)
            v.assign_sub(grads)
            zs.get_worker_context()
            return jax.lax.psum(jnp.sum(x @ v.value()), "replica")

        return replicate(replica, x), v.value()

    x = np.arange(4, dtype=np.float32).reshape(2, 2)
    for _ in range(2):
        before = storage.values[v.spec.key]
        expected = before - x.sum(axis=0)
        results, after = step(x)
        np.testing.assert_allclose(results, [np.sum(x @ expected)])
        np.testing.assert_allclose(after, expected)
        np.testing.assert_allclose(storage.values[v.spec.key], expected)
    assert step.trace_count == 1
    assert step.plan((x,)).asked_context

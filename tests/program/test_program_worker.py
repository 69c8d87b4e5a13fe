"""A script with a file beside it, run from another folder with a cluster of its own."""

from __future__ import annotations

import programs
import pytest

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("programs")]

BESIDE = """
import enum, functools, threading
import equinox as eqx, jax, jax.numpy as jnp

class Scale(eqx.Module):
    weight: jax.Array
    power: int = eqx.field(static=True, default=2)
    def __call__(self, x):
        return (self.weight * x) ** self.power + offset(1)

class Kind(enum.Enum):
    PLAIN = 1
    TWICE = 2
    def of(self, x):
        return self.value * x

@functools.cache
def offset(n):
    return n * OFFSET
OFFSET = 7

LOCK = threading.Lock()
def locked(x):
    with LOCK:
        return x

class Point:
    def __init__(self, x):
        self.x = x
jax.tree_util.register_pytree_node(
    Point, lambda p: ((p.x,), None), lambda _, parts: Point(*parts)
)
"""

SCRIPT = """
import functools
import numpy as np
import zstrat as zs
import beside
from beside import *

class Sum(eqx.Module):
    parts: list[Scale]
    def __call__(self, x):
        return show(sum(part(x) for part in self.parts))

@functools.singledispatch
def show(x):
    return x + beside.offset(2)

MODEL, X = Sum([Scale(jnp.ones(3)), Scale(jnp.arange(3.), power=1)]), np.arange(3.)

def steps():
    yield lambda model, x: model(x), (MODEL, X)
    yield lambda x: MODEL(x), (X,)
    yield MODEL.__call__, (X,)
    yield lambda model: jax.tree.map(lambda leaf: 2 * leaf, model), (MODEL,)
    yield lambda x: locked(beside.Point(x)).x, (X,)
    yield lambda point: point, (Point(X),)
    yield lambda kind, x: kind.of(x) + (kind is Kind.TWICE), (Kind.TWICE, X)

if __name__ == "__main__":
    beside.OFFSET = 3  # what is so now goes to the worker
    with zs.LocalCluster(num_ps=1, num_workers=1) as cluster:
        strategy = zs.ParameterServerStrategy(cluster.resolver)
        coordinator = zs.ClusterCoordinator(strategy)
        for number, (step, args) in enumerate(steps()):
            result = coordinator.schedule(zs.function(step), args=args).fetch()
            here = step(*args)
            assert jax.tree.structure(result) == jax.tree.structure(here), number
            same = jax.tree.leaves(jax.tree.map(np.allclose, result, here))
            assert same and all(same), (number, result, here)
        coordinator.shutdown(cluster=True)
"""


def test_models_of_a_script_and_of_the_file_beside_it(tmp_path):
    (tmp_path / "beside.py").write_text(BESIDE)
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [str(tmp_path / "script.py")]
    ran = programs.run(command, cwd="/", capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr

"""A small script: what it defines is in ``__main__``, and workers have no copy of it.

The script makes cases, each a function and its arguments; another process runs them
from the bytes alone and must get what the script gets.
"""

from __future__ import annotations

import numpy as np
import programs
import pytest

pytestmark = pytest.mark.usefixtures("programs")

SCRIPT = """
import contextlib, dataclasses, functools, pathlib, sys
import jax, jax.numpy as jnp, numpy as np
import zstrat.program as zs

@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    x: jax.Array
    y: jax.Array
    name: str = dataclasses.field(metadata={"static": True})

@jax.tree_util.register_pytree_node_class
class Node:
    def __init__(self, x):
        self.x = x
    def tree_flatten(self):
        return (self.x,), None
    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children)

@jax.tree_util.register_static
class Mode(str):
    pass

class Base:
    def __init_subclass__(cls):
        there = lambda node: ((node.x,), None)
        jax.tree_util.register_pytree_node(cls, there, lambda _, c: cls(*c))
    def __init__(self, x):
        self.x = x

class Derived(Base):
    pass

def double(tree):
    return jax.tree.map(lambda x: 2 * x, tree)

def captured(state=State(jnp.ones(2), jnp.zeros(1), "n")):
    return double(state).x

def local():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Local:
        x: object
    return Local(np.float32(3))
"""

FUNCTIONS = """
@jax.custom_vjp
def seven(x):
    return 2 * x
seven.defvjp(lambda x: (seven(x), None), lambda _, g: (7 * g,))

@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def times(x, n):
    return n * x
times.defvjp(lambda x, n: (n * x, x), lambda n, x, g: (x * g + n,))

@jax.checkpoint
def wave(x):
    return scaled(jnp.sin(x)).sum()

@functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
def layer(x):
    return jnp.tanh(x @ x)

def scaled(x):
    return 3 * x

@contextlib.contextmanager
def factor():
    yield 4

@functools.wraps(scaled)
def own(x):
    return x + scaled(x)

def mean(x):
    with factor() as n:
        return n * x.mean()

def recursive():
    @functools.partial(jax.checkpoint, static_argnums=(1,))
    def down(x, n):
        return x if n == 0 else jnp.sin(down(x, n - 1))
    return down

down, X, M = recursive(), np.ones(2, np.float32), np.ones((2, 2), np.float32)
"""

OF_CLASSES = """{
    "dataclass": (double, (State(np.float32(1), np.float32(2), "name"),)),
    "node": (double, (Node(np.float32(5)),)),
    "static": (lambda m: jax.jit(lambda m: len(m), static_argnums=())(m),
               (Mode("abc"),)),
    "itself": (double, (Derived(np.float32(7)),)),
    "captured": (captured, ()),
    "local": (double, (local(),)),
}"""

OF_FUNCTIONS = """{
    "vjp": (lambda x: jax.grad(lambda y: seven(y).sum())(x), (X,)),
    "nondiff": (lambda x: jax.grad(lambda y: times(y, 3.0).sum())(x), (X,)),
    "checkpoint": (lambda x: jax.value_and_grad(wave)(x), (X,)),
    "policy": (lambda x: jax.grad(lambda y: layer(y).sum())(x), (M,)),
    "recursive": (lambda x: jax.grad(lambda y: down(y, 3).sum())(x), (X,)),
    "vmap": (jax.vmap(lambda x: 3 * x), (X,)),
    "grad": (jax.grad(wave), (X,)),
    "jit": (jax.jit(mean), (X,)),
    "manager": (mean, (X,)),
    "wraps": (own, (X,)),
    "relu": (lambda x: jax.grad(lambda y: jax.nn.relu(y).sum())(x), (X,)),
}"""

LOADER = """
import pathlib, sys
import jax, numpy as np
import zstrat.program as zs
folder = pathlib.Path(sys.argv[1])
for path in sorted(folder.glob("*.code")):
    function = zs.load(path.read_bytes())
    args = zs.load(path.with_suffix(".args").read_bytes())
    prepared = zs.prepare(function, args, {})
    result = prepared.run([])
    leaves = [np.asarray(leaf) for leaf in result.leaves]
    np.savez(path.with_suffix(".there.npz"), *leaves)
"""

SENDER = """
folder = pathlib.Path(sys.argv[1])
for name, (function, args) in CASES.items():
    (folder / f"{name}.code").write_bytes(zs.dump_code(zs.function(function)))
    (folder / f"{name}.args").write_bytes(zs.dump_code(args))
    leaves = jax.tree.leaves(function(*args))
    np.savez(folder / f"{name}.here.npz", *map(np.asarray, leaves))
"""


@pytest.fixture(scope="module")
def arrived(tmp_path_factory):
    """What two processes make of all cases: by name what the script gets itself, and
    what the other process gets from the bytes."""
    folder = tmp_path_factory.mktemp("cases")
    cases = f"CASES = {{**{OF_CLASSES}, **{OF_FUNCTIONS}}}"
    (folder / "script.py").write_text("\n".join([SCRIPT, FUNCTIONS, cases, SENDER]))
    for program in ([str(folder / "script.py")], ["-c", LOADER]):
        programs.run([*program, str(folder)], check=True, cwd="/", timeout=100)
    here, there = [
        {path.name.partition(".")[0]: path for path in folder.glob(f"*.{place}.npz")}
        for place in ("here", "there")
    ]
    assert here.keys() == there.keys()
    return {name: (path, there[name]) for name, path in here.items()}


def check(arrived, names):
    for name in names:
        here, there = arrived[name]
        with np.load(there) as got, np.load(here) as expected:
            assert sorted(got) == sorted(expected), name
            for leaf in expected:
                assert got[leaf].dtype == expected[leaf].dtype, name
                np.testing.assert_array_equal(got[leaf], expected[leaf], name)


def test_pytree_classes_of_a_script_arrive_registered(arrived):
    check(arrived, ["dataclass", "node", "static", "itself", "captured", "local"])


@pytest.mark.parametrize(
    "name",
    [
        "vjp",
        "nondiff",
        "checkpoint",
        "policy",
        "recursive",
        "vmap",
        "grad",
        "jit",
        "manager",
        "wraps",
        "relu",
    ],
)
def test_functions_made_by_jax_and_by_the_library_arrive(arrived, name):
    check(arrived, [name])

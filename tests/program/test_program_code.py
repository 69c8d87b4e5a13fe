"""Shipping code and data: user code by value, and errors for the rest."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
import threading
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zstrat.program as zs
from zstrat.errors import ProtocolError, VersionMismatchError
from zstrat.variables import Optimizer, Variable, values

SCALE = 3


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    x: jax.Array
    y: jax.Array
    name: str = dataclasses.field(metadata={"static": True})

    def total(self):
        return SCALE * (self.x + self.y)


@jax.tree_util.register_pytree_node_class
class Node:
    def __init__(self, x):
        self.x = x

    def tree_flatten(self):
        return (self.x,), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children)


@jax.tree_util.register_pytree_with_keys_class
class KeyNode(Node):
    def tree_flatten_with_keys(self):
        return ((jax.tree_util.GetAttrKey("x"), self.x),), None


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Trained:
    """Its method uses an optimizer of its own tree, which arrives before it is made."""

    x: object

    def train(self, gradient):
        OPTIMIZERS[-1].apply_gradients(Trained(gradient), self)


OPTIMIZERS = []


def helper(x):
    return x + SCALE


RUNNER = """
import sys, numpy as np
import zstrat.program as zs
code, arguments, out = sys.argv[1:]
function = zs.load(open(code, "rb").read())
args = zs.load(open(arguments, "rb").read())
prepared = zs.prepare(function, args, {})
assert [spec.name for spec in prepared.plan.reads] == ["w"], prepared.plan.reads
result = prepared.run([np.float32(10)])
structure = prepared.plan.out_structure
leaves = {f"leaf{n}": leaf for n, leaf in enumerate(result.leaves)}
update = result.updates[0]
np.savez(out, update=update.arrays[0], optimizer=update.optimizer,
         text=repr(structure.treedef), **leaves)
assert "test_program_code" not in sys.modules
"""


def test_a_step_runs_in_another_process(storage, tmp_path):
    """Closures over variables, optimizer, steps, arrays, keys and classes."""
    w, optimizer = (
        storage.variable(np.float32(1), "w"),
        storage.optimizer(optax.sgd(0.1)),
    )
    constant, key = jnp.arange(3.0), jax.random.key(7)

    @zs.function
    def inner(state):
        return helper(state.total()) + w.value()

    @zs.function
    def step(state, node):
        doubled = jax.tree.map(lambda x: 2 * x, state)
        result = {"inner": inner(doubled), "node": node.x, "s": doubled}
        optimizer.apply_gradients([(constant[1], w)])
        return result | {"noise": jax.random.uniform(key)}

    state = State(np.float32(1), np.float32(2), "name")
    arguments = (state, Node(np.float32(5)))
    (tmp_path / "code").write_bytes(step.code)
    (tmp_path / "args").write_bytes(zs.dump_code(arguments))
    paths = [str(tmp_path / name) for name in ("code", "args", "out.npz")]
    subprocess.run([sys.executable, "-c", RUNNER, *paths], check=True, cwd="/")
    got = np.load(tmp_path / "out.npz")
    assert got["leaf0"] == 3 * 2 * 3 + 3 + 10
    assert got["leaf1"] == 5.0
    assert got["leaf2"] == jax.random.uniform(key)
    assert (got["leaf3"], got["leaf4"]) == (2.0, 4.0)
    assert (got["update"], got["optimizer"]) == (1.0, optimizer.id)
    assert "State" in str(got["text"])


@pytest.mark.parametrize("made", [Node, KeyNode, Trained])
def test_an_optimizer_of_a_tree_of_a_users_class_arrives(
    storage, tmp_path, made, programs
):
    """It was flattened before jax was told of the class."""
    params = made(storage.variable(np.float32(1), "w"))
    optimizer = storage.optimizer(optax.sgd(0.1), params)
    structure = jax.tree.structure(params)
    OPTIMIZERS[:] = [optimizer]

    @zs.function
    def step():
        (value,) = structure.flatten_up_to(values(params))
        if isinstance(params, Trained):
            params.train(2 * value)
        else:
            optimizer.apply_gradients(structure.unflatten([2 * value]), params)
        return value

    (tmp_path / "code").write_bytes(step.code)
    (tmp_path / "args").write_bytes(zs.dump_code(()))
    paths = [str(tmp_path / name) for name in ("code", "args", "out.npz")]
    programs.run(["-c", RUNNER, *paths], check=True, cwd="/")
    got = np.load(tmp_path / "out.npz")
    assert (got["leaf0"], got["update"]) == (10, 20)
    assert got["optimizer"] == optimizer.id


def test_code_and_digest_stay_the_same():
    step = zs.function(lambda: 1)
    assert step.code is step.code
    assert step.digest == zs.digest(step.code)
    assert len(step.digest) == 16


def test_a_recursive_function_and_a_method_are_shipped():
    class Model:
        scale = 2

        @zs.function
        def step(self, n):
            return self.scale if n == "stop" else self.step("stop") + 1

    model = Model()
    loaded = zs.load(model.step.code)
    result = zs.prepare(loaded, ("go",), {}).run([])
    assert zs.rebuild(result.layout.structure, result.leaves) == 3


def test_a_module_of_the_users_is_shipped_by_value(tmp_path, monkeypatch):
    (tmp_path / "my_model.py").write_text(
        "FACTOR = 4\ndef apply(x): return FACTOR * x\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import my_model

    code = zs.dump_code(zs.function(lambda x: my_model.apply(x)))
    monkeypatch.delitem(sys.modules, "my_model")
    assert zs.load(code)(np.float32(2)) == 8.0
    assert "my_model" not in sys.modules


def test_a_folder_of_the_users_may_end_in_packages(tmp_path, monkeypatch):
    folder = tmp_path / "my-packages"
    folder.mkdir()
    (folder / "my_packaged.py").write_text("def apply(x): return 5 * x\n")
    monkeypatch.syspath_prepend(folder)
    import my_packaged

    code = zs.dump_code(my_packaged.apply)
    monkeypatch.delitem(sys.modules, "my_packaged")
    assert zs.load(code)(2) == 10
    assert "my_packaged" not in sys.modules


@pytest.mark.parametrize("shape", [(), (2, 3)])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("scalar", [2.5, 3, 2j])
def test_weakly_typed_arrays_stay_weak(scalar, wide, shape):
    with jax.enable_x64(wide):
        weak = jnp.full(shape, scalar)
    (got,) = zs.load(*zs.dump((weak,)))
    assert got.weak_type
    assert (got.dtype, got.shape) == (weak.dtype, weak.shape)
    np.testing.assert_array_equal(got, weak)
    (strong,) = zs.load(*zs.dump((jnp.asarray(np.asarray(weak)),)))
    assert not strong.weak_type


def test_zstrat_and_installed_packages_go_by_reference():
    loaded = zs.load(zs.dump_code((zs.function, optax.sgd, jnp.sum)))
    assert loaded == (zs.function, optax.sgd, jnp.sum)


def test_large_arrays_travel_beside_data_and_inside_code():
    large = np.arange(1 << 16, dtype=np.float32).reshape(256, 256)
    small = np.arange(4)
    data = ({"large": large, "columns": np.asfortranarray(large)}, [small, "text"])
    code, arrays = zs.dump(data)
    assert len(code) < 1 << 12
    assert [a.nbytes for a in arrays] == [large.nbytes] * 2
    assert np.shares_memory(arrays[0], large)
    loaded = zs.load(code, arrays)
    jax.tree.map(np.testing.assert_array_equal, loaded, data)
    assert np.shares_memory(loaded[0]["large"], large)
    code, arrays = zs.dump(lambda: large)
    assert arrays == ()
    np.testing.assert_array_equal(zs.load(code)(), large)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float64", "bool"])
def test_arrays_of_every_kind(dtype):
    array = np.ones(1 << 18, jnp.dtype(dtype))
    (loaded,) = zs.load(*zs.dump((array,)))
    assert loaded.dtype == array.dtype
    np.testing.assert_array_equal(loaded, array)


def test_jax_arrays_and_keys_arrive_as_such():
    array, key = jnp.arange(3, dtype=jnp.bfloat16), jax.random.key(3, impl="rbg")
    got, got_key = zs.load(*zs.dump((array, key)))
    assert isinstance(got, jax.Array)
    assert got.dtype == jnp.bfloat16
    assert jax.random.key_impl(got_key) == jax.random.key_impl(key)
    np.testing.assert_array_equal(jax.random.bits(got_key), jax.random.bits(key))


def test_resources_travel_as_numbers():
    class Handle(zs.Resource):
        def __init__(self, number):
            self.resource = number
            self.lock = threading.Lock()

    code, _ = zs.dump(((Handle(7), [Handle(9)]), {}))
    assert zs.load(code, (), lambda number: f"it {number}") == (("it 7", ["it 9"]), {})
    with pytest.raises(ProtocolError):
        zs.load(code)


def test_errors_name_the_path_to_a_part_that_cannot_be_pickled():
    class Session:
        def __init__(self):
            self.name, self.lock = "mine", threading.Lock()

    session, lock = {"open": [Session()]}, threading.Lock()

    @zs.function
    def step():
        return session["open"][0].name

    words = r"'body'.*'session'.*'open'"
    with pytest.raises(TypeError, match=words) as caught:
        zs.dump_code(step)
    assert isinstance(caught.value.__cause__, TypeError)
    with pytest.raises(TypeError, match=r"'partly'.*\b0\b.*_thread\.lock"):
        zs.dump_code(_named(lambda x=lock: x, "partly"))
    with pytest.raises(TypeError, match=r"this tuple cannot be shipped.*item 1 is a"):
        zs.dump((1, lock))
    with pytest.raises(TypeError, match=r"_thread\.lock"):
        zs.dump(lock)


def test_a_large_captured_constant_is_warned_about():
    table = np.zeros((5, 1 << 20), np.float32)

    @zs.function
    def step():
        return table[0, 0]

    words = r"'body'.*'table'.*\b20\b"
    with pytest.warns(UserWarning, match=words):
        zs.dump_code(step)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zs.dump((table,))


def test_a_handle_has_no_value_on_another_task():
    step, optimizer = zs.load(
        zs.dump_code((zs.function(lambda v: v.value()), Optimizer(optax.sgd(0.1))))
    )
    variable = zs.load(zs.dump_code(Variable(1.0, name="here")))
    with pytest.raises(RuntimeError, match=r"'here'.*zs\.function"):
        step(variable)
    assert optimizer.transformation.init(np.float32(1)) is not None


def test_code_of_another_python_is_refused():
    code = bytearray(zs.dump_code(len))
    code[4] += 1
    with pytest.raises(VersionMismatchError):
        zs.load(bytes(code))


@pytest.mark.parametrize("junk", [b"", b"zs1", b"garbage", pickle.dumps(1)])
def test_bytes_that_are_not_code_are_refused(junk):
    with pytest.raises(ProtocolError):
        zs.load(junk)


def test_the_pickler_leaves_no_trace_in_cloudpickle():
    import cloudpickle

    module = types.ModuleType("generated")
    module.__file__ = "/home/user/generated.py"
    module.value = threading.Lock()
    before = cloudpickle.list_registry_pickle_by_value()
    sys.modules["generated"] = module
    try:
        with pytest.raises(TypeError, match="'value'"):
            zs.dump_code(_named(lambda: module.value, "uses a module"))
    finally:
        del sys.modules["generated"]
    assert cloudpickle.list_registry_pickle_by_value() == before


def _named(fn, name):
    fn.__qualname__ = name
    return fn


def test_a_pytree_class_registered_by_functions_is_refused():
    class Point:
        def __init__(self, x):
            self.x = x

    @dataclasses.dataclass
    class Shape:
        x: object

    jax.tree_util.register_pytree_node(Point, lambda p: ((p.x,), None), lambda _, c: c)
    jax.tree_util.register_pytree_node(
        Shape, lambda s: ((s.x + 1,), None), lambda _, c: Shape(*c)
    )
    words = r"'at'.*register_dataclass"
    with pytest.raises(TypeError, match=words):
        zs.dump({"at": Point(1)})
    with pytest.raises(TypeError, match="Shape"):
        zs.dump_code(zs.function(lambda: Shape(1).x))

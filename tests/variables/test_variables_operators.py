"""A variable acts as its value in Python, numpy and jax expressions."""

import operator
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zstrat.program as zs
import zstrat.variables as zv

BINARY = [
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    operator.floordiv,
    operator.mod,
    operator.pow,
    operator.lt,
    operator.le,
    operator.gt,
    operator.ge,
    operator.eq,
    operator.ne,
]
A = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
B = np.array([[2.0, 2.0], [1.0, 5.0]], np.float32)


@pytest.mark.parametrize("op", BINARY)
@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray, zv.Variable])
def test_binary_operators_are_those_of_the_value(op, kind):
    a, b = zv.Variable(A), kind(B)
    np.testing.assert_array_equal(op(a, b), op(A, B))
    np.testing.assert_array_equal(op(b, a), op(B, A))
    np.testing.assert_array_equal(op(a, 2), op(A, 2))


@pytest.mark.parametrize("wrap", [lambda fn: fn, zs.function])
@pytest.mark.parametrize(
    "use",
    [
        np.sum,
        np.max,
        lambda v: np.add(v, 1, dtype=np.float64),
        lambda v: np.add(v, 1, out=np.zeros_like(A)),
        lambda v: np.multiply.outer(v, v),
        lambda v: np.add.at(v, 0, 1),
    ],
)
def test_functions_of_numpy_that_take_arrays_ask_for_the_value(use, wrap):
    v = zv.Variable(A)
    with pytest.raises(TypeError, match=r"v\.value\(\)"):
        wrap(lambda: use(v))()


TREE = {"a": np.array([3.0, -4.0], np.float32), "b": np.float32(12.0)}
ON_TREES = {
    "optax.tree.norm": (optax.tree.norm, 13.0),
    "lambda": (lambda tree: jax.tree.map(lambda v: v * 2, tree)["b"], 24.0),
    "zs.values": (lambda tree: jax.tree.map(jnp.mean, zv.values(tree))["a"], -0.5),
}


@pytest.mark.parametrize("wrap", [lambda fn: fn, zs.function])
@pytest.mark.parametrize("name", ON_TREES)
def test_functions_of_trees_take_variables(name, wrap):
    fn, expected = ON_TREES[name]
    tree = jax.tree.map(zv.Variable, TREE)
    assert wrap(lambda: fn(tree))() == expected


@pytest.mark.parametrize("wrap", [lambda fn: fn, zs.function])
@pytest.mark.parametrize("fn", [jnp.mean, jnp.square, jax.jit(lambda v: v)])
def test_functions_that_jax_compiles_take_values(fn, wrap):
    tree = jax.tree.map(zv.Variable, TREE)
    with pytest.raises((ValueError, TypeError), match=r"value\(\)"):
        wrap(lambda: jax.tree.map(fn, tree))()


def test_a_refusing_function_is_known_by_its_message_not_its_name():
    """The functions of jax that refuse have had several names."""

    def of_another_jax(x):
        """Refuses."""
        if getattr(x, "__jax_array__", None) is not None:
            raise ValueError("Triggering __jax_array__() is no longer supported")

    def taking(x):
        """Takes arrays, and objects with a ``__jax_array__`` method."""
        made = getattr(x, "__jax_array__", None)
        return made()

    with pytest.raises(ValueError, match=r"value\(\)"):
        of_another_jax(zv.Variable(A))
    np.testing.assert_array_equal(taking(zv.Variable(A)), A)


def test_methods_are_those_of_the_value():
    variable = zv.Variable(A)
    with pytest.raises(AttributeError, match=r"value\(\)"):
        variable.mean()
    assert not hasattr(variable, "nothing")


@pytest.mark.parametrize("op", BINARY[:7])
def test_a_number_on_the_left(op):
    np.testing.assert_array_equal(op(2, zv.Variable(A)), op(2, A))


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray, zv.Variable])
def test_matmul_from_both_sides(kind):
    np.testing.assert_array_equal(zv.Variable(A) @ kind(B), A @ B)
    np.testing.assert_array_equal(kind(B) @ zv.Variable(A), B @ A)


def test_integer_operators():
    a, b = np.array([6, 3]), np.array([3, 1])
    x = zv.Variable(a)
    for op in (operator.and_, operator.or_, operator.xor):
        np.testing.assert_array_equal(op(x, b), op(a, b))
        np.testing.assert_array_equal(op(b, x), op(b, a))
    np.testing.assert_array_equal(x << 1, a << 1)
    np.testing.assert_array_equal(x >> 1, a >> 1)
    np.testing.assert_array_equal(~x, ~a)
    np.testing.assert_array_equal(divmod(x, b)[0], a // b)
    np.testing.assert_array_equal(divmod(13, x)[1], 13 % a)


def test_unary_operators_and_conversions():
    x = zv.Variable(A)
    np.testing.assert_array_equal(-x, -A)
    np.testing.assert_array_equal(+x, A)
    np.testing.assert_array_equal(abs(-1 * x), A)
    np.testing.assert_array_equal(round(zv.Variable([1.26]), 1), np.float32([1.3]))
    assert float(zv.Variable(1.5)) == 1.5
    assert int(zv.Variable(3)) == 3
    assert [10, 20, 30][zv.Variable(1)] == 20
    assert bool(zv.Variable(True))
    assert f"{zv.Variable(1.5):.2f}" == "1.50"
    assert "Variable" in f"{zv.Variable(1.5)}"


def test_indexing_and_iteration():
    x = zv.Variable(A)
    np.testing.assert_array_equal(x[1], A[1])
    np.testing.assert_array_equal(x[:, ::-1], A[:, ::-1])
    np.testing.assert_array_equal(x[A > 2], A[A > 2])
    assert len(x) == 2
    np.testing.assert_array_equal(list(x), A)


def test_numpy_functions_take_variables():
    x = zv.Variable(A)
    np.testing.assert_array_equal(np.exp(x), np.exp(A))
    np.testing.assert_array_equal(np.add(x, jnp.asarray(B)), A + B)
    assert np.asarray(x, np.float64).dtype == np.float64
    writable = np.array(x)
    writable[0] = 0
    np.testing.assert_array_equal(x.numpy(), A)


def test_jax_converts_variables():
    x = zv.Variable(A)
    np.testing.assert_array_equal(jnp.asarray(x), A)
    np.testing.assert_array_equal(jnp.stack([x, x])[1], A)
    np.testing.assert_array_equal(zv.values({"a": [x, 1]})["a"][0], A)


@pytest.mark.parametrize(
    "op", ["+", "-", "*", "/", "//", "%", "**", "@", "&", "|", "^", "<<", ">>"]
)
def test_in_place_arithmetic_is_refused_with_words(op):
    x = zv.Variable(1)
    instead = {"+": "assign_add", "-": "assign_sub"}.get(op, "assign")
    with pytest.raises(TypeError, match=rf"{re.escape(op)}= would .* {instead}\("):
        exec(f"x {op}= 1", {"x": x})


def test_variables_are_keys_by_identity():
    a, b = zv.Variable(A), zv.Variable(A)
    names = {a: "a", b: "b"}
    assert names[a] == "a"
    assert names[b] == "b"
    assert len({a, b, a}) == 2

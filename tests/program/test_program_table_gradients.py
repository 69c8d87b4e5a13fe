"""Gradients of tables equal those of plain jax on the whole table."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zstrat.program as zs
from zstrat.strategy.replica import Team
from zstrat.variables import IndexedSlices

RNG = np.random.default_rng(5)
TABLE = RNG.normal(size=(10, 4)).astype(np.float32)
OTHER = RNG.normal(size=(7, 4)).astype(np.float32)
W = RNG.normal(size=4).astype(np.float32)
IDS = np.array([[3, 6], [3, 0]])
MODES = ["in a step", "eager", "outside"]


def called(mode, body, *args):
    if mode != "outside":
        body = zs.function(body, eager=mode == "eager")
    return body(*args)


def dense(gradient):
    return gradient.to_dense() if isinstance(gradient, IndexedSlices) else gradient


def is_slices(node):
    return isinstance(node, IndexedSlices)


def close(got, expected):
    got = jax.tree.map(dense, got, is_leaf=is_slices)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        got,
        expected,
    )


@pytest.mark.parametrize("mode", MODES)
def test_tables_among_the_arguments(storage, mode):
    """In parts, whole, and a dense one, in one pytree."""
    params = {
        "t": storage.sharded(TABLE, 3),
        "p": storage.variable(OTHER),
        "w": storage.variable(W),
    }

    def loss(params, ids):
        rows = zs.embedding_lookup(params["t"], ids)
        more = zs.embedding_lookup(params["p"], ids % 7)
        return jnp.sum((rows * more @ params["w"]) ** 2)

    def plain(params, ids):
        return jnp.sum((params["t"][ids] * params["p"][ids % 7] @ params["w"]) ** 2)

    got = called(mode, lambda ids: zs.value_and_grad(loss)(params, ids), IDS)
    whole = {"t": TABLE, "p": OTHER, "w": W}
    close(got, jax.jit(jax.value_and_grad(plain))(whole, IDS))
    _, grads = got
    assert is_slices(grads["t"])
    assert is_slices(grads["p"])
    assert grads["t"].dense_shape == (10, 4)
    assert not is_slices(grads["w"])


@pytest.mark.parametrize("mode", MODES)
def test_variables_by_closure_with_ids_of_the_next_level(storage, mode):
    table, other = storage.sharded(TABLE, 2), storage.variable(OTHER)
    chain = storage.variable(np.arange(10, dtype=np.int32)[::-1].copy())

    def loss(scale, ids):
        rows = zs.embedding_lookup(table, ids)
        following = zs.embedding_lookup(chain, ids) % 7
        again = zs.embedding_lookup(table, following)
        return scale * jnp.sum(rows * again) + jnp.sum(
            zs.embedding_lookup(other, following) ** 2
        ), {"rows": rows}

    def plain(scale, table, other, ids):
        following = (9 - ids) % 7
        return scale * jnp.sum(table[ids] * table[following]) + jnp.sum(
            other[following] ** 2
        )

    def body(ids):
        both = zs.value_and_grad(loss, 0, variables=[table, other], has_aux=True)
        return both(np.float32(2), ids)

    (value, aux), (of_scale, of_variables) = called(mode, body, IDS)
    expected, grads = jax.jit(jax.value_and_grad(plain, (0, 1, 2)))(
        np.float32(2), TABLE, OTHER, IDS
    )
    close((value, of_scale, *of_variables), (expected, *grads))
    np.testing.assert_array_equal(aux["rows"], TABLE[IDS])
    assert all(map(is_slices, of_variables))


@pytest.mark.parametrize("mode", MODES)
def test_a_table_that_is_read_whole_too_has_a_dense_gradient(storage, mode):
    sharded, plain_table = storage.sharded(TABLE, 3), storage.variable(OTHER)

    def loss(a, b, ids):
        rows = zs.embedding_lookup(a, ids) * zs.embedding_lookup(b, ids)
        return jnp.sum(rows**2) + jnp.sum(a.value() ** 3) + jnp.sum(jnp.sin(b))

    def plain(a, b, ids):
        return jnp.sum((a[ids] * b[ids]) ** 2) + jnp.sum(a**3) + jnp.sum(jnp.sin(b))

    def body(ids):
        return zs.value_and_grad(loss, (0, 1))(sharded, plain_table, ids)

    got = called(mode, body, IDS)
    assert not any(map(is_slices, got[1]))
    close(got, jax.jit(jax.value_and_grad(plain, (0, 1)))(TABLE, OTHER, IDS))


def test_a_list_of_variables_has_dense_gradients(storage):
    parts = [storage.variable(x) for x in np.array_split(TABLE, 3)]
    sharded = [storage.variable(TABLE[n::3]) for n in range(3)]

    def loss(parts, sharded, ids):
        rows = zs.embedding_lookup(parts, ids)
        more = zs.embedding_lookup(sharded, ids + 1, partition_strategy="mod")
        return jnp.sum(rows * more**2)

    @zs.function
    def step(ids):
        return zs.grad(loss, (0, 1))(parts, sharded, ids)

    of_parts, of_sharded = step(IDS)
    expected = jax.grad(lambda a, b: jnp.sum(a[IDS] * b[IDS + 1] ** 2), (0, 1))
    a, b = expected(TABLE, TABLE)
    close(jnp.concatenate(of_parts), a)
    for n in range(3):
        close(of_sharded[n], b[n::3])


def test_arguments_that_are_not_differentiated_have_no_gradient(storage):
    table, w = storage.sharded(TABLE, 2), storage.variable(W)

    def loss(w, untouched, ids):
        return jnp.sum(zs.embedding_lookup(table, ids) @ w) + 0 * w[0]

    @zs.function
    def step(ids):
        return zs.grad(loss, (0, 1))(w, table, ids), zs.grad(loss)(w, None, ids)

    (of_w, of_table), alone = step(IDS)
    close((of_w, alone), (TABLE[IDS].sum((0, 1)),) * 2)
    # By itself or as an argument: a table in parts is one and the same.
    close(of_table, jax.jit(jax.grad(lambda t: jnp.sum(t[IDS] @ W)))(TABLE))

    @zs.function
    def unused():
        return zs.grad(lambda t, w: jnp.sum(w**2), (0, 1))(table, w)

    with pytest.warns(UserWarning, match=r"ShardedVariable.*'t'"):
        of_table, of_w = unused()
    assert of_table.values.shape == (0, 4)
    close(of_w, 2 * W)


@pytest.mark.parametrize("mode", MODES)
def test_a_variable_that_is_read_without_effect_has_zeros(storage, mode):
    """As in jax: momentum moves a table whose batch happens to be empty."""
    table = storage.sharded(TABLE, 3)

    def body(ids):
        return zs.grad(lambda t: jnp.take(t.value(), ids, axis=0).sum())(table)

    gradient = called(mode, body, np.zeros(0, np.int32))
    assert not is_slices(gradient)
    np.testing.assert_array_equal(gradient, np.zeros_like(TABLE))


def test_second_derivatives(storage):
    table = storage.sharded(TABLE, 2)

    def slope(x, ids):
        def inner(x):
            return jnp.sum(jnp.sin(x * zs.embedding_lookup(table, ids)))

        return zs.grad(inner)(x)

    def plain(x, t):
        return jax.grad(lambda x: jnp.sum(jnp.sin(x * t[IDS])))(x)

    @zs.function
    def step(ids):
        return zs.grad(slope, 0, variables=table)(np.float32(0.5), ids)

    close(step(IDS), jax.jit(jax.grad(plain, (0, 1)))(np.float32(0.5), TABLE))


@pytest.mark.parametrize("mode", ["step", "eager", "outside"])
def test_computing_ids_skips_other_results_of_an_inner_function(storage, mode):
    """It would be from rows that are not there yet, and this loop has no end then."""
    table = storage.variable(np.ones((9, 3), np.float32))

    @jax.jit
    def inner(ids, rows):
        total = jax.lax.stop_gradient(jnp.abs(rows).sum())
        scale = jax.lax.while_loop(lambda s: s < 1, lambda s: s * 2, total)
        return (ids + 1) % 9, scale

    def loss(ids):
        rows = zs.embedding_lookup(table, ids)
        following, scale = inner(ids, rows)
        return jnp.sum(rows) * scale + jnp.sum(zs.embedding_lookup(table, following))

    both = zs.value_and_grad(loss, variables=table)
    run = both if mode == "outside" else zs.function(both, eager=mode == "eager")
    value, gradient = run(np.array([1, 2], np.int32))
    assert float(value) == 6 * 6 + 6
    expected = np.zeros((9, 3))
    expected[[1, 2, 3]] = [[6] * 3, [7] * 3, [1] * 3]
    np.testing.assert_allclose(gradient.to_dense(), expected)


def test_refusals(storage):
    table, w = storage.sharded(TABLE, 2), storage.variable(W)
    counts = storage.sharded(np.arange(4, dtype=np.int32), 2, "counts")

    def refused(loss, match, error=RuntimeError):
        with pytest.raises(error, match=match):
            zs.function(lambda ids: zs.grad(loss)(w, ids))(IDS[0])

    lookup = zs.embedding_lookup
    inside = "'t'"
    refused(lambda w, ids: jax.jit(lambda x: lookup(table, x))(ids).sum(), inside)
    refused(lambda w, ids: jax.vmap(lambda x: lookup(table, x))(ids).sum(), inside)
    refused(
        lambda w, ids: (
            lookup(table, ids).sum()
            + table.scatter_add(IndexedSlices(jnp.ones((2, 4)), ids)).value().sum()
        ),
        r"SCATTER_ADD.*'t'",
    )
    with pytest.raises(TypeError, match=r"\[0\].*'counts'"):
        zs.grad(lambda t: t.value().sum())(counts)
    with pytest.raises(RuntimeError, match="'t'"):
        jax.jit(lambda ids: zs.grad(lambda w: lookup(table, ids).sum() * w)(1.0))(IDS)


@pytest.mark.parametrize("eager", [False, True], ids=["captured", "eager"])
def test_training(storage, eager):
    """Two tables, one of them looked up twice, through an optimizer beside them."""
    rng = np.random.default_rng(1)
    table, other, w = (
        storage.sharded(TABLE, 3),
        storage.variable(OTHER),
        storage.variable(W),
    )
    optimizer = storage.optimizer(optax.adagrad(0.1))
    batches = [
        {
            "a": rng.integers(0, 10, (6, 3)),
            "b": rng.integers(0, 7, 6),
            "y": rng.normal(size=6).astype(np.float32),
        }
        for _ in range(2 if eager else 8)
    ]

    def loss(params, batch, take):
        table, other, w = params
        rows = take(table, batch["a"]).sum(1) + take(table, batch["b"])
        return jnp.mean(
            (jnp.tanh(rows * take(other, batch["b"])) @ w - batch["y"]) ** 2
        )

    params = (table, other, w)

    @zs.function(eager=eager)
    def step(iterator):
        value, grads = zs.value_and_grad(loss)(
            params, next(iterator), zs.embedding_lookup
        )
        optimizer.apply_gradients(grads, params)
        return value

    iterator = zs.StepIterator(batches)
    losses = [float(step(iterator)) for _ in batches]
    rule, plain, expected = optax.adagrad(0.1), (TABLE, OTHER, W), []
    state = rule.init(plain)

    @jax.jit
    def moved(plain, state, batch):
        value, grads = jax.value_and_grad(loss)(plain, batch, lambda t, ids: t[ids])
        with jax.numpy_dtype_promotion("standard"):  # optax itself needs it
            updates, state = rule.update(grads, state, plain)
        return value, optax.apply_updates(plain, updates), state

    for batch in batches:
        value, plain, state = moved(plain, state, batch)
        expected.append(float(value))
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    for variable, value in zip(params, plain, strict=True):
        np.testing.assert_allclose(storage.whole(variable), value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("devices", [0, 2], ids=["one device", "a mesh"])
@pytest.mark.parametrize("inside", [True, False], ids=["in a step", "outside"])
def test_replicas(storage, inside, devices):
    """Each looks its own rows up; their gradients are summed."""
    from zstrat.strategy.replica import Spread, mesh_of
    from zstrat.strategy.replica._regions import replicate

    table, w = storage.sharded(TABLE, 3), storage.variable(W)
    chain = storage.variable(np.arange(10, dtype=np.int32)[::-1].copy())
    optimizer = storage.optimizer(optax.sgd(1.0))

    def loss(table, w, ids):
        rows = zs.embedding_lookup(table, ids)
        again = zs.embedding_lookup(table, zs.embedding_lookup(chain, ids))
        return jnp.sum(rows * again @ w)

    def replica(shared, own):
        (ids,) = own
        value, grads = zs.value_and_grad(loss, (0, 1))(table, w, ids)
        optimizer.apply_gradients(grads, (table, w))
        return value

    def body(ids):
        return replicate(
            replica,
            [],
            [Spread(ids, stacked=True)],
            team=Team(2),
            mesh=mesh_of(jax.devices()[:devices], 2),
        ).array

    ids = np.array([[3, 6, 3], [0, 3, 9]])
    values = zs.function(body)(ids) if inside else body(ids)

    def plain(table, w):
        each = jnp.sum(table[ids] * table[9 - ids] @ w, axis=1)
        return each.sum(), each

    plainly = jax.jit(jax.value_and_grad(plain, (0, 1), has_aux=True))
    (_, each), grads = plainly(TABLE, W)
    np.testing.assert_allclose(values, each, rtol=1e-4)
    np.testing.assert_allclose(storage.whole(table), TABLE - grads[0], rtol=1e-4)
    np.testing.assert_allclose(storage.whole(w), W - grads[1], rtol=1e-4)

"""Gradients of small variables leave a step side by side, as one array."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zstrat.program as zs
import zstrat.variables as zv
from zstrat.codecs import wire_format
from zstrat.wire import UpdateOp

SHAPES = [(4, 8), (7,), (3, 5), ()] * 5
RNG = np.random.default_rng(5)


def loss(weights, x):
    each = [jnp.sum(jnp.tanh(w * x.astype(w.dtype)) ** 2) for w in weights]
    return sum(part.astype(jnp.float32) for part in each)


def prepared_step(storage, values, *, optimizer=None, twice=False):
    """A step of these variables, and of them those that it reads, in order."""
    variables = [storage.variable(x, f"v{n}") for n, x in enumerate(values)]
    optimizer = optimizer or storage.optimizer(optax.sgd(0.1))

    @zs.function
    def step(x):
        _, gradients = zs.value_and_grad(loss)(variables, x)
        optimizer.apply_gradients(gradients, variables)
        if twice:
            variables[3].assign_add(jnp.ones(values[3].shape, values[3].dtype))

    prepared = zs.prepare(step, (np.float32(0.5),), {})
    read = [storage.values[spec.key] for spec in prepared.plan.reads]
    return prepared, read


def made(*others, dtype="f4"):
    small = [np.asarray(RNG.normal(size=shape), dtype) for shape in SHAPES]
    return [*small, *others]


def test_a_set_has_the_bits_of_its_gradients(storage):
    large = np.ones((200, 200), "f4")
    values = made(large, *made(dtype=jnp.bfloat16))
    values.insert(3, large)
    prepared, read = prepared_step(storage, values)
    gradients = jax.jit(jax.grad(loss))(read, np.float32(0.5))
    keys = [spec.key for spec in prepared.plan.reads]
    by_key = dict(zip(keys, map(np.asarray, gradients), strict=True))
    sent = prepared.run(read).updates
    ops = [update.op for update in sent]
    assert ops.count(UpdateOp.OPTIMIZE_SET) == 2
    assert ops.count(UpdateOp.OPTIMIZE) == 2
    found = {}
    for spec, op, _, arrays, _ in sent:
        if op is UpdateOp.OPTIMIZE:
            found[spec.key] = arrays[0].tobytes()
            continue
        keys, side = arrays
        assert (keys[0], keys.dtype, side.ndim) == (spec.key, np.int64, 1)
        ends = np.cumsum([by_key[key].size for key in keys.tolist()])
        parts = np.split(side, ends[:-1])
        assert ends[-1] == side.size
        for key, part in zip(keys.tolist(), parts, strict=True):
            found[key] = part.tobytes()
    assert found == {key: array.tobytes() for key, array in by_key.items()}


def test_a_set_is_of_one_tree(storage):
    """Each tree has a global norm of its own, which is sent before its gradients."""
    clipped = storage.optimizer(
        optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1))
    )
    names = enumerate([*made(), *made()])
    variables = [storage.variable(x, f"v{n}") for n, x in names]
    trees = variables[:20], variables[20:]

    @zs.function
    def step(x):
        for tree in trees:
            _, gradients = zs.value_and_grad(loss)(tree, x)
            clipped.apply_gradients(gradients, tree)

    prepared = zs.prepare(step, (np.float32(0.5),), {})
    read = [storage.values[spec.key] for spec in prepared.plan.reads]
    sent = prepared.run(read).updates
    operands, keys = UpdateOp.OPERANDS, [v.spec.key for v in variables]
    assert [update.op for update in sent] == [operands, UpdateOp.OPTIMIZE_SET] * 2
    values = {spec.key: x for spec, x in zip(prepared.plan.reads, read, strict=True)}
    for n, tree in enumerate(trees):
        own = [values[variable.spec.key] for variable in tree]
        norm = optax.tree.norm(jax.grad(loss)(own, np.float32(0.5)))
        given = {float(array) for array in sent[2 * n].arrays if array.dtype == "f4"}
        assert any(np.isclose(norm, [*given], rtol=1e-5))
        together = sent[2 * n + 1].arrays[0].tolist()
        assert sorted(together) == keys[20 * n : 20 * (n + 1)]


def test_what_is_not_sent_as_it_is_stays_by_itself(storage):
    rounds = storage.optimizer(optax.sgd(0.1))
    rounds.rounds = zv.Rounds()
    coded = storage.optimizer(optax.sgd(0.1))
    coded.wire = wire_format("int8")
    for prepared, read in (
        prepared_step(storage, made()[:15]),
        prepared_step(storage, made(), twice=True),  # in the order of the step
        prepared_step(storage, made(), optimizer=rounds),
        prepared_step(storage, made(), optimizer=coded),
    ):
        ops = {update.op for update in prepared.run(read).updates}
        assert UpdateOp.OPTIMIZE in ops
        assert UpdateOp.OPTIMIZE_SET not in ops


def test_small_variables_beside_look_ups_are_sent_in_sets(storage):
    table = storage.variable(np.ones((9, 2), "f4"), "table")
    variables = [storage.variable(x, f"v{n}") for n, x in enumerate(made())]
    optimizer = storage.optimizer(optax.sgd(0.1))

    def both(trained, ids):
        table, variables = trained
        return jnp.sum(zs.embedding_lookup(table, ids)) + loss(variables, jnp.ones(()))

    @zs.function
    def step(ids):
        _, gradients = zs.value_and_grad(both)((table, variables), ids)
        optimizer.apply_gradients(gradients, (table, variables))

    ids = np.array([3, 3, 8])
    prepared = zs.prepare(step, (ids,), {})
    read = [storage.values[spec.key] for spec in prepared.wanted.reads]
    rows = [storage.values[spec.key][at] for spec, at in prepared.wanted.rows]
    values = [storage.values[variable.spec.key] for variable in variables]
    gradients = jax.jit(jax.grad(loss))(values, np.float32(1))
    sent = {update.op: update.arrays for update in prepared.run([*read, *rows]).updates}
    assert sent.keys() == {UpdateOp.OPTIMIZE_SET, UpdateOp.OPTIMIZE_ROWS}
    keys, side = sent[UpdateOp.OPTIMIZE_SET]
    assert keys.tolist() == [variable.spec.key for variable in variables]
    want = np.concatenate([np.ravel(x) for x in gradients])
    np.testing.assert_allclose(side, want, rtol=1e-6)
    step(ids)  # in this process it has sets, too
    for variable, before, gradient in zip(variables, values, gradients, strict=True):
        now = storage.values[variable.spec.key]
        np.testing.assert_allclose(now, before - 0.1 * gradient, rtol=1e-5)

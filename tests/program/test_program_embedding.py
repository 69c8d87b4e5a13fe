"""``zs.embedding_lookup`` and its variants, compared with numpy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zstrat.program as zs
from zstrat.variables import ABSENT, IndexedSlices, Optimizer, Variable

RNG = np.random.default_rng(2)
TABLE = RNG.normal(size=(11, 3)).astype(np.float32)
IDS = np.array([[10, 0, 10], [4, 5, 9]])


def everywhere(body, *args):
    """In a step, in an eager one, and outside of steps: all the same."""
    results = [
        zs.function(body)(*args),
        zs.function(body, eager=True)(*args),
        body(*args),
    ]
    for other in results[1:]:
        np.testing.assert_allclose(results[0], other, rtol=1e-6)
    return results[0]


def kinds(storage):
    sharded = [TABLE[n::3] for n in range(3)]
    pieces = np.array_split(TABLE, 3)
    return {
        "whole": (storage.variable(TABLE), {}),
        "in parts": (storage.sharded(TABLE, 3), {}),
        "a list": ([storage.variable(x) for x in pieces], {}),
        "a list of one": ([storage.sharded(TABLE, 2)], {}),
        "mod": ([storage.variable(x) for x in sharded], {"partition_strategy": "mod"}),
        "arrays": ([jnp.asarray(x) for x in pieces], {}),
        "mod of arrays": (sharded, {"partition_strategy": "mod"}),
        "local": (Variable(TABLE), {}),
    }


@pytest.mark.parametrize(
    "kind",
    [
        "whole",
        "in parts",
        "a list",
        "a list of one",
        "mod",
        "arrays",
        "mod of arrays",
        "local",
    ],
)
def test_rows_come_in_the_order_of_their_ids(storage, kind):
    params, options = kinds(storage)[kind]
    rows = everywhere(lambda ids: zs.embedding_lookup(params, ids, **options), IDS)
    np.testing.assert_array_equal(rows, TABLE[IDS])


@pytest.mark.shows("tf.nn.embedding_lookup")
@pytest.mark.parametrize("kind", ["whole", "in parts", "a list", "arrays", "local"])
def test_ids_in_lists(storage, kind):
    """As constants, and as arguments of a step, whose numbers are traced."""
    table, how = kinds(storage)[kind]
    for ids in ([10, 0, 10], [[10, 0], [4, 5]], (3, 1), [], 2):
        wanted = TABLE[np.asarray(ids, int)]
        constant = everywhere(lambda ids=ids: zs.embedding_lookup(table, ids, **how))
        np.testing.assert_array_equal(constant, wanted)
        # Outside of a step, arguments are constants.
        step = zs.function(lambda ids: zs.embedding_lookup(table, ids, **how))
        np.testing.assert_array_equal(step(ids), wanted)
    pairs = everywhere(
        lambda ids, rows, weights: zs.embedding_lookup_sparse(
            table, (ids, rows, 2), weights, "sum", **how
        ),
        [1, 2, 0],
        [0, 0, 1],
        [1.0, 2.0, 3.0],
    )
    wanted = np.stack([TABLE[1] + 2 * TABLE[2], 3 * TABLE[0]])
    np.testing.assert_allclose(pairs, wanted, rtol=1e-5)
    if kind in ("whole", "in parts", "local"):
        read = everywhere(lambda ids: table.sparse_read(ids), [10, 0])
        np.testing.assert_array_equal(read, TABLE[[10, 0]])
    with pytest.raises(ValueError, match=r"zs\.embedding_lookup_sparse"):
        zs.embedding_lookup(table, [[1, 2], [3]], **how)


def test_values_in_lists_with_traced_numbers(storage):
    v = storage.variable(np.zeros(2, np.float32))
    tables = storage.variable(TABLE), storage.sharded(TABLE, 2)

    @zs.function
    def step(a, ids):
        v.assign_add([a, 2.0])
        for table in tables:
            table.scatter_add(IndexedSlices(jnp.ones((2, 3)), ids))

    step(1.0, [4, 7])
    assert v.numpy().tolist() == [1, 2]
    for table in tables:
        np.testing.assert_array_equal(table.numpy()[[4, 7]], TABLE[[4, 7]] + 1)


def test_only_requested_rows_are_sent(storage):
    sharded = [storage.variable(TABLE[n::3], f"d{n}") for n in range(3)]
    zs.function(lambda i: zs.embedding_lookup(sharded, i, partition_strategy="mod"))(
        IDS
    )
    assert storage.requests == [[("d0", [0, 3]), ("d1", [1, 3]), ("d2", [1])]]
    assert storage.reads == 0


def test_max_norm_is_a_number(storage):
    table = storage.sharded(TABLE, 2)
    with pytest.raises(TypeError, match=r"max_norm.*'1'"):
        zs.embedding_lookup(table, np.array([1]), max_norm="1")


def test_max_norm(storage):
    table = storage.sharded(np.concatenate([TABLE, np.zeros((1, 3), np.float32)]), 2)
    ids = np.array([[3, 11], [7, 0]])
    rows = everywhere(lambda ids: zs.embedding_lookup(table, ids, max_norm=1.0), ids)
    taken = np.concatenate([TABLE, np.zeros((1, 3))])[ids]
    norms = np.linalg.norm(taken, axis=-1, keepdims=True)
    expected = np.where(norms > 1, taken / np.maximum(norms, 1e-9), taken)
    np.testing.assert_allclose(rows, expected, rtol=1e-5)
    # Rows of zeros have a gradient, too.
    step = zs.function(
        lambda ids: (
            zs.grad(
                lambda: zs.embedding_lookup(table, ids, 1.0).sum(), variables=table
            )().values
        )
    )
    assert np.isfinite(step(ids)).all()


def test_rows_of_rank_zero_and_two(storage):
    flat, deep = TABLE[:, 0], TABLE.reshape(11, 3, 1)
    for value in (flat, deep):
        table = storage.sharded(value, 2)
        rows = zs.function(lambda i, t=table: zs.embedding_lookup(t, i, 0.5))(IDS)
        taken = value[IDS]
        axes = tuple(range(2, taken.ndim))
        norms = np.sqrt((taken**2).sum(axes, keepdims=True))
        np.testing.assert_allclose(rows, taken * np.minimum(1, 0.5 / norms), rtol=1e-5)


def test_refusals(storage):
    table, parts = storage.variable(TABLE), storage.sharded(TABLE, 2)
    count = storage.variable(np.int32(3))

    def refused(error, match, *args, **options):
        with pytest.raises(error, match=match):
            zs.embedding_lookup(*args, **options)

    refused(ValueError, "embedding_lookup", None, IDS)
    refused(ValueError, "embedding_lookup", [], IDS)
    refused(TypeError, "embedding_lookup", {"a": table}, IDS)
    refused(ValueError, r"'div'.*'mod'.*'rows'", table, IDS, partition_strategy="rows")
    refused(ValueError, "partition_strategy", parts, IDS, partition_strategy="mod")
    refused(ValueError, "sharded already", [parts, table], IDS)
    refused(
        ValueError, "embedding_lookup", [table, storage.variable(TABLE[:, :2])], IDS
    )
    refused(
        ValueError,
        r"\b16\b.*\[8, 8\].*\[11, 5\]",
        [table, storage.variable(TABLE[:5])],
        IDS,
        partition_strategy="mod",
    )
    refused(ValueError, "is a scalar", count, IDS)
    refused(ValueError, "must be integers, got float64", table, IDS * 1.0)
    refused(ValueError, "must be integers, got float64", TABLE, IDS * 1.0)
    refused(ValueError, "must be integers, got bool", table, IDS > 3)
    refused(IndexError, "no row 11", table, [3, 11])
    refused(IndexError, r"\b1\b", TABLE, [-1])
    refused(ValueError, "max_norm", table, IDS, -1.0)
    with pytest.raises(RuntimeError, match=r"jax\.jit.*zs\.function"):
        jax.jit(lambda ids: zs.embedding_lookup(table, ids))(IDS)
    with pytest.raises(ValueError, match="must be integers"):
        zs.function(lambda x: zs.embedding_lookup(table, x))(np.float32([1.0]))
    with pytest.raises(IndexError, match="no row 11"):
        zs.function(lambda: zs.embedding_lookup(table, [3, 11]))()


def combined(rows, weights, combiner):
    """One row of ids, in float64 numpy."""
    if not len(rows):
        return np.zeros(TABLE.shape[1])
    total = (rows * weights[:, None]).sum(0)
    by = {"sum": 1.0, "mean": weights.sum(), "sqrtn": np.sqrt((weights**2).sum())}
    return total / by[combiner]


def padded(rows, fill, dtype, width=4):
    out = np.full((len(rows), width), fill, dtype)
    mask = np.zeros(out.shape, bool)
    for n, row in enumerate(rows):
        out[n, : len(row)] = row
        mask[n, : len(row)] = True
    return out, mask


def pairs(rows):
    row_ids = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    return np.concatenate(rows), row_ids


@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_both_forms_of_ragged_ids(combiner, weighted):
    lengths = [2, 0, 3, 1]
    ids = [RNG.integers(0, 11, n) for n in lengths]
    weights = [RNG.uniform(0.5, 2, n) if weighted else np.ones(n) for n in lengths]
    expected = [
        combined(TABLE[i].astype(np.float64), w, combiner)
        for i, w in zip(ids, weights, strict=True)
    ]
    # Padding may be anything.
    given_ids, mask = padded(ids, -7, np.int64)
    given_weights = padded(weights, np.nan, np.float32)[0] if weighted else None
    rows = zs.embedding_lookup_sparse(TABLE, (given_ids, mask), given_weights, combiner)
    np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-6)
    values, row_ids = pairs(ids)
    flat = pairs(weights)[0].astype(np.float32) if weighted else None
    rows = zs.embedding_lookup_sparse(
        TABLE, zs.RaggedIds.pairs(values, row_ids, len(ids)), flat, combiner
    )
    np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-6)


def test_safe_lookups_drop_and_fill():
    ids = np.array([[3, -1, 5], [-2, -1, 0], [4, 4, 4]])
    mask = np.array([[True, True, True], [True, True, False], [True, True, True]])
    weights = np.array([[1, 1, 2], [1, 1, 1], [0, -1, 3]], np.float32)
    expected = [(TABLE[3] + 2 * TABLE[5]) / 3, np.zeros(3), TABLE[4]]
    flat, where = ids[mask], np.repeat(np.arange(3), mask.sum(1))
    forms = [((ids, mask), weights), ((flat, where, 3), weights[mask])]

    @functools.partial(jax.jit, static_argnums=0)
    def found(default):
        return [
            zs.safe_embedding_lookup_sparse(TABLE, *form, default_id=default)
            for form in forms
        ]

    for rows in found(None):
        np.testing.assert_allclose(rows, expected, rtol=1e-5)
    for rows in found(7):
        np.testing.assert_allclose(rows, [expected[0], TABLE[7], TABLE[4]], rtol=1e-5)


WEIGHTS = np.array([[0.5, -2, 3], [0, -1, 2], [-1, 0, 0], [7, 1, 1]], np.float32)
SAFE_IDS = np.array([[3, 1, -1], [2, 2, 5], [4, 6, -3], [-1, -2, -5]])


def safely_combined(table, weights, combiner, default):
    """As TensorFlow: ids below 0 go; weights that are not positive go, but of a sum."""
    rows = []
    for ids, mine in zip(SAFE_IDS, weights, strict=True):
        keep = [
            n
            for n in range(len(ids))
            if ids[n] >= 0 and (combiner == "sum" or WEIGHTS[len(rows)][n] > 0)
        ]
        if not keep:
            rows.append(0.0 * table[0] if default is None else table[default])
            continue
        total = sum(mine[n] * table[ids[n]] for n in keep)
        by = {
            "sum": 1.0,
            "mean": sum(mine[n] for n in keep),
            "sqrtn": jnp.sqrt(sum(mine[n] ** 2 for n in keep)),
        }
        rows.append(total / by[combiner])
    return jnp.stack(rows)


@pytest.mark.parametrize(("form", "default"), [("padded", None), ("pairs", 7)])
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_safe_lookups_keep_every_weight_of_a_sum(form, combiner, default):
    """Its value, and the gradients of the table and of the weights."""
    mask = np.ones(SAFE_IDS.shape, bool)
    slopes = RNG.normal(size=(len(SAFE_IDS), TABLE.shape[1])).astype(np.float32)

    def slopes_of(body):
        # Compiled as one: each operation by itself takes seconds.
        return jax.jit(jax.grad(body, argnums=(0, 1), has_aux=True))

    def found(table, weights):
        given, mine = (SAFE_IDS, mask), weights
        if form == "pairs":
            given = SAFE_IDS.ravel(), np.repeat(np.arange(4), 3), 4
            mine = weights.ravel()
        rows = zs.safe_embedding_lookup_sparse(table, given, mine, combiner, default)
        return jnp.sum(rows * slopes), rows

    def expected(table, weights):
        rows = safely_combined(table, weights, combiner, default)
        return jnp.sum(rows * slopes), rows

    table, weights = jnp.asarray(TABLE), jnp.asarray(WEIGHTS)
    got, rows = slopes_of(found)(table, weights)
    want, wanted = slopes_of(expected)(table, weights)
    np.testing.assert_allclose(rows, wanted, rtol=1e-5, atol=1e-6)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("limit", [4.0, 5.0, 6.0])
def test_the_gradient_under_max_norm(limit):
    """A row is scaled by ``limit / max(norm, limit)``, whose gradient at a norm of the
    limit TensorFlow takes of the norm."""
    table = jnp.array([[3.0, 4.0], [0.0, 0.0]])

    def first(table, limit):
        return zs.embedding_lookup(table, np.array([0, 1]), limit)[:, 0].sum()

    unit, along = np.array([3.0, 4.0]) / 5, np.array([1.0, 0.0])
    scaled = (along - unit[0] * unit) * (limit / 5)
    expected = scaled if limit <= 5 else along
    slopes = jax.jit(jax.grad(first), static_argnums=1)
    np.testing.assert_allclose(slopes(table, limit)[0], expected, rtol=1e-6)
    assert np.isfinite(slopes(table, 0.0)).all()


@pytest.mark.parametrize(
    ("combiner", "second"), [("sum", 1.0), ("mean", 0.0), ("sqrtn", 0.5**0.5)]
)
def test_weights_that_add_up_to_nothing(combiner, second):
    """TensorFlow divides by no zero: a mean of weights that add up to 0 is 0."""
    ids, mask = np.array([[1, 2], [1, 2]]), np.ones((2, 2), bool)
    weights = np.array([[0, 0], [1, -1]], np.float32)

    def total(weights):
        return zs.embedding_lookup_sparse(TABLE, (ids, mask), weights, combiner)

    want = [np.zeros_like(TABLE[0]), second * (TABLE[1] - TABLE[2])]
    np.testing.assert_allclose(jax.jit(total)(weights), want, rtol=1e-6)
    slopes = jax.jit(jax.grad(lambda w: jnp.sum(total(w))))(weights)
    assert np.isfinite(slopes).all()


def test_padding_fetches_and_moves_nothing(storage):
    table = storage.sharded(TABLE, 2, "t")

    @zs.function
    def step(ids, mask):
        def loss():
            rows = zs.embedding_lookup_sparse(table, zs.RaggedIds.padded(ids, mask))
            return jnp.sum(rows**2)

        return zs.grad(loss, variables=table)()

    ids, mask = np.array([[8, 0, 0], [9, 8, 0]]), np.array([[1, 0, 0], [1, 1, 0]], bool)
    gradient = step(ids, mask)
    assert storage.requests == [[("t/part_1", [2, 3])]]
    assert set(np.asarray(gradient.indices).tolist()) == {8, 9, ABSENT}
    mean = (TABLE[8] + TABLE[9]) / 2
    expected = np.zeros_like(TABLE)
    expected[8], expected[9] = 2 * TABLE[8] + mean, mean
    np.testing.assert_allclose(gradient.to_dense(), expected, rtol=1e-5)


MODES, DTYPES = ["step", "eager", "outside"], ["int8", "int32", "uint32"]
TABLES = ["whole", "in parts", "mod", "local"]


@pytest.mark.parametrize(
    ("kind", "mode", "dtype"),
    # Every two of the three: each mode of each kind has another dtype.
    [
        (kind, mode, DTYPES[(n + m) % 3])
        for n, kind in enumerate(TABLES)
        for m, mode in enumerate(MODES)
    ],
)
def test_padding_is_in_no_update(storage, mode, dtype, kind):
    """Neither that of rows with some ids nor that of batches that are all padding."""
    table, options = kinds(storage)[kind]
    local = kind == "local"
    # It moves a row whose gradient is zero, too.
    rule = optax.sgd(1.0, momentum=0.9)
    momentum = Optimizer(rule) if local else storage.optimizer(rule)

    def step(ids, mask):
        def loss(table):
            rows = zs.embedding_lookup_sparse(
                table, (ids, mask), combiner="sum", max_norm=9.0, **options
            )
            return jnp.sum(rows)

        value, gradient = zs.value_and_grad(loss)(table)
        if kind == "mod":
            return value, gradient
        momentum.apply_gradients([(gradient, table)])
        return value, [gradient.to_dense()]

    run = step if mode == "outside" else zs.function(step, eager=mode == "eager")
    expected = np.zeros_like(TABLE)
    for used in ([], [5, 5, 7]):
        before = None if kind == "mod" else table.numpy()
        ids, mask = padded([[], used], 1, dtype)
        storage.updates.clear()
        storage.requests.clear()
        value, parts = run(jnp.asarray(ids), mask)
        np.add.at(expected, used, 1.0)
        if kind == "mod":
            parts = [np.stack(parts[n % 3])[n // 3] for n in range(len(TABLE))]
        found = np.concatenate([np.reshape(part, (-1, 3)) for part in parts])
        rows = TABLE[used].sum() if before is None else before[used].sum()
        np.testing.assert_allclose(value, rows, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(found, expected)
        rows = sum(len(at) for ask in storage.requests for _, at in ask)
        assert rows == (0 if local else len(set(used)))
        moved = sum(len(at) for _, _, (at, _) in storage.updates)
        assert moved == (0 if local or kind == "mod" else len(set(used)))


def test_an_id_that_counts_is_never_taken_for_padding(storage):
    table, mask = storage.sharded(TABLE, 2), np.ones((1, 1), bool)
    step = zs.function(lambda ids: zs.embedding_lookup_sparse(table, (ids, mask)))
    for wrong in (ABSENT, -1, 11):
        with pytest.raises(IndexError, match=r"zs\.embedding_lookup_sparse"):
            step(np.array([[wrong]], np.int32))
    with pytest.raises(IndexError, match=r"zs\.embedding_lookup_sparse"):
        step(np.array([[2**32 - 1]], np.uint32))


def test_sixteen_bits_are_combined_in_thirty_two():
    table = np.ones((1, 2), jnp.bfloat16)
    ids, mask = np.zeros((1, 1000), int), np.ones((1, 1000), bool)
    rows = zs.embedding_lookup_sparse(table, (ids, mask), combiner="sum")
    assert rows.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rows.astype(np.float32), [[1000, 1000]])


def test_refusals_of_ragged_ids():
    ids, mask = np.array([[1, 2]]), np.ones((1, 2), bool)

    def refused(match, *args, **options):
        with pytest.raises(ValueError, match=match):
            zs.embedding_lookup_sparse(TABLE, *args, **options)

    refused("RaggedIds", ids)
    refused("mask of booleans of the same shape", (ids, mask[:, :1]))
    refused("mask of booleans of the same shape", (ids, mask.astype(int)))
    refused("ids must be integers", (ids * 1.0, mask))
    refused(r"\[m\].*row_ids", (ids, ids, 2))
    refused("weights must be floats", (ids, mask), np.ones((1, 3), "f"))
    refused("weights must be floats", (ids, mask), np.ones((1, 2), int))
    refused("combiner must be one of", (ids, mask), combiner="max")
    with pytest.raises(ValueError, match="int32"):
        zs.embedding_lookup_sparse(np.arange(3, dtype=np.int32), (ids, mask))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32"])
def test_ragged_ids_of_few_bits_reach_all_rows(dtype):
    """300 is no number of 8 bits, and neither that of the default row nor of rows."""
    table = np.arange(1200, dtype=np.float32).reshape(600, 2)
    values, row_ids = np.array([5, 7]).astype(dtype), np.array([3, 100]).astype(dtype)

    def pairs(values, row_ids):
        bag = (values, row_ids, 300)
        return (
            zs.embedding_lookup_sparse(jnp.array(table), bag, combiner="sum"),
            zs.safe_embedding_lookup_sparse(jnp.array(table), bag, default_id=599),
        )

    expected = np.zeros((300, 2), np.float32)
    expected[[3, 100]] = table[[5, 7]]
    found, filled = zs.function(pairs)(values, row_ids)
    np.testing.assert_array_equal(found, expected)
    expected[(expected == 0).all(1)] = table[599]
    np.testing.assert_array_equal(filled, expected)

    def padded(ids, mask):
        bag = (ids, mask)
        return zs.safe_embedding_lookup_sparse(jnp.array(table), bag, default_id=599)

    (first, second) = zs.function(padded)(values[:, None], np.array([[True], [False]]))
    np.testing.assert_array_equal([first, second], table[[5, 599]])

"""Ids and indices of 64 bits while jax computes with 32: none hits another row."""

from __future__ import annotations

import gc
import re
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zstrat.program as zs
from zstrat.variables import ABSENT, DowncastWarning, IndexedSlices, apply
from zstrat.wire import UpdateOp

TABLE = np.arange(40, dtype=np.float32).reshape(10, 4) / 7


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_wide_integers_that_ids_are_computed_of_have_to_fit(storage, dtype):
    table = storage.sharded(TABLE, 2)
    wide = np.array([2, 2**32 + 1], dtype)

    def step(batch, other):
        plus = batch["ids"] + (0 if dtype == "int64" else jnp.uint32(0))
        return zs.embedding_lookup(table, plus), other * 2

    run = zs.function(step)
    with pytest.raises(ValueError, match=r"\[0\].*\['ids'\].*\b4294967297\b"):
        run({"ids": wide}, np.int32(1))
    drawn = zs.function(lambda it: step(next(it), np.int32(1)))
    with pytest.raises(ValueError, match=r"\b0\b.*\['ids'\].*\b4294967297\b"):
        drawn(zs.StepIterator([{"ids": wide}]))
    # What no id depends on may be cut, and what fits is looked up.
    fits = np.array([2, 9], dtype)
    with pytest.warns(DowncastWarning, match=r"\[1\].*\b1099511627776\b.*\b0\b"):
        rows, _ = run({"ids": fits}, np.int64(2**40))
    np.testing.assert_array_equal(rows, TABLE[[2, 9]])

    @zs.function
    def update(ids, index):
        rows = zs.embedding_lookup(table, ids)
        table.scatter_add(IndexedSlices(rows, jnp.flip(index)))

    with pytest.raises(ValueError, match=r"args\[1\].*contains"):
        update(fits, wide)

    @zs.function
    def other_ids(ids, index):
        rows = zs.embedding_lookup(table, ids)
        table.scatter_add(IndexedSlices(rows, index))

    with pytest.raises(ValueError, match=r"args\[1\].*contains"):
        other_ids(fits, wide)
    with pytest.raises(IndexError, match=r"\b4294967297\b"):
        zs.function(lambda ids: zs.embedding_lookup(table, ids))(wide)


@pytest.fixture(params=["elsewhere", "on devices"])
def table(storage, request):
    if request.param == "elsewhere":
        return storage.variable(TABLE)
    return storage.on_devices(TABLE)


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside another"])
@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_indices_of_a_step_that_only_updates_have_to_fit(storage, table, dtype, beside):
    here = storage.on_devices(TABLE)

    @zs.function
    def step(it, index):
        if beside:  # then its value is an output before the indices
            here.assign_add(jnp.ones((10, 4)))
        table.scatter_sub(IndexedSlices(jnp.ones((2, 4)), next(it)))
        table.scatter_add(IndexedSlices(jnp.ones((2, 4)), index))

    def call(element, index):
        step(zs.StepIterator([np.array(element, dtype)]), np.array(index, dtype))

    for _ in range(2):
        with pytest.raises(ValueError, match=r"\[1\].*\b4294967297\b"):
            call([2, 3], [2, 2**32 + 1])
        with pytest.raises(ValueError, match=r"\b0\b.*\b4294967297\b"):
            call([2, 2**32 + 1], [2, 3])
    np.testing.assert_array_equal(table.numpy(), TABLE)
    call([2, 3], [2, 4])
    expected = TABLE.copy()
    expected[3] -= 1
    expected[4] += 1
    np.testing.assert_allclose(table.numpy(), expected, rtol=1e-6)


def test_ids_of_rows_on_devices_have_to_fit(storage):
    table = storage.on_devices(TABLE)

    @zs.function
    def step(ids, hashes):
        table.assign_add(jnp.zeros((10, 4)))
        grad = zs.grad(lambda t: zs.embedding_lookup(t, ids).sum())(table)
        return jax.jit(lambda x: x + 1)(grad.values).sum(), hashes % 7

    fits, wide = np.array([1, 2]), np.array([1, 2**32 + 1])
    with pytest.warns(DowncastWarning, match=r"\[1\].*\b4294967297\b.*\b1\b"):
        step(fits, wide)  # no row is found by these
    with pytest.raises(ValueError, match=r"\[0\].*\b4294967297\b"):
        step(wide, wide)
    assert step.trace_count == 1


def test_no_argument_is_kept_for_its_width(storage):
    variable = storage.variable(TABLE)
    index = np.array([1, 2])
    kept = weakref.ref(index)

    @zs.function
    def step(index):
        variable.scatter_add(IndexedSlices(jnp.ones((2, 4)), index))

    step(index)
    del index
    gc.collect()
    assert kept() is None


SCATTERS = [op for op in UpdateOp if op.name.startswith("SCATTER")]


@pytest.mark.parametrize("op", SCATTERS, ids=lambda op: op.name.lower())
def test_small_indices_reach_all_rows_of_a_large_variable(storage, op):
    """Whether it is read in the same step or not: 300 is no number of int8."""
    whole = np.linspace(1, 2, 300, dtype=np.float32)
    index, rows = np.array([7, 0, 7, 120], np.int8), np.float32([2, 3, 4, 5])
    expected = apply(op, whole, (index.astype(int), rows))
    for variable in (storage.variable(whole), storage.on_devices(whole)):

        @zs.function
        def step(index, rows, variable=variable):
            variable._sparse(op, IndexedSlices(rows, index))
            return variable.value()

        np.testing.assert_allclose(step(index, rows), expected, rtol=1e-6)
        np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("op", SCATTERS, ids=lambda op: op.name.lower())
@pytest.mark.parametrize("bad", [-1, 10])
def test_an_index_that_is_not_there_is_named_by_every_scatter(storage, op, bad):
    """A negative one does not count from the end, and what does not count is left."""
    variable = storage.variable(TABLE + 1)

    @zs.function
    def step(index):
        variable._sparse(op, IndexedSlices(2 * jnp.ones((2, 4)), index))

    with pytest.raises(IndexError, match=rf"{re.escape(__file__)}.*'v'.*no row {bad}"):
        step(np.array([1, bad], np.int32))
    np.testing.assert_array_equal(variable.numpy(), TABLE + 1)
    step(np.array([1, ABSENT], np.int32))
    rows = np.full((1, 4), 2, np.float32)
    expected = apply(op, TABLE + 1, (np.array([1]), rows))
    np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint32"])
def test_an_array_has_no_rows_before_its_first(dtype):
    ids = np.array([-1, 2, 11]).astype(dtype)
    (rows,) = zs.function(lambda ids: (zs.embedding_lookup(jnp.array(TABLE), ids),))(
        ids
    )
    np.testing.assert_array_equal(rows, [[np.nan] * 4, TABLE[2], [np.nan] * 4])


LOOKUPS = {
    "lookup": zs.embedding_lookup,
    "padded": lambda table, ids: zs.embedding_lookup_sparse(
        table, (ids, np.ones(2, bool)), combiner="sum"
    ),
    "pairs": lambda table, ids: zs.embedding_lookup_sparse(
        table, (ids, np.zeros(2, int), 1), combiner="sum"
    ),
    "safe": lambda table, ids: zs.safe_embedding_lookup_sparse(
        table, (ids, np.ones(2, bool)), combiner="sum"
    ),
    "default": lambda table, ids: zs.safe_embedding_lookup_sparse(
        table, (ids, np.ones(2, bool)), combiner="sum", default_id=4
    ),
}
"""Of two ids. The safe ones leave out what is below 0."""


def wrong_ids(name):
    below = [] if name in ("safe", "default") else [-1, 3 - 2**32]
    return [np.array([2, wrong]) for wrong in (10, 2**32 + 3, *below)]


@pytest.mark.parametrize("name", LOOKUPS)
@pytest.mark.parametrize("where", ["elsewhere", "in parts", "on devices", "an array"])
def test_a_wrong_id_that_is_known_is_an_error_and_never_another_row(
    storage, where, name
):
    table = {
        "elsewhere": lambda: storage.variable(TABLE),
        "in parts": lambda: storage.sharded(TABLE, 3),
        "on devices": lambda: storage.on_devices(TABLE),
        "an array": lambda: jnp.array(TABLE),
    }[where]()
    for ids in wrong_ids(name):
        with pytest.raises(IndexError, match="has no row"):
            LOOKUPS[name](table, ids)
        if name != "default":  # which counts the ids that are left, when it runs
            with pytest.raises(IndexError, match="has no row"):
                zs.function(lambda ids=ids: LOOKUPS[name](table, ids))()
        if where in ("elsewhere", "in parts") and abs(ids[1]) < 2**31:
            with pytest.raises(IndexError, match="has no row"):
                zs.function(lambda ids: LOOKUPS[name](table, ids))(ids)


@pytest.mark.parametrize("name", LOOKUPS)
@pytest.mark.parametrize("where", ["on devices", "an array"])
def test_a_wrong_id_that_only_the_program_knows_is_a_row_of_nan(storage, where, name):
    table = storage.on_devices(TABLE) if where == "on devices" else jnp.array(TABLE)
    step = zs.function(lambda ids: LOOKUPS[name](table, ids))
    for ids in wrong_ids(name):
        if abs(ids[1]) < 2**31:
            rows = step(ids)
            assert np.isnan(np.atleast_2d(rows)[-1]).all()
    if name == "default":
        known = zs.function(lambda: LOOKUPS[name](table, np.array([2, 2**32 + 3])))
        assert np.isnan(known()).all()


@pytest.mark.parametrize("wrong", [-1, 10])
def test_a_wrong_id_of_a_sparse_read_and_of_an_index(storage, wrong):
    """What is indexed is the value, by jax's own rules, as the docs say."""
    ids, held = np.array([2, wrong]), storage.on_devices(TABLE)
    for table in (storage.variable(TABLE), storage.sharded(TABLE, 3)):
        with pytest.raises(IndexError, match="has no row"):
            table.sparse_read(ids)
        with pytest.raises(IndexError, match="has no row"):
            zs.function(lambda ids, table=table: table.sparse_read(ids))(ids)
    assert np.isnan(zs.function(lambda ids: held.sparse_read(ids))(ids)[1]).all()
    rows = zs.function(lambda ids: held[ids])(ids)
    np.testing.assert_array_equal(rows, TABLE[[2, 9]])
    rows = zs.function(lambda ids: jnp.take(held.value(), ids, axis=0))(ids)
    last = TABLE[9] if wrong < 0 else np.full(4, np.nan)
    np.testing.assert_array_equal(rows, [TABLE[2], last])


@pytest.mark.parametrize("name", ["safe", "default"])
def test_a_safe_lookup_leaves_out_ids_below_0_of_any_width(storage, name):
    ids = np.array([-1, 3 - 2**32])
    expected = TABLE[4] if name == "default" else np.zeros(4)
    for table in (storage.variable(TABLE), storage.on_devices(TABLE), jnp.array(TABLE)):
        np.testing.assert_array_equal(LOOKUPS[name](table, ids), expected)
        rows = zs.function(lambda table=table: LOOKUPS[name](table, ids))()
        np.testing.assert_array_equal(rows, expected)


def test_padding_may_be_anything_and_belong_anywhere(storage):
    """What does not count is no error, and counts in no row."""
    ids, mask = np.array([[2, 2**40], [-(2**40), 3]]), np.eye(2, dtype=bool)
    pairs = np.array([2, 3, 2**40]), np.array([0, 2**32 + 1, -(2**32)]), 2
    for table in (storage.variable(TABLE), storage.on_devices(TABLE), jnp.array(TABLE)):
        rows = zs.embedding_lookup_sparse(table, (ids, mask))
        np.testing.assert_array_equal(rows, TABLE[[2, 3]])
        rows = zs.embedding_lookup_sparse(table, pairs)
        np.testing.assert_array_equal(rows, [TABLE[2], np.zeros(4)])


@pytest.mark.parametrize("eager", [False, True])
def test_a_rounded_float_hushes_no_integer_in_its_place(eager):
    @zs.function(eager=eager)
    def step(x):
        return x

    with pytest.warns(DowncastWarning, match=r"args\[0\] .*float64"):
        step(np.array([1 + 1e-12]))
    with pytest.warns(DowncastWarning, match=r"\[0\].*\b1099511627776\b.*\b0\b"):
        step(np.array([2**40]))


@pytest.mark.parametrize("width", [8, 16, 32, 64])
@pytest.mark.parametrize("kind", ["int", "uint"])
def test_ids_of_any_width_are_those_rows(storage, kind, width):
    """What means no row is cut to the number of one in 8 or 16 bits."""
    ids = np.array([3, 1, 0, 1, 9]).astype(f"{kind}{width}")

    def loss(table):
        return (table[ids.astype(int)] ** 2).sum() / 2

    expected = TABLE - jax.grad(loss)(jnp.array(TABLE))
    for table in (
        storage.variable(TABLE),
        storage.on_devices(TABLE),
        storage.sharded(TABLE, 3),
    ):

        @zs.function
        def step(ids, table=table):
            rows = zs.embedding_lookup(table, ids)
            gradient = zs.grad(lambda t: (zs.embedding_lookup(t, ids) ** 2).sum() / 2)
            table.scatter_sub(gradient(table))
            return rows

        np.testing.assert_array_equal(step(ids), TABLE[ids.astype(int)])
        np.testing.assert_allclose(table.numpy(), expected, atol=1e-6)
        table.scatter_add(IndexedSlices(np.ones((5, 4), np.float32), ids))
        added = expected.at[ids.astype(int)].add(1.0)
        np.testing.assert_allclose(table.numpy(), added, rtol=1e-6)

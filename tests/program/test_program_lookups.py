"""Lookups of rows in steps: the requests, their order, and the results.

Expected rows are those that numpy takes from the whole table.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zstrat.program as zs
from zstrat.variables import (
    IndexedSlices,
)

TABLE = np.arange(40, dtype=np.float32).reshape(10, 4) / 7
NEXT = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3], np.int32)


def run_by_hand(step, *args):
    """What a worker does, level by level. Returns the result, and what was wanted."""
    prepared = zs.prepare(step, args, {})
    wanted, asked = prepared.wanted, []
    plan = prepared.plan
    handles = {v.spec.key: v for v in plan.variables}
    for lookup in plan.lookups:
        handles.update((v.spec.key, v) for v in lookup.table.components)
    while wanted is not None:
        asked.append(wanted)
        values = [
            handles[spec.key].storage.read(handles[spec.key]) for spec in wanted.reads
        ]
        for spec, indices in wanted.rows:
            values += handles[spec.key].storage.read_rows(
                [(handles[spec.key], indices)]
            )
        wanted = prepared.advance(values)
    assert len(asked) == plan.levels
    result = prepared.run(values)
    return zs.rebuild(result.layout.structure, result.leaves), result.updates, asked


def names(wanted):
    return [(spec.name, indices.tolist()) for spec, indices in wanted.rows]


def test_ids_of_any_shape_are_asked_for_once(storage):
    table = storage.sharded(TABLE, 3)

    @zs.function
    def step(many, one, none):
        rows = [zs.embedding_lookup(table, ids) for ids in (many, one, none)]
        return [*rows, table.sparse_read(jnp.array([7, 7]))]

    many, none = np.array([[9, 0, 9], [3, 3, 4]]), np.zeros((0, 2), np.int64)
    args = (many, np.int32(4), none)
    result, _, (wanted,) = run_by_hand(step, *args)
    for rows, ids in zip(result, (*args, [7, 7]), strict=True):
        np.testing.assert_array_equal(rows, TABLE[ids])
    assert wanted.reads == ()
    assert names(wanted) == [
        ("t/part_0", [0, 3]),
        ("t/part_1", [0]),
        ("t/part_2", [0, 2]),
    ]
    assert step.plan(args).has_lookups
    assert step.trace_count == 1


def test_ids_may_be_parts_of_an_array(storage):
    table = storage.sharded(TABLE, 3)
    places = [0, -1, (slice(None), 1), (slice(0, 2), slice(1, 3)), (..., None)]

    @zs.function
    def step(ids):
        rows = [zs.embedding_lookup(table, ids[place]) for place in places]
        return [*rows, zs.embedding_lookup(table, ids.T), ids]

    ids = np.array([[1, 9, 0], [3, 3, 4]])
    result, _, (wanted,) = run_by_hand(step, ids)
    expected = [*[ids[place] for place in places], ids.T]
    for rows, chosen in zip(result[:-1], expected, strict=True):
        np.testing.assert_array_equal(rows, TABLE[chosen])
    assert names(wanted) == [
        ("t/part_0", [0, 1, 3]),
        ("t/part_1", [0]),
        ("t/part_2", [2]),
    ]


def test_ids_that_depend_on_rows_are_asked_for_with_the_next_request(storage):
    table, chain = storage.sharded(TABLE, 2), storage.sharded(NEXT, 2, "next")
    shift = storage.variable(np.int32(1), "shift")
    unused = storage.variable(np.zeros(1000, np.float32), "unused")

    @zs.function
    def step(ids):
        first = chain.sparse_read(ids * 2)
        second = chain.sparse_read(first)
        unused.value()  # nothing depends on it, so that it stays where it is
        by_value = table.sparse_read((ids + shift.value()) % 10)
        return table.sparse_read(second), by_value, table.sparse_read(ids)

    ids = np.array([0, 4, 4, 3])
    result, _, asked = run_by_hand(step, ids)
    np.testing.assert_array_equal(result[0], TABLE[NEXT[NEXT[ids * 2]]])
    np.testing.assert_array_equal(result[1], TABLE[(ids + 1) % 10])
    np.testing.assert_array_equal(result[2], TABLE[ids])
    assert [lookup.level for lookup in step.plan((ids,)).lookups] == [0, 1, 1, 2, 0]
    assert [[spec.name for spec in wanted.reads] for wanted in asked] == [
        ["shift"],
        [],
        [],
    ]
    jax.tree.map(
        np.testing.assert_array_equal, step(ids), tuple(map(jnp.array, result))
    )


def test_levels_are_found_through_inner_functions(storage):
    table = storage.sharded(TABLE, 2)

    @jax.jit
    def both(ids, rows):
        return ids + 1, rows.sum()

    @zs.function
    def step(ids):
        rows = table.sparse_read(ids)
        following, total = both(ids, rows)
        return table.sparse_read(following), total

    ids = np.array([1, 5])
    result, _, _ = run_by_hand(step, ids)
    assert step.plan((ids,)).levels == 1
    np.testing.assert_array_equal(result[0], TABLE[ids + 1])


def test_effects_of_the_body_happen_once(storage, capsys):
    table = storage.sharded(TABLE, 2)

    @zs.function
    def step(ids):
        shifted = ids + 1
        jax.debug.print("ids {}", shifted)
        return table.sparse_read(shifted)

    step(np.array([1, 2]))
    jax.effects_barrier()
    assert capsys.readouterr().out == "ids [2 3]\n"


@pytest.mark.parametrize("bad", [-1, 10])
@pytest.mark.parametrize("computed", [False, True], ids=["given", "computed"])
def test_an_id_that_is_not_there_is_named(storage, bad, computed):
    table, other = storage.sharded(TABLE, 2), storage.sharded(TABLE, 3, "other")

    def body(iterator):
        ids = next(iterator)
        rows = other.sparse_read(ids % 10)
        return rows, table.sparse_read(ids + 0 if computed else ids)  # here

    step = zs.function(body)
    iterator = zs.StepIterator([np.array([3, bad]), np.array([1, 1])])
    with pytest.raises(IndexError, match=rf"table 't'.*no row {bad}: ids are in") as e:
        step(iterator)
    line = body.__code__.co_firstlineno + 3
    assert re.match(rf"{re.escape(__file__)}:{line} \(in body\)", str(e.value))
    # The step has failed with its element, and the next one has the next.
    np.testing.assert_array_equal(step(iterator)[1], TABLE[[1, 1]])


def test_an_argument_that_is_in_parts_names_the_program(storage):
    table, other = storage.sharded(TABLE, 2), storage.sharded(TABLE + 1, 2)
    step = zs.function(lambda table, ids: table.sparse_read(ids))
    ids = np.array([2])
    for each in (table, other, table):
        np.testing.assert_array_equal(step(each, ids), storage.whole(each)[ids])
    assert step.trace_count == 2
    np.testing.assert_array_equal(zs.function(lambda: table)(), TABLE)


def test_refusals(storage):
    table = storage.sharded(TABLE, 2)
    ids = np.array([1, 2])

    def refused(body, match, error=RuntimeError):
        with pytest.raises(error, match=match):
            zs.function(body)(ids)

    def after_update(ids):
        table.scatter_add(IndexedSlices(jnp.ones((2, 4)), ids))
        return table.sparse_read(ids)

    inside = r"'t'.*zs\.value_and_grad"
    refused(after_update, r"'t'.*value\(\)")
    refused(jax.jit(table.sparse_read), inside)
    refused(jax.vmap(lambda i: zs.embedding_lookup(table, i)), inside)
    refused(lambda x: jax.grad(lambda y: y * table.sparse_read(x).sum())(1.0), inside)
    refused(
        lambda x: jax.lax.map(lambda i: zs.embedding_lookup(table, i), x),
        inside,
    )
    refused(
        lambda x: table.sparse_read(x.astype(np.float32)),
        "must be integers",
        ValueError,
    )
    calls, v = [], storage.variable(np.float32(1))

    def changing(ids):
        calls.append(1)
        # Read inside of what jax traces by itself, so that the body is traced again.
        read = jax.lax.fori_loop(0, 2, lambda _, x: x + v.value(), 0.0)
        return [read, *[table.sparse_read(ids) for _ in calls]]

    refused(changing, "did something else when it was traced again: .*looks up other")


def test_a_step_with_lookups_is_shipped(storage):
    table = storage.sharded(TABLE, 2)
    step = zs.function(lambda ids: zs.embedding_lookup(table, ids) * 2)
    loaded = zs.load(zs.dump_code(step))
    prepared = zs.prepare(loaded, (np.array([9, 1, 9]),), {})
    assert names(prepared.wanted) == [("t/part_0", [1]), ("t/part_1", [4])]
    result = prepared.run([TABLE[[1]], TABLE[[9]]])
    np.testing.assert_array_equal(result.leaves[0], TABLE[[9, 1, 9]] * 2)
    with pytest.raises(ValueError, match="'t/part_1'"):
        zs.prepare(loaded, (np.array([9, 1, 9]),), {}).run([TABLE[[1]], TABLE[[8, 9]]])

"""Rows of tables in steps: what is asked for when, and what comes of it.

Expected rows are those that numpy takes from the whole table.
"""

from __future__ import annotations

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import zstrat.program as zs
from zstrat.program._flow import Flow
from zstrat.program._lookups import Level, PlannedLookup
from zstrat.rows import sums
from zstrat.variables import (
    ABSENT,
    IndexedSlices,
    Table,
    TableLayout,
    VariableSpec,
    apply,
    handle,
)
from zstrat.wire._messages import UpdateOp

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
            handles[spec.key].home.read(handles[spec.key]) for spec in wanted.reads
        ]
        for spec, indices in wanted.rows:
            values += handles[spec.key].home.read_rows([(handles[spec.key], indices)])
        wanted = prepared.advance(values)
    assert len(asked) == plan.levels
    result = prepared.run(values)
    return zs.rebuild(result.layout.structure, result.leaves), result.updates, asked


def names(wanted):
    return [(spec.name, indices.tolist()) for spec, indices in wanted.rows]


def test_ids_of_any_shape_are_asked_for_once(home):
    table = home.sharded(TABLE, 3)

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


def test_ids_that_depend_on_rows_are_asked_for_with_the_next_request(home):
    table, chain = home.sharded(TABLE, 2), home.sharded(NEXT, 2, "next")
    shift = home.variable(np.int32(1), "shift")
    unused = home.variable(np.zeros(1000, np.float32), "unused")

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


def test_levels_are_found_through_inner_functions(home):
    table = home.sharded(TABLE, 2)

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


def test_effects_of_the_body_happen_once(home, capsys):
    table = home.sharded(TABLE, 2)

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
def test_an_id_that_is_not_there_is_named(home, bad, computed):
    table, other = home.sharded(TABLE, 2), home.sharded(TABLE, 3, "other")

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


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_wide_integers_that_ids_are_computed_of_have_to_fit(home, dtype):
    table = home.sharded(TABLE, 2)
    wide = np.array([2, 2**32 + 1], dtype)

    def step(batch, other):
        plus = batch["ids"] + (0 if dtype == "int64" else jnp.uint32(0))
        return zs.embedding_lookup(table, plus), other * 2

    run = zs.function(step)
    with pytest.raises(ValueError, match=r"args\[0\]\['ids'\].*contains 4294967297"):
        run({"ids": wide}, np.int32(1))
    drawn = zs.function(lambda it: step(next(it), np.int32(1)))
    with pytest.raises(ValueError, match=r"element 0\['ids'\].*contains 4294967297"):
        drawn(zs.StepIterator([{"ids": wide}]))
    # What no id depends on may be cut, and what fits is looked up.
    fits = np.array([2, 9], dtype)
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
    with pytest.raises(IndexError, match="no row 4294967297"):
        zs.function(lambda ids: zs.embedding_lookup(table, ids))(wide)


def test_an_index_of_an_update_that_is_not_there_is_named(home):
    table = home.sharded(TABLE, 2)

    @zs.function
    def step(ids):
        table.scatter_add(IndexedSlices(jnp.ones((2, 4)), ids))

    with pytest.raises(IndexError, match=rf"{re.escape(__file__)}.*'t'.*no row 10"):
        step(np.array([1, 10]))
    np.testing.assert_array_equal(home.whole(table), TABLE)


SCATTERS = [op for op in UpdateOp if op.name.startswith("SCATTER")]


@pytest.mark.parametrize("op", SCATTERS, ids=lambda op: op.name.lower())
def test_updates_of_rows(home, op):
    """Duplicates too, and a read after them sees them."""
    table = home.sharded(TABLE + 1, 3)
    indices = np.array([9, 2, 9, 0, 2, 2, 5])
    rows = np.linspace(1, 5, 28, dtype=np.float32).reshape(7, 4)

    @zs.function
    def step(indices, rows):
        table._sparse(op, IndexedSlices(rows, indices))
        return table.value()

    seen = step(indices, rows)
    expected = apply(op, TABLE + 1, (indices, rows))
    np.testing.assert_allclose(home.whole(table), expected, rtol=1e-6)
    np.testing.assert_allclose(seen, expected, rtol=1e-6)
    for _, _, (local, _) in home.updates:
        assert sorted(local) == local.tolist()


@pytest.mark.parametrize("eager", [False, True], ids=["captured", "eager"])
def test_gradient_rows_are_summed_before_they_travel(home, eager):
    table, other = home.sharded(TABLE, 3), home.variable(TABLE[:, :2], "other")
    optimizer = home.optimizer(optax.sgd(1.0))

    @zs.function(eager=eager)
    def step(ids):
        rows = zs.embedding_lookup(table, ids)
        flat = ids.reshape(-1)
        slices = IndexedSlices(rows.reshape(-1, 4), flat)
        again = IndexedSlices(jnp.ones((4, 2)), jnp.concatenate([flat[2:], flat[:2]]))
        optimizer.apply_gradients([(slices, table), (again, other)])

    ids = np.array([[3, 9], [3, 0]])
    step(ids)
    counts = np.bincount(ids.ravel(), minlength=10)[:, None]
    np.testing.assert_allclose(home.whole(table), TABLE * (1 - counts), rtol=1e-6)
    np.testing.assert_allclose(home.whole(other), TABLE[:, :2] - counts, rtol=1e-6)
    assert [(name, index.tolist()) for name, _, (index, _) in home.updates] == [
        ("t/part_0", [0, 3]),
        ("t/part_1", []),  # it counts this step too
        ("t/part_2", [2]),
        ("other", [0, 3, 9]),
    ]


@pytest.mark.parametrize("eager", [False, True], ids=["captured", "eager"])
@pytest.mark.parametrize("shared", [False, True], ids=["other ids", "its own ids"])
def test_an_optimizer_steps_on_components_without_rows(home, eager, shared):
    table = home.sharded(TABLE, 3)
    adam = home.optimizer(optax.adam(0.1))

    @zs.function(eager=eager)
    def step(ids):
        rows = zs.embedding_lookup(table, ids)
        index = ids if shared else ids + 1
        adam.apply_gradients([(IndexedSlices(rows, index), table)])
        table.scatter_add(IndexedSlices(rows, index))

    step(np.array([5, 5]))
    row = 1 if shared else 2
    optimized = [u for u in home.updates if u[1] is UpdateOp.OPTIMIZE_ROWS]
    assert sorted((name, at.tolist()) for name, _, (at, _) in optimized) == [
        ("t/part_0", []),
        ("t/part_1", [row]),
        ("t/part_2", []),
    ]
    assert all(rows.shape == (len(at), 4) for _, _, (at, rows) in optimized)
    # What no optimizer counts is not sent.
    assert [u[0] for u in home.updates if u[1] is UpdateOp.SCATTER_ADD] == ["t/part_1"]
    home.updates.clear()
    step(np.zeros(0, np.int32))
    assert [(name, op, len(at)) for name, op, (at, _) in home.updates] == [
        (f"t/part_{n}", UpdateOp.OPTIMIZE_ROWS, 0) for n in range(3)
    ]


def test_several_tables_leave_as_one_and_in_their_order(home):
    """Tables alike, one looked up twice, one without a gradient between them."""
    rng = np.random.default_rng(0)
    values = [rng.normal(size=(rows, 3)).astype(np.float32) for rows in (7, 5, 9, 4)]
    tables = [home.sharded(v, 2, f"t{n}") for n, v in enumerate(values)]
    optimizer = home.optimizer(optax.sgd(1.0))
    counter = home.variable(np.int32(0), "counter")

    @zs.function
    def step(ids):
        rows = [table.sparse_read(ids[n]) for n, table in enumerate(tables)]
        more = tables[0].sparse_read(ids[3])
        joined = jnp.concatenate([rows[0], more])
        optimizer.apply_gradients(IndexedSlices(rows[3], ids[3]), tables[3])
        counter.assign_add(1)
        index = jnp.concatenate([ids[0], ids[3]])
        optimizer.apply_gradients(IndexedSlices(joined, index), tables[0])
        optimizer.apply_gradients(IndexedSlices(rows[1], ids[1]), tables[1])
        return rows

    ids = rng.integers(0, 4, (4, 6))
    rows = step(ids)
    for n, value in enumerate(values):
        np.testing.assert_array_equal(rows[n], value[ids[n]])
    used = [np.concatenate([ids[0], ids[3]]), ids[1], None, ids[3]]
    for n, (value, index) in enumerate(zip(values, used, strict=True)):
        counts = 0 if index is None else np.bincount(index, minlength=len(value))
        expected = value * (1 - np.reshape(counts, (-1, 1)))
        np.testing.assert_allclose(home.whole(tables[n]), expected, rtol=1e-6)
    order = [name.split("/")[0] for name, _, _ in home.updates]
    assert list(dict.fromkeys(order)) == ["t3", "counter", "t0", "t1"]


def test_an_argument_that_is_in_parts_names_the_program(home):
    table, other = home.sharded(TABLE, 2), home.sharded(TABLE + 1, 2)
    step = zs.function(lambda table, ids: table.sparse_read(ids))
    ids = np.array([2])
    for each in (table, other, table):
        np.testing.assert_array_equal(step(each, ids), home.whole(each)[ids])
    assert step.trace_count == 2
    np.testing.assert_array_equal(zs.function(lambda: table)(), TABLE)


def test_refusals(home):
    table = home.sharded(TABLE, 2)
    ids = np.array([1, 2])

    def refused(body, match, error=RuntimeError):
        with pytest.raises(error, match=match):
            zs.function(body)(ids)

    def after_update(ids):
        table.scatter_add(IndexedSlices(jnp.ones((2, 4)), ids))
        return table.sparse_read(ids)

    inside = r"table 't'.*inside a function that jax.*before.*zs\.value_and_grad"
    refused(after_update, r"'t'.*looked up after the same step updated it.*value\(\)")
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
    calls = []

    def changing(ids):
        calls.append(1)
        return [table.sparse_read(ids) for _ in calls]

    refused(changing, "did something else when it was traced again: .*looks up other")


def test_a_step_with_lookups_is_shipped(home):
    table = home.sharded(TABLE, 2)
    step = zs.function(lambda ids: zs.embedding_lookup(table, ids) * 2)
    loaded = zs.load(zs.dump_code(step))
    prepared = zs.prepare(loaded, (np.array([9, 1, 9]),), {})
    assert names(prepared.wanted) == [("t/part_0", [1]), ("t/part_1", [4])]
    result = prepared.run([TABLE[[1]], TABLE[[9]]])
    np.testing.assert_array_equal(result.leaves[0], TABLE[[9, 1, 9]] * 2)
    with pytest.raises(ValueError, match="answered float32"):
        zs.prepare(loaded, (np.array([9, 1, 9]),), {}).run([TABLE[[1]], TABLE[[8, 9]]])


# ---- the parts by themselves ---------------------------------------------------------


def test_flow():
    def program(a, b, c):
        doubled, other = jax.jit(lambda x, y: (x * 2, y + 1))(a, b)
        looped = jax.lax.fori_loop(0, 3, lambda _, x: (x[1], x[0]), (a, a + c))[0]
        flat = jnp.concatenate([doubled.reshape(-1), a.reshape(-1)])
        return doubled, other, looped, flat, a.reshape(-1), a.astype(np.int8)

    a = np.arange(4, dtype=np.int32).reshape(2, 2)
    closed = jax.make_jaxpr(program)(a, np.float32(1), np.int32(2))
    flow = Flow(closed)
    assert [flow.inputs_of([n]) for n in range(4)] == [0b001, 0b010, 0b101, 0b001]
    assert flow.origin(3) == (*flow.origin(0), *flow.origin(4))
    assert [flow.input_at_origin(n) for n in (0, 4, 5)] == [None, 0, None]
    part, inputs = flow.part([3, 0])
    assert inputs == [0]
    flat, doubled = jax.jit(part)(a)
    np.testing.assert_array_equal(flat, [0, 2, 4, 6, 0, 1, 2, 3])
    np.testing.assert_array_equal(doubled, a * 2)


MOVES = {
    "reshape": lambda x: x.reshape(-1, 2),
    "reshape in Fortran's order": lambda x: x.reshape((2, -1), order="F"),
    "ravel": jnp.ravel,
    "ravel in Fortran's order": lambda x: jnp.ravel(x, order="F"),
    "lax.reshape of dimensions": lambda x: jax.lax.reshape(
        x, (x.size,), tuple(range(x.ndim))[::-1]
    ),
    "transpose": jnp.transpose,
    "swapaxes": lambda x: jnp.swapaxes(x, 0, -1),
    "rev": lambda x: jax.lax.rev(x, (0,)),
    "flip": jnp.flip,
    "sort": lambda x: jnp.sort(x, axis=-1),
    "roll": lambda x: jnp.roll(x, 1),
    "expand_dims": lambda x: jnp.expand_dims(x, 0),
    "squeeze": lambda x: jnp.squeeze(x[None]),
    "broadcast": lambda x: jax.lax.broadcast(x, (1,)),
    "twice": lambda x: jnp.stack([x, x]),
    "joined": lambda x: jnp.concatenate([x, x], axis=-1),
    "joined with itself turned": lambda x: jnp.concatenate([x.ravel(), x.T.ravel()]),
    "wide": lambda x: x.astype(jnp.int32),
    "narrow": lambda x: x.astype(jnp.int8),
    "copy": jnp.copy,
    "as it is": lambda x: x,
}


@settings(
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(st.sampled_from(list(MOVES)), max_size=3),
    st.lists(st.sampled_from(list(MOVES)), max_size=3),
    st.sampled_from(["int16", "int32"]),
)
@example(["ravel in Fortran's order"], ["ravel"], "int32")
@example(["lax.reshape of dimensions"], ["as it is"], "int32")
@example(["as it is"], ["reshape in Fortran's order"], "int32")
def test_ids_that_are_moved_stay_with_their_rows(home, looked_up, updated, dtype):
    """Those of a lookup are those of the batch, or of an update, only if none moved."""
    ids = np.array([[3, 1, 4], [1, 5, 9]], dtype)

    def moved(x, names):
        for name in names:
            x = MOVES[name](x)
        return x

    def both(x):
        return moved(x, looked_up), moved(x, updated).reshape(-1)

    table = home.sharded(TABLE, 3)

    @zs.function
    def step(x, rows):
        first, second = both(x)
        read = zs.embedding_lookup(table, first)
        table.scatter_sub(IndexedSlices(rows, second))
        return read

    first, second = (np.asarray(x) for x in both(jnp.asarray(ids)))
    rows = np.arange(second.size * 4, dtype=np.float32).reshape(-1, 4)
    expected = TABLE.copy()
    np.subtract.at(expected, second, rows)
    np.testing.assert_array_equal(step(ids, rows), TABLE[first])
    np.testing.assert_allclose(home.whole(table), expected, rtol=1e-6)


def planned(tables, sizes):
    return [
        (number, PlannedLookup(tables[which], shape, 0, "here"))
        for number, (which, shape) in enumerate(sizes)
    ]


def table_of(number, heights, row, dtype, layout):
    width = {"shape": row}
    parts = tuple(
        handle(
            VariableSpec(100 * number + n, f"t{number}/{n}", (h, *row), dtype, ps=n),
            types.SimpleNamespace(**width),
        )
        for n, h in enumerate(heights)
    )
    return Table(f"t{number}", parts, layout)


@st.composite
def levels(draw):
    tables = []
    for number in range(draw(st.integers(1, 4))):
        parts, rows = draw(st.integers(1, 3)), draw(st.integers(3, 12))
        layout = draw(st.sampled_from(TableLayout))
        if layout is TableLayout.MOD:
            heights = [-(-(rows - n) // parts) for n in range(parts)]
        else:
            heights = [len(x) for x in np.array_split(np.arange(rows), parts)]
        row, dtype = draw(
            st.sampled_from([((), "int32"), ((2,), "float32"), ((2,), "bfloat16")])
        )
        tables.append(table_of(number, heights, row, dtype, layout))
    which = st.integers(0, len(tables) - 1)
    shapes = st.sampled_from([(), (0,), (1,), (5,), (2, 3)])
    sizes = draw(st.lists(st.tuples(which, shapes), min_size=1, max_size=6))
    padding = draw(st.sampled_from([0, 0.3, 1]))
    return tables, sizes, padding, draw(st.integers(0, 2**32 - 1))


@settings(deadline=None, max_examples=150)
@given(levels())
def test_a_level_gives_the_rows_and_the_sums_of_each_lookup(case):
    tables, sizes, padding, seed = case
    rng = np.random.default_rng(seed)
    wholes, stored = [], {}
    for table in tables:
        whole = rng.integers(0, 99, table.shape).astype(table.dtype)
        wholes.append(whole)
        count = len(table.components)
        at = np.arange(len(whole))
        for n, component in enumerate(table.components):
            mine = (
                at % count == n
                if table.layout is TableLayout.MOD
                else (at >= table.offsets[n]) & (at < table.offsets[n + 1])
            )
            stored[component.spec] = whole[mine]
    lookups = planned(tables, sizes)
    level = Level(lookups)
    ids = {n: np.array(rng.integers(0, x.table.shape[0], x.shape)) for n, x in lookups}
    for each in ids.values():
        left_out = rng.random(each.shape) < padding
        np.copyto(each, ABSENT, where=left_out)
    flat = np.concatenate([np.ravel(ids[n]) for n in level.order]).astype(np.int64)
    asked = level.ask(flat)
    assert len({spec for spec, _ in asked.rows}) == len(asked.rows)
    for _, indices in asked.rows:
        assert (np.diff(indices) > 0).all()
    blocks = level.assembled(asked, [stored[spec][at] for spec, at in asked.rows])
    for block, rows in zip(level.blocks, blocks, strict=True):
        at = 0
        for segment in block.segments:
            for number in segment.lookups:
                size = lookups[number][1].size
                which = sizes[number][0]
                mine = ids[number].reshape(-1)
                expected = wholes[which][np.maximum(mine, 0)]
                expected[mine == ABSENT] = 0
                np.testing.assert_array_equal(rows[at : at + size], expected)
                at += size
        gradient = rng.integers(0, 9, (at, *rows.shape[1:])).astype(np.float32)
        summed = sums(level.runs_of(asked, block.segments), gradient)
        parts = level.parts_of(asked, block.segments)
        for segment, own_parts in zip(block.segments, parts, strict=True):
            own = slice(segment.start - block.start, segment.stop - block.start)
            found = {
                (s, i): summed[w][n] for s, w, at in own_parts for n, i in enumerate(at)
            }
            dense = np.zeros(segment.table.shape, np.float32)
            mine, rows = flat[segment.start : segment.stop], gradient[own]
            np.add.at(dense, mine[mine != ABSENT], rows[mine != ABSENT])
            count = len(segment.table.components)
            for n, component in enumerate(segment.table.components):
                total = (
                    dense[n::count]
                    if segment.table.layout is TableLayout.MOD
                    else dense[segment.table.offsets[n] : segment.table.offsets[n + 1]]
                )
                for index, row in enumerate(total):
                    seen = found.get((component.spec, index), np.zeros_like(row))
                    np.testing.assert_array_equal(seen, row)

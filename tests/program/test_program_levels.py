"""The lookups of a level as one batch, and data flow in a program.

Expected rows are those that numpy takes from the whole table.
"""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st
from tiers import examples

import zstrat.program as zs
from zstrat.program.lookup import PlannedLookup
from zstrat.program.lookup._lookups import Level
from zstrat.program.trace import Flow
from zstrat.rows import sums
from zstrat.variables import (
    ABSENT,
    IndexedSlices,
    Table,
    TableLayout,
    VariableSpec,
    handle,
)

TABLE = np.arange(40, dtype=np.float32).reshape(10, 4) / 7


def test_flow():
    def program(a, b, c):
        doubled, other = jax.jit(lambda x, y: (x * 2, y + 1))(a, b)
        looped = jax.lax.fori_loop(0, 3, lambda _, x: (x[1], x[0]), (a, a + c))[0]
        flat = jnp.concatenate([doubled.reshape(-1), a.reshape(-1)])
        apart = jax.lax.fori_loop(0, 3, lambda _, x: (x[0] * 2, x[1] + 1), (a, c))[0]
        either = jax.lax.cond(b > 0, lambda x, y: (x, y), lambda x, y: (-x, y), a, c)
        results = doubled, other, looped, flat, a.reshape(-1), a.astype(np.int8)
        return *results, apart, either[0].sum()

    a = np.arange(4, dtype=np.int32).reshape(2, 2)
    closed = jax.make_jaxpr(program)(a, np.float32(1), np.int32(2))
    flow = Flow(closed)
    assert [flow.inputs_of([n]) for n in range(4)] == [0b001, 0b010, 0b101, 0b001]
    assert [flow.inputs_of([n]) for n in (6, 7)] == [0b001, 0b011]
    assert flow.origin(3) == (*flow.origin(0), *flow.origin(4))
    assert [flow.input_at_origin(n) for n in (0, 4, 5)] == [None, 0, None]
    part, inputs = flow.part([3, 0])
    assert inputs == [0]
    flat, doubled = jax.jit(part)(a)
    np.testing.assert_array_equal(flat, [0, 2, 4, 6, 0, 1, 2, 3])
    np.testing.assert_array_equal(doubled, a * 2)


def bounds(size):
    """Slices of an axis, as bounds and a stride."""
    ends = st.tuples(st.integers(0, size), st.integers(0, size)).map(sorted)
    return st.tuples(ends, st.integers(1, 3))


@st.composite
def parts(draw):
    """A function that chooses elements of an array ``[3, 4, 2]``, of int32."""
    steps = []
    shape = (3, 4, 2)
    for kind in draw(st.lists(st.sampled_from(["slice", "turn", "reshape"]))):
        if kind == "slice":
            chosen = [draw(bounds(size)) for size in shape]
            starts, ends = zip(*[each for each, _ in chosen], strict=True)
            strides = draw(st.sampled_from([None, tuple(by for _, by in chosen)]))
            steps.append((jax.lax.slice, (starts, ends, strides)))
        elif kind == "turn":
            steps.append((jax.lax.transpose, (draw(st.permutations(range(3))),)))
        else:
            order = draw(st.permutations(shape))
            steps.append((jax.lax.reshape, (order,)))

        def choose(x, steps=tuple(steps)):
            for function, arguments in steps:
                x = function(x, *arguments)
            return x

        shape = choose(jnp.zeros((3, 4, 2), np.int32)).shape
    return lambda x: choose(x) if steps else x


@examples(25)
@given(parts(), st.sampled_from(["int8", "int32"]))
@example(lambda x: jax.lax.slice(x, (0, 1, 0), (3, 4, 1), (2, 3, 1)), "int32")
@example(lambda x: jax.lax.transpose(x[1:], (2, 0, 1)).reshape(-1)[3:], "int8")
def test_parts_of_an_input_are_found_without_a_program(choose, dtype):
    array = np.arange(24, dtype=dtype).reshape(3, 4, 2)

    def program(_, x):
        return choose(x.astype(np.int32)), choose(x)[..., None] + 1

    flow = Flow(jax.make_jaxpr(program)(np.float32(1), array))
    view = flow.view_of_input(0)
    assert view.number == 1
    np.testing.assert_array_equal(view.elements(array), np.ravel(choose(array)))
    assert flow.view_of_input(1) is None


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


@examples(25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sampled_from(list(MOVES)), max_size=3),
    st.lists(st.sampled_from(list(MOVES)), max_size=3),
    st.sampled_from(["int16", "int32"]),
)
@example(["ravel in Fortran's order"], ["ravel"], "int32")
@example(["lax.reshape of dimensions"], ["as it is"], "int32")
@example(["as it is"], ["reshape in Fortran's order"], "int32")
def test_ids_that_are_moved_stay_with_their_rows(storage, looked_up, updated, dtype):
    """Those of a lookup are those of the batch, or of an update, only if none moved."""
    ids = np.array([[3, 1, 4], [1, 5, 9]], dtype)

    def moved(x, names):
        for name in names:
            x = MOVES[name](x)
        return x

    def both(x):
        return moved(x, looked_up), moved(x, updated).reshape(-1)

    table = storage.sharded(TABLE, 3)

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
    np.testing.assert_allclose(storage.whole(table), expected, rtol=1e-6)


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
        layout = draw(st.sampled_from([TableLayout.DIV, TableLayout.MOD]))
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


@examples(150)
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
        absent_mask = rng.random(each.shape) < padding
        np.copyto(each, ABSENT, where=absent_mask)
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

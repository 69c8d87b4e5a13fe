"""Tables of any id in steps: ids keep their 64 bits, compared with a dict."""

from __future__ import annotations

import inspect
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zstrat.program as zs
from zstrat.ids import BUCKETS, buckets_of, hashes_of
from zstrat.variables import (
    ABSENT,
    BUCKET_ROWS,
    DowncastWarning,
    IndexedSlices,
    Module,
    VariableSpec,
    handle,
    hashed,
)
from zstrat.wire import UpdateOp

RNG = np.random.default_rng(11)
IDS = RNG.integers(-(2**63), 2**63 - 1, (4, 3))
IDS[1] = IDS[0, ::-1]
LOW = IDS.astype(np.int32)
"""What would be left of them with 32 bits."""

ONES = np.ones((3, 2), np.float32)
RATE = np.float32(0.5)


def first(ids):
    """The first values of rows: they tell any two of these ids apart."""
    halves = np.stack([ids >> 32, ids & (2**32 - 1)], axis=-1)
    return (halves % 10007).astype(np.float32)


KEYS = itertools.count(100)


class Rows:
    """Parts of a table as a server keeps them, in dicts; sgd for gradients."""

    def __init__(self, parts: int = 3) -> None:
        self.rows: list[dict[int, np.ndarray]] = [{} for _ in range(parts)]
        cuts = [BUCKETS * n // parts for n in range(parts + 1)]
        self.ranges = list(itertools.pairwise(cuts))
        self.asked: list[list[int]] = []
        specs = [
            VariableSpec(
                next(KEYS), f"t/{n}", ((b - a) * BUCKET_ROWS, 2), "float32", n,
                buckets=(a, b),
            )
            for n, (a, b) in enumerate(self.ranges)
        ]  # fmt: skip
        self.table = hashed([handle(spec, self) for spec in specs], "t")

    def get(self, ids):
        whole = {k: v for part in self.rows for k, v in part.items()}
        flat = np.ravel(ids)
        rows = [whole.get(int(i), first(i)) for i in flat]
        return np.array(rows, np.float32).reshape(*np.shape(ids), 2)

    def own(self, variable, ids, *, distinct=True):
        """The rows of a part; ids are its own, and sorted by their hash."""
        assert ids.dtype == np.int64
        part = variable.spec.ps
        hashes, (low, high) = hashes_of(ids), self.ranges[part]
        buckets = buckets_of(hashes)
        assert ((buckets >= low) & (buckets < high)).all()
        assert (hashes[1:] > hashes[:-1]).all() or not distinct
        return self.rows[part]

    def read_rows(self, parts):
        for variable, ids in parts:
            self.own(variable, ids)
        self.asked.append([i for _, ids in parts for i in ids.tolist()])
        return [self.get(ids) for _, ids in parts]

    def update_many(self, updates):
        for variable, op, operands, _ in updates:
            ids = operands[0]
            rows = self.own(variable, ids, distinct=op is UpdateOp.OPTIMIZE_ROWS)
            if op is UpdateOp.REMOVE_ROWS:
                for i in ids.tolist():
                    rows.pop(i, None)
                continue
            for i, row in zip(ids.tolist(), operands[1], strict=True):
                before = rows.get(i, first(np.int64(i)))
                rows[i] = {
                    UpdateOp.OPTIMIZE_ROWS: lambda a, b: a - RATE * b,
                    UpdateOp.SCATTER_ADD: lambda a, b: a + b,
                    UpdateOp.SCATTER_UPDATE: lambda a, b: b,
                }[op](before, row)

    def bind(self, call):
        """Nothing: it knows one optimizer."""

    def register_optimizer(self, optimizer):
        return 1

    def create_variables(self, requests):
        raise AssertionError(requests)


@pytest.fixture
def rows():
    return Rows()


@pytest.fixture
def optimizer(storage):
    return storage.optimizer(optax.sgd(float(RATE)))


@pytest.mark.parametrize("ids", [IDS, IDS[0, 0], IDS[:0], IDS.view(np.uint64), LOW])
def test_rows_of_any_ids_in_a_step_and_outside(rows, ids):
    wanted = rows.get(np.asarray(ids).astype(np.int64))
    step = zs.function(lambda ids: zs.embedding_lookup(rows.table, ids))
    np.testing.assert_array_equal(step(ids), wanted)
    np.testing.assert_array_equal(zs.embedding_lookup(rows.table, ids), wanted)
    np.testing.assert_array_equal(rows.table.lookup(ids), wanted)
    for asked in rows.asked:
        assert len(asked) == len(set(asked)) == len(np.unique(ids))


@pytest.mark.filterwarnings("ignore::zstrat.DowncastWarning")
def test_an_eager_step_takes_ids_that_fit_32_bits(rows):
    eager = zs.function(lambda ids: zs.embedding_lookup(rows.table, ids), eager=True)
    small = IDS % 1000
    np.testing.assert_array_equal(eager(small), rows.get(small))
    with pytest.raises(ValueError, match="eager=True"):
        eager(IDS)
    constant = zs.function(lambda: zs.embedding_lookup(rows.table, IDS), eager=True)
    np.testing.assert_array_equal(constant(), rows.get(IDS))


def test_hashed_tables_beside_others_in_one_request(storage):
    one, other = Rows(1), Rows(5)
    dense = storage.sharded(np.arange(22, dtype=np.float32).reshape(11, 2), 3)

    @zs.function
    def step(a, b, c):
        found = [zs.embedding_lookup(one.table, a), zs.embedding_lookup(dense, c)]
        return [*found, zs.embedding_lookup(other.table, b), one.table.lookup(b)]

    places = np.array([10, 0, 3])
    got = step(IDS, IDS[2:], places)
    wanted = [one.get(IDS), dense.numpy()[places], other.get(IDS[2:]), one.get(IDS[2:])]
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(a, b)


WAYS = {
    "reshape": lambda ids: ids.reshape(-1),
    "slices": lambda ids: ids[1:, ::-1],
    "a row": lambda ids: ids[2],
    "where": lambda ids: jnp.where(ids > 0, ids, ids + 1),
    "arithmetic": lambda ids: ids * 3 - 7,
    "modulo": lambda ids: ids % 1_000_003,
    "bits": lambda ids: (ids >> 7) ^ ids,
    "concatenated": lambda ids: jnp.concatenate([ids.ravel(), -ids.ravel()]),
    "stacked": lambda ids: jnp.stack([ids, ids], 1),
    "taken": lambda ids: jnp.take(ids.ravel(), np.array([3, 0, 3])),
    "sorted": lambda ids: jnp.sort(ids.ravel()),
    "clipped": lambda ids: jnp.clip(ids, 0),
    "a part replaced": lambda ids: ids.at[1, :2].set(ids[2, 1:]),
    "split": lambda ids: jnp.split(ids, 2)[1],
    "in jit": jax.jit(lambda ids: jnp.maximum(ids, 5).T),
    "the least": lambda ids: jnp.min(ids, 0),
    "unique": lambda ids: jnp.unique(ids, size=20),
    "the most": lambda ids: jax.lax.top_k(ids, 2)[0],
    "added to a part": lambda ids: ids.at[1].add(5).at[0].max(ids[1]),
    "a part that is outside": lambda ids: ids.at[9].get(mode="fill"),
    "products": lambda ids: jnp.cumprod(ids % 2**20, 1) + jnp.prod(ids, 1)[:, None],
    "a product of matrices": lambda ids: ids @ jnp.array([1, 31, 961]),
    "by position": lambda ids: (jnp.arange(1000) << 40)[ids % 1000],
    "sums of segments": lambda ids: jax.ops.segment_sum(ids, ids[:, 0] % 4, 4),
    "fields": lambda ids: (ids & (2**20 - 1)) | (jnp.arange(3) << 40)[None],
    "fields in jit": lambda ids: (
        ids ^ jax.jit(lambda: jnp.ones((4, 3), int) * 2**30 * 2**9)()
    ),
    "a mask of fields": lambda ids: jnp.where(
        ids > 0, ids, (ids > 5).astype(int) << 35
    ),
    "bits that are set": lambda ids: jax.lax.population_count(ids) << 40,
    "a hash of 32 bits": lambda ids: (
        (ids.astype(jnp.uint32) * jnp.uint32(2654435761)) >> 3
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_ids_that_a_step_computes_are_those_of_64_bits(rows, way):
    """The expectation is what jax computes with 64 bits."""
    with jax.enable_x64(True):
        ids = np.asarray(WAYS[way](jnp.asarray(IDS)))
    ids = ids.astype(np.int64)
    got = zs.function(lambda ids: zs.embedding_lookup(rows.table, WAYS[way](ids)))(IDS)
    np.testing.assert_array_equal(got, rows.get(ids))


def test_unsigned_ids_become_signed_ones_whole(rows):
    """jax has traced int64 as int32, too."""
    ids = IDS.view(np.uint64)
    ways = {
        "a cast": lambda ids: ids.astype(jnp.int32),
        "a sum": lambda ids: ids.astype(jnp.int32) + jnp.arange(12).reshape(4, 3),
    }
    for way in ways.values():
        got = zs.function(lambda ids, way=way: rows.table.lookup(way(ids)))(ids)
        wanted = np.asarray(
            IDS if way is ways["a cast"] else IDS + np.arange(12).reshape(4, 3)
        )
        np.testing.assert_array_equal(got, rows.get(wanted))


def test_what_else_a_step_computes_with_ids_sees_64_bits(rows):
    ids = IDS.copy()
    ids[0] = [2**32, 2**40, 0]  # with 32 bits, all are 0

    @zs.function
    def step(ids, scale):
        found = zs.embedding_lookup(rows.table, ids)
        mask = (ids != 0).astype(jnp.float32)[..., None]
        return jnp.sum(found * mask * scale), jnp.sum(ids > 5)

    total, large = step(ids, np.float32(2))
    wanted = rows.get(ids) * (ids != 0)[..., None]
    np.testing.assert_allclose(total, 2 * wanted.sum(), rtol=1e-6)
    assert large == (ids > 5).sum()


def test_ids_that_a_step_returns_are_warned_of(rows):
    step = zs.function(lambda ids: (zs.embedding_lookup(rows.table, ids), ids))
    with pytest.warns(DowncastWarning, match="ids"):
        found, returned = step(IDS)
    np.testing.assert_array_equal(found, rows.get(IDS))
    np.testing.assert_array_equal(returned, LOW)


def added(state, i):
    return i, i + state


FLOWS = {
    "scan": lambda ids: jax.lax.scan(added, jnp.zeros((), jnp.int32), ids)[1],
    "while": lambda ids: jax.lax.while_loop(
        lambda state: state[0] < 2, lambda s: (s[0] + 1, s[1] * 2), (0, ids)
    )[1],
    "cond": lambda ids: jax.lax.cond(ids[0] > 0, lambda i: i + 1, lambda i: -i, ids),
    "of jax": lambda ids: ids + jnp.searchsorted(jnp.sort(ids), ids),
}


@pytest.mark.parametrize("flow", FLOWS)
def test_an_operation_that_is_not_known_takes_ids_of_32_bits_only(rows, flow):
    """An error names the line; jax knows none of its own code."""

    @zs.function
    def step(ids):
        return zs.embedding_lookup(rows.table, FLOWS[flow](ids))

    small = np.array([5, 6, 7], np.int64)
    wanted = np.asarray(FLOWS[flow](jnp.asarray(small)), np.int64)
    np.testing.assert_array_equal(step(small), rows.get(wanted))
    lines, first = inspect.getsourcelines(FLOWS[flow])
    with pytest.raises(ValueError, match=str(IDS[0, 0])) as refused:
        step(IDS[0])
    # What jax makes of its own function depends on its version.
    name = r"\w+" if flow == "of jax" else flow
    (line,) = re.findall(rf"'{name}' at {__file__}:(\d+)", str(refused.value))
    assert int(line) in range(first, first + len(lines))


def test_rows_of_another_shape_are_refused_without_sizes_of_ours(rows):
    """The first size of such a table is no number that its user knows."""
    wrong = IndexedSlices(np.zeros((2, 5), np.float32), np.array([1, 2]))
    with pytest.raises(ValueError, match=r"'t.*\(any id.*\(2, 5\).*\(2, 2\)") as raised:
        rows.table.scatter_add(wrong)
    assert not re.search(r"\d{5}", str(raised.value))


def test_gradients_create_rows(rows, optimizer):
    """Rows that occur twice take one step by the sum; look-ups alone create none."""
    table = rows.table
    weights = RNG.normal(size=(4, 3, 2)).astype(np.float32)

    @zs.function
    def step(ids, weights):
        def loss(t):
            return jnp.sum(zs.embedding_lookup(t, ids) * weights)

        value, gradient = zs.value_and_grad(loss)(table)
        assert isinstance(gradient, IndexedSlices)
        optimizer.apply_gradients([(gradient, table)])
        return value

    before = rows.get(IDS)
    table.lookup(IDS)
    assert rows.rows == [{}, {}, {}]
    value = step(IDS, weights)
    np.testing.assert_allclose(value, (before * weights).sum(), rtol=1e-4)
    for i in np.unique(IDS):
        moved = first(i) - RATE * weights[i == IDS].sum(0)
        np.testing.assert_allclose(rows.get(i), moved, rtol=1e-5)
    assert sum(map(len, rows.rows)) == len(np.unique(IDS))


def test_gradients_of_several_lookups_of_one_table(rows, optimizer):
    @zs.function
    def step(a, b):
        def loss(t):
            more = zs.embedding_lookup(t, b + 1)
            return jnp.sum(zs.embedding_lookup(t, a)) + 2 * jnp.sum(more)

        optimizer.apply_gradients([(zs.grad(loss)(rows.table), rows.table)])

    a, b = IDS[0], IDS[0, :2] - 1
    step(a, b)
    wanted = first(a) - RATE
    wanted[:2] -= 2 * RATE
    np.testing.assert_allclose(rows.get(a), wanted)


def test_ids_that_depend_on_rows(rows):
    table, other = rows.table, Rows(2)
    table.assign(IDS[0], np.array([[7, 0], [8, 0], [9, 0]], np.float32))

    @zs.function
    def step(ids):
        found = zs.embedding_lookup(table, ids)
        return zs.embedding_lookup(other.table, found[:, 0].astype(jnp.int32) + ids)

    np.testing.assert_array_equal(step(IDS[0]), other.get(IDS[0] + [7, 8, 9]))


def test_padding_is_not_looked_up_and_not_updated(rows, optimizer):
    mask = np.array([[1, 0, 1], [0, 0, 0], [1, 1, 1], [1, 1, 1]], bool)

    @zs.function
    def step(ids, mask):
        def loss(t):
            found = zs.embedding_lookup_sparse(t, (ids, mask), combiner="sum")
            return jnp.sum(found), found

        gradient, found = zs.grad(loss, has_aux=True)(rows.table)
        optimizer.apply_gradients([(gradient, rows.table)])
        return found

    before = rows.get(IDS)
    np.testing.assert_allclose(step(IDS, mask), (before * mask[..., None]).sum(1))
    assert set(rows.asked[0]) == set(IDS[mask].tolist())
    created = {i for part in rows.rows for i in part}
    assert created == set(IDS[mask].tolist())
    zeros = zs.embedding_lookup(rows.table, np.array([ABSENT]))
    np.testing.assert_array_equal(zeros, np.zeros((1, 2)))
    with pytest.raises(ValueError, match=str(ABSENT)):
        rows.table.assign([3, ABSENT], np.ones((2, 2), np.float32))


MASK = np.array([True, False, True, True])
LOOK_UPS = {
    "embedding_lookup": lambda t, ids, mask: zs.embedding_lookup(t, ids),
    "with a mask": lambda t, ids, mask: zs.embedding_lookup_sparse(
        t, (ids[:, None], mask[:, None])
    ),
    "with weights": lambda t, ids, mask: zs.embedding_lookup_sparse(
        t, (ids, np.arange(4), 4), weights=mask.astype(np.float32)
    ),
    "with a default": lambda t, ids, mask: zs.safe_embedding_lookup_sparse(
        t, (ids[:, None], mask[:, None]), default_id=-5
    ),
}
COMPUTED = {
    "given": lambda ids: ids,
    "arithmetic": lambda ids: ids * 3 + 1,
    "a hash": lambda ids: (ids ^ (ids >> 7)) * ids,
}


def edges(dtype):
    """Ids at both ends of a dtype, which wrap in other ones; none is `ABSENT`."""
    info = np.iinfo(dtype)
    return np.array([info.max - 3, 7, info.max // 2 + 2, info.min + 9], dtype)


def found_by(rows, look_up, ids):
    """What a look-up gives, by numpy."""
    wanted = rows.get(ids.astype(np.int64))
    if look_up != "embedding_lookup":
        default = [-5] if look_up == "with a default" else []
        wanted[~MASK] = first(np.array(default, np.int64)) if default else 0
    return wanted


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64", "uint64"])
@pytest.mark.parametrize("look_up", LOOK_UPS)
def test_a_row_of_an_id_is_the_same_to_all_lookups(rows, look_up, dtype, x64):
    """Ids of 32 bits are computed with 32, those of 64 with 64, as numpy does."""
    ids, call = edges(dtype), LOOK_UPS[look_up]
    with jax.enable_x64(x64):
        for way in COMPUTED.values():
            step = zs.function(lambda ids, m, way=way: call(rows.table, way(ids), m))
            with np.errstate(over="ignore"):
                wanted = found_by(rows, look_up, way(ids))
            np.testing.assert_array_equal(step(ids, MASK), wanted)
        np.testing.assert_array_equal(
            call(rows.table, ids, MASK), found_by(rows, look_up, ids)
        )


@pytest.mark.parametrize("look_up", LOOK_UPS)
def test_ids_of_32_bits_that_a_step_makes(rows, look_up):
    """From numbers of another dtype, and as constants."""
    call, ids = LOOK_UPS[look_up], edges("uint32")
    wanted = found_by(rows, look_up, ids)
    bodies = [
        lambda given, mask: call(rows.table, given.astype(jnp.uint32), mask),
        lambda given, mask: call(rows.table, jnp.uint32(ids) + given * 0, mask),
        lambda given, mask: call(rows.table, ids, mask),
        lambda given, mask: call(rows.table, ids.astype(np.uint64), mask),
        lambda given, mask: call(rows.table, jnp.asarray(ids), mask),
    ]
    for body in bodies:
        given = ids if body is bodies[1] else ids.view(np.int32)
        np.testing.assert_array_equal(zs.function(body)(given, MASK), wanted)


def test_ids_of_several_dtypes_in_one_request(rows):
    given = [edges(dtype) for dtype in ("int32", "uint32", "int64", "uint64")]

    def body(given, mask):
        computed = [ids ^ 5 for ids in given]
        masked = [look_up(rows.table, ids, mask) for ids in computed]
        return [zs.embedding_lookup(rows.table, ids) for ids in computed], masked

    look_up = LOOK_UPS["with a mask"]
    plain, masked = zs.function(body)(given, MASK)
    for ids, a, b in zip(given, plain, masked, strict=True):
        five = np.array(5, ids.dtype)
        np.testing.assert_array_equal(a, rows.get((ids ^ five).astype(np.int64)))
        np.testing.assert_array_equal(b, found_by(rows, "with a mask", ids ^ five))


def test_gradients_of_unsigned_ids_with_a_mask(rows, optimizer):
    """Also of the one that is padding, if it is cut to 32 bits with a sign."""
    ids = np.array([ABSENT, 5], np.int32).view(np.uint32)

    @zs.function
    def step(ids, mask):
        def loss(t):
            return zs.embedding_lookup_sparse(t, (ids ^ 0, mask), combiner="sum").sum()

        optimizer.apply_gradients([(zs.grad(loss)(rows.table), rows.table)])

    step(ids[None], np.ones((1, 2), bool))
    signed = ids.astype(np.int64)
    np.testing.assert_allclose(rows.get(signed), first(signed) - RATE)
    assert {i for part in rows.rows for i in part} == set(signed.tolist())


def test_unsigned_ids_of_32_bits_meet_those_of_64_whole(rows):
    ids, salt = IDS[0], edges("uint32")[:3]
    with jax.numpy_dtype_promotion("standard"):
        step = zs.function(lambda ids, salt: rows.table.lookup(ids ^ salt))
        np.testing.assert_array_equal(step(ids, salt), rows.get(ids ^ salt))


def test_rows_are_assigned_added_and_removed_outside_of_steps(rows):
    table = rows.table
    table.assign([7, 2**60, 7], np.array([[1, 1], [2, 2], [3, 3]], np.float32))
    np.testing.assert_array_equal(rows.get([7, 2**60]), [[3, 3], [2, 2]])
    ones = np.ones((2, 2), np.float32)
    table.scatter_add(IndexedSlices(ones, np.array([7, -(2**61)])))
    added = first(np.array([-(2**61)])) + 1
    np.testing.assert_array_equal(rows.get([7, -(2**61)]), [[4, 4], *added])
    table.remove([7, 12345])
    np.testing.assert_array_equal(rows.get([7]), first(np.array([7])))
    assert sum(map(len, rows.rows)) == 2


def test_scatter_by_the_ids_of_a_lookup(rows):
    @zs.function
    def step(ids):
        rows.table.lookup(ids)
        rows.table.scatter_add(IndexedSlices(jnp.ones((3, 2)), ids))

    step(IDS[0])
    np.testing.assert_array_equal(rows.get(IDS[0]), first(IDS[0]) + 1)


@pytest.mark.parametrize(
    "body",
    [
        lambda t, ids: [t.scatter_add(IndexedSlices(ONES, ids))],
        lambda t, ids: [t.lookup(ids), t.scatter_add(IndexedSlices(ONES, ids + 1))],
        lambda t, ids: [t.lookup(ids), t.scatter_max(IndexedSlices(ONES, ids))],
        lambda t, ids: [zs.embedding_lookup(t, IDS[0])],
    ],
)
def test_updates_by_other_ids_than_those_of_lookups_are_refused(rows, body):
    with pytest.raises(ValueError, match="'t'"):
        zs.function(lambda ids: body(rows.table, ids)[:0])(IDS[0])
    assert rows.rows == [{}, {}, {}]


def test_a_table_of_any_id_has_no_whole_value(rows):
    table = rows.table
    for use in (
        table.numpy,
        table.value,
        lambda: table.assign_add(np.ones((3, 2), np.float32)),
        zs.function(lambda: table.value()),
        lambda: table + 1,
    ):
        with pytest.raises(TypeError, match="embedding_lookup"):
            use()


@pytest.mark.parametrize("ids", [IDS, IDS.view(np.uint64), IDS.view(np.uint64) >> 32])
@pytest.mark.parametrize("default_id", [None, -5])
@pytest.mark.parametrize("look_up", ["embedding", "safe_embedding"])
def test_ragged_ids_of_any_sign(rows, ids, default_id, look_up):
    """In steps and outside; negative ids are ids, also of `safe_...`."""
    mask = np.array([[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 1]], bool)
    call = getattr(zs, f"{look_up}_lookup_sparse")
    more = {"default_id": default_id} if look_up == "safe_embedding" else {}

    def found(ids, mask):
        return call(rows.table, (ids, mask), combiner="sum", **more)

    wanted = (rows.get(ids.astype(np.int64)) * mask[..., None]).sum(1)
    if more.get("default_id") is not None:
        wanted[1] = first(np.int64(default_id))
    np.testing.assert_allclose(zs.function(found)(ids, mask), wanted)
    np.testing.assert_allclose(found(ids, mask), wanted)


def test_a_default_id_that_does_not_fit_is_refused(rows):
    step = zs.function(
        lambda ids: zs.safe_embedding_lookup_sparse(
            rows.table, (ids, ids > 0), default_id=2**40
        )
    )
    with pytest.raises(ValueError, match="default_id"):
        step(IDS)


def test_a_number_of_the_step_that_is_too_large_is_named_with_the_remedy(rows):
    with pytest.raises(OverflowError, match=r"numpy\.int64"):
        zs.function(lambda ids: rows.table.lookup(ids + 2**40))(IDS)
    step = zs.function(lambda ids, more: rows.table.lookup(ids + more))
    np.testing.assert_array_equal(step(IDS, np.int64(2**40)), rows.get(IDS + 2**40))


def test_rows_that_do_not_fit_are_not_assigned(rows):
    for values in (np.ones(2), np.ones((2, 3)), np.ones((1, 2)), 0.0):
        with pytest.raises(ValueError, match=r"\[2, 2\]"):
            rows.table.assign([1, 2], values)
    assert rows.rows == [{}, {}, {}]


def test_a_module_has_its_tables(rows):
    class Model(Module):
        def __init__(self, table):
            super().__init__()
            self.parts = [{"table": table}]

    model = Model(rows.table)
    assert model.trainable_variables == model.variables == (rows.table,)


FIELDS = np.arange(1, 4) << 40


def test_numbers_of_the_step_that_jax_downcasts_are_named(rows):
    fields, own = FIELDS, FIELDS.astype(np.int32) * 5

    def combined(ids):
        return ids | fields[None]

    with pytest.warns(DowncastWarning, match="fields"):
        zs.function(lambda ids: rows.table.lookup(combined(ids)))(IDS)
    with pytest.warns(DowncastWarning, match="FIELDS"):
        zs.function(lambda ids: rows.table.lookup(ids | FIELDS[None]))(IDS)
    step = zs.function(lambda ids, more: rows.table.lookup((ids + own[None]) | more))
    wanted = rows.get((IDS + own) | fields)
    np.testing.assert_array_equal(step(IDS, fields[None]), wanted)

"""Tables of any id in a store of this process."""

import numpy as np
import optax
from ps_callers import SESSION
from ps_stores import push_to
from ps_trees import bind, binding, message

from zstrat.ids import hashes_of, mixed
from zstrat.initializers import Initializer, Uniform
from zstrat.ps import OptimizerEngine, Store, tables_plan
from zstrat.wire import (
    CreateOptimizer,
    CreateTables,
    PullTable,
    Push,
    TableEntry,
    Update,
    UpdateOp,
)

WIDTH, SEED = 3, 5
TALL = 2**30
"""Rows of a table in the tree of an optimizer."""
BEGIN = int(mixed(np.array([SESSION], np.uint64))[0] >> np.uint64(34)) << 32
"""The cut of a table without changes."""

OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, 0.9),
    "adagrad": lambda: optax.adagrad(0.1),
    "adam": lambda: optax.adam(1e-2),
    "average": lambda: optax.contrib.schedule_free_sgd(0.1),
}
LIMITS = np.iinfo(np.int64)


def load(code: bytes) -> object:
    """Shipped code: the name of an optimizer, or the bounds of uniform first values."""
    name = code.decode()
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]()
    return Uniform(*map(float, name.split()))


def store_with(
    name: str = "", *keys: int, row=(WIDTH,), dtype="f4", given=None, **rules
):
    """A store of tables, and with an optimizer that moves each."""
    store = Store(OptimizerEngine(load), task="/job:ps/task:0")
    for key in keys or (1,):
        create(store, entry(key, row, dtype, **rules))
    if name:
        run(store, store.plan_optimizer(1, name, name.encode()))
        kind = (TALL, *row), np.dtype(dtype)
        tree = {f"w{key:03}": ((key,), *kind) for key in keys or (1,)}
        bind(store, 1, binding(OPTIMIZERS[name](), tree, given))
    return store


def entry(key: int, row=(WIDTH,), dtype="f4", **rules) -> TableEntry:
    name, seed = np.dtype(dtype).name, SEED + key
    return TableEntry(key, f"t{key}", True, name, list(row), seed, **rules)


def create(store: Store, *entries: TableEntry, code: bytes = b"-1 1") -> None:
    run(
        store,
        tables_plan(
            list(entries), code, store.engine.load_code, store.variables, SESSION
        ),
    )


def creation(session: int, *entries: TableEntry) -> CreateTables:
    return CreateTables(session, list(entries), b"-1 1")


def run(store: Store, plan):
    if hasattr(plan, "compute"):
        plan.compute()
        return store.commit(plan)
    return plan


def in_order(ids) -> np.ndarray:
    """Distinct ids as they are sent."""
    ids = np.unique(np.array(ids, np.int64))
    return ids[np.argsort(hashes_of(ids))]


def first_rows(ids, key: int = 1, row=(WIDTH,), dtype="f4") -> np.ndarray:
    """What ids begin with."""
    from zstrat.ids import IdGenerator

    out = np.empty((len(ids), *row), dtype)
    if len(ids):
        initializer: Initializer = Uniform(-1.0, 1.0)
        initializer.rows(IdGenerator(SEED + key, np.array(ids, np.int64)), out)
    return out


def push(*updates) -> Push:
    """Of ``(key, op, array, ...)``."""
    heads = [
        Update(key, int(op), int("OPTIMIZE" in UpdateOp(op).name), len(arrays))
        for key, op, *arrays in updates
    ]
    return Push(7, -1, 0, 0, heads, tuple(a for _, _, *x in updates for a in x))


def step(store: Store, *updates):
    return push_to(store, push(*updates))


def look_up(store: Store, ids, key: int = 1) -> np.ndarray:
    ids = np.array(ids, np.int64)
    return run(store, store.plan_rows([], [key], (ids,))).arrays[0]


def items(store: Store, key: int = 1, first: int = 0, last: int = 4096):
    """The ids and rows of a table."""
    return run(store, store.plan_items(PullTable(7, key, first, last))).arrays


UNIFORM = Uniform(-1.0, 1.0)
"""What `creation` ships."""


def beginning(optimizer="adam", **rules):
    """Messages that make a table, and what moves it."""
    made = {"adam": optax.adam(0.1), "momentum": optax.sgd(0.1, momentum=0.9)}
    code = optimizer.encode()
    tree = {"w": ((1,), (TALL, WIDTH), "f4")}
    told = binding(made[optimizer], tree)
    return [
        creation(SESSION, entry(1, **rules)),
        CreateOptimizer(SESSION, 1, optimizer, code),
        message(SESSION, 1, told),
    ]


def training(rng, number, removes=False):
    """A push that trains some ids, of which some are new; and maybe removes others."""
    ids = in_order(rng.choice(200 + 20 * number, 40, replace=False))
    updates = [Update(1, int(UpdateOp.OPTIMIZE_ROWS), 1, 2)]
    arrays = [ids, rng.normal(size=(len(ids), WIDTH)).astype("f4")]
    if removes:
        updates.insert(0, Update(1, int(UpdateOp.REMOVE_ROWS), 0, 1))
        arrays.insert(0, rng.integers(0, 300, 30))
    return Push(SESSION, number, 0, 0, updates, tuple(arrays))


def eviction(number, rule, limit, first=0, last=4096):
    """A push that evicts, as the update ``number`` of its sender."""
    operand = np.array([rule, limit, first, last], "f8")
    update = Update(1, int(UpdateOp.EVICT_ROWS), 0, 1)
    return Push(SESSION, 1000 + number, 0, 0, [update], (operand,))


def timing(number, now, age):
    """A push that notes a time, as the update ``number`` of its sender."""
    update = Update(1, int(UpdateOp.NOTE_TIME), 0, 1)
    return Push(SESSION, 1000 + number, 0, 0, [update], (np.array([now, age]),))


def content(store):
    """All that a store has of the table, by name."""
    held = store.variables[1]
    found = {"value": held.cell.look()}
    found |= {name: cell.look() for name, cell in held.table.leaves().items()}
    for slots in held.slots.values():
        pairs = zip(slots.leaves, slots.cells, strict=True)
        found |= {leaf.name: cell.look() for leaf, cell in pairs}
    for ids, index in [
        (held.table.ids, held.table.index),
        *[(x.ids, x.index) for x in (held.table.waiting, held.table.gone) if x],
    ]:
        rows = index.rows(ids.look())
        np.testing.assert_array_equal(rows, np.arange(len(rows)))
        assert len(index.items()[0]) == len(rows)
    return found

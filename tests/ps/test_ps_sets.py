"""Sets of small variables, read and updated as one array: each remains a variable of
its own, and gets the bits that it would have got by itself."""

import asyncio
import weakref

import numpy as np
import optax
import pytest
from ps_callers import SESSION, Gated, caller
from ps_stores import create_in, push_to
from ps_trees import bind, message, of_values

from zstrat.errors import InvalidArgumentError, NotFoundError, UnavailableError
from zstrat.ps import OptimizerEngine, PsClient, Ref, SetRef, Store
from zstrat.ps.replication._replay import hand_over
from zstrat.testing import FakeLink
from zstrat.wire import (
    CreateOptimizer,
    Exchange,
    Job,
    Pull,
    PullRows,
    Push,
    Read,
    Update,
    UpdateOp,
    VariableEntry,
    in_sets,
    parts_of,
)

SHAPES = {key: [(4, 8), (7,), (3, 5), ()][key % 4] for key in range(1, 41)}
RNG = np.random.default_rng(0)
VALUES = {k: np.asarray(RNG.normal(size=s), "f4") for k, s in SHAPES.items()}
SET = int(UpdateOp.OPTIMIZE_SET)

OPTIMIZERS = {
    "adam": lambda: optax.adamw(optax.linear_schedule(1e-2, 1e-3, 5)),
    "not by element": lambda: optax.chain(optax.clip_by_block_rms(0.5), optax.sgd(0.1)),
    "of two kinds": lambda: optax.masked(
        optax.adam(0.1), {f"v{k:05}": k % 3 > 0 for k in SHAPES}
    ),
}


def store_of(transformation) -> Store:
    store = Store(OptimizerEngine(lambda _: transformation), task="/job:ps/task:0")
    entries = [VariableEntry(key, f"v{key}", True, False) for key in SHAPES]
    create_in(store, entries, list(VALUES.values()))
    plan = store.plan_optimizer(1, "mine", b"mine")
    plan.compute()
    store.commit(plan)
    bind(store, 1, of_values(transformation, VALUES))
    return store


def gradients(turn: int, keys) -> dict[int, np.ndarray]:
    rng = np.random.default_rng(turn)
    made = {k: np.asarray(rng.normal(size=s), "f4") for k, s in SHAPES.items()}
    return {key: made[key] for key in keys}


def keys_of(keys) -> np.ndarray:
    return np.array([*keys], np.int64)


def pushed_in_sets(*grads: dict[int, np.ndarray], apart=None) -> Push:
    """Sets, and then others by themselves."""
    alone = pushed_apart(apart or {})
    heads = [Update(next(iter(each)), SET, 1, 2) for each in grads]
    arrays = [
        array
        for each in grads
        for array in (
            keys_of(each),
            np.concatenate([np.ravel(x) for x in each.values()]),
        )
    ]
    arrays += alone.arrays
    return Push(SESSION, -1, 0, 0, heads + alone.updates, tuple(arrays))


def pushed_apart(grads: dict[int, np.ndarray]) -> Push:
    heads = [Update(key, int(UpdateOp.OPTIMIZE), 1, 1) for key in grads]
    return Push(SESSION, -1, 0, 0, heads, tuple(grads.values()))


def assign(store: Store, key: int) -> None:
    value = np.full(SHAPES[key], 0.5, "f4")
    head = Update(key, int(UpdateOp.ASSIGN), 0, 1)
    assert push_to(store, Push(SESSION, -1, 0, 0, [head], (value,))).applied


def read(store: Store, keys=SHAPES, known: int = -1):
    """Reads a set: its version, and its value."""
    (version,), arrays = store.read([], [known], [keys_of(keys)])
    return version, arrays


def side_by_side(store: Store, keys) -> np.ndarray:
    each = store.read([Read(key, -1) for key in keys])[1]
    return np.concatenate([np.ravel(value) for value in each])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_set_gives_each_variable_its_bits(name):
    together, alone = store_of(OPTIMIZERS[name]()), store_of(OPTIMIZERS[name]())
    first, second = range(1, 21), range(21, 41)
    turns = [[SHAPES], [SHAPES], [first, second], [first, second], [second], [SHAPES]]
    for turn, sets in enumerate([*turns, *turns]):
        grads = [gradients(turn, keys) for keys in sets]
        pushed = pushed_in_sets(*grads)
        if turn > 6:
            pushed = pushed_in_sets(*grads[:1], apart=dict(*grads[1:]))
        assert push_to(together, pushed).applied
        for each in grads:
            push_to(alone, pushed_apart(each))
        version, (value,) = read(together)
        assert version == sum(held.version for held in together.variables.values())
        assert value.tobytes() == side_by_side(alone, SHAPES).tobytes()
        assert not value.flags.writeable
        if turn % 2:  # it is a variable still, and its updates are not lost
            for store in (together, alone):
                assign(store, 2 + turn)
                push_to(store, pushed_apart(gradients(turn, (1, 2, 3, 30))))
    for held, other in zip(
        together.variables.values(), alone.variables.values(), strict=True
    ):
        assert held.version == other.version
        slots = [x.slots[1].cells for x in (held, other)]
        for a, b in zip(*slots, strict=True):
            assert np.asarray(a.look()).tobytes() == np.asarray(b.look()).tobytes()


def test_a_set_takes_the_operands_of_its_own_push():
    clipped = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1))
    together, alone = store_of(clipped), store_of(clipped)
    tree = of_values(clipped, VALUES)
    for turn in range(4):
        grads = gradients(turn, SHAPES)
        given = tree.operands({key: (array,) for key, array in grads.items()})
        operands = Update(1, int(UpdateOp.OPERANDS), 1, len(given))
        for store, pushed in (
            (together, pushed_in_sets(grads)),
            (alone, pushed_apart(grads)),
        ):
            updates, arrays = [operands, *pushed.updates], (*given, *pushed.arrays)
            push_to(store, Push(SESSION, -1, 0, 0, updates, arrays))
        value = read(together)[1][0]
        assert value.tobytes() == side_by_side(alone, SHAPES).tobytes()
        norm = optax.tree.norm(grads)
        assert any(np.allclose(norm, array) for array in given)


def test_sets_may_bring_the_same_array():
    store = store_of(optax.sgd(1.0))
    same = {key: np.ones(SHAPES[1], "f4") for key in (1, 5, 9, 13)}
    pushed = pushed_in_sets(
        dict.fromkeys((1, 5), same[1]), dict.fromkeys((9, 13), same[1])
    )
    first, side, second, _ = pushed.arrays
    for _ in range(2):
        push_to(
            store, Push(SESSION, -1, 0, 0, pushed.updates, (first, side, second, side))
        )
    for key in same:
        (value,) = store.read([Read(key, -1)])[1]
        np.testing.assert_allclose(value, VALUES[key] - 2, rtol=1e-5)


def test_a_set_is_sent_again_when_one_of_it_has_changed():
    store = store_of(optax.sgd(0.1))
    push_to(store, pushed_in_sets(gradients(0, SHAPES)))
    version, (value,) = read(store)
    before = value.copy()
    assert read(store, known=version) == (version, ())
    assign(store, 7)
    later, (now,) = read(store, known=version)
    assert later == version + 1
    np.testing.assert_array_equal(now, side_by_side(store, SHAPES))
    assert (now != before).any()
    np.testing.assert_array_equal(value, before)  # a reader's never changes
    store.delete([7])
    with pytest.raises(NotFoundError, match="7"):
        read(store)
    create_in(store, [VariableEntry(7, "v7", True, False)], [VALUES[7]])
    assert read(store)[0] > later


def test_a_set_with_a_lost_value_is_not_read_also_where_it_was_before():
    store = store_of(optax.sgd(0.1))
    _, reader = read(store)  # has what was put together
    store.variables[7].cell.lose("XLA was out of memory")
    with pytest.raises(UnavailableError, match="'v7'"):
        read(store)
    del reader
    with pytest.raises(UnavailableError, match="'v7'"):
        read(store)


@pytest.mark.parametrize("ends", ["deleted", "session ends", "handed over"])
def test_nothing_keeps_the_memory_of_variables_that_are_gone(ends):
    store = store_of(optax.sgd(0.1, momentum=0.9))
    keys = [key for key, shape in SHAPES.items() if shape]  # each alike to the others
    for turn in range(2):
        push_to(store, pushed_in_sets(gradients(turn, keys)))
    values = weakref.ref(read(store, keys)[1][0])
    (momentum, *_) = store.variables[1].slots[1].cells
    slots = weakref.ref(momentum.part.flat.array)
    del momentum
    assert values() is not None
    assert slots() is not None
    if ends == "session ends":
        store.clear()
    elif ends == "deleted":
        store.delete([*SHAPES])
    else:
        other = Store(OptimizerEngine(lambda _: None))
        hand_over(store, other)
        other.clear()
    assert values() is None
    assert slots() is None


@pytest.mark.parametrize(
    "keys",
    [
        np.array([1.0, 2.0]),
        np.array([[1, 2]]),
        np.array([], np.int64),
        np.array([1, 2, 1]),
        np.arange(1, 1026) % 40 + 1,
        np.array([1, 99]),  # of another dtype
        np.array([1, 98]),  # too large
    ],
    ids=["floats", "two axes", "none", "twice", "too many", "dtypes", "bytes"],
)
def test_keys_that_are_no_set_are_refused(keys):
    store = store_of(optax.sgd(0.1))
    entries = [VariableEntry(key, f"v{key}", True, False) for key in (98, 99)]
    create_in(store, entries, [np.zeros(2**18, "f4"), np.zeros(3, "i4")])
    with pytest.raises(InvalidArgumentError):
        store.read([], [-1], [keys])
    head = [Update(1, SET, 1, 2)]
    with pytest.raises(InvalidArgumentError):
        push_to(store, Push(SESSION, -1, 0, 0, head, (keys, np.zeros(2, "f4"))))
    assert all(held.version == 0 for held in store.variables.values())


def test_gradients_that_do_not_fit_their_set_are_refused():
    store = store_of(optax.sgd(0.1))
    good = pushed_in_sets(gradients(0, SHAPES))
    for _ in range(2):  # before one like it was applied, and after
        keys, side = good.arrays
        for wrong in (side[:-1], side.astype("i4"), side.reshape(1, -1)):
            with pytest.raises(InvalidArgumentError):
                push_to(store, Push(SESSION, -1, 0, 0, good.updates, (keys, wrong)))
        push_to(store, good)
    head, arrays = [Update(1, SET, 1, 3)], (*good.arrays, good.arrays[1])
    with pytest.raises(InvalidArgumentError, match="3 arrays"):
        push_to(store, Push(SESSION, -1, 0, 0, head, arrays))
    assert {held.version for held in store.variables.values()} == {2}


async def test_all_of_a_set_waits_for_its_turn():
    rig = Gated()
    rig.create(dict.fromkeys(range(20), np.zeros((2, 2), "f4")))
    values = dict.fromkeys(range(20), np.zeros((2, 2), "f4"))
    await rig.answer(CreateOptimizer(SESSION, 1, "sgd", b""))
    await rig.answer(message(SESSION, 1, of_values(optax.sgd(0.5), values)))
    keys, ones = np.arange(20), np.ones(80, "f4")
    both = Exchange(
        SESSION, 1, 0, 0, [Update(0, SET, 1, 2)], [], [], (keys, ones, keys), b"", [-1]
    )
    first = rig.ask(both)  # it has programs to compile
    assert asyncio.isfuture(first)
    waits = [rig.ask(Pull(SESSION, [Read(19, -1)]))]
    waits.append(rig.ask(PullRows(SESSION, [], [], (keys[10:],), [-1])))
    assert all(map(asyncio.isfuture, waits))
    one, some = await asyncio.gather(*waits)
    assert (one.versions, one.arrays[0].tolist()) == ([1], [[-0.5, -0.5]] * 2)
    assert (some.versions, set(some.arrays[0].tolist())) == ([10], {-0.5})
    answer = await first
    assert (answer.applied, answer.versions) == (True, [20])
    assert rig.ask(both).applied is False  # a copy of it
    with pytest.raises(InvalidArgumentError):
        rig.ask(Exchange(SESSION, 2, 0, 0, [], [], [], (keys,), b"", [-1, -1]))


async def test_a_client_reads_sets_among_others_and_unchanged_ones_once():
    rig = Gated()
    rig.create({key: VALUES[key] for key in range(1, 31)})
    link = FakeLink(rig.ask, name="/job:ps/task:0", hello=caller(Job.PS, 5).hello)
    link.start()
    client = PsClient([link], SESSION)
    refs = [Ref(0, key) for key in range(1, 31)]
    places = tuple(range(5, 25))
    keys = keys_of(place + 1 for place in places)
    parts = parts_of([SHAPES[key] for key in keys.tolist()])
    one = SetRef(0, places, keys, parts)

    async def pulled():
        async with asyncio.timeout(60):
            return await client.pull(refs, [], [one])

    def asked():
        return rig.service.statistics()

    for value, key in zip(await pulled(), range(1, 31), strict=True):
        assert (value.shape, value.dtype) == (SHAPES[key], np.float32)
        assert not value.flags.writeable
        np.testing.assert_array_equal(value, VALUES[key])
    assert len(link.sent) == 1
    before = asked()["unchanged"]
    await pulled()
    assert asked()["unchanged"] - before == 30
    head, delta = Update(10, int(UpdateOp.ADD), 0, 1), np.ones(SHAPES[10], "f4")
    rig.ask(Push(SESSION, -1, 0, 0, [head], (delta,)))
    again = await pulled()
    np.testing.assert_array_equal(again[9], VALUES[10] + 1)
    np.testing.assert_array_equal(again[10], VALUES[11])
    assert asked()["unchanged"] - before == 30 + 10
    await link.close()


def test_sets_are_as_large_as_fits():
    assert in_sets([4] * 15, 16) == []
    assert in_sets([4, 2**16 + 1, 4, 4], 2) == [[0, 2, 3]]
    assert [len(some) for some in in_sets([2**16] * 40, 8)] == [16, 16, 8]
    assert [len(some) for some in in_sets([4] * 3000, 16)] == [1024, 1024, 952]


def test_a_backup_applies_a_set_as_its_primary_did():
    primary, backup = (store_of(optax.sgd(0.1, momentum=0.9)) for _ in range(2))
    for turn in range(3):
        push = pushed_in_sets(gradients(turn, SHAPES))
        push_to(primary, push)
        plan = backup.plan_again(push)
        plan.compute()
        backup.commit(plan)
        seen = [read(store) for store in (primary, backup)]
        assert seen[0][0] == seen[1][0] == 40 * (turn + 1)
        np.testing.assert_array_equal(seen[0][1][0], seen[1][1][0])


def test_as_many_sets_are_remembered_as_a_model_has():
    """They are the same objects, by which pushes are known again."""
    variables = store_of(optax.sgd(0.1)).variables
    names = [keys_of(range(1, n)) for n in range(2, 41)]
    names += [keys_of(range(n, 41)) for n in range(2, 41)]
    first = [variables.sets.find(keys, variables) for keys in names]
    again = [variables.sets.find(keys, variables) for keys in names]
    assert all(one is other for one, other in zip(first, again, strict=True))


def test_readers_of_one_version_share_what_was_put_together():
    store = store_of(optax.sgd(0.1))
    keys = list(SHAPES)[:20]
    values = [read(store, keys)[1][0] for _ in range(2)]
    assert values[0] is values[1]
    weak = weakref.ref(values[0])
    before = values[0].copy()
    assign(store, keys[3])
    now = read(store, keys)[1][0]
    np.testing.assert_array_equal(values[0], before)
    np.testing.assert_array_equal(now, side_by_side(store, keys))
    values.clear()
    assert weak() is None

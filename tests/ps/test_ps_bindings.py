"""The tree of an optimizer, as a server is told of it: by anybody, and never code."""

import json

import jax
import numpy as np
import optax
import pytest
from ps_stores import create_in, push_to
from ps_trees import bind, binding

from zstrat.errors import (
    AlreadyExistsError,
    BusyError,
    InvalidArgumentError,
    NotFoundError,
)
from zstrat.ps import OptimizerEngine, Store
from zstrat.wire import Done, Push, Read, Update, UpdateOp, VariableEntry

W, B, TABLE = ((4, 3), "f4"), ((3,), "f4"), ((6, 2), "f4")


def store_with(transformation, *kinds, sharded=False) -> Store:
    """Optimizer 1, and variables of ones from 1 on."""
    store = Store(OptimizerEngine(lambda _: transformation), task="ps")
    plan = store.plan_optimizer(1, "mine", b"code")
    plan.compute()
    store.commit(plan)
    entries = [
        VariableEntry(k + 1, f"v{k + 1}", True, sharded) for k, _ in enumerate(kinds)
    ]
    create_in(store, entries, [np.ones(*kind) for kind in kinds])
    return store


def push(key: int, gradient) -> Push:
    head = Update(key, int(UpdateOp.OPTIMIZE), 1, 1)
    return Push(7, -1, 0, 0, [head], (gradient,))


def value_of(store: Store, key: int) -> np.ndarray:
    return np.array(store.read([Read(key, -1)])[1][0])


def plan_of(store: Store, data: bytes):
    return store.plan_binding(1, (np.frombuffer(data, np.uint8),))


def test_the_same_tree_again_has_nothing_to_do_until_a_variable_is_gone():
    store = store_with(optax.adam(0.1), W, B)
    data = binding(optax.adam(0.1), {"w": ((1,), *W), "b": ((2,), *B)}).encoded()
    plan = plan_of(store, data)
    plan.compute()
    assert store.commit(plan) == plan_of(store, data) == Done()
    store.delete([2])
    assert plan_of(store, data) == Done()
    create_in(store, [VariableEntry(2, "other", True, False)], [np.ones(5, "f4")])
    with pytest.raises(NotFoundError, match=r"'other'.*'mine'"):
        push_to(store, push(2, np.ones(5, "f4")))
    with pytest.raises(InvalidArgumentError, match=r"'other'.*\[5\].*\[3\]"):
        plan_of(store, data).compute()


def test_variables_of_other_servers_are_no_concern_of_this_one():
    store = store_with(optax.sgd(1.0), W)
    bind(store, 1, binding(optax.sgd(1.0), {"w": ((1,), *W), "b": ((77,), *B)}))
    push_to(store, push(1, np.ones(*W)))
    assert not value_of(store, 1).any()
    assert (
        plan_of(store, binding(optax.sgd(1.0), {"b": ((77,), *B)}).encoded()) != Done()
    )


def by_path(params):
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "frozen" if "b" in str(path) else "free", params
    )


FREEZING = optax.multi_transform(
    {"free": optax.sgd(1.0), "frozen": optax.set_to_zero()}, by_path
)


def test_labels_go_by_the_paths_of_the_tree():
    store = store_with(FREEZING, B, B)
    bind(store, 1, binding(FREEZING, {"a": ((1,), *B), "b": ((2,), *B)}))
    for key in (1, 2):
        push_to(store, push(key, np.ones(*B)))
    assert value_of(store, 1).tolist() == [0] * 3
    assert value_of(store, 2).tolist() == [1] * 3


def test_a_variable_is_not_moved_otherwise_by_another_tree():
    store = store_with(FREEZING, B, B)
    bind(store, 1, binding(FREEZING, {"a": ((1,), *B), "b": ((2,), *B)}))
    # Alike: the same leaf alone is moved as it was.
    bind(store, 1, binding(FREEZING, {"a": ((1,), *B)}))
    with pytest.raises(AlreadyExistsError, match=r"'v2'.*params=params"):
        bind(store, 1, binding(FREEZING, {"a": ((2,), *B)}))
    with pytest.raises(AlreadyExistsError, match="'v1'"):
        bind(store, 1, binding(FREEZING, {"a": ((1,), *B)}, "bfloat16"))
    push_to(store, push(2, np.ones(*B)))
    assert value_of(store, 2).tolist() == [1] * 3


def test_an_optimizer_has_few_trees():
    store = store_with(optax.sgd(1.0), B)
    for number in range(64):
        bind(store, 1, binding(optax.sgd(1.0), {f"v{number}": ((1,), *B)}))
    with pytest.raises(BusyError, match=r"'mine'.*\b64\b"):
        bind(store, 1, binding(optax.sgd(1.0), {"more": ((1,), *B)}))


def changed(**fields) -> bytes:
    told = binding(optax.adam(0.1), {"w": ((1,), *W)}).encoded()
    return json.dumps({**json.loads(told), **fields}).encode()


GARBAGE = {
    "nothing": b"",
    "bytes": b"\x80\x04\x95cos\nsystem",
    "no tree": b"[]",
    "deep": b"[" * 100_000,
    "deep structure": changed(structure=json.loads("[" * 400 + "]" * 400)),
    "container": changed(structure=["x", [0]]),
    "dtype": changed(gradients=["object"]),
    "no dtype": changed(kinds=[[[4, 3], "os.system"]]),
    "shape": changed(kinds=[[[-4, 3], "float32"]]),
    "huge": changed(kinds=[[[2**80], "float32"]]),
    "keys": changed(keys=[["one"]]),
    "twice": changed(keys=[[1, 1]]),
    "lengths": changed(keys=[]),
    "cut": changed(cut={"slots": [], "operands": [], "uses": []}),
    "of others": changed(kinds=[[[3, 4], "float32"]]),
    "another dtype": changed(kinds=[[[4, 3], "float16"]]),
    "wide": changed(kinds=[[[4, 3], "float64"]], gradients=["float64"]),
}


@pytest.mark.parametrize("what", GARBAGE)
def test_what_is_no_tree_of_these_variables_is_refused(what):
    store = store_with(optax.adam(0.1), W)
    with pytest.raises(InvalidArgumentError):
        plan_of(store, GARBAGE[what]).compute()
    with pytest.raises(NotFoundError):
        push_to(store, push(1, np.ones(*W)))


def test_what_is_no_array_of_bytes_is_refused():
    store = store_with(optax.adam(0.1), W)
    for arrays in ((), (np.ones(3),), (np.ones(1, "u1"), np.ones(1, "u1"))):
        with pytest.raises(InvalidArgumentError, match="'mine'"):
            store.plan_binding(1, arrays)
    with pytest.raises(NotFoundError):
        store.plan_binding(5, ())


def test_parts_have_rows_of_their_leaf_and_no_more():
    store = store_with(optax.adam(0.1), TABLE, TABLE)
    bind(store, 1, binding(optax.adam(0.1), {"w": ((1, 2, 99), (20, 2), "f4")}))
    push_to(store, push(2, np.ones(*TABLE)))
    np.testing.assert_allclose(value_of(store, 2), np.full((6, 2), 0.9), rtol=1e-5)
    for shape in ((11, 2), (12, 3), (12,)):
        with pytest.raises(InvalidArgumentError):
            bind(store, 1, binding(optax.adam(0.1), {"x": ((1, 2), shape, "f4")}))
    part = store_with(optax.lamb(0.1), TABLE)
    bind(part, 1, binding(optax.lamb(0.1), {"w": ((1, 99), (20, 2), "f4")}))
    with pytest.raises(InvalidArgumentError, match="'v1'"):
        push_to(part, push(1, np.ones(*TABLE)))


def test_tables_of_any_height_share_programs():
    heights = [((rows, 2), "f4") for rows in (6, 40, 3000)]
    store = store_with(optax.adam(0.1), *heights)
    tree = {f"t{k}": ((k + 1,), *kind) for k, kind in enumerate(heights)}
    bind(store, 1, binding(optax.adam(0.1), tree))
    rows = (np.array([1, 3]), np.ones((2, 2), "f4"))
    heads = [Update(key, int(UpdateOp.OPTIMIZE_ROWS), 1, 2) for key in (1, 2, 3)]
    push_to(store, Push(7, -1, 0, 0, heads, rows * 3))
    assert store.engine.programs == 1 + len({16, 48, 3072})  # and new slots
    for key in (1, 2, 3):
        np.testing.assert_allclose(value_of(store, key)[[1, 3]], 0.9, rtol=1e-5)


def test_leaves_have_one_rule_only_if_they_are_moved_alike():
    labels = {f"v{n}": "cold" if n == 3 else "hot" for n in range(6)}
    transformation = optax.multi_transform(
        {"hot": optax.adam(0.1), "cold": optax.adam(0.2)}, labels
    )
    kinds = {f"v{n}": ((n,), *(B if n == 5 else W)) for n in range(6)}
    rules = binding(transformation, kinds).rules()
    assert not any(rule.row_dependence for rule in rules)
    first = rules[0].digest
    assert [rule.digest == first for rule in rules] == [
        n not in (3, 5) for n in range(6)
    ]

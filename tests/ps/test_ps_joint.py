"""Whole gradients of one push, updated by one program: bit for bit what programs of
their own make of them."""

import numpy as np
import optax
import pytest
from ps_stores import create_in, push_to
from ps_trees import bind, of_values

from zstrat.ps import OptimizerEngine, Store
from zstrat.wire import Push, Read, Update, UpdateOp, VariableEntry

LARGE = {1: (301, 512), 2: (512,), 3: (512, 211)}
"""1 MiB and a little."""
SMALL = {key: shape[-1:] for key, shape in LARGE.items()}

OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "adam": lambda: optax.adamw(1e-2),
    "rmsprop": lambda: optax.rmsprop(0.1, momentum=0.9),
}


def store_of(transformation, shapes) -> Store:
    store = Store(OptimizerEngine(lambda _: transformation), task="/job:ps/task:0")
    rng = np.random.default_rng(0)
    values = {k: rng.normal(size=s).astype("f4") for k, s in shapes.items()}
    entries = [VariableEntry(key, f"v{key}", True, False) for key in shapes]
    create_in(store, entries, list(values.values()))
    plan = store.plan_optimizer(1, "mine", b"mine")
    plan.compute()
    store.commit(plan)
    bind(store, 1, of_values(transformation, values))
    return store


def gradients(turn: int, shapes) -> dict[int, np.ndarray]:
    rng = np.random.default_rng(turn)
    return {k: rng.normal(size=s).astype("f4") for k, s in shapes.items()}


def push(store: Store, grads: dict[int, np.ndarray]) -> None:
    updates = [Update(key, int(UpdateOp.OPTIMIZE), 1, 1) for key in grads]
    assert push_to(store, Push(7, -1, 0, 0, updates, tuple(grads.values()))).applied


def values_of(store: Store) -> list[bytes]:
    """Values and slots, as their bytes."""
    _, values = store.read([Read(key, -1) for key in LARGE])
    found = [value.tobytes() for value in values]
    for key in LARGE:
        cells = store.variables[key].slots[1].cells
        found += [np.asarray(cell.look()).tobytes() for cell in cells]
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_program_gives_the_bits_of_many(name):
    together, alone = (store_of(OPTIMIZERS[name](), LARGE) for _ in range(2))
    for turn in range(3):
        grads = gradients(turn, LARGE)
        _, readers = together.read([Read(key, -1) for key in LARGE])
        seen = [value.copy() for value in readers]
        push(together, grads)
        # Who looked at the values sees those of before.
        for reader, copy in zip(readers, seen, strict=True):
            np.testing.assert_array_equal(reader, copy)
        for key, gradient in grads.items():
            push(alone, {key: gradient})
        assert values_of(together) == values_of(alone)
    slots = together.engine.programs - 1  # which are made one by one
    assert alone.engine.programs - slots == len(LARGE)


def test_small_ones_have_programs_of_their_own():
    store = store_of(optax.sgd(0.1), SMALL)
    push(store, gradients(0, SMALL))
    before = store.engine.programs
    for key, gradient in gradients(1, SMALL).items():
        push(store, {key: gradient})
    assert store.engine.programs == before


def test_only_so_many_sets_of_variables_have_a_program():
    shapes = {key: (2, 2**16 + key) for key in range(1, 12)}
    store, grads = store_of(optax.sgd(0.1), shapes), gradients(0, shapes)
    start = store.variables[1].cell.look().copy()
    for _ in range(2):
        for key in range(2, 12):
            push(store, {1: grads[1], key: grads[key]})
    # One for each variable's slots, eight sets, and three variables of the other two.
    assert store.engine.programs == 11 + 8 + 3
    moved = start - 20 * 0.1 * grads[1]
    np.testing.assert_allclose(store.variables[1].cell.look(), moved, rtol=1e-4)

"""Optimizers that look at all gradients: what they make of them comes with the push."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ps_stores import create_in, push_to
from ps_trees import bind, binding
from tiers import combined

from zstrat.errors import InvalidArgumentError, NotFoundError
from zstrat.optimizers import cut_for_rows, leaf_rule
from zstrat.ps import OptimizerEngine, Store
from zstrat.wire import Push, Read, Update, UpdateOp, VariableEntry

SHAPES = {1: (6, 2), 2: (3,), 3: (9, 2), 4: ()}


def local_norms():
    """Two global norms, of two variables each."""
    clip = optax.clip_by_global_norm(0.5)
    return optax.multi_transform(
        {
            "x": optax.chain(clip, optax.sgd(0.1)),
            "y": optax.chain(clip, optax.sgd(0.1)),
        },
        lambda params: jax.tree_util.tree_map_with_path(
            lambda path, _: "x" if path[0].key in ("v1", "v2") else "y", params
        ),
    )


def seldom_smaller():
    """A branch that calls a compiled function of the whole tree."""
    smaller = jax.jit(lambda tree: jax.tree.map(lambda x: x / 2, tree))

    def update(updates, state, params=None):
        is_odd = state % 2 == 1
        return jax.lax.cond(is_odd, smaller, lambda x: x, updates), state + 1

    made = optax.GradientTransformation(lambda _: jnp.zeros((), jnp.int32), update)
    return optax.chain(made, optax.sgd(0.1))


OPTIMIZERS = {
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1)),
    "injected": lambda: optax.inject_hyperparams(
        lambda rate: optax.chain(optax.clip_by_global_norm(0.5), optax.adam(rate))
    )(rate=optax.exponential_decay(0.1, 2, 0.5)),
    "late": lambda: optax.chain(
        optax.conditionally_transform(
            optax.clip_by_global_norm(0.5), lambda step: step > 2
        ),
        optax.sgd(0.1),
    ),
    "finite": lambda: optax.apply_if_finite(optax.adam(0.1), 3),
    "two norms": local_norms,
    "seldom": seldom_smaller,
    "accumulated": lambda: optax.MultiSteps(optax.adam(0.1), 3),
}


class World:
    """A store, and what an optimizer makes of the same tree in one process."""

    def __init__(self, name: str, sharded=False) -> None:
        self.store = Store(OptimizerEngine(lambda _: OPTIMIZERS[name]()), task="ps")
        plan = self.store.plan_optimizer(1, name, b"code")
        plan.compute()
        self.store.commit(plan)
        rng = np.random.default_rng(1)
        self.values = {
            k: np.asarray(rng.normal(size=s), "f4") for k, s in SHAPES.items()
        }
        entries = [VariableEntry(k, f"v{k}", True, sharded) for k in SHAPES]
        create_in(self.store, entries, list(self.values.values()))
        tree = {f"v{k}": ((k,), s, "f4") for k, s in SHAPES.items()}
        self.told = binding(OPTIMIZERS[name](), tree)
        bind(self.store, 1, self.told)
        made = self.told.rule.transformation
        self.params = {f"v{k}": jnp.asarray(v) for k, v in self.values.items()}
        self.state = made.init(self.params)
        self.step = jax.jit(lambda g, s, p: made.update(g, s, p))

    def gradients(self, seed: int, scale=1.0) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        return {
            f"v{k}": np.asarray(scale * rng.normal(size=s), "f4")
            for k, s in SHAPES.items()
        }

    def advance(self, gradients) -> None:
        updates, self.state = self.step(gradients, self.state, self.params)
        self.params = optax.apply_updates(self.params, updates)

    def operands(self, gradients) -> tuple[np.ndarray, ...]:
        cut = self.told.rule.cut()
        return tuple(map(np.asarray, cut.computed(list(gradients.values()), [])))

    def push(self, gradients, *, rows=()) -> list[int]:
        """``rows``: keys of those whose gradients go by rows, all of them."""
        shared = self.operands(gradients)
        heads, arrays = [], list(shared)
        if shared:
            heads.append(Update(2, int(UpdateOp.OPERANDS), 1, len(shared)))
        for key, gradient in zip(SHAPES, gradients.values(), strict=True):
            op = UpdateOp.OPTIMIZE_ROWS if key in rows else UpdateOp.OPTIMIZE
            arrays += [np.arange(len(gradient))] if key in rows else []
            arrays.append(gradient)
            heads.append(Update(key, int(op), 1, 1 + (key in rows)))
        return push_to(self.store, Push(7, -1, 0, 0, heads, tuple(arrays))).versions

    def require_equal(self, rtol=1e-5) -> None:
        _, arrays = self.store.read([Read(key, -1) for key in SHAPES])
        for got, want in zip(arrays, self.params.values(), strict=True):
            np.testing.assert_allclose(got, want, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize(("name", "rows"), combined([*OPTIMIZERS], [(), (1, 3)]))
def test_variables_move_as_the_whole_tree_does(name, rows):
    world = World(name)
    for turn in range(7):
        gradients = world.gradients(turn, scale=10.0 ** (turn % 3 - 1))
        if name == "finite" and turn == 2:
            gradients["v2"][0] = np.inf
        world.advance(gradients)
        entries = bool(world.operands(gradients)) + len(SHAPES)
        assert len(world.push(gradients, rows=rows)) == entries
        world.require_equal()


def test_operands_change_no_variable_and_count_as_no_update():
    world = World("clipped")
    gradients = world.gradients(1)
    operands = world.operands(gradients)
    head = Update(2, int(UpdateOp.OPERANDS), 1, len(operands))
    pushed = push_to(world.store, Push(7, 5, 0, 0, [head], operands))
    assert (pushed.applied, pushed.versions) == (True, [0])
    assert world.push(gradients) == [1, 1, 1, 1, 1]  # that of variable 2 comes first
    statistics = world.store.statistics()
    assert (statistics["pushes"], statistics["updates"]) == (2, 4)


def test_operands_that_do_not_fit_are_refused_and_nothing_changes():
    world = World("clipped")
    gradient = world.gradients(1)["v2"]
    right = world.operands(world.gradients(1))

    def push(*shared, optimizer=1):
        heads = [Update(2, int(UpdateOp.OPTIMIZE), 1, 1)]
        if shared:
            heads.insert(0, Update(2, int(UpdateOp.OPERANDS), optimizer, len(shared)))
        push_to(world.store, Push(7, -1, 0, 0, heads, (*shared, gradient)))

    with pytest.raises(InvalidArgumentError, match="'v2'"):
        push()
    with pytest.raises(InvalidArgumentError, match=f"and {len(right) + 1} came"):
        push(*right, right[0])
    with pytest.raises(InvalidArgumentError):
        push(right[0].astype("f8"), *right[1:])
    with pytest.raises(InvalidArgumentError):
        push(right[0][None], *right[1:])
    with pytest.raises(NotFoundError):
        push(*right, optimizer=4)
    assert world.store.read([Read(2, -1)])[0] == [0]
    push(*right)


def test_what_takes_whole_gradients_of_others_is_not_moved_row_by_row():
    """Each variable by the sum of all gradients."""
    together = optax.stateless(
        lambda gradients, _: jax.tree.map(
            lambda _: -sum(jax.tree.leaves(gradients)), gradients
        )
    )
    tree = {name: ((key,), (6, 2), "f4") for key, name in enumerate("ab", 1)}
    for rule in binding(together, tree).rules():
        assert "a row for each of its rows" in rule.row_dependence


def test_tables_share_a_call_only_with_equal_operands():
    """Tables of one kind, each below a norm of its own."""
    world = World("two norms")
    gradients = world.gradients(3, scale=5.0)
    world.advance(gradients)
    world.push(gradients, rows=(1, 3))
    world.require_equal()
    assert world.store.engine.get(1).bindings.get(1).alike is (
        world.store.engine.get(1).bindings.get(3).alike
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_are_told_apart_whatever_numbers_the_program_has(dtype):
    """One of them is nan, of the smallest dtype in the tree."""
    tree = {"table": ((1,), (6, 2), "f4"), "scale": ((2,), (), dtype)}
    told = binding(optax.contrib.schedule_free_sgd(0.1, 3), tree)
    table = jax.tree.leaves(told.keys).index(1)
    assert leaf_rule(cut_for_rows(told.rule), table).row_dependence == ""

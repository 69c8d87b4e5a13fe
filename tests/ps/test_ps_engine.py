"""optax on the server against optax on the whole tree, in one process."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import optax.contrib
import pytest
from ps_stores import create_in, push_to
from ps_trees import bind, bind_each, binding, of_values
from tiers import combined

from zstrat.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError
from zstrat.ps import OptimizerEngine, Store
from zstrat.wire import Done, Push, Read, Update, UpdateOp, VariableEntry

ROWWISE = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, 0.9, nesterov=True),
    "adam": lambda: optax.adam(1e-2),
    "adamw": lambda: optax.adamw(1e-2),
    "adagrad": lambda: optax.adagrad(0.1),
    "rmsprop": lambda: optax.rmsprop(0.1),
    "lion": lambda: optax.lion(1e-2),
    "clip": lambda: optax.chain(optax.clip(0.5), optax.sgd(0.1)),
    "schedule": lambda: optax.adam(optax.exponential_decay(0.1, 2, 0.5)),
    "inject": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    "every second": lambda: optax.MultiSteps(
        optax.adam(0.1), 2
    ).gradient_transformation(),
    "schedule free": lambda: optax.contrib.schedule_free_sgd(0.1),
}
WHOLE = {
    "lamb": lambda: optax.lamb(1e-2),
    "lars": lambda: optax.lars(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2),
    "muon": lambda: optax.contrib.muon(1e-2),
    "novograd": lambda: optax.novograd(1e-2),
}
MIXED = {
    "prodigy": optax.contrib.prodigy,
    "d-adaptation": optax.contrib.dadapt_adamw,
}
SHAPES = {1: (130, 129), 2: (7,)}


class Shelf:
    """Ships transformations by name."""

    def __init__(self):
        self.kept = {n.encode(): f for n, f in {**ROWWISE, **WHOLE, **MIXED}.items()}

    def __call__(self, code: bytes) -> object:
        return self.kept[code]()


def store_with(*names: str, dtype="f4", sharded=False, gradients_of=None) -> Store:
    store = Store(OptimizerEngine(Shelf()), task="/job:ps/task:0")
    rng = np.random.default_rng(3)
    values = [rng.normal(size=shape).astype(dtype) for shape in SHAPES.values()]
    create_in(store, [VariableEntry(k, f"v{k}", True, sharded) for k in SHAPES], values)
    for number, name in enumerate(names, 1):
        register(store, number, name)
        bind(store, number, of_values(made(name), values_of(store), gradients_of))
    return store


def made(name: str):
    return {**ROWWISE, **WHOLE, **MIXED}[name]()


def local(transformation):
    """One step of optax on the whole tree, compiled."""

    @jax.jit
    def step(values, state, grads):
        updates, state = transformation.update(grads, state, values)
        return optax.apply_updates(values, updates), state

    return step


def register(store: Store, number: int, name: str) -> None:
    plan = store.plan_optimizer(number, name, name.encode())
    plan.compute()
    store.commit(plan)


def values_of(store: Store) -> dict[int, np.ndarray]:
    _, arrays = store.read([Read(key, -1) for key in SHAPES])
    return dict(zip(SHAPES, arrays, strict=True))


def gradients(seed: int, dtype="f4") -> dict[int, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {k: rng.normal(size=s).astype(dtype) for k, s in SHAPES.items()}


def optimize(grads: dict[int, np.ndarray], optimizer: int = 1) -> Push:
    updates = [Update(key, int(UpdateOp.OPTIMIZE), optimizer, 1) for key in grads]
    return Push(7, -1, 0, 0, updates, tuple(grads.values()))


@pytest.mark.parametrize("name", combined([*ROWWISE, *WHOLE], step=2))
def test_steps_on_the_server_are_steps_of_optax_on_the_tree(name):
    store, transformation = store_with(name), {**ROWWISE, **WHOLE}[name]()
    want = {k: jnp.asarray(v) for k, v in values_of(store).items()}
    state, step = jax.jit(transformation.init)(want), local(transformation)
    for turn in range(4):
        grads = gradients(turn)
        want, state = step(want, state, grads)
        assert push_to(store, optimize(grads)).versions == [turn + 1] * len(SHAPES)
        for key, value in values_of(store).items():
            np.testing.assert_allclose(
                value, want[key], rtol=2e-3, atol=2e-5, err_msg=name
            )
            assert value.dtype == np.float32
    one = np.ones(SHAPES[1], "f4")
    create_in(store, [VariableEntry(9, "part", True, True)], [one])
    bind_each(store, 1, transformation, [9])
    push = optimize({2: gradients(9)[2], 9: one})
    if name in ROWWISE:
        assert push_to(store, push).applied
        return
    with pytest.raises(InvalidArgumentError, match="'part'"):
        push_to(store, push)
    (value,) = store.read([Read(2, turn + 1), Read(9, -1)])[1]  # v2 is unchanged
    assert (value == 1).all()


@pytest.mark.parametrize("shape", [(), (0,), (6, 2, 2)])
def test_any_shape_is_optimised(shape):
    store, transformation = store_with("adam"), ROWWISE["adam"]()
    value = np.full(shape, 2, "f4")
    create_in(store, [VariableEntry(9, "odd", True, False)], [value])
    bind_each(store, 1, transformation, [9])
    state, step = transformation.init(value), local(transformation)
    want = value
    for _ in range(2):
        want, state = step(want, state, value)
        push_to(store, optimize({9: value}))
    (got,) = store.read([Read(9, -1)])[1]
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_variables_is_refused_whoever_says_otherwise(name):
    store = store_with()
    register(store, 1, name)
    told = of_values(made("sgd"), values_of(store))
    with pytest.raises(InvalidArgumentError, match=f"{name!r}.*several variables"):
        bind(store, 1, told)


@pytest.mark.parametrize("name", ["adam", "every second"])
def test_rows_of_a_sharded_variable_are_optimised_as_the_whole(name):
    whole, parts = store_with(name), store_with(name, sharded=True)
    value = values_of(parts)[1]
    halves = [np.array(value[:65]), np.array(value[65:])]
    entries = [
        VariableEntry(10, "v1/0", True, True),
        VariableEntry(11, "v1/1", True, True),
    ]
    create_in(parts, entries, halves)
    tree = {"v1": ((10, 11), SHAPES[1], "f4")}
    bind(parts, 1, binding(made(name), tree))
    for turn in range(3):
        grad = gradients(turn)[1]
        push_to(whole, optimize({1: grad}))
        push_to(parts, optimize({10: grad[:65], 11: grad[65:]}))
    _, got = parts.read([Read(10, -1), Read(11, -1)])
    np.testing.assert_allclose(
        np.concatenate(got), values_of(whole)[1], rtol=1e-4, atol=1e-6
    )


def test_counts_and_slots_belong_to_a_variable_and_an_optimizer():
    store = store_with("schedule", "momentum")
    grads = {k: np.ones(s, "f4") for k, s in SHAPES.items()}
    start = values_of(store)
    for _ in range(2):
        push_to(store, optimize({2: grads[2]}))
    push_to(store, optimize({2: grads[2]}, optimizer=2))
    first = values_of(store)[1]
    push_to(store, optimize({1: grads[1]}))
    # The first Adam step is the learning rate of step 0, however far v2 has come.
    np.testing.assert_allclose(first - values_of(store)[1], 0.1, rtol=1e-3)
    assert (start[1] == first).all()
    matrix = 130 * 129
    assert store.statistics()["slot_bytes"] == (2 * 7 * 4 + 8) + 7 * 4 + (
        2 * matrix * 4 + 8
    )
    store.delete([2])
    assert store.statistics()["slot_bytes"] == 2 * matrix * 4 + 8


def test_updates_are_in_place_unless_somebody_reads():
    store, grads = store_with("adam"), gradients(0)

    def address() -> int:
        return values_of(store)[1].__array_interface__["data"][0]

    push_to(store, optimize(grads))
    places = set()
    for _ in range(5):
        places.add(address())
        push_to(store, optimize(grads))
    assert len(places) == 1
    lease = values_of(store)[1]
    content = lease.tobytes()
    push_to(store, optimize(grads))
    assert address() not in places
    assert lease.tobytes() == content


def test_programs_are_compiled_once_per_shape_and_dtype():
    store = store_with("adam")
    create_in(
        store, [VariableEntry(9, "twin", True, False)], [np.zeros(SHAPES[1], "f4")]
    )
    bind_each(store, 1, made("adam"), [9])
    engine = store.engine
    for turn in range(3):
        grads = gradients(turn)
        push_to(store, optimize({**grads, 9: grads[1]}))
    assert engine.programs == 2 * len(SHAPES)


BF16 = ml_dtypes.bfloat16


@pytest.mark.parametrize(
    ("value", "gradient"),
    [("f8", "f8"), ("f4", "f8"), ("f4", BF16), (BF16, "f4")],
)
def test_gradients_of_other_dtypes_are_taken_as_optax_takes_them(value, gradient):
    transformation, keys = ROWWISE["adam"](), (2,)
    # jax without 64 bits takes the float64 gradient of a float32 variable as float32.
    taken = "f4" if (value, gradient) == ("f4", "f8") else gradient
    store = store_with("adam", dtype=value, gradients_of=taken)
    with jax.enable_x64(value == "f8"):
        want = {k: jnp.asarray(values_of(store)[k]) for k in keys}
        state, step = jax.jit(transformation.init)(want), local(transformation)
        for turn in range(3):
            grads = {k: g for k, g in gradients(turn, gradient).items() if k in keys}
            want, state = step(want, state, grads)
            push_to(store, optimize(grads))
    for key in keys:
        got, wanted = values_of(store)[key], np.asarray(want[key])
        assert got.dtype == wanted.dtype == value
        tolerance = {2: 1e-2, 4: 1e-5, 8: 1e-12}[got.itemsize]
        np.testing.assert_allclose(
            got.astype("f8"), wanted.astype("f8"), rtol=tolerance
        )


def test_a_push_of_assigns_adds_and_gradients_applies_in_order_and_whole():
    store = store_with("sgd", "momentum")
    one = np.ones(7, "f4")

    def push(*parts):
        updates = [Update(2, int(op), optimizer, 1) for op, optimizer, _ in parts]
        return Push(7, -1, 0, 0, updates, tuple(array for *_, array in parts))

    push_to(
        store,
        push(
            (UpdateOp.ASSIGN, 0, one),
            (UpdateOp.OPTIMIZE, 1, one),
            (UpdateOp.OPTIMIZE, 1, one),
            (UpdateOp.ADD, 0, one),
            (UpdateOp.OPTIMIZE, 2, one),
        ),
    )
    before = values_of(store)[2].copy()
    np.testing.assert_allclose(before, 1 - 0.1 - 0.1 + 1 - 0.1 * 1.9, rtol=1e-6)
    with pytest.raises(InvalidArgumentError, match="'sgd'"):
        push_to(
            store,
            push((UpdateOp.ADD, 0, one), (UpdateOp.OPTIMIZE, 1, np.ones(8, "f4"))),
        )
    np.testing.assert_array_equal(values_of(store)[2], before)


def test_a_transformation_that_cannot_be_traced_for_a_shape_is_not_bound():
    def update(grads, state, params=None):
        for leaf in jax.tree.leaves(grads):
            if leaf.shape == SHAPES[2]:
                raise ValueError("not this shape")
        return grads, state

    store = shipped(optax.GradientTransformation(lambda p: (), update))
    entries = [VariableEntry(k, f"v{k}", True, False) for k in SHAPES]
    create_in(store, entries, [np.zeros(s, "f4") for s in SHAPES.values()])
    with pytest.raises(InvalidArgumentError, match="'mine'"):
        bind(store, 1, of_values(optax.identity(), values_of(store)))
    with pytest.raises(NotFoundError, match=r"'v1'.*'mine'"):
        push_to(store, optimize(gradients(0)))


def shipped(transformation: object) -> Store:
    store = Store(OptimizerEngine(lambda _: transformation), task="ps")
    register(store, 1, "mine")
    return store


def test_what_is_no_transformation_or_calls_back_is_refused_with_words():
    with pytest.raises(InvalidArgumentError, match=r"'mine'.*GradientTransf"):
        shipped({})

    def called(grads, _):
        return jax.tree.map(
            lambda g: jax.pure_callback(lambda x: x, jax.typeof(g), g), grads
        )

    store = shipped(optax.stateless(called))
    create_in(store, [VariableEntry(1, "v", True, False)], [np.zeros(3, "f4")])
    with pytest.raises(InvalidArgumentError, match="pure_call"):
        bind_each_as(store, optax.identity())


def bind_each_as(store: Store, transformation) -> None:
    """Tells a tree of another transformation than the one that is there."""
    bind_each(store, 1, transformation, [1])


def test_what_makes_a_transformation_is_one():
    store = shipped(optax.MultiSteps(optax.sgd(1.0), 2))
    create_in(store, [VariableEntry(1, "v", True, False)], [np.zeros(3, "f4")])
    bind_each(store, 1, optax.MultiSteps(optax.sgd(1.0), 2), [1])
    for want in (0, -1, -1, -2):
        push_to(store, optimize({1: np.ones(3, "f4")}))
        (value,) = store.read([Read(1, -1)])[1]
        assert (value == want).all()


def test_ids_name_one_optimizer_and_gradients_must_fit():
    store = store_with("sgd")
    assert store.plan_optimizer(1, "sgd", b"sgd") == Done()
    with pytest.raises(AlreadyExistsError, match=r"\b1\b.*'sgd'"):
        register(store, 1, "adam")
    with pytest.raises(InvalidArgumentError):
        register(store, 0, "adam")
    grads = gradients(0)
    with pytest.raises(NotFoundError, match=r"'v1'.*\b5\b"):
        push_to(store, optimize(grads, optimizer=5))
    with pytest.raises(InvalidArgumentError, match=r"'v2'.*'sgd'"):
        push_to(store, optimize({2: np.ones(7, "i4")}))
    with pytest.raises(InvalidArgumentError, match="'v2'"):
        push_to(store, optimize({2: np.ones(7, "f2")}))
    store.clear()
    assert store.statistics()["slot_bytes"] == 0


def test_a_server_that_is_never_asked_to_optimise_does_not_import_jax():
    program = """
import sys
import numpy as np
from zstrat.ps import OptimizerEngine, PsClient, PsService, Store, create_plan
from zstrat.wire import Done, Push, Read, Update, VariableEntry
store = Store(OptimizerEngine(lambda code: None))
entry = VariableEntry(1, "v", True, False)
plans = [
    lambda: create_plan([entry], [np.zeros(3)], store.variables),
    lambda: store.plan_push(Push(1, 0, 0, 0, [Update(1, 1, 0, 1)], (np.ones(3),))),
]
for make in plans:
    plan = make()
    plan.compute()
    store.commit(plan)
assert store.read([Read(1, -1)])[1][0].tolist() == [1, 1, 1]
assert not {"jax", "optax"} & set(sys.modules), "jax was imported"
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)

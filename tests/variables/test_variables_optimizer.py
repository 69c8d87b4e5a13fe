"""The optimizer's handle, and what it does to variables of this process."""

import contextlib
import inspect
import pickle

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiers import combined

import zstrat as zs
import zstrat.variables as zv


def trained_by_optax(transformation, value, gradients):
    state = transformation.init(value)
    for gradient in gradients:
        updates, state = transformation.update(gradient, state, value)
        value = optax.apply_updates(value, updates)
    return value


@pytest.mark.parametrize(
    ("transformation", "dtype"),
    [
        (optax.sgd(0.1), "float32"),
        (optax.sgd(0.1, momentum=0.9), "float32"),
        (optax.adam(0.1), "float32"),
        (optax.adam(0.1), "float64"),  # jax sees floats
        (optax.adamw(0.1), "float32"),
    ],
)
def test_a_local_variable_moves_as_with_optax(transformation, dtype):
    rng = np.random.default_rng(0)
    start = rng.normal(size=(3, 2)).astype(np.float32)
    gradients = rng.normal(size=(5, 3, 2)).astype(dtype)
    x, optimizer = zv.Variable(start), zv.Optimizer(transformation)
    for gradient in gradients:
        optimizer.apply_gradients(gradient, x)
    expected = trained_by_optax(transformation, jnp.asarray(start), gradients)
    np.testing.assert_allclose(x.numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        # On parameter servers another one was waited for, two minutes.
        *[({"name": name}, "name=") for name in (3, b"o", ("o",))],
        ({"transformation": 0.1}, "GradientTransformation"),
    ],
)
def test_arguments_of_another_type_are_refused(given, words):
    with pytest.raises(TypeError, match=words):
        zv.Optimizer(**{"transformation": optax.sgd(0.1)} | given)


def test_pairs_trees_and_missing_gradients():
    a, b = zv.Variable(0.0, name="a"), zv.Variable(0.0, name="b")
    optimizer = zv.Optimizer(optax.sgd(1.0))
    optimizer.apply_gradients([(1.0, a), (None, b)])
    optimizer.apply_gradients(zip([1.0, 2.0], [a, b], strict=True))
    optimizer.apply_gradients({"x": [1.0, None]}, {"x": [a, b]})
    assert (a.numpy(), b.numpy()) == (-3.0, -2.0)


def test_absent_parts_of_a_model_have_no_gradients():
    weight = zv.Variable(0.0, name="weight")
    optimizer = zv.Optimizer(optax.sgd(1.0))
    model = {"weight": weight, "bias": None, "rest": [None, None]}
    grads = jax.tree.map(lambda _: 1.0, model)
    optimizer.apply_gradients(grads, model)
    optimizer.apply_gradients([(None, None), (1.0, weight)])
    assert weight.numpy() == -2.0


@pytest.mark.parametrize(
    ("grads", "variables", "words"),
    [
        ({"a": 1.0}, {"b": zv.Variable(0.0)}, "PyTreeDef"),
        ([(None, zv.Variable(0.0, name="lonely"))], None, "No gradients.*lonely"),
        ({"a": 1.0}, None, "apply_gradients"),
        (3.0, None, "apply_gradients"),
        ({"w": 1.0, "b": 2.0}, {"w": zv.Variable(0.0), "b": None}, "NoneType"),
        ([(1.0, "no variable")], None, "apply_gradients"),
        (np.ones(2), zv.Variable(0.0), "PyTreeDef"),
        (jnp.ones((), jnp.int32), zv.Variable(0.0), "dtype mismatch"),
    ],
)
def test_gradients_that_do_not_fit(grads, variables, words):
    with pytest.raises(ValueError, match=words):
        zv.Optimizer(optax.sgd(1.0)).apply_gradients(grads, variables)


@pytest.mark.parametrize(
    ("dtype", "given"),
    [
        ("float32", "bfloat16"),
        ("float32", "float16"),
        ("float32", "int32"),
        ("bfloat16", "float32"),
        ("float16", "float64"),
    ],
)
def test_no_gradient_is_converted_before_optax_computes_with_it(dtype, given):
    dtype, given = jnp.dtype(dtype), jnp.dtype(given)
    x = zv.Variable(np.zeros((2, 3), dtype))
    optimizer = zv.Optimizer(optax.adam(0.1))
    for gradient in (
        np.ones((2, 3), given),
        zv.IndexedSlices(np.ones((1, 3), given), [1]),
        np.ones((4, 2, 3), given),  # of four examples
    ):
        with pytest.raises(ValueError, match=rf"dtype mismatch.*{given}.*{dtype}"):
            optimizer.apply_gradients([(gradient, x)])
    np.testing.assert_array_equal(x.numpy(), np.zeros((2, 3), dtype))


KEPT_AT_ONCE = {
    "sgd": optax.sgd,
    "adam": optax.adam,
    "warmup": lambda v: optax.sgd(optax.warmup_cosine_decay_schedule(0.0, v, 5, 9)),
    "branch": lambda v: optax.sgd(optax.exponential_decay(0.1, 10, v)),
    "list": lambda v: optax.piecewise_interpolate_schedule("linear", 0.1, {1: v}),
}
"""Functions of optax that compute with a number when they are called."""

KEPT_BY_A_TRACE = {
    "scale": optax.scale,
    "decay": lambda v: optax.adam(0.1, b1=v),
    "clip": lambda v: optax.chain(optax.clip(v), optax.sgd(0.1)),
    "injected": lambda v: optax.inject_hyperparams(optax.sgd)(learning_rate=v),
    "schedule": lambda v: optax.sgd(lambda count: v.value()),
    "returned": lambda v: optax.sgd(lambda count: v),
    "numpy": lambda v: optax.sgd(lambda count: v.numpy()),
    "array": lambda v: optax.sgd(
        optax.piecewise_interpolate_schedule("linear", v, {1: 0.5})
    ),
    "cosine": lambda v: optax.sgd(optax.cosine_decay_schedule(v, 100)),
}
"""Those that compute with it in each update."""

STRATEGIES = {
    "none": None,
    "one": lambda: zs.OneDeviceStrategy("CPU:0"),
    "mirrored": lambda: zs.MirroredStrategy(["CPU:0"]),
    "several": zs.MultiWorkerMirroredStrategy,
}


@pytest.fixture(params=STRATEGIES)
def scope(request):
    make = STRATEGIES[request.param]
    return contextlib.nullcontext() if make is None else make().scope()


@pytest.mark.parametrize("make", KEPT_AT_ONCE.values(), ids=KEPT_AT_ONCE)
def test_a_variable_is_not_frozen_while_an_optimizer_is_made(scope, make):
    """A rate that was a variable kept its first value, whatever was assigned."""
    with scope, pytest.raises(ValueError, match="inject_hyperparams"):
        make(zv.Variable(0.1))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("module", [optax, optax.contrib, optax.schedules])
def test_no_function_of_optax_freezes_a_variable(module, monkeypatch):
    """Each one that makes an optimizer or a schedule of numbers, number by number."""
    read, tried = [], 0
    value = zv.AbstractVariable.value
    monkeypatch.setattr(
        zv.AbstractVariable, "value", lambda self: read.append(self) or value(self)
    )
    for name, function in vars(module).items():
        if not inspect.isfunction(function):
            continue
        parameters = inspect.signature(function).parameters.values()
        wanted = {p.name: 0.1 for p in parameters if p.default is p.empty}
        for each in parameters:
            if type(each.default) not in (int, float) and each.name not in wanted:
                continue
            read.clear()
            try:
                made = function(**wanted | {each.name: zv.Variable(0.1)})
            except Exception:  # refused, or it wants something else than numbers
                continue
            if callable(made) or isinstance(made, optax.GradientTransformation):
                tried += 1
                assert not read, (name, each.name)
    assert tried > 10


@pytest.mark.parametrize(
    ("kept", "in_step"), combined([*KEPT_BY_A_TRACE], [False, True])
)
def test_a_variable_is_not_frozen_while_an_optimizer_is_traced(scope, kept, in_step):
    make = KEPT_BY_A_TRACE[kept]
    with scope:
        rate, x = zv.Variable(0.1, name="rate"), zv.Variable(np.zeros(2, np.float32))
        optimizer = zv.Optimizer(make(rate), params=x)

    def step():
        optimizer.apply_gradients(jnp.ones(2), x)

    with pytest.raises(ValueError, match=r"'rate'[\s\S]*inject_hyperparams"):
        (zs.function(step) if in_step else step)()


def test_a_rate_that_is_assigned_while_training(scope):
    """The remedy that these refusals name."""
    with scope:
        x = zv.Variable(np.zeros(2, np.float32))
        made = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
        optimizer = zv.Optimizer(made, params=x)
    step = zs.function(lambda: optimizer.apply_gradients(jnp.ones(2), x))
    step()
    optimizer.hyperparams["learning_rate"] = 0.5
    step()
    np.testing.assert_allclose(x.numpy(), [-0.6, -0.6], rtol=1e-6)


def test_a_number_that_is_read_by_name_is_taken():
    rate, x = zv.Variable(0.5), zv.Variable(1.0)
    for number in (rate.numpy(), rate.value(), float(rate)):
        zv.Optimizer(optax.sgd(number)).apply_gradients(1.0, x)
    assert float(x) == -0.5


def test_functions_of_optax_that_keep_nothing_take_variables():
    x, y = zv.Variable([3.0, 4.0]), zv.Variable([0.0, 0.0])
    assert optax.tree.norm([x]) == 5
    np.testing.assert_array_equal(optax.squared_error(x, y), [9, 16])
    np.testing.assert_array_equal(optax.apply_updates([x], [jnp.ones(2)])[0], [4, 5])


def test_optax_itself_takes_variables_in_a_step():
    rate = zv.Variable(0.5)

    @zs.function
    def moved(gradient):
        transformation = optax.sgd(rate)
        return transformation.update(gradient, transformation.init(gradient))[0]

    for value in (0.5, 0.25):
        rate.assign(value)
        np.testing.assert_array_equal(moved(jnp.ones(2)), [-value, -value])


def test_iterations_are_counted_when_asked_for():
    x = zv.Variable(0.0)
    optimizer = zv.Optimizer(optax.sgd(1.0), name="sgd", count_iterations=True)
    for _ in range(3):
        optimizer.apply_gradients(1.0, x)
    assert optimizer.iterations.numpy() == 3
    assert optimizer.iterations.name == "sgd/iterations"
    assert zv.Optimizer(optax.sgd(1.0)).iterations is None


async def test_gradients_can_be_applied_without_blocking():
    x, table = zv.Variable(0.0), zv.Variable(np.zeros((2, 1), np.float32))
    optimizer = zv.Optimizer(optax.sgd(1.0), count_iterations=True)
    rows = zv.IndexedSlices(np.ones((1, 1)), [1])
    await optimizer.apply_gradients_async([1.0, rows], [x, table])
    assert x.numpy() == -1.0
    np.testing.assert_array_equal(table.numpy(), [[0.0], [-1.0]])
    assert optimizer.iterations.numpy() == 1


def scaled_by(measure):
    """Makes a transformation that scales all gradients by the sum of a measure."""

    def update(updates, state, params=None):
        scale = sum(map(measure, jax.tree.leaves(updates)))
        return jax.tree.map(lambda gradient: scale * gradient, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def test_what_is_summed_over_rows_may_be_padded_with_zeros():
    table, dense = zv.Variable(np.zeros((20, 2), np.float32)), zv.Variable([0.0])
    rows = zv.IndexedSlices(np.ones((3, 2), np.float32), [1, 4, 7])
    scaled = zv.Optimizer(scaled_by(lambda gradient: jnp.sum(gradient * gradient)))
    scaled.apply_gradients([rows, np.zeros(1, np.float32)], [table, dense])
    assert table.numpy()[1, 0] == 6.0


@pytest.mark.parametrize(
    "measure",
    [
        # Of each row, and 1 for one of zeros.
        lambda gradient: jnp.sum(jnp.exp(jnp.sum(gradient.T, axis=0))),
        # The last row, which is one of zeros.
        lambda gradient: jnp.sum(jnp.flip(gradient, 0)[:1]),
    ],
    ids=["transposed", "reversed"],
)
def test_rows_that_are_moved_are_not_taken_for_those_that_are_padded(measure):
    table, dense = zv.Variable(np.zeros((20, 2), np.float32)), zv.Variable([[0.0]])
    rows = zv.IndexedSlices(np.ones((3, 2), np.float32), [1, 4, 7])
    scaled = zv.Optimizer(scaled_by(measure))
    with pytest.raises(ValueError, match="IndexedSlices"):
        scaled.apply_gradients([rows, np.zeros((1, 1), np.float32)], [table, dense])


def test_a_pickled_handle_knows_its_transformation_and_its_tree():
    x = zv.Variable(1.0, name="x")
    optimizer = zv.Optimizer(
        optax.adam(0.1), name="adam", params={"x": x}, count_iterations=True
    )
    handle = pickle.loads(cloudpickle.dumps(optimizer))
    assert (handle.id, handle.name) == (optimizer.id, "adam")
    assert handle.iterations.spec == optimizer.iterations.spec
    state = handle.transformation.init({"x": np.float32(1)})
    assert set(state[0].mu) == {"x"}
    (known,) = handle.known_call().targets
    assert known.spec == x.spec


def test_an_optimizer_of_this_process_refuses_variables_on_a_ps():
    spec = zv.VariableSpec(1, "far", (), "float32", ps=0)
    far = zv.unbound(spec)
    with pytest.raises(ValueError, match=r"'far'.*strategy\.scope"):
        zv.Optimizer(optax.sgd(1.0)).apply_gradients(1.0, far)


async def test_a_variable_is_moved_once_per_call():
    v, w = zv.Variable([1.0]), zv.Variable([1.0])
    optimizer = zv.Optimizer(optax.sgd(1.0))
    gradient = np.ones(1, np.float32)
    tied = {"in": v, "out": v, "other": w}
    grads = dict.fromkeys(tied, gradient)
    with pytest.raises(ValueError, match=r"'Variable'.*apply_gradients"):
        optimizer.apply_gradients(grads, tied)
    with pytest.raises(ValueError, match="apply_gradients"):
        await optimizer.apply_gradients_async([(gradient, v), (gradient, v)])
    np.testing.assert_array_equal(v.numpy(), [1.0])
    optimizer.apply_gradients([(None, v), (gradient, v), (gradient, w)])
    np.testing.assert_array_equal(v.numpy(), [0.0])


@pytest.mark.parametrize(
    "swapped",
    [
        lambda w, g: (w, g),
        lambda w, g: ({"a": w, "b": None}, {"a": g, "b": None}),
        lambda w, g: ([(w, g)],),
        lambda w, g: ({"a": w}, {"a": zv.IndexedSlices(g[:1], np.array([0]), (3,))}),
    ],
)
def test_gradients_and_variables_the_other_way_round(swapped):
    w, g = zv.Variable(np.ones(3, np.float32)), np.ones(3, np.float32)
    with pytest.raises(ValueError, match="apply_gradients"):
        zv.Optimizer(optax.sgd(0.1)).apply_gradients(*swapped(w, g))


@pytest.mark.parametrize("make", [zs.MirroredStrategy, zs.OneDeviceStrategy])
def test_rounds_without_parameter_servers_are_refused(make):
    strategy = make("CPU:0") if make is zs.OneDeviceStrategy else make()
    for scope in (contextlib.nullcontext(), strategy.scope()):
        with scope, pytest.raises(ValueError, match="ParameterServerStrategy"):
            zs.Optimizer(optax.sgd(0.5), rounds=zs.Rounds())

"""The optimizer's handle while training goes on: its state, its hyperparameters, and
extra arguments, in this process and on parameter servers."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zstrat as zs

pytestmark = pytest.mark.processes

START = {"b": np.ones(2, np.float32), "w": np.arange(6, dtype="f4").reshape(3, 2) - 2}
GRADIENTS = [jax.tree.map(lambda leaf, n=n: np.cos(leaf + n), START) for n in range(4)]


CUT = (4, 2)
"""The shape that is in two parts on servers; no other one is."""


def halves(shape, dtype):
    del dtype
    return [2 if shape == CUT and n == 0 else 1 for n in range(len(shape))]


@pytest.fixture(scope="module")
def servers(daemons):
    """Of one worker: a second one would only compile all steps again."""
    jobs = daemons.spec.as_dict()
    some = zs.ClusterSpec({"ps": jobs["ps"], "worker": jobs["worker"][:1]})
    resolver = zs.cluster_resolver.SimpleClusterResolver(some)
    with zs.ParameterServerStrategy(resolver, variable_partitioner=halves) as strategy:
        yield strategy, zs.ClusterCoordinator(strategy)


class Place:
    """Where an optimizer and its variables are, and how a step is taken there."""

    def __init__(self, strategy=None, coordinator=None):
        self._strategy, self._coordinator = strategy, coordinator

    def made(self, transformation, start=START, *, named=True):
        scope = contextlib.nullcontext()
        if self._strategy is not None:
            scope = self._strategy.scope()
        with scope:
            variables = jax.tree.map(zs.Variable, start)
            params = variables if named else None
            return variables, zs.Optimizer(transformation, params=params)

    def stepper(self, optimizer, variables, also=""):
        @zs.function
        def train_step(gradients, extra):
            if also == "state":
                _ = optimizer.state
            if also == "read":
                _ = optimizer.hyperparams["learning_rate"]
            if also == "assign":
                optimizer.hyperparams["learning_rate"] = 0.25
            optimizer.apply_gradients(gradients, variables, **extra)

        def take(gradients, **extra):
            if self._coordinator is None:
                train_step(gradients, extra)
            else:
                self._coordinator.schedule(train_step, args=(gradients, extra))
                self._coordinator.join()

        return take


@pytest.fixture(scope="module", params=["here", "servers"])
def place(request):
    if request.param == "here":
        return Place()
    return Place(*request.getfixturevalue("servers"))


def by_optax(transformation, gradients, start=START, change=None, **extra):
    """The last values and state; ``change`` gets the state before each step."""
    transformation = optax.with_extra_args_support(transformation)
    values = jax.tree.map(jnp.asarray, start)
    state = transformation.init(values)

    @jax.jit
    def moved(gradient, state, values):
        updates, state = transformation.update(gradient, state, values, **extra)
        return optax.apply_updates(values, updates), state

    for number, gradient in enumerate(gradients):
        state = state if change is None else change(number, state)
        values, state = moved(gradient, state, values)
    return values, state


def assert_close(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-5)


def values_of(variables):
    return jax.tree.map(lambda variable: variable.numpy(), variables)


def test_the_state_is_optax_own(place):
    def transformation():
        return optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1))

    variables, optimizer = place.made(transformation())
    take = place.stepper(optimizer, variables)
    assert optax.tree_utils.tree_get(optimizer.state, "count") == 0
    for gradient in GRADIENTS:
        take(gradient)
    values, state = by_optax(transformation(), GRADIENTS)
    assert optax.tree_utils.tree_get(optimizer.state, "count") == len(GRADIENTS)
    assert_close(optimizer.state, state)
    assert_close(values_of(variables), values)


def test_the_state_of_a_list_of_pairs(place):
    """Read and assigned, though the variables have no paths."""
    variables, optimizer = place.made(optax.adam(0.1), named=False)
    names = sorted(variables)
    for gradient in GRADIENTS[:2]:
        optimizer.apply_gradients([(gradient[n], variables[n]) for n in names])
    lists = [[gradient[n] for n in names] for gradient in GRADIENTS[:2]]
    _, state = by_optax(optax.adam(0.1), lists, [START[n] for n in names])
    assert_close(optimizer.state, state)
    doubled = jax.tree.map(lambda x: 2 * x, optimizer.state)
    optimizer.state = doubled
    assert_close(optimizer.state, doubled)


def test_functions_of_optax_take_the_state(place):
    def transformation():
        return optax.contrib.schedule_free_sgd(0.1)

    variables, optimizer = place.made(transformation())
    take = place.stepper(optimizer, variables)
    for gradient in GRADIENTS:
        take(gradient)
    values, state = by_optax(transformation(), GRADIENTS)
    got = optax.contrib.schedule_free_eval_params(optimizer.state, values_of(variables))
    assert_close(got, optax.contrib.schedule_free_eval_params(state, values))


def test_hyperparameters_are_read_and_assigned_between_steps(place):
    def transformation():
        return optax.inject_hyperparams(optax.adam)(learning_rate=0.1)

    def change(number, state):
        if number == 2:
            state.hyperparams["learning_rate"] = jnp.float32(0.01)
        return state

    variables, optimizer = place.made(transformation())
    take = place.stepper(optimizer, variables)
    assert float(optimizer.hyperparams["learning_rate"]) == pytest.approx(0.1)
    for number, gradient in enumerate(GRADIENTS):
        if number == 2:
            optimizer.hyperparams["learning_rate"] = 0.01
        take(gradient)
    assert float(optimizer.hyperparams["learning_rate"]) == pytest.approx(0.01)
    values, _ = by_optax(transformation(), GRADIENTS, change=change)
    assert_close(values_of(variables), values)


def test_an_unknown_hyperparameter_names_those_there_are(place):
    transformation = optax.inject_hyperparams(optax.adam)(learning_rate=0.1)
    _, optimizer = place.made(transformation)
    with pytest.raises(KeyError, match="learning_rate"):
        optimizer.hyperparams["rate"]
    with pytest.raises(KeyError, match="learning_rate"):
        optimizer.hyperparams["rate"] = 0.1


@pytest.mark.parametrize(
    ("rate", "value"), [(0.5, None), (0.5, "0.25"), (0.5, 1j), (1, 0.25)]
)
def test_a_hyperparameter_is_never_made_another_number(place, rate, value):
    """None would be nan, and 0.25 as an integer would end the training."""
    transformation = optax.inject_hyperparams(optax.sgd)(learning_rate=rate)
    variables, optimizer = place.made(transformation)
    with pytest.raises(TypeError, match="'learning_rate'"):
        optimizer.hyperparams["learning_rate"] = value
    optimizer.hyperparams["learning_rate"] = 2
    place.stepper(optimizer, variables)(GRADIENTS[0])
    transformation = optax.inject_hyperparams(optax.sgd)(learning_rate=2)
    values, _ = by_optax(transformation, GRADIENTS[:1])
    assert_close(values_of(variables), values)


def test_hyperparameters_without_inject_hyperparams_say_what_to_write(place):
    _, optimizer = place.made(optax.adam(0.1))
    with pytest.raises((ValueError, KeyError), match="inject_hyperparams"):
        optimizer.hyperparams["learning_rate"]


def test_an_extra_argument_that_is_missing_is_named(place):
    plateau = optax.contrib.reduce_on_plateau(patience=1)
    variables, optimizer = place.made(optax.chain(optax.sgd(0.1), plateau))
    take = place.stepper(optimizer, variables)
    with pytest.raises(Exception, match=r"reduce_on_plateau.*'value'.*value="):
        take(GRADIENTS[0])


def test_an_extra_argument_becomes_known_with_the_first_call(place, tmp_path):
    def transformation():
        plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=1, cooldown=0)
        return optax.chain(optax.adam(0.1), plateau)

    def moved(optimizer, variables):
        optimizer.apply_gradients(GRADIENTS[0], variables, value=np.float32(1))

    alike = [GRADIENTS[0]] * 3
    first, optimizer = place.made(transformation())
    assert_close(optimizer.state, by_optax(transformation(), [])[1])
    for _ in range(3):
        moved(optimizer, first)
    assert_close(optimizer.state, by_optax(transformation(), alike, value=1.0)[1])
    saved = zs.Checkpoint(params=first, optimizer=optimizer).save(tmp_path / "saved")
    second, restored = place.made(transformation())
    zs.Checkpoint(params=second, optimizer=restored).restore(saved)
    for each, variables in ((optimizer, first), (restored, second)):
        moved(each, variables)
    assert_close(restored.state, optimizer.state)
    assert_close(values_of(second), values_of(first))


def test_a_state_is_assigned(place):
    """Back to where it was, and with another rate: as in plain optax."""

    def transformation():
        clip = optax.clip_by_global_norm(0.5)
        return optax.chain(clip, optax.inject_hyperparams(optax.adam)(0.1))

    start = {"table": np.ones(CUT, np.float32), "b": START["b"]}
    gradients = [jax.tree.map(lambda x, n=n: np.cos(x + n), start) for n in range(4)]
    variables, optimizer = place.made(transformation(), start)
    take = place.stepper(optimizer, variables)
    first = optimizer.state  # which is kept nowhere yet
    take(gradients[0])
    optimizer.state = first
    jax.tree.map(lambda variable, value: variable.assign(value), variables, start)
    for gradient in gradients[:2]:
        take(gradient)
    optimizer.state = optax.tree_utils.tree_set(optimizer.state, learning_rate=0.5)
    for gradient in gradients[2:]:
        take(gradient)

    def change(number, state):
        if number != 2:
            return state
        return optax.tree_utils.tree_set(state, learning_rate=jnp.float32(0.5))

    values, state = by_optax(transformation(), gradients, start, change)
    assert_close(optimizer.state, state)
    assert_close(values_of(variables), values)


def test_a_state_that_does_not_fit_is_not_assigned():
    _, optimizer = Place().made(optax.adam(0.1))
    before = optimizer.state
    with pytest.raises(ValueError, match="PyTreeDef"):
        optimizer.state = before[0]
    with pytest.raises(ValueError, match=r"\['w'\].*\(3, 2\)"):
        optimizer.state = jax.tree.map(lambda leaf: leaf.T, before)
    with pytest.raises(TypeError, match=r"count.*int32"):
        optimizer.state = jax.tree.map(lambda leaf: leaf * 1.0, before)
    assert_close(optimizer.state, before)


def test_a_table_that_has_grown_gets_its_slots_back(place, tmp_path):
    """And those of an optimizer that was wrapped meanwhile."""
    small = {"b": START["b"], "w": np.ones((3, 2), np.float32)}
    large = {"b": START["b"], "w": np.full(CUT, 7, np.float32)}
    first, optimizer = place.made(optax.adam(0.1), small)
    take = place.stepper(optimizer, first)
    for gradient in GRADIENTS[:2]:
        take(gradient)
    saved = zs.Checkpoint(params=first, optimizer=optimizer).save(tmp_path / "saved")

    wrapped = optax.chain(optax.clip(9.0), optax.adam(0.1))
    second, restored = place.made(wrapped, large)
    checkpoint = zs.Checkpoint(params=second, optimizer=restored)
    with pytest.raises(zs.InvalidArgumentError, match="partial='rows'"):
        checkpoint.restore(saved)
    np.testing.assert_array_equal(second["w"].numpy(), large["w"])
    checkpoint.restore(saved, partial="rows").assert_consumed()
    added = np.full((1, 2), 7, np.float32)
    grown = np.concatenate([first["w"].numpy(), added])
    np.testing.assert_array_equal(second["w"].numpy(), grown)
    was, now = optimizer.state[0], restored.state[1][0]
    for old, new in ((was.mu, now.mu), (was.nu, now.nu)):
        padded = np.concatenate([old["w"], np.zeros((1, 2), np.float32)])
        np.testing.assert_array_equal(new["w"], padded)
        np.testing.assert_array_equal(new["b"], old["b"])
    assert now.count == was.count == 2

    gradient = {"b": GRADIENTS[2]["b"], "w": np.cos(grown)}
    values, state = values_of(second), restored.state
    updates, _ = wrapped.update(jax.tree.map(jnp.asarray, gradient), state, values)
    place.stepper(restored, second)(gradient)
    assert_close(values_of(second), optax.apply_updates(values, updates))


def measured():
    measures = {
        "norm": optax.tree.norm,
        "average": optax.measure_with_ema(optax.tree.norm, decay=0.9),
    }
    last = optax.snapshot("last", optax.tree.norm)
    return optax.chain(optax.monitor(measures), last, optax.adam(0.1))


def test_what_the_first_update_adds_to_the_state_is_zero_before_it(place):
    variables, optimizer = place.made(measured())
    take = place.stepper(optimizer, variables)
    before = optimizer.state
    assert float(optax.tree_utils.tree_get(before, "last")) == pytest.approx(
        float(optax.tree.norm(START))
    )
    for gradient in GRADIENTS:
        take(gradient)
    values, state = by_optax(measured(), GRADIENTS)
    assert_close(optimizer.state, state)
    assert_close(values_of(variables), values)


def test_a_state_that_all_variables_are_moved_with_is_told_as_it_is():
    variables, optimizer = Place().made(optax.contrib.dog())
    take = Place().stepper(optimizer, variables)
    for gradient in GRADIENTS:
        take(gradient)
    values, state = by_optax(optax.contrib.dog(), GRADIENTS)
    assert_close(optimizer.state, state)
    assert_close(values_of(variables), values)


def test_an_update_of_another_shape_is_refused(place):
    """In plain optax the scalar becomes a vector."""
    start = {"b": np.float32(2), "w": START["w"]}

    def moved():
        transformation = optax.scale_by_distance_over_gradients()
        variables, optimizer = place.made(transformation, start)
        optimizer.apply_gradients(start, variables)

    with pytest.raises(ValueError, match=r"\['b'\].*\(1,\)"):
        moved()


def counted_by_keys():
    """Does something else once its state has the leaf that its first update adds."""

    def update(updates, state, params=None):
        scale = 0.1 if state else 0.2
        return jax.tree.map(lambda u: -scale * u, updates), {"seen": jnp.float32(1)}

    return optax.GradientTransformation(lambda params: {}, update)


def test_a_state_that_grows_and_is_looked_at_is_refused(place):
    def moved():
        variables, optimizer = place.made(counted_by_keys())
        optimizer.apply_gradients(GRADIENTS[0], variables)

    with pytest.raises(ValueError, match="apply_gradients"):
        moved()


def by_first_norm():
    """Divides by the norm of the first values."""

    def init(params):
        return {"norm": optax.tree.norm(params)}

    def update(updates, state, params=None):
        return jax.tree.map(lambda u: -u / state["norm"], updates), state

    return optax.GradientTransformation(init, update)


def test_a_state_that_begins_with_all_values_needs_all_of_them(servers):
    variables, optimizer = Place().made(by_first_norm())
    Place().stepper(optimizer, variables)(GRADIENTS[0])
    assert_close(values_of(variables), by_optax(by_first_norm(), GRADIENTS[:1])[0])
    with pytest.raises(ValueError, match=r"\['norm'\]"):
        Place(*servers).made(by_first_norm())


def test_a_part_does_not_begin_with_its_own_norm(servers):
    table = {"table": np.ones(CUT, np.float32)}
    with pytest.raises(ValueError, match=r"\['table'\]"):
        Place(*servers).made(by_first_norm(), table)


def test_a_mask_that_does_not_fit_is_refused_before_any_call(servers):
    by_label = {"one": optax.sgd(0.1), "two": optax.adam(0.1)}
    labels = {"b": "one", "another": "two"}
    for transformation in (
        optax.multi_transform(by_label, labels),
        optax.with_extra_args_support(optax.masked(optax.sgd(0.1), {"b": True})),
    ):
        with pytest.raises(ValueError, match="ValueError"):
            Place(*servers).made(transformation)


def test_rows_and_dense_gradients_of_one_clipped_table(servers):
    def transformation():
        clip = optax.clip_by_global_norm(0.5)
        return optax.chain(clip, optax.inject_hyperparams(optax.sgd)(0.1))

    table = {"table": START["w"]}
    dense = [{"table": GRADIENTS[n]["w"]} for n in range(2)]
    given = jnp.asarray([[0.0, 0.0], [1.5, -2.0], [0.0, 0.0]])
    rows = {"table": zs.IndexedSlices(given[1:2], np.asarray([1]), (3, 2))}
    variables, optimizer = Place(*servers).made(transformation(), table)
    optimizer.hyperparams["learning_rate"] = 0.1
    take = Place(*servers).stepper(optimizer, variables)
    for gradient in (rows, dense[0], rows, dense[1]):
        take(gradient)
    wanted = [{"table": given}, dense[0], {"table": given}, dense[1]]
    values, _ = by_optax(transformation(), wanted, table)
    assert_close(values_of(variables), values)


@pytest.mark.parametrize("what", ["state", "read", "assign"])
def test_in_a_step_the_handle_is_refused(place, what):
    variables, optimizer = place.made(
        optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
    )
    take = place.stepper(optimizer, variables, also=what)
    with pytest.raises(
        RuntimeError, match=r"optax\.inject_hyperparams.*learning_rate="
    ):
        take(GRADIENTS[0])
    assert float(optimizer.hyperparams["learning_rate"]) == 0.5
    assert_close(values_of(variables), START)


@pytest.mark.parametrize("is_saved_here", [True, False])
def test_a_checkpoint_goes_from_one_place_to_another(servers, tmp_path, is_saved_here):
    def transformation():
        clip = optax.clip_by_global_norm(0.5)
        return optax.chain(clip, optax.inject_hyperparams(optax.adam)(0.1))

    def change(number, state):
        if number == 2:
            state[1].hyperparams["learning_rate"] = jnp.float32(0.01)
        return state

    places = [Place(), Place(*servers)]
    first, second = places if is_saved_here else places[::-1]
    variables, optimizer = first.made(transformation())
    take = first.stepper(optimizer, variables)
    for gradient in GRADIENTS[:2]:
        take(gradient)
    optimizer.hyperparams["learning_rate"] = 0.01
    saved = zs.Checkpoint(params=variables, optimizer=optimizer).save(tmp_path / "at")
    variables, optimizer = second.made(transformation())
    zs.Checkpoint(params=variables, optimizer=optimizer).restore(saved)
    take = second.stepper(optimizer, variables)
    for gradient in GRADIENTS[2:]:
        take(gradient)
    values, state = by_optax(transformation(), GRADIENTS, change=change)
    assert_close(optimizer.state, state)
    assert_close(values_of(variables), values)


def test_a_refusal_names_two_leaves_and_the_cure(servers):
    strategy, _ = servers
    transformation = optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)), 8
    )
    with strategy.scope():
        variables = {
            "layer": {"kernel": zs.Variable(np.ones((2, 2), np.float32))},
            "scale": zs.Variable(np.float32(1)),
        }
        with pytest.raises(
            ValueError, match=r"(?s)(layer.*kernel.*scale|scale.*layer)"
        ):
            zs.Optimizer(transformation, params=variables)

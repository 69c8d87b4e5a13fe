"""Towers of TF 1.12 over two devices of their own: what they draw, and what is done to
variables between them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zstrat as zs
from zstrat.contrib import distribute


@pytest.fixture
def towers():
    return distribute.ParameterServerStrategy(num_gpus_per_worker=2)


def one_buffer():
    """Fills the same memory with 0 0, 1 1, 2 2, 3 3."""
    buffer = np.zeros(2, np.float32)
    for number in range(4):
        buffer[:] = number
        yield buffer


class Pairs:
    """The same in a structure, by an iterable that is no generator."""

    def __iter__(self):
        return (({"x": buffer}, buffer) for buffer in one_buffer())


def drawn(distribution, dataset_fn, steps):
    """What each tower sees in each step."""
    iterator = iter(distribution.distribute_dataset(dataset_fn))
    seen = []
    with distribution.scope():
        for _ in range(steps):
            sums = distribution.call_for_each_tower(
                lambda x: sum(jnp.sum(leaf) for leaf in jax.tree.leaves(x)),
                iterator.get_next(),
            )
            seen.append([float(x) for x in distribution.unwrap(sums)])
        with pytest.raises(zs.OutOfRangeError):
            iterator.get_next()
    return seen


@pytest.mark.parametrize(
    "dataset_fn", [one_buffer, lambda: zs.data.Dataset.from_generator(one_buffer)]
)
def test_towers_have_elements_of_their_own_though_the_source_has_one_buffer(
    towers, dataset_fn
):
    assert drawn(towers, dataset_fn, 2) == [[0, 2], [4, 6]]


def test_structures_of_a_source_with_one_buffer(towers):
    assert drawn(towers, Pairs, 2) == [[0, 4], [8, 12]]


def test_one_tower_has_elements_of_its_own_too():
    one = distribute.ParameterServerStrategy()
    iterator = one.distribute_dataset(one_buffer).make_one_shot_iterator()
    kept = [iterator.get_next() for _ in range(4)]
    assert [x.tolist() for x in kept] == [[n, n] for n in range(4)]


def test_elements_that_nobody_writes_to_are_not_copied(towers):
    rows = [np.full(2, number) for number in range(4)]
    iterator = iter(towers.distribute_dataset(lambda: rows))
    for step in range(2):
        for number, value in enumerate(towers.unwrap(iterator.get_next())):
            assert value is rows[2 * step + number]


@pytest.mark.parametrize(("count", "wanted"), [(1, [0, 1, 2, 3, 4]), (2, [0, 1, 2, 3])])
def test_a_loop_over_a_dataset_ends_with_its_elements(count, wanted):
    """A remainder that only some of the towers would have is left out."""
    distribution = distribute.ParameterServerStrategy(count)
    dataset = distribution.distribute_dataset(lambda: zs.data.Dataset.range(5))
    for _ in range(2):
        seen = [int(x) for each in dataset for x in distribution.unwrap(each)]
        assert seen == wanted


def test_who_asks_for_the_next_element_is_told_that_there_is_none(towers):
    iterator = iter(towers.distribute_dataset(lambda: [1, 2]))
    assert towers.unwrap(next(iterator)) == [1, 2]
    with pytest.raises(zs.OutOfRangeError):
        iterator.get_next()
    with pytest.raises(StopIteration):
        next(iterator)


def test_steps_end_with_an_error_where_the_elements_do(towers):
    rows = np.arange(2, dtype=np.float32)
    dataset = towers.distribute_dataset(lambda: rows)

    @zs.function
    def step(iterator):
        return towers.call_for_each_tower(lambda x: x + 1, next(iterator))

    def several(context, x):
        context.set_last_step_output("x", x, zs.VariableAggregation.SUM)

    with towers.scope():
        iterator = iter(dataset)
        assert [float(x) for x in towers.unwrap(step(iterator))] == [1, 2]
        with pytest.raises(zs.OutOfRangeError):
            step(iterator)
        context = towers.run_steps_on_dataset(several, iter(dataset), 1)
        assert float(context.last_step_outputs["x"]) == 1
        with pytest.raises(zs.OutOfRangeError):
            towers.run_steps_on_dataset(several, iter(dataset), 2)


ENGINES = {
    "mirrored": lambda: zs.MirroredStrategy(["CPU:0", "CPU:1"]),
    "central": lambda: zs.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:0"),
    "one": lambda: zs.OneDeviceStrategy("CPU:0"),
}


@pytest.mark.parametrize("engine", sorted(ENGINES))
@pytest.mark.parametrize("decorate", [lambda fn: fn, zs.function])
def test_a_merge_call_reduces_and_updates(engine, decorate):
    """Gradients 1 and 2, the second time 2 and 3, half of their sum off a variable."""
    strategy = ENGINES[engine]()
    with strategy.scope():
        v = zs.Variable(np.float32(1))

    def merge(distribution, gradient):
        total = distribution.reduce(zs.VariableAggregation.SUM, gradient, v)
        distribution.update(v, lambda var, x: var.assign_sub(0.5 * x), total)
        distribution.update_non_slot(
            distribution.non_slot_devices([v]), lambda x: x["total"], {"total": total}
        )

    def tower(x):
        context = distribute.get_tower_context()
        context.merge_call(merge, x + context.tower_id)

    step = decorate(lambda x: strategy.run(tower, args=(x,)))
    expected = 1.0
    for x in (1, 2):
        step(jnp.float32(x))
        towers = strategy.num_replicas_in_sync
        expected -= 0.5 * sum(x + number for number in range(towers))
        assert float(v.numpy()) == expected


def test_each_component_of_a_variable_gets_its_own_of_a_mirrored_value():
    strategy = ENGINES["mirrored"]()
    with strategy.scope():
        v = zs.Variable(np.zeros(2, np.float32))
        face = distribute.get_distribution_strategy()
        mirrored = face.broadcast(jnp.arange(2.0))
        assert isinstance(mirrored, zs.Mirrored)
        face.update(v, lambda var, x, y: var.assign(x + y["y"]), 1.0, {"y": mirrored})
        assert v.numpy().tolist() == [1, 2]
        assert float(face.update_non_slot("CPU:0", jnp.sum, mirrored)) == 1
        apart = zs.PerReplica((1.0, 2.0))
        for wrong in (apart, [apart]):
            with pytest.raises(ValueError, match="PerDevice"):
                face.update(v, lambda var, x: var.assign(x), wrong)
            with pytest.raises(ValueError, match="PerDevice"):
                face.update_non_slot("CPU:0", lambda x: x, x=wrong)
    assert v.numpy().tolist() == [1, 2]


@pytest.mark.parametrize("concurrently", [True, False])
def test_an_update_is_for_the_cross_tower_context(towers, concurrently):
    with towers.scope():
        v = zs.Variable(1.0, aggregation=zs.VariableAggregation.SUM)

        def tower():
            with pytest.raises(RuntimeError, match=r"update\(\)"):
                towers.update(v, lambda var: var.assign_add(1.0))

        towers.call_for_each_tower(tower, run_concurrently=concurrently)
        assert v.numpy() == 1.0
        towers.update(v, lambda var: var.assign_add(1.0))
        assert v.numpy() == 2.0
    other = distribute.ParameterServerStrategy()
    with other.scope(), pytest.raises(RuntimeError, match="CentralStorageStrategy"):
        towers.update(v, lambda var: var.assign_add(1.0))

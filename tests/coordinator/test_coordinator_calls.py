"""What is shipped once, and results that stay where they are until they are fetched."""

import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zstrat.program as zs
from zstrat.errors import ClosureAbortedError
from zstrat.variables import DowncastWarning


class Batch(NamedTuple):
    """Its arrays are pickled with it at each call."""

    x: np.ndarray


@zs.function
def add(a, b):
    return {"sum": a + b.x, "parts": (a, [b.x]), "none": None}


@pytest.fixture
def same():
    @zs.function
    def same(*args):
        return args[0] if len(args) == 1 else args

    return same


@zs.function
def scale(layer, x):
    return x * layer.units


@zs.function
def constant():
    return jnp.float32(7)


@zs.function
def large(n):
    return jnp.zeros(1000, jnp.float32) + n


def test_the_same_call_is_traced_and_shipped_once(world, coordinator):

    @zs.function
    def scale(x, factor, *, flag=False):
        return x * factor if flag else x

    for _ in range(20):
        coordinator.schedule(scale, args=(2, (1.5, None)[:1][0]), kwargs={"flag": True})
    coordinator.join()
    assert scale.trace_count == 1
    assert len({n for w in world.workers for n in w.arguments}) == 1


class Layer:
    """Compared by identity, as most objects are."""

    def __init__(self, units):
        self.units = units


def test_objects_with_the_same_bytes_are_the_same_on_a_worker(world, coordinator):
    layers = Layer(2), Layer(3)
    values = [coordinator.schedule(scale, args=(layer, 1.5)) for layer in layers * 10]
    assert [float(v.fetch()) for v in values] == [3.0, 4.5] * 10
    assert len({n for w in world.workers for n in w.arguments}) == 2
    layers[0].units = 5
    coordinator.schedule(scale, args=(layers[0], 1.5)).fetch()
    assert len({n for w in world.workers for n in w.arguments}) == 3


def test_arguments_that_closures_share_fill_no_queue(world, monkeypatch):
    monkeypatch.setattr("zstrat.coordinator._queue.MAX_QUEUED_BYTES", 2**20)
    coordinator = world.coordinator()
    world.on_loop(world.hold)

    layer = Layer(2)
    layer.notes = bytes(2**16)  # of which there is one copy: 20 would be over 1 MiB
    values = [coordinator.schedule(scale, args=(layer, 1.5)) for _ in range(20)]
    world.on_loop(world.release)
    assert [float(v.fetch()) for v in values] == [3.0] * 20


def test_an_eager_step_has_its_arguments_for_itself(coordinator):

    @zs.function(eager=True)
    def take(layer):
        layer.units += 1
        return layer.units

    layer = Layer(2)
    values = [coordinator.schedule(take, args=(layer,)) for _ in range(4)]
    assert [int(v.fetch()) for v in values] == [3] * 4


def test_equal_numbers_of_other_types_are_other_arguments(coordinator, same):
    values = [coordinator.schedule(same, args=(x,)) for x in (1, 1.0, True, 0.0, -0.0)]
    results = [value.fetch() for value in values]
    assert [np.asarray(x).dtype.kind for x in results] == list("ifbff")
    assert np.signbit(results[4])
    assert not np.signbit(results[3])


def test_arguments_are_taken_as_they_are_at_schedule(world, coordinator):
    world.on_loop(world.hold)

    @zs.function
    def total(x):
        return x.sum()

    small, big, changing = np.ones(4), np.ones(100_000), [1.0]
    values = []
    for _ in range(3):
        arguments = (small, big, np.asarray(changing))
        values += [coordinator.schedule(total, args=(x,)) for x in arguments]
        small += 1
        big += 1
        changing[0] += 1
    world.on_loop(world.release)
    assert [v.fetch() for v in values] == [4, 1e5, 1, 8, 2e5, 2, 12, 3e5, 3]


@pytest.mark.parametrize("rows", [2, 40_000])
def test_calls_with_other_arrays_are_traced_and_shipped_once(world, coordinator, rows):

    @zs.function
    def step(rate, batch, *, flag):
        return rate * batch["x"].sum() + batch["y"][1] if flag else rate

    def call(i, dtype="f4"):
        x = np.zeros((rows, 3), dtype).T
        x[:, :2] = i
        batch = {"x": x, "y": [7, np.int32(i)]}
        arguments = {"args": (np.float32(i), batch), "kwargs": {"flag": True}}
        return coordinator.schedule(step, **arguments)

    values = [call(i) for i in range(40)]
    assert [float(v.fetch()) for v in values] == [6 * i * i + i for i in range(40)]
    assert step.trace_count == 1
    assert len({n for w in world.workers for n in w.arguments}) == 1
    assert float(call(2, "i4").fetch()) == 26
    assert step.trace_count == 2


@pytest.mark.parametrize("size", [3, 40_000])
def test_arrays_of_jax_arrive_as_such_and_are_shipped_once(world, coordinator, size):
    kinds = []

    @zs.function(eager=True)
    def kind(x, n):
        kinds.append(type(x))
        return np.asarray(x) * n

    for i in range(3):
        value = coordinator.schedule(kind, args=(jnp.arange(size) * i, np.int32(2)))
        np.testing.assert_array_equal(value.fetch(), np.arange(size) * 2 * i)
    assert all(issubclass(kind, jax.Array) for kind in kinds)
    assert len({n for w in world.workers for n in w.arguments}) == 1


def test_what_is_special_of_an_array_of_jax_arrives_at_each_call(coordinator):

    @zs.function
    def product(x, y):
        return x * y

    half = jnp.ones(2, jnp.bfloat16)
    for value in (jnp.asarray(2.0), jnp.full(2, 2.0), jnp.float32(2), jnp.ones(2)):
        for _ in range(2):
            got = coordinator.schedule(product, args=(value, half)).fetch()
            assert got.dtype == (value * half).dtype
    key, draw = jax.random.key(7), zs.function(lambda key: jax.random.uniform(key))
    for _ in range(2):
        drawn = coordinator.schedule(draw, args=(key,)).fetch()
        assert drawn == jax.random.uniform(key)


def test_an_array_that_was_donated_is_told_where_it_is_scheduled(coordinator, same):
    array = jnp.ones(3)
    coordinator.schedule(same, args=(array,)).fetch()
    array.delete()
    with pytest.raises((RuntimeError, TypeError), match="shape="):
        coordinator.schedule(same, args=(array,))


def test_one_array_in_two_places_arrives_in_both(coordinator):

    @zs.function
    def difference(x, y):
        return (x - y).sum()

    ones, twos = np.ones(20_000, np.float32), np.full(20_000, 2, np.float32)
    for x, y, expected in ((ones, ones, 0), (twos, ones, 20_000), (twos, twos, 0)):
        assert coordinator.schedule(difference, args=(x, y)).fetch() == expected


def test_numbers_in_the_keys_of_a_dict_are_no_inputs(coordinator):

    @zs.function
    def step(batch):
        return {1: 10, 2: 20}[next(iter(batch))[0]] * batch.popitem()[1]

    def call(i):
        return coordinator.schedule(step, args=({(np.int32(i),): np.float32(i)},))

    assert [float(call(i).fetch()) for i in (1, 2, 1)] == [10, 40, 10]


@pytest.mark.parametrize("size", [1, 1000])
def test_an_argument_that_loses_bits_is_told_at_schedule(coordinator, size, same):
    numbers = np.arange(size)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            coordinator.schedule(same, args=(numbers,)).fetch()
    numbers[-1] = 2**40
    with pytest.warns(DowncastWarning, match=r"\b1099511627776\b.*\b0\b") as told:
        coordinator.schedule(same, args=(numbers,)).fetch()
    assert told[0].filename == __file__


def test_the_elements_of_an_array_keep_their_places(coordinator, same):
    transposed = np.arange(6, dtype=">f4").reshape(2, 3).T.astype("f4")
    args = (np.bool_(True), transposed[::-1], np.float16(0.5), np.zeros((2, 0), "f4"))
    for _ in range(2):  # made, then found
        for got, given in zip(
            coordinator.schedule(same, args=args).fetch(), args, strict=True
        ):
            np.testing.assert_array_equal(got, given, strict=True)


@pytest.mark.parametrize("size", [2, 20_000])
def test_a_retried_closure_has_the_inputs_of_its_schedule(world, coordinator, size):
    world.on_loop(world.hold)

    @zs.function
    def ends(x):
        return x[:1], x[-1:]

    numbers = np.zeros(size, np.float32)
    values = []
    for i in range(8):
        numbers[0], numbers[-1] = i, -i
        values.append(coordinator.schedule(ends, args=(numbers,)))
    world.until(lambda: len(world.workers[0].queue) > 0)
    world.on_loop(world.workers[0].kill, "crashed")
    world.on_loop(world.release)
    for i, value in enumerate(values):
        np.testing.assert_array_equal(value.fetch(), [[i], [-i]])


def test_workers_forget_arguments_that_nobody_needs(world, coordinator):
    for i in range(20):
        batch = Batch(np.ones(300, np.float32))
        coordinator.schedule(add, args=(np.float32(i), batch)).fetch()
    coordinator.schedule(constant).fetch()
    coordinator.join()
    world.until(lambda: sum(len(w.arguments) for w in world.workers) <= 2)


def test_large_results_stay_until_they_are_fetched(world, coordinator):
    value = coordinator.schedule(large, args=(3,))
    coordinator.join()
    assert sum(len(worker.kept) for worker in world.workers) == 1
    np.testing.assert_array_equal(value.fetch(), np.full(1000, 3, np.float32))
    np.testing.assert_array_equal(value.fetch(), np.full(1000, 3, np.float32))


def test_a_large_result_that_nobody_holds_is_dropped(world, coordinator):
    value = coordinator.schedule(large, args=(3,))
    coordinator.join()
    del value
    coordinator.schedule(constant).fetch()
    world.until(lambda: not any(worker.kept for worker in world.workers))


def test_a_large_result_goes_with_its_worker(world, coordinator):
    value = coordinator.schedule(large, args=(3,))
    coordinator.join()
    (owner,) = [worker for worker in world.workers if worker.kept]
    world.on_loop(owner.kill)
    for _ in range(2):
        with pytest.raises(ClosureAbortedError, match=f"task:{owner.index}.*again"):
            value.fetch()


def test_a_worker_that_was_away_lacks_results_of_before(world, coordinator):
    value = coordinator.schedule(large, args=(3,))
    coordinator.join()
    (owner,) = [worker for worker in world.workers if worker.kept]
    coordinator.shutdown()
    other = world.coordinator()
    other.schedule(constant).fetch()
    world.on_loop(owner.kill)
    world.on_loop(owner.come_back)
    other.schedule(constant).fetch()
    with pytest.raises(ClosureAbortedError):
        value.fetch()

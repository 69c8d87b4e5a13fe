"""Closures from dispatch to completion, with a parameter server behind fake links."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zstrat.data import Dataset
from zstrat.errors import (
    InvalidArgumentError,
    NotFoundError,
    OutOfRangeError,
    ProtocolError,
    PSUnavailableError,
    StepError,
)
from zstrat.program import (
    cut_inputs,
    function,
    get_worker_context,
    value_and_grad,
)
from zstrat.variables import Optimizer, creator
from zstrat.wire import (
    CancelSteps,
    CreateOptimizer,
    DropArguments,
    DropResults,
    Fetch,
)


async def test_results_of_any_structure(world):
    @function
    def step(x):
        return {"sum": x + 1, "parts": (x, [None, "word"])}

    result = await world.once(step, np.float32(2))
    assert result == {"sum": 3, "parts": (2, [None, "word"])}


async def test_quick_closures_share_messages_and_one_layout(world):
    @function
    def step(x):
        return x * 2

    digest = await world.ship(step)
    results = await world.run(digest, range(500), world.arguments(np.arange(3)))
    assert all(result.tolist() == [0, 2, 4] for result in results)
    told = world.remote.notices
    assert len(told) < 250
    assert sum(len(message.layouts) for message in told) == 1
    assert step.trace_count == 1


async def test_readers_share_pulls(world):
    v = world.variable(np.float32(3))

    @function
    def step():
        return v.value() + 1

    digest = await world.ship(step)
    await world.run(digest, [1])
    world.log.clear()
    results = await world.run(digest, range(2, 66))
    assert [float(r) for r in results] == [4.0] * 64
    assert len(world.log) <= 8  # 16 or 32 closures a pull


async def test_a_training_step_reads_what_the_one_before_wrote(world):
    v = world.variable(np.zeros(2, np.float32))

    @function
    def step(iterator):
        v.assign(v.value() * 2 + next(iterator)["x"])
        return v.value()

    resource, layout = await world.build(
        lambda: ({"x": np.full(2, i, np.float32)} for i in range(1, 7))
    )
    assert (layout.dtypes, layout.shapes) == (["float32"], [[2]])
    digest = await world.ship(step)
    results = await world.run(digest, range(6), world.arguments(world.it(resource)))
    expected, value = [], 0
    for i in range(1, 7):
        value = value * 2 + i
        expected.append([value, value])
    assert [r.tolist() for r in results] == expected
    assert world.value(v).tolist() == expected[-1]
    kinds = [type(message).__name__ for message in world.log]
    # A step that takes long to prepare does not keep the push before it back.
    apart = [kind.replace("Exchange", "Push Pull") for kind in kinds]
    assert " ".join(apart).split() == ["Pull", "Push"] * 6


async def test_several_parameter_servers(shipping):
    a, b = (
        shipping.variable(np.float32(1), ps=0),
        shipping.variable(np.float32(2), ps=1),
    )

    @function
    def step(x):
        total = a.value() + b.value() + x
        a.assign(total)
        b.assign_sub(total)
        return total

    digest = await shipping.ship(step)
    arguments = shipping.arguments(np.ones(50_000, np.float32)[0])
    results = await shipping.run(digest, range(3), arguments)
    expected, x, y = [], 1.0, 2.0
    for _ in range(3):
        total = x + y + 1
        x, y = total, y - total
        expected.append(total)
    assert [float(r) for r in results] == expected
    assert (shipping.value(a), shipping.value(b)) == (x, y)


async def test_the_error_shows_the_users_line_first(world):
    @function
    def step(x):
        return x.reshape(7)  # the guilty line

    digest = await world.ship(step)
    first, second = await world.run(digest, [1, 2], world.arguments(np.zeros(3)))
    for error in (first, second):
        assert isinstance(error, TypeError)
        (note,) = error.__notes__
        assert "# the guilty line" in note or "x.reshape(7)" in note
        assert "/zstrat/program/" not in note
        assert "/jax/" not in note


async def test_flags_of_the_program_are_not_on_the_worker(world):
    """In a step, traced or not, and in a dataset function."""
    absl = pytest.importorskip("absl.flags")

    def reads(*_):
        return [absl.FLAGS.a_flag_that_only_the_program_defines]

    for eager in (False, True):
        digest = await world.ship(function(reads, eager=eager))
        (error,) = await world.run(digest, [1 + eager])
        assert isinstance(error, AttributeError)
        assert "a_flag_that_only_the_program_defines" in str(error)
        assert "pass its value to the step as an argument" in str(error)
    with pytest.raises(AttributeError, match="a_flag_that_only_the_program_defines"):
        await world.build(lambda: reads())


async def test_errors_of_all_kinds_do_not_end_the_thread(world):
    class OddError(Exception):
        def __init__(self, a, b):
            super().__init__(a)

    def raising(error):
        @function
        def step():
            raise error

        return step

    for number, error in enumerate([SystemExit(3), OddError("x", 1), StopIteration(4)]):
        (ended,) = await world.run(await world.ship(raising(error)), [number])
        assert isinstance(ended, Exception)
    assert isinstance(ended, StepError | StopIteration)

    @function
    def wordy():
        raise ValueError("x" * 1_000_000)

    (ended,) = await world.run(await world.ship(wordy), [9])
    assert len(str(ended)) < 20_000


async def test_unknown_function_and_arguments(world):
    (error,) = await world.run(b"nobody", [1])
    assert isinstance(error, NotFoundError)

    @function
    def step(x):
        return x

    digest = await world.ship(step)
    (error,) = await world.run(digest, [2], 999)
    assert isinstance(error, NotFoundError)
    number = world.arguments(np.float32(1))
    assert (await world.run(digest, [3], number)) == [1]
    world.worker.handle(world.remote, DropArguments(world.session, [number]))
    (error,) = await world.run(digest, [4], number)
    assert isinstance(error, NotFoundError)


async def test_code_that_cannot_be_loaded(world):
    with pytest.raises(ImportError, match="no module"):
        await world.ship(ImportError("no module named numbers2"))
    (error,) = await world.run(b"digest 1", [1])
    assert isinstance(error, ImportError)


async def test_a_push_that_the_server_refuses(world):
    v = world.variable(np.float32(0))

    @function
    def step():
        v.assign_add(1.0)

    digest = await world.ship(step)
    await world.run(digest, [1])
    world.services[0]._store.clear()
    (error,) = await world.run(digest, [2])
    assert isinstance(error, NotFoundError | InvalidArgumentError)
    assert world.doubtful == {2}, "another server may have taken its part"


async def test_a_lost_server_fails_steps_and_gives_elements_back(world):
    v = world.variable(np.float32(0))

    @function
    def step(iterator):
        v.assign_add(next(iterator) + 0 * v.value())

    digest, arguments = await world.reading(
        lambda: iter(np.arange(10, dtype=np.float32)), step
    )
    assert (await world.run(digest, [0], arguments)) == [None]
    link = world.links[0]
    link.hold()
    world.dispatch(digest, [1, 2, 3], arguments)
    await world.until(lambda: link.held)
    link.cut()
    for error in await world.outcomes([1, 2, 3]):
        assert isinstance(error, PSUnavailableError)
        assert error.task == "/job:ps/task:0"
    assert not world.doubtful
    link.connect()
    await world.run(digest, range(4, 13), arguments)
    assert world.value(v) == sum(range(10))


async def test_what_is_put_back_is_drawn_before_what_was_drawn_behind_it(shipping):
    """So a place in the data, as a save takes it, is one of the order of the data."""
    world = shipping
    early, late = world.variable(np.float32(0)), world.variable(np.float32(0), ps=1)

    @function
    def first(iterator):
        return next(iterator) + early.value()

    @function
    def second(iterator):
        return next(iterator) + late.value()

    data = Dataset.from_tensor_slices(np.arange(6, dtype=np.float32))
    one, two, arguments = await world.reading(lambda: data, first, second)
    assert (await world.run(one, [0], arguments)) == [0]
    assert (await world.run(two, [1], arguments)) == [1]
    for link in world.links:
        link.hold()
    world.dispatch(one, [2], arguments)
    world.dispatch(two, [3], arguments)
    await world.until(lambda: all(link.held for link in world.links))  # both have drawn
    world.links[0].cut()
    (error,) = await world.outcomes([2])
    assert isinstance(error, PSUnavailableError)
    world.links[1].release()
    assert (await world.outcomes([3])) == [2]
    world.links[0].connect()
    assert (await world.run(one, [4, 5, 6], arguments)) == [3, 4, 5]


async def test_cancel_keeps_what_runs_and_loses_no_element(world):
    v = world.variable(np.float32(0))
    gate = world.gate()

    @function(eager=True)
    def slow():
        gate.hold()
        return "ran"

    @function
    def step(iterator):
        v.assign_add(next(iterator))

    data = np.arange(8, dtype=np.float32)
    block, step, arguments = await world.reading(lambda: iter(data), slow, step)
    await world.run(step, [0], arguments)
    world.dispatch(block, [1])
    world.dispatch(step, [2, 3, 4], arguments)
    await gate.wait_reached()
    world.worker.handle(world.remote, CancelSteps(world.session))
    world.dispatch(step, [5], arguments)
    gate.open()
    assert await world.outcomes([1, 2, 3, 4, 5]) == ["ran", *["cancelled"] * 3, None]
    await world.run(step, range(6, 12), arguments)
    assert world.value(v) == sum(range(8))


async def test_large_results_stay_until_fetched(world):
    @function
    def step(x):
        return {"big": x.repeat(100_000), "small": x}

    digest = await world.ship(step)
    arguments = world.arguments(np.float32(2))
    assert await world.run(digest, [5], arguments) == ["kept"]
    fetched = await world.ask(Fetch(world.session, 5))
    assert [a.shape for a in fetched.arrays] == [(100_000,), ()]
    assert world.worker.statistics()["kept_bytes"] == 400_004
    world.worker.handle(world.remote, DropResults(world.session, [5, 6]))
    with pytest.raises(NotFoundError):
        await world.ask(Fetch(world.session, 5))
    assert world.worker.statistics()["kept_bytes"] == 0


async def test_a_step_that_is_here_already_is_ignored(world):
    gate = world.gate()
    runs = []

    @function(eager=True)
    def slow():
        runs.append(1)
        gate.hold()

    digest = await world.ship(slow)
    world.dispatch(digest, [1, 2])
    await gate.wait_reached()
    world.dispatch(digest, [1, 2, 3])
    gate.open()
    await world.outcomes([1, 2, 3])
    assert len(runs) == 3
    assert world.worker.statistics()["duplicates"] == 2


@pytest.mark.parametrize("count", [1, 10_000])
async def test_steps_that_are_here_already_leave_the_others_their_inputs(world, count):
    gate = world.gate()

    @function(eager=True)
    def doubled(x):
        gate.hold()
        x *= 2  # it is the step's own
        return x[:1]

    def numbers(*given):
        each = [np.full(count, n, np.float64).view(np.uint8) for n in given]
        if count == 1:
            return {"size": 8, "inputs": np.concatenate(each).tobytes()}
        return {"size": 8 * count, "arrays": tuple(each)}

    (number,), _ = cut_inputs(((np.ones(count),), {}), [0])
    digest, arguments = await world.ship(doubled), world.arguments(number)
    world.dispatch(digest, [1, 2], arguments, **numbers(1, 2))
    await gate.wait_reached()
    world.dispatch(digest, [2, 3, 1, 4], arguments, **numbers(2, 3, 1, 4))
    gate.open()
    assert np.concatenate(await world.outcomes([1, 2, 3, 4])).tolist() == [2, 4, 6, 8]


async def test_inputs_that_are_not_as_long_as_announced_are_refused(world):
    words = r"\b16\b.*\b0\b.*\b17\b"
    with pytest.raises(ProtocolError, match=words):
        world.dispatch(b"digest", [1, 2], size=8, inputs=bytes(17))
    size = 2**16
    large, short = np.zeros(size, np.uint8), np.zeros(size - 1, np.uint8)
    for arrays, words in (
        ((large, short), r"\b65536\b.*\b65535\b"),
        ((large, large.view("f4")), r"\b65536\b"),
        ((large,) * 3, r"\b0\b.*\b2\b.*\b0\b"),
        ((large,), r"\b0\b.*\b2\b.*\b0\b"),
    ):
        with pytest.raises(ProtocolError, match=words):
            world.dispatch(b"digest", [1, 2], size=size, arrays=arrays)


async def test_the_context_of_a_step(world):
    @function
    def step():
        context = get_worker_context()
        return context.worker_index, context.worker_count, context.attempt

    digest = await world.ship(step)
    assert await world.run(digest, [1]) == [(1, 3, 1)]
    assert await world.run(digest, [2], attempt=4) == [(1, 3, 4)]


async def test_eager_steps_read_and_update_as_they_go(world):
    v = world.variable(np.float32(1))
    seen = []

    @function(eager=True)
    def step(iterator):
        seen.append(float(v.value()))
        v.assign_add(next(iterator))
        seen.append(float(v.value()))
        v.assign(v.value() * 2)
        return {"v": v.value()}

    digest, arguments = await world.reading(
        lambda: iter([np.float32(2), np.float32(5)]), step
    )
    first, second = await world.run(digest, [1, 2], arguments)
    assert (float(first["v"]), float(second["v"])) == (6.0, 22.0)
    assert seen == [1.0, 3.0, 6.0, 11.0]
    assert world.value(v) == 22.0
    (third,) = await world.run(digest, [3], arguments)
    assert isinstance(third, OutOfRangeError)


async def test_an_eager_step_without_its_server(world):
    v = world.variable(np.float32(0))

    @function(eager=True)
    def step():
        return v.value()

    world.links[0].cut()
    error = await world.once(step)
    assert isinstance(error, PSUnavailableError)


async def test_an_eager_result_of_the_other_byte_order(world):
    @function(eager=True)
    def step():
        return np.arange(3, dtype=">f4"), np.arange(3, dtype="<i2")

    big, little = await world.once(step)
    assert (big.tolist(), little.tolist()) == ([0.0, 1.0, 2.0], [0, 1, 2])


class _Registering:
    """As the scope of a coordinator: gives an optimizer its number."""

    def register_optimizer(self, optimizer):
        return 9


@pytest.fixture
async def untold(make_world):
    """With an optimizer that no server has been told of yet, and a weight of it."""
    world = await make_world(load_code=lambda code: optax.sgd(1.0))
    world.weight = world.variable(np.zeros(2, "f4"))
    token = creator.set(_Registering())
    world.sgd = Optimizer(optax.sgd(1.0))
    creator.reset(token)
    return world


async def told(world):
    (service,) = world.services
    await service.handle(world.remote, CreateOptimizer(world.session, 9, "sgd", b""))


async def test_steps_whose_tree_is_refused_give_their_elements_back(untold):
    weight = untold.weight

    @function
    def step(iterator):
        x = next(iterator)
        gradients = value_and_grad(lambda w: jnp.sum(w[0] * x))([weight])[1]
        untold.sgd.apply_gradients(gradients, [weight])
        return x

    data = np.arange(1, 9, dtype="f4")
    digest, arguments = await untold.reading(lambda: iter(data), step)
    for error in await untold.run(digest, [1, 2], arguments):
        assert isinstance(error, NotFoundError)
    await told(untold)
    assert await untold.run(digest, [3, 4], arguments) == [1, 2]
    np.testing.assert_array_equal(untold.value(weight), [-3, -3])


async def test_each_step_whose_tree_was_refused_sends_it_again(untold):
    weight = untold.weight

    @function
    def step():
        gradients = value_and_grad(lambda w: jnp.sum(w[0]))([weight])[1]
        untold.sgd.apply_gradients(gradients, [weight])

    digest = await untold.ship(step)
    # They share what was prepared, but not that the tree was refused.
    for error in await untold.run(digest, [1, 2, 3]):
        assert isinstance(error, NotFoundError)
    assert not untold.doubtful  # no gradient was sent ahead of its tree
    await told(untold)
    assert await untold.run(digest, [4, 5]) == [None, None]
    np.testing.assert_array_equal(untold.value(weight), [-2, -2])

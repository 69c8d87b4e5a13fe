"""Datasets and values that are built on the worker."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import numpy as np
import pytest

from zstrat.data import Dataset, InputContext
from zstrat.errors import ClosureInputError, NotFoundError, OutOfRangeError
from zstrat.program import (
    function,
    get_current_worker_index,
    get_worker_context,
    rebuild,
)
from zstrat.variables import Variable
from zstrat.wire import DropResources


@function
def draw(iterator):
    return next(iterator)


async def drawn(world, resource, count, first=100):
    digest = await world.ship(draw)
    arguments = world.arguments(world.it(resource))
    return await world.run(digest, range(first, first + count), arguments)


async def test_layout_is_that_of_the_first_element_which_is_not_lost(world):
    data = {"x": np.arange(12.0).reshape(4, 3), "y": (np.arange(4, dtype=np.int8),)}
    resource, layout = await world.build(
        lambda: Dataset.from_tensor_slices(data).batch(2)
    )
    assert layout.dtypes == ["float64", "int8"]
    assert layout.shapes == [[2, 3], [2]]
    assert layout.structure == ["{", ["x", 0], ["y", ["(", 1]]]
    first, second, end = await drawn(world, resource, 3)
    np.testing.assert_array_equal(first["x"], data["x"][:2])
    assert second["y"][0].tolist() == [2, 3]
    assert isinstance(end, OutOfRangeError)
    assert "/job:worker/task:0" in str(end)


@pytest.mark.parametrize(
    ("maker", "told"),
    [
        (lambda: 0, False),
        (lambda context: context, True),
        (lambda i=5: i, False),
        (lambda input_context=None: input_context, True),
        (lambda *args: args, False),
    ],
)
async def test_dataset_functions_with_and_without_a_context(world, maker, told):
    got = []

    def dataset_fn(*args):
        got.append(maker(*args))
        return [np.zeros(1)]

    dataset_fn.__wrapped__ = maker  # what inspect.signature looks at
    await world.build(dataset_fn)
    if told:
        assert got == [InputContext(3, 1, 1)]
    else:
        assert got in ([0], [5], [()])


async def test_a_dataset_itself_and_a_generator_will_do(world):
    for made in (Dataset.range(3).batch(2), [np.zeros(2)]):
        _, layout = await world.build(made)
        assert layout.shapes == [[2]]


async def test_a_generator_that_fills_one_buffer(world):
    def dataset_fn():
        buffer = np.zeros(3, np.int32)
        for i in range(20):
            buffer[:] = i
            yield {"x": buffer}

    # Steps that read wait for values with their elements in their hands.
    v = world.variable(np.zeros(3, np.int32))

    @function
    def step(iterator):
        return next(iterator)["x"] + v.value()

    digest, arguments = await world.reading(dataset_fn, step)
    results = await world.run(digest, range(20), arguments)
    assert [r.tolist() for r in results] == [[i] * 3 for i in range(20)]


async def test_the_index_of_the_worker_in_datasets_and_steps(world):
    def dataset_fn():
        while True:
            yield np.array(
                [get_current_worker_index(), get_worker_context().worker_index]
            )

    @function
    def step(iterator):
        return next(iterator), get_current_worker_index()

    digest, arguments = await world.reading(dataset_fn, step)
    ((told, index),) = await world.run(digest, [1], arguments)
    assert (told.tolist(), index) == ([1, 1], 1)
    with pytest.raises(RuntimeError, match=r"get_current_worker_index\(\)"):
        get_current_worker_index()


async def test_a_dataset_function_creates_no_variables(world):
    def dataset_fn():
        return [Variable(np.zeros(1), name="shuffled").value()]

    with pytest.raises(ValueError, match=r"'shuffled'.*strategy\.scope\(\)"):
        await world.build(dataset_fn)


async def test_building_again_starts_from_the_beginning(world):
    closed = []

    def dataset_fn():
        try:
            yield from np.arange(10)
        finally:
            closed.append(True)

    resource, _ = await world.build(dataset_fn)
    assert [int(x) for x in await drawn(world, resource, 2)] == [0, 1]
    await world.build(dataset_fn, resource=resource)
    assert closed == [True]
    assert [int(x) for x in await drawn(world, resource, 2, first=200)] == [0, 1]


async def test_dropping_closes(world):
    closed = []

    def dataset_fn():
        try:
            yield from np.arange(10)
        finally:
            closed.append(True)

    resource, _ = await world.build(dataset_fn)
    world.worker.handle(world.remote, DropResources(world.session, [resource, 99]))
    (error,) = await drawn(world, resource, 1)
    assert isinstance(error, NotFoundError)
    assert closed == [True]


async def test_values(world):
    resource, layout = await world.build(
        lambda: {"w": np.ones(3, np.float32)}, purpose="value"
    )
    assert (layout.dtypes, layout.shapes) == (["float32"], [[3]])

    @function
    def step(value):
        return value["w"].sum()

    digest, arguments = await world.ship(step), world.arguments(world.it(resource))
    assert await world.run(digest, [1], arguments) == [3.0]
    _, layout = await world.build(lambda: object(), purpose="value")
    assert layout.structure is None


async def test_values_from_arguments(world):
    arguments = world.arguments(2, start=3)
    _, layout = await world.build(
        lambda n, start: np.arange(start, start + n),
        purpose="value",
        arguments=arguments,
    )
    assert layout.shapes == [[2]]


async def test_errors_show_the_users_line(world):
    def dataset_fn():
        raise FileNotFoundError("no shards here")  # line of the user

    with pytest.raises(FileNotFoundError, match="no shards") as caught:
        await world.build(dataset_fn)
    (note,) = caught.value.__notes__
    assert "line of the user" in note
    assert "/zstrat/worker/" not in note


@pytest.mark.parametrize(
    ("maker", "kind", "words"),
    [
        (lambda: 3, TypeError, "must be iterable"),
        (lambda: ["text"], TypeError, "numbers or booleans"),
        (lambda: [{1: object()}], TypeError, "numbers or booleans"),
        (lambda: [{"k": jax.random.key(1)}], TypeError, "key_data"),
    ],
)
async def test_what_is_no_dataset(world, maker, kind, words):
    with pytest.raises(kind, match=words):
        await world.build(maker, resource=50)
    (error,) = await drawn(world, 50, 1)
    assert isinstance(error, ClosureInputError)
    assert isinstance(error.original_exception, kind)


async def test_a_dataset_of_no_element_is_at_its_end(world):
    with pytest.raises(OutOfRangeError):
        await world.build(list, resource=50)
    (error,) = await drawn(world, 50, 1)
    assert isinstance(error, OutOfRangeError)


async def test_a_function_that_raises_as_at_an_end_has_failed(world):
    def dataset_fn():
        raise OutOfRangeError("no such shard")

    with pytest.raises(ClosureInputError, match="OutOfRangeError"):
        await world.build(dataset_fn, resource=50)
    (error,) = await drawn(world, 50, 1)
    assert isinstance(error, ClosureInputError)
    assert isinstance(error.original_exception, OutOfRangeError)


async def test_an_error_can_be_mended_by_building_again(world):
    with pytest.raises(ZeroDivisionError):
        await world.build(lambda: 1 / 0, resource=50)
    (error,) = await drawn(world, 50, 1)
    assert isinstance(error, ClosureInputError)
    await world.build(lambda: [np.zeros(1)], resource=50)
    (element,) = await drawn(world, 50, 1, first=200)
    assert element.tolist() == [0]


class Named(NamedTuple):
    x: object
    rest: object = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    x: object
    rest: object = None


@jax.tree_util.register_pytree_node_class
class Pytree:
    def __init__(self, x, rest=None):
        self.x, self.rest = x, rest

    def tree_flatten(self):
        return (self.x, self.rest), ("kept", 1)

    @classmethod
    def tree_unflatten(cls, kept, children):
        assert kept == ("kept", 1)
        return cls(*children)


@pytest.mark.parametrize("kind", [Named, Registered, Pytree])
async def test_elements_of_classes_that_jax_knows(shipping, kind):
    def batches():
        for number in range(3):
            yield kind(np.full(2, number), {"inner": [kind(np.float32(number))]})

    dataset = Dataset.from_tensor_slices(kind(np.arange(4.0), (np.arange(4),)))
    first = 0
    for maker, shape in (batches, [2]), (dataset.batch(4), [4]):
        for _ in range(2):  # as a worker that returns builds it again
            first += 1
            resource, layout = await shipping.build(maker)
            leaves = [np.zeros(shape) for shape in layout.shapes]
            element = rebuild(layout.structure, leaves)
            assert type(element) is kind
            assert list(element.x.shape) == layout.shapes[0] == shape
            (drawn_one,) = await drawn(shipping, resource, 1, first)
            assert type(drawn_one) is kind


async def test_elements_that_no_coordinator_could_describe(world):
    partial = jax.tree_util.Partial(len, np.zeros(1))  # keeps the function beside it
    with pytest.raises(TypeError, match="PyTreeDef"):
        await world.build(lambda: [(partial, np.zeros(1))])


@pytest.mark.parametrize(
    ("leaf", "words"),
    [
        (np.array(["a", "b"]), "contains text,"),
        (np.array([b"a"]), "contains text of bytes,"),
        (np.array(["2020-01-01"], "M8[D]"), "contains dates,"),
        (np.array(["a", None], object), "contains text,"),
    ],
)
async def test_elements_of_text_are_named_as_users_know_them(world, leaf, words):
    with pytest.raises(TypeError, match=words):
        await world.build(lambda: [{"x": leaf}])


async def test_unknown_purpose(world):
    with pytest.raises(ValueError, match="'ornament'"):
        await world.build(lambda: 0, purpose="ornament")


async def test_pickled_dataset_function(shipping):
    offset = 5

    def dataset_fn(context):
        rows = Dataset.range(10).shard(
            context.num_input_pipelines, context.input_pipeline_id
        )
        return rows.map(lambda x: x + offset).batch(2).prefetch(1)

    resource, _ = await shipping.build(dataset_fn)
    first, second = await drawn(shipping, resource, 2)
    assert (first.tolist(), second.tolist()) == ([6, 9], [12])


async def test_code_that_captures_a_resource_follows_it(world):
    resource, _ = await world.build(lambda: np.float32(1), purpose="value")

    def load(code, arrays, resolve):
        found = world.load(code, arrays, resolve)
        if found != "captures":
            return found
        value = resolve(resource)
        return function(lambda: value)

    world.worker._session.runner.resources._load = load
    digest = await world.ship("captures")
    assert await world.run(digest, [1]) == [1]
    await world.build(lambda: np.float32(2), resource=resource, purpose="value")
    assert await world.run(digest, [2]) == [2]


async def test_a_source_that_cannot_be_closed_ends_alone(world):
    closed = []

    class Source:
        def __init__(self, error=None):
            self.error = error

        def __iter__(self):
            return self

        def __next__(self):
            return np.float32(1)

        def close(self):
            closed.append(self.error)
            if self.error is not None:
                raise self.error

    def stubborn():
        try:
            yield np.float32(1)
        except GeneratorExit:
            yield np.float32(2)

    makers = [stubborn, lambda: Source(SystemExit()), lambda: Source()]
    resources = [(await world.build(maker))[0] for maker in makers]
    world.worker.handle(world.remote, DropResources(world.session, resources))
    resource, _ = await world.build(lambda: [np.float32(7)])
    assert await drawn(world, resource, 1) == [7]
    assert not world.crashes
    assert [type(error) for error in closed] == [SystemExit, type(None)]

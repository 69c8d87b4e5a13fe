"""Objects that hold the coordinator, datasets and iterators, and methods of theirs as
steps, on real daemons."""

import copy
import functools
import threading

import numpy as np
import pytest

import zstrat as zs

pytestmark = pytest.mark.processes


def numbers():
    return zs.data.Dataset.from_tensor_slices(np.arange(100.0)).repeat()


class Trainer:
    """As TensorFlow's own test of fault tolerance has it."""

    def __init__(self, coordinator, **more):
        self.coordinator = coordinator
        self.strategy = coordinator.strategy
        self.asynchronous = zs.AsyncClusterCoordinator(self.strategy)
        self.dataset = coordinator.create_per_worker_dataset(numbers)
        self.iterator = iter(self.dataset)
        self.__dict__.update(more)
        with self.strategy.scope():
            self.v = zs.Variable(0.0, name="v")

    @zs.function
    def step(self, x):
        self.v.assign_add(x)
        return self.strategy.num_replicas_in_sync

    @zs.function
    def draw(self):
        return next(self.iterator), next(self.iterator)

    @zs.function(eager=True)
    def draw_eagerly(self):
        return next(self.iterator)

    @zs.function
    def draw_given(self, iterator):
        return next(iterator) + 0 * self.v

    @zs.function(eager=True)
    def use(self, what):
        return {
            "schedule": lambda: self.coordinator.schedule(self.step, (1.0,)),
            "join": lambda: self.asynchronous.join(),
            "iter": lambda: iter(self.dataset),
        }[what]()

    @zs.function
    def nested(self):
        self.coordinator.schedule(self.step, args=(1.0,))


@pytest.fixture
def trainer(world):
    return Trainer(world.coordinator)


def test_a_method_of_an_object_that_holds_the_coordinator(world, trainer):
    schedule = world.coordinator.schedule
    assert int(schedule(trainer.step, args=(3.0,)).fetch()) == 1
    schedule(trainer.step, args=(4.0,)).fetch()
    assert trainer.v.numpy() == 7
    assert copy.deepcopy(trainer.coordinator) is world.coordinator


@pytest.mark.parametrize("what", ["schedule", "join", "iter"])
def test_what_it_cannot_do_on_a_worker_it_says_there(world, trainer, what):
    with pytest.raises(RuntimeError, match=f"{what}.* is used in a step function"):
        world.coordinator.schedule(trainer.use, args=(what,)).fetch()
    with pytest.raises(RuntimeError):
        world.coordinator.join()


def test_a_step_that_schedules_is_refused_where_it_is_traced(world, trainer):
    with pytest.raises(RuntimeError, match=r"coordinator\.schedule"):
        world.coordinator.schedule(trainer.nested)


def test_a_step_draws_from_the_iterator_that_its_object_holds(world, trainer):
    drawn = [world.coordinator.schedule(trainer.draw) for _ in range(6)]
    world.coordinator.join()
    pairs = sorted(tuple(map(float, value.fetch())) for value in drawn)
    assert all(b == a + 1 and a % 2 == 0 for a, b in pairs)
    with pytest.raises(RuntimeError, match=r"zs\.function"):
        trainer.draw()


def test_a_captured_iterator_that_was_dropped_is_named(world, trainer):
    world.coordinator.schedule(trainer.draw).fetch()
    trainer.iterator = iter(trainer.dataset)
    with pytest.raises(RuntimeError, match=r"args=\(iterator"):
        world.coordinator.schedule(trainer.draw)


def test_what_eager_steps_hold_stays_until_they_have_run(world, trainer):
    schedule = world.coordinator.schedule
    drawn = [schedule(trainer.draw_eagerly) for _ in range(32)]
    trainer.iterator = iter(trainer.dataset)
    world.coordinator.join()
    assert sum(float(value.fetch()) == 0 for value in drawn) in (1, 2)  # per worker
    with pytest.raises(zs.errors.NotFoundError):
        while True:  # until the workers have heard that nobody needs it
            schedule(trainer.draw_eagerly).fetch()
    with pytest.raises(zs.errors.NotFoundError):
        world.coordinator.join()


def test_an_object_that_gets_a_new_iterator_for_each_epoch(world, trainer):
    """The one that it held when it was shipped is gone, and nobody asks for it."""
    for _ in range(3):
        trainer.iterator = iter(trainer.dataset)
        given = (trainer.iterator,)
        values = [world.coordinator.schedule(trainer.draw_given, given) for _ in "ab"]
        world.coordinator.join()
        assert all(float(value.fetch()) in (0.0, 1.0) for value in values)
    assert trainer.draw_given.trace_count == 1


def test_locks_are_refused_by_path(world):
    trainer = Trainer(world.coordinator, lock=threading.Lock())
    with pytest.raises(TypeError, match=r"'lock'.*_thread\.lock"):
        world.coordinator.schedule(trainer.step, args=(1.0,))


def wrapped(fn):
    @functools.wraps(fn)
    def wrapper(*args):
        return fn(*args)

    return wrapper


def in_context(context):
    assert context.num_input_pipelines == 2
    return numbers()


@pytest.mark.parametrize(
    "maker",
    [
        zs.function(numbers),
        zs.function(in_context),
        zs.function(eager=True)(numbers),
        wrapped(in_context),
        wrapped(zs.function(in_context)),
        zs.function(wrapped(numbers)),
    ],
)
def test_a_dataset_function_may_be_decorated(world, maker):
    @zs.function
    def draw(iterator):
        return next(iterator)

    iterator = iter(world.coordinator.create_per_worker_dataset(maker))
    assert float(world.coordinator.schedule(draw, (iterator,)).fetch()) == 0


def test_a_step_function_that_returns_the_datasets_of_a_strategy(world):
    """Cell 47 of TensorFlow's tutorial on custom training loops."""

    strategy = world.strategy

    @zs.function
    def per_worker_dataset_fn():
        return strategy.distribute_datasets_from_function(zs.function(in_context))

    @zs.function
    def draw(iterator):
        return next(iterator)

    made = world.coordinator.create_per_worker_dataset(per_worker_dataset_fn)
    assert float(world.coordinator.schedule(draw, (iter(made),)).fetch()) == 0


def test_the_value_of_a_variable_of_this_process_travels_with_each_step(world):
    here = zs.Variable(np.float32([1, 2]), name="here")
    with world.strategy.scope():
        there = zs.Variable(np.float32([0, 0]), name="there")

    @zs.function
    def step(factor, given=here):
        there.assign_add(factor * here)
        return zs.grad(lambda w: (w * given * given).sum())(there) + here.value()

    values = []
    for n in range(1, 4):
        here.assign([n, 2 * n])
        values.append(world.coordinator.schedule(step, args=(1.0,)))
    world.coordinator.join()
    assert [value.fetch().tolist() for value in values] == [[2, 6], [6, 20], [12, 42]]
    assert there.numpy().tolist() == [6, 12]
    assert step.trace_count == 1


@pytest.mark.parametrize("eager", [False, True])
def test_an_update_of_such_a_variable_is_refused(world, eager):
    here = zs.Variable(1.0, name="here")
    step = zs.function(lambda: here.assign_add(1.0), eager=eager)
    words = r"(updates|uses) variable 'here'.*created outside of strategy\.scope"
    with pytest.raises(ValueError, match=words):
        world.coordinator.schedule(step).fetch()
    if eager:
        with pytest.raises(ValueError, match=words):
            world.coordinator.join()
    assert here.numpy() == 1

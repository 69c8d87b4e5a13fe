"""Loops over data in a step, as TensorFlow's guides write them: such a step runs in
Python, says so once, and what `run` is given is compiled all the same."""

import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zstrat as zs

X = np.arange(20, dtype=np.float32)
SAID = r"zs\.function"


class Training:
    """A model on two devices, and the loops of the guides."""

    def __init__(self, strategy=None):
        self.strategy = strategy or zs.MirroredStrategy(["CPU:0", "CPU:1"])
        with self.strategy.scope():
            self.weight = zs.Variable(0.0, name="weight")
            self.optimizer = zs.Optimizer(optax.sgd(0.001))
        self.traces = 0
        batch = max(4, self.strategy.num_replicas_in_sync)
        data = zs.data.Dataset.from_tensor_slices(X).batch(batch, drop_remainder=True)
        self.data = self.strategy.experimental_distribute_dataset(data)

    def replica_step(self, x):
        self.traces += 1
        loss, grad = zs.value_and_grad(lambda w: jnp.sum((x - w * x) ** 2))(self.weight)
        self.optimizer.apply_gradients([(grad, self.weight)])
        return loss

    def step(self, x):
        losses = self.strategy.run(self.replica_step, args=(x,))
        return self.strategy.reduce("sum", losses, axis=None)

    def epoch(self, data):
        """Of custom_training, "Iterating inside a tf.function"."""
        total = count = 0
        for x in data:
            total += self.step(x)
            count += 1
        return total / count

    def some(self, iterator):
        """Of the guide of inputs, "Using get_next_as_optional"."""
        count = 0
        for _ in range(3):
            optional = iterator.get_next_as_optional()
            if not optional.has_value():
                break
            self.step(optional.get_value())
            count += 1
        return count


@pytest.fixture(scope="module")
def expected():
    """The mean loss of an epoch, and the weight after it."""
    training = Training()
    losses = [float(training.step(x)) for x in training.data]
    return np.mean(losses, dtype=np.float32), training.weight.numpy()


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("given", ["dataset", "iterator"])
def test_an_epoch_in_a_step(expected, given, eager):
    training = Training()
    epoch = zs.function(training.epoch, eager=eager)
    data = training.data if given == "dataset" else iter(training.data)
    if eager:
        loss = epoch(data)
    else:
        with pytest.warns(UserWarning, match=SAID) as said:
            loss = epoch(data)
        assert re.search(r"test_strategy_local_loops.py:\d+ \(in epoch\)", f"{said[0]}")
    np.testing.assert_allclose(loss, expected[0], rtol=1e-5)
    np.testing.assert_allclose(training.weight.numpy(), expected[1], rtol=1e-5)


@pytest.mark.parametrize("make", [zs.MirroredStrategy, zs.TPUStrategy])
def test_the_second_epoch_says_and_traces_nothing(make):
    training = Training(make())
    epoch = zs.function(training.epoch)
    with pytest.warns(UserWarning, match=SAID):
        first = epoch(training.data)
    traces = training.traces
    assert epoch(training.data) < first
    assert training.traces == traces


@pytest.mark.parametrize("eager", [False, True])
def test_a_break_where_the_data_end(expected, eager):
    training = Training()
    some, iterator = zs.function(training.some, eager=eager), iter(training.data)
    if eager:
        counts = [some(iterator)]
    else:
        with pytest.warns(UserWarning, match=SAID):
            counts = [some(iterator)]
    counts += [some(iterator), some(iterator)]
    assert counts == [3, 2, 0]
    np.testing.assert_allclose(training.weight.numpy(), expected[1], rtol=1e-5)


def test_a_replica_function_loops_over_no_dataset():
    training = Training()
    inside = zs.function(lambda: training.strategy.run(lambda: list(training.data)))
    with pytest.raises(ValueError, match=r"strategy\.run"):
        inside()


def test_a_number_of_draws_that_is_known_stays_one_program(expected):
    training = Training()

    @zs.function
    def five(iterator):
        return sum(training.step(next(iterator)) for _ in range(5)) / 5

    loss = five(iter(training.data))
    assert five.trace_count == 1
    np.testing.assert_allclose(loss, expected[0], rtol=1e-5)

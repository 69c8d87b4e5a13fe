"""A variable that is read after an optimizer in the same step: who computes its new
value, and where it may be read."""

import numpy as np
import optax
import pytest

import zstrat as zs

START = np.array([1.0, 2.0], np.float32)


def test_in_a_replica_the_other_gradients_are_not_known(two):
    with two.scope():
        variable = zs.Variable(START, name="moved")
        optimizer = zs.Optimizer(optax.sgd(1.0))

    def replica():
        optimizer.apply_gradients(np.ones(2, np.float32), variable)
        return variable.value()

    words = "'moved'"
    with pytest.raises(RuntimeError, match=words):
        zs.function(lambda: two.run(replica))()

    @zs.function
    def step():
        two.run(lambda: optimizer.apply_gradients(np.ones(2, np.float32), variable))
        return variable.value()

    np.testing.assert_array_equal(step(), START - 2)  # the sum of two gradients


def test_a_variable_of_this_process():
    variable, optimizer = zs.Variable(START, name="own"), zs.Optimizer(optax.sgd(1.0))

    @zs.function
    def step():
        optimizer.apply_gradients(np.ones(2, np.float32), variable)
        return variable.value()

    with pytest.raises(RuntimeError, match="'own'"):
        step()

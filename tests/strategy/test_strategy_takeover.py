"""What a step has destroyed that failed in the middle comes back from other processes,
from a checkpoint, or by an assignment; until then it is an error that says so."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ranks import ranks

import zstrat as zs
from zstrat.errors import DataLossError


class Training:
    """Two steps of momentum on a variable: of 1.0, by gradients of 1."""

    def __init__(self, strategy):
        with strategy.scope():
            self.v = zs.Variable([1.0, 1.0], name="weights")
            self.momentum = zs.Optimizer(optax.sgd(0.5, momentum=0.5))

        @zs.function
        def step():
            self.momentum.apply_gradients([(jnp.ones(2) / size, self.v)])

        size = strategy.num_replicas_in_sync
        self.step = lambda: strategy.run(step)
        self.step()
        self.saved = zs.Checkpoint(v=self.v, momentum=self.momentum)
        self.step()
        # Traces: 1, then 1.5.
        assert self.v.numpy().tolist() == [-0.25, -0.25]

    def destroy(self):
        """What XLA does with what a step gives it, before the step fails."""
        storage = self.v.storage
        for leaf in [
            storage.value(),
            *storage.slots_before(self.momentum.slot_rule(self.v)),
        ]:
            leaf.delete()

    def require_lost(self):
        with pytest.raises(DataLossError, match="'weights'"):
            self.v.numpy()
        with pytest.raises(DataLossError, match="'weights'"):
            self.v.storage.taken(self.v.name)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_value_is_taken_from_another_process(lost):
    def program(strategy, rank):
        training = Training(strategy)
        if rank == lost:
            training.destroy()
            training.require_lost()
        strategy._variables.take_over()
        found = [training.v.numpy().tolist()]
        training.step()  # the momentum came too
        return [*found, training.v.numpy().tolist()]

    # The third trace is 1.75.
    assert ranks(2, program) == [[[-0.25] * 2, [-1.125] * 2]] * 2


def test_a_variable_of_64_bits_brings_the_state_of_its_optimizer():
    """Steps refuse it, and the program updates it between them."""

    def program(strategy, rank):
        with strategy.scope():
            wide = zs.Variable(np.ones(2), dtype="float64")
            momentum = zs.Optimizer(optax.sgd(0.5, momentum=0.5))
        if rank == 0:
            momentum.apply_gradients([(np.ones(2), wide)])
        strategy._variables._is_late = rank == 1
        strategy._variables.take_over()
        momentum.apply_gradients([(np.ones(2), wide)])
        return wide.numpy().tolist()

    # Traces: 1, then 1.5.
    assert ranks(2, program) == [[-0.25] * 2] * 2


def test_a_variable_that_one_process_has_dropped_is_not_missed():
    """When a variable is freed depends on the garbage collector of the process."""

    def program(strategy, rank):
        training = Training(strategy)
        with strategy.scope():
            temporary = zs.Variable([1.0, 2.0])
            last = zs.Variable(float(rank))
        if rank == 1:
            del temporary
            training.destroy()
        strategy._variables.take_over()
        training.step()
        return [training.v.numpy().tolist(), float(last.numpy())]

    assert ranks(2, program) == [[[-1.125] * 2, 0.0]] * 2


def test_a_value_that_all_have_lost_is_no_longer_there():
    def program(strategy, rank):
        training = Training(strategy)
        training.destroy()
        with pytest.raises(DataLossError, match="'weights'"):
            strategy._variables.take_over()
        return True

    assert ranks(2, program) == [True, True]


def test_a_lost_value_is_restored(tmp_path):
    training = Training(zs.OneDeviceStrategy("CPU:0"))
    path = training.saved.save(str(tmp_path / "whole"))
    training.destroy()
    training.require_lost()
    with pytest.raises(DataLossError, match=r"'weights'"):
        training.saved.save(str(tmp_path / "none"))
    training.saved.restore(path)
    assert training.v.numpy().tolist() == [-0.25, -0.25]
    training.step()
    assert training.v.numpy().tolist() == [-1.125, -1.125]


def test_a_lost_value_may_be_assigned():
    training = Training(zs.OneDeviceStrategy("CPU:0"))
    training.destroy()
    with pytest.raises(DataLossError, match="MultiWorkerMirroredStrategy"):
        training.v.assign_add([1.0, 1.0])
    training.v.assign([1.0, 3.0])
    np.testing.assert_array_equal(training.v.numpy(), [1.0, 3.0])
    training.step()  # momentum began anew
    np.testing.assert_array_equal(training.v.numpy(), [0.5, 2.5])

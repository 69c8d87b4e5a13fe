"""What strategies refuse about variables, values and options, in their own words."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import zstrat as zs
from zstrat.errors import InvalidArgumentError
from zstrat.program.stages import PROCESS
from zstrat.strategy.mirrored import MirroredVariables
from zstrat.strategy.mirrored._takeover import taken_over
from zstrat.strategy.replica import AXIS, Team
from zstrat.variables import VariableRequest

ON_READ = {
    "synchronization": zs.VariableSynchronization.ON_READ,
    "aggregation": zs.VariableAggregation.SUM,
}


def test_a_value_of_each_replica_has_no_64_bits():
    strategy = zs.MirroredStrategy(["CPU:0"])
    with (
        strategy.scope(),
        pytest.raises(NotImplementedError, match=r"'seen'.*ON_READ.*\b64\b"),
    ):
        zs.Variable(np.zeros(2, np.int64), name="seen", **ON_READ)


class Whole:
    """A channel of one process, whose collectives are XLA's own."""

    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), (PROCESS, AXIS))
    rank, size, fingerprint = 0, 1, None

    def carry_out(self, kind, values):
        return values


def test_one_program_of_all_processes_has_no_values_of_each_device():
    """As `implementation="XLA"` with several devices in a process."""
    variables = MirroredVariables(jax.devices()[:1], Team(2, Whole()))
    asked = VariableRequest(
        [1.0],
        shape=None,
        dtype=None,
        name="seen",
        trainable=False,
        aggregation=zs.VariableAggregation.SUM,
        synchronization=zs.VariableSynchronization.AUTO,
    )
    (kept,) = variables.create_variables([asked])
    assert kept.numpy().tolist() == [1.0]
    on_read = replace(asked, synchronization=zs.VariableSynchronization.ON_READ)
    with pytest.raises(NotImplementedError, match=r"'seen'.*ON_READ"):
        variables.create_variables([on_read])


class Line:
    """What a rank hears of the others; rank 0 speaks first, alone."""

    size = 2

    def __init__(self, rank, said):
        self.rank, self._said, self._heard = rank, said, 0

    def all_reduce(self, tree, op):
        assert op == "max"
        return self.broadcast(tree, 0)

    def broadcast(self, tree, root):
        if self.rank == root:
            self._said.append([np.array(x) for x in tree])
        self._heard += 1
        return self._said[self._heard - 1]


def trained():
    """A variable beside which an optimizer keeps something."""
    strategy = zs.OneDeviceStrategy("CPU:0")
    with strategy.scope():
        weights = zs.Variable([1.0, 1.0], name="weights")
        momentum = zs.Optimizer(optax.sgd(0.5, momentum=0.5))
    strategy.run(
        zs.function(lambda: momentum.apply_gradients([(jnp.ones(2), weights)]))
    )
    return weights, momentum


def variable(value, name="weights"):
    with zs.OneDeviceStrategy("CPU:0").scope():
        return zs.Variable(value, name=name)


@pytest.mark.parametrize(
    ("mine", "words"),
    [
        ({}, r"has not created their variable 'weights' \(float32\[2\]\), number 0"),
        ({0: ([1.0] * 3, "weights")}, r"number 0 .* and their variable 'weights'"),
        ({0: ([1.0] * 2, "other")}, r"has created 0 optimizers.*have a number 0"),
    ],
    ids=["none", "another", "optimizer"],
)
def test_who_comes_late_has_to_have_what_the_others_have(mine, words):
    weights, momentum = trained()
    said = []
    assert taken_over(Line(0, said), 1, {0: weights}, [momentum]) == 1
    created = {number: variable(*each) for number, each in mine.items()}
    with pytest.raises(InvalidArgumentError, match=f"takes over .*{words}"):
        taken_over(Line(1, said), -1, created, [])


@pytest.mark.parametrize("seconds", [0, -1.5])
def test_a_collective_waits_for_a_while(seconds):
    with pytest.raises(ValueError, match="`timeout_seconds`"):
        zs.CommunicationOptions(timeout_seconds=seconds)


def test_rows_are_reduced_among_themselves():
    rows = zs.IndexedSlices(np.ones((1, 2)), np.array([3]))
    others = replace(rows, indices=np.array([5]))
    strategy = zs.OneDeviceStrategy("CPU:0")
    both = strategy.reduce("sum", zs.PerReplica((rows, others)))
    assert both.indices.tolist() == [3, 5]
    with pytest.raises(ValueError, match="IndexedSlices"):
        strategy.reduce("sum", zs.PerReplica((rows, np.ones((1, 2)))))

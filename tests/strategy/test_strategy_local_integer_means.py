"""The mean that a variable of integers gets is exact in each way that replicas run."""

import jax.numpy as jnp
import numpy as np
import pytest

import zstrat as zs

A, S = zs.VariableAggregation, zs.VariableSynchronization

# What two replicas have, and the mean without what is behind the point.
VALUES = np.array(
    [
        [16777217, 2**31 - 1, -(2**31), -3, 7, 16777217, -16777219],
        [16777217, 2**31 - 1, -(2**31), -4, 8, 16777220, -16777218],
    ],
    np.int32,
)
MEAN = [int(sum(map(int, x)) / 2) for x in VALUES.T]
WIDE = np.array([[2**32 - 1, 2**31], [2**32 - 1, 1]], np.uint32)
NARROW = np.array([[-128, 127, -3], [-128, 127, -2]], np.int8)

# One strategy is given functions that are made anew for each test.
pytestmark = pytest.mark.filterwarnings("ignore::zstrat.program.RetraceWarning")


@pytest.fixture(scope="module")
def two():
    return zs.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.fixture(params=["by itself", "in a step", "in turns", "in turns in a step"])
def run(request):
    def run(strategy, fn):
        def body():
            if "turns" in request.param:
                zs.get_replica_context().merge_call(lambda strategy: None)
            return fn()

        def step():
            return strategy.run(body)

        return (zs.function(step) if "step" in request.param else step)()

    return run


def own(values):
    return jnp.asarray(values)[zs.get_replica_context().replica_id_in_sync_group]


CASES = [
    (VALUES, MEAN),
    (WIDE, [2**32 - 1, 2**30]),
    (NARROW, [-128, 127, -2]),
]


@pytest.mark.parametrize(("values", "mean"), CASES)
def test_what_replicas_assign(two, run, values, mean):
    with two.scope():
        v = zs.Variable(np.zeros_like(values[0]), aggregation=A.MEAN)
    run(two, lambda: v.assign(own(values)).value())
    assert v.numpy().dtype == values.dtype
    assert v.numpy().tolist() == mean


@pytest.mark.parametrize(("values", "mean"), CASES)
def test_what_replicas_have_when_it_is_read(two, run, values, mean):
    with two.scope():
        v = zs.Variable(
            np.zeros_like(values[0]), aggregation=A.MEAN, synchronization=S.ON_READ
        )
    run(two, lambda: v.assign(own(values)).value())
    assert v.numpy().tolist() == mean
    assert zs.function(lambda: v.value() + 0)().tolist() == mean


def test_a_team_of_eight_and_a_byte():
    eight = zs.MirroredStrategy([f"CPU:{n}" for n in range(8)])
    values = np.array([[127 - n] for n in range(8)], np.int8)
    with eight.scope():
        v = zs.Variable(np.zeros(1, np.int8), aggregation=A.MEAN)
    eight.run(lambda: v.assign(own(values)).value())
    assert v.numpy().tolist() == [123]  # 123.5


FAR = np.array([[2**31 - 1, 2**30, 5], [2**31 - 1, 2**30 + 1, 6]], np.int32)


@pytest.mark.parametrize("values", [FAR, -FAR, WIDE])
def test_what_is_reduced_does_not_wrap_on_the_way(two, run, values):
    mean = values.astype(float).mean(0)
    found = run(two, lambda: zs.get_replica_context().all_reduce("mean", own(values)))
    for each in two.experimental_local_results(found):
        assert each.dtype == np.float32
        np.testing.assert_allclose(each, mean, rtol=1e-7)
    parts = run(two, lambda: own(values))
    here = zs.PerReplica(tuple(values))
    for each in (parts, here):
        np.testing.assert_allclose(two.reduce("mean", each, None), mean, rtol=1e-7)
        np.testing.assert_allclose(
            two.reduce("mean", each, 0), values.astype(float).mean(), rtol=1e-7
        )
        there = two.extended.reduce_to("mean", each, "CPU:0")
        np.testing.assert_allclose(there, mean, rtol=1e-7)
    reduce = zs.function(lambda: two.reduce("mean", two.run(lambda: own(values)), 0))
    np.testing.assert_allclose(reduce(), values.astype(float).mean(), rtol=1e-7)

"""Of what dtype sums and means are: the same with one replica, and over processes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ranks import ranks
from tiers import combined

import zstrat as zs
from zstrat.strategy import PerReplica

FLOATS = ["float16", "bfloat16", "float32", "complex64"]
# jax makes float32 of integers.
MEANS = {**{name: name for name in FLOATS}, "int8": "float32", "int32": "float32"}
MEANS["bool"] = "float32"
SUMS = {name: name for name in (*FLOATS, "int8", "int32")} | {"bool": "int32"}


def reduced(strategy, value, axis):
    found = [strategy.reduce(op, value, axis=axis) for op in ("sum", "mean")]
    return [(x.dtype.name, np.asarray(x).astype(complex).tolist()) for x in found]


@pytest.mark.parametrize(("name", "axis"), combined([*MEANS], [None, 0]))
def test_two_processes(name, axis):
    def program(strategy, rank):
        arrays = [jnp.full(2, rank, name), PerReplica([jnp.full(2, rank, name)])]
        return [reduced(strategy, x, axis) for x in arrays]

    expected = [1, 1] if axis is None else 2
    mean = [0.5, 0.5] if axis is None else 0.5
    both = [(SUMS[name], expected), (MEANS[name], mean)]
    if axis is not None and name == "int8":
        both[0] = "int32", expected  # jax adds the elements of bytes as integers
    assert ranks(2, program) == [[both] * 2] * 2


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.int64, np.float64])
def test_what_numpy_holds_has_numpy_s_dtypes(dtype):
    def program(strategy, rank):
        return reduced(strategy, np.full(2, rank, dtype), None)

    mean = (np.ones(1, dtype) / 2).dtype.name
    both = [(np.dtype(dtype).name, [1, 1]), (mean, [0.5, 0.5])]
    assert ranks(2, program) == [both] * 2


@pytest.mark.parametrize(
    ("name", "strategy", "compiled"),
    combined(
        [*MEANS],
        [lambda: zs.OneDeviceStrategy("CPU:0"), lambda: zs.MirroredStrategy(["CPU:0"])],
        [True, False],
    ),
)
def test_one_replica(name, strategy, compiled):
    strategy = strategy()
    value = jnp.array([1, 0], name)
    fn = zs.function(strategy.reduce) if compiled else strategy.reduce
    for op, dtypes in (("sum", SUMS), ("mean", MEANS)):
        found = fn(op, value)
        assert isinstance(found, jax.Array)
        assert found.dtype.name == dtypes[name]
        assert np.asarray(found).astype(complex).tolist() == [1, 0]


def test_a_mean_of_zeros_is_no_integer():
    one = zs.OneDeviceStrategy("/cpu:0")
    assert one.reduce("mean", np.zeros(2, np.int32)).dtype == np.float64
    assert one.reduce("sum", np.zeros(2, np.int32)).dtype == np.int32
    assert one.reduce("mean", 3) == 3

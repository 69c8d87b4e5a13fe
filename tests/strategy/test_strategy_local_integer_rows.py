"""What replicas add to rows of integers is brought together exactly, whichever way
they run."""

import jax.numpy as jnp
import numpy as np
import pytest
from ranks import ranks

import zstrat as zs

MEAN = zs.VariableAggregation.MEAN
WAYS = ["by itself", "in a step", "in turns", "in turns in a step", "eagerly"]

pytestmark = pytest.mark.filterwarnings("ignore::zstrat.program.RetraceWarning")


@pytest.fixture(scope="module")
def two():
    return zs.MirroredStrategy(["CPU:0", "CPU:1"])


def run(way, strategy, fn):
    def body(number):
        if "turns" in way:
            zs.get_replica_context().merge_call(lambda strategy: None)
        fn(number)

    numbers = strategy.experimental_distribute_values_from_function(
        lambda context: np.int32(context.replica_id_in_sync_group)
    )

    def step():
        strategy.run(body, (numbers,))

    if way == "eagerly":
        return zs.function(step, eager=True)()
    return (zs.function(step) if "step" in way else step)()


def variable(strategy, values, dtype=np.int32):
    with strategy.scope():
        return zs.Variable(np.array(values, dtype), aggregation=MEAN)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "sign"), [("scatter_add", 1), ("scatter_sub", -1)])
def test_halves_of_several_replicas_make_a_whole(two, way, name, sign):
    v = variable(two, [18, 0, 16777217, 5])
    # Of replica n, where both have row 0, and one of them has row 2 twice.
    indices = np.array([[0, 1, 2, 2], [0, 3, 3, 0]])
    rows = np.array([[3, 5, 1, 2], [3, -5, 2, 2]], np.int32)
    update = getattr(v, name)
    run(
        way,
        two,
        lambda n: update(
            zs.IndexedSlices(jnp.asarray(rows)[n], jnp.asarray(indices)[n])
        ),
    )
    # (3 + 3 + 2) / 2, 5 / 2, (1 + 2) / 2 and (-5 + 2) / 2, cut towards zero
    moved = np.array([4, 2, 1, -1]) * sign
    expected = np.array([18, 0, 16777217, 5]) + moved
    assert v.numpy().tolist() == expected.tolist()


@pytest.mark.parametrize("way", WAYS)
def test_large_and_narrow_ones(two, way):
    large = variable(two, [[0, 0]])
    narrow = variable(two, [0], np.int8)
    unsigned = variable(two, [0], np.uint32)

    def fn(n):
        at = jnp.zeros(1, jnp.int32)
        largest = jnp.array([[2**31 - 1, -(2**31)]], jnp.int32)
        large.scatter_add(zs.IndexedSlices(largest, at))
        narrow.scatter_add(zs.IndexedSlices(jnp.array([-127], jnp.int8), at))
        most = jnp.array([2**32 - 1], jnp.uint32)
        unsigned.scatter_add(zs.IndexedSlices(most, at))

    run(way, two, fn)
    assert large.numpy().tolist() == [[2**31 - 1, -(2**31)]]
    assert narrow.numpy().tolist() == [-127]
    assert unsigned.numpy().tolist() == [2**32 - 1]


@pytest.mark.parametrize("way", WAYS)
def test_no_rows(two, way):
    v = variable(two, [1, 2])
    nothing = jnp.zeros(0, jnp.int32)
    run(way, two, lambda n: v.scatter_add(zs.IndexedSlices(nothing, nothing)))
    assert v.numpy().tolist() == [1, 2]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["scatter_mul", "scatter_div"])
def test_there_is_no_mean_of_factors(two, way, name):
    v = variable(two, [6])
    factor = zs.IndexedSlices(jnp.array([3], jnp.int32), jnp.array([0]))
    with pytest.raises(NotImplementedError, match=f"{name} of .*none of integers"):
        run(way, two, lambda n: getattr(v, name)(factor))
    assert v.numpy().tolist() == [6]


@pytest.mark.parametrize("way", ["in a step", "in turns"])
def test_rows_of_two_processes(way):
    def program(strategy, rank):
        v = variable(strategy, [18, -1])
        run(
            way,
            strategy,
            lambda n: v.scatter_add(
                zs.IndexedSlices(jnp.stack([n, -n]), jnp.array([0, 1]))
            ),
        )
        return v.numpy().tolist()

    # 0 + 1 + ... + 7 = 28, and 28 / 8 = 3.5
    assert ranks(2, program) == [[18 + 3, -1 - 3]] * 2

"""What sums and means of booleans and integers are, and that no count is lost: on two
and on three replicas, in each way that a replica function runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zstrat as zs
from zstrat.strategy import PerReplica

A, S = zs.VariableAggregation, zs.VariableSynchronization

# One strategy is given functions that are made anew for each test.
pytestmark = pytest.mark.filterwarnings("ignore::zstrat.program.RetraceWarning")


@pytest.fixture(scope="module")
def two():
    return zs.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.fixture(scope="module")
def three():
    return zs.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"])


def replica_id():
    return zs.get_replica_context().replica_id_in_sync_group


def local(strategy, result):
    return [np.asarray(x).tolist() for x in strategy.experimental_local_results(result)]


def own(values):
    return jnp.asarray(values)[replica_id()]


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


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("count", [0, 5, 100, -7])
def test_no_count_is_lost_when_it_is_assigned(three, inside, count):
    with three.scope():
        v = zs.Variable(
            [0, 0], dtype="int32", synchronization=S.ON_READ, aggregation=A.SUM
        )

    def assign():
        v.assign(np.array([count, 3], np.int32))

    (zs.function(assign) if inside else assign)()
    assert v.numpy().tolist() == [count, 3]
    each, rest = divmod(count, 3)
    expected = [[each + (n < rest), 1] for n in range(3)]
    assert local(three, three.run(lambda: v.value())) == expected
    three.run(lambda: v.assign_add(jnp.ones(2, jnp.int32)).value())
    assert v.numpy().tolist() == [count + 3, 6]


def test_no_count_is_lost_when_it_is_restored(three, two, tmp_path):
    def counter(strategy):
        with strategy.scope():
            return zs.Variable(
                0, dtype="int32", synchronization=S.ON_READ, aggregation=A.SUM
            )

    seen = counter(three)
    three.run(lambda: seen.assign_add(7).value())
    three.run(lambda: seen.assign_add(replica_id() // 2).value())
    path = zs.Checkpoint(seen=seen).save(str(tmp_path / "seen"))
    for strategy in (three, two, zs.OneDeviceStrategy("CPU:4")):
        found = counter(strategy)
        zs.Checkpoint(seen=found).restore(path)
        assert found.numpy() == 22


@pytest.mark.parametrize("synchronization", [S.ON_READ, S.ON_WRITE])
def test_a_scalar_variable_is_read_as_an_array(two, synchronization):
    with two.scope():
        v = zs.Variable(1.0, aggregation=A.MEAN, synchronization=synchronization)
        apart = zs.Variable(1.0, aggregation=A.NONE)
    two.run(lambda: apart.assign_add(jnp.float32(1)).value())
    for each in (v, apart):
        assert isinstance(each.numpy(), np.ndarray)
        assert each.numpy().shape == ()


def test_all_gather_of_shapes_that_do_not_fit(two):
    value = PerReplica((np.ones((2, 3), np.float32), np.ones((1, 3), np.float32)))

    def gathered(axis):
        return lambda x: zs.get_replica_context().all_gather(x, axis)

    for axis in (0, -2):
        found = local(two, two.run(gathered(axis), (value,)))
        assert found == [[[1.0] * 3] * 3] * 2
    for axis in (1, -1):
        with pytest.raises(ValueError, match=r"all_gather.*\b1\b"):
            two.run(gathered(axis), (value,))
    with pytest.raises(ValueError, match="axis 2 is out of bounds"):
        two.run(gathered(2), (value,))


def test_cross_device_ops_are_some(two):
    with pytest.raises(TypeError, match=r"CrossDeviceOps.*'nccl'"):
        zs.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops="nccl")


@pytest.mark.parametrize("values", [(1.0,), (1, 2, 3, 4), ("a",) * 3, ([], [1], [2])])
def test_one_value_for_each_replica(two, values):
    value = PerReplica(tuple(np.array(x) if isinstance(x, list) else x for x in values))
    one = zs.OneDeviceStrategy("CPU:1")

    def fn(x):
        return x

    def peeking(x):
        int(replica_id())
        return x

    for strategy in (two, one):
        if strategy.num_replicas_in_sync == len(values):
            continue
        expected = strategy.num_replicas_in_sync
        words = f"has {len(values)} values; expected one for each of the {expected} rep"
        for each in (fn, peeking):
            with pytest.raises(ValueError, match=words):
                strategy.run(each, (value,))
            with pytest.raises(ValueError, match=words):
                strategy.run(each, (), {"x": [value]})
    words = f"has {len(values)} values; expected one for each of the 2 replicas"
    if not isinstance(values[0], str):
        with pytest.raises(ValueError, match=words):
            zs.function(lambda x: two.run(fn, (x,)))(value)


def test_random_keys_of_replicas(two):
    keys = jax.random.split(jax.random.key(7), 2)

    def draw(key):
        return jax.random.normal(key, (3,))

    def draw_of_several(several):
        return draw(several[1])

    expected = [draw(key).tolist() for key in keys]
    assert local(two, two.run(draw, (PerReplica(tuple(keys)),))) == expected
    per_worker = two.experimental_distribute_values_from_function(
        lambda context: keys[context.replica_id_in_sync_group]
    )
    assert local(two, two.run(draw, (per_worker,))) == expected
    both = PerReplica((keys, keys[::-1]))
    assert local(two, two.run(draw_of_several, (both,))) == expected[::-1]


@pytest.mark.parametrize("inside", [False, True])
def test_a_variable_is_the_values_that_its_replicas_have(two, inside):
    """TF's variables of several devices are distributed values."""
    with two.scope():
        mine = zs.Variable([0.0, 0.0], aggregation=A.SUM, synchronization=S.ON_READ)
        shared = zs.Variable([3.0, 5.0], aggregation=A.MEAN, name="shared")
    two.run(lambda: mine.assign(jnp.ones(2) * (replica_id() + 1)).value())

    def do(fn):
        return (zs.function(fn) if inside else fn)()

    both = do(lambda: two.reduce("sum", {"mine": mine, "shared": shared}, None))
    assert both["mine"].tolist() == [3, 3]
    assert both["shared"].tolist() == [6, 10]
    assert do(lambda: two.reduce("mean", mine, None)).tolist() == [1.5, 1.5]
    assert do(lambda: two.reduce("mean", shared, 0)) == 4.0
    assert do(lambda: two.gather(mine, 0)).tolist() == [1, 1, 2, 2]
    assert do(lambda: two.gather(shared, 0)).tolist() == [3, 5, 3, 5]
    if not inside:
        first, second = two.experimental_local_results({"m": mine, "s": [shared]})
        assert (first["m"].numpy().tolist(), second["m"].numpy().tolist()) == (
            [1, 1],
            [2, 2],
        )
        assert second["s"][0].name == "shared/replica_1"


def test_text_goes_to_the_replicas_where_it_is(two):
    words = zs.data.Dataset.from_tensor_slices(np.array(["a", "b", "c", "d", "e"]))
    found = [local(two, x) for x in two.experimental_distribute_dataset(words.batch(2))]
    assert found == [[["a"], ["b"]], [["c"], ["d"]], [["e"], []]]


# What two replicas have, and the mean without what is behind the point.
VALUES = np.array(
    [
        [16777217, 2**31 - 1, -(2**31), -3, 7, 16777217, -16777219],
        [16777217, 2**31 - 1, -(2**31), -4, 8, 16777220, -16777218],
    ],
    np.int32,
)
MEAN = [int(sum(map(int, x)) / 2) for x in VALUES.T]


def test_a_team_of_eight_and_a_byte():
    eight = zs.MirroredStrategy([f"CPU:{n}" for n in range(8)])
    values = np.array([[127 - n] for n in range(8)], np.int8)
    with eight.scope():
        v = zs.Variable(np.zeros(1, np.int8), aggregation=A.MEAN)
    eight.run(lambda: v.assign(own(values)).value())
    assert v.numpy().tolist() == [123]  # 123.5

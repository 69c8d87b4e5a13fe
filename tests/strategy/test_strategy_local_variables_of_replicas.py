"""Variables of several devices: when their copies are brought together, and how. The
tables of TF's mirrored and sync-on-read variables; no count of integers is lost."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from in_replicas import copies
from in_replicas import number as replica_id
from lockstep import A, S

import zstrat as zs
from zstrat.strategy import Mirrored, PerReplica

# One strategy is given functions that each test makes again.
pytestmark = pytest.mark.filterwarnings("ignore::zstrat.program.RetraceWarning")

WAYS = ["by itself", "in turns in a step"]


@pytest.fixture(params=WAYS)
def run(request, two):
    """``strategy.run`` in each of its ways."""

    def run(fn, *args):
        def body(*args):
            if "turns" in request.param:
                zs.get_replica_context().merge_call(lambda strategy: None)
            return fn(*args)

        def step(*args):
            return two.run(body, args)

        return (zs.function(step) if "step" in request.param else step)(*args)

    return run


def variable(strategy, value, aggregation, synchronization=S.AUTO, **more):
    with strategy.scope():
        return zs.Variable(
            value, aggregation=aggregation, synchronization=synchronization, **more
        )


def number():
    return (replica_id() + 1) * jnp.float32(1)


def values_of(result):
    return [float(x) for x in result.values]


def test_without_aggregation_copies_go_their_own_ways(two, run):
    v, expected = variable(two, 10.0, A.NONE), [11, 12]

    def fn():
        v.assign_add(number())
        return v.value()

    assert values_of(run(fn)) == expected
    assert v.numpy() == expected[0], "from outside the first copy"
    assert isinstance(v.numpy(), np.ndarray)
    assert zs.function(lambda: v.value() * 1)() == expected[0]
    assert values_of(run(lambda: v.value())) == expected
    v.assign_add(1.0)
    assert values_of(run(lambda: v.value())) == [x + 1 for x in expected]
    zs.function(lambda: v.assign(7.0))()
    assert values_of(run(lambda: v.value())) == [7, 7]


def test_copies_that_differ_get_the_same_gradients(two, run):
    v = variable(two, 10.0, A.NONE)
    with two.scope():
        optimizer = zs.Optimizer(optax.sgd(1.0, momentum=0.5))
    run(lambda: v.assign(number()))

    def fn():
        optimizer.apply_gradients([(number(), v)])

    run(fn)
    run(fn)
    # The sum of the gradients is 3: steps of 3 and of 3 + 1.5.
    assert values_of(run(lambda: v.value())) == [1 - 7.5, 2 - 7.5]


def test_a_mixed_step_sees_its_own_writes(two):
    v = variable(two, [1.0, 2.0], A.NONE)

    @zs.function
    def step():
        v.assign_add([1.0, 1.0])
        inside = two.run(lambda: v.assign_add(jnp.ones(2) * number()).value() + 0)
        after = v.value()
        v.assign_sub([1.0, 1.0])
        return inside, after

    inside, after = step()
    assert [x.tolist() for x in inside.values] == [[3, 4], [4, 5]]
    assert after.tolist() == [3, 4]
    assert [x.tolist() for x in two.run(lambda: v.value()).values] == [[2, 3], [3, 4]]


def test_a_number_that_is_the_same_everywhere_has_no_sum(two, run):
    v = variable(two, 10.0, A.SUM)
    words = r"DistributedValues.*\b1\b.*\b0\b"
    with pytest.raises(ValueError, match=words):
        run(lambda: v.assign_add(1.0))
    run(lambda: v.assign_add(0.0))
    assert v.numpy() == 10.0
    for aggregation in (A.MEAN, A.ONLY_FIRST_REPLICA):
        w = variable(two, 10.0, aggregation)
        run(lambda w=w: w.assign_add(1.0))
        assert w.numpy() == 11.0


@pytest.mark.parametrize("aggregation", list(A))
def test_from_outside_an_update_is_that_of_every_copy(two, aggregation):
    v = variable(two, 10.0, aggregation)
    v.assign(1.0)
    v.assign_add(2.0)
    v.assign_sub(Mirrored((0.5, 0.5)))
    assert v.numpy() == 2.5
    assert values_of(two.run(lambda: v.value())) == [2.5] * 2
    with pytest.raises(TypeError, match="expects a mirrored value"):
        v.assign(PerReplica((1.0, 2.0)))


def test_no_synchronization_is_refused(two):
    with pytest.raises(ValueError, match="`NONE`"):
        variable(two, 1.0, A.SUM, S.NONE)


MERGED = [(A.SUM, 3), (A.MEAN, 1.5), (A.ONLY_FIRST_REPLICA, 1)]


@pytest.mark.shows("VariableSynchronization.ON_READ")
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("aggregation", [A.SUM, A.MEAN, A.ONLY_FIRST_REPLICA])
def test_on_read_written_from_outside(two, inside, aggregation):
    v = variable(two, 0.0, aggregation, S.ON_READ)

    def do(fn):
        return (zs.function(lambda: (fn(), None)[1]) if inside else fn)()

    do(lambda: v.assign(4.0))
    each = 2.0 if aggregation is A.SUM else 4.0
    assert values_of(two.run(lambda: v.value())) == [each] * 2
    assert v.numpy() == 4.0
    if aggregation is A.SUM:
        for method in ("assign_add", "assign_sub"):
            words = f"SyncOnReadVariable does not support `{method}`"
            with pytest.raises(ValueError, match=words):
                do(lambda m=method: getattr(v, m)(1.0))
    else:
        do(lambda: v.assign_add(1.0))
        do(lambda: v.assign_sub(2.0))
        assert values_of(two.run(lambda: v.value())) == [3.0] * 2


@pytest.mark.parametrize(("aggregation", "merged"), MERGED)
def test_a_checkpoint_has_the_merged_value(two, tmp_path, aggregation, merged):
    v = variable(two, 0.0, aggregation, S.ON_READ)
    two.run(lambda: v.assign(number()))
    path = zs.Checkpoint(v=v).save(str(tmp_path / "own"))
    v.assign(0.0)
    zs.Checkpoint(v=v).restore(path)
    each = merged / 2 if aggregation is A.SUM else merged
    assert values_of(two.run(lambda: v.value())) == [each] * 2
    assert v.numpy() == merged
    plain = zs.Variable(0.0)
    zs.Checkpoint(v=plain).restore(path)
    assert plain.numpy() == merged
    # Copies that differ are equal again.
    apart = variable(two, 0.0, A.NONE)
    two.run(lambda: apart.assign(number()))
    zs.Checkpoint(v=apart).restore(path)
    assert copies(two, apart) == [merged] * 2
    plain.assign(8.0)
    path = zs.Checkpoint(v=plain).save(str(tmp_path / "plain"))
    zs.Checkpoint(v=v).restore(path)
    assert v.numpy() == 8.0
    assert (
        values_of(two.run(lambda: v.value()))
        == [4.0 if aggregation is A.SUM else 8.0] * 2
    )


def test_each_copy_is_on_its_device(two):
    v = variable(two, np.ones(3, np.float32), A.NONE)
    assert v.storage.value().sharding.is_fully_replicated
    two.run(lambda: v.assign(jnp.ones(3) * number()))
    shards = v.storage.value().addressable_shards
    assert [s.data.shape for s in shards] == [(1, 3)] * 2
    assert [s.device for s in shards] == jax.devices()[:2]
    step = zs.function(lambda: two.run(lambda: v.assign_add(jnp.ones(3)) + 0))
    for _ in range(3):
        step()
        assert not v.storage.value().sharding.is_fully_replicated
    assert step.trace_count == 1
    assert v.numpy().tolist() == [4.0] * 3


def test_copies_of_another_strategy_are_refused(two):
    v = variable(two, 1.0, A.NONE)
    two.run(lambda: v.assign(number()))
    three = zs.MirroredStrategy([f"CPU:{n}" for n in range(3)])
    with pytest.raises(ValueError, match="one value for each of 2 replicas"):
        three.run(lambda: v.value())


@pytest.fixture(scope="module")
def three():
    return zs.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"])


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("count", [0, 5, 100, -7])
def test_no_count_is_lost_when_it_is_assigned(three, inside, count):
    v = variable(three, [0, 0], A.SUM, S.ON_READ, dtype="int32")

    def assign():
        v.assign(np.array([count, 3], np.int32))

    (zs.function(assign) if inside else assign)()
    assert v.numpy().tolist() == [count, 3]
    each, rest = divmod(count, 3)
    expected = [[each + (n < rest), 1] for n in range(3)]
    assert copies(three, v) == expected
    three.run(lambda: v.assign_add(jnp.ones(2, jnp.int32)).value())
    assert v.numpy().tolist() == [count + 3, 6]


def test_no_count_is_lost_when_it_is_restored(three, two, tmp_path):
    def counter(strategy):
        return variable(strategy, 0, A.SUM, S.ON_READ, dtype="int32")

    seen = counter(three)
    three.run(lambda: seen.assign_add(7).value())
    three.run(lambda: seen.assign_add(replica_id() // 2).value())
    path = zs.Checkpoint(seen=seen).save(str(tmp_path / "seen"))
    for strategy in (three, two, zs.OneDeviceStrategy("CPU:4")):
        found = counter(strategy)
        zs.Checkpoint(seen=found).restore(path)
        assert found.numpy() == 22


def test_all_gather_of_shapes_that_do_not_fit(two):
    parts = PerReplica((np.ones((2, 3), np.float32), np.ones((1, 3), np.float32)))

    def gathered(axis):
        return lambda x: zs.get_replica_context().all_gather(x, axis)

    for axis in (0, -2):
        for found in two.run(gathered(axis), (parts,)).values:
            np.testing.assert_array_equal(found, np.ones((3, 3)))
    for axis in (1, -1):
        with pytest.raises(ValueError, match=r"all_gather.*\b1\b"):
            two.run(gathered(axis), (parts,))
    with pytest.raises(ValueError, match="axis 2 is out of bounds"):
        two.run(gathered(2), (parts,))


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


@pytest.mark.shows("Variable.distribute_strategy", "Variable.get_shape")
@pytest.mark.shows("MirroredVariable.values")
def test_a_variable_knows_its_strategy_and_its_copies(two):
    with two.scope():
        v = zs.Variable([1.0, 2.0])
        counts = zs.Variable(0.0, synchronization=zs.VariableSynchronization.ON_READ)
    for variable in (v, counts):
        assert variable.distribute_strategy is two
        assert [copy.device[-5:] for copy in variable.values] == ["CPU:0", "CPU:1"]
    assert v.get_shape() == v.shape == (2,)
    assert zs.Variable(1.0).distribute_strategy is None
    zs.experimental_set_strategy(zs.OneDeviceStrategy("CPU:1"))
    try:
        assert zs.Variable(1.0).distribute_strategy is zs.get_strategy()
    finally:
        zs.experimental_set_strategy(None)

"""TF 1.12's towers on two devices: the examples are those of TF's documentation, with
jax in place of TF."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zstrat as zs
from zstrat.contrib import distribute

SUM, MEAN = zs.VariableAggregation.SUM, zs.VariableAggregation.MEAN
FIRST = zs.VariableAggregation.ONLY_FIRST_TOWER
CPUS = [f"/job:localhost/replica:0/task:0/device:CPU:{n}" for n in range(2)]


@pytest.fixture
def distribution():
    return distribute.ParameterServerStrategy(num_gpus_per_worker=2)


def numbers(*values):
    """A value per tower."""
    return zs.PerReplica(values)


def plain(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), tree)


@pytest.mark.shows("call_for_each_tower", "unwrap", "tf.get_tower_context")
@pytest.mark.shows("merge_call", "tower_id")
def test_the_example_of_merge_calls(distribution, capsys):
    # Called once in "cross-tower" context.
    def merge_fn(distribution, three_plus_tower_id):
        # sum the values across towers
        return sum(distribution.unwrap(three_plus_tower_id))

    # Called once per tower in `distribution`, in a "tower" context.
    def fn(three):
        tower_ctx = zs.get_tower_context()
        v = three + tower_ctx.tower_id
        # Computes the sum of the `v` values across all towers.
        s = tower_ctx.merge_call(merge_fn, v)
        return s + v

    with distribution.scope():
        # in "cross-tower" context
        merged_results = distribution.call_for_each_tower(fn, 3)
        # merged_results has the values from every tower execution of `fn`.
        print(distribution.unwrap(merged_results))  # Prints a list

    assert capsys.readouterr().out == "[10, 11]\n"


@pytest.mark.shows("tf.get_variable")
def test_a_variable_that_towers_create_is_one_for_all(distribution):
    def fn():
        return zs.Variable(2.0, name="w")

    with distribution.scope():
        (created,) = distribution.unwrap(distribution.call_for_each_tower(fn))
    assert isinstance(created, zs.Variable)
    assert (created.name, created.numpy()) == ("w", 2.0)


@pytest.mark.shows("colocate_vars_with", "update")
def test_the_example_of_colocation_and_update(distribution):
    seen = []
    with distribution.scope():
        var1 = zs.Variable(1.0)
        with distribution.colocate_vars_with(var1):
            # var2 and var3 will be created on the same device(s) as var1
            var2 = zs.Variable(2.0)
            var3 = zs.Variable(3.0)

        def fn(v1, v2, v3):
            # operates on v1 from var1, v2 from var2, and v3 from var3
            seen.append(zs.get_update_replica_id())
            return v1.assign_add(v2.value() * v3.value())

        # `fn` runs on every device `v1` is on, `v2` and `v3` will be there too.
        assert distribution.update(var1, fn, var2, var3) is var1
    assert var1.numpy() == 7.0
    assert var1.device == var2.device == var3.device
    assert [var1.device] == distribution.parameter_devices
    assert seen == [0]


@pytest.mark.shows("worker_device_index")
def test_the_example_of_numbered_devices(distribution):
    found = []
    with distribution.scope():

        def fn(device_id):
            # device_id is an integer. `fn` is being executed on device:
            found.append(distribution.worker_devices[device_id])
            assert found[-1] == zs.get_tower_context().device

        distribution.call_for_each_tower(fn, distribution.worker_device_index)
    assert found == CPUS


@pytest.mark.shows("between_graph", "is_single_tower", "num_towers")
@pytest.mark.shows("parameter_devices", "should_checkpoint", "should_init")
@pytest.mark.shows("should_save_summary", "worker_devices", "initialize", "finalize")
@pytest.mark.shows("ParameterServerStrategy(num_gpus_per_worker=)")
def test_what_the_strategy_says_of_itself(distribution):
    assert distribution.num_towers == 2
    assert not distribution.is_single_tower
    assert distribution.between_graph
    assert distribution.worker_devices == CPUS
    assert distribution.parameter_devices == CPUS[:1]
    assert distribution.should_init
    assert distribution.should_checkpoint
    assert distribution.should_save_summary
    assert distribution.initialize() is None
    assert distribution.finalize() is None


@pytest.mark.shows("TowerContext", "call_for_each_tower(run_concurrently=)")
def test_towers_know_themselves(distribution):
    def fn():
        tower = distribute.get_tower_context()
        assert tower.distribution_strategy is distribution
        assert tower.num_towers == 2
        assert not tower.is_single_tower
        assert not distribute.in_cross_tower_context()
        assert distribute.get_cross_tower_context() is None
        assert distribute.get_distribution_strategy() is distribution
        assert distribute.has_distribution_strategy()
        distribute.require_tower_context(tower)

        def merge_fn(merging, devices, *, kind):
            assert merging is distribution
            assert distribute.in_cross_tower_context()
            assert distribute.get_cross_tower_context() is distribution
            assert distribute.get_tower_context() is None
            with pytest.raises(RuntimeError, match=r"`call_for_each_tower\(\)`"):
                distribute.require_tower_context(tower)
            assert distribution.unwrap(devices) == CPUS
            return kind

        return tower.merge_call(merge_fn, tower.device, kind="merged")

    with distribution.scope():
        assert distribution.call_for_each_tower(fn) == "merged"
        assert distribution.call_for_each_tower(fn, run_concurrently=False) == "merged"


@pytest.mark.shows("reduce", "reduce(destinations=)", "batch_reduce")
@pytest.mark.shows("tf.VariableAggregation.SUM", "tf.VariableAggregation.MEAN")
@pytest.mark.shows("tf.VariableAggregation.ONLY_FIRST_TOWER")
@pytest.mark.parametrize(
    ("aggregation", "wanted"), [(SUM, 5.0), (MEAN, 2.5), (FIRST, 1.0)]
)
def test_values_of_towers_are_reduced(distribution, aggregation, wanted):
    with distribution.scope():
        v = zs.Variable(0.0)
        values = numbers(np.float32(1), np.float32(4))
        for destinations in (v, values, CPUS[0], "/device:CPU:1", CPUS, [CPUS[1]]):
            found = distribution.reduce(aggregation, values, destinations)
            assert plain(distribution.unwrap(found)) in ([wanted], [wanted] * 2)
        pairs = [(values, v), (values, CPUS)]
        one, two = distribution.batch_reduce(aggregation, pairs)
        assert plain(distribution.unwrap(one)) == [wanted]
        assert plain(distribution.unwrap(two)) == [wanted] * 2
        places = [x.devices() for x in two.values]
        assert places == [{device} for device in jax.devices()[:2]]


def test_values_that_are_the_same_in_all_towers(distribution):
    with distribution.scope():
        assert distribution.reduce(SUM, 0, CPUS[0]) == 0
        assert distribution.reduce(MEAN, 3.0, CPUS[0]) == 3.0
        assert distribution.reduce(FIRST, 3.0, CPUS[0]) == 3.0
        with pytest.raises(ValueError, match=r"SUM.*MEAN"):
            distribution.reduce(SUM, 3.0, CPUS[0])
        for wrong in (zs.VariableAggregation.NONE, "SUM", None):
            with pytest.raises(AssertionError, match="ONLY_FIRST_TOWER"):
                distribution.reduce(wrong, 3.0, CPUS[0])


def test_pairs_are_a_list(distribution):
    with distribution.scope():
        pair = (numbers(1.0, 2.0), CPUS[0])
        for wrong in (iter([pair]), [pair[0]], [(1, 2, 3)]):
            with pytest.raises(ValueError, match="`value_destination_pairs`"):
                distribution.batch_reduce(SUM, wrong)


@pytest.mark.shows("broadcast")
def test_a_broadcast_goes_to_all_towers(distribution):
    with distribution.scope():
        found = distribution.broadcast(jnp.arange(2.0))
        assert plain(distribution.unwrap(found)) == [[0, 1], [0, 1]]
        assert [x.devices() for x in found.values] == [{d} for d in jax.devices()[:2]]
        (one,) = distribution.unwrap(distribution.broadcast(jnp.ones(1), CPUS[1]))
        assert one.devices() == {jax.devices()[1]}
        assert distribution.broadcast(3) == 3


@pytest.mark.shows("update(grouped=)")
def test_updates_take_single_values(distribution):
    with distribution.scope():
        v = zs.Variable(1.0)
        apart = numbers(1.0, 2.0)
        mirrored = distribution.broadcast(jnp.ones(()))
        for value, words in ((apart, "PerDevice"), (mirrored, "multiple components")):
            with pytest.raises(ValueError, match=f"You cannot update .*{words}"):
                distribution.update(v, lambda var, x: var.assign(x), value)
            with pytest.raises(ValueError, match=f"You cannot update .*{words}"):
                distribution.update_non_slot(CPUS[0], lambda x: x, x=value)
            # Within a structure, too.
            with pytest.raises(ValueError, match=f"You cannot update .*{words}"):
                distribution.update(v, lambda var, x: var.assign(x[0]), [value])
        inner = zs.Mirrored((np.float32(5),))
        distribution.update(v, lambda var, x: var.assign(x["a"]), x={"a": inner})
        assert v.numpy() == 5.0
        with pytest.raises(ValueError, match="`var`"):
            distribution.update(3.0, lambda var: var)
        single = distribution.reduce(SUM, apart, v)
        distribution.update(v, lambda var, x: var.assign(x), single)
        assert v.numpy() == 3.0
        found = distribution.update(v, lambda var: (var, var.numpy()), grouped=False)
        assert found == ([v], [3.0])


@pytest.mark.shows("non_slot_devices", "update_non_slot", "read_var", "value_container")
def test_updates_without_a_variable(distribution):
    with distribution.scope():
        b, a = zs.Variable(1.0, name="b"), zs.Variable(2.0, name="a")
        devices = distribution.non_slot_devices([b, a])
        assert devices == a.device
        assert distribution.update_non_slot(devices, lambda x: x + 1, 2) == 3
        assert distribution.update_non_slot(
            devices, lambda x: x + 1, 2, grouped=False
        ) == [3]
        assert distribution.read_var(a) is a
        assert distribution.value_container(a) is a
        # It is there once, whatever the number of towers.
        assert distribution.unwrap(a) == [a]


def test_assignments_in_towers_follow_the_aggregation(distribution):
    with distribution.scope():
        total = zs.Variable(0.0, aggregation=SUM)
        mean = zs.Variable(0.0, aggregation=MEAN)
        first = zs.Variable(0.0, aggregation=FIRST)
        none = zs.Variable(0.0)

        def fn(x):
            total.assign_add(x)
            mean.assign_add(x)
            first.assign_add(x)

        distribution.call_for_each_tower(fn, numbers(1.0, 4.0))
        assert [float(v.numpy()) for v in (total, mean, first)] == [5.0, 2.5, 1.0]

        def wrong(x):
            none.assign_add(x)

        with pytest.raises(ValueError, match=r"'Variable'.*zs\.Variable.*aggregation="):
            distribution.call_for_each_tower(wrong, numbers(1.0, 4.0))


@pytest.mark.shows("distribute_dataset", "iterator.get_next")
def test_a_dataset_is_dealt_out(distribution):
    dataset = distribution.distribute_dataset(lambda: zs.data.Dataset.range(7).batch(1))
    with distribution.scope():
        iterator = dataset.make_one_shot_iterator()
        found = []
        while len(found) < 3:
            doubled = distribution.call_for_each_tower(
                lambda x: x * 2, iterator.get_next()
            )
            found.append(plain(distribution.unwrap(doubled)))
        assert found == [[[0], [2]], [[4], [6]], [[8], [10]]]
        with pytest.raises(zs.OutOfRangeError):  # the seventh has no partner
            iterator.get_next()
    again = dataset.make_initializable_iterator()
    assert again.initialize() == []
    assert plain(distribution.unwrap(again.get_next())) == [[0], [1]]


@pytest.mark.shows("run_steps_on_dataset")
@pytest.mark.shows("run_steps_on_dataset(iterations=, initial_loop_values=)")
@pytest.mark.shows("MultiStepContext", "MultiStepContext.set_last_step_output")
@pytest.mark.shows("MultiStepContext.set_non_tensor_output")
@pytest.mark.shows("MultiStepContext.last_step_outputs")
@pytest.mark.shows("MultiStepContext.non_tensor_outputs", "MultiStepContext.run_op")
def test_steps_on_a_dataset(distribution):
    with distribution.scope():
        seen = zs.Variable(0.0, aggregation=SUM)

        def step_fn(context, x, y):
            def tower_fn(x, y):
                context.set_last_step_output("loss", x + y, aggregation=MEAN)
                number = zs.get_tower_context().tower_id
                context.set_non_tensor_output("kind", f"tower {number}")
                seen.assign_add(x.sum())

            distribution.call_for_each_tower(tower_fn, x, y, run_concurrently=False)
            context.set_last_step_output("x", x)
            context.set_last_step_output("sum", x, aggregation=SUM)

        rows = np.arange(8, dtype=np.float32)
        dataset = distribution.distribute_dataset(
            lambda: zs.data.Dataset.from_tensor_slices((rows, rows * 10)).batch(2)
        )
        context = distribution.run_steps_on_dataset(
            step_fn, iter(dataset), 2, initial_loop_values={"loss": 0.0}
        )
        outputs = context.last_step_outputs
        # The second step has rows 4, 5 and 6, 7.
        assert plain(outputs["loss"]) == [55.0, 66.0]
        assert plain(distribution.unwrap(outputs["x"])) == [[4, 5], [6, 7]]
        assert plain(outputs["sum"]) == [10, 12]
        assert context.non_tensor_outputs == {"kind": ["tower 0", "tower 1"]}
        assert context.run_op is None
        assert seen.numpy() == 28.0


def test_what_is_for_the_cross_tower_context(distribution):
    def fn():
        for call in (
            lambda: distribution.call_for_each_tower(lambda: None),
            lambda: distribution.reduce(SUM, 1.0, CPUS[0]),
            lambda: distribution.broadcast(1.0),
            lambda: distribution.update_non_slot(CPUS[0], lambda: 1),
            lambda: distribution.run_steps_on_dataset(lambda c: c, iter([])),
        ):
            with pytest.raises(RuntimeError, match="get_replica_context"):
                call()
        return 1

    with distribution.scope():
        assert distribution.call_for_each_tower(fn) == 1
    other = distribute.ParameterServerStrategy()
    with other.scope(), pytest.raises(RuntimeError, match="CPU"):
        distribution.call_for_each_tower(fn)
    with pytest.raises(RuntimeError, match=r"CPU.*colocate_vars_with\(\)"):
        distribution.colocate_vars_with(None)
    with (
        distribution.scope(),
        pytest.raises(ValueError, match=r"`colocate_vars_with`.*IndexedSlices"),
    ):
        distribution.colocate_vars_with(zs.IndexedSlices(np.ones(1), [0]))


def test_there_must_be_so_many_devices():
    with pytest.raises(ValueError, match="num_gpus_per_worker=9"):
        distribute.ParameterServerStrategy(num_gpus_per_worker=9)
    with pytest.raises(ValueError, match="expected 0 or more"):
        distribute.ParameterServerStrategy(num_gpus_per_worker=-1)

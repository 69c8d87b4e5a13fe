"""Several processes: what they reduce and gather, sparse clusters, devices, and the
words of each task about itself."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ranks import Board, Threads, ranks

import zstrat as zs
from zstrat.cluster import ClusterSpec, SimpleClusterResolver


@pytest.mark.parametrize("kind", [int, np.array, jnp.int32])
def test_an_axis_of_any_kind_between_processes(kind):
    def program(strategy, rank):
        mine = np.full((1, 2), rank + 1.0, np.float32)
        rows = strategy.gather(mine, axis=kind(1))
        total = strategy.reduce("sum", mine, axis=kind(1))
        everybody = strategy.run(
            lambda: zs.get_replica_context().all_gather(jnp.asarray(mine), kind(1))
        )
        return rows.tolist(), np.asarray(total).tolist(), everybody.tolist()

    row = [[1, 1, 2, 2]]
    assert ranks(2, program) == [(row, [6], row)] * 2


def test_no_process_waits_for_one_whose_axis_is_no_integer():
    def program(strategy, rank):
        with pytest.raises(TypeError, match="axis must be an integer"):
            strategy.gather(np.ones(2), axis=0.5)

    ranks(2, program)


def test_each_rank_names_its_own_task():
    def program(strategy, rank):
        with strategy.scope():
            v = zs.Variable(1.0)
        assert strategy.extended.parameter_devices[0] == v.device
        assert strategy.extended.non_slot_devices([v]) == v.device
        return v.device

    assert ranks(2, program) == [
        f"/job:worker/replica:0/task:{rank}/device:CPU:0" for rank in range(2)
    ]


def duties(cluster, job, index):
    """Whether the task saves checkpoints, and whether it saves summaries."""
    resolver = SimpleClusterResolver(ClusterSpec(cluster), task_type=job, task_id=index)
    strategy = zs.MultiWorkerMirroredStrategy(
        resolver, group=lambda *_: Threads(Board(1), 0)
    )
    return strategy.extended.should_checkpoint, strategy.extended.should_save_summary


SPECS = [
    {"worker": {1: "a:1", 2: "b:1"}},
    {"worker": {0: "a:1", 2: "b:1"}},
    {"worker": {4: "a:1"}},
    {"chief": ["c:1"], "worker": {0: "a:1", 3: "b:1"}},
    {"chief": ["c:1"]},
]


@pytest.mark.parametrize("cluster", SPECS)
def test_the_first_one_that_is_there_saves_alone(cluster):
    tasks = [("chief", 0)] if "chief" in cluster else []
    tasks += [("worker", index) for index in sorted(cluster.get("worker", ()))]
    found = [duties(cluster, *task) for task in tasks]
    assert found == [(True, True)] + [(False, False)] * (len(tasks) - 1)


@pytest.mark.parametrize("cluster", SPECS)
def test_so_does_an_evaluator(cluster):
    everybody = {**cluster, "evaluator": ["e:1"]}
    assert duties(everybody, "evaluator", 0) == (True, True)


SPEC = ClusterSpec({"worker": ["127.0.0.1:9000", "127.0.0.1:9001"]})


def alone(*_):
    return Threads(Board(1), 0)


@pytest.mark.parametrize("task", [(None, None), ("worker", None), (None, 0)])
def test_a_process_knows_which_task_it_is(task):
    job, index = task
    resolver = SimpleClusterResolver(SPEC, task_type=job, task_id=index)
    words = (
        "When `cluster_spec` is not empty, both `task_type` and `task_id` must be "
        "specified."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        zs.MultiWorkerMirroredStrategy(resolver, group=alone)


def gathered(strategy, rank, axis):
    """Rank n has n + 1 rows, or columns, of its number."""
    mine = jnp.full((rank + 1, 2) if axis == 0 else (2, rank + 1), rank)
    return strategy.run(lambda: zs.get_replica_context().all_gather(mine, axis))


@pytest.mark.parametrize(
    ("axis", "expected"), [(0, [[0, 0], [1, 1], [1, 1]]), (1, [[0, 1, 1]] * 2)]
)
def test_replicas_of_processes_give_different_lengths_outside_of_steps(axis, expected):
    for found in ranks(2, lambda *my: gathered(*my, axis)):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_step_has_one_length_for_all_processes(axis):
    def program(strategy, rank):
        return zs.function(lambda: gathered(strategy, rank, axis))()

    words = r"zs\.RaggedIds"
    with pytest.raises(ValueError, match=words):
        ranks(2, program)


@pytest.mark.parametrize("compiled", [True, False])
def test_what_is_not_distributed_is_the_process_s_own_value(compiled):
    def program(strategy, rank):
        def all_of(x):
            rows = strategy.gather(jnp.full((2, 2), x), axis=0)
            return (
                strategy.reduce("sum", x, None),
                strategy.reduce("mean", {"a": x, "b": x * 2}, None),
                strategy.reduce("mean", jnp.arange(4.0) + x, 0),
                rows,
            )

        fn = zs.function(all_of) if compiled else all_of
        x = np.float32(rank + 1)
        return jax.tree.map(np.asarray, fn(x if compiled else jnp.asarray(x)))

    for total, mean, over_axis, rows in ranks(2, program):
        assert total == 3.0
        assert mean == {"a": 1.5, "b": 3.0}
        assert over_axis == 3.0
        np.testing.assert_array_equal(rows[:, 0], [1, 1, 2, 2])


def test_uneven_means_weigh_correctly():
    def program(strategy, rank):
        values = np.arange(1.0 + 3 * rank)  # one element, then four
        return float(strategy.reduce("mean", values, axis=0))

    expected = (0 + (0 + 1 + 2 + 3)) / 5
    assert ranks(2, program) == pytest.approx([expected] * 2)


def test_uneven_values_are_gathered_outside_of_steps():
    def program(strategy, rank):
        mine = np.full((1, rank + 1), rank, np.int64)
        return strategy.gather(mine, axis=1).tolist()

    assert ranks(2, program) == [[[0, 1, 1]]] * 2


@pytest.mark.parametrize("compiled", [True, False])
def test_sums_of_what_is_narrow_count_and_means_do_not_wrap(compiled):
    flags = [[True, True, False], [True, False, False]]
    narrow = [[200, 100, 3], [100, 100, 4]]

    def program(strategy, rank):
        def all_of(flag, x):
            return (
                strategy.reduce("sum", flag, None),
                strategy.reduce("mean", flag, None),
                strategy.reduce("mean", x, None),
                strategy.reduce("sum", x, None),
            )

        fn = zs.function(all_of) if compiled else all_of
        found = fn(np.array(flags[rank]), np.array(narrow[rank], np.uint8))
        return [np.asarray(x) for x in found]

    for count, share, mean, total in ranks(2, program):
        assert count.dtype.kind == "i"
        assert count.tolist() == [2, 1, 0]
        assert share.tolist() == [1.0, 0.5, 0.0]
        assert mean.tolist() == [150.0, 100.0, 3.5]
        assert total.dtype == np.uint8
        assert total.tolist() == [300 - 256, 200, 7]


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("aggregation", ["SUM", "MEAN", "ONLY_FIRST_REPLICA"])
def test_a_variable_with_a_value_in_each_process_is_reduced_once(compiled, aggregation):
    def program(strategy, rank):
        with strategy.scope():
            v = zs.Variable(
                np.float32([0]),
                aggregation=zs.VariableAggregation[aggregation],
                synchronization=zs.VariableSynchronization.ON_READ,
            )
        strategy.run(lambda: v.assign_add(jnp.float32([rank + 1])))
        (mine,) = strategy.experimental_local_results(v)

        def together():
            return (
                mine.value(),
                strategy.reduce("sum", v),
                strategy.reduce("mean", v),
                strategy.gather(v, 0),
            )

        found = (zs.function(together) if compiled else together)()
        mine.assign_add([5.0])
        again = strategy.gather(v, 0)
        return [np.asarray(each).tolist() for each in (*found, mine.value(), again)]

    assert ranks(2, program) == [
        [[n], [3.0], [1.5], [1.0, 2.0], [n + 5], [6.0, 7.0]] for n in (1.0, 2.0)
    ]
